//! Builds `libcuda.so.1`, `libcublasLt.so.12` and `libnccl.so.2` from `cpp/`, the project's kernels and the machine
//! that runs them.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use inflight_kernel_sources::{files_with_extension, is_for_clippy};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let sources = package.join("cpp");
    let kernels = package.join("../../kernels");
    let machine = package.join("../kernels-on-cpu/cpp");
    let tests = package.join("tests/kernels");
    for path in [&sources, &kernels, &machine, &tests] {
        println!("cargo::rerun-if-changed={}", path.display());
    }

    let libraries = out.join("libraries");
    println!(
        "cargo::rustc-env=INFLIGHT_STAND_IN_LIBRARIES={}",
        libraries.display()
    );
    if is_for_clippy() {
        return;
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        // Lines for stack traces; more would double the time that the kernels take.
        .debug(false)
        .flag("-g1")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        // Programs must find only the functions of the API.
        .flag("-fvisibility=hidden")
        // Kernels read floats as vectors, which C++ forbids and CUDA allows.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .include(&machine)
        .include(&kernels)
        .cargo_metadata(false);
    let mut kernel_build = build.clone();
    kernel_build.opt_level(2).flags(["-x", "c++"]);

    let mut driver = objects(
        build.opt_level(1),
        &sources_in(&[&sources.join("driver")], "cpp"),
    );
    driver.extend(objects(&kernel_build, &sources_in(&[&tests], "cu")));
    driver.extend(compiled("KERNELS"));
    driver.extend(compiled("MACHINE"));
    // Not a kernel, but what the tests of kernels launch on a GPU.
    let of_tests = compiled("TESTS").into_iter();
    driver.extend(of_tests.filter(|object| object.to_string_lossy().ends_with("fp8.o")));
    fs::create_dir_all(&libraries).expect("OUT_DIR can be written");
    link(&build, &driver, &libraries.join("libcuda.so.1"), &[]);

    let blas = objects(
        build.clone().opt_level(3),
        &sources_in(&[&sources.join("cublaslt")], "cpp"),
    );
    let driver = libraries.join("libcuda.so.1");
    link(
        &build,
        &blas,
        &libraries.join("libcublasLt.so.12"),
        &[&driver],
    );
    let nccl = objects(
        build.clone().opt_level(2),
        &sources_in(&[&sources.join("nccl")], "cpp"),
    );
    link(&build, &nccl, &libraries.join("libnccl.so.2"), &[&driver]);
    // CUDA 13 has the same functions under another name.
    let alias = libraries.join("libcublasLt.so.13");
    if fs::symlink_metadata(&alias).is_err() {
        symlink("libcublasLt.so.12", &alias).expect("OUT_DIR can be written");
    }
}

fn objects(build: &cc::Build, files: &[PathBuf]) -> Vec<PathBuf> {
    let compiled = build.clone().files(files).try_compile_intermediates();
    compiled.unwrap_or_else(|error| {
        panic!(
            "the stand-in for the CUDA driver needs g++ 11 or newer (Debian: apt-get install g++), or a compiler that \
             CXX names: {error}"
        )
    })
}

/// Objects that crates/kernels-on-cpu has compiled.
fn compiled(group: &str) -> Vec<PathBuf> {
    let objects =
        env::var_os(format!("DEP_INFLIGHT_KERNELS_ON_CPU_{group}")).expect("a dependency");
    env::split_paths(&objects).collect()
}

fn link(build: &cc::Build, objects: &[PathBuf], library: &Path, needed: &[&Path]) {
    let exports = Path::new("cpp/api.map");
    let name = library.file_name().expect("a file").to_string_lossy();
    let output = build
        .get_compiler()
        .to_command()
        .args(["-shared", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"])
        // Whoever closes it must not take the handler of faults away: NVIDIA's runtime library opens and closes it.
        .arg("-Wl,-z,nodelete")
        .arg(format!("-Wl,-soname,{name}"))
        // Not the instances of templates of the standard library, either.
        .arg(format!("-Wl,--version-script={}", exports.display()))
        .arg("-o")
        .arg(library)
        .args(objects)
        .args(needed)
        .arg("-pthread")
        .output()
        .expect("the compiler that has just run");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cannot link {name}: {errors}");
}

fn sources_in(folders: &[&Path], extension: &str) -> Vec<PathBuf> {
    files_with_extension(folders, extension).unwrap_or_else(|error| panic!("{error}"))
}
