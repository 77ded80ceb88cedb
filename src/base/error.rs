//! The three kinds of error: one fails a load, one fails a request, one fails an instance.
//!
//! Each names the thing, its value and the way out, because the text is what a user reads.

use std::path::PathBuf;

use thiserror::Error;

/// Why a model or an instance could not be loaded. The server lives on without it.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A parameter of config.pbtxt with a value outside its range.
    #[error("parameter '{key}': '{value}' is not {expected}")]
    Knob {
        /// The parameter's key.
        key: String,
        /// What config.pbtxt says.
        value: String,
        /// What may stand there: type and range.
        expected: String,
    },
    /// A parameter of config.pbtxt that does not exist.
    #[error("unknown parameter '{key}'{}", did_you_mean(.nearest))]
    UnknownKnob {
        /// The key as written.
        key: String,
        /// The known key most like it.
        nearest: Option<String>,
    },
    /// A parameter of config.pbtxt that another backend has.
    #[error("parameter '{key}' is none of this backend's: {reason}")]
    ForeignKnob {
        /// The key as written.
        key: String,
        /// What to write instead, or why nothing.
        reason: String,
    },
    /// Another field of config.pbtxt, or several together, that cannot be served.
    #[error("config.pbtxt: {problem}; {remedy}")]
    Config {
        /// What is wrong, with the value.
        problem: String,
        /// What to write instead.
        remedy: String,
    },
    /// A file of the checkpoint that is missing or cannot be understood.
    #[error("{}: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor of the checkpoint that is missing or has the wrong shape, type or values.
    #[error("{}: tensor '{name}': {reason}", .path.display())]
    Tensor {
        /// The file, or the folder where no file has it.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Several errors, each with its own way out.
    #[error("{}", list(.0))]
    Several(Vec<LoadError>),
    /// The machine cannot give what the model needs: memory, threads.
    #[error("{0}")]
    Resource(String),
}

/// Why one request was refused or ended early. Only its client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// An option with a value of the wrong type or outside its range.
    #[error("option '{name}': {value} is not {expected}")]
    Option {
        /// The option's name as the client wrote it.
        name: String,
        /// The value as the client wrote it.
        value: String,
        /// What may stand there.
        expected: String,
    },
    /// An option that does not exist.
    #[error("unknown option '{name}'{}", did_you_mean(.nearest))]
    UnknownOption {
        /// The name as the client wrote it.
        name: String,
        /// The known option most like it.
        nearest: Option<String>,
    },
    /// Anything else that the client must change: an input tensor, a combination of options.
    #[error("{0}")]
    Invalid(String),
    /// The client's request id belongs to a request that has not had its final response.
    #[error("request id '{0}' is in flight already; use it again after its final response")]
    InFlight(String),
    /// Our fault, or the checkpoint's: logits that are not numbers, a failed step.
    #[error("{0}")]
    Internal(String),
}

/// Why a step failed: the instance's state is unknown afterwards, and every request in it fails.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("step failed: {0}")]
pub struct StepError(pub String);

impl LoadError {
    /// Nothing, the one error, or all of them as one.
    pub fn check(errors: Vec<Self>) -> Result<(), Self> {
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
}

fn list(errors: &[LoadError]) -> String {
    let numbered = errors.iter().enumerate();
    let numbered: Vec<_> = numbered
        .map(|(index, error)| format!("({}) {error}", index + 1))
        .collect();
    format!("{} errors: {}", errors.len(), numbered.join("; "))
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map(|name| format!("; did you mean '{name}'?"))
        .unwrap_or_default()
}
