//! Builds the backend, in the layout of a Triton backend directory, and the project's programs.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::process::{cargo, command, output, run};
use crate::workspace::{root, target};
use crate::{Result, setup, source_paths};

/// The file of the library.
pub const LIBRARY: &str = "libtriton_inflight.so";
/// The package of the other ranks of a model, and its program, beside the library.
pub const RANK_PROGRAM: &str = "inflight-rank";

/// How programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// As they ship: with link-time optimisation, and their bytes depend on the sources alone.
    Shipped,
    /// As unit tests are: with debug assertions and checks for overflow, from the crates that unit tests are linked
    /// with.
    Tested,
}

impl Build {
    /// The folder of the backend directory.
    fn backends(self) -> PathBuf {
        match self {
            Self::Shipped => target("backends"),
            Self::Tested => target("tested-backends"),
        }
    }

    /// Builds a target of a package; returns cargo's messages.
    fn build(self, package: &str, filter: &[&str]) -> Result<String> {
        match self {
            Self::Shipped => {
                let is_front = package == OPENAI;
                let mut cargo = release(match is_front {
                    true => cargo_in_idle_time(),
                    false => cargo(),
                })?;
                cargo.args(["build", "--release", MESSAGES, "--package", package]);
                if is_front {
                    cargo.arg("--target-dir").arg(target(OPENAI_FOLDER));
                }
                output(cargo.args(filter))
            }
            // All at once, with examples: any other choice would give crates other features than a test of the
            // workspace does, and so compile the library again.
            Self::Tested => output(cargo().args([
                "build",
                "--workspace",
                MESSAGES,
                "--lib",
                "--bins",
                "--examples",
            ])),
        }
    }
}

/// The cargo of builds that leave the processors to others: the library, whose last crates compile one after the other,
/// decides how long all takes.
fn cargo_in_idle_time() -> Command {
    let mut nice = command("nice");
    nice.args(["-n", "19"]).arg(cargo().get_program());
    nice
}

/// Has cargo print what it builds.
const MESSAGES: &str = "--message-format=json-render-diagnostics";

/// Builds `libtriton_inflight.so` and `inflight-rank`; returns a backend directory that contains them.
pub fn backend_directory(build: Build) -> Result<PathBuf> {
    let (library, program) = (library(build)?, program(RANK_PROGRAM, RANK_PROGRAM, build)?);
    let backends = build.backends();
    let folder = backends.join("inflight");
    install(&library, &folder, LIBRARY)?;
    install(&program, &folder, RANK_PROGRAM)?;
    // The library is its own batch strategy.
    match symlink(LIBRARY, folder.join("batchstrategy.so")) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(backends),
    }
}

/// Copies what cargo has built into a folder, under a name. Steps may do so beside each other, and a running server
/// keeps the old file that it has mapped.
fn install(built: &Path, folder: &Path, name: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    let new = NamedTempFile::new_in(folder)?;
    fs::copy(built, &new)?;
    new.persist(folder.join(name))?;
    Ok(())
}

/// Builds the library and the program of the other ranks of a model; returns the program's path in the backend
/// directory.
pub fn rank_program() -> Result<PathBuf> {
    Ok(backend_directory(Build::Shipped)?
        .join("inflight")
        .join(RANK_PROGRAM))
}

/// The plug-in for MPI, beside the library.
pub const MPI_LIBRARY: &str = "libinflight_mpi.so";

/// Builds the plug-in for MPI into the backend directory, by MPI's compiler and libclang as `setup::mpi` has found
/// them.
pub fn mpi_plugin(build: Build) -> Result<()> {
    let built = target("mpi");
    let libclang = setup::mpi()?;
    run(release_cargo()?
        .args(["build", "--release", "--locked"])
        .arg("--manifest-path")
        .arg(root().join("plugins/mpi/Cargo.toml"))
        .arg("--target-dir")
        .arg(&built)
        .env("LIBCLANG_PATH", libclang)
        // The headers that belong to a compiler: libclang comes without.
        .env(
            "BINDGEN_EXTRA_CLANG_ARGS",
            format!(
                "-I{}",
                output(command("gcc").arg("-print-file-name=include"))?.trim()
            ),
        ))?;
    let library = built.join("release").join(MPI_LIBRARY);
    install(&library, &build.backends().join("inflight"), MPI_LIBRARY)
}

/// Builds `inflight-sim` (crates/simulator); returns the program's path.
pub fn simulator(build: Build) -> Result<PathBuf> {
    program("inflight-simulator", "inflight-sim", build)
}

/// The package of the server with OpenAI's API, and its program.
const OPENAI: &str = "inflight-openai";
/// Where cargo keeps the shipped build of that package, so that it compiles while the library is linked: cargo locks a
/// folder, and the two builds have few crates in common.
const OPENAI_FOLDER: &str = "openai";

/// Builds the server with OpenAI's API; returns the program's path.
pub fn openai(build: Build) -> Result<PathBuf> {
    program(OPENAI, OPENAI, build)
}

/// The batch manager for C and C++ applications.
pub const EMBED: &str = "libinflight_embed.a";

/// Builds it as it ships; returns its path. A test links it as an rlib too: a plain `build` of both would drop the
/// profile's LTO (cargo issue 9672), and compile all dependencies once more for that.
pub fn embed() -> Result<PathBuf> {
    let messages = output(release_cargo()?.args([
        "rustc",
        "--release",
        "--package=inflight-embed",
        "--lib",
        "--crate-type=staticlib",
        MESSAGES,
    ]))?;
    file_among(&messages, EMBED)
}

/// Builds the program that measures the server with OpenAI's API; returns its path.
pub fn front_cost(build: Build) -> Result<PathBuf> {
    let messages = build.build(OPENAI, &["--example=front-cost"])?;
    program_among(&messages, "front-cost")
}

/// Builds the program that measures the library in process; returns its path.
pub fn measure() -> Result<PathBuf> {
    program("inflight-measure", "inflight-measure", Build::Shipped)
}

/// Builds this program; returns its path. Needed by test steps, because the running executable may be gone:
/// `cargo test --workspace` replaces it with another build.
pub fn xtask() -> Result<PathBuf> {
    program("xtask", "xtask", Build::Tested)
}

/// Builds the stand-in for a GPU; returns the folder of its libraries.
pub fn cuda_stand_in() -> Result<PathBuf> {
    let folder = output(&mut Command::new(program(
        "inflight-cuda-stand-in",
        "inflight-cuda-stand-in",
        Build::Tested,
    )?))?;
    Ok(PathBuf::from(folder.trim_end()))
}

/// Builds the program that checks and measures the library on a GPU; returns its path.
pub fn gpu_check() -> Result<PathBuf> {
    program("inflight-measure", "gpu-check", Build::Shipped)
}

/// Builds a test program of a package, as the tests of the whole workspace are built; returns its path.
pub fn test_program(package: &str, name: &str) -> Result<PathBuf> {
    let messages = output(
        cargo()
            .args(["test", "--no-run", "--workspace", "--test", name])
            .arg(MESSAGES),
    )?;
    let of_package = format!("#{package}@");
    artifacts(&messages)
        .filter(|artifact| artifact["target"]["name"] == name)
        .filter(|artifact| {
            let id = artifact["package_id"].as_str();
            id.is_some_and(|id| id.contains(&of_package))
        })
        .find_map(|artifact| artifact["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo did not build the test {name} of {package}").into())
}

/// Builds a program of a package; returns its path.
fn program(package: &str, name: &str, build: Build) -> Result<PathBuf> {
    let messages = build.build(package, &["--bin", name])?;
    program_among(&messages, name)
}

/// Builds the library; returns its path.
fn library(build: Build) -> Result<PathBuf> {
    let messages = build.build("inflight-backend", &["--lib"])?;
    file_among(&messages, LIBRARY)
}

/// The program with a name among the artifacts in cargo's JSON messages.
fn program_among(messages: &str, name: &str) -> Result<PathBuf> {
    artifacts(messages)
        .filter(|artifact| artifact["target"]["name"] == name)
        .find_map(|artifact| artifact["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo did not build {name}").into())
}

/// The file with a name among the artifacts in cargo's JSON messages.
fn file_among(messages: &str, name: &str) -> Result<PathBuf> {
    artifacts(messages)
        .filter_map(|message| message["filenames"].as_array().cloned())
        .flatten()
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.ends_with(name))
        .ok_or_else(|| format!("cargo did not build {name}").into())
}

/// The cargo for programs that are given away: their bytes depend on the sources alone.
fn release_cargo() -> Result<Command> {
    release(cargo())
}

/// A cargo with the options of such programs.
fn release(mut cargo: Command) -> Result<Command> {
    cargo
        .args(source_paths::options()?)
        .env("CARGO_INCREMENTAL", "0");
    Ok(cargo)
}

/// The artifacts in cargo's JSON messages.
fn artifacts(messages: &str) -> impl Iterator<Item = Value> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use super::*;

    #[test]
    fn steps_beside_each_other_install_the_same_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let built = folder.path().join("built");
        fs::write(&built, vec![7; 1 << 20]).expect("a file");
        fs::set_permissions(&built, fs::Permissions::from_mode(0o755)).expect("a mode");
        let backends = folder.path().join("backends");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        install(&built, &backends, LIBRARY).expect("it is installed");
                    }
                });
            }
        });
        let installed = backends.join(LIBRARY);
        assert_eq!(fs::read(&installed).expect("the file"), vec![7; 1 << 20]);
        let mode = fs::metadata(&installed).expect("the file").permissions();
        assert_eq!(mode.mode() & 0o777, 0o755);
        assert_eq!(fs::read_dir(&backends).expect("a folder").count(), 1);
    }

    /// The crates that a package is built from, each with its features.
    fn crates(package: &str) -> BTreeSet<String> {
        crates_of(&["--edges=normal,build", "--package", package])
    }

    /// The crates that `cargo tree` lists, each with its features.
    fn crates_of(options: &[&str]) -> BTreeSet<String> {
        let mut tree = cargo();
        tree.args(["tree", "--locked", "--prefix=none", "--format={p}: {f}"])
            .args(options);
        let lines = output(&mut tree).expect("cargo answers");
        let lines = lines.lines().map(|line| line.trim_end_matches(" (*)"));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn the_library_is_built_once_for_all_that_link_it() {
        let library = crates("triton-inflight");
        assert!(library.len() > 50, "{library:?}");
        for package in [
            "inflight-backend",
            "inflight-embed",
            "inflight-measure",
            "inflight-simulator",
        ] {
            let of_package = crates(package);
            let is_in_both = |of: &str| {
                let name = of.split(": ").next().unwrap_or(of);
                let start = format!("{name}: ");
                of_package.iter().any(|other| other.starts_with(&start))
            };
            let other = library.difference(&of_package);
            let other: Vec<_> = other.filter(|of| is_in_both(of)).collect();
            assert!(
                other.is_empty(),
                "cargo compiles these again for {package}, because it gives them other features: {other:?}"
            );
        }
    }

    #[test]
    fn commands_are_built_from_the_crates_of_the_workspace() {
        let of_workspace = crates_of(&["--workspace", "--edges=normal,build,dev"]);
        let of_commands = crates("xtask");
        let other: Vec<_> = of_commands.difference(&of_workspace).collect();
        assert!(
            other.is_empty(),
            "cargo compiles these again for the workspace, which gives them more features: name those in \
             xtask/Cargo.toml: {other:?}"
        );
    }
}
