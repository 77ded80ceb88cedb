//! The one pass that every request needs: the largest logit, its token, and whether all logits are valid.

use crate::SampleError;
use inflight_base::TokenId;

/// Logits per block. Later passes skip blocks by their peaks.
pub(super) const BLOCK: usize = 64;

const LANES: usize = 8;

/// The largest logit of each block and of all.
pub(super) struct Peaks {
    /// `[ceil(vocab_size / BLOCK)]`
    blocks: Vec<f32>,
    max: f32,
}

impl Peaks {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            blocks: vec![f32::NEG_INFINITY; vocab_size.div_ceil(BLOCK)],
            max: f32::NEG_INFINITY,
        }
    }

    /// Reads each logit once.
    pub(super) fn find(&mut self, logits: &[f32]) -> Result<(), SampleError> {
        self.max = f32::NEG_INFINITY;
        let mut all_numbers = true;
        for (block, peak) in logits.chunks(BLOCK).zip(&mut self.blocks) {
            let (max, numbers) = block_peak(block);
            *peak = max;
            self.max = self.max.max(max);
            all_numbers &= numbers;
        }
        if !all_numbers {
            Err(SampleError::NotFinite)
        } else if self.max == f32::NEG_INFINITY {
            Err(SampleError::NoneAllowed)
        } else {
            Ok(())
        }
    }

    /// The largest logit.
    pub(super) fn max(&self) -> f32 {
        self.max
    }

    /// The largest logit of each block, in order.
    pub(super) fn blocks(&self) -> &[f32] {
        &self.blocks
    }

    /// The most likely token, the lowest id on a tie.
    pub(super) fn argmax(&self, logits: &[f32]) -> TokenId {
        let is_max = |&logit: &f32| logit == self.max;
        let block = self.blocks.iter().position(is_max).unwrap_or(0) * BLOCK;
        let within = logits[block..].iter().position(is_max).unwrap_or(0);
        (block + within) as TokenId
    }
}

/// The largest of `block`, and whether none is NaN or `+inf`.
pub(super) fn block_peak(block: &[f32]) -> (f32, bool) {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut numbers = [true; LANES];
    let mut look = |lane: usize, logit: f32| {
        max[lane] = if logit > max[lane] { logit } else { max[lane] };
        numbers[lane] &= logit < f32::INFINITY;
    };
    let (rows, rest) = block.as_chunks::<LANES>();
    for row in rows {
        for (lane, &logit) in row.iter().enumerate() {
            look(lane, logit);
        }
    }
    for (lane, &logit) in rest.iter().enumerate() {
        look(lane, logit);
    }
    let all_numbers = numbers == [true; LANES];
    (
        max.into_iter().fold(f32::NEG_INFINITY, f32::max),
        all_numbers,
    )
}
