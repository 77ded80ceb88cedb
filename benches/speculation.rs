//! Gain and cost of speculation: generation with and without, by number of requests.
//!
//! `cargo bench --bench speculation -- [--int4] [--fresh] [MODEL_DIR [DRAFT_MODEL_DIR]]`; the default is the demo
//! model, in the precision of the checkpoint or in 4 bits. Each figure is the best of five runs: output tokens per
//! second, and the share of accepted draft tokens:
//!
//! - `told again`: greedy, after a story by the model itself whose beginning is repeated; prompt lookup;
//! - `all right`: greedy, with the whole answer as the request's expected output;
//! - `all wrong`: tokens sampled almost at random, lookup by single tokens.
//!
//! With a draft model, its drafts instead: for a story, and for tokens sampled almost at random after a prompt of 512
//! tokens: 128 of them, and 8. The latter are of 16 times as many requests, one after the other, and their prompts
//! count.
//!
//! Each workload runs three ways in turn: without drafts, with the maximum number of drafts, and with adaptive drafts.
//! The last two are compared with the first. With a draft model, runs share one engine and its requests, as on a
//! server; `--fresh` gives each run a new engine. The last lines are the engine's own time per step, without a model,
//! when it looks up the last tokens in long texts.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_base::{BlockSize, Blocks, SequenceId, TokenId, Tokens};
use inflight_device_cpu::CpuOptions;
use inflight_engine::{
    BlockReuse, DraftOptions, DraftTotals, Engine, EngineConfig, Event, NewRequest, PromptLookup,
    Sampled, Speculation, StepOutput,
};
use inflight_manager::measure_costs;
use inflight_numbers::CodeBits;
use inflight_runner::{CpuRunner, ModelSource, Runner, RunnerLimits, WeightPrecision};
use inflight_sampling::SamplingParams;
use inflight_text::Tokenizer;

use support::demo_folder;

const NUM_RUNS: usize = 5;
const NUM_NEW_TOKENS: u32 = 128;
const NUM_ROUNDS: u32 = 16;
const MAX_DRAFT_TOKENS: u32 = 4;
const BEGINNING: &str = "Once upon a time, there was a brave fox named Finn.";

fn main() {
    let arguments = std::env::args().skip(1);
    let mut folders = arguments.filter(|it| !it.starts_with("--"));
    let folder = folders.next().map_or_else(demo_folder, PathBuf::from);
    let source = ModelSource::open(&folder).expect("the model opens");
    if let Some(draft_folder) = folders.next() {
        let draft_model =
            ModelSource::open(Path::new(&draft_folder)).expect("the draft model opens");
        let source = source.with_draft_model(draft_model);
        with_draft_model(&source.expect("the same tokens"), &folder);
        return;
    }
    let again = story_that_begins_again(&source, &folder);
    println!(
        "| requests | drafts | without | all | accepted | ratio | worth it | accepted | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for num_requests in [1, 8, 32] {
        let bench = Bench {
            source: &source,
            num_requests,
            num_new_tokens: NUM_NEW_TOKENS,
        };
        bench.print(
            "told again",
            &again,
            Some(PromptLookup { min: 2, max: 4 }),
            0.0,
        );
        bench.print("all right", &again, None, 0.0);
        let noise: Vec<_> = (0..512).map(|n| 5 + n * 7919 % 1500).collect();
        bench.print(
            "all wrong",
            &noise,
            Some(PromptLookup { min: 1, max: 1 }),
            100.0,
        );
    }
    println!("\nengine, us a step of 64 sequences, by the length of their texts: off, on");
    for len in [512, 8192, 32768] {
        let [off, on] = [false, true].map(|is_on| engine_step(len, is_on).as_nanos() as f64 / 1e3);
        println!("{len}: {off:.1}, {on:.1}");
    }
}

fn with_draft_model(source: &ModelSource, folder: &Path) {
    let story = encode(BEGINNING, true, folder);
    let noise: Vec<_> = (0..512).map(|n| 5 + n * 7919 % 1500).collect();
    println!(
        "| requests | drafts | without | all | accepted | ratio | worth it | accepted | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for num_requests in [1, 8, 32] {
        let bench = |num_new_tokens| Bench {
            source,
            num_requests,
            num_new_tokens,
        };
        bench(NUM_NEW_TOKENS).print("a story", &story, None, 0.0);
        bench(NUM_NEW_TOKENS).print("all wrong", &noise, None, 100.0);
        bench(8).print("all wrong, 8 tokens each", &noise, None, 100.0);
    }
}

fn encode(text: &str, is_first: bool, folder: &Path) -> Vec<TokenId> {
    match Tokenizer::load(folder) {
        Ok(tokenizer) => tokenizer.encode(text, is_first).expect("tokens"),
        // A model without a tokenizer has no meaningful texts: any tokens do.
        Err(_) => (5..20).collect(),
    }
}

/// The model, rounded to 4 bits if that is asked for.
fn load(source: &ModelSource, config: &EngineConfig) -> CpuRunner {
    let is_rounded = std::env::args().any(|it| it == "--int4");
    let limits = RunnerLimits {
        weights: is_rounded.then(|| WeightPrecision::new(CodeBits::Four)),
        ..RunnerLimits::of(config)
    };
    CpuRunner::new(source, limits, &CpuOptions::default()).expect("the model loads")
}

/// A beginning, the model's continuation, and the beginning again.
fn story_that_begins_again(source: &ModelSource, folder: &Path) -> Vec<TokenId> {
    let encode = |text, is_first| encode(text, is_first, folder);
    let bench = Bench {
        source,
        num_requests: 1,
        num_new_tokens: NUM_NEW_TOKENS,
    };
    let beginning = encode(BEGINNING, true);
    let config = bench.config(None, beginning.len());
    let mut runner = load(source, &config);
    let answers = bench
        .run(&config, &mut runner, &beginning, 0.0, &[])
        .answers;
    let story = &answers[0][..90];
    [
        &beginning,
        story,
        &encode("\n\n", false),
        &encode(BEGINNING, false),
    ]
    .concat()
}

struct Bench<'a> {
    source: &'a ModelSource,
    num_requests: u32,
    num_new_tokens: u32,
}

/// The results of a run.
#[derive(Clone, Default)]
struct Run {
    tokens_per_second: f64,
    acceptance_rate: f64,
    answers: Vec<Vec<TokenId>>,
}

impl Bench<'_> {
    fn print(
        &self,
        what: &str,
        prompt: &[TokenId],
        prompt_lookup: Option<PromptLookup>,
        temperature: f32,
    ) {
        let speculation = Some(Speculation {
            max_draft_tokens: MAX_DRAFT_TOKENS,
            prompt_lookup,
            has_draft_model: self.source.draft_model().is_some(),
            recomputes_drafts: false,
        });
        let [off, all] = [None, speculation].map(|it| self.config(it, prompt.len()));
        let mut runner = load(self.source, &all);
        let mut worth_it = all.clone();
        measure_costs(&mut worth_it, &mut runner).expect("steps are computed");
        let mut best = [(); 3].map(|()| Run::default());
        for _ in 0..NUM_RUNS {
            for (config, place) in [&off, &all, &worth_it].into_iter().zip(0..) {
                let expected = match (prompt_lookup, place) {
                    (None, 1..) if self.source.draft_model().is_none() => best[0].answers.clone(),
                    _ => Vec::new(),
                };
                let run = self.run(config, &mut runner, prompt, temperature, &expected);
                assert!(
                    place == 0 || run.answers == best[0].answers,
                    "drafts do not change the output"
                );
                if run.tokens_per_second > best[place].tokens_per_second {
                    best[place] = run;
                }
            }
        }
        let [off, all, worth_it] = best;
        let figures = |run: &Run| {
            format!(
                "{:.0} | {:.0} % | {:.2}",
                run.tokens_per_second,
                100.0 * run.acceptance_rate,
                run.tokens_per_second / off.tokens_per_second
            )
        };
        println!(
            "| {} | {what} | {:.0} | {} | {} |",
            self.num_requests,
            off.tokens_per_second,
            figures(&all),
            figures(&worth_it)
        );
    }

    fn run(
        &self,
        config: &EngineConfig,
        runner: &mut dyn Runner,
        prompt: &[TokenId],
        temperature: f32,
        expected: &[Vec<TokenId>],
    ) -> Run {
        let mut engine = Engine::new(config.clone());
        let is_fresh = std::env::args().any(|it| it == "--fresh");
        if self.source.draft_model().is_some() && !is_fresh {
            self.serve(&mut engine, runner, prompt, temperature, expected);
        }
        let totals = engine.draft_totals();
        let mut run = self.serve(&mut engine, runner, prompt, temperature, expected);
        let all = engine.draft_totals();
        let measured = DraftTotals {
            num_drafted: all.num_drafted - totals.num_drafted,
            num_accepted: all.num_accepted - totals.num_accepted,
        };
        run.acceptance_rate = measured.acceptance_rate();
        run
    }

    fn serve(
        &self,
        engine: &mut Engine,
        runner: &mut dyn Runner,
        prompt: &[TokenId],
        temperature: f32,
        expected: &[Vec<TokenId>],
    ) -> Run {
        let are_short = self.num_new_tokens < NUM_NEW_TOKENS;
        let num_requests = self.num_requests * if are_short { NUM_ROUNDS } else { 1 };
        for id in 0..num_requests {
            let sampling = SamplingParams {
                temperature,
                seed: u64::from(id),
                ..SamplingParams::default()
            };
            let id = SequenceId(u64::from(id));
            let request = NewRequest {
                sampling: Arc::new(sampling),
                drafts: DraftOptions {
                    expected: expected.get(id.index()).cloned().unwrap_or_default().into(),
                    ..DraftOptions::default()
                },
                ..NewRequest::new(id, prompt.to_vec(), Tokens(self.num_new_tokens))
            };
            engine.add(request).expect("fits");
        }
        generate(engine, runner, are_short)
    }

    fn config(&self, speculation: Option<Speculation>, num_prompt_tokens: usize) -> EngineConfig {
        let max_seq_len = Tokens(num_prompt_tokens as u32 + self.num_new_tokens);
        let block_size = BlockSize::new(32).expect("not zero");
        EngineConfig {
            max_num_requests: self.num_requests,
            max_seq_len,
            max_num_tokens: Tokens(512),
            block_size,
            num_blocks: Blocks(self.num_requests * max_seq_len.blocks_ceil(block_size).0),
            reuse: BlockReuse::Off,
            speculation,
            ..EngineConfig::default()
        }
    }
}

/// Serves all requests. The clock starts when the last prompt is computed, unless prompts count.
fn generate(engine: &mut Engine, runner: &mut dyn Runner, prompts_count: bool) -> Run {
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let mut start = Instant::now();
    let mut num_before = 0;
    while !engine.is_idle() {
        let mut step = engine.schedule();
        let has_contexts = engine.stats().is_some_and(|stats| stats.num_context > 0);
        output.clear();
        runner.make_drafts(&mut step).expect("drafts are made");
        for plan in step.plans() {
            runner.run(plan, &mut output).expect("the step runs");
        }
        engine.apply(step, &mut output, &mut events);
        if has_contexts && !prompts_count {
            start = Instant::now();
            num_before = events.len();
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let mut run = Run::default();
    let mut num_tokens = 0;
    for (place, event) in events.iter().enumerate() {
        if let Event::Token(id, token) = *event {
            run.answers
                .resize(run.answers.len().max(id.index() + 1), Vec::new());
            run.answers[id.index()].push(token);
            num_tokens += usize::from(place >= num_before);
        }
    }
    run.tokens_per_second = num_tokens as f64 / elapsed;
    run
}

/// The engine's time for a step of 64 sequences that end with `len` different tokens, one in 50 of which is
/// the last token: the rest of the n-gram never matches.
fn engine_step(len: u32, is_on: bool) -> Duration {
    const NUM_REQUESTS: u32 = 64;
    const NUM_STEPS: u32 = 200;
    let block_size = BlockSize::new(32).expect("not zero");
    let max_seq_len = Tokens(len + NUM_STEPS + 2);
    let mut engine = Engine::new(EngineConfig {
        max_num_requests: NUM_REQUESTS,
        max_seq_len,
        max_num_tokens: Tokens(NUM_REQUESTS * len),
        block_size,
        num_blocks: Blocks(NUM_REQUESTS * max_seq_len.blocks_ceil(block_size).0),
        reuse: BlockReuse::Off,
        speculation: is_on.then_some(Speculation {
            max_draft_tokens: MAX_DRAFT_TOKENS,
            prompt_lookup: Some(PromptLookup { min: 2, max: 4 }),
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..EngineConfig::default()
    });
    for id in 0..u64::from(NUM_REQUESTS) {
        let prompt = (0..len).map(|n| if n % 50 == 0 { 7 } else { 100 + n });
        let request = NewRequest::new(
            SequenceId(id),
            prompt.collect::<Vec<_>>(),
            Tokens(NUM_STEPS + 1),
        );
        engine.add(request).expect("fits");
    }
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    let mut total = Duration::ZERO;
    for step in 0..NUM_STEPS {
        let start = Instant::now();
        let decided = engine.schedule();
        let scheduled = start.elapsed();
        output.clear();
        for planned in decided.sequences() {
            assert_eq!(planned.num_drafts, 0, "the lookup finds nothing");
            // The last token is the prompts' last one; the one before it is always different.
            let token = if step % 2 == 0 { 7 } else { 1_000_000 + step };
            output.sampled.push((planned.slot, Sampled::Token(token)));
        }
        events.clear();
        let start = Instant::now();
        engine.apply(decided, &mut output, &mut events);
        // The first step computes the prompts.
        if step > 0 {
            total += scheduled + start.elapsed();
        }
    }
    total / (NUM_STEPS - 1)
}
