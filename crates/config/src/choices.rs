//! The values of parameters that name one of several choices.

use std::fmt::{self, Display, Formatter};

use inflight_base::CpuSet;

/// How a part of replies is recognised: `reasoning_parser`, `tool_call_parser`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyParser<F> {
    /// By the format that the chat template is written for.
    Auto,
    /// Not at all.
    None,
    /// By this format.
    Named(F),
}

/// How models write their reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>...</think>`, if the reply or the prompt has the first mark.
    Think,
    /// `...</think>`: everything up to the mark.
    DeepSeekR1,
    /// `[THINK]...[/THINK]`
    Mistral,
    /// `<seed:think>...</seed:think>`
    SeedOss,
    /// `<|START_THINKING|>...<|END_THINKING|>`
    Command,
    /// `<|inner_prefix|>...<|inner_suffix|>`
    Apertus,
    /// `<|channel>thought...<channel|>`
    Gemma4,
    /// Behind the sentence "Here is my thought process:".
    Granite,
    /// The channel `analysis` of GPT-OSS.
    Harmony,
}

/// How models write calls of functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// `<tool_call>{...}</tool_call>`
    Hermes,
    /// `<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`
    QwenCoder,
    /// `{"name": ..., "parameters": ...}` and nothing else.
    Llama3,
    /// Behind `[TOOL_CALLS]`.
    Mistral,
    /// Between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.
    DeepSeek,
    /// A list behind `<|tool_call|>`.
    Granite,
    /// `<tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`
    Glm,
    /// Between `<|tool_call_begin|>` and `<|tool_call_end|>`.
    Kimi,
    /// A list of calls in Python and nothing else.
    Pythonic,
    /// A list of calls in Python between `<|tool_call_start|>` and `<|tool_call_end|>`.
    Lfm2,
    /// Lines of calls in Python between `<function_calls>` and `</function_calls>`.
    Olmo3,
    /// `<minimax:tool_call><invoke name=...><parameter name=...>...</parameter></invoke></minimax:tool_call>`
    MiniMax,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name=...><｜DSML｜parameter name=... string=...>...`
    Dsml,
    /// A list between `<tool_calls>` and `</tool_calls>`.
    Hunyuan,
    /// A list between `<TOOLCALL>` and `</TOOLCALL>`.
    Nemotron,
    /// A list between `<|START_ACTION|>` and `<|END_ACTION|>`.
    Command,
    /// A list between `<|tools_prefix|>` and `<|tools_suffix|>`, of objects with a function's name as their key.
    Apertus,
    /// `<|tool_call>call:name{...}<tool_call|>`
    Gemma4,
    /// `<start_function_call>call:name{...}<end_function_call>`
    FunctionGemma,
    /// `<tool_call>{...}</tool_call>`, and other text between `<response>` and `</response>`.
    Ernie,
    /// `<longcat_tool_call>{...}</longcat_tool_call>`
    LongCat,
    /// `<|action_start|><|plugin|>{...}<|action_end|>`
    InternLm,
    /// `{...}` behind `<function_call>`.
    Granite20b,
    /// `{...}` behind `function call<|role_sep|>` or `<|function_call|>`.
    GigaChat,
    /// Lines of JSON between `<tool_calls>` and `</tool_calls>`.
    MiniMaxM1,
    /// `<seed:tool_call><function=...><parameter=...>...</parameter></function></seed:tool_call>`
    SeedOss,
    /// A list in JSON and nothing else.
    XLam,
    /// Messages of GPT-OSS to `functions`.
    Harmony,
}

impl ReplyParser<ReasoningFormat> {
    /// The values by vLLM's names.
    pub(super) const REASONING: &[(&str, Self)] = &[
        ("auto", Self::Auto),
        ("none", Self::None),
        ("qwen3", Self::Named(ReasoningFormat::Think)),
        ("glm45", Self::Named(ReasoningFormat::Think)),
        ("deepseek_v3", Self::Named(ReasoningFormat::Think)),
        ("olmo3", Self::Named(ReasoningFormat::Think)),
        ("minimax_m2", Self::Named(ReasoningFormat::Think)),
        ("ernie45", Self::Named(ReasoningFormat::Think)),
        ("deepseek_r1", Self::Named(ReasoningFormat::DeepSeekR1)),
        ("mistral", Self::Named(ReasoningFormat::Mistral)),
        ("seed_oss", Self::Named(ReasoningFormat::SeedOss)),
        ("cohere_command3", Self::Named(ReasoningFormat::Command)),
        ("apertus", Self::Named(ReasoningFormat::Apertus)),
        ("gemma4", Self::Named(ReasoningFormat::Gemma4)),
        ("granite", Self::Named(ReasoningFormat::Granite)),
        ("openai_gptoss", Self::Named(ReasoningFormat::Harmony)),
    ];
}

impl ReplyParser<ToolCallFormat> {
    /// The values by vLLM's names.
    pub(super) const TOOL_CALLS: &[(&str, Self)] = &[
        ("auto", Self::Auto),
        ("none", Self::None),
        ("hermes", Self::Named(ToolCallFormat::Hermes)),
        ("qwen3_coder", Self::Named(ToolCallFormat::QwenCoder)),
        ("qwen3_xml", Self::Named(ToolCallFormat::QwenCoder)),
        ("step3p5", Self::Named(ToolCallFormat::QwenCoder)),
        ("seed_oss", Self::Named(ToolCallFormat::SeedOss)),
        ("ernie45", Self::Named(ToolCallFormat::Ernie)),
        ("longcat", Self::Named(ToolCallFormat::LongCat)),
        ("internlm", Self::Named(ToolCallFormat::InternLm)),
        ("granite-20b-fc", Self::Named(ToolCallFormat::Granite20b)),
        ("gigachat3", Self::Named(ToolCallFormat::GigaChat)),
        ("minimax", Self::Named(ToolCallFormat::MiniMaxM1)),
        ("xlam", Self::Named(ToolCallFormat::XLam)),
        ("llama3_json", Self::Named(ToolCallFormat::Llama3)),
        ("llama4_json", Self::Named(ToolCallFormat::Llama3)),
        ("mistral", Self::Named(ToolCallFormat::Mistral)),
        ("deepseek_v3", Self::Named(ToolCallFormat::DeepSeek)),
        ("deepseek_v31", Self::Named(ToolCallFormat::DeepSeek)),
        ("granite", Self::Named(ToolCallFormat::Granite)),
        ("phi4_mini_json", Self::Named(ToolCallFormat::Granite)),
        ("glm45", Self::Named(ToolCallFormat::Glm)),
        ("glm47", Self::Named(ToolCallFormat::Glm)),
        ("kimi_k2", Self::Named(ToolCallFormat::Kimi)),
        ("llama4_pythonic", Self::Named(ToolCallFormat::Pythonic)),
        ("pythonic", Self::Named(ToolCallFormat::Pythonic)),
        ("lfm2", Self::Named(ToolCallFormat::Lfm2)),
        ("olmo3", Self::Named(ToolCallFormat::Olmo3)),
        ("minimax_m2", Self::Named(ToolCallFormat::MiniMax)),
        ("deepseek_v32", Self::Named(ToolCallFormat::Dsml)),
        ("deepseek_v4", Self::Named(ToolCallFormat::Dsml)),
        ("hunyuan_a13b", Self::Named(ToolCallFormat::Hunyuan)),
        ("jamba", Self::Named(ToolCallFormat::Hunyuan)),
        ("nemotron_json", Self::Named(ToolCallFormat::Nemotron)),
        ("cohere_command3", Self::Named(ToolCallFormat::Command)),
        ("apertus", Self::Named(ToolCallFormat::Apertus)),
        ("gemma4", Self::Named(ToolCallFormat::Gemma4)),
        ("functiongemma", Self::Named(ToolCallFormat::FunctionGemma)),
        ("openai", Self::Named(ToolCallFormat::Harmony)),
    ];
}

/// The runner that computes the tokens: `runner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerKind {
    /// A Hugging Face checkpoint.
    HuggingFace,
    /// No weights: the next token is a hash of all tokens so far, and a step takes a configured time.
    Synthetic,
}

/// What requests get: `task`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Text that goes on from the prompt.
    Generate,
    /// A vector for the prompt.
    Embed,
    /// The probabilities of classes.
    Classify,
    /// One number.
    Score,
}

/// Which of a prompt's last hidden states stand for it: `pooling`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// The state of the last token.
    Last,
    /// The mean of all.
    Mean,
    /// The state of the first token.
    Cls,
}

/// How the ranks of a model reach each other: `rank_transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankTransportKind {
    /// Processes that rank 0 starts on its host.
    Processes,
    /// The processes that `mpirun` has started.
    Mpi,
}

/// The CPUs of each rank of a host: `rank_cpus`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankCpus {
    /// The CPUs of one memory node or a part of them, where the server may use several nodes.
    Auto,
    /// All that the server may use.
    Any,
    /// These of each rank.
    Sets(Vec<CpuSet>),
}

impl Display for RankCpus {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Any => f.write_str("any"),
            Self::Sets(sets) => {
                let sets: Vec<_> = sets.iter().map(CpuSet::to_string).collect();
                f.write_str(&sets.join(";"))
            }
        }
    }
}

impl Task {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("generate", Self::Generate),
        ("embed", Self::Embed),
        ("classify", Self::Classify),
        ("score", Self::Score),
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }

    /// Whether nothing is generated: a request is answered when its prompt is computed.
    pub fn is_pooling(self) -> bool {
        self != Self::Generate
    }
}

impl PoolingMode {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("last", Self::Last),
        ("mean", Self::Mean),
        ("cls", Self::Cls),
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    let mut own = names.iter().filter(|(_, other)| *other == value);
    own.next().map_or("", |(name, _)| name)
}

impl RankTransportKind {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[("processes", Self::Processes), ("mpi", Self::Mpi)];
}

impl RunnerKind {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("huggingface", Self::HuggingFace),
        ("synthetic", Self::Synthetic),
    ];
}

/// How requests are batched: `gpt_model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchingScheme {
    /// Lockstep: a batch is padded to its longest member, no request joins it, and its responses are sent
    /// when all requests have finished.
    V1,
    /// In-flight: requests join and leave at every step. A step is two model calls, one for contexts
    /// and one for generation.
    Inflight,
    /// In-flight, with one packed model call per step.
    InflightFused,
}

impl BatchingScheme {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("V1", Self::V1),
        ("inflight_batching", Self::Inflight),
        ("inflight_fused_batching", Self::InflightFused),
    ];

    /// Whether requests are batched in lockstep.
    pub fn is_lockstep(self) -> bool {
        self == Self::V1
    }
}

/// How the remaining token budget is divided among contexts: `context_chunking_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextChunkPolicy {
    /// The first context gets all it needs, then the next.
    FirstComeFirstServed,
    /// Each context gets one block in turn.
    EqualProgress,
}

impl ContextChunkPolicy {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("first_come_first_served", Self::FirstComeFirstServed),
        ("equal_progress", Self::EqualProgress),
    ];
}

/// Data type of keys and values: `kv_cache_dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvCacheDtype {
    /// bfloat16.
    Bf16,
    /// 8-bit integers, with a scale for each vector.
    Int8,
    /// 8-bit floats, with a scale for each vector; on GPUs.
    Fp8,
}

impl KvCacheDtype {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("auto", Self::Bf16),
        ("bf16", Self::Bf16),
        ("int8", Self::Int8),
        ("fp8", Self::Fp8),
    ];
}

/// Data type to which floating-point weights are quantised: `weight_only_precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightOnlyPrecision {
    /// 8 bits.
    Int8,
    /// 4 bits; the output layer has 8.
    Int4,
    /// 8-bit floats; on GPUs.
    Fp8,
}

impl WeightOnlyPrecision {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Option<Self>)] = &[
        ("auto", None),
        ("int8", Some(Self::Int8)),
        ("int4", Some(Self::Int4)),
        ("fp8", Some(Self::Fp8)),
    ];
}

/// The source of draft tokens to verify: `speculation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpeculationKind {
    /// No draft tokens.
    None,
    /// Draft tokens given by requests.
    DraftInputIds,
    /// Draft tokens given by requests, or else the tokens that followed an earlier occurrence of the last n-gram.
    PromptLookup,
    /// Draft tokens given by requests, or else by a smaller model.
    DraftModel,
    /// Draft tokens given by requests, or else by an EAGLE-3 head.
    Eagle3,
    /// Draft tokens given by requests, or else by the checkpoint's head for multi-token prediction.
    Mtp,
}

impl SpeculationKind {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("none", Self::None),
        ("draft_input_ids", Self::DraftInputIds),
        ("prompt_lookup", Self::PromptLookup),
        ("draft_model", Self::DraftModel),
        ("eagle3", Self::Eagle3),
        ("mtp", Self::Mtp),
    ];

    /// Whether a model or a head makes draft tokens.
    pub fn is_by_model(self) -> bool {
        self.has_path() || self == Self::Mtp
    }

    /// Whether that is at `draft_model_path`.
    pub fn has_path(self) -> bool {
        matches!(self, Self::DraftModel | Self::Eagle3)
    }

    /// Whether draft tokens follow hidden states of the model.
    pub fn is_by_head(self) -> bool {
        matches!(self, Self::Eagle3 | Self::Mtp)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        let names = Self::NAMES.iter();
        let mut names = names.filter(|(_, kind)| *kind == self);
        names.next().map_or("", |(name, _)| name)
    }
}

/// Which sequences may run with the available KV blocks: `batch_scheduler_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CapacityPolicy {
    /// Admit every sequence that fits now; when blocks run out, pause the most recently started one.
    MaxUtilization,
    /// Admit a sequence only if it can run to its last token. Never pauses.
    GuaranteedNoEvict,
    /// Like `GuaranteedNoEvict`, but admit only when nothing is running.
    StaticBatch,
}

impl CapacityPolicy {
    /// The values by name.
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("guaranteed_no_evict", Self::GuaranteedNoEvict),
        ("max_utilization", Self::MaxUtilization),
        ("static_batch", Self::StaticBatch),
    ];
}
