//! FP8: e4m3 codes, of 4 bits of exponent and 3 of mantissa (Micikevicius et al., arXiv:2209.05433).
//!
//! ```text
//! quant_method fp8                             transformers, vLLM, AutoFP8
//! quant_method modelopt, quant_algo FP8 ...    TensorRT Model Optimizer
//! compressed-tensors, format float-quantized   LLM Compressor
//!
//! weight                              F8_E4M3 [outputs, inputs]
//! weight_scale or weight_scale_inv    one for all, [outputs], [outputs, 1], or one for each block, such as of 128 x 128:
//!                                     [blocks of outputs, blocks of inputs], or that with ones between (ModelOpt)
//! weight = scale * code
//! ```
//!
//! Scales of activations are not read: activations are not FP8.

use safetensors::tensor::Dtype as StoredDtype;

use super::module::{Module, refused};
use super::words::Floats;
use crate::fp8_matrix::{Fp8Matrix, Fp8Scales};
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use inflight_base::LoadError;

/// Outputs and inputs of a block of ModelOpt's `FP8_PB_WO`.
const MODELOPT_BLOCK: [usize; 2] = [128, 128];

/// FP8 as `quantization_config` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8 {
    /// Outputs and inputs of a block that shares a scale, if there are blocks.
    block: Option<[usize; 2]>,
}

impl Fp8 {
    /// `quant_method: fp8`.
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let block = block(section, "weight_block_size")?;
        Ok(Self { block })
    }

    /// ModelOpt's FP8, in blocks or not.
    pub fn of_modelopt(has_blocks: bool) -> Self {
        let block = has_blocks.then_some(MODELOPT_BLOCK);
        Self { block }
    }

    /// A scheme of compressed-tensors.
    pub fn from_scheme(weights: &JsonFile) -> Result<Self, LoadError> {
        let block = block(weights, "block_structure")?;
        Ok(Self { block })
    }

    /// A module's matrix; `None` if it is not FP8.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Module {
            tensors,
            outputs,
            inputs,
            ..
        } = module;
        let Some(weight) = tensors.find(&module.tensor("weight"))? else {
            return Ok(None);
        };
        if weight.dtype != StoredDtype::F8_E4M3 {
            return Ok(None);
        }
        let weight = weight.of_shape(&[outputs, inputs])?;
        let scales = match module.find_any(&["weight_scale_inv"])? {
            Some(scales) => scales,
            None => module.beside(&weight, "weight_scale")?,
        };
        let scales = self.scales(scales, outputs, inputs)?;
        let matrix = Fp8Matrix::new(weight.bytes, outputs, inputs, scales);
        Ok(Some(Matrix::Fp8(weight.location, matrix)))
    }

    fn scales(
        &self,
        stored: StoredTensor<'_>,
        outputs: usize,
        inputs: usize,
    ) -> Result<Fp8Scales, LoadError> {
        let [block_outputs, block_inputs] = self.block.unwrap_or([outputs, inputs]);
        let num_blocks = [
            outputs.div_ceil(block_outputs),
            inputs.div_ceil(block_inputs),
        ];
        let (block_outputs, block_inputs) = match *stored.shape {
            [rows, columns] | [rows, 1, columns, 1]
                if self.block.is_some() && [rows, columns] == num_blocks =>
            {
                (block_outputs, block_inputs)
            }
            [] | [1] | [1, 1] => (outputs, inputs),
            [rows] | [rows, 1] if rows == outputs => (1, inputs),
            _ => {
                let blocks = match self.block {
                    Some(_) => format!(", and {num_blocks:?}"),
                    None => String::new(),
                };
                return Err(stored.location.error(format!(
                    "has shape {:?}; supported for {outputs} outputs and {inputs} inputs are [1], [{outputs}, 1]{blocks}",
                    stored.shape
                )));
            }
        };
        Ok(Fp8Scales {
            values: Floats::all(stored)?,
            block_outputs,
            block_inputs,
        })
    }
}

/// The size of blocks; `None` if the config has none.
fn block(section: &JsonFile, key: &str) -> Result<Option<[usize; 2]>, LoadError> {
    let Some(value) = section.get(key).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let sizes = value.as_array().map_or(&[][..], |sizes| sizes);
    let mut sizes = sizes.iter().map(|size| {
        let size = size.as_u64().filter(|size| (1..=1 << 20).contains(size))?;
        usize::try_from(size).ok()
    });
    match (sizes.next(), sizes.next(), sizes.next()) {
        (Some(Some(outputs)), Some(Some(inputs)), None) => Ok(Some([outputs, inputs])),
        _ => Err(refused(
            section,
            key,
            value,
            "a list of two sizes, such as [128, 128],",
        )),
    }
}
