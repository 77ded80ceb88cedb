//! Calls of the `tokenizers` library.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls the library. A malicious tokenizer.json can make it panic, which becomes an error.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizer library panicked; check tokenizer.json".to_owned()),
    }
}
