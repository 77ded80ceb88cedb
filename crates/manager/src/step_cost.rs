//! What a step of a runner costs, measured before the first request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::runner_thread::run;
use inflight_base::{Blocks, LoadError, SequenceId, StepError, TokenId, Tokens};
use inflight_engine::{
    BlockReuse, DraftOptions, Engine, EngineConfig, Event, NewRequest, StepCost, StepOutput,
};
use inflight_runner::Runner;

/// The most sequences of a step: where the line between few tokens and many is straight on all processors.
const MAX_SEQUENCES: u32 = 8;

/// How often each step is computed. Other programs can only make one slower, so the fastest counts.
const NUM_ROUNDS: u32 = 5;

/// When no further round begins.
const MAX_DURATION: Duration = Duration::from_secs(3);

/// The tokens of the prompt that a draft model catches up on.
const NUM_PROMPT_TOKENS: u32 = 64;

/// Measures what decides how many drafts are worth their price: generation steps of one token and of many drafts, and
/// the passes of the draft model, if there is one. Nothing if there can be no drafts.
///
/// The KV cache has other content afterwards.
///
/// # Errors
/// The runner failed.
pub fn measure_costs(config: &mut EngineConfig, runner: &mut dyn Runner) -> Result<(), LoadError> {
    config.step_cost = measure_step_cost(config, runner)?;
    config.draft_cost = measure_draft_cost(config, runner)?;
    Ok(())
}

/// Measures generation steps of one token and of many drafts; `None` if there can be no drafts.
///
/// The KV cache has other content afterwards.
///
/// # Errors
/// The runner failed.
pub fn measure_step_cost(
    config: &EngineConfig,
    runner: &mut dyn Runner,
) -> Result<Option<StepCost>, LoadError> {
    let Some(speculation) = config.speculation else {
        return Ok(None);
    };
    let mut rehearsal = Rehearsal::new(config, runner);
    let started = Instant::now();
    for _ in 0..NUM_ROUNDS {
        let Some(first_token) = rehearsal.generate(1, 1, Drafts::None).map_err(failed)? else {
            return Ok(None);
        };
        // The output begins with this token, so that the drafts behind it are computed, right or wrong.
        let mut expected = vec![first_token; 1 + speculation.max_draft_tokens as usize];
        expected[1..].fill(0);
        let num_sequences = config.max_num_requests.min(MAX_SEQUENCES);
        rehearsal
            .generate(num_sequences, 1, Drafts::Given(&expected))
            .map_err(failed)?;
        if started.elapsed() > MAX_DURATION {
            break;
        }
    }
    let fastest = rehearsal.fastest;
    let ends = fastest.first_key_value().zip(fastest.last_key_value());
    let cost = ends.and_then(|((&few, &few_ns), (&many, &many_ns))| {
        StepCost::through((few, few_ns), (many, many_ns))
    });
    if let Some(cost) = cost {
        log::info!(
            "a step takes {:.3} ms, and {:.3} ms for each of its tokens: drafts that cost more than they are worth are not made",
            cost.fixed_ns as f64 / 1e6,
            cost.per_token_ns as f64 / 1e6,
        );
    }
    Ok(cost)
}

/// Measures passes of the draft model, over one token and over a prompt that it has to catch up on; `None` if there is
/// none.
fn measure_draft_cost(
    config: &EngineConfig,
    runner: &mut dyn Runner,
) -> Result<Option<StepCost>, LoadError> {
    let Some(speculation) = config.speculation.filter(|it| it.has_draft_model) else {
        return Ok(None);
    };
    let num_drafts = speculation.max_draft_tokens;
    let longest = config.max_seq_len.0.saturating_sub(2 + num_drafts);
    let long = NUM_PROMPT_TOKENS.min(longest).min(config.max_num_tokens.0);
    let mut fastest = BTreeMap::new();
    let started = Instant::now();
    for _ in 0..NUM_ROUNDS {
        for num_prompt_tokens in [1, long.max(2)] {
            let mut rehearsal = Rehearsal::new(config, runner);
            rehearsal
                .generate(1, num_prompt_tokens, Drafts::Made)
                .map_err(failed)?;
            let time = rehearsal.drafting.as_nanos() as u64;
            let fastest = fastest.entry(num_prompt_tokens).or_insert(time);
            *fastest = time.min(*fastest);
        }
        if started.elapsed() > MAX_DURATION {
            break;
        }
    }
    let ends = fastest.first_key_value().zip(fastest.last_key_value());
    let cost = ends.and_then(|((&few, &few_ns), (&many, &many_ns))| {
        // The first pass computes the prompt and the first token, each pass after it one token.
        StepCost::through((few + num_drafts, few_ns), (many + num_drafts, many_ns))
    });
    let cost = cost.map(|all| StepCost {
        fixed_ns: all.fixed_ns / u64::from(num_drafts),
        ..all
    });
    if let Some(cost) = cost {
        log::info!(
            "a pass of the draft model takes {:.3} ms, and {:.3} ms for each of its tokens",
            cost.fixed_ns as f64 / 1e6,
            cost.per_token_ns as f64 / 1e6,
        );
    }
    Ok(cost)
}

fn failed(error: StepError) -> LoadError {
    LoadError::Resource(format!("{error}, in a step at load"))
}

/// The drafts of a request without a user.
#[derive(Clone, Copy)]
enum Drafts<'a> {
    None,
    /// From this expected output.
    Given(&'a [TokenId]),
    /// By the draft model.
    Made,
}

/// Requests without a user.
struct Rehearsal<'a> {
    engine: Engine,
    runner: &'a mut dyn Runner,
    output: StepOutput,
    /// By the tokens of a generation step, its shortest time in nanoseconds.
    fastest: BTreeMap<u32, u64>,
    /// How long the drafts of the last step were made.
    drafting: Duration,
}

impl<'a> Rehearsal<'a> {
    fn new(config: &EngineConfig, runner: &'a mut dyn Runner) -> Self {
        Self {
            engine: Engine::new(EngineConfig {
                num_micro_batches: 1,
                plan_ahead: false,
                reuse: BlockReuse::Off,
                num_state_snapshots: 0,
                num_host_blocks: Blocks::ZERO,
                record_requests: false,
                step_cost: None,
                draft_cost: None,
                ..config.clone()
            }),
            runner,
            output: StepOutput::default(),
            fastest: BTreeMap::new(),
            drafting: Duration::ZERO,
        }
    }

    /// Runs the context phase of `num_sequences` prompts of the given length, and one generation step. Returns the
    /// first generated token.
    fn generate(
        &mut self,
        num_sequences: u32,
        num_prompt_tokens: u32,
        drafts: Drafts<'_>,
    ) -> Result<Option<TokenId>, StepError> {
        let (expected, max_draft_tokens) = match drafts {
            Drafts::None => (&[][..], Some(0)),
            Drafts::Given(expected) => (expected, None),
            Drafts::Made => (&[][..], None),
        };
        let speculation = self.engine.config().speculation;
        let num_drafts = speculation.map_or(0, |it| it.max_draft_tokens);
        let num_new = Tokens(2 + num_drafts + expected.len() as u32);
        let num_new = num_new.min(self.engine.config().max_seq_len - Tokens(1));
        for id in 0..num_sequences {
            let request = NewRequest {
                drafts: DraftOptions {
                    expected: expected.into(),
                    max_draft_tokens,
                },
                ..NewRequest::new(
                    SequenceId(u64::from(id)),
                    vec![0; num_prompt_tokens as usize],
                    num_new,
                )
            };
            if self.engine.add(request).is_err() {
                break;
            }
        }
        let mut events = Vec::new();
        while !self.engine.is_idle() {
            let mut step = self.engine.schedule();
            let started = Instant::now();
            self.runner.make_drafts(&mut step)?;
            self.drafting = started.elapsed();
            let mut computed = run(self.runner, step, std::mem::take(&mut self.output))?;
            let planned = computed.step.sequences();
            let is_generation = planned.iter().all(|it| it.kv_len > num_prompt_tokens);
            if is_generation {
                let tokens = planned.iter().map(|it| 1 + it.num_drafts).sum();
                let time = computed.timing.as_nanos() as u64;
                let fastest = self.fastest.entry(tokens).or_insert(time);
                *fastest = time.min(*fastest);
            }
            self.engine
                .apply(computed.step, &mut computed.output, &mut events);
            self.output = computed.output;
            if is_generation {
                (0..num_sequences).for_each(|id| {
                    self.engine.cancel(SequenceId(u64::from(id)));
                });
            }
        }
        Ok(events.iter().find_map(|event| match event {
            Event::Token(_, token) => Some(*token),
            _ => None,
        }))
    }
}
