//! Runs requests through the real engine and a real runner, and keeps every step's results.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;

use inflight_base::{
    BlockId, BlockSize, Blocks, LoadError, SequenceId, StepError, TokenId, Tokens,
};
use inflight_device::{Device, KvDtype};
use inflight_device_cpu::{Cpu, CpuOptions, Simd};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_engine::{
    Adapter, AttentionWindow, BatchingScheme, BlockMove, BlockReuse, CapacityPolicy, DraftOptions,
    DraftTotals, Engine, EngineConfig, Event, ImageLimits, ImageMove, KvGroups, NewRequest,
    OutputOptions, PromptImages, ReuseOptions, Sampled, Speculation, StateMove, Step, StepCost,
    StepOutput, StepPlan,
};
use inflight_machines::{LeadingRunner, RankDevice, load_on_cpus, load_on_gpu};
use inflight_reference_device::{Reference, ReferenceOptions, load_on_reference};
use inflight_runner::{
    AdapterRoom, AttentionWindows, GroupedLayers, ModelSource, Runner, RunnerLimits,
    SyntheticRunner, WeightPrecision,
};
use inflight_sampling::{Hypothesis, SamplingParams, TokenLogProbs};
use inflight_tests::checkout;

use crate::missing;
use crate::moves::Moves;

/// The instruction sets of this machine. Reports that the test skips the others.
pub fn simds() -> impl Iterator<Item = Simd> {
    Simd::ALL
        .into_iter()
        .filter(|simd| missing::present_or_reported(simd, simd.is_supported()))
}

/// The folder of a fixture, in the checkout or in the folder that `INFLIGHT_FIXTURES` names.
pub fn fixture(name: &str) -> PathBuf {
    let fixtures = match std::env::var_os("INFLIGHT_FIXTURES") {
        Some(folder) => folder.into(),
        None => checkout().join("tests/fixtures"),
    };
    fixtures.join(name)
}

/// How a test serves its requests.
#[derive(Clone, Debug)]
pub struct Setup {
    pub max_num_requests: u32,
    pub max_beam_width: u32,
    pub max_seq_len: u32,
    pub max_num_tokens: u32,
    pub block_size: u32,
    pub num_blocks: u32,
    /// Blocks in host memory.
    pub num_host_blocks: u32,
    pub policy: CapacityPolicy,
    pub enable_chunked_context: bool,
    pub num_threads: usize,
    pub kv_dtype: KvDtype,
    /// Rounding of the weights; `None` for bf16.
    pub weights: Option<WeightPrecision>,
    /// Memory of a GPU for adapters.
    pub adapter_bytes: u64,
    /// The user's limits of the layers' windows and sinks.
    pub windows: &'static [u32],
    pub num_sinks: u32,
    /// Whether they shift.
    pub shifts_sinks: bool,
    /// Whether the engine frees blocks outside of the windows.
    pub gives_back: bool,
    /// The fixture whose layers have blocks by their windows.
    pub groups_of: Option<&'static str>,
    /// Whether each sequence has a single block.
    pub contiguous: bool,
    /// Whether blocks are constantly copied elsewhere, and taken away when no query attends to them.
    pub moves_blocks: bool,
    /// Number of the runner's blocks, if different from the engine's.
    pub num_runner_blocks: Option<u32>,
    /// Whether contexts and generation are computed in separate calls.
    pub separate_calls: bool,
    /// Prefix reuse.
    pub reuse: BlockReuse,
    /// Snapshots of recurrent states on the device and in host memory, and tokens of a prompt from one to the next.
    pub num_state_snapshots: u32,
    pub num_host_state_snapshots: u32,
    pub state_snapshot_interval: u32,
    /// Speculation settings.
    pub speculation: Option<Speculation>,
    /// The fixture of the draft model.
    pub draft_model: Option<&'static str>,
    /// Limits of images; `None` if the model is loaded for text only.
    pub images: Option<ImageLimits>,
    /// The fixture of the draft head.
    pub draft_head: Option<&'static str>,
    /// Whether the head for multi-token prediction in the checkpoint makes drafts.
    pub has_mtp_head: bool,
    /// What steps are said to cost.
    pub step_cost: Option<StepCost>,
    /// Instruction set; `None` for the best one of the machine.
    pub simd: Option<Simd>,
    /// Whether one rank sums in the tiles of several.
    pub deterministic: bool,
    /// Whether the logits of every row are collected and compared, also where several ranks need only the largest ones.
    pub keeps_all_logits: bool,
}

impl Default for Setup {
    /// Enough memory for all: no chunks, no pauses.
    fn default() -> Self {
        Self {
            max_num_requests: 8,
            max_beam_width: 1,
            max_seq_len: 96,
            max_num_tokens: 1024,
            block_size: 16,
            num_blocks: 64,
            num_host_blocks: 0,
            policy: CapacityPolicy::GuaranteedNoEvict,
            enable_chunked_context: false,
            num_threads: 1,
            kv_dtype: KvDtype::Bf16,
            weights: None,
            adapter_bytes: 8 << 20,
            windows: &[],
            num_sinks: 0,
            shifts_sinks: false,
            gives_back: false,
            groups_of: None,
            contiguous: false,
            moves_blocks: false,
            num_runner_blocks: None,
            separate_calls: false,
            reuse: BlockReuse::Off,
            num_state_snapshots: 0,
            num_host_state_snapshots: 0,
            state_snapshot_interval: 0,
            speculation: None,
            draft_model: None,
            images: None,
            draft_head: None,
            has_mtp_head: false,
            step_cost: None,
            simd: None,
            deterministic: false,
            keeps_all_logits: true,
        }
    }
}

impl Setup {
    /// Searches with up to 4 beams, whose contexts are computed in chunks and share blocks.
    pub fn for_beams() -> Self {
        Self {
            max_beam_width: 4,
            max_num_tokens: 37,
            enable_chunked_context: true,
            reuse: BlockReuse::PartialBlocks,
            num_blocks: 128,
            ..Self::default()
        }
    }

    pub fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            max_num_requests: self.max_num_requests,
            max_beam_width: self.max_beam_width,
            max_seq_len: Tokens(self.max_seq_len),
            max_num_tokens: Tokens(self.max_num_tokens),
            block_size: BlockSize::new(self.block_size).expect("not zero"),
            num_blocks: Blocks(self.num_blocks),
            num_host_blocks: Blocks(self.num_host_blocks),
            policy: self.policy,
            enable_chunked_context: self.enable_chunked_context,
            chunk_unit: BlockSize::new(self.block_size.min(16)).expect("not zero"),
            paged_kv: !self.contiguous,
            groups: match self.grouped_layers() {
                Some(grouped) => grouped.windows(),
                None => KvGroups::one(self.window().filter(|_| self.gives_back)),
            },
            scheme: match self.separate_calls {
                true => BatchingScheme::Inflight,
                false => BatchingScheme::InflightFused,
            },
            reuse: self.reuse,
            num_state_snapshots: self.num_state_snapshots,
            num_host_state_snapshots: self.num_host_state_snapshots,
            state_snapshot_interval: Tokens(self.state_snapshot_interval),
            speculation: self.speculation,
            images: self.images,
            step_cost: self.step_cost,
            ..EngineConfig::default()
        }
    }

    pub fn runner_limits(&self) -> RunnerLimits {
        RunnerLimits {
            num_blocks: Blocks(self.num_runner_blocks.unwrap_or(self.num_blocks)),
            layer_groups: self.grouped_layers().map(|it| it.layers().clone()),
            kv_dtype: self.kv_dtype,
            weights: self.weights,
            attention: self.attention_limits(),
            adapters: AdapterRoom {
                max_rank: 64,
                num_bytes: 0,
                page_bytes: self.adapter_bytes,
                num_running_pages: 1,
            },
            ..RunnerLimits::of(&self.engine_config())
        }
    }

    pub fn attention_limits(&self) -> AttentionWindows {
        let windows = self.windows.iter();
        AttentionWindows {
            windows: windows
                .filter_map(|&window| NonZeroU32::new(window))
                .collect(),
            num_sinks: Tokens(self.num_sinks),
            shifts_sinks: self.shifts_sinks,
        }
    }

    /// Relocates blocks, if the setup asks for it.
    pub fn moves(&self) -> Option<Moves> {
        let num_runner_blocks = self.runner_limits().num_blocks.0;
        let groups = match self.grouped_layers() {
            Some(grouped) => grouped.windows(),
            None => KvGroups::one(self.window()),
        };
        self.moves_blocks
            .then(|| Moves::new(self.num_blocks, num_runner_blocks, groups))
    }

    /// The layers of the fixture that has several groups of them.
    pub fn grouped_layers(&self) -> Option<GroupedLayers> {
        let grouped = self.layers_by_windows(self.groups_of?);
        assert!(grouped.layers().num_groups() > 1, "{grouped:?}");
        Some(grouped)
    }

    /// The layers of a fixture in groups, of which there may be only one.
    pub fn layers_by_windows(&self, name: &str) -> GroupedLayers {
        let source = ModelSource::open(&fixture(name)).expect("the fixture opens");
        let limits = self.attention_limits();
        let spec = source.spec();
        GroupedLayers::new(
            spec.windows_within(&limits).zip(spec.kv_widths()),
            slice::from_ref(&(0..spec.num_cached_layers())),
            limits.num_sinks,
            Tokens(self.max_seq_len),
        )
    }

    /// The window of positions that a sequence must keep.
    fn window(&self) -> Option<AttentionWindow> {
        let limits = self.attention_limits();
        let largest = SyntheticRunner::largest_window(&limits, Tokens(self.max_seq_len));
        largest.map(|size| AttentionWindow {
            size,
            num_sinks: limits.num_sinks,
        })
    }

    /// The fixture's model, loaded for this setup.
    pub fn load(&self, name: &str) -> Box<dyn Runner> {
        self.load_from(&fixture(name))
    }

    /// The model in a folder, loaded for this setup.
    pub fn load_from(&self, dir: &Path) -> Box<dyn Runner> {
        self.load_on::<Cpu>(dir, &self.cpu_options())
    }

    /// What it is computed with, on each rank.
    pub fn cpu_options(&self) -> CpuOptions {
        CpuOptions {
            num_threads: NonZeroUsize::new(self.num_threads),
            simd: self.simd,
            deterministic: self.deterministic,
            ..CpuOptions::default()
        }
    }

    /// The model in a folder, loaded for this setup on a device.
    pub fn load_on<D: TestedDevice>(&self, dir: &Path, options: &D::Options) -> Box<dyn Runner> {
        let open = |dir: &Path| ModelSource::open(dir).expect("the checkpoint opens");
        let mut source = open(dir);
        if let Some(draft_model) = self.draft_model {
            let drafted = source.with_draft_model(open(&fixture(draft_model)));
            source = drafted.expect("their tokens are the same");
        }
        if let Some(draft_head) = self.draft_head {
            let drafted = source.with_draft_head(&fixture(draft_head));
            source = drafted.expect("the head is one of this model");
        }
        if self.images.is_some() {
            let tower = source.find_tower().expect("the checkpoint has a tower");
            source = source.with_tower(tower.with_max_tokens(24));
        }
        if self.has_mtp_head {
            source = source.with_mtp_head().expect("the checkpoint has a head");
        }
        D::load(&source, self.runner_limits(), options).expect("the checkpoint loads")
    }
}

/// A device that models are tested on. Those of the library are compiled there, once.
pub trait TestedDevice: Device {
    /// Loads a model on it.
    fn load(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &Self::Options,
    ) -> Result<Box<dyn Runner>, LoadError>;
}

impl TestedDevice for Cpu {
    fn load(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &CpuOptions,
    ) -> Result<Box<dyn Runner>, LoadError> {
        load_on_cpus(source, limits, options)
    }
}

impl TestedDevice for Reference {
    fn load(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &ReferenceOptions,
    ) -> Result<Box<dyn Runner>, LoadError> {
        load_on_reference(source, limits, options)
    }
}

impl TestedDevice for Cuda {
    fn load(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &CudaOptions,
    ) -> Result<Box<dyn Runner>, LoadError> {
        load_on_gpu(source, limits, options)
    }
}

/// A prompt, a number of tokens to generate, and sampling parameters.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub sampling: SamplingParams,
    /// The extra outputs that it requests.
    pub outputs: OutputOptions,
    /// Its draft tokens.
    pub drafts: DraftOptions,
    /// The adapter that it is computed with.
    pub adapter: Option<Adapter>,
    pub images: PromptImages,
    /// The step before which it arrives.
    pub arrival: usize,
    /// It is cancelled when it has this many tokens.
    pub cancelled_at: Option<usize>,
}

impl Request {
    pub fn greedy(prompt: &[TokenId], max_new_tokens: u32) -> Self {
        Self {
            prompt: prompt.to_vec(),
            max_new_tokens,
            sampling: SamplingParams::default(),
            outputs: OutputOptions::default(),
            drafts: DraftOptions::default(),
            adapter: None,
            images: PromptImages::default(),
            arrival: 0,
            cancelled_at: None,
        }
    }
}

/// The results of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Served {
    pub tokens: Vec<TokenId>,
    /// The logits from which each token was chosen.
    pub logits: Vec<Vec<f32>>,
    /// Each token's log-probabilities, if requested.
    pub log_probs: Vec<TokenLogProbs>,
    /// Those of the prompt's tokens but the first, if requested.
    pub prompt_log_probs: Vec<TokenLogProbs>,
    /// Logits of the prompt and of the chosen tokens, if requested.
    pub context_logits: Vec<f32>,
    pub generation_logits: Vec<f32>,
    /// Hypotheses of its beam search.
    pub hypotheses: Vec<Hypothesis>,
}

/// Statistics of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Happened {
    pub num_steps: usize,
    pub num_pauses: usize,
    /// Steps that computed a part of a sequence's context, but not its end.
    pub num_chunks: usize,
    /// Maximum number of sequences in a step.
    pub max_sequences: usize,
    /// Number of blocks copied elsewhere.
    pub num_moves: usize,
    /// Number of blocks taken away.
    pub num_taken: usize,
    /// Number of copies that the engine planned.
    pub num_copies: usize,
    /// Blocks that went to host memory, and that came back.
    pub num_offloaded: usize,
    pub num_onboarded: usize,
    /// Snapshots of recurrent states that went to host memory, and that were read there.
    pub num_offloaded_states: usize,
    pub num_onboarded_states: usize,
    /// Number of block table entries that the engine had freed.
    pub num_holes: usize,
    /// Positions before the first chunks of requests: reused ones, which are not computed again.
    pub num_reused: usize,
    /// Images that were encoded.
    pub num_encoded: usize,
    /// Draft statistics of all requests.
    pub drafts: DraftTotals,
}

/// What computes model calls.
pub trait CallRunner {
    fn make_drafts(&mut self, _: &mut Step) -> Result<(), StepError> {
        Ok(())
    }

    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError>;
    fn keep_all_logits(&mut self);
    fn logits(&mut self) -> &[f32];
    fn vocab_size(&self) -> usize;
}

impl CallRunner for Box<dyn Runner> {
    fn make_drafts(&mut self, step: &mut Step) -> Result<(), StepError> {
        (**self).make_drafts(step)
    }

    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        (**self).run(plan, output)
    }

    fn keep_all_logits(&mut self) {
        (**self).keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        (**self).logits()
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size() as usize
    }
}

impl<D: RankDevice> CallRunner for LeadingRunner<D>
where
    Self: Runner,
{
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        Runner::run(self, plan, output)
    }

    fn keep_all_logits(&mut self) {
        Runner::keep_all_logits(self);
    }

    fn logits(&mut self) -> &[f32] {
        Runner::logits(self)
    }

    fn vocab_size(&self) -> usize {
        Runner::vocab_size(self) as usize
    }
}

/// Serves the requests to their ends.
pub fn serve(
    runner: &mut impl CallRunner,
    setup: &Setup,
    requests: &[Request],
) -> (Vec<Served>, Happened) {
    if setup.keeps_all_logits {
        runner.keep_all_logits();
    }
    let mut engine = Engine::new(setup.engine_config());
    let mut moves = setup.moves();
    let mut served = vec![Served::default(); requests.len()];
    let mut has_started = vec![false; requests.len()];
    let mut happened = Happened::default();
    let mut output = StepOutput::default();
    let mut events = Vec::new();
    let mut num_added = 0;
    while num_added < requests.len() || !engine.is_idle() {
        for (index, request) in requests.iter().enumerate() {
            if request.arrival == happened.num_steps {
                engine
                    .add(new_request(index, request))
                    .expect("a valid request");
                num_added += 1;
            }
        }
        let mut step = engine.schedule();
        runner.make_drafts(&mut step).expect("drafts are made");
        let planned = step.sequences();
        happened.max_sequences = happened.max_sequences.max(planned.len());
        for sequence in planned {
            if !std::mem::replace(&mut has_started[sequence.id.index()], true) {
                happened.num_reused += sequence.kv_len as usize - sequence.tokens.len();
            }
        }
        // The owner of each row of logits, and whether the row is a draft's.
        let sampling: Vec<_> = planned
            .iter()
            .filter(|sequence| sequence.samples)
            .flat_map(|sequence| {
                let drafts = 0..=sequence.num_drafts;
                drafts.map(|draft| (sequence.id.index(), sequence.slot, draft > 0))
            })
            .collect();
        let num_sampling = sampling.iter().filter(|(.., is_draft)| !is_draft).count();
        happened.num_chunks += planned.len() - num_sampling;
        for plan in step.plans() {
            let encoded = |one: &&ImageMove| matches!(one, ImageMove::Encode { .. });
            happened.num_encoded += plan.image_moves.iter().filter(encoded).count();
            let tables = plan
                .sequences
                .iter()
                .map(|planned| plan.block_table(planned));
            let holes = tables.flatten().filter(|&&block| block == BlockId::NONE);
            happened.num_holes += holes.count();
            for one in plan.moves {
                match one {
                    BlockMove::Copy(_) => happened.num_copies += 1,
                    BlockMove::Offload { .. } => happened.num_offloaded += 1,
                    BlockMove::Onboard { .. } => happened.num_onboarded += 1,
                }
            }
            for one in plan.state_moves {
                match one {
                    StateMove::Offload { .. } => happened.num_offloaded_states += 1,
                    StateMove::Onboard { .. } => happened.num_onboarded_states += 1,
                    StateMove::Restore(_) => {}
                }
            }
        }
        let vocab_size = runner.vocab_size();
        let mut logits = Vec::new();
        output.clear();
        for plan in step.plans() {
            let plan = match &mut moves {
                Some(moves) => moves.apply(plan),
                None => plan,
            };
            runner.run(plan, &mut output).expect("the step runs");
            let rows = runner.logits().chunks_exact(vocab_size);
            logits.extend(rows.map(<[f32]>::to_vec));
        }

        assert_eq!(logits.len(), sampling.len());
        let mut results = output.sampled.iter().peekable();
        for (&(index, slot, is_draft), logits) in sampling.iter().zip(logits) {
            let Some((_, sampled)) = results.next_if(|(sampled, _)| *sampled == slot) else {
                assert!(is_draft, "request {index} has no token");
                continue;
            };
            let token = match *sampled {
                Sampled::Token(token) => token,
                Sampled::Candidates | Sampled::Pooled => continue,
                Sampled::Failed(error) => panic!("request {index}: {error}"),
                Sampled::Missed => unreachable!("no step is planned ahead"),
            };
            served[index].tokens.push(token);
            if setup.keeps_all_logits {
                served[index].logits.push(logits);
            }
        }
        assert_eq!(results.next(), None);
        let first_new = events.len();
        engine.apply(step, &mut output, &mut events);
        for event in &events[first_new..] {
            if let Event::ExtraOutputs(id, extra_outputs) = event {
                let served = &mut served[id.index()];
                served.log_probs.extend(extra_outputs.log_probs.clone());
                served.context_logits.extend(&extra_outputs.context_logits);
                let of_prompt = extra_outputs.prompt_log_probs.iter();
                served.prompt_log_probs.extend(of_prompt.cloned());
                served
                    .generation_logits
                    .extend(&extra_outputs.generation_logits);
            }
            if let Event::Hypotheses(id, found) = event {
                served[id.index()].hypotheses = found.to_vec();
            }
        }
        for (index, (served, request)) in served.iter().zip(requests).enumerate() {
            let is_enough = |num_tokens| served.tokens.len() >= num_tokens;
            if request.cancelled_at.is_some_and(is_enough) {
                engine.cancel(SequenceId(index as u64));
            }
        }
        engine.check_integrity();
        happened.drafts = engine.draft_totals();
        happened.num_steps += 1;
        assert!(happened.num_steps < 100_000, "the requests do not end");
    }
    happened.num_pauses = events
        .iter()
        .filter(|event| matches!(event, Event::Paused(_)))
        .count();
    if let Some(moves) = moves {
        (happened.num_moves, happened.num_taken) = (moves.num_moves, moves.num_taken);
    }
    (served, happened)
}

/// Serves one request alone, to its end.
pub fn serve_alone(runner: &mut impl CallRunner, setup: &Setup, request: &Request) -> Served {
    let request = Request {
        arrival: 0,
        cancelled_at: None,
        ..request.clone()
    };
    let (mut served, _) = serve(runner, setup, &[request]);
    served.remove(0)
}

pub fn new_request(index: usize, request: &Request) -> NewRequest {
    let id = SequenceId(index as u64);
    let adapter = request.adapter.as_ref();
    NewRequest {
        reuse: ReuseOptions {
            salt: adapter.map(|adapter| format!("{adapter:?}").into()),
            ..ReuseOptions::default()
        },
        sampling: Arc::new(request.sampling.clone()),
        outputs: request.outputs,
        drafts: request.drafts.clone(),
        adapter: request.adapter.clone(),
        images: request.images.clone(),
        ..NewRequest::new(id, request.prompt.clone(), Tokens(request.max_new_tokens))
    }
}
