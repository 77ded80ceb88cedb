//! The owners of Triton's objects and the entry points, tested with an in-process fake server that finds
//! every leak, every use after delete and every response after the final one.

#[path = "../support/fake_triton/mod.rs"]
mod fake_triton;
#[path = "../support/served.rs"]
mod served;

mod adapters;
mod chat;
mod classes;
mod conversations;
mod draw;
mod driver;
mod embeddings;
mod failing_steps;
mod fake_server;
mod gate;
mod handles;
mod heavy_answers;
mod large_options;
mod lifecycle;
mod metrics_and_log;
mod odd_options;
mod preparing;
mod queue;
mod random_clients;
mod reading;
mod records;
mod requests;
mod responses;
mod sequences;

use std::ptr::NonNull;

use fake_triton::Host;
use inflight_triton::{Request, sys};
use served::{Failure, RawRequest, outcome};

const INTERNAL: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_INTERNAL.0;
const INVALID: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_INVALID_ARG.0;
const UNAVAILABLE: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_UNAVAILABLE.0;

/// A request of the fake server, owned as in Execute.
fn take(raw: RawRequest) -> Request {
    let raw = NonNull::new(raw).expect("not null");
    // SAFETY: the fake server has passed the request to the backend, and the test takes it once each time.
    unsafe { Request::from_raw(raw) }
}

/// The error code of each response sent to a request's client.
fn error_codes(host: &Host, request: RawRequest) -> Vec<Option<u32>> {
    let sent = host.sent(request);
    sent.iter()
        .map(|sent| sent.error.as_ref().map(|(code, _)| *code))
        .collect()
}
