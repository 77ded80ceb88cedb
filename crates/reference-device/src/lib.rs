//! A second device: every operation written down by its definition, one number after the other.
//!
//! It shows that the decoder needs nothing but the operations of the trait, and the operations of other devices can
//! be compared with it. Sums are f64 and are stored as f32; the inputs of products (activations, attention weights,
//! keys and values) are rounded to bf16.

mod indexer;
mod layer_inputs;
mod recurrence;

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::ops::Range;

use half::{bf16, f16};
use indexer::ReferenceIndexer;
use inflight_base::{BlockId, HostBlockId, LoadError, StepError};
use inflight_device::{
    Activation, AdaptedPlace, AdaptedRows, AttentionParams, Device, EmbeddingTable, Expert,
    Experts, Gating, GroupBlocks, GroupedRouting, HeadBiases, HeadShape, InnerActivation, KvBatch,
    KvDtype, KvLayout, KvLayouts, KvSpan, Lacking, LatentParams, LayerGroups, LayerNorm, Linear,
    Load, LogitsTransform, MixtureShape, Norm, Ops, Output, PackedWeights, PlainActivation, QkNorm,
    QkNormKind, RankHost, RopeParams, RopeTable, RouterScores, Routing, RoutingRule, StateOps,
    StepCapacity, StepInputs, StepIo,
};
use inflight_numbers::{
    CodeBits, Dtype, FloatRows, NotFinite, QuantisedRow, QuantisedRows, Stacking,
};
use inflight_runner::{ModelRunner, ModelSource, Runner, RunnerLimits};
use inflight_threads::Pool;
use layer_inputs::ReferenceLayerInputs;

/// A device of plain loops.
pub struct Reference {
    threads: Pool,
    options: ReferenceOptions,
}

/// How it computes.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceOptions {
    /// Whether projections add to the residual stream, as on one rank. If not, their results are added separately,
    /// as after a sum over several ranks.
    pub has_whole_sums: bool,
    /// Whether activations are rounded to FP8 where weights are and have one scale for each output.
    pub fp8_activations: bool,
}

impl Default for ReferenceOptions {
    fn default() -> Self {
        Self {
            has_whole_sums: true,
            fp8_activations: false,
        }
    }
}

/// What it computes of pooling models and draft heads.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceStates;

/// Rows of activations.
pub struct Rows {
    values: Vec<f32>,
    width: usize,
    is_bf16: bool,
}

/// Weights, `[n, k]`, the parts one after the other.
pub struct Weights {
    values: Vec<f32>,
    k: usize,
    stacking: Stacking,
    is_float: bool,
    /// Whether the rows that it multiplies are rounded to FP8.
    rounds_rows: bool,
}

/// Keys and values.
pub struct Cache {
    layouts: KvLayouts,
    groups: LayerGroups,
    num_blocks: usize,
    /// Of each place of a group, or of each layer if layouts differ.
    planes: Vec<Plane>,
}

/// Keys and values, each `[block, position, head, element]`.
struct Plane {
    layout: KvLayout,
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[block, position, element]`.
    indexer_keys: Vec<f32>,
}

/// The experts of rows: index and weight of each, by rank, and the weight of the shared expert; whether inputs have the
/// weights; and how many of the first experts have weights.
#[derive(Default)]
pub struct ExpertRows(Vec<(Vec<(usize, f64)>, f64)>, bool, usize);

/// A step.
pub struct Step<'a> {
    inputs: StepInputs<'a>,
    batch: KvBatch<'a>,
}

impl Rows {
    fn new(max_rows: usize, width: usize, is_bf16: bool) -> Self {
        Self {
            values: vec![f32::NAN; max_rows * width],
            width,
            is_bf16,
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }

    fn set(&mut self, row: usize, column: usize, value: f64) {
        let value = value as f32;
        self.values[row * self.width + column] = match self.is_bf16 {
            true => bf16::from_f32(value).to_f32(),
            false => value,
        };
    }

    fn keep(&mut self, rows: &[u32]) {
        for (to, &from) in rows.iter().enumerate() {
            let from = from as usize * self.width;
            self.values
                .copy_within(from..from + self.width, to * self.width);
        }
    }
}

impl Weights {
    /// `x * W^T` of one output.
    fn product(&self, output: usize, x: &[f64]) -> f64 {
        assert_eq!(x.len(), self.k);
        let weights = &self.values[output * self.k..][..self.k];
        weights.iter().zip(x).map(|(&w, &x)| exact(w) * x).sum()
    }

    /// The inputs of a product.
    fn inputs(&self, x: &[f32]) -> Vec<f64> {
        let x: Vec<_> = x.iter().map(|&x| exact(x)).collect();
        match self.rounds_rows {
            true => rounded_to_e4m3(&x),
            false => x,
        }
    }
}

impl PackedWeights for Weights {
    fn n(&self) -> usize {
        self.values.len() / self.k
    }

    fn k(&self) -> usize {
        self.k
    }

    fn num_bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }

    fn has_rows(&self) -> bool {
        self.is_float && self.stacking == Stacking::Concatenated
    }
}

impl Cache {
    /// An empty cache, which notices reads of positions never stored.
    fn new(layouts: &KvLayouts, groups: &LayerGroups, num_blocks: usize) -> Self {
        let num_planes = match layouts.differ() {
            true => layouts.layers().len(),
            false => groups.layers_per_group(),
        };
        let planes = layouts.layers()[..num_planes].iter().map(|&layout| {
            let [keys, values] = block_lens(&layout).map(|len| vec![f32::NAN; num_blocks * len]);
            Plane {
                layout,
                keys,
                values,
                indexer_keys: vec![f32::NAN; num_blocks * indexer_block_len(&layout)],
            }
        });
        Self {
            layouts: layouts.clone(),
            groups: groups.clone(),
            num_blocks,
            planes: planes.collect(),
        }
    }

    /// The plane of a layer.
    fn plane(&self, layer: usize) -> usize {
        match self.layouts.differ() {
            true => layer,
            false => self.groups.place(layer).index,
        }
    }

    fn positions_per_block(&self) -> usize {
        self.layouts.block_size().tokens().index()
    }

    /// The blocks of a sequence for a layer.
    fn table<'a>(&self, batch: &KvBatch<'a>, span: &KvSpan, layer: usize) -> GroupBlocks<'a> {
        batch.block_table(span, self.groups.place(layer).group)
    }

    /// Where the key of a head at a position of a block is in a plane.
    fn place(&self, plane: usize, block: BlockId, position: usize, head: usize) -> Range<usize> {
        self.place_of(
            plane,
            block,
            position,
            head,
            self.planes[plane].layout.head_dim,
        )
    }

    /// Where its value is.
    fn value_place(
        &self,
        plane: usize,
        block: BlockId,
        position: usize,
        head: usize,
    ) -> Range<usize> {
        let len = stored_value_dim(&self.planes[plane].layout);
        self.place_of(plane, block, position, head, len)
    }

    fn place_of(
        &self,
        plane: usize,
        block: BlockId,
        position: usize,
        head: usize,
        len: usize,
    ) -> Range<usize> {
        assert!(block.index() < self.num_blocks);
        let position = block.index() * self.positions_per_block() + position;
        let start = (position * self.planes[plane].layout.num_kv_heads + head) * len;
        start..start + len
    }

    /// Where the key of an indexer at a position of a block is in a plane.
    fn indexer_place(&self, plane: usize, block: BlockId, position: usize) -> Range<usize> {
        let len = self.planes[plane].layout.indexer_dim;
        let start = (block.index() * self.positions_per_block() + position) * len;
        start..start + len
    }

    fn stored(&self, vector: &[f64]) -> Vec<f32> {
        match self.layouts.layers()[0].dtype {
            KvDtype::Bf16 => vector.iter().map(|&x| rounded(x)).collect(),
            KvDtype::Int8 => {
                let largest = vector.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
                let scale = exact(rounded(largest / 127.0));
                let code = |x: f64| match scale {
                    0.0 => 0.0,
                    _ => (x / scale).round_ties_even().clamp(-127.0, 127.0),
                };
                vector.iter().map(|&x| (code(x) * scale) as f32).collect()
            }
            KvDtype::Fp8 => {
                let rounded = rounded_to_e4m3(vector);
                rounded.into_iter().map(|x| x as f32).collect()
            }
        }
    }
}

/// A vector after rounding to codes that share a scale.
pub fn rounded_to_e4m3(vector: &[f64]) -> Vec<f64> {
    let largest = vector.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
    let scale = exact((largest / 448.0) as f32);
    let code = |x: f64| match scale {
        0.0 => 0.0,
        _ => nearest_e4m3(x / scale),
    };
    vector.iter().map(|&x| code(x) * scale).collect()
}

/// The nearest number of 4 bits of exponent and 3 of mantissa, ties to even.
fn nearest_e4m3(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().max(-6.0);
    let step = (exponent - 3.0).exp2();
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

impl Load for Reference {
    type Options = ReferenceOptions;
    type Matrix = Weights;
    type Vector = Vec<f32>;
    type Embedding = Rows;
    type Angles = RopeTable;
    type Sums = Rows;
    type Inputs = Rows;
    type Logits = Rows;
    type ExpertRows = ExpertRows;
    type KvCache = Cache;
    type HostBlocks = Cache;

    const HAS_FP8: bool = true;

    fn open(options: &ReferenceOptions) -> Result<Self, LoadError> {
        Ok(Self {
            threads: Pool::new(1).expect("one thread is the caller"),
            options: *options,
        })
    }

    fn description(&self) -> String {
        "plain loops".to_owned()
    }

    fn host_threads(&mut self) -> &mut Pool {
        &mut self.threads
    }

    fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<Weights, NotFinite>, LoadError> {
        let mut values = Vec::new();
        for (part, rows) in parts.iter().enumerate() {
            for row in 0..rows.rows() {
                let mut bytes = vec![0; rows.columns() * rows.dtype().size()];
                rows.read_rows(row..row + 1, &mut bytes);
                let row_values = bf16s(rows.dtype(), &bytes);
                if row_values.iter().any(|value| !value.is_finite()) {
                    return Ok(Err(NotFinite { part, row }));
                }
                values.extend(row_values);
            }
        }
        Ok(Ok(Weights {
            values,
            k: parts[0].columns(),
            stacking,
            is_float: true,
            rounds_rows: false,
        }))
    }

    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        stacking: Stacking,
    ) -> Result<Result<Weights, NotFinite>, LoadError> {
        let (k, format) = (parts[0].columns(), parts[0].format());
        let mut values = Vec::new();
        let mut row = QuantisedRow::default();
        for (part, rows) in parts.iter().enumerate() {
            for index in 0..rows.rows() {
                rows.read_row(index, &mut row);
                let mut columns = vec![0.0; k];
                row.dequantise(rows.format(), &mut columns);
                if columns.iter().any(|value| !value.is_finite()) {
                    return Ok(Err(NotFinite { part, row: index }));
                }
                let mut weights = vec![0.0; k];
                for (column, value) in columns.into_iter().enumerate() {
                    let input = rows
                        .input_order()
                        .map_or(column, |order| order[column] as usize);
                    weights[input] = value;
                }
                values.extend(weights);
            }
        }
        Ok(Ok(Weights {
            values,
            k,
            stacking,
            is_float: false,
            rounds_rows: self.options.fp8_activations
                && format.bits == CodeBits::Fp8
                && format.group_size >= k,
        }))
    }

    fn upload_vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, LoadError> {
        Ok(values)
    }

    fn upload_embedding(&mut self, rows: Vec<bf16>, width: usize) -> Result<Rows, LoadError> {
        Ok(Rows {
            values: rows.into_iter().map(bf16::to_f32).collect(),
            width,
            is_bf16: true,
        })
    }

    fn upload_angles(&mut self, table: RopeTable) -> Result<RopeTable, LoadError> {
        Ok(table)
    }

    fn alloc_sums(&mut self, max_rows: usize, width: usize) -> Result<Rows, LoadError> {
        Ok(Rows::new(max_rows, width, false))
    }

    fn alloc_inputs(&mut self, max_rows: usize, width: usize) -> Result<Rows, LoadError> {
        Ok(Rows::new(max_rows, width, true))
    }

    fn alloc_logits(&mut self, max_rows: usize, width: usize) -> Result<Rows, LoadError> {
        Ok(Rows::new(max_rows, width, false))
    }

    fn alloc_expert_rows(&mut self, _: usize, _: &MixtureShape) -> Result<ExpertRows, LoadError> {
        Ok(ExpertRows::default())
    }

    fn alloc_kv_cache(
        &mut self,
        layouts: &KvLayouts,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<Cache, LoadError> {
        Ok(Cache::new(layouts, groups, num_blocks))
    }

    fn alloc_host_blocks(&mut self, cache: &Cache, num_blocks: usize) -> Result<Cache, LoadError> {
        Ok(Cache::new(&cache.layouts, &cache.groups, num_blocks))
    }

    fn kv_bytes_per_block(layouts: &KvLayouts, groups: &LayerGroups) -> usize {
        let len = |layout: &KvLayout| {
            block_lens(layout).iter().sum::<usize>() + indexer_block_len(layout)
        };
        size_of::<f32>() * layouts.largest_group(groups, len)
    }

    fn reserve(&mut self, _: &Cache, _: &StepCapacity) -> Result<(), LoadError> {
        Ok(())
    }
}

impl StepIo for Reference {
    type Step<'a> = Step<'a>;

    fn copy_positions(
        &mut self,
        cache: &mut Cache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        for (source, target, num_positions) in copies {
            copy(cache, source, target, num_positions);
        }
    }

    fn offload(&mut self, cache: &Cache, source: BlockId, host: &mut Cache, target: HostBlockId) {
        copy_block(cache, source.index(), host, target.index());
    }

    fn onboard(&mut self, host: &Cache, source: HostBlockId, cache: &mut Cache, target: BlockId) {
        copy_block(host, source.index(), cache, target.index());
    }

    fn host_block<'h>(
        &mut self,
        _: &'h mut Cache,
        _: HostBlockId,
    ) -> Result<&'h mut [u8], StepError> {
        unimplemented!("it is kept in no file")
    }

    fn begin_step<'a>(&mut self, cache: &Cache, inputs: StepInputs<'a>) -> Step<'a> {
        let (block_size, num_blocks) = (cache.layouts.block_size(), cache.num_blocks);
        Step {
            inputs,
            batch: KvBatch::new(
                inputs.spans,
                inputs.block_tables,
                cache.groups.num_groups(),
                block_size,
                num_blocks,
            )
            .with_mutual(inputs.mutual),
        }
    }

    fn end_step(&mut self, _: Step<'_>) {}

    fn host_logits<'l>(
        &mut self,
        logits: &'l mut Rows,
        num_rows: usize,
    ) -> Result<&'l mut [f32], StepError> {
        Ok(&mut logits.values[..num_rows * logits.width])
    }
}

impl Ops for Reference {
    fn embed(
        &mut self,
        step: &Step<'_>,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Rows,
    ) {
        for (row, &token) in step.inputs.token_ids.iter().enumerate() {
            let token = token as usize;
            let embedding = match table {
                EmbeddingTable::Own(rows) => rows.row(token),
                EmbeddingTable::Tied(weights) => &weights.values[token * weights.k..][..weights.k],
            };
            for (column, &value) in embedding.iter().enumerate() {
                out.set(row, column, exact(scale) * exact(value));
            }
        }
    }

    fn add_positions(&mut self, step: &Step<'_>, table: &Rows, out: &mut Rows) {
        for span in step.batch.spans() {
            let first = span.kv_len as usize - span.tokens.len();
            let rows = span.tokens.start as usize..span.tokens.end as usize;
            for (row, position) in rows.zip(first..) {
                for (column, &value) in table.row(position).iter().enumerate() {
                    out.set(row, column, exact(out.row(row)[column]) + exact(value));
                }
            }
        }
    }

    fn norm(&mut self, num_rows: usize, x: &Rows, norm: Norm<'_, Vec<f32>>, out: &mut Rows) {
        for row in 0..num_rows {
            for (column, value) in normed(x.row(row), norm).into_iter().enumerate() {
                out.set(row, column, value);
            }
        }
    }

    fn norm_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows,
        norm: LayerNorm<'_, Vec<f32>>,
        out: &mut Rows,
    ) {
        normalise_in_place(num_rows, hidden, norm.into(), out);
    }

    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Rows,
        norm: Norm<'_, Vec<f32>>,
        hidden: &mut Rows,
    ) {
        for row in 0..num_rows {
            for (column, value) in normed(x.row(row), norm).into_iter().enumerate() {
                hidden.set(row, column, exact(hidden.row(row)[column]) + value);
            }
        }
    }

    fn scale(&mut self, num_rows: usize, factor: f32, hidden: &mut Rows) {
        for row in 0..num_rows {
            for column in 0..hidden.width {
                let value = exact(hidden.row(row)[column]) * exact(factor);
                hidden.set(row, column, value);
            }
        }
    }

    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Rows,
        hidden: &mut Rows,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows,
    ) {
        for row in 0..num_rows {
            for column in 0..hidden.width {
                let sum = exact(hidden.row(row)[column]) + exact(x.row(row)[column]);
                hidden.set(row, column, sum);
            }
        }
        self.norm(num_rows, hidden, norm, out);
    }

    fn project(
        &mut self,
        num_rows: usize,
        x: &Rows,
        linear: &Linear<Self>,
        output: Output,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows,
    ) {
        let before = out.values.clone();
        assert_eq!(linear.matrix.stacking, Stacking::Concatenated);
        for row in 0..num_rows {
            let inputs = linear.matrix.inputs(x.row(row));
            for column in 0..linear.matrix.n() {
                let before = match output {
                    Output::Store => 0.0,
                    Output::Add => exact(out.row(row)[column]),
                };
                out.set(row, column, before + linear_output(linear, column, &inputs));
            }
        }
        for (run, place) in adapted.into_iter().flat_map(AdaptedRows::changed) {
            for row in run.rows.clone().map(|row| row as usize) {
                let inputs = linear.matrix.inputs(x.row(row));
                for column in 0..out.width {
                    let changed = changed_output(linear, place, column, x.row(row), &inputs);
                    let before = match output {
                        Output::Store => 0.0,
                        Output::Add => exact(before[row * out.width + column]),
                    };
                    out.set(row, column, before + changed);
                }
            }
        }
    }

    fn project_activated(
        &mut self,
        num_rows: usize,
        x: &Rows,
        linear: &Linear<Self>,
        activation: InnerActivation,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows,
    ) {
        let n = linear.matrix.n();
        let width = match activation {
            InnerActivation::Gated(_) | InnerActivation::ScaledGate(..) => n / 2,
            InnerActivation::Plain(_) => n,
        };
        let stacking = match activation {
            InnerActivation::Gated(_) | InnerActivation::ScaledGate(..) => Stacking::Interleaved,
            InnerActivation::Plain(_) => Stacking::Concatenated,
        };
        assert_eq!(linear.matrix.stacking, stacking);
        let inner = |column: usize, output: &dyn Fn(usize) -> f64| match activation {
            InnerActivation::Gated(activation) => {
                activated(activation, output(column)) * output(width + column)
            }
            InnerActivation::ScaledGate(activation, factor) => {
                activated(activation, exact(factor) * output(column)) * output(width + column)
            }
            InnerActivation::Plain(PlainActivation::Of(activation)) => {
                activated(activation, output(column))
            }
            InnerActivation::Plain(PlainActivation::Xielu { positive, negative }) => {
                let x = output(column);
                let curved = match x > 0.0 {
                    true => exact(positive) * x * x,
                    false => exact(negative) * (x.min(-1e-6).exp_m1() - x),
                };
                curved + x / 2.0
            }
            InnerActivation::Plain(PlainActivation::QuickGelu) => {
                let x = output(column);
                x / (1.0 + (-1.702 * x).exp())
            }
        };
        for row in 0..num_rows {
            let inputs = linear.matrix.inputs(x.row(row));
            for column in 0..width {
                let value = inner(column, &|output| linear_output(linear, output, &inputs));
                out.set(row, column, value);
            }
        }
        for (run, place) in adapted.into_iter().flat_map(AdaptedRows::changed) {
            for row in run.rows.clone().map(|row| row as usize) {
                let inputs = linear.matrix.inputs(x.row(row));
                for column in 0..width {
                    let value = inner(column, &|output| {
                        changed_output(linear, place, output, x.row(row), &inputs)
                    });
                    out.set(row, column, value);
                }
            }
        }
    }

    fn adapt_embeddings(
        &mut self,
        step: &Step<'_>,
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut Rows,
    ) {
        assert_eq!(first_token, 0, "it is no rank of several");
        for (run, place) in adapted.changed() {
            for row in run.rows.clone().map(|row| row as usize) {
                let token = step.inputs.token_ids[row] as usize;
                for column in 0..out.width {
                    let own = match place.replacement() {
                        Some(rows) => exact(scale) * rows.row(token)[column].to_f64(),
                        None => exact(out.row(row)[column]),
                    };
                    let parts = place.parts().iter().map(|part| {
                        let ranks = (0..part.rank()).map(|rank| {
                            part.a(rank, token).to_f64() * part.b(column, rank).to_f64()
                        });
                        exact(scale) * exact(part.scale()) * ranks.sum::<f64>()
                    });
                    out.set(row, column, own + parts.sum::<f64>());
                }
            }
        }
    }

    fn route(
        &mut self,
        num_rows: usize,
        logits: &Rows,
        routing: &Routing,
        correction: Option<&Vec<f32>>,
        rows: &mut ExpertRows,
    ) {
        rows.0.clear();
        rows.1 = routing.rule == RoutingRule::WeightedInputs;
        rows.2 = routing.num_computed_experts();
        for row in 0..num_rows {
            let (logits, rest) = logits.row(row).split_at(routing.num_experts);
            if let RoutingRule::Grouped(rule) = routing.rule {
                let chosen = grouped(logits, &rule, correction, routing.num_chosen);
                rows.0.push((chosen, 1.0));
                continue;
            }
            let powers: Vec<_> = logits.iter().map(|&logit| exact(logit).exp()).collect();
            let mut order: Vec<_> = (0..routing.num_experts).collect();
            order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
            order.truncate(routing.num_chosen);
            let total = |rank: usize| -> f64 {
                match routing.rule {
                    RoutingRule::Softmax {
                        is_normalised: true,
                    } => order.iter().map(|&expert| powers[expert]).sum(),
                    RoutingRule::Softmax {
                        is_normalised: false,
                    } => powers.iter().sum(),
                    RoutingRule::SparseMixer { jitter } => {
                        let largest = exact(logits[order[rank]]);
                        let rest = (0..logits.len()).filter(|it| !order[..rank].contains(it));
                        let near = rest.filter(|&expert| {
                            let logit = exact(logits[expert]);
                            largest - logit <= 2.0 * exact(jitter) * logit.abs().max(largest)
                        });
                        near.map(|expert| powers[expert]).sum()
                    }
                    RoutingRule::WeightedInputs => 1.0 + powers[order[rank]],
                    RoutingRule::Grouped(_) => unreachable!("chosen above"),
                }
            };
            let ranks = order.iter().enumerate();
            let chosen = ranks.map(|(rank, &expert)| (expert, powers[expert] / total(rank)));
            let shared = rest
                .first()
                .map_or(1.0, |&gate| 1.0 / (1.0 + (-exact(gate)).exp()));
            rows.0.push((chosen.collect(), shared));
        }
    }

    fn mix_experts(
        &mut self,
        num_rows: usize,
        x: &Rows,
        experts: &Experts<Self>,
        rows: &mut ExpertRows,
        output: Output,
        out: &mut Rows,
    ) {
        for (row, (chosen, shared_weight)) in rows.0[..num_rows].iter().enumerate() {
            let (chosen, without_weights): (Vec<_>, Vec<_>) =
                chosen.iter().partition(|(expert, _)| *expert < rows.2);
            let weight: f64 = without_weights.iter().map(|(_, weight)| weight).sum();
            let x_of_row = x.row(row).iter();
            let mut totals: Vec<_> = x_of_row.map(|&x| weight * exact(x)).collect();
            let chosen = chosen.iter().map(|&(expert, weight)| {
                let weights = if rows.1 { [weight, 1.0] } else { [1.0, weight] };
                (&experts.chosen[expert], experts.gating, weights)
            });
            let shared = experts.shared.iter();
            let shared = shared.map(|it| (it, experts.shared_gating, [1.0, *shared_weight]));
            for (Expert { gate_up, down }, gating, [of_input, weight]) in chosen.chain(shared) {
                let width = down.matrix.k;
                let x = x.row(row).iter();
                let x: Vec<_> = x.map(|&x| rounded(exact(x) * of_input)).collect();
                let x = gate_up.matrix.inputs(&x);
                let inner: Vec<_> = (0..width)
                    .map(|i| {
                        let first = linear_output(gate_up, i, &x);
                        let second = match gating.has_gate() {
                            true => linear_output(gate_up, width + i, &x),
                            false => 1.0,
                        };
                        rounded(gated(gating, first, second))
                    })
                    .collect();
                let inner = down.matrix.inputs(&inner);
                for (column, total) in totals.iter_mut().enumerate() {
                    *total += weight * linear_output(down, column, &inner);
                }
            }
            for (column, total) in totals.into_iter().enumerate() {
                let before = match output {
                    Output::Store => 0.0,
                    Output::Add => exact(out.row(row)[column]),
                };
                out.set(row, column, before + total);
            }
        }
    }

    fn num_touched_experts(&self, rows: &ExpertRows) -> usize {
        let chosen = rows.0.iter().flat_map(|(chosen, _)| chosen);
        let experts = chosen.map(|(expert, _)| expert);
        let experts: BTreeSet<_> = experts.filter(|&&expert| expert < rows.2).collect();
        experts.len()
    }

    fn rope_and_store(
        &mut self,
        step: &Step<'_>,
        params: RopeParams<'_, Self>,
        qkv: &mut Rows,
        cache: &mut Cache,
        layer: usize,
        q: &mut Rows,
        mut sink_q: Option<(&AttentionParams, &mut Rows)>,
    ) {
        let HeadShape {
            num_q_heads,
            num_kv_heads,
            head_dim,
            value_dim,
        } = params.heads;
        // The norm of a head, or of all heads, of which it has the weights of this one.
        let norm = |norm: Option<(&Vec<f32>, QkNormKind, f32)>, all: &[f32], head: usize| {
            let Some((weight, kind, eps)) = norm else {
                return all[head * head_dim..][..head_dim]
                    .iter()
                    .map(|&x| exact(x))
                    .collect();
            };
            match kind {
                QkNormKind::Head | QkNormKind::RotatedHead => {
                    normalise(&all[head * head_dim..][..head_dim], weight, eps)
                }
                QkNormKind::Row => {
                    normalise(all, weight, eps)[head * head_dim..][..head_dim].to_vec()
                }
                QkNormKind::BiasedLayer => {
                    let (weight, bias) = weight.split_at(head_dim);
                    let norm = Norm::Layer {
                        weight: &weight.to_vec(),
                        bias: Some(&bias.to_vec()),
                        eps,
                    };
                    normed(&all[head * head_dim..][..head_dim], norm)
                }
                QkNormKind::LayerOfHead => {
                    let of_head = head * head_dim..(head + 1) * head_dim;
                    let norm = Norm::Layer {
                        weight: &weight[of_head.clone()].to_vec(),
                        bias: None,
                        eps,
                    };
                    normed(&all[of_head], norm)
                }
            }
        };
        // A head, normalised and rotated, in the order of the model.
        let turned =
            |of: Option<(&Vec<f32>, QkNormKind, f32)>, all: &[f32], head: usize, angles: &[f32]| {
                match of {
                    Some((weight, QkNormKind::RotatedHead, eps)) => {
                        let x = rotate(&norm(None, all, head), angles);
                        let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                        let scale = (mean + exact(eps)).sqrt().recip();
                        let weighted = x.iter().zip(weight);
                        weighted.map(|(x, &w)| x * scale * exact(w)).collect()
                    }
                    of => rotate(&norm(of, all, head), angles),
                }
            };
        let [q_norm, k_norm] = match params.qk_norm {
            Some(QkNorm {
                q, k, kind, eps, ..
            }) => [Some((q, kind, eps)), Some((k, kind, eps))],
            None => [None, None],
        };
        let ones = vec![1.0; value_dim];
        let v_norm = params.qk_norm.filter(|norm| norm.has_values);
        let v_norm = v_norm.map(|norm| norm.eps);
        let plane = cache.plane(layer);
        for (row, position, block, offset) in places(&step.batch, cache, layer) {
            let qkv = qkv.row(row);
            let (queries, keys_and_values) = qkv.split_at(num_q_heads * head_dim);
            let (keys, values) = keys_and_values.split_at(num_kv_heads * head_dim);
            let angles = &params.angles.row_of(row, position, step.inputs.positions);
            let factor = params.angles.query_factor(position).map_or(1.0, exact);
            for head in 0..num_q_heads {
                let x = turned(q_norm, queries, head, angles);
                let x = x.into_iter().map(|x| x * factor);
                for (i, value) in x.enumerate() {
                    q.set(row, head * head_dim + i, value);
                }
                let Some((params_of_sinks, sink_q)) = &mut sink_q else {
                    continue;
                };
                let position = params_of_sinks.shifted(position as u32) as usize;
                let angles = params.angles.row(position);
                let x = turned(q_norm, queries, head, angles);
                for (i, value) in x.into_iter().enumerate() {
                    sink_q.set(row, head * head_dim + i, value);
                }
            }
            for head in 0..num_kv_heads {
                let place = cache.place(plane, block, offset, head);
                let key = cache.stored(&turned(k_norm, keys, head, angles));
                let value = &values[head * value_dim..][..value_dim];
                let value = match v_norm {
                    Some(eps) => normalise(value, &ones, eps),
                    None => value.iter().map(|&x| exact(x)).collect(),
                };
                let value = cache.stored(&value);
                let of_value = cache.value_place(plane, block, offset, head);
                let plane = &mut cache.planes[plane];
                plane.keys[place].copy_from_slice(&key);
                plane.values[of_value].copy_from_slice(&value);
            }
        }
    }

    fn paged_attention(
        &mut self,
        step: &Step<'_>,
        params: &AttentionParams,
        biases: HeadBiases<'_, Vec<f32>>,
        (q, sink_q): (&Rows, Option<&Rows>),
        cache: &Cache,
        layer: usize,
        out: &mut Rows,
    ) {
        let HeadShape {
            num_q_heads,
            num_kv_heads,
            head_dim,
            value_dim,
        } = params.shape;
        let (block_size, plane) = (cache.positions_per_block(), cache.plane(layer));
        for span in step.batch.spans() {
            let table = cache.table(&step.batch, span, layer);
            let first = span.kv_len as usize - span.tokens.len();
            for (row, position) in
                (span.tokens.start as usize..span.tokens.end as usize).zip(first..)
            {
                let window = params
                    .window
                    .map_or(usize::MAX, |w: NonZeroU32| w.get() as usize);
                let chunk = params.chunk.map_or(usize::MAX, |it| it.get() as usize);
                let is_seen = |other: &usize| {
                    *other < params.num_sinks as usize
                        || other.saturating_add(window) > position
                            && other / chunk == position / chunk
                };
                let end = match params.is_bidirectional {
                    true => (span.kv_len as usize).min(position.saturating_add(window)),
                    false => position + 1 + step.batch.num_seen_ahead(row),
                };
                let seen: Vec<_> = (0..end).filter(is_seen).collect();
                for head in 0..num_q_heads {
                    let kv_head = head / (num_q_heads / num_kv_heads);
                    let place = |other: usize| {
                        let block = table.at(other / block_size);
                        cache.place(plane, block, other % block_size, kv_head)
                    };
                    let query_for = |other: usize| {
                        let is_sink = other < params.num_sinks as usize;
                        let q = sink_q.filter(|_| is_sink).unwrap_or(q);
                        &q.row(row)[head * head_dim..][..head_dim]
                    };
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&other| {
                            let key = &cache.planes[plane].keys[place(other)];
                            let query = query_for(other).iter();
                            let products = query.zip(key).map(|(&q, &k)| exact(q) * exact(k));
                            let score = products.sum::<f64>() * exact(params.scale);
                            let distance = position as f64 - other as f64;
                            let slope = biases.slopes.map_or(0.0, |slopes| exact(slopes[head]));
                            capped(score, params.soft_cap) - slope * distance
                        })
                        .collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    // They are inputs of a product too.
                    let weights = scores.iter().map(|s| exact(rounded((s - largest).exp())));
                    let weights: Vec<_> = weights.collect();
                    let of_sink = biases
                        .sink_logits
                        .map_or(0.0, |logits| (exact(logits[head]) - largest).exp());
                    let sum: f64 = weights.iter().sum::<f64>() + of_sink;
                    let value_place = |other: usize| {
                        let block = table.at(other / block_size);
                        cache.value_place(plane, block, other % block_size, kv_head)
                    };
                    for i in 0..value_dim {
                        let terms = seen.iter().zip(&weights).map(|(&other, weight)| {
                            exact(cache.planes[plane].values[value_place(other)][i]) * weight
                        });
                        out.set(row, head * value_dim + i, terms.sum::<f64>() / sum);
                    }
                }
            }
        }
    }

    fn store_latents(
        &mut self,
        step: &Step<'_>,
        params: &LatentParams<'_, Self>,
        kv: &Rows,
        cache: &mut Cache,
        layer: usize,
    ) {
        let plane = cache.plane(layer);
        for (row, position, block, offset) in places(&step.batch, cache, layer) {
            let (latent, rotary) = kv.row(row).split_at(params.shape.latent_dim);
            let latent = normalise(latent, params.norm, params.norm_eps);
            let rotary: Vec<_> = rotary.iter().map(|&x| exact(x)).collect();
            let rotary = rotate(&rotary, params.angles.row(position));
            let place = cache.place(plane, block, offset, 0);
            let key = cache.stored(&[latent, rotary].concat());
            cache.planes[plane].keys[place].copy_from_slice(&key);
        }
    }

    fn latent_attention(
        &mut self,
        step: &Step<'_>,
        params: &LatentParams<'_, Self>,
        q: &Rows,
        cache: &Cache,
        layer: usize,
        out: &mut Rows,
    ) {
        let attention = &params.attention;
        let window = attention.window.map_or(usize::MAX, |w| w.get() as usize);
        let seen = |_, position: usize| {
            let is_seen = |&other: &usize| {
                other < attention.num_sinks as usize || other.saturating_add(window) > position
            };
            (0..=position).filter(is_seen).collect()
        };
        self.attend_to_latents(step, params, q, seen, cache, layer, out);
    }

    fn has_whole_sums(&self) -> bool {
        self.options.has_whole_sums
    }

    fn keep_rows(&mut self, step: &Step<'_>, hidden: &mut Rows, attended: &mut Rows) {
        hidden.keep(step.inputs.kept_rows);
        attended.keep(step.inputs.kept_rows);
    }

    fn keep_sampled_rows(&mut self, step: &Step<'_>, states: &mut Rows) {
        states.keep(step.inputs.sampled_rows);
    }

    fn logits(
        &mut self,
        num_rows: usize,
        states: &Rows,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Rows,
    ) {
        let width = out.width;
        let values = &mut out.values[..num_rows * width];
        self.context_logits(states, 0..num_rows, lm_head, transform, adapted, values);
    }

    fn context_logits(
        &mut self,
        states: &Rows,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut [f32],
    ) {
        let width = lm_head.matrix.n();
        for (row, out) in rows.clone().zip(out.chunks_mut(width)) {
            let inputs = lm_head.matrix.inputs(states.row(row));
            for (token, out) in out.iter_mut().enumerate() {
                let logit = linear_output(lm_head, token, &inputs) * exact(transform.scale);
                *out = capped(logit, transform.soft_cap) as f32;
            }
        }
        for (run, place) in adapted.into_iter().flat_map(AdaptedRows::changed) {
            for row in run.rows.clone().map(|row| row as usize) {
                let x = states.row(rows.start + row);
                let inputs = lm_head.matrix.inputs(x);
                for column in 0..width {
                    let own = match place.replacement() {
                        Some(rows) => dot(x, rows.row(column)),
                        None => lm_head.matrix.product(column, &inputs),
                    };
                    let bias = lm_head
                        .bias
                        .as_ref()
                        .map_or(0.0, |bias| exact(bias[column]));
                    let changed = finished(place, column, own + added(place, column, x), bias);
                    let scaled = changed * exact(transform.scale);
                    out[row * width + column] = capped(scaled, transform.soft_cap) as f32;
                }
            }
        }
    }
}

impl Reference {
    /// Latent attention of each query over the positions that `seen` tells by its row and its own position.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn attend_to_latents(
        &mut self,
        step: &Step<'_>,
        params: &LatentParams<'_, Self>,
        q: &Rows,
        seen: impl Fn(usize, usize) -> Vec<usize>,
        cache: &Cache,
        layer: usize,
        out: &mut Rows,
    ) {
        let (shape, attention) = (params.shape, &params.attention);
        let (block_size, plane) = (cache.positions_per_block(), cache.plane(layer));
        for (row, position, _, _) in places(&step.batch, cache, layer) {
            let table = cache.table(&step.batch, step.batch.place(row).0, layer);
            let keys: Vec<_> = seen(row, position)
                .into_iter()
                .map(|other| {
                    let block = table.at(other / block_size);
                    &cache.planes[plane].keys[cache.place(plane, block, other % block_size, 0)]
                })
                .collect();
            for (head, query) in q.row(row).chunks(shape.query_dim()).enumerate() {
                let (content, rotary) = query.split_at(shape.content_dim);
                let to_latent = &params.heads.keys[head];
                let content: Vec<_> = content.iter().map(|&x| rounded(exact(x))).collect();
                let content = to_latent.matrix.inputs(&content);
                let latent = (0..shape.latent_dim).map(|i| linear_output(to_latent, i, &content));
                let rotary: Vec<_> = rotary.iter().map(|&x| exact(x)).collect();
                let rotary = rotate(&rotary, params.angles.row(position));
                let query: Vec<_> = latent.chain(rotary).map(|x| exact(rounded(x))).collect();
                let scores = keys.iter().map(|key| {
                    let products = query.iter().zip(*key).map(|(q, &k)| q * exact(k));
                    products.sum::<f64>() * exact(attention.scale)
                });
                let scores: Vec<_> = scores.collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights = scores.iter().map(|s| exact(rounded((s - largest).exp())));
                let weights: Vec<_> = weights.collect();
                let total: f64 = weights.iter().sum();
                let attended = (0..shape.latent_dim).map(|i| {
                    let terms = keys.iter().zip(&weights).map(|(key, w)| exact(key[i]) * w);
                    rounded(terms.sum::<f64>() / total)
                });
                let to_values = &params.heads.values[head];
                let attended = to_values.matrix.inputs(&attended.collect::<Vec<_>>());
                for i in 0..shape.value_dim {
                    let value = linear_output(to_values, i, &attended);
                    out.set(row, head * shape.value_dim + i, value);
                }
            }
        }
    }
}

impl Device for Reference {
    type Stacks = Lacking;
    type Tiles = Lacking;
    type RowNorms = Lacking;
    type States = ReferenceStates;
    type LayerInputs = ReferenceLayerInputs;
    type Indexer = ReferenceIndexer;
    type Ranks = Lacking;

    const STACKS: Option<Lacking> = None;
    const TILES: Option<Lacking> = None;
    const ROW_NORMS: Option<Lacking> = None;
    const STATES: Option<ReferenceStates> = Some(ReferenceStates);
    const LAYER_INPUTS: Option<ReferenceLayerInputs> = Some(ReferenceLayerInputs);
    const INDEXER: Option<ReferenceIndexer> = Some(ReferenceIndexer);

    fn join_ranks(&mut self, _: &mut RankHost) -> Result<Lacking, LoadError> {
        Err(LoadError::Resource("it is the only one".to_owned()))
    }
}

impl StateOps<Reference> for ReferenceStates {
    fn add_to_rows(self, _: &mut Reference, rows: Range<usize>, added: &Vec<f32>, out: &mut Rows) {
        for row in rows {
            for (column, &value) in added.iter().enumerate() {
                out.set(row, column, exact(out.row(row)[column]) + exact(value));
            }
        }
    }

    fn add_table_rows(self, _: &mut Reference, table: &Rows, rows: &[u32], out: &mut Rows) {
        for (row, &added) in rows.iter().enumerate() {
            for (column, &value) in table.row(added as usize).iter().enumerate() {
                out.set(row, column, exact(out.row(row)[column]) + exact(value));
            }
        }
    }

    fn norm_in_place(
        self,
        _: &mut Reference,
        num_rows: usize,
        hidden: &mut Rows,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows,
    ) {
        normalise_in_place(num_rows, hidden, norm, out);
    }

    fn write_sums(self, _: &mut Reference, rows: &[f32], out: &mut Rows) {
        out.values[..rows.len()].copy_from_slice(rows);
    }

    fn replace_rows(self, _: &mut Reference, first: usize, rows: &[bf16], out: &mut Rows) {
        for (index, value) in rows.iter().enumerate() {
            out.set(
                first + index / out.width,
                index % out.width,
                exact(value.to_f32()),
            );
        }
    }

    fn add_rows(self, _: &mut Reference, first: usize, rows: &[bf16], out: &mut Rows) {
        for (index, value) in rows.iter().enumerate() {
            let (row, column) = (first + index / out.width, index % out.width);
            let sum = exact(out.row(row)[column]) + exact(value.to_f32());
            out.set(row, column, sum);
        }
    }

    fn read_sums(self, device: &mut Reference, sums: &Rows, num_rows: usize, out: &mut [f32]) {
        self.read_states(device, sums, num_rows, out);
    }

    fn read_states(self, _: &mut Reference, states: &Rows, num_rows: usize, out: &mut [f32]) {
        let rows = (0..num_rows).map(|row| states.row(row));
        for (row, out) in rows.zip(out.chunks_mut(states.width)) {
            out.copy_from_slice(row);
        }
    }
}

/// `hidden = norm(hidden); out = hidden`.
fn normalise_in_place(
    num_rows: usize,
    hidden: &mut Rows,
    norm: Norm<'_, Vec<f32>>,
    out: &mut Rows,
) {
    for row in 0..num_rows {
        for (column, value) in normed(hidden.row(row), norm).into_iter().enumerate() {
            hidden.set(row, column, value);
            out.set(row, column, value);
        }
    }
}

/// Copies the first positions of a block to another one.
fn copy(cache: &mut Cache, source: BlockId, target: BlockId, num_positions: usize) {
    for plane in 0..cache.planes.len() {
        for position in 0..num_positions {
            for head in 0..cache.planes[plane].layout.num_kv_heads {
                let places = [source, target];
                let keys = places.map(|it| cache.place(plane, it, position, head));
                let values = places.map(|it| cache.value_place(plane, it, position, head));
                let plane = &mut cache.planes[plane];
                plane.keys.copy_within(keys[0].clone(), keys[1].start);
                plane.values.copy_within(values[0].clone(), values[1].start);
            }
            let [from, to] = [source, target].map(|it| cache.indexer_place(plane, it, position));
            let keys = &mut cache.planes[plane].indexer_keys;
            keys.copy_within(from, to.start);
        }
    }
}

fn copy_block(from: &Cache, source: usize, to: &mut Cache, target: usize) {
    for (from, to) in from.planes.iter().zip(&mut to.planes) {
        let places = |len: usize| [source, target].map(|block| block * len..(block + 1) * len);
        let [keys, values] = block_lens(&from.layout).map(places);
        to.keys[keys[1].clone()].copy_from_slice(&from.keys[keys[0].clone()]);
        to.values[values[1].clone()].copy_from_slice(&from.values[values[0].clone()]);
        let [source, target] = places(indexer_block_len(&from.layout));
        to.indexer_keys[target].copy_from_slice(&from.indexer_keys[source]);
    }
}

/// Elements of the keys that an indexer has of a block in a layer.
fn indexer_block_len(layout: &KvLayout) -> usize {
    layout.block_size.tokens().index() * layout.indexer_dim
}

/// Elements of the keys, and of the values, of a block in a layer.
fn block_lens(layout: &KvLayout) -> [usize; 2] {
    let num_vectors = layout.block_size.tokens().index() * layout.num_kv_heads;
    [layout.head_dim, stored_value_dim(layout)].map(|dim| num_vectors * dim)
}

/// Elements of a value that is stored beside its key.
fn stored_value_dim(layout: &KvLayout) -> usize {
    match layout.stores_values() {
        true => layout.value_dim(),
        false => 0,
    }
}

fn exact(x: f32) -> f64 {
    f64::from(x)
}

/// A number after rounding to bf16.
fn rounded(x: f64) -> f32 {
    bf16::from_f32(x as f32).to_f32()
}

fn bf16s(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(dtype.size())
        .map(|bytes| {
            let value = match dtype {
                Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                Dtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            };
            bf16::from_f32(value).to_f32()
        })
        .collect()
}

/// What an adapter adds to one output.
fn added(place: &AdaptedPlace, output: usize, x: &[f32]) -> f64 {
    let parts = place.parts().iter();
    let parts = parts.filter(|part| part.outputs().contains(&output));
    let sums = parts.map(|part| {
        let ranks = (0..part.rank()).map(|rank| {
            let products = x.iter().enumerate();
            let products = products.map(|(input, &x)| exact(x) * part.a(rank, input).to_f64());
            let b = part.b(output - part.outputs().start, rank);
            b.to_f64() * products.sum::<f64>()
        });
        f64::from(part.scale()) * ranks.sum::<f64>()
    });
    sums.sum()
}

/// One output as an adapter leaves it.
fn changed_output(
    linear: &Linear<Reference>,
    place: &AdaptedPlace,
    output: usize,
    x: &[f32],
    inputs: &[f64],
) -> f64 {
    let bias = linear.bias.as_ref().map_or(0.0, |bias| exact(bias[output]));
    let sum = linear.matrix.product(output, inputs) + added(place, output, x);
    finished(place, output, sum, bias)
}

fn finished(place: &AdaptedPlace, output: usize, sum: f64, bias: f64) -> f64 {
    let factor = place
        .factors()
        .map_or(1.0, |factors| exact(factors[output]));
    let own_bias = place.bias().map_or(0.0, |bias| exact(bias[output]));
    sum * factor + bias + own_bias
}

fn dot(x: &[f32], weights: &[bf16]) -> f64 {
    let products = x.iter().zip(weights);
    products
        .map(|(&x, weight)| exact(x) * weight.to_f64())
        .sum()
}

fn linear_output(linear: &Linear<Reference>, output: usize, x: &[f64]) -> f64 {
    let bias = linear.bias.as_ref().map_or(0.0, |bias| exact(bias[output]));
    linear.matrix.product(output, x) + bias
}

/// The experts of a row and their weights, of the best groups only.
fn grouped(
    logits: &[f32],
    rule: &GroupedRouting,
    correction: Option<&Vec<f32>>,
    num_chosen: usize,
) -> Vec<(usize, f64)> {
    let powers: f64 = logits.iter().map(|&logit| exact(logit).exp()).sum();
    let scores = logits.iter().map(|&logit| match rule.scores {
        RouterScores::Softmax => exact(logit).exp() / powers,
        RouterScores::Sigmoid | RouterScores::SigmoidOfLogit => 1.0 / (1.0 + (-exact(logit)).exp()),
    });
    let scores: Vec<_> = scores.collect();
    let corrected = |expert: usize| {
        let score = match rule.scores {
            RouterScores::SigmoidOfLogit => exact(logits[expert]),
            RouterScores::Softmax | RouterScores::Sigmoid => scores[expert],
        };
        score + correction.map_or(0.0, |c| exact(c[expert]))
    };
    let best = |mut all: Vec<(usize, f64)>, num: usize| {
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(num);
        all
    };
    let group_len = logits.len() / rule.num_groups;
    let of_group = |group: usize| {
        let experts = group * group_len..(group + 1) * group_len;
        experts.map(|expert| (expert, corrected(expert)))
    };
    let groups = (0..rule.num_groups).map(|group| {
        let best = best(of_group(group).collect(), rule.num_group_scores);
        (group, best.iter().map(|(_, score)| score).sum())
    });
    let mut groups = best(groups.collect(), rule.num_chosen_groups);
    groups.sort_unstable_by_key(|(group, _)| *group);
    let experts = groups.iter().flat_map(|&(group, _)| of_group(group));
    let chosen = best(experts.collect(), num_chosen);
    let total = match rule.is_normalised {
        true => chosen.iter().map(|&(expert, _)| scores[expert]).sum(),
        false => 1.0,
    };
    let weight = |expert: usize| scores[expert] / total * exact(rule.scale);
    chosen
        .iter()
        .map(|&(expert, _)| (expert, weight(expert)))
        .collect()
}

fn normed(x: &[f32], norm: Norm<'_, Vec<f32>>) -> Vec<f64> {
    match norm {
        Norm::Identity => x.iter().map(|&x| exact(x)).collect(),
        Norm::Rms { weight, eps } => normalise(x, weight, eps),
        Norm::Layer { weight, bias, eps } => {
            let mean = x.iter().map(|&x| exact(x)).sum::<f64>() / x.len() as f64;
            let squares = x.iter().map(|&x| (exact(x) - mean).powi(2));
            let variance = squares.sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (variance + exact(eps)).sqrt();
            let bias = |i: usize| bias.map_or(0.0, |bias| exact(bias[i]));
            let scaled = x.iter().zip(weight).enumerate();
            scaled
                .map(|(i, (&x, &weight))| (exact(x) - mean) * scale * exact(weight) + bias(i))
                .collect()
        }
    }
}

fn gated(gating: Gating, gate: f64, up: f64) -> f64 {
    match gating {
        Gating::Product(activation) => activated(activation, gate) * up,
        Gating::Scaled(activation, factor) => activated(activation, exact(factor) * gate) * up,
        Gating::Clamped { alpha, limit } => {
            let (alpha, limit) = (exact(alpha), exact(limit));
            let gate = gate.min(limit);
            gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
        Gating::Bounded(activation, limit) => {
            let limit = exact(limit);
            activated(activation, gate).min(limit) * up.clamp(-limit, limit)
        }
        Gating::Plain(activation) => activated(activation, gate),
    }
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::SquaredRelu => x.max(0.0).powi(2),
    }
}

include!("../../../tests/support/normal_distribution.rs");

fn capped(x: f64, soft_cap: Option<f32>) -> f64 {
    soft_cap.map_or(x, |cap| exact(cap) * (x / exact(cap)).tanh())
}

fn normalise(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|&x| exact(x).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + exact(eps)).sqrt();
    let products = x.iter().zip(weight);
    products
        .map(|(&x, &weight)| exact(x) * scale * exact(weight))
        .collect()
}

/// A head, rotated: element `i` with element `i + head_dim / 2`.
fn rotate(head: &[f64], angles: &[f32]) -> Vec<f64> {
    let (low, high) = head.split_at(head.len() / 2);
    let (cos, sin) = angles.split_at(low.len());
    let turned = |i: usize| {
        let (cos, sin) = (exact(cos[i]), exact(sin[i]));
        (low[i] * cos - high[i] * sin, high[i] * cos + low[i] * sin)
    };
    let (low, high): (Vec<_>, Vec<_>) = (0..low.len()).map(turned).unzip();
    [low, high].concat()
}

/// Row, position, block and place in the block of each token.
fn places(
    batch: &KvBatch<'_>,
    cache: &Cache,
    layer: usize,
) -> impl Iterator<Item = (usize, usize, BlockId, usize)> + use<> {
    let block_size = cache.positions_per_block();
    let place = |span: &KvSpan| {
        let table = cache.table(batch, span, layer);
        let first = span.kv_len as usize - span.tokens.len();
        let rows = span.tokens.start as usize..span.tokens.end as usize;
        rows.zip(first..).map(move |(row, position)| {
            let block = table.at(position / block_size);
            (row, position, block, position % block_size)
        })
    };
    let places: Vec<_> = batch.spans().iter().flat_map(place).collect();
    places.into_iter()
}

/// Loads a model on the reference device.
///
/// # Errors
/// As [`ModelRunner::new`].
pub fn load_on_reference(
    source: &ModelSource,
    limits: RunnerLimits,
    options: &ReferenceOptions,
) -> Result<Box<dyn Runner>, LoadError> {
    Ok(Box::new(ModelRunner::<Reference>::new(
        source, limits, options,
    )?))
}
