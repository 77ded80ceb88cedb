//! Calls of the `tokenizers` library.

use inflight_base::catch_panic;

/// Calls the library. A malicious tokenizer.json can make it panic, which becomes an error.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    catch_panic(call)
        .map_err(|_| "the tokenizer library panicked; check tokenizer.json".to_owned())?
        .map_err(|error| error.to_string())
}
