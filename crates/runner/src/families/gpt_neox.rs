//! GPT-NeoX 20B, Pythia, and others of their shape, such as RedPajama-INCITE.
//!
//! LayerNorm with biases. Both blocks read the residual stream, each through a norm of its own
//! (`use_parallel_residual`), or one follows the other. Queries, keys and values are one module, head by head. The
//! first part of a head is rotated (`rotary_pct`, 0.25 where config.json is silent). The feed-forward block has no
//! gate. All of its layers have biases, those of attention unless `attention_bias` is false. The output layer is
//! `embed_out`.
//!
//! Source: modeling_gpt_neox.py and configuration_gpt_neox.py of transformers; Black et al., arXiv:2204.06745.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::{RopeDefaults, THETA};
use super::windows::no_windows;
use crate::spec::{ModelModules, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "GPTNeoXForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("use_parallel_residual", "use_parallel_residual")],
        has_partial_rotary: true,
        has_ordered_qkv: true,
        ..GgufArchitecture::named("gptneox")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let rotary_share = config.number("rotary_pct", 0.0..=1.0)?;
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_432, 6144, 24_576, 44, 64, 2048)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            theta: config.number("rotary_emb_base", THETA)?.unwrap_or(10_000.0),
            partial_rotary_factor: Some(rotary_share.unwrap_or(0.25)),
            ..Defaults::LLAMA.rope
        },
        activation: Activation::Gelu,
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    let [attention, feed_forward] = ["input_layernorm", "post_attention_layernorm"];
    layer.norms = match config.bool_or("use_parallel_residual", true)? {
        true => Norms::Parallel {
            attention,
            feed_forward: Some(feed_forward),
        },
        false => Norms::before(attention, feed_forward),
    };
    layer.attention.qkv = dimensions.qkv_by_group("attention.query_key_value");
    layer.attention.o = Projection::single("attention.dense", hidden, q_width);
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", true)?);
    layer.feed_forward = dimensions.plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h");
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        modules: ModelModules {
            embedding: "gpt_neox.embed_in",
            layers: "gpt_neox.layers",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("gpt_neox.final_layer_norm"),
            output_layer: "embed_out",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
