//! DeepSeek-V3.2, by DeepSeek-AI, and GLM-5, by Z.ai: DeepSeek-V3 with sparse attention by an indexer.
//!
//! A query sees the `index_topk` positions that an indexer of `index_n_heads` heads of `index_head_dim` elements scores
//! highest. The indexer makes its queries of the latents of queries, normalises its keys by a layer norm with biases,
//! and rotates the first `qk_rope_head_dim` elements of both: in halves in DeepSeek-V3.2, in adjacent pairs in GLM-5.
//! Some layers of GLM-5 have no indexer and use the selection of the last layer before them that has one: the layers
//! that `indexer_types` or `index_topk_pattern` lists, or the schedule of `index_topk_freq` and
//! `index_skip_topk_offset`.
//!
//! As in transformers, the queries and keys of an indexer are bf16 and are not turned by a Hadamard transform, which
//! DeepSeek's own code needs to round them to FP8. The layer behind the last one, which makes drafts, is not read.
//!
//! Source: configuration_*.py and modeling_*.py of deepseek_v32 and glm_moe_dsa of transformers; DeepSeek-AI,
//! arXiv:2512.02556.

use serde_json::{Value, json};

use super::bounds::{MAX_HEADS, MAX_LAYERS, MAX_POSITIONS};
use super::deepseek::{DEEPSEEK_PARTS, Generation, Parts, V3_EXPERTS, describe_generation, part};
use super::dimensions::Sizes;
use super::family::Family;
use super::grouped_experts::{GroupedExperts, GroupedNames};
use super::layer_lists::layers_of_kind;
use crate::spec::{IndexerSpec, LatentSelection, LatentSpec, ModelSpec, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::IndexerShape;

pub const V32: Family = Family {
    class: "DeepseekV32ForCausalLM",
    gguf: None,
    describe: |config| {
        let indexer = Indexer {
            num_heads: 64,
            is_interleaved: false,
        };
        describe(config, &V32_GENERATION, &indexer, |_, num_layers| {
            Ok(vec![false; num_layers])
        })
    },
};

pub const GLM_MOE_DSA: Family = Family {
    class: "GlmMoeDsaForCausalLM",
    gguf: None,
    describe: |config| {
        let indexer = Indexer {
            num_heads: 32,
            is_interleaved: true,
        };
        describe(
            config,
            &GLM_GENERATION,
            &indexer,
            layers_with_shared_selections,
        )
    },
};

/// The differences between the indexers of the two families.
struct Indexer {
    /// The default of `index_n_heads`.
    num_heads: usize,
    is_interleaved: bool,
}

const V32_EXPERTS: GroupedExperts = GroupedExperts {
    has_mlp_bias: false,
    names: GroupedNames {
        layer_types: Some("mlp_layer_types"),
        ..GroupedNames::DEEPSEEK
    },
    ..V3_EXPERTS
};

const V32_GENERATION: Generation = Generation {
    class: V32.class,
    sizes: Sizes::new(129_280, 7168, 18_432, 61, 128, 163_840),
    norm_eps: 1e-6,
    rope_theta: 10_000.0,
    parts: DEEPSEEK_PARTS,
    is_tied: false,
    experts: Some(V32_EXPERTS),
};

const GLM_GENERATION: Generation = Generation {
    class: GLM_MOE_DSA.class,
    sizes: Sizes::new(154_880, 6144, 12_288, 78, 64, 202_752),
    norm_eps: 1e-5,
    rope_theta: 10_000.0,
    parts: Parts {
        rotary: 64,
        content: 192,
        value: 256,
        queries: 2048,
        latent: 512,
    },
    is_tied: false,
    experts: Some(GroupedExperts {
        num_groups: Some(1),
        num_chosen_groups: Some(1),
        ..V32_EXPERTS
    }),
};

/// `shares` tells of each layer whether it has no indexer.
fn describe(
    config: &JsonFile,
    generation: &Generation,
    indexer: &Indexer,
    shares: fn(&JsonFile, usize) -> Result<Vec<bool>, LoadError>,
) -> Result<ModelSpec, LoadError> {
    // The classes rotate adjacent elements of queries and keys, whatever the config says.
    let config = &config.with("rope_interleave", json!(true));
    let mut spec = describe_generation(config, generation)?;
    let shares = shares(config, spec.num_layers())?;
    let hidden_size = spec.hidden_size;
    for (layer, shares) in spec.layers.iter_mut().zip(shares) {
        if let Some(latent) = &mut layer.attention.latent {
            latent.selection = Some(match shares {
                true => LatentSelection::Shared,
                false => LatentSelection::Own(indexer.spec(config, latent, hidden_size)?),
            });
        }
    }
    Ok(spec)
}

impl Indexer {
    fn spec(
        &self,
        config: &JsonFile,
        latent: &LatentSpec,
        hidden_size: usize,
    ) -> Result<IndexerSpec, LoadError> {
        const DIM: &str = "index_head_dim";
        let Some(queries) = &latent.queries else {
            let expected = "a size: the queries of the indexer are made of latents of queries";
            return Err(config.unexpected("q_lora_rank", "null", expected));
        };
        let shape = IndexerShape {
            num_heads: config
                .size("index_n_heads", 1..=MAX_HEADS)?
                .unwrap_or(self.num_heads),
            head_dim: part(config, DIM, 128, true)?,
            rotary_dim: latent.shape.rotary_dim,
            is_interleaved: self.is_interleaved,
            max_selected: config
                .size("index_topk", 1..=MAX_POSITIONS)?
                .unwrap_or(2048),
        };
        if shape.head_dim < shape.rotary_dim {
            let expected = format!("at least qk_rope_head_dim, {}", shape.rotary_dim);
            return Err(config.unexpected(DIM, shape.head_dim, expected));
        }
        let num_inputs = queries.projection.num_inputs;
        Ok(IndexerSpec {
            shape,
            queries: Projection::single("self_attn.indexer.wq_b", shape.q_len(), num_inputs),
            keys: Projection::single("self_attn.indexer.wk", shape.head_dim, hidden_size),
            key_norm: "self_attn.indexer.k_norm",
            norm_eps: 1e-6,
            head_weights: Projection::single(
                "self_attn.indexer.weights_proj",
                shape.num_heads,
                hidden_size,
            ),
        })
    }
}

/// The layers of a GLM-5 that have no indexer.
fn layers_with_shared_selections(
    config: &JsonFile,
    num_layers: usize,
) -> Result<Vec<bool>, LoadError> {
    const TYPES: &str = "indexer_types";
    const PATTERN: &str = "index_topk_pattern";
    const KINDS: &[[&str; 2]] = &[["full", "shared"], ["F", "S"]];
    let (key, shares) = match (config.get(TYPES), config.get(PATTERN)) {
        (Some(types), _) => (
            TYPES,
            layers_of_kind(config, (TYPES, types), num_layers, &KINDS[..1])?,
        ),
        (None, Some(Value::String(pattern))) => {
            let letters: Value = pattern.chars().map(String::from).collect();
            let listed = (PATTERN, &letters);
            (
                PATTERN,
                layers_of_kind(config, listed, num_layers, &KINDS[1..])?,
            )
        }
        (None, Some(pattern)) => {
            let listed = (PATTERN, pattern);
            (
                PATTERN,
                layers_of_kind(config, listed, num_layers, &KINDS[..1])?,
            )
        }
        (None, None) => {
            let period = config
                .size("index_topk_freq", 0..=MAX_LAYERS)?
                .unwrap_or(1)
                .max(1);
            let offset = config
                .size("index_skip_topk_offset", 0..=MAX_LAYERS)?
                .unwrap_or(2);
            let is_full = |layer: usize| (layer + 1).saturating_sub(offset).is_multiple_of(period);
            let layers = 0..num_layers;
            (
                "index_skip_topk_offset",
                layers.map(|layer| !is_full(layer)).collect(),
            )
        }
    };
    match shares.first() {
        Some(true) => Err(config.error(format!(
            "{key}: the first layer has no indexer, and no layer before it has one"
        ))),
        _ => Ok(shares),
    }
}
