//! `cargo xtask gpu-bundle`: packs what checks and measures the library on a GPU machine that reaches no registry.
//!
//! ```text
//! gpu-check                       crates/measure/src/gpu_check: runs all of it, and writes a report
//! tests/kernels, tests/models     the project's own tests, which run on a real GPU there
//! kernels/ fixtures/              what they read
//! triton/bin, triton/lib          tritonserver and the libraries that it needs
//! backends/ model_repository/     the backend, and the demo model
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::library::Build;
use crate::process::{command, output, run as run_command};
use crate::{Result, kernels, library, setup, workspace};

#[derive(clap::Args)]
pub struct Options {
    /// Run the bundle here, on the stand-in for a GPU, with small sizes
    #[arg(long)]
    try_it: bool,
}

const NAME: &str = "inflight-gpu-check";
/// What such a machine takes.
const MAX_BYTES: u64 = 60_000_000;
/// Packs the bundle.
pub fn run(options: &Options) -> Result<()> {
    kernels::run(kernels::ALL)?;
    let parent = workspace::target("gpu-bundle");
    if parent.exists() {
        fs::remove_dir_all(&parent)?;
    }
    let folder = parent.join(NAME);
    fs::create_dir_all(&folder)?;
    fill(&folder)?;
    let archive = parent.join(format!("{NAME}.tar.xz"));
    run_command(
        command("tar")
            .args([
                "--create",
                // The kernels are in it as files, in the library and in `gpu-check`: the window must reach from one to
                // the next.
                "--use-compress-program=xz --lzma2=preset=6,dict=256MiB",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
            ])
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .arg(&parent)
            .arg(NAME),
    )?;
    let num_bytes = fs::metadata(&archive)?.len();
    println!("{}: {num_bytes} bytes", archive.display());
    if num_bytes > MAX_BYTES {
        return Err(
            format!("the bundle has {num_bytes} bytes, and {MAX_BYTES} is the most").into(),
        );
    }
    if options.try_it {
        try_it(&parent, &archive)?;
    }
    Ok(())
}

fn fill(folder: &Path) -> Result<()> {
    let root = workspace::root();
    for folder in [
        "tests",
        "kernels",
        "triton/bin",
        "triton/lib",
        "backends/inflight",
    ]
    .map(|name| folder.join(name))
    {
        fs::create_dir_all(folder)?;
    }
    copy_program(&library::gpu_check()?, &folder.join("gpu-check"))?;
    for (package, test, name) in [
        ("inflight-kernels-on-cpu", "suite", "kernels"),
        ("inflight-tests", "models", "models"),
    ] {
        let program = library::test_program(package, test)?;
        copy_program(&program, &folder.join("tests").join(name))?;
    }
    let backend = "inflight/libtriton_inflight.so";
    let library = library::backend_directory(Build::Shipped)?.join(backend);
    copy_program(&library, &folder.join("backends").join(backend))?;
    let images = folder.join("kernels");
    copy_images(&workspace::target("kernels"), &images)?;
    // The conversions of fp8.cuh, which are no kernels by themselves.
    let conversions = workspace::target("test-kernels");
    kernels::compile(
        &root.join("crates/kernels-on-cpu/tests/kernels/fp8.cu"),
        &conversions,
        kernels::ALL,
    )?;
    copy_images(&conversions, &images)?;
    copy_folder(&root.join("tests/fixtures"), &folder.join("fixtures"))?;
    fs::create_dir_all(folder.join("model_repository"))?;
    copy_folder(
        &root.join("model_repository/stories"),
        &folder.join("model_repository/stories"),
    )?;
    copy_server(&setup::tritonserver()?, &folder.join("triton"))
}

fn copy_images(source: &Path, target: &Path) -> Result<()> {
    for entry in fs::read_dir(source)? {
        let path = entry?.path();
        let kind = path.extension();
        if kind.is_some_and(|kind| kind == "cubin" || kind == "ptx") {
            fs::copy(&path, target.join(path.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

/// The server, and the libraries beside it that it needs.
fn copy_server(server: &Path, folder: &Path) -> Result<()> {
    let libraries = server
        .ancestors()
        .nth(4)
        .map(|package| package.join("nvidia_pytriton.libs"));
    let Some(libraries) = libraries.filter(|folder| folder.is_dir()) else {
        return Err("the bundle needs the tritonserver from PyPI: unset TRITONSERVER".into());
    };
    let mut waiting = vec![server.to_owned()];
    let mut known = BTreeSet::new();
    while let Some(file) = waiting.pop() {
        for name in needed(&file)? {
            let library = libraries.join(&name);
            if library.is_file() && known.insert(name) {
                waiting.push(library);
            }
        }
    }
    copy_program(server, &folder.join("bin/tritonserver"))?;
    for name in known {
        copy_program(&libraries.join(&name), &folder.join("lib").join(&name))?;
    }
    Ok(())
}

/// The libraries that a program or library names.
fn needed(file: &Path) -> Result<Vec<String>> {
    let dynamic = output(command("readelf").args(["--dynamic", "--wide"]).arg(file))?;
    let names = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned()));
    Ok(names.collect())
}

/// Copies a program or library without what only debuggers read.
fn copy_program(source: &Path, target: &Path) -> Result<()> {
    run_command(
        command("strip")
            .arg("--strip-unneeded")
            .arg("-o")
            .args([target, source]),
    )
}

fn copy_folder(source: &Path, target: &Path) -> Result<()> {
    run_command(
        command("cp")
            .arg("--recursive")
            .arg("--dereference")
            .args([source, target]),
    )
}

/// Unpacks the bundle elsewhere and runs it, with the stand-in where a GPU's libraries are.
fn try_it(parent: &Path, archive: &Path) -> Result<()> {
    let place = parent.join("unpacked");
    fs::create_dir_all(&place)?;
    run_command(
        command("tar")
            .arg("--extract")
            .arg("--file")
            .arg(archive)
            .arg("--directory")
            .arg(&place),
    )?;
    // Triton's own runtime library looks for `libcuda.so.1`, and needs more of it than the stand-in has.
    let stand_in = library::cuda_stand_in()?;
    let libraries = parent.join("libraries");
    fs::create_dir_all(&libraries)?;
    for (name, library) in [
        ("libcuda.so", "libcuda.so.1"),
        ("libcublasLt.so.12", "libcublasLt.so.12"),
    ] {
        let link = libraries.join(name);
        std::os::unix::fs::symlink(stand_in.join(library), link)?;
    }
    let program: PathBuf = place.join(NAME).join("gpu-check");
    run_command(
        Command::new(program)
            .arg("--quick")
            .arg("--out")
            .arg(parent.join("report"))
            .env("LD_LIBRARY_PATH", libraries),
    )
}
