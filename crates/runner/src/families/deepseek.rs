//! DeepSeek-V2, V2-Lite, V3 and R1, and others of their form, such as Moonlight, Kimi K2, GLM-4.7-Flash, by Z.ai,
//! Youtu-LLM, by Tencent, Mistral 4, by Mistral AI, and A.X K1, by SK Telecom.
//!
//! Attention is latent: keys and values of all heads are made of one latent of `kv_lora_rank` elements, which is all
//! that the cache holds of a position besides `qk_rope_head_dim` rotated elements that all heads share. Queries come
//! from a latent too, unless `q_lora_rank` is null (V2-Lite). RoPE rotates adjacent elements of the last part of each
//! query. With YaRN, scores are multiplied by the square of a temperature (`mscale_all_dim`).
//!
//! Layers from `first_k_dense_replace` on have experts, and `n_shared_experts` that all tokens have, which are one wide
//! block. V2 chooses experts by a softmax, of all experts or of those in the groups with the largest scores
//! (`topk_method`); weights are multiplied by `routed_scaling_factor`. V3 chooses by sigmoids, to which a correction of
//! each expert is added for the choice alone, in the groups with the largest sums of two scores; weights are divided by
//! their sum first if `norm_topk_prob` says so. The layer behind the last one that V3's checkpoints have makes
//! drafts (mtp.rs). GLM-4.7-Flash is as V3; `mlp_layer_types` may list its layers with experts. Youtu-LLM has no
//! experts. Mistral 4 chooses by a softmax, in the groups with the largest sums of two scores, and its weights are
//! divided by their sum; queries have a factor that grows with their positions, as in
//! [Ministral 3](super::ministral3). A.X K1 is as V3, with a norm of what a block with experts gives; its checkpoints
//! may lack the corrections, which are 0 then.
//!
//! Source: configuration_*.py and modeling_*.py of deepseek_v2, deepseek_v3, glm4_moe_lite, youtu, mistral4 and axk1
//! of transformers; DeepSeek-AI, arXiv:2405.04434 and arXiv:2412.19437.

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_HEAD_DIM, MAX_WIDTH};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::grouped_experts::{CHOSEN_GROUPS, GROUPS, GroupedExperts, GroupedNames, experts};
use super::ministral3::query_factors;
use super::rope_config::{RopeDefaults, rope, rope_parameters};
use super::windows::no_windows;
use crate::spec::{
    AttentionSpec, FeedForward, LatentQueries, LatentSpec, ModelSpec, Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RowOrder};
use inflight_device::{LatentShape, RouterScores};

pub const V2: Family = Family {
    class: "DeepseekV2ForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts {
            has_scale: true,
            ..GgufExperts::softmax(false)
        }),
        add_fixed: |config| {
            add_groups(config);
            let has_groups = config.get(GROUPS).and_then(Json::as_u64) > Some(1);
            let method = match has_groups {
                true => "group_limited_greedy",
                false => "greedy",
            };
            config.insert("topk_method".to_owned(), json!(method));
        },
        ..GGUF
    }),
    describe: |config| describe_generation(config, &GENERATIONS[0]),
};

pub const V3: Family = Family {
    class: "DeepseekV3ForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts {
            is_normalised: false,
            has_scale: true,
            gating: 2,
        }),
        add_fixed: add_groups,
        ..GGUF
    }),
    describe: |config| describe_generation(config, &GENERATIONS[1]),
};

pub const GLM4_MOE_LITE: Family = Family {
    class: "Glm4MoeLiteForCausalLM",
    gguf: None,
    describe: |config| describe_generation(config, &GENERATIONS[2]),
};

pub const YOUTU: Family = Family {
    class: "YoutuForCausalLM",
    gguf: None,
    describe: |config| describe_generation(config, &GENERATIONS[3]),
};

pub const MISTRAL4: Family = Family {
    class: "Mistral4ForCausalLM",
    gguf: None,
    describe: describe_mistral4,
};

pub const AXK1: Family = Family {
    class: "AXK1ForCausalLM",
    gguf: None,
    describe: |config| {
        let mut spec = describe_generation(config, &GENERATIONS[5])?;
        for layer in &mut spec.layers {
            if let (FeedForward::Experts(experts), Norms::Sequential { feed_forward, .. }) =
                (&mut layer.feed_forward, &mut layer.norms)
            {
                feed_forward.after = Some("post_mlp_layernorm");
                experts.may_lack_correction = true;
            }
        }
        Ok(spec)
    },
};

/// The GGUF layout of V2 and V3. Queries and keys keep their rows: llama.cpp rotates adjacent elements, too.
const GGUF: GgufArchitecture = GgufArchitecture {
    modules: &[("mlp.gate.e_score_correction_bias", "exp_probs_b")],
    keys: &[
        ("expert_count", "n_routed_experts"),
        ("expert_shared_count", "n_shared_experts"),
        ("expert_group_count", GROUPS),
        ("expert_group_used_count", CHOSEN_GROUPS),
        ("leading_dense_block_count", "first_k_dense_replace"),
    ],
    has_latents: true,
    ..GgufArchitecture::named("deepseek2")
};

/// What llama.cpp takes for metadata that files of before September 2025 do not have: no groups.
fn add_groups(config: &mut Map<String, Json>) {
    for key in [GROUPS, CHOSEN_GROUPS] {
        config.entry(key).or_insert(json!(1));
    }
}

/// The epsilon of the norms of latents, whatever the other norms have.
const LATENT_EPS: f32 = 1e-6;

/// The defaults of one generation, and its routing.
pub struct Generation {
    pub class: &'static str,
    pub sizes: Sizes,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub parts: Parts,
    pub is_tied: bool,
    /// `None`: all layers have a dense block.
    pub experts: Option<GroupedExperts>,
}

/// Sizes of parts of heads, and of latents.
pub struct Parts {
    pub rotary: usize,
    pub content: usize,
    pub value: usize,
    pub queries: usize,
    pub latent: usize,
}

/// The parts of DeepSeek-V2 and V3.
pub const DEEPSEEK_PARTS: Parts = Parts {
    rotary: 64,
    content: 128,
    value: 128,
    queries: 1536,
    latent: 512,
};

/// DeepSeek-V3's experts, where config.json is silent.
pub const V3_EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Sigmoid,
    num_experts: Some(256),
    num_chosen: Some(8),
    num_shared: Some(1),
    expert_size: 2048,
    num_dense_layers: 3,
    num_groups: Some(8),
    num_chosen_groups: Some(4),
    num_group_scores: 2,
    is_normalised: true,
    routed_scale: 2.5,
    has_mlp_bias: true,
    names: GroupedNames::DEEPSEEK,
};

const GENERATIONS: [Generation; 6] = [
    Generation {
        class: "DeepseekV2ForCausalLM",
        sizes: Sizes::new(102_400, 4096, 11_008, 32, 32, 2048),
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        parts: DEEPSEEK_PARTS,
        is_tied: false,
        experts: Some(GroupedExperts {
            scores: RouterScores::Softmax,
            num_experts: Some(64),
            num_chosen: None,
            num_shared: Some(2),
            expert_size: 1407,
            num_dense_layers: 0,
            num_groups: None,
            num_chosen_groups: None,
            num_group_scores: 1,
            is_normalised: false,
            routed_scale: 1.0,
            has_mlp_bias: true,
            names: GroupedNames::DEEPSEEK,
        }),
    },
    Generation {
        class: "DeepseekV3ForCausalLM",
        sizes: Sizes::new(129_280, 7168, 18_432, 61, 128, 4096),
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        parts: DEEPSEEK_PARTS,
        is_tied: false,
        experts: Some(V3_EXPERTS),
    },
    Generation {
        class: "Glm4MoeLiteForCausalLM",
        sizes: Sizes::new(154_880, 2048, 10_240, 47, 20, 202_752),
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        parts: Parts {
            rotary: 64,
            content: 192,
            value: 256,
            queries: 768,
            latent: 512,
        },
        is_tied: false,
        experts: Some(GroupedExperts {
            scores: RouterScores::Sigmoid,
            num_experts: Some(64),
            num_chosen: Some(4),
            num_shared: Some(1),
            expert_size: 1536,
            num_dense_layers: 1,
            num_groups: Some(1),
            num_chosen_groups: Some(1),
            num_group_scores: 2,
            is_normalised: true,
            routed_scale: 1.8,
            has_mlp_bias: false,
            names: GroupedNames {
                num_dense: None,
                layer_types: Some("mlp_layer_types"),
                ..GroupedNames::DEEPSEEK
            },
        }),
    },
    Generation {
        class: "YoutuForCausalLM",
        sizes: Sizes::new(128_256, 2048, 6144, 32, 16, 131_072),
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        parts: DEEPSEEK_PARTS,
        is_tied: true,
        experts: None,
    },
    Generation {
        class: "Mistral4ForCausalLM",
        sizes: Sizes::new(131_072, 4096, 12_288, 36, 32, 1_048_576),
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        parts: Parts {
            rotary: 64,
            content: 64,
            value: 128,
            queries: 1024,
            latent: 256,
        },
        is_tied: false,
        experts: Some(GroupedExperts {
            scores: RouterScores::Softmax,
            num_experts: Some(128),
            num_chosen: Some(4),
            num_shared: Some(1),
            expert_size: 2048,
            num_dense_layers: 0,
            num_groups: Some(1),
            num_chosen_groups: Some(1),
            num_group_scores: 2,
            is_normalised: true,
            routed_scale: 1.0,
            has_mlp_bias: false,
            names: GroupedNames::DEEPSEEK,
        }),
    },
    Generation {
        class: "AXK1ForCausalLM",
        sizes: Sizes::new(163_840, 7168, 18_432, 61, 64, 32_768),
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        parts: DEEPSEEK_PARTS,
        is_tied: false,
        experts: Some(GroupedExperts {
            scores: RouterScores::Sigmoid,
            num_experts: Some(192),
            num_chosen: Some(8),
            num_shared: Some(1),
            expert_size: 2048,
            num_dense_layers: 1,
            num_groups: Some(8),
            num_chosen_groups: Some(4),
            num_group_scores: 2,
            is_normalised: true,
            routed_scale: 2.5,
            has_mlp_bias: false,
            names: GroupedNames {
                layer_types: Some("mlp_layer_types"),
                ..GroupedNames::DEEPSEEK
            },
        }),
    },
];

/// A model with latent attention.
///
/// # Errors
/// A key is out of range.
pub fn describe_generation(
    config: &JsonFile,
    generation: &Generation,
) -> Result<ModelSpec, LoadError> {
    let mut dimensions = dimensions(config, generation)?;
    let rotary_dim = part(config, "qk_rope_head_dim", generation.parts.rotary, true)?;
    let shape = LatentShape {
        num_heads: dimensions.num_heads,
        content_dim: part(config, "qk_nope_head_dim", generation.parts.content, false)?,
        rotary_dim,
        latent_dim: part(config, "kv_lora_rank", generation.parts.latent, true)?,
        value_dim: part(config, "v_head_dim", generation.parts.value, false)?,
    };
    let mut layer = dimensions.llama_layer();
    let rank = config.size_or("q_lora_rank", 1..=MAX_WIDTH, Some(generation.parts.queries))?;
    layer.attention = attention(config, &dimensions, shape, rank)?;
    let family = generation.experts.as_ref();
    let has_bias = match family {
        Some(family) => family.has_mlp_bias && config.bool_or("mlp_bias", false)?,
        None => false,
    };
    layer.feed_forward.set_biases(has_bias);
    let experts = match family {
        Some(family) => Some((family, experts(config, &dimensions, family)?)),
        None => None,
    };
    (dimensions.num_kv_heads, dimensions.head_dim) = (1, shape.key_dim());
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(generation.class, layer, windows);
    if let Some((family, experts)) = experts {
        family.replace_dense(config, &experts, &mut spec)?;
    }
    Ok(spec)
}

/// The sizes of such a model, with the position embedding of the rotated part of heads.
///
/// # Errors
/// A key is out of range.
pub fn dimensions(config: &JsonFile, generation: &Generation) -> Result<Dimensions, LoadError> {
    let rotary_dim = part(config, "qk_rope_head_dim", generation.parts.rotary, true)?;
    let defaults = Defaults {
        sizes: Some(generation.sizes),
        head_dim: Some(rotary_dim),
        norm_eps: generation.norm_eps,
        rope: RopeDefaults {
            theta: generation.rope_theta,
            ..Defaults::LLAMA.rope
        },
        tied_embeddings: generation.is_tied,
        keys: Keys {
            // All heads have keys of their own, whatever the config says.
            num_kv_heads: Keys::LLAMA.num_heads,
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    let positions = dimensions.max_position_embeddings;
    dimensions.rope = rope(config, positions, rotary_dim, defaults.rope)?;
    Ok(dimensions)
}

fn describe_mistral4(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const SHARE: &str = "partial_rotary_factor";
    let generation = &GENERATIONS[4];
    let silent = json!({
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    });
    let told = rope_parameters(config)?;
    let mut parameters = match &told {
        Some(told) => told
            .entries()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
        None => object(silent),
    };
    // The share of a query that is rotated, which its parts tell, too.
    if let (Some(told), Some(share)) = (&told, parameters.remove(SHARE)) {
        let rotary = part(config, "qk_rope_head_dim", 64, true)?;
        let content = part(config, "qk_nope_head_dim", generation.parts.content, false)?;
        let whole = rotary + content;
        if share.as_f64().map(|share| (share * whole as f64) as usize) != Some(rotary) {
            let expected = format!("{rotary} of {whole}, as qk_rope_head_dim says");
            return Err(told.unexpected(SHARE, share, expected));
        }
    }
    let config = &config
        .with("rope_scaling", Json::Null)
        .with("rope_parameters", Json::Object(parameters))
        .with("topk_method", json!("group_limited_greedy"));
    let mut spec = describe_generation(config, generation)?;
    let factors = query_factors(config)?;
    for layer in &mut spec.layers {
        layer.attention.rope.query_factors = factors;
    }
    Ok(spec)
}

fn object(value: Json) -> Map<String, Json> {
    match value {
        Json::Object(object) => object,
        _ => Map::new(),
    }
}

/// The size of a part of heads, or of latents.
///
/// # Errors
/// The size is out of range, or odd where it must be even.
pub fn part(
    config: &JsonFile,
    key: &str,
    default: usize,
    is_even: bool,
) -> Result<usize, LoadError> {
    const MAX: usize = 4 * MAX_HEAD_DIM;
    let size = config.size(key, 1..=MAX)?.unwrap_or(default);
    match is_even && !size.is_multiple_of(2) {
        true => Err(config.unexpected(key, size, format!("an even number up to {MAX}"))),
        false => Ok(size),
    }
}

fn attention(
    config: &JsonFile,
    dimensions: &Dimensions,
    shape: LatentShape,
    rank: Option<usize>,
) -> Result<AttentionSpec, LoadError> {
    let hidden = dimensions.hidden_size;
    let has_bias = config.bool_or("attention_bias", false)?;
    let is_interleaved = config.bool_or("rope_interleave", true)?;
    let in_tails = |head_dim, mut projection: Projection| {
        if is_interleaved {
            projection.parts[0].row_order = RowOrder::AdjacentTails {
                head_dim,
                rotary_dim: shape.rotary_dim,
            };
        }
        projection
    };
    let queries = |module, num_inputs| {
        let projection = Projection::single(module, shape.q_len(), num_inputs);
        in_tails(shape.query_dim(), projection)
    };
    let kv = Projection::single("self_attn.kv_a_proj_with_mqa", shape.key_dim(), hidden);
    let num_rows = shape.num_heads * (shape.content_dim + shape.value_dim);
    Ok(AttentionSpec {
        qkv: match rank {
            Some(rank) => {
                Projection::single("self_attn.q_a_proj", rank, hidden).with_bias(has_bias)
            }
            None => queries("self_attn.q_proj", hidden),
        },
        latent: Some(LatentSpec {
            shape,
            queries: rank.map(|rank| LatentQueries {
                norm: "self_attn.q_a_layernorm",
                projection: queries("self_attn.q_b_proj", rank),
            }),
            kv: in_tails(shape.key_dim(), kv).with_bias(has_bias),
            kv_norm: "self_attn.kv_a_layernorm",
            kv_scale: 1.0,
            heads: Projection::single("self_attn.kv_b_proj", num_rows, shape.latent_dim),
            parted_heads: ["self_attn.k_b_proj", "self_attn.v_b_proj"],
            norm_eps: LATENT_EPS,
            selection: None,
        }),
        recurrence: None,
        late: None,
        gate: None,
        kv_heads: None,
        kv_source: None,
        clip: None,
        qk_norm: None,
        rope: dimensions.rope.clone(),
        scale: (shape.query_dim() as f64).sqrt().recip() as f32 * temperature(config)?.powi(2),
        soft_cap: None,
        window: None,
        chunk: None,
        sink_logits: None,
        o: Projection::single("self_attn.o_proj", hidden, shape.out_len()).with_bias(has_bias),
    })
}

/// The temperature of scores with scaled positions.
fn temperature(config: &JsonFile) -> Result<f32, LoadError> {
    let Some(parameters) = rope_parameters(config)? else {
        return Ok(1.0);
    };
    let kind = parameters.string("rope_type")?;
    let kind = kind.or(parameters.string("type")?);
    let mscale = parameters.number("mscale_all_dim", 0.0..=1e6)?;
    let factor = parameters.number("factor", 0.0..=1e6)?;
    Ok(match (kind, mscale, factor) {
        (None | Some("default"), ..) => 1.0,
        (_, Some(mscale), Some(factor)) if mscale > 0.0 && factor > 1.0 => {
            (0.1 * mscale * factor.ln() + 1.0) as f32
        }
        _ => 1.0,
    })
}
