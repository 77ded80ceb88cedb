//! Checkpoints that were quantised before they were saved: `quantization_config` of config.json.
//!
//! ```text
//! gptq.rs         GPTQ of 4 and 8 bits, also with act order
//! awq.rs          AWQ of 4 bits, version gemm
//! compressed.rs   compressed-tensors, int-quantized and pack-quantized
//! groups.rs       scales and zeros of GPTQ and AWQ
//! words.rs        codes in 32-bit words, scales, act order
//! ```
//!
//! What a method leaves out (the output projection mostly, and modules that the config ignores) is there under its
//! usual name, and is read as always: which tensors a module has decides, and their shapes are checked.

mod awq;
mod compressed;
mod gptq;
mod groups;
mod words;

use super::json_file::JsonFile;
use super::matrix::Matrix;
use super::tensors::Tensors;
use crate::base::LoadError;

use awq::Awq;
use compressed::CompressedTensors;
use gptq::Gptq;

/// How the modules of a checkpoint are quantised.
#[derive(Debug)]
pub(super) enum Method {
    Gptq(Gptq),
    Awq(Awq),
    CompressedTensors(CompressedTensors),
}

impl Method {
    /// Reads `quantization_config`, if there is one.
    ///
    /// # Errors
    /// A method, or a value of one, that is not supported.
    pub(super) fn from_config(config: &JsonFile) -> Result<Option<Self>, LoadError> {
        const KEY: &str = "quantization_config";
        let Some(section) = config.object(KEY)? else {
            return Ok(None);
        };
        let method = match section.string("quant_method")? {
            Some("gptq") => Self::Gptq(Gptq::from_config(&section)?),
            Some("awq") => Self::Awq(Awq::from_config(&section)?),
            Some("compressed-tensors") => {
                Self::CompressedTensors(CompressedTensors::from_config(&section)?)
            }
            other => {
                return Err(refused(
                    &section,
                    "quant_method",
                    format_args!("'{}'", other.unwrap_or("none")),
                    "'gptq', 'awq' or 'compressed-tensors'",
                ));
            }
        };
        Ok(Some(method))
    }

    /// The weights of a module, `[outputs, inputs]`, quantised or not.
    ///
    /// # Errors
    /// A tensor that is missing, or has another shape or type than the method gives it.
    pub(super) fn matrix<'a>(
        &self,
        tensors: &'a Tensors,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let module = Module {
            tensors,
            name: module,
            outputs,
            inputs,
        };
        let quantised = match self {
            Self::Gptq(gptq) => gptq.matrix(&module)?,
            Self::Awq(awq) => awq.matrix(&module)?,
            Self::CompressedTensors(compressed) => compressed.matrix(&module)?,
        };
        match quantised {
            Some(matrix) => Ok(matrix),
            None => {
                let weight = tensors.get(&module.tensor("weight"), &[outputs, inputs])?;
                Ok(Matrix::Float(weight.to_float()?))
            }
        }
    }
}

/// A linear layer of a checkpoint.
struct Module<'a, 'n> {
    tensors: &'a Tensors,
    name: &'n str,
    outputs: usize,
    inputs: usize,
}

impl Module<'_, '_> {
    /// The name of one of its tensors.
    fn tensor(&self, tensor: &str) -> String {
        format!("{}.{tensor}", self.name)
    }
}

/// The error of a method or of a value that is not read.
fn refused(
    section: &JsonFile,
    key: &str,
    value: impl std::fmt::Display,
    supported: &str,
) -> LoadError {
    let expected = format!(
        "supported; {supported} is: use another quantisation of the model (see docs/src/checkpoints.md), or \
         the bf16, f16 or f32 checkpoint it was made from"
    );
    section.unexpected(key, value, expected)
}

/// `group_size`: -1 for all inputs of an output.
fn group_size(section: &JsonFile, key: &str) -> Result<Option<usize>, LoadError> {
    let Some(value) = section.get(key) else {
        return Ok(None);
    };
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(size @ 32..=0xffff_ffff) if size % 32 == 0 => Ok(Some(size as usize)),
        _ => Err(refused(
            section,
            key,
            value,
            "-1 or a multiple of 32 above 0",
        )),
    }
}
