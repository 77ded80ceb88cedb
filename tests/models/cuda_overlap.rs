//! Steps that are launched before the tokens of the last one are known: the same answers, without leaks.

use std::sync::Arc;

use inflight_base::{Blocks, SequenceId, StepError, TokenId, Tokens};
use inflight_cuda_stand_in::{StandIn, count, set};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::{
    CapacityPolicy, EngineConfig, Event, NewRequest, OutputOptions, Speculation,
};
use inflight_manager::BatchManager;
use inflight_sampling::{FinishReason, SamplingParams, TokenLogProbs};

use crate::cuda::{on_stand_in, sampled_requests};
use crate::cuda_faults::without_leaks;
use crate::devices::setups;
use crate::support::{Request, Setup, fixture};

/// A request, and when the host ends it.
#[derive(Clone, Debug)]
struct Asked {
    request: Request,
    /// Two tokens that end it, as a stop word that the host finds.
    stop: Option<[TokenId; 2]>,
    /// It is cancelled when it has this many tokens.
    cancelled_at: Option<usize>,
}

impl From<Request> for Asked {
    fn from(request: Request) -> Self {
        Self {
            request,
            stop: None,
            cancelled_at: None,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<TokenId>,
    log_probs: Vec<TokenLogProbs>,
    end: Option<FinishReason>,
}

fn options(max_graphs: usize) -> CudaOptions {
    CudaOptions {
        deterministic: true,
        max_graphs,
        ..CudaOptions::default()
    }
}

fn manager(setup: &Setup, options: &CudaOptions, plan_ahead: bool) -> BatchManager {
    let config = EngineConfig {
        plan_ahead,
        ..setup.engine_config()
    };
    let runner = setup.load_on::<Cuda>(&fixture("llama3"), options);
    BatchManager::new(config, runner).expect("no thread is needed")
}

fn new_request(id: usize, request: &Request) -> NewRequest {
    let prompt = request.prompt.clone();
    let max_new_tokens = Tokens(request.max_new_tokens);
    NewRequest {
        sampling: Arc::new(request.sampling.clone()),
        outputs: request.outputs,
        drafts: request.drafts.clone(),
        ..NewRequest::new(SequenceId(id as u64), prompt, max_new_tokens)
    }
}

/// Serves requests to their ends. Returns their answers, and in how many steps the host knew fewer tokens than were
/// sampled when it launched the next step.
fn serve(manager: &mut BatchManager, asked: &[Asked]) -> Result<(Vec<Answer>, usize), StepError> {
    let mut answers = vec![Answer::default(); asked.len()];
    let mut events = Vec::new();
    let (mut num_steps, mut num_added, mut num_ahead) = (0, 0, 0);
    let mut is_one_out = false;
    while num_added < asked.len() || !manager.is_idle() {
        for (id, asked) in asked.iter().enumerate() {
            if asked.request.arrival == num_steps {
                let added = manager.add(new_request(id, &asked.request));
                added.expect("a valid request");
                num_added += 1;
            }
        }
        let before = count("FAIL_LAUNCH");
        manager.launch()?;
        let has_launched = count("FAIL_LAUNCH") > before;
        num_ahead += usize::from(has_launched && is_one_out);
        let landed = manager.land(&mut events)?;
        is_one_out = has_launched && (landed.is_none() || is_one_out);
        for event in events.drain(..) {
            let id = event.sequence_id();
            let (asked, answer) = (&asked[id.index()], &mut answers[id.index()]);
            assert_eq!(answer.end, None, "{event:?} after the end");
            match event {
                Event::Token(_, token) => {
                    answer.tokens.push(token);
                    let num_tokens = answer.tokens.len();
                    if asked
                        .stop
                        .is_some_and(|stop| answer.tokens.ends_with(&stop))
                    {
                        let reason = FinishReason::StopWords;
                        // If the token is the last one in any case, it has ended already.
                        manager.finish(id, Tokens(num_tokens as u32), reason);
                        answer.end = Some(reason);
                    } else if asked.cancelled_at == Some(num_tokens) {
                        manager.cancel(id);
                        answer.end = Some(FinishReason::Cancelled);
                    }
                }
                Event::ExtraOutputs(_, outputs) => answer.log_probs.extend(outputs.log_probs),
                Event::Finished(_, reason) => answer.end = Some(reason),
                Event::Admitted(..) | Event::Paused(_) | Event::Hypotheses(..) => {}
            }
        }
        num_steps += 1;
        assert!(num_steps < 10_000, "the requests do not end");
    }
    manager.settle(&mut events)?;
    assert_eq!(events, [], "what happens after the end");
    assert_eq!(manager.kv_usage().num_used, Blocks(0), "blocks are lost");
    Ok((answers, num_ahead))
}

/// Requests of which nothing but the token is wanted, greedy and with seeds.
fn plain_requests() -> Vec<Request> {
    let changes: [fn(&mut SamplingParams); 6] = [
        |params| params.temperature = 0.0,
        |_| {},
        |params| params.top_k = 5,
        |params| params.top_p = 0.9,
        |params| (params.min_p, params.top_k) = (0.05, 40),
        |params| params.temperature = 0.0,
    ];
    let request = |(index, change): (usize, fn(&mut SamplingParams))| {
        let prompt: Vec<_> = (0..7 + 9 * index as u32)
            .map(|i| (i * 37 + 11) % 90 + 3)
            .collect();
        let mut sampling = SamplingParams {
            temperature: 0.8,
            seed: 40 + index as u64,
            ..SamplingParams::default()
        };
        change(&mut sampling);
        Request {
            sampling,
            arrival: 2 * index,
            ..Request::greedy(&prompt, 3 + 5 * index as u32)
        }
    };
    changes.into_iter().enumerate().map(request).collect()
}

/// The same requests, ended in the different ways that there are. `answers` are those of the whole requests.
fn ended_early(requests: &[Request], answers: &[Answer]) -> Vec<Asked> {
    let ended = requests.iter().zip(answers).enumerate();
    let ended = ended.map(|(index, (request, answer))| {
        let mut asked = Asked::from(request.clone());
        let half = answer.tokens.len() / 2;
        match index % 4 {
            0 => asked.request.max_new_tokens = 1,
            1 => asked.request.sampling.end_ids = vec![answer.tokens[half]],
            2 => asked.stop = Some([answer.tokens[half - 1], answer.tokens[half]]),
            _ => asked.cancelled_at = Some(half),
        }
        asked
    });
    ended.collect()
}

/// Sequences pause.
fn tight() -> Setup {
    Setup {
        policy: CapacityPolicy::MaxUtilization,
        num_blocks: 14,
        max_num_requests: 4,
        max_num_tokens: 24,
        block_size: 8,
        enable_chunked_context: true,
        ..Setup::default()
    }
}

#[test]
fn overlap_changes_no_answer() {
    let test = "cuda_overlap::overlap_changes_no_answer";
    on_stand_in(StandIn::new().set("SEED", 5), test, || {
        let tight = tight();
        let setups = setups().into_iter().map(|(what, setup)| {
            let speculation: Option<Speculation> = None;
            (
                what,
                Setup {
                    speculation,
                    ..setup
                },
            )
        });
        let grouped = Setup {
            windows: &[96, 13],
            groups_of: Some("llama3"),
            num_blocks: 28,
            ..tight.clone()
        };
        for (what, setup) in setups.chain([("pauses", tight), ("groups of layers", grouped)]) {
            let all = |requests: Vec<Request>| -> Vec<Asked> {
                requests.into_iter().map(Asked::from).collect()
            };
            let whole = all(plain_requests());
            let mut without = manager(&setup, &options(0), false);
            let (expected, num_ahead) = serve(&mut without, &whole).expect("nothing fails");
            assert_eq!(num_ahead, 0, "{what}");
            let ended = ended_early(&plain_requests(), &expected);
            let (expected_ended, _) = serve(&mut without, &ended).expect("nothing fails");
            for (asked, answer) in ended.iter().zip(&expected_ended) {
                let is_end_id = !asked.request.sampling.end_ids.is_empty();
                assert_eq!(answer.end == Some(FinishReason::EndId), is_end_id, "{what}");
            }
            for max_graphs in [0, 64] {
                let mut with = manager(&setup, &options(max_graphs), true);
                let (answers, num_ahead) = serve(&mut with, &whole).expect("nothing fails");
                assert_eq!(answers, expected, "{what}, {max_graphs} graphs");
                assert!(num_ahead > 10, "{what}: {num_ahead} steps ahead");
                let (answers, _) = serve(&mut with, &ended).expect("nothing fails");
                assert_eq!(answers, expected_ended, "{what}, {max_graphs} graphs");
            }
        }
    });
}

#[test]
fn requests_that_need_the_host_are_served_beside_others() {
    let test = "cuda_overlap::requests_that_need_the_host_are_served_beside_others";
    on_stand_in(StandIn::new().set("SEED", 9), test, || {
        let mut requests = plain_requests();
        requests.extend(sampled_requests());
        let last = requests.len() - 1;
        requests[last].outputs = OutputOptions {
            log_probs: Some(2),
            ..OutputOptions::default()
        };
        // The first of them are alone for a while.
        for (index, request) in requests.iter_mut().enumerate() {
            request.arrival = 3 * index;
        }
        let asked: Vec<_> = requests.into_iter().map(Asked::from).collect();
        for (what, setup) in setups() {
            let [without, with] = [false, true].map(|plan_ahead| {
                let mut manager = manager(&setup, &options(64), plan_ahead);
                serve(&mut manager, &asked).expect("nothing fails")
            });
            assert_eq!(with.0, without.0, "{what}");
            assert!(!with.0[last].log_probs.is_empty(), "{what}");
            let can_overlap = setup.speculation.is_none();
            assert_eq!(with.1 > 0, can_overlap, "{what}: {} steps ahead", with.1);
        }
    });
}

#[test]
fn a_step_is_launched_before_the_tokens_of_the_last_one_are_read() {
    let test = "cuda_overlap::a_step_is_launched_before_the_tokens_of_the_last_one_are_read";
    on_stand_in(StandIn::new(), test, || {
        const NUM_TOKENS: u32 = 12;
        let mut manager = manager(&Setup::default(), &options(64), true);
        let request = Request::greedy(&[3, 4, 5], NUM_TOKENS);
        manager.add(new_request(0, &request)).expect("it is valid");
        let mut events = Vec::new();
        let tokens = |events: &[Event]| {
            let tokens = events.iter().filter(|it| matches!(it, Event::Token(..)));
            tokens.count() as u32
        };
        for step in 1..=NUM_TOKENS {
            let launches = count("FAIL_LAUNCH");
            manager.launch().expect("nothing fails");
            assert!(count("FAIL_LAUNCH") > launches, "step {step} is launched");
            assert_eq!(
                tokens(&events),
                step.saturating_sub(2),
                "before step {step}"
            );
            let num_run = count("LOSE_DEVICE");
            manager.land(&mut events).expect("nothing fails");
            let num_run = count("LOSE_DEVICE") - num_run;
            assert_eq!(num_run > 0, step > 1, "operations while step {step} is out");
            assert_eq!(tokens(&events), step - 1, "after the launch of step {step}");
        }
        // Nothing is launched behind the last step, which has not run to its end yet.
        let [launches, num_run] = ["FAIL_LAUNCH", "LOSE_DEVICE"].map(count);
        manager.launch().expect("nothing fails");
        manager.land(&mut events).expect("nothing fails");
        assert_eq!(count("FAIL_LAUNCH"), launches);
        assert!(count("LOSE_DEVICE") > num_run);
        assert_eq!(tokens(&events), NUM_TOKENS);
        assert!(manager.is_idle());
    });
}

#[test]
fn a_failing_step_fails_the_one_behind_it() {
    without_leaks(
        "cuda_overlap::a_failing_step_fails_the_one_behind_it",
        || assert_steps_fail("FAIL_LAUNCH", "LAUNCH_OUT_OF_RESOURCES"),
    );
}

#[test]
fn a_lost_gpu_fails_both_steps_that_it_has() {
    let test = "cuda_overlap::a_lost_gpu_fails_both_steps_that_it_has";
    on_stand_in(StandIn::new(), test, || {
        assert_steps_fail("LOSE_DEVICE", "ILLEGAL_ADDRESS");
    });
}

/// Lets events of some numbers fail. All requests fail with the error, and the next load serves them.
fn assert_steps_fail(fault: &str, error: &str) {
    let asked: Vec<_> = plain_requests().into_iter().map(Asked::from).collect();
    let setup = Setup::default();
    // A step with a graph has a single launch.
    for (max_graphs, failing) in [
        (64, 1),
        (64, 2),
        (64, 40),
        (0, 100),
        (0, 101),
        (0, 102),
        (0, 160),
    ] {
        let mut manager = manager(&setup, &options(max_graphs), true);
        set(fault, failing);
        let StepError(text) = serve(&mut manager, &asked).expect_err("a step fails");
        assert!(text.starts_with("GPU 0: "), "{text}");
        assert!(text.contains(error), "{text}");
        // The step behind it has no results.
        let mut events = Vec::new();
        let again = manager.settle(&mut events);
        assert!(again.is_err() || events.is_empty(), "{events:?}");
    }
    let mut manager = manager(&setup, &options(64), true);
    assert!(serve(&mut manager, &asked).is_ok());
}
