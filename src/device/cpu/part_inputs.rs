//! What a CPU computes as one of several ranks only: products with some of the inputs, and norms over the heads of all.

use std::ops::Range;

use half::bf16;

use super::Cpu;
use super::elementwise::sum;
use crate::device::ranks::Ranks;
use crate::device::{HeadPlaces, HeadShape, QkNorm, Tile};

/// A device and its ranks, side by side. It has them again when this is dropped, after a panic too.
struct LentRanks<'a> {
    cpu: &'a mut Cpu,
    ranks: Option<Ranks>,
}

impl<'a> LentRanks<'a> {
    fn of(cpu: &'a mut Cpu) -> Self {
        let ranks = cpu.ranks.take();
        Self { cpu, ranks }
    }
}

impl Drop for LentRanks<'_> {
    fn drop(&mut self) {
        self.cpu.ranks = self.ranks.take();
    }
}

impl Cpu {
    /// The other ranks. Only for a device that has joined some.
    pub(super) fn ranks_mut(&mut self) -> &mut Ranks {
        self.ranks.as_mut().expect("it has joined ranks")
    }

    /// Normalises queries and keys of `qkv`, `[m, qkv_len]`, over all heads of the model. The square of each head is that of one
    /// rank, and all are added in their order, so that the sum does not depend on the number of ranks. `squares` is
    /// `[m, heads of the model]`.
    pub(super) fn norm_over_ranks(
        &mut self,
        heads: HeadShape,
        norm: QkNorm<'_>,
        places: &HeadPlaces,
        qkv: &mut [f32],
        squares: &mut [f32],
    ) {
        let (d, qkv_len) = (heads.head_dim, heads.qkv_len());
        let [num_q, num_k] = places.num_heads;
        let (num_rows, num_heads) = (qkv.len() / qkv_len, num_q + num_k);
        let norm_len = norm.q.len() + norm.k.len();
        assert_eq!(norm_len, places.places.len() * d, "weights of all heads");
        // What changes no sum.
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

    /// [`Cpu::gemm_tiles`], summed over all ranks. The tiles of this one are written where the others read them.
    pub(super) fn sum_tiles(
        &mut self,
        x: &[bf16],
        width: usize,
        tiles: &[Option<Tile<Self>>],
        out: &mut [f32],
    ) {
        let mut lent = LentRanks::of(self);
        let LentRanks { cpu, ranks } = &mut lent;
        match ranks {
            None => cpu.gemm_tiles(x, width, tiles, out),
            Some(ranks) => ranks.all_reduce_of(out, |part| cpu.gemm_tiles(x, width, tiles, part)),
        }
    }

    /// Calls `multiply` with some columns of `x`, which has rows of `width`.
    pub(super) fn with_part(
        &mut self,
        x: &[bf16],
        width: usize,
        columns: Range<usize>,
        multiply: impl FnOnce(&mut Self, &[bf16]),
    ) {
        if columns == (0..width) {
            return multiply(self, x);
        }
        let mut part = std::mem::take(&mut self.part_x);
        part.clear();
        let rows = x.chunks_exact(width);
        part.extend(rows.flat_map(|row| &row[columns.clone()]));
        multiply(self, &part);
        self.part_x = part;
    }
}
