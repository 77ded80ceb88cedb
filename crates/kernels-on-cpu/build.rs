//! Compiles the kernels and the machine that runs them on the CPU with g++.
//!
//! `INFLIGHT_KERNEL_SANITIZER`, which is `address`, `undefined` or `thread`, builds them with that sanitizer of g++.

use std::env;
use std::path::{Path, PathBuf};

use inflight_kernel_sources::{files_with_extension, is_for_clippy};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let kernels = package.join("../../kernels");
    let machine = package.join("cpp");
    let tests = package.join("tests/kernels");
    for folder in [&kernels, &machine, &tests] {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::rerun-if-env-changed=INFLIGHT_KERNEL_SANITIZER");
    println!(
        "cargo::rustc-check-cfg=cfg(kernel_sanitizer, values(none(), \"address\", \"undefined\", \"thread\"))"
    );

    let sanitizer = env::var("INFLIGHT_KERNEL_SANITIZER").unwrap_or_default();
    // The sanitizer's library, and the object that starts it before any other library.
    let runtime: &[&str] = match sanitizer.as_str() {
        "" => &[],
        "address" => &["libasan.a", "libasan_preinit.o"],
        "undefined" => &["libubsan.a"],
        "thread" => &["libtsan.a", "libtsan_preinit.o"],
        other => panic!(
            "INFLIGHT_KERNEL_SANITIZER is '{other}'; it must be 'address', 'undefined' or 'thread'"
        ),
    };
    if !sanitizer.is_empty() {
        println!("cargo::rustc-cfg=kernel_sanitizer");
        println!("cargo::rustc-cfg=kernel_sanitizer=\"{sanitizer}\"");
    }
    if is_for_clippy() {
        return;
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .opt_level(1)
        // Lines for the reports of the sanitizers; more would double the time that the kernels take.
        .debug(false)
        .flag("-g1")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        // Kernels read floats as vectors, which C++ forbids and CUDA allows.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .include(&kernels)
        .include(&machine)
        .cargo_metadata(false);
    if !sanitizer.is_empty() {
        build.flag(format!("-fsanitize={sanitizer}"));
        build.flag("-fno-sanitize-recover=all");
    }
    // rustc links without the compiler's default libraries, so the sanitizer's is named here: all of it, because it
    // takes the place of functions of the C library.
    for file in runtime {
        let file = library(&build, file);
        println!("cargo::rustc-link-arg-tests=-Wl,--whole-archive,{file},--no-whole-archive");
    }
    if sanitizer == "thread" {
        build.define("CUDA_CPU_THREADS", None);
    }
    let mut kernel_build = build.clone();
    kernel_build.flags(["-x", "c++"]);
    compile(
        &mut kernel_build,
        &sources_in(&[&kernels, &tests], "cu"),
        "cuda_kernels",
    );
    // The machine itself is not watched: it orders threads in ways that a sanitizer does not know.
    if sanitizer == "thread" {
        build.flag("-fno-sanitize=thread");
    }
    compile(&mut build, &sources_in(&[&machine], "cpp"), "cuda_cpu");

    let out = env::var("OUT_DIR").expect("set by cargo");
    println!("cargo::rustc-link-search=native={out}");
    // Kernels register themselves: nothing else refers to them.
    println!("cargo::rustc-link-lib=static:+whole-archive=cuda_kernels");
    println!("cargo::rustc-link-lib=static=cuda_cpu");
    println!("cargo::rustc-link-lib=stdc++");
}

/// The path of one of the compiler's own libraries.
fn library(build: &cc::Build, name: &str) -> String {
    let mut compiler = build.get_compiler().to_command();
    let output = compiler.arg(format!("-print-file-name={name}")).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run g++: {error}"));
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(Path::new(&path).is_absolute(), "g++ has no {name}");
    path
}

fn compile(build: &mut cc::Build, files: &[PathBuf], library: &str) {
    if let Err(error) = build.files(files).try_compile(library) {
        panic!(
            "cannot compile the CUDA kernels for tests on the CPU, which takes g++ 11 or newer (Debian: apt-get install \
             g++) or a compiler that CXX names: {error}"
        );
    }
}

fn sources_in(folders: &[&Path], extension: &str) -> Vec<PathBuf> {
    files_with_extension(folders, extension).unwrap_or_else(|error| panic!("{error}"))
}
