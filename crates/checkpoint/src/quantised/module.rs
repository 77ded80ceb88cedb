//! A linear layer by name, and what the methods share when they read the config.

use crate::json_file::JsonFile;
use crate::safetensors::{SafetensorsFolder, StoredTensor};
use inflight_base::LoadError;

/// A linear layer of a checkpoint.
pub struct Module<'a, 'n> {
    pub tensors: &'a SafetensorsFolder,
    pub name: &'n str,
    pub outputs: usize,
    pub inputs: usize,
}

impl<'a> Module<'a, '_> {
    /// The full name of one of its tensors.
    pub fn tensor(&self, tensor: &str) -> String {
        format!("{}.{tensor}", self.name)
    }

    /// The first of several tensors that it has.
    pub fn find_any(&self, names: &[&str]) -> Result<Option<StoredTensor<'a>>, LoadError> {
        for name in names {
            if let Some(stored) = self.tensors.find(&self.tensor(name))? {
                return Ok(Some(stored));
            }
        }
        Ok(None)
    }

    /// A tensor that a quantised weight needs.
    pub fn beside(
        &self,
        weight: &StoredTensor<'_>,
        tensor: &str,
    ) -> Result<StoredTensor<'a>, LoadError> {
        let name = self.tensor(tensor);
        self.tensors.find(&name)?.ok_or_else(|| {
            let reason = format!("is quantised, and {name} is missing");
            weight.location.error(reason)
        })
    }
}

/// The error for a method or a setting that is not supported.
pub fn refused(
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

/// Inputs of a group; `None` (-1 in the config) for all inputs of an output. Those that are no multiples of 32 are
/// rounded to groups that kernels have.
pub fn group_size(section: &JsonFile, key: &str) -> Result<Option<usize>, LoadError> {
    let Some(value) = section.get(key) else {
        return Ok(None);
    };
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(size @ 8..=0xffff_ffff) if size % 8 == 0 => Ok(Some(size as usize)),
        _ => Err(refused(
            section,
            key,
            value,
            "-1 or a multiple of 8 above 0",
        )),
    }
}
