//! A model as the server sees it from outside: whether it is ready, and requests to it that no client sent.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use super::error::{check, get, get_object};
use super::request::END_OF_SEQUENCE;
use super::{CorrelationId, DataType, Error, ErrorCode, sys};

/// The server, and the model's name in it. For a model's own instances, while they live.
#[derive(Clone, Debug)]
pub struct ServedModel {
    server: NonNull<sys::TRITONSERVER_Server>,
    name: CString,
    version: i64,
}

// SAFETY: the server lives as long as any model; what is asked of it here it allows on every thread.
unsafe impl Send for ServedModel {}
// SAFETY: as above.
unsafe impl Sync for ServedModel {}

impl ServedModel {
    /// The model `version` of `name`.
    pub(super) fn new(server: NonNull<sys::TRITONSERVER_Server>, name: &str, version: u64) -> Self {
        Self {
            server,
            name: CString::new(name).unwrap_or_default(),
            version: i64::try_from(version).unwrap_or(-1),
        }
    }

    /// Whether clients can send requests to the model: not while it is unloaded. A model that was loaded over another
    /// of its name stands for both.
    ///
    /// # Errors
    /// The server ends.
    pub fn is_ready(&self) -> Result<bool, Error> {
        // SAFETY: server and name are alive.
        unsafe {
            get(false, |out| {
                sys::TRITONSERVER_ServerModelIsReady(
                    self.server.as_ptr(),
                    self.name.as_ptr(),
                    self.version,
                    out,
                )
            })
        }
    }

    /// Has a sequence end that may have ended: sends a request that starts it anew, in its old slot if it has one. It
    /// comes to Execute, where [`super::Request::only_ends_its_sequence`] tells it from others, and its release ends
    /// the sequence. (One with the END flag would free the slot, too, but not with the `oldest` strategy: Triton 2.51
    /// then waits for ever for that request to be done.) `input` is the one that every request has, in a `shape` of one
    /// element.
    ///
    /// # Errors
    /// Triton's: the model is unloaded.
    pub fn end_sequence(
        &self,
        sequence: CorrelationId<'_>,
        input: &CStr,
        data_type: DataType,
        shape: &[i64],
    ) -> Result<(), Error> {
        let request = OwnRequest::new(self)?;
        request.prepare(sequence, input, data_type, shape)?;
        // SAFETY: server and request are alive; there is no trace.
        unsafe {
            check(sys::TRITONSERVER_ServerInferAsync(
                self.server.as_ptr(),
                request.0.as_ptr(),
                ptr::null_mut(),
            ))
        }?;
        // It is Triton's now, which gives it to `released` in the end.
        std::mem::forget(request);
        Ok(())
    }
}

/// A request that has not been sent; deleted if it is dropped.
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

    fn prepare(
        &self,
        sequence: CorrelationId<'_>,
        input: &CStr,
        data_type: DataType,
        shape: &[i64],
    ) -> Result<(), Error> {
        /// A token id, or the length of an empty text. Triton reads it as long as the request lives.
        static ZERO: [u8; 4] = [0; 4];
        const START: u32 =
            sys::TRITONSERVER_RequestFlag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START.0;
        let request = self.0.as_ptr();
        let allocator = allocator()?;
        let memory = sys::TRITONSERVER_MemoryType::TRITONSERVER_MEMORY_CPU;
        // SAFETY: the request is alive. Triton copies id, names and shape; data, allocator and callbacks are static.
        unsafe {
            check(sys::TRITONSERVER_InferenceRequestSetId(
                request,
                END_OF_SEQUENCE.as_ptr(),
            ))?;
            check(sys::TRITONSERVER_InferenceRequestSetFlags(request, START))?;
            check(match sequence {
                CorrelationId::Number(number) => {
                    sys::TRITONSERVER_InferenceRequestSetCorrelationId(request, number)
                }
                CorrelationId::Text(text) => {
                    sys::TRITONSERVER_InferenceRequestSetCorrelationIdString(request, text.as_ptr())
                }
            })?;
            check(sys::TRITONSERVER_InferenceRequestAddInput(
                request,
                input.as_ptr(),
                data_type.to_sys(),
                shape.as_ptr(),
                shape.len() as u64,
            ))?;
            check(sys::TRITONSERVER_InferenceRequestAppendInputData(
                request,
                input.as_ptr(),
                ZERO.as_ptr().cast(),
                ZERO.len(),
                memory,
                0,
            ))?;
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

/// Takes a request back from Triton, for good.
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

/// Takes a response, which says nothing that anybody waits for.
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

/// The allocator of responses that have no outputs, made once and never deleted.
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
                sys::TRITONSERVER_ResponseAllocatorNew(out, Some(refuse), Some(give_back), None)
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
    Error::new(ErrorCode::Unsupported, "nobody reads this response").into_raw()
}

unsafe extern "C" fn give_back(
    _: *mut sys::TRITONSERVER_ResponseAllocator,
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: sys::TRITONSERVER_MemoryType,
    _: i64,
) -> *mut sys::TRITONSERVER_Error {
    ptr::null_mut()
}
