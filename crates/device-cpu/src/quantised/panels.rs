//! Quantised weights in the layout that the kernels stream.

use super::super::math::nearest_f16;
use super::BLOCK;
use super::panel_format::{PanelBits, PanelFormat};
use inflight_base::LoadError;
use inflight_device::PackedBytes;
use inflight_device::memory::{Arena, Buffer};
use inflight_numbers::QuantFormat;

/// The unit of stored scales and offsets, which are f16: small ones keep their precision. The range is that of f16
/// times the unit, 1.5e-8 to 16 with 11 bits.
pub(super) const UNIT: f32 = 1.0 / 4096.0;

/// A scale or an offset after it was stored.
#[inline(always)]
pub(super) fn stored_number(value: f32) -> f32 {
    nearest_f16(value / UNIT) * UNIT
}

/// Unsigned codes `[n, k]` in panels of 48 outputs, with their scales and offsets:
///
/// ```text
/// 8 bits   | input 0 1 2 3 of output 0 | of output 1 | ... 47 |  inputs 4..8 of all outputs | ...
/// 4 bits   | input 0 1 2 3 of output 0 | of output 1 | ... 47 |  inputs 8..16 of all outputs | ...
///          |   and 4 5 6 7 in the upper halves of the bytes   |
/// scales   | of outputs 0..48 in group 0 | their offsets | in group 1 | ...
/// ```
///
/// A kernel reads both from front to back. Outputs are padded with zeros to whole panels, inputs to whole blocks.
pub(crate) struct Panels {
    pub(super) format: PanelFormat,
    /// Blocks of inputs.
    pub(super) num_blocks: usize,
    pub(super) codes: Buffer,
    pub(super) scales: Buffer,
    /// The input of each column, if it is not the one with the same index.
    pub(super) input_order: Option<Box<[u32]>>,
}

impl Panels {
    /// Zeroed panels of `arena` for rows of `k` inputs.
    ///
    /// # Errors
    ///
    /// If there is not enough memory, or the CPU does not multiply with such codes.
    ///
    /// # Panics
    ///
    /// If a group is neither a multiple of a block nor a whole row.
    pub(super) fn zeroed(
        arena: &mut Arena,
        num_panels: usize,
        k: usize,
        format: QuantFormat,
    ) -> Result<Self, LoadError> {
        let group_size = format.group_size;
        assert!(
            group_size > 0 && (group_size.is_multiple_of(BLOCK) || group_size >= k),
            "groups of {group_size}: whole blocks of {BLOCK}, or whole rows of {k}"
        );
        // A group that ends with the row can end with its last block instead.
        let padded_k = k.next_multiple_of(BLOCK);
        let group_size = if group_size < k { group_size } else { padded_k };
        let format = PanelFormat::new(format, group_size)?;
        let code_bytes = format.bits.code_bytes(padded_k);
        let scales_len = format.num_groups(padded_k) * format.group_len();
        Ok(Self {
            format,
            num_blocks: padded_k / BLOCK,
            codes: arena.zeroed(num_panels * code_bytes / 2)?,
            scales: arena.zeroed(num_panels * scales_len)?,
            input_order: None,
        })
    }

    /// Codes and scales, without the input order.
    pub(super) fn bytes(&self) -> PackedBytes<'_> {
        PackedBytes {
            codes: bytemuck::cast_slice(self.codes.as_slice()),
            scales: bytemuck::cast_slice(self.scales.as_slice()),
        }
    }

    /// What its codes are.
    pub(crate) fn bits(&self) -> PanelBits {
        self.format.bits
    }

    /// Blocks of inputs.
    pub(crate) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The input of each column, if it is not the one with the same index.
    pub(crate) fn input_order(&self) -> Option<&[u32]> {
        self.input_order.as_deref()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        let order = self.input_order.as_ref().map_or(0, |order| order.len());
        2 * (self.codes.len() + self.scales.len() + 2 * order)
    }

    /// The codes of a panel, starting at a block.
    pub(super) fn codes(&self, panel: usize, block: usize) -> *const u8 {
        let bits = self.format.bits;
        let start =
            bits.code_bytes(self.num_blocks * BLOCK) * panel + bits.code_bytes(BLOCK) * block;
        assert!(start <= 2 * self.codes.len());
        self.codes.as_ptr().cast::<u8>().wrapping_add(start)
    }

    /// The scales and offsets of a panel, `[num_groups][48]` or `[num_groups][2][48]`.
    pub(super) fn scales(&self, panel: usize) -> *const u16 {
        let num_groups = self.format.num_groups(self.num_blocks * BLOCK);
        let start = panel * num_groups * self.format.group_len();
        assert!(start <= self.scales.len());
        self.scales.as_ptr().wrapping_add(start)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn numbers_of_16_bits_are_stored_exactly() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits).to_f32();
            if value.abs() < 16.0 {
                assert_eq!(stored_number(value), value);
            }
        }
    }
}
