//! The symbols that the shared library exports and imports.
//!
//! The library is linked with BIND_NOW: one function that the server lacks fails the load of every model.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH};
use object::read::elf::{Dyn, ElfFile64, ElfSymbol64};
use object::{Endianness, Object, ObjectSymbol};

/// The oldest supported server.
const SERVER: &str = include_str!("symbols/server-2.51.0.txt");

const ENTRY_POINTS: [&str; 15] = [
    "INFLIGHT_RankMain",
    "TRITONBACKEND_Finalize",
    "TRITONBACKEND_GetBackendAttribute",
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_ModelBatchFinalize",
    "TRITONBACKEND_ModelBatchIncludeRequest",
    "TRITONBACKEND_ModelBatchInitialize",
    "TRITONBACKEND_ModelBatcherFinalize",
    "TRITONBACKEND_ModelBatcherInitialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelInstanceExecute",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
    "TRITONBACKEND_ModelInstanceReady",
];

type Names = BTreeSet<String>;

#[test]
fn the_library_exports_its_entry_points_and_nothing_else() {
    let mut exports = Library::open(&ours()).exports;
    if cfg!(not(target_arch = "x86_64")) {
        // They cannot be hidden there: see build.rs.
        exports.retain(|name| !name.starts_with("llg_"));
    }
    assert_eq!(exports, ENTRY_POINTS.map(str::to_owned).into());
}

#[test]
fn the_oldest_supported_server_has_every_function_that_the_library_imports() {
    let imports = Library::open(&ours()).triton_imports();
    assert!(imports.len() > 50, "only {} imports found", imports.len());
    let missing: Names = imports.difference(&listed()).cloned().collect();
    assert_eq!(missing, Names::new());
}

#[test]
fn the_library_needs_nothing_but_the_c_library() {
    // A library of Triton's among these would be loaded a second time beside the server's own: in some
    // distributions its file has another name.
    let system = [
        "libc.",
        "libm.",
        "libgcc_s.",
        "ld-linux",
        "libpthread.",
        "libdl.",
        "librt.",
    ];
    let needed = Library::open(&ours()).needed;
    let others: Vec<_> = needed
        .iter()
        .filter(|name| !system.iter().any(|known| name.starts_with(known)))
        .collect();
    assert_eq!(others, Vec::<&String>::new());
}

/// The server that the tests run: what `TRITONSERVER` names, else the one that was set up for them.
#[test]
fn the_server_at_hand_has_every_function_that_the_library_imports() {
    let Some(server) = server() else {
        // The set-up server is the listed one, so the test above has said as much.
        eprintln!("no server at hand: run `cargo xtask test`, or name one in TRITONSERVER");
        return;
    };
    let exports = server_exports(&server);
    let imports = Library::open(&ours()).triton_imports();
    let missing: Names = imports.difference(&exports).cloned().collect();
    assert_eq!(
        missing,
        Names::new(),
        "functions that {} lacks",
        server.display()
    );
}

/// The library that cargo has built beside this test.
fn ours() -> PathBuf {
    let test = env::current_exe().expect("the test has a path");
    test.with_file_name("libtriton_inflight.so")
}

fn listed() -> Names {
    let lines = SERVER.lines().filter(|line| !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

fn server() -> Option<PathBuf> {
    if let Some(named) = env::var_os("TRITONSERVER") {
        return Some(PathBuf::from(named));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let set_up = root.join("target/triton/pytriton/tritonserver/bin/tritonserver");
    set_up.is_file().then_some(set_up)
}

/// The symbols that the server and its own libraries export, found by the server's run path.
fn server_exports(server: &Path) -> Names {
    let server = fs::canonicalize(server).expect("the server exists");
    let folder = server.parent().expect("a file lies in a folder").to_owned();
    let program = Library::open(&server);
    let mut exports = program.exports;
    for folder_of_libraries in &program.run_path {
        let origin = folder.to_str().expect("UTF-8");
        let libraries = PathBuf::from(folder_of_libraries.replace("$ORIGIN", origin));
        for name in program
            .needed
            .iter()
            .filter(|name| name.starts_with("libtritonserver"))
        {
            let file = libraries.join(name);
            if file.is_file() {
                exports.extend(Library::open(&file).exports);
            }
        }
    }
    exports
}

/// The entries of an ELF file for the dynamic linker.
struct Library {
    exports: Names,
    imports: Names,
    needed: Vec<String>,
    run_path: Vec<String>,
}

impl Library {
    fn open(path: &Path) -> Self {
        let data = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = ElfFile64::<Endianness>::parse(&*data).expect("an ELF file");
        let name = |symbol: ElfSymbol64<'_, '_>| symbol.name().expect("UTF-8").to_owned();
        let (defined, undefined): (Vec<_>, Vec<_>) = file
            .dynamic_symbols()
            .filter(|symbol| symbol.is_global())
            .partition(|symbol| symbol.is_definition());
        let mut library = Self {
            exports: defined.into_iter().map(name).collect(),
            imports: undefined.into_iter().map(name).collect(),
            needed: Vec::new(),
            run_path: Vec::new(),
        };
        library.read_dynamic_section(&file);
        library
    }

    fn read_dynamic_section(&mut self, file: &ElfFile64<'_>) {
        let (endian, data) = (file.endian(), file.data());
        let sections = file.elf_section_table();
        let Some((entries, strings)) = sections.dynamic(endian, data).expect("well formed") else {
            return;
        };
        let strings = sections
            .strings(endian, data, strings)
            .expect("well formed");
        for entry in entries {
            let text = || {
                let text = strings
                    .get(entry.d_val.get(endian) as u32)
                    .expect("in the table");
                String::from_utf8(text.to_vec()).expect("UTF-8")
            };
            match entry.d_tag(endian) {
                DT_NEEDED => self.needed.push(text()),
                DT_RPATH | DT_RUNPATH => self.run_path.extend(text().split(':').map(str::to_owned)),
                _ => {}
            }
        }
    }

    fn triton_imports(&self) -> Names {
        let names = self.imports.iter();
        names
            .filter(|name| name.starts_with("TRITON"))
            .cloned()
            .collect()
    }
}
