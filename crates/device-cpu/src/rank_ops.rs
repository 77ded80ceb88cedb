//! A CPU as one of the ranks of a model.

use super::elementwise::sum;
use super::logits::CpuLogits;
use super::ops::of_heads;
use super::rows::Rows;
use super::step::CpuStep;
use super::{Cpu, Simd};
use inflight_base::{LoadError, StepError};
use inflight_device::{EmbeddingTable, HeadPlaces, HeadShape, QkNorm, RankHost, RankOps};

/// Collective operations of a CPU. Only a CPU that has joined ranks has this value.
#[derive(Clone, Copy, Debug)]
pub struct CpuRanks(());

impl CpuRanks {
    /// Makes a CPU one of several ranks.
    pub(super) fn join(cpu: &mut Cpu) -> Self {
        cpu.is_rank = true;
        Self(())
    }
}

impl RankOps<Cpu> for CpuRanks {
    fn check_alike(self, cpu: &mut Cpu, host: &mut RankHost) -> Result<(), LoadError> {
        let index = Simd::ALL.iter().position(|simd| *simd == cpu.simd);
        let describe = |index: u32| match Simd::ALL.get(index as usize) {
            Some(simd) => format!("the instruction set {simd}"),
            None => "another build".to_owned(),
        };
        let index = index.map_or(u32::MAX, |index| index as u32);
        host.check_alike(
            index,
            describe,
            "set cpu_instruction_set to one that all hosts have",
        )
    }

    fn wait(self, _: &mut Cpu, host: &mut RankHost) -> Result<(), StepError> {
        host.check()
    }

    fn all_reduce(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &mut Rows<f32>) {
        host.all_reduce(rows.first_mut(num_rows));
    }

    fn norm_over_ranks(
        self,
        cpu: &mut Cpu,
        host: &mut RankHost,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, Vec<f32>>,
        places: &HeadPlaces,
        qkv: &mut Rows<f32>,
        squares: &mut Rows<f32>,
    ) {
        cpu.norm_over_ranks(host, num_rows, heads, norm, places, qkv, squares);
    }

    fn embed_part(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        table: EmbeddingTable<'_, Cpu>,
        first_token: usize,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let width = out.width();
        let out = out.first_mut(step.token_ids.len());
        cpu.embed_rows(step.token_ids, width, scale, out, |id, row| {
            let index = (id as usize).checked_sub(first_token);
            match (index, &table) {
                (Some(index), EmbeddingTable::Own(own)) if index < own.num_rows() => {
                    own.table().row_to_f32(index, row);
                }
                (Some(index), EmbeddingTable::Tied(matrix)) if index < matrix.n() => {
                    matrix.row_to_f32(index, row);
                }
                _ => row.fill(-0.0),
            }
        });
    }

    fn gather_logits(
        self,
        cpu: &mut Cpu,
        host: &mut RankHost,
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut CpuLogits,
        out: &mut CpuLogits,
    ) {
        if greedy_rows.is_empty() {
            let (part, out) = (part.first_mut(num_rows), out.begin(num_rows));
            return host.gather_columns(widths, part, out, |row| row);
        }
        cpu.gather_greedy_logits(host, num_rows, greedy_rows, widths, part, out);
    }

    fn send_rows(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &Rows<f32>) {
        host.send(rows.first(num_rows));
    }

    fn receive_rows(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &mut Rows<f32>) {
        host.receive(rows.first_mut(num_rows));
    }
}

impl Cpu {
    /// Normalises queries and keys of `qkv`, `[num_rows, qkv_len]`, over all heads of the model. The square of each
    /// head is summed as of one rank, and all are added in their order, so that the sum does not depend on the number
    /// of ranks. `squares` is `[num_rows, heads of the model]`.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn norm_over_ranks(
        &mut self,
        host: &mut RankHost,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, Vec<f32>>,
        places: &HeadPlaces,
        qkv: &mut Rows<f32>,
        squares: &mut Rows<f32>,
    ) {
        let norm = of_heads(norm);
        let (qkv, squares) = (qkv.first_mut(num_rows), squares.first_mut(num_rows));
        let (d, qkv_len) = (heads.head_dim, heads.qkv_len());
        let [num_q, num_k] = places.num_heads;
        let num_heads = num_q + num_k;
        let norm_len = norm.q.len() + norm.k.len();
        assert_eq!(norm_len, places.places.len() * d, "weights of all heads");
        // -0 changes no sum.
        squares.fill(-0.0);
        self.for_each_row_block(num_rows, num_heads, squares, |first, squares| {
            let rows = qkv[first * qkv_len..].chunks_exact(qkv_len);
            for (row, squares) in rows.zip(squares.chunks_exact_mut(num_heads)) {
                for (head, place) in row.chunks_exact(d).zip(&places.places) {
                    if let Some(place) = place {
                        squares[*place] = sum(head, |x| x * x);
                    }
                }
            }
        });
        host.all_reduce(squares);
        let squares = &*squares;
        self.for_each_row_block(num_rows, qkv_len, qkv, |first, rows| {
            let squares = squares[first * num_heads..].chunks_exact(num_heads);
            for (row, squares) in rows.chunks_exact_mut(qkv_len).zip(squares) {
                let (q, k) = row[..norm_len].split_at_mut(norm.q.len());
                let (q_squares, k_squares) = squares.split_at(num_q);
                for (x, weights, squares) in [(q, norm.q, q_squares), (k, norm.k, k_squares)] {
                    let mean = sum(squares, |square| square) / (squares.len() * d) as f32;
                    let scale = 1.0 / (mean + norm.eps).sqrt();
                    for (x, weight) in x.iter_mut().zip(weights) {
                        *x = *x * scale * weight;
                    }
                }
            }
        });
    }
}
