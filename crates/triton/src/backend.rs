//! The agreement between Triton and a backend before models are loaded.

use std::ptr::NonNull;

use super::error::{check, get};
use super::{Error, ErrorCode, sys};

/// The version of Triton's backend API that this library is built for: major, minor.
const API_VERSION: (u32, u32) = (
    sys::TRITONBACKEND_API_VERSION_MAJOR,
    sys::TRITONBACKEND_API_VERSION_MINOR,
);

/// The attributes that Triton asks a backend for before it loads models.
#[derive(Debug)]
pub struct BackendAttributes(NonNull<sys::TRITONBACKEND_BackendAttribute>);

/// An error if the server has another major version of the API than this library, or an older minor one.
pub fn check_api_version() -> Result<(), Error> {
    let mut major = 0;
    // SAFETY: both out-parameters point to variables of their type.
    let minor = unsafe {
        get(0, |minor| {
            sys::TRITONBACKEND_ApiVersion(&raw mut major, minor)
        })
    }?;
    if major == API_VERSION.0 && minor >= API_VERSION.1 {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::Unsupported,
        format!(
            "the server has version {major}.{minor} of Triton's backend API, and this backend needs \
             {}.{} or a later {}.x (server 2.51.0 or later)",
            API_VERSION.0, API_VERSION.1, API_VERSION.0
        ),
    ))
}

impl BackendAttributes {
    /// Wraps the attributes that an entry point was given.
    ///
    /// # Safety
    /// The attributes are alive for as long as the value is used.
    pub unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_BackendAttribute>) -> Self {
        Self(raw)
    }

    /// Asks for `count` instances on the CPU for models whose configuration does not set instances.
    pub fn prefer_cpu_instances(&self, count: u64) -> Result<(), Error> {
        let kind = sys::TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_CPU;
        self.prefer_instances(kind, count)
    }

    /// Asks for `count` instances on each GPU for such models, or on the CPU if the server finds no GPU.
    pub fn prefer_gpu_instances(&self, count: u64) -> Result<(), Error> {
        let kind = sys::TRITONSERVER_InstanceGroupKind::TRITONSERVER_INSTANCEGROUPKIND_AUTO;
        self.prefer_instances(kind, count)
    }

    fn prefer_instances(
        &self,
        kind: sys::TRITONSERVER_InstanceGroupKind,
        count: u64,
    ) -> Result<(), Error> {
        // SAFETY: the attributes are alive; no device ids are given.
        unsafe {
            check(
                sys::TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
                    self.0.as_ptr(),
                    kind,
                    count,
                    std::ptr::null(),
                    0,
                ),
            )
        }
    }
}
