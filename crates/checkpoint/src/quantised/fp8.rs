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
//! NAME                                F8_E4M3 [num_matrices, outputs, inputs], or [num_matrices, inputs, outputs]
//! NAME_scale_inv or NAME_weight_scale one for all, [num_matrices], [num_matrices, outputs, 1] or, of the second,
//!                                     [num_matrices, 1, outputs]; of the first also scales of blocks of each matrix
//! weight = scale * code
//! ```
//!
//! Scales of activations are not read: activations are not FP8.

use safetensors::tensor::Dtype as StoredDtype;

use super::module::{Module, refused};
use super::stack::Stack;
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

    /// One of several matrices in a tensor; `None` if that is not FP8.
    pub fn one_of<'a>(&self, stack: &Stack<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Stack {
            num_matrices,
            outputs,
            inputs,
            index,
            ..
        } = stack;
        let Some(weight) = stack.find()? else {
            return Ok(None);
        };
        if weight.dtype != StoredDtype::F8_E4M3 {
            return Ok(None);
        }
        let weight = weight.of_shape(&stack.shape(inputs))?;
        let scales = stack.beside(
            &weight,
            &["_scale_inv", "_weight_scale_inv", "_weight_scale"],
        )?;
        let scales = self.scales_of(stack, scales)?;
        let codes = weight.one_of(num_matrices, index);
        let location = weight.location;
        let matrix = match stack.is_by_inputs {
            false => Matrix::Fp8(location, Fp8Matrix::new(codes, outputs, inputs, scales)),
            true => {
                let stored = Fp8Matrix::new(codes, inputs, outputs, scales);
                Matrix::Fp8(location, stored).turned()
            }
        };
        Ok(Some(matrix))
    }

    /// The scales of one of several matrices, as rows and columns of the tensor.
    fn scales_of(
        &self,
        stack: &Stack<'_, '_>,
        stored: StoredTensor<'_>,
    ) -> Result<Fp8Scales, LoadError> {
        let &Stack {
            num_matrices,
            outputs,
            inputs,
            is_by_inputs,
            index,
            ..
        } = stack;
        let block = self.block.filter(|_| !is_by_inputs);
        let num_blocks = block.map(|[rows, columns]| {
            let [rows, columns] = [outputs.div_ceil(rows), inputs.div_ceil(columns)];
            [num_matrices, rows, columns]
        });
        let [rows, columns] = match is_by_inputs {
            true => [inputs, outputs],
            false => [outputs, inputs],
        };
        let is_of_outputs = match *stored.shape {
            [count, len] | [count, len, 1] => {
                !is_by_inputs && [count, len] == [num_matrices, outputs]
            }
            [count, 1, len] => is_by_inputs && [count, len] == [num_matrices, outputs],
            _ => false,
        };
        let (block_outputs, block_inputs, len) = match *stored.shape {
            [] | [1] => (rows, columns, 0),
            _ if num_blocks.is_some_and(|shape| stored.shape == shape) => {
                let [block_outputs, block_inputs] = block.expect("there are blocks");
                let [_, rows, columns] = num_blocks.expect("there are blocks");
                (block_outputs, block_inputs, rows * columns)
            }
            [count] | [count, 1] | [count, 1, 1] if count == num_matrices => (rows, columns, 1),
            _ if is_of_outputs && is_by_inputs => (rows, 1, outputs),
            _ if is_of_outputs => (1, columns, outputs),
            _ => {
                let blocks = num_blocks.map_or(String::new(), |shape| format!(", {shape:?}"));
                let of_outputs = match is_by_inputs {
                    true => [num_matrices, 1, outputs],
                    false => [num_matrices, outputs, 1],
                };
                return Err(stored.location.error(format!(
                    "has shape {:?}; supported are [1], [{num_matrices}], {of_outputs:?}{blocks}",
                    stored.shape
                )));
            }
        };
        let values = match len {
            0 => Floats::all(stored)?,
            _ => Floats::some(stored, index * len..(index + 1) * len)?,
        };
        Ok(Fp8Scales {
            values,
            block_outputs,
            block_inputs,
        })
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
