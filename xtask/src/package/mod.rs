//! `cargo xtask package`: the library and the programs as a tar archive and a Debian package, with checksums and a bill
//! of materials.
//!
//! The same sources give the same bytes in any folder, on any day: paths are remapped, entries are sorted, owners are
//! root, and every date is the commit's, or `SOURCE_DATE_EPOCH`.

mod contents;
mod date;
mod deb;
mod dependencies;
mod elf;
mod licences;
mod sbom;
mod tarball;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use self::contents::Programs;
use self::date::Date;
use self::dependencies::Dependencies;
use crate::{Result, kernels, workspace};

/// The name of the package.
const NAME: &str = "triton-inflight";
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(clap::Args)]
pub struct Options {
    /// The folder to write [default: target/packages]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Pack the library and the programs that lie in this folder, instead of building them
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
}

/// Builds what is packed, and writes the packages.
pub fn run(options: &Options) -> Result<()> {
    let programs = match &options.programs {
        Some(folder) => Programs::read(folder)?,
        None => {
            kernels::run(kernels::ALL)?;
            Programs::build()?
        }
    };
    let out = match &options.out {
        Some(folder) => folder.clone(),
        None => workspace::target("packages"),
    };
    fs::create_dir_all(&out).map_err(|error| format!("--out {}: {error}", out.display()))?;
    write(&programs, Date::of_sources()?, &out)
}

fn write(programs: &Programs, date: Date, out: &Path) -> Result<()> {
    programs.refuse_build_paths()?;
    let dependencies = Dependencies::of(&programs.packages())?;
    let bill = sbom::document(&dependencies, date)?;
    let tree = contents::tree(programs, &dependencies, &bill)?;
    let full_name = format!("{NAME}-{VERSION}-{}-linux", std::env::consts::ARCH);
    let needed = elf::needed_packages(programs.linked())?;
    let suggested = elf::suggested_packages(programs.linked())?;
    // To compress them takes most of the time.
    let (archive, package) = std::thread::scope(|scope| {
        let archive = scope.spawn(|| {
            let archive = tarball::compressed(&tree.below(&full_name), date);
            archive.map_err(|error| error.to_string())
        });
        let package = deb::package(&tree, &needed, &suggested, date);
        (archive.join().expect("no panic"), package)
    });
    let files = [
        (format!("{full_name}.tar.gz"), archive?),
        (
            format!("{NAME}_{VERSION}_{}.deb", deb::architecture()),
            package?,
        ),
        (format!("{full_name}.spdx.json"), bill.into_bytes()),
    ];
    let mut sums = String::new();
    for (name, bytes) in &files {
        let path = out.join(name);
        fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("{}: {} bytes", path.display(), bytes.len());
        sums += &format!("{}  {name}\n", sha256(bytes));
    }
    Ok(fs::write(out.join("SHA256SUMS"), sums)?)
}

/// The SHA-256 in hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
