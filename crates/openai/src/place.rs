//! Where files of a model are: `MODEL=PATH`.

use std::path::PathBuf;
use std::str::FromStr;

/// A model, and a file or folder of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The model's name.
    pub model: String,
    /// The file or folder.
    pub path: PathBuf,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((model, path)) if !model.is_empty() && !path.is_empty() => Ok(Self {
                model: model.to_owned(),
                path: path.into(),
            }),
            _ => Err("give MODEL=PATH".to_owned()),
        }
    }
}
