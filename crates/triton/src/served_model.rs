//! A model seen through the server: whether it is ready, and requests that the backend itself sends to it.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use super::error::{check, get, get_object};
use super::health::ask_for_model;
use super::request::END_OF_SEQUENCE;
use super::{CorrelationId, DataType, Error, ErrorCode, sys};
use sys::TRITONSERVER_RequestFlag as Flag;

/// What the server says of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// Clients can send requests to it.
    Loaded,
    /// The model is unloaded, or being unloaded.
    Unloaded,
    /// The server is shutting down. It unloads its models when their requests have ended.
    ServerStops,
}

/// The server and a model in it. Used by the instances of that model, as long as they live.
#[derive(Clone, Debug)]
pub struct ServedModel {
    server: NonNull<sys::TRITONSERVER_Server>,
    name: CString,
    version: i64,
}

// SAFETY: the server outlives its models, and allows the calls of this file on every thread.
unsafe impl Send for ServedModel {}
// SAFETY: as above.
unsafe impl Sync for ServedModel {}

impl ServedModel {
    /// Version `version` of the model `name`.
    pub(super) fn new(server: NonNull<sys::TRITONSERVER_Server>, name: &str, version: u64) -> Self {
        Self {
            server,
            name: CString::new(name).unwrap_or_default(),
            version: i64::try_from(version).unwrap_or(-1),
        }
    }

    /// Whether clients can send requests to the model. If a model has replaced another of the same name, both are
    /// served. A failed instance makes no difference.
    pub fn serving(&self) -> Serving {
        // SAFETY: server and name are alive.
        let is_ready = ask_for_model(|| unsafe {
            get(false, |out| {
                sys::TRITONSERVER_ServerModelIsReady(
                    self.server.as_ptr(),
                    self.name.as_ptr(),
                    self.version,
                    out,
                )
            })
        });
        match is_ready.map_err(|error| error.code()) {
            Ok(true) => Serving::Loaded,
            Ok(false) | Err(ErrorCode::NotFound) => Serving::Unloaded,
            Err(ErrorCode::Unavailable) => Serving::ServerStops,
            Err(_) => Serving::Loaded,
        }
    }

    /// Ends a sequence that may still hold a slot: sends a request that starts the sequence again, in its old slot if
    /// it has one. Execute recognises the request by [`super::Request::only_ends_its_sequence`], and releasing it ends
    /// the sequence. (A request with the END flag would also free the slot, but not with the `oldest` strategy: Triton
    /// 2.51 then waits forever for that request.) Of iterative sequences. `input` names the input that every request
    /// has; `shape` has one element.
    ///
    /// # Errors
    /// Triton's error if the model is unloaded.
    pub fn end_sequence(
        &self,
        sequence: CorrelationId<'_>,
        input: &CStr,
        data_type: DataType,
        shape: &[i64],
    ) -> Result<(), Error> {
        const START: Flag = Flag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START;
        self.send_own(sequence, START, input, data_type, shape)
    }

    /// Sends the last request of a sequence that is not iterative, which [`super::Request::only_ends_its_sequence`]
    /// recognises. Servers that stop take it, too. The other arguments as above.
    ///
    /// # Errors
    /// As above.
    pub fn close_sequence(
        &self,
        sequence: CorrelationId<'_>,
        input: &CStr,
        data_type: DataType,
        shape: &[i64],
    ) -> Result<(), Error> {
        const END: Flag = Flag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END;
        self.send_own(sequence, END, input, data_type, shape)
    }

    fn send_own(
        &self,
        sequence: CorrelationId<'_>,
        flag: Flag,
        input: &CStr,
        data_type: DataType,
        shape: &[i64],
    ) -> Result<(), Error> {
        let request = OwnRequest::new(self)?;
        request.belongs_to(sequence, flag)?;
        request.add_input(input, data_type, shape)?;
        request.set_callbacks()?;
        // SAFETY: server and request are alive; there is no trace.
        unsafe {
            check(sys::TRITONSERVER_ServerInferAsync(
                self.server.as_ptr(),
                request.0.as_ptr(),
                ptr::null_mut(),
            ))
        }?;
        // Triton owns the request now, and passes it to `released` in the end.
        std::mem::forget(request);
        Ok(())
    }
}

/// A request that has not been sent. Deleted if it is dropped.
struct OwnRequest(NonNull<sys::TRITONSERVER_InferenceRequest>);

impl OwnRequest {
    fn new(model: &ServedModel) -> Result<Self, Error> {
        // SAFETY: server and name are alive; the request is ours.
        let raw = unsafe {
            get_object(|out| {
                sys::TRITONSERVER_InferenceRequestNew(
                    out,
                    model.server.as_ptr(),
                    model.name.as_ptr(),
                    model.version,
                )
            })
        }?;
        Ok(Self(raw))
    }

    fn belongs_to(&self, sequence: CorrelationId<'_>, flag: Flag) -> Result<(), Error> {
        let request = self.0.as_ptr();
        // SAFETY: the request is alive. Triton copies both ids.
        unsafe {
            check(sys::TRITONSERVER_InferenceRequestSetId(
                request,
                END_OF_SEQUENCE.as_ptr(),
            ))?;
            check(sys::TRITONSERVER_InferenceRequestSetFlags(request, flag.0))?;
            check(match sequence {
                CorrelationId::Number(number) => {
                    sys::TRITONSERVER_InferenceRequestSetCorrelationId(request, number)
                }
                CorrelationId::Text(text) => {
                    sys::TRITONSERVER_InferenceRequestSetCorrelationIdString(request, text.as_ptr())
                }
            })
        }
    }

    fn add_input(&self, name: &CStr, data_type: DataType, shape: &[i64]) -> Result<(), Error> {
        /// A token id, or the length of an empty text.
        static ZERO: [u8; 4] = [0; 4];
        let request = self.0.as_ptr();
        // SAFETY: the request is alive. Triton copies name and shape; the data is static.
        unsafe {
            check(sys::TRITONSERVER_InferenceRequestAddInput(
                request,
                name.as_ptr(),
                data_type.to_sys(),
                shape.as_ptr(),
                shape.len() as u64,
            ))?;
            check(sys::TRITONSERVER_InferenceRequestAppendInputData(
                request,
                name.as_ptr(),
                ZERO.as_ptr().cast(),
                ZERO.len(),
                sys::TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_CPU,
                0,
            ))
        }
    }

    fn set_callbacks(&self) -> Result<(), Error> {
        let request = self.0.as_ptr();
        let allocator = allocator()?;
        // SAFETY: the request is alive; allocator and callbacks are static.
        unsafe {
            check(sys::TRITONSERVER_InferenceRequestSetReleaseCallback(
                request,
                Some(released),
                ptr::null_mut(),
            ))?;
            check(sys::TRITONSERVER_InferenceRequestSetResponseCallback(
                request,
                allocator,
                ptr::null_mut(),
                Some(answered),
                ptr::null_mut(),
            ))
        }
    }
}

impl Drop for OwnRequest {
    fn drop(&mut self) {
        // SAFETY: the request is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_InferenceRequestDelete(self.0.as_ptr())) };
    }
}

/// Deletes a request that Triton has released.
unsafe extern "C" fn released(
    request: *mut sys::TRITONSERVER_InferenceRequest,
    flags: u32,
    _: *mut c_void,
) {
    const ALL: u32 = sys::TRITONSERVER_RequestReleaseFlag::TRITONSERVER_REQUEST_RELEASE_ALL.0;
    if let Some(request) = NonNull::new(request).filter(|_| flags & ALL != 0) {
        drop(OwnRequest(request));
    }
}

/// Deletes a response that no client waits for.
unsafe extern "C" fn answered(
    response: *mut sys::TRITONSERVER_InferenceResponse,
    _: u32,
    _: *mut c_void,
) {
    if !response.is_null() {
        // SAFETY: the response is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONSERVER_InferenceResponseDelete(response)) };
    }
}

/// The allocator for responses without outputs, created once and never deleted.
fn allocator() -> Result<*mut sys::TRITONSERVER_ResponseAllocator, Error> {
    struct Allocator(NonNull<sys::TRITONSERVER_ResponseAllocator>);
    // SAFETY: Triton only reads it.
    unsafe impl Send for Allocator {}
    // SAFETY: as above.
    unsafe impl Sync for Allocator {}
    static ALLOCATOR: OnceLock<Result<Allocator, Error>> = OnceLock::new();
    let made = ALLOCATOR.get_or_init(|| {
        // SAFETY: the functions live as long as this library.
        let raw = unsafe {
            get_object(|out| {
                sys::TRITONSERVER_ResponseAllocatorNew(out, Some(refuse), Some(release), None)
            })
        };
        raw.map(Allocator)
    });
    match made {
        Ok(allocator) => Ok(allocator.0.as_ptr()),
        Err(error) => Err(error.clone()),
    }
}

unsafe extern "C" fn refuse(
    _: *mut sys::TRITONSERVER_ResponseAllocator,
    _: *const c_char,
    _: usize,
    _: sys::TRITONSERVER_MemoryType,
    _: i64,
    _: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
    _: *mut sys::TRITONSERVER_MemoryType,
    _: *mut i64,
) -> *mut sys::TRITONSERVER_Error {
    Error::new(ErrorCode::Unsupported, "no client reads this response").into_raw()
}

unsafe extern "C" fn release(
    _: *mut sys::TRITONSERVER_ResponseAllocator,
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: sys::TRITONSERVER_MemoryType,
    _: i64,
) -> *mut sys::TRITONSERVER_Error {
    ptr::null_mut()
}
