//! Prefix reuse in all families: a prompt whose beginning an earlier sequence has computed.

use inflight_base::TokenId;
use inflight_engine::BlockReuse;

use crate::batching::{each_as_alone, prompt};
use crate::families::{WITH_INDEXERS, reusable_families};
use crate::support::{Happened, Request, Setup, serve_alone};

/// Families whose layers see unequally far, by themselves or with the windows of the list.
const WITH_GROUPS: [&str; 43] = [
    "qwen3",
    "qwen3-windows",
    "ministral",
    "gemma2",
    "gemma3",
    "olmo3",
    "exaone4",
    "opt-350m",
    "gpt2",
    "cohere2",
    "codegen",
    "vaultgemma",
    "granite-swa",
    "cwm",
    "ministral3",
    "qwen3-moe",
    "dots1",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "deepseek-v2-lite",
    "glm4-moe-lite",
    "exaone-moe",
    "internlm2",
    "cohere2-moe",
    "mellum",
    "granite-moe-swa",
    "flint",
    "kolibri1",
    "gpt-neo",
    "biogpt",
    "internlm",
    "afmoe",
    "gemma4",
    "gemma4-moe",
    "llama4",
    "gemma3n",
    "nanochat",
    "bitnet",
    "laguna",
    "mimo-v2",
    "step3p5",
    "persimmon",
    "longcat-flash",
];

/// Few tokens a step, so that contexts have chunks, and small blocks.
pub fn reusing() -> Setup {
    Setup {
        max_num_tokens: 32,
        block_size: 4,
        num_blocks: 320,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        ..Setup::default()
    }
}

/// A first request of 45 tokens, and the 14 tokens of its answer.
pub fn first_with_answer(name: &str, setup: &Setup) -> (Request, Vec<TokenId>) {
    let first = Request::greedy(&prompt(7, 45), 14);
    let answer = serve_alone(&mut setup.load(name), setup, &first).tokens;
    (first, answer)
}

/// A later request for 6 tokens, whose prompt begins as an earlier one.
pub fn later(arrival: usize, begin: &[TokenId], own: &[TokenId]) -> Request {
    Request {
        arrival,
        ..Request::greedy(&[begin, own].concat(), 6)
    }
}

/// Serves prompts whose beginnings were computed before, and compares each with its run alone, which reuses nothing.
///
/// ```text
/// first         |---- 45 ----|-- 14 --|          in 2 chunks
/// meanwhile     |-- 30 --|- 9 -|- 6 -|           30: seven blocks, and half of the eighth
/// conversation  |---- 45 ----|-- 14 --|- 3 -|    56: the block of the others was not full
/// again         |---- 45 ----|- 6 -|             44: the last token is computed again
/// ```
pub fn reuses_as_alone(name: &str, setup: &Setup) -> Happened {
    let (first, answer) = first_with_answer(name, setup);
    let requests = [
        later(4, &first.prompt[..30], &prompt(8, 9)),
        later(40, &first.prompt, &[&answer, &prompt(9, 3)[..]].concat()),
        later(45, &first.prompt, &[]),
        first,
    ];
    let happened = each_as_alone(name, setup, &requests);
    assert_eq!(happened.num_reused, 30 + 56 + 44, "{name}: {happened:?}");
    assert!(happened.num_chunks > 0, "{name}: {happened:?}");
    assert!(happened.num_copies > 0, "{name}: {happened:?}");
    happened
}

#[test]
fn a_family_computes_no_block_again_that_it_has() {
    for (name, _) in reusable_families() {
        reuses_as_alone(name, &reusing());
    }
}

/// Blocks behind the windows are given back, and are found as long as nothing else was written there.
#[test]
fn a_family_with_windows_and_sinks_computes_no_block_again_that_it_has() {
    for (name, windows) in reusable_families() {
        if WITH_INDEXERS.contains(&name) {
            continue;
        }
        let setup = Setup {
            windows: if windows.is_empty() { &[24] } else { windows },
            num_sinks: 3,
            gives_back: true,
            ..reusing()
        };
        let happened = reuses_as_alone(name, &setup);
        assert!(happened.num_holes > 10, "{name}: {happened:?}");
    }
}

#[test]
fn a_family_with_groups_of_layers_computes_no_block_again_that_it_has() {
    let mut found = Vec::new();
    for (name, windows) in reusable_families() {
        let in_one = [&[], windows].map(|windows| Setup {
            windows,
            ..reusing()
        });
        let num_groups = |it: &Setup| it.layers_by_windows(name).layers().num_groups();
        let Some(in_one) = in_one.into_iter().find(|it| num_groups(it) > 1) else {
            continue;
        };
        let setup = Setup {
            groups_of: Some(name),
            ..in_one
        };
        let happened = reuses_as_alone(name, &setup);
        assert!(happened.num_holes > 10, "{name}: {happened:?}");
        found.push(name);
    }
    assert_eq!(found, WITH_GROUPS);
}
