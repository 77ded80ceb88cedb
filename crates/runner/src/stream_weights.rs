//! The weights of several residual streams and of low-rank blocks beside attention, found and packed.

use super::linear_weights::{NormSource, NormWeights, ProjectionSource, SummedLinear};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::spec::{Linear as LinearSpec, ModelSpec, Module, Projection, StreamsSpec};
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, Tensor};
use inflight_device::{Device, Linear};

/// The weights between tokens and the other streams, not yet read.
pub(super) struct StreamsSource<'a> {
    pub(super) inputs: Vec<ProjectionSource<'a>>,
    pub(super) outputs: Vec<ProjectionSource<'a>>,
}

/// The weights of a layer, not yet read.
pub(super) struct LayerStreamsSource<'a> {
    router_norm: Tensor<'a>,
    pub(super) router: ProjectionSource<'a>,
    prediction: Matrix<'a>,
    correction: Matrix<'a>,
    output_scale: Option<Tensor<'a>>,
    pub(super) left: ProjectionSource<'a>,
    pub(super) right: ProjectionSource<'a>,
    laurel_norm: NormSource<'a>,
}

/// The weights between tokens and the other streams.
pub(super) struct StreamsWeights<D: Device> {
    pub(super) inputs: Vec<Linear<D>>,
    pub(super) outputs: Vec<Linear<D>>,
}

/// The weights of a layer.
pub(super) struct LayerStreams<D: Device> {
    pub(super) router_norm: NormWeights<D>,
    pub(super) router: Linear<D>,
    pub(super) prediction: D::Vector,
    pub(super) correction: D::Vector,
    pub(super) output_scale: Option<D::Vector>,
    pub(super) left: Linear<D>,
    pub(super) right: SummedLinear<D>,
    pub(super) laurel_norm: NormWeights<D>,
}

impl<'a> StreamsSource<'a> {
    /// Finds the weights.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        model: &ModelSpec,
        spec: &StreamsSpec,
    ) -> Result<Self, LoadError> {
        let hidden = model.hidden_size;
        let find = |name| {
            let all = (1..spec.num).map(|stream| {
                let module = Module {
                    layer: None,
                    index: Some(stream - 1),
                    name,
                };
                let linear = LinearSpec::whole(name, hidden);
                let num_others = spec.num - 1;
                let matrix = tensors.one_of_linears(module, &linear, hidden, num_others, None)?;
                Ok(ProjectionSource::of_matrix(matrix, None))
            });
            all.collect::<Result<Vec<_>, LoadError>>()
        };
        Ok(Self {
            inputs: find(spec.inputs)?,
            outputs: find(spec.outputs)?,
        })
    }

    /// Reads and packs them, inputs first.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<StreamsWeights<D>, LoadError> {
        let mut load = |sources: &[ProjectionSource<'_>]| {
            let all = sources.iter().map(|source| source.load(packer));
            all.collect::<Result<Vec<_>, _>>()
        };
        Ok(StreamsWeights {
            inputs: load(&self.inputs)?,
            outputs: load(&self.outputs)?,
        })
    }
}

impl<D: Device> StreamsWeights<D> {
    /// In the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        self.inputs.iter().chain(&self.outputs)
    }
}

impl<'a> LayerStreamsSource<'a> {
    /// Finds the weights of a layer.
    ///
    /// # Errors
    /// As [`StreamsSource::find`].
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        model: &ModelSpec,
        spec: &StreamsSpec,
    ) -> Result<Self, LoadError> {
        let hidden = model.hidden_size;
        let norm = |name| {
            let module = Module::of_layer(layer, name);
            NormSource::find(tensors, &model.norm, module, hidden)
        };
        let find =
            |projection: &Projection| ProjectionSource::find(tensors, Some(layer), projection);
        let coefs =
            |name, num_coefs| tensors.matrix(Module::of_layer(layer, name), num_coefs, spec.num);
        Ok(Self {
            router_norm: tensors.norm(Module::of_layer(layer, spec.router_norm), hidden)?,
            router: find(&spec.router)?.exactly(),
            prediction: coefs(spec.prediction, spec.num * spec.num)?,
            correction: coefs(spec.correction, spec.num)?,
            output_scale: match spec.output_scale {
                Some(name) => Some(tensors.parameter(Module::of_layer(layer, name), hidden)?),
                None => None,
            },
            left: find(&spec.left)?,
            right: find(&spec.right)?,
            laurel_norm: norm(spec.laurel_norm)?,
        })
    }

    /// Reads and packs them.
    ///
    /// # Errors
    /// As [`StreamsSource::load`].
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<LayerStreams<D>, LoadError> {
        let hidden = self.router_norm.columns() as f32;
        Ok(LayerStreams {
            router_norm: NormWeights {
                weight: packer.upload_mapped(&self.router_norm, |weight| weight / hidden)?,
                bias: None,
            },
            router: self.router.load(packer)?,
            prediction: packer.upload_transposed(std::slice::from_ref(&self.prediction))?,
            correction: packer.upload_transposed(std::slice::from_ref(&self.correction))?,
            output_scale: match &self.output_scale {
                Some(scale) => Some(packer.upload(scale)?),
                None => None,
            },
            left: self.left.load(packer)?,
            right: self.right.load_summed(packer)?,
            laurel_norm: self.laurel_norm.load(packer)?,
        })
    }
}
