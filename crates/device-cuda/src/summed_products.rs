//! Products of many rows, whose sums over ranks begin before all rows are multiplied.
//!
//! ```text
//! stream           | x[0..a] W | x[a..b] W | x[b..c] W | waits     | next kernels
//! sums' stream                 | sum 0..a  | sum a..b  | sum b..c  |
//! ```
//!
//! That pays where both take long: in steps with a long context. A step of generation has a few rows, and is a graph of
//! one stream.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use half::bf16;

use super::Cuda;
use super::gpu::load_error;
use super::rows::Rows;
use inflight_base::LoadError;
use inflight_device::{Linear, Output};

/// The fewest rows of a piece: with fewer, a product does not use the whole GPU.
const MIN_PIECE_ROWS: usize = 512;
/// What the rows of a piece are a multiple of, but for the last piece: the largest tile of a product.
const ROUNDING: usize = 256;
const MAX_PIECES: usize = 4;

/// The stream of sums that run beside products.
pub(super) struct SumStream {
    pub(super) stream: Arc<CudaStream>,
    reached: CudaEvent,
}

impl SumStream {
    /// Makes one on the GPU of another stream.
    ///
    /// # Errors
    ///
    /// CUDA refuses.
    pub(super) fn new(other: &CudaStream) -> Result<Self, LoadError> {
        let failed = |error| load_error("creating a stream for sums", &error);
        Ok(Self {
            stream: other.context().new_stream().map_err(failed)?,
            reached: other.context().new_event(None).map_err(failed)?,
        })
    }

    /// Has what follows in `then` wait for all that has been launched in `first`.
    ///
    /// # Errors
    ///
    /// CUDA refuses.
    pub(super) fn order(&self, first: &CudaStream, then: &CudaStream) -> Result<(), String> {
        let ordered = self.reached.record(first);
        let ordered = ordered.and_then(|()| then.wait(&self.reached));
        ordered.map_err(|error| error.to_string())
    }
}

impl Cuda {
    /// `out = x * W^T + bias`, summed over all ranks.
    pub(super) fn project_rows_and_sum(
        &mut self,
        num_rows: usize,
        x: &Rows<bf16>,
        linear: &Linear<Self>,
        out: &mut Rows<f32>,
    ) {
        let pieces = pieces(num_rows);
        // A sum in a fixed order needs the memory that it collects in for itself.
        let is_whole =
            pieces.len() == 1 || self.padded_rows.is_some() || self.gemm.is_deterministic();
        if is_whole || !self.is_one_of_several() {
            self.project_rows(num_rows, x, linear, Output::Store, None, out);
            return self.sum_over_ranks(num_rows, out);
        }
        for Range { start, end } in pieces {
            let (num_rows, to) = (end - start, out.row_address(start));
            // What it is rounded up by falls on rows that come later.
            self.multiply(
                num_rows,
                x.row_address(start),
                &linear.matrix,
                Output::Store,
                to,
            );
            self.add_bias(num_rows, linear, to);
            self.begin_sum(to, num_rows * out.width());
        }
        self.await_sums();
    }
}

/// The rows of each piece.
///
/// ```text
/// rows     0 ........ 2600
/// pieces   0..768, 768..1536, 1536..2304, 2304..2600
/// ```
fn pieces(num_rows: usize) -> Vec<Range<usize>> {
    let piece_rows = num_rows.div_ceil(MAX_PIECES).next_multiple_of(ROUNDING);
    let piece_rows = piece_rows.max(MIN_PIECE_ROWS);
    let starts = (0..num_rows).step_by(piece_rows);
    starts
        .map(|start| start..num_rows.min(start + piece_rows))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_rows_once() {
        for num_rows in (0..10_000).step_by(7).chain([512, 513, 1024, 2048, 8192]) {
            let pieces = pieces(num_rows);
            let mut next = 0;
            for Range { start, end } in &pieces {
                assert!(*start == next && end > start, "{num_rows}: {pieces:?}");
                next = *end;
            }
            assert_eq!(next, num_rows, "{pieces:?}");
            assert!(pieces.len() <= MAX_PIECES, "{num_rows}: {pieces:?}");
        }
    }

    #[test]
    fn few_rows_are_one_piece_and_many_are_four() {
        assert_eq!(pieces(512).len(), 1);
        assert_eq!(pieces(1000), [0..512, 512..1000]);
        assert_eq!(pieces(2600), [0..768, 768..1536, 1536..2304, 2304..2600]);
        assert_eq!(pieces(8192).len(), MAX_PIECES);
    }
}
