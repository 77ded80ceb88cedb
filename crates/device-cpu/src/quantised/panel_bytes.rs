//! Packed quantised weights as bytes, which can be kept in a file.

use super::super::Cpu;
use super::super::packed_matrix::{Packed, PackedMatrix};
use super::super::panel_order::PanelOrder;
use super::panels::Panels;
use inflight_base::LoadError;
use inflight_device::memory::Buffer;
use inflight_device::{PACKED_PIECE_BYTES, PackedBytes, PackedReader, PackedShape};
use inflight_threads::DisjointSlice;

/// The version of the layout of panels and of the rounding of [`Rounded`](super::Rounded). It must change if either
/// does.
pub const PANELS_VERSION: u32 = 1;

impl PackedMatrix {
    /// The bytes of its panels. `None` for bf16, and for weights with an input order.
    pub fn panel_bytes(&self) -> Option<PackedBytes<'_>> {
        match self.weights() {
            Packed::Quantised(panels) if panels.input_order.is_none() => Some(panels.bytes()),
            _ => None,
        }
    }
}

impl Cpu {
    /// Reads the panels of a quantised matrix. `None` if the number of bytes is wrong.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    ///
    /// # Panics
    ///
    /// If a group is neither a multiple of a block nor a whole row, or parts are interleaved and their heights differ.
    pub fn read_panels(
        &mut self,
        shape: PackedShape<'_>,
        codes: PackedReader<'_>,
        scales: PackedReader<'_>,
    ) -> Result<Option<PackedMatrix>, LoadError> {
        let order = PanelOrder::new(shape.stacking, shape.num_rows.iter().copied());
        let mut panels = Panels::zeroed(
            &mut self.weights,
            order.num_panels(),
            shape.columns,
            shape.format,
        )?;
        let expected = panels.bytes();
        if (expected.codes.len(), expected.scales.len()) != (codes.num_bytes, scales.num_bytes) {
            return Ok(None);
        }
        self.read(codes, &mut panels.codes);
        self.read(scales, &mut panels.scales);
        Ok(Some(PackedMatrix::quantised(order, shape.columns, panels)))
    }

    /// Reads as many bytes as `to` has, on all threads.
    fn read(&mut self, from: PackedReader<'_>, to: &mut Buffer) {
        let shared = DisjointSlice::new(bytemuck::cast_slice_mut::<_, u8>(to.as_mut_slice()));
        let num_pieces = from.num_bytes.div_ceil(PACKED_PIECE_BYTES);
        self.pool
            .for_each(&mut self.workers, num_pieces, |_, index| {
                let start = index * PACKED_PIECE_BYTES;
                let len = PACKED_PIECE_BYTES.min(from.num_bytes - start);
                // SAFETY: each piece belongs to one task.
                (from.read)(start, unsafe { shared.slice(start, len) });
            });
    }
}

#[cfg(test)]
mod tests {
    use twox_hash::XxHash3_64;

    use super::super::Rounded;
    use super::*;
    use crate::{CpuOptions, Simd};
    use inflight_numbers::{CodeBits, QuantFormat, Stacking};

    fn formats() -> [QuantFormat; 2] {
        [(CodeBits::Eight, 128), (CodeBits::Four, 32)].map(|(bits, group_size)| QuantFormat {
            bits,
            group_size,
            has_offsets: false,
        })
    }

    fn cpus() -> impl Iterator<Item = Cpu> {
        Simd::tested().map(|simd| {
            let simd = Some(simd);
            let options = CpuOptions {
                simd,
                ..CpuOptions::default()
            };
            Cpu::new(&options).expect("threads")
        })
    }

    fn shapes() -> impl Iterator<Item = PackedShape<'static>> {
        formats().into_iter().flat_map(|format| {
            [Stacking::Concatenated, Stacking::Interleaved].map(|stacking| PackedShape {
                num_rows: &[70, 70],
                columns: 300,
                stacking,
                format,
            })
        })
    }

    fn packed(cpu: &mut Cpu, shape: PackedShape<'_>) -> PackedMatrix {
        let QuantFormat {
            bits, group_size, ..
        } = shape.format;
        let read = [0, 100].map(|part| {
            move |row: usize, out: &mut [f32]| {
                for (column, out) in out.iter_mut().enumerate() {
                    *out = (((part + row) * 7919 + column * 104_729) % 2003) as f32 / 1000.0 - 1.0;
                }
            }
        });
        let rounded = [&read[0], &read[1]]
            .map(|read| Rounded::new(cpu.simd(), 70, 300, bits, group_size, read));
        let packed = cpu.pack_quantised(&[&rounded[0], &rounded[1]], shape.stacking);
        packed.expect("memory").expect("finite numbers")
    }

    fn copy_panels(
        cpu: &mut Cpu,
        shape: PackedShape<'_>,
        bytes: PackedBytes<'_>,
    ) -> Option<PackedMatrix> {
        let read = |bytes: &[u8], start: usize, out: &mut [u8]| {
            out.copy_from_slice(&bytes[start..][..out.len()]);
        };
        let codes = PackedReader {
            num_bytes: bytes.codes.len(),
            read: &|start, out| read(bytes.codes, start, out),
        };
        let scales = PackedReader {
            num_bytes: bytes.scales.len(),
            read: &|start, out| read(bytes.scales, start, out),
        };
        cpu.read_panels(shape, codes, scales).expect("memory")
    }

    /// If this fails, increase `PANELS_VERSION`: files that were written before must not be read.
    #[test]
    fn panels_are_those_of_their_version_with_every_instruction_set() {
        assert_eq!(PANELS_VERSION, 1);
        for mut cpu in cpus() {
            let sums: Vec<_> = shapes()
                .map(|shape| {
                    let packed = packed(&mut cpu, shape);
                    let PackedBytes { codes, scales } = packed.panel_bytes().expect("quantised");
                    [codes, scales].map(XxHash3_64::oneshot)
                })
                .collect();
            let expected = [
                [5_451_409_829_411_032_619, 17_029_206_946_784_999_432],
                [3_292_939_247_095_791_037, 16_147_646_766_820_279_268],
                [17_839_099_290_243_845_310, 4_250_373_731_043_712_818],
                [13_331_882_031_256_583_066, 10_882_615_687_711_080_529],
            ];
            assert_eq!(sums, expected, "{}", cpu.simd());
        }
    }

    #[test]
    fn a_copy_is_what_it_was_copied_from_and_another_size_is_refused() {
        for mut cpu in cpus() {
            for shape in shapes() {
                let packed = packed(&mut cpu, shape);
                let bytes = packed.panel_bytes().expect("quantised");
                let copy = copy_panels(&mut cpu, shape, bytes).expect("its size");
                assert_eq!(copy.panel_bytes(), Some(bytes));
                assert_eq!((copy.n(), copy.k()), (140, 300));
                assert_eq!(copy.stacking(), shape.stacking);
                let [codes, scales] = [bytes.codes, bytes.scales];
                for (num_rows, columns, codes, scales) in [
                    (&[97, 97], 300, codes, scales),
                    (&[70, 70], 321, codes, scales),
                    (&[70, 70], 300, &codes[1..], scales),
                    (&[70, 70], 300, codes, &scales[2..]),
                ] {
                    let shape = PackedShape {
                        num_rows,
                        columns,
                        ..shape
                    };
                    let bytes = PackedBytes { codes, scales };
                    let copy = copy_panels(&mut cpu, shape, bytes);
                    assert!(copy.is_none(), "{shape:?}");
                }
            }
        }
    }
}
