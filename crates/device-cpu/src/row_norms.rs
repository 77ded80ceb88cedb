//! Norms of rows of queries and keys of which a rank has some heads.

use super::Cpu;
use super::elementwise::sum;
use super::ops::of_heads;
use super::rows::Rows;
use inflight_device::{HeadPlaces, HeadShape, QkNorm, RankHost, RowNormOps};

/// Norms of rows over the heads of all ranks, on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuRowNorms;

impl RowNormOps<Cpu> for CpuRowNorms {
    /// The square of each head is summed as of one rank, and all are added in their order, so that the sum does not
    /// depend on the number of ranks.
    fn norm(
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
        let norm = of_heads(norm);
        let (qkv, squares) = (qkv.first_mut(num_rows), squares.first_mut(num_rows));
        let (d, qkv_len) = (heads.head_dim, heads.qkv_len());
        let [num_q, num_k] = places.num_heads;
        let num_heads = num_q + num_k;
        let norm_len = norm.q.len() + norm.k.len();
        assert_eq!(norm_len, places.places.len() * d, "weights of all heads");
        // -0 changes no sum.
        squares.fill(-0.0);
        cpu.for_each_row_block(num_rows, num_heads, squares, |first, squares| {
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
        cpu.for_each_row_block(num_rows, qkv_len, qkv, |first, rows| {
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
