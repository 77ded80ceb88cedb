//! The tensors that a request may have: all of TensorRT-LLM's `InferenceRequest` and of its Triton model `tensorrt_llm`
//! that mean something for the tokens of a decoder. `docs/src/embedding.md` lists them with the others.

use super::model::TensorModel;
use super::tensor::{HostTensor, TensorType};
use inflight_base::TokenId;
use inflight_engine::OutputOptions;
use inflight_sampling::{EarlyStopping, SamplingParams, words_of_ids};

/// A request while its tensors are read.
pub(super) struct Draft {
    pub(super) prompt: Vec<TokenId>,
    /// The number of `input_ids` that are the prompt.
    pub(super) input_length: Option<usize>,
    pub(super) max_new_tokens: Option<u32>,
    pub(super) stop_words: Vec<Vec<TokenId>>,
    pub(super) draft_tokens: Vec<TokenId>,
    pub(super) beam_width: u32,
    pub(super) num_returned: Option<u32>,
    pub(super) length_penalty: f32,
    pub(super) early_stopping: EarlyStopping,
    pub(super) diversity_rate: f32,
    pub(super) pad_id: Option<i32>,
    pub(super) top_p_decay: Option<f32>,
    pub(super) top_p_min: Option<f32>,
    pub(super) top_p_reset_ids: Vec<TokenId>,
    pub(super) outputs: OutputOptions,
    pub(super) sampling: SamplingParams,
}

impl Draft {
    /// A draft of a greedy request without a prompt.
    pub(super) fn new(model: &TensorModel) -> Self {
        Self {
            prompt: Vec::new(),
            input_length: None,
            max_new_tokens: None,
            stop_words: Vec::new(),
            draft_tokens: Vec::new(),
            beam_width: 1,
            num_returned: None,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Likely,
            diversity_rate: 0.0,
            pad_id: None,
            top_p_decay: None,
            top_p_min: None,
            top_p_reset_ids: Vec::new(),
            outputs: OutputOptions::default(),
            sampling: SamplingParams {
                end_ids: model.end_ids.clone(),
                ..SamplingParams::default()
            },
        }
    }
}

/// Reads a tensor into a draft, or returns what is wrong with it.
pub(super) type Set = fn(&mut Draft, &HostTensor, &TensorModel) -> Result<(), String>;

/// Every tensor that a request may have.
pub(super) const INPUTS: &[(&str, Set)] = &[
    ("input_ids", |draft, tensor, model| {
        // [prompt] or [1, prompt]
        draft.prompt = tokens(tensor, model)?;
        Ok(())
    }),
    ("input_lengths", |draft, tensor, _| {
        draft.input_length = Some(count(tensor, 1)? as usize);
        Ok(())
    }),
    ("request_output_len", |draft, tensor, _| {
        draft.max_new_tokens = Some(count(tensor, 1)?);
        Ok(())
    }),
    ("stop_words_list", |draft, tensor, model| {
        draft.stop_words = id_words(tensor, model)?;
        Ok(())
    }),
    ("bad_words_list", |draft, tensor, model| {
        draft.sampling.bad_words = id_words(tensor, model)?.into();
        Ok(())
    }),
    ("draft_input_ids", |draft, tensor, model| {
        draft.draft_tokens = tokens(tensor, model)?;
        Ok(())
    }),
    ("end_id", |draft, tensor, model| {
        // -1 stands for none.
        draft.sampling.end_ids = match tensor.element::<i32>()? {
            -1 => Vec::new(),
            id => vec![model.token(id)?],
        };
        Ok(())
    }),
    ("pad_id", |draft, tensor, _| {
        draft.pad_id = Some(tensor.element()?);
        Ok(())
    }),
    ("beam_width", |draft, tensor, _| {
        draft.beam_width = count(tensor, 1)?;
        Ok(())
    }),
    ("num_return_sequences", |draft, tensor, _| {
        draft.num_returned = Some(count(tensor, 1)?);
        Ok(())
    }),
    ("temperature", |draft, tensor, _| {
        draft.sampling.temperature = number(tensor, 0.0, 100.0)?;
        Ok(())
    }),
    ("runtime_top_k", |draft, tensor, _| {
        // -1 is all, like 0.
        draft.sampling.top_k = match tensor.element::<i32>()? {
            -1 => 0,
            _ => count(tensor, 0)?,
        };
        Ok(())
    }),
    ("runtime_top_p", |draft, tensor, _| {
        draft.sampling.top_p = number(tensor, 0.0, 1.0)?;
        Ok(())
    }),
    ("runtime_top_p_min", |draft, tensor, _| {
        draft.top_p_min = Some(number(tensor, 0.0, 1.0)?);
        Ok(())
    }),
    ("runtime_top_p_decay", |draft, tensor, _| {
        draft.top_p_decay = Some(number(tensor, f32::MIN_POSITIVE, 1.0)?);
        Ok(())
    }),
    ("runtime_top_p_reset_ids", |draft, tensor, model| {
        draft.top_p_reset_ids = few_tokens(tensor, model)?;
        Ok(())
    }),
    ("min_p", |draft, tensor, _| {
        draft.sampling.min_p = number(tensor, 0.0, 1.0)?;
        Ok(())
    }),
    ("typical_p", |draft, tensor, _| {
        draft.sampling.typical_p = number(tensor, f32::MIN_POSITIVE, 1.0)?;
        Ok(())
    }),
    ("seed", seed),
    ("random_seed", seed),
    ("min_tokens", min_tokens),
    ("min_length", min_tokens),
    ("repetition_penalty", |draft, tensor, _| {
        draft.sampling.repetition_penalty = number(tensor, 1e-3, 100.0)?;
        Ok(())
    }),
    ("presence_penalty", |draft, tensor, _| {
        draft.sampling.presence_penalty = number(tensor, -100.0, 100.0)?;
        Ok(())
    }),
    ("frequency_penalty", |draft, tensor, _| {
        draft.sampling.frequency_penalty = number(tensor, -100.0, 100.0)?;
        Ok(())
    }),
    ("prompt_ignore_length", |draft, tensor, _| {
        draft.sampling.prompt_ignore_length = count(tensor, 0)?;
        Ok(())
    }),
    ("no_repeat_ngram_size", |draft, tensor, _| {
        let size = count(tensor, 0)?;
        if size > MAX_NGRAM_SIZE {
            return Err(format!("is {size}, and must be at most {MAX_NGRAM_SIZE}"));
        }
        draft.sampling.no_repeat_ngram_size = size;
        Ok(())
    }),
    ("len_penalty", |draft, tensor, _| {
        draft.length_penalty = number(tensor, -10.0, 10.0)?;
        Ok(())
    }),
    ("early_stopping", |draft, tensor, _| {
        // TensorRT-LLM's model declares a boolean, and its request has an integer.
        draft.early_stopping = match tensor.data_type {
            TensorType::Int32 => EarlyStopping::of_integer(tensor.element::<i32>()?.into()),
            _ => EarlyStopping::of_integer(tensor.element::<bool>()?.into()),
        };
        Ok(())
    }),
    ("beam_search_diversity_rate", |draft, tensor, _| {
        draft.diversity_rate = number(tensor, 0.0, 100.0)?;
        Ok(())
    }),
    ("embedding_bias", |draft, tensor, model| {
        let num_biases = tensor.num_elements()?;
        if num_biases != model.vocab_size as usize {
            return Err(format!(
                "has {num_biases} elements, and must have one for each of {} tokens",
                model.vocab_size
            ));
        }
        let biases = (0..).zip(tensor.elements::<f32>()?);
        let biases: Vec<_> = biases.filter(|(_, bias)| *bias != 0.0).collect();
        let is_valid = |bias: f32| bias.is_finite() || bias == f32::NEG_INFINITY;
        if let Some((token, bias)) = biases.iter().find(|(_, bias)| !is_valid(*bias)) {
            return Err(format!(
                "is {bias} for token {token}, and must be finite, or minus infinity to forbid the token"
            ));
        }
        draft.sampling.logit_bias = biases.into();
        Ok(())
    }),
    ("return_log_probs", |draft, tensor, _| {
        draft.outputs.log_probs = tensor.element::<bool>()?.then_some(0);
        Ok(())
    }),
    ("return_context_logits", |draft, tensor, _| {
        draft.outputs.context_logits = tensor.element()?;
        Ok(())
    }),
    ("return_generation_logits", |draft, tensor, _| {
        draft.outputs.generation_logits = tensor.element()?;
        Ok(())
    }),
    ("return_perf_metrics", |draft, tensor, _| {
        let is_wanted = tensor.element()?;
        draft.outputs.kv_blocks = is_wanted;
        draft.outputs.drafts = is_wanted;
        Ok(())
    }),
];

/// Tensors of TensorRT-LLM's requests that are not supported, and why.
pub(super) const UNSUPPORTED: &[(&str, &str)] = &[
    ("streaming", "is the field is_streaming of the request"),
    ("stop", "is a stop signal: name the request there"),
    (
        "exclude_input_in_output",
        "is not supported: the prompt comes first in output_ids, unless it streams",
    ),
    (
        "return_num_input_tokens",
        "is not supported: sequence_length counts prompt and output",
    ),
    (
        "return_num_output_tokens",
        "is not supported: sequence_length counts prompt and output",
    ),
    ("draft_logits", EXACT_DRAFTS),
    ("draft_acceptance_threshold", EXACT_DRAFTS),
    ("guided_decoding_guide_type", NO_TOKENIZER),
    ("guided_decoding_guide", NO_TOKENIZER),
    ("prompt_embedding_table", TOKENS_ONLY),
    ("prompt_table_extra_ids", TOKENS_ONLY),
    ("prompt_vocab_size", TOKENS_ONLY),
    ("mrope_rotary_cos_sin", TOKENS_ONLY),
    ("mrope_position_deltas", TOKENS_ONLY),
    ("encoder_input_features", NO_ENCODER),
    ("encoder_output_lengths", NO_ENCODER),
    ("decoder_input_ids", NO_ENCODER),
    ("decoder_input_lengths", NO_ENCODER),
    ("cross_attention_mask", NO_ENCODER),
    ("skip_cross_attn_blocks", NO_ENCODER),
    ("lora_task_id", NO_ADAPTERS),
    ("lora_weights", NO_ADAPTERS),
    ("lora_config", NO_ADAPTERS),
    (
        "context_phase_params",
        "is not supported: one process computes context and generation",
    ),
    ("retention_token_range_starts", BY_USE),
    ("retention_token_range_ends", BY_USE),
    ("retention_token_range_priorities", BY_USE),
    ("retention_token_range_durations_ms", BY_USE),
    ("retention_decode_priority", BY_USE),
    ("retention_decode_duration_ms", BY_USE),
    ("lookahead_window_size", BY_OPTIONS),
    ("lookahead_ngram_size", BY_OPTIONS),
    ("lookahead_verification_set_size", BY_OPTIONS),
];

const EXACT_DRAFTS: &str =
    "is not supported: a draft token is accepted only if it equals the token that is generated";
const NO_TOKENIZER: &str =
    "is not supported: a guide needs a tokenizer, and requests here are token ids";
const TOKENS_ONLY: &str = "is not supported: prompts are token ids";
const NO_ENCODER: &str = "is not supported: models have no encoder";
const NO_ADAPTERS: &str = "is not supported: merge the adapter into its checkpoint";
const BY_USE: &str = "is not supported: the least recently used blocks are evicted first";
const BY_OPTIONS: &str = "is not supported: speculation is an option of the manager";

/// The most end ids and reset ids.
const MAX_IDS: usize = 16;
/// The longest n-gram of `no_repeat_ngram_size`.
const MAX_NGRAM_SIZE: u32 = 64;

fn seed(draft: &mut Draft, tensor: &HostTensor, _: &TensorModel) -> Result<(), String> {
    draft.sampling.seed = tensor.element()?;
    Ok(())
}

fn min_tokens(draft: &mut Draft, tensor: &HostTensor, _: &TensorModel) -> Result<(), String> {
    draft.sampling.min_tokens = count(tensor, 0)?;
    Ok(())
}

/// Token ids, each in the vocabulary.
fn tokens(tensor: &HostTensor, model: &TensorModel) -> Result<Vec<TokenId>, String> {
    let ids = tensor.elements::<i32>()?;
    ids.map(|id| model.token(id)).collect()
}

/// A short list of token ids.
fn few_tokens(tensor: &HostTensor, model: &TensorModel) -> Result<Vec<TokenId>, String> {
    let num = tensor.num_elements()?;
    match num <= MAX_IDS {
        true => tokens(tensor, model),
        false => Err(format!(
            "has {num} token ids, and may have at most {MAX_IDS}"
        )),
    }
}

/// Words as token ids, `[1, 2, n]` or `[2, n]`: see [`words_of_ids`].
fn id_words(tensor: &HostTensor, model: &TensorModel) -> Result<Vec<Vec<TokenId>>, String> {
    let numbers: Vec<i32> = tensor.elements()?.collect();
    if !matches!(tensor.shape[..], [2, _] | [1, 2, _]) {
        return Err(format!(
            "has the shape {:?}, and must have [1, 2, n]: token ids, and where each word ends",
            tensor.shape
        ));
    }
    let (ids, ends) = numbers.split_at(numbers.len() / 2);
    let words = words_of_ids(ids, ends).ok_or(
        "must have the token ids of at most 64 words of at most 256 each in its first row, and in the second \
         where each word ends among them, padded with -1",
    )?;
    for id in words.iter().flatten() {
        model.token(*id as i32)?;
    }
    Ok(words)
}

impl TensorModel {
    fn token(&self, id: i32) -> Result<TokenId, String> {
        let token = TokenId::try_from(id).ok();
        token.filter(|id| *id < self.vocab_size).ok_or_else(|| {
            format!(
                "has {id}, which is not a token id: those are 0 to {}",
                self.vocab_size - 1
            )
        })
    }
}

fn count(tensor: &HostTensor, min: u32) -> Result<u32, String> {
    let value: i32 = tensor.element()?;
    let count = u32::try_from(value).ok().filter(|count| *count >= min);
    count.ok_or_else(|| format!("is {value}, and must be at least {min}"))
}

fn number(tensor: &HostTensor, min: f32, max: f32) -> Result<f32, String> {
    let value: f32 = tensor.element()?;
    match (min..=max).contains(&value) {
        true => Ok(value),
        false => Err(format!("is {value}, and must be {min} to {max}")),
    }
}
