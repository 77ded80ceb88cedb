//! Hunyuan, by Tencent: the dense models, and those with experts.
//!
//! Llama whose queries and keys have an RMS norm of each head behind rotation. `alpha` of a `dynamic` position
//! embedding stretches its base, whatever the length of a sequence. All layers of a model with experts have some beside
//! one that all tokens have, each as wide as `intermediate_size`; `moe_topk` may be a list of equal numbers.
//!
//! Source: configuration_*.py and modeling_*.py of hunyuan_v1_dense and hunyuan_v1_moe of transformers; Tencent,
//! Hunyuan-A13B Technical Report.

use serde_json::{Map, Value};

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{EXPERT_MODULES, ExpertDefaults, ExpertModules, routing_of};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufExperts};
use super::rope_config::rope_parameters;
use super::windows::no_windows;
use crate::spec::{ExpertsSpec, FeedForward, LayerSpec, QkNormSpec, StackedExperts};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{QkNormKind, RoutingRule};

pub const DENSE: Family = Family {
    class: "HunYuanDenseV1ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.query_layernorm", "attn_q_norm"),
            ("self_attn.key_layernorm", "attn_k_norm"),
        ],
        ..GgufArchitecture::named("hunyuan-dense")
    }),
    describe: |config| {
        let (dimensions, layer) = dense(config)?;
        let windows = no_windows(dimensions.num_layers);
        Ok(dimensions.model(DENSE.class, layer, windows))
    },
};

pub const MOE: Family = Family {
    class: "HunYuanMoEV1ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.query_layernorm", "attn_q_norm"),
            ("self_attn.key_layernorm", "attn_k_norm"),
            (ROUTER, "ffn_gate_inp"),
            ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
            ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
        ],
        keys: &[
            ("expert_used_count", CHOSEN),
            // One, whose width is the width of the others.
            ("expert_shared_count", "num_shared_expert"),
        ],
        experts: Some(GgufExperts::softmax(true)),
        ..GgufArchitecture::named("hunyuan-moe")
    }),
    describe: |config| {
        let (dimensions, mut layer) = dense(config)?;
        layer.feed_forward = FeedForward::Experts(experts(config, &dimensions)?);
        let windows = no_windows(dimensions.num_layers);
        Ok(dimensions.model(MOE.class, layer, windows))
    },
};

const ROUTER: &str = "mlp.gate.wg";
const CHOSEN: &str = "moe_topk";

fn dense(config: &JsonFile) -> Result<(Dimensions, LayerSpec), LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(290_943, 4096, 11_008, 32, 32, 2048)),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let alpha = alpha(config)?;
    let dimensions = match alpha {
        None => Dimensions::from_config(config, &defaults)?,
        Some(alpha) => {
            let config = without_scaling(config)?;
            let mut dimensions = Dimensions::from_config(&config, &defaults)?;
            let head_dim = dimensions.head_dim as f64;
            if head_dim <= 2.0 {
                let expected = "above 2 for a position embedding with alpha";
                return Err(config.unexpected("head_dim", head_dim, expected));
            }
            dimensions.rope.theta *= alpha.powf(head_dim / (head_dim - 2.0));
            dimensions
        }
    };
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "self_attn.query_layernorm",
        k: "self_attn.key_layernorm",
        kind: QkNormKind::RotatedHead,
        ..QkNormSpec::of_heads(dimensions.norm.eps)
    });
    Ok((dimensions, layer))
}

/// The factor that stretches the RoPE base; `None` if it is absent or 0.
fn alpha(config: &JsonFile) -> Result<Option<f64>, LoadError> {
    let Some(parameters) = rope_parameters(config)? else {
        return Ok(None);
    };
    let kind = parameters.string("rope_type")?;
    match kind.or(parameters.string("type")?) {
        Some("dynamic") => {
            let alpha = parameters.number("alpha", 0.0..=1e6)?;
            Ok(alpha.filter(|&alpha| alpha > 0.0))
        }
        _ => Ok(None),
    }
}

/// A config with nothing but the base of the position embedding.
fn without_scaling(config: &JsonFile) -> Result<JsonFile, LoadError> {
    let parameters = rope_parameters(config)?;
    let theta = parameters.and_then(|it| it.get("rope_theta").cloned());
    let kept = theta.map(|theta| ("rope_theta".to_owned(), theta));
    let kept = Map::from_iter(kept);
    let config = config.with("rope_scaling", Value::Null);
    Ok(config.with("rope_parameters", Value::Object(kept)))
}

fn experts(config: &JsonFile, dimensions: &Dimensions) -> Result<ExpertsSpec, LoadError> {
    let defaults = ExpertDefaults {
        num_experts: 1,
        num_chosen: 1,
    };
    let rule = RoutingRule::Softmax {
        is_normalised: true,
    };
    let config = &with_one_number(config)?;
    let keys = (["num_experts", "num_local_experts"], CHOSEN);
    let routing = routing_of(config, keys, &defaults, rule)?;
    let modules = ExpertModules {
        router: ROUTER,
        stacked: StackedExperts {
            router: ROUTER,
            ..EXPERT_MODULES.stacked
        },
        ..EXPERT_MODULES
    };
    let width = dimensions.intermediate_size;
    let mut experts = dimensions.experts(&modules, routing, width);
    let shared = [
        "mlp.shared_mlp.gate_proj",
        "mlp.shared_mlp.up_proj",
        "mlp.shared_mlp.down_proj",
    ];
    experts.shared = Some(dimensions.shared_expert(shared, width));
    Ok(experts)
}

/// A config with a number in place of a list with one for each layer, and under its own name.
fn with_one_number(config: &JsonFile) -> Result<JsonFile, LoadError> {
    let told = config.get(CHOSEN).or(config.get("num_experts_per_tok"));
    let Some(told) = told else {
        return Ok(config.clone());
    };
    let number = match told.as_array() {
        None => told,
        Some(list) => match list.first() {
            Some(first) if list.iter().all(|it| it == first) => first,
            _ => {
                let expected = "a number, or a list of equal numbers";
                return Err(config.unexpected(CHOSEN, told, expected));
            }
        },
    };
    Ok(config.with(CHOSEN, number.clone()))
}
