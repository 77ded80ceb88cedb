//! Every parameter of config.pbtxt, one entry each. The reference is generated from the entries.
//!
//! A parameter has the same name as in TensorRT-LLM's Triton backend if its meaning is the same.

use crate::choices::{
    BatchingScheme, CapacityPolicy, ContextChunkPolicy, KvCacheDtype, PoolingMode,
    RankTransportKind, ReplyParser, RunnerKind, SpeculationKind, Task, WeightOnlyPrecision,
};
use crate::client_compatibility::ClientCompatibility;
use crate::settings::Settings;
use crate::values::{
    Kind, MAX_COUNT, MAX_STATE_SNAPSHOTS, MAX_THREADS, block_size, choice, count, file, flag,
    folder, fraction, gpus, group_size, instruction_set, integer, microseconds, num_threads,
    optional, or_empty, rank_cpus, two_tokens, windows,
};

/// One parameter of config.pbtxt.
pub(super) struct Knob {
    pub(super) key: &'static str,
    /// The accepted values, worded to follow "is not".
    pub(super) expected: String,
    /// The default, as shown in the reference.
    pub(super) default: String,
    /// Description for the reference, in Markdown.
    pub(super) doc: &'static str,
    set: Box<Set>,
}

/// Sets a field from its text. Returns None if the text is not an accepted value.
type Set = dyn Fn(&mut Settings, &str) -> Option<()>;

/// Bounds the work of a step: each beam has this many candidates, which are sorted together.
const MAX_BEAM_WIDTH: u32 = 256;

/// As many as the operations between ranks are made for.
const MAX_RANKS: u32 = 16;

/// A day.
const MAX_RANK_SECONDS: u32 = 24 * 60 * 60;

/// A day.
const MAX_DRAIN_SECONDS: u32 = 24 * 60 * 60;
const MAX_RANK_RESTARTS: u32 = 16;
const MAX_IMAGES: u32 = 1024;
const MAX_IMAGE_TOKENS: u32 = 1 << 14;

/// Every parameter; `reference.rs` has the order in which they are shown.
pub(super) fn knobs() -> Vec<Knob> {
    vec![
        knob(
            "gpt_model_path",
            optional(folder(), "the model's version folder"),
            |s| &mut s.gpt_model_path,
            "The checkpoint: a folder with `config.json` and `*.safetensors`, or with a GGUF file (see \
             [Checkpoints](checkpoints.md)). A relative path is resolved against the model's folder in the \
             repository.",
        ),
        knob(
            "tokenizer_dir",
            optional(folder(), "`gpt_model_path`"),
            |s| &mut s.tokenizer_dir,
            "The folder with `tokenizer.json` and `tokenizer_config.json`. Not needed by a model whose input is \
             `input_ids`.",
        ),
        knob(
            "task",
            choice(Task::NAMES),
            |s| &mut s.task,
            "What a request gets. `generate`: text that goes on from its prompt. `embed`: a vector for its prompt, in the \
             output `embedding` ([Embeddings](embeddings.md)). `classify`: the probabilities of the classes of a \
             `...ForSequenceClassification`. `score`: one number from such a model with one class \
             ([Classes and scores](classification.md)).",
        ),
        knob(
            "pooling",
            optional(choice(PoolingMode::NAMES), "as `modules.json` says; without that file, `last`"),
            |s| &mut s.pooling,
            "With a `task` other than `generate`: which of the prompt's last hidden states stand for it. `last`: that of its \
             last token. `mean`: the mean of all. `cls`: that of its first token.",
        ),
        knob(
            "normalize",
            optional(flag(), "as `modules.json` says; without that file, `true`"),
            |s| &mut s.normalize,
            "With `task: embed`: whether embeddings are divided by their length, so that their dot product is the cosine.",
        ),
        knob(
            "classifier_from_token",
            optional(two_tokens(), "none, or `[\"no\", \"yes\"]` with `is_original_qwen3_reranker`"),
            |s| &mut s.classifier_from_token,
            "With `task: score`: scores are made by a model that generates, a `...ForCausalLM`, and are the probability \
             that its next token is the second one, where it is one of these two \
             ([Classes and scores](classification.md#models-that-answer-yes-or-no)).",
        ),
        knob(
            "is_original_qwen3_reranker",
            flag(),
            |s| &mut s.is_original_qwen3_reranker,
            "With `task: score`: the checkpoint is a Qwen3-Reranker as Qwen has published it. Pairs are put into \
             the prompt that it was trained with.",
        ),
        knob(
            "gpt_model_type",
            choice(BatchingScheme::NAMES),
            |s| &mut s.gpt_model_type,
            "The batching scheme. `inflight_fused_batching`: requests join and leave at every step, and a step is \
             one packed model call. `inflight_batching`: the same, but with two model calls per step, contexts \
             first. `V1`: lockstep batching, as before in-flight batching: a batch is padded to its longest \
             member, no request joins it, and all responses are sent when the last request finishes; no streaming. \
             A batch starts with all waiting requests, up to `max_num_requests`.",
        ),
        knob(
            "batch_scheduler_policy",
            choice(CapacityPolicy::NAMES),
            |s| &mut s.batch_scheduler_policy,
            "Which requests may run with the available KV cache blocks. `guaranteed_no_evict` starts a request \
             only if it can run to its last token. `max_utilization` starts every request that fits now and, when \
             blocks run out, pauses the most recently started one; a paused request resumes automatically, and \
             only its latency is affected. `static_batch` starts requests only after all running requests have \
             finished (with two micro-batches, see `enable_trt_overlap`: all requests of theirs).",
        ),
        knob(
            "enable_trt_overlap",
            flag(),
            |s| &mut s.enable_trt_overlap,
            "Whether one step is computed while the host processes the output of another. On a GPU, with \
             `inflight_fused_batching`, the next step begins before the host knows the tokens of the last one: see \
             [GPUs](gpus.md#overlap); models with [recurrent states](checkpoints.md#recurrent-states) refuse that. On \
             the CPU, and with `inflight_batching`, the requests are split into two \
             micro-batches, which take turns: each request then takes part in every second step, and the weights are \
             read twice as often, so this pays off only if host work is a large part of a step, or if the micro-batches \
             are computed by [stages](ranks.md#stages) at the same time.",
        ),
        knob(
            "speculation",
            choice(SpeculationKind::NAMES),
            |s| &mut s.speculation,
            "Whether later tokens are guessed and verified within one step. \
             `draft_input_ids`: guesses are given by requests. `prompt_lookup`: for requests that give none, the \
             tokens that followed an earlier occurrence of the last tokens in the prompt or output. `draft_model`: for \
             requests that give none, those of the model at `draft_model_path`. `eagle3`: the same by the EAGLE-3 head at \
             `draft_model_path`. `mtp`: the same by the head for multi-token prediction in the model's checkpoint. \
             Responses are bit-identical to those with `none`. See [Speculation](speculation.md).",
        ),
        knob(
            "draft_model_path",
            optional(folder(), "none"),
            |s| &mut s.draft_model_path,
            "With `speculation: draft_model`: the checkpoint of a smaller model with the same tokens. With `eagle3`: the \
             checkpoint of a head that was trained for the model. A relative path is resolved against the model's folder in the repository. On one CPU process; its weights are rounded as those of \
             the model, and its KV cache shares the memory of the model's.",
        ),
        knob(
            "max_draft_tokens",
            count(1..=64),
            |s| &mut s.max_draft_tokens,
            "Maximum number of draft tokens per request and step. They count towards `max_num_tokens`, but use \
             only what other requests leave of it. Each draft token has a row of logits (4 bytes per token of the \
             vocabulary) for each of `max_num_requests`.",
        ),
        knob(
            "enable_adaptive_drafts",
            flag(),
            |s| &mut s.enable_adaptive_drafts,
            "Whether a request has fewer draft tokens, or none, while they are wrong more often than they are worth. What \
             they cost is measured when the model is loaded. `false`: always up to `max_draft_tokens`.",
        ),
        knob(
            "prompt_lookup_min",
            count(1..=32),
            |s| &mut s.prompt_lookup_min,
            "Minimum number of last tokens that must have occurred earlier in the same order for `prompt_lookup` \
             to guess.",
        ),
        knob(
            "prompt_lookup_max",
            count(1..=32),
            |s| &mut s.prompt_lookup_max,
            "Maximum number of last tokens to compare. Of the places with the longest match up to this length, \
             the last is used.",
        ),
        knob(
            "max_num_requests",
            optional(count(1..=MAX_COUNT), "`max_batch_size`"),
            |s| &mut s.max_num_requests,
            "Maximum number of requests in one step; with two micro-batches (`enable_trt_overlap`), in both together. \
             Triton's own `max_batch_size` limits how many requests Triton passes to the backend; requests beyond \
             `max_num_requests` wait in the backend.",
        ),
        knob(
            "allow_iterative_oldest",
            flag(),
            |s| &mut s.allow_iterative_oldest,
            "Whether iterative sequences may have the strategy `oldest`, although Triton's batcher for it loses slots when clients \
             leave, and on servers since 25.10 crashes or hangs then ([Limitations](limitations.md#of-tritons-sequence-batcher)). \
             Conversations need no permission.",
        ),
        knob(
            "max_rank_restarts",
            count(0..=MAX_RANK_RESTARTS),
            |s| &mut s.max_rank_restarts,
            "How often in a row an instance whose [ranks](ranks.md#when-a-rank-fails) have failed is loaded anew by itself: after \
             1 s, and each time after twice as long. An instance that has served for 10 minutes begins anew. With 0 it waits for a \
             load.",
        ),
        knob(
            "drain_timeout_seconds",
            optional(count(0..=MAX_DRAIN_SECONDS), "none: they run to their end"),
            |s| &mut s.drain_timeout_seconds,
            "When the model is unloaded or the server stops, its requests end after this long with what they have, \
             `finish_reason` `timed_out`. Counted from when the backend notices, within a second.",
        ),
        knob(
            "max_beam_width",
            count(1..=MAX_BEAM_WIDTH),
            |s| &mut s.max_beam_width,
            "Maximum number of beams per request: the upper limit of `beam_width`. A request with beams counts \
             once towards `max_num_requests`, and uses one token per beam in every step. Under \
             `guaranteed_no_evict` and `static_batch`, blocks for all of its beams are reserved when it starts.",
        ),
        knob(
            "max_num_tokens",
            optional(count(1..=MAX_COUNT), "512 on a CPU, 8192 on a GPU (TensorRT-LLM: 8192), or `max_num_requests` (with `speculation`, times 1 + `max_draft_tokens`) + `tokens_per_block` if larger; `max_seq_len` without chunked context"),
            |s| &mut s.max_num_tokens,
            "The token budget: the maximum number of tokens in one step. A larger budget finishes prompts in \
             fewer steps; a smaller one delays generating requests less. A CPU reaches its full speed at a few hundred tokens. It does not limit padded batches (`V1`), whose \
             prompts are computed in as many steps as needed.",
        ),
        knob(
            "max_seq_len",
            optional(count(2..=MAX_COUNT), "the model's `max_position_embeddings`"),
            |s| &mut s.max_seq_len,
            "Maximum length of prompt and output of one request together, in tokens.",
        ),
        knob(
            "enable_chunked_context",
            optional(flag(), "`true`, except with `V1` (Batch Manager: `false`)"),
            |s| &mut s.enable_chunked_context,
            "Whether a prompt may be computed in chunks over several steps, alongside generating requests. \
             Without chunks, a prompt longer than `max_num_tokens` is rejected, and `max_num_tokens` must be as \
             large as `max_seq_len` to accept all; so chunking is enabled by default. `V1` has no chunks.",
        ),
        knob(
            "context_chunking_policy",
            choice(ContextChunkPolicy::NAMES),
            |s| &mut s.context_chunking_policy,
            "How the remaining token budget is divided among prompts. `first_come_first_served`: the first prompt \
             gets all it needs, then the next. `equal_progress`: each prompt gets one block in turn.",
        ),
        knob(
            "kv_cache_type",
            choice(&[("paged", true), ("contiguous", false)]),
            |s| &mut s.paged_kv_cache,
            "`contiguous` gives every running request one piece of memory for `max_seq_len` positions, for as \
             many of `max_num_requests` as fit into memory. Blocks cannot be shared then.",
        ),
        knob(
            "kv_cache_dtype",
            choice(KvCacheDtype::NAMES),
            |s| &mut s.kv_cache_dtype,
            "Data type of keys and values. `int8`, and on GPUs `fp8` (E4M3), take about half the memory and change the logits slightly \
             (see [Results](results-quality.md#int8-keys-and-values-kv_cache_dtype)); responses remain bit-identical whether a request runs \
             alone or in a batch.",
        ).with_note(": bf16"),
        knob(
            "weight_only_precision",
            choice(WeightOnlyPrecision::NAMES),
            |s| &mut s.weight_only_precision,
            "Quantises the weights of a floating-point checkpoint at load: half or a quarter of the memory, and \
             correspondingly faster generation where memory bandwidth is the limit. On a CPU, activations are rounded to 8 \
             bits for the matrix products. `fp8` (E4M3) is for GPUs. With `int4` the output layer has 8 bits; embedding and norms are not \
             quantised. [Results](results-quality.md#int8-and-int4-weights-weight_only_precision) has the loss of quality. Weights that are already \
             quantised in the checkpoint are unchanged.",
        ).with_note(": as in the checkpoint; floating-point weights as bf16"),
        knob(
            "weight_only_group_size",
            optional(
                group_size(),
                "128 for `int8` and `fp8`, 32 for `int4`, all with `fp8_activations`",
            ),
            |s| &mut s.weight_only_group_size,
            "With `weight_only_precision`: number of consecutive inputs of an output that share a 16-bit scale. \
             Smaller groups are more accurate and take more memory.",
        ),
        knob(
            "fp8_activations",
            flag(),
            |s| &mut s.fp8_activations,
            "On a GPU with compute capability 8.9 or higher, whether activations are rounded to FP8 (E4M3) too, each token by a \
             scale of its own, where weights are FP8 with one scale for each output or for the whole matrix: those of the \
             checkpoint, or of `weight_only_precision: fp8`. Products are up to twice as fast then where they are bound by \
             arithmetic, and less exact. See [GPUs](gpus.md#products-of-fp8-with-fp8).",
        ),
        knob(
            "weight_cache_dir",
            optional(folder(), "none: weights are quantised at each load"),
            |s| &mut s.weight_cache_dir,
            "Folder for weights that were quantised at load, in one file per model, version, and kind of device, so that the next \
             load reads them instead (see [Checkpoints](checkpoints.md#keeping-rounded-weights-between-loads)). It is created if missing; choose one \
             outside the model repository. A relative path is resolved against the model's folder in the \
             repository.",
        ),
        knob(
            "weight_cache_mode",
            choice(&[("600", 0o600), ("640", 0o640), ("644", 0o644)]),
            |s| &mut s.weight_cache_mode,
            "Permissions of the files in `weight_cache_dir`, regardless of the checkpoint's: readable by the \
             server's user only, by its group too, or by everyone. Folders created for the cache can be entered by \
             the same users; existing folders are unchanged.",
        ),
        knob(
            "enable_kv_cache_reuse",
            optional(flag(), "`true` with a paged cache (Batch Manager: `false`)"),
            |s| &mut s.enable_kv_cache_reuse,
            "Whether requests that start with the same tokens share the KV cache blocks of those tokens, even \
             after the earlier request has finished. The least recently used blocks are evicted first. A request \
             can opt out with `kv_cache_reuse`, and shares blocks only with requests of the same `cache_salt`. \
             Enabled by default, since it costs next to nothing and responses are bit-identical.",
        ),
        knob(
            "enable_partial_reuse",
            flag(),
            |s| &mut s.enable_partial_reuse,
            "Whether the matching first positions of a block are copied when two requests diverge inside it.",
        ),
        knob(
            "max_attention_window_size",
            windows(),
            |s| &mut s.max_attention_window_size,
            "How many positions each layer's attention looks back, including the current token. A list is \
             repeated over the layers; a smaller window of the model takes precedence. Blocks outside the windows \
             of all layers are released.",
        ),
        knob(
            "sink_token_length",
            count(0..=MAX_COUNT),
            |s| &mut s.sink_token_length,
            "Number of positions at the start that every layer with a window attends to in addition \
             (StreamingLLM). They keep their original positions, unless `enable_sink_token_shift`.",
        ),
        knob(
            "enable_sink_token_shift",
            flag(),
            |s| &mut s.enable_sink_token_shift,
            "Whether positions are counted within the cache, as in StreamingLLM: for a layer with a window, the positions \
             of `sink_token_length` are always right before those of its window, however long the sequence is. Only for \
             models with rotary positions. See [Attention windows and sinks](kv-cache.md#attention-windows-and-sinks).",
        ),
        knob(
            "tokens_per_block",
            block_size(),
            |s| &mut s.tokens_per_block,
            "Number of positions in one KV cache block.",
        ),
        knob(
            "max_tokens_in_paged_kv_cache",
            optional(count(1..=MAX_COUNT), "what `kv_cache_free_gpu_mem_fraction` allows"),
            |s| &mut s.max_tokens_in_paged_kv_cache,
            "Number of positions in the whole KV cache, in all layers, rounded down to blocks. If both limits are set, the \
             smaller one applies. Without prefix reuse no more than `max_num_requests` sequences of `max_seq_len` can use. More fit where [layers with a window](kv-cache.md#groups-of-layers) keep what they see.",
        ),
        knob(
            "kv_cache_free_gpu_mem_fraction",
            optional(fraction(), "0.9 on a GPU, 0.5 on the CPU"),
            |s| &mut s.kv_cache_free_mem_fraction,
            "Fraction of the memory left after loading the weights that the KV cache may use; on the CPU, of the \
             available host memory less what the caches of other instances have yet to fill. On a GPU it is filled, for \
             prefixes: the second model of a GPU has what the first one leaves. Without prefix reuse, and on the CPU \
             without `max_tokens_in_paged_kv_cache`, no more than what \
             `max_num_requests` sequences of `max_seq_len` tokens can use. The Batch Manager's default, 0.9, is meant \
             for GPU memory, which nothing else uses; host memory is shared with Triton, other models and the \
             system.",
        ),
        knob(
            "kv_cache_host_memory_bytes",
            integer(0..=1 << 45),
            |s| &mut s.kv_cache_host_memory_bytes,
            "Host memory, in bytes, for KV cache blocks that the cache gives up: they move there instead of being \
             forgotten, and come back when a request starts with their tokens (see [KV cache](kv-cache.md)). Snapshots \
             of [recurrent states](checkpoints.md#recurrent-states) move there as well, in a quarter of these bytes, \
             or in all of them if no layer has keys and values. Pinned memory where the model runs on a GPU. Needs \
             `enable_kv_cache_reuse`.",
        ),
        knob(
            "max_state_snapshots",
            optional(
                count(0..=MAX_STATE_SNAPSHOTS),
                "two for each of `max_num_requests`, in at most a quarter of the memory that the KV cache may use",
            ),
            |s| &mut s.max_state_snapshots,
            "Maximum number of snapshots of recurrent states, for models that [have them](checkpoints.md#recurrent-states). \
             A request goes on behind the longest prefix that has one. Each takes as many bytes as the states of a \
             sequence. With 0, prefixes are not reused.",
        ),
        knob(
            "state_snapshot_interval",
            count(0..=MAX_COUNT),
            |s| &mut s.state_snapshot_interval,
            "Number of tokens of a prompt after which its recurrent states are kept, besides those at its end and where \
             it diverges from earlier prompts; rounded up to whole blocks. 0: nowhere else.",
        ),
        knob(
            "kv_cache_file",
            optional(file(), "none"),
            |s| &mut s.kv_cache_file,
            "A file in which the KV cache is kept when the model is unloaded, up to `kv_cache_host_memory_bytes`, so \
             that conversations find their prefix after a restart. Readable by the server's user only; it holds the \
             tokens of requests. A file that was made from another checkpoint, or that is damaged, is replaced. \
             With several instances, the last one that is unloaded writes it. A relative path is resolved against \
             the model's folder in the repository; with `--model-control-mode=poll`, choose a file outside of the \
             repository.",
        ),
        knob(
            "lora_dir",
            optional(folder(), "none"),
            |s| &mut s.lora_dir,
            "A folder of LoRA adapters: each folder in it, as PEFT saves one or with TensorRT-LLM's `.npy` files, is an \
             adapter that requests name with `lora_name`. It is looked for when a request names it, and loaded again when its files change. A relative \
             path is resolved against the model's folder in the repository. See [Adapters](adapters.md).",
        ),
        knob(
            "lora_prefetch_dir",
            or_empty(folder()),
            |s| &mut s.lora_prefetch_dir,
            "A folder of LoRA adapters whose folders have numbers, which requests give in `lora_task_id`. An adapter is \
             read when a request names it, and not before. Otherwise as `lora_dir`.",
        ),
        knob(
            "lora_cache_max_adapter_size",
            count(1..=4096),
            |s| &mut s.lora_cache_max_adapter_size,
            "The largest rank of an adapter.",
        ),
        knob(
            "lora_cache_optimal_adapter_size",
            count(0..=4096),
            |s| &mut s.lora_cache_optimal_adapter_size,
            "The rank that pages are made for: a page of the memory for adapters holds an adapter of this rank in every \
             module, or one module of rank `lora_cache_max_adapter_size` if that is more. An adapter takes whole pages, \
             so a smaller number suits adapters that change few modules. 0 makes the smallest pages.",
        ),
        knob(
            "lora_cache_host_memory_bytes",
            integer(0..=1 << 45),
            |s| &mut s.lora_cache_host_memory_bytes,
            "Memory for adapters, in bytes, of which there are as many pages as fit. Those that no request in flight uses \
             are kept until others need their place. A request waits while requests with other adapters need all of it. \
             Shared by the instances of a model.",
        ),
        knob(
            "lora_cache_num_host_module_layer",
            integer(0..=1 << 45),
            |s| &mut s.lora_cache_num_host_module_layer,
            "The same as a number of rows: weights of rank 1 for the narrowest module of a layer. Unless it is 0, it is \
             taken instead of `lora_cache_host_memory_bytes`.",
        ),
        knob(
            "lora_cache_num_device_module_layer",
            integer(0..=1 << 45),
            |s| &mut s.lora_cache_num_device_module_layer,
            "The most memory for the adapters of one step, as a number of such rows. Requests whose adapters do not fit \
             wait; requests without adapters do not. 0: all of the memory; on a GPU, what \
             `lora_cache_gpu_memory_fraction` allows.",
        ),
        knob(
            "lora_cache_gpu_memory_fraction",
            fraction(),
            |s| &mut s.lora_cache_gpu_memory_fraction,
            "Fraction of the GPU memory left after loading the weights that the adapters of one step may use. Without \
             effect on the CPU, or if `lora_cache_num_device_module_layer` is not 0.",
        ),
        knob(
            "lora_cache_num_put_workers",
            count(1..=MAX_THREADS),
            |s| &mut s.lora_cache_num_put_workers,
            "The most threads that look for adapters and check their files, for models on CPUs and on GPUs. A file that is slow to \
             read holds up one of them. TensorRT-LLM's Triton backend has 4 too, its Batch Manager 1.",
        ),
        knob(
            "lora_cache_num_ensure_workers",
            count(1..=MAX_THREADS),
            |s| &mut s.lora_cache_num_ensure_workers,
            "The most threads that read the weights of adapters, for models on CPUs and on GPUs. TensorRT-LLM's Triton backend has 4 \
             too, its Batch Manager 1.",
        ),
        knob(
            "max_num_image_tokens",
            optional(count(0..=MAX_COUNT), "as many as take `max_num_tokens` patches, if the checkpoint has a vision tower that is read, on one CPU rank"),
            |s| &mut s.max_num_image_tokens,
            "Maximum number of tokens of [images](images.md) that are encoded in one step. A smaller number delays generating requests \
             less. One image may have more. `0` loads the model for text only, without its vision tower.",
        ),
        knob(
            "max_cached_image_tokens",
            optional(count(1..=MAX_COUNT), "8192, or `max_num_image_tokens` if larger"),
            |s| &mut s.max_cached_image_tokens,
            "Maximum number of tokens of images whose encoded rows are kept for the chunks of their prompts and for later requests \
             with the same image. An image with more tokens is refused.",
        ),
        knob(
            "max_image_tokens",
            count(1..=MAX_IMAGE_TOKENS),
            |s| &mut s.max_image_tokens,
            "Maximum number of tokens of one image, in models that take images of any size. A larger image is made \
             smaller, as the checkpoint's processor does above its own maximum. The vision tower reserves memory for \
             so many tokens.",
        ),
        knob(
            "max_images",
            count(1..=MAX_IMAGES),
            |s| &mut s.max_images,
            "Maximum number of images in one request.",
        ),
        knob(
            "max_image_bytes",
            integer(1..=1 << 30),
            |s| &mut s.max_image_bytes,
            "Maximum size of all encoded images of one request together, in bytes.",
        ),
        knob(
            "max_image_pixels",
            integer(1..=1 << 30),
            |s| &mut s.max_image_pixels,
            "Maximum number of pixels of all images of one request together. It is checked before an image is decoded, which takes \
             about 20 bytes a pixel, one image at a time.",
        ),
        knob(
            "image_memory_bytes",
            integer(1..=1 << 40),
            |s| &mut s.image_memory_bytes,
            "Memory for the decoded images of all requests of an instance, in bytes. Images that no request needs are kept for later \
             ones as long as there is room. A request for which there is none is refused, to be sent again.",
        ),
        knob(
            "logits_memory_bytes",
            integer(0..=1 << 40),
            |s| &mut s.logits_memory_bytes,
            "Memory for the logits and log-probabilities in the responses of all requests in flight of an \
             instance, in bytes. A request that could exceed what is left is rejected. For each sequence or beam, \
             `return_context_logits` and `return_generation_logits` need 4 bytes per token of the vocabulary for \
             each token of the prompt or of `max_tokens`; `logprobs` needs about 150 bytes (more for long tokens) \
             for each token of `max_tokens` and each token listed in its place. `0` rejects all such requests.",
        ),
        knob(
            "logits_post_processor_library",
            optional(file(), "none"),
            |s| &mut s.logits_post_processor_library,
            "A shared library with custom logits post-processors, which runs inside the server process: see \
             [Logits post-processors](logits-processors.md#your-own-post-processors). A relative path is resolved against the model's \
             folder in the repository.",
        ),
        knob(
            "exclude_input_in_output",
            flag(),
            |s| &mut s.exclude_input_in_output,
            "Whether the full response omits the prompt, unless the request sets it. Streamed responses never \
             repeat the prompt.",
        ),
        knob(
            "stream_interval",
            count(1..=MAX_COUNT),
            |s| &mut s.stream_interval,
            "Number of tokens in each response of a stream, unless the request sets it. A larger number means \
             fewer responses for the server and its clients to process, each of which takes them longer than a step \
             does.",
        ),
        knob(
            "client_compatibility",
            choice(ClientCompatibility::NAMES),
            |s| &mut s.client_compatibility,
            "The backend whose clients the model is compatible with: inputs, shapes, `finish_reason`, outputs \
             sent only on request, token counts. [Clients of other backends](clients.md#a-model-that-answers-as-another-backend-does) lists the differences.",
        ),
        knob(
            "default_max_tokens",
            count(1..=MAX_COUNT),
            |s| &mut s.default_max_tokens,
            "`max_tokens` of a request that does not set it.",
        ),
        knob(
            "use_generation_config",
            flag(),
            |s| &mut s.use_generation_config,
            "Whether requests take the options that they do not give from the checkpoint's `generation_config.json`: \
             `max_new_tokens` and `repetition_penalty`, and with `do_sample: true` also `temperature`, `top_k`, \
             `top_p`, `min_p` and `typical_p`. A beam search takes only the first two.",
        ),
        knob(
            "add_special_tokens",
            flag(),
            |s| &mut s.add_special_tokens,
            "Whether the tokenizer adds its special tokens (such as beginning-of-text) to a prompt. A prompt \
             rendered by the chat template includes its own.",
        ),
        knob(
            "skip_special_tokens",
            flag(),
            |s| &mut s.skip_special_tokens,
            "Whether special tokens are omitted from the returned text.",
        ),
        knob(
            "reasoning_parser",
            choice(ReplyParser::REASONING),
            |s| &mut s.reasoning_parser,
            "How the reasoning of a reply is recognised, which `reasoning_content` returns: see \
             [Chat](chat.md#the-parts-of-a-reply). `auto` goes by the marks that the chat template has.",
        ),
        knob(
            "tool_call_parser",
            choice(ReplyParser::TOOL_CALLS),
            |s| &mut s.tool_call_parser,
            "How calls of functions in a reply are recognised, which `tool_calls` returns: see \
             [Chat](chat.md#the-parts-of-a-reply). `auto` goes by the marks that the chat template has.",
        ),
        knob(
            "gpu_device_ids",
            gpus(),
            |s| &mut s.gpu_device_ids,
            "The GPU of instances with `kind: KIND_CPU` or `KIND_MODEL`, as the driver counts them: for servers that \
             were built without GPU support, and refuse `KIND_GPU`. Instances with `kind: KIND_GPU` run on the GPU \
             that Triton gives them. With `tensor_parallel_size` above 1, the GPUs of all ranks, one for each; by \
             default that of the instance and those that follow it. On several hosts each as the driver of its host counts \
             them (see [Ranks](ranks.md#several-hosts)).",
        ),
        knob(
            "deterministic",
            flag(),
            |s| &mut s.deterministic,
            "On a GPU, whether matrix products of a row never depend on how many rows a step has. Without it, the last \
             bits of a logit may differ with the load of the server. On a CPU they never do; there it has \
             `tensor_parallel_size` 1 give the bits of 2 and 4 (see [Ranks](ranks.md#the-same-bits)).",
        ),
        knob(
            "cuda_graph_mode",
            flag(),
            |s| &mut s.cuda_graph_mode,
            "Whether a GPU computes generation steps as CUDA graphs: recorded once for a number of requests, and \
             launched as a whole from then on, which takes the host less time than launching each operation. The bits \
             are the same.",
        ),
        knob(
            "cuda_graph_cache_size",
            count(0..=4096),
            |s| &mut s.cuda_graph_cache_size,
            "CUDA graphs that an instance keeps, at most; 0 has the effect of `cuda_graph_mode: false`. There are up \
             to two for each number of requests up to 8, each multiple of 8 up to 64, of 16 up to 256, and of 64 \
             beyond. A graph takes a little device memory.",
        ),
        knob(
            "tensor_parallel_size",
            count(1..=MAX_RANKS),
            |s| &mut s.tensor_parallel_size,
            "Number of processes that compute the model together on this host's CPUs or GPUs, each with its part of the \
             weights and of the KV cache: see [Ranks](ranks.md). Not yet with `kv_cache_file`.",
        ),
        knob(
            "pipeline_parallel_size",
            count(1..=MAX_RANKS),
            |s| &mut s.pipeline_parallel_size,
            "Number of stages that the model's layers are cut into, each computed by `tensor_parallel_size` processes: \
             see [Ranks](ranks.md). No more than the model has layers, and at most 16 processes in all. With \
             `enable_trt_overlap`, one stage computes a step while another one computes the step before. Not yet with \
             `kv_cache_file`.",
        ),
        knob(
            "rank_transport",
            choice(RankTransportKind::NAMES),
            |s| &mut s.rank_transport,
            "With `tensor_parallel_size` or `pipeline_parallel_size`: `processes` has the server start the other ranks on its \
             host; with `mpi` they are the processes that `mpirun` has started beside the server, on any host: see \
             [Ranks](ranks.md#several-hosts).",
        ),
        knob(
            "rank_cpus",
            rank_cpus(),
            |s| &mut s.rank_cpus,
            "The CPUs of the ranks of a host. With `auto` a rank has those of a node of the memory (NUMA), or a share of them, where \
             the server may use several nodes. With lists, as Linux writes them, rank 0 has the first one, and so on. `any` leaves \
             the choice to the system. See [Ranks](ranks.md#memory-of-several-nodes).",
        ),
        knob(
            "rank_timeout_seconds",
            count(1..=MAX_RANK_SECONDS),
            |s| &mut s.rank_timeout_seconds,
            "With `tensor_parallel_size` or `pipeline_parallel_size`: how long the processes wait for each other within a step. Then the requests in \
             flight get an error, and the instance is not ready.",
        ),
        knob(
            "rank_load_timeout_seconds",
            count(1..=MAX_RANK_SECONDS),
            |s| &mut s.rank_load_timeout_seconds,
            "With `tensor_parallel_size` or `pipeline_parallel_size`: how long the processes wait until all of them have \
             loaded their weights.",
        ),
        knob(
            "num_threads",
            optional(num_threads(), "the CPUs available to the process"),
            |s| &mut s.num_threads,
            "Number of CPU threads per step, including Triton's calling thread. The default respects the CPU \
             affinity of the process and the CPU quota of its container. Instances and models of one server that \
             have more threads than that in total take turns to compute.",
        ),
        knob(
            "cpu_instruction_set",
            instruction_set(),
            |s| &mut s.cpu_instruction_set,
            "The CPU kernels. Each set gives the same text in every run; different sets may differ in the last \
             bits of a logit.",
        ).with_note(": the best set that the CPU supports"),
        knob(
            "stats_file",
            optional(file(), "none"),
            |s| &mut s.stats_file,
            "Appends the statistics record of every step to this file, one JSON object per line. A relative path \
             is resolved against the server's working directory. Choose a file outside the model repository: with \
             `--model-control-mode=poll`, Triton reloads a model whenever anything in its folder changes.",
        ),
        knob(
            "runner",
            choice(RunnerKind::NAMES),
            |s| &mut s.runner,
            "What computes the tokens. `synthetic` needs no checkpoint: the next token is a hash of all tokens so \
             far, and a step takes `synthetic_step_us` plus `synthetic_token_us` for each of its tokens. For load \
             tests and capacity planning.",
        ),
        knob(
            "synthetic_vocab_size",
            integer(2..=1 << 24),
            |s| &mut s.synthetic_vocab_size,
            "Vocabulary size of the synthetic runner.",
        ),
        knob(
            "synthetic_step_us",
            microseconds(),
            |s| &mut s.synthetic_step_us,
            "Duration of each step of the synthetic runner, in microseconds.",
        ),
        knob(
            "synthetic_token_us",
            microseconds(),
            |s| &mut s.synthetic_token_us,
            "Duration that each token adds to a step of the synthetic runner, in microseconds.",
        ),
        knob(
            "synthetic_fail_after",
            optional(count(0..=MAX_COUNT), "never"),
            |s| &mut s.synthetic_fail_after,
            "Number of steps after which the synthetic runner fails permanently: for testing how clients and \
             monitoring handle a failed model instance.",
        ),
        knob(
            "synthetic_gate",
            optional(file(), "none"),
            |s| &mut s.synthetic_gate,
            "While this file contains a number, the synthetic runner stops after that many steps in total and \
             waits: for tests that need a request to be still running. A relative path is resolved against the \
             model's folder in the repository.",
        ),
    ]
}

impl Knob {
    /// Sets the parameter from its text. Returns None if the text is not an accepted value.
    pub(super) fn set(&self, settings: &mut Settings, text: &str) -> Option<()> {
        (self.set)(settings, text)
    }

    /// Appends a note to the default in the reference.
    fn with_note(mut self, note: &str) -> Self {
        self.default += note;
        self
    }
}

/// A knob that sets a field of [`Settings`]. Its default is the field's default.
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
    use inflight_base::LoadError;

    /// For every knob: accepted values, rejected values.
    const CASES: &[(&str, &[&str], &[&str])] = &[
        (
            "gpt_model_path",
            &["/models/x", "x"],
            &["", "${gpt_model_path}"],
        ),
        ("tokenizer_dir", &["/models/x"], &[""]),
        (
            "task",
            &["generate", "embed", "classify", "score"],
            &["embedding", ""],
        ),
        ("pooling", &["last", "mean", "cls"], &["max", ""]),
        ("normalize", &["true", "false"], &["l2", ""]),
        (
            "classifier_from_token",
            &[r#"["no", "yes"]"#, r#"["0","1"]"#],
            &["", "no, yes", r#"["yes"]"#, r#"["a", "a"]"#, r#"["", "a"]"#],
        ),
        ("is_original_qwen3_reranker", &["true", "false"], &["yes"]),
        (
            "gpt_model_type",
            &["V1", "inflight_batching", "inflight_fused_batching"],
            &["V2", ""],
        ),
        ("enable_trt_overlap", &["true"], &["2"]),
        (
            "speculation",
            &[
                "none",
                "draft_input_ids",
                "PROMPT_LOOKUP",
                "draft_model",
                "eagle3",
                "mtp",
            ],
            &["medusa", "true", ""],
        ),
        (
            "draft_model_path",
            &["../draft/1", "/models/draft"],
            &["", "${dir}"],
        ),
        ("max_draft_tokens", &["1", "64"], &["0", "65"]),
        ("enable_adaptive_drafts", &["true", "false"], &["maybe"]),
        ("prompt_lookup_min", &["1", "32"], &["0", "33"]),
        ("prompt_lookup_max", &["1", "32"], &["0", "33"]),
        (
            "context_chunking_policy",
            &["first_come_first_served", "equal_progress"],
            &["fair"],
        ),
        ("kv_cache_type", &["paged", "contiguous"], &["disabled"]),
        ("kv_cache_dtype", &["auto", "bf16", "int8", "fp8"], &["fp4"]),
        (
            "weight_only_precision",
            &["auto", "int8", "INT4", "fp8"],
            &["fp4", ""],
        ),
        ("weight_only_group_size", &["32", "128"], &["0", "16", "48"]),
        ("fp8_activations", &["true"], &["yes"]),
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
            "enable_sink_token_shift",
            &["true", "false"],
            &["2", "cache"],
        ),
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
        (
            "drain_timeout_seconds",
            &["0", "30", "86400"],
            &["", "-1", "1.5", "86401"],
        ),
        ("allow_iterative_oldest", &["true", "False"], &["yes", "1"]),
        ("max_rank_restarts", &["0", "16"], &["", "-1", "17"]),
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
            "kv_cache_host_memory_bytes",
            &["0", "35184372088832"],
            &["-1", "1e9", "35184372088833"],
        ),
        ("max_state_snapshots", &["0", "4096"], &["-1", "4097"]),
        ("state_snapshot_interval", &["0", "512"], &["-1", "all"]),
        (
            "kv_cache_file",
            &["/var/cache/stories.kv", "stories.kv"],
            &["", "${file}"],
        ),
        ("lora_dir", &["/srv/adapters", "adapters"], &["", "${dir}"]),
        ("lora_prefetch_dir", &["/srv/adapters", ""], &["${dir}"]),
        (
            "lora_cache_max_adapter_size",
            &["1", "64", "4096"],
            &["0", "4097"],
        ),
        (
            "lora_cache_optimal_adapter_size",
            &["0", "8", "4096"],
            &["-1", "4097"],
        ),
        (
            "lora_cache_num_host_module_layer",
            &["0", "35184372088832"],
            &["-1", "35184372088833"],
        ),
        (
            "lora_cache_num_device_module_layer",
            &["0", "35184372088832"],
            &["-1", "35184372088833"],
        ),
        (
            "lora_cache_gpu_memory_fraction",
            &["0.05", "1"],
            &["0", "1.1", "nan"],
        ),
        ("lora_cache_num_put_workers", &["1", "1024"], &["0", "1025"]),
        (
            "lora_cache_num_ensure_workers",
            &["1", "1024"],
            &["0", "1025"],
        ),
        (
            "lora_cache_host_memory_bytes",
            &["0", "35184372088832"],
            &["-1", "1e9", "35184372088833"],
        ),
        ("max_num_image_tokens", &["0", "2147483647"], &["-1", "all"]),
        ("max_cached_image_tokens", &["1"], &["0", ""]),
        ("max_image_tokens", &["1", "16384"], &["0", "16385"]),
        ("max_images", &["1", "1024"], &["0", "1025"]),
        ("max_image_bytes", &["1", "1073741824"], &["0", "1e6"]),
        ("max_image_pixels", &["1", "1073741824"], &["0", "1e6"]),
        (
            "image_memory_bytes",
            &["1", "1099511627776"],
            &["0", "1099511627777"],
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
        ("use_generation_config", &["true"], &["auto"]),
        (
            "reasoning_parser",
            &["auto", "none", "Qwen3"],
            &["", "think"],
        ),
        (
            "tool_call_parser",
            &["auto", "none", "hermes"],
            &["", "json"],
        ),
        (
            "gpu_device_ids",
            &["0", "7", "", "0,1", "3, 2"],
            &["-1", "0,", "1024"],
        ),
        ("deterministic", &["true"], &["2"]),
        ("cuda_graph_mode", &["false"], &["2"]),
        ("cuda_graph_cache_size", &["0", "4096"], &["-1", "4097"]),
        ("tensor_parallel_size", &["1", "16"], &["0", "17", "auto"]),
        ("pipeline_parallel_size", &["1", "16"], &["0", "17", "auto"]),
        ("rank_transport", &["processes", "MPI"], &["shm", ""]),
        (
            "rank_cpus",
            &["auto", "any", "0-3;4,6", "0|1"],
            &["", "0;", "3-1", "1024", "none"],
        ),
        ("rank_timeout_seconds", &["1", "86400"], &["0", "86401"]),
        (
            "rank_load_timeout_seconds",
            &["1", "86400"],
            &["0", "86401"],
        ),
        ("num_threads", &["1", "1024"], &["0", "1025"]),
        (
            "cpu_instruction_set",
            &["auto", "avx2", "portable", "avx512_bf16", "amx_bf16"],
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
            let (min, max) = range.split_once(" to ").expect("two numbers");
            let [min, max] = [min, max].map(|n| n.parse::<i64>().expect("a number"));
            num_ranges += 1;
            for (value, is_good) in [
                (min - 1, false),
                (min, true),
                (max, true),
                (max + 1, false),
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
