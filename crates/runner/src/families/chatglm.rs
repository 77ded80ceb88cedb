//! ChatGLM 2 and 3 and GLM-4 9B, by Z.ai, in their authors' own format.
//!
//! [GLM-4](super::glm) under names of its own: queries, keys and values are one module, and the base of RoPE is
//! multiplied by `rope_ratio`. `add_qkv_bias` and `add_bias_linear` add biases.
//!
//! Source: configuration_chatglm.py and modeling_chatglm.py of THUDM/chatglm3-6b and zai-org/glm-4-9b-chat; GLM Team,
//! arXiv:2406.12793.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{FeedForward, ModelModules, ModelSpec, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};
use inflight_numbers::Stacking;
use serde_json::json;

pub const FAMILY: Family = Family {
    class: "ChatGLMModel",
    gguf: Some(GgufArchitecture {
        modules: &[("mlp.dense_h_to_4h", "ffn_up")],
        keys: &[
            ("block_count", NUM_LAYERS),
            ("context_length", "seq_length"),
            ("feed_forward_length", "ffn_hidden_size"),
            ("attention.head_count_kv", NUM_GROUPS),
            ("attention.layer_norm_rms_epsilon", "layernorm_epsilon"),
        ],
        has_partial_rotary: true,
        is_of: |gguf| gguf.shape("blk.0.attn_qkv.weight").is_some(),
        optional_biases: &[
            ("add_qkv_bias", "self_attention.query_key_value"),
            ("add_bias_linear", "self_attention.dense"),
        ],
        add_fixed: |config| {
            config.insert(HAS_GROUPS.to_owned(), json!(true));
        },
        ..GgufArchitecture::named("chatglm")
    }),
    describe: |config| describe(config, FAMILY.class),
};

/// The class of older checkpoints.
pub const CONDITIONAL: Family = Family {
    class: "ChatGLMForConditionalGeneration",
    gguf: None,
    describe: |config| describe(config, CONDITIONAL.class),
};

const NUM_LAYERS: &str = "num_layers";
const NUM_GROUPS: &str = "multi_query_group_num";
const HAS_GROUPS: &str = "multi_query_attention";

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    check(config)?;
    let ratio = config.number("rope_ratio", 1e-3..=1e6)?;
    let defaults = Defaults {
        sizes: Some(Sizes::new(65_024, 4096, 13_696, 28, 32, 2048)),
        num_kv_heads: Some(1),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: 10_000.0 * ratio.unwrap_or(1.0),
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        keys: Keys {
            num_layers: NUM_LAYERS,
            num_kv_heads: NUM_GROUPS,
            positions: "seq_length",
            intermediate_size: "ffn_hidden_size",
            norm_eps: "layernorm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut told = config.clone();
    for (key, ours) in [
        ("kv_channels", "head_dim"),
        ("padded_vocab_size", "vocab_size"),
    ] {
        if let Some(value) = config.get(key) {
            told = told.with(ours, json!(value));
        }
    }
    let mut dimensions = Dimensions::from_config(&told, &defaults)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let [q, ..] = dimensions.qkv_widths();
    let has_bias = config.bool_or("add_bias_linear", false)?;
    let has_qkv_bias = has_bias || config.bool_or("add_qkv_bias", false)?;
    let mut layer = dimensions.llama_layer();
    let qkv = dimensions.fused_qkv("self_attention.query_key_value");
    layer.attention.qkv = qkv.with_bias(has_qkv_bias);
    let o = Projection::single("self_attention.dense", hidden, q);
    layer.attention.o = o.with_bias(has_bias);
    let gate_up = [inner, inner];
    layer.feed_forward = FeedForward::Gated {
        gate_up: Projection::fused("mlp.dense_h_to_4h", &gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("mlp.dense_4h_to_h", hidden, inner),
    };
    layer.feed_forward.set_biases(has_bias);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        modules: ModelModules {
            embedding: "transformer.embedding.word_embeddings",
            layers: "transformer.encoder.layers",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("transformer.encoder.final_layernorm"),
            output_layer: "transformer.output_layer",
        },
        ..dimensions.model(class, layer, windows)
    })
}

/// Refuses the first ChatGLM, which shares its class with ChatGLM 2, and choices that no published model has.
fn check(config: &JsonFile) -> Result<(), LoadError> {
    const FIRST: &str = "position_encoding_2d";
    if config.get(FIRST).is_some() {
        let expected = "supported: it is the first ChatGLM; ChatGLM 2 and 3 and GLM-4 are";
        return Err(config.unexpected(FIRST, "there", expected));
    }
    const PREFIX: &str = "pre_seq_len";
    if let Some(length) = config.get(PREFIX).filter(|length| !length.is_null()) {
        let expected = "null: prefixes of P-tuning are not read";
        return Err(config.unexpected(PREFIX, length, expected));
    }
    for (key, default, supported) in [
        (HAS_GROUPS, false, true),
        ("rmsnorm", true, true),
        ("post_layer_norm", true, true),
        ("original_rope", true, true),
        ("apply_residual_connection_post_layernorm", false, false),
    ] {
        if config.bool_or(key, default)? != supported {
            let expected = format!("supported; only {supported} is");
            return Err(config.unexpected(key, !supported, expected));
        }
    }
    Ok(())
}
