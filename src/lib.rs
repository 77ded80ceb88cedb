//! `inflight`: a Triton Inference Server backend that generates text with in-flight batching.
//!
//! Each module is a room with a level, and imports only rooms of a lower level. `docs/src/architecture.md` lists the rooms
//! and their levels; `tests/architecture/` enforces them.
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
pub mod collective;
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
