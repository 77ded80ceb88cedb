//! Numbers that differ each time: for ids, and for the seeds of requests that give none.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A number that no other request has, as far as 64 bits allow. Not a secret.
pub fn random() -> u64 {
    // Each state has keys of its own, from the system's random numbers.
    RandomState::new().hash_one(())
}

/// An id such as `cmpl-1f0c...`.
pub fn id(beginning: &str) -> String {
    format!("{beginning}{:016x}{:016x}", random(), random())
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| id("cmpl-")).collect();
        assert_eq!(ids.len(), 1000);
    }
}
