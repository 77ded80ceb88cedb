//! What a step of a runner costs, measured before the first request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::base::{Blocks, LoadError, SequenceId, StepError, TokenId, Tokens};
use crate::engine::{
    BlockReuse, DraftOptions, Engine, EngineConfig, Event, NewRequest, StepCost, StepOutput,
};
use crate::manager::runner_thread::compute;
use crate::runner::Runner;

/// The most sequences of a step: where the line between few tokens and many is straight on all processors.
const MAX_SEQUENCES: u32 = 8;

/// How often each step is computed. Other programs can only make one slower, so the fastest counts.
const NUM_ROUNDS: u32 = 5;

/// When no further round begins.
const MAX_DURATION: Duration = Duration::from_secs(3);

/// Measures generation steps of one token and of many drafts; `None` if there can be no drafts.
///
/// The KV cache has other content afterwards.
///
/// # Errors
/// The runner failed.
pub fn measure_step_cost(
    config: &EngineConfig,
    runner: &mut Runner,
) -> Result<Option<StepCost>, LoadError> {
    let Some(speculation) = config.speculation else {
        return Ok(None);
    };
    let mut rehearsal = Rehearsal {
        engine: Engine::new(EngineConfig {
            num_micro_batches: 1,
            plan_ahead: false,
            reuse: BlockReuse::Off,
            num_host_blocks: Blocks::ZERO,
            record_requests: false,
            step_cost: None,
            ..config.clone()
        }),
        runner,
        output: StepOutput::default(),
        fastest: BTreeMap::new(),
    };
    let failed = |error: StepError| LoadError::Resource(format!("{error}, in a step at load"));
    let started = Instant::now();
    for _ in 0..NUM_ROUNDS {
        let Some(first_token) = rehearsal.generate(1, &[]).map_err(failed)? else {
            return Ok(None);
        };
        // The output begins with this token, so that the drafts behind it are computed, right or wrong.
        let mut expected = vec![first_token; 1 + speculation.max_draft_tokens as usize];
        expected[1..].fill(0);
        let num_sequences = config.max_num_requests.min(MAX_SEQUENCES);
        rehearsal
            .generate(num_sequences, &expected)
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

/// Requests without a user.
struct Rehearsal<'a> {
    engine: Engine,
    runner: &'a mut Runner,
    output: StepOutput,
    /// By the tokens of a generation step, its shortest time in nanoseconds.
    fastest: BTreeMap<u32, u64>,
}

impl Rehearsal<'_> {
    /// Computes the prompts of `num_sequences`, of a token each, and one generation step. Returns their first token.
    fn generate(
        &mut self,
        num_sequences: u32,
        expected: &[TokenId],
    ) -> Result<Option<TokenId>, StepError> {
        let num_new = Tokens(2 + expected.len() as u32);
        let num_new = num_new.min(self.engine.config().max_seq_len - Tokens(1));
        for id in 0..num_sequences {
            let request = NewRequest {
                drafts: DraftOptions {
                    expected: expected.into(),
                    ..DraftOptions::default()
                },
                ..NewRequest::new(SequenceId(u64::from(id)), vec![0], num_new)
            };
            if self.engine.add(request).is_err() {
                break;
            }
        }
        let mut events = Vec::new();
        while !self.engine.is_idle() {
            let step = self.engine.schedule();
            let mut computed = compute(self.runner, step, &[], std::mem::take(&mut self.output))?;
            let planned = computed.step.sequences();
            let is_generation = planned.iter().all(|it| it.kv_len > 1);
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
