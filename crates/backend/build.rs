//! Hides the C functions of dependencies, so that the library exports only its entry points.
//!
//! The grammar parser has a C interface besides the Rust one, and rustc exports the C functions of all dependencies
//! from a `cdylib` (rust-lang/rust issue 73958). A second version script hides the functions listed in
//! `hidden_symbols.map`. LLD, rustc's bundled linker on x86-64 Linux, accepts a second version script; GNU ld does not.
//! With another linker the library exports these functions too, which is harmless: the server loads every backend with
//! its own symbol scope.

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

/// Whether rustc uses its bundled LLD for this target and no setting selects another linker.
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
