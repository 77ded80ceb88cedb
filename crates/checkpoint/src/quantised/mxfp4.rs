//! MXFP4: floats of 4 bits (E2M1), each 32 of which share a power of two as scale (OCP Microscaling Formats, 1.0).
//!
//! ```text
//! OpenAI's gpt-oss (quant_method mxfp4): the weights of all experts of a layer
//! NAME_blocks      U8 [num_matrices, outputs, inputs / 32, 16]    two codes a byte, the first in the low bits
//! NAME_scales      U8 [num_matrices, outputs, inputs / 32]        the exponents, 127 of which stands for 1
//!
//! compressed-tensors, mxfp4-pack-quantized
//! weight_packed    U8 [outputs, inputs / 2]
//! weight_scale     U8 [outputs, inputs / 32]
//!
//! weight = 2^(exponent - 127) f(code)
//! ```
//!
//! Twice a float of 4 bits is a whole number from -12 to 12, so the weights are taken over as codes of 8 bits, without
//! loss: 4 bits hold whole numbers from -8 to 7 only. A GPU keeps them in 4 bits
//! ([`QuantisedRows::are_twice_e2m1`](inflight_numbers::QuantisedRows::are_twice_e2m1)). Other weights
//! (`modules_to_not_convert`) are stored unquantised.

use safetensors::tensor::Dtype as StoredDtype;

use super::fp4_rows::{Fp4Rows, Fp4Scale};
use super::module::Module;
use super::stack::Stack;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use inflight_base::LoadError;

/// MXFP4, which has no settings that matter: the tensors tell what is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MxFp4;

impl MxFp4 {
    /// Weights that share a scale.
    pub const GROUP: usize = Fp4Scale::PowerOfTwo.group();

    /// One of several matrices in gpt-oss's tensors, which have rows of outputs; `None` if they are not quantised.
    ///
    /// # Errors
    /// A tensor is missing, or does not have the shape or type that the method gives it.
    pub fn one_of<'a>(self, stack: &Stack<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Stack {
            tensors,
            name,
            num_matrices,
            outputs,
            inputs,
            index,
            ..
        } = stack;
        let Some(blocks) = tensors.find(&format!("{name}_blocks"))? else {
            return Ok(None);
        };
        check_columns(&blocks, inputs)?;
        let shape = [num_matrices, outputs, inputs / Self::GROUP, Self::GROUP / 2];
        let location = blocks.location;
        let blocks = of_bytes(blocks, &shape)?;
        let scales = tensors.get(&format!("{name}_scales"), &shape[..3])?;
        let scales = of_bytes(scales, &shape[..3])?;
        let rows = Fp4Rows::new(
            blocks.one_of(num_matrices, index),
            scales.one_of(num_matrices, index),
            Fp4Scale::PowerOfTwo,
            [outputs, inputs],
        );
        Ok(Some(Matrix::Quantised(location, Box::new(rows))))
    }

    /// A module whose packed weights and scales are these.
    ///
    /// # Errors
    /// A tensor does not have the shape or type that the method gives it.
    pub fn matrix<'a>(
        self,
        module: &Module<'a, '_>,
        packed: StoredTensor<'a>,
        scales: StoredTensor<'a>,
    ) -> Result<Matrix<'a>, LoadError> {
        let &Module {
            outputs, inputs, ..
        } = module;
        check_columns(&packed, inputs)?;
        let location = packed.location;
        let rows = Fp4Rows::new(
            of_bytes(packed, &[outputs, inputs / 2])?.bytes,
            of_bytes(scales, &[outputs, inputs / Self::GROUP])?.bytes,
            Fp4Scale::PowerOfTwo,
            [outputs, inputs],
        );
        Ok(Matrix::Quantised(location, Box::new(rows)))
    }
}

fn check_columns(stored: &StoredTensor<'_>, inputs: usize) -> Result<(), LoadError> {
    match inputs.is_multiple_of(MxFp4::GROUP) {
        true => Ok(()),
        false => Err(stored.location.error(format!(
            "has rows of {inputs} weights; multiples of {} are supported",
            MxFp4::GROUP
        ))),
    }
}

fn of_bytes<'a>(stored: StoredTensor<'a>, shape: &[usize]) -> Result<StoredTensor<'a>, LoadError> {
    let stored = stored.of_shape(shape)?;
    match stored.dtype {
        StoredDtype::U8 => Ok(stored),
        other => {
            let reason = format!("is of type {other:?}; MXFP4 has U8");
            Err(stored.location.error(reason))
        }
    }
}
