//! Kimi Linear, by Moonshot AI: the gated delta rule by channels in three of four layers (Kimi Delta Attention), and
//! DeepSeek-V3's latent attention without positions in the others.
//!
//! Gates of results, and decays, are made by low rank, from `head_dim` elements each. Queries, keys and values have a
//! convolution each. `linear_attn_config` counts layers from 1; transformers writes `layer_types` in its place. Layers
//! from `first_k_dense_replace` on have DeepSeek-V3's experts, under Mixtral's names.
//!
//! Source: configuration_kimi_linear.py and modeling_kimi_linear.py of transformers, and its conversion_mapping.py;
//! Kimi Team, arXiv:2510.26692.

use serde_json::{Map, Value, json};

use super::bounds::{MAX_HEAD_DIM, MAX_HEADS};
use super::deepseek::{Generation, Parts, describe_generation};
use super::dimensions::{Sizes, activation};
use super::experts::rename_experts;
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, GgufExperts};
use super::grouped_experts::{GroupedExperts, GroupedNames};
use super::mixtral::MODULES;
use super::recurrent::{MAX_KERNEL_LEN, check_activation, layers_of_type};
use crate::recurrence_spec::{RecurrenceSpec, RuleModules};
use crate::rope::Rope;
use crate::spec::{FeedForward, LateInputsSpec, ModelSpec, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{
    Activation, DeltaForm, DeltaShape, RecurrenceShape, RecurrentRule, RouterScores,
};
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "KimiLinearForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.q_conv1d", "ssm_conv1d_q"),
            ("self_attn.k_conv1d", "ssm_conv1d_k"),
            ("self_attn.v_conv1d", "ssm_conv1d_v"),
            ("self_attn.b_proj", "ssm_beta"),
            ("self_attn.f_a_proj", "ssm_f_a"),
            ("self_attn.f_b_proj", "ssm_f_b"),
            ("self_attn.g_a_proj", "ssm_g_a"),
            ("self_attn.g_b_proj", "ssm_g_b"),
            ("self_attn.A_log", "ssm_a"),
            ("self_attn.dt_bias", "ssm_dt"),
            ("self_attn.o_norm", "ssm_norm"),
            (
                "block_sparse_moe.gate.e_score_correction_bias",
                "exp_probs_b",
            ),
            (
                "block_sparse_moe.shared_experts.gate_proj",
                "ffn_gate_shexp",
            ),
            ("block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"),
            (
                "block_sparse_moe.shared_experts.down_proj",
                "ffn_down_shexp",
            ),
        ],
        keys: &[
            ("ssm.conv_kernel", "linear_conv_kernel_dim"),
            ("kda.head_dim", "linear_head_dim"),
            ("expert_used_count", "num_experts_per_token"),
            ("expert_shared_count", "num_shared_experts"),
            ("expert_group_count", "num_expert_group"),
            ("expert_group_used_count", "topk_group"),
        ],
        experts: Some(GgufExperts {
            is_normalised: true,
            has_scale: true,
            gating: 2,
        }),
        has_latents: true,
        may_lack_blocks: true,
        add_read: add_layers,
        add_fixed: |config| {
            let is_normalised = config.get("norm_topk_prob").cloned();
            config.insert("moe_renormalize".to_owned(), json!(is_normalised));
        },
        ..GgufArchitecture::named("kimi-linear")
    }),
    describe,
};

/// Adds which layers have attention and experts, and the heads of the others, which only their tensors tell.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    const HEADS: &str = "attention.head_count_kv";
    let has_attention = gguf.required_layers_with(HEADS)?;
    let with_state = has_attention.iter().position(|has| !has);
    let strengths = with_state.map(|layer| format!("blk.{layer}.ssm_beta.weight"));
    if let Some([num_heads, _]) = strengths.and_then(|name| gguf.shape(&name)) {
        config.insert("linear_num_heads".to_owned(), json!(num_heads));
    }
    let kinds = ["linear_attention", "full_attention"];
    GgufConfig::add_layer_types(config, &has_attention, kinds);
    // The number of the first layers without experts says less than the tensors do.
    gguf.get("leading_dense_block_count");
    gguf.add_layers_with_experts(config)
}

const GENERATION: Generation = Generation {
    class: FAMILY.class,
    sizes: Sizes::new(163_840, 2304, 9216, 27, 32, 1_048_576),
    norm_eps: 1e-5,
    rope_theta: 10_000.0,
    parts: Parts {
        rotary: 64,
        content: 128,
        value: 128,
        queries: 1536,
        latent: 512,
    },
    is_tied: false,
    experts: Some(GroupedExperts {
        scores: RouterScores::Sigmoid,
        num_experts: Some(256),
        num_chosen: Some(8),
        num_shared: Some(1),
        expert_size: 1024,
        num_dense_layers: 1,
        num_groups: Some(1),
        num_chosen_groups: Some(1),
        num_group_scores: 2,
        is_normalised: true,
        routed_scale: 2.446,
        has_mlp_bias: false,
        names: GroupedNames {
            num_experts: "num_experts",
            num_chosen: "num_experts_per_token",
            num_shared: "num_shared_experts",
            num_groups: "num_expert_group",
            is_normalised: "moe_renormalize",
            layer_types: Some("mlp_layer_types"),
            correction: "block_sparse_moe.gate.e_score_correction_bias",
            ..GroupedNames::DEEPSEEK
        },
    }),
};

/// The older place of the keys of layers with a state.
const LINEAR: &str = "linear_attn_config";

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    check(config)?;
    // No layer has a position embedding, whatever config.json says of one.
    let mut known = config
        .with("rope_interleave", json!(false))
        .with("rope_scaling", Value::Null)
        .with("rope_parameters", Value::Null);
    if let Some(positions) = config.get("model_max_length") {
        known = known.with("max_position_embeddings", positions.clone());
    }
    if !config.has("q_lora_rank") {
        known = known.with("q_lora_rank", Value::Null);
    }
    let mut spec = describe_generation(&known, &GENERATION)?;
    let (hidden, num_layers) = (spec.hidden_size, spec.num_layers());
    let delta = delta_shape(config, spec.norm.eps)?;
    let kernel_len = of_linear(
        config,
        ["short_conv_kernel_size", "linear_conv_kernel_dim"],
        MAX_KERNEL_LEN,
        4,
    )?;
    let has_attention = layers_with_attention(config, num_layers)?;
    for (layer, has_attention) in spec.layers.iter_mut().zip(has_attention) {
        if let FeedForward::Experts(experts) = &mut layer.feed_forward {
            rename_experts(
                experts,
                &MODULES,
                [
                    "block_sparse_moe.shared_experts.gate_proj",
                    "block_sparse_moe.shared_experts.up_proj",
                    "block_sparse_moe.shared_experts.down_proj",
                ],
            );
        }
        let attention = &mut layer.attention;
        attention.rope = Rope::none();
        if has_attention {
            continue;
        }
        attention.latent = None;
        attention.qkv = inputs(&delta, hidden);
        attention.o = Projection::single("self_attn.o_proj", hidden, delta.value_len());
        attention.late = Some(late_inputs(&delta, hidden));
        attention.recurrence = Some(RecurrenceSpec {
            shape: RecurrenceShape {
                kernel_len,
                rule: RecurrentRule::GatedDelta(delta),
            },
            convolution: "self_attn.conv1d",
            convolution_parts: Some([
                "self_attn.q_conv1d",
                "self_attn.k_conv1d",
                "self_attn.v_conv1d",
            ]),
            has_convolution_bias: false,
            modules: Some(RuleModules {
                log_rates: "self_attn.A_log",
                time_biases: "self_attn.dt_bias",
                skips: None,
                norm: Some("self_attn.o_norm"),
                key_norms: None,
            }),
        });
    }
    Ok(spec)
}

/// Refuses what published configs say and transformers ignores, if it is something else.
fn check(config: &JsonFile) -> Result<(), LoadError> {
    const POSITIONS: &str = "mla_use_nope";
    const SCORES: &str = "moe_router_activation_func";
    if !config.bool_or(POSITIONS, true)? {
        let expected = "supported in this family; only true is";
        return Err(config.unexpected(POSITIONS, false, expected));
    }
    if let Some(other) = config.string(SCORES)?
        && other != "sigmoid"
    {
        let expected = "'sigmoid' in this family";
        return Err(config.unexpected(SCORES, format_args!("'{other}'"), expected));
    }
    let activation = activation(config, "hidden_act")?.unwrap_or(Activation::Silu);
    check_activation(config, activation)
}

/// A size of layers with a state: by the first key in `linear_attn_config`, or else by the second one.
fn of_linear(
    config: &JsonFile,
    [older, key]: [&str; 2],
    max: usize,
    default: usize,
) -> Result<usize, LoadError> {
    if let Some(linear) = config.object(LINEAR)?
        && let Some(size) = linear.size(older, 1..=max)?
    {
        return Ok(size);
    }
    Ok(config.size(key, 1..=max)?.unwrap_or(default))
}

fn delta_shape(config: &JsonFile, norm_eps: f32) -> Result<DeltaShape, LoadError> {
    let num_heads = of_linear(config, ["num_heads", "linear_num_heads"], MAX_HEADS, 32)?;
    let head_dim = of_linear(config, ["head_dim", "linear_head_dim"], MAX_HEAD_DIM, 128)?;
    Ok(DeltaShape {
        form: DeltaForm::Channels,
        num_key_heads: num_heads,
        num_value_heads: num_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        strength_scale: 1.0,
        norm_eps,
    })
}

/// Which layers have attention. Lists that count from 1 must name each layer once.
fn layers_with_attention(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    const LISTS: [&str; 2] = ["kda_layers", "full_attn_layers"];
    if config.get("layer_types").is_some() {
        let names = [["linear_attention", "full_attention"]];
        return layers_of_type(config, num_layers, &names);
    }
    let linear = config.object(LINEAR)?;
    let lists = linear.as_ref().and_then(|linear| {
        let [with_state, with_attention] = LISTS.map(|key| linear.get(key));
        Some((linear, [with_state?, with_attention?]))
    });
    let Some((linear, lists)) = lists else {
        return Ok((0..num_layers)
            .map(|layer| layer > 0 && layer.is_multiple_of(4))
            .collect());
    };
    let mut kinds = vec![None; num_layers];
    for ((key, list), has_attention) in LISTS.into_iter().zip(lists).zip([false, true]) {
        let place = |layer: &Value| usize::try_from(layer.as_u64()?).ok()?.checked_sub(1);
        let places = list.as_array().map(|list| list.iter().map(place));
        let taken = places.and_then(|mut places| {
            places.try_for_each(|place| {
                let kind = kinds.get_mut(place?)?;
                kind.replace(has_attention).is_none().then_some(())
            })
        });
        if taken.is_none() {
            let expected = format!("a list of layers from 1 to {num_layers}, each once");
            return Err(linear.unexpected(key, list, expected));
        }
    }
    let all: Option<Vec<_>> = kinds.iter().copied().collect();
    all.ok_or_else(|| {
        let missing = kinds.iter().position(Option::is_none).unwrap_or(0) + 1;
        config.error(format!(
            "{LINEAR}: layer {missing} of {num_layers} is neither in {} nor in {}",
            LISTS[0], LISTS[1]
        ))
    })
}

/// The input projection: queries, keys, values, strengths.
fn inputs(delta: &DeltaShape, hidden_size: usize) -> Projection {
    let parts = [
        ("self_attn.q_proj", delta.key_len()),
        ("self_attn.k_proj", delta.key_len()),
        ("self_attn.v_proj", delta.value_len()),
        ("self_attn.b_proj", delta.num_value_heads),
    ];
    Projection::stacked(&parts, hidden_size, Stacking::Concatenated)
}

/// Gates and decays.
fn late_inputs(delta: &DeltaShape, hidden_size: usize) -> LateInputsSpec {
    let rank = delta.value_dim;
    let low_rank = |[first, second]: [&'static str; 2], width| {
        [
            Projection::single(first, rank, hidden_size),
            Projection::single(second, width, rank),
        ]
    };
    LateInputsSpec::LowRank {
        gates: low_rank(
            ["self_attn.g_a_proj", "self_attn.g_b_proj"],
            delta.value_len(),
        ),
        decays: low_rank(
            ["self_attn.f_a_proj", "self_attn.f_b_proj"],
            delta.num_decays(),
        ),
    }
}
