//! Guided decoding on the demo model: outputs match their guides, and are the same in any batch.

mod bad_guides;
mod batching;
mod generations;
mod structures;
mod support;
