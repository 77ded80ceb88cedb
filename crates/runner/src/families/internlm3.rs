//! InternLM 3, by Shanghai AI Laboratory, and IQuest-Coder, by IQuest Lab: Llama with other defaults.
//!
//! InternLM 3 calls the switches of biases `qkv_bias` and `bias`, which must be equal, as transformers demands, too.
//! IQuest-Coder's `clip_qkv` and `use_sliding_window` are refused. transformers gives the class `LlamaForCausalLM` to
//! the models that it saves, with a `model_type` of their own.
//!
//! Source: configuration_internlm3.py and configuration_iquestcoder.py of transformers.

use serde_json::json;

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::llama_form::describe_with;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const INTERNLM3: Family = Family {
    class: "InternLM3ForCausalLM",
    // llama.cpp's converter makes it a llama, as the other one.
    gguf: None,
    describe: |config| describe_internlm3(config, INTERNLM3.class),
};

pub const IQUEST_CODER: Family = Family {
    class: "IQuestCoderForCausalLM",
    gguf: None,
    describe: |config| describe_iquest_coder(config, IQUEST_CODER.class),
};

/// Describes the model of the family that a `model_type` of Llama's class names; `None` if it names none of these.
pub fn describe_by_type(
    config: &JsonFile,
    class: &'static str,
) -> Result<Option<ModelSpec>, LoadError> {
    match config.string("model_type")? {
        Some("internlm3") => describe_internlm3(config, class).map(Some),
        Some("iquestcoder") => describe_iquest_coder(config, class).map(Some),
        _ => Ok(None),
    }
}

fn describe_internlm3(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    const OF_ATTENTION: [&str; 2] = ["qkv_bias", "attention_bias"];
    const OF_BLOCKS: [&str; 2] = ["bias", "mlp_bias"];
    let has_bias = |[name, other]: [&str; 2]| {
        let given = config.bool_or(other, false)?;
        config.bool_or(name, given)
    };
    let (of_attention, of_blocks) = (has_bias(OF_ATTENTION)?, has_bias(OF_BLOCKS)?);
    if of_attention != of_blocks {
        let expected = format!("{}, which is {of_blocks}", OF_BLOCKS[0]);
        return Err(config.unexpected(OF_ATTENTION[0], of_attention, expected));
    }
    let told = config
        .with(OF_ATTENTION[1], json!(of_attention))
        .with(OF_BLOCKS[1], json!(of_blocks));
    let defaults = Defaults {
        sizes: Some(Sizes::new(128_512, 4096, 10_240, 48, 32, 32_768)),
        num_kv_heads: Some(2),
        head_dim: Some(128),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    describe_with(&told, class, &defaults)
}

fn describe_iquest_coder(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    const CLIP: &str = "clip_qkv";
    const LOOPS: &str = "loop_num";
    const WINDOW: &str = "use_sliding_window";
    if let Some(bound) = config.get(CLIP) {
        return Err(config.unexpected(CLIP, bound, "supported; only null is"));
    }
    if let Some(num) = config.get(LOOPS) {
        return Err(config.unexpected(LOOPS, num, "supported; only models without it are"));
    }
    if config.bool_or(WINDOW, false)? {
        return Err(config.unexpected(WINDOW, true, "supported; only false is"));
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(76_800, 5120, 27_648, 80, 40, 131_072)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    describe_with(config, class, &defaults)
}
