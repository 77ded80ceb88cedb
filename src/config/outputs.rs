//! The output tensors that a model can have: one output is one row of the table below.

use std::ffi::CStr;

/// Declares [`OutputKind`] and what is known of each kind.
macro_rules! outputs {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $data_type:literal, $dims:expr, $sent:ident, $logits:ident;)*) => {
        /// The output tensors that a model can have.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum OutputKind {
            $($(#[$doc])* $kind,)*
        }

        impl OutputKind {
            /// All of them, in the order of a response.
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

/// What is known of an output.
struct Output {
    name: &'static CStr,
    /// As config.pbtxt spells it.
    data_type: &'static str,
    /// Without the batch dimension, as config.pbtxt has it.
    dims: &'static [i64],
    sent: Sent,
    logits: Logits,
}

/// Which requests get an output that they do not name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    ByDefault,
    /// To requests that ask for it by an option.
    OnRequest,
    /// To requests that ask for `return_perf_metrics`. These outputs follow one another.
    WithPerfMetrics,
    /// To none: it is declared for clients that expect it.
    Never,
}

/// How an output depends on logits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logits {
    NotNeeded,
    Needed,
    /// Needed, and a request that names the output without asking for it gets a dummy, as from TensorRT-LLM's backend:
    /// the logits themselves may be large.
    OrDummy,
}

/// The shape of an output with one value for the request.
const ONE: &[i64] = &[1];
/// The shape of an output with a value for each sequence, or a list of unknown length.
const EACH: &[i64] = &[-1];
/// The shape of an output with a value for each token of each sequence, or logits of each token of the prompt.
const TOKENS: &[i64] = &[-1, -1];

outputs! {
    /// The text, a delta when streaming.
    TextOutput: c"text_output", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// The tokens, new ones when streaming.
    OutputIds: c"output_ids", "TYPE_INT32", TOKENS, ByDefault, NotNeeded;
    /// Prompt and output tokens so far.
    SequenceLength: c"sequence_length", "TYPE_INT32", EACH, ByDefault, NotNeeded;
    /// Why the sequence ended; empty while it runs.
    FinishReason: c"finish_reason", "TYPE_STRING", EACH, ByDefault, NotNeeded;
    /// Tokens of the prompt.
    NumInputTokens: c"num_input_tokens", "TYPE_INT32", ONE, ByDefault, NotNeeded;
    /// Tokens generated so far.
    NumOutputTokens: c"num_output_tokens", "TYPE_INT32", EACH, ByDefault, NotNeeded;
    /// The log-probability of each chosen token; new ones when streaming.
    OutputLogProbs: c"output_log_probs", "TYPE_FP32", TOKENS, OnRequest, Needed;
    /// Their sum so far.
    CumLogProbs: c"cum_log_probs", "TYPE_FP32", EACH, OnRequest, Needed;
    /// The same under vLLM's name.
    CumulativeLogprob: c"cumulative_logprob", "TYPE_FP32", EACH, OnRequest, Needed;
    /// The most likely alternatives to each token, as JSON; new ones when streaming.
    Logprobs: c"logprobs", "TYPE_STRING", EACH, OnRequest, Needed;
    /// The model's logits at each token of the prompt.
    ContextLogits: c"context_logits", "TYPE_FP32", TOKENS, OnRequest, OrDummy;
    /// The logits that each output token was chosen from; new ones when streaming.
    GenerationLogits: c"generation_logits", "TYPE_FP32", &[-1, -1, -1], OnRequest, OrDummy;
    /// The stop word or the token that ended the sequence.
    StopReason: c"stop_reason", "TYPE_STRING", EACH, OnRequest, NotNeeded;
    /// KV blocks that the request allocated.
    KvCacheAllocNewBlocks: c"kv_cache_alloc_new_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// KV blocks that it reused.
    KvCacheReusedBlocks: c"kv_cache_reused_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// Both together.
    KvCacheAllocTotalBlocks: c"kv_cache_alloc_total_blocks", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// When the request was first seen.
    ArrivalTimeNs: c"arrival_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When it was first scheduled.
    FirstScheduledTimeNs: c"first_scheduled_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When its first token was generated.
    FirstTokenTimeNs: c"first_token_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// When its last token was generated.
    LastTokenTimeNs: c"last_token_time_ns", "TYPE_INT64", ONE, WithPerfMetrics, NotNeeded;
    /// Accepted draft tokens as a share of all draft tokens.
    AcceptanceRate: c"acceptance_rate", "TYPE_FP32", ONE, WithPerfMetrics, NotNeeded;
    /// Draft tokens that were accepted.
    TotalAcceptedDraftTokens: c"total_accepted_draft_tokens", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// Draft tokens that were computed.
    TotalDraftTokens: c"total_draft_tokens", "TYPE_INT32", ONE, WithPerfMetrics, NotNeeded;
    /// The tokens of each sequence as JSON, a list of lists; new ones when streaming.
    OutputIdsJson: c"output_ids_json", "TYPE_STRING", ONE, OnRequest, NotNeeded;
    /// The index of a row's sequence in its request.
    SequenceIndex: c"sequence_index", "TYPE_INT32", EACH, OnRequest, NotNeeded;
    /// The index of a row's prompt in its request: never sent, since a request has one.
    BatchIndex: c"batch_index", "TYPE_INT32", ONE, Never, NotNeeded;
    /// What a server that only computes contexts passes on: never sent.
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

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether only requests that ask for it by an option get it; the others get every output
    /// that they do not name.
    pub const fn is_on_request(self) -> bool {
        !matches!(self.output().sent, Sent::ByDefault)
    }

    /// Whether it is declared for clients that expect it, and no response has it.
    pub const fn is_never_sent(self) -> bool {
        matches!(self.output().sent, Sent::Never)
    }

    const fn is_perf_metric(self) -> bool {
        matches!(self.output().sent, Sent::WithPerfMetrics)
    }

    /// Whether it is made of logits.
    pub const fn needs_logits(self) -> bool {
        !matches!(self.output().logits, Logits::NotNeeded)
    }

    /// Whether a request that names it without asking for it gets a dummy.
    pub const fn has_dummy(self) -> bool {
        matches!(self.output().logits, Logits::OrDummy)
    }

    /// Its type, as config.pbtxt spells it. Numbers of tokens have the type that the model's clients expect.
    pub(super) const fn data_type(self, has_unsigned_counts: bool) -> &'static str {
        match self {
            OutputKind::NumInputTokens | OutputKind::NumOutputTokens if has_unsigned_counts => {
                "TYPE_UINT32"
            }
            _ => self.output().data_type,
        }
    }

    /// Its shape without the batch dimension, as config.pbtxt has it.
    pub(super) const fn dims(self) -> &'static [i64] {
        self.output().dims
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_perf_metrics_follow_one_another() {
        let all = OutputKind::ALL.into_iter();
        let metrics: Vec<_> = all.filter(|kind| kind.is_perf_metric()).collect();
        assert_eq!(OutputKind::PERF_METRICS, metrics);
        assert_eq!(metrics.len(), 10);
    }

    #[test]
    fn each_output_is_found_by_its_name() {
        for kind in OutputKind::ALL {
            assert_eq!(OutputKind::from_name(kind.name()), Some(kind));
        }
    }
}
