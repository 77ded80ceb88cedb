//! The options of a request. One option is one entry of `table.rs`, which `docs/src/request-options.md` is generated
//! from.
//!
//! Options are request *parameters*, not tensors, because Triton's direct sequence batching requires
//! the same inputs in every request. A parameter is a boolean, an integer, a number or a string, so
//! a list is sent as a JSON string. Names come from TensorRT-LLM's ensemble and from vLLM's backend.

mod beams;
mod recommended;
mod table;
mod values;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::request::chat_options::ChatOptions;
use crate::request::foreign_fields::{ADAPTER_TENSOR, Handling, foreign, plain_name};
use crate::request::guide_options::GuideOptions;
use crate::request::post_processor_options::PostProcessorOptions;
use beams::BeamOptions;
use inflight_base::{ClientId, RequestError, TokenId, nearest_name};
use inflight_config::{ClientCompatibility, OutputKind};
use inflight_engine::{DraftOptions, OutputOptions, ReuseOptions};
use inflight_sampling::{SamplingParams, TopPDecay};
use table::{OPTIONS, RequestOption};
use values::{MAX_BIASES, TokenTypes, expected_of, nested, shortened};

pub(super) use values::{flag, json_of, parsed};

pub use table::reference_table;

/// How many tokens of a prompt are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// At most this many.
    To(u32),
    /// As many as fit into the model's `max_seq_len` in front of the output.
    ToRoom,
}

/// The options of one request, each in its range.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestOptions {
    max_tokens: Option<u32>,
    num_returned: Option<u32>,
    num_generated: Option<u32>,
    pad_id: Option<i32>,
    beams: BeamOptions,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Tokens per response of a stream.
    pub stream_interval: Option<u32>,
    /// Whether an answer that is not streamed leaves out the prompt.
    pub exclude_input_in_output: Option<bool>,
    /// Texts that end the output, and are not part of it.
    pub stop: Vec<String>,
    /// Words that end the output, as token ids.
    pub stop_ids: Vec<Vec<TokenId>>,
    /// Texts that the output must not contain.
    pub bad_words: Vec<String>,
    /// Ends the request after this many microseconds; zero is no limit.
    pub timeout_us: u64,
    /// Images, each as base64 or as a URL.
    pub images: Vec<String>,
    /// A conversation, from which the model's chat template makes the prompt.
    pub chat: ChatOptions,
    /// Smaller values are scheduled first.
    pub priority: i32,
    /// The client, for the logits post-processor.
    pub client_id: Option<ClientId>,
    /// Which KV blocks it shares.
    pub reuse: ReuseOptions,
    lora_name: Option<String>,
    lora_task_id: Option<u64>,
    /// The guide that the output follows.
    pub guide: GuideOptions,
    /// The logits post-processor.
    pub post_processor: PostProcessorOptions,
    /// Output tensors that the request excludes.
    pub omitted: Vec<OutputKind>,
    /// Options that ask for output tensors, with these tensors; a model that has none of them refuses the option.
    pub asked: Vec<(&'static str, &'static [OutputKind])>,
    /// Output tensors that the request asks for by name where they are not sent by default.
    wanted: Vec<OutputKind>,
    num_logprobs: Option<u32>,
    num_prompt_logprobs: Option<u32>,
    /// The prompt as token ids, instead of a text.
    pub prompt_token_ids: Vec<TokenId>,
    /// Whether the answer is the prompt, and nothing is computed.
    pub prompt_only: bool,
    /// The number of `input_ids` that are the prompt; the rest is padding.
    pub input_length: Option<u32>,
    /// How many tokens of the prompt are kept; `None`: all.
    pub truncate_prompt_tokens: Option<Truncation>,
    /// The number of elements of the embedding.
    pub dimensions: Option<u32>,
    /// Whether the embedding is divided by its length.
    pub normalize: Option<bool>,
    /// The second text of a pair.
    pub text_pair: Option<String>,
    /// Which tokens of a prompt in tokens belong to a second text.
    pub token_types: Option<TokenTypes>,
    /// Whether classes and scores are numbers as the model computes them.
    pub raw_scores: bool,
    /// Texts whose tokens' logits are biased.
    pub embedding_bias_words: Vec<String>,
    /// The bias of each of `embedding_bias_words`.
    pub embedding_bias_weights: Vec<f32>,
    /// Fields of other backends' clients that have no effect.
    pub ignored: Vec<&'static str>,
    /// How the tokens become text.
    pub text: TextOptions,
    end_ids: Option<Vec<TokenId>>,
    stop_token_ids: Vec<TokenId>,
    ignore_eos: bool,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    top_p_decay: Option<f32>,
    top_p_min: Option<f32>,
    top_p_reset_ids: Vec<TokenId>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    seed: u64,
    repetition_penalty: Option<f32>,
    presence_penalty: f32,
    frequency_penalty: f32,
    prompt_ignore_length: Option<u32>,
    no_repeat_ngram_size: u32,
    min_tokens: u32,
    logit_bias: Vec<(TokenId, f32)>,
    embedding_bias: Vec<f32>,
    bad_ids: Vec<Vec<TokenId>>,
    allowed_token_ids: Option<Vec<TokenId>>,
    num_draft_tokens: Option<u32>,
    draft_input_ids: Vec<TokenId>,
    /// The expected beginning of the output.
    pub draft_text: Option<String>,
    /// The most tokens of the reasoning.
    pub thinking_token_budget: Option<u32>,
    /// Whether responses have counts of tokens.
    pub return_usage: bool,
}

/// The numbers of a request's sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumSequences {
    /// Number of generated sequences, at least one.
    pub generated: u32,
    /// Number of returned sequences; if not all, the most likely ones.
    pub returned: u32,
}

/// How a request's tokens are turned into text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Whether there is any text.
    pub detokenize: bool,
    /// Whether special tokens are left out; `None` for the model's setting.
    pub skip_special_tokens: Option<bool>,
    /// Whether the tokenizer's spaces between consecutive special tokens are kept.
    pub spaces_between_special_tokens: bool,
    /// Whether the stop word or the token that ended the text is part of it.
    pub include_stop: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            detokenize: true,
            skip_special_tokens: None,
            spaces_between_special_tokens: true,
            include_stop: false,
        }
    }
}

impl RequestOptions {
    /// Reads the parameters of a request.
    ///
    /// # Errors
    /// An unknown name, with the nearest known one; a value outside its range; an option given twice
    /// with two values; a field of another backend's clients that is refused.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Result<Self, RequestError> {
        let mut options = Self::default();
        let mut seen = Vec::new();
        for (name, value) in parameters {
            if name == "sampling_parameters" {
                for (name, value) in &nested(&value)? {
                    options.set(name, value, " in sampling_parameters", &mut seen)?;
                }
            } else {
                options.set(name, &value, "", &mut seen)?;
            }
        }
        if options.embedding_bias_words.len() != options.embedding_bias_weights.len() {
            return Err(RequestError::Invalid(format!(
                "option 'embedding_bias_weights' has {} numbers, and 'embedding_bias_words' {} texts; \
                 give one number for each text",
                options.embedding_bias_weights.len(),
                options.embedding_bias_words.len()
            )));
        }
        Ok(options)
    }

    /// The name of the adapter, and the option that gives it.
    ///
    /// # Errors
    /// It is given in two ways.
    pub fn adapter(&self) -> Result<Option<(&'static str, String)>, RequestError> {
        match (&self.lora_name, self.lora_task_id) {
            (None, None) => Ok(None),
            (Some(name), None) => Ok(Some(("lora_name", name.clone()))),
            (None, Some(id)) => Ok(Some(("lora_task_id", id.to_string()))),
            (Some(name), Some(id)) => Err(RequestError::Option {
                name: "lora_task_id".to_owned(),
                value: id.to_string(),
                expected: format!("given beside lora_name, which is '{name}'"),
            }),
        }
    }

    /// The most tokens that a prompt keeps, where it is cut, in a sequence of `max_seq_len` tokens. A prompt that
    /// `has_output` leaves room for `max_tokens`, or for one token.
    pub fn max_kept(&self, max_seq_len: usize, has_output: bool) -> Option<usize> {
        let num_output_tokens = match has_output {
            true => self.max_tokens.unwrap_or(1) as usize,
            false => 0,
        };
        self.truncate_prompt_tokens.map(|kept| match kept {
            Truncation::To(num) => num as usize,
            Truncation::ToRoom => max_seq_len.saturating_sub(num_output_tokens).max(1),
        })
    }

    /// The most tokens to generate: the request's own value or the model's default.
    ///
    /// # Errors
    /// Fewer than `min_tokens`.
    pub fn max_tokens_or(&self, default: u32) -> Result<u32, RequestError> {
        let max = self.max_tokens.unwrap_or(default);
        if self.min_tokens > max {
            return Err(RequestError::Option {
                name: "min_tokens".to_owned(),
                value: self.min_tokens.to_string(),
                expected: format!("at most max_tokens, which is {max}"),
            });
        }
        Ok(max)
    }

    /// How many sequences are generated, at most `max`, the model's `max_batch_size`, and how many returned.
    ///
    /// # Errors
    /// More than `max`; fewer generated than returned; more generated than returned in a stream, which sends them all.
    pub fn num_sequences(&self, max: u32) -> Result<NumSequences, RequestError> {
        let returned = self.num_returned.unwrap_or(1);
        let generated = self.num_generated.unwrap_or(returned);
        for (name, value) in [("n", returned), ("best_of", generated)] {
            if value > max {
                return Err(RequestError::Option {
                    name: name.to_owned(),
                    value: value.to_string(),
                    expected: format!(
                        "at most max_batch_size, which is {max} in the model's config.pbtxt"
                    ),
                });
            }
        }
        if generated < returned {
            return Err(RequestError::Option {
                name: "best_of".to_owned(),
                value: generated.to_string(),
                expected: format!("at least n, which is {returned}"),
            });
        }
        if self.stream && generated > returned {
            return Err(RequestError::Invalid(
                "option 'best_of': which sequences are the best is known at their end, and a stream sends each \
                 token at once; leave out 'stream', or let best_of be n"
                    .to_owned(),
            ));
        }
        Ok(NumSequences {
            generated,
            returned,
        })
    }

    /// The padding of the shorter of several sequences: by default the end id, as in TensorRT-LLM.
    pub fn pad_id(&self, end_ids: &[TokenId]) -> i32 {
        let end_id = end_ids.first().map_or(0, |id| *id as i32);
        self.pad_id.unwrap_or(end_id)
    }

    /// The sampling options, for a model whose sequences end with `model_end_ids`.
    ///
    /// A request without sampling options is greedy; one that gives any of
    /// `temperature`, `top_k`, `top_p`, `min_p` or `typical_p` is sampled, at temperature 1 if it
    /// gives none.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn sampling(
        &self,
        model_end_ids: &[TokenId],
        mut bad_words: Vec<Vec<TokenId>>,
        vocab_size: u32,
    ) -> Result<SamplingParams, RequestError> {
        let (top_k, top_p) = self.truncation();
        let sampled = self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some()
            || self.typical_p.is_some();
        let end_ids = match &self.end_ids {
            _ if self.ignore_eos => Vec::new(),
            Some(ids) => ids.clone(),
            None => model_end_ids.to_vec(),
        };
        self.check_ids(vocab_size)?;
        bad_words.extend_from_slice(&self.bad_ids);
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(if sampled { 1.0 } else { 0.0 }),
            top_k,
            top_p,
            top_p_decay: self.top_p_decay(),
            min_p: self.min_p.unwrap_or(0.0),
            typical_p: self.typical_p.unwrap_or(1.0),
            seed: self.seed,
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            prompt_ignore_length: self.prompt_ignore_length.unwrap_or(u32::MAX),
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            min_tokens: self.min_tokens,
            end_ids,
            stop_token_ids: self.stop_token_ids.clone(),
            allowed_token_ids: self.allowed_token_ids.as_deref().map(Arc::from),
            bad_words: bad_words.into(),
            logit_bias: self.logit_bias.as_slice().into(),
            guide: None,
            logits_processor: None,
            beam_search: None,
            stop_text: None,
        })
    }

    /// Whether an option of the request asks for an output tensor.
    pub fn asks(&self, output: OutputKind) -> bool {
        self.asked
            .iter()
            .any(|(_, outputs)| outputs.contains(&output))
            && !self.omits(output)
    }

    /// Whether the request excludes an output tensor, even if it names it.
    pub fn omits(&self, output: OutputKind) -> bool {
        self.omitted.contains(&output)
    }

    /// Whether the request asks for an output tensor without naming it.
    pub fn wants(&self, output: OutputKind, compatibility: ClientCompatibility) -> bool {
        let says_only_how_many =
            |option: &str| option == "logprobs" && compatibility.requires_return_logprobs();
        let is_asked = self
            .asked
            .iter()
            .any(|(option, outputs)| outputs.contains(&output) && !says_only_how_many(option));
        let is_unasked = match output {
            OutputKind::FinishReason | OutputKind::NumInputTokens | OutputKind::NumOutputTokens => {
                !compatibility.sends_reasons_and_counts_on_request()
                    || self.wanted.contains(&output)
            }
            OutputKind::SequenceIndex => {
                compatibility.splits_sequences() && self.num_returned.is_some()
            }
            _ => !output.is_on_request(),
        };
        (is_asked || is_unasked) && !self.omits(output)
    }

    /// Whether the request does not say how many log-probabilities to return, which some clients take as none.
    pub fn has_null_logprobs(&self, compatibility: ClientCompatibility) -> bool {
        compatibility.requires_return_logprobs() && self.num_logprobs.is_none()
    }

    /// Whether the request gives the number of its sequences, even if it is one.
    pub fn says_num_sequences(&self) -> bool {
        self.num_returned.is_some()
    }

    /// The extra outputs that the engine has to return for these outputs. Logits without the option for them are a
    /// dummy.
    pub fn engine_outputs(&self, outputs: &[OutputKind]) -> OutputOptions {
        let wants = |output: OutputKind| {
            let is_asked = || self.wants(output, ClientCompatibility::None);
            outputs.contains(&output) && (!output.has_dummy() || is_asked())
        };
        let num_top = |output: &OutputKind| match output {
            OutputKind::Logprobs => Some(self.num_logprobs.unwrap_or(0)),
            OutputKind::OutputLogProbs
            | OutputKind::CumLogProbs
            | OutputKind::CumulativeLogprob => Some(0),
            _ => None,
        };
        OutputOptions {
            log_probs: outputs.iter().filter_map(num_top).max(),
            context_logits: wants(OutputKind::ContextLogits),
            prompt_log_probs: outputs
                .contains(&OutputKind::PromptLogprobs)
                .then(|| self.num_prompt_logprobs.unwrap_or(0)),
            generation_logits: wants(OutputKind::GenerationLogits),
            kv_blocks: wants(OutputKind::KvCacheAllocNewBlocks)
                || wants(OutputKind::KvCacheReusedBlocks)
                || wants(OutputKind::KvCacheAllocTotalBlocks),
            drafts: wants(OutputKind::AcceptanceRate)
                || wants(OutputKind::TotalAcceptedDraftTokens)
                || wants(OutputKind::TotalDraftTokens),
            // The engine knows.
            pooled: false,
            beams: None,
        }
    }

    /// Whether the draft is given in tokens.
    pub fn has_draft_ids(&self) -> bool {
        !self.draft_input_ids.is_empty()
    }

    /// The drafts of an output of up to `max_new_tokens`, the last of which is never drafted. `of_text` is in the place
    /// of `draft_input_ids` where the draft is a text.
    pub fn drafts(&self, of_text: Option<&[TokenId]>, max_new_tokens: usize) -> DraftOptions {
        let expected = of_text.unwrap_or(&self.draft_input_ids);
        let num_expected = expected.len().min(max_new_tokens);
        DraftOptions {
            max_draft_tokens: self.num_draft_tokens,
            expected: expected[..num_expected].into(),
        }
    }

    /// Applies the sampling defaults that the model's clients expect.
    pub fn take_defaults_of(&mut self, compatibility: ClientCompatibility) {
        if compatibility.is_greedy_by_default() && self.top_p.is_none() {
            self.top_k.get_or_insert(1);
        }
    }

    /// The effective `top_k` and `top_p`. A `top_p` of 0 is as in
    /// TensorRT-LLM: no limit beside a `top_k`, else the most likely token.
    fn truncation(&self) -> (u32, f32) {
        let top_k = self.top_k.unwrap_or(0);
        match self.top_p {
            Some(0.0) => (top_k.max(1), 1.0),
            top_p => (top_k, top_p.unwrap_or(1.0)),
        }
    }

    /// The decay of `top_p`, if it decays.
    fn top_p_decay(&self) -> Option<TopPDecay> {
        (self.top_p_decay.is_some() || self.top_p_min.is_some()).then(|| TopPDecay {
            factor: self.top_p_decay.unwrap_or(1.0),
            min: self.top_p_min.unwrap_or(TopPDecay::DEFAULT_MIN),
            reset_ids: self.top_p_reset_ids.clone(),
        })
    }

    /// Checks that every token that the options name is in the vocabulary.
    fn check_ids(&self, vocab_size: u32) -> Result<(), RequestError> {
        let biased: Vec<_> = self.logit_bias.iter().map(|(id, _)| *id).collect();
        let none = Vec::new();
        for (name, ids) in [
            ("end_id", self.end_ids.as_ref().unwrap_or(&none)),
            ("stop_token_ids", &self.stop_token_ids),
            (
                "allowed_token_ids",
                self.allowed_token_ids.as_ref().unwrap_or(&none),
            ),
            ("top_p_reset_ids", &self.top_p_reset_ids),
            ("logit_bias", &biased),
            ("draft_input_ids", &self.draft_input_ids),
            ("stop_words_list", &self.stop_ids.concat()),
            ("bad_words_list", &self.bad_ids.concat()),
        ] {
            if let Some(id) = ids.iter().find(|id| **id >= vocab_size) {
                return Err(RequestError::Option {
                    name: name.to_owned(),
                    value: format!("token {id}"),
                    expected: format!("in the vocabulary, 0 to {}", vocab_size - 1),
                });
            }
        }
        Ok(())
    }

    /// Adds `embedding_bias`, if there is one, to the biases of all tokens.
    pub fn add_embedding_bias(
        &self,
        sampling: &mut SamplingParams,
        vocab_size: u32,
    ) -> Result<(), RequestError> {
        if self.embedding_bias.is_empty() {
            return Ok(());
        }
        if self.embedding_bias.len() != vocab_size as usize {
            return Err(RequestError::Option {
                name: "embedding_bias".to_owned(),
                value: format!("a list of {}", self.embedding_bias.len()),
                expected: format!("one of {vocab_size}, a number for each token"),
            });
        }
        let mut biases = self.embedding_bias.clone();
        for &(token, bias) in sampling.logit_bias.iter() {
            if let Some(sum) = biases.get_mut(token as usize) {
                *sum += bias;
            }
        }
        let biases = (0..).zip(biases).filter(|(_, bias)| *bias != 0.0);
        sampling.logit_bias = biases.collect();
        Ok(())
    }

    /// Adds each weight of `embedding_bias_weights` to the biases of the tokens of its word.
    pub fn add_word_biases(
        &self,
        sampling: &mut SamplingParams,
        tokens: &[Vec<TokenId>],
    ) -> Result<(), RequestError> {
        let mut biases: BTreeMap<TokenId, f32> = sampling.logit_bias.iter().copied().collect();
        for (tokens, weight) in tokens.iter().zip(&self.embedding_bias_weights) {
            for &token in tokens {
                *biases.entry(token).or_default() += weight;
            }
        }
        if biases.len() > MAX_BIASES {
            return Err(RequestError::Invalid(format!(
                "options 'logit_bias' and 'embedding_bias_words' change the logits of {} tokens; at most \
                 {MAX_BIASES} can be changed",
                biases.len()
            )));
        }
        sampling.logit_bias = biases.into_iter().collect();
        Ok(())
    }

    /// Sets one field. `place` follows its name in error messages.
    fn set(
        &mut self,
        name: &str,
        value: &Value,
        place: &'static str,
        seen: &mut Vec<Seen>,
    ) -> Result<(), RequestError> {
        if value.is_null() {
            // Clients that send all their fields send null for unused ones.
            return Ok(());
        }
        let Some(option) = option_named(name) else {
            return self.set_foreign(name, value);
        };
        if option.name == "stop" && *value == Value::Bool(false) {
            // Clients of other backends send `stop: false` with every request.
            return Ok(());
        }
        let earlier = seen.iter().find(|seen| seen.option == option.name);
        let before = earlier.map(|earlier| (self.clone(), earlier.spelling.clone()));
        seen.push(Seen {
            option: option.name,
            spelling: format!("'{name}'{place}"),
        });
        (option.set)(self, value).ok_or_else(|| RequestError::Option {
            name: name.to_owned(),
            value: shortened(&value.to_string()),
            expected: expected_of(option.expected, value),
        })?;
        // vLLM's own client gives each twice, as a parameter and in `sampling_parameters`.
        if let Some((before, spelling)) = before
            && before != *self
        {
            return Err(RequestError::Invalid(format!(
                "option '{}' is given twice, as {spelling} and as '{name}'{place}, with two values; give it once",
                option.name
            )));
        }
        Ok(())
    }

    /// Handles a field that is not an option here.
    fn set_foreign(&mut self, name: &str, value: &Value) -> Result<(), RequestError> {
        let Some(field) = foreign(name) else {
            let known = OPTIONS
                .iter()
                .flat_map(|o| std::iter::once(&o.name).chain(o.aliases));
            return Err(RequestError::UnknownOption {
                name: shortened(name),
                nearest: nearest_name(name, known.copied()).map(str::to_owned),
            });
        };
        match field.handling {
            Handling::Ignored(_) if self.ignored.contains(&field.name) => Ok(()),
            Handling::Ignored(_) => {
                self.ignored.push(field.name);
                Ok(())
            }
            Handling::Only { is_neutral, .. } if is_neutral(value) => Ok(()),
            Handling::Only { expected, .. } => Err(RequestError::Option {
                name: name.to_owned(),
                value: shortened(&value.to_string()),
                expected: expected.to_owned(),
            }),
            Handling::AdapterTensor => Err(refused(name, ADAPTER_TENSOR)),
            Handling::Refused(reason) => Err(refused(name, reason)),
        }
    }
}

fn refused(name: &str, reason: &str) -> RequestError {
    RequestError::Invalid(format!("option '{name}': {reason}"))
}

/// An option that the request gives.
struct Seen {
    /// The name of the option.
    option: &'static str,
    /// The name that the request uses, and its place in the request.
    spelling: String,
}

/// The option of this name or alias.
fn option_named(name: &str) -> Option<&'static RequestOption> {
    let name = plain_name(name);
    OPTIONS
        .iter()
        .find(|option| option.name == name || option.aliases.contains(&name))
}

/// The main name of the option with this name or alias.
pub(super) fn canonical_name(name: &str) -> Option<&'static str> {
    option_named(name).map(|option| option.name)
}

#[cfg(test)]
mod tests;
