//! Parameters whose values are names.

/// What computes the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerKind {
    /// A Hugging Face checkpoint.
    HuggingFace,
    /// No weights: the next token is a hash of all tokens so far, a step takes a set time.
    Synthetic,
}

impl RunnerKind {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("huggingface", Self::HuggingFace),
        ("synthetic", Self::Synthetic),
    ];
}

/// How requests become batches: `gpt_model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchingScheme {
    /// In lockstep: a batch is padded to its longest member, nobody joins it, and its answers leave
    /// when all are done.
    V1,
    /// In flight: requests join and leave in every step, which is two model calls, one for contexts
    /// and one for generation.
    Inflight,
    /// In flight, with all of a step in one packed model call.
    InflightFused,
}

impl BatchingScheme {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("V1", Self::V1),
        ("inflight_batching", Self::Inflight),
        ("inflight_fused_batching", Self::InflightFused),
    ];
}

/// Which contexts get the tokens that are left: `context_chunking_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextChunkPolicy {
    /// The first one all it needs, then the next.
    FirstComeFirstServed,
    /// A block each in turn.
    EqualProgress,
}

impl ContextChunkPolicy {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("first_come_first_served", Self::FirstComeFirstServed),
        ("equal_progress", Self::EqualProgress),
    ];
}

/// What float weights are rounded to: `weight_only_precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightOnlyPrecision {
    /// 8 bits.
    Int8,
    /// 4 bits, the output layer 8.
    Int4,
}

impl WeightOnlyPrecision {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Option<Self>)] = &[
        ("auto", None),
        ("int8", Some(Self::Int8)),
        ("int4", Some(Self::Int4)),
    ];
}

/// Whose guesses at later tokens are verified: `speculation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpeculationKind {
    /// Nobody's.
    None,
    /// Those that requests bring.
    DraftInputIds,
    /// Those, and what followed the same n-grams before.
    PromptLookup,
}

impl SpeculationKind {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("none", Self::None),
        ("draft_input_ids", Self::DraftInputIds),
        ("prompt_lookup", Self::PromptLookup),
    ];
}

/// Who may run, given the KV blocks there are: `batch_scheduler_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CapacityPolicy {
    /// Admit whatever fits now; when blocks run out, pause the sequence that started last.
    MaxUtilization,
    /// Admit only what can run to its last token: nothing is ever paused.
    GuaranteedNoEvict,
    /// As `GuaranteedNoEvict`, and admit only when nothing runs.
    StaticBatch,
}

impl CapacityPolicy {
    /// Its values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("guaranteed_no_evict", Self::GuaranteedNoEvict),
        ("max_utilization", Self::MaxUtilization),
        ("static_batch", Self::StaticBatch),
    ];
}
