//! Whose clients a model answers as their own backend does: `client_compatibility`.
//!
//! Each method is one difference. `docs/src/clients.md` has them in a table, and `tests/server/test_compatibility.py` a test
//! of each line.

use crate::config::client_inputs::{ClientInput, ENSEMBLE, TENSORRT_LLM, VLLM};
use crate::config::outputs::OutputKind;

/// Whose clients a model is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ClientCompatibility {
    /// Nobody's in particular.
    #[default]
    None,
    /// vLLM's.
    Vllm,
    /// TensorRT-LLM's.
    TensorrtLlm,
}

impl ClientCompatibility {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("none", Self::None),
        ("vllm", Self::Vllm),
        ("tensorrtllm", Self::TensorrtLlm),
    ];
}

/// The outputs of vLLM's models, in their order.
const VLLM_OUTPUTS: &[OutputKind] = &[
    OutputKind::TextOutput,
    OutputKind::FinishReason,
    OutputKind::CumulativeLogprob,
    OutputKind::Logprobs,
    OutputKind::NumInputTokens,
    OutputKind::NumOutputTokens,
];

impl ClientCompatibility {
    /// The inputs of a model whose config.pbtxt names none, besides its prompt.
    pub(super) fn inputs(self, takes_text: bool) -> &'static [ClientInput] {
        match (self, takes_text) {
            (Self::None, _) => &[],
            (Self::Vllm, _) => VLLM,
            (Self::TensorrtLlm, true) => ENSEMBLE,
            (Self::TensorrtLlm, false) => TENSORRT_LLM,
        }
    }

    /// Its outputs, where it names none.
    pub(super) fn outputs(self) -> &'static [OutputKind] {
        match self {
            Self::Vllm => VLLM_OUTPUTS,
            _ => &OutputKind::ALL,
        }
    }

    /// Whether a `max_batch_size` of 0 stays: tensors have no batch dimension then.
    pub(super) fn allows_missing_batch_dim(self) -> bool {
        self == Self::Vllm
    }

    /// Whether numbers of tokens are UINT32.
    pub fn has_unsigned_counts(self) -> bool {
        self == Self::Vllm
    }

    /// Whether `num_output_tokens` counts the tokens of its response, and not all so far.
    pub fn counts_new_tokens(self) -> bool {
        self == Self::Vllm
    }

    /// Whether `sequence_length` counts the ids of its response, and not prompt and output so far.
    pub fn counts_response_ids(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether only those requests get `finish_reason`, `num_input_tokens` and `num_output_tokens` that ask for them.
    pub fn sends_reasons_and_counts_on_request(self) -> bool {
        self != Self::None
    }

    /// Whether `logprobs` says how many, and `return_logprobs` whether there is an output at all.
    pub fn requires_return_logprobs(self) -> bool {
        self == Self::Vllm
    }

    /// Whether a reason is a word of both backends' Python models: `stop` for an end id and for a stop word.
    pub fn uses_short_finish_reasons(self) -> bool {
        self != Self::None
    }

    /// Whether `text_output` has no batch dimension although the model has one: the ensemble's last model makes it.
    pub fn has_flat_text(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether each of several sequences comes in a response of its own, where the model may send several.
    pub fn splits_sequences(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// What fills up the shorter rows, ids and log-probabilities, if not the usual.
    pub fn padding_value(self) -> Option<i8> {
        (self == Self::TensorrtLlm).then_some(-1)
    }

    /// Whether a request that gives neither `top_k` nor `top_p` gets the most likely token, whatever its temperature.
    pub fn is_greedy_by_default(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether a request may ask for several sequences that are all the same.
    pub fn repeats_greedy_sequences(self) -> bool {
        self == Self::TensorrtLlm
    }

    /// Whether a stream may say that its answer repeats the prompt, which none does.
    pub fn ignores_input_in_streams(self) -> bool {
        self == Self::TensorrtLlm
    }
}
