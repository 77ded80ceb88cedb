//! What a checkpoint's JSON files say, in the words of several versions of transformers.

use std::fs;

use serde_json::Value;
use triton_inflight::base::BlockSize;
use triton_inflight::device::cpu::KvDtype;
use triton_inflight::runner::{Architecture, Checkpoint, CpuRunner, RopeScaling};

use crate::copy::Copy;
use crate::support::fixture;

const FIXTURES: [&str; 14] = [
    "llama2",
    "llama3",
    "llama-linear",
    "llama-yarn",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "mistral-window",
    "qwen2-windows",
    "qwen3-windows",
    "sharded",
    "stored-f16",
    "stored-f32",
];

#[test]
fn configs_of_older_transformers_mean_the_same() {
    for name in FIXTURES {
        let copy = Copy::of(name);
        let path = copy.path("config.json");
        let text = fs::read_to_string(&path).expect("the file");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        let mut rope = config["rope_parameters"].take();
        let rope = rope.as_object_mut().expect("as transformers 5 writes it");
        config["rope_theta"] = rope.remove("rope_theta").expect("there");
        // The first versions called it `type`.
        let kind = rope.remove("rope_type").expect("there");
        if kind != "default" {
            rope.insert("type".to_owned(), kind);
            config["rope_scaling"] = Value::Object(rope.clone());
        }
        fs::write(&path, config.to_string()).expect("written");

        let old = Checkpoint::open(copy.dir()).expect("the old config opens");
        let new = Checkpoint::open(&fixture(name)).expect("the fixture opens");
        assert_eq!(old.spec(), new.spec(), "{name}");
    }
}

#[test]
fn end_ids_are_a_number_or_a_list() {
    for (name, end_ids) in [("llama2", &[2][..]), ("llama3", &[2, 7])] {
        let checkpoint = Checkpoint::open(&fixture(name)).expect("the fixture opens");
        assert_eq!(checkpoint.end_ids(), end_ids, "{name}");
    }
}

#[test]
fn a_spec_tells_what_a_backend_sizes_its_pool_with() {
    let checkpoint = Checkpoint::open(&fixture("llama3")).expect("the fixture opens");
    let spec = checkpoint.spec();
    assert_eq!(spec.architecture, Architecture::Llama);
    assert_eq!((spec.vocab_size, spec.max_seq_len()), (160, 128));
    // Keys and values, 2 layers, 2 heads of 16, 2 bytes; or 1, and 2 for the scale of each vector.
    let block_size = BlockSize::new(32).expect("not zero");
    let bytes = |dtype| CpuRunner::kv_bytes_per_block(spec, block_size, dtype);
    assert_eq!(bytes(KvDtype::Bf16), 32 * 2 * 2 * 2 * 16 * 2);
    assert_eq!(bytes(KvDtype::Int8), 32 * 2 * 2 * 2 * (16 + 2));
    assert!(matches!(spec.rope.scaling, RopeScaling::Llama3 { .. }));
}
