//! Real steps of the engine, and logits that are made up: the likeliest token depends on the one before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use inflight_base::{SequenceId, TokenId, Tokens};
use inflight_engine::{
    DraftOptions, Engine, EngineConfig, NewRequest, OutputOptions, Speculation, StepOutput,
};
use inflight_sampling::{
    BeamSearch, EarlyStopping, Guide, GuideCost, GuideTokens, LogProbs, SampleError, SamplingParams,
};

const VOCAB_SIZE: usize = 50;

/// The likeliest token after another.
fn next(token: TokenId) -> TokenId {
    (token * 7 + 3) % VOCAB_SIZE as TokenId
}

/// The logits after a token: the likeliest one, then those above it in order.
fn logits_after(token: TokenId) -> Vec<f32> {
    let rank = |id: usize| (id + VOCAB_SIZE - next(token) as usize) % VOCAB_SIZE;
    (0..VOCAB_SIZE).map(|id| -(rank(id) as f32)).collect()
}

/// The engine, and sampling in the place of a runner.
struct Sampling {
    engine: Engine,
    layout: StepLayout,
    sampling: StepSampling,
    threads: Pool,
    /// A token whose logits are not numbers.
    broken: Option<TokenId>,
}

impl Sampling {
    fn new(num_threads: usize) -> Self {
        let config = EngineConfig {
            max_beam_width: 2,
            speculation: Some(Speculation {
                max_draft_tokens: 4,
                prompt_lookup: None,
                has_draft_model: false,
                recomputes_drafts: false,
            }),
            ..EngineConfig::default()
        };
        let limits = RunnerLimits::of(&config);
        Self {
            engine: Engine::new(config),
            layout: StepLayout::new(&limits, None),
            sampling: StepSampling::new(VOCAB_SIZE, &limits, num_threads),
            threads: Pool::new(num_threads).expect("threads"),
            broken: None,
        }
    }

    fn add(&mut self, id: u64, prompt: &[TokenId], change: impl FnOnce(&mut NewRequest)) {
        let mut request = NewRequest::new(SequenceId(id), prompt.to_vec(), Tokens(8));
        change(&mut request);
        self.engine.add(request).expect("a valid request");
    }

    /// One step: its results, in the order of its sequences.
    fn step(&mut self) -> StepOutput {
        let step = self.engine.schedule();
        let mut output = StepOutput::default();
        for plan in step.plans() {
            self.layout.set(&plan);
            self.sampling.begin(&plan, &self.layout);
            let inputs = self.layout.inputs(&plan);
            let row = |&kept: &u32| {
                let token = inputs.token_ids[kept as usize];
                match self.broken == Some(token) {
                    true => vec![f32::NAN; VOCAB_SIZE],
                    false => logits_after(token),
                }
            };
            let kept: Vec<_> = inputs.kept_rows.iter().map(row).collect();
            let sampled = inputs.sampled_rows.iter();
            let mut logits = sampled
                .map(|&row| &kept[row as usize][..])
                .collect::<Vec<_>>()
                .concat();
            for context in self.layout.contexts() {
                let logits = kept[context.rows.clone()].concat();
                let outputs = self
                    .sampling
                    .context_outputs(&mut self.threads, context, logits);
                self.sampling.add_context_outputs(context.sequence, outputs);
            }
            let (threads, layout) = (&mut self.threads, &self.layout);
            let results = StepResults {
                logits: &mut logits,
                samples: &[],
            };
            self.sampling
                .sample(threads, &plan, layout, results, &mut output);
        }
        let result = output.clone();
        self.engine.apply(step, &mut output, &mut Vec::new());
        result
    }

    fn tokens(&mut self) -> Vec<Sampled> {
        let output = self.step();
        output.sampled.iter().map(|(_, sampled)| *sampled).collect()
    }
}

#[test]
fn each_sequence_gets_its_own_tokens_on_any_number_of_threads() {
    for num_threads in [1, 3] {
        let mut sampling = Sampling::new(num_threads);
        let mut last: Vec<TokenId> = (0..7).map(|id| 5 * id + 2).collect();
        for (id, &token) in last.iter().enumerate() {
            sampling.add(id as u64, &[1, 2, token], |_| {});
        }
        for _ in 0..4 {
            let expected: Vec<_> = last.iter().map(|&token| next(token)).collect();
            let tokens: Vec<_> = expected.iter().map(|&it| Sampled::Token(it)).collect();
            assert_eq!(sampling.tokens(), tokens);
            last = expected;
        }
    }
}

#[test]
fn drafts_are_accepted_until_one_is_wrong() {
    let mut sampling = Sampling::new(2);
    let chain: Vec<_> = std::iter::successors(Some(next(9)), |&token| Some(next(token)))
        .take(5)
        .collect();
    let mut expected = chain.clone();
    expected[3] += 1;
    sampling.add(0, &[9], |request| {
        request.drafts = DraftOptions {
            expected: expected.into(),
            ..DraftOptions::default()
        };
    });
    sampling.add(1, &[8], |_| {});
    let token = Sampled::Token;
    assert_eq!(sampling.tokens(), [token(chain[0]), token(next(8))]);
    // Two drafts are right, and the row of the third one's predecessor gives another token.
    let others = token(next(next(8)));
    let [_, a, b, c, _] = chain[..] else { panic!() };
    assert_eq!(sampling.tokens(), [token(a), token(b), token(c), others]);
}

#[test]
fn the_outputs_of_a_context_and_of_its_first_token_are_one() {
    let mut sampling = Sampling::new(2);
    let prompt = [4, 5, 6];
    sampling.add(0, &[7], |_| {});
    sampling.add(1, &prompt, |request| {
        request.outputs = OutputOptions {
            log_probs: Some(2),
            context_logits: true,
            generation_logits: true,
            ..OutputOptions::default()
        };
    });
    let output = sampling.step();
    let [(slot, outputs)] = &output.extra_outputs[..] else {
        panic!("{:?}", output.extra_outputs);
    };
    assert_eq!(*slot, output.sampled[1].0);
    let of_prompt = prompt.map(logits_after);
    assert_eq!(outputs.context_logits, of_prompt.concat());
    assert_eq!(outputs.generation_logits, of_prompt[2]);
    let log_probs = outputs.log_probs.as_ref().expect("they were asked for");
    assert_eq!(
        (log_probs.chosen.token, log_probs.chosen.rank),
        (next(6), 1)
    );
    // Later tokens have no context.
    let output = sampling.step();
    assert_eq!(output.extra_outputs.len(), 1);
    assert!(output.extra_outputs[0].1.context_logits.is_empty());
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_the_tokens_behind_each_row() {
    let prompt: Vec<_> = (0..150)
        .map(|n| (n * n + 3) % VOCAB_SIZE as TokenId)
        .collect();
    let expected = |num_top: usize| -> Vec<_> {
        let mut log_probs = LogProbs::new(VOCAB_SIZE);
        let of = |pair: &[TokenId]| {
            log_probs.keep(&logits_after(pair[0]));
            log_probs.of(pair[1], num_top as u32)
        };
        prompt.windows(2).map(of).collect()
    };
    for (num_threads, context_logits) in [(1, false), (3, false), (2, true)] {
        let mut sampling = Sampling::new(num_threads);
        for id in 0..2 {
            sampling.add(id, &prompt, |request| {
                request.outputs = OutputOptions {
                    context_logits,
                    prompt_log_probs: Some(id as u32),
                    ..OutputOptions::default()
                };
            });
        }
        let output = sampling.step();
        let rows = sampling.layout.contexts().iter();
        let most = rows.map(|context| context.rows.len()).max();
        assert_eq!(most, Some(if context_logits { 150 } else { 64 }));
        assert_eq!(output.extra_outputs.len(), 2);
        for (num_top, (_, outputs)) in output.extra_outputs.iter().enumerate() {
            assert_eq!(outputs.prompt_log_probs, expected(num_top));
            let num_rows = if context_logits { 150 } else { 0 };
            assert_eq!(outputs.context_logits.len(), num_rows * VOCAB_SIZE);
        }
    }
}

#[test]
fn logits_that_are_not_numbers_fail_only_their_sequence() {
    let mut sampling = Sampling::new(2);
    sampling.broken = Some(20);
    for (id, token) in [10, 20, 30].into_iter().enumerate() {
        sampling.add(id as u64, &[token], |_| {});
    }
    assert_eq!(
        sampling.tokens(),
        [
            Sampled::Token(next(10)),
            Sampled::Failed(SampleError::NotFinite),
            Sampled::Token(next(30))
        ]
    );
}

#[test]
fn the_candidates_of_beams_are_in_the_order_of_the_sequences() {
    let mut sampling = Sampling::new(3);
    let prompts = [11, 12, 13, 14];
    for (id, token) in prompts.into_iter().enumerate() {
        sampling.add(id as u64, &[token], |request| {
            request.sampling = Arc::new(SamplingParams {
                beam_search: Some(BeamSearch {
                    width: 2,
                    num_returned: 1,
                    length_penalty: 1.0,
                    early_stopping: EarlyStopping::Always,
                    diversity_rate: 0.0,
                }),
                ..SamplingParams::default()
            });
        });
    }
    let output = sampling.step();
    assert!(
        output
            .sampled
            .iter()
            .all(|(_, it)| *it == Sampled::Candidates)
    );
    let best = output
        .beam_candidates
        .iter()
        .map(|it| it.candidates[0].token);
    assert_eq!(best.collect::<Vec<_>>(), prompts.map(next));
}

/// A guide that allows everything, once it is told to be ready.
#[derive(Default)]
struct Slow {
    is_ready: AtomicBool,
}

impl GuideTokens for Slow {
    fn fresh(&self) -> Guide {
        Guide(Arc::new(Self::default()))
    }

    fn prepare(&self, _: &[TokenId], _: &[TokenId]) {}

    fn is_ready(&self, _: &[TokenId]) -> bool {
        self.is_ready.load(Ordering::SeqCst)
    }

    fn cost(&self) -> GuideCost {
        GuideCost {
            total: Duration::ZERO,
            last: Duration::from_secs(1),
        }
    }

    fn give_up(&self) {}

    fn restrict(&self, _: &mut [f32], _: &[TokenId]) -> Result<(), SampleError> {
        assert!(self.is_ready(&[]), "a step computes no mask");
        Ok(())
    }
}

#[test]
fn a_sequence_whose_guide_is_slow_sits_out_and_its_neighbour_does_not() {
    let mut sampling = Sampling::new(2);
    let slow = Arc::new(Slow::default());
    let guide = Guide(slow.clone());
    sampling.add(0, &[4], |_| {});
    sampling.add(1, &[5], |request| {
        request.sampling = Arc::new(SamplingParams {
            guide: Some(guide),
            ..SamplingParams::default()
        });
        request.outputs.log_probs = Some(1);
    });
    let token = Sampled::Token;
    let (mut last, mut guided) = (4, 5);
    for is_ready in [false, false, true, false, true, true] {
        slow.is_ready.store(is_ready, Ordering::SeqCst);
        last = next(last);
        let expected = match is_ready {
            true => {
                guided = next(guided);
                token(guided)
            }
            false => Sampled::Missed,
        };
        let output = sampling.step();
        let mut tokens: Vec<_> = output.sampled.iter().map(|(_, sampled)| *sampled).collect();
        // A context comes first.
        if tokens[0] == expected {
            tokens.swap(0, 1);
        }
        assert_eq!(tokens, [token(last), expected]);
        assert_eq!(output.extra_outputs.len(), usize::from(is_ready));
    }
}
