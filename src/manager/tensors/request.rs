//! Reading a request's tensors, by the names of TensorRT-LLM's `InferenceRequest`.

use std::sync::Arc;

use super::model::{TensorModel, TensorRequest};
use super::tensor::HostTensor;
use crate::base::{RequestError, TokenId, Tokens, nearest_name};
use crate::engine::{NewRequest, OutputOptions};
use crate::manager::Submission;
use crate::sampling::{BeamSearch, EarlyStopping, SamplingParams};

/// A request while its tensors are read.
struct Draft {
    prompt: Vec<TokenId>,
    max_new_tokens: Option<u32>,
    beam_width: u32,
    length_penalty: f32,
    early_stopping: EarlyStopping,
    diversity_rate: f32,
    pad_id: Option<i32>,
    outputs: OutputOptions,
    sampling: SamplingParams,
}

/// Reads a tensor into a draft, or returns what is wrong with it.
type Set = fn(&mut Draft, &HostTensor, &TensorModel) -> Result<(), String>;

/// Every tensor that a request may have.
const INPUTS: &[(&str, Set)] = &[
    ("input_ids", |draft, tensor, model| {
        // [prompt] or [1, prompt]
        draft.prompt = tensor
            .elements::<i32>()?
            .map(|id| model.token(id))
            .collect::<Result<_, _>>()?;
        Ok(())
    }),
    ("request_output_len", |draft, tensor, _| {
        draft.max_new_tokens = Some(count(tensor, 1)?);
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
    ("temperature", |draft, tensor, _| {
        draft.sampling.temperature = number(tensor, 0.0, 100.0)?;
        Ok(())
    }),
    ("runtime_top_k", |draft, tensor, _| {
        draft.sampling.top_k = count(tensor, 0)?;
        Ok(())
    }),
    ("runtime_top_p", |draft, tensor, _| {
        // 0 is off, as in TensorRT-LLM.
        let top_p = number(tensor, 0.0, 1.0)?;
        draft.sampling.top_p = if top_p == 0.0 { 1.0 } else { top_p };
        Ok(())
    }),
    ("random_seed", |draft, tensor, _| {
        draft.sampling.seed = tensor.element()?;
        Ok(())
    }),
    ("min_length", |draft, tensor, _| {
        draft.sampling.min_tokens = count(tensor, 0)?;
        Ok(())
    }),
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
    ("len_penalty", |draft, tensor, _| {
        draft.length_penalty = number(tensor, -10.0, 10.0)?;
        Ok(())
    }),
    ("early_stopping", |draft, tensor, _| {
        draft.early_stopping = match tensor.element()? {
            true => EarlyStopping::Always,
            false => EarlyStopping::Likely,
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
        if let Some((token, bias)) = biases.iter().find(|(_, bias)| !bias.is_finite()) {
            return Err(format!("is {bias} for token {token}, and must be finite"));
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
];

/// What is needed later to write the responses.
pub(super) struct Asked {
    pub(super) submission: Submission,
    pub(super) pad_id: i32,
    pub(super) beam_width: usize,
}

/// Reads a request.
///
/// # Errors
/// A tensor is unknown, missing or invalid.
pub(super) fn read(request: &TensorRequest, model: &TensorModel) -> Result<Asked, RequestError> {
    let invalid = |text: String| RequestError::Invalid(text);
    let mut draft = Draft {
        prompt: Vec::new(),
        max_new_tokens: None,
        beam_width: 1,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Likely,
        diversity_rate: 0.0,
        pad_id: None,
        outputs: OutputOptions::default(),
        sampling: SamplingParams {
            end_ids: model.end_ids.clone(),
            ..SamplingParams::default()
        },
    };
    let names = || INPUTS.iter().map(|(name, _)| *name);
    for (name, tensor) in &request.tensors {
        let Some((_, set)) = INPUTS.iter().find(|(known, _)| known == name) else {
            let nearest = nearest_name(name, names());
            let hint = nearest.map_or_else(
                || format!("there are {}", names().collect::<Vec<_>>().join(", ")),
                |nearest| format!("did you mean '{nearest}'?"),
            );
            return Err(invalid(format!("unknown tensor '{name}'; {hint}")));
        };
        let is_prompt_too_long = name == "input_ids"
            && tensor.bytes.len() > model.max_seq_len.index().saturating_mul(size_of::<i32>());
        if is_prompt_too_long {
            return Err(invalid(format!(
                "tensor 'input_ids' is longer than max_seq_len = {}",
                model.max_seq_len
            )));
        }
        set(&mut draft, tensor, model)
            .map_err(|reason| invalid(format!("tensor '{name}' {reason}")))?;
    }
    let Some(max_new_tokens) = draft.max_new_tokens else {
        return Err(invalid("tensor 'request_output_len' is missing".to_owned()));
    };
    // Without these options a request is greedy; with top-k or top-p it is sampled.
    let is_cut = draft.sampling.top_k > 0 || draft.sampling.top_p < 1.0;
    if is_cut && !request.tensors.contains_key("temperature") {
        draft.sampling.temperature = 1.0;
    }
    let beam_width = draft.beam_width;
    if beam_width > 1 {
        draft.sampling.beam_search = Some(BeamSearch {
            width: beam_width,
            num_returned: beam_width,
            length_penalty: draft.length_penalty,
            early_stopping: draft.early_stopping,
            diversity_rate: draft.diversity_rate,
        });
        draft.outputs.log_probs = None;
    }
    let end_id = draft.sampling.end_ids.first().map_or(0, |id| *id as i32);
    Ok(Asked {
        pad_id: draft.pad_id.unwrap_or(end_id),
        beam_width: beam_width as usize,
        submission: Submission {
            request: NewRequest {
                client_id: request.client_id,
                outputs: draft.outputs,
                sampling: Arc::new(draft.sampling),
                ..NewRequest::new(request.id, draft.prompt, Tokens(max_new_tokens))
            },
            is_streaming: request.is_streaming,
        },
    })
}

impl TensorModel {
    fn token(&self, id: i32) -> Result<TokenId, String> {
        let token = TokenId::try_from(id).ok();
        token.filter(|id| *id < self.vocab_size).ok_or_else(|| {
            format!(
                "has {id}, which is not a token id: they are 0 to {}",
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
