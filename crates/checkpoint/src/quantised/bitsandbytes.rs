//! bitsandbytes, as transformers saves it: 4 bits (NF4 and FP4, QLoRA, Dettmers et al., arXiv:2305.14314) and 8 bits
//! (LLM.int8(), arXiv:2208.07339).
//!
//! ```text
//! 4 bits    weight               U8 [outputs inputs / 2, 1]   two codes a byte, the first in the high bits
//!           weight.quant_map     [16]                         what the codes stand for
//!           weight.absmax        [blocks]                     the scale of each `blocksize` codes, row after row: floats, or
//!                                                             U8, codes themselves of
//!           weight.nested_quant_map   [256]
//!           weight.nested_absmax      [nested blocks]         the scale of each `nested_blocksize` of them
//!           weight.quant_state.bitsandbytes__nf4 (or __fp4)   JSON as bytes: the sizes, and `nested_offset`, which is
//!                                                             added to a scale that was a code
//!           weight = map[code] absmax[block]
//!
//! 8 bits    weight               I8 [outputs, inputs]
//!           SCB                  [outputs]                    the largest weight of each output
//!           weight = code SCB / 127
//! ```
//!
//! The levels of 4 bits are no multiples of one step, so they are dequantised, and rounded to what the kernels have.
//! Whether a module is quantised is told by its tensors.

use std::ops::Range;
use std::sync::Arc;

use safetensors::tensor::Dtype as StoredDtype;

use super::module::{Module, refused};
use super::words::Floats;
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::row_order::part_of;
use crate::safetensors::StoredTensor;
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

/// The largest code of 8 bits.
const MAX_CODE: f32 = 127.0;
/// The largest quant_state that is read: it has a few numbers.
const MAX_STATE_BYTES: usize = 1 << 16;
/// Codes that share a scale, at most.
const MAX_BLOCK: usize = 1 << 20;

/// bitsandbytes as `quantization_config` describes it. The tensors say the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitsAndBytes;

impl BitsAndBytes {
    /// `quant_method: bitsandbytes`.
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        match section.string("bnb_4bit_quant_type")? {
            None | Some("nf4" | "fp4") => Ok(Self),
            Some(other) => {
                let value = format_args!("'{other}'");
                Err(refused(
                    section,
                    "bnb_4bit_quant_type",
                    value,
                    "'nf4' or 'fp4'",
                ))
            }
        }
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let Some(weight) = module.tensors.find(&module.tensor("weight"))? else {
            return Ok(None);
        };
        match weight.dtype {
            StoredDtype::U8 => four_bits(module, weight).map(Some),
            StoredDtype::I8 => eight_bits(module, weight).map(Some),
            _ => Ok(None),
        }
    }
}

fn four_bits<'a>(
    module: &Module<'a, '_>,
    weight: StoredTensor<'a>,
) -> Result<Matrix<'a>, LoadError> {
    let &Module {
        outputs, inputs, ..
    } = module;
    let location = weight.location;
    if !inputs.is_multiple_of(2) {
        let reason = format!("has rows of {inputs} codes of 4 bits; an even number is supported");
        return Err(location.error(reason));
    }
    let num_codes = outputs * inputs;
    let weight = weight.of_shape(&[num_codes / 2, 1])?;
    let state = State::read(module, &weight)?;
    let num_blocks = num_codes.div_ceil(state.block);
    let absmax = beside(module, &weight, "weight.absmax", &[num_blocks])?;
    let map = Floats::all(beside(module, &weight, "weight.quant_map", &[16])?)?;
    let scales = match absmax.dtype {
        StoredDtype::U8 => Scales::Codes {
            bytes: absmax.bytes,
            map: Floats::all(beside(module, &weight, "weight.nested_quant_map", &[256])?)?,
            scales: {
                let shape = [num_blocks.div_ceil(state.nested_block)];
                Floats::all(beside(module, &weight, "weight.nested_absmax", &shape)?)?
            },
            block: state.nested_block,
            offset: state.nested_offset,
        },
        StoredDtype::F32 => Scales::Floats(absmax.bytes),
        other => {
            let reason = format!("is of type {other:?}; U8 and F32 are supported");
            return Err(absmax.location.error(reason));
        }
    };
    let codes = weight.bytes;
    let block = state.block;
    let read = move |row: usize, columns: Range<usize>, out: &mut [f32]| {
        let own = row * inputs + columns.start..row * inputs + columns.end;
        let blocks = own.start / block..own.end.div_ceil(block);
        let mut scales_of_row = vec![0.0; blocks.len()];
        scales.read(blocks.start, &mut scales_of_row);
        let first_byte = own.start / 2;
        let mut bytes = vec![0; own.end.div_ceil(2) - first_byte];
        codes.read_at(first_byte, &mut bytes);
        for (index, out) in own.zip(out) {
            let byte = bytes[index / 2 - first_byte];
            let code = if index % 2 == 0 { byte >> 4 } else { byte & 15 };
            let scale = scales_of_row[index / block - blocks.start];
            *out = map[usize::from(code)] * scale;
        }
    };
    Ok(Matrix::Dequantised {
        location,
        rows: outputs,
        columns: inputs,
        read: Arc::new(read),
    })
}

fn eight_bits<'a>(
    module: &Module<'a, '_>,
    weight: StoredTensor<'a>,
) -> Result<Matrix<'a>, LoadError> {
    let &Module {
        outputs, inputs, ..
    } = module;
    let weight = weight.of_shape(&[outputs, inputs])?;
    let scales = Floats::all(beside(module, &weight, "SCB", &[outputs])?)?;
    let rows = EightBitRows {
        codes: weight.bytes,
        scales: scales.into(),
        num_stored_columns: inputs,
        rows: 0..outputs,
        columns: 0..inputs,
    };
    Ok(Matrix::Quantised(weight.location, Box::new(rows)))
}

/// What quant_state says.
struct State {
    block: usize,
    nested_block: usize,
    nested_offset: f32,
}

impl State {
    fn read(module: &Module<'_, '_>, weight: &StoredTensor<'_>) -> Result<Self, LoadError> {
        let names = ["nf4", "fp4"].map(|kind| format!("weight.quant_state.bitsandbytes__{kind}"));
        let Some(stored) = module.find_any(&names.each_ref().map(String::as_str))? else {
            let reason = format!("is of 4 bits, and {} is missing", module.tensor(&names[0]));
            return Err(weight.location.error(reason));
        };
        let fail = |reason: &str| Err(stored.location.error(reason.to_owned()));
        if stored.bytes.len() > MAX_STATE_BYTES {
            return fail("is too long; the file is damaged");
        }
        let json: serde_json::Value = match serde_json::from_slice(&stored.bytes.to_vec()?) {
            Ok(json) => json,
            Err(error) => return fail(&format!("is not JSON: {error}")),
        };
        let size = |key: &str, default: u64| {
            let size = json
                .get(key)
                .map_or(Some(default), serde_json::Value::as_u64);
            let size = size.and_then(|size| usize::try_from(size).ok());
            size.filter(|size| (1..=MAX_BLOCK).contains(size))
        };
        let (Some(block), Some(nested_block)) =
            (size("blocksize", 64), size("nested_blocksize", 256))
        else {
            return fail(
                "has a blocksize that is no number from 1 to 1048576; the file is damaged",
            );
        };
        let offset = json
            .get("nested_offset")
            .map_or(Some(0.0), serde_json::Value::as_f64);
        match offset.filter(|offset| offset.is_finite()) {
            Some(offset) => Ok(Self {
                block,
                nested_block,
                nested_offset: offset as f32,
            }),
            None => fail("has a nested_offset that is not a number; the file is damaged"),
        }
    }
}

/// The scales of blocks of 4-bit codes. They are read row by row: all modules together have many.
enum Scales<'a> {
    Floats(FileRange<'a>),
    Codes {
        bytes: FileRange<'a>,
        map: Vec<f32>,
        scales: Vec<f32>,
        block: usize,
        offset: f32,
    },
}

impl Scales<'_> {
    /// Reads the scales from the block `first` on.
    fn read(&self, first: usize, out: &mut [f32]) {
        match self {
            Self::Floats(bytes) => bytes.read_at(4 * first, bytemuck::cast_slice_mut(out)),
            Self::Codes {
                bytes,
                map,
                scales,
                block,
                offset,
            } => {
                let mut codes = vec![0; out.len()];
                bytes.read_at(first, &mut codes);
                for (index, (out, code)) in out.iter_mut().zip(codes).enumerate() {
                    *out = map[usize::from(code)] * scales[(first + index) / block] + offset;
                }
            }
        }
    }
}

/// Some columns of some rows of a matrix of 8 bits.
struct EightBitRows<'a> {
    codes: FileRange<'a>,
    /// One for each output of the matrix.
    scales: Arc<[f32]>,
    /// Columns of the matrix.
    num_stored_columns: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> StoredQuantisedRows<'a> for EightBitRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        Ok(())
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            codes: self.codes,
            scales: Arc::clone(&self.scales),
            num_stored_columns: self.num_stored_columns,
            rows: part_of(&self.rows, rows),
            columns: part_of(&self.columns, columns),
        })
    }
}

impl QuantisedRows for EightBitRows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Eight,
                group_size: self.num_stored_columns,
                has_offsets: false,
            },
            rows: self.rows.len(),
            columns: self.columns.len(),
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns.len());
        let codes = bytemuck::cast_slice_mut(&mut row.codes);
        let stored = self.rows.start + index;
        let first = stored * self.num_stored_columns + self.columns.start;
        self.codes.read_at(first, codes);
        row.scales[0] = self.scales[stored] / MAX_CODE;
    }
}

/// A tensor beside the weight, of this shape.
fn beside<'a>(
    module: &Module<'a, '_>,
    weight: &StoredTensor<'_>,
    tensor: &str,
    shape: &[usize],
) -> Result<StoredTensor<'a>, LoadError> {
    module.beside(weight, tensor)?.of_shape(shape)
}
