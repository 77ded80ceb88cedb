//! DBRX, by Databricks.
//!
//! LayerNorms and linear layers without biases, queries, keys and values in one module, which are clipped
//! (`clip_qkv`), and experts in place of each feed-forward block: four of 16, weighted by the softmax of all logits,
//! which is divided by the sum of the chosen ones. Gates, ups and downs of all experts are three tensors, one expert
//! below the other, downs by inputs. Sizes of attention and of experts are in sections, `attn_config` and `ffn_config`.
//!
//! `attn_config.rope_theta` is the base of published models; `rope_parameters`, which transformers 5 writes, must agree
//! with it.
//!
//! Source: configuration_dbrx.py and modeling_dbrx.py of transformers; Databricks, "Introducing DBRX", 2024.

use serde_json::{Map, Value, json};

use super::bounds::MAX_HEADS;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes, activation, clip_qkv};
use super::experts::{ExpertDefaults, ExpertModules, routing_of, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::rope_config::{THETA, rope_parameters};
use super::windows::no_windows;
use crate::spec::{
    FeedForward, ModelModules, ModelSpec, NormKind, Norms, Projection, StackedExperts,
    StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::RoutingRule;

pub const FAMILY: Family = Family {
    class: "DbrxForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("norm_attn_norm.norm_1", "attn_norm"),
            ("norm_attn_norm.attn.Wqkv", "attn_qkv"),
            ("norm_attn_norm.attn.out_proj", "attn_output"),
            ("norm_attn_norm.norm_2", "attn_output_norm"),
            ("ffn.router.layer", "ffn_gate_inp"),
        ],
        keys: &[
            ("embedding_length", "d_model"),
            ("block_count", "n_layers"),
            ("attention.head_count", "n_heads"),
            ("context_length", "max_seq_len"),
            ("attention.layer_norm_epsilon", "rms_norm_eps"),
        ],
        experts: Some(GgufExperts::softmax(true)),
        // `DbrxModel` of the converter takes experts apart, and turns downs.
        unstacks_experts: true,
        add_read: add_sections,
        ..GgufArchitecture::named("dbrx")
    }),
    describe,
};

/// Adds the sections of attention and of experts.
fn add_sections(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let attention = json!({
        "kv_n_heads": gguf.required("attention.head_count_kv")?,
        "clip_qkv": gguf.clip()?,
    });
    let experts = json!({
        "moe_num_experts": gguf.required("expert_count")?,
        "moe_top_k": gguf.required("expert_used_count")?,
        "ffn_hidden_size": gguf.required("feed_forward_length")?,
    });
    config.insert("attn_config".to_owned(), attention);
    config.insert("ffn_config".to_owned(), experts);
    Ok(())
}

const MODULES: ExpertModules = ExpertModules {
    router: "ffn.router.layer",
    gate: "ffn.experts.mlp.w1",
    up: "ffn.experts.mlp.v1",
    down: "ffn.experts.mlp.w2",
    stacked: StackedExperts {
        router: "ffn.router.layer",
        gate_up: "ffn.experts.mlp.w1",
        down: "ffn.experts.mlp.w2",
        layout: StackedLayout::Rows,
    },
};

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(32_000, 2048, 3584, 24, 16, 2048)),
    norm_eps: 1e-5,
    keys: Keys {
        hidden_size: "d_model",
        num_layers: "n_layers",
        num_heads: "n_heads",
        positions: "max_seq_len",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let section = |key: &str| {
        let silent = || JsonFile::new(config.path(), &format!("{key}."), Map::new());
        Ok::<_, LoadError>(config.object(key)?.unwrap_or_else(silent))
    };
    let (attention, experts) = (section("attn_config")?, section("ffn_config")?);
    let num_kv_heads = attention.size("kv_n_heads", 1..=MAX_HEADS)?.unwrap_or(1);
    let mut told = config.with("num_key_value_heads", json!(num_kv_heads));
    if let Some(theta) = theta(config, &attention)? {
        told = told.with("rope_theta", json!(theta));
    }
    let mut dimensions = Dimensions::from_config(&told, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: false };
    if let Some(of_gate) = experts.object("ffn_act_fn")? {
        let known = activation(&of_gate, "name")?;
        dimensions.activation = known.unwrap_or(dimensions.activation);
    }
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("norm_attn_norm.norm_1", "norm_attn_norm.norm_2");
    layer.attention.qkv = dimensions.fused_qkv("norm_attn_norm.attn.Wqkv");
    layer.attention.o = Projection::single(
        "norm_attn_norm.attn.out_proj",
        dimensions.hidden_size,
        dimensions.qkv_widths()[0],
    );
    layer.attention.clip = clip_qkv(&attention)?;
    layer.feed_forward = mixture(&experts, &dimensions)?;
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        modules: ModelModules {
            embedding: "transformer.wte",
            layers: "transformer.blocks",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("transformer.norm_f"),
            output_layer: "lm_head",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}

/// The base of frequencies in `attn_config`.
fn theta(config: &JsonFile, attention: &JsonFile) -> Result<Option<f64>, LoadError> {
    const KEY: &str = "rope_theta";
    let theta = attention.number(KEY, THETA)?;
    let other = match rope_parameters(config)? {
        Some(parameters) => parameters.number(KEY, THETA)?,
        None => None,
    };
    match (theta, other) {
        (Some(theta), Some(other)) if theta != other => {
            let expected = format!("rope_parameters.{KEY}, which is {other}");
            Err(attention.unexpected(KEY, theta, expected))
        }
        _ => Ok(theta),
    }
}

fn mixture(config: &JsonFile, dimensions: &Dimensions) -> Result<FeedForward, LoadError> {
    const NORM: &str = "moe_normalize_expert_weights";
    let norm = match config.has(NORM) {
        true => config.number(NORM, 0.0..=1e6)?,
        false => Some(1.0),
    };
    if let Some(other) = norm.filter(|&norm| norm != 1.0) {
        return Err(config.unexpected(NORM, other, "supported; 1 and null are"));
    }
    let rule = RoutingRule::Softmax {
        is_normalised: norm.is_some(),
    };
    let defaults = ExpertDefaults {
        num_experts: 4,
        num_chosen: 1,
    };
    let keys = (["moe_num_experts"; 2], "moe_top_k");
    let routing = routing_of(config, keys, &defaults, rule)?;
    let expert_size = width(config, "ffn_hidden_size", 3584)?;
    let mut experts = dimensions.experts(&MODULES, routing, expert_size);
    experts.down = experts.down.transposed();
    Ok(FeedForward::Experts(experts))
}
