//! The functions that tritonserver and the program of other ranks find in the library, each behind a guard.

use std::ffi::{c_int, c_void};

use crate::Inflight;
use inflight_base::catch_panic;
use inflight_machines::{leave_mpi_world, rank_main};
use inflight_triton::{lifecycle, sys};

type Outcome = *mut sys::TRITONSERVER_Error;

/// Prepares the backend.
///
/// # Safety
/// For tritonserver alone, as tritonbackend.h says; so are all of these.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_Initialize(
    _backend: *mut sys::TRITONBACKEND_Backend,
) -> Outcome {
    lifecycle::initialize::<Inflight>()
}

/// Ends the backend, and with it the other processes of `mpirun`. All else that it holds belonged to its models.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_Finalize(
    _backend: *mut sys::TRITONBACKEND_Backend,
) -> Outcome {
    // A panic must not leave the library, and nobody reads an error of this function.
    let _ = catch_panic(leave_mpi_world);
    std::ptr::null_mut()
}

/// Says how models are to be loaded.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_GetBackendAttribute(
    _backend: *mut sys::TRITONBACKEND_Backend,
    attributes: *mut sys::TRITONBACKEND_BackendAttribute,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::attributes::<Inflight>(attributes) }
}

/// Loads a model.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInitialize(
    model: *mut sys::TRITONBACKEND_Model,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::model_initialize::<Inflight>(model) }
}

/// Drops a model.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelFinalize(
    model: *mut sys::TRITONBACKEND_Model,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::model_finalize::<Inflight>(model) }
}

/// Loads an instance of a model.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceInitialize(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::instance_initialize::<Inflight>(instance) }
}

/// Drops an instance.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceFinalize(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::instance_finalize::<Inflight>(instance) }
}

/// One step over the requests in flight.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceExecute(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
    requests: *mut *mut sys::TRITONBACKEND_Request,
    request_count: u32,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::instance_execute::<Inflight>(instance, requests, request_count) }
}

/// Whether an instance can serve: asked by servers since 25.12.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelInstanceReady(
    instance: *mut sys::TRITONBACKEND_ModelInstance,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::instance_ready::<Inflight>(instance) }
}

/// Begins to form batches of a model, if this library is its `batchstrategy.so`.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatcherInitialize(
    batcher: *mut *mut sys::TRITONBACKEND_Batcher,
    model: *mut sys::TRITONBACKEND_Model,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::batcher_initialize::<Inflight>(batcher, model) }
}

/// Ends that. Nothing is left to do: all that the batcher holds belongs to its model.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatcherFinalize(
    _batcher: *mut sys::TRITONBACKEND_Batcher,
) -> Outcome {
    std::ptr::null_mut()
}

/// Begins a batch.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchInitialize(
    batcher: *const sys::TRITONBACKEND_Batcher,
    batch: *mut *mut c_void,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::batch_initialize::<Inflight>(batcher, batch) }
}

/// Whether a request joins a batch.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchIncludeRequest(
    request: *mut sys::TRITONBACKEND_Request,
    batch: *mut c_void,
    includes: *mut bool,
) -> Outcome {
    // SAFETY: Triton's promise.
    unsafe { lifecycle::batch_includes::<Inflight>(request, batch, includes) }
}

/// Ends a batch. Nothing is left to do, as above.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TRITONBACKEND_ModelBatchFinalize(_batch: *mut c_void) -> Outcome {
    std::ptr::null_mut()
}

/// Is another rank of a model, as [`rank_main`]: for `inflight-rank` (`crates/rank`). Returns the exit status.
#[unsafe(no_mangle)]
pub extern "C" fn INFLIGHT_RankMain() -> c_int {
    catch_panic(rank_main).unwrap_or(1).into()
}
