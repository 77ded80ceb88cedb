//! ModernBERT: encoders for long texts.
//!
//! RoPE, a gated feed-forward block with GELU, and LayerNorm in front of each block and behind the last layer; the
//! first block reads the embedded tokens, which are normalised themselves. Queries, keys and values are one module.
//! Every third layer (`layer_types`, or `global_attn_every_n_layers`) sees the whole text. The others see half of
//! `local_attention` positions before each token and behind it, and have a position embedding of their own.
//!
//! Source: modeling_modernbert.py and configuration_modernbert.py of transformers; Warner et al., arXiv:2412.13663.

use std::num::NonZeroU32;

use super::bounds::{MAX_LAYERS, MAX_POSITIONS};
use super::dimensions::{Defaults, Dimensions, Keys};
use super::family::Family;
use super::rope_config::{RopeDefaults, rope_of, rope_parameters};
use super::windows::{DEFAULT_MAX_WINDOW_LAYERS, set_rope_of_windows, windowed_layers};
use crate::rope::Rope;
use crate::spec::{
    ClassActivation, ClassDense, ClassModules, ModelModules, ModelSpec, NormKind, Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_config::PoolingMode;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "ModernBertModel",
    gguf: None,
    describe,
};

const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-5,
    activation: Activation::Gelu,
    rope: RopeDefaults {
        theta: 160_000.0,
        section: Some("full_attention"),
        ..Defaults::LLAMA.rope
    },
    keys: Keys {
        activation: "hidden_activation",
        norm_eps: "norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

/// The prediction head and the classifier behind it.
pub fn classes(config: &JsonFile) -> Result<ClassModules, LoadError> {
    let pooling = match config.string("classifier_pooling")? {
        None | Some("cls") => PoolingMode::Cls,
        Some("mean") => PoolingMode::Mean,
        Some(other) => {
            return Err(config.unexpected(
                "classifier_pooling",
                format_args!("'{other}'"),
                "one of 'cls' and 'mean'",
            ));
        }
    };
    if let Some(other) = config.string("classifier_activation")?
        && other != "gelu"
    {
        let expected = "supported; only 'gelu' is";
        return Err(config.unexpected(
            "classifier_activation",
            format_args!("'{other}'"),
            expected,
        ));
    }
    Ok(ClassModules {
        pooling,
        dense: Some(ClassDense {
            module: "head.dense",
            has_bias: config.bool_or("classifier_bias", false)?,
            activation: ClassActivation::Gelu,
            norm: Some("head.norm"),
        }),
        output: "classifier",
        has_bias: true,
    })
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer {
        has_bias: config.bool_or("norm_bias", false)?,
    };
    dimensions.rope = rope(
        config,
        &dimensions,
        "full_attention",
        "global_rope_theta",
        160_000.0,
    )?;
    let local_rope = rope(
        config,
        &dimensions,
        "sliding_attention",
        "local_rope_theta",
        10_000.0,
    )?;
    let windows = windows(config, dimensions.num_layers)?;
    let hidden = dimensions.hidden_size;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("attn_norm", "mlp_norm");
    layer.attention.qkv = dimensions.fused_qkv("attn.Wqkv");
    layer.attention.o = Projection::single("attn.Wo", hidden, dimensions.qkv_widths()[0]);
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = dimensions.fused_gated("mlp.Wi");
    for down in layer.feed_forward.downs_mut() {
        *down = Projection::single("mlp.Wo", hidden, dimensions.intermediate_size);
    }
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let mut spec = ModelSpec {
        embedding_norm: Some("model.embeddings.norm"),
        is_bidirectional: true,
        modules: ModelModules {
            embedding: "model.embeddings.tok_embeddings",
            layers: "model.layers",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("model.final_norm"),
            output_layer: "decoder",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    };
    set_rope_of_windows(&mut spec, &local_rope);
    if let Some(Norms::Sequential { attention, .. }) =
        spec.layers.first_mut().map(|layer| &mut layer.norms)
    {
        attention.before = None;
    }
    Ok(spec)
}

/// The position embedding of a type of layers: a section of `rope_parameters`, or the base under a key of earlier
/// versions.
fn rope(
    config: &JsonFile,
    dimensions: &Dimensions,
    section: &'static str,
    key: &str,
    theta: f64,
) -> Result<Rope, LoadError> {
    let parameters = match rope_parameters(config)? {
        Some(parameters) => parameters.object(section)?,
        None => None,
    };
    rope_of(
        config,
        parameters.as_ref(),
        config.number(key, 1.0..=1e15)?,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
        RopeDefaults {
            theta,
            section: Some(section),
            ..DEFAULTS.rope
        },
    )
}

/// How many positions a token of each layer sees in each direction, its own included.
fn windows(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let width = config.size("local_attention", 2..=MAX_POSITIONS)?;
    let window = NonZeroU32::new(width.unwrap_or(128) as u32 / 2 + 1);
    let interval = config.size("global_attn_every_n_layers", 1..=MAX_LAYERS)?;
    let is_local = match config.get("layer_types") {
        Some(_) => windowed_layers(config, num_layers, DEFAULT_MAX_WINDOW_LAYERS)?,
        None => (0..num_layers)
            .map(|layer| !layer.is_multiple_of(interval.unwrap_or(3)))
            .collect(),
    };
    let windows = is_local.into_iter().map(|is| window.filter(|_| is));
    Ok(windows.collect())
}
