//! NVFP4: floats of 4 bits (E2M1), each 16 of which share a float of 8 bits (E4M3) as scale, and all of them a factor
//! (NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference", 2025).
//!
//! ```text
//! ModelOpt          weight          U8       [outputs, inputs / 2]     two codes a byte, the first in the low bits
//!                   weight_scale    F8_E4M3  [outputs, inputs / 16]
//!                   weight_scale_2  one                                the factor
//!
//! compressed-tensors, nvfp4-pack-quantized
//!                   weight_packed   U8       [outputs, inputs / 2]
//!                   weight_scale    F8_E4M3  [outputs, inputs / 16]
//!                   weight_global_scale  one                           1 / factor
//!
//! ModelOpt, all experts of a layer
//!                   NAME                 U8       [num_matrices, outputs, inputs / 2]
//!                   NAME_weight_scale    F8_E4M3  [num_matrices, outputs, inputs / 16]
//!                   NAME_weight_scale_2  one, or one for each matrix
//!                   or [num_matrices, inputs / 2, outputs] and [num_matrices, inputs / 16, outputs] (Llama 4, gpt-oss)
//!
//! weight = factor scale f(code)
//! ```
//!
//! Kernels have scales of 32 weights, so the weights become [codes of 8 bits](super::joined_groups). Scales of
//! activations (`input_scale`, `input_global_scale`) are not read.

use safetensors::tensor::Dtype as StoredDtype;

use super::fp4_columns::Fp4Columns;
use super::fp4_rows::{Fp4Rows, Fp4Scale};
use super::joined_groups::matrix_of_codes;
use super::module::Module;
use super::stack::Stack;
use super::words::Floats;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use crate::stored_rows::StoredQuantisedRows;
use crate::tensor::TensorLocation;
use inflight_base::LoadError;

/// Weights that share a scale.
pub const GROUP: usize = 16;

/// A module whose packed weights and scales are these.
///
/// # Errors
/// A tensor does not have the shape or type that the format gives it.
pub fn matrix<'a>(
    module: &Module<'a, '_>,
    packed: StoredTensor<'a>,
    scales: StoredTensor<'a>,
    factor: f32,
) -> Result<Matrix<'a>, LoadError> {
    let &Module {
        outputs, inputs, ..
    } = module;
    check_inputs(&packed, inputs)?;
    let location = packed.location;
    let packed = packed.of_shape(&[outputs, inputs / 2])?;
    let scales = of_scales(scales, &[outputs, inputs / GROUP])?;
    let rows = Fp4Rows::new(
        packed.bytes,
        scales.bytes,
        Fp4Scale::Float(factor),
        [outputs, inputs],
    );
    Ok(matrix_of_codes(location, Box::new(rows)))
}

/// One of several matrices whose packed weights are these.
///
/// # Errors
/// As [`matrix`].
pub fn one_of<'a>(
    stack: &Stack<'a, '_>,
    packed: StoredTensor<'a>,
) -> Result<Matrix<'a>, LoadError> {
    let &Stack {
        num_matrices,
        outputs,
        inputs,
        index,
        ..
    } = stack;
    check_inputs(&packed, inputs)?;
    let location = packed.location;
    let scales = stack.beside(&packed, &["_weight_scale"])?;
    let factors = stack.beside(&packed, &["_weight_scale_2"])?;
    let factor = factor_of(factors, num_matrices, index)?;
    let packed = packed.of_shape(&stack.shape(inputs / 2))?;
    let packed = packed.one_of(num_matrices, index);
    let scales = of_scales(scales, &stack.shape(inputs / GROUP))?;
    let scales = scales.one_of(num_matrices, index);
    let kind = Fp4Scale::Float(factor);
    let shape = [outputs, inputs];
    let rows: Box<dyn StoredQuantisedRows<'a> + 'a> = match stack.is_by_inputs {
        true => Box::new(Fp4Columns::new(packed, scales, kind, shape)),
        false => Box::new(Fp4Rows::new(packed, scales, kind, shape)),
    };
    Ok(matrix_of_codes(location, rows))
}

/// The factor in a tensor of one element, which may be stored as its reciprocal.
///
/// # Errors
/// The tensor has more elements, or is no finite number above 0.
pub fn factor(stored: StoredTensor<'_>, is_reciprocal: bool) -> Result<f32, LoadError> {
    if !matches!(stored.shape, [] | [1]) {
        let reason = format!("has shape {:?}; [1] is expected", stored.shape);
        return Err(stored.location.error(reason));
    }
    let location = stored.location;
    finite(location, Floats::all(stored)?[0], is_reciprocal)
}

/// The factor of one of several matrices.
fn factor_of(
    stored: StoredTensor<'_>,
    num_matrices: usize,
    index: usize,
) -> Result<f32, LoadError> {
    let location = stored.location;
    let index = match *stored.shape {
        [] | [1] => 0,
        [len] | [len, 1] | [len, 1, 1] if len == num_matrices => index,
        _ => {
            let shape = stored.shape;
            let reason = format!("has shape {shape:?}; [1] and [{num_matrices}] are supported");
            return Err(location.error(reason));
        }
    };
    finite(location, Floats::some(stored, index..index + 1)?[0], false)
}

fn finite(
    location: TensorLocation<'_>,
    stored: f32,
    is_reciprocal: bool,
) -> Result<f32, LoadError> {
    let factor = if is_reciprocal { 1.0 / stored } else { stored };
    match factor.is_finite() && factor > 0.0 {
        true => Ok(factor),
        false => Err(location.error(format!(
            "is {stored}; a scale and its reciprocal are finite numbers above 0: the file is damaged"
        ))),
    }
}

fn check_inputs(stored: &StoredTensor<'_>, inputs: usize) -> Result<(), LoadError> {
    match inputs.is_multiple_of(GROUP) {
        true => Ok(()),
        false => Err(stored.location.error(format!(
            "has rows of {inputs} weights; multiples of {GROUP} are supported"
        ))),
    }
}

fn of_scales<'a>(stored: StoredTensor<'a>, shape: &[usize]) -> Result<StoredTensor<'a>, LoadError> {
    let stored = stored.of_shape(shape)?;
    match stored.dtype {
        StoredDtype::F8_E4M3 => Ok(stored),
        other => {
            let reason = format!("is of type {other:?}; NVFP4 has scales in F8_E4M3");
            Err(stored.location.error(reason))
        }
    }
}
