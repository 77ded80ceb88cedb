//! Adapters: products of two narrow matrices that are added to projections (LoRA, Hu et al., arXiv:2106.09685), whose
//! outputs may have factors then (DoRA, Liu et al., arXiv:2402.09353), and biases.
//!
//! ```text
//! out = (x * W^T + scale * (x * A^T) * B^T) * factors + bias        x [m, k], W [n, k], A [rank, k], B [n, rank]
//!
//! A as packed   panels of 16 ranks:   for each input, the weights of these ranks
//! B as packed   panels of 64 outputs: for each rank, the weights of these outputs
//! ```

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::adapter_values::{AdapterValues, gather};
use inflight_base::LoadError;

/// Ranks of a panel of A.
pub const RANK_PANEL: usize = 16;

/// Outputs of a panel of B.
pub const OUTPUT_PANEL: usize = 64;

/// What an adapter adds to one linear layer, with weights in bf16.
#[derive(Debug)]
pub struct LowRank {
    rank: usize,
    num_inputs: usize,
    /// Among those of the projection that the layer is a part of; of interleaved parts, one after the other.
    outputs: Range<usize>,
    scale: f32,
    a: AdapterValues,
    b: AdapterValues,
}

/// The weights of an adapter: for each place of a model, what is changed there. A place is a projection of a layer, the
/// embedding of tokens, or the output layer.
#[derive(Debug)]
pub struct AdapterWeights {
    places: Vec<AdaptedPlace>,
}

/// What an adapter changes at one place.
#[derive(Debug, Default)]
pub struct AdaptedPlace {
    parts: Vec<LowRank>,
    factors: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    replacement: Option<DenseRows>,
}

/// Weights that take the place of those of the model: `[rows, columns]`, of the embedding or of the output layer.
#[derive(Debug)]
pub struct DenseRows {
    columns: usize,
    values: AdapterValues,
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
        Ok(Self {
            rank,
            num_inputs,
            a: AdapterValues::zeroed(a_len(rank, num_inputs))?,
            b: AdapterValues::zeroed(b_len(rank, outputs.len()))?,
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
        let panel = &mut self.a.as_mut_slice()[panel * self.num_inputs * RANK_PANEL..];
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
        let panel = &mut self.b.as_mut_slice()[panel * self.rank * OUTPUT_PANEL..];
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

    /// A as packed.
    pub fn packed_a(&self) -> &[bf16] {
        &self.a
    }

    /// B as packed.
    pub fn packed_b(&self) -> &[bf16] {
        &self.b
    }

    /// A and B as packed, to be set.
    pub fn packed_mut(&mut self) -> [&mut [bf16]; 2] {
        [self.a.as_mut_slice(), self.b.as_mut_slice()]
    }

    /// The panels of A, each `[num_inputs, 16]`.
    pub fn rank_panels(&self) -> impl ExactSizeIterator<Item = &[bf16]> {
        self.a.chunks_exact(self.num_inputs * RANK_PANEL)
    }

    /// The panels of B, each `[rank, 64]`.
    pub fn output_panels(&self) -> impl ExactSizeIterator<Item = &[bf16]> {
        self.b.chunks_exact(self.rank * OUTPUT_PANEL)
    }
}

impl DenseRows {
    /// Weights that are zero.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn new(rows: usize, columns: usize) -> Result<Self, LoadError> {
        let values = AdapterValues::zeroed(rows * columns)?;
        Ok(Self { columns, values })
    }

    /// Bytes of the weights.
    pub fn num_bytes_of(rows: usize, columns: usize) -> u64 {
        (rows * columns * size_of::<bf16>()) as u64
    }

    /// Rows: tokens.
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Weights of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The weights of all tokens.
    pub fn values(&self) -> &[bf16] {
        &self.values
    }

    /// The weights of a token.
    pub fn row(&self, index: usize) -> &[bf16] {
        &self.values[index * self.columns..][..self.columns]
    }

    /// The weights of a token, to be set.
    pub fn row_mut(&mut self, index: usize) -> &mut [bf16] {
        &mut self.values.as_mut_slice()[index * self.columns..][..self.columns]
    }
}

impl AdapterWeights {
    /// An adapter that changes nothing at any of these places.
    pub fn new(num_places: usize) -> Self {
        Self {
            places: (0..num_places).map(|_| AdaptedPlace::default()).collect(),
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
        let parts = &mut self.places[place].parts;
        assert!(parts.iter().all(is_apart), "outputs overlap");
        parts.push(weights);
    }

    /// Sets the factors of some of the outputs of a place, which has `num_outputs`. Others keep theirs, 1 at first.
    ///
    /// # Panics
    ///
    /// If there is no such place, or it has fewer outputs.
    pub fn set_factors(&mut self, place: usize, num_outputs: usize, first: usize, values: &[f32]) {
        let factors = &mut self.places[place].factors;
        let factors = factors.get_or_insert_with(|| vec![1.0; num_outputs]);
        factors[first..][..values.len()].copy_from_slice(values);
    }

    /// Adds to the bias of some of the outputs of a place, which has `num_outputs`.
    ///
    /// # Panics
    ///
    /// As [`AdapterWeights::set_factors`].
    pub fn add_bias(&mut self, place: usize, num_outputs: usize, first: usize, values: &[f32]) {
        let bias = &mut self.places[place].bias;
        let bias = bias.get_or_insert_with(|| vec![0.0; num_outputs]);
        for (bias, value) in bias[first..][..values.len()].iter_mut().zip(values) {
            *bias += value;
        }
    }

    /// Replaces the model's weights at a place: the embedding or the output layer.
    ///
    /// # Panics
    ///
    /// If there is no such place.
    pub fn replace(&mut self, place: usize, rows: DenseRows) {
        self.places[place].replacement = Some(rows);
    }

    /// Moves all weights to one buffer, in the order of places. To be called once they have been set.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn gather(&mut self) -> Result<(), LoadError> {
        let mut values = Vec::new();
        for place in &mut self.places {
            for part in &mut place.parts {
                values.extend([&mut part.a, &mut part.b]);
            }
            values.extend(place.replacement.as_mut().map(|rows| &mut rows.values));
        }
        gather(&mut values)
    }

    /// What is changed at each place.
    pub fn places(&self) -> &[AdaptedPlace] {
        &self.places
    }

    /// What is changed at a place.
    pub fn at(&self, place: usize) -> &AdaptedPlace {
        &self.places[place]
    }
}

impl AdaptedPlace {
    /// Whether the place is as without the adapter.
    pub fn is_unchanged(&self) -> bool {
        let has_vectors = self.factors.is_some() || self.bias.is_some();
        self.parts.is_empty() && !has_vectors && self.replacement.is_none()
    }

    /// The products that are added. Each has outputs of its own.
    pub fn parts(&self) -> &[LowRank] {
        &self.parts
    }

    /// The factors of all outputs, without biases.
    pub fn factors(&self) -> Option<&[f32]> {
        self.factors.as_deref()
    }

    /// What is added to all outputs in the end.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The weights that the place has instead of the model's.
    pub fn replacement(&self) -> Option<&DenseRows> {
        self.replacement.as_ref()
    }
}

impl<'a> AdaptedRows<'a> {
    /// Whether no row is in two runs.
    pub fn are_ascending(self) -> bool {
        let is_before = |two: &[AdapterRun]| two[0].rows.end <= two[1].rows.start;
        self.runs.windows(2).all(is_before)
    }

    /// The runs with something at the place, and what that is.
    pub fn changed(self) -> impl Iterator<Item = (&'a AdapterRun, &'a AdaptedPlace)> {
        let places = self
            .runs
            .iter()
            .map(move |run| (run, run.weights.at(self.place)));
        places.filter(|(_, place)| !place.is_unchanged())
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
        let check = |weights: &LowRank| {
            for row in 0..rank {
                for input in 0..num_inputs {
                    assert_eq!(weights.a(row, input), number(row, input));
                }
                for output in 0..num_outputs {
                    assert_eq!(weights.b(output, row), number(output, row));
                }
            }
        };
        check(&weights);
        assert_eq!(weights.rank_panels().len(), 2);
        assert_eq!(weights.output_panels().len(), 3);
        let num_bytes = 2 * (weights.a.len() + weights.b.len()) as u64;
        assert_eq!(
            LowRank::num_bytes_of(rank, num_inputs, num_outputs),
            num_bytes
        );

        let mut table = DenseRows::new(3, 4).expect("memory");
        for row in 0..3 {
            table.row_mut(row).fill(number(row, 1));
        }
        let mut adapter = AdapterWeights::new(2);
        adapter.push(1, weights);
        adapter.replace(0, table);
        adapter.gather().expect("memory");
        check(&adapter.at(1).parts()[0]);
        let table = adapter.at(0).replacement().expect("a table");
        for row in 0..3 {
            assert_eq!(table.row(row), [number(row, 1); 4]);
        }
        let [end_of_table, start_of_a] = [
            table.values().as_ptr_range().end,
            adapter.at(1).parts()[0].packed_a().as_ptr(),
        ];
        assert_eq!(end_of_table, start_of_a, "one after the other");
    }
}
