//! Gives the program every function that the library imports from tritonserver, so that it can be opened where no
//! server is. All are one instruction that ends the process: a rank calls none of them.

use std::env;
use std::fs;
use std::path::PathBuf;

/// The bindings, with a line for each function.
const BINDINGS: &str = "../triton/src/sys.rs";

fn main() {
    println!("cargo::rerun-if-changed={BINDINGS}");
    // The library finds what the program exports.
    println!("cargo::rustc-link-arg-bins=-Wl,--export-dynamic-symbol=TRITON*");
    let bindings = fs::read_to_string(BINDINGS).expect("the bindings are in the repository");
    let functions = bindings.lines().filter_map(|line| {
        let name = line.trim().strip_prefix("pub fn ")?.split('(').next()?;
        name.starts_with("TRITON").then_some(name)
    });
    let mut assembly = String::new();
    for name in functions {
        assembly += &format!(".globl {name}\n.type {name}, @function\n{name}:\n");
    }
    assert!(!assembly.is_empty(), "{BINDINGS} declares functions");
    assembly += match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "brk #0\n",
        _ => "ud2\n",
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("server.s"), assembly).expect("OUT_DIR can be written");
}
