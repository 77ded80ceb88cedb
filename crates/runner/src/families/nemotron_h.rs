//! Nemotron-H, Nemotron Nano 2 and Nemotron 3, by NVIDIA: layers of one block each.
//!
//! `layers_block_type` tells what each layer has, or the letters of `hybrid_override_pattern`: the state space of
//! Mamba-2 (`M`), attention without positions (`*`), a feed-forward block without a gate (`-`), or experts without
//! gates (`E`), which are chosen as DeepSeek-V3's. The activation is squared ReLU. Norms of the state space have one
//! group for each of its groups of heads.
//!
//! transformers raises times to `time_step_min` in prompts, and not in what follows them. NVIDIA's code bounds them by
//! `time_step_limit` everywhere, and so does this.
//!
//! Source: configuration_nemotron_h.py and modeling_nemotron_h.py of transformers; NVIDIA, arXiv:2504.03624 and
//! arXiv:2512.20848.

use serde_json::{Map, Value, json};

use super::bounds::{MAX_HEAD_DIM, MAX_LAYERS};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::experts::{ExpertModules, width};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::glm4_moe::SIGMOIDS;
use super::grouped_experts::{CHOSEN_GROUPS, GROUPS, GroupedExperts, GroupedNames, experts};
use super::recurrent::{MAX_KERNEL_LEN, times};
use super::state_space::{SpaceModules, StateSpace, heads_and_groups};
use super::windows::no_windows;
use crate::recurrence_spec::RuleModules;
use crate::rope::Rope;
use crate::spec::{
    Block, ExpertsSpec, FeedForward, ModelSpec, Norms, Projection, SharedExpert, StackedExperts,
    StackedLayout,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, Gating, RouterScores, SpaceNorm, StateSpaceShape};
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "NemotronHForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "nemotron_h_moe",
        experts: Some(SIGMOIDS),
        ..DENSE_GGUF
    }),
    describe,
};

/// How llama.cpp stores a model without experts.
pub const DENSE_GGUF: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("norm", "attn_norm"),
        ("mixer.in_proj", "ssm_in"),
        ("mixer.conv1d", "ssm_conv1d"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.dt_bias", "ssm_dt"),
        ("mixer.D", "ssm_d"),
        ("mixer.norm", "ssm_norm"),
        ("mixer.out_proj", "ssm_out"),
        ("mixer.q_proj", "attn_q"),
        ("mixer.k_proj", "attn_k"),
        ("mixer.v_proj", "attn_v"),
        ("mixer.o_proj", "attn_output"),
        ("mixer.up_proj", "ffn_up"),
        ("mixer.down_proj", "ffn_down"),
        ("mixer.gate", "ffn_gate_inp"),
        ("mixer.gate.e_score_correction_bias", "exp_probs_b"),
        ("mixer.experts.{}.up_proj", "ffn_up_exps"),
        ("mixer.experts.{}.down_proj", "ffn_down_exps"),
        ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
        ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    keys: &[
        ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        // Counts before that.
        ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        ("ssm.conv_kernel", "conv_kernel"),
        ("ssm.state_size", "ssm_state_size"),
        ("ssm.group_count", "n_groups"),
        ("ssm.time_step_rank", "mamba_num_heads"),
        ("expert_count", "n_routed_experts"),
        ("expert_group_count", GROUPS),
        ("expert_group_used_count", CHOSEN_GROUPS),
        ("expert_shared_count", "n_shared_experts"),
        (
            "expert_shared_feed_forward_length",
            "moe_shared_expert_intermediate_size",
        ),
        ("moe_latent_size", "moe_latent_size"),
    ],
    // The width of rotated parts, although no layer rotates.
    has_partial_rotary: true,
    may_lack_blocks: true,
    optional_biases: &[
        ("mlp_bias", "mixer.up_proj"),
        ("use_bias", "mixer.in_proj"),
        ("use_conv_bias", "mixer.conv1d"),
    ],
    add_read: add_blocks,
    ..GgufArchitecture::named("nemotron_h")
};

/// Adds the kinds of layers and the width of the state space's heads, and removes the rotation, which no layer has.
fn add_blocks(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let head_dim = gguf.quotient("ssm.inner_size", "ssm.time_step_rank")?;
    config.insert("mamba_head_dim".to_owned(), json!(head_dim));
    config.remove("rope_parameters");
    let keys = ["attention.head_count_kv", "feed_forward_length"];
    let [has_attention, has_block] = keys.map(|key| gguf.layers_with(key));
    let has_experts = gguf.layers_with_tensor("ffn_gate_inp.weight")?;
    if let (Some(has_attention), Some(has_block)) = (has_attention?, has_block?) {
        let layers = has_attention.into_iter().zip(has_block).zip(has_experts);
        let kinds = layers.map(|((has_attention, has_block), has_experts)| {
            match (has_attention, has_block, has_experts) {
                (true, ..) => "attention",
                (_, true, true) => "moe",
                (_, true, false) => "mlp",
                (_, false, _) => "mamba",
            }
        });
        let kinds: Vec<_> = kinds.collect();
        config.insert("layers_block_type".to_owned(), json!(kinds));
    }
    Ok(())
}

/// The kind of a layer's only block.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Space,
    Attention,
    Dense,
    Experts,
}

const EXPERTS: GroupedExperts = GroupedExperts {
    scores: RouterScores::Sigmoid,
    num_experts: Some(8),
    num_chosen: Some(2),
    // One, whose width config.json tells apart.
    num_shared: Some(0),
    expert_size: 7688,
    num_dense_layers: 0,
    num_groups: Some(1),
    num_chosen_groups: Some(1),
    num_group_scores: 2,
    is_normalised: true,
    routed_scale: 1.0,
    has_mlp_bias: false,
    names: GroupedNames {
        num_dense: None,
        correction: "mixer.gate.e_score_correction_bias",
        ..GroupedNames::DEEPSEEK
    },
};

const MODULES: ExpertModules = ExpertModules {
    router: "mixer.gate",
    gate: "mixer.experts.{}.up_proj",
    up: "mixer.experts.{}.up_proj",
    down: "mixer.experts.{}.down_proj",
    stacked: StackedExperts {
        router: "mixer.gate",
        gate_up: "mixer.experts.up_proj",
        down: "mixer.experts.down_proj",
        layout: StackedLayout::Outputs,
    },
};

const SPACE_MODULES: SpaceModules = SpaceModules {
    input: "mixer.in_proj",
    convolution: "mixer.conv1d",
    rule: RuleModules {
        log_rates: "mixer.A_log",
        time_biases: "mixer.dt_bias",
        skips: Some("mixer.D"),
        norm: Some("mixer.norm"),
        key_norms: None,
    },
    output: "mixer.out_proj",
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(131_072, 4096, 21_504, 4, 32, 4096)),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        activation: Activation::SquaredRelu,
        keys: Keys {
            activation: "mlp_hidden_act",
            norm_eps: "layer_norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    check_absent(config)?;
    let blocks = blocks(config)?;
    let dimensions = Dimensions {
        num_layers: blocks.len(),
        // Whatever config.json says.
        tied_embeddings: false,
        rope: Rope::none(),
        ..Dimensions::from_config(config, &defaults)?
    };
    let hidden = dimensions.hidden_size;
    let has_bias = config.bool_or("mlp_bias", false)?;
    let mut layer = dimensions.llama_layer();
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("mixer.q_proj", q),
        ("mixer.k_proj", kv),
        ("mixer.v_proj", kv),
    ];
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    layer.attention.o = Projection::single("mixer.o_proj", hidden, q);
    let mut dense = dimensions.plain("mixer.up_proj", "mixer.down_proj");
    dense.set_biases(has_bias);
    let experts = match blocks.contains(&Kind::Experts) {
        true => {
            check_latent(config)?;
            Some(experts_without_gates(config, &dimensions, has_bias)?)
        }
        false => None,
    };
    let space = space(config, &dimensions)?;
    let windows = no_windows(blocks.len());
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    spec.modules.embedding = "model.embeddings";
    spec.modules.final_norm = Some("model.norm_f");
    for (layer, kind) in spec.layers.iter_mut().zip(blocks) {
        let block = match kind {
            Kind::Space | Kind::Attention => Block::Attention,
            Kind::Dense | Kind::Experts => Block::FeedForward,
        };
        layer.norms = Norms::OfOne {
            block,
            norm: "norm",
        };
        layer.feed_forward = match (kind, &experts) {
            (Kind::Experts, Some(experts)) => FeedForward::Experts(experts.clone()),
            _ => dense.clone(),
        };
        if kind == Kind::Space {
            space.replace(&mut layer.attention, hidden);
        }
    }
    Ok(spec)
}

/// Refuses experts on a latent.
fn check_latent(config: &JsonFile) -> Result<(), LoadError> {
    const LATENT: &str = "moe_latent_size";
    match config.get(LATENT) {
        Some(size) => {
            let expected = "null: experts on a latent (LatentMoE) are not supported";
            Err(config.unexpected(LATENT, size, expected))
        }
        None => Ok(()),
    }
}

/// Refuses what is not computed.
fn check_absent(config: &JsonFile) -> Result<(), LoadError> {
    const BIAS: &str = "attention_bias";
    if config.bool_or(BIAS, false)? {
        let expected = "supported in this family, whose attention has no biases; only false is";
        return Err(config.unexpected(BIAS, true, expected));
    }
    const ACTIVATION: &str = "mamba_hidden_act";
    match config.string(ACTIVATION)? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(config.unexpected(ACTIVATION, format_args!("'{other}'"), "'silu'")),
    }
}

/// The kinds of all layers, in order.
fn blocks(config: &JsonFile) -> Result<Vec<Kind>, LoadError> {
    const TYPES: &str = "layers_block_type";
    const PATTERN: &str = "hybrid_override_pattern";
    let key = [TYPES, "layer_types", PATTERN]
        .into_iter()
        .find(|key| config.get(key).is_some());
    let Some(key) = key else {
        return Ok(vec![
            Kind::Space,
            Kind::Experts,
            Kind::Attention,
            Kind::Dense,
        ]);
    };
    let of_letter = |letter| match letter {
        'M' => Some(Kind::Space),
        '*' => Some(Kind::Attention),
        '-' => Some(Kind::Dense),
        'E' => Some(Kind::Experts),
        _ => None,
    };
    let of_name = |name: &Value| match name.as_str()? {
        "linear_attention" | "mamba" => Some(Kind::Space),
        "full_attention" | "attention" => Some(Kind::Attention),
        "mlp" => Some(Kind::Dense),
        "moe" => Some(Kind::Experts),
        _ => None,
    };
    let told = config.get(key).unwrap_or(&Value::Null);
    let (blocks, expected): (Option<Vec<_>>, _) = match key {
        PATTERN => (
            told.as_str()
                .and_then(|it| it.chars().map(of_letter).collect()),
            "the letters M, *, - and E",
        ),
        _ => (
            told.as_array()
                .and_then(|it| it.iter().map(of_name).collect()),
            "a list of 'linear_attention', 'full_attention', 'mlp' and 'moe'",
        ),
    };
    let fits = |blocks: &Vec<_>| (1..=MAX_LAYERS).contains(&blocks.len());
    blocks.filter(fits).ok_or_else(|| {
        let expected = format!("1 to {MAX_LAYERS} layers, as {expected}");
        config.unexpected(key, told, expected)
    })
}

fn experts_without_gates(
    config: &JsonFile,
    dimensions: &Dimensions,
    has_bias: bool,
) -> Result<ExpertsSpec, LoadError> {
    let hidden = dimensions.hidden_size;
    let shared_size = width(config, "moe_shared_expert_intermediate_size", 7688)?;
    let of_gates = experts(config, dimensions, &EXPERTS)?;
    let mut experts = dimensions.experts(&MODULES, of_gates.routing, of_gates.down.num_inputs);
    experts.gate_up = Projection::single(MODULES.up, experts.down.num_inputs, hidden);
    experts.gating = Gating::Plain(dimensions.activation);
    experts.correction = of_gates.correction;
    let (up, down) = (
        "mixer.shared_experts.up_proj",
        "mixer.shared_experts.down_proj",
    );
    experts.shared = Some(SharedExpert {
        gate_up: Projection::single(up, shared_size, hidden).with_bias(has_bias),
        down: Projection::single(down, hidden, shared_size).with_bias(has_bias),
        gating: None,
    });
    Ok(experts)
}

fn space(config: &JsonFile, dimensions: &Dimensions) -> Result<StateSpace, LoadError> {
    // The names of older configs count first.
    let key = |older: &'static str, key: &'static str| match config.get(older) {
        Some(_) => older,
        None => key,
    };
    let size = |key, max, default: usize| Ok(config.size(key, 1..=max)?.unwrap_or(default));
    let keys = ["mamba_num_heads", key("mamba_n_groups", "n_groups")];
    let [num_heads, num_groups] = heads_and_groups(config, keys, [128, 8])?;
    let shape = StateSpaceShape {
        num_heads,
        head_dim: size("mamba_head_dim", MAX_HEAD_DIM, 64)?,
        num_groups,
        state_dim: size("ssm_state_size", MAX_HEAD_DIM, 128)?,
        input_scales: [1.0; 5],
        norm: SpaceNorm::Gated,
        num_norm_groups: num_groups,
        norm_eps: dimensions.norm.eps,
        times: times(config, key("mamba_dt_limit", "time_step_limit"))?,
    };
    let kernel_len = size(key("mamba_d_conv", "conv_kernel"), MAX_KERNEL_LEN, 4)?;
    let biases = [
        config.bool_or(key("mamba_conv_bias", "use_conv_bias"), true)?,
        config.bool_or("use_bias", false)?,
    ];
    Ok(StateSpace::new(shape, kernel_len, SPACE_MODULES, biases))
}
