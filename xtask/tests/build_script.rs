//! The build script that embeds the kernels, in a small package of its own: cargo runs it again when what it embeds has
//! changed, and only then.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use inflight_kernel_sources::snapshot;

const CHECKOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

const KERNEL: &str = "// a kernel\n";

/// Prints the number of embedded kernels.
const MAIN: &str = r#"
struct Image { name: &'static str, capability: u32, is_ptx: bool, bytes: &'static [u8] }
include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));
fn main() {
    for image in IMAGES {
        println!("{} {} {} {}", image.name, image.capability, image.is_ptx, image.bytes.len());
    }
}
"#;

/// A checkout of one package, with the build script and one kernel that nobody has compiled.
struct Package {
    checkout: PathBuf,
    folder: PathBuf,
}

impl Package {
    fn new(name: &str) -> Self {
        let checkout = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        let folder = checkout.join("crates/small");
        for folder in [folder.join("src"), checkout.join("kernels")] {
            fs::create_dir_all(folder).expect("a folder");
        }
        let manifest = format!(
            "[package]\nname = \"small\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n\
             [build-dependencies]\ninflight-kernel-sources = {{ path = \"{CHECKOUT}/crates/kernel-sources\" }}\n"
        );
        fs::write(folder.join("Cargo.toml"), manifest).expect("a file");
        fs::write(folder.join("src/main.rs"), MAIN).expect("a file");
        fs::write(checkout.join("kernels/add.cu"), KERNEL).expect("a file");
        let script = Path::new(CHECKOUT).join("crates/device-cuda/build.rs");
        fs::copy(script, folder.join("build.rs")).expect("a file");
        Self { checkout, folder }
    }

    /// As `cargo xtask kernels` leaves the folder.
    fn compile_kernels(&self) {
        let compiled = self.checkout.join("target/kernels");
        fs::remove_dir_all(&compiled).expect("the build script has made it");
        fs::create_dir_all(&compiled).expect("a folder");
        fs::write(compiled.join("add.sm_80.cubin"), "code").expect("a file");
        let sources = snapshot(&self.checkout.join("kernels")).expect("a snapshot");
        fs::write(compiled.join("sources.txt"), sources).expect("a file");
    }

    /// Builds the package; returns whether cargo compiled anything.
    fn build(&self) -> bool {
        let (messages, errors) = self.cargo(&["build", "--message-format=json"]);
        let of_package = messages.lines().filter(|line| {
            line.contains("\"reason\":\"compiler-artifact\"") && line.contains("/crates/small#")
        });
        let fresh: Vec<bool> = of_package
            .map(|line| line.contains("\"fresh\":true"))
            .collect();
        assert_eq!(fresh.len(), 2, "the script and the program: {messages}");
        let compiles = errors.contains("Compiling");
        assert_eq!(compiles, fresh.contains(&false), "{errors}");
        compiles
    }

    /// The embedded kernels, a line each.
    fn kernels(&self) -> String {
        self.cargo(&["run"]).0
    }

    /// Standard output and standard error of cargo.
    fn cargo(&self, arguments: &[&str]) -> (String, String) {
        let mut cargo = Command::new(env!("CARGO"));
        let run = cargo
            .args(arguments)
            .arg("--offline")
            .current_dir(&self.folder)
            .env_remove("INFLIGHT_KERNELS")
            .env("CARGO_TARGET_DIR", self.folder.join("target"));
        let output = run.output().expect("cargo runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        let text = String::from_utf8(output.stdout).expect("cargo writes UTF-8");
        (text, errors)
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        // What is left of a failed test lies among other temporary files.
        let _ = fs::remove_dir_all(&self.checkout);
    }
}

#[test]
fn a_second_build_compiles_nothing_with_and_without_kernels() {
    let package = Package::new("build-script");
    assert!(package.build(), "the first build");
    assert!(!package.build(), "a second build without kernels");
    assert_eq!(package.kernels(), "");

    package.compile_kernels();
    assert!(package.build(), "a build that embeds new kernels");
    assert!(!package.build(), "a second build with kernels");
    assert_eq!(package.kernels(), "add 80 false 4\n");

    fs::write(package.checkout.join("kernels/add.cu"), "// another\n").expect("a file");
    assert!(package.build(), "a build whose kernels are out of date");
    assert!(!package.build(), "a second one");
    assert_eq!(package.kernels(), "");
}
