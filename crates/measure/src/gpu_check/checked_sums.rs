//! Numbers whose sums over GPUs are known, in any order, and whether the GPUs' sums are these.
//!
//! ```text
//! embed       rows of small whole numbers, others on each GPU
//! all_reduce  sums of at most 240
//! norm        the same as bf16, exactly: the mean square is nothing beside eps, and the weight undoes the scale
//! logits      the same in the host's memory: a product with the identity
//! ```

use half::bf16;
use inflight_base::TokenId;
use inflight_device::{
    EmbeddingTable, HeadShape, Linear, Load, LogitsTransform, Norm, Ops, RankHost, RankOps, StepIo,
};
use inflight_device_cuda::{Cuda, CudaRanks};
use inflight_numbers::{Dtype, RawMatrix, Stacking};

use super::one_step::OneStep;
use crate::Result;

/// Rows that differ.
const NUM_TOKENS: usize = 13;
/// The largest number. bf16 has all whole numbers up to 256: the sums of 16 ranks.
const MAX_NUMBER: usize = 15;
/// The norm divides by the root of this, and the weight multiplies by it.
const EPS: f32 = (1_u64 << 40) as f32;
const EPS_ROOT: f32 = (1 << 20) as f32;
/// Rows in the host's memory at a time.
const READ_ROWS: usize = 256;

/// What one of several GPUs needs for it.
pub struct CheckedSums {
    num_ranks: usize,
    width: usize,
    cache: <Cuda as Load>::KvCache,
    table: <Cuda as Load>::Embedding,
    weight: <Cuda as Load>::Vector,
    identity: Linear<Cuda>,
    states: <Cuda as Load>::Inputs,
}

impl CheckedSums {
    /// Reserves it for up to so many rows, on a device that has joined its ranks and reserved its logits.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(
        device: &mut Cuda,
        (rank, num_ranks): (usize, usize),
        max_rows: usize,
        width: usize,
    ) -> Result<Self> {
        let heads = HeadShape {
            num_q_heads: 1,
            num_kv_heads: 1,
            head_dim: 64,
            value_dim: 64,
        };
        let tokens =
            (0..NUM_TOKENS).flat_map(|token| (0..width).map(move |column| (token, column)));
        let numbers = tokens.map(|(token, column)| number(rank, token, column) as f32);
        let numbers = numbers.map(bf16::from_f32).collect();
        let mut ones = vec![bf16::ZERO; width * width];
        ones.iter_mut()
            .step_by(width + 1)
            .for_each(|one| *one = bf16::ONE);
        let ones: Vec<u8> = ones.into_iter().flat_map(bf16::to_le_bytes).collect();
        let ones = RawMatrix::new(Dtype::Bf16, width, width, &ones);
        let matrix = device.pack(&[ones], Stacking::Concatenated)?;
        Ok(Self {
            num_ranks,
            width,
            identity: Linear {
                matrix: matrix.map_err(|_| "the identity is finite")?,
                bias: None,
                place: None,
            },
            cache: OneStep::prompt(max_rows).cache(device, heads)?,
            table: device.upload_embedding(numbers, width)?,
            weight: device.upload_vector(vec![EPS_ROOT; width])?,
            states: device.alloc_inputs(max_rows, width)?,
        })
    }

    /// Sums rows over all GPUs, which do the same at the same time. Says which sum is wrong, if one is.
    ///
    /// # Errors
    /// An operation has failed.
    pub fn check(
        &mut self,
        device: &mut Cuda,
        (ranks, host): (CudaRanks, &mut RankHost),
        num_rows: usize,
        rows: &mut <Cuda as Load>::Sums,
    ) -> Result<Option<String>> {
        let mut step = OneStep::prompt(num_rows);
        let tokens = (0..num_rows).map(|row| (row % NUM_TOKENS) as TokenId);
        step.token_ids = tokens.collect();
        host.begin_step(&step.inputs());
        let begun = device.begin_step(&self.cache, step.inputs());
        device.embed(&begun, EmbeddingTable::Own(&self.table), 1.0, rows);
        ranks.all_reduce(device, host, num_rows, rows);
        let norm = Norm::Rms {
            weight: &self.weight,
            eps: EPS,
        };
        device.norm(num_rows, rows, norm, &mut self.states);
        ranks.wait(device, host)?;
        let mut wrong = None;
        for first in (0..num_rows).step_by(READ_ROWS) {
            let part = first..num_rows.min(first + READ_ROWS);
            let mut sums = vec![0.0; part.len() * self.width];
            let unchanged = LogitsTransform::IDENTITY;
            let states = &self.states;
            device.context_logits(states, part, &self.identity, unchanged, None, &mut sums);
            wrong = wrong.or_else(|| self.first_wrong(first, &sums));
        }
        device.end_step(begun);
        Ok(wrong)
    }

    /// Which is wrong of the sums of rows from `first` on.
    fn first_wrong(&self, first: usize, sums: &[f32]) -> Option<String> {
        let of_tokens: Vec<Vec<f32>> = (0..NUM_TOKENS)
            .map(|token| {
                let columns = 0..self.width;
                let numbers =
                    |column| (0..self.num_ranks).map(move |rank| number(rank, token, column));
                columns
                    .map(|column| numbers(column).sum::<usize>() as f32)
                    .collect()
            })
            .collect();
        let rows = sums.chunks_exact(self.width).zip(first..);
        let mut wrong = rows.flat_map(|(sums, row)| {
            let expected = &of_tokens[row % NUM_TOKENS];
            let pairs = sums.iter().zip(expected).enumerate();
            let differs = pairs.filter(|(_, (sum, expected))| sum != expected);
            differs.map(move |(column, (sum, expected))| {
                format!("column {column} of row {row} is {sum}, and the sum is {expected}")
            })
        });
        wrong.next()
    }
}

/// What a GPU adds to an element of a row with this token: 1 to [`MAX_NUMBER`].
fn number(rank: usize, token: usize, column: usize) -> usize {
    1 + (rank + 1) * (31 * token + 7 * column + 1) % MAX_NUMBER
}
