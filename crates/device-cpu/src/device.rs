//! The CPU as a [`Device`]: its memory, its steps, and what it has of the operations that not all devices have.

use std::borrow::Cow;

use half::bf16;

use super::embedding::Embedding;
use super::experts::ExpertRows;
use super::indexer::CpuIndexer;
use super::kv_cache::{HostBlocks, KvCache};
use super::layer_inputs::CpuLayerInputs;
use super::logits::CpuLogits;
use super::packed_matrix::PackedMatrix;
use super::quantised::PANELS_VERSION;
use super::rank_ops::CpuRanks;
use super::row_norms::CpuRowNorms;
use super::rows::Rows;
use super::states::CpuStates;
use super::step::CpuStep;
use super::tiles::CpuTiles;
use super::{Cpu, CpuOptions};
use inflight_base::{BlockId, HostBlockId, LoadError, StepError};
use inflight_device::{
    Device, KvLayouts, Lacking, LayerGroups, Load, MixtureShape, PackedBytes, PackedPart,
    PackedReader, PackedShape, PackedWeights, RankHost, RopeTable, StepCapacity, StepInputs,
    StepIo, StepResults, Tiling,
};
use inflight_numbers::{FloatRows, NotFinite, QuantisedRows, Stacking};
use inflight_threads::Pool;

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

impl Load for Cpu {
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
        Ok(Embedding::new(rows, hidden_size))
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
        layouts: &KvLayouts,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<KvCache, LoadError> {
        KvCache::new(layouts.clone(), groups.clone(), num_blocks)
    }

    fn alloc_host_blocks(
        &mut self,
        cache: &KvCache,
        num_blocks: usize,
    ) -> Result<HostBlocks, LoadError> {
        HostBlocks::new(cache, num_blocks)
    }

    fn kv_bytes_per_block(layouts: &KvLayouts, groups: &LayerGroups) -> usize {
        KvCache::bytes_per_block(layouts, groups)
    }

    fn reserve(&mut self, _: &KvCache, _: &StepCapacity) -> Result<(), LoadError> {
        // Its scratch memory grows with the first steps.
        Ok(())
    }
}

impl StepIo for Cpu {
    type Step<'a> = CpuStep<'a>;

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
        CpuStep {
            batch: cache
                .batch(inputs.spans, inputs.block_tables)
                .with_mutual(inputs.mutual),
            token_ids: inputs.token_ids,
            positions: inputs.positions,
            state_slots: inputs.state_slots,
            saved_states: inputs.saved_states,
            is_repeated: inputs.is_repeated,
            kept_rows: inputs.kept_rows,
            sampled_rows: inputs.sampled_rows,
            _turn: (!self.is_rank).then(|| self.turn()),
        }
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

impl Device for Cpu {
    type Stacks = Lacking;
    type Tiles = CpuTiles;
    type RowNorms = CpuRowNorms;
    type States = CpuStates;
    type LayerInputs = CpuLayerInputs;
    type Indexer = CpuIndexer;
    type Ranks = CpuRanks;

    const STACKS: Option<Lacking> = None;
    const TILES: Option<CpuTiles> = Some(CpuTiles);
    const ROW_NORMS: Option<CpuRowNorms> = Some(CpuRowNorms);
    const STATES: Option<CpuStates> = Some(CpuStates);
    const LAYER_INPUTS: Option<CpuLayerInputs> = Some(CpuLayerInputs);
    const INDEXER: Option<CpuIndexer> = Some(CpuIndexer);

    fn tiling(options: &CpuOptions) -> Tiling {
        Tiling::of_cpus(options.deterministic)
    }

    fn join_ranks(&mut self, _: &mut RankHost) -> Result<CpuRanks, LoadError> {
        Ok(CpuRanks::join(self))
    }
}
