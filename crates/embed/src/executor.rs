//! The exported functions of the executor. Each is documented in the header.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

use inflight_base::SequenceId;
use inflight_manager::{ServingRank, TensorExecutor};

use crate::abi::{self, ExecutorOptions, Request};
use crate::responses::{Responses, c_text};
use crate::{Loaded, created, load};

/// `inflight_executor`. Its functions need no exclusive access: any thread may call them.
pub enum Executor {
    /// The one that has the requests.
    Serving(TensorExecutor),
    /// Another rank of it.
    Rank(ServingRank),
}

impl Executor {
    /// What has the requests; `None` on another rank.
    fn serving(&self) -> Option<&TensorExecutor> {
        match self {
            Self::Serving(executor) => Some(executor),
            Self::Rank(_) => None,
        }
    }
}

/// Creates an executor; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_create(
    options: *const ExecutorOptions,
    error: *mut c_char,
) -> *mut Executor {
    let create = || -> Result<Box<Executor>, String> {
        if options.is_null() {
            return Err("options may not be NULL".to_owned());
        }
        // SAFETY: every version of the struct starts with its version.
        let version = unsafe { (&raw const (*options).version).read() };
        abi::check_version(version)?;
        // SAFETY: options of this version have all fields.
        let options = unsafe { &*options };
        // SAFETY: null, or a C string by the header.
        let loaded = unsafe { load(options.manager) }?;
        let (manager, model) = match loaded {
            Loaded::Manager(manager, model) => (manager, model),
            Loaded::Rank(rank) => return Ok(Box::new(Executor::Rank(rank))),
        };
        let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
        let default = inflight_manager::ExecutorOptions::default();
        let stored = inflight_manager::ExecutorOptions {
            max_queue_size: match options.max_queue_size {
                0 => default.max_queue_size,
                given => size(given),
            },
            max_num_statistics: size(options.max_num_statistics),
        };
        let executor = TensorExecutor::new(*manager, model, stored);
        let executor = executor.map_err(|error| error.to_string())?;
        Ok(Box::new(Executor::Serving(executor)))
    };
    // SAFETY: by the header, `error` has room for the text.
    unsafe { created(catch_unwind(AssertUnwindSafe(create)), error) }
}

/// Enqueues a request; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_enqueue(
    executor: *const Executor,
    request: *const Request,
    request_id: *mut u64,
    error: *mut c_char,
) -> i32 {
    let enqueue = || -> Result<SequenceId, String> {
        // SAFETY: null, or a live executor.
        let executor = unsafe { executor.as_ref() }.ok_or("the executor is NULL")?;
        // SAFETY: null, or valid during the call.
        let request = unsafe { request.as_ref() }.ok_or("the request is NULL")?;
        // SAFETY: its pointers are valid during the call.
        let request = unsafe { abi::read_request(request) }?;
        let executor = executor.serving().ok_or(
            "this process is another rank of mpirun than 0, which alone takes requests: see inflight_executor_can_enqueue",
        )?;
        let enqueued = executor.enqueue(&request);
        enqueued.map_err(|error| error.to_string())
    };
    let enqueued = catch_unwind(AssertUnwindSafe(enqueue));
    match enqueued.unwrap_or_else(|_| Err("the executor panicked".to_owned())) {
        Ok(id) => {
            if !request_id.is_null() {
                // SAFETY: not null, so valid for a write by the header.
                unsafe { request_id.write(id.0) };
            }
            0
        }
        Err(reason) => {
            // SAFETY: by the header, `error` has room for the text.
            unsafe { abi::write_error(&reason, error) };
            1
        }
    }
}

/// Whether requests can be enqueued; see the header.
///
/// # Safety
/// `executor` must be null, or a live executor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_can_enqueue(executor: *const Executor) -> i32 {
    // SAFETY: null, or a live executor.
    let executor = unsafe { executor.as_ref() }.and_then(Executor::serving);
    let can = || executor.is_some_and(TensorExecutor::can_enqueue);
    catch_unwind(AssertUnwindSafe(can)).unwrap_or(false).into()
}

/// Waits for responses; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_await_responses(
    executor: *const Executor,
    request_id: *const u64,
    timeout_ms: i64,
) -> *mut Responses {
    let wait = || {
        // SAFETY: null, or a live executor.
        let executor = unsafe { executor.as_ref() }?;
        // SAFETY: null, or valid during the call.
        let id = unsafe { request_id.as_ref() }.map(|&id| SequenceId(id));
        // A negative time is no limit.
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let responses = executor
            .serving()
            .map(|executor| executor.await_responses(id, timeout));
        Some(Box::new(Responses::new(responses.unwrap_or_default())))
    };
    let responses = catch_unwind(AssertUnwindSafe(wait)).unwrap_or(None);
    responses.map_or(ptr::null_mut(), Box::into_raw)
}

/// Frees responses; see the header.
///
/// # Safety
/// `responses` must be null, or from `inflight_executor_await_responses` and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_responses_free(responses: *mut Responses) {
    if !responses.is_null() {
        // SAFETY: the pointer comes from `Box::into_raw`, and the caller gives up the responses.
        drop(unsafe { Box::from_raw(responses) });
    }
}

/// Cancels a request; see the header.
///
/// # Safety
/// `executor` must be null, or a live executor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_cancel(executor: *const Executor, request_id: u64) {
    // SAFETY: null, or a live executor.
    if let Some(executor) = unsafe { executor.as_ref() }.and_then(Executor::serving) {
        // It only changes a queue; a panic has left the rest as it was.
        let cancel = || executor.cancel(SequenceId(request_id));
        let _ = catch_unwind(AssertUnwindSafe(cancel));
    }
}

/// Returns the statistics; see the header.
///
/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_take_stats(
    executor: *const Executor,
    return_stats: Option<unsafe extern "C" fn(*mut c_void, *const c_char)>,
    context: *mut c_void,
) -> u64 {
    // SAFETY: null, or a live executor.
    let executor = unsafe { executor.as_ref() }.and_then(Executor::serving);
    let (Some(executor), Some(return_stats)) = (executor, return_stats) else {
        return 0;
    };
    let take = || {
        let records = executor.take_statistics();
        for record in &records {
            let record = c_text(record);
            // SAFETY: the function conforms to the header; the text is valid during the call.
            unsafe { return_stats(context, record.as_ptr()) };
        }
        records.len() as u64
    };
    catch_unwind(AssertUnwindSafe(take)).unwrap_or(0)
}

/// Shuts an executor down; see the header.
///
/// # Safety
/// `executor` must be null, or a live executor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_shutdown(executor: *const Executor) -> i32 {
    // SAFETY: null, or a live executor.
    let Some(executor) = (unsafe { executor.as_ref() }) else {
        return 0;
    };
    let ended = catch_unwind(AssertUnwindSafe(|| match executor {
        Executor::Serving(executor) => executor.shutdown(),
        Executor::Rank(rank) => rank.join(),
    }));
    i32::from(!matches!(ended, Ok(Ok(()))))
}

/// Shuts an executor down and frees it; see the header.
///
/// # Safety
/// `executor` must be null, or a live executor that no other thread uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn inflight_executor_destroy(executor: *mut Executor) -> i32 {
    // SAFETY: null, or a live executor.
    let failed = unsafe { inflight_executor_shutdown(executor) };
    if !executor.is_null() {
        // SAFETY: the pointer comes from `Box::into_raw`, and the caller gives up the executor.
        let executor = unsafe { Box::from_raw(executor) };
        let _ = catch_unwind(AssertUnwindSafe(move || drop(executor)));
    }
    failed
}
