//! Quantised safetensors checkpoints.
//!
//! ```text
//! gptq.rs           GPTQ, 4 and 8 bits, with or without act order
//! awq.rs            AWQ, 4 bits, version gemm
//! compressed.rs     compressed-tensors, of integers and of floats
//! integer_rows.rs   its integers
//! fp8.rs            FP8, of several methods
//! bitnet.rs         BitNet, three values
//! bitsandbytes.rs   4 bits (NF4, FP4) and 8 bits of bitsandbytes
//! modelopt.rs       TensorRT Model Optimizer, FP8 and NVFP4
//! mxfp4.rs          MXFP4, of gpt-oss and of compressed-tensors
//! nvfp4.rs          NVFP4, of ModelOpt and of compressed-tensors
//! fp4_rows.rs       floats of 4 bits with scales
//! fp4_columns.rs    floats of 4 bits whose rows are columns of their tensor
//! joined_groups.rs  groups that are smaller than the kernels'
//! groups.rs         scales and zeros of GPTQ and AWQ
//! words.rs          codes in 32-bit words, scales, act order
//! module.rs         a linear layer by name, and what the methods share when they read the config
//! stack.rs          several matrices in one tensor
//! section.rs        where the method and its settings are found
//! ```
//!
//! Modules that a method leaves unquantised (mostly the output projection, and those that the config ignores) are
//! stored under their usual names. The tensors that a module has decide how it is read, and their shapes are checked.

mod awq;
mod bitnet;
mod bitsandbytes;
mod compressed;
mod fp4_columns;
mod fp4_rows;
mod fp8;
mod gptq;
mod groups;
mod integer_rows;
mod joined_groups;
mod modelopt;
mod module;
mod mxfp4;
mod nvfp4;
mod section;
mod stack;
mod words;

use self::awq::Awq;
use self::bitnet::BitNet;
use self::bitsandbytes::BitsAndBytes;
use self::compressed::CompressedTensors;
use self::fp8::Fp8;
use self::gptq::Gptq;
use self::modelopt::ModelOpt;
use self::module::{Module, refused};
use self::mxfp4::MxFp4;
pub use self::section::QuantisationSection;
pub use self::stack::Stack;
use super::matrix::Matrix;
use super::safetensors::SafetensorsFolder;
use inflight_base::LoadError;

/// The quantisation method of a checkpoint.
#[derive(Debug)]
pub enum Quantisation {
    Gptq(Gptq),
    Awq(Awq),
    CompressedTensors(CompressedTensors),
    Fp8(Fp8),
    BitNet(BitNet),
    BitsAndBytes(BitsAndBytes),
    MxFp4(MxFp4),
    ModelOpt(ModelOpt),
}

impl Quantisation {
    /// Reads how the weights are quantised.
    ///
    /// # Errors
    /// The method, or one of its settings, is not supported.
    pub fn from_section(found: &QuantisationSection) -> Result<Self, LoadError> {
        let section = &found.section;
        let quantisation = match found.method()? {
            Some("gptq") => Self::Gptq(Gptq::from_config(section)?),
            Some("awq") => Self::Awq(Awq::from_config(section)?),
            Some("compressed-tensors") => {
                Self::CompressedTensors(CompressedTensors::from_config(section)?)
            }
            Some("fp8") => Self::Fp8(Fp8::from_config(section)?),
            Some("bitnet") => Self::BitNet(BitNet::from_config(section)?),
            Some("bitsandbytes") => Self::BitsAndBytes(BitsAndBytes::from_config(section)?),
            Some("mxfp4") => Self::MxFp4(MxFp4),
            Some("modelopt") => Self::ModelOpt(ModelOpt::from_config(section)?),
            other => {
                return Err(refused(
                    section,
                    "quant_method",
                    format_args!("'{}'", other.unwrap_or("none")),
                    "'gptq', 'awq', 'compressed-tensors', 'fp8', 'bitnet', 'bitsandbytes', 'mxfp4' or 'modelopt'",
                ));
            }
        };
        Ok(quantisation)
    }

    /// The weights of a module, `[outputs, inputs]`, quantised or not.
    ///
    /// # Errors
    /// A tensor is missing, or does not have the shape or type that the method gives it.
    pub fn matrix<'a>(
        &self,
        tensors: &'a SafetensorsFolder,
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
            Self::Fp8(fp8) => fp8.matrix(&module)?,
            Self::BitNet(method) => method.matrix(&module)?,
            Self::BitsAndBytes(method) => method.matrix(&module)?,
            Self::ModelOpt(method) => method.matrix(&module)?,
            // Only experts are.
            Self::MxFp4(_) => None,
        };
        match quantised {
            Some(matrix) => Ok(matrix),
            None => {
                let weight = tensors.get(&module.tensor("weight"), &[outputs, inputs])?;
                Ok(Matrix::Float(weight.to_float()?))
            }
        }
    }

    /// One of several matrices in a tensor, `[outputs, inputs]`; `None` if that is not quantised.
    ///
    /// # Errors
    /// As [`Quantisation::matrix`].
    pub fn one_of<'a>(&self, stack: &Stack<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        match self {
            Self::MxFp4(method) => method.one_of(stack),
            Self::Fp8(method) => method.one_of(stack),
            Self::ModelOpt(method) => method.one_of(stack),
            // Each expert has tensors of its own.
            Self::Gptq(_)
            | Self::Awq(_)
            | Self::CompressedTensors(_)
            | Self::BitNet(_)
            | Self::BitsAndBytes(_) => Ok(None),
        }
    }
}
