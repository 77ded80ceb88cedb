//! Embeds the compiled CUDA kernels, and names the build.
//!
//! `cargo xtask kernels` compiles the kernels into `target/kernels`, one image for each kind of GPU, beside a copy of their
//! sources, `sources.txt`. If they are missing or of other sources, the library is built without kernels, and serves on CPU only.
//! `INFLIGHT_KERNELS` names another folder.
//!
//! `INFLIGHT_BUILD` is a hash of the sources and kernels, by which the processes of a model's ranks know that they are of one build.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use inflight_kernel_sources::{files, snapshot};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    embed_kernels(&out);
    name_build(&out);
}

/// Writes `kernel_images.rs`: a table of the compiled files, see `device/cuda/kernels.rs`. They are copied beside it into
/// `kernels`, because the compiler derives names from its text: with absolute paths, each folder would build another library.
fn embed_kernels(out: &Path) {
    println!("cargo::rerun-if-env-changed=INFLIGHT_KERNELS");
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let folder = match env::var_os("INFLIGHT_KERNELS") {
        Some(folder) => PathBuf::from(folder),
        None => package.join("target/kernels"),
    };
    let sources = package.join("kernels");
    let stamp = folder.join("sources.txt");
    ensure_exists(&stamp);
    for path in [&sources, &stamp] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let images = out.join("kernels");
    if images.exists() {
        fs::remove_dir_all(&images).expect("OUT_DIR can be written");
    }
    fs::create_dir(&images).expect("OUT_DIR can be written");
    let mut table = String::from("static IMAGES: &[Image] = &[\n");
    match fs::read(stamp) {
        Ok(compiled) if compiled.is_empty() => {}
        Ok(compiled) if snapshot(&sources).is_ok_and(|sources| sources == compiled) => {
            for path in files(&folder).expect("it has a readable file") {
                if let Some((name, capability, is_ptx)) = image_kind(&path) {
                    let image =
                        format!("name: {name:?}, capability: {capability}, is_ptx: {is_ptx}");
                    let file = path.file_name().expect("an image has a name");
                    fs::copy(&path, images.join(file)).expect("OUT_DIR can be written");
                    let bytes = Path::new("kernels").join(file);
                    table += &format!("Image {{ {image}, bytes: include_bytes!({bytes:?}) }},\n");
                }
            }
        }
        Ok(_) => println!(
            "cargo::warning=kernels/ has changed since `cargo xtask kernels`: the library is built without CUDA kernels"
        ),
        Err(_) => {}
    }
    table += "];\n";
    fs::write(out.join("kernel_images.rs"), table).expect("OUT_DIR can be written");
}

/// Creates an empty file, unless there is one. Cargo takes a file that is missing for one that has changed, and would compile the
/// library in every build where nobody has compiled kernels. The file is as old as can be: not changed since this build began.
/// Where it cannot be written, such as in a checkout of another user, builds are right and slow.
fn ensure_exists(path: &Path) {
    let parent = path.parent().expect("a file is in a folder");
    if fs::create_dir_all(parent).is_ok()
        && let Ok(file) = fs::File::create_new(path)
    {
        // A later time only costs one build.
        let _ = file.set_modified(SystemTime::UNIX_EPOCH);
    }
}

/// Sets `INFLIGHT_BUILD`: a hash of all that the library is compiled from, and how.
fn name_build(out: &Path) {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut hasher = DefaultHasher::new();
    for name in ["src", "Cargo.lock", "Cargo.toml"] {
        let path = package.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        hash(&path, &mut hasher);
    }
    hash(&out.join("kernels"), &mut hasher);
    for name in ["PROFILE", "OPT_LEVEL", "TARGET"] {
        env::var_os(name).hash(&mut hasher);
    }
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    // Where the sources lay makes no other build.
    let flags = flags.split('\x1f');
    for flag in flags.filter(|flag| !flag.starts_with("--remap-path-prefix=")) {
        flag.hash(&mut hasher);
    }
    println!("cargo::rustc-env=INFLIGHT_BUILD={:016x}", hasher.finish());
}

/// Hashes a file, or those of a folder in the order of their names. What is not there has no content.
fn hash(path: &Path, hasher: &mut DefaultHasher) {
    path.file_name().hash(hasher);
    match fs::read_dir(path) {
        Ok(entries) => {
            let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
            paths.sort();
            paths.iter().for_each(|path| self::hash(path, hasher));
        }
        Err(_) => fs::read(path).unwrap_or_default().hash(hasher),
    }
}

/// The source's name, the compute capability and the kind of an image: `embed.sm_80.cubin` or `embed.compute_90.ptx`.
fn image_kind(path: &Path) -> Option<(String, u32, bool)> {
    let file = path.file_name()?.to_str()?;
    let mut parts = file.split('.');
    let (name, architecture, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let is_ptx = kind == "ptx";
    let prefix = if is_ptx { "compute_" } else { "sm_" };
    let capability = architecture.strip_prefix(prefix)?.parse().ok()?;
    Some((name.to_owned(), capability, is_ptx))
}
