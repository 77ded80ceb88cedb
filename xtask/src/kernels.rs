//! `cargo xtask kernels`: compiles `kernels/*.cu` for GPUs, so that the next build embeds them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process::{command, run as run_command};
use crate::{Result, setup, workspace};

/// Binaries for desktop GPUs of Ampere and for Ada as well: what ships.
pub const ALL: &[&str] = &["sm_80", "sm_86", "sm_89", "sm_90", "compute_90"];

/// Binaries take most of the compiler's time, so the quick tier has them of one in so many sources.
const SOURCES_PER_SAMPLE: usize = 4;

/// Compiles the kernels for the quick tier: to PTX, which the drivers of all GPUs compile, and some sources for Hopper
/// as well, which a seed chooses.
pub fn run_sample(seed: u32) -> Result<()> {
    let sources = inflight_kernel_sources::files_with_extension(&[&sources()], "cu")?;
    let names: Vec<_> = sources
        .iter()
        .filter_map(|source| source.file_stem()?.to_str())
        .collect();
    let sample = sample(&names, seed).join(",");
    run(&["compute_80", &format!("sm_90={sample}")])
}

/// The names that a seed chooses.
fn sample<'a>(names: &[&'a str], seed: u32) -> Vec<&'a str> {
    let first = seed as usize % SOURCES_PER_SAMPLE;
    let names = names.iter().skip(first).step_by(SOURCES_PER_SAMPLE);
    names.copied().collect()
}

/// Compiles the kernels for these architectures into `target/kernels`, unless they have been compiled from these
/// sources.
pub fn run(architectures: &[&str]) -> Result<()> {
    let sources = sources();
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

fn sources() -> PathBuf {
    workspace::root().join("kernels")
}

/// Whether a folder has images for these architectures.
fn has_images(folder: &Path, architectures: &[&str]) -> Result<bool> {
    let images = inflight_kernel_sources::files(folder)?;
    let has_one = |architecture: &&str| {
        // Whichever sources a sample has: another one is no reason to compile everything again.
        let (architecture, _) = architecture.split_once('=').unwrap_or((architecture, ""));
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
    fn every_source_is_in_the_sample_of_a_seed() {
        let names = ["a", "b", "c", "d", "e"];
        let samples = [0, 1, 2, 3].map(|seed| sample(&names, seed));
        assert_eq!(samples[0], ["a", "e"]);
        let mut all = samples.concat();
        all.sort_unstable();
        assert_eq!(all, names);
        assert_eq!(sample(&names, 4), samples[0]);
    }

    #[test]
    fn a_folder_with_few_images_lacks_some_of_all() {
        let folder = std::env::temp_dir().join(format!("kernel-images-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        for name in ["a.sm_90.cubin", "a.compute_80.ptx"] {
            fs::write(folder.join(name), "").expect("a file");
        }
        let has = |architectures: &[&str]| has_images(&folder, architectures).expect("a folder");
        assert!(has(&["compute_80", "sm_90=b"]));
        assert!(!has(ALL));
        fs::remove_dir_all(&folder).expect("the folder");
    }
}
