//! compressed-tensors, as LLM Compressor saves it: integer weights in one of two formats.
//!
//! ```text
//! int-quantized    weight         I8  [outputs, inputs]
//! pack-quantized   weight_packed  I32 [outputs, inputs / codes per word]    codes plus 8 or 128
//! both             weight_scale   [outputs, groups], [outputs, 1], or one for all
//! weight = scale * code
//! ```
//!
//! The scheme for activations is ignored: the kernels quantise each token at run time, at least as finely.

use safetensors::tensor::Dtype;

use super::module::{Module, refused};
use super::words::{Floats, Words, code_at, codes_per_word};
use crate::base::LoadError;
use crate::checkpoint::json_file::JsonFile;
use crate::checkpoint::matrix::{Matrix, StoredQuantisedRows};
use crate::checkpoint::safetensors::StoredTensor;
use crate::checkpoint::weight_file::LazyBytes;
use crate::device::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

const FORMATS: [&str; 2] = ["int-quantized", "pack-quantized"];

/// compressed-tensors as `quantization_config` describes it. Groups follow from the shapes of the tensors.
#[derive(Debug)]
pub struct CompressedTensors {
    /// `None` for int-quantized.
    packed_bits: Option<CodeBits>,
}

impl CompressedTensors {
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let is_packed = match section.string("format")? {
            Some(format) if FORMATS.contains(&format) => format == FORMATS[1],
            other => {
                let value = format_args!("'{}'", other.unwrap_or("none"));
                let supported = "'int-quantized' or 'pack-quantized'";
                return Err(refused(section, "format", value, supported));
            }
        };
        if let Some(sparsity) = section.object("sparsity_config")?
            && let Some(format) = sparsity.string("format")?
            && format != "dense"
        {
            let value = format_args!("'{format}'");
            return Err(refused(&sparsity, "format", value, "'dense'"));
        }
        if let Some(transforms) = section.object("transform_config")?
            && transforms.entries().next().is_some()
        {
            let value = "a transform of weights or activations";
            return Err(refused(section, "transform_config", value, "none"));
        }
        let groups = section.object("config_groups")?.ok_or_else(|| {
            section.error("quantization_config.config_groups is missing".to_owned())
        })?;
        let mut packed_bits = None;
        for (name, _) in groups.entries() {
            let Some(group) = groups.object(name)? else {
                continue;
            };
            let Some(weights) = group.object("weights")? else {
                continue;
            };
            let bits = scheme(&group, &weights, is_packed)?;
            if is_packed && *packed_bits.get_or_insert(bits) != bits {
                let value = "weights of 4 bits and of 8 bits";
                return Err(refused(section, "config_groups", value, "one of them"));
            }
        }
        Ok(Self { packed_bits })
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Module {
            tensors,
            outputs,
            inputs,
            ..
        } = module;
        let (location, codes) = if let Some(bits) = self.packed_bits
            && let Some(packed) = tensors.find(&module.tensor("weight_packed"))?
        {
            let shape = [outputs, inputs.div_ceil(codes_per_word(bits))];
            let words = Words::new(packed, shape)?;
            (packed.location, Codes::Packed(words, bits))
        } else {
            match tensors.find(&module.tensor("weight"))? {
                Some(weight) if weight.dtype == Dtype::I8 => {
                    let weight = weight.of_shape(&[outputs, inputs])?;
                    (weight.location, Codes::Bytes(weight.bytes.lazy()))
                }
                _ => return Ok(None),
            }
        };
        for unsupported in ["weight_zero_point", "weight_g_idx"] {
            if let Some(stored) = tensors.find(&module.tensor(unsupported))?
                && stored.bytes.to_vec()?.iter().any(|&byte| byte != 0)
            {
                let reason =
                    "is not supported: only symmetric weights in the order of their inputs are";
                return Err(stored.location.error(reason.to_owned()));
            }
        }
        let name = module.tensor("weight_scale");
        let Some(scales) = tensors.find(&name)? else {
            return Err(location.error(format!("is quantised, and {name} is missing")));
        };
        let (num_scales, group_size) = groups(scales, outputs, inputs)?;
        let rows = CompressedRows {
            shape: QuantisedShape {
                format: QuantFormat {
                    bits: match codes {
                        Codes::Bytes(_) => CodeBits::Eight,
                        Codes::Packed(_, bits) => bits,
                    },
                    group_size,
                    has_offsets: false,
                },
                rows: outputs,
                columns: inputs,
            },
            codes,
            scales: Floats::new(scales)?,
            num_scales,
        };
        Ok(Some(Matrix::Quantised(location, Box::new(rows))))
    }
}

/// The bits of the weights of a config group.
fn scheme(group: &JsonFile, weights: &JsonFile, is_packed: bool) -> Result<CodeBits, LoadError> {
    if let Some(format) = group.string("format")?
        && format != FORMATS[usize::from(is_packed)]
    {
        let value = format_args!("'{format}'");
        return Err(refused(group, "format", value, "the format of the whole"));
    }
    match weights.string("type")? {
        None | Some("int") => {}
        Some(other) => {
            let value = format_args!("'{other}'");
            return Err(refused(weights, "type", value, "'int'"));
        }
    }
    if !weights.bool_or("symmetric", true)? {
        return Err(refused(weights, "symmetric", false, "true"));
    }
    if let Some(strategy) = weights.string("strategy")?
        && !["tensor", "channel", "group"].contains(&strategy)
    {
        let value = format_args!("'{strategy}'");
        let supported = "'tensor', 'channel' or 'group'";
        return Err(refused(weights, "strategy", value, supported));
    }
    match weights.required_size("num_bits", 1..=32)? {
        8 => Ok(CodeBits::Eight),
        4 if is_packed => Ok(CodeBits::Four),
        other => {
            let supported = if is_packed { "4 or 8" } else { "8" };
            Err(refused(weights, "num_bits", other, supported))
        }
    }
}

/// The scales of a row (0 if one scale is shared by all rows), and the inputs of a scale.
fn groups(
    scales: StoredTensor<'_>,
    outputs: usize,
    inputs: usize,
) -> Result<(usize, usize), LoadError> {
    match *scales.shape {
        [] | [1] => Ok((0, inputs)),
        [rows] | [rows, 1] if rows == outputs => Ok((1, inputs)),
        [rows, num_groups]
            if rows == outputs
                && num_groups > 0
                && inputs.is_multiple_of(32 * num_groups) =>
        {
            Ok((num_groups, inputs / num_groups))
        }
        _ => Err(scales.location.error(format!(
            "has shape {:?}; supported for {outputs} outputs and {inputs} inputs are [1], [{outputs}, 1], and \
             [{outputs}, groups] with a multiple of 32 inputs in each",
            scales.shape
        ))),
    }
}

enum Codes<'a> {
    Bytes(LazyBytes<'a>),
    Packed(Words<'a>, CodeBits),
}

struct CompressedRows<'a> {
    shape: QuantisedShape,
    codes: Codes<'a>,
    scales: Floats<'a>,
    num_scales: usize,
}

impl StoredQuantisedRows for CompressedRows<'_> {
    fn preload(&self) -> Result<(), LoadError> {
        match &self.codes {
            Codes::Bytes(bytes) => bytes.read()?,
            Codes::Packed(words, _) => words.read()?,
        }
        self.scales.read()
    }
}

impl QuantisedRows for CompressedRows<'_> {
    fn shape(&self) -> QuantisedShape {
        self.shape
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.shape.format, self.shape.columns);
        match &self.codes {
            Codes::Bytes(bytes) => {
                let bytes = &bytes[index * self.shape.columns..][..self.shape.columns];
                row.codes.copy_from_slice(bytemuck::cast_slice(bytes));
            }
            Codes::Packed(words, bits) => {
                let codes = row.codes.chunks_mut(codes_per_word(*bits));
                for (codes, word) in codes.zip(words.row(index)) {
                    for (lane, code) in codes.iter_mut().enumerate() {
                        *code = (code_at(word, lane, *bits) as i32 - bits.bias()) as i8;
                    }
                }
            }
        }
        let first = index * self.num_scales;
        for (group, scale) in row.scales.iter_mut().enumerate() {
            *scale = self.scales.at(first + group);
        }
    }
}
