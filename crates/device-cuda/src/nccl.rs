//! NCCL, opened at run time: sums of, and messages between, the GPUs of several ranks.
//!
//! Names, types and numbers are those of NCCL's documented API
//! (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>), which all versions from 2.9 on have: since
//! then operations can be captured in CUDA graphs.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaStream;

use inflight_base::LoadError;

/// Where it may be.
const NAMES: [&CStr; 2] = [c"libnccl.so.2", c"libnccl.so"];
/// The first version whose operations can be captured.
const MIN_VERSION: c_int = 20900;

const SUCCESS: c_int = 0;
const FLOAT_32: c_int = 7;
const SUM: c_int = 0;

/// `u32` words of an id by which ranks find each other.
pub(super) const ID_WORDS: usize = 32;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u32; ID_WORDS]);

type Comm = *mut c_void;

type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type CommInitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int;
type CommGetAsyncError = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
type CommAbort = unsafe extern "C" fn(Comm) -> c_int;
type AllReduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
type AllGather = unsafe extern "C" fn(u64, u64, usize, c_int, Comm, *mut c_void) -> c_int;
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// Its functions.
struct Library {
    get_version: GetVersion,
    get_unique_id: GetUniqueId,
    comm_init_rank: CommInitRank,
    comm_get_async_error: CommGetAsyncError,
    comm_abort: CommAbort,
    all_reduce: AllReduce,
    all_gather: AllGather,
    get_error_string: GetErrorString,
}

/// One of several ranks, which all call the same operations in the same order.
pub(super) struct Communicator {
    library: &'static Library,
    comm: Comm,
    rank: usize,
}

// SAFETY: a communicator may be used by any thread, by one at a time, and its owner is used by one at a time.
unsafe impl Send for Communicator {}

/// An id for the ranks of a model, made by one of them and told to the others.
///
/// # Errors
///
/// NCCL is not there.
pub(super) fn unique_id() -> Result<[u32; ID_WORDS], LoadError> {
    let library = library()?;
    let mut id = UniqueId([0; ID_WORDS]);
    // SAFETY: the id has room.
    let status = unsafe { (library.get_unique_id)(&raw mut id) };
    library.check(status).map_err(|error| {
        LoadError::Resource(format!("NCCL: making the id of the ranks: {error}"))
    })?;
    Ok(id.0)
}

/// Looks for it, so that a rank without it is noticed before others wait for that rank.
///
/// # Errors
///
/// NCCL is not there.
pub(super) fn check() -> Result<(), LoadError> {
    library().map(|_| ())
}

impl Communicator {
    /// Meets the other ranks, each of which has a GPU of its own, and lets a first operation of each kind connect them.
    /// `memory` is the address of an f32 for each rank, which were written.
    ///
    /// # Errors
    ///
    /// NCCL is not there or refuses, or the others do not come in time. Then a thread waits on until NCCL gives up.
    pub fn new(
        stream: &Arc<CudaStream>,
        id: [u32; ID_WORDS],
        rank: usize,
        num_ranks: usize,
        memory: u64,
        time_limit: Duration,
    ) -> Result<Self, LoadError> {
        let library = library()?;
        let failed =
            |what: &str| LoadError::Resource(format!("NCCL: meeting {num_ranks} ranks: {what}"));
        let stream = Arc::clone(stream);
        let (sender, met) = sync_channel(1);
        let meet = move || {
            let connected = Self::meet(library, &stream, id, rank, num_ranks, memory);
            // Nobody waits any more: the communicator is dropped.
            let _ = sender.send(connected);
        };
        let thread = thread::Builder::new().name("inflight-nccl".to_owned());
        thread
            .spawn(meet)
            .map_err(|error| failed(&error.to_string()))?;
        let met = met.recv_timeout(time_limit);
        let met = met.map_err(|_| {
            failed(&format!(
                "rank {rank} has waited for the others for {time_limit:?}"
            ))
        })?;
        met.map_err(|error| failed(&error))
    }

    fn meet(
        library: &'static Library,
        stream: &CudaStream,
        id: [u32; ID_WORDS],
        rank: usize,
        num_ranks: usize,
        memory: u64,
    ) -> Result<Self, String> {
        let bound = stream.context().bind_to_thread();
        bound.map_err(|error| error.to_string())?;
        let mut comm = ptr::null_mut();
        // SAFETY: the thread has the rank's GPU, and the communicator has room.
        let status = unsafe {
            (library.comm_init_rank)(
                &raw mut comm,
                num_ranks as c_int,
                UniqueId(id),
                rank as c_int,
            )
        };
        library.check(status)?;
        let connected = Self {
            library,
            comm,
            rank,
        };
        // SAFETY: the memory holds an f32 for each rank, and is used by nobody else until the stream has been waited
        // for.
        unsafe {
            connected.all_reduce(stream, memory, 1)?;
            connected.all_gather(stream, memory, 1)?;
        }
        stream.synchronize().map_err(|error| error.to_string())?;
        connected.check()?;
        Ok(connected)
    }

    /// Sums `len` f32 at an address over all ranks, in an order that NCCL chooses, after the stream's other work.
    ///
    /// # Errors
    ///
    /// NCCL refuses, or another rank has failed.
    ///
    /// # Safety
    ///
    /// There are so many, and they live longer than the stream's work, and all graphs that it is captured in.
    pub unsafe fn all_reduce(
        &self,
        stream: &CudaStream,
        address: u64,
        len: usize,
    ) -> Result<(), String> {
        let stream = Self::raw(stream)?;
        // SAFETY: the caller's promise.
        let status = unsafe {
            (self.library.all_reduce)(address, address, len, FLOAT_32, SUM, self.comm, stream)
        };
        self.library.check(status)
    }

    /// Gives every rank the `len` f32 that each rank has at its place, `address + 4 * rank * len`.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    ///
    /// # Safety
    ///
    /// As there, for `len` of each rank.
    pub unsafe fn all_gather(
        &self,
        stream: &CudaStream,
        address: u64,
        len: usize,
    ) -> Result<(), String> {
        let stream = Self::raw(stream)?;
        let own = address + (4 * self.rank * len) as u64;
        // SAFETY: the caller's promise. The operation is in place.
        let status =
            unsafe { (self.library.all_gather)(own, address, len, FLOAT_32, self.comm, stream) };
        self.library.check(status)
    }

    /// Whether operations that were launched have not failed.
    ///
    /// # Errors
    ///
    /// One has.
    pub fn check(&self) -> Result<(), String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator lives, and the state has room.
        let status = unsafe { (self.library.comm_get_async_error)(self.comm, &raw mut state) };
        self.library.check(status)?;
        self.library.check(state)
    }

    /// The stream as NCCL wants it, whose GPU the thread must have.
    fn raw(stream: &CudaStream) -> Result<*mut c_void, String> {
        let bound = stream.context().bind_to_thread();
        bound.map_err(|error| error.to_string())?;
        Ok(stream.cu_stream().cast())
    }
}

impl Drop for Communicator {
    /// Ends operations that wait for other ranks, too. Unlike `ncclCommDestroy` it waits for no other rank.
    fn drop(&mut self) {
        // SAFETY: the communicator lives, and nobody uses it after this.
        let status = unsafe { (self.library.comm_abort)(self.comm) };
        if let Err(error) = self.library.check(status) {
            log::debug!("NCCL: ending a communicator: {error}");
        }
    }
}

impl Library {
    fn open() -> Option<Self> {
        let opened = NAMES.into_iter().find_map(|name| {
            // SAFETY: the name is a C string; opening the library runs its initialisers. It is never closed.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!library.is_null()).then_some(library)
        })?;
        let find = |name: &CStr| {
            // SAFETY: the library is open, and the name is a C string.
            let function = unsafe { libc::dlsym(opened, name.as_ptr()) };
            (!function.is_null()).then_some(function)
        };
        // SAFETY: these are NCCL's functions of these names, with these types.
        unsafe {
            Some(Self {
                get_version: transmute::<*mut c_void, GetVersion>(find(c"ncclGetVersion")?),
                get_unique_id: transmute::<*mut c_void, GetUniqueId>(find(c"ncclGetUniqueId")?),
                comm_init_rank: transmute::<*mut c_void, CommInitRank>(find(c"ncclCommInitRank")?),
                comm_get_async_error: transmute::<*mut c_void, CommGetAsyncError>(find(
                    c"ncclCommGetAsyncError",
                )?),
                comm_abort: transmute::<*mut c_void, CommAbort>(find(c"ncclCommAbort")?),
                all_reduce: transmute::<*mut c_void, AllReduce>(find(c"ncclAllReduce")?),
                all_gather: transmute::<*mut c_void, AllGather>(find(c"ncclAllGather")?),
                get_error_string: transmute::<*mut c_void, GetErrorString>(find(
                    c"ncclGetErrorString",
                )?),
            })
        }
    }

    fn check(&self, status: c_int) -> Result<(), String> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: it takes any number, and its texts are C strings that are never freed.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// The one of this process: two would not know of each other.
fn library() -> Result<&'static Library, LoadError> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let Some(library) = LIBRARY.get_or_init(Library::open) else {
        return Err(LoadError::Resource(
            "several GPUs compute a model over NCCL, and libnccl.so.2 is missing: install it (package libnccl2, or nvidia-nccl-cu12 \
             from PyPI, whose folder LD_LIBRARY_PATH must name), or use one GPU"
                .to_owned(),
        ));
    };
    let mut version = 0;
    // SAFETY: the version has room.
    let status = unsafe { (library.get_version)(&raw mut version) };
    if status == SUCCESS && version < MIN_VERSION {
        return Err(LoadError::Resource(format!(
            "libnccl.so.2 is of version {version}, and {MIN_VERSION} (2.9) is needed: update it, or use one GPU"
        )));
    }
    Ok(library)
}
