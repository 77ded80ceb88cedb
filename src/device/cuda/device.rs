//! A GPU as a [`Device`].

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{LaunchConfig, PushKernelArg};
use half::bf16;

use super::attention::{self, AttentionScratch};
use super::gemm::{self, Operands};
use super::graphs::{self, StepMode};
use super::host_blocks::HostBlocks;
use super::kernels::{launch, row_grid, shared_row_grid};
use super::kv_cache::KvCache;
use super::logits::{self, Logits};
use super::matrix::{Matrix, Weights};
use super::memory::{self, DeviceMemory, UploadBuffer};
use super::quantised_gemm::{self, QuantisedProduct, QuantisedProducts};
use super::rows::Rows;
use super::step::{CudaStep, StepBuffer};
use super::{Cuda, CudaOptions};
use crate::base::{BlockId, HostBlockId, LoadError, StepError};
use crate::device::{
    Activation, AttentionParams, Device, DeviceSample, EmbeddingTable, Experts, FirstStep,
    FloatRows, HeadShape, KvBatch, KvDtype, KvLayout, Linear, LogitsTransform, MixtureShape, Norm,
    NotFinite, Output, PackedWeights, Pool, QkNorm, QkNormWidth, QuantisedRows, RopeParams,
    RopeTable, Routing, Stacking, StepCapacity, StepInputs, StepResults, StepWidths,
};

/// Elements that a thread of most kernels computes at a time.
const VECTOR: usize = 8;
/// Threads of a block that computes a whole row.
const WIDE_ROW_THREADS: u32 = 1024;
/// The same for rows of which a thread keeps all its elements in registers with fewer threads.
const ROW_THREADS: u32 = 256;
const MAX_ROW_THREADS_WIDTH: usize = 4096;
/// Copies of blocks that are uploaded at a time.
const MAX_COPIES: usize = 1024;
/// `u32` words of a copy: source, target, number of positions.
const COPY_WORDS: usize = 3;
/// Memory that is not counted one by one.
const OTHER_BYTES: u64 = 256 << 20;
/// Rows of context logits that are computed at a time.
const CONTEXT_LOGITS_ROWS: usize = 64;

/// The rows of a token embedding.
pub struct Embedding {
    memory: DeviceMemory,
    hidden_size: usize,
}

/// A norm's weights, or a bias.
pub struct Vector {
    memory: DeviceMemory,
}

/// Rotary angles.
pub struct Angles {
    memory: DeviceMemory,
}

impl Device for Cuda {
    type Options = CudaOptions;
    type Matrix = Matrix;
    type Vector = Vector;
    type Embedding = Embedding;
    type Angles = Angles;
    type Sums = Rows<f32>;
    type Inputs = Rows<bf16>;
    type Logits = Logits;
    /// There are none: models with experts are refused.
    type ExpertRows = Infallible;
    type KvCache = KvCache;
    type HostBlocks = HostBlocks;
    type Step<'a> = CudaStep;

    const SAMPLES: bool = true;
    const HAS_FP8: bool = true;

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
            self.gemm.add(matrix.n(), matrix.k(), matrix.n(), 1);
        }
        Ok(packed)
    }

    fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        _: Stacking,
    ) -> Result<Result<Matrix, NotFinite>, LoadError> {
        let products = match &mut self.quantised {
            Some(products) => products,
            none => none.insert(QuantisedProducts::new(&self.stream, &self.kernels)?),
        };
        let packed = Matrix::upload_quantised(&self.stream, &mut self.pool, parts)?;
        if let Ok(matrix) = &packed {
            let is_reordered = parts[0].input_order().is_some();
            products.add(matrix.n(), matrix.k(), is_reordered);
            if !self.gemm.is_deterministic() {
                let (n, k) = (matrix.n(), matrix.k());
                for num_outputs in quantised_gemm::dequantised_pieces(n, k) {
                    self.gemm
                        .add(num_outputs, k, n, quantised_gemm::MAX_FUSED_ROWS + 1);
                }
            }
        }
        Ok(packed)
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
        Ok(Angles { memory })
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
        _: usize,
        shape: &MixtureShape,
    ) -> Result<Infallible, LoadError> {
        Err(LoadError::Resource(format!(
            "the model has {} experts in a layer, and mixtures of experts are computed on the CPU only: use an \
             instance_group of KIND_CPU",
            shape.routing.num_experts
        )))
    }

    fn alloc_kv_cache(
        &mut self,
        layout: KvLayout,
        num_layers: usize,
        num_blocks: usize,
    ) -> Result<KvCache, LoadError> {
        KvCache::new(&self.stream, layout, num_layers, num_blocks)
    }

    fn alloc_host_blocks(
        &mut self,
        cache: &KvCache,
        num_blocks: usize,
    ) -> Result<HostBlocks, LoadError> {
        HostBlocks::new(&self.stream, cache, num_blocks)
    }

    fn kv_bytes_per_block(layout: &KvLayout, num_layers: usize) -> usize {
        KvCache::bytes_per_block(layout, num_layers)
    }

    fn reserve(&mut self, cache: &KvCache, capacity: &StepCapacity) -> Result<(), LoadError> {
        let attention = AttentionScratch::new(&self.stream, &self.kernels, cache, capacity)?;
        let lists = attention.lists(cache, capacity);
        self.step = Some(StepBuffer::new(&self.stream, capacity, lists)?);
        self.attention = Some(attention);
        // No rotary angles are there for positions beyond the pool.
        let num_positions = cache.num_blocks * cache.layout.block_size.tokens().index();
        let capacity_in_pool = StepCapacity {
            max_seq_len: capacity.max_seq_len.min(num_positions),
            ..*capacity
        };
        self.first_steps = graphs::first_steps(&capacity_in_pool, self.graphs.max_graphs());
        self.gemm.prepare(capacity.max_num_tokens)?;
        self.copies = Some(UploadBuffer::new(&self.stream, COPY_WORDS * MAX_COPIES)?);
        match &mut self.quantised {
            Some(products) => products.reserve(&self.stream, capacity.max_num_tokens),
            None => Ok(()),
        }
    }

    fn first_steps(&self) -> Vec<FirstStep> {
        self.first_steps.clone()
    }

    fn copy_positions(
        &mut self,
        cache: &mut KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        let mut copies = copies.peekable();
        while copies.peek().is_some() && self.failure.is_none() {
            self.copy_some(cache, copies.by_ref().take(MAX_COPIES));
        }
    }

    fn offload(
        &mut self,
        cache: &KvCache,
        source: BlockId,
        host: &mut HostBlocks,
        target: HostBlockId,
    ) {
        if self.failure.is_none() {
            let copied = host.offload(cache, source, target);
            self.record("copying a KV block to the host", copied);
        }
    }

    fn onboard(
        &mut self,
        host: &HostBlocks,
        source: HostBlockId,
        cache: &mut KvCache,
        target: BlockId,
    ) {
        if self.failure.is_none() {
            let copied = host.onboard(source, cache, target);
            self.record("copying a KV block from the host", copied);
        }
    }

    fn host_block<'h>(
        &mut self,
        host: &'h mut HostBlocks,
        block: HostBlockId,
    ) -> Result<&'h mut [u8], StepError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let bytes = host.bytes_mut(block);
        bytes.map_err(|error| self.failed("waiting for KV blocks", &error))
    }

    fn begin_step<'a>(&mut self, cache: &KvCache, inputs: StepInputs<'a>) -> CudaStep {
        let block_size = cache.layout.block_size;
        let batch = KvBatch::new(
            inputs.spans,
            inputs.block_tables,
            block_size,
            cache.num_blocks,
        );
        let Some(mut buffer) = self.step.take() else {
            unreachable!("reserve comes before steps");
        };
        self.num_steps += 1;
        let step = match self.failure {
            None => {
                let may_have_graph = self.graphs.is_enabled();
                buffer
                    .upload(&self.stream, &batch, &inputs, may_have_graph)
                    .map(Some)
            }
            Some(_) => Ok(None),
        };
        self.step = Some(buffer);
        let step = self.record("uploading a step", step).flatten();
        let step = step.unwrap_or_default();
        self.begin_graph(&step);
        step
    }

    fn embed(
        &mut self,
        step: &CudaStep,
        table: EmbeddingTable<'_, Self>,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let (table, hidden_size) = match table {
            EmbeddingTable::Own(embedding) => (embedding.memory.address(), embedding.hidden_size),
            EmbeddingTable::Tied(matrix) => (matrix.rows_address(), matrix.k()),
        };
        let config = shared_row_grid(step.num_rows, hidden_size.div_ceil(VECTOR));
        let sampled = self.sampled_tokens.as_ref();
        let sampled = sampled.map_or(0, |tokens| tokens.address());
        launch!(
            self,
            self.kernels.embed,
            "embed",
            config,
            out.address(),
            table,
            step.token_ids,
            sampled,
            scale,
            hidden_size as i32
        );
    }

    fn add_positions(&mut self, step: &CudaStep, table: &Embedding, out: &mut Rows<f32>) {
        let width = table.hidden_size;
        launch!(
            self,
            self.kernels.add_positions,
            "add_positions",
            shared_row_grid(step.num_rows, width.div_ceil(VECTOR)),
            out.address(),
            table.memory.address(),
            step.positions,
            width as i32
        );
    }

    fn norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        let (num_rows, width) = (self.padded(num_rows), x.width());
        match norm {
            Norm::Identity => launch!(
                self,
                self.kernels.round_rows,
                "round_rows",
                shared_row_grid(num_rows, width.div_ceil(VECTOR)),
                out.address(),
                x.address(),
                width as i32
            ),
            Norm::Rms { weight, eps } => launch!(
                self,
                self.kernels.rms_norm,
                "rms_norm",
                row_grid(num_rows, row_threads(width)),
                out.address(),
                x.address(),
                weight.memory.address(),
                eps,
                width as i32
            ),
            Norm::Layer { weight, bias, eps } => launch!(
                self,
                self.kernels.layer_norm,
                "layer_norm",
                row_grid(num_rows, row_threads(width)),
                out.address(),
                x.address(),
                weight.memory.address(),
                bias.map_or(0, |bias| bias.memory.address()),
                eps,
                width as i32
            ),
        }
    }

    fn add_normed(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        norm: Norm<'_, Vector>,
        hidden: &mut Rows<f32>,
    ) {
        let (num_rows, width) = (self.padded(num_rows), x.width());
        match norm {
            Norm::Identity => launch!(
                self,
                self.kernels.add_rows,
                "add_rows",
                shared_row_grid(num_rows, width),
                hidden.address(),
                x.address(),
                width as i32
            ),
            Norm::Rms { weight, eps } => launch!(
                self,
                self.kernels.add_rms_normed,
                "add_rms_normed",
                row_grid(num_rows, row_threads(width)),
                hidden.address(),
                x.address(),
                weight.memory.address(),
                eps,
                width as i32
            ),
            Norm::Layer { weight, bias, eps } => launch!(
                self,
                self.kernels.add_layer_normed,
                "add_layer_normed",
                row_grid(num_rows, row_threads(width)),
                hidden.address(),
                x.address(),
                weight.memory.address(),
                bias.map_or(0, |bias| bias.memory.address()),
                eps,
                width as i32
            ),
        }
    }

    fn add_norm(
        &mut self,
        num_rows: usize,
        x: &Rows<f32>,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vector>,
        out: &mut Rows<bf16>,
    ) {
        let Norm::Rms { weight, eps } = norm else {
            self.add_normed(num_rows, x, Norm::Identity, hidden);
            return self.norm(num_rows, hidden, norm, out);
        };
        let width = x.width();
        launch!(
            self,
            self.kernels.add_rms_norm,
            "add_rms_norm",
            row_grid(self.padded(num_rows), row_threads(width)),
            out.address(),
            hidden.address(),
            x.address(),
            weight.memory.address(),
            eps,
            width as i32
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
        self.multiply(num_rows, x.address(), &linear.matrix, output, out.address());
        if let Some(bias) = &linear.bias {
            let n = linear.matrix.n();
            launch!(
                self,
                self.kernels.add_bias,
                "add_bias",
                shared_row_grid(self.padded(num_rows), n.div_ceil(VECTOR)),
                out.address(),
                bias.memory.address(),
                n as i32
            );
        }
    }

    fn project_gated(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        activation: Activation,
        out: &mut Rows<bf16>,
    ) {
        let scratch = self.scratch.address();
        self.multiply(
            num_rows,
            x.address(),
            &linear.matrix,
            Output::Store,
            scratch,
        );
        let width = linear.matrix.n() / 2;
        let bias = linear.bias.as_ref().map_or(0, |bias| bias.memory.address());
        launch!(
            self,
            self.kernels.gated.of(activation),
            "a gated activation",
            shared_row_grid(self.padded(num_rows), width.div_ceil(VECTOR)),
            out.address(),
            scratch,
            bias,
            width as i32
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
        let scratch = self.scratch.address();
        self.multiply(
            num_rows,
            x.address(),
            &linear.matrix,
            Output::Store,
            scratch,
        );
        let width = linear.matrix.n();
        let bias = linear.bias.as_ref().map_or(0, |bias| bias.memory.address());
        launch!(
            self,
            self.kernels.plain.of(activation),
            "an activation",
            shared_row_grid(self.padded(num_rows), width.div_ceil(VECTOR)),
            out.address(),
            scratch,
            bias,
            width as i32
        );
    }

    fn route(&mut self, _: usize, _: &Rows<f32>, _: &Routing, rows: &mut Infallible) {
        match *rows {}
    }

    fn mix_experts(
        &mut self,
        _: usize,
        _: &Rows<bf16>,
        _: &Experts<Self>,
        rows: &mut Infallible,
        _: Output,
        _: &mut Rows<f32>,
    ) {
        match *rows {}
    }

    fn num_touched_experts(&self, rows: &Infallible) -> usize {
        match *rows {}
    }

    fn rope_and_store(
        &mut self,
        step: &CudaStep,
        params: RopeParams<'_, Self>,
        qkv: &mut Rows<f32>,
        cache: &mut KvCache,
        layer: usize,
        q: &mut Rows<bf16>,
    ) {
        let heads = params.heads;
        let arrays = cache.layer(layer);
        let (q_norm, k_norm, eps) = match params.qk_norm {
            None => (0, 0, 0.0),
            Some(QkNorm { q, k, width, eps }) => {
                let (q, k) = (q.memory.address(), k.memory.address());
                match width {
                    QkNormWidth::Head => (q, k, eps),
                    QkNormWidth::Row => {
                        self.normalise_rows(step.num_rows, heads, qkv, (q, k, eps));
                        (0, 0, 0.0)
                    }
                }
            }
        };
        let kernel = match cache.layout.dtype {
            KvDtype::Bf16 => &self.kernels.rope_and_store_bf16,
            KvDtype::Int8 => &self.kernels.rope_and_store_int8,
            KvDtype::Fp8 => &self.kernels.rope_and_store_fp8,
        };
        let config = shared_row_grid(step.num_rows, qkv.width().div_ceil(2 * VECTOR));
        launch!(
            self,
            kernel,
            "rope_and_store",
            config,
            q.address(),
            arrays.keys,
            arrays.values,
            arrays.key_scales,
            arrays.value_scales,
            qkv.address(),
            params.angles.memory.address(),
            q_norm,
            k_norm,
            eps,
            step.positions,
            step.slots,
            heads.num_q_heads as i32,
            heads.num_kv_heads as i32,
            heads.head_dim as i32,
            cache.layout.block_size.tokens().0 as i32
        );
    }

    fn paged_attention(
        &mut self,
        step: &CudaStep,
        params: &AttentionParams,
        q: &Rows<bf16>,
        cache: &KvCache,
        layer: usize,
        out: &mut Rows<bf16>,
    ) {
        self.attend(step, params, q.address(), cache, layer, out.address());
    }

    fn keep_rows(&mut self, step: &CudaStep, hidden: &mut Rows<f32>, attended: &mut Rows<bf16>) {
        if !step.keeps_all {
            self.gather(step.num_kept, step.kept_rows, hidden);
            self.gather(step.num_kept, step.kept_rows, attended);
        }
    }

    fn keep_sampled_rows(&mut self, step: &CudaStep, states: &mut Rows<bf16>) {
        if !step.samples_all {
            self.gather(step.num_sampled, step.sampled_rows, states);
        }
    }

    fn logits(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Matrix,
        transform: LogitsTransform,
        out: &mut Logits,
    ) {
        let address = out.rows.address();
        self.multiply(num_rows, states.address(), lm_head, Output::Store, address);
        self.transform_logits(num_rows, lm_head.n(), transform, address);
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

    fn context_logits(
        &mut self,
        states: &Rows<bf16>,
        rows: Range<usize>,
        lm_head: &Matrix,
        transform: LogitsTransform,
        out: &mut [f32],
    ) {
        let vocab_size = lm_head.n();
        let chunks = out.chunks_mut(CONTEXT_LOGITS_ROWS * vocab_size);
        for (start, chunk) in rows.step_by(CONTEXT_LOGITS_ROWS).zip(chunks) {
            let num_rows = chunk.len() / vocab_size;
            // Products need aligned inputs, and a row may begin anywhere.
            let x = self.scratch.address()
                + (4 * CONTEXT_LOGITS_ROWS * vocab_size).next_multiple_of(256) as u64;
            self.copy(x, states.row_address(start), num_rows * states.row_bytes());
            let logits = self.scratch.address();
            self.multiply(num_rows, x, lm_head, Output::Store, logits);
            self.transform_logits(num_rows, vocab_size, transform, logits);
            if self.failure.is_none() {
                let read = self
                    .scratch
                    .read(&self.stream, bytemuck::cast_slice_mut(chunk));
                self.record("reading context logits", read);
            }
        }
    }

    fn end_step(&mut self, _: CudaStep) {
        self.end_graph();
    }

    fn results<'l>(
        &mut self,
        logits: &'l mut Logits,
        num_rows: usize,
    ) -> Result<StepResults<'l>, StepError> {
        if !logits.has_kept(self.num_steps) {
            self.keep_samples(logits, num_rows);
        }
        self.check()?;
        let results = logits.results(&self.stream, self.num_steps, num_rows);
        results.map_err(|error| self.step_failed(&error))
    }

    fn can_run_ahead(&self, logits: &Logits) -> bool {
        logits.sample.is_some()
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
        let rows = logits.host_rows(&self.stream, self.num_steps, num_rows);
        rows.map_err(|error| self.step_failed(&error))
    }
}

impl Cuda {
    /// Bytes of device memory that steps of this capacity take: all that is reserved for them, but the KV cache. At
    /// least as many as that, for the KV cache gets the rest.
    pub fn num_step_bytes(
        capacity: &StepCapacity,
        widths: &StepWidths,
        max_logits_rows: usize,
    ) -> u64 {
        let max_rows = capacity.max_num_tokens + gemm::MAX_ROUNDING;
        let rows = max_rows * (4 * widths.sums + 2 * widths.inputs);
        let gated = 8 * max_rows * widths.widest_inputs;
        let logits = 4 * (max_logits_rows + gemm::MAX_ROUNDING) * widths.logits;
        let counts = logits::num_count_bytes(max_logits_rows, widths.logits);
        (rows + gated.max(context_logits_bytes(widths.logits)) + logits + counts) as u64
            + quantised_gemm::num_scratch_bytes(&widths.quantised, capacity.max_num_tokens) as u64
            + (gemm::WORKSPACE_BYTES + attention::MAX_PARTIAL_BYTES) as u64
            // Kernels, descriptors, the upload of a step, and what the driver rounds up.
            + OTHER_BYTES
    }

    /// Launches the graph of the last step again, some times one after the other, and waits for all: what a step takes
    /// without the host. It computes what it has computed. Gives whether there is such a graph.
    ///
    /// # Errors
    ///
    /// An operation has failed.
    pub fn repeat_step(&mut self, num_times: u32) -> Result<bool, StepError> {
        self.check()?;
        let Some(graph) = self.graphs.last() else {
            return Ok(false);
        };
        let launched = (0..num_times).try_for_each(|_| graph.launch());
        let ended = launched.and_then(|()| self.stream.synchronize());
        ended.map_err(|error| self.step_failed(&error))?;
        Ok(true)
    }

    /// Begins to record a step, or leaves its operations to a graph.
    fn begin_graph(&mut self, step: &CudaStep) {
        let Some(shape) = step.shape else {
            return;
        };
        self.padded_rows = Some(shape.num_rows);
        self.mode = self.graphs.mode(shape, self.num_steps);
        if let StepMode::Recording(_) = self.mode {
            // Other threads may use the driver meanwhile, for models of their own.
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            let begun = self.stream.begin_capture(mode);
            self.record("recording a step", begun);
        }
    }

    /// Launches the graph of a step that has one.
    fn end_graph(&mut self) {
        self.padded_rows = None;
        let mode = std::mem::take(&mut self.mode);
        self.graphs.set_last(None);
        if let StepMode::Recording(shape) = mode {
            // After an operation has failed, too: the stream must not stay captured.
            let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
            if let Some(Some(graph)) = self.record("recording a step", graph) {
                self.graphs.insert(shape, graph);
            }
        }
        if let StepMode::Recording(shape) | StepMode::Replaying(shape) = mode
            && self.failure.is_none()
            && let Some(graph) = self.graphs.get(shape)
        {
            let launched = graph.launch();
            self.record("launching a step", launched);
            self.graphs.set_last(Some(shape));
        }
    }

    /// Rows that an operation computes: more than asked for in a step whose rows are rounded up.
    fn padded(&self, num_rows: usize) -> usize {
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

    fn multiply(&mut self, num_rows: usize, x: u64, matrix: &Matrix, output: Output, out: u64) {
        let num_rows = self.padded(num_rows);
        if num_rows == 0 {
            return;
        }
        let (n, k) = (matrix.n(), matrix.k());
        match &matrix.weights {
            Weights::Bf16(memory) => self.multiply_floats(
                num_rows,
                Operands {
                    x,
                    weights: memory.address(),
                    n,
                    k,
                    output,
                    out,
                    out_width: n,
                },
            ),
            Weights::Quantised(weights) => self.multiply_quantised(QuantisedProduct {
                num_rows,
                x,
                weights,
                n,
                k,
                output,
                out,
            }),
        }
    }

    pub(super) fn multiply_floats(&mut self, num_rows: usize, operands: Operands) {
        if self.is_launching() {
            let result = self.gemm.multiply(&self.stream, num_rows, operands);
            self.record("a matrix product", result);
        }
    }

    /// Changes logits in place, if there is anything to change.
    fn transform_logits(
        &mut self,
        num_rows: usize,
        width: usize,
        transform: LogitsTransform,
        logits: u64,
    ) {
        if transform == LogitsTransform::IDENTITY || num_rows == 0 {
            return;
        }
        launch!(
            self,
            self.kernels.transform_logits,
            "transform_logits",
            shared_row_grid(self.padded(num_rows), width),
            logits,
            transform.scale,
            transform.soft_cap.unwrap_or(0.0),
            width as i32
        );
    }

    /// Normalises queries and keys in place, each over all of their heads.
    fn normalise_rows(
        &mut self,
        num_rows: usize,
        heads: HeadShape,
        qkv: &mut Rows<f32>,
        (q_weight, k_weight, eps): (u64, u64, f32),
    ) {
        let (q_width, k_width) = (heads.q_len(), heads.num_kv_heads * heads.head_dim);
        let config = LaunchConfig {
            grid_dim: (num_rows as u32, 2, 1),
            ..row_grid(num_rows, row_threads(q_width))
        };
        launch!(
            self,
            self.kernels.qk_norm,
            "qk_norm",
            config,
            qkv.address(),
            q_weight,
            k_weight,
            eps,
            q_width as i32,
            k_width as i32
        );
    }

    /// Moves the rows with these indices to the front.
    fn gather<T>(&mut self, num_rows: usize, indices: u64, rows: &mut Rows<T>) {
        if num_rows == 0 {
            return;
        }
        let row_bytes = rows.row_bytes();
        let (kernel, unit) = match row_bytes.is_multiple_of(16) {
            true => (&self.kernels.gather_rows, 16),
            false => (&self.kernels.gather_rows_4, 4),
        };
        assert!(row_bytes.is_multiple_of(unit), "rows of {row_bytes} bytes");
        let units = row_bytes / unit;
        let scratch = self.scratch.address();
        launch!(
            self,
            kernel,
            "gather_rows",
            shared_row_grid(num_rows, units),
            scratch,
            rows.address(),
            indices,
            units as i32
        );
        self.copy(rows.address(), scratch, num_rows * row_bytes);
    }

    /// Copies bytes of one buffer to another one.
    fn copy(&mut self, target: u64, source: u64, num_bytes: usize) {
        if self.is_launching() {
            let copied = memory::copy(&self.stream, target, source, num_bytes);
            self.record("moving rows", copied);
        }
    }

    /// Copies positions of at most [`MAX_COPIES`] blocks, one after the other: a later copy may overwrite what an
    /// earlier one has read.
    fn copy_some(
        &mut self,
        cache: &KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    ) {
        let Some(mut buffer) = self.copies.take() else {
            unreachable!("reserve comes before steps");
        };
        let mut num_copies = 0;
        let filled = buffer.staging().map(|words| {
            for ((source, target, num_positions), words) in
                copies.zip(words.chunks_exact_mut(COPY_WORDS))
            {
                cache
                    .layout
                    .check_copy(cache.num_blocks, source, target, num_positions);
                words.copy_from_slice(&[
                    source.index() as u32,
                    target.index() as u32,
                    num_positions as u32,
                ]);
                num_copies += 1;
            }
        });
        let uploaded = filled.and_then(|()| buffer.upload(&self.stream, COPY_WORDS * num_copies));
        self.record("uploading copies", uploaded);
        let (regions, num_regions) = cache.device_regions();
        let num_heads = cache.layout.num_kv_heads;
        for copy in 0..num_copies {
            let config = LaunchConfig {
                grid_dim: ((num_regions * num_heads) as u32, 1, 1),
                block_dim: (ROW_THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            launch!(
                self,
                self.kernels.copy_positions,
                "copy_positions",
                config,
                cache.address(),
                regions,
                buffer.address(COPY_WORDS * copy),
                num_heads as i32
            );
        }
        self.copies = Some(buffer);
    }
}

/// Bytes of scratch memory for context logits, and for the states that they are computed from, which are narrower.
fn context_logits_bytes(vocab_size: usize) -> usize {
    (4 * CONTEXT_LOGITS_ROWS * vocab_size).next_multiple_of(256)
        + 2 * CONTEXT_LOGITS_ROWS * vocab_size
}

/// Threads for a norm over rows of this width: the same for all rows of a width, since it decides the order of sums.
fn row_threads(width: usize) -> u32 {
    match width <= MAX_ROW_THREADS_WIDTH {
        true => ROW_THREADS,
        false => WIDE_ROW_THREADS,
    }
}
