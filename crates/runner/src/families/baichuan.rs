//! Baichuan 7B and 13B, and Baichuan 2, by Baichuan Inc.
//!
//! Llama with one module for queries, keys and values. The models of 13B have linear biases of scores in place of RoPE
//! ([ALiBi](crate::alibi)); their configs have `model_max_length` and no `max_position_embeddings`. Baichuan 2, whose
//! config has `z_loss_weight`, divides the rows of its output layer by their lengths.
//!
//! Source: configuration_baichuan.py and modeling_baichuan.py of baichuan-inc/Baichuan-7B, Baichuan-13B-Base,
//! Baichuan2-7B-Base and Baichuan2-13B-Base; Yang et al., arXiv:2309.10305.

use serde_json::json;

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::internlm2::split_heads;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "BaichuanForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        add_fixed: |config| {
            // llama.cpp knows the larger models by their number of layers.
            if config.get("num_hidden_layers") == Some(&json!(40))
                && let Some(length) = config.remove(LENGTH_OF_ROPE)
            {
                config.insert(LENGTH.to_owned(), length);
            }
        },
        rewrite: |gguf, spec| {
            split_heads(gguf, spec);
            Ok(())
        },
        ..GgufArchitecture::named("baichuan")
    }),
    describe: |config| describe(config, FAMILY.class),
};

/// Baichuan 7B.
pub const FIRST: Family = Family {
    class: "BaiChuanForCausalLM",
    gguf: None,
    describe: |config| describe(config, FIRST.class),
};

const LENGTH_OF_ROPE: &str = Keys::LLAMA.positions;
const LENGTH: &str = "model_max_length";
/// The tokens of Baichuan 2.
const VOCAB_SIZE: usize = 125_696;

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let has_slopes = config.get(LENGTH_OF_ROPE).is_none() && config.get(LENGTH).is_some();
    let defaults = Defaults {
        sizes: Some(Sizes::new(64_000, 4096, 11_008, 32, 32, 4096)),
        keys: Keys {
            num_kv_heads: Keys::LLAMA.num_heads,
            positions: match has_slopes {
                true => LENGTH,
                false => LENGTH_OF_ROPE,
            },
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    if has_slopes {
        dimensions.rope = Rope::none();
    }
    let mut layer = dimensions.llama_layer();
    layer.attention.qkv = dimensions.fused_qkv("self_attn.W_pack");
    let windows = no_windows(dimensions.num_layers);
    let is_second = config.get("z_loss_weight").is_some() || dimensions.vocab_size == VOCAB_SIZE;
    if is_second && dimensions.tied_embeddings {
        const TIED: &str = "tie_word_embeddings";
        return Err(config.unexpected(TIED, true, "supported in Baichuan 2; only false is"));
    }
    Ok(ModelSpec {
        slope_factor: has_slopes.then_some(1.0),
        has_unit_outputs: is_second,
        ..dimensions.model(class, layer, windows)
    })
}
