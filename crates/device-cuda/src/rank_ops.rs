//! A GPU as one of the ranks of a model, as a device is one.

use cudarc::driver::PushKernelArg;
use half::bf16;

use super::Cuda;
use super::kernels::{VECTOR, launch, shared_row_grid};
use super::logits::Logits;
use super::rows::Rows;
use super::step::CudaStep;
use inflight_base::{LoadError, StepError};
use inflight_device::{EmbeddingTable, Linear, PackedWeights, RankHost, RankOps};

/// Collective operations of a GPU. Only a GPU that has joined ranks has this value.
#[derive(Clone, Copy, Debug)]
pub struct CudaRanks(());

impl CudaRanks {
    /// Makes a GPU one of several ranks.
    pub(super) fn join(cuda: &mut Cuda, host: &mut RankHost) -> Result<Self, LoadError> {
        cuda.join(host)?;
        Ok(Self(()))
    }
}

impl RankOps<Cuda> for CudaRanks {
    fn check_alike(self, cuda: &mut Cuda, host: &mut RankHost) -> Result<(), LoadError> {
        cuda.check_kind_of_ranks(host)
    }

    fn wait(self, cuda: &mut Cuda, host: &mut RankHost) -> Result<(), StepError> {
        match cuda.has_sent() {
            // The GPU was waited for then. The last stage has the logits, and sends them to this host.
            true => cuda.check(),
            false => cuda.wait_for_ranks(host),
        }
    }

    fn reserve_rows_between_stages(
        self,
        cuda: &mut Cuda,
        host: &RankHost,
        max_rows: usize,
        max_sequences: usize,
        width: usize,
    ) -> Result<(), LoadError> {
        cuda.reserve_stage_rows(host, max_rows, max_sequences, width)
    }

    fn all_reduce(self, cuda: &mut Cuda, _: &mut RankHost, num_rows: usize, rows: &mut Rows<f32>) {
        cuda.sum_over_ranks(num_rows, rows);
    }

    fn project_and_sum(
        self,
        cuda: &mut Cuda,
        _: &mut RankHost,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Cuda>,
        out: &mut Rows<f32>,
    ) {
        cuda.project_rows_and_sum(num_rows, x, linear, out);
    }

    fn embed_part(
        self,
        cuda: &mut Cuda,
        step: &CudaStep,
        table: EmbeddingTable<'_, Cuda>,
        first_token: usize,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let width = out.width();
        let (table, num_tokens) = match table {
            EmbeddingTable::Own(embedding) => {
                let num_tokens = embedding.memory.num_bytes() / (2 * width);
                (embedding.memory.address(), num_tokens)
            }
            EmbeddingTable::Tied(matrix) => (matrix.rows_address(), matrix.n()),
        };
        launch!(
            cuda,
            cuda.kernels.embed_part,
            "embed_part",
            shared_row_grid(step.num_rows, width.div_ceil(VECTOR)),
            out.address(),
            table,
            step.token_ids,
            first_token as i32,
            num_tokens as i32,
            scale,
            width as i32
        );
    }

    fn gather_logits(
        self,
        cuda: &mut Cuda,
        _: &mut RankHost,
        num_rows: usize,
        _greedy_rows: &[u32],
        widths: &[usize],
        part: &mut Logits,
        out: &mut Logits,
    ) {
        cuda.gather_parts(num_rows, widths, part.rows.address(), &out.rows);
    }

    fn send_rows(self, cuda: &mut Cuda, _: &mut RankHost, num_rows: usize, rows: &Rows<f32>) {
        cuda.send_later(num_rows, rows);
    }

    fn receive_rows(
        self,
        cuda: &mut Cuda,
        host: &mut RankHost,
        num_rows: usize,
        rows: &mut Rows<f32>,
    ) {
        cuda.receive_from_stage(host, num_rows, rows);
    }

    fn end_step(self, cuda: &mut Cuda, host: &mut RankHost) {
        cuda.send_outgoing(host);
    }
}
