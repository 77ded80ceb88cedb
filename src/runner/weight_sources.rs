//! All weights of a model in its checkpoint: found, and their shapes checked, before any is packed.
//!
//! So sizes that a config makes up cost no memory, and a bad checkpoint fails at once.

use super::model_tensors::ModelTensors;
use super::packer::PackedForm;
use super::precision::WeightPrecision;
use super::spec::{FeedForward, LayerSpec, ModelSpec, Module, Norms, Projection};
use crate::base::LoadError;
use crate::checkpoint::{Matrix, RowOrder, RowSelection, Tensor};
use crate::device::{QuantisedWidths, Stacking};

/// The weights of a model, not yet read.
pub(super) struct WeightSources<'a> {
    pub(super) embedding: Matrix<'a>,
    pub(super) layers: Vec<LayerSource<'a>>,
    pub(super) final_norm: Tensor<'a>,
    /// `None` if it is the embedding.
    pub(super) output_layer: Option<Matrix<'a>>,
}

/// The weights of a layer.
pub(super) struct LayerSource<'a> {
    pub(super) attention_norm: Tensor<'a>,
    pub(super) qkv: ProjectionSource<'a>,
    /// The norms of query heads and of key heads.
    pub(super) qk_norm: Option<[Tensor<'a>; 2]>,
    pub(super) o: ProjectionSource<'a>,
    pub(super) feed_forward_norm: Tensor<'a>,
    pub(super) gate_up: ProjectionSource<'a>,
    pub(super) down: ProjectionSource<'a>,
}

/// The linear layers that are packed into one projection.
pub(super) struct ProjectionSource<'a> {
    pub(super) matrices: Vec<Matrix<'a>>,
    /// None, or one for each matrix.
    pub(super) biases: Vec<Tensor<'a>>,
    pub(super) stacking: Stacking,
}

impl<'a> WeightSources<'a> {
    /// Finds all weights that the description calls for.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(tensors: &ModelTensors<'a>, spec: &ModelSpec) -> Result<Self, LoadError> {
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let modules = &spec.modules;
        let embedding = tensors.matrix(Module::of_model(modules.embedding), vocab, hidden)?;
        let output_layer = match spec.tied_embeddings {
            true => None,
            false => {
                let module = Module::of_model(modules.output_layer);
                Some(tensors.matrix(module, vocab, hidden)?)
            }
        };
        let layers = spec.layers.iter().enumerate();
        Ok(Self {
            embedding,
            layers: layers
                .map(|(index, layer)| LayerSource::find(tensors, spec, index, layer))
                .collect::<Result<_, _>>()?,
            final_norm: tensors.norm(Module::of_model(modules.final_norm), hidden)?,
            output_layer,
        })
    }

    /// The matrix of the output layer.
    pub(super) fn output_matrix(&self) -> &Matrix<'a> {
        self.output_layer.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of all weights once they are packed, without padding, if float weights are rounded to `precision`, on a
    /// device that multiplies with FP8 weights or not.
    pub(super) fn num_bytes(&self, precision: Option<WeightPrecision>, has_fp8: bool) -> u64 {
        let output_matrix = std::slice::from_ref(self.output_matrix());
        let output_form = PackedForm::of_output_layer(output_matrix, precision, has_fp8);
        let embedding_bytes = match (&output_form, &self.output_layer) {
            (PackedForm::Float(_), None) => 0,
            _ => 2 * (self.embedding.rows() * self.embedding.columns()) as u64,
        };
        let projections = self.layers.iter().flat_map(LayerSource::projections);
        let projection_bytes = projections.map(|projection| {
            let matrices = &projection.matrices;
            PackedForm::of(matrices, precision, has_fp8).num_bytes(matrices)
        });
        embedding_bytes + output_form.num_bytes(output_matrix) + projection_bytes.sum::<u64>()
    }

    /// The widths of the matrices that are quantised once they are packed.
    pub(super) fn quantised_widths(
        &self,
        precision: Option<WeightPrecision>,
        has_fp8: bool,
    ) -> QuantisedWidths {
        let mut widths = QuantisedWidths::default();
        let projections = self.layers.iter().flat_map(LayerSource::projections);
        for projection in projections {
            let matrices = &projection.matrices;
            PackedForm::of(matrices, precision, has_fp8).add_to(&mut widths, matrices);
        }
        let output_matrix = std::slice::from_ref(self.output_matrix());
        PackedForm::of_output_layer(output_matrix, precision, has_fp8)
            .add_to(&mut widths, output_matrix);
        widths
    }
}

impl<'a> LayerSource<'a> {
    fn find(
        tensors: &ModelTensors<'a>,
        spec: &ModelSpec,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<Self, LoadError> {
        let hidden = spec.hidden_size;
        let norm = |name, len| tensors.norm(Module::of_layer(index, name), len);
        let find = |projection| ProjectionSource::find(tensors, index, projection);
        let LayerSpec {
            norms,
            attention,
            feed_forward,
        } = layer;
        let Norms::Pre {
            attention: attention_norm,
            feed_forward: feed_forward_norm,
        } = *norms;
        let FeedForward::Gated { gate_up, down, .. } = feed_forward;
        Ok(Self {
            attention_norm: norm(attention_norm, hidden)?,
            qkv: find(&attention.qkv)?,
            qk_norm: match attention.qk_norm {
                Some(names) => {
                    let [q, k] = [norm(names.q, spec.head_dim)?, norm(names.k, spec.head_dim)?];
                    let order = attention.qkv.parts[0].row_order;
                    Some([q, k].map(|norm| in_order_of_head(norm, spec.head_dim, order)))
                }
                None => None,
            },
            o: find(&attention.o)?,
            feed_forward_norm: norm(feed_forward_norm, hidden)?,
            gate_up: find(gate_up)?,
            down: find(down)?,
        })
    }

    fn projections(&self) -> [&ProjectionSource<'a>; 4] {
        [&self.qkv, &self.o, &self.gate_up, &self.down]
    }
}

impl<'a> ProjectionSource<'a> {
    fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        projection: &Projection,
    ) -> Result<Self, LoadError> {
        let mut source = Self {
            matrices: Vec::new(),
            biases: Vec::new(),
            stacking: projection.stacking,
        };
        for part in &projection.parts {
            let module = Module::of_layer(layer, part.module);
            let num_outputs = part.num_module_outputs();
            let rows = part.selected_rows();
            let matrix = tensors.matrix(module, num_outputs, projection.num_inputs)?;
            source.matrices.push(match rows {
                Some(rows) => matrix.select(rows),
                None => matrix,
            });
            if projection.has_bias {
                let bias = tensors.bias(module, num_outputs)?;
                source.biases.push(match rows {
                    Some(rows) => bias.select(rows),
                    None => bias,
                });
            }
        }
        Ok(source)
    }
}

/// The norm of heads, `[head_dim]`, in the order in which their rows are read.
fn in_order_of_head(norm: Tensor<'_>, head_dim: usize, order: RowOrder) -> Tensor<'_> {
    match order {
        RowOrder::Same => norm,
        RowOrder::Heads { .. } => norm.select(RowSelection {
            first: 0,
            len: head_dim,
            order,
        }),
    }
}
