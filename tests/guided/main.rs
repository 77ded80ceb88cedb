//! Guided decoding on the demo model: what is generated fits its guide, and is the same in any batch.

mod bad_guides;
mod batching;
mod generations;
mod support;
