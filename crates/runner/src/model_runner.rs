//! The runner of a real model: plan -> forward pass -> logits -> sampled tokens.

use std::ops::Range;
use std::time::Duration;

use half::bf16;

use super::block_moves::move_device_blocks;
use super::decoder::{Decoder, draft_head_ops};
use super::draft_head::{DraftHead, HeadSource, state_bytes_per_block};
use super::draft_model::{ComputeRows, DraftModel, limits_of_draft_model};
use super::first_steps;
use super::late_inputs::late_widths;
use super::latent::latent_widths;
use super::layer_attention::kv_layouts;
use super::limits::RunnerLimits;
use super::model_source::ModelSource;
use super::pass::{ContextLogits, PassOn};
use super::pooler::Pooler;
use super::precision::WeightPrecision;
use super::probe::{Operation, Probe, Work};
use super::rank_calls::{AdapterRuns, RankCall, ReceivedCalls};
use super::results::Results;
use super::spec::{ModelSpec, TowerSpec};
use super::stage::ModelPart;
use super::step_layout::{SampledRows, StepLayout};
use super::step_sampling::StepSampling;
use super::streams::stream_widths;
use super::tower::{ImageEncoder, KeptImages};
use inflight_base::{BlockSize, HostBlockId, LoadError, StepError, TokenId};
use inflight_collective::Collective;
use inflight_device::{
    AdapterCapacity, Device, DeviceSample, IndexerOps, KvDtype, LayerGroups, QuantisedWidths,
    RankHost, RankOps, StepCapacity, StepInputs, StepResults, StepWidths, Tiling,
};
use inflight_engine::{BlockMove, ExtraOutputs, Step, StepOutput, StepPlan};
use inflight_images::ImagePatches;

/// A model on a device: weights, KV cache, and the buffers of its largest step. `P` is the profiling probe.
///
/// On CPU, what it computes for a sequence is bit for bit the same whatever else is in the step, however
/// the context was chunked, and on any number of threads.
pub struct ModelRunner<D: Device, P = ()> {
    probe: P,
    device: D,
    /// The connection with the hosts of other ranks, if there are any.
    host: RankHost,
    decoder: Decoder<D>,
    results: Results,
    /// Whether the ranks of the stage send only the largest logit of a row where nothing else is needed.
    gathers_largest: bool,
    cache: D::KvCache,
    host_blocks: D::HostBlocks,
    limits: RunnerLimits,
    vocab_size: usize,
    /// `[max_sampled_rows, vocab_size]`.
    logits: D::Logits,
    sampling: StepSampling,
    draft_model: Option<Box<DraftModel<ModelRunner<D>>>>,
    draft_head: Option<Box<DraftHead<D>>>,
    /// Only if prompts may have images.
    images: Option<Box<KeptImages<D>>>,
    /// The model calls that were launched last, and may not have been collected.
    calls: [LaunchedCall; 2],
    /// Which of them is launched next.
    next_call: usize,
    num_launched: usize,
    /// Where the tokens of the last one are sampled.
    sampled_rows: SampledRows,
    /// For each sampled row of the one that was collected last, whether the device has sampled a token.
    has_token: Vec<bool>,
}

/// How a runner is one of several ranks.
pub struct RankOptions {
    /// Its connection with the others. Its time limit is that of loading.
    pub collective: Box<dyn Collective>,
    /// The longest that an operation between ranks may take once all have loaded their weights.
    pub time_limit: Duration,
}

/// A model call, besides its plan.
struct LaunchedCall {
    layout: StepLayout,
    /// What was made of context logits, each with the index of its sequence.
    context_outputs: Vec<(usize, ExtraOutputs)>,
    /// Of the sampled rows, `[num_sampled_rows, embedding_width]`, if nothing is generated.
    states: Vec<f32>,
    /// Its number among the steps of ranks, if its results come from the last stage and have not been received.
    awaited: Option<u64>,
}

impl<D: Device> ModelRunner<D> {
    /// Loads a model's weights and reserves the KV cache. The source is not needed afterwards.
    ///
    /// # Errors
    /// If a tensor is missing, misshapen or not finite, if the model cannot keep the limits, or if there is
    /// not enough memory or no thread.
    pub fn new(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &D::Options,
    ) -> Result<Self, LoadError> {
        Self::with_probe(source, limits, options, ())
    }

    /// Loads a rank's share of the weights, to compute steps together with the other ranks: each is given the same
    /// plans. On 2 and 4 ranks of CPUs the results are the same bits; with
    /// [`CpuOptions::deterministic`](inflight_device_cpu::CpuOptions::deterministic) also on 1, and those of
    /// [`ModelRunner::new`]. Any number of stages gives the bits of one.
    ///
    /// Only the first rank samples, and has results.
    ///
    /// # Errors
    /// As [`ModelRunner::new`], or if the model or the device cannot be one of several ranks.
    pub fn of_rank(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &D::Options,
        rank: RankOptions,
    ) -> Result<Self, LoadError> {
        Self::load(source, limits, options, (), Some(rank))
    }

    /// Bytes of one block of the KV cache, with all layers in one group, padding and scales included.
    pub fn kv_bytes_per_block(spec: &ModelSpec, block_size: BlockSize, dtype: KvDtype) -> usize {
        let groups = one_group(spec, spec.num_cached_layers());
        D::kv_bytes_per_block(&kv_layouts(spec, block_size, dtype), &groups)
    }

    /// Bytes of scratch memory of the indexer, which is taken at load; 0 if no layer has one.
    pub fn num_scratch_bytes(spec: &ModelSpec) -> usize {
        let ops = D::INDEXER.filter(|_| spec.indexer_shape().is_some());
        ops.map_or(0, |ops| ops.num_scratch_bytes())
    }

    /// Bytes of the activations and of the KV cache of a vision tower, which are taken at load.
    pub fn num_tower_bytes(tower: &TowerSpec, block_size: BlockSize) -> usize {
        let encoder = &tower.encoder;
        let widths = step_widths(encoder, QuantisedWidths::default());
        let num_encoded = tower.max_num_encoded();
        let of_layers = num_encoded * (4 * widths.sums + 2 * widths.inputs);
        let num_blocks = tower.max_num_blocks(block_size) as usize;
        let groups = LayerGroups::of_one_step(encoder.num_layers());
        let layouts = kv_layouts(encoder, block_size, KvDtype::Bf16);
        let of_cache = num_blocks * D::kv_bytes_per_block(&layouts, &groups);
        of_layers + tower.num_buffer_bytes() + of_cache
    }

    /// Bytes of one block of the KV cache of a draft head, and of the states that the head reads.
    pub fn head_bytes_per_block(head: &HeadSource, block_size: BlockSize, dtype: KvDtype) -> usize {
        let spec = head.spec();
        Self::kv_bytes_per_block(spec, block_size, dtype)
            + state_bytes_per_block(spec.hidden_size, block_size)
    }

    /// Bytes of one block of a stage, which has these of the layers with keys and values in the `groups`.
    pub fn kv_bytes_in_groups(
        spec: &ModelSpec,
        layers: Range<usize>,
        groups: &LayerGroups,
        block_size: BlockSize,
        dtype: KvDtype,
    ) -> usize {
        let layouts = kv_layouts(spec, block_size, dtype);
        D::kv_bytes_per_block(&layouts, &groups.with_layers(layers))
    }

    /// Bytes of the weights on this device, if float weights are rounded to `precision`.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub fn num_weight_bytes(
        source: &ModelSource,
        precision: Option<WeightPrecision>,
    ) -> Result<u64, LoadError> {
        source.num_weight_bytes_on::<D>(precision)
    }

    /// The largest step, and the widths of its rows: what its activations take on a device depends on these.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub fn step_size(
        source: &ModelSource,
        limits: &RunnerLimits,
    ) -> Result<(StepCapacity, StepWidths), LoadError> {
        let spec = source.spec();
        let quantised = source.quantised_widths::<D>(limits.weights)?;
        Ok((step_capacity(spec, limits), step_widths(spec, quantised)))
    }
}

impl<D: Device, P: Probe> ModelRunner<D, P> {
    /// As [`ModelRunner::new`], with a probe.
    ///
    /// # Errors
    /// As [`ModelRunner::new`].
    pub fn with_probe(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &D::Options,
        probe: P,
    ) -> Result<Self, LoadError> {
        Self::load(source, limits, options, probe, None)
    }

    fn load(
        source: &ModelSource,
        limits: RunnerLimits,
        options: &D::Options,
        probe: P,
        rank: Option<RankOptions>,
    ) -> Result<Self, LoadError> {
        check(source.spec(), &limits)?;
        let pooler = pooler(source, rank.is_some())?;
        let pooling = source.spec().pooling.map(|pooling| pooling.mode);
        let draft_model = match source.draft_model() {
            Some(draft_model) => {
                let limits = limits_of_draft_model(&limits);
                let runner = ModelRunner::new(draft_model, limits, options)?;
                Some(Box::new(DraftModel::new(runner)))
            }
            None => None,
        };
        let draft_head = match source.draft_head() {
            Some(head) => {
                let ops = draft_head_ops::<D>(rank.is_some())?;
                Some(Box::new(DraftHead::new(head, &limits, options, ops)?))
            }
            None => None,
        };
        let images = kept_images(source, &limits, options, rank.is_some())?;
        let mut device = D::open(options)?;
        let time_limit = rank.as_ref().map(|rank| rank.time_limit);
        let mut host = match rank {
            Some(rank) => RankHost::new(rank.collective),
            None => RankHost::alone(),
        };
        let (part, ranks) = join_ranks(&mut device, source, &mut host, D::tiling(options))?;
        let spec = &part.local_spec(source.spec());
        let mut decoder = Decoder::new(source, spec, &part, &limits, &mut device, (&host, ranks))?;
        let num_threads = device.host_threads().num_threads();
        let groups = layer_groups(&part, spec, &limits)?;
        let mut cache = kv_cache(
            &mut device,
            &part.local_spec_of_stage(source.spec()),
            &groups,
            &limits,
        )?;
        let host_blocks = device.alloc_host_blocks(&cache, limits.num_host_blocks.index())?;
        device.reserve(&cache, &step_capacity(spec, &limits))?;
        let num_logits = match &pooler {
            None => limits.max_sampled_rows.index(),
            Some(_) => 0,
        };
        let mut logits = device.alloc_logits(num_logits, spec.vocab_size)?;
        if let Some(time_limit) = time_limit {
            host.meet(time_limit)?;
        }
        first_steps::compute(
            &mut device,
            &mut host,
            &mut decoder,
            &mut cache,
            &limits,
            &mut logits,
        )?;
        Ok(Self {
            draft_model,
            draft_head,
            images,
            // Logits that another stage sends on are whole, and so are those that a device samples from.
            gathers_largest: part.stage.is_only() && !D::SAMPLES && decoder.has_part_of_logits(),
            decoder,
            results: Results::of(&part.stage, pooler),
            cache,
            host_blocks,
            vocab_size: spec.vocab_size,
            logits,
            calls: [(); 2].map(|()| LaunchedCall {
                layout: StepLayout::new(&limits, pooling),
                context_outputs: Vec::new(),
                states: Vec::new(),
                awaited: None,
            }),
            next_call: 0,
            num_launched: 0,
            sampled_rows: SampledRows::default(),
            has_token: Vec::with_capacity(limits.max_sampled_rows.index()),
            sampling: StepSampling::new(spec.vocab_size, &limits, num_threads),
            device,
            host,
            limits,
            probe,
        })
    }

    /// Has the draft model or head make the drafts that a step asks for, before its first model call is run or
    /// launched. Each step comes here, in order, for its moves of blocks. Without either, nothing happens.
    ///
    /// # Errors
    /// The device has failed.
    pub fn make_drafts(&mut self, step: &mut Step) -> Result<(), StepError> {
        if let Some(draft_head) = &mut self.draft_head {
            let decoder = &self.decoder;
            return draft_head.make(step, || decoder.shared_weights());
        }
        match &mut self.draft_model {
            Some(draft_model) => draft_model.make(step),
            None => Ok(()),
        }
    }

    /// The vision tower, if prompts may have images.
    pub fn tower(&self) -> Option<&TowerSpec> {
        self.images.as_ref().map(|images| images.encoder().spec())
    }

    /// The rows of the residual stream that an image becomes, `[num_tokens, hidden_size]`. They do not depend on
    /// anything else that is computed.
    ///
    /// # Errors
    /// The model was loaded without a vision tower or does not read such an image, or the device has failed.
    pub fn encode_image(&mut self, image: &ImagePatches) -> Result<Vec<bf16>, StepError> {
        match &mut self.images {
            Some(images) => Ok(images.encoder_mut().encode(image)?.rows),
            None => Err(StepError(
                "an image for a model that was loaded without its vision tower".to_owned(),
            )),
        }
    }

    /// The device, for measurements.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// The probe.
    pub fn probe_mut(&mut self) -> &mut P {
        &mut self.probe
    }

    /// The size of the vocabulary: token ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Computes one model call of a step and appends its results to `output`, unless it is a rank that does not sample.
    /// After the first steps it allocates nothing.
    ///
    /// # Errors
    /// If a token id is not in the vocabulary, for the request was not checked, or if the device fails.
    ///
    /// # Panics
    /// If the plan exceeds the limits that the runner was made for, or names blocks outside of the pool.
    pub fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        match self.results {
            Results::Sampled | Results::Pooled(_) | Results::Received => {
                self.launch(&plan)?;
                self.collect(&plan, output)
            }
            Results::Sent | Results::Elsewhere => self.run_share_of(&plan),
        }
    }

    /// Whether a model call may be launched before the one before it was collected, with tokens that that one samples.
    pub fn can_run_ahead(&self) -> bool {
        self.device.can_run_ahead(&self.logits)
    }

    /// Whether a model call may be launched before the one before it was collected, if it does not depend on it: other
    /// stages compute that one in the meantime.
    pub fn has_stages(&self) -> bool {
        matches!(self.results, Results::Received)
    }

    /// Starts a model call of a step. A device that [can run ahead](ModelRunner::can_run_ahead) computes it while the
    /// caller does something else, and so do [other stages](ModelRunner::has_stages); at most two are launched and not
    /// collected then.
    ///
    /// # Errors
    /// As [`ModelRunner::run`]; the device's errors come when the call is collected.
    ///
    /// # Panics
    /// As [`ModelRunner::run`].
    pub fn launch(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        let max_launched = 1 + usize::from(self.can_run_ahead() || self.has_stages());
        assert!(
            self.num_launched < max_launched,
            "a call is launched after another one was collected"
        );
        self.check_plan(plan)?;
        let call = &mut self.calls[self.next_call];
        call.context_outputs.clear();
        call.layout.set(plan);
        call.layout.set_ahead(plan, &self.sampled_rows);
        if self.gathers_largest {
            call.layout.set_greedy(plan);
        }
        let samples_here = matches!(self.results, Results::Sampled);
        // Logits of other stages come to the host.
        if D::SAMPLES && samples_here {
            call.layout.set_sampling(plan);
        }
        self.sampled_rows.set(plan, &call.layout);
        self.move_blocks(plan.moves);
        self.decoder
            .move_states(&mut self.device, plan.state_moves, plan.state_copies);
        if let Some(images) = &mut self.images {
            images.make_moves(plan.image_moves)?;
        }
        if !plan.token_ids.is_empty() {
            if samples_here {
                let layout = &self.calls[self.next_call].layout;
                self.sampling.begin(plan, layout);
            }
            self.forward(plan);
        }
        self.next_call = 1 - self.next_call;
        self.num_launched += 1;
        Ok(())
    }

    /// Waits for the oldest model call that was launched and has not been collected, whose plan is given, and appends
    /// its results to `output`.
    ///
    /// # Errors
    /// The device has failed.
    ///
    /// # Panics
    /// There is no such call.
    pub fn collect(
        &mut self,
        plan: &StepPlan<'_>,
        output: &mut StepOutput,
    ) -> Result<(), StepError> {
        assert!(self.num_launched > 0, "a call is launched first");
        let is_last = self.num_launched == 1;
        self.num_launched -= 1;
        if plan.token_ids.is_empty() {
            return Ok(());
        }
        let call = match is_last {
            true => 1 - self.next_call,
            false => self.next_call,
        };
        let has_logits = match &self.results {
            Results::Pooled(pooler) => {
                // They tell whether the device has failed.
                self.device.results(&mut self.logits, 0)?;
                let call = &self.calls[call];
                pooler.append(plan, &call.layout, &call.states, output);
                return Ok(());
            }
            Results::Received => {
                // Guides work while other stages compute. Of two calls, this one is sampled first.
                self.sampling.begin(plan, &self.calls[call].layout);
                self.receive_results_of(call)?;
                true
            }
            // The next call would have replaced the logits.
            _ => is_last,
        };
        let LaunchedCall {
            layout,
            context_outputs,
            ..
        } = &mut self.calls[call];
        layout.set_lost(plan, &self.has_token);
        let num_rows = layout.num_sampled_rows();
        let results = match has_logits {
            true => {
                self.decoder
                    .wait_for_ranks(&mut self.device, &mut self.host)?;
                self.device.results(&mut self.logits, num_rows)?
            }
            false => StepResults {
                logits: &mut [],
                samples: self.device.earlier_samples(&mut self.logits)?,
            },
        };
        let samples = results.samples.iter();
        self.has_token.clear();
        self.has_token
            .extend(samples.map(|sample| matches!(sample, DeviceSample::Sampled(Ok(_)))));
        for (index, outputs) in context_outputs.drain(..) {
            self.sampling.add_context_outputs(index, outputs);
        }
        match has_logits {
            true => {
                let threads = self.device.host_threads();
                self.sampling.sample(threads, plan, layout, results, output);
            }
            false => self
                .sampling
                .take_samples(plan, layout, results.samples, output),
        }
        let vocab_size = self.vocab_size;
        self.probe.ended(Operation::Sampling, || {
            Work::elements(num_rows, vocab_size, 4, 0)
        });
        Ok(())
    }

    /// The most tokens of a call that can be launched while other stages compute the one before.
    pub fn max_unread_rows(&self) -> usize {
        let width = self.decoder.hidden_size();
        match self.results {
            Results::Received => self.host.max_unread() / width,
            _ => usize::MAX,
        }
    }

    /// Receives the results of the model call that was launched and has not been collected, if there is one.
    ///
    /// # Errors
    /// The device or another rank has failed.
    pub fn receive_results(&mut self) -> Result<(), StepError> {
        match self.num_launched {
            1 => self.receive_results_of(1 - self.next_call),
            _ => Ok(()),
        }
    }

    /// Receives the results of a model call from the last stage, unless they are here.
    fn receive_results_of(&mut self, call: usize) -> Result<(), StepError> {
        let LaunchedCall {
            layout,
            context_outputs,
            awaited,
            ..
        } = &mut self.calls[call];
        let Some(step) = awaited.take() else {
            return Ok(());
        };
        for context in layout.contexts() {
            let mut logits = vec![0.0; context.rows.len() * self.vocab_size];
            self.host.receive_results(step, &mut logits)?;
            let threads = self.device.host_threads();
            let outputs = self.sampling.context_outputs(threads, context, logits);
            context_outputs.push((context.sequence, outputs));
        }
        let num_rows = layout.num_sampled_rows();
        self.decoder
            .wait_for_ranks(&mut self.device, &mut self.host)?;
        let results = self.device.results(&mut self.logits, num_rows)?;
        self.host.receive_results(step, results.logits)
    }

    /// Computes this rank's share of a model call, for the rank that samples. It has no results.
    ///
    /// # Errors
    /// The call is not one of this model, or the device or another rank has failed.
    ///
    /// # Panics
    /// If it exceeds the limits that the runner was made for, or names blocks outside of the pool.
    pub fn run_share(&mut self, calls: &mut ReceivedCalls) -> Result<(), StepError> {
        let (call, adapters) = calls.call();
        self.compute_share(call, adapters)?;
        calls.forget_adapters();
        Ok(())
    }

    /// Computes this rank's share of a step whose plan all ranks are given.
    fn run_share_of(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        self.check_plan(plan)?;
        let layout = &mut self.calls[0].layout;
        layout.set(plan);
        if self.gathers_largest {
            layout.set_greedy(plan);
        }
        let mut call = RankCall::default();
        call.set(plan, layout, None);
        let adapters = AdapterRuns::of(&layout.inputs(plan));
        layout.forget_adapters();
        self.compute_share(&call, &adapters)
    }

    fn compute_share(&mut self, call: &RankCall, adapters: &AdapterRuns) -> Result<(), StepError> {
        self.check_tokens(&call.token_ids)?;
        self.move_blocks(&call.moves);
        self.decoder
            .move_states(&mut self.device, &call.state_moves, &call.state_copies);
        if call.token_ids.is_empty() {
            return Ok(());
        }
        let inputs = call.inputs(adapters);
        let sends = matches!(self.results, Results::Sent);
        let mut sent = Ok(());
        let contexts = ContextLogits {
            rows: call.context_rows.iter().cloned(),
            // Only the rank that sends them gets them.
            width: if sends { self.vocab_size } else { 0 },
            take: |_: &mut D, host: &mut RankHost, _, logits: Vec<f32>| {
                if sends && sent.is_ok() {
                    sent = host.send_results(&logits);
                }
            },
        };
        self.pass().compute(inputs, contexts);
        sent?;
        let num_rows = inputs.sampled_rows.len();
        self.decoder
            .wait_for_ranks(&mut self.device, &mut self.host)?;
        let results = self.device.results(&mut self.logits, num_rows)?;
        match sends {
            true => self.host.send_results(results.logits),
            false => Ok(()),
        }
    }

    /// Whether ranks send only the largest logit of a row where nothing else is needed.
    pub fn gathers_largest(&self) -> bool {
        self.gathers_largest
    }

    /// Makes [`ModelRunner::logits`] complete on several ranks, each of which must be told so. Otherwise the rows of
    /// greedy sequences are undefined there.
    pub fn keep_all_logits(&mut self) {
        self.gathers_largest = false;
    }

    /// The logits that the tokens of the last run were chosen from, `[num_sampled, vocab_size]`, in the order of
    /// its output, followed within a sequence by those of its rejected drafts. Where a token was chosen,
    /// penalties and biases are applied; temperature is not.
    pub fn logits(&mut self) -> &[f32] {
        let num_rows = self.calls[1 - self.next_call].layout.num_sampled_rows();
        let logits = self.device.host_logits(&mut self.logits, num_rows);
        // The run would have failed before.
        logits.map_or(&[], |logits| logits)
    }

    /// What it computes with.
    pub fn description(&self) -> String {
        self.device.description()
    }

    /// The bytes of a block in host memory.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError> {
        self.device.host_block(&mut self.host_blocks, block)
    }

    /// Makes moves of blocks, one after the other.
    pub fn move_blocks(&mut self, moves: &[BlockMove]) {
        let Self {
            device,
            cache,
            host_blocks,
            ..
        } = self;
        move_device_blocks(device, moves, cache, host_blocks);
    }

    fn check_plan(&self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        assert!(plan.token_ids.len() <= self.limits.max_num_tokens.index());
        assert!(plan.sequences.len() <= self.limits.max_num_requests as usize);
        assert_eq!(plan.block_size, self.limits.block_size);
        let num_groups = self.limits.num_groups();
        assert_eq!(plan.num_groups, num_groups, "groups of layers");
        self.check_tokens(plan.token_ids)
    }

    fn check_tokens(&self, token_ids: &[TokenId]) -> Result<(), StepError> {
        let vocab_size = self.vocab_size;
        match token_ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(id) => Err(StepError(format!(
                "token id {id} is not below the vocabulary size {vocab_size}"
            ))),
            None => Ok(()),
        }
    }

    /// What a pass runs on.
    fn pass(&mut self) -> PassOn<'_, D, P> {
        PassOn {
            device: &mut self.device,
            host: &mut self.host,
            decoder: &mut self.decoder,
            cache: &mut self.cache,
            logits: &mut self.logits,
            probe: &mut self.probe,
        }
    }

    /// This rank's part of a model call, up to the logits.
    fn forward(&mut self, plan: &StepPlan<'_>) {
        let Self {
            probe,
            device,
            host,
            decoder,
            cache,
            logits,
            calls,
            next_call,
            draft_head,
            images,
            sampling,
            ..
        } = self;
        let LaunchedCall {
            layout,
            context_outputs,
            states,
            awaited,
        } = &mut calls[*next_call];
        let images = images.as_mut().map(|images| images.inputs(plan));
        let images = images.unwrap_or_default();
        let inputs = StepInputs {
            images: &images.rows,
            deep_images: &images.deep_rows,
            positions: images.positions,
            mutual: &images.mutual,
            ..layout.inputs(plan)
        };
        let contexts = layout.contexts();
        let pass = PassOn {
            device,
            host,
            decoder,
            cache,
            logits,
            probe,
        };
        let contexts = ContextLogits {
            rows: contexts.iter().map(|context| context.rows.clone()),
            width: self.vocab_size,
            take: |device: &mut D, _: &mut RankHost, index: usize, logits: Vec<f32>| {
                let context = &contexts[index];
                let outputs = sampling.context_outputs(device.host_threads(), context, logits);
                context_outputs.push((context.sequence, outputs));
            },
        };
        pass.compute(inputs, contexts);
        if let Some(draft_head) = draft_head {
            let num_rows = inputs.token_ids.len();
            draft_head.keep_states(inputs, |out| decoder.tapped_states(device, num_rows, out));
        }
        let num_rows = layout.num_sampled_rows();
        match &self.results {
            Results::Received => {
                *awaited = Some(host.step());
                return;
            }
            Results::Pooled(_) => decoder.states(device, num_rows, states),
            _ => device.keep_samples(logits, num_rows),
        }
        layout.forget_adapters();
    }
}

impl<D: Device> ComputeRows for ModelRunner<D> {
    fn compute_rows(&mut self, inputs: StepInputs<'_>) -> Result<&[f32], StepError> {
        self.check_tokens(inputs.token_ids)?;
        self.pass().compute_rows(inputs);
        let num_rows = inputs.sampled_rows.len();
        Ok(self.device.results(&mut self.logits, num_rows)?.logits)
    }

    fn move_blocks(&mut self, moves: &[BlockMove]) {
        self.move_blocks(moves);
    }

    fn max_num_tokens(&self) -> usize {
        self.limits.max_num_tokens.index()
    }

    fn block_size(&self) -> BlockSize {
        self.limits.block_size
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

/// The vision tower, if prompts may have images.
fn kept_images<D: Device>(
    source: &ModelSource,
    limits: &RunnerLimits,
    options: &D::Options,
    is_rank: bool,
) -> Result<Option<Box<KeptImages<D>>>, LoadError> {
    let Some((tower, weights)) = source.tower().zip(source.tower_source()?) else {
        return Ok(None);
    };
    if is_rank {
        return Err(LoadError::Resource(
            "images are encoded by one process: leave out tensor_parallel_size and pipeline_parallel_size".to_owned(),
        ));
    }
    let encoder = ImageEncoder::new(tower, weights, limits, options)?;
    Ok(Some(Box::new(KeptImages::new(encoder, source.spec()))))
}

/// The pooler of a pooling model.
fn pooler(source: &ModelSource, is_rank: bool) -> Result<Option<Pooler>, LoadError> {
    if is_rank && source.spec().pooling.is_some() {
        return Err(LoadError::Resource(
            "pooling models are computed by one rank: leave out tensor_parallel_size and \
             pipeline_parallel_size"
                .to_owned(),
        ));
    }
    Pooler::load(source)
}

/// Makes a device one of several ranks, unless it is the only one, and tells which part of the model it has.
fn join_ranks<D: Device>(
    device: &mut D,
    source: &ModelSource,
    host: &mut RankHost,
    tiling: Tiling,
) -> Result<(ModelPart, Option<D::Ranks>), LoadError> {
    let grid = host.grid();
    let rank = host.stage() * grid.ranks_per_stage + host.rank();
    let part = source.part(grid, rank, tiling)?;
    if grid.num_ranks() == 1 {
        return Ok((part, None));
    }
    let ranks = device.join_ranks(host)?;
    if grid.ranks_per_stage > 1 && source.spec().mixture().is_some() {
        ranks.check_alike(device, host)?;
    }
    Ok((part, Some(ranks)))
}

/// The groups of the layers that this part of a model has.
fn layer_groups(
    part: &ModelPart,
    spec: &ModelSpec,
    limits: &RunnerLimits,
) -> Result<LayerGroups, LoadError> {
    let layers = spec.cached_layers(part.stage.layers.clone());
    let num_layers = spec.num_cached_layers();
    let Some(groups) = &limits.layer_groups else {
        return Ok(one_group(spec, layers.len()));
    };
    match groups.num_layers() == num_layers {
        true => Ok(groups.with_layers(layers)),
        false => Err(LoadError::Resource(format!(
            "{} groups of {} layers in the KV cache, and the model has {num_layers} layers with keys and values",
            groups.num_groups(),
            groups.num_layers()
        ))),
    }
}

/// So many layers of a model in one group.
fn one_group(spec: &ModelSpec, num_layers: usize) -> LayerGroups {
    match spec.is_bidirectional {
        // Its prompts are computed in one step, which reads what a layer has stored before the next one stores.
        true => LayerGroups::of_one_step(num_layers),
        false => LayerGroups::one(num_layers),
    }
}

fn kv_cache<D: Device>(
    device: &mut D,
    spec: &ModelSpec,
    groups: &LayerGroups,
    limits: &RunnerLimits,
) -> Result<D::KvCache, LoadError> {
    let layouts = kv_layouts(spec, limits.block_size, limits.kv_dtype);
    let cache = device.alloc_kv_cache(&layouts, groups, limits.num_blocks.index());
    cache.map_err(|error| {
        LoadError::Resource(format!(
            "{error}, for a KV cache of {} blocks of {} tokens; lower max_tokens_in_paged_kv_cache or \
             kv_cache_free_gpu_mem_fraction, or max_num_requests or max_seq_len with a contiguous cache",
            limits.num_blocks,
            limits.block_size.tokens()
        ))
    })
}

/// The widths of the activations of a step.
fn step_widths(spec: &ModelSpec, quantised: QuantisedWidths) -> StepWidths {
    let mixture = spec.mixture();
    let num_router_logits = mixture.map_or(0, |shape| shape.routing.num_logits());
    let [sums, inputs, widest_inputs] = match spec.latent() {
        Some(latent) => latent_widths(latent),
        // Queries, keys and values; the rotated queries, and what attention makes of them.
        None => {
            let shapes = spec.head_shapes().into_iter();
            let widths = shapes.map(|(heads, stores)| {
                let qkv_len = if stores {
                    heads.qkv_len()
                } else {
                    heads.q_len()
                };
                let [q_len, out_len] = [heads.q_len(), heads.out_len()];
                [qkv_len, q_len + out_len, q_len.max(out_len)]
            });
            widths.fold([0; 3], |[sums, inputs, widest], of_shape| {
                let [sums_of_shape, inputs_of_shape, widest_of_shape] = of_shape;
                [
                    sums + sums_of_shape,
                    inputs + inputs_of_shape,
                    widest.max(widest_of_shape),
                ]
            })
        }
    };
    let of_states = spec.recurrence().map_or([0; 2], |recurrence| {
        [recurrence.shape.input_len(), recurrence.shape.out_len()]
    });
    let of_late_inputs = spec.late_inputs().map_or([0; 2], late_widths);
    let of_gates: usize = spec.gate_widths().iter().sum();
    let of_inputs = spec.layer_inputs.as_ref();
    let of_inputs = of_inputs.map_or([0; 2], |inputs| {
        [inputs.width * (spec.num_layers() + 1), inputs.width]
    });
    let of_streams = stream_widths(spec);
    let has_experts_block = spec.layers.iter().any(|it| it.experts_block.is_some());
    let of_experts_block = if has_experts_block {
        spec.hidden_size
    } else {
        0
    };
    let inner: usize = spec.intermediate_sizes().iter().sum();
    let projections = spec.embedding_projections.as_ref();
    let embedding_width = projections.map_or(0, |_| spec.embedding_width());
    StepWidths {
        // The residual stream and its summand, embeddings of another width, rows of attention and of recurrent
        // states, and what experts are chosen by.
        sums: 2 * spec.hidden_size
            + embedding_width
            + sums
            + of_states[0]
            + of_late_inputs[0]
            + of_gates
            + num_router_logits
            + of_inputs[0]
            + of_experts_block
            + of_streams[0],
        // Its norm, embeddings of another width, the buffers of attention and of recurrent states, and the inner
        // activations.
        inputs: spec.hidden_size
            + embedding_width
            + inputs
            + of_states[1]
            + of_late_inputs[1]
            + inner
            + of_inputs[1]
            + of_streams[1],
        widest_inputs: spec.max_intermediate_size().max(widest_inputs),
        logits: spec.vocab_size,
        quantised,
    }
}

fn step_capacity(spec: &ModelSpec, limits: &RunnerLimits) -> StepCapacity {
    StepCapacity {
        max_num_tokens: limits.max_num_tokens.index(),
        max_num_sequences: limits.max_num_requests as usize,
        max_seq_len: limits.max_seq_len.index(),
        max_blocks_per_sequence: limits.max_seq_len.blocks_ceil(limits.block_size).index()
            * limits.num_groups(),
        num_layer_groups: limits.num_groups(),
        num_q_heads: spec.max_query_heads(),
        has_slopes: spec.slope_factor.is_some(),
        adapters: AdapterCapacity {
            max_rank: limits.adapters.max_rank,
            max_bytes: limits.adapters.num_running_bytes() as usize,
            num_places: spec.num_places(),
        },
    }
}

/// Refuses limits that the model cannot keep.
fn check(spec: &ModelSpec, limits: &RunnerLimits) -> Result<(), LoadError> {
    let max_seq_len = spec.max_seq_len();
    if limits.max_seq_len.index() > max_seq_len {
        return Err(LoadError::Config {
            problem: format!(
                "max_seq_len {} is above {max_seq_len}, the model's max_position_embeddings",
                limits.max_seq_len
            ),
            remedy: format!(
                "set it to at most {max_seq_len}, or give config.json the number of tokens that the model can read as \
                 max_position_embeddings"
            ),
        });
    }
    let num_windows = limits.attention.windows.len();
    if num_windows > spec.num_layers() {
        return Err(LoadError::Config {
            problem: format!(
                "max_attention_window_size has {num_windows} windows for {} layers",
                spec.num_layers()
            ),
            remedy: "write one for each layer, or a shorter list, which is repeated".to_owned(),
        });
    }
    Ok(())
}
