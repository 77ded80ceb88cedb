//! The cache file of rounded weights.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use inflight_device_cpu::{CpuOptions, Simd};
use inflight_machines::load_on_cpus;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, WeightPrecision};
use log::Level;

use crate::copy::Copy;
use crate::log_lines;
use crate::support::{Request, Served, Setup, fixture, serve_alone, simds};

/// A file in a folder that does not exist yet; deleted when dropped.
pub struct Cache {
    setting: PathBuf,
    file: PathBuf,
}

impl Cache {
    fn new(name: &str) -> Self {
        Self::with_file(name, "model-1.weights")
    }

    /// That of instances on GPUs.
    pub fn of_gpu(name: &str) -> Self {
        Self::with_file(name, "model-1.gpu.weights")
    }

    fn with_file(name: &str, file: &str) -> Self {
        log_lines::collect();
        let name = format!("inflight-weights-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name).join("below");
        Self {
            setting: folder.join("model-1.weights"),
            file: folder.join(file),
        }
    }

    /// The file of instances on the CPU in the same place.
    pub fn of_cpu(&self) -> Self {
        Self {
            file: self.setting.clone(),
            setting: self.setting.clone(),
        }
    }

    /// What a model is told.
    pub fn setting(&self) -> &Path {
        &self.setting
    }

    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The only line that a load logs about it.
    fn line(&self) -> (Level, String) {
        let mut lines = log_lines::take(&self.file.display().to_string());
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }

    /// Asserts that the next line reports that weights were read.
    #[track_caller]
    pub fn was_read(&self) {
        let (level, line) = self.line();
        assert!(level == Level::Info && line.starts_with("read "), "{line}");
    }

    /// Asserts that the next line reports that weights were cached.
    #[track_caller]
    pub fn was_written(&self) {
        let (level, line) = self.line();
        assert!(level == Level::Info && line.starts_with("kept "), "{line}");
    }

    /// Asserts that the next lines report why the file was not read, and that weights were cached.
    #[track_caller]
    pub fn was_replaced(&self, level: Level, reason: &str) {
        let lines = log_lines::take(&self.file.display().to_string());
        let [(first, why), (_, kept)] = &lines[..] else {
            panic!("{lines:?}");
        };
        assert!(*first == level && why.contains(reason), "{lines:?}");
        assert!(kept.starts_with("kept "), "{lines:?}");
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let folder = self.file.parent().and_then(Path::parent);
        let _ = fs::remove_dir_all(folder.expect("a folder"));
    }
}

fn rounded(bits: CodeBits, simd: Option<Simd>) -> Setup {
    Setup {
        weights: Some(WeightPrecision {
            bits,
            group_size: 32,
        }),
        simd,
        ..Setup::default()
    }
}

/// The tokens and logits of a model loaded with or without this file.
pub fn answer(dir: &Path, setup: &Setup, cache: Option<&Path>) -> Served {
    let mut source = ModelSource::open(dir).expect("the checkpoint opens");
    if let Some(path) = cache {
        source = source.with_weight_cache(path.to_owned(), 0o600);
    }
    let options = CpuOptions {
        simd: setup.simd,
        ..CpuOptions::default()
    };
    let mut runner = load_on_cpus(&source, setup.runner_limits(), &options).expect("it loads");
    serve_alone(
        &mut runner,
        setup,
        &Request::greedy(&[3, 14, 15, 9, 26], 12),
    )
}

#[test]
fn cached_weights_are_the_same_as_rounded_weights() {
    for (name, bits) in [
        ("llama3", CodeBits::Four),
        ("qwen2", CodeBits::Eight),
        ("sharded", CodeBits::Four),
        // All experts of a layer are in one tensor.
        ("mixtral-stacked", CodeBits::Eight),
    ] {
        let cache = Cache::new(&format!("bits-{name}"));
        let setup = rounded(bits, None);
        let expected = answer(&fixture(name), &setup, None);
        assert_eq!(answer(&fixture(name), &setup, Some(cache.path())), expected);
        cache.was_written();
        let inode = fs::metadata(cache.path()).expect("the file").ino();
        assert_eq!(answer(&fixture(name), &setup, Some(cache.path())), expected);
        cache.was_read();
        // All instruction sets share one file, which is not rewritten.
        for simd in simds() {
            let setup = rounded(bits, Some(simd));
            let expected = answer(&fixture(name), &setup, None);
            assert_eq!(answer(&fixture(name), &setup, Some(cache.path())), expected);
            cache.was_read();
        }
        assert_eq!(fs::metadata(cache.path()).expect("the file").ino(), inode);
    }
}

#[test]
fn the_weights_in_the_file_are_used() {
    let cache = Cache::new("holds");
    let (setup, dir) = (rounded(CodeBits::Eight, None), fixture("llama3"));
    let expected = answer(&dir, &setup, Some(cache.path()));
    cache.was_written();
    // Another model's file, relabelled as this one's.
    let stored = Copy::of("llama3").tensor("model.layers.0.self_attn.o_proj.weight", |view| {
        let zeros = vec![0; view.data().len()];
        Some((view.dtype(), view.shape().to_vec(), zeros))
    });
    let other = Cache::new("holds-other");
    let of_zeros = answer(stored.dir(), &setup, Some(other.path()));
    assert_ne!(of_zeros.logits, expected.logits);
    with_made_from(other.path(), &made_from(cache.path()));
    fs::rename(other.path(), cache.path()).expect("renamed");
    assert_eq!(answer(&dir, &setup, Some(cache.path())), of_zeros);
    cache.was_read();
}

pub fn made_from(path: &Path) -> String {
    let bytes = fs::read(path).expect("the file");
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("whole");
    metadata.metadata().as_ref().expect("metadata")["made_from"].clone()
}

pub fn with_made_from(path: &Path, made_from: &str) {
    let bytes = fs::read(path).expect("the file");
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("whole");
    let mut metadata = metadata.metadata().clone().expect("metadata");
    metadata.insert("made_from".to_owned(), made_from.to_owned());
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("whole");
    safetensors::serialize_to_file(tensors.tensors(), Some(metadata), path).expect("written");
}

#[test]
fn a_changed_checkpoint_or_precision_replaces_the_file() {
    let cache = Cache::new("changed");
    let setup = rounded(CodeBits::Four, None);
    let mut copy = Copy::of("llama3");
    let before = answer(copy.dir(), &setup, Some(cache.path()));
    cache.was_written();
    copy = copy.tensor("model.layers.1.mlp.down_proj.weight", |view| {
        let zeros = vec![0; view.data().len()];
        Some((view.dtype(), view.shape().to_vec(), zeros))
    });
    let after = answer(copy.dir(), &setup, Some(cache.path()));
    cache.was_replaced(Level::Info, "another checkpoint");
    assert_eq!(after, answer(copy.dir(), &setup, None));
    assert_ne!(after.logits, before.logits);
    let setup = rounded(CodeBits::Eight, None);
    let eight = answer(copy.dir(), &setup, Some(cache.path()));
    cache.was_replaced(Level::Info, "another precision");
    assert_eq!(eight, answer(copy.dir(), &setup, None));
    // Files that determine how the weights are read count as well.
    copy = copy.config(serde_json::json!({"rms_norm_eps": 1e-3}));
    let eps = answer(copy.dir(), &setup, Some(cache.path()));
    cache.was_replaced(Level::Info, "another checkpoint");
    assert_eq!(eps, answer(copy.dir(), &setup, None));
}

#[test]
fn a_foreign_or_damaged_file_is_replaced() {
    let cache = Cache::new("damaged");
    let (setup, dir) = (rounded(CodeBits::Four, None), fixture("llama3"));
    let expected = answer(&dir, &setup, Some(cache.path()));
    cache.was_written();
    let whole = fs::read(cache.path()).expect("the file");
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("not empty") ^= 0x40;
    let foreign = fs::read(dir.join("model.safetensors")).expect("the file");
    for (bytes, level, reason) in [
        (&flipped[..], Level::Warn, "is damaged"),
        (&whole[..whole.len() - 5], Level::Warn, "is not a whole"),
        (&b""[..], Level::Warn, "is not a whole"),
        (&b"not weights"[..], Level::Warn, "is not a whole"),
        (&foreign, Level::Info, "was made from another"),
    ] {
        fs::write(cache.path(), bytes).expect("written");
        assert_eq!(answer(&dir, &setup, Some(cache.path())), expected);
        cache.was_replaced(level, reason);
        assert_eq!(answer(&dir, &setup, Some(cache.path())), expected);
        cache.was_read();
    }
}

#[test]
fn a_location_that_cannot_be_written_causes_a_warning() {
    let cache = Cache::new("unwritable");
    let (setup, dir) = (rounded(CodeBits::Four, None), fixture("llama3"));
    let expected = answer(&dir, &setup, None);
    // A file in place of the folder; a file system without write access; a folder.
    let folder = cache.path().parent().expect("a folder");
    fs::create_dir_all(folder.parent().expect("a folder")).expect("made");
    fs::write(folder, "a file").expect("written");
    assert_eq!(answer(&dir, &setup, Some(cache.path())), expected);
    let (level, line) = cache.line();
    assert!(
        level == Level::Warn && line.contains("cannot be written"),
        "{line}"
    );
    let nowhere = Path::new("/proc/inflight/model-1.weights");
    assert_eq!(answer(&dir, &setup, Some(nowhere)), expected);
    let lines = log_lines::take("/proc/inflight/model-1.weights");
    assert!(
        lines.iter().any(|(level, _)| *level == Level::Warn),
        "{lines:?}"
    );
    fs::remove_file(folder).expect("removed");
    fs::create_dir_all(cache.path()).expect("made");
    assert_eq!(answer(&dir, &setup, Some(cache.path())), expected);
    let lines = log_lines::take(&cache.path().display().to_string());
    assert_eq!(
        lines.iter().map(|(level, _)| *level).collect::<Vec<_>>(),
        [Level::Warn; 2]
    );
    let left: Vec<_> = fs::read_dir(folder).expect("a folder").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn the_file_has_the_configured_permissions() {
    let setup = rounded(CodeBits::Eight, None);
    let mode = |path: &Path| fs::metadata(path).expect("it is there").mode() & 0o777;
    for (file, folder) in [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)] {
        let cache = Cache::new(&format!("readers-{file:o}"));
        let below = cache.path().parent().expect("a folder");
        let above = below.parent().expect("a folder");
        fs::create_dir_all(above).expect("a folder");
        fs::set_permissions(above, Permissions::from_mode(0o751)).expect("its owner");
        // Independent of the permissions of the checkpoint.
        let copy = Copy::of("llama3");
        let weights = copy.path("model.safetensors");
        fs::set_permissions(weights, Permissions::from_mode(0o644)).expect("its owner");
        let source = ModelSource::open(copy.dir()).expect("it opens");
        let source = source.with_weight_cache(cache.path().to_owned(), file);
        let options = CpuOptions::default();
        load_on_cpus(&source, setup.runner_limits(), &options).expect("it loads");
        cache.was_written();
        assert_eq!([mode(cache.path()), mode(below)], [file, folder]);
        assert_eq!(mode(above), 0o751, "it was there");
    }
}

#[test]
fn several_processes_can_write_concurrently() {
    let cache = Cache::new("at-once");
    let (setup, dir) = (rounded(CodeBits::Eight, None), fixture("llama3"));
    let expected = answer(&dir, &setup, None);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(answer(&dir, &setup, Some(cache.path())), expected));
        }
    });
    let lines = log_lines::take(&cache.path().display().to_string());
    assert!(
        lines.iter().all(|(level, _)| *level == Level::Info),
        "{lines:?}"
    );
    assert_eq!(answer(&dir, &setup, Some(cache.path())), expected);
    cache.was_read();
    let folder = cache.path().parent().expect("a folder");
    assert_eq!(fs::read_dir(folder).expect("a folder").count(), 1);
}

#[test]
fn only_rounded_weights_are_cached() {
    let cache = Cache::new("only");
    answer(&fixture("llama3"), &Setup::default(), Some(cache.path()));
    assert!(!cache.path().exists());
    // A format without a kernel is rounded whatever the precision is.
    let dir = fixture("quantised/gguf-mixed");
    let expected = answer(&dir, &Setup::default(), None);
    assert_eq!(
        answer(&dir, &Setup::default(), Some(cache.path())),
        expected
    );
    cache.was_written();
    assert_eq!(
        answer(&dir, &Setup::default(), Some(cache.path())),
        expected
    );
    cache.was_read();
}
