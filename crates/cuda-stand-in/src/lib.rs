//! Runs programs on a stand-in for a GPU: libraries with the names and functions of the CUDA driver, of cuBLASLt and of
//! NCCL, which compute on the CPU. Kernels are the project's own, compiled by g++ (`crates/kernels-on-cpu`).
//!
//! It finds what a real GPU hides, or shows only now and then:
//!
//! | mistake | what happens |
//! |---|---|
//! | a missing wait or event | work runs late and in a random order, so that results are wrong |
//! | device memory that nobody has written | it is full of NaN (`0xffa5` in every two bytes) |
//! | the host follows a device pointer | SIGSEGV, and a line on standard error that names the allocation |
//! | use after free, by a copy or a kernel | the process ends with a line that names both |
//! | copies beyond an allocation, a second free | `CUDA_ERROR_INVALID_VALUE`, and a line that says why |
//! | a kernel gets a pointer to memory that is not pinned | the process ends with a line that says which |
//! | a kernel beyond an allocation | SIGSEGV, or the end of the process when the memory is freed |
//! | ranks that call different collective operations, or with other counts | `ncclInvalidUsage`, and a line that says who |
//! | what is forbidden while a stream is captured | the driver's errors |
//!
//! A program takes the stand-in for the real libraries if it finds them in `LD_LIBRARY_PATH`: [`StandIn::apply`]. A
//! test that uses CUDA itself runs in a process of its own: [`StandIn::run`]. By hand, `cargo run -p
//! inflight-cuda-stand-in -- PROGRAM ARGUMENT...` runs a program on it, and without a program prints the folder of the
//! libraries.
//!
//! # Options
//!
//! Environment variables that begin with `CUDA_STAND_IN_`; all are numbers. A name or a value that is not understood
//! ends the process. A test sets them later by [`set`], and asks by [`count`] how many events a fault has counted.
//!
//! | name | meaning | default |
//! |---|---|---|
//! | `DEVICES` | number of devices; 0: `cuInit` returns `CUDA_ERROR_NO_DEVICE` | 1 |
//! | `MEMORY_BYTES` | memory of each device | 2 GiB |
//! | `OTHER_MEMORY_BYTES` | that of all devices but the first; 0: the same | 0 |
//! | `COMPUTE_CAPABILITY` | such as 90 for 9.0 | 90 |
//! | `OTHER_CAPABILITY` | that of all devices but the first; 0: the same | 0 |
//! | `DRIVER_VERSION` | what `cuDriverGetVersion` says | 12040 |
//! | `SEED` | of the order in which streams, graphs, blocks and threads run | 0 |
//! | `RUN_AFTER_MS` | work that nobody waits for runs all the same, a part every so many milliseconds | never |
//! | `PRINT_WORK` | 1: lists all work as it is enqueued or captured: kernels with their grid, blocks, shared memory and arguments | 0 |
//! | `REPORT_LEAKS` | 1: lists what was not freed when a context ends and at exit | 0 |
//! | `INIT_ERROR` | what `cuInit` returns, such as 803 for a driver that does not fit | none |
//! | `MODULE_ERROR` | what loading a module returns, such as 222 or 209 for a driver that is too old | none |
//! | `FAIL_ALLOCATION` | the n-th allocation of device memory fails: `CUDA_ERROR_OUT_OF_MEMORY` | never |
//! | `FAIL_HOST_ALLOCATION` | the n-th allocation of pinned memory fails: `CUDA_ERROR_OUT_OF_MEMORY` | never |
//! | `FAIL_LAUNCH` | the n-th launch of a kernel or graph fails: `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES` | never |
//! | `FAIL_COLLECTIVE` | the n-th call of a collective operation fails: `ncclInternalError` | never |
//! | `STALL_COLLECTIVE` | the n-th collective operation ends only when its communicator is aborted | never |
//! | `SPOIL_COLLECTIVE` | the n-th call of a collective operation gives its rank a first number that is 1 too large | never |
//! | `LOSE_DEVICE` | the device on which the n-th operation runs is lost: all later calls fail | never |
//! | `LOST_ERROR` | how they fail | 700 |
//!
//! # Where it is stricter than a GPU
//!
//! Memory must not be freed while work that uses it waits, although `cuMemFree` of a real driver waits for that work.
//! Nothing runs unless somebody waits or asks, so that a host that watches pinned memory, or is told by a host
//! function, needs `RUN_AFTER_MS`. Copies of pageable memory cannot be captured. cuBLASLt checks the alignment that an
//! algorithm was found for.
//!
//! # What it does not have
//!
//! Contexts besides the primary ones, managed memory, cooperative launches, launch attributes, child graphs, and
//! allocations in graphs: calls return an error, or have no symbol. `cuGetProcAddress` is missing on purpose: without
//! it NVIDIA's runtime library, which Triton links, finds no GPU, and Triton itself stays on the CPU. Pointers that a
//! kernel reads from device memory are not translated, so that following one is a fault.

use std::env;
use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of `libcuda.so.1`, `libcublasLt.so.12`, `libcublasLt.so.13` and `libnccl.so.2`.
pub const LIBRARY_DIR: &str = env!("INFLIGHT_STAND_IN_LIBRARIES");

/// Says which test a process runs, if it runs on the stand-in.
const CHILD: &str = "INFLIGHT_STAND_IN_TEST";

/// A stand-in and its options.
#[derive(Clone, Debug, Default)]
pub struct StandIn {
    variables: Vec<(String, String)>,
    /// The only libraries that a program finds, if not all of them.
    libraries: Option<&'static [&'static str]>,
}

impl StandIn {
    /// One device and no errors on purpose.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets an option, by its name without the prefix.
    pub fn set(mut self, option: &str, value: u64) -> Self {
        let name = format!("CUDA_STAND_IN_{option}");
        self.variables.push((name, value.to_string()));
        self
    }

    /// Lets a program find these libraries alone, by the names of their files.
    pub fn only(mut self, libraries: &'static [&'static str]) -> Self {
        self.libraries = Some(libraries);
        self
    }

    /// Lets a program that is about to start find the stand-in.
    pub fn apply<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let mut path = match self.libraries {
            Some(names) => folder_of(names).into_os_string(),
            None => OsString::from(LIBRARY_DIR),
        };
        if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        let variables = self.variables.iter().map(|(name, value)| (name, value));
        command.env("LD_LIBRARY_PATH", path).envs(variables)
    }

    /// Runs the body of a test on the stand-in, in a process of its own, and fails if it fails. `test` is the path of
    /// the test function in its binary.
    ///
    /// ```no_run
    /// # fn sums_are_right() {
    /// use inflight_cuda_stand_in::StandIn;
    ///
    /// StandIn::new().set("DEVICES", 2).run("sums_are_right", || {
    ///     // The calls of CUDA.
    /// });
    /// # }
    /// ```
    pub fn run(&self, test: &str, body: impl FnOnce()) {
        if let Some(output) = self.output(test, body) {
            let text = text_of(&output);
            assert!(output.status.success(), "on the stand-in:\n{text}");
        }
    }

    /// The same, for tests of what ends the process: returns how it ended. In the process that runs the body, returns
    /// nothing when it has run.
    pub fn output(&self, test: &str, body: impl FnOnce()) -> Option<Output> {
        if env::var_os(CHILD).is_some_and(|running| running == test) {
            body();
            return None;
        }
        let program = env::current_exe().expect("a test has a path");
        let mut command = Command::new(program);
        command.args([test, "--exact", "--include-ignored", "--nocapture"]);
        let output = self.apply(&mut command).env(CHILD, test).output();
        let output = output.expect("a test can be started");
        let text = text_of(&output);
        assert!(text.contains("running 1 test"), "no test {test}:\n{text}");
        Some(output)
    }
}

/// A folder that has some of the libraries.
fn folder_of(names: &[&str]) -> PathBuf {
    let all = Path::new(LIBRARY_DIR);
    let folder = all.with_file_name(names.join("+"));
    fs::create_dir_all(&folder).expect("the build's folder can be written");
    for name in names {
        // Tests that run beside each other make the same links.
        if let Err(error) = symlink(all.join(name), folder.join(name))
            && error.kind() != ErrorKind::AlreadyExists
        {
            panic!("{name} of {}: {error}", folder.display());
        }
    }
    folder
}

/// Sets an option of the stand-in that this process runs on. A fault strikes at the n-th event from now on; 0 takes it
/// back.
///
/// # Panics
/// The process does not run on the stand-in, or there is no such option.
pub fn set(option: &str, value: u64) {
    let name = CString::new(option).expect("a name without zeros");
    let function = function("cuStandInSet");
    // SAFETY: it is this function, and the name is a C string.
    let result = unsafe {
        let set: extern "C" fn(*const c_char, u64) -> c_int = std::mem::transmute(function);
        set(name.as_ptr(), value)
    };
    assert_eq!(result, 0, "there is no option {option}");
}

/// How many events a fault has counted so far, by its option.
///
/// # Panics
/// The process does not run on the stand-in, or there is no such fault.
pub fn count(fault: &str) -> u64 {
    let name = CString::new(fault).expect("a name without zeros");
    let function = function("cuStandInCount");
    let mut count = 0;
    // SAFETY: it is this function, the name is a C string, and the number has room.
    let result = unsafe {
        let of: extern "C" fn(*const c_char, *mut u64) -> c_int = std::mem::transmute(function);
        of(name.as_ptr(), &raw mut count)
    };
    assert_eq!(result, 0, "there is no fault {fault}");
    count
}

/// A function that the stand-in has besides the driver's.
fn function(name: &str) -> *mut c_void {
    let library =
        CString::new(format!("{LIBRARY_DIR}/libcuda.so.1")).expect("a path without zeros");
    let symbol = CString::new(name).expect("a name without zeros");
    // SAFETY: both are C strings. The library is loaded already, if the process runs on the stand-in, and is never
    // closed.
    let found = unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        match library.is_null() {
            true => library,
            false => libc::dlsym(library, symbol.as_ptr()),
        }
    };
    assert!(!found.is_null(), "this process has not opened the stand-in");
    found
}

fn text_of(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}
