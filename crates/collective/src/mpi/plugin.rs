//! The opened plug-in, and messages that own their bytes.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use inflight_mpi_interface::{
    ENTRY_POINT, EntryPoint, Handle, Interface, TOO_FEW_THREADS, VERSION, World,
};

use super::super::error::CollectiveError;

/// The plug-in. It is never closed.
#[derive(Clone, Copy)]
pub(super) struct Plugin(&'static Interface);

/// What a message is, and its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(c_int);

/// A message on its way to another rank. If it is dropped before, its memory is left to MPI.
pub(super) struct Sending {
    plugin: Plugin,
    handle: Handle,
    /// `None` when it was sent.
    words: Option<Arc<Vec<u32>>>,
}

/// A message on its way from another rank. If it is dropped before, its memory is left to MPI.
pub(super) struct Receiving {
    plugin: Plugin,
    handle: Handle,
    words: Vec<u32>,
    is_done: bool,
}

impl Tag {
    /// Sessions have different tags until there were so many others: MPI promises 15 bits.
    pub(super) const NUM_SESSIONS: u32 = 4096;

    /// A tag of a session, of which there are eight.
    pub(super) fn new(session: u32, kind: u8) -> Self {
        let session = (session % Self::NUM_SESSIONS) as c_int;
        Self(8 * session + c_int::from(kind % 8))
    }
}

impl Plugin {
    /// Opens the plug-in.
    ///
    /// # Errors
    /// It is not there, needs a library that is not there, or is of another version.
    pub(super) fn open(path: &Path) -> Result<Self, CollectiveError> {
        let failed = |reason: String| {
            CollectiveError::World(format!("{} cannot be opened: {reason}", path.display()))
        };
        let name = CString::new(path.as_os_str().as_bytes());
        let name = name.map_err(|error| failed(error.to_string()))?;
        // MPI opens libraries of its own, which may look for its functions.
        let flags = libc::RTLD_NOW | libc::RTLD_GLOBAL;
        // SAFETY: the name is a C string; MPI's library does nothing when it is opened.
        let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if library.is_null() {
            return Err(failed(linker_error()));
        }
        // SAFETY: the library is open, the name is a C string.
        let symbol: *mut c_void = unsafe { libc::dlsym(library, ENTRY_POINT.as_ptr()) };
        if symbol.is_null() {
            return Err(failed(linker_error()));
        }
        // SAFETY: the function of this name has this type in every version.
        let entry_point = unsafe { mem::transmute::<*mut c_void, EntryPoint>(symbol) };
        // SAFETY: it may be called at any time, and what it returns is never freed. The version comes first in every
        // version.
        let interface = unsafe { &*entry_point() };
        match interface.version {
            VERSION => Ok(Self(interface)),
            version => Err(failed(format!(
                "it is of version {version}, and the library beside it needs version {VERSION}: install both of one build"
            ))),
        }
    }

    /// Waits until all processes have joined.
    pub(super) fn join(self) -> Result<World, CollectiveError> {
        let mut world = World::default();
        // SAFETY: the world is written before it returns.
        self.check(unsafe { (self.0.join)(&raw mut world) })?;
        Ok(world)
    }

    /// Waits until all processes leave. For the thread of `join`.
    pub(super) fn leave(self) -> Result<(), CollectiveError> {
        // SAFETY: nothing is being sent or received that anybody waits for.
        self.check(unsafe { (self.0.leave)() })
    }

    /// Ends all processes.
    pub(super) fn abort(self) {
        // SAFETY: it may be called at any time.
        unsafe { (self.0.abort)(1) };
    }

    /// Begins to send a message.
    pub(super) fn send(
        self,
        to: usize,
        tag: Tag,
        words: &Arc<Vec<u32>>,
    ) -> Result<Sending, CollectiveError> {
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let mut handle = Handle::default();
        // SAFETY: the words stay as they are, because they are shared until they were sent.
        let result = unsafe {
            let (first, len) = (bytes.as_ptr(), bytes.len());
            (self.0.send)(to as c_int, tag.0, first, len, &raw mut handle)
        };
        self.check(result)?;
        Ok(Sending {
            plugin: self,
            handle,
            words: Some(Arc::clone(words)),
        })
    }

    /// Begins to receive the next message of a rank, or of any, if there is one. It replaces `words`.
    pub(super) fn receive(
        self,
        from: Option<usize>,
        tag: Tag,
        words: &mut Vec<u32>,
    ) -> Result<Option<Receiving>, CollectiveError> {
        let from = from.map_or(-1, |from| from as c_int);
        let (mut is_there, mut handle, mut num_bytes) = (false, Handle::default(), 0);
        // SAFETY: all three are written before it returns.
        let result = unsafe {
            let (is_there, handle) = (&raw mut is_there, &raw mut handle);
            (self.0.find)(from, tag.0, is_there, handle, &raw mut num_bytes)
        };
        self.check(result)?;
        if !is_there {
            return Ok(None);
        }
        if !num_bytes.is_multiple_of(size_of::<u32>()) {
            return Err(CollectiveError::World(format!(
                "a message of {num_bytes} bytes is none of a rank"
            )));
        }
        let mut words = mem::take(words);
        words.resize(num_bytes / size_of::<u32>(), 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        // SAFETY: the message was found, and nobody else uses the words until they were received.
        let result = unsafe { (self.0.receive)(&raw mut handle, bytes.as_mut_ptr(), bytes.len()) };
        self.check(result)?;
        Ok(Some(Receiving {
            plugin: self,
            handle,
            words,
            is_done: false,
        }))
    }

    fn is_done(self, handle: &mut Handle) -> Result<bool, CollectiveError> {
        let mut is_done = false;
        // SAFETY: the handle belongs to a message, until it is done.
        self.check(unsafe { (self.0.is_done)(handle, &raw mut is_done) })?;
        Ok(is_done)
    }

    fn check(self, result: c_int) -> Result<(), CollectiveError> {
        match result {
            0 => Ok(()),
            TOO_FEW_THREADS => Err(CollectiveError::World(
                "this MPI does not let all threads of a process call it: MPI_THREAD_MULTIPLE is needed".to_owned(),
            )),
            error => {
                let mut text = [0 as c_char; 256];
                // SAFETY: there is room for so many bytes.
                unsafe { (self.0.describe)(error, text.as_mut_ptr(), text.len()) };
                // SAFETY: it was written as a C string.
                let text = unsafe { CStr::from_ptr(text.as_ptr()) };
                Err(CollectiveError::World(text.to_string_lossy().into_owned()))
            }
        }
    }
}

impl Sending {
    /// Whether it was sent: its words are free then.
    pub(super) fn is_done(&mut self) -> Result<bool, CollectiveError> {
        if self.words.is_some() && self.plugin.is_done(&mut self.handle)? {
            self.words = None;
        }
        Ok(self.words.is_none())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        mem::forget(self.words.take());
    }
}

impl Receiving {
    /// The message, if all of it has come. To be called until then.
    pub(super) fn words(&mut self) -> Result<Option<Vec<u32>>, CollectiveError> {
        self.is_done = self.is_done || self.plugin.is_done(&mut self.handle)?;
        Ok(self.is_done.then(|| mem::take(&mut self.words)))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !self.is_done {
            mem::forget(mem::take(&mut self.words));
        }
    }
}

/// The error of the dynamic linker.
fn linker_error() -> String {
    // SAFETY: it returns a C string that is valid until the next call of the linker by this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker gives no reason".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        /// The messages of all ranks on their way, with their tags.
        static MESSAGES: RefCell<Vec<(c_int, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
    }

    /// A plug-in without MPI: a message goes from the thread that computes as one rank, then as another, to itself.
    pub(crate) fn plugin_of_one_thread() -> Plugin {
        Plugin(&Interface {
            version: VERSION,
            join,
            leave,
            abort,
            send,
            find,
            receive,
            is_done,
            describe,
        })
    }

    unsafe extern "C" fn join(_: *mut World) -> c_int {
        1
    }

    unsafe extern "C" fn leave() -> c_int {
        1
    }

    unsafe extern "C" fn abort(_: c_int) {}

    unsafe extern "C" fn send(
        _: c_int,
        tag: c_int,
        bytes: *const u8,
        len: usize,
        _: *mut Handle,
    ) -> c_int {
        // SAFETY: by the interface, there are so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, len) };
        MESSAGES.with_borrow_mut(|messages| messages.push((tag, bytes.to_vec())));
        0
    }

    unsafe extern "C" fn find(
        _: c_int,
        tag: c_int,
        is_there: *mut bool,
        message: *mut Handle,
        len: *mut usize,
    ) -> c_int {
        MESSAGES.with_borrow(|messages| {
            let index = messages.iter().position(|(of, _)| *of == tag);
            // SAFETY: by the interface, all three may be written.
            unsafe {
                is_there.write(index.is_some());
                message.write(Handle(index.unwrap_or(0)));
                len.write(index.map_or(0, |index| messages[index].1.len()));
            }
        });
        0
    }

    unsafe extern "C" fn receive(message: *mut Handle, bytes: *mut u8, len: usize) -> c_int {
        // SAFETY: by the interface, it is the message that was found.
        let index = unsafe { (*message).0 };
        let (_, message) = MESSAGES.with_borrow_mut(|messages| messages.remove(index));
        // SAFETY: by the interface, there is room for so many bytes.
        unsafe { std::slice::from_raw_parts_mut(bytes, len) }.copy_from_slice(&message);
        0
    }

    unsafe extern "C" fn is_done(_: *mut Handle, is_done: *mut bool) -> c_int {
        // SAFETY: by the interface, it may be written.
        unsafe { is_done.write(true) };
        0
    }

    unsafe extern "C" fn describe(_: c_int, text: *mut c_char, _: usize) {
        // SAFETY: by the interface, there is room for it.
        unsafe { text.write(0) };
    }
}
