//! The versions of the system's libraries that programs need, from the versions of the symbols that they import.

use std::collections::BTreeMap;

use object::Endianness;
use object::read::elf::{ElfFile64, FileHeader};

use crate::Result;

/// The Debian package of each library, and how its versions of symbols begin.
const LIBRARIES: [(&str, &str, &str); 7] = [
    ("libc.so.6", "libc6", "GLIBC_"),
    ("libm.so.6", "libc6", "GLIBC_"),
    ("libdl.so.2", "libc6", "GLIBC_"),
    ("libpthread.so.0", "libc6", "GLIBC_"),
    ("ld-linux-x86-64.so.2", "libc6", "GLIBC_"),
    ("ld-linux-aarch64.so.1", "libc6", "GLIBC_"),
    ("libgcc_s.so.1", "libgcc-s1", "GCC_"),
];

/// A version of a package, as numbers that compare.
type Version = Vec<u32>;

/// The lowest version of each package that has every symbol a program imports, by the names of packages.
pub fn needed_packages<'a>(
    programs: impl IntoIterator<Item = &'a [u8]>,
) -> Result<BTreeMap<&'static str, String>> {
    let mut needed: BTreeMap<&str, Version> = BTreeMap::new();
    for program in programs {
        for (library, symbols) in imported_versions(program)? {
            let found = LIBRARIES.iter().find(|(name, ..)| *name == library);
            let (_, package, start) =
                found.ok_or_else(|| format!("no package is known that has {library}"))?;
            let version = symbols.strip_prefix(start).and_then(parse);
            let version =
                version.ok_or_else(|| format!("{library}: {symbols} is no version of symbols"))?;
            let highest = needed.entry(package).or_default();
            *highest = version.max(std::mem::take(highest));
        }
    }
    let written = |version: Version| {
        version
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(".")
    };
    Ok(needed
        .into_iter()
        .map(|(package, version)| (package, written(version)))
        .collect())
}

fn parse(version: &str) -> Option<Version> {
    version
        .split('.')
        .map(|number| number.parse().ok())
        .collect()
}

/// Each library with each of its versions of symbols.
fn imported_versions(program: &[u8]) -> Result<Vec<(String, String)>> {
    let file = ElfFile64::<Endianness>::parse(program)?;
    let endian = file.elf_header().endian()?;
    let sections = file.elf_section_table();
    let mut versions = Vec::new();
    let Some((needs, strings)) = sections.gnu_verneed(endian, program)? else {
        return Ok(versions);
    };
    let strings = sections.strings(endian, program, strings)?;
    for need in needs {
        let (library, symbols) = need?;
        let library = std::str::from_utf8(library.file(endian, strings)?)?;
        for version in symbols {
            let version = std::str::from_utf8(version?.name(endian, strings)?)?;
            versions.push((library.to_owned(), version.to_owned()));
        }
    }
    Ok(versions)
}
