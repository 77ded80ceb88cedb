//! All model families that generate, by their fixtures.

use std::collections::BTreeSet;
use std::path::Path;

use inflight_runner::ModelSource;
use serde_json::json;

use crate::copy::Copy;
use crate::support::{Request, Setup, fixture, serve_alone};

/// The name of a fixture, and windows that a user sets.
pub type Family = (&'static str, &'static [u32]);

/// A fixture of each family and of each of its shapes.
pub const FAMILIES: [Family; 100] = [
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
    ("glm4", &[]),
    ("arcee", &[]),
    ("gemma", &[]),
    ("gemma2", &[]),
    ("gemma3", &[40, 13]),
    ("olmo2", &[]),
    ("olmo3", &[40, 13]),
    ("granite", &[]),
    ("exaone4", &[50, 20]),
    ("gpt-neox", &[]),
    ("opt", &[]),
    ("opt-350m", &[17, 30]),
    ("gpt2", &[30, 17]),
    ("cohere", &[]),
    ("cohere-plus", &[]),
    ("cohere2", &[50, 20]),
    ("stablelm", &[]),
    ("stablelm-12b", &[]),
    ("nemotron", &[]),
    ("starcoder2", &[]),
    ("falcon", &[]),
    ("falcon-grouped", &[]),
    ("falcon-rw", &[]),
    ("bloom", &[]),
    ("phi", &[]),
    ("gptj", &[]),
    ("codegen", &[17, 30]),
    ("olmo", &[]),
    ("gpt-bigcode", &[]),
    ("gpt-bigcode-heads", &[]),
    ("vaultgemma", &[]),
    ("hyperclovax", &[]),
    ("jais2", &[]),
    ("granite-swa", &[]),
    ("exaone", &[]),
    ("cwm", &[]),
    ("ministral3", &[17, 30]),
    ("hunyuan", &[]),
    ("apertus", &[]),
    ("mixtral", &[]),
    ("mixtral-stacked", &[]),
    ("qwen2-moe", &[]),
    ("qwen3-moe", &[17, 30]),
    ("olmoe", &[]),
    ("phimoe", &[]),
    ("glm4-moe", &[]),
    ("dots1", &[]),
    ("granite-moe", &[]),
    ("granite-moe-shared", &[]),
    ("gpt-oss", &[30, 17]),
    ("gpt-oss-mxfp4", &[]),
    ("deepseek-v2", &[]),
    ("deepseek-v2-lite", &[30, 17]),
    ("deepseek-v3", &[]),
    ("ernie4-5-moe", &[]),
    ("minimax-m2", &[]),
    ("glm4-moe-lite", &[30, 17]),
    ("solar-open", &[]),
    ("exaone-moe", &[]),
    ("flex-olmo", &[]),
    ("hunyuan-moe", &[]),
    ("youtu", &[]),
    ("minicpm3", &[]),
    ("internlm3", &[]),
    ("iquest-coder", &[]),
    ("internlm2", &[17, 30]),
    ("minicpm", &[]),
    ("cohere2-moe", &[30, 13]),
    ("mellum", &[]),
    ("hy3", &[]),
    ("granite-moe-swa", &[]),
    ("flint", &[]),
    ("axk1", &[]),
    ("kolibri1", &[]),
    ("gpt-neo", &[]),
    ("biogpt", &[17, 30]),
    ("mpt", &[]),
    ("deepseek", &[]),
    ("internlm", &[17, 30]),
    ("qwen", &[]),
    ("baichuan2", &[]),
    ("baichuan-13b", &[]),
    ("chatglm", &[]),
    ("ling", &[]),
    ("sarvam-moe", &[]),
    ("ling-lite", &[]),
    ("sarvam-mla", &[]),
];

/// Families with recurrent states, whose prefixes are reused behind snapshots, as [`FAMILIES`].
pub const RECURRENT: [Family; 19] = [
    ("lfm2", &[17, 30]),
    ("lfm2-moe", &[]),
    ("lfm3", &[]),
    ("qwen3-next", &[]),
    ("qwen3-5", &[17, 30]),
    ("qwen3-5-moe", &[]),
    ("granite4", &[]),
    ("granite4-dense", &[17, 30]),
    ("bamba", &[]),
    ("nemotron-h", &[17, 30]),
    ("nemotron-h-moe", &[]),
    ("falcon-h1", &[17, 30]),
    ("falcon-h1-norm", &[]),
    ("olmo-hybrid", &[]),
    ("kimi-linear", &[]),
    ("jamba", &[17, 30]),
    ("mamba", &[]),
    ("falcon-mamba", &[]),
    ("lara-mini", &[]),
];

/// Families with recurrent states in all layers, of [`RECURRENT`].
pub const WITHOUT_ATTENTION: [&str; 2] = ["mamba", "falcon-mamba"];

/// Families whose attention has gates, which one process computes, as [`FAMILIES`].
pub const WITH_GATES: [Family; 1] = [("afmoe", &[])];

/// Families that are computed on CPUs only, as [`FAMILIES`].
pub const ON_CPUS: [Family; 17] = [
    ("gemma4", &[30, 17, 40, 7, 24]),
    ("gemma4-moe", &[]),
    ("llama4", &[]),
    ("gemma3n", &[30, 17, 40, 7, 24]),
    ("nanochat", &[17, 30]),
    ("mistral4", &[]),
    ("bitnet", &[17, 30]),
    ("olmo-clip", &[]),
    ("dbrx", &[]),
    ("laguna", &[]),
    ("deepseek-v32", &[]),
    ("glm-moe-dsa", &[]),
    ("mimo-v2", &[30, 7, 17, 24]),
    ("step3p5", &[]),
    ("persimmon", &[17, 30]),
    ("longcat-flash", &[30, 7, 17, 24]),
    ("bitnet-3b", &[]),
];

/// Families whose queries see what an indexer selects, and so have no windows, of [`ON_CPUS`].
pub const WITH_INDEXERS: [&str; 2] = ["deepseek-v32", "glm-moe-dsa"];

/// Families whose prefixes are reused wherever they end.
pub fn reusable_families() -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().chain(WITH_GATES).chain(ON_CPUS)
}

/// Tests with one body, each of one share of some items, such as families. The quick tier of `cargo xtask test` has one
/// share, which the commit chooses.
macro_rules! on_shares {
    ($tests:ident: 4 of $items:expr, $body:path) => {
        mod $tests {
            use super::*;

            on_shares! {
                $items, 4, $body; share_0_of_4: 0, share_1_of_4: 1, share_2_of_4: 2, share_3_of_4: 3,
            }
        }
    };
    ($tests:ident: 8 of $items:expr, $body:path) => {
        mod $tests {
            use super::*;

            on_shares! {
                $items, 8, $body;
                share_0_of_8: 0, share_1_of_8: 1, share_2_of_8: 2, share_3_of_8: 3,
                share_4_of_8: 4, share_5_of_8: 5, share_6_of_8: 6, share_7_of_8: 7,
            }
        }
    };
    ($items:expr, $num:literal, $body:path; $($test:ident: $number:literal,)*) => {
        $(#[test]
        fn $test() {
            let items = IntoIterator::into_iter($items);
            let share: Vec<_> = items.skip($number).step_by($num).collect();
            $body(&share);
        })*
    };
}
pub(crate) use on_shares;

/// All of them.
pub fn all_families() -> impl Iterator<Item = Family> {
    reusable_families().chain(RECURRENT)
}

/// Modules, experts and heads are put together whichever file their parts are in.
#[test]
fn a_family_is_the_same_in_several_files() {
    let setup = Setup::default();
    let serve = |dir: &Path| {
        let request = Request::greedy(&[5, 60, 7, 31, 12], 3);
        serve_alone(&mut setup.load_from(dir), &setup, &request)
    };
    for (name, _) in all_families() {
        let parts = Copy::of(name).in_two_files();
        assert!(serve(parts.dir()) == serve(&fixture(name)), "{name}");
    }
}

#[test]
fn each_family_has_a_fixture() {
    let unknown = Copy::of("llama2").config(json!({"architectures": ["Unknown"]}));
    let error = ModelSource::open(unknown.dir()).err().expect("refused");
    let error = error.to_string();
    let (_, known) = error.split_once("one of ").expect("a list of classes");
    let known: BTreeSet<_> = known
        .split([',', ';', ' '])
        .filter(|class| !class.is_empty())
        // Other names of three that are in the list, and models whose language model is of one of the others.
        .filter(|class| {
            !["PhiMoEForCausalLM", "MPTForCausalLM", "BaiChuanForCausalLM"].contains(class)
                && !class.ends_with("ForConditionalGeneration")
        })
        .map(str::to_owned)
        .collect();
    let found = all_families().map(|(name, _)| {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        source.spec().family.to_owned()
    });
    assert_eq!(known, found.collect::<BTreeSet<_>>());
}
