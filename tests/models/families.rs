//! All model families that generate, by their fixtures.

use std::collections::BTreeSet;

use serde_json::json;
use triton_inflight::runner::ModelSource;

use crate::copy::Copy;
use crate::support::fixture;

/// A fixture of each family and of each of its shapes, and windows that a user sets.
pub const FAMILIES: [(&str, &[u32]); 38] = [
    ("llama3", &[]),
    ("mistral-window", &[]),
    ("qwen2", &[]),
    ("qwen3", &[17, 30]),
    ("qwen3-windows", &[50, 20]),
    ("phi3", &[]),
    ("phi4-mini", &[]),
    ("smollm3", &[]),
    ("ministral", &[]),
    ("seed-oss", &[]),
    ("ernie4-5", &[]),
    ("helium", &[]),
    ("glm", &[]),
    ("gemma2", &[]),
    ("gemma3", &[40, 13]),
    ("olmo2", &[]),
    ("granite", &[]),
    ("exaone4", &[50, 20]),
    ("gpt-neox", &[]),
    ("opt", &[]),
    ("gpt2", &[30, 17]),
    ("cohere", &[]),
    ("cohere2", &[50, 20]),
    ("stablelm", &[]),
    ("nemotron", &[]),
    ("falcon", &[]),
    ("falcon-grouped", &[]),
    ("mixtral", &[]),
    ("mixtral-stacked", &[]),
    ("qwen2-moe", &[]),
    ("qwen3-moe", &[17, 30]),
    ("olmoe", &[]),
    ("phimoe", &[]),
    ("gpt-oss", &[30, 17]),
    ("gpt-oss-mxfp4", &[]),
    ("deepseek-v2", &[]),
    ("deepseek-v2-lite", &[30, 17]),
    ("deepseek-v3", &[]),
];

#[test]
fn each_family_has_a_fixture() {
    let unknown = Copy::of("llama2").config(json!({"architectures": ["None"]}));
    let error = ModelSource::open(unknown.dir()).err().expect("refused");
    let error = error.to_string();
    let (_, known) = error.split_once("one of ").expect("a list of classes");
    let known: BTreeSet<_> = known
        .split([',', ';', ' '])
        .filter(|class| !class.is_empty())
        // Other names of two that are in the list.
        .filter(|class| !["Gemma3ForConditionalGeneration", "PhiMoEForCausalLM"].contains(class))
        .map(str::to_owned)
        .collect();
    let found = FAMILIES.map(|(name, _)| {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        source.spec().family.to_owned()
    });
    assert_eq!(known, BTreeSet::from(found));
}
