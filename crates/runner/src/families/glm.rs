//! GLM-4 9B and GLM-Edge (`GlmForCausalLM`), and GLM-4-0414 and GLM-Z1 (`Glm4ForCausalLM`), by Z.ai.
//!
//! Llama whose RoPE rotates neighbouring elements of the first half of a head (`partial_rotary_factor`, 0.5 where
//! config.json is silent). Gate and up are one module, gate first. `attention_bias`, true where config.json is silent,
//! adds biases to queries, keys and values. GLM-4-0414 also normalises the results of blocks.
//!
//! Source: modeling_glm.py and modeling_glm4.py of transformers; GLM Team, arXiv:2406.12793.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{BlockNorms, ModelSpec, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};

pub const FAMILY: Family = Family {
    class: "GlmForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.gate_up_proj", "ffn_up")],
        has_partial_rotary: true,
        is_of: |gguf| gguf.shape("blk.0.attn_qkv.weight").is_none(),
        ..GgufArchitecture::named("chatglm")
    }),
    describe: |config| describe(config, FAMILY.class, Norms::before(BEFORE[0], BEFORE[1])),
};

/// GLM-4-0414 and GLM-Z1.
pub const GLM4: Family = Family {
    class: "Glm4ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("mlp.gate_up_proj", "ffn_up"),
            (BEHIND[0], "post_attention_norm"),
            (BEHIND[1], "post_ffw_norm"),
        ],
        has_partial_rotary: true,
        ..GgufArchitecture::named("glm4")
    }),
    describe: |config| {
        let [attention, feed_forward] = [0, 1].map(|block| BlockNorms {
            before: Some(BEFORE[block]),
            after: Some(BEHIND[block]),
        });
        let norms = Norms::Sequential {
            attention,
            feed_forward,
        };
        describe(config, GLM4.class, norms)
    },
};

/// The norms of a layer in front of its blocks.
const BEFORE: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];
/// The norms of the results of its blocks.
const BEHIND: [&str; 2] = ["post_self_attn_layernorm", "post_mlp_layernorm"];

fn describe(config: &JsonFile, class: &'static str, norms: Norms) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(151_552, 4096, 13_696, 40, 32, 131_072)),
        num_kv_heads: Some(2),
        head_dim: Some(128),
        norm_eps: 1.5625e-7,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let mut layer = dimensions.llama_layer();
    layer.norms = norms;
    layer.attention.qkv.has_bias = config.bool_or("attention_bias", true)?;
    layer.feed_forward = dimensions.fused_gated("mlp.gate_up_proj");
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(class, layer, windows))
}
