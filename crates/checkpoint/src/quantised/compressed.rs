//! compressed-tensors, as LLM Compressor saves it: integer weights, FP8, or floats of 4 bits.
//!
//! ```text
//! int-quantized          weight         I8  [outputs, inputs]
//! pack-quantized         weight_packed  I32 [outputs, inputs / codes per word]    codes plus 8 or 128
//! both                   weight_scale   [outputs, groups], [outputs, 1], or one for all
//! weight = scale * code
//!
//! float-quantized        FP8 (fp8.rs)
//! naive-quantized        int-quantized or float-quantized, by the type of its weights
//! nvfp4-pack-quantized   NVFP4 (nvfp4.rs)
//! mxfp4-pack-quantized   MXFP4 (mxfp4.rs)
//! mixed-precision        each group of modules has one of these
//! ```
//!
//! The tensors of a module tell which of the formats in the config it has. The scheme for activations is ignored: the
//! kernels quantise each token at run time, at least as finely. So is the one for the KV cache.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::fp8::Fp8;
use super::module::{Module, refused};
use super::mxfp4::MxFp4;
use super::nvfp4;
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
    Naive,
    NvFp4,
    MxFp4,
}

/// compressed-tensors as `quantization_config` describes it. Groups follow from the shapes of the tensors.
#[derive(Debug)]
pub struct CompressedTensors {
    /// Without repetitions; of FP8 at most one.
    schemes: Vec<Scheme>,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    /// Codes of 8 bits.
    Int,
    /// Codes of these bits, in words.
    Packed(CodeBits),
    Float(Fp8),
    NvFp4,
    MxFp4,
}

impl Format {
    const ALL: [Self; 6] = [
        Self::Int,
        Self::Packed,
        Self::Float,
        Self::Naive,
        Self::NvFp4,
        Self::MxFp4,
    ];
    const SUPPORTED: &str = "'int-quantized', 'pack-quantized', 'float-quantized', 'naive-quantized', \
                             'nvfp4-pack-quantized', 'mxfp4-pack-quantized', or 'mixed-precision' of these";

    fn name(self) -> &'static str {
        match self {
            Self::Int => "int-quantized",
            Self::Packed => "pack-quantized",
            Self::Float => "float-quantized",
            Self::Naive => "naive-quantized",
            Self::NvFp4 => "nvfp4-pack-quantized",
            Self::MxFp4 => "mxfp4-pack-quantized",
        }
    }

    /// The format of the whole, or of a group of modules; `None` if each group has its own.
    fn of(section: &JsonFile) -> Result<Option<Self>, LoadError> {
        let name = section.string("format")?;
        let found = Self::ALL.into_iter().find(|it| Some(it.name()) == name);
        match found {
            None if name != Some("mixed-precision") => {
                let value = format_args!("'{}'", name.unwrap_or("none"));
                Err(refused(section, "format", value, Self::SUPPORTED))
            }
            found => Ok(found),
        }
    }
}

impl CompressedTensors {
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let format = Format::of(section)?;
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
        let mut schemes = Vec::new();
        for (name, _) in groups.entries() {
            let Some(group) = groups.object(name)? else {
                continue;
            };
            let Some(weights) = group.object("weights")? else {
                continue;
            };
            let format = match group.get("format").is_some() || format.is_none() {
                true => Format::of(&group)?,
                false => format,
            };
            let Some(format) = format else {
                let value = "'mixed-precision'";
                return Err(refused(&group, "format", value, Format::SUPPORTED));
            };
            let scheme = Scheme::of(&weights, format)?;
            if !schemes.contains(&scheme) {
                schemes.push(scheme);
            }
        }
        let num_fp8 = schemes.iter().filter(|it| matches!(it, Scheme::Float(_)));
        if num_fp8.count() > 1 {
            let value = "FP8 weights with different blocks";
            return Err(refused(section, "config_groups", value, "one of them"));
        }
        Ok(Self { schemes })
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let tensors = module.tensors;
        if let Some(packed) = tensors.find(&module.tensor("weight_packed"))? {
            return match packed.dtype {
                Dtype::U8 => self.four_bit_floats(module, packed),
                _ => self.packed(module, packed),
            }
            .map(Some);
        }
        match tensors.find(&module.tensor("weight"))? {
            Some(weight) if weight.dtype == Dtype::I8 => {
                let location = weight.location;
                let weight = weight.of_shape(&[module.outputs, module.inputs])?;
                let codes = Codes::Bytes(weight.bytes.lazy());
                integers(module, weight, codes).map(|rows| Some(Matrix::Quantised(location, rows)))
            }
            Some(weight) if weight.dtype == Dtype::F8_E4M3 => {
                let fp8 = self.schemes.iter().find_map(|scheme| match scheme {
                    Scheme::Float(fp8) => Some(fp8),
                    _ => None,
                });
                match fp8 {
                    Some(fp8) => fp8.matrix(module),
                    None => Err(contradicts(&weight, "FP8 weights")),
                }
            }
            _ => Ok(None),
        }
    }

    fn packed<'a>(
        &self,
        module: &Module<'a, '_>,
        packed: StoredTensor<'a>,
    ) -> Result<Matrix<'a>, LoadError> {
        let &Module {
            outputs, inputs, ..
        } = module;
        let shape_of = |bits| [outputs, inputs.div_ceil(codes_per_word(bits))];
        let all = self.schemes.iter().filter_map(|scheme| match scheme {
            Scheme::Packed(bits) => Some(*bits),
            _ => None,
        });
        // Bits are told by the number of words.
        let fitting = all.clone().find(|&bits| packed.shape == shape_of(bits));
        let Some(bits) = fitting.or_else(|| all.clone().next()) else {
            return Err(contradicts(&packed, "packed integers"));
        };
        let words = Words::new(packed, shape_of(bits))?;
        let rows = integers(module, packed, Codes::Packed(words, bits))?;
        Ok(Matrix::Quantised(packed.location, rows))
    }

    fn four_bit_floats<'a>(
        &self,
        module: &Module<'a, '_>,
        packed: StoredTensor<'a>,
    ) -> Result<Matrix<'a>, LoadError> {
        let has = |scheme| self.schemes.contains(&scheme);
        let scales = module.beside(&packed, "weight_scale")?;
        let is_power_of_two = scales.dtype == Dtype::U8;
        match (has(Scheme::NvFp4), has(Scheme::MxFp4)) {
            (true, true) if is_power_of_two => MxFp4.matrix(module, packed, scales),
            (false, true) => MxFp4.matrix(module, packed, scales),
            (true, _) => {
                let factor = module.beside(&packed, "weight_global_scale")?;
                nvfp4::matrix(module, packed, scales, nvfp4::factor(factor, true)?)
            }
            (false, false) => Err(contradicts(&packed, "floats of 4 bits")),
        }
    }
}

/// The error for a tensor in a format that the config does not have.
fn contradicts(stored: &StoredTensor<'_>, found: &str) -> LoadError {
    stored.location.error(format!(
        "is of type {:?}, and quantization_config.config_groups has no {found}: one of them is wrong",
        stored.dtype
    ))
}

/// The rows of a module with integer codes.
fn integers<'a>(
    module: &Module<'a, '_>,
    weight: StoredTensor<'a>,
    codes: Codes<'a>,
) -> Result<Box<dyn StoredQuantisedRows<'a> + 'a>, LoadError> {
    let &Module {
        tensors,
        outputs,
        inputs,
        ..
    } = module;
    for unsupported in ["weight_zero_point", "weight_g_idx"] {
        if let Some(stored) = tensors.find(&module.tensor(unsupported))?
            && stored.bytes.to_vec()?.iter().any(|&byte| byte != 0)
        {
            let reason =
                "is not supported: only symmetric weights in the order of their inputs are";
            return Err(stored.location.error(reason.to_owned()));
        }
    }
    let scales = module.beside(&weight, "weight_scale")?;
    let (num_scales, group_size) = groups(scales, outputs, inputs)?;
    Ok(Box::new(CompressedRows {
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
    }))
}

impl Scheme {
    /// The scheme of a config group's weights.
    fn of(weights: &JsonFile, format: Format) -> Result<Self, LoadError> {
        let given_type = weights.string("type")?;
        let format = match (format, given_type) {
            (Format::Naive, Some("float")) => Format::Float,
            (Format::Naive, _) => Format::Int,
            (format, _) => format,
        };
        let is_float = !matches!(format, Format::Int | Format::Packed);
        let expected_type = if is_float { "float" } else { "int" };
        if let Some(other) = given_type
            && other != expected_type
        {
            let value = format_args!("'{other}'");
            let supported = format!("'{expected_type}'");
            return Err(refused(weights, "type", value, &supported));
        }
        if !weights.bool_or("symmetric", true)? {
            return Err(refused(weights, "symmetric", false, "true"));
        }
        let (strategies, supported): (&[_], _) = match format {
            Format::Float | Format::Naive => (
                &["tensor", "channel", "block"],
                "'tensor', 'channel' or 'block'",
            ),
            Format::Int | Format::Packed => (
                &["tensor", "channel", "group"],
                "'tensor', 'channel' or 'group'",
            ),
            Format::NvFp4 => (&["tensor_group"], "'tensor_group'"),
            Format::MxFp4 => (&["group"], "'group'"),
        };
        if let Some(strategy) = weights.string("strategy")?
            && !strategies.contains(&strategy)
        {
            let value = format_args!("'{strategy}'");
            return Err(refused(weights, "strategy", value, supported));
        }
        let group = match format {
            Format::NvFp4 => Some(nvfp4::GROUP),
            Format::MxFp4 => Some(MxFp4::GROUP),
            _ => None,
        };
        if let Some(group) = group
            && let Some(size) = weights.size("group_size", 0..=usize::MAX)?
            && size != group
        {
            return Err(refused(weights, "group_size", size, &group.to_string()));
        }
        match (weights.required_size("num_bits", 1..=32)?, format) {
            (8, Format::Int) => Ok(Self::Int),
            (8, Format::Packed) => Ok(Self::Packed(CodeBits::Eight)),
            (4, Format::Packed) => Ok(Self::Packed(CodeBits::Four)),
            (8, Format::Float) => Fp8::from_scheme(weights).map(Self::Float),
            (4, Format::NvFp4) => Ok(Self::NvFp4),
            (4, Format::MxFp4) => Ok(Self::MxFp4),
            (other, Format::Packed) => Err(refused(weights, "num_bits", other, "4 or 8")),
            (other, Format::NvFp4 | Format::MxFp4) => Err(refused(weights, "num_bits", other, "4")),
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
