//! Panics while the backend reads a request or writes a step's record: only the affected request fails, or
//! none, and all others are served.
//!
//! The backend writes to the log at both places, and this executable installs a logger that panics on
//! request.

#[path = "../support/fake_triton/mod.rs"]
mod fake_triton;
#[path = "../support/served.rs"]
#[allow(dead_code, reason = "each test executable uses a part")]
mod served;

use std::sync::Once;

use inflight_triton::sys;
use log::{LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;

use fake_triton::{Parameter, Where};
use served::{ClientRequest, Server, error_code, output_ids};

const INTERNAL: u32 = sys::TRITONSERVER_Error_Code::TRITONSERVER_ERROR_INTERNAL.0;

/// The text that makes the logger panic, and the number of panics so far.
static TRAP: Mutex<(Option<&str>, usize)> = Mutex::new((None, 0));

struct PanickingLog;

impl Log for PanickingLog {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string();
        let mut trap = TRAP.lock();
        if trap.0.is_some_and(|words| line.contains(words)) {
            trap.1 += 1;
            drop(trap);
            panic!("the log message triggered the test's panic");
        }
    }

    fn flush(&self) {}
}

/// Makes the logger panic at lines that contain `words`.
fn set_trap(words: Option<&'static str>) {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&PanickingLog).expect("the first logger of this process");
        log::set_max_level(LevelFilter::Debug);
    });
    *TRAP.lock() = (words, 0);
}

fn num_panics() -> usize {
    TRAP.lock().1
}

#[test]
fn a_panic_while_a_request_is_read_ends_that_request_alone() {
    let mut server = Server::load(&[]);
    set_trap(Some("is ignored"));
    let content = ClientRequest::of_lengths(4, 6, true);
    let before = server.request(&content);
    assert_eq!(server.execute(&[before]), Ok(()));
    // The backend logs that this option has no effect.
    let mut spec = server.spec(&content);
    let unused = (c"lookahead_ngram_size".to_owned(), Parameter::Int(3));
    spec.parameters.push(unused);
    let broken = server.host.request(spec);
    let after = server.request(&content);
    assert_eq!(server.execute(&[before, broken, after]), Ok(()));
    assert_eq!(num_panics(), 1);
    assert_eq!(server.host.place(broken), Where::Released);
    let sent = server.host.sent(broken);
    assert_eq!((sent.len(), error_code(&sent)), (1, Some(INTERNAL)));
    assert_eq!(server.ready(), Ok(()));

    server.finish(&[before, after]);
    server.unload();
    set_trap(None);
    for request in [before, after] {
        assert_eq!(output_ids(&server.host.sent(request)), content.expected());
    }
}

#[test]
fn a_panic_while_a_step_is_recorded_leaves_no_request_without_an_answer() {
    let mut server = Server::load(&[]);
    server.host.set_verbose(true);
    set_trap(Some("Active Request Count"));
    let contents = [true, false, false].map(|stream| ClientRequest::of_lengths(4, 3, stream));
    for _ in 0..20 {
        let requests = contents.each_ref().map(|content| server.request(content));
        server.finish(&requests);
        for (request, content) in requests.into_iter().zip(&contents) {
            server.wait_for_final(request);
            assert_eq!(output_ids(&server.host.sent(request)), content.expected());
        }
    }
    assert_eq!(server.ready(), Ok(()));
    server.unload();
    assert!(num_panics() > 0);
    set_trap(None);
}
