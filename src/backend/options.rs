//! What a request may ask for: one option, one entry, from which the README's table is made.
//!
//! Options are request *parameters*, not tensors, because Triton's direct sequence batching wants
//! the same inputs in every request. A parameter is a boolean, an integer, a number or a string, so
//! a list travels as a JSON string. Names are those of TensorRT-LLM's ensemble and of vLLM's backend.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;

use serde_json::Value;

use crate::backend::clients::{Fate, foreign};
use crate::backend::guide_options::GuideOptions;
use crate::base::{RequestError, TokenId, nearest_name};
use crate::config::OutputKind;
use crate::engine::{Gather, ReuseOptions};
use crate::sampling::{SamplingParams, TopPDecay};

/// The options of one request, each in its range.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestOptions {
    max_tokens: Option<u32>,
    /// Whether every step answers, or only the last.
    pub stream: bool,
    /// Whether a full answer leaves out the prompt.
    pub exclude_input_in_output: Option<bool>,
    /// Texts that end the output, and are not part of it.
    pub stop: Vec<String>,
    /// Texts that the output must not contain.
    pub bad_words: Vec<String>,
    /// Ends the request after this many microseconds; zero is no limit.
    pub timeout_us: u64,
    /// A conversation, from which the model's chat template makes the prompt.
    pub messages: Option<Value>,
    /// Who comes first: the smaller.
    pub priority: i32,
    /// What it shares of the KV cache.
    pub reuse: ReuseOptions,
    /// What the output has to be.
    pub guide: GuideOptions,
    /// Output tensors that the request does not want.
    pub omitted: Vec<OutputKind>,
    /// Options that ask for output tensors, and which; a model that has none of them refuses.
    pub asked: Vec<(&'static str, &'static [OutputKind])>,
    num_logprobs: u32,
    /// So many of the ids that the request brings are the prompt, the rest padding.
    pub input_length: Option<u32>,
    /// So many tokens at the end of the prompt are kept.
    pub truncate_prompt_tokens: Option<u32>,
    /// Texts whose tokens are more or less likely, and what is added to their logits.
    pub embedding_bias_words: Vec<String>,
    /// One for each of `embedding_bias_words`.
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
    allowed_token_ids: Option<Vec<TokenId>>,
}

/// How a request wants its tokens turned into text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Whether there is any text.
    pub detokenize: bool,
    /// Whether special tokens are left out; `None`: as the model says.
    pub skip_special_tokens: Option<bool>,
    /// Whether special tokens that follow one another keep a space between them that the tokenizer
    /// puts there.
    pub spaces_between_special_tokens: bool,
    /// Whether what ended the text, a stop word or a token, is part of it.
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
    /// with two values; a field of another backend's clients that cannot be served.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Result<Self, RequestError> {
        let mut options = Self::default();
        let mut seen = Vec::new();
        for (name, value) in parameters {
            if name == "sampling_parameters" {
                for (name, value) in &nested(&value)? {
                    options.set(name, value, &mut seen)?;
                }
            } else {
                options.set(name, &value, &mut seen)?;
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

    /// Tokens to generate, at most: the request's own figure or the model's.
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

    /// The sampler's part of the options, for a model whose sequences end with `model_end_ids`.
    ///
    /// A request that says nothing of sampling is answered greedily; one that gives any of
    /// `temperature`, `top_k`, `top_p`, `min_p` or `typical_p` is sampled, at temperature 1 if it
    /// gives none.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn sampling(
        &self,
        model_end_ids: &[TokenId],
        bad_words: Vec<Vec<TokenId>>,
        vocab_size: u32,
    ) -> Result<SamplingParams, RequestError> {
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
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(if sampled { 1.0 } else { 0.0 }),
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
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
            allowed_token_ids: self.allowed_token_ids.clone(),
            bad_words,
            logit_bias: self.logit_bias.clone(),
            guide: None,
            logits_processor: None,
        })
    }

    /// Whether the request wants an output tensor that it does not name.
    pub fn wants(&self, output: OutputKind) -> bool {
        let is_asked = self
            .asked
            .iter()
            .any(|(_, outputs)| outputs.contains(&output));
        (is_asked || !output.is_on_request()) && !self.omitted.contains(&output)
    }

    /// What is to be gathered for these outputs.
    pub fn gather(&self, outputs: &[OutputKind]) -> Gather {
        let wants = |output| self.wants(output) && outputs.contains(&output);
        let num_top = |output: &OutputKind| match output {
            OutputKind::Logprobs => Some(self.num_logprobs),
            OutputKind::OutputLogProbs
            | OutputKind::CumLogProbs
            | OutputKind::CumulativeLogprob => Some(0),
            _ => None,
        };
        Gather {
            log_probs: outputs.iter().filter_map(num_top).max(),
            context_logits: wants(OutputKind::ContextLogits),
            generation_logits: wants(OutputKind::GenerationLogits),
            kv_blocks: wants(OutputKind::KvCacheAllocNewBlocks)
                || wants(OutputKind::KvCacheReusedBlocks)
                || wants(OutputKind::KvCacheAllocTotalBlocks),
        }
    }

    /// How `top_p` falls, if it does.
    fn top_p_decay(&self) -> Option<TopPDecay> {
        (self.top_p_decay.is_some() || self.top_p_min.is_some()).then(|| TopPDecay {
            factor: self.top_p_decay.unwrap_or(1.0),
            min: self.top_p_min.unwrap_or(DEFAULT_TOP_P_MIN),
            reset_ids: self.top_p_reset_ids.clone(),
        })
    }

    /// Whether every token that the options name is in the vocabulary.
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

    /// Adds each weight of `embedding_bias_weights` to the biases of the tokens of its word.
    pub fn add_word_biases(
        &self,
        sampling: &mut SamplingParams,
        tokens: &[Vec<TokenId>],
    ) -> Result<(), RequestError> {
        let mut biases: BTreeMap<TokenId, f32> = sampling.logit_bias.drain(..).collect();
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

    fn set(
        &mut self,
        name: &str,
        value: &Value,
        seen: &mut Vec<&'static str>,
    ) -> Result<(), RequestError> {
        if value.is_null() {
            // A client that writes all that it knows writes null for what it does not want.
            return Ok(());
        }
        let Some(option) = option_named(name) else {
            return self.set_foreign(name, value);
        };
        if option.name == "stop" && *value == Value::Bool(false) {
            // Clients of other backends say with every request that it stops no other.
            return Ok(());
        }
        let before = seen.contains(&option.name).then(|| self.clone());
        seen.push(option.name);
        (option.set)(self, value).ok_or_else(|| RequestError::Option {
            name: name.to_owned(),
            value: shortened(&value.to_string()),
            expected: option.expected.to_owned(),
        })?;
        // vLLM's own client gives each twice, as a parameter and in `sampling_parameters`.
        if before.is_some_and(|before| before != *self) {
            return Err(RequestError::Invalid(format!(
                "option '{}' is given twice, once as '{name}', with two values; give it once",
                option.name
            )));
        }
        Ok(())
    }

    /// A field that is no option of ours.
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
        match field.fate {
            Fate::Ignored(_) if self.ignored.contains(&field.name) => Ok(()),
            Fate::Ignored(_) => {
                self.ignored.push(field.name);
                Ok(())
            }
            Fate::Only { is_neutral, .. } if is_neutral(value) => Ok(()),
            Fate::Only { expected, .. } => Err(RequestError::Option {
                name: name.to_owned(),
                value: shortened(&value.to_string()),
                expected: expected.to_owned(),
            }),
            Fate::Refused(reason) => {
                Err(RequestError::Invalid(format!("option '{name}': {reason}")))
            }
        }
    }
}

/// The name without what TensorRT-LLM's LLM API model puts before it.
pub(super) fn plain_name(name: &str) -> &str {
    name.strip_prefix("sampling_param_").unwrap_or(name)
}

/// The option that a client calls so.
fn option_named(name: &str) -> Option<&'static RequestOption> {
    let name = plain_name(name);
    OPTIONS
        .iter()
        .find(|option| option.name == name || option.aliases.contains(&name))
}

/// What we call the option that a client calls so, if there is one.
pub(super) fn canonical_name(name: &str) -> Option<&'static str> {
    option_named(name).map(|option| option.name)
}

/// One option of a request.
struct RequestOption {
    /// Its name.
    pub name: &'static str,
    /// Other names that clients of other backends use.
    pub aliases: &'static [&'static str],
    /// What its value may be, worded to follow "is not".
    pub expected: &'static str,
    /// What holds where it is not given.
    pub default: &'static str,
    /// What it does, for the README.
    pub doc: &'static str,
    set: fn(&mut RequestOptions, &Value) -> Option<()>,
}

/// The largest count that an option takes.
const MAX_COUNT: u32 = i32::MAX as u32;
/// Words of one list, bytes of one word, entries of `logit_bias`: a request must not make every
/// step of all the others slow.
const MAX_WORDS: usize = 64;
const MAX_WORD_BYTES: usize = 256;
const MAX_BIASES: usize = 1024;
const MAX_BIAS: f64 = 1000.0;
const MAX_END_IDS: usize = 16;
/// Most likely tokens that are named in the place of each token: vLLM's default `max_logprobs`.
const MAX_LOGPROBS: u32 = 20;

/// What `return_perf_metrics` gives.
const PERF_METRICS: &[OutputKind] = &[
    OutputKind::KvCacheAllocNewBlocks,
    OutputKind::KvCacheReusedBlocks,
    OutputKind::KvCacheAllocTotalBlocks,
    OutputKind::ArrivalTimeNs,
    OutputKind::FirstScheduledTimeNs,
    OutputKind::FirstTokenTimeNs,
    OutputKind::LastTokenTimeNs,
];
/// Allowed ids are looked at together with the logits, once a token.
const MAX_ALLOWED_IDS: usize = 65536;
/// Every place of the sequence is compared with its end, once a token.
const MAX_NGRAM_SIZE: u32 = 64;
/// What TensorRT-LLM takes where nothing is said.
const DEFAULT_TOP_P_MIN: f32 = 1e-6;

/// Every option, in the order of the README.
const OPTIONS: &[RequestOption] = &[
    RequestOption {
        name: "max_tokens",
        aliases: &["request_output_len"],
        expected: "an integer of at least 1",
        default: "the model's `default_max_tokens`",
        doc: "Tokens to generate, at most. Never more than fit into `max_seq_len` after the prompt.",
        set: |o, v| set(&mut o.max_tokens, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "min_tokens",
        aliases: &["min_length"],
        expected: "an integer of at least 0",
        default: "0",
        doc: "The end ids and `stop_token_ids` cannot be chosen before this many tokens.",
        set: |o, v| set(&mut o.min_tokens, integer(v, 0..=MAX_COUNT)),
    },
    RequestOption {
        name: "temperature",
        aliases: &[],
        expected: "a number from 0 to 100",
        default: "0 (greedy); 1 if `top_k`, `top_p`, `min_p` or `typical_p` is given",
        doc: "Divides the logits; 0 always takes the most likely token.",
        set: |o, v| set(&mut o.temperature, number(v, 0.0..=100.0).map(Some)),
    },
    RequestOption {
        name: "top_k",
        aliases: &["runtime_top_k"],
        expected: "an integer of at least 0, or -1",
        default: "0: all",
        doc: "Keeps the `top_k` most likely tokens; 0 or -1 keeps all.",
        set: |o, v| {
            let all = (v.as_i64() == Some(-1)).then_some(0);
            set(
                &mut o.top_k,
                all.or_else(|| integer(v, 0..=MAX_COUNT)).map(Some),
            )
        },
    },
    RequestOption {
        name: "top_p",
        aliases: &["runtime_top_p"],
        expected: "a number above 0 and at most 1",
        default: "1: all",
        doc: "Keeps the most likely tokens whose probabilities reach this sum.",
        set: |o, v| set(&mut o.top_p, share(v).map(Some)),
    },
    RequestOption {
        name: "top_p_decay",
        aliases: &["runtime_top_p_decay"],
        expected: "a number above 0 and at most 1",
        default: "1: off",
        doc: "After each token, `top_p` becomes this fraction of what it was.",
        set: |o, v| set(&mut o.top_p_decay, share(v).map(Some)),
    },
    RequestOption {
        name: "top_p_min",
        aliases: &["runtime_top_p_min"],
        expected: "a number from 0 to 1",
        default: "0.000001",
        doc: "What `top_p` is at least, from the second token on.",
        set: |o, v| set(&mut o.top_p_min, number(v, 0.0..=1.0).map(Some)),
    },
    RequestOption {
        name: "top_p_reset_ids",
        aliases: &["runtime_top_p_reset_ids"],
        expected: "a token id, or a JSON list of at most 16",
        default: "none",
        doc: "After one of these tokens, `top_p` is again what the request gave.",
        set: |o, v| set(&mut o.top_p_reset_ids, ids(v, MAX_END_IDS)),
    },
    RequestOption {
        name: "min_p",
        aliases: &[],
        expected: "a number from 0 to 1",
        default: "0: all",
        doc: "Keeps the tokens at least this fraction as likely as the most likely one.",
        set: |o, v| set(&mut o.min_p, number(v, 0.0..=1.0).map(Some)),
    },
    RequestOption {
        name: "typical_p",
        aliases: &[],
        expected: "a number above 0 and at most 1",
        default: "1: all",
        doc: "Keeps the tokens whose information is nearest to the expected one, until their \
              probabilities reach this sum. After the options above.",
        set: |o, v| set(&mut o.typical_p, share(v).map(Some)),
    },
    RequestOption {
        name: "seed",
        aliases: &["random_seed"],
        expected: "an integer from 0 to 18446744073709551615",
        default: "0",
        doc: "Same seed, same text, whatever else runs.",
        set: |o, v| set(&mut o.seed, unsigned(v)),
    },
    RequestOption {
        name: "repetition_penalty",
        aliases: &[],
        expected: "a number above 0 and at most 100",
        default: "1: off",
        doc: "Makes tokens of prompt and output less likely (above 1) or more (below).",
        set: |o, v| {
            let penalty = number(v, 0.0..=100.0).filter(|penalty| *penalty > 0.0);
            set(&mut o.repetition_penalty, penalty.map(Some))
        },
    },
    RequestOption {
        name: "presence_penalty",
        aliases: &[],
        expected: "a number from -100 to 100",
        default: "0: off",
        doc: "Subtracted from the logit of every token that the output has.",
        set: |o, v| set(&mut o.presence_penalty, number(v, -100.0..=100.0)),
    },
    RequestOption {
        name: "frequency_penalty",
        aliases: &[],
        expected: "a number from -100 to 100",
        default: "0: off",
        doc: "The same, once for each time that the output has it.",
        set: |o, v| set(&mut o.frequency_penalty, number(v, -100.0..=100.0)),
    },
    RequestOption {
        name: "prompt_ignore_length",
        aliases: &[],
        expected: "an integer of at least 0",
        default: "the whole prompt, as OpenAI and vLLM define the penalties",
        doc: "So many tokens at the beginning of the prompt are nothing to `presence_penalty` and \
              `frequency_penalty`; those after them count like the output. 0 is how TensorRT-LLM \
              defines the penalties.",
        set: |o, v| {
            set(
                &mut o.prompt_ignore_length,
                integer(v, 0..=MAX_COUNT).map(Some),
            )
        },
    },
    RequestOption {
        name: "no_repeat_ngram_size",
        aliases: &[],
        expected: "an integer from 0 to 64",
        default: "0: off",
        doc: "No run of so many tokens occurs twice in prompt and output.",
        set: |o, v| set(&mut o.no_repeat_ngram_size, integer(v, 0..=MAX_NGRAM_SIZE)),
    },
    RequestOption {
        name: "logit_bias",
        aliases: &[],
        expected: "a JSON object of at most 1024 tokens, each with a number from -1000 to 1000",
        default: "none",
        doc: "Added to the logits of single tokens: `{\"50256\": -100}`.",
        set: |o, v| set(&mut o.logit_bias, biases(v)),
    },
    RequestOption {
        name: "embedding_bias_words",
        aliases: &[],
        expected: "a text of at most 256 bytes, or a JSON list of at most 64 (a text that begins with [ goes in a list)",
        default: "none",
        doc: "Texts to whose tokens' logits `embedding_bias_weights` are added, as `logit_bias` is.",
        set: |o, v| set(&mut o.embedding_bias_words, words(v)),
    },
    RequestOption {
        name: "embedding_bias_weights",
        aliases: &[],
        expected: "a number from -1000 to 1000, or a JSON list of at most 64",
        default: "none",
        doc: "One number for each of `embedding_bias_words`.",
        set: |o, v| set(&mut o.embedding_bias_weights, weights(v)),
    },
    RequestOption {
        name: "allowed_token_ids",
        aliases: &[],
        expected: "a JSON list of 1 to 65536 token ids",
        default: "all",
        doc: "No other token can be chosen. The ids that end the output are not among them by \
              themselves.",
        set: |o, v| set(&mut o.allowed_token_ids, allowed_ids(v).map(Some)),
    },
    RequestOption {
        name: "end_id",
        aliases: &["end_ids"],
        expected: "a token id, or a JSON list of at most 16",
        default: "the model's end ids",
        doc: "Tokens that end the output, in the place of the model's. -1 is none, as `ignore_eos`.",
        set: |o, v| set(&mut o.end_ids, end_ids(v).map(Some)),
    },
    RequestOption {
        name: "ignore_eos",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "No end id ends the output; `stop_token_ids` and `stop` do.",
        set: |o, v| set(&mut o.ignore_eos, flag(v)),
    },
    RequestOption {
        name: "stop_token_ids",
        aliases: &[],
        expected: "a token id, or a JSON list of at most 16",
        default: "none",
        doc: "Tokens that end the output besides the end ids, as a stop word does: the token is in \
              `output_ids`, and not in `text_output`.",
        set: |o, v| set(&mut o.stop_token_ids, ids(v, MAX_END_IDS)),
    },
    RequestOption {
        name: "priority",
        aliases: &["request_priority"],
        expected: "an integer from -2147483648 to 2147483647",
        default: "0",
        doc: "Who comes first inside the backend: the smaller number, and of equal ones the earlier \
              request. What has the largest is paused first. (Triton keeps `priority` to itself over \
              gRPC and in HTTP's `/infer`: write `request_priority` there. Requests that wait for a slot in Triton's sequence \
              batcher are in order of arrival.)",
        set: |o, v| set(&mut o.priority, signed(v)),
    },
    RequestOption {
        name: "kv_cache_reuse",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: uses no blocks of earlier requests and leaves none to later ones.",
        set: |o, v| set(&mut o.reuse.enabled, flag(v)),
    },
    RequestOption {
        name: "cache_salt",
        aliases: &[],
        expected: "a text of 1 to 256 bytes",
        default: "none",
        doc: "Blocks are shared only with requests of the same salt, so that tenants cannot tell \
              from their latency what others have asked.",
        set: |o, v| {
            let salt = v
                .as_str()
                .filter(|salt| (1..=MAX_WORD_BYTES).contains(&salt.len()));
            set(&mut o.reuse.salt, salt.map(|salt| Some(salt.into())))
        },
    },
    RequestOption {
        name: "stop",
        aliases: &["stop_words"],
        expected: "a text of at most 256 bytes, or a JSON list of at most 64 (a text that begins with [ goes in a list)",
        default: "none",
        doc: "Texts that end the output; `text_output` stops before them. A list is written as a JSON \
              string: `\"[\\\"\\\\n\\\", \\\"END\\\"]\"`. `stop: true` makes the request one that \
              ends the request in flight with the same request id, and generates nothing itself.",
        set: |o, v| set(&mut o.stop, words(v)),
    },
    RequestOption {
        name: "include_stop_str_in_output",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "`text_output` ends with the stop word, or with the text of the token, that ended it.",
        set: |o, v| set(&mut o.text.include_stop, flag(v)),
    },
    RequestOption {
        name: "bad_words",
        aliases: &[],
        expected: "a text of at most 256 bytes, or a JSON list of at most 64 (a text that begins with [ goes in a list)",
        default: "none",
        doc: "Texts whose tokens the output must not contain, with or without a space before.",
        set: |o, v| set(&mut o.bad_words, words(v)),
    },
    RequestOption {
        name: "guided_decoding_guide_type",
        aliases: &[],
        expected: "'json', 'json_schema', 'regex' or 'ebnf_grammar'",
        default: "none: the output is free",
        doc: "What the output has to be, as `guided_decoding_guide` says. `json` is any JSON object or array, \
              and needs no guide. Every output fits its guide, unless `max_tokens` or a stop word cuts it \
              off; it ends with an end id where the guide allows the end.",
        set: |o, v| o.guide.set_type(v),
    },
    RequestOption {
        name: "guided_decoding_guide",
        aliases: &[],
        expected: "a text",
        default: "none",
        doc: "The JSON schema, the regular expression (syntax of Rust's `regex`; the whole output must match), \
              or the grammar: EBNF with rules `root ::= ...`, as llama.cpp and XGrammar write it, or Lark's \
              syntax with rules `start: ...`.",
        set: |o, v| o.guide.set_guide(v),
    },
    RequestOption {
        name: "structured_outputs",
        aliases: &["guided_decoding"],
        expected: "a JSON object with one of 'json', 'regex', 'choice', 'grammar' and 'json_object'",
        default: "none",
        doc: "The same as vLLM says it: `{\"json\": {...}}` is a schema, `{\"choice\": [\"yes\", \"no\"]}` a \
              list of texts, `{\"json_object\": true}` any JSON object.",
        set: |o, v| o.guide.add_structured_outputs(v),
    },
    RequestOption {
        name: "guided_json",
        aliases: &[],
        expected: "a JSON schema: an object, true or false",
        default: "none",
        doc: "The output is JSON that the schema describes.",
        set: |o, v| o.guide.add_json(v),
    },
    RequestOption {
        name: "guided_regex",
        aliases: &[],
        expected: "a regular expression",
        default: "none",
        doc: "The whole output matches it.",
        set: |o, v| o.guide.add_regex(v),
    },
    RequestOption {
        name: "guided_choice",
        aliases: &[],
        expected: "a JSON list of 1 to 1024 texts",
        default: "none",
        doc: "The output is one of the texts.",
        set: |o, v| o.guide.add_choice(v),
    },
    RequestOption {
        name: "guided_grammar",
        aliases: &[],
        expected: "a grammar",
        default: "none",
        doc: "The output is of the grammar, in EBNF or in Lark's syntax.",
        set: |o, v| o.guide.add_grammar(v),
    },
    RequestOption {
        name: "stream",
        aliases: &["streaming"],
        expected: "true or false",
        default: "false",
        doc: "One response for every token, each with what is new, instead of one at the end.",
        set: |o, v| set(&mut o.stream, flag(v)),
    },
    RequestOption {
        name: "exclude_input_in_output",
        aliases: &["exclude_input_from_output"],
        expected: "true or false",
        default: "the model's `exclude_input_in_output`",
        doc: "Whether a full answer leaves out the prompt.",
        set: |o, v| set(&mut o.exclude_input_in_output, flag(v).map(Some)),
    },
    RequestOption {
        name: "detokenize",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: no text is made of the tokens; `text_output` is empty but for the prompt.",
        set: |o, v| set(&mut o.text.detokenize, flag(v)),
    },
    RequestOption {
        name: "skip_special_tokens",
        aliases: &[],
        expected: "true or false",
        default: "the model's `skip_special_tokens`",
        doc: "Whether special tokens are left out of `text_output`.",
        set: |o, v| set(&mut o.text.skip_special_tokens, flag(v).map(Some)),
    },
    RequestOption {
        name: "spaces_between_special_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false`: special tokens that follow one another are written without the space that \
              some tokenizers put between tokens.",
        set: |o, v| set(&mut o.text.spaces_between_special_tokens, flag(v)),
    },
    RequestOption {
        name: "messages",
        aliases: &[],
        expected: "a JSON list of objects",
        default: "none",
        doc: "A conversation, `[{\"role\": \"user\", \"content\": \"...\"}]` as a JSON string; the \
              model's chat template makes the prompt of it. `text_input` is empty then.",
        set: |o, v| set(&mut o.messages, messages(v).map(Some)),
    },
    RequestOption {
        name: "truncate_prompt_tokens",
        aliases: &[],
        expected: "an integer of at least 1",
        default: "the whole prompt",
        doc: "Keeps so many tokens at the end of the prompt.",
        set: |o, v| {
            set(
                &mut o.truncate_prompt_tokens,
                integer(v, 1..=MAX_COUNT).map(Some),
            )
        },
    },
    RequestOption {
        name: "input_lengths",
        aliases: &[],
        expected: "an integer of at least 1",
        default: "the length of `input_ids`",
        doc: "So many of `input_ids` are the prompt, and the rest is padding.",
        set: |o, v| set(&mut o.input_length, integer(v, 1..=MAX_COUNT).map(Some)),
    },
    RequestOption {
        name: "timeout",
        aliases: &[],
        expected: "an integer of at least 0, in microseconds",
        default: "0: none",
        doc: "Ends the request, with what it has, this long after it reached the backend. (Over \
              gRPC and in HTTP's `/infer` it is Triton's own `timeout`, and also acts while the request \
              waits for a slot.)",
        set: |o, v| set(&mut o.timeout_us, unsigned(v)),
    },
    RequestOption {
        name: "return_finish_reason",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `finish_reason`.",
        set: |o, v| o.want(OutputKind::FinishReason, v),
    },
    RequestOption {
        name: "return_num_input_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `num_input_tokens`.",
        set: |o, v| o.want(OutputKind::NumInputTokens, v),
    },
    RequestOption {
        name: "return_num_output_tokens",
        aliases: &[],
        expected: "true or false",
        default: "true",
        doc: "`false` leaves out the output `num_output_tokens`.",
        set: |o, v| o.want(OutputKind::NumOutputTokens, v),
    },
    RequestOption {
        name: "return_log_probs",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the outputs `output_log_probs` and `cum_log_probs`.",
        set: |o, v| {
            const OUTPUTS: &[OutputKind] = &[OutputKind::OutputLogProbs, OutputKind::CumLogProbs];
            o.ask("return_log_probs", OUTPUTS, v)
        },
    },
    RequestOption {
        name: "return_cumulative_logprob",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the output `cumulative_logprob`.",
        set: |o, v| {
            o.ask(
                "return_cumulative_logprob",
                &[OutputKind::CumulativeLogprob],
                v,
            )
        },
    },
    RequestOption {
        name: "logprobs",
        aliases: &[],
        expected: "an integer from 0 to 20",
        default: "0, with `return_logprobs`",
        doc: "Gives the output `logprobs`, with so many of the most likely tokens in the place of each \
              token, and the token itself.",
        set: |o, v| {
            set(&mut o.num_logprobs, integer(v, 0..=MAX_LOGPROBS))?;
            o.ask("logprobs", &[OutputKind::Logprobs], &Value::Bool(true))
        },
    },
    RequestOption {
        name: "return_logprobs",
        aliases: &[],
        expected: "true or false",
        default: "true, with `logprobs`",
        doc: "Gives the output `logprobs`; `false` leaves it out.",
        set: |o, v| match flag(v)? {
            true => o.ask("return_logprobs", &[OutputKind::Logprobs], v),
            false => o.want(OutputKind::Logprobs, v),
        },
    },
    RequestOption {
        name: "return_context_logits",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the output `context_logits`. The prompt is computed anew, whatever blocks of it the \
              cache has.",
        set: |o, v| o.ask("return_context_logits", &[OutputKind::ContextLogits], v),
    },
    RequestOption {
        name: "return_generation_logits",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the output `generation_logits`.",
        set: |o, v| {
            o.ask(
                "return_generation_logits",
                &[OutputKind::GenerationLogits],
                v,
            )
        },
    },
    RequestOption {
        name: "return_stop_reason",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the output `stop_reason`.",
        set: |o, v| o.ask("return_stop_reason", &[OutputKind::StopReason], v),
    },
    RequestOption {
        name: "return_perf_metrics",
        aliases: &[],
        expected: "true or false",
        default: "false",
        doc: "Gives the outputs `kv_cache_alloc_new_blocks`, `kv_cache_reused_blocks`, \
              `kv_cache_alloc_total_blocks`, `arrival_time_ns`, `first_scheduled_time_ns`, \
              `first_token_time_ns` and `last_token_time_ns`, with the last response.",
        set: |o, v| o.ask("return_perf_metrics", PERF_METRICS, v),
    },
    RequestOption {
        name: "sampling_parameters",
        aliases: &[],
        expected: "a JSON object of options",
        default: "none",
        doc: "Any of the options above in one JSON string, as vLLM's backend takes them; lists and \
              objects stand there as they are.",
        // Its members are options themselves: `RequestOptions::parse` unfolds it.
        set: |_, _| None,
    },
];

/// The README's table of all options.
pub fn reference_table() -> String {
    let mut table =
        String::from("| option | value | default | what it does |\n|---|---|---|---|\n");
    for RequestOption {
        name,
        aliases,
        expected,
        default,
        doc,
        ..
    } in OPTIONS
    {
        let names = std::iter::once(name)
            .chain(*aliases)
            .map(|name| format!("`{name}`"));
        let names = names.collect::<Vec<_>>().join(", ");
        // Writing to a String cannot fail.
        let _ = writeln!(table, "| {names} | {expected} | {default} | {doc} |");
    }
    table
}

impl RequestOptions {
    fn ask(
        &mut self,
        option: &'static str,
        outputs: &'static [OutputKind],
        value: &Value,
    ) -> Option<()> {
        if flag(value)? && !self.asked.contains(&(option, outputs)) {
            self.asked.push((option, outputs));
        }
        Some(())
    }

    fn want(&mut self, output: OutputKind, value: &Value) -> Option<()> {
        if !flag(value)? && !self.omitted.contains(&output) {
            self.omitted.push(output);
        }
        Some(())
    }
}

fn set<T>(place: &mut T, value: Option<T>) -> Option<()> {
    *place = value?;
    Some(())
}

/// The members of a `sampling_parameters` option.
fn nested(value: &Value) -> Result<serde_json::Map<String, Value>, RequestError> {
    match parsed(value) {
        Some(Value::Object(members)) if !members.contains_key("sampling_parameters") => Ok(members),
        _ => Err(RequestError::Option {
            name: "sampling_parameters".to_owned(),
            value: shortened(&value.to_string()),
            expected: "a JSON object of options".to_owned(),
        }),
    }
}

/// A parameter's structured value: itself, or the JSON in its string.
pub(super) fn parsed(value: &Value) -> Option<Value> {
    match value {
        Value::String(text) => serde_json::from_str(text).ok(),
        other => Some(other.clone()),
    }
}

/// gRPC clients without a type for a number send it as a string.
fn unsigned(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_str()?.trim().parse().ok())
}

fn integer(value: &Value, range: RangeInclusive<u32>) -> Option<u32> {
    u32::try_from(unsigned(value)?)
        .ok()
        .filter(|count| range.contains(count))
}

fn signed(value: &Value) -> Option<i32> {
    let written = value.as_str().and_then(|text| text.trim().parse().ok());
    value.as_i64().or(written)?.try_into().ok()
}

fn number(value: &Value, range: RangeInclusive<f64>) -> Option<f32> {
    let number: f64 = value
        .as_f64()
        .or_else(|| value.as_str()?.trim().parse().ok())?;
    range.contains(&number).then_some(number as f32)
}

fn flag(value: &Value) -> Option<bool> {
    value
        .as_bool()
        .or_else(|| value.as_str()?.trim().to_ascii_lowercase().parse().ok())
}

fn words(value: &Value) -> Option<Vec<String>> {
    let list = match value {
        Value::String(text) if !text.trim_start().starts_with('[') => vec![text.clone()],
        _ => {
            let list = parsed(value)?;
            list.as_array()?
                .iter()
                .map(|w| w.as_str().map(str::to_owned))
                .collect::<Option<_>>()?
        }
    };
    let fits = |word: &String| word.len() <= MAX_WORD_BYTES;
    if list.len() > MAX_WORDS || !list.iter().all(fits) {
        return None;
    }
    // Clients of TensorRT-LLM say with an empty text that there is no word.
    Some(list.into_iter().filter(|word| !word.is_empty()).collect())
}

/// A probability that is not zero.
fn share(value: &Value) -> Option<f32> {
    number(value, 0.0..=1.0).filter(|share| *share > 0.0)
}

/// A token id or a list of at most `max_len`.
fn ids(value: &Value, max_len: usize) -> Option<Vec<TokenId>> {
    let list = match parsed(value)? {
        Value::Array(list) => list,
        id => vec![id],
    };
    if list.len() > max_len {
        return None;
    }
    list.iter().map(|id| integer(id, 0..=MAX_COUNT)).collect()
}

/// Clients of TensorRT-LLM say with -1 that no token ends the output.
fn end_ids(value: &Value) -> Option<Vec<TokenId>> {
    match parsed(value)?.as_i64() {
        Some(-1) => Some(Vec::new()),
        _ => ids(value, MAX_END_IDS),
    }
}

/// Some token ids, sorted, each once.
fn allowed_ids(value: &Value) -> Option<Vec<TokenId>> {
    let mut ids = ids(value, MAX_ALLOWED_IDS).filter(|ids| !ids.is_empty())?;
    ids.sort_unstable();
    ids.dedup();
    Some(ids)
}

fn weights(value: &Value) -> Option<Vec<f32>> {
    let list = match parsed(value)? {
        Value::Array(list) => list,
        weight => vec![weight],
    };
    if list.len() > MAX_WORDS {
        return None;
    }
    let weight = |weight: &Value| number(weight, -MAX_BIAS..=MAX_BIAS);
    list.iter().map(weight).collect()
}

fn biases(value: &Value) -> Option<Vec<(TokenId, f32)>> {
    let members = parsed(value)?;
    let members = members.as_object()?;
    let bias = |(token, bias): (&String, &Value)| {
        let token = token
            .parse::<TokenId>()
            .ok()
            .filter(|token| *token <= MAX_COUNT)?;
        Some((token, number(bias, -MAX_BIAS..=MAX_BIAS)?))
    };
    let mut biases: Vec<_> = members.iter().map(bias).collect::<Option<_>>()?;
    biases.sort_unstable_by_key(|(token, _)| *token);
    let unique = biases.windows(2).all(|pair| pair[0].0 != pair[1].0);
    (unique && biases.len() <= MAX_BIASES).then_some(biases)
}

fn messages(value: &Value) -> Option<Value> {
    let list = parsed(value)?;
    let objects = list.as_array()?;
    (!objects.is_empty() && objects.iter().all(Value::is_object)).then_some(list)
}

/// A client's text as it is shown in an error: it can be megabytes long.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(parameters: &[(&str, Value)]) -> Result<RequestOptions, RequestError> {
        RequestOptions::parse(
            parameters
                .iter()
                .map(|(name, value)| (*name, value.clone())),
        )
    }

    fn sampling(parameters: &[(&str, Value)]) -> SamplingParams {
        parse(parameters)
            .expect("good options")
            .sampling(&[2], Vec::new(), 100)
            .expect("in range")
    }

    #[test]
    fn a_request_that_says_nothing_is_greedy_and_ends_with_the_models_end_ids() {
        let params = sampling(&[]);
        assert_eq!(
            params,
            SamplingParams {
                end_ids: vec![2],
                ..SamplingParams::default()
            }
        );
    }

    #[test]
    fn any_sampling_option_makes_it_sampled_and_temperature_zero_greedy_again() {
        assert_eq!(sampling(&[("top_k", json!(5))]).temperature, 1.0);
        assert_eq!(sampling(&[("top_p", json!("0.5"))]).top_p, 0.5);
        assert!(sampling(&[("top_k", json!(-1)), ("temperature", json!(0))]).is_greedy());
    }

    #[test]
    fn end_ids_are_the_requests_own_or_none() {
        assert_eq!(sampling(&[("end_id", json!(7))]).end_ids, [7]);
        assert_eq!(sampling(&[("end_id", json!("[7, 8]"))]).end_ids, [7, 8]);
        assert_eq!(sampling(&[("end_id", json!(-1))]).end_ids, [0; 0]);
        assert_eq!(sampling(&[("ignore_eos", json!(true))]).end_ids, [0; 0]);
    }

    #[test]
    fn stop_token_ids_add_to_the_end_ids_and_outlive_ignore_eos() {
        let stop = ("stop_token_ids", json!("[7, 8]"));
        let both = sampling(std::slice::from_ref(&stop));
        assert_eq!((both.end_ids, both.stop_token_ids), (vec![2], vec![7, 8]));
        let alone = sampling(&[stop, ("ignore_eos", json!(true))]);
        assert_eq!((alone.end_ids, alone.stop_token_ids), (vec![], vec![7, 8]));
    }

    #[test]
    fn top_p_decays_where_a_factor_or_a_minimum_is_given() {
        assert_eq!(sampling(&[("top_p", json!(0.9))]).top_p_decay, None);
        let decay = sampling(&[
            ("runtime_top_p_decay", json!(0.5)),
            ("runtime_top_p_reset_ids", json!(7)),
        ]);
        let expected = TopPDecay {
            factor: 0.5,
            min: 1e-6,
            reset_ids: vec![7],
        };
        assert_eq!(decay.top_p_decay, Some(expected));
        let risen = sampling(&[("top_p_min", json!(0.5))]).top_p_decay;
        assert_eq!(
            risen.map(|decay| (decay.factor, decay.min)),
            Some((1.0, 0.5))
        );
    }

    #[test]
    fn allowed_ids_are_sorted_and_in_the_vocabulary() {
        let params = sampling(&[("allowed_token_ids", json!("[9, 3, 9, 99]"))]);
        assert_eq!(params.allowed_token_ids, Some(vec![3, 9, 99]));
        for name in [
            "allowed_token_ids",
            "stop_token_ids",
            "top_p_reset_ids",
            "end_id",
        ] {
            let options = parse(&[(name, json!("[3, 100]"))]).expect("parses");
            let error = options
                .sampling(&[], Vec::new(), 100)
                .expect_err("out of range")
                .to_string();
            assert!(error.contains(name) && error.contains("0 to 99"), "{error}");
        }
    }

    #[test]
    fn vllms_json_of_options_unfolds() {
        let nested = r#"{"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"9": -1, "3": 2}}"#;
        let options = parse(&[("sampling_parameters", json!(nested))]).expect("good options");
        assert_eq!(options.stop, ["a", "b"]);
        assert_eq!(options.logit_bias, [(3, 2.0), (9, -1.0)]);
    }

    #[test]
    fn a_word_is_a_text_or_a_list_in_json() {
        assert_eq!(
            parse(&[("stop", json!("END"))]).expect("a word").stop,
            ["END"]
        );
        assert_eq!(
            parse(&[("stop", json!(r#"["x", " [y"]"#))])
                .expect("two")
                .stop,
            ["x", " [y"]
        );
        for none in [json!("[]"), json!(""), json!(r#"[""]"#)] {
            let options = parse(&[("stop_words", none)]);
            assert_eq!(options.expect("none").stop, [""; 0]);
        }
    }

    #[test]
    fn every_option_refuses_what_it_cannot_be_and_says_what_it_can() {
        let long = "x".repeat(MAX_WORD_BYTES + 1);
        let bad = [
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-5)),
            ("max_tokens", json!(1u64 << 31)),
            ("max_tokens", json!("many")),
            ("max_tokens", json!(true)),
            ("max_tokens", json!(1.5)),
            ("min_tokens", json!(-1)),
            ("temperature", json!(-0.1)),
            ("temperature", json!("hot")),
            ("temperature", json!("nan")),
            ("temperature", json!(1e30)),
            ("top_k", json!(-2)),
            ("top_p", json!(0)),
            ("top_p", json!(1.01)),
            ("top_p_decay", json!(0)),
            ("top_p_min", json!(-0.1)),
            ("top_p_reset_ids", json!(-1)),
            ("min_p", json!(2)),
            ("typical_p", json!(0)),
            ("typical_p", json!(1.1)),
            ("seed", json!(-1)),
            ("repetition_penalty", json!(0)),
            ("presence_penalty", json!(1e9)),
            ("frequency_penalty", json!("inf")),
            ("prompt_ignore_length", json!(-1)),
            ("no_repeat_ngram_size", json!(65)),
            ("allowed_token_ids", json!("[]")),
            ("allowed_token_ids", json!("[-1]")),
            ("allowed_token_ids", json!(vec![1; MAX_ALLOWED_IDS + 1])),
            ("stop_token_ids", json!(-1)),
            ("stop_token_ids", json!(vec![1; MAX_END_IDS + 1])),
            ("include_stop_str_in_output", json!(1)),
            ("detokenize", json!("no")),
            ("skip_special_tokens", json!(0)),
            ("spaces_between_special_tokens", json!(2)),
            ("logit_bias", json!("[1]")),
            ("logit_bias", json!(r#"{"x": 1}"#)),
            ("logit_bias", json!(r#"{"1": 1e9}"#)),
            ("logit_bias", json!(r#"{"1": 1, "01": 2}"#)),
            ("end_id", json!(-2)),
            ("end_id", json!("[1, \"a\"]")),
            ("ignore_eos", json!(1)),
            ("priority", json!(1u64 << 31)),
            ("priority", json!("high")),
            ("kv_cache_reuse", json!(2)),
            ("cache_salt", json!("")),
            ("cache_salt", json!(long)),
            ("stop", json!(true)),
            ("stop", json!("[1]")),
            ("stop", json!("[\"a\"")),
            ("stop", json!(long)),
            ("bad_words", json!(vec!["x"; MAX_WORDS + 1])),
            ("embedding_bias_words", json!(vec!["x"; MAX_WORDS + 1])),
            ("embedding_bias_weights", json!("[\"x\"]")),
            ("embedding_bias_weights", json!(1e9)),
            ("embedding_bias_weights", json!(vec![1; MAX_WORDS + 1])),
            ("truncate_prompt_tokens", json!(0)),
            ("input_lengths", json!(0)),
            ("guided_decoding_guide_type", json!("xml")),
            ("guided_decoding_guide", json!(5)),
            ("structured_outputs", json!("{}")),
            ("structured_outputs", json!({"json": {}, "regex": "a"})),
            ("structured_outputs", json!({"structural_tag": "x"})),
            ("guided_json", json!("{")),
            ("guided_json", json!("[]")),
            ("guided_regex", json!("")),
            ("guided_choice", json!("[]")),
            ("guided_choice", json!(vec!["x"; 1025])),
            ("guided_grammar", json!(1)),
            ("stream", json!("perhaps")),
            ("exclude_input_in_output", json!(0)),
            ("messages", json!("{}")),
            ("messages", json!("[]")),
            ("messages", json!("[1]")),
            ("timeout", json!(-1)),
            ("return_finish_reason", json!("no")),
            ("return_log_probs", json!(1)),
            ("return_cumulative_logprob", json!("sum")),
            ("logprobs", json!(-1)),
            ("logprobs", json!(21)),
            ("logprobs", json!(true)),
            ("return_logprobs", json!(2)),
            ("return_context_logits", json!("all")),
            ("return_generation_logits", json!(3)),
            ("return_stop_reason", json!("why")),
            ("return_perf_metrics", json!(0.5)),
            ("sampling_parameters", json!("[]")),
            ("sampling_parameters", json!("{")),
            ("sampling_parameters", json!({ "sampling_parameters": {} })),
        ];
        for (name, value) in &bad {
            let error = parse(&[(name, value.clone())]).expect_err("must be refused");
            let RequestError::Option {
                name: named,
                expected,
                ..
            } = &error
            else {
                panic!("{name}={value}: {error:?}");
            };
            assert_eq!(named, name);
            let option = OPTIONS
                .iter()
                .find(|o| o.name == *name)
                .expect("a known name");
            assert_eq!(expected, option.expected);
            assert!(error.to_string().len() < 300, "{error}");
        }
        let untested = OPTIONS
            .iter()
            .filter(|o| bad.iter().all(|(name, _)| *name != o.name));
        let untested: Vec<_> = untested.map(|o| o.name).collect();
        assert_eq!(
            untested,
            ["return_num_input_tokens", "return_num_output_tokens"]
        );
    }

    #[test]
    fn an_unknown_option_is_refused_with_the_nearest_one() {
        let error = parse(&[("temprature", json!(1))])
            .expect_err("unknown")
            .to_string();
        assert_eq!(
            error,
            "unknown option 'temprature'; did you mean 'temperature'?"
        );
    }

    #[test]
    fn an_option_given_under_two_names_is_refused() {
        let not_a_stop = [("stop", json!(false)), ("stop_words", json!("b"))];
        assert_eq!(parse(&not_a_stop).expect("both").stop, ["b"]);
        let alike = [("stop", json!("a")), ("stop_words", json!(["a"]))];
        assert_eq!(parse(&alike).expect("the same").stop, ["a"]);
        let omitted = ("return_finish_reason", json!(false));
        assert!(parse(&[omitted.clone(), omitted]).is_ok());
        let twice = [("stop", json!("a")), ("stop_words", json!("b"))];
        assert!(
            parse(&twice)
                .expect_err("twice")
                .to_string()
                .contains("give it once")
        );
    }

    #[test]
    fn a_null_is_an_option_that_is_not_given() {
        let nested = r#"{"seed": null, "stop": null, "max_tokens": 7, "n": null}"#;
        let options = parse(&[("sampling_parameters", json!(nested))]).expect("good options");
        assert_eq!(options.max_tokens_or(16), Ok(7));
    }

    #[test]
    fn the_llm_apis_names_are_understood() {
        let options = parse(&[
            ("sampling_param_max_tokens", json!(7)),
            ("sampling_param_stop", json!(["a"])),
            ("sampling_param_exclude_input_from_output", json!(true)),
        ])
        .expect("good options");
        assert_eq!(options.max_tokens_or(16), Ok(7));
        assert_eq!(options.stop, ["a"]);
        assert_eq!(options.exclude_input_in_output, Some(true));
    }

    #[test]
    fn words_are_biased_by_their_tokens_and_add_to_the_logit_biases() {
        let options = parse(&[
            ("logit_bias", json!(r#"{"7": 1, "1": 2}"#)),
            ("embedding_bias_words", json!(["a", "b"])),
            ("embedding_bias_weights", json!([0.5, -3])),
        ])
        .expect("good options");
        let mut params = options.sampling(&[], Vec::new(), 100).expect("in range");
        let tokens = [vec![7, 9], vec![9]];
        assert_eq!(options.add_word_biases(&mut params, &tokens), Ok(()));
        assert_eq!(params.logit_bias, [(1, 2.0), (7, 1.5), (9, -2.5)]);
        let many: Vec<Vec<TokenId>> = vec![(0..1025).collect()];
        let error = options.add_word_biases(&mut params, &many);
        assert!(error.is_err_and(|error| error.to_string().contains("at most 1024")));
        let error = parse(&[("embedding_bias_words", json!(["a", "b"]))]);
        let error = error.expect_err("no weights").to_string();
        assert!(error.contains("one number for each"), "{error}");
    }

    #[test]
    fn options_must_fit_each_other_and_the_vocabulary() {
        let options = parse(&[("min_tokens", json!(17))]).expect("parses");
        let error = options.max_tokens_or(16).expect_err("17 > 16");
        assert!(
            error.to_string().contains("max_tokens, which is 16"),
            "{error}"
        );
        let options = parse(&[("logit_bias", json!(r#"{"100": 1}"#))]).expect("parses");
        let error = options
            .sampling(&[], Vec::new(), 100)
            .expect_err("out of range");
        assert!(error.to_string().contains("0 to 99"), "{error}");
    }
}
