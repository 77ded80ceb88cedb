//! The weights of a projection or of a norm: found in a checkpoint, cut for a rank, and packed for a device.

use std::ops::Range;

use super::model_tensors::ModelTensors;
use super::packer::{PackedForm, Packer, Packing};
use super::precision::WeightPrecision;
use super::rank::whole;
use super::share::ModelShare;
use super::spec::{Module, NormKind, NormSpec, Projection};
use super::summed::Summed;
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, Tensor};
use inflight_device::{Device, Linear, Load, Tile};
use inflight_numbers::Stacking;

/// A norm of the residual stream, `[hidden_size]` each.
pub(super) struct NormWeights<D: Load> {
    pub(super) weight: D::Vector,
    pub(super) bias: Option<D::Vector>,
}

/// A norm.
pub(super) struct NormSource<'a> {
    /// Its parts, one after the other.
    pub(super) weight: Vec<Tensor<'a>>,
    /// The number of its weights if the checkpoint has none: all are 1.
    pub(super) num_ones: usize,
    /// What is added to the stored weights.
    pub(super) weight_offset: f32,
    /// The factor of the sum.
    pub(super) scale: f32,
    pub(super) bias: Option<Tensor<'a>>,
}

/// A projection to the residual stream.
pub(super) type SummedLinear<D> = Summed<D, Tile<D>>;

/// The linear layers that are packed into one projection.
pub(super) struct ProjectionSource<'a> {
    pub(super) matrices: Vec<Matrix<'a>>,
    /// None, or one for each matrix.
    pub(super) biases: Vec<Tensor<'a>>,
    pub(super) packing: Packing,
    /// Its place in the weights of adapters, and the first place of its tiles.
    pub(super) place: Option<usize>,
    /// The inputs whose products are summed by themselves, counted from the first one of this rank. Empty: all at once.
    pub(super) tiles: Vec<Range<usize>>,
}

impl<'a> NormSource<'a> {
    /// So many weights, which are 1.
    pub(super) fn of_ones(len: usize) -> Self {
        Self {
            weight: Vec::new(),
            num_ones: len,
            weight_offset: 0.0,
            scale: 1.0,
            bias: None,
        }
    }

    /// The weights of an RMS norm, in parts.
    pub(super) fn of_weights(weight: Vec<Tensor<'a>>) -> Self {
        Self {
            weight,
            num_ones: 0,
            weight_offset: 0.0,
            scale: 1.0,
            bias: None,
        }
    }

    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        spec: &NormSpec,
        module: Module,
        len: usize,
    ) -> Result<Self, LoadError> {
        let has_weights = spec.has_weights;
        Ok(Self {
            weight: match has_weights {
                true => vec![tensors.norm(module, len)?],
                false => Vec::new(),
            },
            num_ones: if has_weights { 0 } else { len },
            weight_offset: spec.weight_offset,
            scale: 1.0,
            bias: match spec.kind {
                NormKind::Layer { has_bias: true } => Some(tensors.bias(module, len)?),
                NormKind::Layer { has_bias: false } | NormKind::Rms => None,
            },
        })
    }

    /// Some of its parts, without a bias.
    pub(super) fn parts(self, parts: &[Range<usize>]) -> Self {
        let runs = parts.iter().map(|run| &self.weight[run.clone()]);
        Self {
            weight: runs.flatten().copied().collect(),
            ..self
        }
    }

    /// Some of the elements of its only part, without a bias.
    pub(super) fn elements(self, elements: &[Range<usize>]) -> Self {
        let elements = elements.iter();
        Self {
            weight: elements
                .map(|elements| self.weight[0].elements(elements.clone()))
                .collect(),
            ..self
        }
    }
}

impl NormSource<'_> {
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<NormWeights<D>, LoadError> {
        Ok(NormWeights {
            weight: match self.num_ones {
                0 => packer.upload_norm(&self.weight, self.weight_offset, self.scale)?,
                len => packer.upload_ones(len)?,
            },
            bias: match &self.bias {
                Some(bias) => Some(packer.upload(bias)?),
                None => None,
            },
        })
    }
}

impl<'a> ProjectionSource<'a> {
    /// A projection of one matrix, without a bias, adapters or tiles; `index` as [`Packing::index`].
    pub(super) fn of_matrix(matrix: Matrix<'a>, index: Option<usize>) -> Self {
        Self {
            matrices: vec![matrix],
            biases: Vec::new(),
            packing: Packing {
                stacking: Stacking::Concatenated,
                index,
                is_exact: false,
            },
            place: None,
            tiles: Vec::new(),
        }
    }

    /// This projection, whose weights are never rounded.
    pub(super) fn exactly(mut self) -> Self {
        self.packing.is_exact = true;
        self
    }

    /// The projection of a layer, or of the model if `layer` is `None`.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: Option<usize>,
        projection: &Projection,
    ) -> Result<Self, LoadError> {
        let module_of = |name| Module {
            layer,
            ..Module::of_model(name)
        };
        Self::find_in(tensors, module_of, projection)
    }

    /// The projection whose modules these names stand for.
    pub(super) fn find_in(
        tensors: &ModelTensors<'a>,
        module_of: impl Fn(&'static str) -> Module,
        projection: &Projection,
    ) -> Result<Self, LoadError> {
        let mut source = Self {
            matrices: Vec::new(),
            biases: Vec::new(),
            packing: Packing {
                stacking: projection.stacking,
                index: None,
                is_exact: false,
            },
            place: None,
            tiles: Vec::new(),
        };
        for part in &projection.parts {
            let module = module_of(part.module);
            let num_outputs = part.num_module_outputs();
            let matrix = tensors.linear(module, part, projection.num_inputs)?;
            source.matrices.push(matrix);
            if projection.has_bias {
                let bias = tensors.bias(module, num_outputs)?;
                source.biases.push(match part.selected_rows() {
                    Some(rows) => bias.select(rows),
                    None => bias,
                });
            }
        }
        Ok(source)
    }

    /// Some outputs of each of its linear layers, in the order that they are read in.
    pub(super) fn outputs(&self, outputs: &[Vec<Range<usize>>]) -> Self {
        debug_assert_eq!(outputs.len(), self.matrices.len());
        let mut matrices = Vec::new();
        let mut biases = Vec::new();
        for (index, outputs) in outputs.iter().enumerate() {
            let matrix = &self.matrices[index];
            for rows in outputs {
                matrices.push(matrix.part(rows.clone(), 0..matrix.columns()));
                let bias = self.biases.get(index);
                biases.extend(bias.map(|bias| bias.elements(rows.clone())));
            }
        }
        Self {
            matrices,
            biases,
            packing: self.packing,
            place: self.place,
            tiles: Vec::new(),
        }
    }

    /// The same in the weights of adapters of a rank.
    pub(super) fn placed(self, share: &ModelShare) -> Self {
        Self {
            place: self.place.map(|place| share.place(place)),
            ..self
        }
    }

    /// The same outputs of each of its linear layers.
    pub(super) fn same_outputs(&self, outputs: Range<usize>) -> Self {
        self.outputs(&vec![vec![outputs]; self.matrices.len()])
    }

    /// Some inputs of its linear layers, in tiles. One rank has the biases.
    pub(super) fn inputs(&self, tiles: &[Range<usize>], share: &ModelShare) -> Self {
        let inputs = whole(tiles);
        let first = inputs.start;
        let tiles = tiles.iter();
        Self {
            tiles: tiles
                .map(|tile| tile.start - first..tile.end - first)
                .collect(),
            ..self.some_inputs(inputs, share.has_biases_of_sums())
        }
    }

    /// Some inputs of its linear layers, with their biases or without.
    pub(super) fn some_inputs(&self, inputs: Range<usize>, has_bias: bool) -> Self {
        Self {
            matrices: columns(&self.matrices, &inputs),
            biases: match has_bias {
                true => self.biases.clone(),
                false => Vec::new(),
            },
            packing: self.packing,
            place: self.place,
            tiles: Vec::new(),
        }
    }

    pub(super) fn form(&self, precision: Option<WeightPrecision>, has_fp8: bool) -> PackedForm<'_> {
        PackedForm::of_projection(&self.matrices, self.packing, precision, has_fp8)
    }
}

impl ProjectionSource<'_> {
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<Linear<D>, LoadError> {
        Ok(Linear {
            bias: match self.biases.is_empty() {
                true => None,
                false => Some(packer.upload_bias(&self.biases)?),
            },
            matrix: packer.pack(&self.matrices, self.packing)?,
            place: self.place,
        })
    }

    /// The same projection of all experts, or heads, of a layer, as one matrix.
    pub(super) fn load_stacked<D: Device>(
        of_experts: Vec<Self>,
        stacks: D::Stacks,
        packer: &mut Packer<'_, D>,
    ) -> Result<Linear<D>, LoadError> {
        let packing = of_experts[0].packing;
        let (matrices, biases): (Vec<_>, Vec<_>) = of_experts
            .into_iter()
            .map(|source| (source.matrices, source.biases))
            .unzip();
        let matrices: Vec<_> = matrices.into_iter().flatten().collect();
        let biases: Vec<_> = biases.into_iter().flatten().collect();
        Ok(Linear {
            bias: match biases.is_empty() {
                true => None,
                false => Some(packer.upload_bias(&biases)?),
            },
            matrix: packer.pack_stacked(stacks, &matrices, packing)?,
            place: None,
        })
    }

    /// A projection to the residual stream.
    pub(super) fn load_summed<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<SummedLinear<D>, LoadError> {
        if self.tiles.is_empty() {
            let inputs = 0..self.matrices[0].columns();
            let linear = self.load(packer)?;
            return Ok(Summed::Whole(Tile { inputs, linear }));
        }
        let last = self.tiles.iter().rposition(|tile| !tile.is_empty());
        let tiles = self.tiles.iter().enumerate().map(|(index, inputs)| {
            if inputs.is_empty() {
                return Ok(None);
            }
            let parts = columns(&self.matrices, inputs);
            Ok(Some(Tile {
                inputs: inputs.clone(),
                linear: Linear {
                    bias: match self.biases.is_empty() || last != Some(index) {
                        true => None,
                        false => Some(packer.upload_bias(&self.biases)?),
                    },
                    matrix: packer.pack(&parts, self.packing)?,
                    place: self.place.map(|place| place + index),
                },
            }))
        });
        Summed::of_tiles(tiles.collect::<Result<_, LoadError>>()?)
    }
}

/// These columns of matrices.
fn columns<'a>(matrices: &[Matrix<'a>], columns: &Range<usize>) -> Vec<Matrix<'a>> {
    let parts = matrices.iter();
    parts
        .map(|matrix| matrix.part(0..matrix.rows(), columns.clone()))
        .collect()
}

/// The projections of all tiles.
pub(super) fn linears_of<D: Device>(summed: &SummedLinear<D>) -> impl Iterator<Item = &Linear<D>> {
    summed.parts().map(|tile| &tile.linear)
}
