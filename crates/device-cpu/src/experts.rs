//! Mixtures of experts on CPU.
//!
//! ```text
//! rows        row 0: experts 3, 1    row 1: experts 1, 4    row 2: experts 3, 4      (largest weight first)
//! sorted      | 0.1 1.0 | 0.0 2.0 | 1.1 2.1 |         row.rank: segments of experts 1, 3 and 4, rows in order
//! products    down(activation(gate) * up) of each segment with its expert
//! sums        row 0: w * sorted[2] + w * sorted[0]    in the order of the ranks
//! ```
//!
//! Each touched expert's weights are read once for all rows, or once for each [chunk](ExpertRows) of a long context. A
//! row's result depends neither on the other rows nor on the chunks: products are those of single rows, and the order
//! of the sum is the order of the row's own weights.

use std::ops::Range;

use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::elementwise::MIN_TASK_LEN;
use super::gemm::Segment;
use super::math::{exp, from_bf16_bits, to_bf16_bits};
use super::packed_matrix::PackedMatrix;
use super::simd::for_each_simd;
use inflight_base::LoadError;
use inflight_device::{
    Experts, Gating, GroupedRouting, MixtureShape, Output, PlainActivation, RouterScores, Routing,
    RoutingRule,
};
use inflight_threads::DisjointSlice;

/// What the activations of a chunk may take.
const MAX_CHUNK_BYTES: usize = 128 << 20;
/// Outputs of a row that are summed up at a time, in registers.
const SUM_LEN: usize = 64;

/// The experts of rows, and memory for the activations of a chunk of rows. Memory is taken when it is first written.
pub struct ExpertRows {
    shape: MixtureShape,
    /// The expert of each row and rank.
    experts: Vec<u32>,
    /// Their weights.
    weights: Vec<f32>,
    /// The weight of the shared expert of each row.
    shared_weights: Vec<f32>,
    num_routed: usize,
    chunk: Chunk,
}

/// Rows that are computed together.
struct Chunk {
    max_rows: usize,
    /// For each expert with weights, the rows that have it, as a place in the sorted order.
    segments: Vec<Segment>,
    /// For each expert, the next free place in the sorted order.
    next: Vec<usize>,
    /// For each row and rank, its place in the sorted order.
    places: Vec<u32>,
    /// For each place, its row.
    sorted: Vec<u32>,
    /// The rows in sorted order, `[places, hidden_size]`.
    x: Vec<bf16>,
    /// The inner activations, `[places, expert_size]`.
    inner: Vec<bf16>,
    /// What the experts give, `[places, hidden_size]`.
    sums: Vec<f32>,
    /// The inner activations of the shared expert, `[max_rows, shared_size]`.
    shared_inner: Vec<bf16>,
    /// What it gives, `[max_rows, hidden_size]`; empty without one.
    shared_sums: Vec<f32>,
}

impl ExpertRows {
    /// Multiplies the weight of each chosen expert of the first rows with its factor.
    pub(super) fn scale(&mut self, num_rows: usize, scales: &[f32]) {
        let Routing {
            num_experts,
            num_chosen,
            ..
        } = self.shape.routing;
        assert_eq!(scales.len(), num_experts, "a factor for each expert");
        let weights = self.weights[..num_rows * num_chosen].iter_mut();
        for (weight, &expert) in weights.zip(&self.experts) {
            *weight *= scales[expert as usize];
        }
    }

    pub(super) fn new(max_rows: usize, shape: &MixtureShape) -> Result<Self, LoadError> {
        Self::with_chunks(max_rows, shape, MAX_CHUNK_BYTES)
    }

    fn with_chunks(
        max_rows: usize,
        shape: &MixtureShape,
        max_chunk_bytes: usize,
    ) -> Result<Self, LoadError> {
        let Routing {
            num_experts,
            num_chosen,
            ..
        } = shape.routing;
        assert!(
            (1..=num_experts).contains(&num_chosen),
            "{:?}",
            shape.routing
        );
        let (hidden, inner, shared) = (shape.hidden_size, shape.expert_size, shape.shared_size);
        let bytes_per_row = num_chosen * (6 * hidden + 2 * inner) + 4 * hidden + 2 * shared;
        let chunk_rows = (max_chunk_bytes / bytes_per_row).clamp(1, max_rows.max(1));
        let num_places = chunk_rows * num_chosen;
        Ok(Self {
            shape: *shape,
            experts: zeroed(max_rows, num_chosen)?,
            weights: zeroed(max_rows, num_chosen)?,
            shared_weights: zeroed(max_rows, 1)?,
            num_routed: 0,
            chunk: Chunk {
                max_rows: chunk_rows,
                segments: Vec::with_capacity(num_experts),
                next: vec![0; num_experts],
                places: zeroed(num_places, 1)?,
                sorted: zeroed(num_places, 1)?,
                x: zeroed(num_places, hidden)?,
                inner: zeroed(num_places, inner)?,
                sums: zeroed(num_places, hidden)?,
                shared_inner: zeroed(chunk_rows, shared)?,
                shared_sums: zeroed(chunk_rows, if shared > 0 { hidden } else { 0 })?,
            },
        })
    }

    /// Experts with weights that were chosen for a row.
    pub(super) fn num_touched(&self) -> usize {
        let routing = &self.shape.routing;
        let mut is_touched = vec![false; routing.num_experts];
        for &expert in &self.experts[..self.num_routed * routing.num_chosen] {
            is_touched[expert as usize] = true;
        }
        is_touched
            .into_iter()
            .take(routing.num_computed_experts())
            .filter(|&is_touched| is_touched)
            .count()
    }
}

impl Chunk {
    /// Sorts the experts of rows, `[rows, num_chosen]`. Experts below `num_computed` have weights. Returns the number
    /// of places of experts with weights.
    fn sort(&mut self, experts: &[u32], num_chosen: usize, num_computed: usize) -> usize {
        self.next.fill(0);
        for &expert in experts {
            self.next[expert as usize] += 1;
        }
        self.segments.clear();
        let (mut start, mut num_places) = (0, 0);
        for (matrix, next) in self.next.iter_mut().enumerate() {
            let rows = start..start + *next;
            *next = start;
            start = rows.end;
            if !rows.is_empty() && matrix < num_computed {
                num_places = rows.end;
                self.segments.push(Segment { matrix, rows });
            }
        }
        for (index, (&expert, place)) in experts.iter().zip(&mut self.places).enumerate() {
            let next = &mut self.next[expert as usize];
            self.sorted[*next] = (index / num_chosen) as u32;
            *place = *next as u32;
            *next += 1;
        }
        num_places
    }
}

impl Cpu {
    /// Chooses the experts of each row of `logits`, `[m, num_logits]`.
    pub(super) fn route(
        &mut self,
        logits: &[f32],
        routing: &Routing,
        correction: Option<&[f32]>,
        rows: &mut ExpertRows,
    ) {
        let (num_logits, num_chosen) = (routing.num_logits(), routing.num_chosen);
        assert_eq!(rows.shape.routing, *routing, "rows of this model");
        let m = logits.len() / num_logits;
        rows.num_routed = m;
        let experts = DisjointSlice::new(&mut rows.experts);
        let weights = DisjointSlice::new(&mut rows.weights);
        let shared_weights = DisjointSlice::new(&mut rows.shared_weights);
        let max_rows = MIN_TASK_LEN.div_ceil(num_logits);
        self.pool
            .for_each(&mut self.workers, m.div_ceil(max_rows), |worker, task| {
                for row in task * max_rows..m.min((task + 1) * max_rows) {
                    // SAFETY: each row belongs to one task.
                    let (experts, weights, shared_weight) = unsafe {
                        (
                            experts.slice(row * num_chosen, num_chosen),
                            weights.slice(row * num_chosen, num_chosen),
                            shared_weights.slice(row, 1),
                        )
                    };
                    let (logits, rest) =
                        logits[row * num_logits..][..num_logits].split_at(routing.num_experts);
                    let scratch = &mut worker.routing;
                    choose(logits, routing.rule, correction, scratch, experts, weights);
                    shared_weight[0] = rest.first().map_or(1.0, |gate| 1.0 / (1.0 + exp(-gate)));
                }
            });
    }

    /// `out = sum over the chosen experts of weight * down(activation(gate) * up)`, and that of the shared expert, or
    /// that added to `out`. `x` and `out` are `[m, hidden_size]`.
    pub(super) fn mix_experts(
        &mut self,
        x: &[bf16],
        experts: &Experts<Self>,
        rows: &mut ExpertRows,
        output: Output,
        out: &mut [f32],
    ) {
        let hidden = rows.shape.hidden_size;
        let num_rows = x.len() / hidden;
        let num_chosen = experts.chosen.len();
        assert!(
            num_rows <= rows.num_routed
                && (num_chosen == 0 || num_chosen == rows.shape.routing.num_computed_experts())
        );
        let max_rows = rows.chunk.max_rows;
        for start in (0..num_rows).step_by(max_rows) {
            let chunk = start..num_rows.min(start + max_rows);
            let elements = chunk.start * hidden..chunk.end * hidden;
            self.mix_chunk(
                chunk,
                &x[elements.clone()],
                experts,
                rows,
                output,
                &mut out[elements],
            );
        }
    }

    fn mix_chunk(
        &mut self,
        rows: Range<usize>,
        x: &[bf16],
        experts: &Experts<Self>,
        all: &mut ExpertRows,
        output: Output,
        out: &mut [f32],
    ) {
        let (hidden, routing) = (all.shape.hidden_size, all.shape.routing);
        // The width inside may be that of a tile.
        let (num_chosen, expert_size) = match experts.chosen.first() {
            Some(expert) => (routing.num_chosen, expert.down.matrix.k()),
            None => (0, 0),
        };
        assert!(
            routing.num_zero_experts == 0 || expert_size == all.shape.expert_size,
            "what is added once is in no tile"
        );
        let (num_rows, num_places) = (rows.len(), rows.len() * num_chosen);
        let pairs = rows.start * num_chosen..rows.end * num_chosen;
        let chunk = &mut all.chunk;
        let num_computed = routing.num_computed_experts();
        let num_computed = chunk.sort(&all.experts[pairs.clone()], num_chosen, num_computed);
        let sorted_x = &mut chunk.x[..num_places * hidden];
        let weights = &all.weights[pairs.clone()];
        let places = &chunk.places[..num_places];
        let of_inputs = routing.rule == RoutingRule::WeightedInputs;
        match of_inputs {
            true => self.gather_weighted(x, (places, weights), hidden, sorted_x),
            false => self.gather(x, &chunk.sorted[..num_places], hidden, sorted_x),
        }
        let inner = &mut chunk.inner[..num_computed * expert_size];
        let sums = &mut chunk.sums[..num_places * hidden];
        let (sorted_x, inputs) = sorted_x.split_at(num_computed * hidden);
        let (of_computed, of_zero) = sums.split_at_mut(num_computed * hidden);
        inputs.convert_to_f32_slice(of_zero);
        let (of, gating) = (&experts.chosen, experts.gating);
        let (segments, up) = (&chunk.segments, |expert: usize| &of[expert].gate_up);
        match gating {
            Gating::Plain(activation) => {
                let activation = PlainActivation::Of(activation);
                self.gemm_activated_segments(sorted_x, segments, up, activation, inner);
            }
            _ => {
                self.gemm_gated_segments(sorted_x, segments, up, gating, inner);
            }
        }
        self.gemm_segments(inner, segments, |expert| &of[expert].down, of_computed);
        let shared_sums = &mut chunk.shared_sums[..if experts.shared.is_some() {
            num_rows * hidden
        } else {
            0
        }];
        if let Some(shared) = &experts.shared {
            let (gate_up, down) = (&shared.gate_up, &shared.down);
            let inner = &mut chunk.shared_inner[..num_rows * down.matrix.k()];
            let bias = gate_up.bias.as_deref();
            let gating = experts.shared_gating;
            self.gemm_inside(x, num_rows, &gate_up.matrix, bias, gating, inner);
            let bias = down.bias.as_deref();
            self.gemm(
                inner,
                num_rows,
                &down.matrix,
                bias,
                Output::Store,
                shared_sums,
            );
        }
        let weighted = Weighted {
            sums,
            places,
            weights: (!of_inputs).then_some(weights),
            shared_sums,
            shared_weights: &all.shared_weights[rows],
            num_chosen,
            output,
        };
        self.add_up(&weighted, hidden, out);
    }

    /// The inside of the shared expert: the inputs of its down projection.
    fn gemm_inside(
        &mut self,
        x: &[bf16],
        num_rows: usize,
        up: &PackedMatrix,
        bias: Option<&[f32]>,
        gating: Gating,
        out: &mut [bf16],
    ) {
        match gating {
            Gating::Plain(activation) => {
                let activation = (PlainActivation::Of(activation), None);
                self.gemm_activated(x, num_rows, up, bias, activation, out);
            }
            _ => {
                self.gemm_gated(x, num_rows, up, bias, gating, out);
            }
        }
    }

    /// Copies rows of `x` to their places.
    fn gather(&mut self, x: &[bf16], sorted: &[u32], width: usize, out: &mut [bf16]) {
        let max_rows = MIN_TASK_LEN.div_ceil(width);
        let num_tasks = sorted.len().div_ceil(max_rows);
        let out = DisjointSlice::new(out);
        self.pool.for_each(&mut self.workers, num_tasks, |_, task| {
            let first = task * max_rows;
            for (place, &row) in (first..).zip(sorted[first..].iter().take(max_rows)) {
                // SAFETY: each place belongs to one task.
                let out = unsafe { out.slice(place * width, width) };
                out.copy_from_slice(&x[row as usize * width..][..width]);
            }
        });
    }

    /// Copies rows of `x` to the places of their experts, multiplied with the weights of these.
    fn gather_weighted(
        &mut self,
        x: &[bf16],
        (places, weights): (&[u32], &[f32]),
        width: usize,
        out: &mut [bf16],
    ) {
        let num_chosen = (places.len() * width).checked_div(x.len()).unwrap_or(1);
        let max_pairs = MIN_TASK_LEN.div_ceil(width);
        let num_tasks = places.len().div_ceil(max_pairs);
        let simd = self.simd;
        let x: &[u16] = x.reinterpret_cast();
        let out = DisjointSlice::new(out.reinterpret_cast_mut());
        self.pool.for_each(&mut self.workers, num_tasks, |_, task| {
            let first = task * max_pairs;
            for pair in first..places.len().min(first + max_pairs) {
                let (x, weight) = (&x[pair / num_chosen * width..][..width], weights[pair]);
                // SAFETY: each place belongs to one task.
                let out = unsafe { out.slice(places[pair] as usize * width, width) };
                for_each_simd!(simd, write_weighted, (x: &[u16], weight: f32, out: &mut [u16]));
            }
        });
    }

    /// Adds up what the experts of each row have given.
    fn add_up(&mut self, weighted: &Weighted<'_>, width: usize, out: &mut [f32]) {
        let simd = self.simd;
        let num_rows = out.len() / width;
        let max_rows = MIN_TASK_LEN.div_ceil(width);
        let out = DisjointSlice::new(out);
        self.pool
            .for_each(&mut self.workers, num_rows.div_ceil(max_rows), |_, task| {
                for row in task * max_rows..num_rows.min((task + 1) * max_rows) {
                    // SAFETY: each row belongs to one task.
                    let out = unsafe { out.slice(row * width, width) };
                    for_each_simd!(simd, add_up_row, (weighted: &Weighted<'_>, row: usize, out: &mut [f32]));
                }
            });
    }
}

#[inline(always)]
fn write_weighted(x: &[u16], weight: f32, out: &mut [u16]) {
    for (x, out) in x.iter().zip(out) {
        *out = to_bf16_bits(from_bf16_bits(*x) * weight);
    }
}

/// What experts have given for rows, and what that weighs.
struct Weighted<'a> {
    /// `[places, width]`.
    sums: &'a [f32],
    /// `[rows, num_chosen]`.
    places: &'a [u32],
    /// `[rows, num_chosen]`; `None`: all are 1.
    weights: Option<&'a [f32]>,
    /// `[rows, width]`, or empty.
    shared_sums: &'a [f32],
    shared_weights: &'a [f32],
    num_chosen: usize,
    output: Output,
}

#[inline(always)]
fn add_up_row(weighted: &Weighted<'_>, row: usize, out: &mut [f32]) {
    let (width, num_chosen) = (out.len(), weighted.num_chosen);
    let places = &weighted.places[row * num_chosen..][..num_chosen];
    let weights = weighted
        .weights
        .map(|all| &all[row * num_chosen..][..num_chosen]);
    for (index, out) in out.chunks_mut(SUM_LEN).enumerate() {
        let first = index * SUM_LEN;
        let mut totals = [0.0; SUM_LEN];
        let mut add = |sums: &[f32], weight: f32| {
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total += weight * sum;
            }
        };
        for (rank, &place) in places.iter().enumerate() {
            add(
                &weighted.sums[place as usize * width + first..][..out.len()],
                weights.map_or(1.0, |weights| weights[rank]),
            );
        }
        if !weighted.shared_sums.is_empty() {
            let sums = &weighted.shared_sums[row * width + first..][..out.len()];
            add(sums, weighted.shared_weights[row]);
        }
        match weighted.output {
            Output::Store => out.copy_from_slice(&totals[..out.len()]),
            Output::Add => {
                for (out, total) in out.iter_mut().zip(&totals) {
                    *out += total;
                }
            }
        }
    }
}

/// Scratch memory of one thread.
#[derive(Default)]
pub(super) struct RoutingScratch {
    /// The score of each expert.
    scores: Vec<f32>,
    /// The same with its correction.
    corrected: Vec<f32>,
    /// The best ones of a group, by their places there.
    best: Vec<(u32, f32)>,
    group_scores: Vec<f32>,
    /// The best ones of these, by group.
    groups: Vec<(u32, f32)>,
    /// The chosen experts.
    chosen: Vec<(u32, f32)>,
}

/// Chooses the experts of a row, best first. They are different ones even if logits are not finite.
fn choose(
    logits: &[f32],
    rule: RoutingRule,
    correction: Option<&[f32]>,
    scratch: &mut RoutingScratch,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    if let RoutingRule::Grouped(rule) = rule {
        return choose_in_groups(logits, &rule, correction, scratch, experts, weights);
    }
    let chosen = &mut scratch.chosen;
    chosen.resize(experts.len(), (0, 0.0));
    largest((0..).zip(logits.iter().copied()), chosen);
    for ((&chosen, expert), weight) in chosen.iter().zip(&mut *experts).zip(&mut *weights) {
        (*expert, *weight) = chosen;
    }
    match rule {
        RoutingRule::Softmax { is_normalised } => {
            let largest = weights[0];
            let power = |logit: f32| exp(logit - largest);
            let sum = |logits: &[f32]| logits.iter().fold(0.0, |sum, &logit| sum + power(logit));
            let total = match is_normalised {
                true => sum(weights),
                false => sum(logits),
            };
            for weight in weights {
                *weight = power(*weight) / total;
            }
        }
        RoutingRule::WeightedInputs => {
            for weight in weights {
                *weight = 1.0 / (1.0 + exp(-*weight));
            }
        }
        RoutingRule::SparseMixer { jitter } => {
            for rank in 0..experts.len() {
                weights[rank] =
                    sparse_mixer_weight(logits, jitter, &experts[..rank], weights[rank]);
            }
        }
        RoutingRule::Grouped(_) => unreachable!("chosen in groups"),
    }
}

/// Finds the largest of several numbers, largest first, with their indices; of equal ones, the first one first. There
/// are enough of them, and even if some are not numbers, the indices differ.
fn largest(all: impl Iterator<Item = (u32, f32)>, found: &mut [(u32, f32)]) {
    let mut len = 0;
    for (index, number) in all {
        let mut place = len;
        while place > 0 && number > found[place - 1].1 {
            place -= 1;
        }
        if place == found.len() {
            continue;
        }
        len = found.len().min(len + 1);
        found.copy_within(place..len - 1, place + 1);
        found[place] = (index, number);
    }
}

fn choose_in_groups(
    logits: &[f32],
    rule: &GroupedRouting,
    correction: Option<&[f32]>,
    scratch: &mut RoutingScratch,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let RoutingScratch {
        scores,
        corrected,
        best,
        group_scores,
        groups,
        chosen,
    } = scratch;
    scores.clear();
    match rule.scores {
        RouterScores::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.extend(logits.iter().map(|logit| exp(logit - max)));
            let total = scores.iter().sum::<f32>();
            scores.iter_mut().for_each(|score| *score /= total);
        }
        RouterScores::Sigmoid | RouterScores::SigmoidOfLogit => {
            scores.extend(logits.iter().map(|logit| 1.0 / (1.0 + exp(-logit))));
        }
    }
    corrected.clear();
    corrected.extend_from_slice(match rule.scores {
        RouterScores::SigmoidOfLogit => logits,
        RouterScores::Softmax | RouterScores::Sigmoid => scores,
    });
    for (score, correction) in corrected.iter_mut().zip(correction.into_iter().flatten()) {
        *score += correction;
    }
    let group_len = logits.len() / rule.num_groups;
    best.resize(rule.num_group_scores, (0, 0.0));
    groups.resize(rule.num_chosen_groups, (0, 0.0));
    group_scores.clear();
    group_scores.extend(corrected.chunks(group_len).map(|group| {
        largest((0..).zip(group.iter().copied()), best);
        best.iter().map(|(_, score)| score).sum::<f32>()
    }));
    largest((0..).zip(group_scores.iter().copied()), groups);
    // In the order of experts, so that the first of equal ones comes first.
    groups.sort_unstable_by_key(|&(group, _)| group);
    let members = groups.iter().flat_map(|&(group, _)| {
        let first = group as usize * group_len;
        (first..first + group_len).map(|expert| (expert as u32, corrected[expert]))
    });
    chosen.resize(experts.len(), (0, 0.0));
    largest(members, chosen);
    for ((&(chosen, _), expert), weight) in chosen.iter().zip(experts).zip(&mut *weights) {
        (*expert, *weight) = (chosen, scores[chosen as usize]);
    }
    let total = match rule.is_normalised {
        // Scores may all be zero.
        true => weights.iter().sum::<f32>() + 1e-20,
        false => 1.0,
    };
    for weight in weights {
        *weight = *weight / total * rule.scale;
    }
}

/// The weight of the expert with the `largest` logit of those that are not `taken`.
fn sparse_mixer_weight(logits: &[f32], jitter: f32, taken: &[u32], largest: f32) -> f32 {
    let mut total = 0.0;
    for (expert, &logit) in logits.iter().enumerate() {
        // Near is also what cannot be compared: zeros, and what is not a number.
        let is_far = (largest - logit) / logit.abs().max(largest) > 2.0 * jitter;
        if !is_far && !taken.contains(&(expert as u32)) {
            total += exp(logit - largest);
        }
    }
    1.0 / total
}

fn zeroed<T: Zeroable>(rows: usize, width: usize) -> Result<Vec<T>, LoadError> {
    let vec = rows
        .checked_mul(width)
        .and_then(|len| try_zeroed_vec(len).ok());
    vec.ok_or_else(|| {
        LoadError::Resource(format!(
            "no memory for the experts of tokens, {rows} x {width} x {} bytes; lower max_num_tokens",
            size_of::<T>()
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::{CpuOptions, Rounded, Simd};
    use inflight_device::{Activation, Expert, Linear};
    use inflight_numbers::{CodeBits, Dtype, QuantisedRows, RawMatrix, Stacking};

    const HIDDEN: usize = 53;
    const INNER: usize = 70;

    fn routing(num_experts: usize, num_chosen: usize, has_shared_gate: bool) -> Routing {
        Routing {
            num_experts,
            num_zero_experts: 0,
            num_chosen,
            rule: RoutingRule::Softmax {
                is_normalised: true,
            },
            has_shared_gate,
        }
    }

    fn chosen(logits: &[f32], num: usize, is_normalised: bool) -> (Vec<u32>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![9; num], vec![f32::NAN; num]);
        let rule = RoutingRule::Softmax { is_normalised };
        choose(
            logits,
            rule,
            None,
            &mut RoutingScratch::default(),
            &mut experts,
            &mut weights,
        );
        (experts, weights)
    }

    #[test]
    fn the_largest_logits_are_chosen_and_weights_are_their_softmax() {
        let logits = [0.5, -1.0, 2.0, 2.0, 1.0];
        let (experts, weights) = chosen(&logits, 3, true);
        assert_eq!(experts, [2, 3, 4], "the first of equal ones first");
        let e = (-1.0_f64).exp();
        for (weight, expected) in weights.iter().zip([1.0, 1.0, e]) {
            assert!((f64::from(*weight) - expected / (2.0 + e)).abs() < 1e-6);
        }
        let (experts, weights) = chosen(&logits, 5, true);
        assert_eq!(experts, [2, 3, 4, 0, 1]);
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        let (_, scores) = chosen(&logits, 3, false);
        assert!(
            scores
                .iter()
                .zip(&weights)
                .all(|(a, b)| (a - b).abs() < 1e-6)
        );
    }

    #[test]
    fn experts_with_weighted_inputs_have_the_largest_logits_and_their_sigmoids() {
        let (mut experts, mut weights) = ([9; 2], [f32::NAN; 2]);
        let scratch = &mut RoutingScratch::default();
        let rule = RoutingRule::WeightedInputs;
        let logits = [0.5, -1.0, 2.0, 1.0];
        choose(&logits, rule, None, scratch, &mut experts, &mut weights);
        assert_eq!(experts, [2, 3]);
        for (weight, logit) in weights.iter().zip([2.0_f64, 1.0]) {
            assert!((f64::from(*weight) - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-6);
        }
    }

    /// Compared with transformers' `sparsemixer`.
    #[test]
    fn a_sparse_mixer_weighs_each_expert_among_those_near_it() {
        let mixed = |logits: &[f32], jitter: f32| {
            let (mut experts, mut weights) = ([9; 2], [f32::NAN; 2]);
            let rule = RoutingRule::SparseMixer { jitter };
            choose(
                logits,
                rule,
                None,
                &mut RoutingScratch::default(),
                &mut experts,
                &mut weights,
            );
            (experts, weights)
        };
        let near = |weights: [f32; 2], expected: [f64; 2]| {
            let pairs = weights.iter().zip(expected);
            pairs
                .into_iter()
                .all(|(weight, expected)| (f64::from(*weight) - expected).abs() < 1e-6)
        };
        // Of 2.0, 1.9 is near, and 1.0 is not; of 1.9 none of the rest is.
        let logits = [1.0, 1.9, -3.0, 2.0];
        let (experts, weights) = mixed(&logits, 0.05);
        assert_eq!(experts, [3, 1]);
        assert!(near(weights, [1.0 / (1.0 + (-0.1_f64).exp()), 1.0]));
        // All of the same sign are near.
        let (_, weights) = mixed(&logits, 0.25);
        let first = 1.0 + (-0.1_f64).exp() + (-1.0_f64).exp();
        assert!(near(weights, [1.0 / first, 1.0 / (1.0 + (-0.9_f64).exp())]));
        // Negative ones are measured by the farther one: -1 by 0.5 of 1.5, -2 by 1.5 of 2.
        let (experts, weights) = mixed(&[-1.5, -0.5, -2.0, -1.0], 0.3);
        assert_eq!(experts, [1, 3]);
        let first = 1.0 + (-0.5_f64).exp();
        let second = 1.0 + (-0.5_f64).exp() + (-1.0_f64).exp();
        assert!(near(weights, [1.0 / first, 1.0 / second]), "{weights:?}");
        assert_eq!(mixed(&[0.0, 0.0, -1.0], 0.0).1, [0.5, 1.0]);
    }

    fn grouped(
        logits: &[f32],
        rule: GroupedRouting,
        correction: Option<&[f32]>,
        num: usize,
    ) -> (Vec<u32>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![9; num], vec![f32::NAN; num]);
        let rule = RoutingRule::Grouped(rule);
        let scratch = &mut RoutingScratch::default();
        choose(
            logits,
            rule,
            correction,
            scratch,
            &mut experts,
            &mut weights,
        );
        (experts, weights)
    }

    /// Compared with transformers' `DeepseekV3TopkRouter` and `DeepseekV2TopkRouter`.
    #[test]
    fn experts_come_from_the_best_groups_and_corrections_count_for_the_choice_alone() {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let near = |weights: &[f32], expected: &[f64]| {
            let mut pairs = weights.iter().zip(expected);
            weights.len() == expected.len()
                && pairs.all(|(weight, expected)| (f64::from(*weight) - expected).abs() < 1e-6)
        };
        let rule = GroupedRouting {
            scores: RouterScores::Sigmoid,
            num_groups: 3,
            num_chosen_groups: 2,
            num_group_scores: 2,
            is_normalised: true,
            scale: 2.5,
        };
        // The largest logit is in the group with the smallest sum of two.
        let logits = [3.0, -9.0, 1.0, 0.5, 0.0, 1.0];
        let (experts, weights) = grouped(&logits, rule, None, 3);
        assert_eq!(experts, [2, 5, 3], "of equal ones, the first one");
        let scores = [1.0, 1.0, 0.5].map(sigmoid);
        let total: f64 = scores.iter().sum();
        assert!(near(&weights, &scores.map(|score| 2.5 * score / total)));
        // Corrected, the first group beats the last, and its second expert the rest.
        let correction = [0.0, 2.0, 0.0, 0.0, 0.0, 0.0];
        let (experts, weights) = grouped(&logits, rule, Some(&correction), 3);
        assert_eq!(experts, [1, 0, 2]);
        let scores = [-9.0, 3.0, 1.0].map(sigmoid);
        let total: f64 = scores.iter().sum();
        assert!(near(&weights, &scores.map(|score| 2.5 * score / total)));

        let rule = GroupedRouting {
            scores: RouterScores::Softmax,
            num_group_scores: 1,
            is_normalised: false,
            ..rule
        };
        let (experts, weights) = grouped(&logits, rule, None, 3);
        assert_eq!(experts, [0, 2, 3], "of equal groups, the first one");
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let scores = [3.0, 1.0, 0.5].map(|logit: f64| 2.5 * logit.exp() / total);
        assert!(near(&weights, &scores));
    }

    #[test]
    fn whatever_the_logits_are_the_experts_of_a_row_differ() {
        for logits in [
            [f32::NAN; 5],
            [1.0, f32::NAN, 3.0, f32::NAN, 2.0],
            [f32::NEG_INFINITY; 5],
            [f32::INFINITY, 1.0, f32::INFINITY, f32::MAX, f32::MIN],
        ] {
            for num in 1..=5 {
                let (mut experts, _) = chosen(&logits, num, true);
                experts.sort_unstable();
                experts.dedup();
                assert!(experts.len() == num && experts.iter().all(|&expert| expert < 5));
                for scores in [
                    RouterScores::Softmax,
                    RouterScores::Sigmoid,
                    RouterScores::SigmoidOfLogit,
                ] {
                    let rule = GroupedRouting {
                        scores,
                        num_groups: 5,
                        num_chosen_groups: num,
                        num_group_scores: 1,
                        is_normalised: true,
                        scale: 1.0,
                    };
                    let correction = [f32::NAN, 0.0, f32::INFINITY, 1.0, f32::NEG_INFINITY];
                    for correction in [None, Some(&correction[..])] {
                        let (mut experts, _) = grouped(&logits, rule, correction, num);
                        experts.sort_unstable();
                        experts.dedup();
                        assert!(experts.len() == num && experts.iter().all(|&expert| expert < 5));
                    }
                }
            }
        }
    }

    /// Numbers from -1 to 1, always the same.
    struct Rng(u64);

    impl Rng {
        fn next(&mut self) -> f32 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        }

        fn f32s(&mut self, len: usize) -> Vec<f32> {
            (0..len).map(|_| self.next()).collect()
        }

        fn bf16s(&mut self, len: usize) -> Vec<bf16> {
            (0..len).map(|_| bf16::from_f32(self.next())).collect()
        }
    }

    fn cpu(simd: Simd, num_threads: usize) -> Cpu {
        Cpu::new(&CpuOptions {
            num_threads: NonZeroUsize::new(num_threads),
            simd: Some(simd),
            ..CpuOptions::default()
        })
        .expect("supported")
    }

    fn pack(cpu: &mut Cpu, bits: Option<CodeBits>, parts: &[&[bf16]], k: usize) -> PackedMatrix {
        let stacking = match parts.len() {
            1 => Stacking::Concatenated,
            _ => Stacking::Interleaved,
        };
        let parts = parts
            .iter()
            .map(|part| RawMatrix::new(Dtype::Bf16, part.len() / k, k, bytemuck::cast_slice(part)));
        let parts: Vec<_> = parts.collect();
        let Some(bits) = bits else {
            return cpu.pack(&parts, stacking).expect("memory").expect("finite");
        };
        let readers: Vec<_> = parts
            .iter()
            .map(|part| move |row: usize, out: &mut [f32]| part.row_to_f32(row, out))
            .collect();
        let rounded: Vec<_> = parts
            .iter()
            .zip(&readers)
            .map(|(part, read)| Rounded::new(Simd::detect(), part.rows(), k, bits, 32, read))
            .collect();
        let rounded: Vec<_> = rounded
            .iter()
            .map(|rows| rows as &dyn QuantisedRows)
            .collect();
        let packed = cpu.pack_quantised(&rounded, stacking);
        packed.expect("memory").expect("finite")
    }

    fn expert(
        cpu: &mut Cpu,
        bits: Option<CodeBits>,
        rng: &mut Rng,
        has_bias: bool,
        has_gate: bool,
    ) -> Expert<Cpu> {
        let [gate, up, down] = [(); 3].map(|()| rng.bf16s(HIDDEN * INNER));
        let num_parts = if has_gate { 2 } else { 1 };
        Expert {
            gate_up: Linear {
                matrix: pack(cpu, bits, &[&gate[..], &up][..num_parts], HIDDEN),
                bias: has_bias.then(|| rng.f32s(num_parts * INNER)),
                place: None,
            },
            down: Linear {
                matrix: pack(cpu, bits, &[&down], INNER),
                bias: has_bias.then(|| rng.f32s(HIDDEN)),
                place: None,
            },
        }
    }

    /// What experts give for each row alone, with the operations of a model without experts.
    fn by_rows(cpu: &mut Cpu, x: &[bf16], experts: &Experts<Cpu>, rows: &ExpertRows) -> Vec<f32> {
        let routing = rows.shape.routing;
        let num_chosen = routing.num_chosen;
        let mut all = Vec::new();
        for (row, x) in x.chunks(HIDDEN).enumerate() {
            let mut total = vec![0.0; HIDDEN];
            let mut add = |total: &mut [f32], x: &[bf16], expert: &Expert<Cpu>, gating, weight| {
                let (gate_up, down) = (&expert.gate_up, &expert.down);
                let mut inner = vec![bf16::NAN; INNER];
                let bias = gate_up.bias.as_deref();
                cpu.gemm_inside(x, 1, &gate_up.matrix, bias, gating, &mut inner);
                let mut sums = vec![f32::NAN; HIDDEN];
                let bias = down.bias.as_deref();
                cpu.gemm(&inner, 1, &down.matrix, bias, Output::Store, &mut sums);
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total += weight * sum;
                }
            };
            for rank in row * num_chosen..(row + 1) * num_chosen {
                let weight = rows.weights[rank];
                let Some(expert) = experts.chosen.get(rows.experts[rank] as usize) else {
                    for (total, x) in total.iter_mut().zip(x) {
                        *total += weight * x.to_f32();
                    }
                    continue;
                };
                match routing.rule == RoutingRule::WeightedInputs {
                    true => {
                        let weighted = x.iter().map(|x| bf16::from_f32(x.to_f32() * weight));
                        let weighted: Vec<_> = weighted.collect();
                        add(&mut total, &weighted, expert, experts.gating, 1.0);
                    }
                    false => add(&mut total, x, expert, experts.gating, weight),
                }
            }
            if let Some(shared) = &experts.shared {
                let weight = rows.shared_weights[row];
                add(&mut total, x, shared, experts.shared_gating, weight);
            }
            all.extend(total);
        }
        all
    }

    #[test]
    fn rows_have_the_bits_of_products_of_their_own_in_any_chunks_on_any_threads() {
        let formats = [None, Some(CodeBits::Eight), Some(CodeBits::Four)];
        for (simd, bits) in Simd::tested().flat_map(|simd| formats.map(|bits| (simd, bits))) {
            let mut rng = Rng(7);
            let product = Gating::Product(Activation::Silu);
            let clamped = Gating::Clamped {
                alpha: 1.702,
                limit: 0.5,
            };
            let plain = Gating::Plain(Activation::SquaredRelu);
            for (m, has_shared, has_bias, gating, of_inputs, num_zero) in [
                (1, true, false, product, false, 0),
                (3, false, true, clamped, false, 0),
                (300, true, true, product, false, 0),
                (70, true, false, product, true, 0),
                (1, true, true, plain, false, 0),
                (60, true, false, plain, false, 0),
                (1, false, false, product, false, 2),
                (65, false, false, product, false, 3),
            ] {
                let mut one = cpu(simd, 1);
                let mut expert = || expert(&mut one, bits, &mut rng, has_bias, gating.has_gate());
                let shared_gating = match gating {
                    Gating::Product(activation) => Gating::Bounded(activation, 0.25),
                    other => other,
                };
                let experts = Experts {
                    gating,
                    shared_gating,
                    chosen: (num_zero..7).map(|_| expert()).collect(),
                    shared: has_shared.then(expert),
                };
                let shape = MixtureShape {
                    routing: match of_inputs {
                        true => Routing {
                            rule: RoutingRule::WeightedInputs,
                            ..routing(7, 3, false)
                        },
                        false => Routing {
                            num_zero_experts: num_zero,
                            ..routing(7, 3, has_shared)
                        },
                    },
                    hidden_size: HIDDEN,
                    expert_size: INNER,
                    shared_size: if has_shared { INNER } else { 0 },
                };
                let (x, before) = (rng.bf16s(m * HIDDEN), rng.f32s(m * HIDDEN));
                let mut logits = rng.f32s(m * shape.routing.num_logits());
                // One expert has most of the rows, and another one none.
                for logits in logits.chunks_mut(shape.routing.num_logits()) {
                    (logits[4], logits[2]) = (2.0, -2.0);
                }
                let mut expected = None;
                for (num_threads, chunk_bytes) in [(1, 1 << 30), (3, 1 << 30), (2, 1), (2, 50_000)]
                {
                    let mut cpu = cpu(simd, num_threads);
                    let rows = ExpertRows::with_chunks(m, &shape, chunk_bytes);
                    let mut rows = rows.expect("memory");
                    cpu.route(&logits, &shape.routing, None, &mut rows);
                    assert!(
                        rows.num_touched() <= 6 && rows.experts.iter().all(|&expert| expert != 2)
                    );
                    let mut out = vec![f32::NAN; m * HIDDEN];
                    cpu.mix_experts(&x, &experts, &mut rows, Output::Store, &mut out);
                    let expected =
                        expected.get_or_insert_with(|| by_rows(&mut cpu, &x, &experts, &rows));
                    assert!(
                        out == *expected,
                        "{simd}, {bits:?}, {m} rows, {num_threads} threads"
                    );
                    out.copy_from_slice(&before);
                    cpu.mix_experts(&x, &experts, &mut rows, Output::Add, &mut out);
                    let sums = before
                        .iter()
                        .zip(expected)
                        .map(|(before, sum)| before + *sum);
                    assert!(out.iter().copied().eq(sums));
                }
            }
        }
    }
}
