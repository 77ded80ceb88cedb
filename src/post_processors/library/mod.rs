//! A user's shared library: opened, looked through, called, closed. The only part of this room that is unsafe.
//!
//! What is safe here is so as far as the library keeps the contract of `include/inflight_logits_processor.h`: who may
//! write a config.pbtxt may run code in the server.

mod abi;

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use crate::base::{ClientId, SequenceId, TokenId};
use crate::post_processors::guarded_logits::GuardedLogits;

/// An open library.
struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: the handle is only closed with, once, and that may be done on any thread.
unsafe impl Send for Library {}
// SAFETY: nothing can be done with a shared reference.
unsafe impl Sync for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle is of `dlopen`, and closed here only. Whatever is called in the library holds
        // an `Arc` of this.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

impl Library {
    fn open(path: &Path) -> Result<Self, String> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the path is a C string. What the library does when it is opened is its user's choice.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let handle = NonNull::new(handle).ok_or_else(last_error)?;
        Ok(Self { handle })
    }

    /// The table that the library gives.
    fn table(&self) -> Result<NonNull<abi::Table>, String> {
        let name = abi::ENTRY_POINT;
        // SAFETY: the handle is open and the name a C string.
        let symbol = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        let name = name.to_string_lossy();
        if symbol.is_null() {
            let error = last_error();
            return Err(format!("it does not export {name}(): {error}"));
        }
        // SAFETY: the header says what the function of this name is.
        let get_table: abi::GetTable = unsafe { std::mem::transmute(symbol) };
        // SAFETY: as the header says, once for each load.
        let table = unsafe { get_table() }.cast_mut();
        NonNull::new(table)
            .filter(|table| table.is_aligned())
            .ok_or_else(|| format!("{name}() gives no table"))
    }
}

/// What the last call of `dlopen` or `dlsym` on this thread complained about.
fn last_error() -> String {
    // SAFETY: always allowed; the text is this thread's until its next call.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "no reason is given".to_owned();
    }
    // SAFETY: it is not null, so it is a C string.
    let error = unsafe { CStr::from_ptr(error) };
    error.to_string_lossy().into_owned()
}

/// Opens a library, and gives its processors in the order of its table.
///
/// # Errors
/// It cannot be opened, or its table is not what the header says.
pub(super) fn open(path: &Path) -> Result<Vec<Arc<ForeignProcessor>>, String> {
    let library = Arc::new(Library::open(path)?);
    let table = library.table()?.as_ptr();
    // SAFETY: every version of the table begins with its version.
    let version = unsafe { (&raw const (*table).abi_version).read() };
    if version != abi::ABI_VERSION {
        return Err(format!(
            "it was made for version {version} of inflight_logits_processor.h, and this is version {}; \
             compile it anew",
            abi::ABI_VERSION
        ));
    }
    // SAFETY: a table of this version has all the fields, and stays as it is.
    let table = unsafe { &*table };
    let num_processors = table.num_processors;
    if !(1..=abi::MAX_PROCESSORS).contains(&num_processors) {
        return Err(format!(
            "its table has {num_processors} processors; 1 to {} are possible",
            abi::MAX_PROCESSORS
        ));
    }
    if table.processors.is_null() || !table.processors.is_aligned() {
        return Err("its table has no processors".to_owned());
    }
    // SAFETY: the header says that there are so many, and that they stay.
    let processors = unsafe { slice::from_raw_parts(table.processors, num_processors as usize) };
    let processors = processors.iter().enumerate();
    processors
        .map(|(n, processor)| {
            let name = name_of(processor).map_err(|error| format!("processor {n}: {error}"))?;
            if processor.process.is_some() == processor.process_batch.is_some() {
                return Err(format!(
                    "processor '{name}' must have one of process and process_batch"
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
    // SAFETY: the header says that it is a C string, and stays.
    let name = unsafe { CStr::from_ptr(processor.name) };
    match name.to_str() {
        Ok(name) if (1..=MAX_NAME_BYTES).contains(&name.len()) => Ok(name.to_owned()),
        _ => Err(format!(
            "its name is not a text of 1 to {MAX_NAME_BYTES} bytes of UTF-8"
        )),
    }
}

/// A processor of a library.
pub(super) struct ForeignProcessor {
    name: String,
    raw: abi::Processor,
    /// Open for as long as anything of it can be called.
    _library: Arc<Library>,
}

// SAFETY: the header demands that its functions may be called on any thread, several at the same time. Its
// pointers are handed to them, and not looked at.
unsafe impl Send for ForeignProcessor {}
// SAFETY: as above.
unsafe impl Sync for ForeignProcessor {}

impl ForeignProcessor {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it takes all requests of a step at once.
    pub(super) fn is_batched(&self) -> bool {
        self.raw.process_batch.is_some()
    }

    /// Makes the state of a request.
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
            // SAFETY: all pointers are good for the call, and the library is open.
            let status =
                unsafe { create(self.raw.context, &request, &mut raw, error.as_mut_ptr()) };
            error.result(status)?;
        }
        Ok(State {
            processor: Arc::clone(self),
            raw,
        })
    }

    /// Has the logits of one token processed: as a batch of one, if it takes batches. Nothing else may be done
    /// with its state meanwhile.
    pub(super) fn process(&self, mut row: Row<'_>) -> Result<(), String> {
        let Some(process) = self.raw.process else {
            let results = self.process_batch(slice::from_mut(&mut row));
            return results.into_iter().collect();
        };
        let mut error = ErrorText::default();
        let mut entry = row.entry(&mut error);
        // SAFETY: the entry's pointers are good for the call, the logits are borrowed for nobody else, and
        // the library is open.
        let status = unsafe { process(self.raw.context, &mut entry) };
        error.result(status)
    }

    /// Has the logits of several tokens processed, one result each. Nothing else may be done with their states
    /// meanwhile.
    ///
    /// # Panics
    /// Unless it is batched.
    pub(super) fn process_batch(&self, rows: &mut [Row<'_>]) -> Vec<Result<(), String>> {
        let process = self.raw.process_batch.expect("it takes all at once");
        let mut errors = vec![ErrorText::default(); rows.len()];
        let rows = rows.iter_mut().zip(&mut errors);
        let mut entries: Vec<_> = rows.map(|(row, error)| row.entry(error)).collect();
        // SAFETY: as in `process`, for each of the entries.
        unsafe { process(self.raw.context, entries.as_mut_ptr(), entries.len()) };
        let statuses = entries.iter().map(|entry| entry.status);
        let results = statuses.zip(&errors);
        results
            .map(|(status, error)| error.result(status))
            .collect()
    }
}

/// What a processor keeps of a request.
pub(super) struct State {
    processor: Arc<ForeignProcessor>,
    raw: *mut c_void,
}

// SAFETY: the header says that it moves between threads.
unsafe impl Send for State {}

impl Drop for State {
    fn drop(&mut self) {
        let ForeignProcessor { raw, .. } = &*self.processor;
        // Without `create` there is nothing to destroy.
        if let (Some(_), Some(destroy)) = (raw.create, raw.destroy) {
            // SAFETY: `create` has made it, and nothing uses it after this. The library is open.
            unsafe { destroy(raw.context, self.raw) };
        }
    }
}

/// Whose logits they are.
#[derive(Clone, Copy)]
pub(super) struct Ids<'a> {
    pub(super) sequence: SequenceId,
    /// What its client calls it.
    pub(super) client_request: Option<&'a CStr>,
    pub(super) client: Option<ClientId>,
}

/// A token that is to be chosen.
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
            // Of the whole memory, so that a write to a guard is no more than that.
            logits: memory.as_mut_ptr().wrapping_add(start),
            stream: ptr::null_mut(),
            state: self.state.raw,
            error: error.as_mut_ptr(),
            status: 0,
        }
    }
}

/// Where a processor writes why it cannot go on.
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

    /// What came of a call that gave `status`.
    fn result(&self, status: i32) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let bytes: Vec<u8> = self.0.iter().map(|&byte| byte as u8).collect();
        let end = bytes.iter().position(|&byte| byte == 0);
        let text = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
        Err(match text.trim() {
            "" => format!("it gives no reason for status {status}"),
            text => text.to_owned(),
        })
    }
}
