//! Models of mixed windows, whose layers have KV cache blocks by how far they see.

use std::num::NonZeroU32;
use std::path::Path;
use std::slice;

use inflight_base::{Blocks, SequenceId, TokenId, Tokens};
use inflight_device::KvDtype;
use inflight_engine::{
    BlockReuse, CapacityPolicy, Engine, EngineConfig, NewRequest, PromptLookup, Sampled,
    Speculation, StepOutput, StepPlan,
};
use inflight_runner::{GroupedLayers, KvFile, ModelSource};

use crate::batching::{each_as_alone, requests_that_share, requests_with_beams};
use crate::rank_processes::{PATIENT, PROGRAM, load};
use crate::ranks::{assert_ranks_change_nothing, assert_same, together};
use crate::stages::{TWO_BY_TWO, assert_stages_change_nothing, stages};
use crate::support::{Setup, fixture, serve};
use inflight_reference_device::{Reference, ReferenceOptions};

/// Models with their own windows, and one with those of the user.
const MODELS: [(&str, &[u32]); 5] = [
    ("gemma3", &[]),
    ("gpt-oss", &[]),
    ("qwen3-windows", &[]),
    ("exaone4", &[]),
    ("llama3", &[96, 13]),
];

pub fn setup(name: &'static str, windows: &'static [u32]) -> Setup {
    Setup {
        windows,
        groups_of: Some(name),
        max_num_tokens: 37,
        block_size: 4,
        num_blocks: 320,
        enable_chunked_context: true,
        reuse: BlockReuse::PartialBlocks,
        num_threads: 2,
        ..Setup::default()
    }
}

fn num_groups(setup: &Setup) -> u32 {
    let grouped = setup.grouped_layers();
    grouped.map_or(1, |it| it.layers().num_groups() as u32)
}

#[test]
fn a_request_is_the_same_with_blocks_by_windows() {
    for (name, windows) in MODELS {
        let chunked = setup(name, windows);
        let happened = each_as_alone(name, &chunked, &requests_that_share());
        assert!(happened.num_holes > 50, "{name}: {happened:?}");
        assert!(
            happened.num_copies > 5 && happened.num_chunks > 3,
            "{name}: {happened:?}"
        );
        let paused = Setup {
            policy: CapacityPolicy::MaxUtilization,
            num_blocks: 24 * num_groups(&chunked),
            num_host_blocks: 60,
            kv_dtype: KvDtype::Int8,
            speculation: Some(Speculation {
                max_draft_tokens: 3,
                prompt_lookup: Some(PromptLookup { min: 1, max: 3 }),
                has_draft_model: false,
                recomputes_drafts: false,
            }),
            ..chunked.clone()
        };
        let happened = each_as_alone(name, &paused, &requests_that_share());
        assert!(happened.num_pauses > 0, "{name}: {happened:?}");
        assert!(
            happened.num_offloaded > 0 && happened.num_onboarded > 0,
            "{name}: {happened:?}"
        );
    }
}

#[test]
fn beams_are_the_same_with_blocks_by_windows() {
    let mut num_pauses = 0;
    for (name, windows) in MODELS {
        let roomy = Setup {
            max_beam_width: 4,
            num_sinks: 1,
            num_blocks: 900,
            ..setup(name, windows)
        };
        let paused = Setup {
            policy: CapacityPolicy::MaxUtilization,
            num_blocks: 34 * num_groups(&roomy),
            ..roomy.clone()
        };
        // Two beams each, so that more requests are in a step, and they grow for long.
        let mut narrow = requests_with_beams();
        for request in &mut narrow {
            let search = request.sampling.beam_search.iter_mut();
            search.for_each(|search| search.width = 2);
            request.sampling.end_ids.clear();
            request.max_new_tokens = 30;
        }
        for (setup, requests) in [(roomy, requests_with_beams()), (paused, narrow)] {
            let happened = each_as_alone(name, &setup, &requests);
            num_pauses += happened.num_pauses;
            assert!(happened.num_holes > 50, "{name}: {happened:?}");
        }
    }
    assert!(num_pauses > 2, "{num_pauses} pauses");
}

#[test]
fn a_runner_reads_no_block_that_its_group_does_not_see() {
    for (name, windows) in MODELS {
        let moving = Setup {
            moves_blocks: true,
            num_runner_blocks: Some(330),
            reuse: BlockReuse::Off,
            ..setup(name, windows)
        };
        let happened = each_as_alone(name, &moving, &requests_that_share());
        assert!(happened.num_moves > 50, "{name}: {happened:?}");
    }
}

#[test]
fn the_reference_device_keeps_the_same_groups() {
    let setup = setup("gpt-oss", &[]);
    let requests = requests_that_share();
    let grouped = setup.load_on::<Reference>(&fixture("gpt-oss"), &ReferenceOptions::default());
    let in_one = Setup {
        groups_of: None,
        ..setup.clone()
    };
    let one = in_one.load_on::<Reference>(&fixture("gpt-oss"), &ReferenceOptions::default());
    let [ours, theirs] = [(grouped, &setup), (one, &in_one)]
        .map(|(mut runner, setup)| serve(&mut runner, setup, &requests).0);
    assert!(ours == theirs);
}

/// The quick tier has one of these.
mod ranks_keep_the_same_groups {
    #[test]
    fn share_0_of_4() {
        super::ranks_keep_groups("gemma3", "chunks");
    }

    #[test]
    fn share_1_of_4() {
        super::ranks_keep_groups("gemma3", "pauses");
    }

    #[test]
    fn share_2_of_4() {
        super::ranks_keep_groups("gpt-oss", "chunks");
    }

    #[test]
    fn share_3_of_4() {
        super::ranks_keep_groups("gpt-oss", "pauses");
    }
}

fn ranks_keep_groups(name: &'static str, what: &str) {
    let dir = fixture(name);
    let chunked = setup(name, &[]);
    let setup = match what {
        "pauses" => with_pauses(KvDtype::Bf16, &chunked),
        _ => chunked,
    };
    let requests = requests_that_share();
    let happened = assert_ranks_change_nothing(&dir, what, &setup, &requests);
    assert!(happened.num_holes > 50, "{name}: {happened:?}");
    match what {
        "pauses" => assert!(
            happened.num_pauses > 0 && happened.num_onboarded > 0,
            "{name}: {happened:?}"
        ),
        _ => assert!(happened.num_copies > 5, "{name}: {happened:?}"),
    }
    // A stage of one layer has none of the other groups.
    let source = ModelSource::open(&dir).expect("the fixture opens");
    let each = stages(source.spec().num_layers());
    let grids = [stages(2), each, TWO_BY_TWO];
    assert_stages_change_nothing(&dir, what, &setup, &requests, &grids);
    let processes = load(Path::new(PROGRAM), &dir, &setup, TWO_BY_TWO, PATIENT);
    let mut processes = processes.expect("it loads");
    let (served, _) = serve(&mut processes, &setup, &requests);
    let expected = together(&dir, &setup, &requests, 2);
    assert_same(&format!("{name}, {what}, processes"), &expected, &served);
}

/// The same with all layers in one group, and with room for every request.
pub fn in_one(grouped: &Setup) -> Setup {
    Setup {
        groups_of: None,
        kv_dtype: grouped.kv_dtype,
        ..setup("gemma3", &[])
    }
}

pub fn with_pauses(kv_dtype: KvDtype, chunked: &Setup) -> Setup {
    Setup {
        policy: CapacityPolicy::MaxUtilization,
        num_blocks: 24 * num_groups(chunked),
        num_host_blocks: 60,
        kv_dtype,
        ..chunked.clone()
    }
}

/// An engine serves one request. Returns its tokens, the tokens of its prompt that were reused, and the most blocks
/// that it held: while it computed its context, and afterwards.
fn serve_one(
    engine: &mut Engine,
    mut run: impl FnMut(StepPlan<'_>, &mut StepOutput),
    request: NewRequest,
) -> (Vec<TokenId>, u64, [Blocks; 2]) {
    let mut most = [Blocks::ZERO; 2];
    let (mut tokens, mut num_reused) = (Vec::new(), 0);
    engine.add(request).expect("it fits");
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    while !engine.is_idle() {
        output.clear();
        let step = engine.schedule();
        let stats = engine.stats().expect("it is active");
        num_reused = stats.reuse.num_reused_tokens;
        let phase = usize::from(!tokens.is_empty());
        most[phase] = most[phase].max(stats.kv.num_used);
        for plan in step.plans() {
            run(plan, &mut output);
        }
        tokens.extend(output.sampled.iter().map(|(_, sampled)| match sampled {
            Sampled::Token(token) => *token,
            other => panic!("{other:?}"),
        }));
        engine.apply(step, &mut output, &mut events);
        engine.check_integrity();
    }
    (tokens, num_reused, most)
}

/// The formula: of each layer, the positions that it sees.
fn needed(windows: &[Option<NonZeroU32>], len: u32) -> u64 {
    let seen = windows
        .iter()
        .map(|window| window.map_or(len, |it| it.get().min(len)));
    seen.map(u64::from).sum()
}

#[test]
fn a_long_sequence_takes_the_memory_that_its_layers_see() {
    const LEN: u32 = 32 << 10;
    let every = |num_layers: u32, interval: u32, window: u32| -> Vec<_> {
        let layers = 1..=num_layers;
        let is_whole = |layer: u32| layer.is_multiple_of(interval);
        layers
            .map(|layer| NonZeroU32::new(window).filter(|_| !is_whole(layer)))
            .collect()
    };
    for (name, windows) in [
        ("Gemma 3 27B", every(62, 6, 1024)),
        ("Gemma 3 4B", every(34, 6, 1024)),
        ("GPT-OSS 20B", every(24, 2, 128)),
        ("Gemma 2 9B", every(42, 2, 4096)),
    ] {
        let grouped = GroupedLayers::new(
            windows.iter().map(|&window| (window, 1)),
            slice::from_ref(&(0..windows.len())),
            Tokens(0),
            Tokens(LEN),
        );
        let mut engine = Engine::new(EngineConfig {
            max_seq_len: Tokens(LEN),
            num_blocks: Blocks(1 << 14),
            groups: grouped.windows(),
            ..EngineConfig::default()
        });
        let request = NewRequest::new(SequenceId(1), vec![7; LEN as usize - 40], Tokens(40));
        let sample = |plan: StepPlan<'_>, output: &mut StepOutput| {
            let sampling = plan.sequences.iter().filter(|planned| planned.samples);
            let sampled = sampling.map(|planned| (planned.slot, Sampled::Token(5)));
            output.sampled.extend(sampled);
        };
        let (_, _, most) = serve_one(&mut engine, sample, request);
        let layers = grouped.layers().layers_per_group() as u64;
        let block_size = u64::from(engine.config().block_size.tokens().0);
        for blocks in most {
            let taken = u64::from(blocks.0) * layers * block_size;
            let ratio = taken as f64 / needed(&windows, LEN) as f64;
            assert!((0.99..=1.1).contains(&ratio), "{name}: {ratio}");
        }
    }
}

#[test]
fn blocks_of_all_groups_are_found_after_a_restart() {
    let setup = Setup {
        num_host_blocks: 100,
        ..setup("gpt-oss", &[])
    };
    let dir = std::env::temp_dir().join(format!("inflight-kv-groups-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let file = KvFile::new(dir.join("model.kv"), "a model".to_owned());
    let request = || {
        let prompt: Vec<_> = (0..60).map(|i| 3 + i * 37 % 150).collect();
        NewRequest::new(SequenceId(1), prompt, Tokens(9))
    };
    let mut results = Vec::new();
    for _ in 0..2 {
        let mut runner = setup.load("gpt-oss");
        let restored = file.restore(&setup.engine_config(), &mut *runner);
        let mut engine = restored.expect("our own file");
        let run = |plan: StepPlan<'_>, output: &mut StepOutput| {
            runner.run(plan, output).expect("the step runs");
        };
        results.push(serve_one(&mut engine, run, request()));
        file.keep(&mut engine, &mut *runner).expect("it is written");
    }
    let _ = std::fs::remove_dir_all(&dir);
    assert_eq!((results[0].1, results[1].1), (0, 59));
    assert_eq!(results[0].0, results[1].0);
}
