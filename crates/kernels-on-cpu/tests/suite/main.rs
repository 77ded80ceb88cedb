//! Each CUDA kernel against a reference in f64, on random shapes; and the machine that runs the kernels.

mod activations;
mod attention;
mod elementwise;
mod experts;
mod fp8;
mod latent;
mod low_rank;
mod machine;
mod norms;
mod quantised;
mod recurrence;
mod rope;
mod rows;
mod sampling;
#[cfg(kernel_sanitizer)]
mod sanitizers;
mod support;
