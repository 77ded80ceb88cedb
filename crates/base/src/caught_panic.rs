//! Panics that are caught, as text.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; a panic becomes its message. Callers drop whatever the panic may have left inconsistent.
///
/// # Errors
/// `body` panicked.
pub fn catch_panic<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(panic_message)
}

/// The message of a panic, from what it was caught with or a thread was joined with.
pub fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return format!("panic: {text}"),
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => format!("panic: {text}"),
        Err(payload) => {
            // The payload may panic when it is dropped, where nothing catches it.
            std::mem::forget(payload);
            "panic without a message".to_owned()
        }
    }
}
