//! Every parameter of config.pbtxt: one knob, one entry, from which the README's table is made.
//!
//! Names are those of TensorRT-LLM's Triton backend where the meaning is equal.

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use crate::base::BlockSize;
use crate::config::client_compatibility::ClientCompatibility;
use crate::config::settings::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, RunnerKind, Settings, SpeculationKind,
    WeightOnlyPrecision,
};

/// One parameter of config.pbtxt.
pub(super) struct Knob {
    /// Its key.
    pub key: &'static str,
    /// What its value may be, worded to follow "is not".
    pub expected: &'static str,
    /// What holds where it is not written.
    pub default: &'static str,
    /// What it does, for the README.
    pub doc: &'static str,
    /// Sets it from its text; `None` where the text is not `expected`.
    pub(super) set: fn(&mut Settings, &str) -> Option<()>,
}

/// The largest count that any knob takes: what an INT32 tensor of a client can still say.
const MAX_COUNT: u32 = i32::MAX as u32;
/// Each beam names as many candidates in every step, and all of them are sorted.
const MAX_BEAM_WIDTH: u32 = 256;

/// Every parameter, in the order of the README.
pub(super) const KNOBS: &[Knob] = &[
    Knob {
        key: "gpt_model_path",
        expected: "a folder",
        default: "the model's version folder",
        doc: "The checkpoint: a folder with `config.json` and `*.safetensors`, or with a GGUF file (see \
              [docs/checkpoints.md](docs/checkpoints.md)). A relative path starts at the model's folder in the \
              repository.",
        set: |s, v| set(&mut s.gpt_model_path, path(v).map(Some)),
    },
    Knob {
        key: "tokenizer_dir",
        expected: "a folder",
        default: "`gpt_model_path`",
        doc: "Where `tokenizer.json` and `tokenizer_config.json` are. A model whose input is \
              `input_ids` needs none.",
        set: |s, v| set(&mut s.tokenizer_dir, path(v).map(Some)),
    },
    Knob {
        key: "gpt_model_type",
        expected: "'V1', 'inflight_batching' or 'inflight_fused_batching'",
        default: "`inflight_fused_batching`",
        doc: "The batching scheme. `inflight_fused_batching`: requests join and leave in every step, \
              and a step is one packed model call. `inflight_batching`: the same in two model calls, \
              contexts first. `V1`: in lockstep, as before in-flight batching: a batch is padded to \
              its longest member, nobody joins it, and all its answers leave when the last is done; \
              there is no streaming. A batch starts with all that wait, up to `max_num_requests`.",
        set: |s, v| {
            let names = [
                ("V1", BatchingScheme::V1),
                ("inflight_batching", BatchingScheme::Inflight),
                ("inflight_fused_batching", BatchingScheme::InflightFused),
            ];
            set(&mut s.gpt_model_type, choice(v, &names))
        },
    },
    Knob {
        key: "batch_scheduler_policy",
        expected: "'guaranteed_no_evict', 'max_utilization' or 'static_batch'",
        default: "`guaranteed_no_evict`",
        doc: "Who may run, given the KV blocks there are. `guaranteed_no_evict` starts only what \
              can run to its last token. `max_utilization` starts whatever fits now, and pauses \
              the request that started last when blocks run out; it resumes by itself, and only \
              its latency tells. `static_batch` starts requests only when all that ran are done \
              (with `enable_trt_overlap`: all of their micro-batch).",
        set: |s, v| {
            let names = [
                ("guaranteed_no_evict", CapacityPolicy::GuaranteedNoEvict),
                ("max_utilization", CapacityPolicy::MaxUtilization),
                ("static_batch", CapacityPolicy::StaticBatch),
            ];
            set(&mut s.batch_scheduler_policy, choice(v, &names))
        },
    },
    Knob {
        key: "enable_trt_overlap",
        expected: "'true' or 'false'",
        default: "`false`",
        doc: "Splits the requests into two micro-batches: one is computed while the host answers \
              and waits for the other. Each request then takes part in every second step, and the \
              weights are read twice as often: it pays only where the host's work is a large part of \
              a step.",
        set: |s, v| set(&mut s.enable_trt_overlap, flag(v)),
    },
    Knob {
        key: "speculation",
        expected: "'none', 'draft_input_ids' or 'prompt_lookup'",
        default: "`none`",
        doc: "Whether later tokens are guessed and verified in one step, without a second model. \
              `draft_input_ids`: as requests say. `prompt_lookup`: where a request says nothing, what \
              followed the last tokens when they occurred before, in its prompt or its output. Every \
              answer is the same, bit for bit, as with `none`. See *Speculation*.",
        set: |s, v| {
            let names = [
                ("none", SpeculationKind::None),
                ("draft_input_ids", SpeculationKind::DraftInputIds),
                ("prompt_lookup", SpeculationKind::PromptLookup),
            ];
            set(&mut s.speculation, choice(v, &names))
        },
    },
    Knob {
        key: "max_draft_tokens",
        expected: "an integer from 1 to 64",
        default: "4",
        doc: "Guesses for one request in one step, at most. They count in `max_num_tokens`, of which they \
              take what nobody else wants; and each has a row of logits (4 bytes for each token of the \
              vocabulary) for each of `max_num_requests`.",
        set: |s, v| set(&mut s.max_draft_tokens, count(v, 1..=64)),
    },
    Knob {
        key: "prompt_lookup_min",
        expected: "an integer from 1 to 32",
        default: "2",
        doc: "Last tokens that must have occurred before in the same order, at least, for \
              `prompt_lookup` to guess.",
        set: |s, v| set(&mut s.prompt_lookup_min, count(v, 1..=32)),
    },
    Knob {
        key: "prompt_lookup_max",
        expected: "an integer from 1 to 32",
        default: "4",
        doc: "Last tokens that are compared, at most. Of all places with as many equal tokens as can be \
              had up to this, the last one counts.",
        set: |s, v| set(&mut s.prompt_lookup_max, count(v, 1..=32)),
    },
    Knob {
        key: "max_num_requests",
        expected: "an integer from 1 to 2147483647",
        default: "`max_batch_size`",
        doc: "Requests in one step, at most; with `enable_trt_overlap`, in both micro-batches \
              together. Triton's own `max_batch_size` is how many it hands over to the backend; those \
              above `max_num_requests` wait inside.",
        set: |s, v| set(&mut s.max_num_requests, count(v, 1..=MAX_COUNT).map(Some)),
    },
    Knob {
        key: "max_beam_width",
        expected: "an integer from 1 to 256",
        default: "1",
        doc: "Beams of one request, at most: what `beam_width` may be. A request with beams is one of \
              `max_num_requests`, and takes a token of each beam from every step. It is never paused: \
              blocks for all its beams are set aside when it starts.",
        set: |s, v| set(&mut s.max_beam_width, count(v, 1..=MAX_BEAM_WIDTH)),
    },
    Knob {
        key: "max_num_tokens",
        expected: "an integer from 1 to 2147483647",
        default: "512 (TensorRT-LLM: 8192), or `max_num_requests` (times 1 + `max_draft_tokens` with `speculation`) + `tokens_per_block` if larger, or `max_seq_len` without chunked context",
        doc: "The token budget: tokens in one step, at most. A larger one finishes prompts in \
              fewer steps, a smaller one delays the requests that are generating less. TensorRT-LLM's default \
              is for GPUs; a CPU is at its full speed from some hundred tokens on. Padded batches (`V1`) are not \
              bounded by it: their prompts are computed in as many steps as it demands.",
        set: |s, v| set(&mut s.max_num_tokens, count(v, 1..=MAX_COUNT).map(Some)),
    },
    Knob {
        key: "max_seq_len",
        expected: "an integer from 2 to 2147483647",
        default: "the model's `max_position_embeddings`",
        doc: "Prompt and output of one request together, at most, in tokens.",
        set: |s, v| set(&mut s.max_seq_len, count(v, 2..=MAX_COUNT).map(Some)),
    },
    Knob {
        key: "enable_chunked_context",
        expected: "'true' or 'false'",
        default: "`true` (Batch Manager: `false`), but with `V1`",
        doc: "Whether a prompt may be computed in chunks over several steps, next to the requests \
              that are generating. Without it, a prompt longer than `max_num_tokens` is refused, or that has to be as \
              large as `max_seq_len`: so it is on here. With `V1` there are no chunks.",
        set: |s, v| set(&mut s.enable_chunked_context, flag(v).map(Some)),
    },
    Knob {
        key: "context_chunking_policy",
        expected: "'first_come_first_served' or 'equal_progress'",
        default: "`first_come_first_served`",
        doc: "Which prompts get the tokens that are left: the first one all it needs and then the \
              next, or a block each in turn.",
        set: |s, v| {
            let names = [
                (
                    "first_come_first_served",
                    ContextChunkPolicy::FirstComeFirstServed,
                ),
                ("equal_progress", ContextChunkPolicy::EqualProgress),
            ];
            set(&mut s.context_chunking_policy, choice(v, &names))
        },
    },
    Knob {
        key: "kv_cache_type",
        expected: "'paged' or 'contiguous'",
        default: "`paged`",
        doc: "`contiguous` gives every request that runs the memory of `max_seq_len` positions in \
              one piece, for as many of `max_num_requests` as there is memory. Nothing can be shared \
              then.",
        set: |s, v| {
            let names = [("paged", true), ("contiguous", false)];
            set(&mut s.paged_kv_cache, choice(v, &names))
        },
    },
    Knob {
        key: "kv_cache_dtype",
        expected: "'auto', 'bf16' or 'int8'",
        default: "`auto`: bf16",
        doc: "How keys and values are kept. `int8` takes about half the memory, and changes the logits a \
              little (see `benches/RESULTS.md`); a request still gets the same, bit for bit, alone and in \
              any batch.",
        set: |s, v| {
            let names = [("auto", false), ("bf16", false), ("int8", true)];
            set(&mut s.int8_kv_cache, choice(v, &names))
        },
    },
    Knob {
        key: "weight_only_precision",
        expected: "'auto', 'int8' or 'int4'",
        default: "`auto`: as the checkpoint has them; bf16 for floats",
        doc: "Rounds the weights of a float checkpoint while it is loaded: half or a quarter of the memory, \
              and faster generation by as much where memory limits it. Activations are rounded to 8 \
              bits for the products. With `int4` the output layer has 8 bits; embedding and norms stay as \
              they are. What it costs in quality is in `benches/RESULTS.md`. What a checkpoint has quantised \
              itself stays as it is.",
        set: |s, v| {
            let names = [
                ("auto", None),
                ("int8", Some(WeightOnlyPrecision::Int8)),
                ("int4", Some(WeightOnlyPrecision::Int4)),
            ];
            set(&mut s.weight_only_precision, choice(v, &names))
        },
    },
    Knob {
        key: "weight_only_group_size",
        expected: "a multiple of 32, up to 1048576",
        default: "128 for `int8`, 32 for `int4`",
        doc: "With `weight_only_precision`: how many neighbouring inputs of an output share a scale of 16 \
              bits. Smaller groups keep more of the weights and take more memory.",
        set: |s, v| {
            let size = count(v, 32..=1 << 20).filter(|size| size.is_multiple_of(32));
            set(&mut s.weight_only_group_size, size.map(Some))
        },
    },
    Knob {
        key: "weight_cache_dir",
        expected: "a folder",
        default: "none: weights are rounded in each load",
        doc: "Where weights that were rounded while they were loaded are kept, in a file for each model and version, \
              so that the next load reads them instead (see [docs/checkpoints.md](docs/checkpoints.md)). It is made \
              where it is missing; choose one outside of the model repository. A relative path starts at the \
              model's folder in the repository.",
        set: |s, v| set(&mut s.weight_cache_dir, path(v).map(Some)),
    },
    Knob {
        key: "weight_cache_mode",
        expected: "'600', '640' or '644'",
        default: "`600`",
        doc: "Who may read the files in `weight_cache_dir`, whoever may read the checkpoint: the server's user, its \
              group as well, or everybody. Folders that are made for it may be entered by the same; those that are \
              there stay as they are.",
        set: |s, v| {
            let names = [("600", 0o600), ("640", 0o640), ("644", 0o644)];
            set(&mut s.weight_cache_mode, choice(v, &names))
        },
    },
    Knob {
        key: "enable_kv_cache_reuse",
        expected: "'true' or 'false'",
        default: "`true` with a paged cache (Batch Manager: `false`)",
        doc: "Whether requests that begin with the same tokens share the blocks of those, also when \
              the earlier one has ended. The blocks that were not used for longest are given up \
              first. A request can opt out with `kv_cache_reuse`, and shares only with requests of \
              the same `cache_salt`. On here, since it costs next to nothing and answers are the same, bit for bit.",
        set: |s, v| set(&mut s.enable_kv_cache_reuse, flag(v).map(Some)),
    },
    Knob {
        key: "enable_partial_reuse",
        expected: "'true' or 'false'",
        default: "`true`",
        doc: "Whether the beginning of a block is copied where two requests begin to differ inside it.",
        set: |s, v| set(&mut s.enable_partial_reuse, flag(v)),
    },
    Knob {
        key: "max_attention_window_size",
        expected: "an integer from 1 to 2147483647, or a list of them for the layers, as '4096,1024'",
        default: "the model's own windows",
        doc: "How far each layer's attention looks back, the token itself included. A list is \
              repeated over the layers; a model's own window counts where it is smaller. Blocks that \
              no layer sees any more are given back.",
        set: |s, v| set(&mut s.max_attention_window_size, windows(v)),
    },
    Knob {
        key: "sink_token_length",
        expected: "an integer from 0 to 2147483647",
        default: "0",
        doc: "Positions at the beginning that every layer with a window sees besides \
              (StreamingLLM). They keep their own positions.",
        set: |s, v| set(&mut s.sink_token_length, count(v, 0..=MAX_COUNT)),
    },
    Knob {
        key: "tokens_per_block",
        expected: "an integer from 1 to 1024",
        default: "32",
        doc: "Positions of one KV cache block.",
        set: |s, v| {
            set(
                &mut s.tokens_per_block,
                count(v, 1..=1024).and_then(BlockSize::new),
            )
        },
    },
    Knob {
        key: "max_tokens_in_paged_kv_cache",
        expected: "an integer from 1 to 2147483647",
        default: "what `kv_cache_free_gpu_mem_fraction` allows",
        doc: "Positions of the whole KV cache, rounded down to blocks. With both limits, the \
              smaller wins.",
        set: |s, v| {
            set(
                &mut s.max_tokens_in_paged_kv_cache,
                count(v, 1..=MAX_COUNT).map(Some),
            )
        },
    },
    Knob {
        key: "kv_cache_free_gpu_mem_fraction",
        expected: "a number above 0 and at most 1",
        default: "0.5 (Batch Manager: 0.9)",
        doc: "Share of the memory that is free after the weights are loaded which the KV cache \
              may take; on the CPU, of available host memory, less what the caches of other \
              instances have yet to fill. Never more than \
              `max_num_requests` sequences of `max_seq_len` could use. The Batch Manager's default is for the memory of a \
              GPU, which nobody else uses; a host's is also Triton's, other models' and the system's.",
        set: |s, v| {
            let fraction = number(v).filter(|fraction| *fraction > 0.0 && *fraction <= 1.0);
            set(&mut s.kv_cache_free_mem_fraction, fraction)
        },
    },
    Knob {
        key: "logits_memory_bytes",
        expected: "an integer from 0 to 1099511627776",
        default: "1073741824",
        doc: "Bytes of logits and log-probabilities that the answers of an instance may hold, those of all \
              requests in flight together. A request that could need more than are left is refused: with \
              `return_context_logits` or `return_generation_logits` 4 bytes for each token of the \
              vocabulary, for each token of the prompt or of `max_tokens`; with `logprobs` some 150 bytes \
              (with long tokens more) for each token of `max_tokens` and each token named in its place; \
              for each sequence or beam. `0` refuses all of them.",
        set: |s, v| {
            let bytes = u64::from_str(v).ok().filter(|bytes| *bytes <= 1 << 40);
            set(&mut s.logits_memory_bytes, bytes)
        },
    },
    Knob {
        key: "logits_post_processor_library",
        expected: "a file",
        default: "none",
        doc: "A shared library with logits post-processors of your own, which runs inside the server: see \
              [docs/logits-processors.md](docs/logits-processors.md). A relative path starts at the model's \
              folder in the repository.",
        set: |s, v| set(&mut s.logits_post_processor_library, path(v).map(Some)),
    },
    Knob {
        key: "exclude_input_in_output",
        expected: "'true' or 'false'",
        default: "`false`",
        doc: "Whether a full answer leaves out the prompt, where the request does not say. \
              Streamed answers never repeat it.",
        set: |s, v| set(&mut s.exclude_input_in_output, flag(v)),
    },
    Knob {
        key: "stream_interval",
        expected: "an integer from 1 to 2147483647",
        default: "1",
        doc: "Tokens of each response of a stream, where the request does not say. A larger number spares the \
              server and its clients responses: each takes both of them more than a step does.",
        set: |s, v| set(&mut s.stream_interval, count(v, 1..=MAX_COUNT)),
    },
    Knob {
        key: "client_compatibility",
        expected: "'none', 'vllm' or 'tensorrtllm'",
        default: "`none`",
        doc: "Whose clients the model answers as their own backend does: inputs, shapes, `finish_reason`, outputs on \
              request, numbers of tokens. What each changes is in [docs/clients.md](docs/clients.md).",
        set: |s, v| {
            let names = [
                ("none", ClientCompatibility::None),
                ("vllm", ClientCompatibility::Vllm),
                ("tensorrtllm", ClientCompatibility::TensorrtLlm),
            ];
            set(&mut s.client_compatibility, choice(v, &names))
        },
    },
    Knob {
        key: "default_max_tokens",
        expected: "an integer from 1 to 2147483647",
        default: "16",
        doc: "`max_tokens` of a request that does not say.",
        set: |s, v| set(&mut s.default_max_tokens, count(v, 1..=MAX_COUNT)),
    },
    Knob {
        key: "add_special_tokens",
        expected: "'true' or 'false'",
        default: "`true`",
        doc: "Whether the tokenizer adds its special tokens (such as a beginning-of-text) to a \
              prompt. A prompt made by the chat template has its own.",
        set: |s, v| set(&mut s.add_special_tokens, flag(v)),
    },
    Knob {
        key: "skip_special_tokens",
        expected: "'true' or 'false'",
        default: "`true`",
        doc: "Whether special tokens are left out of the text that is returned.",
        set: |s, v| set(&mut s.skip_special_tokens, flag(v)),
    },
    Knob {
        key: "num_threads",
        expected: "an integer from 1 to 1024",
        default: "what the process may use",
        doc: "CPU threads of a step, the one that Triton calls on included. The default respects \
              the process's affinity and its container's CPU quota. Instances and models of one \
              server compute in turns where together they have more threads than that.",
        set: |s, v| {
            let threads = count(v, 1..=1024).and_then(|n| usize::try_from(n).ok()?.try_into().ok());
            set(&mut s.num_threads, threads.map(Some))
        },
    },
    Knob {
        key: "cpu_instruction_set",
        expected: "'auto', 'avx512_bf16', 'avx2' or 'portable'",
        default: "`auto`: the best that the processor has",
        doc: "The CPU kernels. Each gives the same text in every run; two sets may differ from \
              each other in the last bits of a logit.",
        set: |s, v| {
            let names = [
                ("auto", None),
                ("avx512_bf16", Some("avx512_bf16")),
                ("avx2", Some("avx2")),
                ("portable", Some("portable")),
            ];
            set(
                &mut s.cpu_instruction_set,
                choice(v, &names).map(|set| set.map(str::to_owned)),
            )
        },
    },
    Knob {
        key: "stats_file",
        expected: "a file",
        default: "none",
        doc: "Appends the statistics record of every step to this file, one JSON object a line. \
              A relative path starts at the server's working directory; choose one outside of the model repository: with \
              `--model-control-mode=poll`, Triton loads a model again when anything in its folder has changed.",
        set: |s, v| set(&mut s.stats_file, path(v).map(Some)),
    },
    Knob {
        key: "runner",
        expected: "'huggingface' or 'synthetic'",
        default: "`huggingface`",
        doc: "What computes the tokens. `synthetic` needs no checkpoint: the next token is a hash \
              of all tokens so far, and a step takes `synthetic_step_us` plus \
              `synthetic_token_us` for each of its tokens. For load tests and capacity planning.",
        set: |s, v| {
            let names = [
                ("huggingface", RunnerKind::HuggingFace),
                ("synthetic", RunnerKind::Synthetic),
            ];
            set(&mut s.runner, choice(v, &names))
        },
    },
    Knob {
        key: "synthetic_vocab_size",
        expected: "an integer from 2 to 16777216",
        default: "32000",
        doc: "Vocabulary of the synthetic runner.",
        set: |s, v| set(&mut s.synthetic_vocab_size, count(v, 2..=1 << 24)),
    },
    Knob {
        key: "synthetic_step_us",
        expected: "a number from 0 to 10000000",
        default: "0",
        doc: "Microseconds that every step of the synthetic runner takes.",
        set: |s, v| set(&mut s.synthetic_step_us, microseconds(v)),
    },
    Knob {
        key: "synthetic_token_us",
        expected: "a number from 0 to 10000000",
        default: "0",
        doc: "Microseconds that each token of a step adds.",
        set: |s, v| set(&mut s.synthetic_token_us, microseconds(v)),
    },
    Knob {
        key: "synthetic_fail_after",
        expected: "an integer from 0 to 2147483647",
        default: "never",
        doc: "Steps after which the synthetic runner fails, once and for all: to see what clients \
              and monitoring make of a lost model instance.",
        set: |s, v| {
            set(
                &mut s.synthetic_fail_after,
                count(v, 0..=MAX_COUNT).map(Some),
            )
        },
    },
    Knob {
        key: "synthetic_gate",
        expected: "a file",
        default: "none",
        doc: "As long as this file has a number, the synthetic runner runs so many steps in all and then waits: \
              for tests that need a request to be still running. A relative path starts at the model's folder \
              in the repository.",
        set: |s, v| set(&mut s.synthetic_gate, path(v).map(Some)),
    },
];

/// The README's table of all parameters.
pub fn reference_table() -> String {
    let mut table =
        String::from("| parameter | value | default | what it does |\n|---|---|---|---|\n");
    for Knob {
        key,
        expected,
        default,
        doc,
        ..
    } in KNOBS
    {
        // Writing to a String cannot fail.
        let _ = writeln!(table, "| `{key}` | {expected} | {default} | {doc} |");
    }
    table
}

fn set<T>(place: &mut T, value: Option<T>) -> Option<()> {
    *place = value?;
    Some(())
}

fn count(text: &str, range: RangeInclusive<u32>) -> Option<u32> {
    u32::from_str(text)
        .ok()
        .filter(|count| range.contains(count))
}

/// One window, or one for each layer; brackets around them are as good as none.
fn windows(text: &str) -> Option<Vec<NonZeroU32>> {
    let text = text.trim_matches(['[', ']', '{', '}']);
    let window = |size: &str| NonZeroU32::new(count(size.trim(), 1..=MAX_COUNT)?);
    text.split([',', ';']).map(window).collect()
}

fn number(text: &str) -> Option<f64> {
    f64::from_str(text).ok().filter(|number| number.is_finite())
}

fn microseconds(text: &str) -> Option<f64> {
    number(text).filter(|us| (0.0..=1e7).contains(us))
}

fn flag(text: &str) -> Option<bool> {
    choice(text, &[("true", true), ("false", false)])
}

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty() && !text.contains("${")).then(|| PathBuf::from(text))
}

/// The value that goes with a name, whatever its case.
fn choice<T: Clone>(text: &str, names: &[(&str, T)]) -> Option<T> {
    names
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(text))
        .map(|(_, value)| value.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::LoadError;

    /// For every knob: values that it takes and values that it must refuse.
    const CASES: &[(&str, &[&str], &[&str])] = &[
        (
            "gpt_model_path",
            &["/models/x", "x"],
            &["", "${gpt_model_path}"],
        ),
        ("tokenizer_dir", &["/models/x"], &[""]),
        (
            "gpt_model_type",
            &["V1", "inflight_batching", "inflight_fused_batching"],
            &["V2", ""],
        ),
        ("enable_trt_overlap", &["true"], &["2"]),
        (
            "speculation",
            &["none", "draft_input_ids", "PROMPT_LOOKUP"],
            &["medusa", "true", ""],
        ),
        ("max_draft_tokens", &["1", "64"], &["0", "65"]),
        ("prompt_lookup_min", &["1", "32"], &["0", "33"]),
        ("prompt_lookup_max", &["1", "32"], &["0", "33"]),
        (
            "context_chunking_policy",
            &["first_come_first_served", "equal_progress"],
            &["fair"],
        ),
        ("kv_cache_type", &["paged", "contiguous"], &["disabled"]),
        ("kv_cache_dtype", &["auto", "bf16", "int8"], &["fp8"]),
        (
            "weight_only_precision",
            &["auto", "int8", "INT4"],
            &["fp8", ""],
        ),
        ("weight_only_group_size", &["32", "128"], &["0", "16", "48"]),
        (
            "weight_cache_dir",
            &["/var/cache/weights", "cache"],
            &["", "${dir}"],
        ),
        (
            "weight_cache_mode",
            &["600", "640", "644"],
            &["", "0", "666", "755"],
        ),
        ("enable_kv_cache_reuse", &["true", "false"], &["maybe"]),
        ("enable_partial_reuse", &["false"], &["1"]),
        (
            "max_attention_window_size",
            &["1", "4096,1024", "[4096, 1024]"],
            &["0", "", "4096,", "many"],
        ),
        ("sink_token_length", &["0", "4"], &["-1"]),
        (
            "batch_scheduler_policy",
            &["guaranteed_no_evict", "MAX_UTILIZATION", "static_batch"],
            &["max", "static"],
        ),
        (
            "max_num_requests",
            &["1", "2147483647"],
            &["0", "-1", "1.5", "2147483648"],
        ),
        ("max_beam_width", &["1", "256"], &["0", "257"]),
        ("max_num_tokens", &["1", "8192"], &["0", "many"]),
        ("max_seq_len", &["2"], &["1", ""]),
        ("enable_chunked_context", &["true", "False"], &["yes", "1"]),
        ("tokens_per_block", &["1", "64"], &["0", "1025"]),
        ("max_tokens_in_paged_kv_cache", &["1"], &["0", "∞"]),
        (
            "kv_cache_free_gpu_mem_fraction",
            &["0.9", "1"],
            &["0", "1.1", "nan", "inf"],
        ),
        (
            "logits_memory_bytes",
            &["0", "1099511627776"],
            &["-1", "1e9", "1099511627777"],
        ),
        (
            "logits_post_processor_library",
            &["/opt/processors.so", "processors.so"],
            &["", "${library}"],
        ),
        ("exclude_input_in_output", &["true"], &["2"]),
        ("stream_interval", &["1", "8"], &["0", "-1", "all"]),
        (
            "client_compatibility",
            &["none", "vllm", "TensorRTLLM"],
            &["", "openai", "true"],
        ),
        ("default_max_tokens", &["1"], &["0"]),
        ("add_special_tokens", &["false"], &["no"]),
        ("skip_special_tokens", &["false"], &["no"]),
        ("num_threads", &["1", "1024"], &["0", "1025"]),
        (
            "cpu_instruction_set",
            &["auto", "avx2", "portable", "avx512_bf16"],
            &["sse"],
        ),
        ("stats_file", &["/tmp/stats.jsonl"], &[""]),
        ("runner", &["huggingface", "synthetic"], &["cuda"]),
        ("synthetic_vocab_size", &["2"], &["1", "16777217"]),
        ("synthetic_step_us", &["0", "5000.5"], &["-1", "1e8", "NaN"]),
        ("synthetic_token_us", &["0", "12.5"], &["-0.1", "inf"]),
        ("synthetic_fail_after", &["0", "300"], &["-1", "never"]),
        ("synthetic_gate", &["/tmp/gate", "gate"], &[""]),
    ];

    #[test]
    fn every_knob_takes_its_range_and_refuses_the_rest_by_name() {
        let keys: Vec<_> = KNOBS.iter().map(|knob| knob.key).collect();
        let tested: Vec<_> = CASES.iter().map(|(key, ..)| *key).collect();
        assert_eq!(
            keys.iter()
                .filter(|key| !tested.contains(key))
                .collect::<Vec<_>>(),
            Vec::<&&str>::new(),
            "knobs without a case"
        );
        for (key, good, bad) in CASES {
            for value in *good {
                Settings::parse([(*key, *value)]).unwrap_or_else(|e| panic!("{key}={value}: {e}"));
            }
            for value in *bad {
                match Settings::parse([(*key, *value)]) {
                    Err(LoadError::Knob {
                        key: named,
                        value: shown,
                        ..
                    }) => {
                        assert_eq!((named.as_str(), shown.as_str()), (*key, *value));
                    }
                    other => panic!("{key}={value}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn every_range_is_the_one_that_is_named() {
        let mut num_ranges = 0;
        for Knob { key, expected, .. } in KNOBS {
            assert!(!expected.contains("at least"), "{key} names no upper limit");
            let Some(range) = expected.strip_prefix("an integer from ") else {
                continue;
            };
            let range = range.split(',').next().expect("the first part");
            let (least, most) = range.split_once(" to ").expect("two numbers");
            let [least, most] = [least, most].map(|n| n.parse::<i64>().expect("a number"));
            num_ranges += 1;
            for (value, is_good) in [
                (least - 1, false),
                (least, true),
                (most, true),
                (most + 1, false),
                (1_000_000_000_000_000, false),
            ] {
                let parsed = Settings::parse([(*key, value.to_string().as_str())]);
                assert_eq!(parsed.is_ok(), is_good, "{key}={value}");
                if let Err(error) = parsed {
                    assert!(error.to_string().contains(range), "{error}");
                }
            }
        }
        assert!(num_ranges > 15, "{num_ranges}");
    }

    #[test]
    fn keys_are_unique_and_every_entry_says_what_it_does() {
        for (i, knob) in KNOBS.iter().enumerate() {
            assert!(
                KNOBS[..i].iter().all(|other| other.key != knob.key),
                "{} twice",
                knob.key
            );
            assert!(!knob.doc.is_empty() && !knob.expected.is_empty() && !knob.default.is_empty());
            assert!(
                !knob.doc.contains('\n') && !knob.doc.contains("  "),
                "{}",
                knob.key
            );
        }
    }
}
