//! Granite 3, by IBM, the dense models.
//!
//! Llama with four multipliers: of embedded tokens (`embedding_multiplier`), of scores, in place of the usual factor
//! (`attention_multiplier`), of what a block adds to the residual stream (`residual_multiplier`), and a divisor of
//! logits (`logits_scaling`).
//!
//! With a residual multiplier `r`, the residual stream `x + r * block(norm(x))` is computed as `x / r +
//! block(norm(x))`: all that reads it are norms, which do not see a factor if their epsilon, which is added to a mean
//! square, is divided by `r^2`. So only the embedding is divided by `r`.
//!
//! Source: modeling_granite.py of transformers.

use serde_json::{Map, Value};

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, QUERIES_AND_KEYS};
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::LogitsTransform;

pub const FAMILY: Family = Family {
    class: "GraniteForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        keys: &[
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ],
        add_read: check_shared_block,
        ..GgufArchitecture::named("granite")
    }),
    describe,
};

/// Reads what the converter writes for a Granite 4 without state spaces and experts: their sizes, and the width of the
/// block as that of a shared expert.
fn check_shared_block(gguf: &GgufConfig<'_>, _: &mut Map<String, Value>) -> Result<(), LoadError> {
    const WIDTH: &str = "expert_shared_feed_forward_length";
    for key in [
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.time_step_rank",
        "expert_used_count",
    ] {
        gguf.get(key);
    }
    let widths = [WIDTH, "feed_forward_length"].map(|key| gguf.number(key));
    let [shared, width] = widths;
    match (shared?, width?) {
        (Some(shared), width) if width.as_ref() != Some(&shared) => {
            let problem = "is not feed_forward_length, the width of the block";
            Err(gguf.error(WIDTH, problem, "the file is damaged"))
        }
        _ => Ok(()),
    }
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let (mut spec, _) = describe_dense(config, FAMILY.class)?;
    set_mlp_biases(config, &mut spec)?;
    Ok(spec)
}

/// Sets whether feed-forward blocks have biases.
///
/// # Errors
/// The key is no truth value.
pub fn set_mlp_biases(config: &JsonFile, spec: &mut ModelSpec) -> Result<(), LoadError> {
    let has_bias = config.bool_or("mlp_bias", false)?;
    for layer in &mut spec.layers {
        layer.feed_forward.set_biases(has_bias);
    }
    Ok(())
}

/// A model whose layers have attention and a block without experts, and the sizes that config.json tells.
///
/// # Errors
/// A key is out of range.
pub fn describe_dense(
    config: &JsonFile,
    class: &'static str,
) -> Result<(ModelSpec, Dimensions), LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 4096, 11_008, 32, 32, 2048)),
        ..Defaults::LLAMA
    };
    describe_dense_with(config, class, &defaults)
}

/// [`describe_dense`] with other defaults.
///
/// # Errors
/// A key is out of range.
pub fn describe_dense_with(
    config: &JsonFile,
    class: &'static str,
    defaults: &Defaults,
) -> Result<(ModelSpec, Dimensions), LoadError> {
    let dimensions = Dimensions::from_config(config, defaults)?;
    let multipliers = Multipliers::read(config)?;
    let mut scaled = dimensions.clone();
    scaled.norm.eps = (f64::from(scaled.norm.eps) / multipliers.residual.powi(2)) as f32;
    let mut layer = dimensions.llama_layer();
    layer.attention.scale = multipliers.scores as f32;
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    let mut spec = scaled.model(class, layer, windows);
    spec.embedding_scale = (multipliers.embedding / multipliers.residual) as f32;
    spec.logits = LogitsTransform {
        scale: multipliers.logits.recip() as f32,
        soft_cap: None,
    };
    Ok((spec, dimensions))
}

/// The factors of a Granite.
struct Multipliers {
    embedding: f64,
    scores: f64,
    residual: f64,
    logits: f64,
}

impl Multipliers {
    fn read(config: &JsonFile) -> Result<Self, LoadError> {
        Ok(Self {
            embedding: multiplier(config, "embedding_multiplier")?,
            scores: multiplier(config, "attention_multiplier")?,
            residual: multiplier(config, "residual_multiplier")?,
            logits: multiplier(config, "logits_scaling")?,
        })
    }
}

/// A factor; 1 where config.json is silent.
///
/// # Errors
/// It is out of range.
pub fn multiplier(config: &JsonFile, key: &str) -> Result<f64, LoadError> {
    Ok(config.number(key, 1e-4..=1e4)?.unwrap_or(1.0))
}
