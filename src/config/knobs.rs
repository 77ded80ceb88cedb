//! Every parameter of config.pbtxt: one knob, one entry, from which the reference's table is made.
//!
//! Names are those of TensorRT-LLM's Triton backend where the meaning is equal.

use std::fmt::Write as _;

use crate::config::choices::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, RunnerKind, SpeculationKind,
    WeightOnlyPrecision,
};
use crate::config::client_compatibility::ClientCompatibility;
use crate::config::settings::Settings;
use crate::config::values::{
    Kind, MAX_COUNT, block_size, choice, count, file, flag, folder, fraction, group_size,
    instruction_set, integer, microseconds, num_threads, optional, windows,
};

/// One parameter of config.pbtxt.
pub(super) struct Knob {
    /// Its key.
    pub(super) key: &'static str,
    /// The values it takes, worded to follow "is not".
    pub(super) expected: String,
    /// What holds where it is not written.
    default: String,
    /// What it does, for the reference.
    doc: &'static str,
    set: Box<Set>,
}

/// Sets a field from its text; `None` if the text is not what is expected.
type Set = dyn Fn(&mut Settings, &str) -> Option<()>;

/// Each beam names as many candidates in every step, and all of them are sorted.
const MAX_BEAM_WIDTH: u32 = 256;

/// Every parameter, in the order of the reference.
pub(super) fn knobs() -> Vec<Knob> {
    vec![
        knob(
            "gpt_model_path",
            optional(folder(), "the model's version folder"),
            |s| &mut s.gpt_model_path,
            "The checkpoint: a folder with `config.json` and `*.safetensors`, or with a GGUF file (see \
             [Checkpoints](checkpoints.md)). A relative path starts at the model's folder in the repository.",
        ),
        knob(
            "tokenizer_dir",
            optional(folder(), "`gpt_model_path`"),
            |s| &mut s.tokenizer_dir,
            "The folder with `tokenizer.json` and `tokenizer_config.json`. A model whose input is `input_ids` \
             needs none.",
        ),
        knob(
            "gpt_model_type",
            choice(BatchingScheme::NAMES),
            |s| &mut s.gpt_model_type,
            "The batching scheme. `inflight_fused_batching`: requests join and leave in every step, and a step is \
             one packed model call. `inflight_batching`: the same with two model calls, contexts first. `V1`: \
             lockstep, as before in-flight batching. A batch is padded to its longest member, no request can join \
             it, and all its answers leave when the last member ends; there is no streaming. A batch starts with \
             all requests that wait, up to `max_num_requests`.",
        ),
        knob(
            "batch_scheduler_policy",
            choice(CapacityPolicy::NAMES),
            |s| &mut s.batch_scheduler_policy,
            "The capacity policy: which requests may run, given the KV blocks there are. `guaranteed_no_evict` \
             starts only requests that can run to their last token. `max_utilization` starts whatever fits now and \
             pauses the request that started last when blocks run out; it resumes by itself, and only its latency \
             shows it. `static_batch` starts requests only when all running ones have ended (with \
             `enable_trt_overlap`: all of their micro-batch).",
        ),
        knob(
            "enable_trt_overlap",
            flag(),
            |s| &mut s.enable_trt_overlap,
            "Splits the requests into two micro-batches: one is computed while the host answers the other and \
             takes in requests for it. Each request then takes part in every second step, and the weights are read \
             twice as often. This pays off only if the host's share of a step is large.",
        ),
        knob(
            "speculation",
            choice(SpeculationKind::NAMES),
            |s| &mut s.speculation,
            "Whether tokens are guessed and verified several at a time, without a second model. `draft_input_ids`: \
             the request brings the guesses. `prompt_lookup`: for a request without guesses, the tokens that \
             followed the last few tokens the last time they occurred, in its prompt or output. Every answer is \
             identical, bit for bit, to that with `none`. See [Speculation](speculation.md).",
        ),
        knob(
            "max_draft_tokens",
            count(1..=64),
            |s| &mut s.max_draft_tokens,
            "The most guesses per request and step. They count towards `max_num_tokens` and take only what nobody \
             else wants. Each needs memory for a row of logits (4 bytes per token of the vocabulary) for each of \
             `max_num_requests`.",
        ),
        knob(
            "prompt_lookup_min",
            count(1..=32),
            |s| &mut s.prompt_lookup_min,
            "With `prompt_lookup`: the fewest last tokens that must have occurred before, in the same order, for a \
             guess.",
        ),
        knob(
            "prompt_lookup_max",
            count(1..=32),
            |s| &mut s.prompt_lookup_max,
            "With `prompt_lookup`: the most last tokens that are compared. Among the places with the longest match \
             up to this length, the latest is used.",
        ),
        knob(
            "max_num_requests",
            optional(count(1..=MAX_COUNT), "`max_batch_size`"),
            |s| &mut s.max_num_requests,
            "The most requests in one step; with `enable_trt_overlap`, in both micro-batches together. Triton's \
             own `max_batch_size` is the number of requests that it hands to the backend; those above \
             `max_num_requests` wait in the backend.",
        ),
        knob(
            "max_beam_width",
            count(1..=MAX_BEAM_WIDTH),
            |s| &mut s.max_beam_width,
            "The most beams of one request: the limit of the option `beam_width`. A request with beams counts as \
             one of `max_num_requests` and takes one token per beam from the budget of every step. It is never \
             paused: blocks for all its beams are reserved when it starts.",
        ),
        knob(
            "max_num_tokens",
            optional(count(1..=MAX_COUNT), "512 (TensorRT-LLM: 8192), or `max_num_requests` (times 1 + `max_draft_tokens` with `speculation`) + `tokens_per_block` if larger, or `max_seq_len` without chunked context"),
            |s| &mut s.max_num_tokens,
            "The token budget: the most tokens in one step. A larger budget finishes prompts in fewer steps; a \
             smaller one delays running requests less. TensorRT-LLM's default is meant for GPUs; a CPU reaches full \
             speed at some hundred tokens. The budget does not bound padded batches (`V1`): their prompts are \
             computed in as many steps as it demands.",
        ),
        knob(
            "max_seq_len",
            optional(count(2..=MAX_COUNT), "the model's `max_position_embeddings`"),
            |s| &mut s.max_seq_len,
            "The most tokens of one request, prompt and output together.",
        ),
        knob(
            "enable_chunked_context",
            optional(flag(), "`true` (Batch Manager: `false`); `false` with `V1`"),
            |s| &mut s.enable_chunked_context,
            "Whether a prompt may be computed in chunks over several steps, next to requests in generation. \
             Without it, a prompt longer than `max_num_tokens` is refused, or `max_num_tokens` must be as large as \
             `max_seq_len`; therefore it is on by default here. `V1` has no chunks.",
        ),
        knob(
            "context_chunking_policy",
            choice(ContextChunkPolicy::NAMES),
            |s| &mut s.context_chunking_policy,
            "Which prompts get the tokens that are left in a step: the first prompt all it needs and then the \
             next, or every prompt one block in turn.",
        ),
        knob(
            "kv_cache_type",
            choice(&[("paged", true), ("contiguous", false)]),
            |s| &mut s.paged_kv_cache,
            "`contiguous` gives each running request the memory of `max_seq_len` positions in one piece, for as \
             many of `max_num_requests` as memory allows. Nothing can be shared then.",
        ),
        knob(
            "kv_cache_dtype",
            choice(&[("auto", false), ("bf16", false), ("int8", true)]),
            |s| &mut s.int8_kv_cache,
            "How keys and values are stored. `int8` takes about half the memory and changes the logits slightly \
             (see [Results](../../benches/RESULTS.md#int8-keys-and-values-kv_cache_dtype)). A request still gets \
             the same answer, bit for bit, alone and in any batch.",
        ).with_note(": bf16"),
        knob(
            "weight_only_precision",
            choice(WeightOnlyPrecision::NAMES),
            |s| &mut s.weight_only_precision,
            "Rounds the weights of a float checkpoint while it loads: a half or a quarter of the memory, and \
             generation faster by as much where memory is the limit. Activations are rounded to 8 bits for the \
             products. With `int4` the output layer has 8 bits; embedding and norms are not rounded. For the loss \
             of quality see [Results](../../benches/RESULTS.md#int8-and-int4-weights-weight_only_precision). \
             Weights that the checkpoint has quantized itself keep their form.",
        ).with_note(": as in the checkpoint; bf16 for floats"),
        knob(
            "weight_only_group_size",
            optional(group_size(), "128 for `int8`, 32 for `int4`"),
            |s| &mut s.weight_only_group_size,
            "With `weight_only_precision`: how many consecutive inputs of an output share a 16-bit scale. Smaller \
             groups are more accurate and take more memory.",
        ),
        knob(
            "weight_cache_dir",
            optional(folder(), "none: weights are rounded at every load"),
            |s| &mut s.weight_cache_dir,
            "Where rounded weights are kept, one file per model and version, so that the next load reads them \
             instead of rounding again (see [Checkpoints](checkpoints.md#keeping-rounded-weights-between-loads)). \
             The folder is created if it is missing; choose one outside the model repository. A relative path \
             starts at the model's folder in the repository.",
        ),
        knob(
            "weight_cache_mode",
            choice(&[("600", 0o600), ("640", 0o640), ("644", 0o644)]),
            |s| &mut s.weight_cache_mode,
            "Who may read the files in `weight_cache_dir`, whatever the mode of the checkpoint: the server's user, \
             also its group, or everybody. Folders created for the files are opened to the same users; existing \
             folders keep their mode.",
        ),
        knob(
            "enable_kv_cache_reuse",
            optional(flag(), "`true` with a paged cache (Batch Manager: `false`)"),
            |s| &mut s.enable_kv_cache_reuse,
            "Whether requests that begin with the same tokens share the blocks of that prefix, even after the \
             earlier request has ended. The least recently used blocks are evicted first. A request can opt out \
             with `kv_cache_reuse`, and shares blocks only with requests of the same `cache_salt`. It is on by \
             default here because it costs next to nothing and answers are identical, bit for bit.",
        ),
        knob(
            "enable_partial_reuse",
            flag(),
            |s| &mut s.enable_partial_reuse,
            "Whether the common part of a block is copied if two requests diverge inside it.",
        ),
        knob(
            "max_attention_window_size",
            windows(),
            |s| &mut s.max_attention_window_size,
            "How many positions each layer's attention looks back, including the token itself. A list is repeated \
             over the layers. A model's own window applies where it is smaller. Blocks outside the window of every \
             layer are freed.",
        ),
        knob(
            "sink_token_length",
            count(0..=MAX_COUNT),
            |s| &mut s.sink_token_length,
            "How many first positions stay visible to layers with a window (StreamingLLM). They keep their own \
             positions.",
        ),
        knob(
            "tokens_per_block",
            block_size(),
            |s| &mut s.tokens_per_block,
            "Positions in one KV cache block.",
        ),
        knob(
            "max_tokens_in_paged_kv_cache",
            optional(count(1..=MAX_COUNT), "what `kv_cache_free_gpu_mem_fraction` allows"),
            |s| &mut s.max_tokens_in_paged_kv_cache,
            "Positions in the whole KV cache, rounded down to blocks. If both limits are given, the smaller one \
             applies.",
        ),
        knob(
            "kv_cache_free_gpu_mem_fraction",
            fraction(),
            |s| &mut s.kv_cache_free_mem_fraction,
            "The share of the memory that is free after loading the weights which the KV cache may take; on the \
             CPU, of available host memory, less what the caches of other instances have yet to fill. Never more \
             than `max_num_requests` sequences of `max_seq_len` could use. The Batch Manager's default is meant for \
             GPU memory, which nothing else uses; host memory is shared with Triton, other models, and the system.",
        ).with_note(" (Batch Manager: 0.9)"),
        knob(
            "logits_memory_bytes",
            integer(0..=1 << 40),
            |s| &mut s.logits_memory_bytes,
            "The most bytes of logits and log-probabilities that the answers of all requests in flight of an \
             instance may hold. A request that could need more than is left is refused. Counted are, per sequence \
             or beam: with `return_context_logits` and `return_generation_logits`, 4 bytes per token of the \
             vocabulary for each token of the prompt and of `max_tokens`; with `logprobs`, some 150 bytes (more \
             with long tokens) for each token of `max_tokens` and each alternative. `0` refuses all of them.",
        ),
        knob(
            "logits_post_processor_library",
            optional(file(), "none"),
            |s| &mut s.logits_post_processor_library,
            "A shared library with logits post-processors of your own, which runs inside the server: see [Logits \
             post-processors](logits-processors.md#your-own-post-processors). A relative path starts at the model's \
             folder in the repository.",
        ),
        knob(
            "exclude_input_in_output",
            flag(),
            |s| &mut s.exclude_input_in_output,
            "Whether a full answer leaves out the prompt, if the request does not say. Streams never repeat the \
             prompt.",
        ),
        knob(
            "stream_interval",
            count(1..=MAX_COUNT),
            |s| &mut s.stream_interval,
            "Tokens per response of a stream, if the request does not say. A larger number means fewer responses, \
             each of which costs server and client more than a step does.",
        ),
        knob(
            "client_compatibility",
            choice(ClientCompatibility::NAMES),
            |s| &mut s.client_compatibility,
            "The backend whose clients the model should satisfy: inputs, shapes, `finish_reason`, outputs on \
             request, token counts. [Clients of other \
             backends](clients.md#a-model-that-answers-as-another-backend-does) lists what each setting changes.",
        ),
        knob(
            "default_max_tokens",
            count(1..=MAX_COUNT),
            |s| &mut s.default_max_tokens,
            "`max_tokens` of a request that does not say.",
        ),
        knob(
            "add_special_tokens",
            flag(),
            |s| &mut s.add_special_tokens,
            "Whether the tokenizer adds its special tokens (such as a beginning-of-text token) to a prompt. A \
             prompt made by the chat template has its own.",
        ),
        knob(
            "skip_special_tokens",
            flag(),
            |s| &mut s.skip_special_tokens,
            "Whether special tokens are left out of the returned text.",
        ),
        knob(
            "num_threads",
            optional(num_threads(), "what the process may use"),
            |s| &mut s.num_threads,
            "CPU threads of a step, including the one on which Triton calls. The default respects the process's \
             affinity and its container's CPU quota. If the instances and models of one server together have more \
             threads than that, they compute in turns.",
        ),
        knob(
            "cpu_instruction_set",
            instruction_set(),
            |s| &mut s.cpu_instruction_set,
            "The CPU kernels. Each set gives the same text in every run; two sets may differ in the last bits of a \
             logit.",
        ).with_note(": the best that the processor has"),
        knob(
            "stats_file",
            optional(file(), "none"),
            |s| &mut s.stats_file,
            "Appends the statistics record of every step to this file, one JSON object per line. A relative path \
             starts at the server's working directory. Choose a file outside the model repository: with \
             `--model-control-mode=poll`, Triton reloads a model when anything in its folder changes.",
        ),
        knob(
            "runner",
            choice(RunnerKind::NAMES),
            |s| &mut s.runner,
            "What computes the tokens. `synthetic` needs no checkpoint: the next token is a hash of all tokens so \
             far, and a step takes `synthetic_step_us` plus `synthetic_token_us` per token. For load tests and \
             capacity planning.",
        ),
        knob(
            "synthetic_vocab_size",
            integer(2..=1 << 24),
            |s| &mut s.synthetic_vocab_size,
            "Vocabulary of the synthetic runner.",
        ),
        knob(
            "synthetic_step_us",
            microseconds(),
            |s| &mut s.synthetic_step_us,
            "Microseconds that every step of the synthetic runner takes.",
        ),
        knob(
            "synthetic_token_us",
            microseconds(),
            |s| &mut s.synthetic_token_us,
            "Microseconds that each token of a step adds.",
        ),
        knob(
            "synthetic_fail_after",
            optional(count(0..=MAX_COUNT), "never"),
            |s| &mut s.synthetic_fail_after,
            "Steps after which the synthetic runner fails for good: shows what clients and monitoring make of a \
             lost model instance.",
        ),
        knob(
            "synthetic_gate",
            optional(file(), "none"),
            |s| &mut s.synthetic_gate,
            "While this file holds a number, the synthetic runner runs that many steps in total and then waits: \
             for tests that need a request to be still running. A relative path starts at the model's folder in the \
             repository.",
        ),
    ]
}

/// The table of all parameters.
pub fn reference_table() -> String {
    let mut table =
        String::from("| parameter | value | default | what it does |\n|---|---|---|---|\n");
    for Knob {
        key,
        expected,
        default,
        doc,
        ..
    } in knobs()
    {
        // Writing to a String cannot fail.
        let _ = writeln!(table, "| `{key}` | {expected} | {default} | {doc} |");
    }
    table
}

impl Knob {
    /// Sets it from its text; `None` where the text is not what is expected.
    pub(super) fn set(&self, settings: &mut Settings, text: &str) -> Option<()> {
        (self.set)(settings, text)
    }

    /// Adds to what the reference says of the default.
    fn with_note(mut self, note: &str) -> Self {
        self.default += note;
        self
    }
}

/// The knob of a field of the settings, whose default is that of the field.
fn knob<T: 'static>(
    key: &'static str,
    kind: Kind<T>,
    field: fn(&mut Settings) -> &mut T,
    doc: &'static str,
) -> Knob {
    let Kind {
        expected,
        read,
        show,
    } = kind;
    Knob {
        key,
        expected,
        default: show(field(&mut Settings::default())),
        doc,
        set: Box::new(move |settings, text| {
            *field(settings) = read(text)?;
            Some(())
        }),
    }
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
    fn every_knob_accepts_its_range_and_rejects_other_values() {
        let keys: Vec<_> = knobs().iter().map(|knob| knob.key).collect();
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
    fn integer_ranges_match_their_descriptions() {
        let mut num_ranges = 0;
        for Knob { key, expected, .. } in knobs() {
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
                let parsed = Settings::parse([(key, value.to_string().as_str())]);
                assert_eq!(parsed.is_ok(), is_good, "{key}={value}");
                if let Err(error) = parsed {
                    assert!(error.to_string().contains(range), "{error}");
                }
            }
        }
        assert!(num_ranges > 15, "{num_ranges}");
    }

    #[test]
    fn keys_are_unique_and_every_entry_is_documented() {
        let knobs = knobs();
        for (i, knob) in knobs.iter().enumerate() {
            assert!(
                knobs[..i].iter().all(|other| other.key != knob.key),
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
