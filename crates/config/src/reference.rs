//! The reference of all parameters: topics of knobs, as Markdown for `docs/src/configuration.md`.

use std::fmt::Write as _;

use super::knobs::{Knob, knobs};

/// Parameters that are read together, under one heading.
struct Topic {
    title: &'static str,
    keys: &'static [&'static str],
}

/// Every parameter is in one topic.
const TOPICS: &[Topic] = &[
    Topic {
        title: "Model and task",
        keys: &[
            "gpt_model_path",
            "tokenizer_dir",
            "task",
            "pooling",
            "normalize",
            "classifier_from_token",
            "is_original_qwen3_reranker",
        ],
    },
    Topic {
        title: "Batching",
        keys: &[
            "gpt_model_type",
            "batch_scheduler_policy",
            "max_num_requests",
            "max_num_tokens",
            "max_seq_len",
            "max_beam_width",
            "enable_chunked_context",
            "context_chunking_policy",
            "enable_trt_overlap",
        ],
    },
    Topic {
        title: "KV cache",
        keys: &[
            "kv_cache_type",
            "kv_cache_dtype",
            "tokens_per_block",
            "max_tokens_in_paged_kv_cache",
            "kv_cache_free_gpu_mem_fraction",
            "enable_kv_cache_reuse",
            "enable_partial_reuse",
            "kv_cache_host_memory_bytes",
            "max_state_snapshots",
            "state_snapshot_interval",
            "kv_cache_file",
            "max_attention_window_size",
            "sink_token_length",
            "enable_sink_token_shift",
        ],
    },
    Topic {
        title: "Weights",
        keys: &[
            "weight_only_precision",
            "weight_only_group_size",
            "fp8_activations",
            "weight_cache_dir",
            "weight_cache_mode",
        ],
    },
    Topic {
        title: "Guessing tokens ahead",
        keys: &[
            "speculation",
            "draft_model_path",
            "max_draft_tokens",
            "enable_adaptive_drafts",
            "prompt_lookup_min",
            "prompt_lookup_max",
        ],
    },
    Topic {
        title: "Adapters",
        keys: &[
            "lora_dir",
            "lora_prefetch_dir",
            "lora_cache_max_adapter_size",
            "lora_cache_optimal_adapter_size",
            "lora_cache_host_memory_bytes",
            "lora_cache_num_host_module_layer",
            "lora_cache_num_device_module_layer",
            "lora_cache_gpu_memory_fraction",
            "lora_cache_num_put_workers",
            "lora_cache_num_ensure_workers",
        ],
    },
    Topic {
        title: "Requests and responses",
        keys: &[
            "default_max_tokens",
            "use_generation_config",
            "exclude_input_in_output",
            "stream_interval",
            "add_special_tokens",
            "skip_special_tokens",
            "reasoning_parser",
            "tool_call_parser",
            "client_compatibility",
            "logits_memory_bytes",
            "logits_post_processor_library",
        ],
    },
    Topic {
        title: "Images",
        keys: &[
            "max_num_image_tokens",
            "max_cached_image_tokens",
            "max_image_tokens",
            "max_images",
            "max_image_bytes",
            "max_image_pixels",
            "image_memory_bytes",
        ],
    },
    Topic {
        title: "CPUs and GPUs",
        keys: &[
            "num_threads",
            "cpu_instruction_set",
            "gpu_device_ids",
            "deterministic",
            "cuda_graph_mode",
            "cuda_graph_cache_size",
        ],
    },
    Topic {
        title: "Ranks and stages",
        keys: &[
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "rank_transport",
            "rank_cpus",
            "rank_timeout_seconds",
            "rank_load_timeout_seconds",
            "max_rank_restarts",
        ],
    },
    Topic {
        title: "Serving",
        keys: &[
            "drain_timeout_seconds",
            "allow_iterative_oldest",
            "stats_file",
        ],
    },
    Topic {
        title: "Load tests",
        keys: &[
            "runner",
            "synthetic_vocab_size",
            "synthetic_step_us",
            "synthetic_token_us",
            "synthetic_fail_after",
            "synthetic_gate",
        ],
    },
];

/// The longest line of the reference, unless a single word is longer.
const MAX_LINE_CHARS: usize = 120;

/// The reference of all parameters, in Markdown: a heading for each topic and each parameter.
pub fn reference() -> String {
    let knobs = knobs();
    let mut page = String::new();
    // Writing to a String cannot fail.
    for topic in TOPICS {
        let links = topic.keys.iter().map(|key| format!("[`{key}`](#{key})"));
        let links = links.collect::<Vec<_>>().join(", ");
        let item = format!("**[{}](#{})**: {links}", topic.title, slug(topic.title));
        let _ = writeln!(page, "- {}", wrapped(&item, "  "));
    }
    for topic in TOPICS {
        let _ = writeln!(page, "\n## {}", topic.title);
        let in_topic = |key: &&str| knobs.iter().find(|knob| knob.key == *key);
        for knob in topic.keys.iter().filter_map(in_topic) {
            let Knob {
                key,
                expected,
                default,
                doc,
                ..
            } = knob;
            let _ = writeln!(page, "\n### `{key}`\n");
            let _ = writeln!(page, "- {}", wrapped(&format!("Value: {expected}"), "  "));
            let _ = writeln!(
                page,
                "- {}\n",
                wrapped(&format!("Default: {default}"), "  ")
            );
            let _ = writeln!(page, "{}", wrapped(doc, ""));
        }
    }
    page
}

/// The fragment by which a heading is linked to.
fn slug(heading: &str) -> String {
    heading.to_lowercase().replace(' ', "-")
}

/// `text` in lines, each after the first one behind `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    // The first line stands behind the mark of a list.
    let mut num_chars = indent.len();
    for (i, word) in text.split_whitespace().enumerate() {
        // At the start of a line these would begin a list.
        let begins_list = matches!(word, "+" | "-" | "*") || is_number_of_item(word);
        let word_chars = word.chars().count();
        if num_chars + 1 + word_chars > MAX_LINE_CHARS && !begins_list && i > 0 {
            lines.push('\n');
            lines.push_str(indent);
            num_chars = indent.len();
        } else if i > 0 {
            lines.push(' ');
            num_chars += 1;
        }
        lines.push_str(word);
        num_chars += word_chars;
    }
    lines
}

fn is_number_of_item(word: &str) -> bool {
    word.strip_suffix(['.', ')'])
        .is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_has_one_topic() {
        let mut listed: Vec<&str> = TOPICS
            .iter()
            .flat_map(|topic| topic.keys)
            .copied()
            .collect();
        let mut known: Vec<&str> = knobs().iter().map(|knob| knob.key).collect();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known);
    }

    #[test]
    fn every_parameter_has_a_heading_and_a_link_to_it() {
        let page = reference();
        for knob in knobs() {
            let key = knob.key;
            assert!(page.contains(&format!("\n### `{key}`\n")), "{key}");
            assert!(page.contains(&format!("[`{key}`](#{key})")), "{key}");
        }
    }

    #[test]
    fn lines_are_short_and_none_begins_a_list_by_chance() {
        let text = format!("{} + 1. {}", "a ".repeat(59), "b ".repeat(70));
        let lines = wrapped(&text, "  ");
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        for line in &lines {
            assert!(line.len() <= MAX_LINE_CHARS + " + 1.".len(), "{line}");
        }
        assert!(lines[0].ends_with("a + 1."), "{lines:?}");
        assert!(lines[1].starts_with("  b "), "{lines:?}");
        assert_eq!(wrapped("a  b\nc", ""), "a b c");
    }
}
