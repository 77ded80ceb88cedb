//! MPT, by MosaicML.
//!
//! LayerNorm and linear layers without biases, GELU in a feed-forward block without a gate, queries, keys and values in
//! one module, and linear biases of scores in place of positions. `clip_qkv` clips queries, keys and values. The
//! authors' own code has another class. Refused are norms of queries and keys (`qk_ln`) and other options that only
//! that code has.
//!
//! Source: configuration_mpt.py and modeling_mpt.py of transformers; MosaicML, "Introducing MPT-7B", 2023.

use serde_json::{Map, Value, json};

use super::dimensions::{Defaults, Dimensions, Keys, Sizes, clip_qkv};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{FeedForward, ModelModules, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

pub const FAMILY: Family = Family {
    class: "MptForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("norm_1", "attn_norm"),
            ("attn.Wqkv", "attn_qkv"),
            ("attn.out_proj", "attn_output"),
            ("norm_2", "ffn_norm"),
            ("ffn.up_proj", "ffn_up"),
            ("ffn.down_proj", "ffn_down"),
        ],
        keys: &[
            ("embedding_length", "d_model"),
            ("block_count", "n_layers"),
            ("attention.head_count", "n_heads"),
            ("context_length", "max_seq_len"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        add_read: add_attention,
        ..GgufArchitecture::named("mpt")
    }),
    describe: |config| describe(config, FAMILY.class),
};

/// The class of the authors' own code.
pub const ORIGINAL: Family = Family {
    class: "MPTForCausalLM",
    gguf: None,
    describe: |config| describe(config, ORIGINAL.class),
};

/// Adds the section of attention, and what decides whether the model is supported.
fn add_attention(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    const SLOPES: &str = "attention.max_alibi_bias";
    let largest = gguf.number(SLOPES)?.filter(|it| it.as_f64() != Some(0.0));
    let has_qk_norm = gguf.layers_with_tensor("attn_q_norm.weight")?;
    let attention = json!({
        "alibi": largest.is_some(),
        "alibi_bias_max": largest,
        "clip_qkv": gguf.clip()?,
        "qk_ln": has_qk_norm.contains(&true),
    });
    config.insert("attn_config".to_owned(), attention);
    let ratio = gguf.quotient("feed_forward_length", "embedding_length")?;
    config.insert("expansion_ratio".to_owned(), json!(ratio));
    let mut has_bias = false;
    for name in ["attn_qkv.bias", "attn_norm.bias", "ffn_up.bias"] {
        has_bias |= gguf.layers_with_tensor(name)?.contains(&true);
    }
    config.insert("no_bias".to_owned(), json!(!has_bias));
    Ok(())
}

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(50_368, 2048, 8192, 24, 16, 2048)),
    norm_eps: 1e-5,
    tied_embeddings: true,
    activation: Activation::Gelu,
    keys: Keys {
        hidden_size: "d_model",
        num_layers: "n_layers",
        num_heads: "n_heads",
        positions: "max_seq_len",
        may_lack_intermediate_size: true,
        norm_eps: "layer_norm_epsilon",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

/// Widths inside of feed-forward blocks: transformers knows no other, whatever config.json says.
const EXPANSION_RATIO: f64 = 4.0;

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let silent = || JsonFile::new(config.path(), "attn_config.", Map::new());
    let attention = config.object("attn_config")?.unwrap_or_else(silent);
    check(config, &attention, class)?;
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: false };
    dimensions.rope = Rope::none();
    let hidden = dimensions.hidden_size;
    let inner = EXPANSION_RATIO as usize * hidden;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("norm_1", "norm_2");
    layer.attention.qkv = dimensions.fused_qkv("attn.Wqkv");
    layer.attention.o = Projection::single("attn.out_proj", hidden, dimensions.qkv_widths()[0]);
    if let Some(scale) = attention.number("softmax_scale", 1e-6..=1e6)? {
        layer.attention.scale = scale as f32;
    }
    layer.attention.clip = clip_qkv(&attention)?;
    layer.feed_forward = FeedForward::Plain {
        up: Projection::single("ffn.up_proj", inner, hidden),
        activation: PlainActivation::Of(Activation::Gelu),
        alphas: None,
        down: Projection::single("ffn.down_proj", hidden, inner),
    };
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        slope_factor: Some(1.0),
        modules: ModelModules {
            embedding: "transformer.wte",
            layers: "transformer.blocks",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("transformer.norm_f"),
            output_layer: "lm_head",
        },
        ..dimensions.model(class, layer, windows)
    })
}

/// Refuses what transformers does not compute.
fn check(config: &JsonFile, attention: &JsonFile, class: &str) -> Result<(), LoadError> {
    // The authors' code has positions and biases where config.json is silent.
    let silent = class == FAMILY.class;
    let refused = |file: &JsonFile, key, value: &Value, supported: &str| {
        Err(file.unexpected(key, value, format_args!("supported; only {supported} is")))
    };
    for (file, key, supported, default) in [
        (attention, "alibi", true, silent),
        (attention, "qk_ln", false, false),
        (attention, "prefix_lm", false, false),
        (attention, "attn_uses_sequence_id", false, false),
        (config, "no_bias", true, silent),
    ] {
        if file.bool_or(key, default)? != supported {
            return Err(file.unexpected(
                key,
                !supported,
                format_args!("supported; only {supported} is"),
            ));
        }
    }
    const LOGIT_SCALE: &str = "logit_scale";
    if let Some(value) = config.get(LOGIT_SCALE) {
        return refused(config, LOGIT_SCALE, value, "null");
    }
    if let Some(norm) = config.get("norm_type")
        && !["layernorm", "low_precision_layernorm"]
            .map(Some)
            .contains(&norm.as_str())
    {
        return refused(config, "norm_type", norm, "'layernorm'");
    }
    const KIND: &str = "attn_type";
    if let Some(kind) = attention.get(KIND)
        && kind.as_str() != Some("multihead_attention")
    {
        return refused(attention, KIND, kind, "'multihead_attention'");
    }
    for (file, key, supported) in [
        (attention, "alibi_bias_max", 8.0),
        (config, "expansion_ratio", EXPANSION_RATIO),
    ] {
        if let Some(value) = file.get(key)
            && value.as_f64() != Some(supported)
        {
            return refused(file, key, value, &supported.to_string());
        }
    }
    Ok(())
}
