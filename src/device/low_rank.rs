//! Adapters: products of two narrow matrices that are added to projections (LoRA, Hu et al., arXiv:2106.09685).
//!
//! ```text
//! out += scale * (x * A^T) * B^T        x [m, k], A [rank, k], B [n, rank]
//!
//! A as packed   panels of 16 ranks:   for each input, the weights of these ranks
//! B as packed   panels of 64 outputs: for each rank, the weights of these outputs
//! ```

use std::ops::Range;
use std::sync::Arc;

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;

use crate::base::LoadError;

/// Ranks of a panel of A.
pub(super) const RANK_PANEL: usize = 16;

/// Outputs of a panel of B.
pub(super) const OUTPUT_PANEL: usize = 64;

/// What an adapter adds to one linear layer, with weights in bf16.
#[derive(Debug)]
pub struct LowRank {
    rank: usize,
    num_inputs: usize,
    /// Among those of the projection that the layer is a part of; of interleaved parts, one after the other.
    outputs: Range<usize>,
    scale: f32,
    a: Vec<bf16>,
    b: Vec<bf16>,
}

/// The weights of an adapter: for each place of a model, what is added there. A place is a projection of a layer.
#[derive(Debug)]
pub struct AdapterWeights {
    places: Vec<Vec<LowRank>>,
}

/// Rows of a step that an adapter is added to.
#[derive(Clone, Debug)]
pub struct AdapterRun {
    /// The adapter.
    pub weights: Arc<AdapterWeights>,
    /// The rows.
    pub rows: Range<u32>,
}

/// What adapters add at one place.
#[derive(Clone, Copy)]
pub struct AdaptedRows<'a> {
    /// The rows, ascending.
    pub runs: &'a [AdapterRun],
    /// The place.
    pub place: usize,
}

impl LowRank {
    /// Weights that are zero.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn new(
        rank: usize,
        num_inputs: usize,
        outputs: Range<usize>,
        scale: f32,
    ) -> Result<Self, LoadError> {
        let alloc = |len| {
            try_zeroed_vec(len).map_err(|()| {
                LoadError::Resource(format!("no memory for {len} bf16 of an adapter"))
            })
        };
        Ok(Self {
            rank,
            num_inputs,
            a: alloc(a_len(rank, num_inputs))?,
            b: alloc(b_len(rank, outputs.len()))?,
            outputs,
            scale,
        })
    }

    /// Bytes of the weights, padding included.
    pub fn num_bytes_of(rank: usize, num_inputs: usize, num_outputs: usize) -> u64 {
        let num_weights = a_len(rank, num_inputs) + b_len(rank, num_outputs);
        (num_weights * size_of::<bf16>()) as u64
    }

    /// Sets a row of A, the weights of one rank.
    ///
    /// # Panics
    ///
    /// If there is no such rank, or there is not one weight for each input.
    pub fn set_rank(&mut self, rank: usize, weights: &[bf16]) {
        assert!(rank < self.rank && weights.len() == self.num_inputs);
        let (panel, lane) = (rank / RANK_PANEL, rank % RANK_PANEL);
        let panel = &mut self.a[panel * self.num_inputs * RANK_PANEL..];
        for (lanes, weight) in panel.chunks_exact_mut(RANK_PANEL).zip(weights) {
            lanes[lane] = *weight;
        }
    }

    /// Sets a row of B, the weights of one output.
    ///
    /// # Panics
    ///
    /// If there is no such output, or there is not one weight for each rank.
    pub fn set_output(&mut self, output: usize, weights: &[bf16]) {
        assert!(output < self.outputs.len() && weights.len() == self.rank);
        let (panel, lane) = (output / OUTPUT_PANEL, output % OUTPUT_PANEL);
        let panel = &mut self.b[panel * self.rank * OUTPUT_PANEL..];
        for (lanes, weight) in panel.chunks_exact_mut(OUTPUT_PANEL).zip(weights) {
            lanes[lane] = *weight;
        }
    }

    /// Rows of A.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Columns of A.
    pub fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    /// The outputs that something is added to.
    pub fn outputs(&self) -> Range<usize> {
        self.outputs.clone()
    }

    /// The factor of the product.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The weight of an input in a rank.
    pub fn a(&self, rank: usize, input: usize) -> bf16 {
        let panel = rank / RANK_PANEL * self.num_inputs;
        self.a[(panel + input) * RANK_PANEL + rank % RANK_PANEL]
    }

    /// The weight of a rank in an output.
    pub fn b(&self, output: usize, rank: usize) -> bf16 {
        let panel = output / OUTPUT_PANEL * self.rank;
        self.b[(panel + rank) * OUTPUT_PANEL + output % OUTPUT_PANEL]
    }

    /// The panels of A, each `[num_inputs, 16]`.
    pub(super) fn rank_panels(&self) -> impl ExactSizeIterator<Item = &[bf16]> {
        self.a.chunks_exact(self.num_inputs * RANK_PANEL)
    }

    /// The panels of B, each `[rank, 64]`.
    pub(super) fn output_panels(&self) -> impl ExactSizeIterator<Item = &[bf16]> {
        self.b.chunks_exact(self.rank * OUTPUT_PANEL)
    }
}

impl AdapterWeights {
    /// An adapter that adds nothing at any of these places.
    pub fn new(num_places: usize) -> Self {
        Self {
            places: (0..num_places).map(|_| Vec::new()).collect(),
        }
    }

    /// Adds weights at a place.
    ///
    /// # Panics
    ///
    /// If there is no such place, or some of these outputs have weights already.
    pub fn push(&mut self, place: usize, weights: LowRank) {
        let is_apart = |other: &LowRank| {
            other.outputs.end <= weights.outputs.start || weights.outputs.end <= other.outputs.start
        };
        assert!(self.places[place].iter().all(is_apart), "outputs overlap");
        self.places[place].push(weights);
    }

    /// What is added at a place.
    pub fn at(&self, place: usize) -> &[LowRank] {
        &self.places[place]
    }
}

impl AdaptedRows<'_> {
    /// Whether no row is in two runs.
    pub(super) fn are_ascending(self) -> bool {
        let is_before = |two: &[AdapterRun]| two[0].rows.end <= two[1].rows.start;
        self.runs.windows(2).all(is_before)
    }
}

fn a_len(rank: usize, num_inputs: usize) -> usize {
    rank.next_multiple_of(RANK_PANEL) * num_inputs
}

fn b_len(rank: usize, num_outputs: usize) -> usize {
    num_outputs.next_multiple_of(OUTPUT_PANEL) * rank
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_found_where_they_were_put() {
        let (rank, num_inputs, num_outputs) = (21, 5, 130);
        let mut weights = LowRank::new(rank, num_inputs, 7..7 + num_outputs, 0.5).expect("memory");
        let number = |row: usize, column: usize| bf16::from_f32((row * 8 + column) as f32 / 4096.0);
        for row in 0..rank {
            let row_of_a: Vec<_> = (0..num_inputs).map(|input| number(row, input)).collect();
            weights.set_rank(row, &row_of_a);
        }
        for output in 0..num_outputs {
            let row_of_b: Vec<_> = (0..rank).map(|rank| number(output, rank)).collect();
            weights.set_output(output, &row_of_b);
        }
        for row in 0..rank {
            for input in 0..num_inputs {
                assert_eq!(weights.a(row, input), number(row, input));
            }
            for output in 0..num_outputs {
                assert_eq!(weights.b(output, row), number(output, row));
            }
        }
        assert_eq!(weights.rank_panels().len(), 2);
        assert_eq!(weights.output_panels().len(), 3);
        let num_bytes = 2 * (weights.a.len() + weights.b.len()) as u64;
        assert_eq!(
            LowRank::num_bytes_of(rank, num_inputs, num_outputs),
            num_bytes
        );
    }
}
