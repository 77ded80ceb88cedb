//! Models with recurrent states, and attention with gates: what they keep, what configs say, and what is refused.

use std::num::NonZeroU32;

use inflight_base::{BlockSize, SequenceId, Tokens};
use inflight_device::{KvDtype, RecurrentRule};
use inflight_engine::{Engine, Event, NewRequest, PromptLookup, Sampled, Speculation, StepOutput};
use inflight_runner::{AttentionWindows, CpuRunner, ModelSource, ModelSpec};
use serde_json::{Value, json};

use crate::copy::Copy;
use crate::families::{RECURRENT, WITHOUT_ATTENTION};
use crate::support::{Setup, fixture};

fn spec(name: &str) -> ModelSpec {
    let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
    source.spec().clone()
}

fn refused(name: &str, config: Value) -> String {
    let copy = Copy::of(name).config(config);
    let error = ModelSource::open(copy.dir()).err().expect("refused");
    error.to_string()
}

#[test]
fn blocks_hold_the_layers_with_attention_and_slots_the_others() {
    let block_size = BlockSize::new(16).expect("not zero");
    for (name, num_cached, state_len) in [
        ("lfm2", 1, 3 * 4 * 60),
        ("lfm2-moe", 1, 3 * 3 * 60),
        // A convolution of four tokens in two layers of four.
        ("lfm3", 2, 2 * 4 * 60),
        // Four inputs of queries, keys and values, and four matrices.
        ("qwen3-next", 1, 3 * (4 * (40 + 28) + 4 * 70)),
        ("qwen3-5", 1, 3 * (4 * (40 + 28) + 4 * 70)),
        // Of values and two groups of keys and queries, and six matrices.
        ("granite4", 1, 3 * (4 * (120 + 4 * 9) + 6 * 180)),
        // Layers of one block, with experts in two.
        ("nemotron-h-moe", 1, 4 * (120 + 4 * 9) + 6 * 180),
        ("lara-mini", 2, 2 * (4 * (40 + 28) + 4 * 70)),
        ("olmo-hybrid", 1, 3 * (4 * (40 + 28) + 4 * 70)),
        ("kimi-linear", 1, 3 * (4 * 90 + 3 * 100)),
        ("jamba", 1, 3 * (4 * 120 + 120 * 9)),
    ] {
        let spec = spec(name);
        assert_eq!(spec.num_cached_layers(), num_cached, "{name}");
        assert_eq!(spec.state_bytes(), 4 * state_len, "{name}");
        let bytes = CpuRunner::kv_bytes_per_block(&spec, block_size, KvDtype::Bf16);
        let mut one = spec.clone();
        one.layers.retain(|layer| layer.has_cache());
        one.layers.truncate(1);
        let of_layer = CpuRunner::kv_bytes_per_block(&one, block_size, KvDtype::Bf16);
        assert_eq!(bytes, num_cached * of_layer, "{name}");
        let windows = AttentionWindows {
            windows: [5, 6, 7, 8]
                .map(NonZeroU32::new)
                .into_iter()
                .flatten()
                .collect(),
            ..AttentionWindows::default()
        };
        let layers = spec.layers.iter().enumerate();
        let with_attention = layers.filter(|(_, layer)| layer.has_cache());
        let expected: Vec<_> = with_attention.map(|(it, _)| windows.window(it)).collect();
        let found: Vec<_> = spec.windows_within(&windows).collect();
        assert_eq!(
            found, expected,
            "{name}: the windows of layers with attention"
        );
    }
}

#[test]
fn blocks_of_a_model_without_attention_take_no_memory() {
    let block_size = BlockSize::new(16).expect("not zero");
    for name in WITHOUT_ATTENTION {
        let spec = spec(name);
        assert_eq!(spec.num_cached_layers(), 0, "{name}");
        assert_eq!(spec.state_bytes(), 4 * 4 * (4 * 120 + 120 * 9), "{name}");
        let bytes = CpuRunner::kv_bytes_per_block(&spec, block_size, KvDtype::Bf16);
        assert_eq!(bytes, 0, "{name}");
    }
    let config = json!({"layer_types": ["mamba", "mamba", "mamba", "mamba"]});
    let copy = Copy::of("granite4").config(config);
    let source = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(source.spec().num_cached_layers(), 0);
}

/// A layer has 120 channels, a convolution of 4 positions with a bias, and a state of 9 numbers for each channel.
#[test]
fn the_vectors_of_a_scan_are_part_of_the_weights() {
    let source = ModelSource::open(&fixture("mamba")).expect("it opens");
    let all = source.num_weight_bytes(None).expect("its tensors");
    let vectors = 4 * 4 * ((4 + 1) * 120 + (9 + 2) * 120 + 2 * 9);
    assert_eq!(all, source.spec().num_weight_bytes() + vectors);
}

#[test]
fn layers_with_both_have_blocks_and_slots() {
    let spec = spec("falcon-h1");
    assert_eq!(spec.num_cached_layers(), 4);
    assert_eq!(spec.state_bytes(), 4 * 4 * (4 * (100 + 2 * 9) + 5 * 180));
}

#[test]
fn a_null_base_leaves_attention_without_positions() {
    let without = json!({"rope_type": "default", "rope_theta": null});
    for (config, rotary_dim) in [
        (json!({"rope_parameters": without}), 0),
        (json!({"rope_parameters": {"rope_type": "default"}}), 10),
        (json!({"rope_parameters": null}), 10),
        // As the converter of transformers writes it.
        (json!({"rope_parameters": null, "rope_theta": null}), 0),
    ] {
        let copy = Copy::of("olmo-hybrid").config(config);
        let source = ModelSource::open(copy.dir()).expect("it opens");
        assert_eq!(
            source.spec().layers[1].attention.rope.rotary_dim,
            rotary_dim
        );
    }
}

#[test]
fn configs_describe_layers() {
    let lfm2 = spec("lfm2");
    let has_attention: Vec<_> = lfm2.layers.iter().map(|layer| layer.has_cache()).collect();
    assert_eq!(has_attention, [false, false, true, false]);
    let attention = &lfm2.layers[0].attention;
    assert!(attention.qkv.has_bias && attention.o.has_bias);
    assert!(!lfm2.layers[2].attention.qkv.has_bias);
    // Two thirds of 84 times 1.1, in steps of 10, or as they are.
    assert_eq!(lfm2.max_intermediate_size(), 70);
    let copy = Copy::of("lfm2").config(json!({"block_ffn_dim_multiplier": null}));
    let source = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(source.spec().max_intermediate_size(), 56);
    let copy = Copy::of("qwen3-5").config(json!({"attention_bias": true}));
    let source = ModelSource::open(copy.dir()).expect("it opens");
    let attention = &source.spec().layers[1].attention;
    assert!(
        attention.qkv.has_bias
            && attention
                .gate
                .as_ref()
                .is_some_and(|it| it.projection.has_bias)
    );
    let copy = Copy::of("dots1").config(json!({"scoring_func": "noaux_tc"}));
    ModelSource::open(copy.dir()).expect("it opens");
    let shape = lfm2.recurrence().expect("a state").shape;
    assert_eq!(shape.kernel_len, 4);
    assert_eq!(
        shape.rule,
        RecurrentRule::GatedConvolution { num_channels: 60 }
    );

    let next = spec("qwen3-next");
    let gates: Vec<_> = next
        .layers
        .iter()
        .map(|layer| layer.attention.gate.is_some())
        .collect();
    assert_eq!(gates, [false, false, false, true]);
    let config = json!({"layer_types": null, "full_attention_interval": 2});
    let copy = Copy::of("qwen3-5").config(config);
    let source = ModelSource::open(copy.dir()).expect("it opens");
    let layers = source.spec().layers.iter();
    let has_attention: Vec<_> = layers.map(|layer| layer.has_cache()).collect();
    assert_eq!(has_attention, [false, true, false, true]);
}

#[test]
fn bad_configs_are_refused_by_their_keys() {
    for (name, config, words) in [
        (
            "qwen3-next",
            json!({"linear_num_value_heads": 3}),
            "linear_num_value_heads: 3 is not a multiple of linear_num_key_heads 2",
        ),
        (
            "qwen3-5",
            json!({"layer_types": ["full_attention", "full_attention", "mamba", "full_attention"]}),
            "a list of 4 entries, each 'linear_attention' or 'full_attention'",
        ),
        (
            "qwen3-5",
            json!({"layer_types": ["full_attention"]}),
            "a list of 4 entries",
        ),
        (
            "qwen3-5",
            json!({"linear_conv_kernel_dim": 1_000_000}),
            "linear_conv_kernel_dim",
        ),
        (
            "lfm2",
            json!({"layer_types": null, "full_attn_idxs": [4]}),
            "full_attn_idxs: [4] is not a list of layers below 4",
        ),
        (
            "granite4",
            json!({"hidden_act": "gelu"}),
            "hidden_act: Gelu is not 'silu'",
        ),
        (
            "lfm2",
            json!({"block_ffn_dim_multiplier": 0.0}),
            "the width of the feed-forward blocks, by intermediate_size and block_ffn_dim_multiplier, is 0",
        ),
        ("lfm2", json!({"conv_L_cache": 0}), "conv_L_cache"),
        (
            "granite4",
            json!({"mamba_n_heads": 5}),
            "mamba_n_heads: 5 is not a multiple of mamba_n_groups 2",
        ),
        (
            "granite4",
            json!({"mamba_d_head": 21}),
            "mamba_n_heads: 6 is not one whose heads of 21 are 120 wide together",
        ),
        (
            "granite4",
            json!({"time_step_limit": [1.0, 0.5]}),
            "time_step_limit: [1.0,0.5] is not a least and a largest time",
        ),
        (
            "nemotron-h",
            json!({"layers_block_type": null, "hybrid_override_pattern": "M-X*"}),
            "hybrid_override_pattern: \"M-X*\" is not 1 to 4096 layers, as the letters M, *, - and E",
        ),
        (
            "nemotron-h",
            json!({"layers_block_type": ["mlp", "gru"]}),
            "a list of 'linear_attention', 'full_attention', 'mlp' and 'moe'",
        ),
        (
            "nemotron-h",
            json!({"layers_block_type": ["mlp", "mlp"]}),
            "no layer has attention or a recurrent state",
        ),
        (
            "nemotron-h",
            json!({"n_groups": 4}),
            "mamba_num_heads: 6 is not a multiple of n_groups 4",
        ),
        (
            "falcon-h1",
            json!({"ssm_multipliers": [1.0, 1.0]}),
            "ssm_multipliers: [1.0,1.0] is not a list of 5 numbers",
        ),
        (
            "falcon-h1",
            json!({"projectors_bias": true}),
            "projectors_bias: true is not supported beside multipliers",
        ),
        (
            "olmo-hybrid",
            json!({"linear_num_key_heads": 1, "linear_key_head_dim": null, "hidden_size": 1500}),
            "linear_key_head_dim would be 1125",
        ),
        (
            "nemotron-h-moe",
            json!({"moe_latent_size": 16}),
            "moe_latent_size: 16 is not null: experts on a latent (LatentMoE) are not supported",
        ),
        (
            "kimi-linear",
            json!({"mla_use_nope": false}),
            "mla_use_nope: false is not supported in this family; only true is",
        ),
        (
            "kimi-linear",
            json!({"moe_router_activation_func": "softmax"}),
            "moe_router_activation_func: 'softmax' is not 'sigmoid'",
        ),
        (
            "kimi-linear",
            json!({"num_experts_per_token": 6}),
            "num_experts_per_token: 6 is not at most 5",
        ),
        (
            "kimi-linear",
            json!({"linear_attn_config": {"num_heads": 0}}),
            "linear_attn_config.num_heads: 0 is not a whole number from 1",
        ),
        (
            "kimi-linear",
            json!({"layer_types": null, "linear_attn_config": {"kda_layers": [1, 3, 4], "full_attn_layers": [3]}}),
            "linear_attn_config.full_attn_layers: [3] is not a list of layers from 1 to 4, each once",
        ),
        (
            "kimi-linear",
            json!({"layer_types": null, "linear_attn_config": {"kda_layers": [1, 5], "full_attn_layers": [3]}}),
            "linear_attn_config.kda_layers: [1,5] is not a list of layers from 1 to 4, each once",
        ),
        (
            "kimi-linear",
            json!({"layer_types": null, "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]}}),
            "linear_attn_config: layer 4 of 4 is neither in kda_layers nor in full_attn_layers",
        ),
    ] {
        let error = refused(name, config);
        assert!(error.contains(words), "{name}: {error}");
    }
}

/// As Moonshot AI writes them, layers counted from 1.
#[test]
fn sizes_of_states_in_a_section_of_their_own_count_first() {
    let section = json!({
        "head_dim": 10, "num_heads": 3, "short_conv_kernel_size": 4,
        "kda_layers": [4, 1, 3], "full_attn_layers": [2],
    });
    let config = json!({
        "layer_types": null, "linear_attn_config": section, "linear_head_dim": 8, "linear_num_heads": 2,
        "linear_conv_kernel_dim": 3,
    });
    let copy = Copy::of("kimi-linear").config(config);
    let source = ModelSource::open(copy.dir()).expect("it opens");
    assert_eq!(source.spec(), &spec("kimi-linear"));
    // Where neither is there, every fourth layer but the first has attention.
    let copy = Copy::of("kimi-linear")
        .config(json!({"layer_types": null, "num_hidden_layers": 9, "mlp_layer_types": null}));
    let source = ModelSource::open(copy.dir()).expect("it opens");
    let layers = source.spec().layers.iter().enumerate();
    let cached = layers.filter(|(_, layer)| layer.has_cache());
    assert_eq!(cached.map(|(index, _)| index).collect::<Vec<_>>(), [4, 8]);
}

/// A state's sizes that contradict its tensors.
#[test]
fn tensors_of_other_shapes_are_refused_with_both() {
    for (name, config, words) in [
        (
            "qwen3-5",
            json!({"linear_conv_kernel_dim": 3}),
            ["linear_attn.conv1d.weight", "[68, 1, 4]", "[68, 1, 3]"],
        ),
        (
            "qwen3-5",
            json!({"linear_num_value_heads": 2}),
            ["linear_attn.in_proj_qkv.weight", "[68, 60]", "[54, 60]"],
        ),
        (
            "lfm2",
            json!({"conv_L_cache": 2}),
            ["conv.conv.weight", "[60, 1, 4]", "[60, 1, 2]"],
        ),
        (
            "kimi-linear",
            json!({"linear_num_heads": 4}),
            ["layers.0.self_attn.q_proj.weight", "[30, 52]", "[40, 52]"],
        ),
        (
            "kimi-linear",
            json!({"layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"]}),
            ["layers.0.self_attn.q_proj.weight", "[30, 52]", "[96, 52]"],
        ),
    ] {
        let copy = Copy::of(name).config(config);
        let source = ModelSource::open(copy.dir()).expect("the config is valid");
        let error = source
            .num_weight_bytes(None)
            .expect_err("refused")
            .to_string();
        for words in words {
            assert!(error.contains(words), "{name}: {words} is not in {error}");
        }
    }
}

#[test]
fn drafts_by_such_models_are_refused() {
    for (name, _) in RECURRENT {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        let model = ModelSource::open(&fixture("qwen3")).expect("the fixture opens");
        let error = model.with_draft_model(source).err().expect("refused");
        let words = "has layers with recurrent states, which drafts that are rejected would change";
        assert!(error.to_string().contains(words), "{name}: {error}");
    }
}

/// Tokens of greedy requests of several lengths. Some steps miss tokens, as if a guide were not ready.
fn tokens_with_misses(
    name: &str,
    speculation: Option<Speculation>,
    is_missed: impl Fn(usize, usize) -> bool,
) -> Vec<Vec<u32>> {
    const NUM_REQUESTS: usize = 3;
    let setup = Setup {
        max_num_tokens: 24,
        enable_chunked_context: true,
        speculation,
        ..Setup::default()
    };
    let mut runner = setup.load(name);
    let mut engine = Engine::new(setup.engine_config());
    for index in 0..NUM_REQUESTS {
        let prompt = (0..5 + 17 * index).map(|at| (at * 37 + index) as u32 % 150 + 3);
        let id = SequenceId(index as u64);
        let request = NewRequest::new(id, prompt.collect(), Tokens(12));
        engine.add(request).expect("it fits");
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let mut tokens = vec![Vec::new(); NUM_REQUESTS];
    for step in 0.. {
        let decided = engine.schedule();
        if decided.is_empty() {
            break;
        }
        output.sampled.clear();
        for plan in decided.plans() {
            runner.run(plan, &mut output).expect("the step runs");
        }
        let sampled = std::mem::take(&mut output.sampled);
        // A sequence with drafts may have several.
        for (index, own) in sampled.chunk_by(|(a, _), (b, _)| a == b).enumerate() {
            match is_missed(step, index) {
                true => output.sampled.push((own[0].0, Sampled::Missed)),
                false => output.sampled.extend_from_slice(own),
            }
        }
        events.clear();
        engine.apply(decided, &mut output, &mut events);
        for event in &events {
            if let Event::Token(id, token) = event {
                tokens[id.0 as usize].push(*token);
            }
        }
    }
    tokens
}

#[test]
fn a_token_that_is_computed_again_has_the_same_bits() {
    for (name, _) in RECURRENT {
        let expected = tokens_with_misses(name, None, |_, _| false);
        assert!(expected.iter().all(|tokens| tokens.len() == 12), "{name}");
        let is_missed = |step, index| (step + index) % 3 < 2 && step < 60;
        let speculation = Speculation {
            max_draft_tokens: 3,
            prompt_lookup: Some(PromptLookup { min: 1, max: 2 }),
            has_draft_model: false,
            recomputes_drafts: false,
        };
        for speculation in [None, Some(speculation)] {
            let missed = tokens_with_misses(name, speculation, is_missed);
            assert_eq!(missed, expected, "{name}, {speculation:?}");
        }
    }
}
