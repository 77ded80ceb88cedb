//! The decoder-only transformer: one forward pass for every model and every device.
//!
//! A step is one pass over the weights for all tokens of all sequences, packed:
//!
//! ```text
//! token ids -> hidden [m, hidden_size], the residual stream
//! each layer:  hidden += o(attention(rope(qkv(norm(hidden)))))      with norms where the model has them,
//!              hidden += down(activation(gate) * up of norm(hidden))      or both from the same hidden;
//!                        or the sum of a few experts of this form; a layer may have one of the two blocks alone
//! kept rows -> lm_head(norm(hidden)) -> logits [num_rows, vocab_size]
//! ```
//!
//! The inputs of matrix products and the KV cache are bf16; all sums are f32. Only attention combines rows,
//! and only rows of the same sequence, so what is computed for a sequence does not depend on the rest of
//! the step.

use std::ops::Range;

use super::alibi;
use super::draft_head::{SharedWeights, StateTap};
use super::experts_block::{ExpertsBlockBuffers, ExpertsBlockWeights};
use super::feed_forward_weights::{DenseWeights, FeedForwardWeights};
use super::indexer::IndexerBuffers;
use super::latent::LatentBuffers;
use super::layer_attention::{
    AttentionBuffers, LatentStep, LayerAttention, LayerShape, attention_buffers, inner_buffers,
    layer_attention, place, upload_angles,
};
use super::layer_inputs::LayerInputs;
use super::limits::RunnerLimits;
use super::linear_weights::NormWeights;
use super::model_source::ModelSource;
use super::positions::Positions;
use super::probe::{Operation, Probe, Work};
use super::recurrence::RecurrenceBuffers;
use super::residual::{Probed, ResidualStream, Scale, adapted_rows, check_norms};
use super::rope::RopeAxes;
use super::share::ModelShare;
use super::spec::{LayerSpec, ModelSpec, Norms};
use super::stage::ModelPart;
use super::state_slots::StateSlots;
use super::streams::Streams;
use super::weights::{Layer, Weights};
use inflight_base::{LoadError, StepError};
use inflight_device::{
    AdapterRun, Device, HeadBiases, HeadPlaces, HeadShape, KvDtype, LatentShape, Linear,
    LogitsTransform, MixtureShape, QkNorm, QkNormKind, RankHost, RankOps, RopeParams, Routing,
    RowNormOps, StateOps, StepInputs,
};
use inflight_engine::{StateCopy, StateMove};

/// A model's weights on a device, and the activations of its largest step.
pub(super) struct Decoder<D: Device> {
    /// Only for a rank of several.
    ranks: Option<D::Ranks>,
    /// Where it gets the rows of the previous stage from; `None`: it embeds tokens.
    previous_stage: Option<D::Ranks>,
    /// Where it sends its rows to; `None`: it has the output layer.
    next_stage: Option<D::Ranks>,
    /// Only for pooling models.
    states: Option<D::States>,
    /// The weights of this stage, whose layers are counted from 0.
    weights: Weights<D>,
    /// One table for each position embedding that the layers have.
    angles: Vec<D::Angles>,
    attention: Vec<LayerAttention>,
    /// The slopes of linear biases, one for each query head.
    slopes: Option<D::Vector>,
    logits: LogitsTransform,
    /// Of the output layer, in the weights of adapters.
    output_place: usize,
    /// Only for a rank of several.
    vocabulary: Option<VocabularyPart<D>>,
    residual: ResidualStream<D>,
    /// One for each of the shapes that layers have.
    buffers: Vec<AttentionBuffers<D>>,
    /// One for each of the widths inside of feed-forward blocks, `[max_num_tokens, width]`: inputs of the down
    /// projections.
    inner: Vec<D::Inputs>,
    /// Only for a model with latent attention.
    latent: Option<LatentBuffers<D>>,
    /// Only for a model with recurrent states.
    recurrence: Option<RecurrenceBuffers<D>>,
    /// Only for a model whose layers have inputs or factors of their own.
    layer_inputs: Option<LayerInputs<D>>,
    /// Only for a model with several residual streams.
    streams: Option<Streams<D>>,
    /// Only for a model with experts beside feed-forward blocks.
    experts_block: Option<ExpertsBlockBuffers<D>>,
    /// The gates of attention, of each width: `[max_num_tokens, num_gates]`.
    gates: Vec<D::Sums>,
    /// Only for a rank of a model with norms over all heads.
    row_norm: Option<RowNorm<D>>,
    /// Only for a model with experts.
    mixture: Option<MixtureBuffers<D>>,
    /// Only with a draft head.
    tap: Option<StateTap<D>>,
}

/// The part of the vocabulary that a rank of several has the embeddings and the logits of.
struct VocabularyPart<D: Device> {
    ranks: D::Ranks,
    first_token: usize,
    /// Tokens of all ranks.
    widths: Vec<usize>,
    /// `[max_sampled_rows, num_tokens]`.
    logits: D::Logits,
    num_tokens: usize,
}

/// What norms over the heads of all ranks need.
struct RowNorm<D: Device> {
    ops: D::RowNorms,
    places: HeadPlaces,
    /// `[max_num_tokens, heads of the model]`.
    squares: D::Sums,
}

/// What mixtures of experts need.
struct MixtureBuffers<D: Device> {
    routing: Routing,
    /// `[max_num_tokens, num_logits]`.
    logits: D::Sums,
    rows: D::ExpertRows,
}

impl<D: Device> Decoder<D> {
    /// Loads the weights of the part of a rank, and sizes everything for `limits`. `spec` has the sizes of this part,
    /// with all layers.
    pub(super) fn new(
        source: &ModelSource,
        spec: &ModelSpec,
        part: &ModelPart,
        limits: &RunnerLimits,
        device: &mut D,
        (host, ranks): (&RankHost, Option<D::Ranks>),
    ) -> Result<Self, LoadError> {
        let load = |device: &mut D| Weights::load(source, limits.weights, part, device);
        let parts = [source.spec(), spec];
        let mut decoder = Self::with_weights(parts, part, limits, device, (host, ranks), load)?;
        if let Some(head) = source.draft_head() {
            let ops = draft_head_ops::<D>(ranks.is_some())?;
            decoder.tap = Some(StateTap::new(head, limits, device, ops)?);
        }
        Ok(decoder)
    }

    /// Sizes layers for `limits` that begin with [rows that they are given](Decoder::hidden_mut). `load` loads their
    /// weights.
    pub(super) fn of_layers(
        spec: &ModelSpec,
        limits: &RunnerLimits,
        device: &mut D,
        load: impl FnOnce(&mut D) -> Result<Weights<D>, LoadError>,
    ) -> Result<Self, LoadError> {
        let part = ModelPart::of_rank(1.into(), 0, spec, None)?;
        let alone = (&RankHost::alone(), None);
        Self::with_weights([spec; 2], &part, limits, device, alone, load)
    }

    /// `specs` are those of the whole model and of the part of a rank.
    fn with_weights(
        [whole, spec]: [&ModelSpec; 2],
        part: &ModelPart,
        limits: &RunnerLimits,
        device: &mut D,
        (host, ranks): (&RankHost, Option<D::Ranks>),
        load: impl FnOnce(&mut D) -> Result<Weights<D>, LoadError>,
    ) -> Result<Self, LoadError> {
        let max_rows = limits.max_num_tokens.index();
        let states = match spec.pooling {
            Some(_) => Some(pooling_ops::<D>()?),
            None => None,
        };
        check_norms(spec)?;
        if let Some(latent) = spec.latent_shape() {
            check_latent(spec.family, &latent, limits)?;
        }
        check_indexer(spec, limits)?;
        if limits.attention.shifts_sinks {
            check_shift(spec)?;
        }
        // Before the weights: not all devices have all of these.
        let layer_inputs = LayerInputs::new(device, spec, max_rows)?;
        let indexer = IndexerBuffers::new(device, spec, max_rows)?;
        let mixture = match spec.mixture() {
            Some(shape) => Some(MixtureBuffers::new(device, max_rows, &shape)?),
            None => None,
        };
        let layers = &spec.layers[part.stage.layers.clone()];
        let num_tiles = part.num_tiles();
        let (rows, slots) = ((max_rows, num_tiles), StateSlots::new(limits));
        let recurrence = RecurrenceBuffers::new(device, layers, rows, slots)?;
        let streams = Streams::new(device, spec, max_rows)?;
        let experts_block = ExpertsBlockBuffers::new(device, spec, max_rows)?;
        let widths = spec.gate_widths().into_iter();
        let gates = widths.map(|width| device.alloc_sums(max_rows, width));
        let gates = gates.collect::<Result<_, _>>()?;
        let weights = load(device)?;
        let vocabulary = match &part.share {
            Some(share) if !share.is_whole() => {
                let ranks = ranks.ok_or_else(alone)?;
                Some(VocabularyPart::new(device, ranks, share, limits)?)
            }
            _ => None,
        };
        // A sequence is not longer than the pool, unless it gives blocks back.
        let longest = limits.num_blocks.tokens(limits.block_size);
        let num_positions = match spec.largest_window(&limits.attention, limits.max_seq_len) {
            Some(_) => limits.max_seq_len,
            None => limits.max_seq_len.min(longest),
        };
        let (mut attention, ropes) = layer_attention::<D>(spec, limits);
        let latent = spec.latent();
        let other_stage = |is_there: bool| match is_there {
            true => ranks.ok_or_else(alone).map(Some),
            false => Ok(None),
        };
        let previous_stage = other_stage(!part.stage.is_first())?;
        let next_stage = other_stage(!part.stage.is_last())?;
        if let Some(ranks) = previous_stage.or(next_stage) {
            let (max_sequences, width) = (limits.max_num_requests as usize, spec.hidden_size);
            ranks.reserve_rows_between_stages(device, host, max_rows, max_sequences, width)?;
        }
        let mut attention: Vec<_> = attention.drain(part.stage.layers.clone()).collect();
        place(&mut attention, layers);
        let buffers = attention_buffers(device, spec, &mut attention, max_rows)?;
        let inner = inner_buffers(device, spec, &mut attention, layers, max_rows)?;
        Ok(Self {
            ranks,
            previous_stage,
            next_stage,
            states,
            weights,
            angles: upload_angles(device, spec, &ropes, limits.max_seq_len, num_positions)?,
            slopes: match spec.slope_factor {
                Some(factor) => {
                    // Those of a rank's heads among all of the model's.
                    let slopes = alibi::slopes(whole.num_heads);
                    let own = match &part.share {
                        Some(share) => share.heads.queries.clone(),
                        None => 0..slopes.len(),
                    };
                    let own = slopes[own].iter().map(|slope| slope * factor);
                    Some(device.upload_vector(own.collect())?)
                }
                None => None,
            },
            attention,
            logits: spec.logits,
            output_place: spec.output_place() * num_tiles,
            vocabulary,
            residual: ResidualStream::new(device, max_rows, spec, num_tiles, host)?,
            row_norm: match &part.share {
                Some(share) => RowNorm::new(device, max_rows, whole, share)?,
                None => None,
            },
            buffers,
            inner,
            latent: match latent {
                Some(latent) => Some(LatentBuffers::new(device, max_rows, latent, indexer)?),
                None => None,
            },
            recurrence,
            layer_inputs,
            streams,
            experts_block,
            gates,
            mixture,
            tap: None,
        })
    }

    /// Moves recurrent states, and copies those that the next step begins with.
    pub(super) fn move_states(
        &mut self,
        device: &mut D,
        moves: &[StateMove],
        copies: &[StateCopy],
    ) {
        if let Some(recurrence) = &mut self.recurrence {
            recurrence.move_states(device, moves, copies);
        }
    }

    /// Prepares recurrent states for a step, before it begins on the device. Returns [`StepInputs::is_repeated`], until
    /// [`Decoder::end_states`].
    pub(super) fn begin_states(&mut self, device: &mut D, inputs: StepInputs<'_>) -> Vec<bool> {
        match &mut self.recurrence {
            Some(recurrence) => recurrence.begin(device, inputs),
            None => Vec::new(),
        }
    }

    /// Ends a step whose recurrent states [`Decoder::begin_states`] has prepared.
    pub(super) fn end_states(&mut self, is_repeated: Vec<bool>) {
        if let Some(recurrence) = &mut self.recurrence {
            recurrence.end(is_repeated);
        }
    }

    /// Computes a step except for the logits: stores keys and values in `cache`, and leaves the normalised hidden
    /// states of the kept rows. A stage begins with the rows of the one before, and sends its own to the one behind.
    pub(super) fn forward(
        &mut self,
        device: &mut D,
        host: &mut RankHost,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        probe: &mut impl Probe,
    ) {
        let run = &mut Probed {
            device,
            host,
            ranks: self.ranks,
            probe,
            adapters: inputs.adapters,
        };
        let num_rows = inputs.token_ids.len();
        let weights = &self.weights;
        if let Some(ranks) = self.previous_stage {
            self.residual.receive(run, ranks, num_rows);
        } else {
            let vocabulary = self.vocabulary.as_ref();
            let part = vocabulary.map(|part| (part.ranks, part.first_token));
            let positions = weights.positions();
            let in_order = positions.and_then(Positions::in_order);
            let table = (weights.embedding(), part);
            let projection = weights.embedding_projection.as_ref();
            let residual = &mut self.residual;
            residual.embed(run, step, num_rows, table, projection, in_order);
            if let Some(ops) = D::STATES.filter(|_| !inputs.images.is_empty()) {
                residual.replace_rows(run.device, ops, inputs.images);
            }
            if let Some(ops) = self.states {
                if let Some((table, rows)) = positions.and_then(|it| it.without_padding(&inputs)) {
                    residual.add_table_rows(run.device, ops, table, &rows);
                }
                let all = 0..num_rows as u32;
                let rows = [std::slice::from_ref(&all), inputs.second_texts];
                for (rows, added) in rows.into_iter().zip(&weights.types) {
                    self.residual.add_to_rows(run.device, ops, rows, added);
                }
            }
            if let Some(norm) = &weights.embedding_norm {
                self.residual.norm_in_place(run, num_rows, norm);
            }
        }
        if let Some((layer_inputs, of_layers)) = self
            .layer_inputs
            .as_mut()
            .zip(weights.layer_inputs.as_ref())
        {
            self.residual.norm(run, num_rows, None);
            layer_inputs.begin(run, step, num_rows, self.residual.normed(), of_layers);
        }
        if let Some((streams, of_model)) = self.streams.as_mut().zip(weights.streams.as_ref()) {
            streams.begin(run, num_rows, &self.residual, of_model);
        }
        let layers = 0..self.num_layers();
        self.layers(run, cache, step, inputs, layers);
    }

    /// Where [layers](Decoder::of_layers) find the rows that they begin with, `[max_num_tokens, hidden_size]`.
    pub(super) fn hidden_mut(&mut self) -> &mut D::Sums {
        self.residual.hidden_mut()
    }

    /// Its layers.
    pub(super) fn num_layers(&self) -> usize {
        self.weights.layers.len()
    }

    /// The residual stream behind the layers that were computed last.
    pub(super) fn hidden(&self) -> &D::Sums {
        self.residual.hidden()
    }

    /// Normalises these rows where they are.
    pub(super) fn norm_hidden_in_place(
        &mut self,
        device: &mut D,
        num_rows: usize,
        norm: &NormWeights<D>,
    ) {
        let run = &mut Probed {
            device,
            host: &mut RankHost::alone(),
            ranks: self.ranks,
            probe: &mut (),
            adapters: &[],
        };
        self.residual.norm_in_place(run, num_rows, norm);
    }

    /// Computes some [layers](Decoder::of_layers), behind those before them: as [`Decoder::forward`] behind the
    /// embedding.
    pub(super) fn compute_layers(
        &mut self,
        device: &mut D,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        layers: Range<usize>,
        probe: &mut impl Probe,
    ) {
        let run = &mut Probed {
            device,
            host: &mut RankHost::alone(),
            ranks: self.ranks,
            probe,
            adapters: inputs.adapters,
        };
        self.layers(run, cache, step, inputs, layers);
    }

    fn layers<'a, P: Probe>(
        &mut self,
        run: &mut Probed<'a, D, P>,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'a>,
        layers: Range<usize>,
    ) {
        let mut num_rows = inputs.token_ids.len();
        let weights = &self.weights;
        if layers.start == 0 {
            let first = weights.layers[0].norms.first();
            self.residual.norm(run, num_rows, first);
        }
        let reads_output = self.tap.as_ref().is_some_and(StateTap::reads_output);
        let num_layers = weights.layers.len();
        for index in layers {
            if let Some(tap) = &mut self.tap {
                tap.read(run.device, index, num_rows, self.residual.hidden());
            }
            let layer = &self.weights.layers[index];
            if let Some((streams, of_layer)) = self.streams.as_mut().zip(layer.streams.as_ref()) {
                let first = layer.norms.first();
                streams.begin_layer(run, num_rows, &mut self.residual, of_layer, first);
            }
            self.attend(run, cache, step, inputs, index);
            let is_last = self.next_stage.is_none() && index + 1 == num_layers;
            let keeps_rows = is_last && !reads_output;
            if keeps_rows {
                // The cache is complete. From here on only the kept rows matter.
                num_rows = inputs.kept_rows.len();
                if num_rows == 0 {
                    return;
                }
                let layer = &self.weights.layers[index];
                let attended = match (&layer.recurrence, &mut self.recurrence) {
                    (Some(_), Some(recurrence)) => &mut recurrence.mixed,
                    _ => &mut self.buffers[self.attention[index].buffers].attended,
                };
                self.residual.keep_rows(run.device, step, attended);
                if let Some(layer_inputs) = &mut self.layer_inputs {
                    layer_inputs.keep_rows(run.device, step);
                }
                if let Some(streams) = &mut self.streams {
                    streams.keep_rows(run.device, step);
                }
                if self.ends_shortcut(index)
                    && let Some(experts_block) = &mut self.experts_block
                {
                    experts_block.keep_rows(run.device, step);
                }
                run.adapters = inputs.kept_adapters;
            }
            self.end_layer(run, index, num_rows, keeps_rows);
            if let Some((images, ops)) = inputs.deep_images.get(index).zip(D::STATES)
                && let Some(next) = self.weights.layers.get(index + 1)
            {
                self.residual.add_image_rows(run.device, ops, images);
                self.residual.norm(run, num_rows, next.norms.first());
            }
        }
        if let Some(tap) = self.tap.as_mut().filter(|_| reads_output) {
            tap.read_output(run.device, num_rows, self.residual.normed());
            if inputs.kept_rows.is_empty() {
                return;
            }
            self.residual.keep_normed_rows(run.device, step);
        }
        if let Some(ranks) = self.next_stage {
            self.residual.send(run, ranks, num_rows);
        }
        let head = self.weights.head.as_ref();
        if let Some(projection) = head.and_then(|head| head.projection.as_ref()) {
            self.residual.narrow(run.device, num_rows, projection);
        }
    }

    /// Computes the logits of the first `num_rows` kept rows, some of which have adapters, and of some of which only
    /// the largest logit is needed. Only the last stage has logits.
    pub(super) fn logits(
        &mut self,
        device: &mut D,
        host: &mut RankHost,
        num_rows: usize,
        (adapters, greedy_rows): (&[AdapterRun], &[u32]),
        out: &mut D::Logits,
        probe: &mut impl Probe,
    ) {
        if num_rows == 0 {
            return;
        }
        let lm_head = self.weights.output_layer();
        let states = self.residual.states();
        let adapted = adapted_rows(adapters, Some(self.output_place));
        let compute = |device: &mut D, out: &mut D::Logits| {
            device.logits(num_rows, states, lm_head, self.logits, adapted, out);
        };
        match &mut self.vocabulary {
            None => compute(device, out),
            Some(VocabularyPart {
                ranks,
                widths,
                logits,
                ..
            }) => {
                compute(device, logits);
                ranks.gather_logits(device, host, num_rows, greedy_rows, widths, logits, out);
            }
        }
        probe.ended(Operation::LmHead, || {
            Work::product(num_rows, &lm_head.matrix, false)
        });
    }

    /// Computes the logits of some of the kept rows, which may have an adapter, in memory of the host, `[rows.len(),
    /// vocab_size]`.
    pub(super) fn context_logits(
        &mut self,
        device: &mut D,
        host: &mut RankHost,
        rows: Range<usize>,
        adapter: Option<&AdapterRun>,
        out: &mut [f32],
        probe: &mut impl Probe,
    ) {
        let num_rows = rows.len();
        let lm_head = self.weights.output_layer();
        let states = self.residual.states();
        let own = adapter.map(|run| AdapterRun {
            rows: 0..num_rows as u32,
            ..run.clone()
        });
        let adapted = adapted_rows(own.as_slice(), Some(self.output_place));
        // A failure is that of the step.
        let _ = self.wait_for_ranks(device, host);
        let compute = |device: &mut D, out: &mut [f32]| {
            device.context_logits(states, rows, lm_head, self.logits, adapted, out);
        };
        match &self.vocabulary {
            None => compute(device, out),
            Some(part) => {
                let mut logits = vec![0.0; num_rows * part.num_tokens];
                compute(device, &mut logits);
                host.gather_columns(&part.widths, &logits, out, |row| row);
            }
        }
        probe.ended(Operation::LmHead, || {
            Work::product(num_rows, &lm_head.matrix, false)
        });
    }

    /// Writes the normalised hidden states of the first `num_rows` kept rows, `[num_rows, embedding_width]`.
    /// Only for pooling models.
    pub(super) fn states(&self, device: &mut D, num_rows: usize, out: &mut Vec<f32>) {
        out.resize(num_rows * self.residual.state_width(), 0.0);
        if let Some(ops) = self.states.filter(|_| num_rows > 0) {
            ops.read_states(device, self.residual.states(), num_rows, out);
        }
    }

    /// Writes what the draft head reads of the tokens of a step. Nothing without a head.
    pub(super) fn tapped_states(&mut self, device: &mut D, num_rows: usize, out: &mut Vec<f32>) {
        if let Some(tap) = &mut self.tap {
            tap.states(device, num_rows, out);
        }
    }

    /// The weights that a draft head may compute with. Only for a model that generates, in one stage.
    pub(super) fn shared_weights(&self) -> SharedWeights<'_, D> {
        SharedWeights {
            embedding: self.weights.embedding(),
            output_layer: self.weights.output_layer(),
            transform: self.logits,
        }
    }

    /// The inputs of the output layer for the kept rows, normalised.
    pub(super) fn normed(&self) -> &D::Inputs {
        self.residual.normed()
    }

    /// The output layer, if it has one.
    pub(super) fn own_output_layer(&self) -> Option<&Linear<D>> {
        self.weights.lm_head()
    }

    /// Whether it has the output layer: it is the last stage of a model that generates.
    pub(super) fn has_logits(&self) -> bool {
        self.weights.lm_head().is_some()
    }

    /// Whether other ranks have the logits of other tokens.
    pub(super) fn has_part_of_logits(&self) -> bool {
        self.has_logits() && self.vocabulary.is_some()
    }

    /// Waits for the other ranks, before the results of a step are read.
    ///
    /// # Errors
    /// An operation between ranks has failed.
    pub(super) fn wait_for_ranks(
        &self,
        device: &mut D,
        host: &mut RankHost,
    ) -> Result<(), StepError> {
        self.ranks.map_or(Ok(()), |ranks| ranks.wait(device, host))
    }

    /// Ends a step of several ranks, behind its end on the device.
    pub(super) fn end_step(&self, device: &mut D, host: &mut RankHost) {
        if let Some(ranks) = self.ranks {
            ranks.end_step(device, host);
        }
    }

    /// The width of the residual stream.
    pub(super) fn hidden_size(&self) -> usize {
        self.residual.hidden_size()
    }

    /// Leaves only the sampled rows of the kept ones.
    pub(super) fn keep_sampled_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        device.keep_sampled_rows(step, self.residual.states_mut());
    }

    /// `attended = attention(rope(qkv(normed)))`, or what a recurrent state gives in its place.
    fn attend<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        cache: &mut D::KvCache,
        step: &D::Step<'_>,
        inputs: StepInputs<'_>,
        index: usize,
    ) {
        let Layer {
            qkv,
            latent,
            recurrence,
            recurrence_block,
            gate,
            clip,
            qk_norm,
            sink_logits,
            ..
        } = &self.weights.layers[index];
        // A layer of one block may have none.
        let Some(qkv) = qkv else { return };
        let num_rows = inputs.token_ids.len();
        let attention = self.attention[index];
        let params = attention.params;
        let LayerShape { heads, stores, .. } = attention.shape;
        let buffers = &mut self.buffers[attention.buffers];
        let place = attention.place;
        if let Some((block, recurrence)) = recurrence_block.as_ref().zip(self.recurrence.as_mut()) {
            let own = (&block.input, &block.recurrence, attention.recurrence);
            recurrence.mix(run, step, inputs, self.residual.normed(), own);
            let output = (&recurrence.mixed, &block.output);
            let residual = &mut self.residual;
            let scale = Scale::All(block.scale);
            residual.add_scaled(run, Operation::O, num_rows, output, scale);
        }
        if let Some((layer, recurrence)) = recurrence.as_ref().zip(self.recurrence.as_mut()) {
            let normed = self.residual.normed();
            return recurrence.mix(run, step, inputs, normed, (qkv, layer, place));
        }
        if let Some((latent, latent_buffers)) = latent.as_ref().zip(self.latent.as_mut()) {
            let at = LatentStep {
                step,
                num_rows,
                spans: inputs.spans,
                layer: place,
                angles: &self.angles[attention.angles],
                params,
                kv_bytes_per_position: attention.kv_bytes_per_position,
            };
            let AttentionBuffers {
                qkv: sums,
                attended,
                ..
            } = buffers;
            let x = self.residual.normed();
            return latent_buffers.attend(run, &at, (qkv, latent), x, sums, cache, attended);
        }
        run.project_qkv(num_rows, self.residual.normed(), qkv, &mut buffers.qkv);
        if let Some((bound, ops)) = clip.zip(self.layer_inputs.as_ref()) {
            ops.clip(run.device, num_rows, bound, &mut buffers.qkv);
        }
        let mut norm = qk_norm
            .as_ref()
            .zip(attention.qk_norm)
            .map(|([q, k], norm)| QkNorm {
                q,
                k,
                kind: norm.kind,
                has_values: norm.has_values,
                eps: norm.eps,
            });
        if let Some(over_ranks) = &mut self.row_norm
            && let Some(row_norm) = norm.take_if(|norm| norm.kind == QkNormKind::Row)
        {
            let RowNorm {
                ops,
                places,
                squares,
            } = over_ranks;
            let (device, host, qkv) = (&mut *run.device, &mut *run.host, &mut buffers.qkv);
            ops.norm(
                device, host, num_rows, heads, row_norm, places, qkv, squares,
            );
        }
        let heads = match stores {
            true => heads,
            false => HeadShape {
                num_kv_heads: 0,
                ..heads
            },
        };
        let rope = RopeParams {
            heads,
            qk_norm: norm,
            angles: &self.angles[attention.angles],
        };
        let AttentionBuffers {
            qkv,
            q,
            sink_q,
            attended,
            ..
        } = buffers;
        let mut sink_q = sink_q.as_mut().filter(|_| params.has_sink_queries());
        let for_sinks = sink_q.as_deref_mut().map(|sink_q| (&params, sink_q));
        run.device
            .rope_and_store(step, rope, qkv, cache, place, q, for_sinks);
        let kv_bytes = attention.kv_bytes_per_position;
        let num_stored = if stores { num_rows } else { 0 };
        run.probe.ended(Operation::Rope, || {
            let read = Work::elements(num_rows, heads.qkv_len(), 4, 0);
            let rotated = Work::elements(num_rows, heads.q_len(), 2, 3);
            Work {
                num_bytes: read.num_bytes + rotated.num_bytes + (num_stored * kv_bytes) as u64,
                num_operations: rotated.num_operations,
            }
        });
        run.device.paged_attention(
            step,
            &params,
            HeadBiases {
                sink_logits: sink_logits.as_ref(),
                slopes: self.slopes.as_ref(),
            },
            (q, sink_q.as_deref()),
            cache,
            place,
            attended,
        );
        run.probe.ended(Operation::Attention, || {
            Work::attention(inputs.spans, &params, kv_bytes as u64)
        });
        if let Some((gate, (index, function))) = gate.as_ref().zip(attention.gate) {
            let gates = &mut self.gates[index];
            run.project_qkv(num_rows, self.residual.normed(), gate, gates);
            run.device
                .gate_attention(num_rows, function, gates, attended);
        }
    }

    /// Whether the layer before one has begun a shortcut.
    fn ends_shortcut(&self, index: usize) -> bool {
        let before = index.checked_sub(1);
        let before = before.and_then(|before| self.weights.layers[before].experts_block.as_ref());
        before.is_some_and(|block| block.norms.is_none())
    }

    /// Adds the results of both blocks to the residual stream, and leaves the input of the next layer or of the output
    /// layer.
    fn end_layer<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        index: usize,
        num_rows: usize,
        has_kept_rows: bool,
    ) {
        let ends_shortcut = self.ends_shortcut(index);
        let Weights { layers, head, .. } = &self.weights;
        let layer = &layers[index];
        let LayerAttention {
            buffers,
            inner: of_inner,
            ..
        } = self.attention[index];
        let attended = &mut self.buffers[buffers].attended;
        let inner = &mut self.inner[of_inner];
        let inner_norms = layer.inner_norms.as_ref().zip(self.layer_inputs.as_ref());
        if let (Some(([norm, _], ops)), Some(o)) = (inner_norms, &layer.o) {
            ops.norm_inside(run, num_rows, norm, attended, o);
        }
        let attended = &*attended;
        let attended = match (&layer.recurrence, &self.recurrence) {
            (Some(_), Some(recurrence)) => &recurrence.mixed,
            _ => attended,
        };
        let residual = &mut self.residual;
        if let Some(streams) = &mut self.streams {
            let of = (index, layer, layer.gate_cutoff);
            let layer_inputs = self.layer_inputs.as_mut();
            streams.end_layer(run, num_rows, residual, of, attended, inner, layer_inputs);
            let is_last = index + 1 == layers.len();
            if let Some(of_model) = self.weights.streams.as_ref().filter(|_| is_last) {
                let next = head.as_ref().and_then(|head| head.final_norm.as_ref());
                streams.end(run, num_rows, residual, of_model, next);
            }
            return;
        }
        let next = match layers.get(index + 1) {
            Some(next) => next.norms.first(),
            // The next stage normalises what it receives.
            None => head.as_ref().and_then(|head| head.final_norm.as_ref()),
        };
        let has_end = layer.input_block.is_some() || layer.scale.is_some();
        let next_of_layer = next;
        let next = next.filter(|_| !has_end);
        let blocks = (layer.o.as_ref(), layer.feed_forward.as_ref());
        match (&layer.norms, blocks) {
            (
                Norms::Sequential {
                    attention,
                    feed_forward,
                },
                (Some(o), Some(weights)),
            ) => {
                let (after, before) = (attention.after.as_ref(), feed_forward.before.as_ref());
                if let Some(factors) = layer.multipliers {
                    let (o, scale) = ((attended, o), Scale::All(factors.attention));
                    residual.add_scaled(run, Operation::O, num_rows, o, scale);
                    residual.norm(run, num_rows, before);
                    let FeedForwardWeights::Dense(dense) = weights else {
                        let (mixture, norms) = (self.mixture.as_mut(), [None, next]);
                        return add_feed_forward(
                            run, num_rows, residual, weights, inner, mixture, None, norms,
                        );
                    };
                    feed_forward_up(run, num_rows, residual, dense, inner);
                    let down = (&*inner, &dense.down);
                    let scale = Scale::All(factors.feed_forward);
                    residual.add_scaled(run, Operation::Down, num_rows, down, scale);
                    return residual.norm(run, num_rows, next);
                }
                let factors = layer.column_factors.as_ref();
                if let (Some([of_o, of_down]), Some(ops), FeedForwardWeights::Dense(dense)) =
                    (factors, D::LAYER_INPUTS, weights)
                {
                    let (o, scale) = ((attended, o), Scale::Columns(ops, of_o));
                    residual.add_scaled(run, Operation::O, num_rows, o, scale);
                    residual.norm(run, num_rows, before);
                    feed_forward_up(run, num_rows, residual, dense, inner);
                    let (down, scale) = ((&*inner, &dense.down), Scale::Columns(ops, of_down));
                    residual.add_scaled(run, Operation::Down, num_rows, down, scale);
                    return residual.norm(run, num_rows, next);
                }
                residual.add(run, Operation::O, num_rows, (attended, o), after, before);
                if ends_shortcut && let Some(experts_block) = &self.experts_block {
                    experts_block.end_shortcut(run, num_rows, residual);
                }
                if let (Some(([_, norm], ops)), FeedForwardWeights::Dense(dense)) =
                    (inner_norms, weights)
                {
                    feed_forward_up(run, num_rows, residual, dense, inner);
                    ops.norm_inside(run, num_rows, norm, inner, &dense.down);
                    let down = (&*inner, &dense.down);
                    let after = feed_forward.after.as_ref();
                    return residual.add(run, Operation::Down, num_rows, down, after, next);
                }
                let norms = [feed_forward.after.as_ref(), next];
                let beside = layer.experts_block.as_ref();
                let beside = beside.zip(self.experts_block.as_mut());
                let mixture = self.mixture.as_mut();
                add_feed_forward(
                    run, num_rows, residual, weights, inner, mixture, beside, norms,
                );
            }
            (Norms::OfOne { .. }, (Some(o), None)) => {
                residual.add(run, Operation::O, num_rows, (attended, o), None, next);
            }
            (Norms::OfOne { norm, .. }, (None, Some(weights))) => {
                // The normalised input is still there, unless rows have moved since.
                if has_kept_rows {
                    residual.norm(run, num_rows, Some(norm));
                }
                let (mixture, norms) = (self.mixture.as_mut(), [None, next]);
                add_feed_forward(
                    run, num_rows, residual, weights, inner, mixture, None, norms,
                );
            }
            (
                Norms::Parallel {
                    attention,
                    feed_forward,
                },
                (Some(o), Some(FeedForwardWeights::Dense(dense))),
            ) => {
                // What attention has read is there, unless rows have moved since.
                let norm = feed_forward.as_ref();
                if let Some(norm) = norm.or(has_kept_rows.then_some(attention)) {
                    residual.norm(run, num_rows, Some(norm));
                }
                feed_forward_up(run, num_rows, residual, dense, inner);
                residual.add_both(run, num_rows, (attended, o), (inner, &dense.down), next);
            }
            (
                Norms::Parallel {
                    attention,
                    feed_forward,
                },
                (Some(o), Some(weights)),
            ) => {
                let norm = feed_forward.as_ref();
                if let Some(norm) = norm.or(has_kept_rows.then_some(attention)) {
                    residual.norm(run, num_rows, Some(norm));
                }
                residual.add_beside(run, Operation::O, num_rows, (attended, o));
                let (mixture, norms) = (self.mixture.as_mut(), [None, next]);
                add_feed_forward(
                    run, num_rows, residual, weights, inner, mixture, None, norms,
                );
            }
            (
                Norms::OfSums {
                    attention,
                    feed_forward,
                },
                (Some(o), Some(FeedForwardWeights::Dense(dense))),
            ) => {
                residual.add_in_norm(run, Operation::O, num_rows, (attended, o), attention);
                feed_forward_up(run, num_rows, residual, dense, inner);
                let down = (&*inner, &dense.down);
                residual.add_in_norm(run, Operation::Down, num_rows, down, feed_forward);
            }
            (Norms::OfSums { .. }, (_, Some(FeedForwardWeights::Experts { .. }))) => {
                unreachable!("no family has such norms and experts")
            }
            (_, (None, _) | (_, None)) => unreachable!("only layers of one block lack the other"),
            (Norms::OfOne { .. }, _) => unreachable!("such a layer has one block"),
        }
        if let Some(layer_inputs) = self.layer_inputs.as_mut().filter(|_| has_end) {
            let (block, scale) = (layer.input_block.as_ref(), layer.scale);
            layer_inputs.end_layer(run, num_rows, residual, index, block, scale, next_of_layer);
        }
    }
}

impl<D: Device> VocabularyPart<D> {
    fn new(
        device: &mut D,
        ranks: D::Ranks,
        share: &ModelShare,
        limits: &RunnerLimits,
    ) -> Result<Self, LoadError> {
        let num_tokens = share.vocabulary.len();
        Ok(Self {
            ranks,
            first_token: share.vocabulary.start,
            widths: share.vocabulary_sizes.clone(),
            logits: device.alloc_logits(limits.max_sampled_rows.index(), num_tokens)?,
            num_tokens,
        })
    }
}

impl<D: Device> RowNorm<D> {
    /// `None` if the model has none.
    fn new(
        device: &mut D,
        max_rows: usize,
        spec: &ModelSpec,
        share: &ModelShare,
    ) -> Result<Option<Self>, LoadError> {
        let mut norms = spec.layers.iter().map(|layer| layer.attention.qk_norm);
        if !norms.any(|norm| norm.is_some_and(|norm| norm.kind == QkNormKind::Row)) {
            return Ok(None);
        }
        Ok(Some(Self {
            ops: D::ROW_NORMS.ok_or_else(alone)?,
            places: share.heads.places(spec.num_heads, spec.num_kv_heads),
            squares: device.alloc_sums(max_rows, spec.num_heads + spec.num_kv_heads)?,
        }))
    }
}

impl<D: Device> MixtureBuffers<D> {
    fn new(device: &mut D, max_rows: usize, shape: &MixtureShape) -> Result<Self, LoadError> {
        let routing = shape.routing;
        Ok(Self {
            routing,
            logits: device.alloc_sums(max_rows, routing.num_logits())?,
            rows: device.alloc_expert_rows(max_rows, shape)?,
        })
    }

    fn parts(&mut self) -> (&Routing, &mut D::Sums, &mut D::ExpertRows) {
        (&self.routing, &mut self.logits, &mut self.rows)
    }
}

/// Adds the result of a feed-forward block or of experts to the residual stream, with what is computed beside it, and
/// leaves the input of what follows.
#[allow(clippy::too_many_arguments, reason = "each is an operand")]
fn add_feed_forward<D: Device, P: Probe>(
    run: &mut Probed<'_, D, P>,
    num_rows: usize,
    residual: &mut ResidualStream<D>,
    weights: &FeedForwardWeights<D>,
    inner: &mut D::Inputs,
    mixture: Option<&mut MixtureBuffers<D>>,
    beside: Option<(&ExpertsBlockWeights<D>, &mut ExpertsBlockBuffers<D>)>,
    [after, next]: [Option<&NormWeights<D>>; 2],
) {
    match (weights, mixture) {
        (FeedForwardWeights::Dense(dense), mixture) => {
            let (mut beside, mut mixture) = (beside, mixture);
            if let Some((block, buffers)) = beside.take_if(|(block, _)| block.norms.is_none())
                && let Some(mixture) = mixture.as_deref_mut()
            {
                buffers.begin_shortcut(run, num_rows, residual, block, mixture.parts());
            }
            feed_forward_up(run, num_rows, residual, dense, inner);
            let down = (&*inner, &dense.down);
            let beside =
                beside.and_then(|(block, buffers)| Some((block, block.norms.as_ref()?, buffers)));
            match beside.zip(mixture) {
                None => residual.add(run, Operation::Down, num_rows, down, after, next),
                Some(((beside, of_experts, buffers), mixture)) => {
                    let (block, norms) = ((beside, of_experts), [after, next]);
                    let mixture = mixture.parts();
                    buffers.add(run, num_rows, residual, down, block, mixture, norms);
                }
            }
        }
        (
            FeedForwardWeights::Experts {
                router,
                correction,
                scale,
                experts,
            },
            Some(mixture),
        ) => {
            let (routing, logits, rows) = mixture.parts();
            let rule = (routing, correction.as_ref());
            run.route(num_rows, residual.normed(), router, rule, logits, rows);
            let num_chosen = routing.num_chosen;
            let (experts, chosen) = ((experts, *scale), (rows, num_chosen));
            residual.add_experts(run, num_rows, experts, chosen, [after, next]);
        }
        (FeedForwardWeights::Experts { .. }, None) => {
            unreachable!("the model's description has experts")
        }
    }
}

/// The input of the down projection.
fn feed_forward_up<D: Device, P: Probe>(
    run: &mut Probed<'_, D, P>,
    num_rows: usize,
    residual: &ResidualStream<D>,
    weights: &DenseWeights<D>,
    inner: &mut D::Inputs,
) {
    let DenseWeights { up, activation, .. } = weights;
    run.project_activated(num_rows, residual.normed(), up, *activation, inner);
}

/// The operations of pooling models.
fn pooling_ops<D: Device>() -> Result<D::States, LoadError> {
    D::STATES.ok_or_else(|| {
        LoadError::Resource(
            "pooling models are computed on the CPU only: use an instance_group of kind KIND_CPU"
                .to_owned(),
        )
    })
}

/// The operations of draft heads, which ranks do not have.
pub(super) fn draft_head_ops<D: Device>(is_rank: bool) -> Result<D::States, LoadError> {
    D::STATES.filter(|_| !is_rank).ok_or_else(|| {
        LoadError::Resource("draft heads are computed on the CPU, by one process".to_owned())
    })
}

/// The error of a part of a model on a device that has joined no other ranks.
fn alone() -> LoadError {
    LoadError::Resource(
        "a part of a model is computed together with other ranks, and the device has joined none"
            .to_owned(),
    )
}

/// Refuses a cache of latents in anything but bf16.
fn check_latent(family: &str, shape: &LatentShape, limits: &RunnerLimits) -> Result<(), LoadError> {
    if limits.kv_dtype != KvDtype::Bf16 {
        return Err(LoadError::Config {
            problem: format!(
                "kv_cache_dtype is {}, but the cache of {family} holds latents, which are stored in bf16",
                limits.kv_dtype
            ),
            remedy: format!(
                "write bf16: it takes {} bytes for a position of a layer",
                2 * shape.key_dim()
            ),
        });
    }
    Ok(())
}

/// Refuses windows where an indexer chooses what queries see.
fn check_indexer(spec: &ModelSpec, limits: &RunnerLimits) -> Result<(), LoadError> {
    let window = limits.attention.windows.first();
    match window.filter(|_| spec.indexer_shape().is_some()) {
        None => Ok(()),
        Some(window) => Err(LoadError::Config {
            problem: format!(
                "max_attention_window_size is {window}, but an indexer of {} chooses the positions that queries see",
                spec.family
            ),
            remedy: "leave it out".to_owned(),
        }),
    }
}

/// Whether queries and keys of a layer are normalised once they are rotated.
fn has_norms_behind_rope(layer: &LayerSpec) -> bool {
    let norm = layer.attention.qk_norm.as_ref();
    norm.is_some_and(|norm| norm.kind == QkNormKind::RotatedHead)
}

/// Refuses sinks that shift where queries cannot have another rotation for them.
fn check_shift(spec: &ModelSpec) -> Result<(), LoadError> {
    let family = spec.family;
    let mut rotated = spec.layers.iter().map(|layer| &layer.attention.rope);
    let cannot = if spec.learned_positions.is_some() {
        "adds learned positions to the embedded tokens, which cannot shift"
    } else if spec.latent_shape().is_some() {
        "has latent attention, whose sinks keep their positions"
    } else if spec.layers.iter().any(has_norms_behind_rope) {
        "has head norms behind RoPE, which sinks that shift do not support"
    } else if rotated.clone().any(|rope| rope.query_factors.is_some()) {
        "scales queries by position, which sinks that shift do not support"
    } else if rotated.clone().any(|rope| rope.axes != RopeAxes::Sequence) {
        "has images whose tokens have positions in a plane, which sinks that shift do not support"
    } else if !rotated.any(|rope| rope.rotary_dim > 0) {
        "has no rotary positions"
    } else {
        return Ok(());
    };
    Err(LoadError::Config {
        problem: format!("enable_sink_token_shift is true, and {family} {cannot}"),
        remedy: "set it to false, or leave it out".to_owned(),
    })
}
