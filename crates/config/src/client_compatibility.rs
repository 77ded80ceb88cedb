//! Compatibility with the clients of other backends: `client_compatibility`.
//!
//! Each method is one difference. `docs/src/clients.md` lists them, and `tests/server/test_compatibility.py` tests
//! each.

use crate::client_inputs::{ClientInput, ENSEMBLE, TENSORRT_LLM, VLLM};
use crate::outputs::OutputKind;

/// The backend whose clients a model is compatible with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ClientCompatibility {
    /// No other backend.
    #[default]
    None,
    /// vLLM's backend.
    Vllm,
    /// TensorRT-LLM's backend.
    TensorrtLlm,
}

impl ClientCompatibility {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("none", Self::None),
        ("vllm", Self::Vllm),
        ("tensorrtllm", Self::TensorrtLlm),
    ];
}

/// The outputs of vLLM's models, in order.
const VLLM_OUTPUTS: &[OutputKind] = &[
    OutputKind::TextOutput,
    OutputKind::FinishReason,
    OutputKind::CumulativeLogprob,
    OutputKind::Logprobs,
    OutputKind::NumInputTokens,
    OutputKind::NumOutputTokens,
];

impl ClientCompatibility {
    /// The default inputs of a model, besides its prompt.
    pub(super) fn inputs(self, takes_text: bool) -> &'static [ClientInput] {
        match (self, takes_text) {
            (Self::None, _) => &[],
            (Self::Vllm, _) => VLLM,
            (Self::TensorrtLlm, true) => ENSEMBLE,
            (Self::TensorrtLlm, false) => TENSORRT_LLM,
        }
    }

    /// The default outputs of a model.
    pub(super) fn outputs(self) -> &'static [OutputKind] {
        match self {
            Self::Vllm => VLLM_OUTPUTS,
            _ => &OutputKind::ALL,
        }
    }

    /// Whether `max_batch_size` may be 0, so that tensors have no batch dimension.
    pub(super) fn allows_missing_batch_dim(self) -> bool {
        self == Self::Vllm
    }

    /// Whether token counts are UINT32.
    pub fn has_unsigned_counts(self) -> bool {
        self == Self::Vllm
    }

    /// Whether `num_output_tokens` counts the tokens of its response instead of all tokens so far.
    pub fn counts_new_tokens(self) -> bool {
        self == Self::Vllm
    }

    /// Whether `sequence_length` counts the ids of its response instead of prompt and output so far.
    pub fn counts_response_ids(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether `finish_reason`, `num_input_tokens` and `num_output_tokens` are sent only on request.
    pub fn sends_reasons_and_counts_on_request(self) -> bool {
        self != Self::None
    }

    /// Whether the output `logprobs` requires `return_logprobs`, while the option `logprobs` only sets the number of
    /// alternatives.
    pub fn requires_return_logprobs(self) -> bool {
        self == Self::Vllm
    }

    /// Whether finish reasons are as in both backends' Python models: `stop` for an end id and for a stop word.
    pub fn uses_short_finish_reasons(self) -> bool {
        self != Self::None
    }

    /// Whether `text_output` lacks the model's batch dimension, like the output of the ensemble's last model.
    pub fn has_flat_text(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether each of several sequences is sent in its own response, if the model may send several responses.
    pub fn splits_sequences(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Padding of the shorter rows of ids and log-probabilities. None: the default padding.
    pub fn padding_value(self) -> Option<i8> {
        (self == Self::TensorrtLlm).then_some(-1)
    }

    /// Whether a request with neither `top_k` nor `top_p` gets the most likely tokens regardless of its temperature.
    pub fn is_greedy_by_default(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether a request may ask for several sequences although greedy sampling makes them equal.
    pub fn repeats_greedy_sequences(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether a streaming request may set `exclude_input_in_output` to false. Streams never repeat the prompt.
    pub fn ignores_input_in_streams(self) -> bool {
        self == Self::TensorrtLlm
    }
}
