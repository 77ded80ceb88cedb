//! The GPUs of this host.

/// Whether this build has kernels for GPUs, and the host has a GPU.
#[cfg(feature = "cuda")]
pub fn has_gpus() -> bool {
    inflight_device_cuda::has_kernels() && inflight_device_cuda::num_gpus() > 0
}

/// Whether this build has kernels for GPUs, and the host has a GPU: this build has none.
#[cfg(not(feature = "cuda"))]
pub fn has_gpus() -> bool {
    false
}
