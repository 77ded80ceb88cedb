//! The layer of a head, of either kind.

use super::eagle_layer::EagleLayer;
use super::head_step::{HeadOutputs, HeadStep};
use super::mtp_layer::MtpLayer;
use super::source::{HeadKind, HeadSource};
use crate::limits::RunnerLimits;
use inflight_base::{LoadError, TokenId};
use inflight_device::Device;

/// The layer of a head on a device.
#[expect(clippy::large_enum_variant, reason = "there is one of them")]
pub(super) enum HeadLayer<D: Device> {
    Eagle(EagleLayer<D>),
    Mtp(MtpLayer<D>),
}

impl<D: Device> HeadLayer<D> {
    /// Loads a head for a model with these limits.
    pub(super) fn load(
        source: &HeadSource,
        limits: &RunnerLimits,
        device: &mut D,
        ops: D::States,
    ) -> Result<Self, LoadError> {
        Ok(match source.kind() {
            HeadKind::Eagle(eagle) => Self::Eagle(EagleLayer::load(eagle, limits, device, ops)?),
            HeadKind::Mtp(mtp) => Self::Mtp(MtpLayer::load(mtp, limits, device, ops)?),
        })
    }

    /// Computes a pass.
    pub(super) fn compute(
        &mut self,
        device: &mut D,
        cache: &mut D::KvCache,
        at: HeadStep<'_, '_, D>,
        out: HeadOutputs<'_, D>,
    ) {
        match self {
            Self::Eagle(eagle) => eagle.compute(device, cache, at, out),
            Self::Mtp(mtp) => mtp.compute(device, cache, at, out),
        }
    }

    /// The token of the model for one of its own.
    pub(super) fn token_of(&self, own: u32) -> TokenId {
        match self {
            Self::Eagle(eagle) => eagle.token_of(own),
            Self::Mtp(_) => own,
        }
    }
}
