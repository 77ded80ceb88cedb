//! BitNet b1.58: weights of three values, -s, 0 and s, with one s for a module (Ma et al., arXiv:2402.17764).
//!
//! ```text
//! offline   weight         U8 [outputs / 4, inputs]    byte i has the codes of outputs i, i + outputs / 4, ..., the
//!                                                      first one in its lowest two bits; code - 1 is -1, 0 or 1
//!           weight_scale   [1]
//!           weight = (code - 1) weight_scale           `linear_class: autobitlinear`
//!           weight = (code - 1) / weight_scale         `linear_class: bitlinear`
//! online    weight         floats, as they are trained
//!           s = mean(|weight|), at least 1e-5; weight = s clamp(round(weight / s), -1, 1)
//! ```
//!
//! Codes are taken over into 4 bits, without loss. transformers also rounds the inputs of each module to 8 bits, with
//! one scale for a token; a kernel rounds them in its own way.
//!
//! Source: integrations/bitnet.py and quantizers/quantizer_bitnet.py of transformers.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use safetensors::tensor::Dtype as StoredDtype;

use super::module::{Module, refused};
use super::words::Floats;
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::row_order::part_of;
use crate::safetensors::StoredTensor;
use crate::stored_rows::StoredQuantisedRows;
use crate::tensor::Tensor;
use crate::weight_file::FileRange;
use inflight_base::LoadError;
use inflight_numbers::{
    CodeBits, Dtype, FloatRows, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape,
};

/// Codes of a byte.
const CODES_OF_BYTE: usize = 4;
/// The least mean magnitude of weights.
const MIN_SCALE: f32 = 1e-5;
/// The linear layers of models with Llama's names.
const LINEAR_LAYERS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// BitNet as `quantization_config` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitNet {
    /// Whether a scale divides codes instead of being their factor.
    is_divisor: bool,
    /// Whether floats are rounded to three values.
    is_online: bool,
    /// Names of modules that stay as they are, with all modules in them: whole parts between dots.
    excluded: Vec<String>,
}

impl BitNet {
    /// `quant_method: bitnet`.
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let one_of = |key, names: [&'static str; 2]| match section.string(key)? {
            None => Ok(false),
            Some(name) if name == names[0] => Ok(false),
            Some(name) if name == names[1] => Ok(true),
            Some(other) => {
                let supported = format!("'{}' or '{}'", names[0], names[1]);
                let value = format_args!("'{other}'");
                Err(refused(section, key, value, &supported))
            }
        };
        let is_auto = one_of("linear_class", ["bitlinear", "autobitlinear"])?;
        const MODE: &str = "quantization_mode";
        let is_online = one_of(MODE, ["offline", "online"])?;
        if is_online && !is_auto {
            let supported = "'offline', or linear_class 'autobitlinear',";
            return Err(refused(section, MODE, "'online'", supported));
        }
        const NORM: &str = "use_rms_norm";
        if section.bool_or(NORM, false)? {
            return Err(refused(section, NORM, true, "false"));
        }
        const EXCLUDED: &str = "modules_to_not_convert";
        let excluded = match section.get(EXCLUDED) {
            None => vec!["lm_head".to_owned()],
            Some(value) => {
                let names = value.as_array().and_then(|names| {
                    let names = names.iter();
                    names
                        .map(|name| name.as_str().map(str::to_owned))
                        .collect::<Option<Vec<_>>>()
                });
                names.ok_or_else(|| section.unexpected(EXCLUDED, value, "a list of names"))?
            }
        };
        Ok(Self {
            is_divisor: !is_auto,
            is_online,
            excluded,
        })
    }

    /// A module's matrix; `None` if it is not quantised.
    ///
    /// # Errors
    /// A tensor is missing, or does not have the shape, type or value that the method gives it.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let Some(weight) = module.tensors.find(&module.tensor("weight"))? else {
            return Ok(None);
        };
        let scale = module.find_any(&["weight_scale"])?;
        let location = weight.location;
        let rows = match (weight.dtype, scale) {
            (StoredDtype::U8, Some(scale)) => self.packed(module, weight, scale)?,
            (StoredDtype::U8, None) => {
                let name = module.tensor("weight_scale");
                return Err(location.error(format!("is packed, and {name} is missing")));
            }
            (other, Some(scale)) if !self.is_online => {
                let reason = format!("belongs to a weight of type {other:?}; U8 is supported");
                return Err(scale.location.error(reason));
            }
            _ if self.is_excluded(module.name) => return Ok(None),
            (other, None) if self.is_divisor && is_linear_layer(module.name) => {
                let remedy = "U8 is supported, or the module in modules_to_not_convert";
                return Err(location.error(format!("is of type {other:?}; {remedy}")));
            }
            _ if self.is_online => {
                // A router, or an embedding of another name, is not rounded by transformers.
                if !is_linear_layer(module.name) {
                    let reason = "is no linear layer of a model like Llama, which quantization_mode 'online' of BitNet \
                                  needs; name it in modules_to_not_convert if it stays as it is";
                    return Err(location.error(reason.to_owned()));
                }
                let weight = weight.of_shape(&[module.outputs, module.inputs])?;
                TernaryRows::new(module, Codes::Online(weight.to_float()?, Arc::default()))
            }
            _ => return Ok(None),
        };
        Ok(Some(Matrix::Quantised(location, Box::new(rows))))
    }

    fn packed<'a>(
        &self,
        module: &Module<'a, '_>,
        weight: StoredTensor<'a>,
        scale: StoredTensor<'a>,
    ) -> Result<TernaryRows<'a>, LoadError> {
        let &Module {
            outputs, inputs, ..
        } = module;
        if !outputs.is_multiple_of(CODES_OF_BYTE) {
            let reason = format!("has {outputs} outputs; packed ones are a multiple of 4");
            return Err(weight.location.error(reason));
        }
        let weight = weight.of_shape(&[outputs / CODES_OF_BYTE, inputs])?;
        let location = scale.location;
        let stored = Floats::all(scale.of_shape(&[1])?)?[0];
        let scale = if self.is_divisor {
            1.0 / stored
        } else {
            stored
        };
        if !scale.is_finite() || !stored.is_finite() {
            let reason = format!("is {stored}, which is no scale; the file is damaged");
            return Err(location.error(reason));
        }
        Ok(TernaryRows::new(
            module,
            Codes::Packed {
                bytes: weight.bytes,
                num_rows: outputs / CODES_OF_BYTE,
                scale,
            },
        ))
    }

    /// Whether a module is one that stays as it is. Embeddings are no linear layers.
    fn is_excluded(&self, name: &str) -> bool {
        let parts = format!(".{name}.");
        let has = |excluded: &str| parts.contains(&format!(".{excluded}."));
        has("embed_tokens") || self.excluded.iter().any(|excluded| has(excluded))
    }
}

/// Whether a module is a linear layer of a model with Llama's names. Experts are none: transformers does not convert
/// them.
fn is_linear_layer(name: &str) -> bool {
    let (block, layer) = name.rsplit_once('.').unwrap_or(("", name));
    LINEAR_LAYERS.contains(&layer) && !block.split('.').any(|part| part == "experts")
}

/// Some columns of some rows of a module.
struct TernaryRows<'a> {
    codes: Codes<'a>,
    num_stored_columns: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// Where they come from.
#[derive(Clone)]
enum Codes<'a> {
    Packed {
        /// `[num_rows, num_stored_columns]`.
        bytes: FileRange<'a>,
        num_rows: usize,
        scale: f32,
    },
    /// All weights of the module, and their mean magnitude, once it is known.
    Online(Tensor<'a>, Arc<OnceLock<f32>>),
}

impl<'a> TernaryRows<'a> {
    fn new(module: &Module<'_, '_>, codes: Codes<'a>) -> Self {
        Self {
            codes,
            num_stored_columns: module.inputs,
            rows: 0..module.outputs,
            columns: 0..module.inputs,
        }
    }
}

impl<'a> StoredQuantisedRows<'a> for TernaryRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        if let Codes::Online(weights, mean) = &self.codes {
            mean.get_or_init(|| mean_magnitude(weights).max(MIN_SCALE));
        }
        Ok(())
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        Box::new(Self {
            codes: self.codes.clone(),
            num_stored_columns: self.num_stored_columns,
            rows: part_of(&self.rows, rows),
            columns: part_of(&self.columns, columns),
        })
    }
}

impl QuantisedRows for TernaryRows<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Four,
                group_size: self.num_stored_columns,
                has_offsets: false,
            },
            rows: self.rows.len(),
            columns: self.columns.len(),
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns.len());
        let stored = self.rows.start + index;
        match &self.codes {
            &Codes::Packed {
                bytes,
                num_rows,
                scale,
            } => {
                let codes: &mut [u8] = bytemuck::cast_slice_mut(&mut row.codes);
                let first = stored % num_rows * self.num_stored_columns + self.columns.start;
                bytes.read_at(first, codes);
                let shift = 2 * (stored / num_rows);
                let mut is_known = true;
                for code in &mut row.codes {
                    *code = (code.cast_unsigned() >> shift & 3).cast_signed() - 1;
                    is_known &= *code < 2;
                }
                // The other value of two bits is no weight.
                row.scales[0] = if is_known { scale } else { f32::NAN };
            }
            Codes::Online(weights, mean) => {
                let mean = mean.get().copied().unwrap_or(f32::NAN);
                let mut values = vec![0.0; self.num_stored_columns];
                weights.read_row(stored, &mut values);
                let inverse = 1.0 / mean;
                for (code, value) in row.codes.iter_mut().zip(&values[self.columns.clone()]) {
                    *code = (value * inverse).round_ties_even().clamp(-1.0, 1.0) as i8;
                }
                let is_finite = values.iter().all(|value| value.is_finite());
                // As exact as the weights are.
                row.scales[0] = match weights.dtype() {
                    _ if !is_finite => f32::NAN,
                    Dtype::Bf16 => bf16::from_f32(1.0 / inverse).to_f32(),
                    Dtype::F16 => f16::from_f32(1.0 / inverse).to_f32(),
                    Dtype::F32 => 1.0 / inverse,
                };
            }
        }
    }
}

fn mean_magnitude(weights: &Tensor<'_>) -> f32 {
    let mut row = vec![0.0; weights.columns()];
    let mut sum = 0.0;
    for index in 0..weights.rows() {
        weights.read_row(index, &mut row);
        sum += row.iter().map(|value| f64::from(value.abs())).sum::<f64>();
    }
    (sum / (weights.rows() * weights.columns()) as f64) as f32
}
