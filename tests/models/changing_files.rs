//! Files that change while a model is loaded, or afterwards: a load that would read them fails and names the
//! file; loaded models do not need them.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use inflight_checkpoint::AdapterFiles;
use inflight_device_cpu::CpuOptions;
use inflight_machines::load_on_cpus;
use inflight_numbers::CodeBits;
use inflight_runner::{ModelSource, PreparedAdapter, Runner, WeightPrecision};

use crate::copy::Copy;
use crate::support::{Request, Setup, fixture, serve_alone};

/// One checkpoint for each storage format of weights.
const FORMS: &[&str] = &[
    "llama2",
    "qwen2",
    "sharded",
    "stored-f32",
    "quantised/gptq",
    "quantised/gptq-act-order",
    "quantised/awq",
    "quantised/compressed-w4a16",
    "quantised/compressed-w8a8",
    "quantised/bnb-nf4",
    "quantised/bnb-int8",
    "quantised/bitnet",
    "quantised/bitnet-online",
    "quantised/gguf-q8_0",
    "quantised/gguf-q4_0-split",
    "quantised/gguf-q4_k",
    "quantised/gguf-mixed",
];

fn weight_files(copy: &Copy) -> Vec<PathBuf> {
    let entries = fs::read_dir(copy.dir()).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| {
            let extension = path.extension().unwrap_or_default();
            extension == "safetensors" || extension == "gguf"
        })
        .collect()
}

fn cut(path: &Path, num_bytes: u64) {
    let file = File::options().write(true).open(path).expect("the file");
    file.set_len(num_bytes).expect("cut");
}

fn setups() -> [Setup; 2] {
    let weights = WeightPrecision {
        bits: CodeBits::Eight,
        group_size: 32,
    };
    [None, Some(weights)].map(|weights| Setup {
        weights,
        num_threads: 2,
        ..Setup::default()
    })
}

/// Adds an instance of an open model.
fn add_instance(source: &ModelSource, setup: &Setup) -> Result<Box<dyn Runner>, String> {
    let runner = load_on_cpus(source, setup.runner_limits(), &CpuOptions::default());
    runner.map_err(|error| error.to_string())
}

#[test]
fn a_file_that_is_truncated_during_a_load_fails_that_load() {
    for name in FORMS {
        for setup in setups() {
            let copy = Copy::of(name);
            for file in weight_files(&copy) {
                let whole = fs::read(&file).expect("the file");
                for num_bytes in [0, whole.len() / 2, whole.len() - 1] {
                    fs::write(&file, &whole).expect("written");
                    let source = ModelSource::open(copy.dir()).expect("it opens");
                    assert!(add_instance(&source, &setup).is_ok(), "{name}");
                    cut(&file, num_bytes as u64);
                    let Err(error) = add_instance(&source, &setup) else {
                        panic!("{name}: {num_bytes} of {} bytes", whole.len());
                    };
                    assert!(error.contains(&file.display().to_string()), "{error}");
                    assert!(
                        error.contains("has been cut short")
                            || error.contains("has been written to"),
                        "{error}"
                    );
                    assert!(error.contains("load the model again"), "{error}");
                }
                fs::write(&file, &whole).expect("written");
            }
        }
    }
}

/// Factors of DoRA, and biases, follow from the model's own weights.
#[test]
fn an_adapter_that_reads_a_model_whose_file_was_cut_is_refused() {
    for (name, base, reads_model) in [
        ("dora", "llama-biases", true),
        ("trained-biases", "llama-biases", true),
        ("rank-33", "llama3", false),
    ] {
        let copy = Copy::of(base);
        let source = ModelSource::open(copy.dir()).expect("it opens");
        let files = fixture("adapters").join(name);
        let files = AdapterFiles::open(&files, 64).expect("the adapter opens");
        let load = || {
            PreparedAdapter::new(&files, &source)
                .expect("it fits")
                .load()
        };
        assert!(load().is_ok(), "{name}");
        for file in weight_files(&copy) {
            cut(&file, 0);
        }
        match (load(), reads_model) {
            (Ok(_), false) => {}
            (Err(error), true) => {
                let error = error.to_string();
                assert!(error.contains("has been cut short"), "{name}: {error}");
            }
            (_, reads_model) => panic!("{name} reads the model: {reads_model}"),
        }
    }
}

#[test]
fn a_file_that_is_modified_after_it_was_opened_fails_the_next_load() {
    for name in FORMS {
        let copy = Copy::of(name);
        let source = ModelSource::open(copy.dir()).expect("it opens");
        let file = weight_files(&copy).pop().expect("a file");
        // A change within the clock's resolution would not be noticed, so the file gets another time.
        let later = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        let opened = File::options().write(true).open(&file).expect("the file");
        opened.set_times(later).expect("its owner");
        let Err(error) = add_instance(&source, &Setup::default()) else {
            panic!("{name} loads");
        };
        assert!(error.contains("has been written to"), "{error}");
        assert!(error.contains(&file.display().to_string()), "{error}");
    }
}

#[test]
fn a_replaced_checkpoint_is_still_read_to_its_end() {
    let copy = Copy::of("llama2");
    let source = ModelSource::open(copy.dir()).expect("it opens");
    let file = copy.path("model.safetensors");
    let other = copy.path("other");
    fs::write(&other, b"something else").expect("written");
    fs::rename(other, file).expect("renamed");
    assert!(add_instance(&source, &Setup::default()).is_ok());
}

#[test]
fn a_loaded_model_does_not_need_its_files() {
    let request = Request::greedy(&[3, 14, 15, 9, 26], 12);
    for name in FORMS {
        for setup in setups() {
            let copy = Copy::of(name);
            let source = ModelSource::open(copy.dir()).expect("it opens");
            let mut runner = add_instance(&source, &setup).expect("it loads");
            let expected = serve_alone(&mut runner, &setup, &request);
            for file in weight_files(&copy) {
                cut(&file, 0);
            }
            assert_eq!(serve_alone(&mut runner, &setup, &request), expected);
        }
    }
}

#[test]
fn a_file_may_shrink_at_any_time_during_a_load() {
    for name in ["llama2", "quantised/gptq", "quantised/gguf-q8_0"] {
        let copy = Copy::of(name);
        let file = weight_files(&copy).pop().expect("a file");
        let whole = fs::read(&file).expect("the file");
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut num_bytes = 0;
                while !is_done.load(Ordering::Relaxed) {
                    num_bytes = (num_bytes + 7919) % whole.len();
                    cut(&file, num_bytes as u64);
                    fs::write(&file, &whole).expect("written");
                }
            });
            for _ in 0..100 {
                if let Err(error) = copy.load() {
                    let error = error.to_string();
                    assert!(error.contains(&file.display().to_string()), "{error}");
                }
            }
            is_done.store(true, Ordering::Relaxed);
        });
    }
}
