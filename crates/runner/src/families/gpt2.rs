//! GPT-2, by OpenAI, and others of its shape, such as DistilGPT-2 and Cerebras-GPT.
//!
//! LayerNorm with biases, learned positions, a feed-forward block without a gate, and biases in all linear layers.
//! Queries, keys and values are one module. Checkpoints store the weights of linear layers as `[inputs, outputs]`
//! (`Conv1D`), and OpenAI's own lack the `transformer.` in front of names. Scores have the usual factor (unless
//! `scale_attn_weights` is false), which `scale_attn_by_inverse_layer_idx` divides by the number of the layer, from 1
//! on.
//!
//! Source: modeling_gpt2.py and pytorch_utils.py of transformers; Radford et al., "Language Models are Unsupervised
//! Multitask Learners", 2019.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{
    FeedForward, LearnedPositions, ModelModules, ModelSpec, NormKind, Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "GPT2LMHeadModel",
    gguf: Some(GgufArchitecture {
        keys: &[
            ("embedding_length", "n_embd"),
            ("block_count", "n_layer"),
            ("attention.head_count", "n_head"),
            ("context_length", "n_positions"),
            ("feed_forward_length", "n_inner"),
            ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        ],
        ..GgufArchitecture::named("gpt2")
    }),
    describe,
};

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(50_257, 768, 3072, 12, 12, 1024)),
    norm_eps: 1e-5,
    tied_embeddings: true,
    activation: Activation::GeluTanh,
    keys: Keys {
        hidden_size: "n_embd",
        num_layers: "n_layer",
        num_heads: "n_head",
        positions: "n_positions",
        intermediate_size: "n_inner",
        may_lack_intermediate_size: true,
        activation: "activation_function",
        norm_eps: "layer_norm_epsilon",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    if config.bool_or("add_cross_attention", false)? {
        return Err(config.unexpected("add_cross_attention", true, "supported; only false is"));
    }
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let inner = dimensions.intermediate_size;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("ln_1", "ln_2");
    layer.attention.qkv = dimensions.fused_qkv("attn.c_attn").transposed();
    layer.attention.o = Projection::single("attn.c_proj", hidden, q_width).transposed();
    layer.attention.set_biases(true);
    if !config.bool_or("scale_attn_weights", true)? {
        layer.attention.scale = 1.0;
    }
    layer.feed_forward = FeedForward::Plain {
        up: Projection::single("mlp.c_fc", inner, hidden).transposed(),
        activation: dimensions.activation,
        down: Projection::single("mlp.c_proj", hidden, inner).transposed(),
    };
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    let num_positions = dimensions.max_position_embeddings;
    let mut spec = ModelSpec {
        learned_positions: Some(LearnedPositions {
            module: "transformer.wpe",
            first_row: 0,
            padding_id: None,
            num_rows: num_positions,
        }),
        modules: ModelModules {
            embedding: "transformer.wte",
            layers: "transformer.h",
            final_norm: Some("transformer.ln_f"),
            output_layer: "lm_head",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    };
    if config.bool_or("scale_attn_by_inverse_layer_idx", false)? {
        for (index, layer) in spec.layers.iter_mut().enumerate() {
            layer.attention.scale /= (index + 1) as f32;
        }
    }
    Ok(spec)
}
