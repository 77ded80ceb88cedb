//! Attention windows and sinks, from the model, from the user, and from both.

use std::num::NonZeroU32;

use inflight_base::{BlockId, SequenceId, Tokens};
use inflight_engine::{Engine, NewRequest, StepOutput};
use inflight_runner::{
    AttentionWindows, ModelSource, ModelSpec, SyntheticOptions, SyntheticRunner,
};
use serde_json::json;

use crate::copy::Copy;
use crate::errors::largest_error;
use crate::support::{Request, Setup, fixture, serve, serve_alone};

fn windows_of(spec: &ModelSpec) -> Vec<Option<NonZeroU32>> {
    spec.windows().collect()
}

fn spec(name: &str) -> ModelSpec {
    let checkpoint = ModelSource::open(&fixture(name)).expect("the fixture opens");
    checkpoint.spec().clone()
}

fn limits(windows: &[u32], num_sinks: u32) -> AttentionWindows {
    AttentionWindows {
        windows: windows.iter().filter_map(|&w| NonZeroU32::new(w)).collect(),
        num_sinks: Tokens(num_sinks),
        shifts_sinks: false,
    }
}

fn windows(windows: &[u32]) -> Vec<Option<NonZeroU32>> {
    windows.iter().map(|&w| NonZeroU32::new(w)).collect()
}

fn prompt(len: usize) -> Request {
    let prompt: Vec<_> = (0..len).map(|i| 3 + (i * 37 % 150) as u32).collect();
    Request::greedy(&prompt, 20)
}

#[test]
fn a_config_says_which_layers_have_a_window() {
    assert_eq!(windows_of(&spec("llama2")), windows(&[0, 0]));
    assert_eq!(windows_of(&spec("mistral")), windows(&[0, 0]));
    assert_eq!(windows_of(&spec("mistral-window")), windows(&[24, 24]));
    assert_eq!(windows_of(&spec("qwen2")), windows(&[0, 0]));
    assert_eq!(windows_of(&spec("qwen2-windows")), windows(&[0, 0, 10]));
    assert_eq!(windows_of(&spec("qwen3-windows")), windows(&[19, 0, 19]));
}

#[test]
fn a_config_without_layer_types_counts_the_layers_without_a_window() {
    for (max_window_layers, expected) in [(0, [10, 10, 10]), (2, [0, 0, 10]), (3, [0, 0, 0])] {
        let copy = Copy::of("qwen2-windows")
            .config(json!({"layer_types": null, "max_window_layers": max_window_layers}));
        let checkpoint = ModelSource::open(copy.dir()).expect("it opens");
        assert_eq!(windows_of(checkpoint.spec()), windows(&expected));
    }
    for layer_types in [
        json!(["full_attention"]),
        json!(["chunked_attention", "full_attention", "full_attention"]),
    ] {
        let copy = Copy::of("qwen2-windows").config(json!({"layer_types": layer_types}));
        copy.refused(&["config.json", "layer_types", "sliding_attention"]);
    }
    Copy::of("mistral")
        .config(json!({"sliding_window": 0}))
        .refused(&["sliding_window", "0", "1 to"]);
}

#[test]
fn a_spec_tells_what_no_layer_needs() {
    let max_seq_len = Tokens(96);
    let largest = |name: &str, limits: AttentionWindows| {
        spec(name)
            .largest_window(&limits, max_seq_len)
            .map(|window| window.0)
    };
    assert_eq!(largest("llama2", limits(&[], 4)), None);
    assert_eq!(largest("llama2", limits(&[30], 4)), Some(30));
    assert_eq!(largest("llama2", limits(&[30, 50], 4)), Some(50));
    assert_eq!(largest("mistral-window", limits(&[], 0)), Some(24));
    assert_eq!(largest("mistral-window", limits(&[20, 30], 0)), Some(24));
    assert_eq!(largest("qwen3-windows", limits(&[], 0)), None);
    // The list is repeated: 30 for the first and the third layer, which need 19, 40 for the second.
    assert_eq!(largest("qwen3-windows", limits(&[30, 40], 0)), Some(40));
    // Together with the sinks they see all.
    assert_eq!(largest("llama2", limits(&[92], 3)), Some(92));
    assert_eq!(largest("llama2", limits(&[92], 4)), None);
    assert_eq!(largest("llama2", limits(&[96], 0)), None);

    let synthetic = |limits| SyntheticRunner::largest_window(&limits, max_seq_len);
    assert_eq!(synthetic(limits(&[], 4)), None);
    assert_eq!(synthetic(limits(&[30, 50], 4)), Some(Tokens(50)));
}

#[test]
fn the_users_window_is_what_the_models_own_would_be() {
    let own = Copy::of("mistral-window");
    let none = Copy::of("mistral-window").config(json!({"sliding_window": null}));
    let plain = Setup::default();
    let limited = |windows| Setup {
        windows,
        ..Setup::default()
    };
    let request = prompt(60);
    let serve = |copy: &Copy, setup: &Setup| {
        let mut runner = copy.load_with(setup).expect("it loads");
        serve_alone(&mut runner, setup, &request)
    };
    let expected = serve(&own, &plain);
    assert!(serve(&none, &limited(&[24])) == expected);
    assert!(serve(&none, &limited(&[24, 24])) == expected);
    // The smaller one counts.
    assert!(serve(&own, &limited(&[96, 24])) == expected);
    // A window matters, and each layer's.
    let all = serve(&none, &plain);
    assert!(all != expected);
    assert!(serve(&none, &limited(&[96])) == all);
    let first = serve(&none, &limited(&[24, 96]));
    let second = serve(&none, &limited(&[96, 24]));
    assert!(first != all && second != all && first != second);
}

#[test]
fn sinks_are_seen_besides_the_window() {
    let setup = |num_sinks| Setup {
        windows: &[40],
        num_sinks,
        ..Setup::default()
    };
    let request = prompt(60);
    let serve = |setup: Setup| serve_alone(&mut setup.load("llama3"), &setup, &request);
    let everything = serve(Setup::default());
    assert!(serve(setup(0)) != everything);
    assert!(serve(setup(4)) != everything && serve(setup(4)) != serve(setup(0)));
    // Of 60 + 20 positions, the last query sees 40 sinks and a window of 40: all.
    assert!(serve(setup(40)) == everything);
}

#[test]
fn sinks_that_shift_are_where_a_text_without_what_was_evicted_has_them() {
    let (window, num_sinks) = (24, 4);
    let text = prompt(70).prompt;
    let kept = [&text[..num_sinks], &text[text.len() - window..]].concat();
    for name in ["llama3", "qwen3", "stablelm", "llama-yarn"] {
        // In one layer a key depends on its token and its position only.
        let copy = Copy::of(name).config(json!({"num_hidden_layers": 1, "layer_types": null}));
        let logits = |prompt: &[u32], setup: &Setup| {
            let mut runner = copy.load_with(setup).expect("it loads");
            let served = serve_alone(&mut runner, setup, &Request::greedy(prompt, 1));
            served.logits[0].clone()
        };
        let in_place = Setup {
            windows: &[24],
            num_sinks: num_sinks as u32,
            ..Setup::default()
        };
        let shifting = Setup {
            shifts_sinks: true,
            ..in_place.clone()
        };
        let expected = logits(&kept, &Setup::default());
        let shifted = largest_error(&logits(&text, &shifting), &expected);
        let stayed = largest_error(&logits(&text, &in_place), &expected);
        // Keys are rounded behind another rotation.
        assert!(shifted < 0.04, "{name}: {shifted}");
        assert!(stayed > 8.0 * shifted, "{name}: {stayed}, and {shifted}");
        // Nothing is evicted, so nothing shifts.
        let short = largest_error(&logits(&kept, &shifting), &expected);
        assert!(short < 0.03, "{name}: {short}");
    }
}

#[test]
fn sinks_of_models_that_do_more_than_rotate_do_not_shift() {
    let setup = Setup {
        windows: &[24],
        num_sinks: 4,
        shifts_sinks: true,
        ..Setup::default()
    };
    for (name, reason) in [
        ("gpt2", "GPT2LMHeadModel adds learned positions"),
        ("opt", "OPTForCausalLM adds learned positions"),
        ("deepseek-v2", "DeepseekV2ForCausalLM has latent attention"),
        (
            "hunyuan",
            "HunYuanDenseV1ForCausalLM has head norms behind RoPE",
        ),
        (
            "ministral3",
            "Ministral3ForCausalLM scales queries by position",
        ),
    ] {
        let error = Copy::of(name).load_with(&setup).err().expect("refused");
        let error = error.to_string();
        for part in ["enable_sink_token_shift is true", reason, "set it to false"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_sequence_may_be_longer_than_the_pool_if_it_gives_blocks_back() {
    // The rotary angles must reach that far, whatever the pool has room for.
    let roomy = Setup {
        windows: &[16],
        ..Setup::default()
    };
    let request = prompt(70);
    let expected = serve_alone(&mut roomy.load("llama3"), &roomy, &request);
    // The engine thinks that it has 12 blocks; the runner gets those that are seen.
    let tight = Setup {
        block_size: 8,
        num_blocks: 12,
        num_runner_blocks: Some(6),
        moves_blocks: true,
        max_num_tokens: 16,
        enable_chunked_context: true,
        ..roomy
    };
    let (served, happened) = serve(&mut tight.load("llama3"), &tight, &[request]);
    assert!(served[0] == expected);
    assert!(happened.num_taken > 6, "{happened:?}");
}

#[test]
fn more_windows_than_layers_are_refused() {
    let setup = Setup {
        windows: &[16, 32, 16],
        ..Setup::default()
    };
    let error = Copy::of("llama2").load_with(&setup).err().expect("refused");
    assert!(
        error.to_string().contains("3 windows for 2 layers"),
        "{error}"
    );
}

#[test]
fn the_synthetic_runner_notices_a_block_that_is_missing() {
    const BLOCK_SIZE: u32 = 4;
    let setup = Setup {
        block_size: BLOCK_SIZE,
        windows: &[10],
        num_sinks: 5,
        ..Setup::default()
    };
    let options = SyntheticOptions {
        vocab_size: 1000,
        step_base_us: 0.0,
        step_per_token_us: 0.0,
    };
    let mut runner = SyntheticRunner::new(options, &setup.runner_limits()).expect("memory");
    let mut engine = Engine::new(setup.engine_config());
    engine
        .add(NewRequest::new(SequenceId(7), vec![1; 40], Tokens(9)))
        .expect("a valid request");
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let step = engine.schedule();
    for plan in step.plans() {
        runner.run(plan, &mut output).expect("the whole table");
    }
    engine.apply(step, &mut output, &mut events);
    let step = engine.schedule();
    // The query at 40 sees 0..5 and 31..41, which are in blocks 0, 1, and 7 to 10.
    for missing in 0..11 {
        let mut plan = step.plans().next().expect("a sequence generates");
        let mut tables = plan.block_tables.to_vec();
        tables[plan.sequences[0].block_table.start as usize + missing] = BlockId::NONE;
        plan.block_tables = &tables;
        output.sampled.clear();
        let result = runner.run(plan, &mut output);
        if (2..7).contains(&missing) {
            assert_eq!(result, Ok(()), "block {missing}");
        } else {
            let error = result.expect_err("seen").to_string();
            let place = format!("positions {} on", missing * BLOCK_SIZE as usize);
            assert!(
                error.contains("request 7") && error.contains(&place),
                "{error}"
            );
        }
    }
}
