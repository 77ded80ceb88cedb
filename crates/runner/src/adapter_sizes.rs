//! What adapters of a model take in memory, before there are any.

use super::spec::ModelSpec;
use inflight_device::LowRank;

/// The widths of the linear layers that adapters can change.
#[derive(Clone, Debug)]
pub struct AdapterSizes {
    /// Inputs and outputs of each.
    linears: Vec<(usize, usize)>,
}

impl AdapterSizes {
    /// The sizes of a model's adapters.
    pub fn new(spec: &ModelSpec) -> Self {
        let projections = spec.projections();
        let linears = projections.flat_map(|(_, projection)| {
            let parts = projection.parts.iter();
            parts.map(|part| (projection.num_inputs, part.num_outputs))
        });
        Self {
            linears: linears.collect(),
        }
    }

    /// Bytes of an adapter of this rank in every linear layer.
    pub fn num_bytes(&self, rank: usize) -> u64 {
        self.bytes_of_each(rank).sum()
    }

    /// Bytes of its largest part, that of one linear layer.
    pub fn max_bytes_of_one(&self, rank: usize) -> u64 {
        self.bytes_of_each(rank).max().unwrap_or(0)
    }

    /// Bytes of rank 1 in the narrowest linear layer, without padding.
    pub fn min_row_bytes(&self) -> u64 {
        let widths = self
            .linears
            .iter()
            .map(|(inputs, outputs)| inputs + outputs);
        2 * widths.min().unwrap_or(0) as u64
    }

    fn bytes_of_each(&self, rank: usize) -> impl Iterator<Item = u64> {
        let linears = self.linears.iter();
        linears.map(move |&(inputs, outputs)| LowRank::num_bytes_of(rank, inputs, outputs))
    }
}
