//! The layers of a rank, where the layers of a model are cut into stages.
//!
//! ```text
//! rank 0                     rank 1                                   rank 2
//! embedding | layers 0..4 -> layers 4..8 -> layers 8..11 | output layer
//!     ^                      rows of the residual stream, f32             |
//!     sampling <--------------------- logits -----------------------------/
//! ```
//!
//! What stages exchange is not rounded, and no sum is cut: on any number of stages the results are the same bits.

use std::ops::Range;

use super::rank::Rank;
use super::share::{CutUnits, ModelShare};
use super::spec::{LayerSpec, ModelSpec};
use inflight_base::LoadError;
use inflight_collective::Grid;

/// What a rank has of a model: the layers of its stage, and a share of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelPart {
    pub(super) stage: Stage,
    /// `None`: whole layers.
    pub(super) share: Option<ModelShare>,
}

/// Consecutive layers of a model, and what comes before the first and after the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    pub(super) layers: Range<usize>,
    is_first: bool,
    is_last: bool,
    /// Whether the rank is the first one of the stage.
    is_leading: bool,
}

impl ModelPart {
    /// The part of a rank: a share of the layers of its stage that is cut at these units, or whole ones.
    ///
    /// # Errors
    /// The model cannot be split so.
    pub(super) fn of_rank(
        grid: Grid,
        rank: usize,
        spec: &ModelSpec,
        units: Option<CutUnits>,
    ) -> Result<Self, LoadError> {
        let Grid {
            num_stages,
            ranks_per_stage,
        } = grid;
        let is_leading = rank.is_multiple_of(ranks_per_stage);
        let stage = Stage {
            is_leading,
            ..Stage::new(grid.stage(rank), num_stages, spec)?
        };
        let rank = Rank::new(rank % ranks_per_stage, ranks_per_stage);
        Ok(Self {
            stage,
            share: match units {
                Some(units) => Some(ModelShare::new(rank, spec, units)?),
                None => None,
            },
        })
    }

    /// The sizes of the model that this rank computes, with all layers.
    pub(super) fn local_spec(&self, spec: &ModelSpec) -> ModelSpec {
        match &self.share {
            Some(share) => share.local_spec(spec),
            None => spec.clone(),
        }
    }

    /// The spec of the rank's part of its stage's layers.
    pub(super) fn local_spec_of_stage(&self, spec: &ModelSpec) -> ModelSpec {
        let mut local = self.local_spec(spec);
        local.layers = local.layers.drain(self.stage.layers.clone()).collect();
        local
    }

    /// The tiles of its sums over inputs.
    pub(super) fn num_tiles(&self) -> usize {
        self.share.as_ref().map_or(1, ModelShare::num_tiles)
    }

    /// Whether it is the whole model, uncut.
    pub(super) fn is_whole(&self) -> bool {
        self.share.is_none() && self.stage.is_only()
    }
}

impl Stage {
    /// One of several stages that take about equally long to generate: that is, to read their weights.
    ///
    /// # Errors
    /// The model has fewer layers.
    fn new(index: usize, num_stages: usize, spec: &ModelSpec) -> Result<Self, LoadError> {
        let num_layers = spec.num_layers();
        if num_stages > num_layers {
            return Err(LoadError::Config {
                problem: format!("{num_stages} stages: the model has only {num_layers} layers"),
                remedy: "use fewer stages".to_owned(),
            });
        }
        let weights: Vec<_> = spec.layers.iter().map(LayerSpec::num_weights).collect();
        let starts = cut(&weights, spec.num_output_weights(), num_stages);
        Ok(Self {
            layers: starts[index]..starts[index + 1],
            is_first: index == 0,
            is_last: index + 1 == num_stages,
            is_leading: true,
        })
    }

    /// Whether it begins with the embedding.
    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Whether it ends with the output layer.
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Whether it is the only one.
    pub(super) fn is_only(&self) -> bool {
        self.is_first && self.is_last
    }

    /// Whether the rank sends or receives results for all ranks of the stage: it is the first one.
    pub(super) fn is_leading(&self) -> bool {
        self.is_leading
    }
}

/// The first layer of each stage, and the end: the weights are divided evenly, and a layer goes to the stage that has
/// its middle. The output layer counts as well, but each stage has a layer.
fn cut(layer_weights: &[u64], output_weights: u64, num_stages: usize) -> Vec<usize> {
    let num_layers = layer_weights.len();
    let total = layer_weights.iter().sum::<u64>() + output_weights;
    // Twice the middles.
    let middles: Vec<_> = layer_weights
        .iter()
        .scan(0, |before, weights| {
            let middle = 2 * *before + weights;
            *before += weights;
            Some(u128::from(middle))
        })
        .collect();
    let mut starts = vec![0];
    for stage in 1..num_stages {
        let begin = 2 * u128::from(total) * stage as u128;
        let in_earlier = |middle: &u128| middle * (num_stages as u128) < begin;
        let start = middles.partition_point(in_earlier);
        let first = starts[stage - 1] + 1;
        starts.push(start.clamp(first, num_layers - (num_stages - stage)));
    }
    starts.push(num_layers);
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_about_the_same_weights() {
        assert_eq!(cut(&[7; 12], 25, 2), [0, 8, 12]);
        assert_eq!(cut(&[10; 12], 0, 3), [0, 4, 8, 12]);
        // The middle layer is in the second one: rank 0 samples besides.
        assert_eq!(cut(&[10; 5], 0, 2), [0, 2, 5]);
        assert_eq!(cut(&[30, 1, 1, 1, 1, 1, 1], 0, 2), [0, 1, 7]);
        assert_eq!(cut(&[1], 9, 1), [0, 1]);
    }

    #[test]
    fn each_stage_has_a_layer() {
        for num_layers in 1..=9 {
            for num_stages in 1..=num_layers {
                for (first, output) in [(1, 0), (1000, 0), (1, 1000), (0, 0)] {
                    let mut weights = vec![1; num_layers];
                    weights[0] = first;
                    let starts = cut(&weights, output, num_stages);
                    assert_eq!(starts.len(), num_stages + 1);
                    assert_eq!((starts[0], starts[num_stages]), (0, num_layers));
                    assert!(starts.is_sorted_by(|a, b| a < b), "{starts:?}");
                }
            }
        }
    }
}
