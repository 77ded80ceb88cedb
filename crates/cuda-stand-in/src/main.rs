//! Runs a program on the stand-in for a GPU; without one, prints the folder of the libraries.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use inflight_cuda_stand_in::{LIBRARY_DIR, StandIn};

fn main() {
    let mut arguments = env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        println!("{LIBRARY_DIR}");
        return;
    };
    let mut command = Command::new(&program);
    let error = StandIn::new().apply(command.args(arguments)).exec();
    eprintln!("cannot run {}: {error}", program.display());
    std::process::exit(127);
}
