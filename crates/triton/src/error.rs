//! Triton's errors as values: a code and a message, without a foreign object behind them.
//!
//! Triton returns errors as objects that the receiver must delete, or null for success. [`check`] turns such a pointer
//! into a `Result` and deletes the object.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{self, NonNull};

use thiserror::Error as ThisError;

use super::sys;
use inflight_base::{LoadError, RequestError, StepError};

/// The kind of failure, which decides the client's gRPC status and HTTP code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// Unknown; also every code that a newer server may add.
    Unknown,
    /// A fault of the backend or the server.
    Internal,
    /// Something that was named does not exist.
    NotFound,
    /// The client or the configuration must change something.
    InvalidArg,
    /// Not possible now: stopping, overloaded, or too late.
    Unavailable,
    /// The server or the backend cannot do it at all.
    Unsupported,
    /// Something with this name exists already.
    AlreadyExists,
    /// The client cancelled the request.
    Cancelled,
}

/// An error for Triton or from it.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[error("{message}")]
pub struct Error {
    code: ErrorCode,
    message: String,
}

impl Error {
    /// An error with the message that the client or the server's log shows.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// An error of kind [`ErrorCode::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    /// An error of kind [`ErrorCode::InvalidArg`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArg, message)
    }

    /// The kind of failure.
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with the name of its code before the message, for clients of streams, which get nothing but the
    /// message.
    pub(super) fn with_code_in_message(self) -> Self {
        let name = match self.code {
            ErrorCode::Unknown => "UNKNOWN",
            ErrorCode::Internal => "INTERNAL",
            ErrorCode::NotFound => "NOT_FOUND",
            ErrorCode::InvalidArg => "INVALID_ARG",
            ErrorCode::Unavailable => "UNAVAILABLE",
            ErrorCode::Unsupported => "UNSUPPORTED",
            ErrorCode::AlreadyExists => "ALREADY_EXISTS",
            ErrorCode::Cancelled => "CANCELLED",
        };
        Self::new(self.code, format!("{name}: {}", self.message))
    }

    /// Triton's object for this error, which the receiver must delete.
    pub fn into_raw(self) -> *mut sys::TRITONSERVER_Error {
        let message = to_c_string(self.message);
        // SAFETY: the message is a C string that outlives the call; Triton copies it.
        unsafe { sys::TRITONSERVER_ErrorNew(self.code.to_sys(), message.as_ptr()) }
    }
}

impl From<RequestError> for Error {
    fn from(error: RequestError) -> Self {
        let code = match error {
            RequestError::Option { .. }
            | RequestError::UnknownOption { .. }
            | RequestError::Invalid(_) => ErrorCode::InvalidArg,
            RequestError::InFlight(_) => ErrorCode::AlreadyExists,
            RequestError::NotFound(_) => ErrorCode::NotFound,
            RequestError::Busy(_) => ErrorCode::Unavailable,
            RequestError::Internal(_) => ErrorCode::Internal,
        };
        Self::new(code, error.to_string())
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        let code = match error {
            LoadError::Knob { .. }
            | LoadError::UnknownKnob { .. }
            | LoadError::ForeignKnob { .. }
            | LoadError::Several(_)
            | LoadError::Config { .. }
            | LoadError::File { .. }
            | LoadError::Tensor { .. } => ErrorCode::InvalidArg,
            LoadError::Resource(_) => ErrorCode::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}

impl From<StepError> for Error {
    fn from(error: StepError) -> Self {
        Self::internal(error.to_string())
    }
}

impl ErrorCode {
    fn to_sys(self) -> sys::TRITONSERVER_Error_Code {
        use sys::TRITONSERVER_Error_Code as Code;
        match self {
            Self::Unknown => Code::TRITONSERVER_ERROR_UNKNOWN,
            Self::Internal => Code::TRITONSERVER_ERROR_INTERNAL,
            Self::NotFound => Code::TRITONSERVER_ERROR_NOT_FOUND,
            Self::InvalidArg => Code::TRITONSERVER_ERROR_INVALID_ARG,
            Self::Unavailable => Code::TRITONSERVER_ERROR_UNAVAILABLE,
            Self::Unsupported => Code::TRITONSERVER_ERROR_UNSUPPORTED,
            Self::AlreadyExists => Code::TRITONSERVER_ERROR_ALREADY_EXISTS,
            Self::Cancelled => Code::TRITONSERVER_ERROR_CANCELLED,
        }
    }

    fn from_sys(code: sys::TRITONSERVER_Error_Code) -> Self {
        use sys::TRITONSERVER_Error_Code as Code;
        match code {
            Code::TRITONSERVER_ERROR_INTERNAL => Self::Internal,
            Code::TRITONSERVER_ERROR_NOT_FOUND => Self::NotFound,
            Code::TRITONSERVER_ERROR_INVALID_ARG => Self::InvalidArg,
            Code::TRITONSERVER_ERROR_UNAVAILABLE => Self::Unavailable,
            Code::TRITONSERVER_ERROR_UNSUPPORTED => Self::Unsupported,
            Code::TRITONSERVER_ERROR_ALREADY_EXISTS => Self::AlreadyExists,
            Code::TRITONSERVER_ERROR_CANCELLED => Self::Cancelled,
            _ => Self::Unknown,
        }
    }
}

/// An error object of Triton, which we must delete.
pub(super) struct RawError(NonNull<sys::TRITONSERVER_Error>);

impl RawError {
    /// The object of an error, to be passed to a function of Triton's. `None` if Triton cannot create it.
    pub(super) fn new(error: Error) -> Option<Self> {
        NonNull::new(error.into_raw()).map(Self)
    }

    pub(super) fn as_ptr(&self) -> *mut sys::TRITONSERVER_Error {
        self.0.as_ptr()
    }
}

impl Drop for RawError {
    fn drop(&mut self) {
        // SAFETY: the object is ours and not used again.
        unsafe { sys::TRITONSERVER_ErrorDelete(self.0.as_ptr()) }
    }
}

/// The outcome of a call: null is success, anything else is an error object, which becomes a value.
///
/// # Safety
/// `raw` is null or an error object that the caller owns and does not use again.
pub(super) unsafe fn check(raw: *mut sys::TRITONSERVER_Error) -> Result<(), Error> {
    let Some(raw) = NonNull::new(raw).map(RawError) else {
        return Ok(());
    };
    // SAFETY: the object lives until `raw` is dropped at the end of this function.
    let code = unsafe { sys::TRITONSERVER_ErrorCode(raw.as_ptr()) };
    // SAFETY: as above; the message lives as long as its error and is copied here.
    let message = unsafe { copy_text(sys::TRITONSERVER_ErrorMessage(raw.as_ptr())) };
    Err(Error::new(ErrorCode::from_sys(code), message))
}

/// Calls one of Triton's getters, which fill an out-parameter, and returns what it filled in.
///
/// # Safety
/// `getter` returns null or an error object that the caller owns.
pub(super) unsafe fn get<T>(
    initial: T,
    getter: impl FnOnce(*mut T) -> *mut sys::TRITONSERVER_Error,
) -> Result<T, Error> {
    let mut value = initial;
    // SAFETY: the caller's promise about the returned pointer.
    unsafe { check(getter(&raw mut value)) }?;
    Ok(value)
}

/// Calls a getter that fills in a pointer to an object; null without an error is an error too.
///
/// # Safety
/// As of [`get`].
pub(super) unsafe fn get_object<T>(
    getter: impl FnOnce(*mut *mut T) -> *mut sys::TRITONSERVER_Error,
) -> Result<NonNull<T>, Error> {
    // SAFETY: the caller's promise, passed on.
    let object = unsafe { get(ptr::null_mut(), getter) }?;
    NonNull::new(object).ok_or_else(|| Error::internal("Triton returned a null object"))
}

/// Calls a getter that fills in a C string.
///
/// # Safety
/// As of [`get`]; the string lives and does not change for as long as `'a`.
pub(super) unsafe fn get_text<'a>(
    getter: impl FnOnce(*mut *const c_char) -> *mut sys::TRITONSERVER_Error,
) -> Result<&'a CStr, Error> {
    // SAFETY: the caller's promise, passed on.
    let text = unsafe { get(ptr::null(), getter) }?;
    if text.is_null() {
        return Ok(c"");
    }
    // SAFETY: not null, so a C string; it lives as long as the caller says.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// The text as UTF-8, or an error that names it and shows where it stops being UTF-8.
pub(super) fn to_utf8<'a>(text: &'a CStr, what: &str) -> Result<&'a str, Error> {
    utf8(text.to_bytes(), what)
}

/// The bytes as UTF-8, or an error that shows where they stop being UTF-8.
pub(super) fn utf8<'a>(text: &'a [u8], what: &str) -> Result<&'a str, Error> {
    std::str::from_utf8(text).map_err(|error| {
        // It can be megabytes long.
        let (start, end) = (error.valid_up_to(), text.len());
        let shown = text[start..end.min(start + 16)].escape_ascii();
        Error::invalid(format!(
            "{what} is not valid UTF-8 from byte {start} on: \"{shown}\""
        ))
    })
}

/// The text for C. A NUL inside would cut it short, so it becomes the replacement character.
pub(super) fn to_c_string(text: impl Into<String>) -> CString {
    let text = text.into();
    CString::new(text).unwrap_or_else(|error| {
        let bytes = error.into_vec();
        let text = String::from_utf8_lossy(&bytes).replace('\0', "\u{fffd}");
        CString::new(text).unwrap_or_default()
    })
}

/// # Safety
/// `text` is null or a C string.
unsafe fn copy_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string, copied before anything else runs.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_inside_a_text_does_not_cut_it_short() {
        assert_eq!(to_c_string("a\0b").as_c_str(), c"a\u{fffd}b");
        assert_eq!(to_c_string("plain").as_c_str(), c"plain");
    }

    #[test]
    fn every_code_survives_the_way_to_triton_and_back() {
        for code in [
            ErrorCode::Unknown,
            ErrorCode::Internal,
            ErrorCode::NotFound,
            ErrorCode::InvalidArg,
            ErrorCode::Unavailable,
            ErrorCode::Unsupported,
            ErrorCode::AlreadyExists,
            ErrorCode::Cancelled,
        ] {
            assert_eq!(ErrorCode::from_sys(code.to_sys()), code);
        }
    }

    #[test]
    fn what_the_client_must_change_is_an_invalid_argument() {
        let error = RequestError::UnknownOption {
            name: "temprature".to_owned(),
            nearest: Some("temperature".to_owned()),
        };
        let text = error.to_string();
        assert_eq!(Error::from(error), Error::invalid(text));
        let in_flight = RequestError::InFlight("a".to_owned());
        assert_eq!(Error::from(in_flight).code(), ErrorCode::AlreadyExists);
        let step = Error::from(StepError("NaN".to_owned()));
        assert_eq!(step.code(), ErrorCode::Internal);
        let named = Error::from(RequestError::NotFound("no".to_owned())).with_code_in_message();
        assert_eq!(
            (named.code(), named.message()),
            (ErrorCode::NotFound, "NOT_FOUND: no")
        );
    }
}
