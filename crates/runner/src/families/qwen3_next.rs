//! Qwen3-Next, Qwen 3.5 and 3.6, dense and with experts: layers with the gated delta rule, and gated attention in some.
//!
//! All norms but the rule's are stored as differences from 1. Attention is Qwen 3's, with a rotated quarter of each
//! head, and gates that `q_proj` makes behind the query of each head. `layer_types` tells which layer is which or,
//! where config.json is silent, every `full_attention_interval`-th one has attention. Qwen3-Next keeps what the rule
//! reads in two modules, by key head; Qwen 3.5 in four. Experts are Qwen2-MoE's, with normalised weights. Qwen
//! 3.5 is served for text: its M-RoPE is RoPE there.
//!
//! Source: configuration_*.py and modeling_*.py of qwen3_next, qwen3_5 and qwen3_5_moe of transformers; Yang, Kautz,
//! Hatamizadeh, arXiv:2412.06464.

use serde_json::{Map, Value as Json, json};

use super::bounds::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::experts::{ExpertDefaults, layers_with_experts, routing, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::recurrent::{MAX_KERNEL_LEN, check_activation, layers_of_type};
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use super::with_images::describe_language_model;
use crate::recurrence_spec::{RecurrenceSpec, RuleModules};
use crate::spec::{FeedForward, GateSpec, LayerSpec, ModelSpec, Projection, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{
    DeltaForm, DeltaShape, GateFunction, RecurrenceShape, RecurrentRule, Routing, RoutingRule,
};
use inflight_numbers::Stacking;

pub const QWEN3_NEXT: Family = Family {
    class: "Qwen3NextForCausalLM",
    gguf: Some(GgufArchitecture {
        experts: Some(GgufExperts::softmax(true)),
        rewrite: |_, spec| {
            split_inputs(spec);
            Ok(())
        },
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let sizes = Sizes::new(151_936, 2048, 5632, 48, 16, 32_768);
        let is_normalised = config.bool_or("norm_topk_prob", true)?;
        let experts = Some((512, 10, is_normalised));
        describe(config, QWEN3_NEXT.class, (sizes, 2), experts, fused_inputs)
    },
};

pub const QWEN3_5: Family = Family {
    class: "Qwen3_5ForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "qwen35",
        tiles_values: true,
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let sizes = Sizes::new(248_320, 4096, 12_288, 32, 16, 32_768);
        describe(config, QWEN3_5.class, (sizes, 4), None, inputs)
    },
};

pub const QWEN3_5_MOE: Family = Family {
    class: "Qwen3_5MoeForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "qwen35moe",
        tiles_values: true,
        experts: Some(GgufExperts::softmax(true)),
        ..GGUF_ARCHITECTURE
    }),
    describe: |config| {
        let sizes = Sizes::new(248_320, 2048, 5632, 40, 16, 32_768);
        let experts = Some((256, 8, true));
        describe(config, QWEN3_5_MOE.class, (sizes, 2), experts, inputs)
    },
};

pub const QWEN3_5_WITH_IMAGES: Family = Family {
    class: "Qwen3_5ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        describe_language_model(config, Map::new(), &QWEN3_5, QWEN3_5_WITH_IMAGES.class)
    },
};

pub const QWEN3_5_MOE_WITH_IMAGES: Family = Family {
    class: "Qwen3_5MoeForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let class = QWEN3_5_MOE_WITH_IMAGES.class;
        describe_language_model(config, Map::new(), &QWEN3_5_MOE, class)
    },
};

/// How llama.cpp stores the families.
const GGUF_ARCHITECTURE: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt_bias", "ssm_dt"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.out_proj", "ssm_out"),
    ],
    keys: &[
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
        ("ssm.state_size", "linear_key_head_dim"),
        ("ssm.group_count", "linear_num_key_heads"),
        ("ssm.time_step_rank", "linear_num_value_heads"),
        ("full_attention_interval", "full_attention_interval"),
    ],
    has_partial_rotary: true,
    has_mrope: true,
    norms_include_one: true,
    add_read: add_rule,
    ..GgufArchitecture::named("qwen3next")
};

/// Adds the width of values, and the layers that have the rule, if the metadata list them.
fn add_rule(gguf: &GgufConfig<'_>, config: &mut Map<String, Json>) -> Result<(), LoadError> {
    let value_dim = gguf.quotient("ssm.inner_size", "ssm.time_step_rank")?;
    config.insert("linear_value_head_dim".to_owned(), json!(value_dim));
    if let Some(has_rule) = gguf.layers_with("attention.recurrent_layers")? {
        let kinds = ["full_attention", "linear_attention"];
        GgufConfig::add_layer_types(config, &has_rule, kinds);
    }
    Ok(())
}

/// Has what the rule reads in the modules of Qwen 3.5, but for strengths and decays.
fn split_inputs(spec: &mut ModelSpec) {
    for layer in &mut spec.layers {
        let attention = &mut layer.attention;
        let rule = attention.recurrence.map(|it| it.shape.rule);
        if let Some(RecurrentRule::GatedDelta(delta)) = rule {
            let inputs = &mut attention.qkv;
            let split = self::inputs(&delta, inputs.num_inputs);
            inputs.parts.splice(..4, split.parts.into_iter().take(2));
        }
    }
}

/// `sizes` and the number of key heads, and the experts and how many of them a token has, are where config.json is
/// silent. `inputs` makes the projection to what the rule reads.
fn describe(
    config: &JsonFile,
    class: &'static str,
    (sizes, num_kv_heads): (Sizes, usize),
    experts: Option<(usize, usize, bool)>,
    inputs: fn(&DeltaShape, usize) -> Projection,
) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(sizes),
        num_kv_heads: Some(num_kv_heads),
        head_dim: Some(256),
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.25),
            ..Defaults::LLAMA.rope
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    check_activation(config, dimensions.activation)?;
    dimensions.norm.weight_offset = 1.0;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let defaults = DeltaDefaults {
        heads: [16, 32],
        key_dim: |_| 128,
        value_dim: |_| 128,
    };
    let delta = delta_shape(config, &defaults, dimensions.norm.eps)?;
    let kernel_len = config.size("linear_conv_kernel_dim", 1..=MAX_KERNEL_LEN)?;
    let has_attention = layers_with_attention(config, num_layers)?;
    let mut layer = attention_layer(&dimensions);
    let has_bias = config.bool_or("attention_bias", false)?;
    layer.attention.set_biases(has_bias);
    let experts = match experts {
        Some((num_experts, num_chosen, is_normalised)) => {
            let routing = routing(
                config,
                &ExpertDefaults {
                    num_experts,
                    num_chosen,
                },
                RoutingRule::Softmax { is_normalised },
            )?;
            let experts = mixture(config, &dimensions, routing)?;
            let has_experts = match class == QWEN3_NEXT.class {
                true => layers_with_experts(config, num_layers)?,
                false => vec![true; num_layers],
            };
            Some((experts, has_experts))
        }
        None => None,
    };
    let mut spec = dimensions.model(class, layer, no_windows(num_layers));
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if let Some((experts, has_experts)) = &experts
            && has_experts[index]
        {
            layer.feed_forward = experts.clone();
        }
        if has_attention[index] {
            continue;
        }
        let attention = &mut layer.attention;
        attention.qk_norm = None;
        attention.gate = None;
        attention.qkv = inputs(&delta, hidden);
        attention.o = Projection::single("linear_attn.out_proj", hidden, delta.value_len());
        attention.recurrence = Some(delta_recurrence(delta, kernel_len, "linear_attn.norm"));
    }
    Ok(spec)
}

/// The gated delta rule behind a convolution, whose length is 4 where config.json does not tell it. `norm` names the
/// norm of the heads.
pub(super) fn delta_recurrence(
    delta: DeltaShape,
    kernel_len: Option<usize>,
    norm: &'static str,
) -> RecurrenceSpec {
    RecurrenceSpec {
        shape: RecurrenceShape {
            kernel_len: kernel_len.unwrap_or(4),
            rule: RecurrentRule::GatedDelta(delta),
        },
        convolution: "linear_attn.conv1d",
        convolution_parts: None,
        has_convolution_bias: false,
        modules: Some(RuleModules {
            log_rates: "linear_attn.A_log",
            time_biases: "linear_attn.dt_bias",
            skips: None,
            norm: Some(norm),
            key_norms: None,
        }),
    }
}

/// A layer with attention, whose gates are behind the queries of their heads.
fn attention_layer(dimensions: &Dimensions) -> LayerSpec {
    let mut layer = dimensions.llama_layer();
    let attention = &mut layer.attention;
    let head_dim = dimensions.head_dim;
    let fused = |part: usize| {
        let mut fused = Projection::fused_in_runs(
            "self_attn.q_proj",
            &[head_dim; 2],
            dimensions.num_heads,
            dimensions.hidden_size,
            Stacking::Concatenated,
        );
        fused.parts.swap_remove(part)
    };
    attention.qkv.parts[0] = fused(0);
    dimensions.order_heads(&mut attention.qkv);
    attention.gate = Some(GateSpec {
        projection: Projection {
            parts: vec![fused(1)],
            ..attention.qkv.clone()
        },
        function: GateFunction::Sigmoid,
    });
    attention.qk_norm = Some(QkNormSpec::of_heads(dimensions.norm.eps));
    layer
}

fn mixture(
    config: &JsonFile,
    dimensions: &Dimensions,
    routing: Routing,
) -> Result<FeedForward, LoadError> {
    let expert_size = width(config, "moe_intermediate_size", 512)?;
    let shared_size = width(config, "shared_expert_intermediate_size", 512)?;
    let experts = dimensions.experts_beside_a_gated_one(routing, expert_size, shared_size);
    Ok(FeedForward::Experts(experts))
}

/// The sizes of a rule where config.json is silent.
pub struct DeltaDefaults<F> {
    /// Heads of keys and of values.
    pub heads: [usize; 2],
    /// The elements of a key, by the number of key heads.
    pub key_dim: F,
    /// The elements of a value, by the elements of a key.
    pub value_dim: fn(usize) -> usize,
}

/// Reads `linear_num_key_heads` and its like.
///
/// # Errors
/// A key is out of range, or the number of value heads is no multiple of the number of key heads.
pub fn delta_shape(
    config: &JsonFile,
    defaults: &DeltaDefaults<impl Fn(usize) -> usize>,
    norm_eps: f32,
) -> Result<DeltaShape, LoadError> {
    const KEY_HEADS: &str = "linear_num_key_heads";
    const VALUE_HEADS: &str = "linear_num_value_heads";
    let size = |key, max, default: usize| Ok(config.size(key, 1..=max)?.unwrap_or(default));
    let num_key_heads = size(KEY_HEADS, MAX_HEADS, defaults.heads[0])?;
    let num_value_heads = size(VALUE_HEADS, MAX_HEADS, defaults.heads[1])?;
    if !num_value_heads.is_multiple_of(num_key_heads) {
        let expected = format!("a multiple of {KEY_HEADS} {num_key_heads}");
        return Err(config.unexpected(VALUE_HEADS, num_value_heads, expected));
    }
    let dim = |key, default: usize| match size(key, MAX_HEAD_DIM, default)? {
        dim @ 1..=MAX_HEAD_DIM => Ok(dim),
        dim => Err(config.error(format!(
            "{key} would be {dim}, where config.json is silent; expected 1 to {MAX_HEAD_DIM}"
        ))),
    };
    let key_dim = dim("linear_key_head_dim", (defaults.key_dim)(num_key_heads))?;
    Ok(DeltaShape {
        form: DeltaForm::Heads,
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim: dim("linear_value_head_dim", (defaults.value_dim)(key_dim))?,
        strength_scale: 1.0,
        norm_eps,
    })
}

fn layers_with_attention(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if config.get("layer_types").is_some() {
        let names = [["linear_attention", "full_attention"]];
        return layers_of_type(config, num_layers, &names);
    }
    let interval = config.size("full_attention_interval", 1..=MAX_LAYERS)?;
    let layers = 1..=num_layers;
    Ok(layers
        .map(|layer| layer.is_multiple_of(interval.unwrap_or(4)))
        .collect())
}

/// The input projection in four modules: queries, keys and values, gates, strengths, decays.
fn inputs(delta: &DeltaShape, hidden_size: usize) -> Projection {
    let num_heads = delta.num_value_heads;
    let parts = [
        (
            "linear_attn.in_proj_qkv",
            2 * delta.key_len() + delta.value_len(),
        ),
        ("linear_attn.in_proj_z", delta.value_len()),
        ("linear_attn.in_proj_b", num_heads),
        ("linear_attn.in_proj_a", num_heads),
    ];
    Projection::stacked(&parts, hidden_size, Stacking::Concatenated)
}

/// The input projection in two modules, in which the outputs of a key head follow one another.
fn fused_inputs(delta: &DeltaShape, hidden_size: usize) -> Projection {
    let group = delta.num_value_heads / delta.num_key_heads;
    let values = group * delta.value_dim;
    let of_key_heads = |module, parts: &[usize]| {
        let num_heads = delta.num_key_heads;
        Projection::fused_in_runs(
            module,
            parts,
            num_heads,
            hidden_size,
            Stacking::Concatenated,
        )
    };
    let key_dim = delta.key_dim;
    let mut all = of_key_heads(
        "linear_attn.in_proj_qkvz",
        &[key_dim, key_dim, values, values],
    );
    let strengths = of_key_heads("linear_attn.in_proj_ba", &[group, group]);
    all.parts.extend(strengths.parts);
    all
}
