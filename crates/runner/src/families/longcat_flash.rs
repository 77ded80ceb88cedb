//! LongCat Flash Chat and Thinking, by Meituan.
//!
//! A layer of the checkpoint holds two: each has the latent attention of [DeepSeek-V3](super::deepseek) and a dense
//! block, and the first one has experts besides, which read what its dense block reads, and whose result is added
//! behind the attention of the second one (a shortcut). Queries and latents are multiplied by the root of the quotient
//! of the hidden size and their rank, if `mla_scale_q_lora` and `mla_scale_kv_lora` say so. Experts are chosen by a
//! softmax and corrections, also the `zero_expert_num` last ones, which return their input.
//!
//! The layers for multi-token prediction (`model.mtp`) are not read.
//!
//! Source: configuration_longcat_flash.py and modeling_longcat_flash.py of transformers and of
//! meituan-longcat/LongCat-Flash-Chat; Meituan, arXiv:2509.01322.

use serde_json::json;

use super::bounds::{MAX_EXPERTS, MAX_LAYERS};
use super::deepseek::{DEEPSEEK_PARTS, Generation, describe_generation, dimensions};
use super::dimensions::{Dimensions, Sizes};
use super::experts::{
    EXPERT_MODULES, ExpertDefaults, ExpertModules, routing_of, scores_rule, width,
};
use super::family::Family;
use crate::spec::{
    ExpertsBlock, ExpertsSpec, FeedForward, LayerSpec, ModelSpec, Norms, StackedExperts,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RouterScores;

pub const FAMILY: Family = Family {
    class: "LongcatFlashForCausalLM",
    gguf: None,
    describe,
};

const LAYERS: &str = "num_layers";
const MODEL_LAYERS: &str = "num_hidden_layers";
const INNER: [&str; 2] = ["ffn_hidden_size", "intermediate_size"];
const EXPERT_INNER: [&str; 2] = ["expert_ffn_hidden_size", "moe_intermediate_size"];
const NUM_LAYERS: usize = 28;
const NUM_EXPERTS: usize = 512;

const GENERATION: Generation = Generation {
    class: FAMILY.class,
    sizes: Sizes::new(131_072, 6144, 12_288, 2 * NUM_LAYERS, 64, 131_072),
    norm_eps: 1e-5,
    rope_theta: 1e7,
    parts: DEEPSEEK_PARTS,
    is_tied: false,
    experts: None,
};

/// The modules of one of the two layers, in the order of [`rename`].
struct Modules {
    norms: [&'static str; 2],
    queries: [&'static str; 3],
    latents: [&'static str; 2],
    heads: &'static str,
    o: &'static str,
    dense: [&'static str; 3],
}

const MODULES: [Modules; 2] = [
    Modules {
        norms: ["input_layernorm.0", "post_attention_layernorm.0"],
        queries: [
            "self_attn.0.q_a_proj",
            "self_attn.0.q_a_layernorm",
            "self_attn.0.q_b_proj",
        ],
        latents: [
            "self_attn.0.kv_a_proj_with_mqa",
            "self_attn.0.kv_a_layernorm",
        ],
        heads: "self_attn.0.kv_b_proj",
        o: "self_attn.0.o_proj",
        dense: ["mlps.0.gate_proj", "mlps.0.up_proj", "mlps.0.down_proj"],
    },
    Modules {
        norms: ["input_layernorm.1", "post_attention_layernorm.1"],
        queries: [
            "self_attn.1.q_a_proj",
            "self_attn.1.q_a_layernorm",
            "self_attn.1.q_b_proj",
        ],
        latents: [
            "self_attn.1.kv_a_proj_with_mqa",
            "self_attn.1.kv_a_layernorm",
        ],
        heads: "self_attn.1.kv_b_proj",
        o: "self_attn.1.o_proj",
        dense: ["mlps.1.gate_proj", "mlps.1.up_proj", "mlps.1.down_proj"],
    },
];

const EXPERTS: ExpertModules = ExpertModules {
    router: ROUTER,
    stacked: StackedExperts {
        router: ROUTER,
        ..EXPERT_MODULES.stacked
    },
    ..EXPERT_MODULES
};

const ROUTER: &str = "mlp.router.classifier";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    check_choices(config)?;
    let inner = width(config, INNER[1], 12_288)?;
    let inner = width(config, INNER[0], inner)?;
    let told = config
        .with(MODEL_LAYERS, json!(num_layers(config)?))
        .with(INNER[1], json!(inner));
    let mut spec = describe_generation(&told, &GENERATION)?;
    let experts = experts(config, &dimensions(&told, &GENERATION)?)?;
    spec.modules.layers_per_module = MODULES.len();
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        rename(layer, &MODULES[index % MODULES.len()]);
        scale_latents(config, layer, spec.hidden_size)?;
        if index.is_multiple_of(MODULES.len()) {
            layer.experts_block = Some(ExpertsBlock {
                experts: experts.clone(),
                norms: None,
            });
        }
    }
    Ok(spec)
}

/// The layers of the model, two for each of the checkpoint: `num_layers` counts layers of the
/// checkpoint, `num_hidden_layers` layers of the model.
fn num_layers(config: &JsonFile) -> Result<usize, LoadError> {
    let listed = config.size(LAYERS, 1..=MAX_LAYERS / 2)?;
    let all = config.size(MODEL_LAYERS, 1..=MAX_LAYERS)?;
    match (listed, all) {
        (Some(listed), _) => Ok(2 * listed),
        (None, Some(all)) if all.is_multiple_of(2) => Ok(all),
        (None, Some(all)) => Err(config.unexpected(MODEL_LAYERS, all, "an even number")),
        (None, None) => Ok(2 * NUM_LAYERS),
    }
}

/// Refuses choices that transformers ignores.
fn check_choices(config: &JsonFile) -> Result<(), LoadError> {
    for (key, only) in [
        ("attention_method", "MLA"),
        ("zero_expert_type", "identity"),
    ] {
        if let Some(other) = config.string(key)?.filter(|value| *value != only) {
            let expected = format!("supported; '{only}' is");
            return Err(config.unexpected(key, format_args!("'{other}'"), expected));
        }
    }
    const NORMALISED: &str = "norm_topk_prob";
    match config.bool_or(NORMALISED, false)? {
        true => Err(config.unexpected(NORMALISED, true, "supported in this family; only false is")),
        false => Ok(()),
    }
}

fn rename(layer: &mut LayerSpec, modules: &Modules) {
    let [before_attention, before_dense] = modules.norms;
    layer.norms = Norms::before(before_attention, before_dense);
    let attention = &mut layer.attention;
    let [first, norm, second] = modules.queries;
    attention.qkv.parts[0].module = first;
    attention.o.parts[0].module = modules.o;
    if let Some(latent) = &mut attention.latent {
        if let Some(queries) = &mut latent.queries {
            queries.norm = norm;
            queries.projection.parts[0].module = second;
        }
        let [latents, norm] = modules.latents;
        latent.kv.parts[0].module = latents;
        latent.kv_norm = norm;
        latent.heads.parts[0].module = modules.heads;
    }
    if let FeedForward::Gated { gate_up, down, .. } = &mut layer.feed_forward {
        let [gate, up, of_down] = modules.dense;
        gate_up.parts[0].module = gate;
        gate_up.parts[1].module = up;
        down.parts[0].module = of_down;
    }
}

fn scale_latents(
    config: &JsonFile,
    layer: &mut LayerSpec,
    hidden_size: usize,
) -> Result<(), LoadError> {
    const RANK: &str = "q_lora_rank";
    let scale = |rank: usize| (hidden_size as f64 / rank as f64).sqrt() as f32;
    let Some(latent) = &mut layer.attention.latent else {
        return Ok(());
    };
    let Some(queries) = &latent.queries else {
        return Err(config.unexpected(RANK, "null", "a number: queries are made of latents"));
    };
    if config.bool_or("mla_scale_q_lora", true)? {
        layer.attention.scale *= scale(queries.projection.num_inputs);
    }
    if config.bool_or("mla_scale_kv_lora", true)? {
        latent.kv_scale = scale(latent.shape.latent_dim);
    }
    Ok(())
}

/// The experts of a layer, those without weights behind the others.
fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    const COMPUTED: &str = "n_routed_experts";
    const ZERO: &str = "zero_expert_num";
    let num_computed = config.size(COMPUTED, 1..=MAX_EXPERTS)?;
    let num_computed = num_computed.unwrap_or(NUM_EXPERTS);
    let num_zero = config.size_or(ZERO, 0..=MAX_EXPERTS, Some(256))?;
    let num_zero = num_zero.unwrap_or(0);
    let scale = config.number("routed_scaling_factor", 0.0..=1e6)?;
    let rule = scores_rule(RouterScores::Softmax, false, scale.unwrap_or(6.0) as f32);
    let told = config.with(COMPUTED, json!(num_computed + num_zero));
    let defaults = ExpertDefaults {
        num_experts: num_computed + num_zero,
        num_chosen: 12,
    };
    let keys = ([COMPUTED, "num_local_experts"], "moe_topk");
    let mut routing = routing_of(&told, keys, &defaults, rule)?;
    routing.num_zero_experts = num_zero;
    let inner = width(config, EXPERT_INNER[1], 2048)?;
    let inner = width(config, EXPERT_INNER[0], inner)?;
    let mut experts = dimensions.experts(&EXPERTS, routing, inner);
    experts.router.has_bias = config.bool_or("router_bias", false)?;
    experts.correction = Some("mlp.router.e_score_correction_bias");
    Ok(experts)
}
