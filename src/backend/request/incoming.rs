//! A request as it arrives: read from Triton once, on the execute thread.
//!
//! What takes time, parsing the options and tokenising the prompt, can wait. So an [`Arrival`] owns copies of all that
//! it needs, each checked for its size before it is copied, and may be sent to another thread.

use std::ops::Range;
use std::time::Instant;

use serde_json::Value;

use crate::backend::request::foreign_fields::{foreign, is_unread};
use crate::backend::request::option_sizes::OptionSizes;
use crate::backend::request::option_tensors::option_of;
use crate::backend::request::options::{self, RequestOptions};
use crate::backend::request::prompt::{ArrivedIds, ArrivedPrompt, PromptEncoder};
use crate::base::RequestError;
use crate::config::{InputKind, ModelConfig, OutputKind};
use crate::triton::{Error, Input, OwnedInput, ParameterValue, Request, strings};

/// The parameter in which Triton's /generate hands on the request id.
const REQUEST_ID: &str = "id";

/// Reads the requests of a model.
#[derive(Clone, Copy)]
pub struct RequestReader<'model> {
    /// The model's configuration.
    pub config: &'model ModelConfig,
    /// What the prompts are to be encoded with.
    pub encoder: &'model PromptEncoder,
}

/// What a new request asks for.
pub enum Incoming {
    /// To generate text.
    Generate(Box<Arrival>),
    /// To stop the request in flight with the same request id.
    Stop(StopRequest),
}

/// A request that stops another one.
pub struct StopRequest {
    /// The request id that the client gave; empty if it gave none.
    pub client_request_id: String,
    /// The outputs of its own response.
    pub outputs: RequestedOutputs,
}

/// A request to generate text, not yet parsed.
pub struct Arrival {
    /// The request id that the client gave; empty if it gave none.
    pub client_request_id: String,
    /// When it was first seen.
    pub time: Instant,
    /// The output tensors that it names.
    pub outputs: RequestedOutputs,
    /// The time limit that Triton knows of; 0 for none.
    pub timeout_us: u64,
    pub(super) prompt: Result<ArrivedPrompt, Error>,
    options: ArrivedOptions,
    option_bytes: usize,
}

/// The output tensors that a request names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedOutputs {
    /// Those that exist; all of the model's if the request names none.
    pub kinds: Vec<OutputKind>,
    /// Whether the request names fewer outputs than the model has. To Triton, a request that names none names all.
    pub are_named: bool,
}

enum ArrivedOptions {
    /// By name, in the order of their precedence.
    Given(Vec<(String, GivenOption)>),
    Parsed(Box<RequestOptions>),
}

enum GivenOption {
    Parameter(Value),
    Tensor(OwnedInput),
}

impl RequestReader<'_> {
    /// Reads a request.
    ///
    /// # Errors
    /// A parameter or an input is too large, or cannot be read.
    pub fn read(self, request: &Request, now: Instant) -> Result<Incoming, Error> {
        let client_request_id = request.client_id()?.unwrap_or_default().to_owned();
        if self.asks_to_stop(request)? {
            return Ok(Incoming::Stop(StopRequest {
                client_request_id,
                outputs: self.requested_outputs(request)?,
            }));
        }
        if request.flags()?.is_end() {
            return Err(Error::invalid(
                "sequence_end is set; a generation is one request, and the server ends its sequence: \
                 leave sequence_end out",
            ));
        }
        let (given, option_bytes) = self.given_options(request, &client_request_id)?;
        let mut options = ArrivedOptions::Given(given);
        let prompt = match prompt_input(self.config.input, request) {
            Err(error) => Err(error),
            Ok(input) => match self.config.input {
                InputKind::Text => self.copy_text(&input),
                InputKind::Ids => self.copy_ids(&input, &mut options)?,
            },
        };
        Ok(Incoming::Generate(Box::new(Arrival {
            client_request_id,
            time: now,
            outputs: self.requested_outputs(request)?,
            timeout_us: request.timeout_us()?,
            prompt,
            options,
            option_bytes,
        })))
    }

    fn requested_outputs(self, request: &Request) -> Result<RequestedOutputs, Error> {
        let names = request.requested_outputs()?;
        Ok(RequestedOutputs {
            are_named: names.len() < self.config.outputs.len(),
            kinds: names
                .iter()
                .filter_map(|name| OutputKind::from_name(name))
                .collect(),
        })
    }

    /// Whether a request does not ask for tokens but stops the one in flight with its request id.
    fn asks_to_stop(self, request: &Request) -> Result<bool, Error> {
        let mut sizes = OptionSizes::new(self.encoder.vocab_size);
        // No string stops anything, so none is read.
        for parameter in request.parameters(|_| 0)? {
            sizes.add(0)?;
            if parameter? == ("stop", ParameterValue::Bool(true)) {
                return Ok(true);
            }
        }
        for input in request.inputs()? {
            if input.name() == "stop" {
                let input = copy_option(&input, &mut sizes)?;
                if option_of(&input)? == Value::Bool(true) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Everything that the request asks for, its parameters and its inputs besides the prompt, with their bytes.
    fn given_options(
        self,
        request: &Request,
        client_request_id: &str,
    ) -> Result<(Vec<(String, GivenOption)>, usize), Error> {
        let mut sizes = OptionSizes::new(self.encoder.vocab_size);
        let max_bytes = OptionSizes::new(self.encoder.vocab_size);
        let mut given = Vec::new();
        for parameter in request.parameters(|name| max_bytes.max_bytes(name))? {
            let (name, value) = parameter?;
            if name == REQUEST_ID {
                check_request_id(value, client_request_id)?;
                continue;
            }
            let value = parameter_option(name, value, &mut sizes)?;
            given.push((name.to_owned(), GivenOption::Parameter(value)));
        }
        for input in request.inputs()? {
            if input.name() == self.config.input.name() {
                continue;
            }
            let option = match is_unread(input.name()) {
                // Adapters and embeddings are large, and refused by their names.
                true => GivenOption::Parameter(Value::Bool(true)),
                false => GivenOption::Tensor(copy_option(&input, &mut sizes)?),
            };
            given.push((input.name().to_owned(), option));
        }
        Ok((given, sizes.num_bytes()))
    }

    fn copy_text(self, input: &Input<'_>) -> Result<ArrivedPrompt, Error> {
        let num_bytes = input.num_bytes();
        let max_bytes = self
            .encoder
            .max_prompt_bytes()
            .saturating_add(strings::LENGTH_BYTES);
        if num_bytes > max_bytes {
            return Ok(ArrivedPrompt::LongText(num_bytes));
        }
        let bytes = input.bytes()?;
        Ok(ArrivedPrompt::Text(bytes.into_owned()))
    }

    /// Copies the ids of a prompt. A request may bring any number of them and name those that count: of a list that is
    /// longer than any prompt, only these are copied, and the options that name them are parsed at once.
    ///
    /// # Errors
    /// Those of the options.
    fn copy_ids(
        self,
        input: &Input<'_>,
        options: &mut ArrivedOptions,
    ) -> Result<Result<ArrivedPrompt, Error>, Error> {
        let num_given = match input.num_elements::<i32>() {
            Ok(num_given) => num_given,
            Err(error) => return Ok(Err(error)),
        };
        let range = match num_given <= self.encoder.max_seq_len.index() {
            true => Ok(0..num_given),
            false => self.encoder.id_range(num_given, options.parsed()?),
        };
        let copy = |range: Range<usize>| {
            Ok(ArrivedPrompt::Ids(ArrivedIds {
                num_given,
                start: range.start,
                ids: input.elements_in(range)?,
            }))
        };
        Ok(range.and_then(copy))
    }
}

impl Arrival {
    /// Bytes of its options and of its prompt.
    pub fn num_bytes(&self) -> usize {
        self.option_bytes + self.prompt.as_ref().map_or(0, ArrivedPrompt::num_bytes)
    }

    /// Bytes that are to be parsed or tokenised. Token ids are only checked.
    pub fn num_bytes_to_read(&self) -> usize {
        match &self.prompt {
            Ok(ArrivedPrompt::Text(text)) => self.option_bytes + text.len(),
            _ => self.option_bytes,
        }
    }

    /// The options, parsed.
    ///
    /// # Errors
    /// An option that the backend does not have, or whose value it refuses.
    pub(super) fn options(&mut self) -> Result<RequestOptions, Error> {
        self.options.parsed().map(std::mem::take)
    }
}

impl ArrivedOptions {
    /// Parses what is not parsed yet.
    fn parsed(&mut self) -> Result<&mut RequestOptions, Error> {
        if let Self::Given(given) = self {
            let mut values = Vec::with_capacity(given.len());
            for (name, option) in given.iter_mut() {
                let value = match option {
                    GivenOption::Parameter(value) => value.take(),
                    GivenOption::Tensor(input) => option_of(input)?,
                };
                values.push((name.as_str(), value));
            }
            let options = RequestOptions::parse(values)?;
            *self = Self::Parsed(Box::new(options));
        }
        match self {
            Self::Parsed(options) => Ok(options),
            Self::Given(_) => unreachable!("they were parsed above"),
        }
    }
}

/// Copies an option's tensor, unless it is too large.
fn copy_option(input: &Input<'_>, sizes: &mut OptionSizes) -> Result<OwnedInput, Error> {
    let num_bytes = input.num_bytes();
    if num_bytes > sizes.max_bytes(input.name()) {
        return Err(sizes.refusal(input.name(), &num_bytes.to_string()));
    }
    sizes.add(num_bytes)?;
    input.to_owned()
}

fn prompt_input(kind: InputKind, request: &Request) -> Result<Input<'_>, Error> {
    let mut inputs = request.inputs()?.into_iter();
    inputs
        .find(|input| input.name() == kind.name())
        .ok_or_else(|| Error::invalid(format!("input '{}' is missing", kind.name())))
}

/// Whether the parameter that Triton's /generate hands on is the request id that it has made of it.
fn check_request_id(
    value: ParameterValue<'_>,
    client_request_id: &str,
) -> Result<(), RequestError> {
    if !client_request_id.is_empty() && value == ParameterValue::String(client_request_id) {
        return Ok(());
    }
    Err(RequestError::Option {
        name: REQUEST_ID.to_owned(),
        value: value.to_string(),
        expected: "the request id, a short text".to_owned(),
    })
}

/// The value that a parameter gives to the option of its name.
fn parameter_option(
    name: &str,
    value: ParameterValue<'_>,
    sizes: &mut OptionSizes,
) -> Result<Value, Error> {
    sizes.add(match value {
        ParameterValue::String(text) => text.len(),
        _ => 0,
    })?;
    if is_unread(name) {
        return Ok(Value::Bool(true));
    }
    Ok(match value {
        // JSON has no NaN and no infinity: they would become null, which stands for an option that is not given.
        ParameterValue::Double(value) if !value.is_finite() => {
            return Err(Error::invalid(format!(
                "option '{name}': {value} is not a finite number; give one, or leave the option out"
            )));
        }
        ParameterValue::Bool(value) => value.into(),
        ParameterValue::Int(value) => value.into(),
        ParameterValue::Double(value) => value.into(),
        ParameterValue::String(value) => value.into(),
        // An unknown option is refused by its name.
        ParameterValue::TooLong
            if options::canonical_name(name).is_none() && foreign(name).is_none() =>
        {
            Value::Bool(true)
        }
        ParameterValue::TooLong => {
            let max = sizes.max_bytes(name);
            return Err(sizes.refusal(name, &format!("more than {max}")));
        }
    })
}
