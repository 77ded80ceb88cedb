//! A user's shared library: loads, checks, calls and closes it. The only unsafe part of this room.
//!
//! Soundness depends on the library keeping the contract of `include/inflight_logits_processor.h`: whoever can write a
//! config.pbtxt can run code in the server.

mod abi;

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use crate::guarded_logits::GuardedLogits;
use inflight_base::{ClientId, SequenceId, TokenId};

/// An open library.
struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: the handle may be closed on any thread, and is closed only once.
unsafe impl Send for Library {}
// SAFETY: a shared reference only allows `dlsym`, which is thread-safe.
unsafe impl Sync for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle comes from `dlopen` and is closed only here. All callers of the library hold an `Arc` of
        // this.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

impl Library {
    fn open(path: &Path) -> Result<Self, String> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the path is a C string. The user chose the library and so the code that it runs when loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let handle = NonNull::new(handle).ok_or_else(last_error)?;
        Ok(Self { handle })
    }

    /// The table of processors that the library returns.
    fn table(&self) -> Result<NonNull<abi::Table>, String> {
        let name = abi::ENTRY_POINT;
        // SAFETY: the handle is open and the name a C string.
        let symbol = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        let name = name.to_string_lossy();
        if symbol.is_null() {
            let error = last_error();
            return Err(format!("it does not export {name}(): {error}"));
        }
        // SAFETY: the header defines the type of the function with this name.
        let get_table: abi::GetTable = unsafe { std::mem::transmute(symbol) };
        // SAFETY: the header allows one call per load.
        let table = unsafe { get_table() }.cast_mut();
        NonNull::new(table)
            .filter(|table| table.is_aligned())
            .ok_or_else(|| format!("{name}() does not return a valid table"))
    }
}

/// The error of the last `dlopen` or `dlsym` call on this thread.
fn last_error() -> String {
    // SAFETY: always allowed; the text is valid until this thread's next call.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: a non-null result is a C string.
    let error = unsafe { CStr::from_ptr(error) };
    error.to_string_lossy().into_owned()
}

/// Opens a library. Returns its processors in the order of its table.
///
/// # Errors
/// The library cannot be opened, or its table does not conform to the header.
pub(super) fn open(path: &Path) -> Result<Vec<Arc<ForeignProcessor>>, String> {
    let library = Arc::new(Library::open(path)?);
    let table = library.table()?.as_ptr();
    // SAFETY: every version of the table starts with its version.
    let version = unsafe { (&raw const (*table).abi_version).read() };
    if version != abi::ABI_VERSION {
        return Err(format!(
            "it was built for version {version} of inflight_logits_processor.h, but this backend needs version {}; \
             rebuild it",
            abi::ABI_VERSION
        ));
    }
    // SAFETY: a table of this version has all fields and does not change.
    let table = unsafe { &*table };
    let num_processors = table.num_processors;
    if !(1..=abi::MAX_PROCESSORS).contains(&num_processors) {
        return Err(format!(
            "its table has {num_processors} processors; allowed are 1 to {}",
            abi::MAX_PROCESSORS
        ));
    }
    if table.processors.is_null() || !table.processors.is_aligned() {
        return Err("the table's pointer to processors is invalid".to_owned());
    }
    // SAFETY: by the header, the array has this length and stays valid.
    let processors = unsafe { slice::from_raw_parts(table.processors, num_processors as usize) };
    let processors = processors.iter().enumerate();
    processors
        .map(|(n, processor)| {
            let name = name_of(processor).map_err(|error| format!("processor {n}: {error}"))?;
            if processor.process.is_some() == processor.process_batch.is_some() {
                return Err(format!(
                    "processor '{name}' must set exactly one of process and process_batch"
                ));
            }
            Ok(Arc::new(ForeignProcessor {
                name,
                raw: *processor,
                _library: Arc::clone(&library),
            }))
        })
        .collect()
}

fn name_of(processor: &abi::Processor) -> Result<String, String> {
    const MAX_NAME_BYTES: usize = 256;
    if processor.name.is_null() {
        return Err("it has no name".to_owned());
    }
    // SAFETY: by the header, the name is a C string and stays valid.
    let name = unsafe { CStr::from_ptr(processor.name) };
    match name.to_str() {
        Ok(name) if (1..=MAX_NAME_BYTES).contains(&name.len()) => Ok(name.to_owned()),
        _ => Err(format!(
            "its name is not 1 to {MAX_NAME_BYTES} bytes of UTF-8"
        )),
    }
}

/// A processor of a library.
pub(super) struct ForeignProcessor {
    name: String,
    raw: abi::Processor,
    /// Keeps the library open while the processor can be called.
    _library: Arc<Library>,
}

// SAFETY: by the header, the functions can be called on any thread, also concurrently. The pointers are only passed to
// them.
unsafe impl Send for ForeignProcessor {}
// SAFETY: as above.
unsafe impl Sync for ForeignProcessor {}

impl ForeignProcessor {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the processor handles all requests of a step in one call.
    pub(super) fn is_batched(&self) -> bool {
        self.raw.process_batch.is_some()
    }

    /// Creates the state of a request.
    pub(super) fn create(
        self: &Arc<Self>,
        ids: Ids<'_>,
        arguments: &CStr,
        vocab_size: u32,
    ) -> Result<State, String> {
        let mut raw = ptr::null_mut();
        if let Some(create) = self.raw.create {
            let request = abi::Request {
                request_id: ids.sequence.0,
                client_request_id: ids.client_request.map_or(ptr::null(), CStr::as_ptr),
                client_id: ids.client.unwrap_or_default().0,
                has_client_id: ids.client.is_some().into(),
                arguments: arguments.as_ptr(),
                vocab_size,
            };
            let mut error = ErrorText::default();
            // SAFETY: all pointers are valid during the call, and the library is open.
            let status =
                unsafe { create(self.raw.context, &request, &mut raw, error.as_mut_ptr()) };
            error.result(status)?;
        }
        Ok(State {
            processor: Arc::clone(self),
            raw,
        })
    }

    /// Processes the logits of one token, as a batch of one if the processor is batched. The caller must have exclusive
    /// access to the row's state.
    pub(super) fn process(&self, mut row: Row<'_>) -> Result<(), String> {
        let Some(process) = self.raw.process else {
            let results = self.process_batch(slice::from_mut(&mut row));
            return results.into_iter().collect();
        };
        let mut error = ErrorText::default();
        let mut entry = row.entry(&mut error);
        // SAFETY: the entry's pointers are valid during the call, the logits are borrowed exclusively, and the library
        // is open.
        let status = unsafe { process(self.raw.context, &mut entry) };
        error.result(status)
    }

    /// Processes the logits of several tokens. Returns one result per row. The caller must have exclusive access to the
    /// rows' states.
    ///
    /// # Panics
    /// The processor is not batched.
    pub(super) fn process_batch(&self, rows: &mut [Row<'_>]) -> Vec<Result<(), String>> {
        let process = self.raw.process_batch.expect("the processor is batched");
        let mut errors = vec![ErrorText::default(); rows.len()];
        let rows = rows.iter_mut().zip(&mut errors);
        let mut entries: Vec<_> = rows.map(|(row, error)| row.entry(error)).collect();
        // SAFETY: as in `process`, for each entry.
        unsafe { process(self.raw.context, entries.as_mut_ptr(), entries.len()) };
        let statuses = entries.iter().map(|entry| entry.status);
        let results = statuses.zip(&errors);
        results
            .map(|(status, error)| error.result(status))
            .collect()
    }
}

/// A processor's state for one request.
pub(super) struct State {
    processor: Arc<ForeignProcessor>,
    raw: *mut c_void,
}

// SAFETY: by the header, the state may move between threads.
unsafe impl Send for State {}

impl Drop for State {
    fn drop(&mut self) {
        let ForeignProcessor { raw, .. } = &*self.processor;
        // Without `create` there is nothing to destroy.
        if let (Some(_), Some(destroy)) = (raw.create, raw.destroy) {
            // SAFETY: `create` made the state, and nothing uses it afterwards. The library is open.
            unsafe { destroy(raw.context, self.raw) };
        }
    }
}

/// The ids of the request whose logits are processed.
#[derive(Clone, Copy)]
pub(super) struct Ids<'a> {
    pub(super) sequence: SequenceId,
    /// The client's request id.
    pub(super) client_request: Option<&'a CStr>,
    pub(super) client: Option<ClientId>,
}

/// A token to be chosen: its logits and its context.
pub(super) struct Row<'a> {
    pub(super) ids: Ids<'a>,
    pub(super) beam: u32,
    pub(super) num_prompt_tokens: usize,
    pub(super) tokens: &'a [TokenId],
    pub(super) logits: &'a mut GuardedLogits,
    pub(super) state: &'a State,
}

impl Row<'_> {
    fn entry(&mut self, error: &mut ErrorText) -> abi::Entry {
        let vocab_size = self.logits.get().len() as u32;
        let (memory, start) = self.logits.memory_mut();
        abi::Entry {
            request_id: self.ids.sequence.0,
            client_request_id: self.ids.client_request.map_or(ptr::null(), CStr::as_ptr),
            client_id: self.ids.client.unwrap_or_default().0,
            has_client_id: self.ids.client.is_some().into(),
            beam: self.beam,
            num_prompt_tokens: self.num_prompt_tokens as u32,
            num_tokens: self.tokens.len() as u32,
            vocab_size,
            tokens: self.tokens.as_ptr(),
            // Derived from the whole allocation, so that a write to a guard stays within it.
            logits: memory.as_mut_ptr().wrapping_add(start),
            stream: ptr::null_mut(),
            state: self.state.raw,
            error: error.as_mut_ptr(),
            status: 0,
        }
    }
}

/// The buffer into which a processor writes its error.
#[derive(Clone)]
struct ErrorText([c_char; abi::ERROR_SIZE]);

impl Default for ErrorText {
    fn default() -> Self {
        Self([0; abi::ERROR_SIZE])
    }
}

impl ErrorText {
    fn as_mut_ptr(&mut self) -> *mut c_char {
        self.0.as_mut_ptr()
    }

    /// The result of a call that returned `status`.
    fn result(&self, status: i32) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let bytes: Vec<u8> = self.0.iter().map(|&byte| byte as u8).collect();
        let end = bytes.iter().position(|&byte| byte == 0);
        let text = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
        Err(match text.trim() {
            "" => format!("it returned status {status} without a reason"),
            text => text.to_owned(),
        })
    }
}
