//! compressed-tensors, as LLM Compressor saves it: integer weights, FP8, or floats of 4 bits.
//!
//! ```text
//! int-quantized          integers (integer_rows.rs)
//! pack-quantized         integers, in words of 32 bits
//! float-quantized        FP8 (fp8.rs)
//! naive-quantized        int-quantized or float-quantized, by the type of its weights
//! nvfp4-pack-quantized   NVFP4 (nvfp4.rs)
//! mxfp4-pack-quantized   MXFP4 (mxfp4.rs)
//! mixed-precision        each group of modules has one of these
//! ```
//!
//! The tensors of a module tell which of the formats in the config it has. The scheme for activations is ignored: the
//! kernels quantise each token at run time, at least as finely. So is the one for the KV cache.

use safetensors::tensor::Dtype;
use serde_json::Value;

use super::fp8::Fp8;
use super::integer_rows::{IntegerScheme, integers};
use super::module::{Module, group_size, refused};
use super::mxfp4::MxFp4;
use super::nvfp4;
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use inflight_base::LoadError;
use inflight_numbers::CodeBits;

/// More than any tool writes, and few enough to compare each module with all of them.
const MAX_SCHEMES: usize = 64;

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

/// compressed-tensors as `quantization_config` describes it.
#[derive(Debug)]
pub struct CompressedTensors {
    /// Without repetitions; of FP8 at most one.
    schemes: Vec<Scheme>,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    /// Codes of 8 bits.
    Int(IntegerScheme),
    /// Codes in words.
    Packed(IntegerScheme),
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
            if schemes.len() > MAX_SCHEMES {
                let value = "more schemes of weights";
                return Err(refused(
                    section,
                    "config_groups",
                    value,
                    &MAX_SCHEMES.to_string(),
                ));
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
                let all = self.schemes.iter().filter_map(|scheme| match scheme {
                    Scheme::Int(scheme) => Some(*scheme),
                    _ => None,
                });
                match integers(module, weight, &all.collect::<Vec<_>>())? {
                    Some(matrix) => Ok(Some(matrix)),
                    None => Err(contradicts(&weight, "integers of 8 bits")),
                }
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
        let all = self.schemes.iter().filter_map(|scheme| match scheme {
            Scheme::Packed(scheme) => Some(*scheme),
            _ => None,
        });
        match integers(module, packed, &all.collect::<Vec<_>>())? {
            Some(matrix) => Ok(matrix),
            None => Err(contradicts(&packed, "packed integers")),
        }
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

/// Whether the inputs of a group may be anywhere (`actorder`).
fn has_order(weights: &JsonFile) -> Result<bool, LoadError> {
    const ORDER: &str = "actorder";
    let name = match weights.get(ORDER) {
        None | Some(Value::Null) => return Ok(false),
        // Of old versions.
        Some(Value::Bool(has_order)) => return Ok(*has_order),
        Some(other) => other.as_str().map(str::to_ascii_lowercase),
    };
    match name.as_deref() {
        Some("group" | "dynamic") => Ok(true),
        Some("weight" | "static") => Ok(false),
        _ => {
            let value = weights.get(ORDER).expect("it is not absent");
            Err(refused(weights, ORDER, value, "'group', 'weight' or null"))
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
        let is_symmetric = weights.bool_or("symmetric", true)?;
        if is_float && !is_symmetric {
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
        let integers = |bits| {
            Ok(IntegerScheme {
                bits,
                group_size: group_size(weights, "group_size")?,
                is_symmetric,
                // Of old versions, `true`.
                has_order: has_order(weights)?,
            })
        };
        match (weights.required_size("num_bits", 1..=32)?, format) {
            (8, Format::Int) => integers(CodeBits::Eight).map(Self::Int),
            (8, Format::Packed) => integers(CodeBits::Eight).map(Self::Packed),
            (4, Format::Packed) => integers(CodeBits::Four).map(Self::Packed),
            (8, Format::Float) => Fp8::from_scheme(weights).map(Self::Float),
            (4, Format::NvFp4) => Ok(Self::NvFp4),
            (4, Format::MxFp4) => Ok(Self::MxFp4),
            (other, Format::Packed) => Err(refused(weights, "num_bits", other, "4 or 8")),
            (other, Format::NvFp4 | Format::MxFp4) => Err(refused(weights, "num_bits", other, "4")),
            (other, _) => Err(refused(weights, "num_bits", other, "8")),
        }
    }
}
