//! The seed of random tests.

use std::hash::{BuildHasher, RandomState};

/// The number that `INFLIGHT_SEED` names, or else another one in each run. Prints it, which the test harness shows if
/// the test fails.
///
/// # Panics
/// `INFLIGHT_SEED` is no number.
pub fn seed() -> u64 {
    let seed = match std::env::var("INFLIGHT_SEED") {
        Ok(seed) => seed.parse().expect("INFLIGHT_SEED is a number"),
        Err(_) => RandomState::new().hash_one("seed"),
    };
    println!("INFLIGHT_SEED={seed}");
    seed
}
