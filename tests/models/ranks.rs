//! One model on several ranks: threads that each have their share of the weights, and an engine that is given the same
//! requests. Only rank 0 samples; the engines of the others take its results.
//!
//! The oracle is one process, whose sums are cut into the same tiles: every bit is the same.

use std::iter;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use inflight_base::{LoadError, StepError};
use inflight_collective::{Collective, Grid, Local};
use inflight_device::KvDtype;
use inflight_engine::{Engine, StepOutput, StepPlan};
use inflight_machines::load_rank_on_cpus;
use inflight_runner::{ModelSource, RankOptions, Runner};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;

use crate::batching;
use crate::copy::Copy;
use crate::devices::{assert_near, assert_same_bits, requests, setups};
use crate::schedules::{assert_happened, beams, pausing, schedules};
use crate::support::{CallRunner, Happened, Request, Served, Setup, fixture, serve, simds};

/// Longer than any step of these tests takes.
pub const PATIENT: Duration = Duration::from_secs(120);

/// Every family without experts. Some have 4 query heads and 2 key heads, some 6 and 3,
/// which divide neither by 2 nor by 4, and some only 3 query heads.
pub const MODELS: [&str; 73] = [
    "apertus",
    "arcee",
    "baichuan-13b",
    "baichuan2",
    "biogpt",
    "bloom",
    "chatglm",
    "codegen",
    "cohere",
    "cohere-plus",
    "cohere2",
    "cwm",
    "ernie4-5",
    "exaone",
    "exaone4",
    "falcon",
    "falcon-grouped",
    "falcon-rw",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "gpt-bigcode",
    "gpt-bigcode-heads",
    "gpt-neo",
    "gpt-neox",
    "gpt2",
    "gptj",
    "granite",
    "granite-swa",
    "helium",
    "hunyuan",
    "hyperclovax",
    "internlm",
    "internlm2",
    "internlm3",
    "iquest-coder",
    "jais2",
    "llama-biases",
    "llama-linear",
    "llama-yarn",
    "llama2",
    "llama3",
    "minicpm",
    "minicpm3",
    "ministral",
    "ministral3",
    "mistral",
    "mistral-window",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "opt-350m",
    "phi",
    "phi3",
    "phi4-mini",
    "qwen",
    "qwen2",
    "qwen2-windows",
    "qwen3",
    "qwen3-windows",
    "seed-oss",
    "sharded",
    "smollm3",
    "stablelm",
    "stablelm-12b",
    "starcoder2",
    "stored-f16",
    "vaultgemma",
    "youtu",
];

/// Output and logits of a model call on rank 0.
type Results = (StepOutput, Vec<f32>);

/// How the engine of a rank gets the results of a model call, which only rank 0 computes.
enum RankResults {
    /// Rank 0 sends its results to the other ranks.
    Sent(Vec<Sender<Results>>),
    /// Another rank receives the results of rank 0; the last logits it received.
    Taken(Receiver<Results>, Vec<f32>),
}

/// A rank that is a thread.
pub struct RankThread {
    /// Among those of all stages.
    pub rank: usize,
    pub collective: Local,
    results: RankResults,
}

/// The runner of a rank with an engine of its own.
pub struct RankRunner {
    runner: Box<dyn Runner>,
    results: RankResults,
}

impl RankThread {
    /// Loads its runner with `load`.
    pub fn load(
        self,
        load: impl FnOnce(Box<dyn Collective>) -> Result<Box<dyn Runner>, LoadError>,
    ) -> Result<RankRunner, LoadError> {
        Ok(RankRunner {
            runner: load(Box::new(self.collective))?,
            results: self.results,
        })
    }
}

impl CallRunner for RankRunner {
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        let Self { runner, results } = self;
        let own = (output.sampled.len(), output.extra_outputs.len());
        runner.run(plan, output)?;
        match results {
            RankResults::Sent(others) => {
                for other in others {
                    let results = (output.clone(), runner.logits().to_vec());
                    // One that has failed says so itself.
                    let _ = other.send(results);
                }
            }
            RankResults::Taken(first, logits) => {
                assert_eq!(own, (output.sampled.len(), output.extra_outputs.len()));
                match first.recv() {
                    Ok(results) => (*output, *logits) = results,
                    // Rank 0 has failed since: the next call says how.
                    Err(_) => runner.run(plan, output)?,
                }
            }
        }
        Ok(())
    }

    fn keep_all_logits(&mut self) {
        self.runner.keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        match &self.results {
            RankResults::Sent(_) => self.runner.logits(),
            RankResults::Taken(_, logits) => logits,
        }
    }

    fn vocab_size(&self) -> usize {
        self.runner.vocab_size()
    }
}

/// Runs something on each rank, in a thread of its own.
pub fn on_ranks<T: Send>(grid: impl Into<Grid>, body: impl Fn(RankThread) -> T + Sync) -> Vec<T> {
    let ranks = Local::world(grid, PATIENT);
    let (senders, receivers): (Vec<_>, Vec<_>) = ranks[1..].iter().map(|_| channel()).unzip();
    let taken = receivers
        .into_iter()
        .map(|first| RankResults::Taken(first, Vec::new()));
    let results = iter::once(RankResults::Sent(senders)).chain(taken);
    let body = &body;
    thread::scope(|scope| {
        let ranks = ranks.into_iter().zip(results).enumerate();
        let threads: Vec<_> = ranks
            .map(|(rank, (collective, results))| {
                let rank = RankThread {
                    rank,
                    collective,
                    results,
                };
                scope.spawn(move || body(rank))
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("no panic")).collect()
    })
}

pub fn load(dir: &Path, setup: &Setup, rank: RankThread) -> Result<RankRunner, LoadError> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    rank.load(|collective| {
        let rank = RankOptions {
            collective,
            time_limit: PATIENT,
        };
        load_rank_on_cpus(&source, setup.runner_limits(), &setup.cpu_options(), rank)
    })
}

/// Serves requests on ranks, each in a thread with an engine of its own.
pub fn serve_on(
    dir: &Path,
    setup: &Setup,
    requests: &[Request],
    grid: impl Into<Grid>,
) -> (Vec<Served>, Happened) {
    serve_each_on(dir, setup, grid, |_| requests.to_vec())
}

/// The same, with `requests(rank)` for each rank: those of all differ only in the parts of adapters.
pub fn serve_each_on(
    dir: &Path,
    setup: &Setup,
    grid: impl Into<Grid>,
    requests: impl Fn(usize) -> Vec<Request> + Sync,
) -> (Vec<Served>, Happened) {
    let mut served = on_ranks(grid, |rank| {
        let requests = requests(rank.rank);
        let mut runner = load(dir, setup, rank).expect("it loads");
        serve(&mut runner, setup, &requests)
    });
    served.swap_remove(0)
}

pub fn assert_same(what: &str, expected: &[Served], got: &[Served]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (expected, got) in expected.iter().zip(got) {
        assert_same_bits(what, expected, got);
        assert!(expected.hypotheses == got.hypotheses, "{what}: hypotheses");
        assert!(expected.log_probs == got.log_probs, "{what}: log-probs");
        let (expected, got) = (&expected.generation_logits, &got.generation_logits);
        assert!(expected == got, "{what}: generation logits");
    }
}

/// Serves requests in one process, with the tiles of several ranks.
pub fn alone(dir: &Path, setup: &Setup, requests: &[Request]) -> (Vec<Served>, Happened) {
    let setup = Setup {
        deterministic: true,
        ..setup.clone()
    };
    serve(&mut setup.load_from(dir), &setup, requests)
}

/// Serves requests on several ranks.
pub fn together(dir: &Path, setup: &Setup, requests: &[Request], num_ranks: usize) -> Vec<Served> {
    serve_on(dir, setup, requests, num_ranks).0
}

/// Of 2 and 4, the numbers of ranks that a model can be split over: each has a query head at least.
pub fn numbers_of_ranks(dir: &Path) -> Vec<usize> {
    let source = ModelSource::open(dir).expect("the checkpoint opens");
    let can_split = |num_ranks: &usize| source.specs_of_ranks(*num_ranks).is_ok();
    [2, 4].into_iter().filter(can_split).collect()
}

/// Serves requests on 1, 2 and 4 ranks, as far as the model can be split, and compares every bit.
pub fn assert_ranks_change_nothing(
    dir: &Path,
    what: &str,
    setup: &Setup,
    requests: &[Request],
) -> Happened {
    let (alone, happened) = alone(dir, setup, requests);
    for num_ranks in numbers_of_ranks(dir) {
        let (together, _) = serve_on(dir, setup, requests, num_ranks);
        let what = format!("{}, {what}, {num_ranks} ranks", dir.display());
        assert_same(&what, &alone, &together);
    }
    happened
}

#[test]
fn every_family_is_the_same_on_1_2_and_4_ranks() {
    let (what, setup) = setups().swap_remove(0);
    for name in MODELS {
        let happened = assert_ranks_change_nothing(&fixture(name), what, &setup, &requests());
        assert!(happened.num_chunks > 0 && happened.max_sequences > 1);
    }
}

#[test]
fn ranks_change_nothing_however_requests_are_scheduled() {
    // Keys that divide by 2, 3 keys that divide by nothing, and latents that all heads read.
    for name in ["llama3", "phi3", "deepseek-v2-lite"] {
        let pauses = ("pauses", pausing(), batching::requests());
        for (what, setup, requests) in schedules().into_iter().chain([pauses]) {
            if name.starts_with("deepseek") && setup.kv_dtype != KvDtype::Bf16 {
                continue;
            }
            let happened = assert_ranks_change_nothing(&fixture(name), what, &setup, &requests);
            assert_happened(what, &happened);
        }
    }
}

#[test]
fn ranks_change_nothing_with_beams() {
    let (what, setup, requests) = beams();
    for name in ["qwen3", "seed-oss", "deepseek-v3"] {
        let happened = assert_ranks_change_nothing(&fixture(name), what, &setup, &requests);
        assert_happened(what, &happened);
    }
}

#[test]
fn ranks_change_nothing_on_any_instruction_set() {
    for simd in simds() {
        let setup = Setup {
            simd: Some(simd),
            ..Setup::default()
        };
        for name in ["gemma2", "qwen2", "deepseek-v3"] {
            assert_ranks_change_nothing(&fixture(name), &simd.to_string(), &setup, &requests());
        }
    }
}

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
}

/// A Llama of these sizes with biases everywhere, whose weights are pseudo-random.
pub fn random_llama(sizes: Sizes, num_layers: usize) -> Copy {
    let Sizes {
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
    } = sizes;
    const HIDDEN: usize = 34;
    let copy = Copy::of("llama-biases").config(json!({
        "hidden_size": HIDDEN,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
    }));
    let mut shapes = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![vocab_size, HIDDEN],
        ),
        ("lm_head.weight".to_owned(), vec![vocab_size, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..num_layers {
        let [q, kv] = [num_heads, num_kv_heads].map(|heads| heads * head_dim);
        for (linear, outputs, inputs) in [
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", intermediate_size, HIDDEN),
            ("mlp.up_proj", intermediate_size, HIDDEN),
            ("mlp.down_proj", HIDDEN, intermediate_size),
        ] {
            let name = format!("model.layers.{layer}.{linear}");
            shapes.push((format!("{name}.weight"), vec![outputs, inputs]));
            shapes.push((format!("{name}.bias"), vec![outputs]));
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.{layer}.{norm}.weight");
            shapes.push((name, vec![HIDDEN]));
        }
    }
    let mut state = 1_u64;
    let mut random = || {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let len = shape.iter().product::<usize>();
            let bytes = (0..len).flat_map(|_| (0.3 * random()).to_le_bytes());
            let bytes = bytes.collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name.as_str(), view.expect("the bytes of its shape"))
    });
    serialize_to_file(views, None, &copy.path("model.safetensors")).expect("written");
    copy
}

#[test]
fn sizes_that_do_not_divide_change_nothing() {
    let (_, setup) = setups().swap_remove(0);
    for (heads, width, vocab_size) in [
        ((5, 5, 6), 30, 97),
        ((7, 1, 8), 45, 131),
        ((12, 3, 4), 18, 101),
        ((10, 2, 2), 64, 99),
        ((9, 9, 4), 95, 103),
        ((4, 1, 10), 9, 98),
        // On 4 ranks, the first one has nothing of the feed-forward blocks.
        ((4, 2, 6), 6, 97),
    ] {
        let (num_heads, num_kv_heads, head_dim) = heads;
        let copy = random_llama(
            Sizes {
                num_heads,
                num_kv_heads,
                head_dim,
                intermediate_size: width,
                vocab_size,
            },
            2,
        );
        let requests = requests();
        assert_ranks_change_nothing(copy.dir(), "odd sizes", &setup, &requests);
        let (ours, _) = serve(&mut setup.load_from(copy.dir()), &setup, &requests);
        let cut = [
            alone(copy.dir(), &setup, &requests).0,
            together(copy.dir(), &setup, &requests, 3),
        ];
        for theirs in cut {
            assert_near(&format!("{heads:?}"), &ours, &theirs, 0.1);
        }
    }
}

#[test]
fn tiles_and_any_number_of_ranks_change_only_the_rounding() {
    let setup = Setup::default();
    for name in MODELS {
        let requests = requests();
        let (ours, _) = serve(&mut setup.load(name), &setup, &requests);
        let dir = fixture(name);
        // On 3 ranks there are 3 tiles.
        let cut = [
            alone(&dir, &setup, &requests).0,
            together(&dir, &setup, &requests, 3),
        ];
        for theirs in cut {
            assert_near(name, &ours, &theirs, 0.1);
        }
    }
}

#[test]
fn what_cannot_be_split_is_refused() {
    for (name, num_ranks, part) in [
        ("llama3", 5, "only 4 query heads"),
        (
            "quantised/awq",
            4,
            "of the 4 query heads of the model, 2 have inputs of the same groups",
        ),
    ] {
        for loaded in on_ranks(num_ranks, |rank| {
            load(&fixture(name), &Setup::default(), rank).map(drop)
        }) {
            let error = loaded.expect_err("it is refused").to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

/// Computes steps of a request until one fails, as a rank that may end or see another request.
fn steps_until_failure(rank: RankThread, prompt_len: u32, max_steps: usize) -> String {
    let setup = Setup::default();
    let mut runner = load(&fixture("llama3"), &setup, rank).expect("it loads");
    let mut engine = Engine::new(setup.engine_config());
    let prompt = (3..3 + prompt_len).collect();
    let request = inflight_engine::NewRequest::new(
        inflight_base::SequenceId(0),
        prompt,
        inflight_base::Tokens(60),
    );
    engine.add(request).expect("a valid request");
    let (mut output, mut events) = (StepOutput::default(), Vec::new());
    for _ in 0..max_steps {
        let step = engine.schedule();
        output.clear();
        for plan in step.plans() {
            if let Err(error) = runner.run(plan, &mut output) {
                return error.to_string();
            }
        }
        engine.apply(step, &mut output, &mut events);
    }
    "no failure".to_owned()
}

/// Runs two ranks, with prompts of these lengths, for so many steps.
fn failures(prompt_lens: [u32; 2], max_steps: [usize; 2]) -> [String; 2] {
    let failures = on_ranks(2, |rank| {
        let index = rank.rank;
        steps_until_failure(rank, prompt_lens[index], max_steps[index])
    });
    failures.try_into().expect("two ranks")
}

#[test]
fn a_rank_that_ends_fails_the_step_of_the_others() {
    let started = Instant::now();
    let [first, second] = failures([7, 7], [40, 5]);
    assert_eq!(second, "no failure");
    assert!(first.contains("rank 1 has ended"), "{first}");
    assert!(started.elapsed() < PATIENT / 2);
}

#[test]
fn ranks_with_different_plans_notice_it_in_the_first_step() {
    for error in failures([7, 8], [5, 5]) {
        assert!(error.contains("different steps"), "{error}");
    }
}
