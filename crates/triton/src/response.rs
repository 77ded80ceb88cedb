//! Responses, and the factory that makes them.
//!
//! A factory outlives its request: it sends responses after the request has been released, and reports cancellation
//! while Triton holds the request. All code that answers a request shares its factory, which lets exactly one final
//! response through: a frontend frees its state with the final response, and a later one would write into freed
//! memory.

use std::ffi::{CStr, CString};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::endpoints::wait_if_closing;
use super::error::{RawError, check, get, get_object};
use super::{DataType, Element, Error, ErrorCode, strings, sys};

/// The largest output that takes no time to write.
const SMALL_BYTES: usize = 1 << 16;

/// Makes the responses of one request, on any thread. Clones share the final response: only one of them can send it.
#[derive(Clone, Debug)]
pub struct ResponseFactory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    raw: NonNull<sys::TRITONBACKEND_ResponseFactory>,
    /// Whether the final response has been sent. Locked while sending, so that responses stay in order.
    finished: Mutex<bool>,
    /// Whether the request has been released for good. From then on only the factory can answer it.
    released: AtomicBool,
    /// Whether the message of an error begins with the name of its code.
    names_codes: bool,
}

/// A response to fill with outputs and send. Deleted if it is dropped.
///
/// Send one response of a request before making the next: frontends that take outputs in shared memory write all
/// responses of a request to the same place.
#[derive(Debug)]
pub struct UnsentResponse {
    raw: RawResponse,
    factory: ResponseFactory,
}

/// A response object, which we must send or delete.
#[derive(Debug)]
struct RawResponse(NonNull<sys::TRITONBACKEND_Response>);

/// Whether a response is the last one of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// More will follow.
    Partial,
    /// Nothing will follow.
    Final,
}

// SAFETY: Triton counts references to the factory atomically, its cancel flag is atomic, and making a response
// only reads it. `finished` serialises the sends of one request.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}
// SAFETY: responses are not bound to a thread; Triton allows sending from any.
unsafe impl Send for RawResponse {}

impl ResponseFactory {
    /// The factory of a request. `names_codes`: the message of an error begins with the name of its code.
    ///
    /// # Safety
    /// `request` is alive and ours.
    pub(super) unsafe fn new(
        request: NonNull<sys::TRITONBACKEND_Request>,
        names_codes: bool,
    ) -> Result<Self, Error> {
        // SAFETY: the request is alive; the factory is ours.
        let raw = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseFactoryNew(out, request.as_ptr()))
        }?;
        Ok(Self(Arc::new(Inner {
            raw,
            finished: Mutex::new(false),
            released: AtomicBool::new(false),
            names_codes,
        })))
    }

    /// Whether the client has cancelled the request. Costs one atomic read.
    pub fn is_cancelled(&self) -> bool {
        // SAFETY: the factory is alive. The call cannot fail in known servers; if it does, the request counts as
        // not cancelled.
        unsafe {
            get(false, |out| {
                sys::TRITONBACKEND_ResponseFactoryIsCancelled(self.0.raw.as_ptr(), out)
            })
        }
        .unwrap_or(false)
    }

    /// Notes that the request has been released for good. If the last clone of the factory is then dropped without
    /// a final response, the request ends with an error.
    pub(super) fn request_released(&self) {
        self.0.released.store(true, Ordering::Relaxed);
    }

    /// Whether the request's final response has been sent.
    pub fn is_finished(&self) -> bool {
        *self.0.finished.lock()
    }

    /// A response without outputs.
    pub fn new_response(&self) -> Result<UnsentResponse, Error> {
        wait_if_closing();
        // SAFETY: the factory is alive; the response is ours.
        let raw = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseNewFromFactory(out, self.0.raw.as_ptr()))
        }?;
        Ok(UnsentResponse {
            raw: RawResponse(raw),
            factory: self.clone(),
        })
    }

    /// Ends the request without a further response.
    ///
    /// # Errors
    /// The request has already ended.
    pub fn send_final(&self) -> Result<(), Error> {
        self.send_with(Completion::Final, |flags| {
            // SAFETY: the factory is alive.
            unsafe {
                check(sys::TRITONBACKEND_ResponseFactorySendFlags(
                    self.0.raw.as_ptr(),
                    flags,
                ))
            }
        })
    }

    /// Ends the request with an error.
    ///
    /// # Errors
    /// The request has already ended.
    pub fn send_error(&self, error: Error) -> Result<(), Error> {
        match self.new_response() {
            Ok(response) => response.send_error(error),
            // Without a response to carry the error, at least end the request: the client must not wait forever.
            Err(_) => self.send_final(),
        }
    }

    fn send_with(
        &self,
        completion: Completion,
        send: impl FnOnce(u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        use sys::TRITONSERVER_ResponseCompleteFlag as Flag;
        wait_if_closing();
        let mut finished = self.0.finished.lock();
        if *finished {
            return Err(Error::internal(
                "the final response of this request has already been sent",
            ));
        }
        let flags = match completion {
            Completion::Partial => 0,
            Completion::Final => {
                *finished = true;
                Flag::TRITONSERVER_RESPONSE_COMPLETE_FINAL.0
            }
        };
        send(flags)
    }
}

impl Inner {
    /// Ends a released request that has no final response, so that its client does not wait forever.
    fn send_abandoned(&mut self) {
        if *self.finished.get_mut() || !*self.released.get_mut() {
            return;
        }
        use sys::TRITONSERVER_ResponseCompleteFlag as Flag;
        wait_if_closing();
        let flags = Flag::TRITONSERVER_RESPONSE_COMPLETE_FINAL.0;
        let error = RawError::new(abandoned());
        // SAFETY: the factory is alive; the response is ours.
        let response = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseNewFromFactory(out, self.raw.as_ptr()))
        };
        let sent = match response {
            // SAFETY: the response is alive and handed over; the error is only borrowed, and outlives the call.
            Ok(response) => unsafe {
                let error = error.as_ref().map_or(ptr::null_mut(), RawError::as_ptr);
                check(sys::TRITONBACKEND_ResponseSend(
                    response.as_ptr(),
                    flags,
                    error,
                ))
            },
            // SAFETY: the factory is alive.
            Err(_) => unsafe {
                check(sys::TRITONBACKEND_ResponseFactorySendFlags(
                    self.raw.as_ptr(),
                    flags,
                ))
            },
        };
        if let Err(error) = sent {
            log::error!("a request could not be answered: {error}");
        }
    }
}

/// The error for a request that was dropped without an answer.
pub(super) fn abandoned() -> Error {
    Error::internal("the backend dropped the request without an answer")
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.send_abandoned();
        // SAFETY: the factory is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONBACKEND_ResponseFactoryDelete(self.raw.as_ptr())) };
    }
}

impl UnsentResponse {
    /// Adds an output of numbers. `shape` begins with the batch dimension if the model supports batching; its product
    /// is the number of elements.
    pub fn output<T: Element>(
        &mut self,
        name: &CStr,
        shape: &[i64],
        elements: &[T],
    ) -> Result<(), Error> {
        self.output_pieces(name, shape, &[elements])
    }

    /// Adds an output of numbers that are stored in several pieces, concatenated in the response.
    pub fn output_pieces<T: Element>(
        &mut self,
        name: &CStr,
        shape: &[i64],
        pieces: &[impl AsRef<[T]>],
    ) -> Result<(), Error> {
        let num_elements = pieces.iter().map(|piece| piece.as_ref().len()).sum();
        check_count(name, shape, num_elements)?;
        let byte_size = num_elements * size_of::<T>();
        let Some(mut place) = self.allocate(name, T::DATA_TYPE, shape, byte_size)? else {
            return Ok(());
        };
        for piece in pieces {
            let bytes: &[u8] = bytemuck::cast_slice(piece.as_ref());
            // SAFETY: the buffer holds the bytes of all pieces, and `place` is behind the previous pieces; the
            // source does not overlap the frontend's memory.
            unsafe {
                place.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
                place = place.add(bytes.len());
            }
        }
        Ok(())
    }

    /// Adds an output of strings, one per element.
    pub fn output_strings<S: AsRef<[u8]>>(
        &mut self,
        name: &CStr,
        shape: &[i64],
        strings: &[S],
    ) -> Result<(), Error> {
        let lens = strings.iter().map(|string| string.as_ref().len());
        self.output_written(name, shape, lens, |i, place| {
            place.copy_from_slice(strings[i].as_ref());
        })
    }

    /// Adds an output of strings with the lengths `lens`. `write` writes each string directly into the response, so
    /// that a large one is never in memory twice.
    pub fn output_written(
        &mut self,
        name: &CStr,
        shape: &[i64],
        lens: impl ExactSizeIterator<Item = usize> + Clone,
        mut write: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), Error> {
        check_count(name, shape, lens.len())?;
        let byte_size = strings::encoded_len_of(lens.clone())?;
        if let Some(buffer) = self.allocate(name, DataType::Bytes, shape, byte_size)? {
            // SAFETY: the buffer has `byte_size` bytes, which only this response writes to.
            unsafe { buffer.write_bytes(0, byte_size) };
            // SAFETY: as above, and initialised.
            let buffer = unsafe { slice::from_raw_parts_mut(buffer.as_ptr(), byte_size) };
            for (i, place) in strings::places(lens, buffer).into_iter().enumerate() {
                write(i, place);
            }
        }
        Ok(())
    }

    /// Adds a text beside the outputs. What is behind a zero byte is left out.
    pub fn set_parameter(&mut self, name: &CStr, value: &str) -> Result<(), Error> {
        let value = value.split('\0').next().unwrap_or_default();
        let value = CString::new(value).unwrap_or_default();
        // SAFETY: the response is ours until it is sent; Triton copies both texts, which end with zeros.
        unsafe {
            check(sys::TRITONBACKEND_ResponseSetStringParameter(
                self.raw.0.as_ptr(),
                name.as_ptr(),
                value.as_ptr(),
            ))
        }
    }

    /// Sends the response.
    ///
    /// # Errors
    /// The final response of the request has already been sent, or Triton's error.
    pub fn send(self, completion: Completion) -> Result<(), Error> {
        self.hand_over(completion, None)
    }

    /// Sends the response as an error, which is final.
    ///
    /// # Errors
    /// As [`UnsentResponse::send`].
    pub fn send_error(self, error: Error) -> Result<(), Error> {
        let error = match self.factory.0.names_codes {
            true => error.with_code_in_message(),
            false => error,
        };
        self.hand_over(Completion::Final, RawError::new(error))
    }

    fn hand_over(self, completion: Completion, error: Option<RawError>) -> Result<(), Error> {
        let Self { raw, factory } = self;
        factory.send_with(completion, move |flags| {
            let error = error.as_ref().map_or(ptr::null_mut(), RawError::as_ptr);
            let response = raw.0.as_ptr();
            // Triton owns the response from here on, even if sending fails.
            std::mem::forget(raw);
            // SAFETY: the response is alive and handed over; the error is only borrowed, and lives until the end of
            // this closure.
            unsafe { check(sys::TRITONBACKEND_ResponseSend(response, flags, error)) }
        })
    }

    /// Adds an output. Returns its uninitialised buffer of `byte_size` bytes; `None` if that is 0.
    fn allocate(
        &mut self,
        name: &CStr,
        data_type: DataType,
        shape: &[i64],
        byte_size: usize,
    ) -> Result<Option<NonNull<u8>>, Error> {
        use sys::TRITONSERVER_MemoryType as Memory;
        // SAFETY: the response is alive; Triton copies name and shape.
        let output = unsafe {
            get_object(|out| {
                sys::TRITONBACKEND_ResponseOutput(
                    self.as_ptr(),
                    out,
                    name.as_ptr(),
                    data_type.to_sys(),
                    shape.as_ptr(),
                    shape.len() as u32,
                )
            })
        }?;
        // In: the preferred memory. Out: the memory that the frontend chose.
        let mut memory = Memory::TRITONSERVER_MEMORY_CPU;
        let mut device = 0;
        if byte_size > SMALL_BYTES {
            wait_if_closing();
        }
        // SAFETY: the output lives as long as the response.
        let buffer = unsafe {
            get(ptr::null_mut(), |out| {
                sys::TRITONBACKEND_OutputBuffer(
                    output.as_ptr(),
                    out,
                    byte_size as u64,
                    &raw mut memory,
                    &raw mut device,
                )
            })
        }?;
        if byte_size == 0 {
            return Ok(None);
        }
        match NonNull::new(buffer.cast::<u8>()) {
            Some(buffer) if memory != Memory::TRITONSERVER_MEMORY_GPU => Ok(Some(buffer)),
            _ => Err(Error::new(
                ErrorCode::Unsupported,
                format!("output {name:?} was given no buffer in system memory"),
            )),
        }
    }

    fn as_ptr(&self) -> *mut sys::TRITONBACKEND_Response {
        self.raw.0.as_ptr()
    }
}

impl Drop for RawResponse {
    fn drop(&mut self) {
        // SAFETY: the response is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONBACKEND_ResponseDelete(self.0.as_ptr())) };
    }
}

/// Refuses a shape that does not match the number of elements: a client would read past them.
fn check_count(name: &CStr, shape: &[i64], num_elements: usize) -> Result<(), Error> {
    let product = shape
        .iter()
        .try_fold(1i64, |product, &size| product.checked_mul(size));
    if product.and_then(|product| usize::try_from(product).ok()) == Some(num_elements) {
        return Ok(());
    }
    Err(Error::internal(format!(
        "output {name:?} of shape {shape:?} has {num_elements} elements"
    )))
}
