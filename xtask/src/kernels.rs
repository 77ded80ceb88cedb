//! `cargo xtask kernels`: compiles `kernels/*.cu` for GPUs, so that the next build embeds them.

use std::fs;
use std::path::Path;

use crate::process::{command, run as run_command};
use crate::{Result, setup, workspace};

/// Binaries for Hopper, and what the drivers of all other GPUs compile: two kinds of images, and of GPUs, as tests have
/// them.
pub const FEW: &[&str] = &["sm_90", "compute_80"];
/// Binaries for desktop GPUs of Ampere and for Ada as well: what ships.
pub const ALL: &[&str] = &["sm_80", "sm_86", "sm_89", "sm_90", "compute_90"];

/// Compiles the kernels for these architectures into `target/kernels`, unless they have been compiled from these
/// sources.
pub fn run(architectures: &[&str]) -> Result<()> {
    let sources = workspace::root().join("kernels");
    let folder = workspace::target("kernels");
    // build.rs compares it with the sources.
    let stamp = folder.join("sources.txt");
    let all = inflight_kernel_sources::snapshot(&sources)?;
    if fs::read(&stamp).is_ok_and(|compiled| compiled == all) && has_images(&folder, architectures)?
    {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    eprintln!("compiling {} to {}", sources.display(), folder.display());
    compile(&sources, &folder, architectures)?;
    fs::write(stamp, all)?;
    Ok(())
}

/// Whether a folder has images for these architectures. One run compiles each source for all of its own.
fn has_images(folder: &Path, architectures: &[&str]) -> Result<bool> {
    let images = inflight_kernel_sources::files(folder)?;
    let has_one = |architecture: &&str| {
        let part = format!(".{architecture}.");
        let names = images.iter().filter_map(|image| image.file_name());
        names
            .into_iter()
            .any(|name| name.to_string_lossy().contains(&part))
    };
    Ok(architectures.iter().all(has_one))
}

/// Compiles a source, or all sources of a folder, to images in another folder.
pub fn compile(sources: &Path, folder: &Path, architectures: &[&str]) -> Result<()> {
    run_command(
        command(setup::python()?)
            .arg(workspace::root().join("tools/kernels/compile.py"))
            .args([&setup::nvrtc()?, sources, folder])
            .args(architectures),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_few_images_lacks_some_of_all() {
        let folder = std::env::temp_dir().join(format!("kernel-images-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        for name in ["a.sm_90.cubin", "a.compute_80.ptx"] {
            fs::write(folder.join(name), "").expect("a file");
        }
        assert!(has_images(&folder, FEW).expect("a folder"));
        assert!(!has_images(&folder, ALL).expect("a folder"));
        fs::remove_dir_all(&folder).expect("the folder");
    }
}
