//! compressed-tensors, as LLM Compressor saves it: integer weights in one of two formats, or FP8 (float-quantized).
//!
//! ```text
//! int-quantized    weight         I8  [outputs, inputs]
//! pack-quantized   weight_packed  I32 [outputs, inputs / codes per word]    codes plus 8 or 128
//! both             weight_scale   [outputs, groups], [outputs, 1], or one for all
//! weight = scale * code
//! ```
//!
//! The scheme for activations is ignored: the kernels quantise each token at run time, at least as finely.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::fp8::Fp8;
use super::module::{Module, refused};
use super::words::{Floats, Words, code_at, codes_per_word};
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use crate::stored_rows::StoredQuantisedRows;
use crate::weight_file::LazyBytes;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

/// A format of `quantization_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Int,
    Packed,
    Float,
}

/// compressed-tensors as `quantization_config` describes it. Groups follow from the shapes of the tensors.
#[derive(Debug)]
pub struct CompressedTensors {
    scheme: Scheme,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    /// Codes of 8 bits.
    Int,
    /// Codes of these bits, in words.
    Packed(CodeBits),
    Float(Fp8),
}

impl Format {
    const ALL: [Self; 3] = [Self::Int, Self::Packed, Self::Float];

    fn name(self) -> &'static str {
        match self {
            Self::Int => "int-quantized",
            Self::Packed => "pack-quantized",
            Self::Float => "float-quantized",
        }
    }
}

impl CompressedTensors {
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let name = section.string("format")?;
        let Some(format) = Format::ALL
            .into_iter()
            .find(|format| Some(format.name()) == name)
        else {
            let value = format_args!("'{}'", name.unwrap_or("none"));
            let supported = "'int-quantized', 'pack-quantized' or 'float-quantized'";
            return Err(refused(section, "format", value, supported));
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
        let mut found: Option<Scheme> = None;
        for (name, _) in groups.entries() {
            let Some(group) = groups.object(name)? else {
                continue;
            };
            let Some(weights) = group.object("weights")? else {
                continue;
            };
            let scheme = Scheme::of(&group, &weights, format)?;
            if *found.get_or_insert(scheme) != scheme {
                let value = "weights of different bits or blocks";
                return Err(refused(section, "config_groups", value, "one of them"));
            }
        }
        Ok(Self {
            scheme: found.unwrap_or(Scheme::Int),
        })
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Module {
            tensors,
            outputs,
            inputs,
            ..
        } = module;
        if let Scheme::Float(fp8) = self.scheme {
            return fp8.matrix(module);
        }
        let (location, codes) = if let Scheme::Packed(bits) = self.scheme
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

impl Scheme {
    /// The scheme of a config group.
    fn of(group: &JsonFile, weights: &JsonFile, format: Format) -> Result<Self, LoadError> {
        if let Some(name) = group.string("format")?
            && name != format.name()
        {
            let value = format_args!("'{name}'");
            return Err(refused(group, "format", value, "the format of the whole"));
        }
        let (expected_type, strategies, supported) = match format {
            Format::Float => (
                "float",
                ["tensor", "channel", "block"],
                "'tensor', 'channel' or 'block'",
            ),
            _ => (
                "int",
                ["tensor", "channel", "group"],
                "'tensor', 'channel' or 'group'",
            ),
        };
        match weights.string("type")? {
            Some(other) if other != expected_type => {
                let value = format_args!("'{other}'");
                let supported = format!("'{expected_type}'");
                return Err(refused(weights, "type", value, &supported));
            }
            _ => {}
        }
        if !weights.bool_or("symmetric", true)? {
            return Err(refused(weights, "symmetric", false, "true"));
        }
        if let Some(strategy) = weights.string("strategy")?
            && !strategies.contains(&strategy)
        {
            let value = format_args!("'{strategy}'");
            return Err(refused(weights, "strategy", value, supported));
        }
        match (weights.required_size("num_bits", 1..=32)?, format) {
            (8, Format::Int) => Ok(Self::Int),
            (8, Format::Packed) => Ok(Self::Packed(CodeBits::Eight)),
            (4, Format::Packed) => Ok(Self::Packed(CodeBits::Four)),
            (8, Format::Float) => Fp8::from_scheme(weights).map(Self::Float),
            (other, Format::Packed) => Err(refused(weights, "num_bits", other, "4 or 8")),
            (other, _) => Err(refused(weights, "num_bits", other, "8")),
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

impl<'a> StoredQuantisedRows<'a> for CompressedRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        match &self.codes {
            Codes::Bytes(bytes) => bytes.read()?,
            Codes::Packed(words, _) => words.read()?,
        }
        self.scales.read()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let num_columns = self.shape.columns;
        let codes = match &self.codes {
            Codes::Bytes(bytes) => {
                Codes::Bytes(bytes.part(num_columns, rows.clone(), columns.clone()))
            }
            Codes::Packed(words, bits) => {
                let per_word = codes_per_word(*bits);
                let of_words = columns.start / per_word..columns.end.div_ceil(per_word);
                Codes::Packed(words.part(rows.clone(), of_words), *bits)
            }
        };
        let size = self.shape.format.group_size;
        let (scales, num_scales) = match self.num_scales {
            0 => (self.scales.part(0..1, 0..1), 0),
            _ => {
                let groups = columns.start / size..columns.end.div_ceil(size);
                (self.scales.part(rows.clone(), groups.clone()), groups.len())
            }
        };
        Box::new(Self {
            shape: QuantisedShape {
                rows: rows.len(),
                columns: columns.len(),
                ..self.shape
            },
            codes,
            scales,
            num_scales,
        })
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
