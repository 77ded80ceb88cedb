//! Real checkpoints through the real engine and the CPU runner.

mod adapters;
mod bad_checkpoints;
mod batching;
mod beams;
mod changing_files;
mod configs;
mod copy;
mod cuda;
mod cuda_adapters;
mod cuda_faults;
mod cuda_fp8;
mod cuda_overlap;
mod cuda_quantised;
mod cuda_weight_cache;
mod devices;
mod experts;
mod family_gguf;
mod fp8;
mod gguf;
mod log_lines;
mod memory;
#[path = "../support/missing.rs"]
mod missing;
mod moves;
mod quality;
mod quantised;
mod rank_processes;
mod ranks;
mod reference_device;
mod stage_processes;
mod stages;
mod support;
mod synthetic;
mod transformers;
mod weight_cache;
mod windows;
