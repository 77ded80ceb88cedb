//! `libinflight_mpi.so`: MPI as the library uses it, see `crates/mpi-interface/`.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use inflight_mpi_interface::{Handle, Interface, TOO_FEW_THREADS, VERSION, World};
use mpi_sys as sys;

/// The processes, and their messages apart from all others.
static COMMUNICATOR: OnceLock<Communicator> = OnceLock::new();
/// Whether the process has left MPI to this library.
static IS_OURS: AtomicBool = AtomicBool::new(false);

static INTERFACE: Interface = Interface {
    version: VERSION,
    join,
    leave,
    abort,
    send,
    find,
    receive,
    is_done,
    describe,
};

struct Communicator(sys::MPI_Comm);

// SAFETY: every thread may call MPI, or `join` has failed.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

const SUCCESS: c_int = 0;
const _: () = assert!(
    size_of::<sys::MPI_Request>() <= size_of::<Handle>()
        && size_of::<sys::MPI_Message>() <= size_of::<Handle>()
);

/// What the library looks for.
#[unsafe(no_mangle)]
pub extern "C" fn inflight_mpi() -> *const Interface {
    &raw const INTERFACE
}

unsafe extern "C" fn join(world: *mut World) -> c_int {
    // SAFETY: the caller passes a world to write to.
    let world = unsafe { &mut *world };
    join_all(world).err().unwrap_or(SUCCESS)
}

fn join_all(world: &mut World) -> Result<(), c_int> {
    let (mut is_initialised, mut level) = (0, 0);
    // SAFETY: it may be called at any time, and writes an integer. So below.
    check(unsafe { sys::MPI_Initialized(&raw mut is_initialised) })?;
    // SAFETY: a constant of MPI.
    let multiple = unsafe { sys::RSMPI_THREAD_MULTIPLE };
    if is_initialised == 0 {
        let (argc, argv) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: MPI is not initialised, and needs no arguments.
        check(unsafe { sys::MPI_Init_thread(argc, argv, multiple, &raw mut level) })?;
        IS_OURS.store(true, Ordering::Release);
    } else {
        // SAFETY: MPI is initialised.
        check(unsafe { sys::MPI_Query_thread(&raw mut level) })?;
    }
    if level < multiple {
        return Err(TOO_FEW_THREADS);
    }
    // SAFETY: constants of MPI.
    let (all, returns) = unsafe { (sys::RSMPI_COMM_WORLD, sys::RSMPI_ERRORS_RETURN) };
    let mut communicator = all;
    // SAFETY: MPI is initialised, `communicator` is written, and all processes call it. So below.
    check(unsafe { sys::MPI_Comm_dup(all, &raw mut communicator) })?;
    // SAFETY: as above.
    check(unsafe { sys::MPI_Comm_set_errhandler(communicator, returns) })?;
    // SAFETY: as above.
    check(unsafe { sys::MPI_Comm_rank(communicator, &raw mut world.rank) })?;
    // SAFETY: as above.
    check(unsafe { sys::MPI_Comm_size(communicator, &raw mut world.size) })?;
    COMMUNICATOR.get_or_init(|| Communicator(communicator));
    Ok(())
}

unsafe extern "C" fn leave() -> c_int {
    match IS_OURS.swap(false, Ordering::AcqRel) {
        // SAFETY: MPI was initialised by `join`, on this thread.
        true => unsafe { sys::MPI_Finalize() },
        false => SUCCESS,
    }
}

unsafe extern "C" fn abort(status: c_int) {
    if COMMUNICATOR.get().is_none() {
        // MPI may only be asked when it is initialised.
        std::process::exit(status);
    }
    // SAFETY: MPI is initialised.
    unsafe { sys::MPI_Abort(sys::RSMPI_COMM_WORLD, status) };
}

unsafe extern "C" fn send(
    to: c_int,
    tag: c_int,
    bytes: *const u8,
    len: usize,
    message: *mut Handle,
) -> c_int {
    let Some(Communicator(communicator)) = COMMUNICATOR.get() else {
        return sys::MPI_ERR_COMM as c_int;
    };
    let Ok(len) = c_int::try_from(len) else {
        return sys::MPI_ERR_COUNT as c_int;
    };
    // SAFETY: the bytes stay as they are until `is_done`, and a handle has room for a request.
    unsafe {
        sys::MPI_Isend(
            bytes.cast(),
            len,
            sys::RSMPI_UINT8_T,
            to,
            tag,
            *communicator,
            message.cast(),
        )
    }
}

unsafe extern "C" fn find(
    from: c_int,
    tag: c_int,
    is_there: *mut bool,
    message: *mut Handle,
    len: *mut usize,
) -> c_int {
    let Some(Communicator(communicator)) = COMMUNICATOR.get() else {
        return sys::MPI_ERR_COMM as c_int;
    };
    let (mut found, mut count) = (0, 0);
    // SAFETY: MPI writes all fields that are read.
    let mut status: sys::MPI_Status = unsafe { std::mem::zeroed() };
    // SAFETY: all that MPI writes to lives until it returns, and a handle has room for a message.
    let result = unsafe {
        let from = if from < 0 { sys::RSMPI_ANY_SOURCE } else { from };
        sys::MPI_Improbe(
            from,
            tag,
            *communicator,
            &raw mut found,
            message.cast(),
            &raw mut status,
        )
    };
    if result == SUCCESS && found != 0 {
        // SAFETY: the status is that of a message.
        let counted =
            unsafe { sys::MPI_Get_count(&raw const status, sys::RSMPI_UINT8_T, &raw mut count) };
        if counted != SUCCESS {
            return counted;
        }
    }
    // SAFETY: the caller passes places to write to.
    unsafe {
        *is_there = found != 0;
        *len = usize::try_from(count).unwrap_or(0);
    }
    result
}

unsafe extern "C" fn receive(message: *mut Handle, bytes: *mut u8, len: usize) -> c_int {
    let Ok(len) = c_int::try_from(len) else {
        return sys::MPI_ERR_COUNT as c_int;
    };
    // SAFETY: the handle is that of a message that was found; then it is that of a request, for which it has room. The
    // bytes are written until `is_done`.
    unsafe {
        let mut found = message.cast::<sys::MPI_Message>().read();
        let kind = sys::RSMPI_UINT8_T;
        sys::MPI_Imrecv(bytes.cast(), len, kind, &raw mut found, message.cast())
    }
}

unsafe extern "C" fn is_done(message: *mut Handle, is_done: *mut bool) -> c_int {
    let mut done = 0;
    // SAFETY: the handle is that of a request.
    let result =
        unsafe { sys::MPI_Test(message.cast(), &raw mut done, sys::RSMPI_STATUS_IGNORE) };
    // SAFETY: the caller passes a place to write to.
    unsafe { *is_done = done != 0 };
    result
}

unsafe extern "C" fn describe(error: c_int, text: *mut c_char, len: usize) {
    let mut description = [0 as c_char; sys::MPI_MAX_ERROR_STRING as usize];
    let mut num_bytes = 0;
    // SAFETY: there is room for the longest description.
    let result =
        unsafe { sys::MPI_Error_string(error, description.as_mut_ptr(), &raw mut num_bytes) };
    let known = match result {
        SUCCESS => usize::try_from(num_bytes).unwrap_or(0),
        _ => 0,
    };
    let num_bytes = known.min(description.len()).min(len.saturating_sub(1));
    if len > 0 {
        // SAFETY: the caller has room for `len` bytes.
        unsafe {
            text.copy_from_nonoverlapping(description.as_ptr(), num_bytes);
            text.add(num_bytes).write(0);
        }
    }
}

fn check(result: c_int) -> Result<(), c_int> {
    match result {
        SUCCESS => Ok(()),
        error => Err(error),
    }
}
