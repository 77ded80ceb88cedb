//! The three kinds of error. Each fails one thing: a load, a request, or a model instance.
//!
//! Users read these texts, so each names the thing, its value and the way out.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a model or an instance failed to load. The server keeps running without it.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A parameter of config.pbtxt with a value outside its range.
    #[error("parameter '{key}': '{value}' is not {expected}")]
    Knob {
        /// The parameter's key.
        key: String,
        /// The value as written.
        value: String,
        /// The accepted type and range.
        expected: String,
    },
    /// A parameter of config.pbtxt that does not exist.
    #[error("unknown parameter '{key}'{}", did_you_mean(.nearest))]
    UnknownKnob {
        /// The key as written.
        key: String,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// A parameter of another backend in config.pbtxt.
    #[error("parameter '{key}' belongs to another backend: {reason}")]
    ForeignKnob {
        /// The key as written.
        key: String,
        /// What to write instead, or why nothing replaces it.
        reason: String,
    },
    /// An unsupported field of config.pbtxt, or an unsupported combination of fields.
    #[error("config.pbtxt: {problem}; {remedy}")]
    Config {
        /// What is wrong, with the value.
        problem: String,
        /// What to write instead.
        remedy: String,
    },
    /// A missing or unreadable file of the checkpoint.
    #[error("{}: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor of the checkpoint that is missing or has the wrong shape, data type or values.
    #[error("{}: tensor '{name}': {reason}", .path.display())]
    Tensor {
        /// The file, or the folder if no file contains the tensor.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Several errors, each with its own way out.
    #[error("{}", list(.0))]
    Several(Vec<LoadError>),
    /// The machine lacks a resource that the model needs, such as memory or threads.
    #[error("{0}")]
    Resource(String),
}

/// Why a request was rejected or ended early. Only its client sees the error.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// An option with a value of the wrong type or outside its range.
    #[error("option '{name}': {value} is not {expected}")]
    Option {
        /// The option's name as the client wrote it.
        name: String,
        /// The value as the client wrote it.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// An option that does not exist.
    #[error("unknown option '{name}'{}", did_you_mean(.nearest))]
    UnknownOption {
        /// The name as the client wrote it.
        name: String,
        /// The most similar known option.
        nearest: Option<String>,
    },
    /// Any other mistake of the client, such as a bad input tensor or combination of options.
    #[error("{0}")]
    Invalid(String),
    /// The client's request id belongs to a request that is still in flight.
    #[error("request id '{0}' is already in flight; use it again after its final response")]
    InFlight(String),
    /// Something that the request names is not there, such as an adapter.
    #[error("{0}")]
    NotFound(String),
    /// There is no room now for what the request needs; it may be sent again later.
    #[error("{0}")]
    Busy(String),
    /// A fault of the backend or the checkpoint, such as non-finite logits or a failed step.
    #[error("{0}")]
    Internal(String),
}

/// Why a step failed. The instance's state is unknown afterwards, so all of its requests fail.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("step failed: {0}")]
pub struct StepError(pub String);

impl LoadError {
    /// Combines `errors` into one. Flattens nested [`LoadError::Several`].
    ///
    /// # Errors
    /// Any of `errors`; `Ok` if the list is empty.
    pub fn combine(errors: Vec<Self>) -> Result<(), Self> {
        let mut all = Vec::new();
        for error in errors {
            match error {
                Self::Several(several) => all.extend(several),
                error => all.push(error),
            }
        }
        match all.len() {
            0 => Ok(()),
            1 => Err(all.remove(0)),
            _ => Err(Self::Several(all)),
        }
    }

    /// The text for a client of a model: it names files, and not where they are on this machine.
    pub fn for_client(&self) -> String {
        match self {
            Self::File { path, reason } => format!("{}: {reason}", name_of(path)),
            Self::Tensor { path, name, reason } => {
                format!("{}: tensor '{name}': {reason}", name_of(path))
            }
            Self::Several(errors) => list_of(errors, Self::for_client),
            Self::Knob { .. }
            | Self::UnknownKnob { .. }
            | Self::ForeignKnob { .. }
            | Self::Config { .. }
            | Self::Resource(_) => self.to_string(),
        }
    }
}

fn list(errors: &[LoadError]) -> String {
    list_of(errors, ToString::to_string)
}

fn list_of(errors: &[LoadError], text: impl Fn(&LoadError) -> String) -> String {
    let numbered = errors.iter().enumerate();
    let numbered: Vec<_> = numbered
        .map(|(index, error)| format!("({}) {}", index + 1, text(error)))
        .collect();
    format!("{} errors: {}", errors.len(), numbered.join("; "))
}

/// The last part of a path.
fn name_of(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map(|name| format!("; did you mean '{name}'?"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_do_not_learn_where_files_are() {
        let path = PathBuf::from("/srv/tenant/adapter_config.json");
        let file = || LoadError::File {
            path: path.clone(),
            reason: "is no JSON".to_owned(),
        };
        let tensor = LoadError::Tensor {
            path: path.clone(),
            name: "a".to_owned(),
            reason: "is missing".to_owned(),
        };
        assert!(file().to_string().starts_with("/srv/tenant"));
        assert_eq!(file().for_client(), "adapter_config.json: is no JSON");
        let several = LoadError::Several(vec![file(), tensor]);
        assert_eq!(
            several.for_client(),
            "2 errors: (1) adapter_config.json: is no JSON; (2) adapter_config.json: tensor 'a': is missing"
        );
    }
}
