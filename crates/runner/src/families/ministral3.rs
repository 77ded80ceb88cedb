//! Ministral 3, by Mistral AI.
//!
//! Mistral whose rotated queries have a factor that grows with their position (`llama_4_scaling_beta`), by steps of
//! `original_max_position_embeddings`. Where config.json is silent, it has YaRN.
//!
//! Source: configuration_ministral3.py and modeling_ministral3.py of transformers; Mistral AI, arXiv:2601.08584.

use serde_json::{Map, Value as Json, json};

use super::bounds::MAX_POSITIONS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, QUERIES_AND_KEYS};
use super::rope_config::rope_parameters;
use super::windows::windows_if_given;
use crate::rope::QueryFactors;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "Ministral3ForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        add_read: add_query_factors,
        ..GgufArchitecture::named("mistral3")
    }),
    describe,
};

/// Adds the factors of queries, without which the model is a Mistral, and what llama.cpp takes for the scales of YaRN
/// where the file has one of them: a factor of 1 for cosines and sines.
fn add_query_factors(
    gguf: &GgufConfig<'_>,
    config: &mut Map<String, Json>,
) -> Result<(), LoadError> {
    let slope = gguf.number("attention.temperature_scale")?;
    let positions = gguf.required("context_length")?;
    let multiplier = gguf.number("rope.scaling.yarn_log_multiplier")?;
    if let Some(Json::Object(rope)) = config.get_mut("rope_parameters") {
        rope.insert(
            "llama_4_scaling_beta".to_owned(),
            slope.unwrap_or(json!(0.0)),
        );
        rope.entry("original_max_position_embeddings")
            .or_insert(positions);
        // 0 is none.
        if multiplier.is_some_and(|it| it.as_f64() != Some(0.0)) {
            for key in ["mscale", "mscale_all_dim"] {
                rope.insert(key.to_owned(), json!(1.0));
            }
        }
    }
    Ok(())
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(131_072, 4096, 14_336, 34, 32, 262_144)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let rope = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    });
    let config = &match rope_parameters(config)? {
        Some(_) => config.clone(),
        None => config.with("rope_parameters", rope),
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.rope.query_factors = query_factors(config)?;
    let layer = dimensions.llama_layer();
    let windows = windows_if_given(config, dimensions.num_layers)?;
    Ok(dimensions.model(FAMILY.class, layer, windows))
}

/// The factors of queries by their positions; `None` without [parameters](rope_parameters) of a position embedding.
///
/// # Errors
/// A key is missing or out of range.
pub fn query_factors(config: &JsonFile) -> Result<Option<QueryFactors>, LoadError> {
    let Some(parameters) = rope_parameters(config)? else {
        return Ok(None);
    };
    let period = parameters.required_size("original_max_position_embeddings", 1..=MAX_POSITIONS)?;
    let slope = parameters.required_number("llama_4_scaling_beta", 0.0..=1e6)?;
    let factors = QueryFactors {
        slope,
        period: period as f64,
        first: 0,
    };
    Ok(Some(factors).filter(|factors| factors.slope > 0.0))
}
