//! The CPU as a [`Device`].

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::experts::ExpertRows;
use super::kv_cache::{HostBlocks, KvCache};
use super::logits::CpuLogits;
use super::packed_matrix::PackedMatrix;
use super::quantised::PANELS_VERSION;
use super::rows::Rows;
use super::{Cpu, CpuOptions, Simd};
use crate::base::{BlockId, HostBlockId, LoadError, StepError, TokenId};
use crate::collective::Collective;
use crate::device::ranks::Ranks;
use crate::device::{
    Activation, AdaptedRows, AttentionParams, Device, Dtype, EmbeddingTable, Experts, FloatRows,
    HeadBiases, HeadPlaces, HeadShape, KvBatch, KvLayout, LatentParams, LayerGroups, Linear,
    LogitsTransform, MixtureShape, Norm, NotFinite, Output, PackedBytes, PackedPart, PackedReader,
    PackedShape, PackedWeights, Pool, QkNorm, QuantisedRows, RankInput, RankRole, RawMatrix,
    RopeParams, RopeTable, Routing, Stacking, StepCapacity, StepInputs, StepResults, Tile, Tiling,
    Turn,
};

/// The rows of a token embedding.
pub struct Embedding {
    rows: Vec<bf16>,
    hidden_size: usize,
}

/// A step on CPU.
pub struct CpuStep<'a> {
    batch: KvBatch<'a>,
    token_ids: &'a [TokenId],
    kept_rows: &'a [u32],
    sampled_rows: &'a [u32],
    /// Until the step ends; `None` for a rank of several, which waits for the others in the step.
    _turn: Option<Turn>,
}

impl PackedWeights for PackedMatrix {
    fn n(&self) -> usize {
        self.n()
    }

    fn k(&self) -> usize {
        self.k()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes()
    }

    fn has_rows(&self) -> bool {
        self.has_rows()
    }
}

impl Device for Cpu {
    type Options = CpuOptions;
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;
    type Embedding = Embedding;
    type Angles = RopeTable;
    type Sums = Rows<f32>;
    type Inputs = Rows<bf16>;
    type Logits = CpuLogits;
    type ExpertRows = ExpertRows;
    type KvCache = KvCache;
    type HostBlocks = HostBlocks;
    type Step<'a> = CpuStep<'a>;

    const HAS_ADAPTERS: bool = true;

    const HAS_SINK_LOGITS: bool = true;

    const HAS_POOLING: bool = true;

    const HAS_DRAFT_HEADS: bool = true;

    const HAS_TILES: bool = true;

    fn tiling(options: &CpuOptions) -> Tiling {
        Tiling::of_cpus(options.deterministic)
    }

    fn open(options: &CpuOptions) -> Result<Self, LoadError> {
        Self::new(options)
    }

    fn description(&self) -> String {
        format!("{} on {} threads", self.simd(), self.num_threads())
    }

    fn host_threads(&mut self) -> &mut Pool {
        self.pool()
    }

    fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        stacking: Stacking,
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        self.pack(parts, stacking)
    }

    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        stacking: Stacking,
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        self.pack_quantised(parts, stacking)
    }

    fn packed_layout(&self) -> Option<String> {
        Some(format!("panels {PANELS_VERSION}"))
    }

    fn packed_len(matrix: &PackedMatrix) -> Option<[usize; 2]> {
        let PackedBytes { codes, scales } = matrix.panel_bytes()?;
        Some([codes.len(), scales.len()])
    }

    fn packed_part<'m>(
        &mut self,
        matrix: &'m PackedMatrix,
        part: PackedPart,
    ) -> Result<Cow<'m, [u8]>, LoadError> {
        let bytes = matrix.panel_bytes().map(|bytes| match part {
            PackedPart::Codes => bytes.codes,
            PackedPart::Scales => bytes.scales,
        });
        Ok(Cow::Borrowed(bytes.unwrap_or_default()))
    }

    fn read_packed(
        &mut self,
        shape: PackedShape<'_>,
        codes: PackedReader<'_>,
        scales: PackedReader<'_>,
    ) -> Result<Option<PackedMatrix>, LoadError> {
        self.read_panels(shape, codes, scales)
    }

    fn upload_vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, LoadError> {
        Ok(values)
    }

    fn upload_embedding(
        &mut self,
        rows: Vec<bf16>,
        hidden_size: usize,
    ) -> Result<Embedding, LoadError> {
        Ok(Embedding { rows, hidden_size })
    }

    fn upload_angles(&mut self, table: RopeTable) -> Result<RopeTable, LoadError> {
        Ok(table)
    }

    fn alloc_sums(&mut self, max_rows: usize, width: usize) -> Result<Rows<f32>, LoadError> {
        Rows::new(max_rows, width)
    }

    fn alloc_inputs(&mut self, max_rows: usize, width: usize) -> Result<Rows<bf16>, LoadError> {
        Rows::new(max_rows, width)
    }

    fn alloc_logits(&mut self, max_rows: usize, width: usize) -> Result<CpuLogits, LoadError> {
        CpuLogits::new(max_rows, width)
    }

    fn alloc_expert_rows(
        &mut self,
        max_rows: usize,
        shape: &MixtureShape,
    ) -> Result<ExpertRows, LoadError> {
        ExpertRows::new(max_rows, shape)
    }

    fn alloc_kv_cache(
        &mut self,
        layout: KvLayout,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<KvCache, LoadError> {
        KvCache::new(layout, groups.clone(), num_blocks)
    }

    fn alloc_host_blocks(
        &mut self,
        cache: &KvCache,
        num_blocks: usize,
    ) -> Result<HostBlocks, LoadError> {
        HostBlocks::new(cache, num_blocks)
    }

    fn kv_bytes_per_block(layout: &KvLayout, num_layers: usize) -> usize {
        KvCache::bytes_per_block(layout, num_layers)
    }

    fn reserve(&mut self, _: &KvCache, _: &StepCapacity) -> Result<(), LoadError> {
        // Its scratch memory grows with the first steps.
        Ok(())
    }

    fn copy_positions(
        &mut self,
        cache: &mut KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        for (source, target, num_positions) in copies {
            cache.copy_positions(source, target, num_positions);
        }
    }

    fn offload(
        &mut self,
        cache: &KvCache,
        source: BlockId,
        host: &mut HostBlocks,
        target: HostBlockId,
    ) {
        host.offload(cache, source, target);
    }

    fn onboard(
        &mut self,
        host: &HostBlocks,
        source: HostBlockId,
        cache: &mut KvCache,
        target: BlockId,
    ) {
        host.onboard(source, cache, target);
    }

    fn host_block<'h>(
        &mut self,
        host: &'h mut HostBlocks,
        block: HostBlockId,
    ) -> Result<&'h mut [u8], StepError> {
        Ok(host.bytes_mut(block))
    }

    fn begin_step<'a>(&mut self, cache: &KvCache, inputs: StepInputs<'a>) -> CpuStep<'a> {
        let turn = match &mut self.ranks {
            None => Some(self.turn()),
            Some(ranks) => {
                ranks.begin_step(&inputs);
                None
            }
        };
        CpuStep {
            _turn: turn,
            batch: cache.batch(inputs.spans, inputs.block_tables),
            token_ids: inputs.token_ids,
            kept_rows: inputs.kept_rows,
            sampled_rows: inputs.sampled_rows,
        }
    }

    fn embed(
        &mut self,
        step: &CpuStep<'_>,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let out = out.first_mut(step.token_ids.len());
        match table {
            EmbeddingTable::Own(Embedding { rows, hidden_size }) => {
                let num_rows = rows.len() / hidden_size;
                let bytes = bytemuck::cast_slice(rows);
                let table = RawMatrix::new(Dtype::Bf16, num_rows, *hidden_size, bytes);
                self.embed(&table, step.token_ids, scale, out);
            }
            EmbeddingTable::Tied(matrix) => self.embed_packed(matrix, step.token_ids, scale, out),
        }
    }

    fn add_positions(&mut self, step: &CpuStep<'_>, table: &Embedding, out: &mut Rows<f32>) {
        let batch = &step.batch;
        let out = out.first_mut(batch.num_tokens());
        let position = |token| batch.place(token).1;
        self.add_positions(&table.rows, table.hidden_size, position, out);
    }

    fn norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        let norm = of_slices(norm);
        self.norm(x.first(num_rows), x.width(), norm, out.first_mut(num_rows));
    }

    fn add_to_rows(&mut self, rows: Range<usize>, row: &Vec<f32>, out: &mut Rows<f32>) {
        for index in rows {
            let width = out.width();
            let out = &mut out.first_mut(index + 1)[index * width..];
            for (out, added) in out.iter_mut().zip(row) {
                *out += added;
            }
        }
    }

    fn norm_in_place(
        &mut self,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        let (width, norm) = (hidden.width(), of_slices(norm));
        let (hidden, out) = (hidden.first_mut(num_rows), out.first_mut(num_rows));
        self.norm_in_place(hidden, width, norm, out);
    }

    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        hidden: &mut Rows<f32>,
    ) {
        let (norm, hidden) = (of_slices(norm), hidden.first_mut(num_rows));
        self.add_normed(x.first(num_rows), x.width(), norm, hidden);
    }

    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        self.add_norm(
            x.first(num_rows),
            x.width(),
            hidden.first_mut(num_rows),
            of_slices(norm),
            out.first_mut(num_rows),
        );
    }

    fn project(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        output: Output,
        out: &mut Rows<f32>,
    ) {
        self.gemm(
            x.first(num_rows),
            num_rows,
            &linear.matrix,
            linear.bias.as_deref(),
            output,
            out.first_mut(num_rows),
        );
    }

    fn project_gated(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: Activation,
        out: &mut Rows<bf16>,
    ) {
        self.gemm_gated(
            x.first(num_rows),
            num_rows,
            &linear.matrix,
            linear.bias.as_deref(),
            activation,
            out.first_mut(num_rows),
        );
    }

    fn project_activated(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: Activation,
        out: &mut Rows<bf16>,
    ) {
        self.gemm_activated(
            x.first(num_rows),
            num_rows,
            &linear.matrix,
            linear.bias.as_deref(),
            activation,
            out.first_mut(num_rows),
        );
    }

    fn project_adapted(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        output: Output,
        adapted: AdaptedRows<'_>,
        out: &mut Rows<f32>,
    ) {
        let (x, out) = (x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        self.gemm_adapted(x, num_rows, matrix, bias, adapted, output, out);
    }

    fn adapt_embeddings(
        &mut self,
        step: &CpuStep<'_>,
        first_token: usize,
        adapted: AdaptedRows<'_>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let (token_ids, n) = (step.token_ids, out.width());
        let out = out.first_mut(token_ids.len());
        self.adapt_embeddings(token_ids, first_token, adapted, scale, out, n);
    }

    fn logits_adapted(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: AdaptedRows<'_>,
        out: &mut CpuLogits,
    ) {
        let (states, out) = (states.first(num_rows), out.begin(num_rows));
        let (matrix, bias) = (&lm_head.matrix, lm_head.bias.as_deref());
        self.gemm_adapted(states, num_rows, matrix, bias, adapted, Output::Store, out);
        self.transform_logits(transform, out);
    }

    fn context_logits_adapted(
        &mut self,
        states: &Rows<bf16>,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: AdaptedRows<'_>,
        out: &mut [f32],
    ) {
        let num_rows = rows.len();
        let states = states.range(rows);
        let (matrix, bias) = (&lm_head.matrix, lm_head.bias.as_deref());
        self.gemm_adapted(states, num_rows, matrix, bias, adapted, Output::Store, out);
        self.transform_logits(transform, out);
    }

    fn project_gated_adapted(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: Activation,
        adapted: AdaptedRows<'_>,
        out: &mut Rows<bf16>,
    ) {
        let (x, out) = (x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        self.with_added_rows(x, num_rows, adapted, matrix.n(), |cpu, added| {
            cpu.gemm_gated_with(
                x,
                num_rows,
                matrix,
                bias,
                (activation.into(), Some(added)),
                out,
            );
        });
    }

    fn project_activated_adapted(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: Activation,
        adapted: AdaptedRows<'_>,
        out: &mut Rows<bf16>,
    ) {
        let (x, out) = (x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        self.with_added_rows(x, num_rows, adapted, matrix.n(), |cpu, added| {
            cpu.gemm_activated_with(x, num_rows, matrix, bias, (activation, Some(added)), out);
        });
    }

    fn route(
        &mut self,
        num_rows: usize,
        logits: &Rows<f32>,
        routing: &Routing,
        correction: Option<&Vec<f32>>,
        rows: &mut ExpertRows,
    ) {
        let correction = correction.map(Vec::as_slice);
        self.route(logits.first(num_rows), routing, correction, rows);
    }

    fn mix_experts(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        experts: &Experts<Self>,
        rows: &mut ExpertRows,
        output: Output,
        out: &mut Rows<f32>,
    ) {
        self.mix_experts(
            x.first(num_rows),
            experts,
            rows,
            output,
            out.first_mut(num_rows),
        );
    }

    fn num_touched_experts(&self, rows: &ExpertRows) -> usize {
        rows.num_touched()
    }

    fn rope_and_store(
        &mut self,
        step: &CpuStep<'_>,
        params: RopeParams<'_, Self>,
        qkv: &mut Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
        q: &mut Rows<bf16>,
        sink_q: Option<(&AttentionParams, &mut Rows<bf16>)>,
    ) {
        let num_rows = step.batch.num_tokens();
        let norm = params.qk_norm.map(of_heads);
        self.rope_and_store(
            qkv.first(num_rows),
            params.heads,
            norm,
            params.angles,
            &step.batch,
            cache,
            layer,
            q.first_mut(num_rows),
            sink_q.map(|(params, q)| (params, q.first_mut(num_rows))),
        );
    }

    fn paged_attention(
        &mut self,
        step: &CpuStep<'_>,
        params: &AttentionParams,
        biases: HeadBiases<'_, Vec<f32>>,
        (q, sink_q): (&Rows<bf16>, Option<&Rows<bf16>>),
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let num_rows = step.batch.num_tokens();
        self.paged_attention(
            (q.first(num_rows), sink_q.map(|q| q.first(num_rows))),
            (params, of_query_heads(biases)),
            &step.batch,
            cache,
            layer,
            out.first_mut(num_rows),
        );
    }

    fn store_latents(
        &mut self,
        step: &CpuStep<'_>,
        params: &LatentParams<'_, Self>,
        kv: &Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
    ) {
        let kv = kv.first(step.batch.num_tokens());
        self.store_latents(kv, params, &step.batch, cache, layer);
    }

    fn latent_attention(
        &mut self,
        step: &CpuStep<'_>,
        params: &LatentParams<'_, Self>,
        q: &Rows<f32>,
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        let num_rows = step.batch.num_tokens();
        let (q, out) = (q.first(num_rows), out.first_mut(num_rows));
        self.latent_attention(q, params, &step.batch, cache, layer, out);
    }

    fn join_ranks(
        &mut self,
        collective: Box<dyn Collective>,
        role: RankRole,
    ) -> Result<(), LoadError> {
        self.ranks = Some(Ranks::new(collective, role));
        Ok(())
    }

    fn check_ranks_alike(&mut self) -> Result<(), LoadError> {
        let Some(ranks) = &mut self.ranks else {
            return Ok(());
        };
        let index = Simd::ALL.iter().position(|simd| *simd == self.simd);
        let describe = |index: u32| match Simd::ALL.get(index as usize) {
            Some(simd) => format!("the instruction set {simd}"),
            None => "another build".to_owned(),
        };
        let index = index.map_or(u32::MAX, |index| index as u32);
        ranks.check_alike(
            index,
            describe,
            "set cpu_instruction_set to one that all hosts have",
        )
    }

    fn meet_ranks(&mut self, time_limit: Duration) -> Result<(), LoadError> {
        match &mut self.ranks {
            Some(ranks) => ranks.meet(time_limit),
            None => Ok(()),
        }
    }

    fn compare_inputs(&mut self, inputs: &[RankInput]) -> Result<(), StepError> {
        match &mut self.ranks {
            Some(ranks) => ranks.compare_inputs(inputs),
            None => Ok(()),
        }
    }

    fn has_whole_sums(&self) -> bool {
        self.ranks.as_ref().is_none_or(Ranks::has_whole_sums)
    }

    fn all_reduce(&mut self, num_rows: usize, rows: &mut Rows<f32>) {
        if let Some(ranks) = &mut self.ranks {
            ranks.all_reduce(rows.first_mut(num_rows));
        }
    }

    fn project_part(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        inputs: Range<usize>,
        linear: &Linear<Self>,
        adapted: Option<AdaptedRows<'_>>,
        output: Output,
        out: &mut Rows<f32>,
    ) {
        let (width, x, out) = (x.width(), x.first(num_rows), out.first_mut(num_rows));
        let (matrix, bias) = (&linear.matrix, linear.bias.as_deref());
        self.with_part(x, width, inputs, |cpu, x| match adapted {
            None => cpu.gemm(x, num_rows, matrix, bias, output, out),
            Some(adapted) => {
                cpu.gemm_adapted_apart(x, num_rows, matrix, bias, adapted, output, out);
            }
        });
    }

    fn sum_tiles(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        tiles: &[Option<Tile<Self>>],
        out: &mut Rows<f32>,
    ) {
        let (width, x) = (x.width(), x.first(num_rows));
        self.sum_tiles(x, width, tiles, out.first_mut(num_rows));
    }

    fn norm_over_ranks(
        &mut self,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, Vec<f32>>,
        places: &HeadPlaces,
        qkv: &mut Rows<f32>,
        squares: &mut Rows<f32>,
    ) {
        let norm = of_heads(norm);
        let (qkv, squares) = (qkv.first_mut(num_rows), squares.first_mut(num_rows));
        self.norm_over_ranks(heads, norm, places, qkv, squares);
    }

    fn clear_part(&mut self, num_rows: usize, rows: &mut Rows<f32>) {
        rows.first_mut(num_rows).fill(-0.0);
    }

    fn embed_part(
        &mut self,
        step: &CpuStep<'_>,
        table: EmbeddingTable<'_, Self>,
        first_token: usize,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let width = out.width();
        let out = out.first_mut(step.token_ids.len());
        self.embed_rows(step.token_ids, width, scale, out, |id, row| {
            let index = (id as usize).checked_sub(first_token);
            match (index, &table) {
                (Some(index), EmbeddingTable::Own(own)) if index < own.rows.len() / width => {
                    let table = RawMatrix::new(
                        Dtype::Bf16,
                        own.rows.len() / width,
                        width,
                        bytemuck::cast_slice(&own.rows),
                    );
                    table.row_to_f32(index, row);
                }
                (Some(index), EmbeddingTable::Tied(matrix)) if index < matrix.n() => {
                    matrix.row_to_f32(index, row);
                }
                _ => row.fill(-0.0),
            }
        });
    }

    fn gather_logits(
        &mut self,
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut CpuLogits,
        out: &mut CpuLogits,
    ) {
        if greedy_rows.is_empty() {
            let (part, out) = (part.first_mut(num_rows), out.begin(num_rows));
            return self.gather_context_logits(widths, part, out);
        }
        self.gather_greedy_logits(num_rows, greedy_rows, widths, part, out);
    }

    fn gather_context_logits(&mut self, widths: &[usize], part: &[f32], out: &mut [f32]) {
        if let Some(ranks) = &mut self.ranks {
            ranks.gather_columns(widths, part, out, |row| row);
        }
    }

    fn send_rows(&mut self, num_rows: usize, rows: &Rows<f32>) {
        self.ranks_mut().send(rows.first(num_rows));
    }

    fn receive_rows(&mut self, num_rows: usize, rows: &mut Rows<f32>) {
        self.ranks_mut().receive(rows.first_mut(num_rows));
    }

    fn max_unread(&self) -> usize {
        self.ranks.as_ref().map_or(0, Ranks::max_unread)
    }

    fn step_number(&self) -> u64 {
        self.ranks.as_ref().map_or(0, Ranks::step)
    }

    fn send_results(&mut self, values: &[f32]) -> Result<(), StepError> {
        self.ranks_mut().send_results(values)
    }

    fn receive_results(&mut self, step: u64, values: &mut [f32]) -> Result<(), StepError> {
        self.ranks_mut().receive_results(step, values)
    }

    fn keep_rows(&mut self, step: &CpuStep<'_>, hidden: &mut Rows<f32>, attended: &mut Rows<bf16>) {
        hidden.keep(step.kept_rows);
        attended.keep(step.kept_rows);
    }

    fn keep_sampled_rows(&mut self, step: &CpuStep<'_>, states: &mut Rows<bf16>) {
        states.keep(step.sampled_rows);
    }

    fn logits(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        out: &mut CpuLogits,
    ) {
        let (states, out) = (states.first(num_rows), out.begin(num_rows));
        let (matrix, bias) = (&lm_head.matrix, lm_head.bias.as_deref());
        self.gemm(states, num_rows, matrix, bias, Output::Store, out);
        self.transform_logits(transform, out);
    }

    fn context_logits(
        &mut self,
        states: &Rows<bf16>,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        out: &mut [f32],
    ) {
        let num_rows = rows.len();
        let states = states.range(rows);
        let (matrix, bias) = (&lm_head.matrix, lm_head.bias.as_deref());
        self.gemm(states, num_rows, matrix, bias, Output::Store, out);
        self.transform_logits(transform, out);
    }

    fn write_sums(&mut self, rows: &[f32], out: &mut Rows<f32>) {
        let num_rows = rows.len() / out.width();
        out.first_mut(num_rows).copy_from_slice(rows);
    }

    fn read_states(&mut self, states: &Rows<bf16>, num_rows: usize, out: &mut [f32]) {
        states.first(num_rows).convert_to_f32_slice(out);
    }

    fn end_step(&mut self, step: CpuStep<'_>) {
        // Others have their turn while this one samples, which may wait for guides and logits processors.
        drop(step);
    }

    fn results<'l>(
        &mut self,
        logits: &'l mut CpuLogits,
        num_rows: usize,
    ) -> Result<StepResults<'l>, StepError> {
        self.ranks.as_ref().map_or(Ok(()), Ranks::check)?;
        Ok(logits.results(num_rows))
    }

    fn host_logits<'l>(
        &mut self,
        logits: &'l mut CpuLogits,
        num_rows: usize,
    ) -> Result<&'l mut [f32], StepError> {
        Ok(logits.first_mut(num_rows))
    }
}

fn of_heads<'a>(norm: QkNorm<'a, Vec<f32>>) -> QkNorm<'a> {
    QkNorm {
        q: norm.q,
        k: norm.k,
        kind: norm.kind,
        eps: norm.eps,
    }
}

fn of_query_heads<'a>(biases: HeadBiases<'a, Vec<f32>>) -> HeadBiases<'a> {
    HeadBiases {
        sink_logits: biases.sink_logits.map(Vec::as_slice),
        slopes: biases.slopes.map(Vec::as_slice),
    }
}

fn of_slices<'a>(norm: Norm<'a, Vec<f32>>) -> Norm<'a, [f32]> {
    match norm {
        Norm::Identity => Norm::Identity,
        Norm::Rms { weight, eps } => Norm::Rms { weight, eps },
        Norm::Layer { weight, bias, eps } => Norm::Layer {
            weight,
            bias: bias.map(Vec::as_slice),
            eps,
        },
    }
}
