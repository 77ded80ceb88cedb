//! Real checkpoints through the real engine and the CPU runner.

mod bad_checkpoints;
mod batching;
mod beams;
mod configs;
mod copy;
mod int8;
mod moves;
mod support;
mod synthetic;
mod transformers;
mod windows;
