//! Where a checkpoint says how its weights are quantised.

use std::path::Path;

use crate::file_stamp::FileStamp;
use crate::json_file::JsonFile;
use inflight_base::LoadError;

/// Sections of config.json: today's, and the one of the first versions of compressed-tensors, each with the method to
/// take where it names none.
const SECTIONS: [(&str, Option<&str>); 2] = [
    ("quantization_config", None),
    ("compression_config", Some("compressed-tensors")),
];

/// Files of a folder whose config.json has no section: of AutoGPTQ, of AutoAWQ, of ModelOpt (which has a section in
/// its file).
const FILES: [(&str, Option<&str>, &str); 3] = [
    ("quantize_config.json", None, "gptq"),
    ("quant_config.json", None, "awq"),
    ("hf_quant_config.json", Some("quantization"), "modelopt"),
];

/// How a checkpoint's weights are quantised, as its files say it.
#[derive(Debug)]
pub struct QuantisationSection {
    pub(super) section: JsonFile,
    default_method: Option<&'static str>,
    stamp: Option<FileStamp>,
}

impl QuantisationSection {
    /// The section of `config`, or else a file beside it. `None` if there is neither.
    ///
    /// # Errors
    /// A file cannot be read, or what should be a section is something else.
    pub fn find(dir: &Path, config: &JsonFile) -> Result<Option<Self>, LoadError> {
        for (key, default_method) in SECTIONS {
            if let Some(section) = config.object(key)? {
                return Ok(Some(Self {
                    section,
                    default_method,
                    stamp: None,
                }));
            }
        }
        for (name, key, method) in FILES {
            let path = dir.join(name);
            if !path.exists() {
                continue;
            }
            let stamp = FileStamp::of(&path);
            let file = JsonFile::read(&path)?;
            let section = match key {
                None => Some(file),
                Some(key) => file.object(key)?,
            };
            return Ok(section.map(|section| Self {
                section,
                default_method: Some(method),
                stamp,
            }));
        }
        Ok(None)
    }

    /// The name of the method.
    ///
    /// # Errors
    /// It is not a string.
    pub(super) fn method(&self) -> Result<Option<&str>, LoadError> {
        let given = self.section.string("quant_method")?;
        Ok(given.or(self.default_method))
    }

    /// The stamp of the file, unless it is config.json.
    pub fn stamp(&self) -> Option<&FileStamp> {
        self.stamp.as_ref()
    }
}
