//! The message of another thread's panic.

use std::any::Any;

/// The message of a panic that was caught.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    message.unwrap_or_else(|| "the runner panicked".to_owned())
}
