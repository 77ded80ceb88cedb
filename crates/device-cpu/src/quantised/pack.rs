//! Packing quantised weights into panels.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;

use super::super::packed_matrix::PackedMatrix;
use super::super::panel_order::{PANEL, PanelOrder, locate};
use super::super::{Cpu, Worker};
use super::BLOCK;
use super::panel_format::{PanelBits, PanelFormat};
use super::panels::{Panels, UNIT};
use inflight_base::LoadError;
use inflight_numbers::{NotFinite, QuantisedRow, QuantisedRows, Stacking, can_be_packed_together};
use inflight_threads::DisjointSlice;

impl Cpu {
    /// Packs quantised matrices as one, as [`Cpu::pack`] does float matrices.
    ///
    /// # Errors
    ///
    /// The outer error: not enough memory, or codes of FP8. The inner one: a scale or an offset is not finite, or above
    /// 16.
    ///
    /// # Panics
    ///
    /// If there is no part, the parts [cannot be packed together](can_be_packed_together), a group is neither a
    /// multiple of a block nor a whole row, or an input order has invalid inputs.
    pub fn pack_quantised(
        &mut self,
        parts: &[&dyn QuantisedRows],
        stacking: Stacking,
    ) -> Result<Result<PackedMatrix, NotFinite>, LoadError> {
        let first = *parts.first().expect("at least one part");
        assert!(can_be_packed_together(parts), "parts of one kind");
        let (k, format) = (first.columns(), first.format());
        let input_order = first.input_order().map(|order| {
            assert!(order.len() == k && order.iter().all(|&input| (input as usize) < k));
            Box::from(order)
        });
        let order = PanelOrder::new(stacking, parts.iter().map(|part| part.rows()));
        let num_panels = order.num_panels();
        let mut panels = Panels::zeroed(&mut self.weights, num_panels, k, format)?;
        panels.input_order = input_order;
        let format = panels.format;
        let padded_k = panels.num_blocks * BLOCK;
        let code_bytes = format.bits.code_bytes(padded_k);
        let scales_len = format.num_groups(padded_k) * format.group_len();

        let bad_row = AtomicUsize::new(usize::MAX);
        let codes = bytemuck::cast_slice_mut::<_, u8>(panels.codes.as_mut_slice());
        let shared_codes = DisjointSlice::new(codes);
        let shared_scales = DisjointSlice::new(panels.scales.as_mut_slice());
        self.pool
            .for_each(&mut self.workers, num_panels, |worker, index| {
                // SAFETY: each panel belongs to one task.
                let (codes, scales) = unsafe {
                    (
                        shared_codes.slice(index * code_bytes, code_bytes),
                        shared_scales.slice(index * scales_len, scales_len),
                    )
                };
                codes.fill(format.bits.zeros());
                for (lane, row) in order.rows(index).enumerate() {
                    let (part, row_in_part) = locate(parts.iter().map(|part| part.rows()), row);
                    let Worker { quantised_row, .. } = worker;
                    parts[part].read_row(row_in_part, quantised_row);
                    assert_eq!(quantised_row.codes.len(), k, "codes of a row");
                    write_codes(format.bits, &quantised_row.codes, lane, codes);
                    if !write_scales(format, quantised_row, lane, scales) {
                        bad_row.fetch_min(row, Ordering::Relaxed);
                    }
                }
            });
        Ok(match bad_row.into_inner() {
            usize::MAX => Ok(PackedMatrix::quantised(order, k, panels)),
            row => {
                let (part, row) = locate(parts.iter().map(|part| part.rows()), row);
                Err(NotFinite { part, row })
            }
        })
    }
}

/// Writes the codes of a row to its lane of a panel.
fn write_codes(bits: PanelBits, row: &[i8], lane: usize, panel: &mut [u8]) {
    let place = |row_of_panel: usize| (row_of_panel * PANEL + lane) * 4;
    match bits {
        PanelBits::Eight => {
            for (quad, codes) in row.chunks(4).enumerate() {
                for (out, code) in panel[place(quad)..].iter_mut().zip(codes) {
                    *out = code.cast_unsigned() ^ 0x80;
                }
            }
        }
        PanelBits::Four => {
            for (octet, codes) in row.chunks(8).enumerate() {
                let mut quads = [[0; 4]; 2];
                quads.as_flattened_mut()[..codes.len()].copy_from_slice(codes);
                // Adding 8 flips the sign bit.
                let [low, high] = quads.map(|quad| {
                    u32::from_le_bytes(bytemuck::cast(quad)) & 0x0f0f_0f0f ^ 0x0808_0808
                });
                panel[place(octet)..][..4].copy_from_slice(&(low | high << 4).to_le_bytes());
            }
        }
    }
}

/// Writes the scales and offsets of a row, and returns whether all of them are finite.
fn write_scales(format: PanelFormat, row: &QuantisedRow, lane: usize, panel: &mut [u16]) -> bool {
    let mut finite = true;
    for (group, out) in panel.chunks_mut(format.group_len()).enumerate() {
        let scale = row.scales[group];
        let offset = row.offsets.get(group).copied();
        for (part, value) in [Some(scale), offset].into_iter().flatten().enumerate() {
            let value = f16::from_f32(value / UNIT);
            finite &= value.is_finite();
            out[part * PANEL + lane] = value.to_bits();
        }
    }
    finite
}
