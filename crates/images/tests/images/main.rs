//! Decoding and processing, compared with transformers.

mod decoding;
mod fixtures;
mod processors;
