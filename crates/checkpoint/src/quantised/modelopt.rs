//! TensorRT Model Optimizer: FP8 and NVFP4, also both in one model.
//!
//! ```text
//! quant_algo
//! FP8, FP8_PER_CHANNEL_PER_TOKEN    e4m3, one scale per tensor or output
//! FP8_PB_WO                         e4m3, one scale per block of 128 x 128
//! NVFP4, W4A16_NVFP4                floats of 4 bits
//! MIXED_PRECISION                   `quantized_layers` has one of these for each module
//! ```
//!
//! The tensors of a module show its format. So `exclude_modules` (or `ignore`), which lists modules that are not
//! quantised, with wildcards, is not needed: published checkpoints have FP8 modules among the excluded ones.
//! `quantized_layers` must agree with the tensors. Formats of the KV cache (`kv_cache_quant_algo`, `k_scale`,
//! `v_scale`) and of activations (`input_scale`) are not read.

use std::collections::HashMap;

use safetensors::tensor::Dtype as StoredDtype;
use serde_json::json;

use super::fp8::Fp8;
use super::module::{Module, refused};
use super::nvfp4;
use super::stack::Stack;
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::safetensors::StoredTensor;
use inflight_base::LoadError;

/// ModelOpt as `quantization_config` or `hf_quant_config.json` describes it.
#[derive(Debug)]
pub struct ModelOpt {
    fp8: Fp8,
    /// The formats of modules by name, if the config lists them.
    layers: HashMap<String, Algorithm>,
}

/// A format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Fp8,
    Fp8Blocks,
    NvFp4,
}

impl Algorithm {
    const SUPPORTED: &str = "'FP8', 'FP8_PER_CHANNEL_PER_TOKEN', 'FP8_PB_WO', 'NVFP4', 'W4A16_NVFP4' or \
                             'MIXED_PRECISION' with these";

    fn of(section: &JsonFile) -> Result<Self, LoadError> {
        let name = section.string("quant_algo")?;
        let algorithm = match name.map(str::to_ascii_uppercase).as_deref() {
            Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => Self::Fp8,
            Some("FP8_PB_WO") => Self::Fp8Blocks,
            Some("NVFP4" | "W4A16_NVFP4") => Self::NvFp4,
            _ => {
                let value = format_args!("'{}'", name.unwrap_or("none"));
                return Err(refused(section, "quant_algo", value, Self::SUPPORTED));
            }
        };
        const SIZE: &str = "group_size";
        match section.get(SIZE) {
            // FP8 has no groups, whatever the config says.
            Some(size) if algorithm == Self::NvFp4 && *size != json!(nvfp4::GROUP) => {
                Err(refused(section, SIZE, size, &nvfp4::GROUP.to_string()))
            }
            _ => Ok(algorithm),
        }
    }

    /// As the config calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::Fp8Blocks => "FP8_PB_WO",
            Self::NvFp4 => "NVFP4",
        }
    }

    /// The element type of its weights.
    fn dtype(self) -> StoredDtype {
        match self {
            Self::Fp8 | Self::Fp8Blocks => StoredDtype::F8_E4M3,
            Self::NvFp4 => StoredDtype::U8,
        }
    }
}

impl ModelOpt {
    /// `quant_method: modelopt`.
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let mut layers = HashMap::new();
        let algorithm = section.string("quant_algo")?;
        let is_mixed = algorithm.is_some_and(|it| it.eq_ignore_ascii_case("MIXED_PRECISION"));
        if let Some(all) = section.object("quantized_layers")?
            && is_mixed
        {
            for (name, _) in all.entries() {
                if let Some(layer) = all.object(name)? {
                    layers.insert(name.clone(), Algorithm::of(&layer)?);
                }
            }
        }
        let has_blocks = match is_mixed {
            true => layers.values().any(|&it| it == Algorithm::Fp8Blocks),
            false => Algorithm::of(section)? == Algorithm::Fp8Blocks,
        };
        Ok(Self {
            fp8: Fp8::of_modelopt(has_blocks),
            layers,
        })
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let Some(weight) = module.tensors.find(&module.tensor("weight"))? else {
            return Ok(None);
        };
        self.check_layer(module, &weight)?;
        match weight.dtype {
            StoredDtype::U8 => {
                let scales = module.beside(&weight, "weight_scale")?;
                let factor = nvfp4::factor(module.beside(&weight, "weight_scale_2")?, false)?;
                nvfp4::matrix(module, weight, scales, factor).map(Some)
            }
            StoredDtype::F8_E4M3 => self.fp8.matrix(module),
            _ => Ok(None),
        }
    }

    /// One of several matrices in a tensor; `None` if that is not quantised.
    pub fn one_of<'a>(&self, stack: &Stack<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        match stack.find()? {
            Some(weight) if weight.dtype == StoredDtype::U8 => {
                nvfp4::one_of(stack, weight).map(Some)
            }
            _ => self.fp8.one_of(stack),
        }
    }

    /// Checks that a module is as the config says, and has nothing that is not read.
    fn check_layer(
        &self,
        module: &Module<'_, '_>,
        weight: &StoredTensor<'_>,
    ) -> Result<(), LoadError> {
        if let Some(algorithm) = self.layers.get(module.name)
            && weight.dtype != algorithm.dtype()
        {
            return Err(weight.location.error(format!(
                "is of type {:?}; quantized_layers of the config calls for {:?} ({}): one of them is wrong",
                weight.dtype,
                algorithm.dtype(),
                algorithm.name()
            )));
        }
        match module.find_any(&["pre_quant_scale", "svdquant_lora_a"])? {
            None => Ok(()),
            Some(stored) => {
                let reason = "is not supported: use a checkpoint in plain NVFP4 or FP8";
                Err(stored.location.error(reason.to_owned()))
            }
        }
    }
}
