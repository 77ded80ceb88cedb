//! A GPU as a [`Device`]: its memory, its steps, and what it has of the operations that not all devices have.

use std::borrow::Cow;
use std::sync::Arc;

use cudarc::driver::{LaunchConfig, PushKernelArg};
use half::bf16;

use super::adapters::{self, AdapterTile, Adapters, NUM_KINDS};
use super::attention::{self, AttentionScratch, HeadGroups};
use super::expert_rows::{self, ExpertRows};
use super::fp8_gemm;
use super::gemm::{self, Elements};
use super::graphs;
use super::host_copies::HostCopies;
use super::kernels::{launch, row_grid};
use super::kv_cache::KvCache;
use super::latent_rows::{self, Latents};
use super::logits::{self, Logits};
use super::matrix::Matrix;
use super::memory::DeviceMemory;
use super::norms::CudaRowNorms;
use super::output_layer::context_logits_bytes;
use super::products::gemm_weights;
use super::quantised::LAYOUT_VERSION;
use super::quantised_gemm;
use super::rank_ops::CudaRanks;
use super::rows::Rows;
use super::stacks::CudaStacks;
use super::step::{CudaStep, StepBuffer};
use super::uploads::{Angles, Embedding, Vector};
use super::{Cuda, CudaOptions, moves, ranks};
use inflight_base::{BlockId, HostBlockId, LoadError, StepError};
use inflight_device::{
    Device, DeviceSample, FirstStep, KvBatch, KvLayouts, Lacking, LatentShape, LayerGroups, Load,
    MixtureShape, PackedPart, PackedReader, PackedShape, RankHost, RopeTable, StepCapacity,
    StepInputs, StepIo, StepResults, StepWidths,
};
use inflight_numbers::{FloatRows, NotFinite, QuantisedRows, Stacking};
use inflight_threads::Pool;

/// Memory that is not counted one by one.
const OTHER_BYTES: u64 = 256 << 20;

impl Load for Cuda {
    type Options = CudaOptions;
    type Matrix = Matrix;
    type Vector = Vector;
    type Embedding = Embedding;
    type Angles = Angles;
    type Sums = Rows<f32>;
    type Inputs = Rows<bf16>;
    type Logits = Logits;
    type ExpertRows = ExpertRows;
    type KvCache = KvCache;
    type HostBlocks = HostCopies;

    const HAS_FP8: bool = true;
    const PACKED_FILE_KIND: Option<&'static str> = Some("gpu");
    const PACKS_E2M1: bool = true;

    fn open(options: &CudaOptions) -> Result<Self, LoadError> {
        Self::new(options)
    }

    fn description(&self) -> String {
        let context = self.stream.context();
        let name = context.name().unwrap_or_else(|_| "a GPU".to_owned());
        format!("GPU {}: {name}", self.gpu)
    }

    fn host_threads(&mut self) -> &mut Pool {
        &mut self.pool
    }

    fn pack<M: FloatRows>(
        &mut self,
        parts: &[M],
        _: Stacking,
    ) -> Result<Result<Matrix, NotFinite>, LoadError> {
        // The activation reads gate and up from both halves of a row.
        let packed = Matrix::upload(&self.stream, &mut self.pool, parts)?;
        if let Ok(matrix) = &packed {
            self.gemm.add(gemm_weights(matrix, Elements::Bf16), 1);
        }
        Ok(packed)
    }

    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        _: Stacking,
    ) -> Result<Result<Matrix, NotFinite>, LoadError> {
        let is_fp8 = self.has_fp8_activations && fp8_gemm::is_supported(parts);
        let packed = Matrix::upload_quantised(&self.stream, &mut self.pool, parts, is_fp8)?;
        if let Ok(matrix) = &packed {
            self.note_quantised(matrix)?;
        }
        Ok(packed)
    }

    fn packed_layout(&self) -> Option<String> {
        let fp8 = self.has_fp8_activations;
        Some(format!(
            "CUDA tiles {LAYOUT_VERSION}, fp8_activations {fp8}"
        ))
    }

    fn packed_len(matrix: &Matrix) -> Option<[usize; 2]> {
        let parts = matrix.packed_parts()?;
        Some(parts.map(DeviceMemory::num_bytes))
    }

    fn packed_part<'m>(
        &mut self,
        matrix: &'m Matrix,
        part: PackedPart,
    ) -> Result<Cow<'m, [u8]>, LoadError> {
        let Some([codes, scales]) = matrix.packed_parts() else {
            return Ok(Cow::Borrowed(&[]));
        };
        let memory = match part {
            PackedPart::Codes => codes,
            PackedPart::Scales => scales,
        };
        memory.to_host(&self.stream).map(Cow::Owned)
    }

    fn read_packed(
        &mut self,
        shape: PackedShape<'_>,
        codes: PackedReader<'_>,
        scales: PackedReader<'_>,
    ) -> Result<Option<Matrix>, LoadError> {
        let n = shape.num_rows.iter().sum();
        let is_fp8 =
            self.has_fp8_activations && fp8_gemm::has_products(shape.format, n, shape.columns);
        let parts = [codes, scales];
        let read = Matrix::read(&self.stream, &mut self.pool, shape, parts, is_fp8)?;
        if let Some(matrix) = &read {
            self.note_quantised(matrix)?;
        }
        Ok(read)
    }

    fn upload_vector(&mut self, values: Vec<f32>) -> Result<Vector, LoadError> {
        let memory = DeviceMemory::upload(&self.stream, &values)?;
        Ok(Vector { memory })
    }

    fn upload_embedding(
        &mut self,
        rows: Vec<bf16>,
        hidden_size: usize,
    ) -> Result<Embedding, LoadError> {
        Ok(Embedding {
            memory: DeviceMemory::upload(&self.stream, &rows)?,
            hidden_size,
        })
    }

    fn upload_angles(&mut self, table: RopeTable) -> Result<Angles, LoadError> {
        let memory = DeviceMemory::upload(&self.stream, table.values())?;
        let query_factors = match table.query_factors() {
            [] => None,
            factors => Some(DeviceMemory::upload(&self.stream, factors)?),
        };
        Ok(Angles {
            memory,
            query_factors,
        })
    }

    fn alloc_sums(&mut self, max_rows: usize, width: usize) -> Result<Rows<f32>, LoadError> {
        let rows = Rows::new(&self.stream, max_rows, width)?;
        self.need_scratch(rows.num_bytes())?;
        Ok(rows)
    }

    fn alloc_inputs(&mut self, max_rows: usize, width: usize) -> Result<Rows<bf16>, LoadError> {
        let rows = Rows::new(&self.stream, max_rows, width)?;
        // A gated projection computes two f32 for each of them.
        self.need_scratch(4 * rows.num_bytes())?;
        Ok(rows)
    }

    fn alloc_logits(&mut self, max_rows: usize, width: usize) -> Result<Logits, LoadError> {
        self.need_scratch(context_logits_bytes(width))?;
        let logits = Logits::new(&self.stream, &self.kernels, max_rows, width)?;
        self.sampled_tokens = Some(Arc::clone(&logits.tokens));
        Ok(logits)
    }

    fn alloc_expert_rows(
        &mut self,
        max_rows: usize,
        shape: &MixtureShape,
    ) -> Result<ExpertRows, LoadError> {
        self.need_scratch(expert_rows::num_shared_scratch_bytes(max_rows, shape))?;
        ExpertRows::new(&self.stream, &self.kernels, max_rows, shape)
    }

    fn alloc_kv_cache(
        &mut self,
        layouts: &KvLayouts,
        groups: &LayerGroups,
        num_blocks: usize,
    ) -> Result<KvCache, LoadError> {
        KvCache::new(&self.stream, layouts, groups.clone(), num_blocks)
    }

    fn alloc_host_blocks(
        &mut self,
        cache: &KvCache,
        num_blocks: usize,
    ) -> Result<HostCopies, LoadError> {
        let bytes_per_block = cache.spans(BlockId(0)).map(|span| span.num_bytes).sum();
        HostCopies::new(&self.stream, bytes_per_block, num_blocks)
    }

    fn kv_bytes_per_block(layouts: &KvLayouts, groups: &LayerGroups) -> usize {
        layouts.largest_group(groups, KvCache::bytes_per_block)
    }

    fn reserve_latents(&mut self, max_rows: usize, shape: &LatentShape) -> Result<(), LoadError> {
        self.latents = Some(Latents::new(&self.stream, &self.kernels, max_rows, shape)?);
        Ok(())
    }

    fn reserve(&mut self, cache: &KvCache, capacity: &StepCapacity) -> Result<(), LoadError> {
        let layout = &cache.layout;
        let groups = match &self.latents {
            Some(latents) => latents.groups,
            None => HeadGroups::of_heads(layout, capacity.num_q_heads),
        };
        let attention =
            AttentionScratch::new(&self.stream, &self.kernels, layout, groups, capacity)?;
        let lists = attention.lists(capacity);
        self.step = Some(StepBuffer::new(
            &self.stream,
            capacity,
            lists,
            self.num_state_slots,
        )?);
        self.attention = Some(attention);
        // No rotary angles are there for positions beyond the pool.
        let num_positions = cache.num_blocks * cache.layout.block_size.tokens().index();
        let capacity_in_pool = StepCapacity {
            max_seq_len: capacity.max_seq_len.min(num_positions),
            ..*capacity
        };
        self.first_steps = graphs::first_steps(&capacity_in_pool, self.graphs.max_graphs());
        self.gemm.prepare(capacity.max_num_tokens)?;
        self.copies = Some(moves::copy_buffer(&self.stream)?);
        self.adapters = Adapters::new(&self.stream, &self.kernels, capacity)?;
        if let Some(products) = &mut self.quantised {
            products.reserve(&self.stream, capacity.max_num_tokens)?;
        }
        match &mut self.fp8 {
            Some(products) => products.reserve(&self.stream, capacity.max_num_tokens),
            None if self.has_fp8_activations => Err(LoadError::Config {
                problem: "fp8_activations is true, and the model has no FP8 weights with one scale for each output"
                    .to_owned(),
                remedy: "set weight_only_precision to fp8, without weight_only_group_size, or leave fp8_activations out"
                    .to_owned(),
            }),
            None => Ok(()),
        }
    }

    fn first_steps(&self) -> Vec<FirstStep> {
        self.first_steps.clone()
    }
}

impl StepIo for Cuda {
    type Step<'a> = CudaStep;

    const SAMPLES: bool = true;

    fn copy_positions(
        &mut self,
        cache: &mut KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        self.copy_all_positions(cache, copies);
    }

    fn offload(
        &mut self,
        cache: &KvCache,
        source: BlockId,
        host: &mut HostCopies,
        target: HostBlockId,
    ) {
        if self.failure.is_none() {
            let copied = host.offload(cache.spans(source), target.index());
            self.record("copying a KV block to the host", copied);
        }
    }

    fn onboard(
        &mut self,
        host: &HostCopies,
        source: HostBlockId,
        cache: &mut KvCache,
        target: BlockId,
    ) {
        if self.failure.is_none() {
            let copied = host.onboard(source.index(), cache.spans(target));
            self.record("copying a KV block from the host", copied);
        }
    }

    fn host_block<'h>(
        &mut self,
        host: &'h mut HostCopies,
        block: HostBlockId,
    ) -> Result<&'h mut [u8], StepError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let bytes = host.bytes_mut(block.index());
        bytes.map_err(|error| self.failed("waiting for KV blocks", &error))
    }

    fn begin_step<'a>(&mut self, cache: &KvCache, inputs: StepInputs<'a>) -> CudaStep {
        let block_size = cache.layout.block_size;
        let batch = KvBatch::new(
            inputs.spans,
            inputs.block_tables,
            cache.num_groups(),
            block_size,
            cache.num_blocks,
        );
        let Some(mut buffer) = self.step.take() else {
            unreachable!("reserve comes before steps");
        };
        self.num_steps += 1;
        let adapter_tiles = self.bring_in_adapters(&inputs);
        let step = match self.failure {
            None => {
                let may_have_graph = self.graphs.is_enabled();
                let tiles = adapter_tiles.each_ref().map(|tiles| &tiles[..]);
                buffer
                    .upload(&self.stream, &batch, &inputs, tiles, may_have_graph)
                    .map(Some)
            }
            Some(_) => Ok(None),
        };
        self.step = Some(buffer);
        let step = self.record("uploading a step", step).flatten();
        let step = step.unwrap_or_default();
        if let Some(adapters) = &mut self.adapters {
            adapters.set_tiles(step.adapters);
        }
        self.num_rows_of_step = step.shape.map_or(0, |_| step.num_tokens);
        self.begin_graph(step.shape);
        step
    }

    fn sample(&mut self, step: &CudaStep, logits: &mut Logits) {
        let Some(kernel) = logits.sample.as_ref().filter(|_| step.sampling > 0) else {
            return;
        };
        launch!(
            self,
            kernel.change,
            "change_logits",
            kernel.change_grid(step.num_sampled),
            logits.rows.address(),
            kernel.counts.address(),
            step.sampling,
            step.words,
            step.num_sampled as i32,
            logits.rows.width() as i32
        );
        let config = LaunchConfig {
            shared_mem_bytes: kernel.shared_bytes,
            ..row_grid(step.num_sampled, kernel.num_threads)
        };
        launch!(
            self,
            kernel.function,
            "sample",
            config,
            logits.tokens.address(),
            logits.rows.address(),
            step.sampling,
            logits.rows.width() as i32
        );
    }

    fn end_step(&mut self, _: CudaStep) {
        self.end_graph();
    }

    fn results<'l>(
        &mut self,
        logits: &'l mut Logits,
        num_rows: usize,
    ) -> Result<StepResults<'l>, StepError> {
        if self.has_sent() {
            self.check()?;
            let logits = match self.gets_logits() {
                true => logits.rows_of_host(num_rows),
                false => &mut [],
            };
            return Ok(StepResults {
                logits,
                samples: &[],
            });
        }
        if !self.gets_logits() {
            return Ok(StepResults {
                logits: &mut [],
                samples: &[],
            });
        }
        if !logits.has_kept(self.num_steps) {
            self.keep_samples(logits, num_rows);
        }
        self.check()?;
        let results = logits.results(&self.stream, self.num_steps, num_rows);
        results.map_err(|error| self.step_failed(&error))
    }

    fn can_run_ahead(&self, logits: &Logits) -> bool {
        logits.sample.is_some() && self.ranks.is_none()
    }

    fn keep_samples(&mut self, logits: &mut Logits, num_rows: usize) {
        if self.failure.is_some() {
            return;
        }
        let is_sampled = match (&self.step, &logits.sample) {
            (Some(step), Some(_)) => step.is_sampled(),
            _ => &[],
        };
        let kept = logits.keep(&self.stream, self.num_steps, num_rows, is_sampled);
        self.record("copying what was sampled", kept);
    }

    fn earlier_samples<'l>(
        &mut self,
        logits: &'l mut Logits,
    ) -> Result<&'l [DeviceSample], StepError> {
        self.check()?;
        let samples = logits.earlier_samples(self.num_steps - 1);
        samples.map_err(|error| self.step_failed(&error))
    }

    fn host_logits<'l>(
        &mut self,
        logits: &'l mut Logits,
        num_rows: usize,
    ) -> Result<&'l mut [f32], StepError> {
        self.check()?;
        if self.has_sent() {
            return Ok(logits.rows_of_host(num_rows));
        }
        let rows = logits.host_rows(&self.stream, self.num_steps, num_rows);
        rows.map_err(|error| self.step_failed(&error))
    }
}

impl Device for Cuda {
    type Stacks = CudaStacks;
    type Tiles = Lacking;
    type RowNorms = CudaRowNorms;
    type States = Lacking;
    type LayerInputs = Lacking;
    type Indexer = Lacking;
    type Ranks = CudaRanks;

    const STACKS: Option<CudaStacks> = Some(CudaStacks);
    const TILES: Option<Lacking> = None;
    const ROW_NORMS: Option<CudaRowNorms> = Some(CudaRowNorms);
    const STATES: Option<Lacking> = None;
    const LAYER_INPUTS: Option<Lacking> = None;
    const INDEXER: Option<Lacking> = None;

    fn join_ranks(&mut self, host: &mut RankHost) -> Result<CudaRanks, LoadError> {
        CudaRanks::join(self, host)
    }
}

impl Cuda {
    /// Bytes of device memory that steps of this capacity take: all that is reserved for them, but the KV cache. At
    /// least as many as that, for the KV cache gets the rest.
    pub fn num_step_bytes(
        capacity: &StepCapacity,
        widths: &StepWidths,
        (mixture, latent): (Option<&MixtureShape>, Option<&LatentShape>),
        max_logits_rows: usize,
        options: &CudaOptions,
    ) -> u64 {
        let max_rows = capacity.max_num_tokens + gemm::MAX_ROUNDING;
        let rows = max_rows * (4 * widths.sums + 2 * widths.inputs);
        let gated = 8 * max_rows * widths.widest_inputs;
        let logits = 4 * (max_logits_rows + gemm::MAX_ROUNDING) * widths.logits;
        let counts = logits::num_count_bytes(max_logits_rows, widths.logits);
        let fp8 = match options.fp8_activations {
            true => fp8_gemm::num_scratch_bytes(&widths.quantised, capacity.max_num_tokens),
            false => 0,
        };
        let adapters = adapters::num_bytes(capacity);
        let experts = mixture.map_or(0, |shape| {
            expert_rows::num_bytes(capacity.max_num_tokens, shape)
        });
        let latents = latent.map_or(0, |shape| {
            latent_rows::num_bytes(capacity.max_num_tokens, shape)
        });
        let shared = mixture.map_or(0, |shape| {
            expert_rows::num_shared_scratch_bytes(capacity.max_num_tokens, shape)
        });
        let scratch = gated.max(context_logits_bytes(widths.logits)).max(shared);
        // Of several, each has rows for its logits as well.
        let ranks = match options.rank_gpus.len() {
            0 | 1 => 0,
            _ => ranks::GATHERED_BYTES + ranks::NCCL_BYTES + logits + counts,
        };
        (rows + experts + latents + scratch + logits + counts + fp8 + adapters + ranks) as u64
            + quantised_gemm::num_scratch_bytes(&widths.quantised, capacity.max_num_tokens) as u64
            + (gemm::WORKSPACE_BYTES + attention::MAX_PARTIAL_BYTES) as u64
            // Kernels, descriptors, the upload of a step, and what the driver rounds up.
            + OTHER_BYTES
    }

    /// Brings in the adapters of a step. Returns the tiles of all its rows, of its kept rows, and of its sampled rows.
    fn bring_in_adapters(&mut self, inputs: &StepInputs<'_>) -> [Vec<AdapterTile>; NUM_KINDS] {
        let Some(mut adapters) = self.adapters.take_if(|_| !inputs.adapters.is_empty()) else {
            return Default::default();
        };
        let tiles = adapters.bring_in(&self.stream, inputs, self.num_steps);
        self.adapters = Some(adapters);
        self.record("copying adapters to the GPU", tiles)
            .unwrap_or_default()
    }

    /// Rows that an operation computes: more than asked for in a step whose rows are rounded up.
    pub(super) fn padded(&self, num_rows: usize) -> usize {
        self.padded_rows.unwrap_or(num_rows)
    }

    /// Makes the scratch memory as large as this. Only while the model is loaded.
    fn need_scratch(&mut self, num_bytes: usize) -> Result<(), LoadError> {
        if self.scratch.num_bytes() < num_bytes {
            self.scratch = DeviceMemory::new(&self.stream, 0)?;
            self.scratch = DeviceMemory::new(&self.stream, num_bytes)?;
        }
        Ok(())
    }
}
