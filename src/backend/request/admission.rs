//! From a Triton request to one that the engine takes: inputs, options, tokens, all checked.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use crate::backend::request::branches::{Branches, NewBranches};
use crate::backend::request::clients::{Handling, foreign, is_unread};
use crate::backend::request::option_sizes::OptionSizes;
use crate::backend::request::option_tensors::option_of;
use crate::backend::request::options::{self, NumSequences, RequestOptions};
use crate::backend::response::answer::{Answer, Echo, Row, Times};
use crate::backend::response::answer_memory::{AnswerMemory, Needs};
use crate::backend::response::stop_ids::StopIds;
use crate::backend::response::text_stream::{BeamText, TextRules, TextStream};
use crate::base::{RequestError, RequestId, TokenId, Tokens};
use crate::config::{BatchingScheme, InputKind, ModelConfig, OutputKind};
use crate::engine::NewRequest;
use crate::guidance::{Compilation, Compiler};
use crate::post_processors::{PostProcessors, ProcessedRequest};
use crate::sampling::{LogitsProcessor, SamplingParams, StopRule, StopText};
use crate::text::{ChatTemplate, Tokenizer};
use crate::triton::{Error, Input, ParameterValue, Request, strings};

/// The parameter in which Triton's /generate hands on the request id.
const REQUEST_ID: &str = "id";

/// How the requests of a model are read.
pub struct Admission {
    /// The instance's name, for the log.
    pub name: String,
    /// The model's configuration.
    pub config: Arc<ModelConfig>,
    /// The tokenizer and what hangs on it; none for a model that only knows ids.
    pub text: Option<TextParts>,
    /// What requests may name to change their logits.
    pub post_processors: Arc<PostProcessors>,
    /// What compiles the guides of requests; none where nothing can be guided.
    pub guides: Option<Arc<Compiler>>,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Whether tokens are chosen from logits.
    pub has_logits: bool,
    /// What answers with logits and log-probabilities may take.
    pub answer_memory: AnswerMemory,
    /// Prompt and output together.
    pub max_seq_len: Tokens,
    /// Tokens that end the output unless the request says otherwise.
    pub end_ids: Vec<TokenId>,
    /// What has been said once, and is not said again.
    pub warned: Warned,
}

/// What turns text into tokens and back.
#[derive(Clone)]
pub struct TextParts {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// How a conversation becomes a prompt, where the checkpoint says.
    pub template: Option<Arc<ChatTemplate>>,
}

/// A request that has been read.
pub struct Admitted {
    /// The engine's part.
    pub new_branches: NewBranches,
    /// Its guide, on its way; none if it has none, or has it already.
    pub compilation: Option<Compilation>,
    /// The responder's part.
    pub answer: Box<Answer>,
    /// When its own time limit passes.
    pub deadline: Option<Instant>,
}

/// A prompt, as text where it was text.
struct Prompt {
    text: String,
    ids: Vec<TokenId>,
}

impl Admission {
    /// Reads `request`, which is `id` from now on.
    ///
    /// # Errors
    /// What the client must change.
    pub fn read(
        &mut self,
        request: &mut Request,
        id: RequestId,
        now: Instant,
    ) -> Result<Admitted, Error> {
        if request.flags()?.is_end() {
            return Err(Error::invalid(
                "sequence_end is set; a generation is one request, and the server ends its sequence: \
                 leave sequence_end out",
            ));
        }
        let mut options = RequestOptions::parse(self.asked(request)?)?;
        options.take_defaults_of(self.config.settings.client_compatibility);
        self.check(&options)?;

        self.warn_of_ignored(&options);

        let prompt = self.prompt(request, &options)?;
        let num_prompt_tokens = prompt.ids.len();
        let max_new_tokens = options.max_tokens_or(self.config.settings.default_max_tokens)?;
        let bad_words = self.bad_words(&options)?;
        let mut sampling = options.sampling(&self.end_ids, bad_words, self.vocab_size)?;
        if !options.embedding_bias_words.is_empty() {
            let tokens = self.tokens_of_each(&options.embedding_bias_words)?;
            options.add_word_biases(&mut sampling, &tokens)?;
        }
        options.add_embedding_bias(&mut sampling, self.vocab_size)?;
        sampling.beam_search = options.beam_search(self.config.settings.max_beam_width)?;
        let num_sequences = match sampling.beam_search {
            None => self.num_sequences(&options, &sampling)?,
            // To the engine they are one.
            Some(_) => NumSequences {
                generated: 1,
                returned: 1,
            },
        };
        let stop_ids = StopIds::new(&options.stop_ids);
        let has_stop_words = !options.stop.is_empty();
        if sampling.beam_search.is_some() {
            let text = self.text_stream(has_stop_words, &options, &sampling, &prompt);
            if text.is_some() || !stop_ids.is_empty() {
                let text = BeamText::new(text, stop_ids.clone());
                sampling.stop_text = Some(StopText(Arc::new(text)));
            }
        }
        let compilation = self.compilation(&options, &mut sampling, now)?;
        let branches = Branches::new(id, num_sequences.generated);
        let processors = self.post_processors(request, branches, &options)?;

        let room = self.max_seq_len.index().saturating_sub(num_prompt_tokens);
        let num_new_tokens = room.min(max_new_tokens as usize);
        let outputs = self.wanted_outputs(request, &options)?;
        let wants_text = outputs.contains(&OutputKind::TextOutput) && options.text.detokenize;
        let num_found = sampling.beam_search.map(|it| it.num_returned as usize);
        let row = |branch: usize| {
            let is_read = wants_text || has_stop_words;
            let text = self.text_stream(is_read, &options, &sampling, &prompt);
            let processor = processors.get(branch).cloned();
            match num_found {
                None => Row::new(num_new_tokens, text, processor).ending_with(stop_ids.clone()),
                Some(_) => Row::found(text, processor),
            }
        };
        let num_rows = num_found.unwrap_or(branches.len());
        let mut answer = Answer::new(
            request.response_factory()?,
            Times::starting(now),
            (0..num_rows).map(row).collect(),
            self.vocab_size,
        );
        answer.num_returned = num_found.unwrap_or(num_sequences.returned as usize);
        answer.searches = num_found.is_some();
        answer.pad_id = options.pad_id(&sampling.end_ids);
        self.fit_to_clients(&mut answer, &options);
        answer.stream = options.stream;
        let stream_interval = options
            .stream_interval
            .unwrap_or(self.config.settings.stream_interval);
        answer.stream_interval = stream_interval as usize;
        answer.outputs = outputs;
        let drafts = options.drafts(num_new_tokens);
        let mut outputs = options.engine_outputs(&answer.outputs);
        if num_sequences.generated > num_sequences.returned {
            outputs.log_probs.get_or_insert(0);
        }
        if num_found.is_some() && !answer.outputs.contains(&OutputKind::Logprobs) {
            // Those that the search goes by come with what is found.
            outputs.log_probs = None;
        }
        if answer.searches && answer.stream {
            // Each time that it hears of them they are due.
            outputs.beams = NonZeroU32::new(stream_interval);
            answer.stream_interval = 1;
        }
        let of = |wanted, num_tokens| if wanted { num_tokens } else { 0 };
        // Of beams that fall away their rows may still be those of a text that has ended.
        let num_texts = branches.len() * sampling.beam_width() as usize;
        answer.memory = self.answer_memory.set_aside(Needs {
            num_logits: of(outputs.context_logits, num_prompt_tokens)
                + of(outputs.generation_logits, num_texts * num_new_tokens),
            num_tokens: of(outputs.log_probs.is_some(), num_texts * num_new_tokens),
            num_top: outputs.log_probs.unwrap_or_default(),
            as_json: answer.outputs.contains(&OutputKind::Logprobs),
        })?;
        answer.num_prompt_tokens = num_prompt_tokens;
        if answer.outputs.contains(&OutputKind::Logprobs) {
            answer.tokenizer = self.text.as_ref().map(|parts| parts.tokenizer.clone());
        }
        let excluded = options
            .exclude_input_in_output
            .unwrap_or(self.config.settings.exclude_input_in_output);
        if !excluded && !options.stream {
            answer.echo = Some(Echo {
                text: prompt.text,
                ids: prompt.ids.clone(),
            });
        }
        let timeout_us = match request.timeout_us()? {
            0 => options.timeout_us,
            timeout_us => timeout_us,
        };
        let first = NewRequest {
            id: branches.first(),
            client_id: options.client_id,
            prompt: prompt.ids.into(),
            stop: StopRule {
                max_new_tokens: Tokens(max_new_tokens),
            },
            sampling: Arc::new(sampling),
            priority: options.priority,
            reuse: options.reuse,
            outputs,
            drafts,
        };
        Ok(Admitted {
            new_branches: NewBranches::new(branches, first, processors),
            compilation,
            answer: Box::new(answer),
            deadline: (timeout_us > 0)
                .then(|| now.checked_add(Duration::from_micros(timeout_us)))
                .flatten(),
        })
    }

    /// Whether a request does not ask for tokens but stops the one in flight with its request id.
    ///
    /// # Errors
    /// Its parameters cannot be read.
    pub fn asks_to_stop(&self, request: &Request) -> Result<bool, Error> {
        let mut sizes = OptionSizes::new(self.vocab_size);
        // No text stops anything.
        for parameter in request.parameters(|_| 0)? {
            sizes.add(0)?;
            if parameter? == ("stop", ParameterValue::Bool(true)) {
                return Ok(true);
            }
        }
        for input in request.inputs()? {
            if input.name() == "stop" && option_of(&input, &mut sizes)? == Value::Bool(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The answer to a request that only stops another: as of one that has generated nothing.
    ///
    /// # Errors
    /// It asks for an output that the model does not have.
    pub fn answer_to_stop(
        &self,
        request: &mut Request,
        now: Instant,
    ) -> Result<Box<Answer>, Error> {
        let mut answer = Answer::new(
            request.response_factory()?,
            Times::starting(now),
            vec![Row::new(0, None, None)],
            self.vocab_size,
        );
        let options = RequestOptions::default();
        answer.outputs = self.wanted_outputs(request, &options)?;
        self.fit_to_clients(&mut answer, &options);
        Ok(Box::new(answer))
    }

    /// Gives an answer the form that the clients of the model expect.
    fn fit_to_clients(&self, answer: &mut Answer, options: &RequestOptions) {
        let compatibility = self.config.settings.client_compatibility;
        answer.compatibility = compatibility;
        answer.has_batch_dim = self.config.has_batch_dim;
        answer.is_split = compatibility.splits_sequences()
            && self.config.decoupled
            && options.says_num_sequences()
            && !answer.searches;
        answer.has_null_logprobs = options.has_null_logprobs(compatibility);
    }

    /// Everything that the request asks for: its parameters, and its inputs besides the prompt.
    fn asked<'a>(&self, request: &'a Request) -> Result<Vec<(&'a str, Value)>, Error> {
        let mut sizes = OptionSizes::new(self.vocab_size);
        let max_bytes = OptionSizes::new(self.vocab_size);
        let client_id = request.client_id()?;
        let mut asked = Vec::new();
        for parameter in request.parameters(|name| max_bytes.max_bytes(name))? {
            let (name, value) = parameter?;
            if name == REQUEST_ID {
                check_request_id(value, client_id)?;
                continue;
            }
            asked.push((name, parameter_option(name, value, &mut sizes)?));
        }
        for input in request.inputs()? {
            if input.name() != self.config.input.name() {
                asked.push((input.name(), option_of(&input, &mut sizes)?));
            }
        }
        Ok(asked)
    }

    /// How the tokens of a request become text, if somebody reads it and the model has a tokenizer.
    fn text_stream(
        &self,
        is_read: bool,
        options: &RequestOptions,
        sampling: &SamplingParams,
        prompt: &Prompt,
    ) -> Option<TextStream> {
        let parts = self.text.as_ref().filter(|_| is_read)?;
        let last = sampling.end_ids.iter().chain(&sampling.stop_token_ids);
        let rules = TextRules {
            skip_special_tokens: options
                .text
                .skip_special_tokens
                .unwrap_or(self.config.settings.skip_special_tokens),
            spaces_between_special_tokens: options.text.spaces_between_special_tokens,
            stop_words: options.stop.clone(),
            last_tokens: last.copied().collect(),
            include_stop: options.text.include_stop,
        };
        let tokenizer = parts.tokenizer.clone();
        Some(TextStream::new(tokenizer, &prompt.ids, rules))
    }

    /// Says of each field that has no effect that it has none, the first time that a client sends it.
    fn warn_of_ignored(&self, options: &RequestOptions) {
        for name in &options.ignored {
            if let Some(Handling::Ignored(reason)) = foreign(name).map(|field| &field.handling)
                && self.warned.0.lock().insert(name)
            {
                log::warn!(
                    "{}: '{name}' of a request is ignored: {reason} (this is said once)",
                    self.name
                );
            }
        }
    }

    /// Options that do not fit the model.
    fn check(&self, options: &RequestOptions) -> Result<(), RequestError> {
        let invalid = |text: &str| Err(RequestError::Invalid(text.to_owned()));
        if options.stream && self.config.settings.gpt_model_type == BatchingScheme::V1 {
            return invalid(
                "option 'stream': with gpt_model_type V1 an answer leaves when its whole batch is done; \
                 inflight_fused_batching streams",
            );
        }
        if options.stream && !self.config.decoupled {
            return invalid(
                "option 'stream': this model answers once; it streams with \
                 model_transaction_policy { decoupled: true } in its config.pbtxt",
            );
        }
        let compatibility = self.config.settings.client_compatibility;
        if options.stream
            && options.exclude_input_in_output == Some(false)
            && !compatibility.ignores_input_in_streams()
        {
            return invalid(
                "option 'exclude_input_in_output': a stream never repeats the prompt; leave the \
                 option out, or 'stream'",
            );
        }
        for (name, outputs) in &options.asked {
            if !outputs
                .iter()
                .any(|output| self.config.outputs.contains(output))
            {
                let outputs: Vec<_> = outputs.iter().map(|output| output.name()).collect();
                return Err(RequestError::Invalid(format!(
                    "option '{name}': this model has no output '{}'; name it in the model's \
                     config.pbtxt, or no output at all, and it has every one",
                    outputs.join("' or '")
                )));
            }
            let needs_logits = outputs.iter().any(|output| output.needs_logits());
            if needs_logits && !self.has_logits {
                return Err(RequestError::Invalid(format!(
                    "option '{name}': the synthetic runner has no logits; leave the option out"
                )));
            }
        }
        if options.post_processor.is_given() {
            if self.config.settings.gpt_model_type == BatchingScheme::V1 {
                return invalid(
                    "option 'logits_post_processor_name': with gpt_model_type V1 there are no logits \
                     post-processors; inflight_fused_batching has them",
                );
            }
            if !self.has_logits {
                return invalid(
                    "option 'logits_post_processor_name': the synthetic runner has no logits; leave the \
                     option out",
                );
            }
        }
        if !options.text.detokenize && !options.stop.is_empty() {
            return invalid(
                "option 'detokenize': a stop word is found in the text; leave out 'stop', or \
                 detokenize: false",
            );
        }
        if options.messages.is_some() && self.config.input == InputKind::Ids {
            return invalid("option 'messages': this model takes input_ids, not text");
        }
        if self.text.is_none() {
            let needs_text = [
                ("stop", !options.stop.is_empty()),
                ("bad_words", !options.bad_words.is_empty()),
                (
                    "embedding_bias_words",
                    !options.embedding_bias_words.is_empty(),
                ),
            ];
            if let Some((name, _)) = needs_text.iter().find(|(_, given)| *given) {
                return Err(RequestError::Invalid(format!(
                    "option '{name}': this model has no tokenizer, it only knows token ids"
                )));
            }
        }
        Ok(())
    }

    /// How many sequences the request gets.
    fn num_sequences(
        &self,
        options: &RequestOptions,
        sampling: &SamplingParams,
    ) -> Result<NumSequences, RequestError> {
        let num_sequences = options.num_sequences(self.config.max_batch_size)?;
        let NumSequences {
            generated,
            returned,
        } = num_sequences;
        let invalid = |text: String| Err(RequestError::Invalid(text));
        let may_repeat = self
            .config
            .settings
            .client_compatibility
            .repeats_greedy_sequences();
        if generated > 1 && sampling.is_greedy() && !may_repeat {
            let name = if returned > 1 { "n" } else { "best_of" };
            return invalid(format!(
                "option '{name}': the {generated} sequences of a greedy request are all the same; give a \
                 temperature above 0, and no top_k of 1, or leave '{name}' out"
            ));
        }
        if generated > returned && !self.has_logits {
            return invalid(
                "option 'best_of': the synthetic runner has no logits, so that no sequence is the best; leave the \
                 option out"
                    .to_owned(),
            );
        }
        Ok(num_sequences)
    }

    /// Begins to compile the request's guide, if it has one; one that is known is there at once.
    fn compilation(
        &self,
        options: &RequestOptions,
        sampling: &mut SamplingParams,
        now: Instant,
    ) -> Result<Option<Compilation>, RequestError> {
        let Some(spec) = options.guide.spec()? else {
            return Ok(None);
        };
        let Some(guides) = &self.guides else {
            return Err(RequestError::Invalid(
                "guided decoding needs a model and its tokenizer; the synthetic runner has no logits, and \
                 a model that takes input_ids needs a tokenizer_dir in its config.pbtxt"
                    .to_owned(),
            ));
        };
        let last_ids = [&sampling.end_ids[..], &sampling.stop_token_ids].concat();
        let compilation = guides.compile(spec, last_ids, now)?;
        match compilation.poll(now) {
            None => Ok(Some(compilation)),
            Some(guide) => {
                sampling.guide = Some(guide?);
                Ok(None)
            }
        }
    }

    /// A logits post-processor for each branch, if the request names one.
    fn post_processors(
        &self,
        request: &Request,
        branches: Branches,
        options: &RequestOptions,
    ) -> Result<Vec<LogitsProcessor>, Error> {
        let Some((name, arguments)) = options.post_processor.named()? else {
            return Ok(Vec::new());
        };
        let client_request_id = request.client_id()?;
        let start = |id| {
            let processed = ProcessedRequest {
                id,
                client_request_id,
                client_id: options.client_id,
                vocab_size: self.vocab_size,
            };
            let processor = self.post_processors.start(name, arguments, processed)?;
            Ok(processor)
        };
        branches.ids().map(start).collect()
    }

    fn prompt(&self, request: &Request, options: &RequestOptions) -> Result<Prompt, Error> {
        let kind = self.config.input;
        let inputs = request.inputs()?;
        let Some(input) = inputs.iter().find(|input| input.name() == kind.name()) else {
            return Err(Error::invalid(format!(
                "input '{}' is missing",
                kind.name()
            )));
        };
        match (kind, &self.text) {
            (InputKind::Ids, _) => Ok(Prompt {
                text: String::new(),
                ids: self.ids(input, options)?,
            }),
            (InputKind::Text, Some(parts)) => {
                let mut prompt = self.text_prompt(input, options, parts)?;
                prompt.ids.drain(..num_cut(prompt.ids.len(), options));
                Ok(prompt)
            }
            (InputKind::Text, None) => Err(Error::internal("a text model without a tokenizer")),
        }
    }

    /// The ids of a prompt: of those that the request brings the first `input_lengths`, and of these the last
    /// `truncate_prompt_tokens`. The others may be many, and nobody looks at them.
    fn ids(&self, input: &Input<'_>, options: &RequestOptions) -> Result<Vec<TokenId>, Error> {
        let num_given = input.num_elements::<i32>()?;
        let end = options
            .input_length
            .map_or(num_given, |length| length as usize);
        if end > num_given {
            return Err(Error::invalid(format!(
                "option 'input_lengths' is {end}, and input_ids has {num_given} ids"
            )));
        }
        let start = num_cut(end, options);
        if end - start > self.max_seq_len.index() {
            return Err(Error::invalid(format!(
                "the prompt has {} tokens, and max_seq_len = {}: shorten the prompt",
                end - start,
                self.max_seq_len
            )));
        }
        let ids: Vec<i32> = input.elements_in(start..end)?;
        let known = |id: i32| {
            TokenId::try_from(id)
                .ok()
                .filter(|id| *id < self.vocab_size)
        };
        ids.iter()
            .enumerate()
            .map(|(i, id)| {
                known(*id).ok_or_else(|| {
                    Error::invalid(format!(
                        "input_ids[{}] is {id}, outside the vocabulary, 0 to {}",
                        start + i,
                        self.vocab_size - 1
                    ))
                })
            })
            .collect()
    }

    fn text_prompt(
        &self,
        input: &Input<'_>,
        options: &RequestOptions,
        parts: &TextParts,
    ) -> Result<Prompt, Error> {
        // Without a limit a text would hold up everybody's step for as long as it takes to tokenise.
        let bytes_per_token = parts.tokenizer.max_bytes_per_token();
        let max_bytes = self.max_seq_len.index().saturating_mul(bytes_per_token);
        let check_len = |num_bytes: usize| match num_bytes <= max_bytes {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "the prompt has {num_bytes} bytes, and max_seq_len is {} tokens of at most {bytes_per_token} \
                 bytes each; shorten it",
                self.max_seq_len
            ))),
        };
        let bytes = input.bytes()?;
        // What comes with a conversation is found to be too much below.
        if options.messages.is_none() {
            check_len(bytes.len().saturating_sub(strings::LENGTH_BYTES))?;
        }
        let texts = strings::decode(&bytes)?;
        let [text] = texts[..] else {
            return Err(Error::invalid(format!(
                "text_input holds {} texts; a request has one",
                texts.len()
            )));
        };
        let text = std::str::from_utf8(text).map_err(|error| {
            Error::invalid(format!(
                "text_input is not valid UTF-8 from byte {} on",
                error.valid_up_to()
            ))
        })?;
        let (text, add_special_tokens) = match &options.messages {
            None => (text.to_owned(), self.config.settings.add_special_tokens),
            Some(_) if !text.is_empty() => {
                return Err(Error::invalid(
                    "text_input and the option 'messages' are both given; with messages, \
                     text_input is empty",
                ));
            }
            // The template writes the special tokens itself.
            Some(messages) => (render(parts, messages)?, false),
        };
        if text.is_empty() {
            return Err(Error::invalid(
                "text_input is empty; a prompt has at least one token",
            ));
        }
        check_len(text.len())?;
        let ids = parts.tokenizer.encode(&text, add_special_tokens)?;
        self.check_made("the prompt", &ids)?;
        Ok(Prompt { text, ids })
    }

    /// The outputs of the answer: those that the request names, or else those that it gets unasked or asks for by
    /// an option. One that names logits and does not ask for them gets a dummy.
    ///
    /// # Errors
    /// It names log-probabilities, and the model has none.
    fn wanted_outputs(
        &self,
        request: &Request,
        options: &RequestOptions,
    ) -> Result<Vec<OutputKind>, Error> {
        let names = request.requested_outputs()?;
        // To Triton, one that names none has named all.
        let has_named = names.len() < self.config.outputs.len();
        let compatibility = self.config.settings.client_compatibility;
        let is_given = |kind: &OutputKind| {
            let is_wanted = options.wants(*kind, compatibility);
            !kind.is_never_sent() && (is_wanted || has_named && !options.omits(*kind))
        };
        let kinds = names.iter().filter_map(|name| OutputKind::from_name(name));
        let kinds: Vec<_> = kinds.filter(is_given).collect();
        let impossible = kinds
            .iter()
            .find(|kind| kind.needs_logits() && !kind.has_dummy());
        match impossible {
            Some(kind) if !self.has_logits => Err(Error::invalid(format!(
                "output '{}': the synthetic runner has no logits; do not name it",
                kind.name()
            ))),
            _ => Ok(kinds),
        }
    }

    /// The tokens of each text, as they stand in no other.
    fn tokens_of_each(&self, texts: &[String]) -> Result<Vec<Vec<TokenId>>, RequestError> {
        let Some(parts) = &self.text else {
            return Ok(Vec::new());
        };
        let tokens = |text: &String| {
            let ids = parts.tokenizer.encode(text, false)?;
            self.check_made("option 'embedding_bias_words'", &ids)?;
            Ok(ids)
        };
        texts.iter().map(tokens).collect()
    }

    /// Refuses what the tokenizer made if the model does not know it: a tokenizer can have tokens, such as one for
    /// padding, that the model has no row for.
    fn check_made(&self, of: &str, ids: &[TokenId]) -> Result<(), RequestError> {
        match ids.iter().find(|id| **id >= self.vocab_size) {
            None => Ok(()),
            Some(id) => Err(RequestError::Invalid(format!(
                "{of}: the tokenizer makes token {id} of it, and the model's vocabulary is 0 to {}; leave out the \
                 text of that token",
                self.vocab_size - 1
            ))),
        }
    }

    fn bad_words(&self, options: &RequestOptions) -> Result<Vec<Vec<TokenId>>, RequestError> {
        let Some(parts) = &self.text else {
            return Ok(Vec::new());
        };
        let mut words = Vec::new();
        for word in &options.bad_words {
            for ids in parts.tokenizer.encode_word_variants(word)? {
                self.check_made("option 'bad_words'", &ids)?;
                words.push(ids);
            }
        }
        Ok(words)
    }
}

/// How many of a prompt's first ids are left out.
fn num_cut(num_ids: usize, options: &RequestOptions) -> usize {
    let num_kept = options.truncate_prompt_tokens;
    num_kept.map_or(0, |num_kept| num_ids.saturating_sub(num_kept as usize))
}

/// The fields that have no effect and that somebody was told of.
#[derive(Default)]
pub struct Warned(Mutex<BTreeSet<&'static str>>);

fn render(parts: &TextParts, messages: &Value) -> Result<String, RequestError> {
    let Some(template) = &parts.template else {
        return Err(RequestError::Invalid(
            "option 'messages': the checkpoint has no chat template; write the prompt to text_input"
                .to_owned(),
        ));
    };
    template.render(messages, None, true)
}

/// Whether the parameter that Triton's /generate hands on is what it has made the request id of.
fn check_request_id(
    value: ParameterValue<'_>,
    client_id: Option<&str>,
) -> Result<(), RequestError> {
    if client_id.is_some_and(|id| value == ParameterValue::String(id)) {
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
        // JSON has no NaN and no infinity: they would become null, which is nothing given.
        ParameterValue::Double(value) if !value.is_finite() => {
            return Err(Error::invalid(format!(
                "option '{name}': {value} is not a finite number; give one, or leave the option out"
            )));
        }
        ParameterValue::Bool(value) => value.into(),
        ParameterValue::Int(value) => value.into(),
        ParameterValue::Double(value) => value.into(),
        ParameterValue::String(value) => value.into(),
        // It is refused by its name.
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
