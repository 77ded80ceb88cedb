//! A head for multi-token prediction in the checkpoint of its model.

use std::sync::Arc;

use crate::families;
use crate::linear_weights::{NormSource, ProjectionSource};
use crate::model_tensors::ModelTensors;
use crate::precision::WeightPrecision;
use crate::spec::{ModelSpec, Module, MtpSpec};
use crate::weight_sources::LayerSource;
use inflight_base::LoadError;
use inflight_checkpoint::{Checkpoint, Matrix};
use inflight_device::Load;
use inflight_device_cpu::Cpu;

/// A head before its weights are read.
pub(super) struct MtpSource {
    checkpoint: Arc<Checkpoint>,
    spec: MtpSpec,
    /// Whose modules tell what names in the checkpoint begin with.
    model: ModelSpec,
}

/// The weights of a head, not yet read.
pub(super) struct MtpWeightSources<'a> {
    pub(super) layer: LayerSource<'a>,
    /// The norms of embeddings and of states.
    pub(super) input_norms: [NormSource<'a>; 2],
    /// The columns of the projection for each of the two, `[hidden_size, hidden_size]`.
    pub(super) projections: [ProjectionSource<'a>; 2],
    pub(super) final_norm: NormSource<'a>,
    /// `None`: it has the model's.
    pub(super) embedding: Option<Matrix<'a>>,
    /// `None`: it has the model's.
    pub(super) output_layer: Option<Matrix<'a>>,
}

impl MtpSource {
    /// Finds the head of a model.
    ///
    /// # Errors
    /// The family is not known to have heads, or the checkpoint has none.
    pub(super) fn find(checkpoint: &Arc<Checkpoint>, model: &ModelSpec) -> Result<Self, LoadError> {
        let refuse = |reason: String| {
            Err(LoadError::File {
                path: checkpoint.dir().to_owned(),
                reason,
            })
        };
        let (None, Some(config)) = (checkpoint.gguf(), checkpoint.config()) else {
            return refuse(
                "speculation is mtp, and heads for multi-token prediction are not read from GGUF files: serve the \
                 checkpoint of safetensors"
                    .to_owned(),
            );
        };
        let mut source = Self {
            spec: families::describe_mtp(config, model)?,
            checkpoint: Arc::clone(checkpoint),
            model: model.clone(),
        };
        let tensors = source.tensors()?;
        let norm = source.spec.final_norm;
        if !tensors.has_weight(norm) {
            return refuse(format!(
                "speculation is mtp, and there is no {}.weight: the checkpoint has no head for multi-token prediction, \
                 which conversions often leave out; serve the original checkpoint, or set speculation to eagle3, \
                 draft_model or prompt_lookup",
                tensors.stored_name(norm)
            ));
        }
        // Most are copies of the model's.
        let modules = &model.modules;
        let output_layer = match model.tied_embeddings {
            true => modules.embedding,
            false => modules.output_layer,
        };
        let is_own = |own: Option<Module>, shared: &'static str| {
            let name = |module| format!("{}.weight", tensors.stored_name(module));
            let Some(own) = own.filter(|&own| tensors.has_weight(own)) else {
                return Ok(None);
            };
            let is_copy = checkpoint.are_equal(&name(Module::of_model(shared)), &name(own))?;
            Ok::<_, LoadError>((!is_copy).then_some(own))
        };
        let embedding = is_own(source.spec.embedding, modules.embedding)?;
        let output_layer = is_own(source.spec.output_layer, output_layer)?;
        (source.spec.embedding, source.spec.output_layer) = (embedding, output_layer);
        Ok(source)
    }

    /// Its layer, as a model of one layer.
    pub(super) fn spec(&self) -> &ModelSpec {
        &self.spec.layer
    }

    /// Bytes of its weights in memory, without padding, if float weights are rounded to `precision`.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub(super) fn num_weight_bytes(
        &self,
        precision: Option<WeightPrecision>,
    ) -> Result<u64, LoadError> {
        let sources = self.weights(&self.tensors()?)?;
        let inputs = sources.projections.iter();
        let inputs = inputs.map(|it| {
            let form = it.form(precision, Cpu::HAS_FP8);
            form.num_bytes::<Cpu>(&it.matrices)
        });
        let rows = [&sources.embedding, &sources.output_layer];
        let rows = rows.into_iter().flatten();
        let rows = rows.map(|it| 2 * (it.rows() * it.columns()) as u64);
        Ok(sources.layer.num_bytes::<Cpu>(precision) + inputs.chain(rows).sum::<u64>())
    }

    /// The weights by name.
    pub(super) fn tensors(&self) -> Result<ModelTensors<'_>, LoadError> {
        let store = self.checkpoint.store()?;
        Ok(ModelTensors::of_head(&self.spec.layer, &self.model, store))
    }

    /// Its weights.
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape or type.
    pub(super) fn weights<'a>(
        &'a self,
        tensors: &ModelTensors<'a>,
    ) -> Result<MtpWeightSources<'a>, LoadError> {
        let spec = &self.spec.layer;
        let (vocab, width) = (spec.vocab_size, spec.hidden_size);
        let norm = |module| NormSource::find(tensors, &spec.norm, module, width);
        let rows = |module: Option<Module>| {
            let rows = module.map(|module| tensors.matrix(module, vocab, width));
            rows.transpose()
        };
        let projection = tensors.matrix(self.spec.projection, width, 2 * width)?;
        let columns = |first: usize| {
            let part = projection.part(0..width, first..first + width);
            ProjectionSource::of_matrix(part, None)
        };
        if !width.is_multiple_of(projection.columns_of_group()) {
            return Err(LoadError::File {
                path: self.checkpoint.dir().to_owned(),
                reason: format!(
                    "{} is quantised in groups of {}, which do not divide hidden_size {width}: speculation cannot be \
                     mtp, but eagle3, draft_model or prompt_lookup",
                    tensors.stored_name(self.spec.projection),
                    projection.columns_of_group()
                ),
            });
        }
        Ok(MtpWeightSources {
            layer: LayerSource::find(tensors, spec, 0, &spec.layers[0])?,
            input_norms: [norm(self.spec.embedding_norm)?, norm(self.spec.state_norm)?],
            projections: [columns(0), columns(width)],
            final_norm: norm(self.spec.final_norm)?,
            embedding: rows(self.spec.embedding)?,
            output_layer: rows(self.spec.output_layer)?,
        })
    }
}
