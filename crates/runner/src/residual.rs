//! The residual stream, and what reads from it and adds to it.

use std::ops::Range;

use super::linear_weights::{NormWeights, SummedLinear, linears_of};
use super::probe::{Operation, Probe, Work};
use super::spec::{ModelSpec, NormKind, NormSpec};
use super::summed::Summed;

use inflight_base::LoadError;
use inflight_device::{
    AdaptedRows, AdapterRun, Device, EmbeddingTable, Experts, ImageRows, InnerActivation,
    LayerInputOps, LayerNorm, Linear, Norm, Output, RankHost, RankOps, Routing, StateOps, Tile,
    TileOps,
};

/// The hidden states of a step, and their normalised form, which the next projection reads.
///
/// Where a projection on this rank gives the whole sum, it adds to the residual stream itself, unless its result is
/// normalised first. Otherwise its part is summed over the ranks first, and added together with the norm.
pub(super) struct ResidualStream<D: Device> {
    hidden_size: usize,
    embedding_scale: f32,
    /// Of the embedding, in the weights of adapters.
    embedding_place: usize,
    norm: NormSpec,
    has_whole_sums: bool,
    hidden: D::Sums,
    normed: D::Inputs,
    /// Only for embeddings of another width.
    narrow: Option<NarrowRows<D>>,
    /// The result of a block that is not added at once: a sum of tiles, this rank's part of a sum, or what is
    /// normalised first.
    result: Option<D::Sums>,
    /// Sums of later tiles.
    tile_sums: Vec<D::Sums>,
}

/// Rows as wide as embeddings, if those differ from the residual stream: of embedded tokens at the beginning of a step,
/// and at its end of what the output layer reads.
struct NarrowRows<D: Device> {
    width: usize,
    sums: D::Sums,
    inputs: D::Inputs,
}

/// The factor of what a block computes.
pub(super) enum Scale<'a, D: Device> {
    /// One for all of it.
    All(f32),
    /// One for each column, `[hidden_size]`.
    Columns(D::LayerInputs, &'a D::Vector),
}

/// A device, the host of a rank, the profiling probe, and the rows that have adapters.
pub(super) struct Probed<'a, D: Device, P> {
    pub device: &'a mut D,
    /// The connection with the hosts of other ranks.
    pub host: &'a mut RankHost,
    /// The operations of several ranks, if it is one of them.
    pub ranks: Option<D::Ranks>,
    pub probe: &'a mut P,
    pub adapters: &'a [AdapterRun],
}

impl<D: Device> ResidualStream<D> {
    /// Reserves `[max_rows, hidden_size]`, for projections in so many tiles.
    pub fn new(
        device: &mut D,
        max_rows: usize,
        spec: &ModelSpec,
        num_tiles: usize,
        host: &RankHost,
    ) -> Result<Self, LoadError> {
        let hidden_size = spec.hidden_size;
        let is_whole = host.has_whole_sums() && num_tiles == 1;
        let has_whole_sums = is_whole && device.has_whole_sums();
        let mut layers = spec.layers.iter();
        let has_after = layers.any(|it| {
            let is_scaled = it.multipliers.is_some()
                || it.column_factors.is_some()
                || it.recurrence_block.is_some();
            let has_factor = it.experts().is_some_and(|experts| experts.scale.is_some());
            it.norms.has_after()
                || it.input_block.is_some()
                || it.experts_block.is_some()
                || is_scaled
                || has_factor
        });
        let has_after = has_after || spec.has_rms_norm_of_embeddings();
        let result = match has_whole_sums && !has_after {
            true => None,
            false => Some(device.alloc_sums(max_rows, hidden_size)?),
        };
        Ok(Self {
            hidden_size,
            embedding_scale: spec.embedding_scale,
            embedding_place: spec.embedding_place() * num_tiles,
            norm: spec.norm,
            has_whole_sums,
            hidden: device.alloc_sums(max_rows, hidden_size)?,
            normed: device.alloc_inputs(max_rows, hidden_size)?,
            narrow: match spec.embedding_projections {
                Some(_) => Some(NarrowRows {
                    width: spec.embedding_width(),
                    sums: device.alloc_sums(max_rows, spec.embedding_width())?,
                    inputs: device.alloc_inputs(max_rows, spec.embedding_width())?,
                }),
                None => None,
            },
            result,
            tile_sums: (0..num_tile_sums(num_tiles))
                .map(|_| device.alloc_sums(max_rows, hidden_size))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Its width.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// The rows themselves.
    pub fn hidden(&self) -> &D::Sums {
        &self.hidden
    }

    /// The rows themselves, to begin with.
    pub fn hidden_mut(&mut self) -> &mut D::Sums {
        &mut self.hidden
    }

    /// The rows as they were normalised last.
    pub fn normed(&self) -> &D::Inputs {
        &self.normed
    }

    /// What the output layer reads, at the end of a step.
    pub fn states(&self) -> &D::Inputs {
        self.narrow.as_ref().map_or(&self.normed, |it| &it.inputs)
    }

    /// The same, mutably.
    pub fn states_mut(&mut self) -> &mut D::Inputs {
        match &mut self.narrow {
            Some(narrow) => &mut narrow.inputs,
            None => &mut self.normed,
        }
    }

    /// Their width.
    pub fn state_width(&self) -> usize {
        self.narrow.as_ref().map_or(self.hidden_size, |it| it.width)
    }

    /// Starts with the embeddings of a step's tokens, which `projection` makes as wide as the residual stream, and of
    /// their positions. With `part`, the table is the part of a rank of several, and its first row is the one of this
    /// token.
    pub fn embed<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        step: &D::Step<'_>,
        num_rows: usize,
        (table, part): (EmbeddingTable<'_, D>, Option<(D::Ranks, usize)>),
        projection: Option<&Linear<D>>,
        positions: Option<&D::Embedding>,
    ) {
        let scale = self.embedding_scale;
        let embedded = match &mut self.narrow {
            Some(narrow) => &mut narrow.sums,
            None => &mut self.hidden,
        };
        let device = &mut *run.device;
        match part {
            None => device.embed(step, table, scale, embedded),
            Some((ranks, first)) => ranks.embed_part(device, step, table, first, scale, embedded),
        }
        if let Some(adapted) = adapted_rows(run.adapters, Some(self.embedding_place)) {
            let first = part.map_or(0, |(_, first_token)| first_token);
            run.device
                .adapt_embeddings(step, first, adapted, scale, embedded);
        }
        if let Some((ranks, _)) = part {
            ranks.all_reduce(run.device, run.host, num_rows, embedded);
        }
        if let Some((NarrowRows { sums, inputs, .. }, linear)) =
            self.narrow.as_mut().zip(projection)
        {
            // As wide as the stream only now, and the same on all ranks, each of which has these weights.
            let device = &mut *run.device;
            device.norm(num_rows, sums, Norm::Identity, inputs);
            device.project(
                num_rows,
                inputs,
                linear,
                Output::Store,
                None,
                &mut self.hidden,
            );
        }
        if let Some(positions) = positions {
            run.device.add_positions(step, positions, &mut self.hidden);
        }
        run.probe.ended(Operation::Embed, || {
            Work::elements(num_rows, self.hidden_size, 6, 0)
        });
    }

    /// Ends with what the output layer reads: `states = linear(normed)`, as wide as embeddings.
    pub fn narrow(&mut self, device: &mut D, num_rows: usize, linear: &Linear<D>) {
        if let Some(NarrowRows { sums, inputs, .. }) = &mut self.narrow {
            device.project(num_rows, &self.normed, linear, Output::Store, None, sums);
            device.norm(num_rows, sums, Norm::Identity, inputs);
        }
    }

    /// Gives tokens of images their rows.
    pub fn replace_rows(&mut self, device: &mut D, ops: D::States, images: &[ImageRows<'_>]) {
        for image in images {
            let first = image.first_token as usize;
            ops.replace_rows(device, first, image.rows, &mut self.hidden);
        }
    }

    /// Adds the rows of images to the rows of their tokens.
    pub fn add_image_rows(&mut self, device: &mut D, ops: D::States, images: &[ImageRows<'_>]) {
        for image in images {
            let first = image.first_token as usize;
            ops.add_rows(device, first, image.rows, &mut self.hidden);
        }
    }

    /// Adds a row of a table to each token's row.
    pub fn add_table_rows(
        &mut self,
        device: &mut D,
        ops: D::States,
        table: &D::Embedding,
        rows: &[u32],
    ) {
        ops.add_table_rows(device, table, rows, &mut self.hidden);
    }

    /// Adds a row to those of some tokens.
    pub fn add_to_rows(
        &mut self,
        device: &mut D,
        ops: D::States,
        rows: &[Range<u32>],
        row: &D::Vector,
    ) {
        for rows in rows {
            let rows = rows.start as usize..rows.end as usize;
            ops.add_to_rows(device, rows, row, &mut self.hidden);
        }
    }

    /// Starts with the rows of the previous stage.
    pub fn receive<P>(&mut self, run: &mut Probed<'_, D, P>, ranks: D::Ranks, num_rows: usize) {
        ranks.receive_rows(run.device, run.host, num_rows, &mut self.hidden);
    }

    /// Ends with the rows as the next stage starts with them.
    pub fn send<P>(&self, run: &mut Probed<'_, D, P>, ranks: D::Ranks, num_rows: usize) {
        ranks.send_rows(run.device, run.host, num_rows, &self.hidden);
    }

    /// `normed = norm(hidden)`; without a norm, the residual stream itself.
    pub fn norm<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        norm: Option<&NormWeights<D>>,
    ) {
        let norm = norm_of(&self.norm, norm);
        run.device
            .norm(num_rows, &self.hidden, norm, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// `hidden += after(linear(x)); normed = next(hidden)`. The projection is `operation`.
    pub fn add<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        (x, linear): (&D::Inputs, &SummedLinear<D>),
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let work = || work_of(num_rows, linear);
        if self.has_whole_sums
            && after.is_none()
            && let Some(tile) = linear.whole()
        {
            run.project(num_rows, x, &tile.linear, Output::Add, &mut self.hidden);
            run.probe.ended(operation, work);
            return self.norm(run, num_rows, next);
        }
        self.sum(run, num_rows, x, linear);
        run.probe.ended(operation, work);
        self.add_result(run, num_rows, after, next);
    }

    /// `hidden += scale * linear(x)`. The projection is `operation`. `normed` stays as it is.
    pub fn add_scaled<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        (x, linear): (&D::Inputs, &SummedLinear<D>),
        scale: Scale<'_, D>,
    ) {
        self.sum(run, num_rows, x, linear);
        if let Some(result) = &mut self.result {
            match scale {
                Scale::All(scale) => run.device.scale(num_rows, scale, result),
                Scale::Columns(ops, weight) => {
                    ops.scale_columns_in_place(run.device, num_rows, weight, result);
                }
            }
            let hidden = &mut self.hidden;
            run.device
                .add_normed(num_rows, result, Norm::Identity, hidden);
        }
        run.probe.ended(operation, || work_of(num_rows, linear));
    }

    /// `hidden = norm(hidden + linear(x)); normed = hidden`. The projection is `operation`.
    pub fn add_in_norm<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        of: (&D::Inputs, &SummedLinear<D>),
        norm: &NormWeights<D>,
    ) {
        self.add_beside(run, operation, num_rows, of);
        self.norm_in_place(run, num_rows, norm);
    }

    /// `hidden += linear(x)`. The projection is `operation`. `normed` stays as it is.
    pub fn add_beside<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        (x, linear): (&D::Inputs, &SummedLinear<D>),
    ) {
        match linear.whole() {
            Some(whole) if self.has_whole_sums => {
                run.project(num_rows, x, &whole.linear, Output::Add, &mut self.hidden);
            }
            _ => {
                self.sum(run, num_rows, x, linear);
                if let Some(result) = &self.result {
                    let hidden = &mut self.hidden;
                    run.device
                        .add_normed(num_rows, result, Norm::Identity, hidden);
                }
            }
        }
        run.probe.ended(operation, || work_of(num_rows, linear));
    }

    /// `hidden = norm(hidden); normed = hidden`. An RMS norm only on devices with
    /// [layer inputs](Device::LAYER_INPUTS).
    pub fn norm_in_place<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        norm: &NormWeights<D>,
    ) {
        if self.norm.kind == NormKind::Rms {
            if let (Some(result), Some(ops)) = (&mut self.result, D::LAYER_INPUTS) {
                std::mem::swap(result, &mut self.hidden);
                ops.clear(run.device, num_rows, &mut self.hidden);
                let norm = norm_of(&self.norm, Some(norm));
                run.device
                    .add_normed(num_rows, result, norm, &mut self.hidden);
            }
            return self.norm(run, num_rows, None);
        }
        let norm = LayerNorm {
            weight: &norm.weight,
            bias: norm.bias.as_ref(),
            eps: self.norm.eps,
        };
        run.device
            .norm_in_place(num_rows, &mut self.hidden, norm, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// `hidden += o(attended) + down(inner); normed = next(hidden)`, of blocks side by side.
    pub fn add_both<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        (attended, o): (&D::Inputs, &SummedLinear<D>),
        (inner, down): (&D::Inputs, &SummedLinear<D>),
        next: Option<&NormWeights<D>>,
    ) {
        if self.has_whole_sums
            && let Some((whole_o, whole_down)) = o.whole().zip(down.whole())
        {
            let hidden = &mut self.hidden;
            run.project(num_rows, attended, &whole_o.linear, Output::Add, hidden);
            run.probe.ended(Operation::O, || work_of(num_rows, o));
            run.project(num_rows, inner, &whole_down.linear, Output::Add, hidden);
            run.probe.ended(Operation::Down, || work_of(num_rows, down));
            return self.norm(run, num_rows, next);
        }
        self.sum(run, num_rows, attended, o);
        if let Some(result) = &self.result {
            let hidden = &mut self.hidden;
            run.device
                .add_normed(num_rows, result, Norm::Identity, hidden);
        }
        run.probe.ended(Operation::O, || work_of(num_rows, o));
        self.sum(run, num_rows, inner, down);
        run.probe.ended(Operation::Down, || work_of(num_rows, down));
        self.add_result(run, num_rows, None, next);
    }

    /// `result = linear(x)`, summed over all tiles of all ranks.
    fn sum<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        x: &D::Inputs,
        linear: &SummedLinear<D>,
    ) {
        let Some(result) = &mut self.result else {
            unreachable!("it was reserved, for not all results are added at once")
        };
        run.sum(num_rows, x, linear, result, &mut self.tile_sums);
    }

    /// `hidden += after(scale * experts(normed)); normed = next(hidden)`, of all tiles. The experts of each row, and
    /// their number, were chosen.
    pub fn add_experts<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        (summed, scale): (&Summed<D, Experts<D>>, Option<f32>),
        chosen: (&mut D::ExpertRows, usize),
        [after, next]: [Option<&NormWeights<D>>; 2],
    ) {
        let may_add = after.is_none() && scale.is_none();
        if self.mix(run, num_rows, summed, chosen, may_add) {
            return self.norm(run, num_rows, next);
        }
        if let (Some(scale), Some(result)) = (scale, &mut self.result) {
            run.device.scale(num_rows, scale, result);
        }
        self.add_result(run, num_rows, after, next);
    }

    /// `hidden += experts(normed)` if `may_add` and they give the whole sum, which it returns; else `result =
    /// experts(normed)`.
    fn mix<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        summed: &Summed<D, Experts<D>>,
        (rows, num_chosen): (&mut D::ExpertRows, usize),
        may_add: bool,
    ) -> bool {
        let normed = &self.normed;
        let mut mix = |device: &mut D, experts: &Experts<D>, output, out: &mut D::Sums| {
            device.mix_experts(num_rows, normed, experts, rows, output, out);
        };
        let is_added = match (&mut self.result, summed.whole()) {
            (_, Some(experts)) if self.has_whole_sums && may_add => {
                mix(run.device, experts, Output::Add, &mut self.hidden);
                true
            }
            (Some(result), _) => {
                match summed {
                    Summed::Whole(experts) => mix(run.device, experts, Output::Store, result),
                    Summed::Tiles(ops, tiles) => {
                        let others = &mut self.tile_sums;
                        sum_all_tiles(run.device, *ops, num_rows, tiles, &mut mix, result, others);
                    }
                }
                if let Some(ranks) = run.ranks {
                    ranks.all_reduce(run.device, run.host, num_rows, result);
                }
                false
            }
            (None, _) => unreachable!("it was reserved, for not all results are added at once"),
        };
        let device = &*run.device;
        run.probe.ended(Operation::Experts, || {
            let num_touched = device.num_touched_experts(rows);
            let works = summed
                .parts()
                .map(|it| Work::experts(num_rows, it, num_touched, num_chosen));
            works.fold(Work::default(), Work::plus)
        });
        is_added
    }

    /// `hidden += after(result); normed = next(hidden)`, for a block that was not added at once.
    fn add_result<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let Some(result) = &self.result else {
            return self.norm(run, num_rows, next);
        };
        if after.is_some() {
            let after = norm_of(&self.norm, after);
            run.device
                .add_normed(num_rows, result, after, &mut self.hidden);
            return self.norm(run, num_rows, next);
        }
        let next = norm_of(&self.norm, next);
        run.device
            .add_norm(num_rows, result, &mut self.hidden, next, &mut self.normed);
        self.norm_ended(run, num_rows);
    }

    /// `out += after(linear(x))`. The projection is `operation`.
    pub fn sum_to<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        of: (&D::Inputs, &SummedLinear<D>),
        after: Option<&NormWeights<D>>,
        out: &mut D::Sums,
    ) {
        let outs = std::slice::from_mut(out);
        self.sum_to_each(run, operation, num_rows, of, after, outs);
    }

    /// The same, for each of several outputs.
    pub fn sum_to_each<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        operation: Operation,
        num_rows: usize,
        (x, linear): (&D::Inputs, &SummedLinear<D>),
        after: Option<&NormWeights<D>>,
        outs: &mut [D::Sums],
    ) {
        self.sum(run, num_rows, x, linear);
        run.probe.ended(operation, || work_of(num_rows, linear));
        for out in outs {
            self.add_result_to(run, num_rows, after, out);
        }
    }

    /// `out += after(experts(normed))`, of the experts that were chosen for each row, and their number.
    pub fn mix_to<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        summed: &Summed<D, Experts<D>>,
        chosen: (&mut D::ExpertRows, usize),
        after: Option<&NormWeights<D>>,
        out: &mut D::Sums,
    ) {
        self.mix(run, num_rows, summed, chosen, false);
        self.add_result_to(run, num_rows, after, out);
    }

    /// `hidden += after(sums); normed = next(hidden)`.
    pub fn add_sums<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        sums: &D::Sums,
        after: Option<&NormWeights<D>>,
        next: Option<&NormWeights<D>>,
    ) {
        let after = norm_of(&self.norm, after);
        run.device
            .add_normed(num_rows, sums, after, &mut self.hidden);
        self.norm(run, num_rows, next);
    }

    /// `hidden += rows`. `normed` stays as it is.
    pub fn add_rows<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        rows: &D::Sums,
    ) {
        let hidden = &mut self.hidden;
        run.device
            .add_normed(num_rows, rows, Norm::Identity, hidden);
        self.norm_ended(run, num_rows);
    }

    /// `out += after(result)`.
    fn add_result_to<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        after: Option<&NormWeights<D>>,
        out: &mut D::Sums,
    ) {
        if let Some(result) = &self.result {
            let after = norm_of(&self.norm, after);
            run.device.add_normed(num_rows, result, after, out);
        }
        self.norm_ended(run, num_rows);
    }

    /// `hidden *= scale; normed = next(hidden)`.
    pub fn scale<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        scale: f32,
        next: Option<&NormWeights<D>>,
    ) {
        run.device.scale(num_rows, scale, &mut self.hidden);
        self.norm(run, num_rows, next);
    }

    /// Keeps a step's kept rows, and those of `attended`.
    pub fn keep_rows(&mut self, device: &mut D, step: &D::Step<'_>, attended: &mut D::Inputs) {
        device.keep_rows(step, &mut self.hidden, attended);
    }

    /// Keeps a step's kept rows, and their normalised form.
    pub fn keep_normed_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        device.keep_rows(step, &mut self.hidden, &mut self.normed);
    }

    fn norm_ended<P: Probe>(&self, run: &mut Probed<'_, D, P>, num_rows: usize) {
        // f32 in, bf16 out.
        run.probe.ended(Operation::Norm, || {
            Work::elements(num_rows, self.hidden_size, 6, 4)
        });
    }
}

impl<'a, D: Device, P: Probe> Probed<'a, D, P> {
    /// Queries, keys and values: `out = linear(x)`.
    pub fn project_qkv(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        out: &mut D::Sums,
    ) {
        self.project(num_rows, x, linear, Output::Store, out);
        self.probe.ended(Operation::Qkv, || {
            Work::product(num_rows, &linear.matrix, false)
        });
    }

    /// Chooses the experts of rows: `rows = route(router(x))`.
    pub fn route(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        router: &Linear<D>,
        (routing, correction): (&Routing, Option<&D::Vector>),
        logits: &mut D::Sums,
        rows: &mut D::ExpertRows,
    ) {
        self.device
            .project(num_rows, x, router, Output::Store, None, logits);
        self.device
            .route(num_rows, logits, routing, correction, rows);
        self.probe.ended(Operation::Router, || {
            Work::product(num_rows, &router.matrix, false)
        });
    }

    /// The input of the down projection: `out = activation(linear(x))`, gated or not.
    pub fn project_activated(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        activation: InnerActivation,
        out: &mut D::Inputs,
    ) {
        let adapted = self.adapted_rows(linear);
        self.device
            .project_activated(num_rows, x, linear, activation, adapted, out);
        self.probe.ended(Operation::GateUp, || match activation {
            InnerActivation::Gated(_) | InnerActivation::ScaledGate(..) => {
                Work::gated_product(num_rows, &linear.matrix)
            }
            InnerActivation::Plain(_) => Work::product(num_rows, &linear.matrix, false),
        });
    }

    /// A projection with what adapters make of their rows.
    fn project(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &Linear<D>,
        output: Output,
        out: &mut D::Sums,
    ) {
        let adapted = self.adapted_rows(linear);
        self.device
            .project(num_rows, x, linear, output, adapted, out);
    }

    /// `out = linear(x)`, summed over all tiles of all ranks. `others` has a buffer for each [level of
    /// pairs](num_tile_sums).
    fn sum(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &SummedLinear<D>,
        out: &mut D::Sums,
        others: &mut [D::Sums],
    ) {
        match linear {
            Summed::Tiles(ops, tiles) if !self.has_adapters(linear) => {
                return ops.sum(self.device, self.host, num_rows, x, tiles, out);
            }
            Summed::Whole(Tile { linear, .. }) => match self.ranks {
                Some(ranks) if self.adapted_rows(linear).is_none() => {
                    let (device, host) = (&mut *self.device, &mut *self.host);
                    return ranks.project_and_sum(device, host, num_rows, x, linear, out);
                }
                _ => self.project(num_rows, x, linear, Output::Store, out),
            },
            Summed::Tiles(ops, tiles) => match &tiles[..] {
                [Some(Tile { linear, .. })] => {
                    self.project(num_rows, x, linear, Output::Store, out);
                }
                tiles => {
                    let adapters = self.adapters;
                    let project =
                        &mut |device: &mut D, tile: &Tile<D>, output, out: &mut D::Sums| {
                            let Tile { inputs, linear } = tile;
                            let adapted = adapted_rows(adapters, linear.place);
                            let inputs = inputs.clone();
                            ops.project(device, num_rows, x, inputs, linear, adapted, output, out);
                        };
                    sum_all_tiles(self.device, *ops, num_rows, tiles, project, out, others);
                }
            },
        }
        if let Some(ranks) = self.ranks {
            ranks.all_reduce(self.device, self.host, num_rows, out);
        }
    }

    /// The inputs of a rule that come of all its channels: `out = linear(x)`, as [`Probed::sum`].
    pub fn sum_late(
        &mut self,
        num_rows: usize,
        x: &D::Inputs,
        linear: &SummedLinear<D>,
        out: &mut D::Sums,
        others: &mut [D::Sums],
    ) {
        self.sum(num_rows, x, linear, out, others);
        self.probe
            .ended(Operation::Qkv, || work_of(num_rows, linear));
    }

    /// Whether adapters change any rows of a projection.
    fn has_adapters(&self, linear: &SummedLinear<D>) -> bool {
        let mut linears = linears_of(linear);
        linears.any(|linear| self.adapted_rows(linear).is_some())
    }

    /// The rows of a projection that adapters change, if there are any.
    fn adapted_rows(&self, linear: &Linear<D>) -> Option<AdaptedRows<'a>> {
        adapted_rows(self.adapters, linear.place)
    }
}

/// Buffers that a sum of so many tiles needs: one for each level of pairs but the first, which adds to the sum of its
/// first tile.
pub(super) fn num_tile_sums(num_tiles: usize) -> u32 {
    num_tiles.ilog2().saturating_sub(1)
}

/// `out` becomes the sum of the products of tiles, in pairs. What changes no sum, if none has inputs. `project` has a
/// tile stored in, or added to, a buffer.
fn sum_all_tiles<D: Device, T>(
    device: &mut D,
    ops: D::Tiles,
    num_rows: usize,
    tiles: &[Option<T>],
    project: &mut impl FnMut(&mut D, &T, Output, &mut D::Sums),
    out: &mut D::Sums,
    others: &mut [D::Sums],
) {
    if !sum_tiles(device, num_rows, tiles, project, out, others) {
        ops.clear(device, num_rows, out);
    }
}

/// The same. `false` if none has inputs; then `out` stays as it is.
fn sum_tiles<D: Device, T>(
    device: &mut D,
    num_rows: usize,
    tiles: &[Option<T>],
    project: &mut impl FnMut(&mut D, &T, Output, &mut D::Sums),
    out: &mut D::Sums,
    others: &mut [D::Sums],
) -> bool {
    match tiles {
        [] | [None] | [None, None] => false,
        [Some(one)] | [Some(one), None] | [None, Some(one)] => {
            project(device, one, Output::Store, out);
            true
        }
        [Some(first), Some(second)] => {
            project(device, first, Output::Store, out);
            project(device, second, Output::Add, out);
            true
        }
        _ => {
            let (first, second) = tiles.split_at(tiles.len() / 2);
            if !sum_tiles(device, num_rows, first, project, out, others) {
                return sum_tiles(device, num_rows, second, project, out, others);
            }
            let Some((own, others)) = others.split_first_mut() else {
                unreachable!("a buffer for each level of pairs was reserved")
            };
            if sum_tiles(device, num_rows, second, project, own, others) {
                device.add_normed(num_rows, own, Norm::Identity, out);
            }
            true
        }
    }
}

/// The work of a projection to the residual stream.
fn work_of<D: Device>(num_rows: usize, linear: &SummedLinear<D>) -> Work {
    let works = linears_of(linear).map(|tile| Work::product(num_rows, &tile.matrix, true));
    works.fold(Work::default(), Work::plus)
}

/// Refuses norms of sums in layers that are not layer norms.
///
/// # Errors
/// The model has others.
pub(super) fn check_norms(spec: &ModelSpec) -> Result<(), LoadError> {
    let mut layers = spec.layers.iter();
    match spec.norm.kind {
        NormKind::Rms if layers.any(|layer| layer.norms.are_of_sums()) => {
            Err(LoadError::Resource(format!(
                "{} has RMS norms of sums, and only layer norms are computed in place",
                spec.family
            )))
        }
        NormKind::Rms | NormKind::Layer { .. } => Ok(()),
    }
}

/// The rows that adapters change at a place, if there are any.
pub(super) fn adapted_rows(runs: &[AdapterRun], place: Option<usize>) -> Option<AdaptedRows<'_>> {
    let adapted = AdaptedRows {
        runs,
        place: place?,
    };
    adapted.changed().next().is_some().then_some(adapted)
}

/// A norm of the residual stream.
pub(super) fn norm_of<'a, D: Device>(
    spec: &NormSpec,
    weights: Option<&'a NormWeights<D>>,
) -> Norm<'a, D::Vector> {
    let Some(NormWeights { weight, bias }) = weights else {
        return Norm::Identity;
    };
    match spec.kind {
        NormKind::Rms => Norm::Rms {
            weight,
            eps: spec.eps,
        },
        NormKind::Layer { .. } => Norm::Layer {
            weight,
            bias: bias.as_ref(),
            eps: spec.eps,
        },
    }
}
