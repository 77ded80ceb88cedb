//! Hides what dependencies would export from the shared library beside its entry points.
//!
//! The C interface of the grammar parser comes along with the Rust one, and rustc exports every function of C from a
//! `cdylib`, whoever it is of (rust-lang/rust issue 73958). A second version script hides those that
//! `hidden_symbols.map` names. That is understood by LLD, rustc's own linker on x86-64 Linux, and refused by GNU ld: with
//! another linker the library exports a few functions more, which nobody calls, since the server opens every backend
//! in a name space of its own.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=hidden_symbols.map");
    if is_linked_by_lld() {
        let folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={folder}/hidden_symbols.map");
    }
}

/// Whether rustc has a linker of its own for this target, and nothing asks for another one.
fn is_linked_by_lld() -> bool {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let others = [
        "linker-features",
        "link-self-contained",
        "fuse-ld",
        "linker=",
    ];
    env::var("TARGET").is_ok_and(|target| target == TARGET)
        && env::var_os("RUSTC_LINKER").is_none()
        && !others.iter().any(|other| flags.contains(other))
        && sysroot().is_some_and(|sysroot| {
            let linker = format!("lib/rustlib/{TARGET}/bin/gcc-ld/ld.lld");
            sysroot.join(linker).is_file()
        })
}

fn sysroot() -> Option<PathBuf> {
    let output = Command::new(env::var_os("RUSTC")?)
        .args(["--print", "sysroot"])
        .output()
        .ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(path.trim().into())
}
