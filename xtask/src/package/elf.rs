//! The versions of the system's libraries that programs need, from the versions of the symbols that they import.

use std::collections::{BTreeMap, BTreeSet};

use object::Endianness;
use object::elf::DT_NEEDED;
use object::read::elf::{Dyn, ElfFile64, FileHeader};

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

/// The Debian package of each library of MPI, which starts programs with it, too.
const MPI_LIBRARIES: [(&str, &str); 2] =
    [("libmpi.so.40", "openmpi-bin"), ("libmpich.so.12", "mpich")];

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

/// The packages of MPI that a program or library is linked with.
pub fn suggested_packages<'a>(
    programs: impl IntoIterator<Item = &'a [u8]>,
) -> Result<BTreeSet<&'static str>> {
    let mut suggested = BTreeSet::new();
    for program in programs {
        let libraries = needed_libraries(program)?;
        let of_mpi = MPI_LIBRARIES
            .iter()
            .filter(|(name, _)| libraries.iter().any(|library| library == name));
        suggested.extend(of_mpi.map(|(_, package)| *package));
    }
    Ok(suggested)
}

/// The names of the libraries that are loaded with a program.
fn needed_libraries(program: &[u8]) -> Result<Vec<String>> {
    let file = ElfFile64::<Endianness>::parse(program)?;
    let endian = file.elf_header().endian()?;
    let sections = file.elf_section_table();
    let Some((entries, strings)) = sections.dynamic(endian, program)? else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, program, strings)?;
    let needed = entries
        .iter()
        .filter(|entry| entry.d_tag(endian) == DT_NEEDED);
    needed
        .map(|entry| {
            let name = strings.get(entry.d_val(endian).try_into()?);
            let name = name.map_err(|()| "a library's name is no text of the file")?;
            Ok(std::str::from_utf8(name)?.to_owned())
        })
        .collect()
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
