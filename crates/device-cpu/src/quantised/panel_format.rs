//! The formats of quantised weights that kernels of CPUs multiply with.

use super::super::panel_order::PANEL;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat};

/// The codes of panels, which are unsigned: [`CodeBits`] plus a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PanelBits {
    /// Two codes in a byte.
    Four,
    /// One code in a byte.
    Eight,
}

/// How panels are quantised, as in [`QuantFormat`].
#[derive(Clone, Copy)]
pub(super) struct PanelFormat {
    pub(super) bits: PanelBits,
    pub(super) group_size: usize,
    pub(super) has_offsets: bool,
}

impl PanelBits {
    /// # Errors
    ///
    /// Codes are floats of 8 bits.
    fn of(bits: CodeBits) -> Result<Self, LoadError> {
        match bits {
            CodeBits::Four => Ok(Self::Four),
            CodeBits::Eight => Ok(Self::Eight),
            CodeBits::Fp8 => Err(LoadError::Resource(
                "the CPU does not multiply with weights of FP8: round them to bf16".to_owned(),
            )),
        }
    }

    /// Bytes of the codes of a panel for `k` inputs, which are whole blocks.
    pub(super) const fn code_bytes(self, k: usize) -> usize {
        match self {
            Self::Four => k * PANEL / 2,
            Self::Eight => k * PANEL,
        }
    }

    /// Added to a signed code, gives the one in a panel.
    pub(super) const fn bias(self) -> i32 {
        match self {
            Self::Four => 8,
            Self::Eight => 128,
        }
    }

    /// A byte of codes that stand for 0.
    pub(super) const fn zeros(self) -> u8 {
        match self {
            Self::Four => 0x88,
            Self::Eight => 0x80,
        }
    }
}

impl PanelFormat {
    /// As `format`, with groups of `group_size`.
    ///
    /// # Errors
    ///
    /// The CPU does not multiply with such codes.
    pub(super) fn new(format: QuantFormat, group_size: usize) -> Result<Self, LoadError> {
        Ok(Self {
            bits: PanelBits::of(format.bits)?,
            group_size,
            has_offsets: format.has_offsets,
        })
    }

    /// Groups of a row of `k` inputs.
    pub(super) const fn num_groups(self, k: usize) -> usize {
        k.div_ceil(self.group_size)
    }

    /// The number of scales and offsets of a group in a panel.
    pub(super) const fn group_len(self) -> usize {
        if self.has_offsets { 2 * PANEL } else { PANEL }
    }
}
