//! MiniCPM 3, by OpenBMB.
//!
//! Latent attention as DeepSeek-V2's, with RoPE in halves of the last part of each query, and no experts. Embedded
//! tokens have the factor `scale_emb`, what a block adds to the residual stream has `scale_depth` divided by the root
//! of the number of layers, and logits are divided by the hidden size over `dim_model_base`. Where one of the last two
//! is null, there is no such factor.
//!
//! The residual stream is divided by the factor of blocks instead, as in [Granite](super::granite).
//!
//! Source: configuration_minicpm3.py and modeling_minicpm3.py of transformers; Hu et al., arXiv:2404.06395.

use serde_json::{Map, Value, json};

use super::bounds::MAX_HEADS;
use super::deepseek::{Generation, Parts, describe_generation};
use super::dimensions::Sizes;
use super::experts::width;
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::granite::set_mlp_biases;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::LogitsTransform;

pub const FAMILY: Family = Family {
    class: "MiniCPM3ForCausalLM",
    gguf: Some(GgufArchitecture {
        has_latents: true,
        add_fixed: add_factors,
        ..GgufArchitecture::named("minicpm3")
    }),
    describe,
};

/// Adds the factors, which are a part of llama.cpp's minicpm3.cpp.
fn add_factors(config: &mut Map<String, Value>) {
    for (key, factor) in [
        ("scale_emb", FACTORS.embedding),
        ("scale_depth", FACTORS.depth),
        ("dim_model_base", FACTORS.base),
    ] {
        config.insert(key.to_owned(), json!(factor));
    }
}

/// The defaults of two sizes.
const HIDDEN: usize = 2560;
const HEADS: usize = 40;

const GENERATION: Generation = Generation {
    class: "MiniCPM3ForCausalLM",
    sizes: Sizes::new(73_448, HIDDEN, 6400, 62, HEADS, 32_768),
    norm_eps: 1e-5,
    rope_theta: 10_000.0,
    parts: Parts {
        rotary: 32,
        content: 64,
        // Where the key is missing or null, the part of the hidden size that a head has.
        value: HIDDEN / HEADS,
        queries: 768,
        latent: 256,
    },
    is_tied: true,
    experts: None,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const VALUE: &str = "v_head_dim";
    let hidden = width(config, "hidden_size", HIDDEN)?;
    let heads = config.size("num_attention_heads", 1..=MAX_HEADS)?;
    let heads = heads.unwrap_or(HEADS);
    let value = config.get(VALUE).cloned();
    let told = config
        .with("rope_interleave", json!(false))
        .with(VALUE, value.unwrap_or_else(|| json!(hidden / heads)));
    let mut spec = describe_generation(&told, &GENERATION)?;
    set_mlp_biases(config, &mut spec)?;
    set_factors(config, &mut spec, &FACTORS)?;
    Ok(spec)
}

/// The factors of a family where config.json is silent.
pub struct Factors {
    pub embedding: f64,
    pub depth: f64,
    pub base: f64,
}

const FACTORS: Factors = Factors {
    embedding: 12.0,
    depth: 1.4,
    base: 256.0,
};

/// Sets the factors of embedded tokens, of blocks and of logits.
///
/// # Errors
/// One of them is out of range.
pub fn set_factors(
    config: &JsonFile,
    spec: &mut ModelSpec,
    defaults: &Factors,
) -> Result<(), LoadError> {
    const DEPTH: &str = "scale_depth";
    const BASE: &str = "dim_model_base";
    // A factor that is null changes nothing.
    let number = |key, default| match config.has(key) {
        true => config.number(key, 1e-4..=1e6),
        false => Ok(Some(default)),
    };
    let embedding = config
        .number("scale_emb", 1e-4..=1e6)?
        .unwrap_or(defaults.embedding);
    let residual = match number(DEPTH, defaults.depth)? {
        Some(depth) => depth / (spec.num_layers() as f64).sqrt(),
        None => 1.0,
    };
    let logits = match number(BASE, defaults.base)? {
        Some(base) => base / spec.hidden_size as f64,
        None => 1.0,
    };
    spec.norm.eps = (f64::from(spec.norm.eps) / residual.powi(2)) as f32;
    spec.embedding_scale = (embedding / residual) as f32;
    spec.logits = LogitsTransform {
        scale: logits as f32,
        soft_cap: None,
    };
    Ok(())
}
