//! The checkpoint of a head.

use std::path::Path;
use std::sync::Arc;

use super::eagle_source::EagleSource;
use super::mtp_source::MtpSource;
use crate::precision::WeightPrecision;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::Checkpoint;

/// A head before its weights are read.
pub struct HeadSource(HeadKind);

/// The kind of a head.
pub(super) enum HeadKind {
    /// An EAGLE-3 head in a folder of its own.
    Eagle(Box<EagleSource>),
    /// A head for multi-token prediction in the checkpoint of the model.
    Mtp(Box<MtpSource>),
}

impl HeadSource {
    /// Opens the checkpoint folder of an EAGLE-3 head for this model.
    ///
    /// # Errors
    /// A file is missing or damaged, or describes no head for such a model, or one that is not supported.
    pub(crate) fn open_eagle(dir: &Path, target: &ModelSpec) -> Result<Self, LoadError> {
        EagleSource::open(dir, target).map(|it| Self(HeadKind::Eagle(Box::new(it))))
    }

    /// Finds the head for multi-token prediction in the checkpoint of a model.
    ///
    /// # Errors
    /// The family is not known to have such heads, or the checkpoint has none.
    pub(crate) fn find_mtp(
        checkpoint: &Arc<Checkpoint>,
        target: &ModelSpec,
    ) -> Result<Self, LoadError> {
        MtpSource::find(checkpoint, target).map(|it| Self(HeadKind::Mtp(Box::new(it))))
    }

    /// Its layer, as a model of one layer.
    pub fn spec(&self) -> &ModelSpec {
        match &self.0 {
            HeadKind::Eagle(eagle) => eagle.spec(),
            HeadKind::Mtp(mtp) => mtp.spec(),
        }
    }

    /// Bytes of its weights: of an EAGLE-3 head in the files; of another one in memory, if float weights are rounded to
    /// `precision`.
    ///
    /// # Errors
    /// They cannot be read, or a tensor is missing, or has the wrong shape or type.
    pub fn num_weight_bytes(&self, precision: Option<WeightPrecision>) -> Result<u64, LoadError> {
        match &self.0 {
            HeadKind::Eagle(eagle) => eagle.num_weight_bytes(),
            HeadKind::Mtp(mtp) => mtp.num_weight_bytes(precision),
        }
    }

    pub(super) fn kind(&self) -> &HeadKind {
        &self.0
    }

    /// Tokens that it guesses.
    pub(super) fn draft_vocab_size(&self) -> usize {
        match &self.0 {
            HeadKind::Eagle(eagle) => eagle.draft_vocab_size(),
            HeadKind::Mtp(mtp) => mtp.spec().vocab_size,
        }
    }
}
