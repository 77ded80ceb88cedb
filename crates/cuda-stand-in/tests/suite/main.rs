//! The stand-in for the CUDA driver, cuBLASLt and NCCL does what they document.

mod devices;
mod graphs;
mod launches;
mod matmul;
mod memory;
mod nccl;
mod streams;
mod support;
