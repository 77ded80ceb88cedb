//! Compiles the kernels and the machine that runs them on the CPU with g++.
//!
//! `INFLIGHT_KERNEL_SANITIZER`, which is `address`, `undefined` or `thread`, builds them with that sanitizer of g++.

use std::env;
use std::fmt::Display;
use std::fs;
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
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        // The tests of kernels, and models on the stand-in for a GPU, run these.
        .opt_level(2)
        // Lines for stack traces and the reports of sanitizers; more would double the time that the kernels take.
        .debug(false)
        .flag("-g1")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        // Programs on the stand-in for a GPU must find only the functions of its API.
        .flag("-fvisibility=hidden")
        // Kernels read floats as vectors, which C++ forbids and CUDA allows.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .include(&kernels)
        .include(&machine)
        .cargo_metadata(false);
    let kernels = sources_in(&[&kernels], "cu");
    let tests = sources_in(&[&tests], "cu");
    let machine = sources_in(&[&machine], "cpp");

    // crates/cuda-stand-in links these.
    let plain = Objects::compile(&build, &build, [&kernels, &tests, &machine], &out);
    plain.tell_dependents();
    let objects = if sanitizer.is_empty() {
        plain
    } else {
        let mut build = build.clone();
        build.opt_level(1);
        if sanitizer == "thread" {
            build.define("CUDA_CPU_THREADS", None);
        }
        let mut watched = build.clone();
        watched.flag(format!("-fsanitize={sanitizer}"));
        watched.flag("-fno-sanitize-recover=all");
        // The machine itself is not watched: it orders threads in ways that this sanitizer does not know.
        let of_machine = if sanitizer == "thread" {
            &build
        } else {
            &watched
        };
        let sources = [&kernels, &tests, &machine];
        let objects = Objects::compile(&watched, of_machine, sources, &out.join(&sanitizer));
        // rustc links without the compiler's default libraries, so the sanitizer's is named here: all of it, because
        // it takes the place of functions of the C library.
        for file in runtime {
            let file = library(&build, file);
            println!("cargo::rustc-link-arg-tests=-Wl,--whole-archive,{file},--no-whole-archive");
        }
        objects
    };
    archive(
        &build,
        objects.kernels.iter().chain(&objects.tests),
        "cuda_kernels",
    );
    archive(&build, &objects.machine, "cuda_cpu");
    println!("cargo::rustc-link-search=native={}", out.display());
    // Kernels register themselves: nothing else refers to them.
    println!("cargo::rustc-link-lib=static:+whole-archive=cuda_kernels");
    println!("cargo::rustc-link-lib=static=cuda_cpu");
    println!("cargo::rustc-link-lib=stdc++");
}

/// Compiled objects, by the kind of their sources.
struct Objects {
    kernels: Vec<PathBuf>,
    tests: Vec<PathBuf>,
    machine: Vec<PathBuf>,
}

impl Objects {
    /// Compiles kernels, tests' kernels and the machine's sources into a folder.
    fn compile(
        build: &cc::Build,
        of_machine: &cc::Build,
        [kernels, tests, machine]: [&Vec<PathBuf>; 3],
        folder: &Path,
    ) -> Self {
        let mut of_kernels = build.clone();
        precompile_headers(&mut of_kernels, &folder.join("headers"));
        of_kernels.flags(["-x", "c++"]);
        Self {
            kernels: objects(&of_kernels, kernels, &folder.join("kernels")),
            tests: objects(&of_kernels, tests, &folder.join("tests")),
            machine: objects(of_machine, machine, &folder.join("machine")),
        }
    }

    /// Gives the paths to the build scripts of crates that depend on this one: `DEP_INFLIGHT_KERNELS_ON_CPU_KERNELS`
    /// and so on.
    fn tell_dependents(&self) {
        let groups = [
            ("kernels", &self.kernels),
            ("tests", &self.tests),
            ("machine", &self.machine),
        ];
        for (group, objects) in groups {
            let paths = env::join_paths(objects).expect("cargo refuses such a folder");
            println!("cargo::metadata={group}={}", paths.display());
        }
    }
}

/// Compiles the headers that every kernel includes, and has them included first, without which a compiler does not take
/// compiled ones: they are most of a small kernel's time.
fn precompile_headers(build: &mut cc::Build, folder: &Path) {
    let header = folder.join("included_first.h");
    fs::create_dir_all(folder).expect("OUT_DIR can be written");
    let includes = "#include <math.h>\n#include <algorithm>\n#include \"registry.h\"\n";
    fs::write(&header, includes).expect("OUT_DIR can be written");
    let mut compiler = build.get_compiler().to_command();
    compiler
        .args(["-x", "c++-header"])
        .arg(&header)
        .arg("-o")
        .arg(folder.join("included_first.h.gch"));
    match compiler.status() {
        Ok(status) if status.success() => {}
        Ok(status) => refuse(format_args!("its headers, {status}")),
        Err(error) => refuse(error),
    }
    build.flag("-include").flag(header.display().to_string());
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

fn objects(build: &cc::Build, files: &[PathBuf], folder: &Path) -> Vec<PathBuf> {
    let mut build = build.clone();
    let compiled = build
        .files(files)
        .out_dir(folder)
        .try_compile_intermediates();
    compiled.unwrap_or_else(|error| refuse(error))
}

fn refuse(error: impl Display) -> ! {
    panic!(
        "cannot compile the CUDA kernels for tests on the CPU, which takes g++ 11 or newer (Debian: apt-get install g++) \
         or a compiler that CXX names: {error}"
    )
}

fn archive<'a>(build: &cc::Build, objects: impl IntoIterator<Item = &'a PathBuf>, name: &str) {
    build.clone().objects(objects).compile(name);
}

fn sources_in(folders: &[&Path], extension: &str) -> Vec<PathBuf> {
    files_with_extension(folders, extension).unwrap_or_else(|error| panic!("{error}"))
}
