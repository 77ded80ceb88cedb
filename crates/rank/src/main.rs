//! Another rank of a model. The backend starts this program, which lies beside `libtriton_inflight.so` and runs what is
//! in it (`crates/machines/`): so every rank computes with the code of rank 0.

use std::arch::global_asm;
use std::env;
use std::error::Error;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

const LIBRARY: &str = "libtriton_inflight.so";
/// What the library exports for this program: it returns the exit status.
const ENTRY_POINT: &CStr = c"INFLIGHT_RankMain";

// The functions of tritonserver that the library imports, see `build.rs`.
global_asm!(include_str!(concat!(env!("OUT_DIR"), "/server.s")));

type RankMain = unsafe extern "C" fn() -> c_int;

const HELP: &str = "\
Another rank of a model that several processes compute.

Usage: inflight-rank [--mpi | --help | --version]

Triton's backend inflight starts this program itself, without these. For a model with `rank_transport: mpi`,
mpirun starts it with --mpi on every host, beside tritonserver: see the manual page inflight-rank(1).
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("--help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some("--version") => {
            println!("inflight-rank {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(option) if option.starts_with('-') && option != "--mpi" => {
            eprintln!("inflight-rank: {option} is no option; --help lists them");
            return ExitCode::from(2);
        }
        _ => {}
    }
    match run() {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("inflight-rank: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<c_int, Box<dyn Error>> {
    let library = env::current_exe()?.with_file_name(LIBRARY);
    let path = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string, and the library does nothing when it is opened.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(linker_error());
    }
    // SAFETY: the handle is that of an open library, which is never closed.
    let entry_point: *mut c_void = unsafe { libc::dlsym(handle, ENTRY_POINT.as_ptr()) };
    if entry_point.is_null() {
        return Err(linker_error());
    }
    // SAFETY: `src/entry.rs` exports a function of this type under this name.
    let rank_main = unsafe { mem::transmute::<*mut c_void, RankMain>(entry_point) };
    // SAFETY: it may be called once by any process that is nothing else.
    Ok(unsafe { rank_main() })
}

/// The error of the dynamic linker.
fn linker_error() -> Box<dyn Error> {
    // SAFETY: it returns a C string that is valid until the next call of the linker by this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker gives no reason".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into()
}
