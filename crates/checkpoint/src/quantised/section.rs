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
    /// The section of `config`, or of the language model's config in it, or else a file beside it. `None` if there is
    /// none of these.
    ///
    /// # Errors
    /// A file cannot be read, or what should be a section is something else.
    pub fn find(dir: &Path, config: &JsonFile) -> Result<Option<Self>, LoadError> {
        let text = config.object("text_config")?;
        for config in [Some(config), text.as_ref()].into_iter().flatten() {
            for (key, default_method) in SECTIONS {
                if let Some(section) = config.object(key)? {
                    return Ok(Some(Self {
                        section,
                        default_method,
                        stamp: None,
                    }));
                }
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
        Ok(has_bits_of_bitnet(config).then(|| {
            let section = [
                ("quant_method", "bitnet"),
                ("linear_class", "autobitlinear"),
                ("quantization_mode", "online"),
            ];
            let section = section.map(|(key, value)| (key.to_owned(), value.into()));
            Self {
                section: JsonFile::new(config.path(), "", section.into_iter().collect()),
                default_method: None,
                stamp: None,
            }
        }))
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

/// Whether it is a model of the authors of BitNet b1.58, whose code rounds floats when it computes with them.
fn has_bits_of_bitnet(config: &JsonFile) -> bool {
    let class = config.get("architectures").and_then(|it| it.get(0));
    let is_of_authors = class.and_then(|it| it.as_str()) == Some("BitnetForCausalLM");
    is_of_authors && config.get("weight_bits").and_then(|it| it.as_u64()) == Some(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_language_model_in_a_model_with_images_may_have_the_section_and_a_bitnet_of_its_authors_none()
     {
        let find = |config: serde_json::Value| {
            let config = config.as_object().expect("an object").clone();
            let config = JsonFile::new(Path::new("config.json"), "", config);
            let found = QuantisationSection::find(Path::new("no such folder"), &config);
            let found = found.expect("valid");
            found.and_then(|it| it.method().expect("a name").map(str::to_owned))
        };
        let section = |method: &str| json!({"quant_method": method});
        let of_text = json!({"text_config": {"quantization_config": section("gptq")}});
        assert_eq!(find(of_text).as_deref(), Some("gptq"));
        let both = json!({
            "quantization_config": section("awq"), "text_config": {"quantization_config": section("gptq")},
        });
        assert_eq!(find(both).as_deref(), Some("awq"));
        assert_eq!(find(json!({"text_config": {}})), None);
        let bits = |class: &str| json!({"architectures": [class], "weight_bits": 1});
        assert_eq!(find(bits("BitnetForCausalLM")).as_deref(), Some("bitnet"));
        assert_eq!(find(bits("LlamaForCausalLM")), None);
    }
}
