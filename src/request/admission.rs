//! Turns an arrival into a request for the engine: parses and checks options and prompt.
//!
//! ```text
//! incoming.rs      copies the request, on the execute thread
//! prompt.rs        the prompt as tokens
//! admission.rs     options, prompt, sampling, and the plan of the answer, on any thread
//! model_checks.rs  options that the model cannot serve
//! ```

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::request::branches::Branches;
use crate::request::foreign_fields::{Handling, foreign};
use crate::request::incoming::{Arrival, Incoming, RequestReader, RequestedOutputs};
use crate::request::options::{NumSequences, RequestOptions};
use crate::request::prompt::{ArrivedPrompt, Prompt, PromptEncoder};
use crate::request::thought_budget::{self, ThoughtBudget};
use crate::request::thoughts::{format_of_guided, guided_content};
use crate::request::volume::TextLengths;
use crate::response::answer::{
    AnswerFormat, AnswerPlan, CallIds, ClassForm, Echo, EmbeddingForm, PromptLogProbs, Row, Usage,
};
use crate::response::answer_memory::{AnswerMemory, Needs};
use crate::response::text_stream::{BeamText, ReplyRules, TextRules, TextStream};
use inflight_base::{ClientId, RequestError, SequenceId, TokenId, Tokens};
use inflight_config::{ClientCompatibility, ModelConfig, OutputKind, SpeculationKind, Task};
use inflight_engine::NewRequest;
use inflight_guidance::{Compilation, Compiler, GuideSpec};
use inflight_manager::{AdapterLoad, AdapterStore, AdapterUpload};
use inflight_post_processors::{PostProcessors, ProcessedRequest};
use inflight_runner::{ClassTransform, Pooling};
use inflight_sampling::{LogitsProcessor, SamplingParams, StopRule, StopText};
use inflight_text::{MessageField, ReplyFormat, ReplyStart};
use inflight_triton::{Error, Request};

/// The parts of a model that prepare its requests. Shared between threads.
pub struct Admission {
    /// The instance's name, for the log.
    pub name: String,
    /// The model's configuration.
    pub config: Arc<ModelConfig>,
    /// Turns prompts into tokens.
    pub encoder: PromptEncoder,
    /// The logits post-processors that requests may name.
    pub post_processors: Arc<PostProcessors>,
    /// Compiles guides; `None` for a model that cannot be guided.
    pub guides: Option<Arc<Compiler>>,
    /// The adapters that requests may name; `None` if there are none.
    pub adapters: Option<Arc<AdapterStore>>,
    /// Whether tokens are chosen from logits.
    pub has_logits: bool,
    /// What stands for a prompt; `None` for a model that generates.
    pub pooling: Option<Pooling>,
    /// Whether its tokens are of several types.
    pub has_token_types: bool,
    /// The function of the class scores, and the names of the classes.
    pub classes: ClassForm,
    /// The elements of the state that stands for it.
    pub hidden_size: usize,
    /// The memory for logits and log-probabilities in answers.
    pub answer_memory: AnswerMemory,
    /// Tokens that end the output unless the request names others.
    pub end_ids: Vec<TokenId>,
    /// How replies are taken apart where an answer has outputs for their parts.
    pub replies: ReplyFormat,
    /// Options that a request takes where it gives none.
    pub recommended: RequestOptions,
    /// How long prompts are in tokens.
    pub text_lengths: Arc<TextLengths>,
    /// Warnings that have been logged; each is logged once.
    pub warned: Warned,
}

/// A request that is ready for the engine, except for the ids of its sequences.
pub struct Prepared {
    /// The request of the first sequence, whose id is not assigned yet.
    pub request: NewRequest,
    /// Number of sequences to generate, at least one.
    pub num_sequences: u32,
    /// Whether the answer is the prompt, so that it needs no step.
    pub is_prompt_only: bool,
    /// The logits post-processor that it names.
    pub post_processor: Option<PostProcessorCall>,
    /// Its guide, if that is still being compiled.
    pub compilation: Option<Compilation>,
    /// Its adapter, if that is still being loaded.
    pub adapter: Option<AdapterLoad>,
    /// The budget of its thought.
    pub thought_budget: Option<ThoughtBudget>,
    /// The plan of its answer.
    pub answer: AnswerPlan,
    /// When it was first seen.
    pub arrival: Instant,
    /// When its own time limit passes.
    pub deadline: Option<Instant>,
}

/// A logits post-processor as a request names it.
pub struct PostProcessorCall {
    name: String,
    arguments: String,
    client_id: Option<ClientId>,
}

/// Warnings that were logged already.
#[derive(Default)]
pub struct Warned {
    /// Fields without effect.
    fields: Mutex<BTreeSet<&'static str>>,
    /// Guides of which a part is left out, by their warnings.
    guides: Mutex<BTreeSet<String>>,
}

impl Admission {
    /// Reads a request. Takes no longer than copying it.
    ///
    /// # Errors
    /// A parameter or an input is too large, or cannot be read.
    pub fn read(&self, request: &Request, now: Instant) -> Result<Incoming, Error> {
        let reader = RequestReader {
            config: &self.config,
            encoder: &self.encoder,
            adapters: self.adapters.as_deref(),
        };
        reader.read(request, now)
    }

    /// Parses a request's options and tokenises its prompt. Takes time in proportion to the prompt.
    ///
    /// # Errors
    /// What the client must change.
    pub fn prepare(&self, mut arrival: Arrival) -> Result<Prepared, Error> {
        let mut options = arrival.options()?;
        options.take_recommended(&self.recommended);
        options.take_defaults_of(self.config.settings.client_compatibility);
        self.check(&options)?;
        self.warn_of_ignored(&options);

        let context: &[TokenId] = match &arrival.turn {
            None => &[],
            Some(turn) => &turn.context,
        };
        let arrived = arrival.prompt?;
        let images = std::mem::take(&mut arrival.images);
        let prompt = self.encoder.encode(&arrived, &images, &options, context)?;
        if arrival.turn.is_some() && !prompt.images.is_empty() {
            return Err(Error::invalid(
                "images: a turn of a conversation has none; send all of the conversation in messages to a model without \
                 conversations",
            ));
        }
        let num_prompt_tokens = prompt.ids.len();
        if let ArrivedPrompt::Text(text) = &arrived
            && context.is_empty()
        {
            self.text_lengths.add(text.len(), num_prompt_tokens);
        }
        let max_new_tokens = options.max_tokens_or(self.config.settings.default_max_tokens)?;
        let bad_words = self.encoder.bad_words(&options)?;
        let mut sampling = options.sampling(&self.end_ids, bad_words, self.encoder.vocab_size)?;
        if !options.embedding_bias_words.is_empty() {
            let tokens = self.encoder.tokens_of_each(&options.embedding_bias_words)?;
            options.add_word_biases(&mut sampling, &tokens)?;
        }
        options.add_embedding_bias(&mut sampling, self.encoder.vocab_size)?;
        sampling.beam_search = options.beam_search(self.config.settings.max_beam_width)?;
        let num_sequences = match sampling.beam_search {
            None => self.num_sequences(&options, &sampling)?,
            // To the engine, all beams of a request are one sequence.
            Some(_) => NumSequences {
                generated: 1,
                returned: 1,
            },
        };
        let num_answers = num_sequences.generated.max(sampling.beam_width());
        if options.prompt_only && arrival.turn.is_some() {
            return Err(Error::invalid(
                "option 'prompt_only': a turn of a conversation has an answer; leave the option out, or ask a model without \
                 conversations",
            ));
        }
        if num_answers > 1 && arrival.turn.as_ref().is_some_and(|turn| !turn.is_last) {
            return Err(Error::invalid(format!(
                "the turn of a conversation asks for {num_answers} sequences, and one answer is continued: leave out n, \
                 best_of and beam_width, or set sequence_end"
            )));
        }
        let has_stop_words = !options.stop.is_empty();
        if sampling.beam_search.is_some() {
            let text = self.text_stream(has_stop_words, &options, &sampling, &prompt, None);
            sampling.stop_text = text.map(|text| StopText(Arc::new(BeamText::new(text))));
        }
        let post_processor = options.post_processor.named()?;
        let post_processor = post_processor.map(|(name, arguments)| PostProcessorCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            client_id: options.client_id,
        });

        let room = self
            .encoder
            .max_seq_len
            .index()
            .saturating_sub(num_prompt_tokens);
        let generates = self.pooling.is_none() && !options.prompt_only;
        let num_new_tokens = match generates {
            true => room.min(max_new_tokens as usize),
            false => 0,
        };
        let mut format = self.answer_format(&options, &arrival.outputs)?;
        format.call_ids = CallIds::of_prompt(&prompt.ids);
        format.num_prompt_tokens = num_prompt_tokens;
        format.pad_id = options.pad_id(&sampling.end_ids);
        let wants_text =
            format.outputs.iter().any(|kind| kind.is_text()) && options.text.detokenize;
        let num_found = sampling.beam_search.map(|it| it.num_returned as usize);
        format.searches = num_found.is_some();
        format.is_split &= !format.searches;
        let in_pieces = format.stream && !format.searches;
        let guide = options.guide.spec()?;
        let mut reply = self.reply_rules(&options, &format.outputs, &prompt.text, in_pieces)?;
        if let (Some(rules), Some(guide)) = (&mut reply, &guide) {
            rules.format = format_of_guided(guide, rules.format);
        }
        let thought_budget = self.thought_budget(&options, &sampling, &prompt.text)?;
        let (compilation, warning) =
            self.compilation(&options, guide, &mut sampling, &prompt.text, reply.as_ref())?;
        format.warning = warning;
        let row = |_| {
            let is_read = wants_text || has_stop_words;
            let text = self.text_stream(is_read, &options, &sampling, &prompt, reply.clone());
            match num_found {
                None => Row::new(num_new_tokens, text),
                Some(_) => Row::found(text),
            }
        };
        let num_rows = num_found.unwrap_or(num_sequences.generated as usize);
        let rows = (0..num_rows).map(row).collect();

        let of_text = self.draft_of_text(&options, num_new_tokens)?;
        let drafts = options.drafts(of_text.as_deref(), num_new_tokens);
        let mut outputs = options.engine_outputs(&format.outputs);
        outputs.drafts |= options.return_usage && !drafts.expected.is_empty();
        let has_logprobs = format.outputs.contains(&OutputKind::Logprobs);
        if num_sequences.generated > num_sequences.returned {
            outputs.log_probs.get_or_insert(0);
        }
        if format.searches && !has_logprobs {
            // Hypotheses carry the log-probabilities that they are ranked by.
            outputs.log_probs = None;
        }
        if format.searches && format.stream {
            // The engine reports the best hypotheses at the stream's interval, and each report is a response.
            outputs.beams = NonZeroU32::new(format.stream_interval as u32);
            format.stream_interval = 1;
        }
        let of = |wanted, num_tokens| if wanted { num_tokens } else { 0 };
        // The rows of beams that are dropped may still belong to a hypothesis that has ended.
        let num_texts = num_sequences.generated as usize * sampling.beam_width() as usize;
        let memory = self.answer_memory.set_aside(Needs {
            num_logits: of(outputs.context_logits, num_prompt_tokens)
                + of(outputs.generation_logits, num_texts * num_new_tokens),
            num_tokens: of(outputs.log_probs.is_some(), num_texts * num_new_tokens),
            num_top: outputs.log_probs.unwrap_or_default(),
            as_json: has_logprobs,
            num_prompt_tokens: of(outputs.prompt_log_probs.is_some(), num_prompt_tokens),
            num_prompt_top: outputs.prompt_log_probs.unwrap_or_default(),
        })?;
        let excluded = options
            .exclude_input_in_output
            .unwrap_or(self.config.settings.exclude_input_in_output);
        let is_repeated = options.prompt_only || !excluded && !options.stream;
        let echo = is_repeated.then(|| Echo {
            text: prompt.text,
            ids: prompt.ids[prompt.num_before..].to_vec(),
        });
        let timeout_us = match arrival.timeout_us {
            0 => options.timeout_us,
            timeout_us => timeout_us,
        };
        let load = self.adapter(&options, arrival.adapter)?;
        let wants_prompt = outputs.prompt_log_probs.is_some();
        let prompt_log_probs = wants_prompt.then(|| PromptLogProbs::of(&prompt.ids));
        let mut request = NewRequest {
            id: SequenceId::default(),
            client_id: options.client_id,
            prompt: prompt.ids.into(),
            images: prompt.images,
            second_text: prompt.second_text,
            stop: StopRule {
                max_new_tokens: Tokens(max_new_tokens),
                stop_words: options.stop_ids.into(),
            },
            sampling: Arc::new(sampling),
            priority: options.priority,
            adapter: None,
            reuse: options.reuse,
            outputs,
            drafts,
        };
        let adapter = match load.as_ref().and_then(AdapterLoad::poll) {
            None => load,
            Some(loaded) => {
                loaded?.apply_to(&mut request);
                None
            }
        };
        Ok(Prepared {
            request,
            num_sequences: num_sequences.generated,
            is_prompt_only: options.prompt_only,
            post_processor,
            compilation,
            adapter,
            thought_budget,
            answer: AnswerPlan {
                format,
                rows,
                num_returned: num_found.unwrap_or(num_sequences.returned as usize),
                echo,
                prompt_log_probs,
                memory,
                usage: options.return_usage.then(Usage::default),
            },
            arrival: arrival.time,
            deadline: (timeout_us > 0)
                .then(|| arrival.time.checked_add(Duration::from_micros(timeout_us)))
                .flatten(),
        })
    }

    /// The plan of the answer to a request without output tokens: it only stops another one, or ends a conversation.
    ///
    /// # Errors
    /// It names an output that the model does not have.
    pub fn empty_answer(&self, outputs: &RequestedOutputs) -> Result<AnswerPlan, Error> {
        Ok(AnswerPlan {
            format: self.answer_format(&RequestOptions::default(), outputs)?,
            rows: vec![Row::new(0, None)],
            num_returned: 1,
            echo: None,
            prompt_log_probs: None,
            memory: None,
            usage: None,
        })
    }

    /// The tokens of `draft_text`, as many as may be generated, if the model verifies drafts.
    ///
    /// # Errors
    /// The draft is there in both forms, or the tokenizer fails.
    fn draft_of_text(
        &self,
        options: &RequestOptions,
        max_new_tokens: usize,
    ) -> Result<Option<Vec<TokenId>>, RequestError> {
        let Some(text) = &options.draft_text else {
            return Ok(None);
        };
        if options.has_draft_ids() {
            return Err(RequestError::Invalid(
                "option 'draft_text': the request has 'draft_input_ids' too; give one of them"
                    .to_owned(),
            ));
        }
        match self.config.settings.speculation {
            SpeculationKind::None => Ok(None),
            _ => self.encoder.draft(text, max_new_tokens),
        }
    }

    /// A logits post-processor for each sequence.
    ///
    /// # Errors
    /// The model has none of this name, or it refuses the arguments.
    pub fn start_processors(
        &self,
        call: &PostProcessorCall,
        client_request_id: &str,
        sequences: Branches,
    ) -> Result<Vec<LogitsProcessor>, RequestError> {
        let start = |id| {
            let processed = ProcessedRequest {
                id,
                client_request_id: Some(client_request_id).filter(|id| !id.is_empty()),
                client_id: call.client_id,
                vocab_size: self.encoder.vocab_size,
            };
            self.post_processors
                .start(&call.name, &call.arguments, processed)
        };
        sequences.ids().map(start).collect()
    }

    /// The format of an answer, by the request and by the model's `client_compatibility`.
    fn answer_format(
        &self,
        options: &RequestOptions,
        requested: &RequestedOutputs,
    ) -> Result<AnswerFormat, Error> {
        let settings = &self.config.settings;
        let compatibility = settings.client_compatibility;
        let outputs = self.wanted_outputs(requested, options)?;
        let stream_interval = options.stream_interval.unwrap_or(settings.stream_interval);
        let names_tokens =
            |kind| matches!(kind, &OutputKind::Logprobs | &OutputKind::PromptLogprobs);
        let has_names = outputs.iter().any(names_tokens);
        let tokenizer = self.encoder.text.as_ref().filter(|_| has_names);
        Ok(AnswerFormat {
            stream: options.stream,
            stream_interval: stream_interval as usize,
            outputs,
            num_prompt_tokens: 0,
            tokenizer: tokenizer.map(|parts| parts.tokenizer.clone()),
            searches: false,
            pad_id: 0,
            compatibility,
            has_batch_dim: self.config.has_batch_dim,
            is_split: compatibility.splits_sequences()
                && self.config.decoupled
                && options.says_num_sequences(),
            has_null_logprobs: options.has_null_logprobs(compatibility),
            call_ids: CallIds::default(),
            warning: None,
            vocab_size: self.encoder.vocab_size as usize,
            embedding: self
                .pooling
                .map_or_else(EmbeddingForm::default, |pooling| EmbeddingForm {
                    num_dimensions: options.dimensions,
                    normalize: options.normalize.unwrap_or(pooling.normalize),
                }),
            classes: match options.raw_scores {
                false => self.classes.clone(),
                true => ClassForm {
                    transform: ClassTransform::Identity,
                    ..self.classes.clone()
                },
            },
        })
    }

    /// The outputs of the answer: those that the request names, otherwise the default ones and those that its options
    /// ask for. Logits that are named without the option for them are a dummy.
    ///
    /// # Errors
    /// It names log-probabilities, and the model has none.
    fn wanted_outputs(
        &self,
        requested: &RequestedOutputs,
        options: &RequestOptions,
    ) -> Result<Vec<OutputKind>, Error> {
        let compatibility = self.config.settings.client_compatibility;
        let pools = self.pooling.is_some();
        let is_given = |kind: &OutputKind| {
            // A pooling model returns the prompt where a client asks for it, and nothing else with `prompt_only`.
            let has_place = match kind {
                OutputKind::TextOutput | OutputKind::OutputIds if pools => {
                    options.prompt_only || requested.are_named
                }
                _ => !pools || !options.prompt_only || kind.is_of(Task::Generate),
            };
            let is_wanted = options.wants(*kind, compatibility)
                || compatibility == ClientCompatibility::None && self.has_part(*kind, options);
            has_place
                && !kind.is_never_sent()
                && (is_wanted || requested.are_named && !options.omits(*kind))
        };
        let kinds = requested.kinds.iter().copied();
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

    /// Whether an output is a part of the replies to a conversation, which is sent unless the request leaves it out.
    fn has_part(&self, kind: OutputKind, options: &RequestOptions) -> bool {
        let is_there = match kind {
            OutputKind::ReasoningContent => {
                self.replies.reasoning.is_some() && options.chat.is_given()
            }
            OutputKind::ToolCalls => self.replies.tool_calls.is_some() && options.chat.has_tools(),
            _ => false,
        };
        is_there && !options.omits(kind)
    }

    /// How the reply is taken apart, if the answer has outputs for its parts. A part without one stays in the text.
    ///
    /// # Errors
    /// The request asks for a part whose format is not known.
    fn reply_rules(
        &self,
        options: &RequestOptions,
        outputs: &[OutputKind],
        prompt: &str,
        in_pieces: bool,
    ) -> Result<Option<ReplyRules>, RequestError> {
        let has = |kind| outputs.contains(&kind);
        let format = ReplyFormat {
            reasoning: (self.replies.reasoning).filter(|_| has(OutputKind::ReasoningContent)),
            tool_calls: (self.replies.tool_calls).filter(|_| has(OutputKind::ToolCalls)),
        };
        for (option, kind, parser, is_known) in [
            (
                "return_reasoning_content",
                OutputKind::ReasoningContent,
                "reasoning_parser",
                format.reasoning.is_some(),
            ),
            (
                "return_tool_calls",
                OutputKind::ToolCalls,
                "tool_call_parser",
                format.tool_calls.is_some(),
            ),
        ] {
            if options.asks(kind) && !is_known {
                return Err(RequestError::Invalid(format!(
                    "option '{option}': the format is not known, because the checkpoint has no chat template that shows it; \
                     name one in {parser} in the model's config.pbtxt, or leave the option out"
                )));
            }
        }
        let start = self.reply_start(options, format, prompt);
        let is_whole = format == ReplyFormat::default();
        Ok((!is_whole).then(|| ReplyRules {
            format,
            start,
            parameters: match format.needs_parameter_types() {
                true => Arc::new(options.chat.parameter_types()),
                false => Arc::default(),
            },
            in_pieces,
            counts_tokens: options.return_usage,
        }))
    }

    /// Where the reply to a prompt begins.
    fn reply_start(
        &self,
        options: &RequestOptions,
        format: ReplyFormat,
        prompt: &str,
    ) -> ReplyStart {
        match options.chat.continued() {
            None => format.start_after(prompt),
            Some((MessageField::Reasoning, _)) => ReplyStart::Reasoning,
            Some((MessageField::Content, text)) => format.start_within(text),
        }
    }

    /// The detokeniser of a sequence, if its text is needed and the model has a tokenizer.
    fn text_stream(
        &self,
        is_read: bool,
        options: &RequestOptions,
        sampling: &SamplingParams,
        prompt: &Prompt,
        reply: Option<ReplyRules>,
    ) -> Option<TextStream> {
        let parts = self.encoder.text.as_ref().filter(|_| is_read)?;
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
            reply,
        };
        let tokenizer = parts.tokenizer.clone();
        Some(TextStream::new(tokenizer, &prompt.ids, rules))
    }

    /// Logs each field without effect when a client sends it for the first time.
    fn warn_of_ignored(&self, options: &RequestOptions) {
        for name in &options.ignored {
            if let Some(Handling::Ignored(reason)) = foreign(name).map(|field| &field.handling)
                && self.warned.fields.lock().insert(name)
            {
                log::warn!(
                    "{}: '{name}' of a request is ignored: {reason} (logged once)",
                    self.name
                );
            }
        }
    }

    /// Starts to load the request's adapter, if it names or brings one. One that was used a moment ago is at hand.
    fn adapter(
        &self,
        options: &RequestOptions,
        upload: Option<AdapterUpload>,
    ) -> Result<Option<AdapterLoad>, RequestError> {
        let Some((option, name)) = options.adapter()? else {
            return match upload {
                None => Ok(None),
                Some(_) => Err(RequestError::Invalid(
                    "lora_weights is given, and no lora_task_id: send the number that the adapter is to be kept under"
                        .to_owned(),
                )),
            };
        };
        let Some(adapters) = &self.adapters else {
            return Err(RequestError::Invalid(format!(
                "option '{option}': this model has no adapters; name their folder in lora_dir in its config.pbtxt, \
                 write a multi_lora.json into the folder of its version, or declare the inputs lora_weights and lora_config"
            )));
        };
        match upload {
            None => adapters.load(&name).map(Some),
            Some(_) if option == "lora_name" => Err(RequestError::Invalid(
                "lora_weights goes with lora_task_id, and the request has a lora_name: a name is that of files"
                    .to_owned(),
            )),
            Some(upload) => adapters.load_upload(&name, upload).map(Some),
        }
    }

    /// The warning about parts of schemas that are not enforced, for the answer. Each is logged once.
    fn warning_of(&self, guide: &GuideSpec) -> Option<String> {
        const MAX_CHARS: usize = 1_000;
        const MAX_LOGGED: usize = 256;
        let left_out = guide.left_out();
        if left_out.is_empty() {
            return None;
        }
        let warning = format!("not enforced: {}", left_out.join("; "));
        let is_plain = |char: &char| char.is_ascii_graphic() || *char == ' ';
        let warning: String = warning.chars().filter(is_plain).take(MAX_CHARS).collect();
        let mut logged = self.warned.guides.lock();
        if logged.len() < MAX_LOGGED && logged.insert(warning.clone()) {
            log::warn!(
                "{}: of a guide's schema is {warning} (logged once)",
                self.name
            );
        }
        Some(warning)
    }

    /// The budget of the reply's thought, if the request has one and the reply begins with a thought.
    fn thought_budget(
        &self,
        options: &RequestOptions,
        sampling: &SamplingParams,
        prompt: &str,
    ) -> Result<Option<ThoughtBudget>, RequestError> {
        let Some(max_tokens) = options.thinking_token_budget else {
            return Ok(None);
        };
        let refusal = |reason: &str| {
            let option = thought_budget::OPTION;
            Err(RequestError::Invalid(format!(
                "option '{option}': {reason}"
            )))
        };
        if sampling.beam_search.is_some() {
            return refusal("beams cannot be guided; leave out one of the two");
        }
        if !self.has_logits {
            return refusal("the synthetic runner has no logits; leave the option out");
        }
        let Some(parts) = &self.encoder.text else {
            return refusal("this model has no tokenizer, it only knows token ids");
        };
        let start = self.reply_start(options, self.replies, prompt);
        ThoughtBudget::new(
            max_tokens as usize,
            self.replies.thinking(start),
            self.replies.content_header(start),
            &parts.tokenizer,
        )
    }

    /// Starts to compile the request's guide, if it has one, and says what of it is left out. A cached guide is ready
    /// at once.
    fn compilation(
        &self,
        options: &RequestOptions,
        guide: Option<GuideSpec>,
        sampling: &mut SamplingParams,
        prompt: &str,
        reply: Option<&ReplyRules>,
    ) -> Result<(Option<Compilation>, Option<String>), RequestError> {
        let thinking = self
            .replies
            .thinking(self.reply_start(options, self.replies, prompt));
        let calls = options.chat.tool_guide(self.replies.tool_calls, thinking)?;
        let spec = match (guide, calls) {
            (None, None) => return Ok((None, None)),
            (Some(spec), None) => match reply {
                None => spec,
                Some(rules) => guided_content(spec, rules.format, rules.start),
            },
            (None, Some(_)) if sampling.beam_search.is_some() => {
                return Err(RequestError::Invalid(
                    "options 'tool_choice' and 'tools' make a guide for calls, and beams cannot be guided; leave out one of the two"
                        .to_owned(),
                ));
            }
            (None, Some(calls)) => GuideSpec::Structure(calls),
            (Some(_), Some(_)) => {
                return Err(RequestError::Invalid(
                    "options 'tool_choice' and 'tools' make a guide for calls, and the request has another guide; leave one out"
                        .to_owned(),
                ));
            }
        };
        let Some(guides) = &self.guides else {
            return Err(RequestError::Invalid(
                "guided decoding needs a model and its tokenizer; the synthetic runner has no logits, and \
                 a model that takes input_ids needs a tokenizer_dir in its config.pbtxt"
                    .to_owned(),
            ));
        };
        let warning = self.warning_of(&spec);
        let now = Instant::now();
        let last_ids = [&sampling.end_ids[..], &sampling.stop_token_ids].concat();
        let compilation = guides.compile(spec, last_ids, now)?;
        match compilation.poll(now) {
            None => Ok((Some(compilation), warning)),
            Some(guide) => {
                sampling.guide = Some(guide?);
                Ok((None, warning))
            }
        }
    }
}
