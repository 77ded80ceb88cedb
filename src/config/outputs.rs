//! The output tensors that a model can have: names, types, shapes, and who gets them.

/// The output tensors that a model can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputKind {
    /// The text, a delta when streaming.
    TextOutput,
    /// The tokens, new ones when streaming.
    OutputIds,
    /// Prompt and output tokens so far.
    SequenceLength,
    /// Why the sequence ended; empty while it runs.
    FinishReason,
    /// Tokens of the prompt.
    NumInputTokens,
    /// Tokens generated so far.
    NumOutputTokens,
    /// How likely each token was, the logarithm; new ones when streaming.
    OutputLogProbs,
    /// Their sum so far.
    CumLogProbs,
    /// The same under vLLM's name.
    CumulativeLogprob,
    /// The most likely tokens in the place of each, as JSON; new ones when streaming.
    Logprobs,
    /// The model's logits of each token of the prompt.
    ContextLogits,
    /// Those that each token of the output was chosen from; new ones when streaming.
    GenerationLogits,
    /// The stop word or the token that ended the sequence.
    StopReason,
    /// Blocks of the KV cache that the sequence took.
    KvCacheAllocNewBlocks,
    /// Those that it found filled.
    KvCacheReusedBlocks,
    /// Both together.
    KvCacheAllocTotalBlocks,
    /// When the request was first seen.
    ArrivalTimeNs,
    /// When it was first in a step.
    FirstScheduledTimeNs,
    /// When its first token was there.
    FirstTokenTimeNs,
    /// When its last token was there.
    LastTokenTimeNs,
    /// Draft tokens that became output, as a share of all that were computed.
    AcceptanceRate,
    /// How many those were.
    TotalAcceptedDraftTokens,
    /// How many all were.
    TotalDraftTokens,
    /// The tokens of each sequence as JSON, a list of lists; new ones when streaming.
    OutputIdsJson,
    /// Which sequence of its request a row is.
    SequenceIndex,
    /// Which prompt of its request: never given, since a request has one.
    BatchIndex,
    /// What a server that only computes contexts hands on: never given.
    ContextPhaseParams,
}

impl OutputKind {
    /// All of them, in the order of a response.
    pub const ALL: [OutputKind; 27] = [
        OutputKind::TextOutput,
        OutputKind::OutputIds,
        OutputKind::SequenceLength,
        OutputKind::FinishReason,
        OutputKind::NumInputTokens,
        OutputKind::NumOutputTokens,
        OutputKind::OutputLogProbs,
        OutputKind::CumLogProbs,
        OutputKind::CumulativeLogprob,
        OutputKind::Logprobs,
        OutputKind::ContextLogits,
        OutputKind::GenerationLogits,
        OutputKind::StopReason,
        OutputKind::KvCacheAllocNewBlocks,
        OutputKind::KvCacheReusedBlocks,
        OutputKind::KvCacheAllocTotalBlocks,
        OutputKind::ArrivalTimeNs,
        OutputKind::FirstScheduledTimeNs,
        OutputKind::FirstTokenTimeNs,
        OutputKind::LastTokenTimeNs,
        OutputKind::AcceptanceRate,
        OutputKind::TotalAcceptedDraftTokens,
        OutputKind::TotalDraftTokens,
        OutputKind::OutputIdsJson,
        OutputKind::SequenceIndex,
        OutputKind::BatchIndex,
        OutputKind::ContextPhaseParams,
    ];

    /// The tensor's name.
    pub const fn name(self) -> &'static str {
        match self {
            OutputKind::TextOutput => "text_output",
            OutputKind::OutputIds => "output_ids",
            OutputKind::SequenceLength => "sequence_length",
            OutputKind::FinishReason => "finish_reason",
            OutputKind::NumInputTokens => "num_input_tokens",
            OutputKind::NumOutputTokens => "num_output_tokens",
            OutputKind::OutputLogProbs => "output_log_probs",
            OutputKind::CumLogProbs => "cum_log_probs",
            OutputKind::CumulativeLogprob => "cumulative_logprob",
            OutputKind::Logprobs => "logprobs",
            OutputKind::ContextLogits => "context_logits",
            OutputKind::GenerationLogits => "generation_logits",
            OutputKind::StopReason => "stop_reason",
            OutputKind::KvCacheAllocNewBlocks => "kv_cache_alloc_new_blocks",
            OutputKind::KvCacheReusedBlocks => "kv_cache_reused_blocks",
            OutputKind::KvCacheAllocTotalBlocks => "kv_cache_alloc_total_blocks",
            OutputKind::ArrivalTimeNs => "arrival_time_ns",
            OutputKind::FirstScheduledTimeNs => "first_scheduled_time_ns",
            OutputKind::FirstTokenTimeNs => "first_token_time_ns",
            OutputKind::LastTokenTimeNs => "last_token_time_ns",
            OutputKind::AcceptanceRate => "acceptance_rate",
            OutputKind::TotalAcceptedDraftTokens => "total_accepted_draft_tokens",
            OutputKind::TotalDraftTokens => "total_draft_tokens",
            OutputKind::OutputIdsJson => "output_ids_json",
            OutputKind::SequenceIndex => "sequence_index",
            OutputKind::BatchIndex => "batch_index",
            OutputKind::ContextPhaseParams => "context_phase_params",
        }
    }

    /// Whether only those requests get it that ask for it by an option; the others get every output
    /// that they do not name.
    pub const fn is_on_request(self) -> bool {
        !matches!(
            self,
            OutputKind::TextOutput
                | OutputKind::OutputIds
                | OutputKind::SequenceLength
                | OutputKind::FinishReason
                | OutputKind::NumInputTokens
                | OutputKind::NumOutputTokens
        )
    }

    /// Whether it is made of logits.
    pub const fn needs_logits(self) -> bool {
        matches!(
            self,
            OutputKind::OutputLogProbs
                | OutputKind::CumLogProbs
                | OutputKind::CumulativeLogprob
                | OutputKind::Logprobs
                | OutputKind::ContextLogits
                | OutputKind::GenerationLogits
        )
    }

    /// Whether a request that names it without asking for it gets a dummy, as TensorRT-LLM's backend gives one: the
    /// logits themselves may be large.
    pub const fn has_dummy(self) -> bool {
        matches!(
            self,
            OutputKind::ContextLogits | OutputKind::GenerationLogits
        )
    }

    /// Whether it is declared for clients that expect it, and no response has it.
    pub const fn is_never_sent(self) -> bool {
        matches!(
            self,
            OutputKind::BatchIndex | OutputKind::ContextPhaseParams
        )
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Its type, as config.pbtxt spells it; of numbers of tokens, as the model's clients have them.
    pub(super) const fn data_type(self, has_unsigned_counts: bool) -> &'static str {
        match self {
            OutputKind::NumInputTokens | OutputKind::NumOutputTokens if has_unsigned_counts => {
                "TYPE_UINT32"
            }
            OutputKind::ContextPhaseParams => "TYPE_UINT8",
            OutputKind::TextOutput
            | OutputKind::OutputIdsJson
            | OutputKind::FinishReason
            | OutputKind::StopReason
            | OutputKind::Logprobs => "TYPE_STRING",
            OutputKind::ArrivalTimeNs
            | OutputKind::FirstScheduledTimeNs
            | OutputKind::FirstTokenTimeNs
            | OutputKind::LastTokenTimeNs => "TYPE_INT64",
            OutputKind::OutputLogProbs
            | OutputKind::CumLogProbs
            | OutputKind::CumulativeLogprob
            | OutputKind::ContextLogits
            | OutputKind::GenerationLogits
            | OutputKind::AcceptanceRate => "TYPE_FP32",
            _ => "TYPE_INT32",
        }
    }

    /// Its shape without the batch dimension, as config.pbtxt has it.
    pub(super) const fn dims(self) -> &'static [i64] {
        match self {
            OutputKind::GenerationLogits => &[-1, -1, -1],
            OutputKind::OutputIds | OutputKind::OutputLogProbs | OutputKind::ContextLogits => {
                &[-1, -1]
            }
            // One for each sequence of the answer.
            OutputKind::TextOutput
            | OutputKind::SequenceLength
            | OutputKind::FinishReason
            | OutputKind::NumOutputTokens
            | OutputKind::CumLogProbs
            | OutputKind::CumulativeLogprob
            | OutputKind::Logprobs
            | OutputKind::SequenceIndex
            | OutputKind::ContextPhaseParams
            | OutputKind::StopReason => &[-1],
            _ => &[1],
        }
    }
}
