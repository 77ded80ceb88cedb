//! A CPU as one of the ranks of a model.

use std::time::Duration;

use super::elementwise::sum;
use super::logits::CpuLogits;
use super::ops::of_heads;
use super::rows::Rows;
use super::step::CpuStep;
use super::{Cpu, Simd};
use inflight_base::LoadError;
use inflight_collective::Collective;
use inflight_device::{EmbeddingTable, HeadPlaces, HeadShape, QkNorm, RankHost, RankOps};

/// Collective operations of a CPU. Only a CPU that has joined ranks has this value.
#[derive(Clone, Copy, Debug)]
pub struct CpuRanks(());

impl CpuRanks {
    /// Makes a CPU one of several ranks.
    pub(super) fn join(cpu: &mut Cpu, collective: Box<dyn Collective>) -> Self {
        cpu.ranks = Some(RankHost::new(collective));
        Self(())
    }
}

impl RankOps<Cpu> for CpuRanks {
    fn host(self, cpu: &mut Cpu) -> &mut RankHost {
        cpu.ranks.as_mut().expect("it has joined ranks")
    }

    fn check_alike(self, cpu: &mut Cpu) -> Result<(), LoadError> {
        let index = Simd::ALL.iter().position(|simd| *simd == cpu.simd);
        let describe = |index: u32| match Simd::ALL.get(index as usize) {
            Some(simd) => format!("the instruction set {simd}"),
            None => "another build".to_owned(),
        };
        let index = index.map_or(u32::MAX, |index| index as u32);
        self.host(cpu).check_alike(
            index,
            describe,
            "set cpu_instruction_set to one that all hosts have",
        )
    }

    fn meet(self, cpu: &mut Cpu, time_limit: Duration) -> Result<(), LoadError> {
        self.host(cpu).meet(time_limit)
    }

    fn all_reduce(self, cpu: &mut Cpu, num_rows: usize, rows: &mut Rows<f32>) {
        self.host(cpu).all_reduce(rows.first_mut(num_rows));
    }

    fn norm_over_ranks(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        heads: HeadShape,
        norm: QkNorm<'_, Vec<f32>>,
        places: &HeadPlaces,
        qkv: &mut Rows<f32>,
        squares: &mut Rows<f32>,
    ) {
        cpu.norm_over_ranks(num_rows, heads, norm, places, qkv, squares);
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
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut CpuLogits,
        out: &mut CpuLogits,
    ) {
        if greedy_rows.is_empty() {
            let (part, out) = (part.first_mut(num_rows), out.begin(num_rows));
            return self.gather_context_logits(cpu, widths, part, out);
        }
        cpu.gather_greedy_logits(num_rows, greedy_rows, widths, part, out);
    }

    fn send_rows(self, cpu: &mut Cpu, num_rows: usize, rows: &Rows<f32>) {
        self.host(cpu).send(rows.first(num_rows));
    }

    fn receive_rows(self, cpu: &mut Cpu, num_rows: usize, rows: &mut Rows<f32>) {
        self.host(cpu).receive(rows.first_mut(num_rows));
    }
}

impl Cpu {
    /// Normalises queries and keys of `qkv`, `[num_rows, qkv_len]`, over all heads of the model. The square of each
    /// head is summed as of one rank, and all are added in their order, so that the sum does not depend on the number
    /// of ranks. `squares` is `[num_rows, heads of the model]`.
    pub(super) fn norm_over_ranks(
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
        if let Some(ranks) = &mut self.ranks {
            ranks.all_reduce(squares);
        }
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
