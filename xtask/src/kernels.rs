//! `cargo xtask kernels`: compiles `kernels/*.cu` for GPUs, so that the next build embeds them.

use std::fs;
use std::path::Path;

use crate::process::{command, run as run_command};
use crate::{Result, setup, workspace};

/// Compiles the kernels into `target/kernels`, unless the images there are those of the sources.
pub fn run() -> Result<()> {
    let sources = workspace::root().join("kernels");
    let folder = workspace::target("kernels");
    // build.rs compares it with the sources.
    let stamp = folder.join("sources.txt");
    let all = inflight_kernel_sources::snapshot(&sources)?;
    if fs::read(&stamp).is_ok_and(|compiled| compiled == all) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    eprintln!("compiling {} to {}", sources.display(), folder.display());
    compile(&sources, &folder)?;
    fs::write(stamp, all)?;
    Ok(())
}

/// Compiles a source, or all sources of a folder, to images in another folder.
pub fn compile(sources: &Path, folder: &Path) -> Result<()> {
    run_command(
        command(setup::python()?)
            .arg(workspace::root().join("tools/kernels/compile.py"))
            .args([&setup::nvrtc()?, sources, folder]),
    )
}
