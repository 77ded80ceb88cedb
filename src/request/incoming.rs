//! A request as it arrives: read from Triton once, on the execute thread.
//!
//! Parsing options and tokenising prompts takes time, and is done elsewhere. So an [`Arrival`] owns copies of all that
//! is needed, each checked for its size before it is copied, and can be sent to another thread.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use crate::request::adapter_tensors::{self, is_adapter_tensor};
use crate::request::foreign_fields::{foreign, is_unread};
use crate::request::images::{ArrivedImages, IMAGE_INPUTS, ImageReader};
use crate::request::option_sizes::OptionSizes;
use crate::request::option_tensors::option_of;
use crate::request::options::{self, RequestOptions};
use crate::request::prompt::{ArrivedIds, ArrivedPrompt, PromptEncoder};
use inflight_base::{ClientId, RequestError, TokenId};
use inflight_config::{InputKind, ModelConfig, OutputKind, Scheduling};
use inflight_manager::{AdapterStore, AdapterUpload, UploadWriter};
use inflight_triton::{Error, Input, OwnedInput, ParameterValue, Request, strings};

/// Bytes that a request with images counts beside their size: more than the threads for small requests take.
const MIN_IMAGE_BYTES: usize = 512 << 10;

/// The parameter in which Triton's /generate passes the request id.
const REQUEST_ID: &str = "id";

/// Reads the requests of a model.
#[derive(Clone, Copy)]
pub struct RequestReader<'model> {
    /// The model's configuration.
    pub config: &'model ModelConfig,
    /// Encodes prompts.
    pub encoder: &'model PromptEncoder,
    /// Takes the adapters that requests bring.
    pub adapters: Option<&'model AdapterStore>,
}

/// The purpose of a new request.
pub enum Incoming {
    /// To generate text.
    Generate(Box<Arrival>),
    /// To stop the request in flight with the same request id.
    Stop(StopRequest),
    /// To end its conversation, with a response of these outputs.
    EndConversation(RequestedOutputs),
}

/// A request that stops another one.
pub struct StopRequest {
    /// The client's request id; empty if there is none.
    pub client_request_id: String,
    /// The outputs of the response to this request.
    pub outputs: RequestedOutputs,
}

/// A request to generate text, not yet parsed.
pub struct Arrival {
    /// The client's request id; empty if there is none.
    pub client_request_id: String,
    /// When it was first seen.
    pub time: Instant,
    /// The output tensors that it requests.
    pub outputs: RequestedOutputs,
    /// The time limit that Triton knows; 0 for none.
    pub timeout_us: u64,
    /// The conversation that it continues.
    pub turn: Option<TurnPrompt>,
    /// Takes the adapter that it brings.
    pub adapter_writer: Option<UploadWriter>,
    pub(super) adapter: Option<AdapterUpload>,
    pub(super) prompt: Result<ArrivedPrompt, Error>,
    pub(super) images: ArrivedImages,
    /// Whether an option may have images, which takes longer than its size tells.
    may_have_images: bool,
    options: ArrivedOptions,
    option_bytes: usize,
}

/// What a turn of a conversation continues.
pub struct TurnPrompt {
    /// All that has been said.
    pub context: Arc<[TokenId]>,
    /// Whether no turn follows.
    pub is_last: bool,
}

/// The output tensors that a request names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedOutputs {
    /// The named outputs that exist; all of the model's if the request names none.
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
        match self.config.scheduling {
            Scheduling::Iterative { .. } if request.flags()?.is_end() => {
                return Err(Error::invalid(
                    "sequence_end is set; a generation is one request, and the server ends its sequence: \
                     leave sequence_end out",
                ));
            }
            Scheduling::Conversations { .. } if self.only_ends_a_conversation(request)? => {
                return Ok(Incoming::EndConversation(self.requested_outputs(request)?));
            }
            _ => {}
        }
        let arriving = match self.adapters {
            Some(adapters) => adapter_tensors::receive(request, adapters)?,
            None => None,
        };
        let (adapter, adapter_writer) = arriving.unzip();
        let images = self.image_inputs(request)?;
        let (given, option_bytes) = self.given_options(request, &client_request_id)?;
        let takes_images = self.encoder.images.is_some();
        let may_have_images =
            takes_images && given.iter().any(|(name, it)| may_have_images(name, it));
        let mut options = ArrivedOptions::Given(given);
        let prompt = match prompt_input(self.config.input, request) {
            Err(error) => Err(error),
            Ok(input) if self.config.has_batch_dim && input.batch_size() != 1 => {
                Err(one_prompt(&input))
            }
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
            turn: None,
            adapter_writer,
            adapter,
            prompt,
            images,
            may_have_images,
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

    /// Whether a request ends its conversation and has no prompt.
    fn only_ends_a_conversation(self, request: &Request) -> Result<bool, Error> {
        let flags = request.flags()?;
        if flags.is_start() || !flags.is_end() {
            return Ok(false);
        }
        let input = prompt_input(self.config.input, request)?;
        let num_bytes_of_none = match self.config.input {
            InputKind::Text => strings::LENGTH_BYTES,
            InputKind::Ids => 0,
        };
        Ok(input.num_bytes() == num_bytes_of_none)
    }

    /// The inputs that carry options.
    fn option_inputs(self, request: &Request) -> Result<impl Iterator<Item = Input<'_>>, Error> {
        let inputs = request.inputs()?.into_iter();
        Ok(inputs.filter(move |input| {
            // The values of Triton's controls are flags of the request, too.
            let name = input.name();
            name != self.config.input.name() && !self.config.controls.iter().any(|it| it == name)
        }))
    }

    /// Whether a request stops the one in flight with its request id, instead of asking for tokens.
    fn asks_to_stop(self, request: &Request) -> Result<bool, Error> {
        let mut sizes = self.option_sizes();
        // A string never stops a request, so strings are not read.
        for parameter in request.parameters(|_| 0)? {
            sizes.add(0)?;
            if parameter? == ("stop", ParameterValue::Bool(true)) {
                return Ok(true);
            }
        }
        for input in self.option_inputs(request)? {
            if input.name() == "stop" {
                let input = copy_option(&input, &mut sizes)?;
                if option_of(&input)? == Value::Bool(true) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The tensors of images, if the model takes images.
    fn image_inputs(self, request: &Request) -> Result<ArrivedImages, Error> {
        let mut images = ArrivedImages::default();
        let Some(reader) = &self.encoder.images else {
            return Ok(images);
        };
        for input in self.option_inputs(request)? {
            if IMAGE_INPUTS.contains(&input.name()) {
                images.add(&input, reader.max_bytes())?;
            }
        }
        Ok(images)
    }

    /// The limits of options.
    fn option_sizes(self) -> OptionSizes {
        let images = self.encoder.images.as_ref();
        OptionSizes::new(
            self.encoder.vocab_size,
            images.map_or(0, ImageReader::max_bytes),
        )
    }

    /// All options of the request, from its parameters and its inputs except the prompt, and their size in bytes.
    fn given_options(
        self,
        request: &Request,
        client_request_id: &str,
    ) -> Result<(Vec<(String, GivenOption)>, usize), Error> {
        let mut sizes = self.option_sizes();
        let max_bytes = self.option_sizes();
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
        for input in self.option_inputs(request)? {
            let is_image = IMAGE_INPUTS.contains(&input.name());
            if is_image || self.adapters.is_some() && is_adapter_tensor(input.name()) {
                sizes.add(0)?;
                // Refused as an image, whatever it holds.
                if is_image && self.encoder.images.is_none() && input.num_bytes() > 0 {
                    let image = GivenOption::Parameter(Value::String(String::new()));
                    given.push(("images".to_owned(), image));
                }
                continue;
            }
            let option = match is_unread(input.name()) {
                // Adapters and embeddings are large, and refused by name.
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

    /// Copies the token ids of a prompt. Options can select a part of `input_ids`: if the list is longer than any
    /// prompt, these options are parsed at once, and only that part is copied.
    ///
    /// # Errors
    /// Errors in these options.
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
    /// The size of its options, its prompt and its images, in bytes.
    pub fn num_bytes(&self) -> usize {
        let prompt = self.prompt.as_ref().map_or(0, ArrivedPrompt::num_bytes);
        self.option_bytes + prompt + self.image_bytes()
    }

    /// The number of bytes to parse, tokenise or decode. Token ids are only checked.
    pub fn num_bytes_to_read(&self) -> usize {
        match &self.prompt {
            Ok(ArrivedPrompt::Text(text)) => self.option_bytes + self.image_bytes() + text.len(),
            _ => self.option_bytes + self.image_bytes(),
        }
    }

    /// The size of its images. A file of a few bytes may take as long as a large one, so each counts as large.
    fn image_bytes(&self) -> usize {
        match self.may_have_images || !self.images.is_empty() {
            true => self.images.num_bytes() + MIN_IMAGE_BYTES,
            false => 0,
        }
    }

    /// The client that it names, if that can be told without parsing its options: clients take turns.
    pub fn client(&self) -> Option<ClientId> {
        let number = match &self.options {
            ArrivedOptions::Parsed(options) => return options.client_id,
            ArrivedOptions::Given(given) => given.iter().find_map(|(name, option)| {
                let is_named = options::canonical_name(name) == Some("client_id");
                match option {
                    GivenOption::Parameter(value) if is_named => value.as_u64(),
                    GivenOption::Tensor(input) if is_named => option_of(input).ok()?.as_u64(),
                    _ => None,
                }
            }),
        };
        number.map(ClientId)
    }

    /// The parsed options.
    ///
    /// # Errors
    /// An option is unknown, or its value is refused.
    pub(super) fn options(&mut self) -> Result<RequestOptions, Error> {
        self.options.parsed().map(std::mem::take)
    }
}

impl ArrivedOptions {
    /// Parses the options that have not been parsed yet.
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

/// Whether an option may have images. In JSON the word may be written by escapes. A large option takes as long anyway,
/// and is not searched.
fn may_have_images(name: &str, option: &GivenOption) -> bool {
    let text = match option {
        GivenOption::Parameter(value) => value.as_str(),
        GivenOption::Tensor(input) => std::str::from_utf8(input.bytes()).ok(),
    };
    let has_word = |text: &str| text.contains("image") || text.contains("\\u");
    text.is_some_and(|text| text.len() > MIN_IMAGE_BYTES || has_word(text))
        || options::canonical_name(name) == Some("images")
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

/// The error of a request with several prompts, which Triton's `dynamic_batching` lets through.
fn one_prompt(input: &Input<'_>) -> Error {
    Error::invalid(format!(
        "input '{}' has a batch of {}; a request is one prompt: send each in a request of its own",
        input.name(),
        input.batch_size()
    ))
}

/// Whether the parameter of Triton's /generate is the same as the request id that Triton has made from it.
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
        // JSON has no NaN and no infinity: they would become null, which means that an option is not given.
        ParameterValue::Double(value) if !value.is_finite() => {
            return Err(Error::invalid(format!(
                "option '{name}': {value} is not a finite number; give one, or leave the option out"
            )));
        }
        ParameterValue::Bool(value) => value.into(),
        ParameterValue::Int(value) => value.into(),
        ParameterValue::Double(value) => value.into(),
        ParameterValue::String(value) => value.into(),
        // An unknown option is refused by name.
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
