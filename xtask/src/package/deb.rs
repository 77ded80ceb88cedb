//! A Debian package: <https://manpages.debian.org/deb.5>.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ar::{Builder, Header};
use md5::{Digest, Md5};

use super::date::Date;
use super::tarball::{compressed, gzip};
use super::tree::{Entry, Tree};
use super::{NAME, VERSION};
use crate::Result;

const MAINTAINER: &str = "The contributors of inflight <maintainers@inflight.invalid>";
/// The license of the package, as <https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/> has it.
const COPYRIGHT: &str = "\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: inflight

Files: *
Copyright: The contributors of inflight
License: Apache-2.0
 The text of the licence is in /usr/share/common-licenses/Apache-2.0, and the licences of the crates
 that the library and the programs contain are in /usr/share/doc/triton-inflight/licences-of-crates.txt.gz.
";

/// The server with OpenAI's API as a service. Nothing starts it but its user: it needs a tritonserver.
const SERVICE: &str = include_str!("inflight-openai.service");

/// What Debian calls this machine's architecture.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A package of files in the layout of a prefix, that needs at least these versions of others, and for some of its uses
/// the suggested ones.
pub fn package(
    files: &Tree,
    needed: &BTreeMap<&str, String>,
    suggested: &BTreeSet<&str>,
    date: Date,
) -> Result<Vec<u8>> {
    let files = installed(files)?;
    let mut control = Tree::default();
    control.insert(
        "control",
        Entry::File(self::control(&files, needed, suggested)?.into()),
    );
    control.insert("md5sums", Entry::File(md5sums(&files)?.into()));
    let mut archive = Builder::new(Vec::new());
    for (name, bytes) in [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", compressed(&control, date)?),
        ("data.tar.gz", compressed(&files, date)?),
    ] {
        let mut header = Header::new(name.into(), bytes.len() as u64);
        header.set_mode(0o100_644);
        header.set_mtime(date.seconds());
        archive.append(&header, bytes.as_slice())?;
    }
    Ok(archive.into_inner()?)
}

/// The files where Debian and Triton have them: backends at Triton's own prefix, the rest below /usr. Documents are
/// compressed, as Debian's policy asks.
fn installed(files: &Tree) -> Result<Tree> {
    let documents = format!("usr/share/doc/{NAME}");
    let mut installed = Tree::default();
    for (path, entry) in files.entries() {
        let path = match path.starts_with("backends/") {
            true => format!("opt/tritonserver/{path}"),
            false => format!("usr/{path}"),
        };
        match entry {
            // Every Debian system has the text of this licence.
            Entry::File(_) if path == format!("{documents}/LICENSE") => {}
            Entry::File(text) if path == format!("{documents}/CHANGELOG.md") => {
                installed.insert(
                    format!("{documents}/changelog.gz"),
                    Entry::File(gzip(text)?),
                );
            }
            Entry::File(text) if path.starts_with("usr/share/") => {
                installed.insert(format!("{path}.gz"), Entry::File(gzip(text)?));
            }
            _ => installed.insert(path, entry.clone()),
        }
    }
    installed.insert(
        format!("{documents}/copyright"),
        Entry::File(COPYRIGHT.into()),
    );
    installed.insert(
        "usr/lib/systemd/system/inflight-openai.service",
        Entry::File(SERVICE.into()),
    );
    // On the path, for mpirun.
    installed.insert(
        "usr/bin/inflight-rank",
        Entry::Link("../../opt/tritonserver/backends/inflight/inflight-rank".into()),
    );
    Ok(installed)
}

fn control(
    files: &Tree,
    needed: &BTreeMap<&str, String>,
    suggested: &BTreeSet<&str>,
) -> Result<String> {
    let depends = needed
        .iter()
        .map(|(package, version)| format!("{package} (>= {version})"));
    let num_bytes: usize = contents(files).map(|(_, bytes)| bytes.len()).sum();
    let mut text = String::new();
    for (field, value) in [
        ("Package", NAME.to_owned()),
        ("Version", VERSION.to_owned()),
        ("Architecture", architecture().to_owned()),
        ("Maintainer", MAINTAINER.to_owned()),
        ("Installed-Size", num_bytes.div_ceil(1024).to_string()),
        ("Depends", depends.collect::<Vec<_>>().join(", ")),
        (
            "Suggests",
            suggested.iter().copied().collect::<Vec<_>>().join(", "),
        ),
        ("Section", "science".to_owned()),
        ("Priority", "optional".to_owned()),
    ] {
        if !value.is_empty() {
            writeln!(text, "{field}: {value}")?;
        }
    }
    text += "\
Description: Triton backend that generates text with in-flight batching
 Serves checkpoints of language models in Triton Inference Server, on CPUs
 and NVIDIA GPUs. Requests join and leave the batch at every step. The
 package holds the backend, the program of its other ranks, a server with
 OpenAI's and Anthropic's APIs in front of Triton, a simulator of
 configurations, and the headers of logits post-processors and of the batch
 manager.
";
    Ok(text)
}

/// The checksum of each file, for `dpkg --verify`.
fn md5sums(files: &Tree) -> Result<String> {
    let mut sums = String::new();
    for (path, bytes) in contents(files) {
        for byte in Md5::digest(bytes) {
            write!(sums, "{byte:02x}")?;
        }
        writeln!(sums, "  {path}")?;
    }
    Ok(sums)
}

fn contents(files: &Tree) -> impl Iterator<Item = (&str, &[u8])> {
    files.entries().filter_map(|(path, entry)| match entry {
        Entry::File(bytes) | Entry::Program(bytes) => Some((path, bytes.as_slice())),
        Entry::Link(_) => None,
    })
}
