//! Logits post-processors in Rust: `avoid_recent` and `avoid_recent_batched`, which exclude the last tokens
//! of a sequence. The argument is the number of these tokens.
//!
//! `cargo build --release -p logits-processors-example` builds
//! `target/release/liblogits_processors_example.so`; name it as `logits_post_processor_library` in a
//! config.pbtxt.

mod abi;

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

use abi::{Entry, Processor, Request, Table};

/// State of a processor for one request.
struct AvoidRecent {
    num_recent: usize,
}

impl AvoidRecent {
    fn new(arguments: &str) -> Result<Self, String> {
        match arguments.trim().parse() {
            Ok(num_recent) if num_recent > 0 => Ok(Self { num_recent }),
            _ => Err(format!(
                "'{arguments}' is not a number of tokens, 1 or above"
            )),
        }
    }

    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<(), String> {
        if self.num_recent >= logits.len() {
            return Err(format!("the vocabulary has only {} tokens", logits.len()));
        }
        for &token in tokens.iter().rev().take(self.num_recent) {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

unsafe extern "C" fn create(
    _: *mut c_void,
    request: *const Request,
    state: *mut *mut c_void,
    error: *mut c_char,
) -> i32 {
    let made = guarded(|| {
        // SAFETY: the request and its arguments are valid during the call.
        let arguments = unsafe { CStr::from_ptr((*request).arguments) };
        AvoidRecent::new(&arguments.to_string_lossy())
    });
    match made {
        Ok(made) => {
            // SAFETY: `state` is valid for writing one pointer.
            unsafe { *state = Box::into_raw(Box::new(made)).cast() };
            0
        }
        // SAFETY: `error` has the size that the header states.
        Err(text) => unsafe { tell(&text, error) },
    }
}

unsafe extern "C" fn destroy(_: *mut c_void, state: *mut c_void) {
    // SAFETY: `create` made this state, and it is not used again.
    drop(unsafe { Box::from_raw(state.cast::<AvoidRecent>()) });
}

unsafe extern "C" fn process(_: *mut c_void, entry: *mut Entry) -> i32 {
    // SAFETY: the entry is valid and not shared during the call.
    let entry = unsafe { &mut *entry };
    let done = guarded(|| {
        // SAFETY: `create` made this state.
        let state = unsafe { &*entry.state.cast::<AvoidRecent>() };
        // SAFETY: the entry states the numbers of its tokens and logits.
        let (tokens, logits) = unsafe {
            (
                slice::from_raw_parts(entry.tokens, entry.num_tokens as usize),
                slice::from_raw_parts_mut(entry.logits, entry.vocab_size as usize),
            )
        };
        state.process(tokens, logits)
    });
    match done {
        Ok(()) => 0,
        // SAFETY: `error` has the size that the header states.
        Err(text) => unsafe { tell(&text, entry.error) },
    }
}

unsafe extern "C" fn process_batch(context: *mut c_void, entries: *mut Entry, num_entries: usize) {
    for n in 0..num_entries {
        // SAFETY: `num_entries` entries are valid and not shared during the call.
        unsafe {
            let entry = entries.add(n);
            (*entry).status = process(context, entry);
        }
    }
}

/// A panic must not leave this library: it would crash the server.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let panicked = |_| Err("the processor panicked".to_owned());
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(panicked)
}

/// Writes an error text, truncated to the buffer.
///
/// # Safety
/// `error` has room for [`abi::ERROR_SIZE`] bytes.
unsafe fn tell(text: &str, error: *mut c_char) -> i32 {
    let len = text.len().min(abi::ERROR_SIZE - 1);
    // SAFETY: the buffer has room for the text and the terminating zero.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), error, len);
        *error.add(len) = 0;
    }
    1
}

static PROCESSORS: [Processor; 2] = [
    Processor {
        name: c"avoid_recent".as_ptr(),
        context: ptr::null_mut(),
        create: Some(create),
        destroy: Some(destroy),
        process: Some(process),
        process_batch: None,
    },
    Processor {
        name: c"avoid_recent_batched".as_ptr(),
        context: ptr::null_mut(),
        create: Some(create),
        destroy: Some(destroy),
        process: None,
        process_batch: Some(process_batch),
    },
];

static TABLE: Table = Table {
    abi_version: abi::ABI_VERSION,
    num_processors: PROCESSORS.len() as u32,
    processors: PROCESSORS.as_ptr(),
};

/// The function that the backend looks up.
// SAFETY: the name and the signature are those of the backend's header.
#[unsafe(no_mangle)]
pub extern "C" fn inflight_get_logits_processors() -> *const Table {
    &raw const TABLE
}
