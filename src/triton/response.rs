//! Responses: the factory that makes them, and one response at a time.
//!
//! A factory outlives its request: it is what answers after the request has been released, and what
//! still tells of a cancellation while Triton holds the request. Whoever answers one request shares one
//! factory, and the factory lets exactly one final response through: a frontend frees its state at the
//! final one, so that a later send would write into freed memory.

use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::error::{RawError, check, get, get_object};
use super::{DataType, Element, Error, ErrorCode, strings, sys};

/// Makes the responses of one request, on any thread; clones share the request's one final response.
#[derive(Clone, Debug)]
pub struct ResponseFactory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    raw: NonNull<sys::TRITONBACKEND_ResponseFactory>,
    /// Whether the final response has been sent. Held while sending, so that nothing can overtake.
    finished: Mutex<bool>,
    /// Whether the request has been released for good: then nobody but the factory can answer it.
    released: AtomicBool,
}

/// One response, to be filled and sent; deleted if it is dropped unsent.
///
/// Fill and send one response of a request before making the next: frontends that take their outputs in
/// shared memory write all of a request's responses to the same place.
#[derive(Debug)]
pub struct Response {
    raw: RawResponse,
    factory: ResponseFactory,
}

/// A response object that we must delete or send.
#[derive(Debug)]
struct RawResponse(NonNull<sys::TRITONBACKEND_Response>);

/// Whether a response is the request's last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// More will follow.
    Partial,
    /// Nothing will follow.
    Final,
}

// SAFETY: Triton's factory is reference counted with atomics, its cancel flag is atomic, and making a
// response only reads it. Sends of one request are serialised by `finished`.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}
// SAFETY: a response belongs to no thread; Triton allows sending from any.
unsafe impl Send for RawResponse {}

impl ResponseFactory {
    /// The factory of a request.
    ///
    /// # Safety
    /// `request` is alive and ours.
    pub(super) unsafe fn new(request: NonNull<sys::TRITONBACKEND_Request>) -> Result<Self, Error> {
        // SAFETY: the request is alive; the factory is ours.
        let raw = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseFactoryNew(out, request.as_ptr()))
        }?;
        Ok(Self(Arc::new(Inner {
            raw,
            finished: Mutex::new(false),
            released: AtomicBool::new(false),
        })))
    }

    /// Whether the client has taken the request back. Costs one atomic read.
    pub fn is_cancelled(&self) -> bool {
        // SAFETY: the factory is alive. It has no way to fail; if a newer server finds one, a request
        // that cannot be asked is not cancelled.
        unsafe {
            get(false, |out| {
                sys::TRITONBACKEND_ResponseFactoryIsCancelled(self.0.raw.as_ptr(), out)
            })
        }
        .unwrap_or(false)
    }

    /// Says that the request has been released for good. If the last clone of the factory is dropped before it has
    /// sent the final response, that is an error.
    pub(super) fn request_released(&self) {
        self.0.released.store(true, Ordering::Relaxed);
    }

    /// Whether the request's final response has been sent.
    pub fn is_finished(&self) -> bool {
        *self.0.finished.lock()
    }

    /// A response without outputs.
    pub fn new_response(&self) -> Result<Response, Error> {
        // SAFETY: the factory is alive; the response is ours.
        let raw = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseNewFromFactory(out, self.0.raw.as_ptr()))
        }?;
        Ok(Response {
            raw: RawResponse(raw),
            factory: self.clone(),
        })
    }

    /// Ends the request with no further response. An error if it has ended already.
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

    /// Ends the request with an error. An error here if it has ended already.
    pub fn send_error(&self, error: Error) -> Result<(), Error> {
        match self.new_response() {
            Ok(response) => response.send_error(error),
            // The client must not wait for ever, even where it cannot be told why.
            Err(_) => self.send_final(),
        }
    }

    fn send_with(
        &self,
        completion: Completion,
        send: impl FnOnce(u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        use sys::TRITONSERVER_ResponseCompleteFlag as Flag;
        let mut finished = self.0.finished.lock();
        if *finished {
            return Err(Error::internal(
                "the final response of this request has been sent already",
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
    /// Ends a released request that nobody has ended: its client must not wait for ever.
    fn send_last_words(&mut self) {
        if *self.finished.get_mut() || !*self.released.get_mut() {
            return;
        }
        use sys::TRITONSERVER_ResponseCompleteFlag as Flag;
        let flags = Flag::TRITONSERVER_RESPONSE_COMPLETE_FINAL.0;
        let error = RawError::new(gave_up());
        // SAFETY: the factory is alive; the response is ours.
        let response = unsafe {
            get_object(|out| sys::TRITONBACKEND_ResponseNewFromFactory(out, self.raw.as_ptr()))
        };
        let sent = match response {
            // SAFETY: the response is alive and given away; the error is only lent, and outlives the call.
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

/// What a client hears whose request was forgotten.
pub(super) fn gave_up() -> Error {
    Error::internal("the backend gave the request up without an answer")
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.send_last_words();
        // SAFETY: the factory is ours and not used again. A failed delete leaves nothing to do.
        let _ = unsafe { check(sys::TRITONBACKEND_ResponseFactoryDelete(self.raw.as_ptr())) };
    }
}

impl Response {
    /// Adds an output of numbers. `shape` has the batch dimension first if the model batches, and its
    /// product is the number of elements.
    pub fn output<T: Element>(
        &mut self,
        name: &CStr,
        shape: &[i64],
        elements: &[T],
    ) -> Result<(), Error> {
        self.output_pieces(name, shape, &[elements])
    }

    /// Adds an output of numbers that lie in several places, which are put together in the response.
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
            // SAFETY: the buffer holds the bytes of all pieces, and `place` is behind those of the ones
            // before, at most at its end; the frontend's memory is not ours.
            unsafe {
                place.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
                place = place.add(bytes.len());
            }
        }
        Ok(())
    }

    /// Adds an output of strings: one element each.
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

    /// Adds an output of strings of these lengths, which `write` writes into their places, one after the other:
    /// so that a large one never lies in two places.
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
            // SAFETY: the buffer holds `byte_size` bytes, which only this response writes.
            unsafe { buffer.write_bytes(0, byte_size) };
            // SAFETY: as above, and initialised.
            let buffer = unsafe { slice::from_raw_parts_mut(buffer.as_ptr(), byte_size) };
            for (i, place) in strings::places(lens, buffer).into_iter().enumerate() {
                write(i, place);
            }
        }
        Ok(())
    }

    /// Sends the response. After the request's final one nothing is sent, and that is an error.
    pub fn send(self, completion: Completion) -> Result<(), Error> {
        self.hand_over(completion, None)
    }

    /// Sends the response as an error, which is the request's last.
    pub fn send_error(self, error: Error) -> Result<(), Error> {
        self.hand_over(Completion::Final, RawError::new(error))
    }

    fn hand_over(self, completion: Completion, error: Option<RawError>) -> Result<(), Error> {
        let Self { raw, factory } = self;
        factory.send_with(completion, move |flags| {
            let error = error.as_ref().map_or(ptr::null_mut(), RawError::as_ptr);
            let response = raw.0.as_ptr();
            // The response is Triton's from here on, whatever comes of sending it.
            std::mem::forget(raw);
            // SAFETY: the response is alive and given away; the error is only lent, and lives to the
            // end of this closure.
            unsafe { check(sys::TRITONBACKEND_ResponseSend(response, flags, error)) }
        })
    }

    /// Adds an output and returns its buffer of `byte_size` bytes, uninitialised; `None` for no bytes.
    fn allocate(
        &mut self,
        name: &CStr,
        data_type: DataType,
        shape: &[i64],
        byte_size: usize,
    ) -> Result<Option<NonNull<u8>>, Error> {
        use sys::TRITONSERVER_MemoryType as Memory;
        // SAFETY: the response is alive; name and shape outlive the call, which copies them.
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
        // In: what we prefer. Out: what the frontend gave.
        let mut memory = Memory::TRITONSERVER_MEMORY_CPU;
        let mut device = 0;
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

/// A shape that does not fit its elements would make a client read past them.
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
