//! Embeds the compiled CUDA kernels.
//!
//! `cargo xtask kernels` compiles the kernels into `target/kernels`, one image for each kind of GPU, beside a copy of
//! their sources, `sources.txt`. If they are missing or of other sources, the library is built without kernels, and
//! serves on CPU only. `INFLIGHT_KERNELS` names another folder. Build scripts of crates that depend on this one find a
//! hash of the images in `DEP_INFLIGHT_KERNELS_HASH`.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use inflight_kernel_sources::{files, snapshot};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    embed_kernels(&out);
}

/// Writes `kernel_images.rs`: a table of the compiled files, see `src/kernels.rs`. They are copied beside it into
/// `kernels`, because the compiler derives names from its text: with absolute paths, each folder would build another
/// library.
fn embed_kernels(out: &Path) {
    println!("cargo::rerun-if-env-changed=INFLIGHT_KERNELS");
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let checkout = package
        .ancestors()
        .nth(2)
        .expect("crates/device-cuda is in a checkout");
    let folder = match env::var_os("INFLIGHT_KERNELS") {
        Some(folder) => PathBuf::from(folder),
        None => checkout.join("target/kernels"),
    };
    let sources = checkout.join("kernels");
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
    let mut hasher = DefaultHasher::new();
    match fs::read(stamp) {
        Ok(compiled) if compiled.is_empty() => {}
        Ok(compiled) if snapshot(&sources).is_ok_and(|sources| sources == compiled) => {
            for path in files(&folder).expect("it has a readable file") {
                if let Some((name, capability, is_ptx)) = image_kind(&path) {
                    let image =
                        format!("name: {name:?}, capability: {capability}, is_ptx: {is_ptx}");
                    let file = path.file_name().expect("an image has a name");
                    let code = fs::read(&path).expect("a readable image");
                    fs::write(images.join(file), &code).expect("OUT_DIR can be written");
                    (file, code).hash(&mut hasher);
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
    println!("cargo::metadata=hash={:016x}", hasher.finish());
}

/// Creates an empty file, unless there is one. Cargo takes a file that is missing for one that has changed, and would
/// compile the library in every build where nobody has compiled kernels. The file is as old as can be: not changed
/// since this build began. Where it cannot be written, such as in a checkout of another user, builds are right and
/// slow.
fn ensure_exists(path: &Path) {
    let parent = path.parent().expect("a file is in a folder");
    if fs::create_dir_all(parent).is_ok()
        && let Ok(file) = fs::File::create_new(path)
    {
        // A later time only costs one build.
        let _ = file.set_modified(SystemTime::UNIX_EPOCH);
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
