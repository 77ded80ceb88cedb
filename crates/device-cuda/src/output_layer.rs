//! The output layer: logits of rows, with and without adapters.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::PushKernelArg;
use half::bf16;

use super::Cuda;
use super::adapters::{Adapters, ProductRows};
use super::kernels::{launch, shared_row_grid};
use super::logits::Logits;
use super::rows::Rows;
use inflight_device::{AdaptedRows, AdapterRun, Linear, LogitsTransform, Output, PackedWeights};

/// Rows of context logits that are computed at a time.
const CONTEXT_LOGITS_ROWS: usize = 64;

impl Cuda {
    /// Logits of rows, `adapted` by the adapters of sampled rows.
    pub(super) fn logits_of_rows(
        &mut self,
        num_rows: usize,
        states: &Rows<bf16>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut Logits,
    ) {
        let (x, address) = (states.address(), out.rows.address());
        let vocab_size = lm_head.matrix.n();
        self.multiply(num_rows, x, &lm_head.matrix, Output::Store, address);
        if let Some(adapted) = adapted {
            let tiles = self.adapters.as_ref().map(Adapters::sampled);
            let rows = ProductRows {
                tiles: tiles.unwrap_or_default(),
                x,
                out: address,
                width: vocab_size,
            };
            self.add_adapted(rows, adapted, 0);
        }
        self.add_bias(num_rows, lm_head, address);
        self.transform_logits(num_rows, vocab_size, transform, address);
    }

    /// Some rows of context logits after the other.
    pub(super) fn rows_of_context_logits(
        &mut self,
        states: &Rows<bf16>,
        rows: Range<usize>,
        lm_head: &Linear<Self>,
        transform: LogitsTransform,
        adapted: Option<AdaptedRows<'_>>,
        out: &mut [f32],
    ) {
        let vocab_size = lm_head.matrix.n();
        let chunks = out.chunks_mut(CONTEXT_LOGITS_ROWS * vocab_size);
        for (first, chunk) in (0..rows.len()).step_by(CONTEXT_LOGITS_ROWS).zip(chunks) {
            let num_rows = chunk.len() / vocab_size;
            // Products need aligned inputs, and a row may begin anywhere.
            let x = self.scratch.address()
                + (4 * CONTEXT_LOGITS_ROWS * vocab_size).next_multiple_of(256) as u64;
            let source = states.row_address(rows.start + first);
            self.copy(x, source, num_rows * states.row_bytes());
            let logits = self.scratch.address();
            self.multiply(num_rows, x, &lm_head.matrix, Output::Store, logits);
            if let Some(adapted) = adapted {
                let own = runs_within(adapted.runs, first..first + num_rows);
                let rows = ProductRows {
                    tiles: self.upload_tiles(&own),
                    x,
                    out: logits,
                    width: vocab_size,
                };
                self.add_adapted(rows, adapted, 0);
            }
            self.add_bias(num_rows, lm_head, logits);
            self.transform_logits(num_rows, vocab_size, transform, logits);
            if self.failure.is_none() {
                let read = self
                    .scratch
                    .read(&self.stream, bytemuck::cast_slice_mut(chunk));
                self.record("reading context logits", read);
            }
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
}

/// Bytes of scratch memory for context logits, and for the states that they are computed from, which are narrower.
pub(super) fn context_logits_bytes(vocab_size: usize) -> usize {
    (4 * CONTEXT_LOGITS_ROWS * vocab_size).next_multiple_of(256)
        + 2 * CONTEXT_LOGITS_ROWS * vocab_size
}

/// The runs of some of the rows, which are counted from the first of these.
fn runs_within(runs: &[AdapterRun], rows: Range<usize>) -> Vec<AdapterRun> {
    let (start, end) = (rows.start as u32, rows.end as u32);
    let within = runs.iter().map(|run| AdapterRun {
        weights: Arc::clone(&run.weights),
        rows: run.rows.start.max(start) - start..run.rows.end.clamp(start, end) - start,
    });
    within.filter(|run| !run.rows.is_empty()).collect()
}
