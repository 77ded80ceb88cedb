//! GPUs as the driver shows them.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use cudarc::cublaslt;
use cudarc::driver::{CudaContext, DriverError, result, sys};

use inflight_base::LoadError;

/// The number of GPUs; 0 without a driver.
pub fn num_gpus() -> usize {
    let count = || {
        start_driver()?;
        CudaContext::device_count().map_err(|error| load_error("counting the GPUs", &error))
    };
    guarded(count).map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

/// The bytes of a GPU's memory that nobody uses.
///
/// # Errors
///
/// As opening it.
pub fn free_memory_bytes(gpu: usize) -> Result<u64, LoadError> {
    let context = open(gpu)?;
    free_bytes_of(&context)
}

/// The UUID of a GPU, which tells it from all others on any host, and the bytes of its memory that nobody uses. It is
/// opened once for both.
///
/// # Errors
///
/// As opening it.
pub fn uuid_and_free_bytes(gpu: usize) -> Result<(String, u64), LoadError> {
    let context = open(gpu)?;
    let uuid = context
        .uuid()
        .map_err(|error| load_error("asking for its UUID", &error))?;
    let digits = uuid.bytes.iter().map(|byte| format!("{byte:02x}"));
    Ok((digits.collect(), free_bytes_of(&context)?))
}

fn free_bytes_of(context: &CudaContext) -> Result<u64, LoadError> {
    let (free, _) = context
        .mem_get_info()
        .map_err(|error| load_error("asking for its free memory", &error))?;
    Ok(free as u64)
}

/// Opens a GPU.
///
/// # Errors
///
/// There is no driver, no cuBLASLt, or no such GPU.
pub(super) fn open(gpu: usize) -> Result<Arc<CudaContext>, LoadError> {
    guarded(|| {
        start_driver()?;
        let num_gpus =
            CudaContext::device_count().map_err(|error| load_error("counting the GPUs", &error))?;
        if gpu >= usize::try_from(num_gpus).unwrap_or(0) {
            return Err(LoadError::Resource(format!(
                "there is no GPU {gpu}: the driver shows {num_gpus}; choose another one in instance_group or gpu_device_ids, or KIND_CPU"
            )));
        }
        // SAFETY: opening a library that is part of the CUDA installation runs its initialisers.
        if !unsafe { cublaslt::sys::is_culib_present() } {
            return Err(LoadError::Resource(
                "cuBLASLt is missing: install libcublasLt.so.12 or .13, as the CUDA containers have it, or serve the \
                 model with KIND_CPU"
                    .to_owned(),
            ));
        }
        let context =
            CudaContext::new(gpu).map_err(|error| load_error("opening the GPU", &error))?;
        // SAFETY: every buffer is used on one stream only, and freed after that stream has been waited for.
        unsafe { context.disable_event_tracking() };
        Ok(context)
    })
}

/// An error of the driver while a model is loaded.
pub(super) fn load_error(action: &str, error: &DriverError) -> LoadError {
    LoadError::Resource(format!("CUDA: {action}: {error}"))
}

fn start_driver() -> Result<(), LoadError> {
    // SAFETY: opening the driver's library runs its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(LoadError::Resource(
            "there is no CUDA driver (libcuda.so.1): install it, or serve the model with KIND_CPU"
                .to_owned(),
        ));
    }
    result::init().map_err(|error| load_error("starting the driver", &error))
}

/// Runs `body`. A function that the driver lacks is a panic in the bindings, and an error here.
fn guarded<T>(body: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(LoadError::Resource(
            "the CUDA driver is older than version 12.4, and lacks a function: update it, or serve the model with \
             KIND_CPU"
                .to_owned(),
        ))
    })
}
