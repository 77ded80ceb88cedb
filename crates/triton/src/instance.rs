//! An instance of a model, which executes and for which statistics are reported.

use std::ptr::NonNull;

use super::error::{check, get, get_object, get_text, to_utf8};
use super::memory::SystemMemory;
use super::{Error, Model, Request, sys};

/// Triton's handle of a model instance, alive from ModelInstanceInitialize to ModelInstanceFinalize.
#[derive(Debug)]
pub struct Instance(NonNull<sys::TRITONBACKEND_ModelInstance>);

/// When the parts of an execution began and ended, each from [`now_ns`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamps {
    /// Execute began. For a request's own statistics this must be the Execute that ended it: Triton
    /// subtracts from it when the request was last put into the queue, so an earlier one underflows.
    pub exec_start: u64,
    /// The model began.
    pub compute_start: u64,
    /// The model ended.
    pub compute_end: u64,
    /// Execute ended.
    pub exec_end: u64,
}

/// The time on the clock that Triton's timestamps use (the steady clock), in nanoseconds.
pub fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec to fill in; this clock exists on every Linux, so it cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

// SAFETY: the handle's getters read what does not change while the instance lives; statistics and
// memory reports take locks of Triton's.
unsafe impl Send for Instance {}
// SAFETY: as above.
unsafe impl Sync for Instance {}

impl Instance {
    /// Wraps the handle that an entry point was given.
    ///
    /// # Safety
    /// The instance is alive, and the value is not used after ModelInstanceFinalize.
    pub unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_ModelInstance>) -> Self {
        Self(raw)
    }

    /// The same handle, which must not be used after ModelInstanceFinalize either: for what the instance loads anew.
    pub fn copy(&self) -> Self {
        Self(self.0)
    }

    /// The instance's name.
    pub fn name(&self) -> Result<&str, Error> {
        // SAFETY: the instance is alive, and so is its name for as long.
        let name =
            unsafe { get_text(|out| sys::TRITONBACKEND_ModelInstanceName(self.as_ptr(), out)) }?;
        to_utf8(name, "the instance's name")
    }

    /// The GPU that Triton gives the instance; `None` for one that is not of `KIND_GPU`.
    pub fn gpu(&self) -> Result<Option<usize>, Error> {
        use sys::TRITONSERVER_InstanceGroupKind as Kind;
        // SAFETY: the instance is alive.
        let kind = unsafe {
            get(Kind::TRITONSERVER_INSTANCEGROUPKIND_AUTO, |out| {
                sys::TRITONBACKEND_ModelInstanceKind(self.as_ptr(), out)
            })
        }?;
        if kind != Kind::TRITONSERVER_INSTANCEGROUPKIND_GPU {
            return Ok(None);
        }
        // SAFETY: the instance is alive.
        let device = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_ModelInstanceDeviceId(self.as_ptr(), out)
            })
        }?;
        Ok(usize::try_from(device).ok())
    }

    /// Counts a finished request in Triton's statistics and `nv_inference_*` metrics. Once per request, before it is
    /// released.
    pub fn report_request(
        &self,
        request: &Request,
        success: bool,
        at: &Timestamps,
    ) -> Result<(), Error> {
        // SAFETY: instance and request are alive.
        unsafe {
            check(sys::TRITONBACKEND_ModelInstanceReportStatistics(
                self.as_ptr(),
                request.as_ptr(),
                success,
                at.exec_start,
                at.compute_start,
                at.compute_end,
                at.exec_end,
            ))
        }
    }

    /// Counts an execution over `batch_size` sequences.
    pub fn report_batch(&self, batch_size: u64, at: &Timestamps) -> Result<(), Error> {
        // SAFETY: the instance is alive.
        unsafe {
            check(sys::TRITONBACKEND_ModelInstanceReportBatchStatistics(
                self.as_ptr(),
                batch_size,
                at.exec_start,
                at.compute_start,
                at.compute_end,
                at.exec_end,
            ))
        }
    }

    /// Reports that the instance holds `bytes` of system memory in addition to the model's; shown in the model's
    /// statistics. Replaces the previous report.
    pub fn report_system_memory(&self, bytes: usize) -> Result<(), Error> {
        let held = SystemMemory::new(bytes)?;
        let mut list = [held.as_ptr()];
        // SAFETY: instance and list are alive; Triton reads the list during the call.
        unsafe {
            check(sys::TRITONBACKEND_ModelInstanceReportMemoryUsage(
                self.as_ptr(),
                list.as_mut_ptr(),
                list.len() as u32,
            ))
        }
    }

    /// The handle of the instance's model.
    ///
    /// # Safety
    /// The value is not used after ModelFinalize.
    pub unsafe fn model(&self) -> Result<Model, Error> {
        // SAFETY: the instance is alive.
        let model =
            unsafe { get_object(|out| sys::TRITONBACKEND_ModelInstanceModel(self.as_ptr(), out)) }?;
        // SAFETY: a model outlives its instances; beyond that the caller promises.
        Ok(unsafe { Model::from_raw(model) })
    }

    /// The state that [`Instance::set_state`] stored.
    ///
    /// # Safety
    /// `T` is the type that was stored.
    pub unsafe fn state<T>(&self) -> Result<Option<NonNull<T>>, Error> {
        // SAFETY: the instance is alive.
        let state = unsafe {
            get(std::ptr::null_mut(), |out| {
                sys::TRITONBACKEND_ModelInstanceState(self.as_ptr(), out)
            })
        }?;
        Ok(NonNull::new(state.cast()))
    }

    /// Stores our state in Triton's instance. `None` clears it without dropping it.
    pub fn set_state<T>(&self, state: Option<NonNull<T>>) -> Result<(), Error> {
        let state = state.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the instance is alive; Triton only keeps the pointer.
        unsafe {
            check(sys::TRITONBACKEND_ModelInstanceSetState(
                self.as_ptr(),
                state.cast(),
            ))
        }
    }

    fn as_ptr(&self) -> *mut sys::TRITONBACKEND_ModelInstance {
        self.0.as_ptr()
    }
}
