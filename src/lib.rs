//! `inflight`: a Triton Inference Server backend that generates text with in-flight batching.
//!
//! # Map
//!
//! ```text
//! room       level  what is in it
//! base/      L0     typed ids and units, the three kinds of error
//! config/    L1     every config.pbtxt knob
//! sampling/  L1     sampling parameters, logits processors, the sampler, stop rules: pure functions
//! engine/    L2     plans steps and applies their results: pure decisions, no clock, no I/O, no thread, no device, no Triton
//! post_processors/  L2  logits post-processors that requests name
//! device/    L3     the `Device` trait and what is common to devices; cpu/: kernels; the thread pool
//! checkpoint/  L4   files and formats (safetensors, GGUF, quantised) -> tensors by name; config.json
//! text/      L4     tokenizer, incremental detokenizer, stop words, chat template
//! triton/    L4     Triton's C API: bindings and safe owners; knows nothing of engine or runner
//! runner/    L5     model families, the forward pass, sampling: `run(plan, &mut output)`
//! guidance/  L5     guided decoding: grammars, and which tokens may come next by them
//! manager/   L6     engine and runner as one object, for Triton's driver and for any other application
//! backend/   L7     the driver, request parsing, responder, metrics: where Triton meets the manager
//! entry.rs   L8     the exported TRITONBACKEND_* functions
//! ```
//!
//! A room imports only rooms of a lower level; `tests/architecture.rs` fails on an upward import and on
//! `unsafe` outside `triton/`, `device/`, `entry.rs` and the calls of a user's library.
//!
//! # One step
//!
//! ```text
//! engine.add(request) / engine.cancel(id)      any number, before the step
//! let step = engine.schedule();                a pure decision: plain data
//! runner.run(plan, &mut output)?;              the only call that takes time, for each of step.plans()
//! engine.apply(step, &mut output, &mut events);   tokens, finishes, pauses
//! ```

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must not take tritonserver down: build with panic = \"unwind\"");

pub mod backend;
pub mod base;
pub mod checkpoint;
pub mod config;
pub mod device;
pub mod engine;
mod entry;
pub mod guidance;
pub mod manager;
pub mod post_processors;
pub mod runner;
pub mod sampling;
pub mod text;
pub mod triton;
