//! The output tensors that a model can declare. Each output is one row of the table below.

use std::ffi::CStr;

use crate::choices::Task;

/// Declares [`OutputKind`] and the properties of each kind.
macro_rules! outputs {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $data_type:literal, $dims:expr, $sent:ident, $logits:ident;)*) => {
        /// An output tensor that a model can declare.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum OutputKind {
            $($(#[$doc])* $kind,)*
        }

        impl OutputKind {
            /// All outputs, in the order of a response.
            pub const ALL: [OutputKind; [$(stringify!($kind)),*].len()] = [$(OutputKind::$kind),*];

            const fn output(self) -> Output {
                match self {
                    $(OutputKind::$kind => Output {
                        name: $name,
                        data_type: $data_type,
                        dims: $dims,
                        sent: Sent::$sent,
                        logits: Logits::$logits,
                    },)*
                }
            }
        }
    };
}

/// The properties of an output.
struct Output {
    name: &'static CStr,
    /// As spelled in config.pbtxt.
    data_type: &'static str,
    /// As in config.pbtxt, without the batch dimension.
    dims: &'static [i64],
    sent: Sent,
    logits: Logits,
}

/// When an output is sent to requests that do not name it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    ByDefault,
    /// To requests that enable it with an option.
    OnRequest,
    /// To requests with `return_perf_metrics`. These outputs are adjacent in the table.
    WithPerfMetrics,
    /// Never: the output is declared for clients that expect it.
    Never,
}

/// How an output depends on logits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logits {
    NotNeeded,
    Needed,
    /// Needed. A request that names the output without its `return_...` option gets a dummy, as from TensorRT-LLM's
    /// backend: the logits themselves may be large.
    OrDummy,
}

/// The shape of an output with one value for the request.
const ONE: &[i64] = &[1];
/// The shape of an output with a value for each sequence, or a list of unknown length.
const EACH: &[i64] = &[-1];
/// The shape of an output with a value for each token of each sequence, or logits of each token of the prompt.
const TOKENS: &[i64] = &[-1, -1];

outputs! {
    /// The text; the new text if streaming.
    TextOutput: c"text_output", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// The tokens; the new tokens if streaming.
    OutputIds: c"output_ids", "TYPE_INT32", TOKENS, ByDefault, NotNeeded;
    /// Number of prompt and output tokens so far.
    SequenceLength: c"sequence_length", "TYPE_INT32", EACH, ByDefault, NotNeeded;
    /// Why the sequence finished; empty while it is running.
    FinishReason: c"finish_reason", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// Number of tokens in the prompt.
    NumInputTokens: c"num_input_tokens", "TYPE_INT32", ONE, ByDefault, NotNeeded;
    /// Number of tokens generated so far.
    NumOutputTokens: c"num_output_tokens", "TYPE_INT32", EACH, ByDefault, NotNeeded;
    /// Log-probability of each token; of the new tokens if streaming.
    OutputLogProbs: c"output_log_probs", "TYPE_FP32", TOKENS, OnRequest, Needed;
    /// Sum of the log-probabilities so far.
    CumLogProbs: c"cum_log_probs", "TYPE_FP32", EACH, OnRequest, Needed;
    /// The same sum under vLLM's name.
    CumulativeLogprob: c"cumulative_logprob", "TYPE_FP32", EACH, OnRequest, Needed;
    /// The most likely alternatives of each token, as JSON; of the new tokens if streaming.
    Logprobs: c"logprobs", "TYPE_STRING", EACH, OnRequest, Needed;
    /// The log-probability of each token of the prompt and the most likely alternatives, as JSON.
    PromptLogprobs: c"prompt_logprobs", "TYPE_STRING", ONE, OnRequest, Needed;
    /// The model's logits at each token of the prompt.
    ContextLogits: c"context_logits", "TYPE_FP32", TOKENS, OnRequest, OrDummy;
    /// The logits from which each output token was chosen; of the new tokens if streaming.
    GenerationLogits: c"generation_logits", "TYPE_FP32", &[-1, -1, -1], OnRequest, OrDummy;
    /// The stop word or token that ended the sequence.
    StopReason: c"stop_reason", "TYPE_STRING", EACH, OnRequest, NotNeeded;
    /// Number of KV cache blocks newly allocated for the sequence.
    KvCacheAllocNewBlocks: c"kv_cache_alloc_new_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// Number of KV cache blocks that the sequence reused.
    KvCacheReusedBlocks: c"kv_cache_reused_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// Number of new and reused KV cache blocks together.
    KvCacheAllocTotalBlocks: c"kv_cache_alloc_total_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// When the request arrived.
    ArrivalTimeNs: c"arrival_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When the request first took part in a step.
    FirstScheduledTimeNs: c"first_scheduled_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When the first token was generated.
    FirstTokenTimeNs: c"first_token_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When the last token was generated.
    LastTokenTimeNs: c"last_token_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// Accepted draft tokens as a fraction of all computed draft tokens.
    AcceptanceRate: c"acceptance_rate", "TYPE_FP32", ONE, WithPerfMetrics, NotNeeded;
    /// Number of accepted draft tokens.
    TotalAcceptedDraftTokens: c"total_accepted_draft_tokens", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// Number of computed draft tokens.
    TotalDraftTokens: c"total_draft_tokens", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// The tokens of each sequence as a JSON list of lists; the new tokens if streaming.
    OutputIdsJson: c"output_ids_json", "TYPE_STRING", ONE, OnRequest, NotNeeded;
    /// What the model thought before it answered; the new part if streaming.
    ReasoningContent: c"reasoning_content", "TYPE_STRING", EACH, OnRequest, NotNeeded;
    /// The functions that the model calls, as JSON; what is new of them if streaming.
    ToolCalls: c"tool_calls", "TYPE_STRING", EACH, OnRequest, NotNeeded;
    /// Index of a row's sequence within its request.
    SequenceIndex: c"sequence_index", "TYPE_INT32", EACH, OnRequest, NotNeeded;
    /// The vector that stands for the prompt.
    Embedding: c"embedding", "TYPE_FP32", EACH, ByDefault, NotNeeded;
    /// The probability of each class.
    Probs: c"probs", "TYPE_FP32", EACH, ByDefault, NotNeeded;
    /// The name of each class.
    Labels: c"labels", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// The name of the most probable class.
    Label: c"label", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// How relevant or good the prompt is.
    Score: c"score", "TYPE_FP32", EACH, ByDefault, NotNeeded;
    /// Index of the prompt within its request. Never sent, because a request has one prompt.
    BatchIndex: c"batch_index", "TYPE_INT32", ONE, Never, NotNeeded;
    /// Data from a context-only server for a generation-only server. Never sent.
    ContextPhaseParams: c"context_phase_params", "TYPE_UINT8", EACH, Never, NotNeeded;
}

impl OutputKind {
    /// The outputs of `return_perf_metrics`.
    pub const PERF_METRICS: &'static [OutputKind] = {
        let mut outputs: &'static [OutputKind] = &Self::ALL;
        while let [first, rest @ ..] = outputs
            && !first.is_perf_metric()
        {
            outputs = rest;
        }
        while let [rest @ .., last] = outputs
            && !last.is_perf_metric()
        {
            outputs = rest;
        }
        outputs
    };

    /// The tensor's name.
    pub const fn name(self) -> &'static str {
        match self.c_name().to_str() {
            Ok(name) => name,
            Err(_) => unreachable!(),
        }
    }

    /// The tensor's name, for Triton.
    pub const fn c_name(self) -> &'static CStr {
        self.output().name
    }

    /// The output with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether the output is sent only to requests that enable it with an option. Other outputs are sent by default.
    pub const fn is_on_request(self) -> bool {
        !matches!(self.output().sent, Sent::ByDefault)
    }

    /// Whether the output may be declared, for clients that expect it, but is never sent.
    pub const fn is_never_sent(self) -> bool {
        matches!(self.output().sent, Sent::Never)
    }

    /// Whether the output is text of the reply, which needs a tokenizer.
    pub const fn is_text(self) -> bool {
        matches!(
            self,
            OutputKind::TextOutput | OutputKind::ReasoningContent | OutputKind::ToolCalls
        )
    }

    /// Whether models with this task have the output.
    pub const fn is_of(self, task: Task) -> bool {
        match (self, task) {
            (OutputKind::Embedding, _) => matches!(task, Task::Embed),
            (OutputKind::Probs | OutputKind::Labels | OutputKind::Label, _) => {
                matches!(task, Task::Classify)
            }
            (OutputKind::Score, _) => matches!(task, Task::Score),
            (_, Task::Generate) => true,
            (
                OutputKind::TextOutput
                | OutputKind::OutputIds
                | OutputKind::NumInputTokens
                | OutputKind::KvCacheAllocNewBlocks
                | OutputKind::KvCacheReusedBlocks
                | OutputKind::KvCacheAllocTotalBlocks
                | OutputKind::ArrivalTimeNs
                | OutputKind::FirstScheduledTimeNs,
                Task::Embed | Task::Classify | Task::Score,
            ) => true,
            (_, Task::Embed | Task::Classify | Task::Score) => false,
        }
    }

    const fn is_perf_metric(self) -> bool {
        matches!(self.output().sent, Sent::WithPerfMetrics)
    }

    /// Whether the output is computed from logits.
    pub const fn needs_logits(self) -> bool {
        !matches!(self.output().logits, Logits::NotNeeded)
    }

    /// Whether a request that names the output without its `return_...` option gets a dummy.
    pub const fn has_dummy(self) -> bool {
        matches!(self.output().logits, Logits::OrDummy)
    }

    /// The data type, as spelled in config.pbtxt. `has_unsigned_counts`: token counts are UINT32.
    pub(super) const fn data_type(self, has_unsigned_counts: bool) -> &'static str {
        match self {
            OutputKind::NumInputTokens | OutputKind::NumOutputTokens if has_unsigned_counts => {
                "TYPE_UINT32"
            }
            _ => self.output().data_type,
        }
    }

    /// The shape in config.pbtxt, without the batch dimension.
    pub(super) const fn dims(self) -> &'static [i64] {
        self.output().dims
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_metrics_are_adjacent() {
        let all = OutputKind::ALL.into_iter();
        let metrics: Vec<_> = all.filter(|kind| kind.is_perf_metric()).collect();
        assert_eq!(OutputKind::PERF_METRICS, metrics);
        assert_eq!(metrics.len(), 10);
    }

    #[test]
    fn finds_each_output_by_name() {
        for kind in OutputKind::ALL {
            assert_eq!(OutputKind::from_name(kind.name()), Some(kind));
        }
    }
}
