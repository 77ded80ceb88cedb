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
//! weight = factor scale f(code)
//! ```
//!
//! Kernels have scales of 32 weights, so the weights become [codes of 8 bits](super::joined_groups), half of them
//! without loss. Scales of activations (`input_scale`, `input_global_scale`) are not read.

use safetensors::tensor::Dtype as StoredDtype;

use super::fp4_rows::{Fp4Rows, Fp4Scale};
use super::joined_groups::matrix_of_codes;
use super::module::Module;
use super::words::Floats;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
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

/// The factor in a tensor of one element, which may be stored as its reciprocal.
///
/// # Errors
/// The tensor has more elements, or is no finite number above 0.
pub fn factor(stored: StoredTensor<'_>, is_reciprocal: bool) -> Result<f32, LoadError> {
    let location = stored.location;
    if !matches!(stored.shape, [] | [1]) {
        let reason = format!("has shape {:?}; [1] is expected", stored.shape);
        return Err(location.error(reason));
    }
    let stored = Floats::all(stored)?[0];
    let factor = if is_reciprocal { 1.0 / stored } else { stored };
    match factor.is_finite() && factor > 0.0 {
        true => Ok(factor),
        false => Err(location.error(format!(
            "is {stored}; a scale is a finite number above 0: the file is damaged"
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
