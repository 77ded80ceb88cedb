//! An inference request that the backend owns.
//!
//! ```text
//!  Triton --Execute--> Request --reschedule--> Triton, which hands it to a later Execute
//!                        | \---fail, drop----> answered with an error, released
//!                        \-----release-------> released; its ResponseFactory sends the final response
//! ```
//! So a request is never lost: Triton owns it, or this value does, or a factory still has to end it. A `Request` stays
//! on the thread of its Execute: Triton accesses a rescheduled request once more after it has queued it (server 25.10
//! and later), which is only safe while the next Execute cannot have begun. One that is not to be rescheduled can be
//! handed over to another thread, see [`Request::hand_over`].

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::slice;

use super::error::{check, get, get_object, get_text, to_utf8, utf8};
use super::response::abandoned;
use super::{Error, ErrorCode, Input, ResponseFactory, sys};

/// The request id of requests that only end a sequence.
pub(super) const END_OF_SEQUENCE: &CStr = c"inflight: the end of a sequence";

/// The parameter that asks for the code of an error in its message.
const RETURN_ERROR_CODE: &str = "return_error_code";
/// The longest request id or parameter name, in bytes.
const MAX_NAME_BYTES: usize = 4096;

/// A request that the backend owns. Dropping it answers it with an error and releases it.
#[derive(Debug)]
pub struct Request {
    /// Also makes the type `!Send`.
    raw: NonNull<sys::TRITONBACKEND_Request>,
    /// Sends its responses; made when it is first needed.
    factory: Option<ResponseFactory>,
    /// Whether it is part of a warm-up.
    is_warm_up: bool,
    /// Whether it was handed over to another thread.
    is_handed_over: bool,
}

/// A request that may change threads: kept for a later call, or handed over for good. Dropping it answers it, as for a
/// [`Request`].
#[derive(Debug)]
pub struct MovingRequest(Request);

// SAFETY: Triton's objects are not bound to a thread. What binds a request is that it can be rescheduled: one that is
// kept is received in an Execute call again, and one that is handed over cannot be rescheduled.
unsafe impl Send for MovingRequest {}

impl MovingRequest {
    /// The request, on its thread.
    pub fn receive(self) -> Request {
        self.0
    }
}

/// The sequence of Triton's batcher that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CorrelationId<'request> {
    /// A number, chosen by the client or counted up by Triton. Zero for no sequence: a warm-up request, or a null
    /// request that fills a gap in a direct batch.
    Number(u64),
    /// A string, chosen by the client.
    Text(&'request CStr),
}

impl CorrelationId<'_> {
    /// Whether the request belongs to no sequence. Such a request cannot be rescheduled.
    pub fn is_none(&self) -> bool {
        match self {
            Self::Number(number) => *number == 0,
            Self::Text(text) => text.is_empty(),
        }
    }
}

/// The position of a request in its sequence; by default neither its start nor its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestFlags(u32);

impl RequestFlags {
    /// Whether it is the first request of its sequence; in an iterative sequence, not rescheduled yet.
    pub fn is_start(self) -> bool {
        self.0 & sys::TRITONSERVER_RequestFlag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START.0 != 0
    }

    /// Whether it is the last of its sequence. Triton never sets this on an iterative sequence, but a client can.
    pub fn is_end(self) -> bool {
        self.0 & sys::TRITONSERVER_RequestFlag::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END.0 != 0
    }
}

/// The value of a request parameter. Triton also has raw bytes, but no frontend sends them, and their length is
/// unknown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterValue<'request> {
    /// True or false.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Double(f64),
    /// A string.
    String(&'request str),
    /// A string with more bytes than the caller accepts, which has not been read.
    TooLong,
}

impl fmt::Display for ParameterValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::Int(value) => value.fmt(f),
            Self::Double(value) => value.fmt(f),
            Self::String(value) => write!(f, "'{value}'"),
            Self::TooLong => f.write_str("a text that is too long"),
        }
    }
}

impl Request {
    /// Takes ownership of a request that was passed to Execute.
    ///
    /// # Safety
    /// The request is alive, nobody else answers or releases it, and Execute returns success: after an error Triton
    /// would answer and release it a second time.
    pub unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_Request>) -> Self {
        Self {
            raw,
            factory: None,
            is_warm_up: false,
            is_handed_over: false,
        }
    }

    /// The request id, if the client has set one.
    pub fn client_id(&self) -> Result<Option<&str>, Error> {
        // SAFETY: the request is alive.
        let id = unsafe {
            get(ptr::null(), |out| {
                sys::TRITONBACKEND_RequestId(self.as_ptr(), out)
            })
        }?;
        // SAFETY: the name lives as long as the request.
        let id = unsafe { name(id, "the request id") }?;
        Ok(if id.is_empty() { None } else { Some(id) })
    }

    /// Which sequence the request belongs to.
    pub fn correlation_id(&self) -> Result<CorrelationId<'_>, Error> {
        // Triton has one getter per kind, and calling the wrong one allocates an error. Strings are rare: only
        // clients choose them.
        // SAFETY: the request is alive.
        let number = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_RequestCorrelationId(self.as_ptr(), out)
            })
        };
        if let Ok(number) = number {
            return Ok(CorrelationId::Number(number));
        }
        // SAFETY: the request is alive, and so is the text for as long.
        unsafe { get_text(|out| sys::TRITONBACKEND_RequestCorrelationIdString(self.as_ptr(), out)) }
            .map(CorrelationId::Text)
    }

    /// The position of the request in its sequence.
    pub fn flags(&self) -> Result<RequestFlags, Error> {
        // SAFETY: the request is alive.
        unsafe { get(0, |out| sys::TRITONBACKEND_RequestFlags(self.as_ptr(), out)) }
            .map(RequestFlags)
    }

    /// The time limit that Triton knows, in microseconds; zero for none. A limit in the body of an HTTP generate
    /// request is unknown to Triton; it is one of the parameters.
    pub fn timeout_us(&self) -> Result<u64, Error> {
        // SAFETY: the request is alive.
        unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_InferenceRequestTimeoutMicroseconds(self.as_ptr(), out)
            })
        }
    }

    /// Whether the client has cancelled the request. If so, call [`Request::reschedule`] without answering it: Triton
    /// then answers it itself and frees its slot at once. A release would leave the slot occupied until the sequence
    /// idles out.
    pub fn is_cancelled(&self) -> bool {
        // SAFETY: the request is alive. The call only fails for a request that was never sent.
        unsafe {
            get(false, |out| {
                sys::TRITONBACKEND_RequestIsCancelled(self.as_ptr(), out)
            })
        }
        .unwrap_or(false)
    }

    /// The parameters of the request, unordered; a name may occur more than once. A string longer than `max_bytes` of
    /// its name is [`ParameterValue::TooLong`], and not read further.
    pub fn parameters(
        &self,
        max_bytes: impl Fn(&str) -> usize,
    ) -> Result<impl Iterator<Item = Result<(&str, ParameterValue<'_>), Error>>, Error> {
        // SAFETY: the request is alive.
        let count = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_RequestParameterCount(self.as_ptr(), out)
            })
        }?;
        Ok((0..count).map(move |index| self.parameter(index, &max_bytes)))
    }

    /// The input tensors.
    pub fn inputs(&self) -> Result<Vec<Input<'_>>, Error> {
        // SAFETY: the request is alive.
        let count = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_RequestInputCount(self.as_ptr(), out)
            })
        }?;
        (0..count)
            .map(|index| {
                // SAFETY: the request is alive and `index` is below the count.
                let raw = unsafe {
                    get_object(|out| {
                        sys::TRITONBACKEND_RequestInputByIndex(self.as_ptr(), index, out)
                    })
                }?;
                // SAFETY: the input lives as long as the request, which `'_` borrows.
                unsafe { Input::from_raw(raw) }
            })
            .collect()
    }

    /// Names of the outputs that the client requests. If it names none, Triton lists all outputs of the model.
    pub fn requested_outputs(&self) -> Result<Vec<&str>, Error> {
        // SAFETY: the request is alive.
        let count = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_RequestOutputCount(self.as_ptr(), out)
            })
        }?;
        (0..count)
            .map(|index| {
                // SAFETY: the request is alive, and so is the name for as long.
                let name = unsafe {
                    get_text(|out| sys::TRITONBACKEND_RequestOutputName(self.as_ptr(), index, out))
                }?;
                to_utf8(name, "an output's name")
            })
            .collect()
    }

    /// Whether the request was sent by [`super::ServedModel::end_sequence`], and is to be dismissed. A client that
    /// sends the same id gets an empty answer.
    pub fn only_ends_its_sequence(&self) -> bool {
        let id = self.client_id().ok().flatten();
        id.is_some() && END_OF_SEQUENCE.to_str().ok() == id
    }

    /// Whether the request has no outputs. This is true only of null requests: for others that name none, Triton lists
    /// all.
    pub fn wants_nothing(&self) -> bool {
        // SAFETY: the request is alive.
        let count = unsafe {
            get(0, |out| {
                sys::TRITONBACKEND_RequestOutputCount(self.as_ptr(), out)
            })
        };
        count == Ok(0)
    }

    /// The factory that answers the request. Created by the first call; later calls return the same one.
    pub fn response_factory(&mut self) -> Result<ResponseFactory, Error> {
        if let Some(factory) = &self.factory {
            return Ok(factory.clone());
        }
        // SAFETY: the request is alive.
        let factory = unsafe { ResponseFactory::new(self.raw, self.names_codes()) }?;
        Ok(self.factory.insert(factory).clone())
    }

    /// Whether the request wants the code of an error in its message.
    fn names_codes(&self) -> bool {
        let is_set = |it: Result<_, Error>| {
            matches!(it, Ok((RETURN_ERROR_CODE, ParameterValue::Bool(true))))
        };
        self.parameters(|_| 0)
            .is_ok_and(|mut parameters| parameters.any(is_set))
    }

    /// Sets the factory that answers the request: the one created in an earlier Execute of the same request. Call this
    /// before anything that may fail; from then on the request cannot get two final responses.
    pub fn answered_by(&mut self, factory: &ResponseFactory) {
        self.factory = Some(factory.clone());
    }

    /// Notes that the request is part of a warm-up, so that no error answers it: server 2.51 crashes then, more often
    /// than not.
    pub fn belongs_to_warm_up(&mut self) {
        self.is_warm_up = true;
    }

    /// Whether [`Request::belongs_to_warm_up`] was called.
    pub fn is_warm_up(&self) -> bool {
        self.is_warm_up
    }

    /// Keeps the request for a later Execute call of its instance, which may still reschedule it.
    pub fn keep(self) -> MovingRequest {
        MovingRequest(self)
    }

    /// Lets another thread have the request. It cannot be rescheduled any more.
    pub fn hand_over(mut self) -> MovingRequest {
        self.is_handed_over = true;
        MovingRequest(self)
    }

    /// Whether [`Request::hand_over`] was called.
    pub fn has_left_its_call(&self) -> bool {
        self.is_handed_over
    }

    /// Gives the request back to Triton, which passes it to a later Execute, or answers it if it was cancelled. If
    /// Triton refuses because the sequence has idled out, the request is returned with the error; so is one that was
    /// handed over.
    pub fn reschedule(self) -> Result<(), (Request, Error)> {
        use sys::TRITONSERVER_RequestReleaseFlag as Flag;
        if self.is_handed_over {
            return Err((
                self,
                Error::internal("the request has left its Execute call"),
            ));
        }
        match self.release_with(Flag::TRITONSERVER_REQUEST_RELEASE_RESCHEDULE) {
            Ok(()) => {
                self.forget();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Gives the request back to Triton for good and frees its slot. Its factory still has to send the final response;
    /// if it is dropped before, it sends an error. Without a factory the request is answered with an error.
    ///
    /// Release before sending the final response: a client that disconnects at the final response could otherwise
    /// set the cancel flag before the release, which then would not free the slot.
    pub fn release(self) {
        if self.factory.is_some() {
            self.release_all();
            self.forget();
        }
    }

    /// Answers the request with an error, unless its final response has been sent, and releases it. One of a warm-up
    /// ends without a response.
    pub fn fail(mut self, error: Error) {
        if self.is_warm_up {
            log::warn!("a request of the model_warmup is not served: {error}");
            return self.dismiss();
        }
        self.end(Some(error));
        self.forget();
    }

    /// Ends the request without a response and releases it. For null requests.
    pub fn dismiss(mut self) {
        self.end(None);
        self.forget();
    }

    /// Answers the request with an error and releases it, without ending its sequence: another request of the same
    /// sequence is in flight.
    ///
    /// Triton ends the sequence of a released request unless the request was cancelled, so this cancels it first.
    /// The two C types name the same object of Triton (`InferenceRequest`, in its `infer_request.h`).
    pub fn fail_beside_sequence(self, error: Error) {
        let request = self.as_ptr().cast::<sys::TRITONSERVER_InferenceRequest>();
        // SAFETY: the request is alive and ours, and an InferenceRequest.
        if let Err(refused) = unsafe { check(sys::TRITONSERVER_InferenceRequestCancel(request)) } {
            log::warn!("a request could not be cancelled: {refused}");
        }
        self.fail(error);
    }

    /// Identifies the request: the address of Triton's object, the same in every Execute that it is passed to.
    pub fn identity(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub(super) fn as_ptr(&self) -> *mut sys::TRITONBACKEND_Request {
        self.raw.as_ptr()
    }

    fn parameter(
        &self,
        index: u32,
        max_bytes: impl Fn(&str) -> usize,
    ) -> Result<(&str, ParameterValue<'_>), Error> {
        use sys::TRITONSERVER_ParameterType as Kind;
        let mut kind = Kind::TRITONSERVER_PARAMETER_STRING;
        let mut value: *const c_void = ptr::null();
        // SAFETY: the request is alive.
        let key = unsafe {
            get(ptr::null(), |out| {
                sys::TRITONBACKEND_RequestParameter(
                    self.as_ptr(),
                    index,
                    out,
                    &raw mut kind,
                    &raw mut value,
                )
            })
        }?;
        // SAFETY: the name lives as long as the request.
        let name = unsafe { name(key, "a parameter's name") }?;
        if value.is_null() {
            return Err(Error::invalid(format!("parameter '{name}' has no value")));
        }
        let value = match kind {
            Kind::TRITONSERVER_PARAMETER_BOOL => {
                // SAFETY: a value of this kind points to a C++ bool.
                ParameterValue::Bool(unsafe { value.cast::<bool>().read() })
            }
            Kind::TRITONSERVER_PARAMETER_INT => {
                // SAFETY: a value of this kind points to an int64_t.
                ParameterValue::Int(unsafe { value.cast::<i64>().read() })
            }
            Kind::TRITONSERVER_PARAMETER_DOUBLE => {
                // SAFETY: a value of this kind points to a double.
                ParameterValue::Double(unsafe { value.cast::<f64>().read() })
            }
            Kind::TRITONSERVER_PARAMETER_STRING => {
                // SAFETY: a value of this kind is a C string that lives as long as the request.
                match unsafe { text_of_at_most(value.cast(), max_bytes(name)) } {
                    Some(text) => {
                        ParameterValue::String(utf8(text, &format!("parameter '{name}'"))?)
                    }
                    None => ParameterValue::TooLong,
                }
            }
            other => {
                return Err(Error::new(
                    ErrorCode::Unsupported,
                    format!(
                        "parameter '{name}' has a type that is not supported ({})",
                        other.0
                    ),
                ));
            }
        };
        Ok((name, value))
    }

    /// Ends the request, with an error or without a response, and releases it. `self` must not be used afterwards.
    fn end(&mut self, error: Option<Error>) {
        let factory = self.response_factory();
        self.release_all();
        let sent = match (factory, error) {
            (Ok(factory), _) if factory.is_finished() => Ok(()),
            (Ok(factory), Some(error)) => factory.send_error(error),
            (Ok(factory), None) => factory.send_final(),
            (Err(error), _) => Err(error),
        };
        if let Err(error) = sent {
            log::error!("a request could not be answered: {error}");
        }
    }

    fn release_all(&self) {
        if let Some(factory) = &self.factory {
            factory.request_released();
        }
        let flag = sys::TRITONSERVER_RequestReleaseFlag::TRITONSERVER_REQUEST_RELEASE_ALL;
        if let Err(error) = self.release_with(flag) {
            log::error!("a request could not be released: {error}");
        }
    }

    /// On success Triton owns the request, and `self` must not be used again.
    fn release_with(&self, flag: sys::TRITONSERVER_RequestReleaseFlag) -> Result<(), Error> {
        // SAFETY: the request is alive and ours; no caller uses `self` again after success.
        unsafe { check(sys::TRITONBACKEND_RequestRelease(self.as_ptr(), flag.0)) }
    }

    /// Drops what `self` owns besides the request, which Triton owns again.
    fn forget(mut self) {
        self.factory = None;
        std::mem::forget(self);
    }
}

/// Reads a short string.
///
/// # Errors
/// It is too long or not UTF-8; the error calls it `what`.
///
/// # Safety
/// `text` is null or a C string that lives, unchanged, for `'request`.
unsafe fn name<'request>(text: *const c_char, what: &str) -> Result<&'request str, Error> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: not null, so a C string that lives for `'request`.
    match unsafe { text_of_at_most(text, MAX_NAME_BYTES) } {
        Some(text) => utf8(text, what),
        None => Err(Error::invalid(format!(
            "{what} has more than {MAX_NAME_BYTES} bytes; shorten it"
        ))),
    }
}

/// The bytes of a string, if it has at most `max_bytes`. No more than that is read: it may have hundreds of
/// megabytes.
///
/// # Safety
/// `text` is a C string that lives, unchanged, for `'request`.
unsafe fn text_of_at_most<'request>(
    text: *const c_char,
    max_bytes: usize,
) -> Option<&'request [u8]> {
    // SAFETY: a C string; no byte after its end is read.
    let len = unsafe { libc::strnlen(text, max_bytes.saturating_add(1)) };
    // SAFETY: the string has `len` bytes and lives for `'request`.
    (len <= max_bytes).then(|| unsafe { slice::from_raw_parts(text.cast(), len) })
}

impl Drop for Request {
    fn drop(&mut self) {
        self.end(Some(abandoned()));
    }
}
