//! GPT-2, by OpenAI, and others of its shape, such as DistilGPT-2 and Cerebras-GPT; StarCoder, by BigCode.
//!
//! LayerNorm with biases, learned positions, a feed-forward block without a gate, and biases in all linear layers.
//! Queries, keys and values are one module. Scores have the usual factor (unless `scale_attn_weights` is false).
//!
//! - GPT-2: checkpoints store the weights of linear layers as `[inputs, outputs]` (`Conv1D`), and OpenAI's own lack the
//!   `transformer.` in front of names. `scale_attn_by_inverse_layer_idx` divides the factor of scores by the number of
//!   the layer, from 1 on.
//! - GPTBigCode: all query heads share a key head (`multi_query`), or each has its own, and their module has query, key
//!   and value head by head.
//!
//! Source: modeling_gpt2.py, pytorch_utils.py and modeling_gpt_bigcode.py of transformers; Radford et al., "Language
//! Models are Unsupervised Multitask Learners", 2019; Li et al., arXiv:2305.06161.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{
    FeedForward, LayerSpec, LearnedPositions, ModelModules, ModelSpec, NormKind, Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

pub const FAMILY: Family = Family {
    class: "GPT2LMHeadModel",
    gguf: Some(GgufArchitecture {
        keys: GGUF_KEYS,
        ..GgufArchitecture::named("gpt2")
    }),
    describe: describe_gpt2,
};

pub const BIGCODE: Family = Family {
    class: "GPTBigCodeForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: GGUF_KEYS,
        ..GgufArchitecture::named("starcoder")
    }),
    describe: describe_bigcode,
};

/// Metadata of GGUF files by what config.json calls them.
const GGUF_KEYS: &[(&str, &str)] = &[
    ("embedding_length", "n_embd"),
    ("block_count", "n_layer"),
    ("attention.head_count", "n_head"),
    ("context_length", "n_positions"),
    ("feed_forward_length", "n_inner"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
];

/// The keys of config.json, also in GPT-J.
pub(super) const KEYS: Keys = Keys {
    hidden_size: "n_embd",
    num_layers: "n_layer",
    num_heads: "n_head",
    positions: "n_positions",
    intermediate_size: "n_inner",
    may_lack_intermediate_size: true,
    activation: "activation_function",
    norm_eps: "layer_norm_epsilon",
    ..Keys::LLAMA
};

/// The modules outside of the layers, likewise.
pub(super) const MODULES: ModelModules = ModelModules {
    embedding: "transformer.wte",
    layers: "transformer.h",
    first_layer: 0,
    layers_per_module: 1,
    final_norm: Some("transformer.ln_f"),
    output_layer: "lm_head",
};

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(50_257, 768, 3072, 12, 12, 1024)),
    norm_eps: 1e-5,
    tied_embeddings: true,
    activation: Activation::GeluTanh,
    keys: KEYS,
    ..Defaults::LLAMA
};

fn describe_gpt2(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let dimensions = dimensions(config)?;
    let qkv = dimensions.fused_qkv(QKV);
    let layer = layer(config, &dimensions, qkv, Projection::transposed)?;
    let mut spec = model(dimensions, FAMILY.class, layer);
    if config.bool_or("scale_attn_by_inverse_layer_idx", false)? {
        for (index, layer) in spec.layers.iter_mut().enumerate() {
            layer.attention.scale /= (index + 1) as f32;
        }
    }
    Ok(spec)
}

fn describe_bigcode(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let mut dimensions = dimensions(config)?;
    let qkv = match config.bool_or("multi_query", true)? {
        true => {
            dimensions.num_kv_heads = 1;
            dimensions.fused_qkv(QKV)
        }
        false => {
            dimensions.num_kv_heads = dimensions.num_heads;
            dimensions.qkv_by_group(QKV)
        }
    };
    let layer = layer(config, &dimensions, qkv, |projection| projection)?;
    Ok(model(dimensions, BIGCODE.class, layer))
}

/// Queries, keys and values.
const QKV: &str = "attn.c_attn";

fn dimensions(config: &JsonFile) -> Result<Dimensions, LoadError> {
    if config.bool_or("add_cross_attention", false)? {
        return Err(config.unexpected("add_cross_attention", true, "supported; only false is"));
    }
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    Ok(dimensions)
}

/// `stored`: makes a projection one whose weights are stored in another way.
fn layer(
    config: &JsonFile,
    dimensions: &Dimensions,
    qkv: Projection,
    stored: fn(Projection) -> Projection,
) -> Result<LayerSpec, LoadError> {
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("ln_1", "ln_2");
    layer.attention.qkv = stored(qkv);
    let num_inputs = layer.attention.o.num_inputs;
    layer.attention.o = stored(Projection::single("attn.c_proj", hidden, num_inputs));
    layer.attention.set_biases(true);
    if !config.bool_or("scale_attn_weights", true)? {
        layer.attention.scale = 1.0;
    }
    layer.feed_forward = FeedForward::Plain {
        up: stored(Projection::single("mlp.c_fc", inner, hidden)),
        activation: PlainActivation::Of(dimensions.activation),
        alphas: None,
        down: stored(Projection::single("mlp.c_proj", hidden, inner)),
    };
    layer.feed_forward.set_biases(true);
    Ok(layer)
}

fn model(dimensions: Dimensions, class: &'static str, layer: LayerSpec) -> ModelSpec {
    let windows = no_windows(dimensions.num_layers);
    ModelSpec {
        learned_positions: Some(LearnedPositions {
            module: "transformer.wpe",
            first_row: 0,
            padding_id: None,
            num_rows: dimensions.max_position_embeddings,
        }),
        modules: MODULES,
        ..dimensions.model(class, layer, windows)
    }
}
