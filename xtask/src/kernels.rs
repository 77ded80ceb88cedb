//! `cargo xtask kernels`: compiles `kernels/*.cu` for GPUs, so that the next build embeds them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process::{command, run as run_command};
use crate::{Result, setup, workspace};

/// Compiles the kernels into `target/kernels`, unless the images there are those of the sources.
pub fn run() -> Result<()> {
    let sources = workspace::root().join("kernels");
    let folder = workspace::target("kernels");
    // build.rs compares it with the sources.
    let stamp = folder.join("sources.txt");
    let all = all_sources(&sources)?;
    if fs::read(&stamp).is_ok_and(|compiled| compiled == all) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    eprintln!("compiling {} to {}", sources.display(), folder.display());
    run_command(
        command(setup::python()?)
            .arg(workspace::root().join("tools/kernels/compile.py"))
            .args([&setup::nvrtc()?, &sources, &folder]),
    )?;
    fs::write(stamp, all)?;
    Ok(())
}

/// The names and the contents of all sources.
fn all_sources(folder: &Path) -> Result<Vec<u8>> {
    let entries = fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut files: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    files.retain(|path| path.is_file());
    files.sort();
    let mut all = Vec::new();
    for path in files {
        all.extend_from_slice(path.file_name().unwrap_or_default().as_encoded_bytes());
        all.push(b'\n');
        all.extend(fs::read(&path)?);
    }
    Ok(all)
}
