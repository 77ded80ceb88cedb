//! Where sources lie on this machine. Programs that are given away must not show it, so that their bytes are the same
//! wherever they are built.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Result;
use crate::process::{cargo, command, output};
use crate::workspace::root;

/// Options of cargo with which built programs show the paths of `shown`. They add to those of config files; where
/// `RUSTFLAGS` is set, that holds instead.
pub fn options() -> Result<[String; 2]> {
    let flags = serde_json::to_string(&rustflags()?)?;
    Ok(["--config".into(), format!("build.rustflags={flags}")])
}

/// The same as arguments of the compiler.
pub fn rustflags() -> Result<Vec<String>> {
    let shown = shown()?.into_iter();
    Ok(shown
        .map(|(folder, name)| format!("--remap-path-prefix={}={name}", folder.display()))
        .collect())
}

/// Folders with sources.
pub fn folders() -> Result<Vec<PathBuf>> {
    Ok(shown()?.into_iter().map(|(folder, _)| folder).collect())
}

/// The first path in a program that is below one of the folders: it would be another one on another machine.
pub fn find(program: &[u8], folders: &[PathBuf]) -> Option<String> {
    let mut starts = folders.iter().filter_map(|folder| {
        let folder = format!("{}/", folder.display());
        let mut windows = program.windows(folder.len());
        windows.position(|window| window == folder.as_bytes())
    });
    let path = program[starts.next()?..].iter();
    let path = path.take_while(|byte| byte.is_ascii_graphic());
    Some(path.map(|&byte| char::from(byte)).collect())
}

/// Folders with sources, and what programs show in place of each.
fn shown() -> Result<Vec<(PathBuf, String)>> {
    let rustc = || command(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let sysroot = output(rustc().args(["--print", "sysroot"]))?;
    let version = output(rustc().args(["--version", "--verbose"]))?;
    let commit = version
        .lines()
        .find_map(|line| line.strip_prefix("commit-hash: "));
    // The standard library comes compiled, with this path.
    let standard = format!("/rustc/{}", commit.unwrap_or("unknown"));
    let mut shown = vec![
        (root().to_owned(), "/inflight".to_owned()),
        (
            Path::new(sysroot.trim()).join("lib/rustlib/src/rust"),
            standard,
        ),
    ];
    let registries = registries()?.into_iter();
    shown.extend(registries.map(|folder| (folder, "/crates".to_owned())));
    Ok(shown)
}

/// The folders that hold the sources of crates of a registry, which cargo names after the registry.
fn registries() -> Result<BTreeSet<PathBuf>> {
    let metadata = output(cargo().args(["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages
        .filter(|package| package["source"].is_string())
        .filter_map(|package| {
            Path::new(package["manifest_path"].as_str()?)
                .ancestors()
                .nth(2)
        })
        .map(Path::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_this_machine_are_found_and_others_are_not() {
        let folders = ["/work/inflight", "/home/me/crates"].map(PathBuf::from);
        let program = b"\0\x01/crates/a/src/lib.rs\0/home/me/crates/b/src/lib.rs\0/work";
        assert_eq!(
            find(program, &folders).as_deref(),
            Some("/home/me/crates/b/src/lib.rs")
        );
        assert_eq!(find(b"/crates/a/src/lib.rs", &folders), None);
        assert_eq!(find(b"", &folders), None);
    }

    #[test]
    fn the_sources_of_crates_are_found_and_shown_as_others() {
        let flags = rustflags().expect("cargo and rustc answer");
        assert!(
            flags.iter().any(|flag| flag.ends_with("=/crates")),
            "{flags:?}"
        );
        let root = format!("--remap-path-prefix={}=/inflight", root().display());
        assert!(flags.contains(&root), "{flags:?}");
    }
}
