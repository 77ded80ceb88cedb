//! Integer weights of compressed-tensors.
//!
//! ```text
//! int-quantized    weight             I8  [outputs, inputs]
//! pack-quantized   weight_packed      I32 [outputs, inputs / codes per word]    codes plus 8 or 128
//!
//! both             weight_scale       [outputs, groups], [outputs, 1], or one for all
//!                  weight_zero_point  if weights are asymmetric: I8, of the shape of the scales, or I32
//!                                     [outputs / codes per word, groups], zeros plus 8 or 128
//!                  weight_g_idx       I32 [inputs], the group of each input, or -1; with `actorder: group`
//! weight = scale * (code - zero)
//! ```
//!
//! With `actorder: weight` or `static`, the inputs of a group are neighbours.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::joined_groups::matrix_of_codes;
use super::module::Module;
use super::words::{Floats, Words, act_order, code_at, codes_per_word};
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::LazyBytes;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

/// How integers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegerScheme {
    pub bits: CodeBits,
    /// Inputs of a group, if the config has a size.
    pub group_size: Option<usize>,
    /// Whether there are no zero points.
    pub is_symmetric: bool,
    /// Whether the inputs of a group may be anywhere.
    pub has_order: bool,
}

impl IntegerScheme {
    /// Scales of a row (0 if all rows share one) and inputs of a group, if scales can have this shape.
    fn groups(&self, shape: &[usize], outputs: usize, inputs: usize) -> Option<(usize, usize)> {
        let has_groups = self.group_size.is_some_and(|size| size < inputs);
        match *shape {
            [] | [1] | [_] | [_, 1] if has_groups => None,
            [] | [1] => Some((0, inputs)),
            [rows] | [rows, 1] if rows == outputs => Some((1, inputs)),
            [rows, num_groups] if rows == outputs && num_groups > 0 => match self.group_size {
                Some(size) => (inputs.div_ceil(size) == num_groups).then_some((num_groups, size)),
                None => inputs
                    .is_multiple_of(8 * num_groups)
                    .then_some((num_groups, inputs / num_groups)),
            },
            _ => None,
        }
    }

    fn num_words(&self, num_codes: usize) -> usize {
        num_codes.div_ceil(codes_per_word(self.bits))
    }
}

/// The weights of a module in the first of these schemes that their tensors fit into; `None` if there is no scheme.
///
/// # Errors
/// A tensor is missing, or does not have the shape or type of the scheme.
pub fn integers<'a>(
    module: &Module<'a, '_>,
    weight: StoredTensor<'a>,
    schemes: &[IntegerScheme],
) -> Result<Option<Matrix<'a>>, LoadError> {
    let &Module {
        outputs, inputs, ..
    } = module;
    let is_packed = weight.dtype != Dtype::I8;
    let Some(first) = schemes.first() else {
        return Ok(None);
    };
    let scales = module.beside(&weight, "weight_scale")?;
    let fits = |scheme: &&IntegerScheme| {
        let has_codes = !is_packed || weight.shape == [outputs, scheme.num_words(inputs)];
        has_codes && scheme.groups(scales.shape, outputs, inputs).is_some()
    };
    // Schemes of one shape differ in the tensors beside the weight.
    let has_zeros = module.find_any(&["weight_zero_point"])?.is_some();
    let has_order = module.find_any(&["weight_g_idx"])?.is_some();
    let is_whole = |scheme: &&IntegerScheme| {
        fits(scheme) && scheme.is_symmetric != has_zeros && scheme.has_order == has_order
    };
    let all = schemes.iter();
    let scheme = all
        .clone()
        .find(is_whole)
        .or_else(|| all.clone().find(fits));
    let scheme = scheme.unwrap_or(first);
    let codes = match is_packed {
        true => Codes::Packed(Words::new(weight, [outputs, scheme.num_words(inputs)])?),
        false => Codes::Bytes(weight.of_shape(&[outputs, inputs])?.bytes.lazy()),
    };
    let Some((num_scales, group_size)) = scheme.groups(scales.shape, outputs, inputs) else {
        let size = match scheme.group_size {
            Some(size) => format!("{size} (group_size of the config)"),
            None => "a multiple of 8".to_owned(),
        };
        return Err(scales.location.error(format!(
            "has shape {:?}; supported for {outputs} outputs and {inputs} inputs are [1], [{outputs}, 1], and \
             [{outputs}, groups] with {size} inputs in each",
            scales.shape
        )));
    };
    let rows = IntegerRows {
        shape: QuantisedShape {
            format: QuantFormat {
                bits: scheme.bits,
                group_size,
                has_offsets: !scheme.is_symmetric,
            },
            rows: outputs,
            columns: inputs,
        },
        codes,
        scales: Floats::new(scales)?,
        num_scales,
        zeros: zeros(module, &weight, scheme, num_scales)?,
        order: order(module, &weight, scheme, group_size)?,
    };
    let matrix = matrix_of_codes(weight.location, Box::new(rows));
    Ok(Some(matrix))
}

fn zeros<'a>(
    module: &Module<'a, '_>,
    weight: &StoredTensor<'_>,
    scheme: &IntegerScheme,
    num_scales: usize,
) -> Result<Zeros<'a>, LoadError> {
    if scheme.is_symmetric {
        return match module.find_any(&["weight_zero_point"])? {
            Some(stored) if stored.bytes.to_vec()?.iter().any(|&byte| byte != 0) => {
                let reason = "is not 0, and quantization_config calls the weights symmetric: one of them is wrong";
                Err(stored.location.error(reason.to_owned()))
            }
            _ => Ok(Zeros::None),
        };
    }
    let stored = module.beside(weight, "weight_zero_point")?;
    match stored.dtype {
        // One zero point for all is not packed.
        Dtype::I32 if num_scales > 0 => {
            let shape = [scheme.num_words(module.outputs), num_scales];
            let words = Words::new(stored, shape)?;
            let first_lane = 0;
            Ok(Zeros::Packed { words, first_lane })
        }
        Dtype::I8 => {
            let stored = match (num_scales, stored.shape) {
                (0, [] | [1]) => stored,
                (0, _) => stored.of_shape(&[1, 1])?,
                (1, [outputs]) if *outputs == module.outputs => stored,
                _ => stored.of_shape(&[module.outputs, num_scales])?,
            };
            Ok(Zeros::Bytes(stored.bytes.lazy()))
        }
        other => Err(stored.location.error(format!(
            "is of type {other:?}; I8, and I32 with packed zero points of several scales, are supported"
        ))),
    }
}

/// The inputs in the order of their groups, if they are not in this order.
fn order(
    module: &Module<'_, '_>,
    weight: &StoredTensor<'_>,
    scheme: &IntegerScheme,
    group_size: usize,
) -> Result<Option<Vec<u32>>, LoadError> {
    let stored = match scheme.has_order {
        true => Some(module.beside(weight, "weight_g_idx")?),
        false => module.find_any(&["weight_g_idx"])?,
    };
    match stored {
        // It has been made, and was not used.
        Some(stored)
            if stored.shape == [module.inputs]
                && stored.bytes.to_vec()?.iter().all(|&byte| byte == 0xff) =>
        {
            Ok(None)
        }
        Some(stored) => act_order(stored, module.inputs, group_size),
        None => Ok(None),
    }
}

enum Codes<'a> {
    Bytes(LazyBytes<'a>),
    Packed(Words<'a>),
}

enum Zeros<'a> {
    None,
    /// One for each scale.
    Bytes(LazyBytes<'a>),
    /// One for each scale, of several outputs in a word. `first_lane` is the place of the first output.
    Packed {
        words: Words<'a>,
        first_lane: usize,
    },
}

struct IntegerRows<'a> {
    shape: QuantisedShape,
    codes: Codes<'a>,
    scales: Floats<'a>,
    /// Scales of a row; 0 if all rows share one.
    num_scales: usize,
    zeros: Zeros<'a>,
    order: Option<Vec<u32>>,
}

impl<'a> StoredQuantisedRows<'a> for IntegerRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        match &self.codes {
            Codes::Bytes(bytes) => bytes.read()?,
            Codes::Packed(words) => words.read()?,
        }
        match &self.zeros {
            Zeros::None => {}
            Zeros::Bytes(bytes) => bytes.read()?,
            Zeros::Packed { words, .. } => words.read()?,
        }
        self.scales.read()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let QuantisedShape {
            format,
            columns: num_columns,
            ..
        } = self.shape;
        let per_word = codes_per_word(format.bits);
        let codes = match &self.codes {
            Codes::Bytes(bytes) => {
                Codes::Bytes(bytes.part(num_columns, rows.clone(), columns.clone()))
            }
            Codes::Packed(words) => {
                let of_words = columns.start / per_word..columns.end.div_ceil(per_word);
                Codes::Packed(words.part(rows.clone(), of_words))
            }
        };
        let (of_rows, groups, num_scales) = match self.num_scales {
            0 => (0..1, 0..1, 0),
            _ => {
                let size = format.group_size;
                let groups = columns.start / size..columns.end.div_ceil(size);
                (rows.clone(), groups.clone(), groups.len())
            }
        };
        let zeros = match &self.zeros {
            Zeros::None => Zeros::None,
            Zeros::Bytes(bytes) => {
                Zeros::Bytes(bytes.part(self.num_scales.max(1), of_rows.clone(), groups.clone()))
            }
            Zeros::Packed { words, first_lane } => {
                let lanes = first_lane + of_rows.start..first_lane + of_rows.end;
                let of_words = lanes.start / per_word..lanes.end.div_ceil(per_word);
                Zeros::Packed {
                    words: words.part(of_words, groups.clone()),
                    first_lane: lanes.start % per_word,
                }
            }
        };
        Box::new(Self {
            shape: QuantisedShape {
                rows: rows.len(),
                columns: columns.len(),
                ..self.shape
            },
            codes,
            scales: self.scales.part(of_rows, groups),
            num_scales,
            zeros,
            order: self.order.clone(),
        })
    }
}

impl QuantisedRows for IntegerRows<'_> {
    fn shape(&self) -> QuantisedShape {
        self.shape
    }

    fn input_order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let bits = self.shape.format.bits;
        let per_word = codes_per_word(bits);
        row.resize(self.shape.format, self.shape.columns);
        let signed = |word, lane| (code_at(word, lane, bits) as i32 - bits.bias()) as i8;
        match (&self.codes, &self.order) {
            (Codes::Bytes(bytes), order) => {
                let bytes = &bytes[index * self.shape.columns..][..self.shape.columns];
                let stored: &[i8] = bytemuck::cast_slice(bytes);
                match order {
                    None => row.codes.copy_from_slice(stored),
                    Some(order) => {
                        for (code, &input) in row.codes.iter_mut().zip(order) {
                            *code = stored[input as usize];
                        }
                    }
                }
            }
            (Codes::Packed(words), None) => {
                let codes = row.codes.chunks_mut(per_word);
                for (codes, word) in codes.zip(words.row(index)) {
                    for (lane, code) in codes.iter_mut().enumerate() {
                        *code = signed(word, lane);
                    }
                }
            }
            (Codes::Packed(words), Some(order)) => {
                for (code, &input) in row.codes.iter_mut().zip(order) {
                    let input = input as usize;
                    *code = signed(words.at(index, input / per_word), input % per_word);
                }
            }
        }
        let first = index * self.num_scales;
        for (group, scale) in row.scales.iter_mut().enumerate() {
            *scale = self.scales.at(first + group);
        }
        let zero = |group: usize| match &self.zeros {
            Zeros::None => 0,
            Zeros::Bytes(bytes) => i32::from(bytes[first + group].cast_signed()),
            Zeros::Packed { words, first_lane } => {
                let lane = first_lane + index;
                code_at(words.at(lane / per_word, group), lane % per_word, bits) as i32
                    - bits.bias()
            }
        };
        for (group, offset) in row.offsets.iter_mut().enumerate() {
            *offset = -row.scales[group] * zero(group) as f32;
        }
    }
}
