//! Warnings at load: settings that are valid, but hardly what the user meant.

use std::path::Path;

use inflight_config::Settings;
use inflight_engine::{BlockReuse, EngineConfig};

/// The configuration of an instance.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The backend's parameters.
    pub settings: &'a Settings,
    /// The engine's configuration that they lead to.
    pub engine: &'a EngineConfig,
    /// Whether any layer's attention window is shorter than the longest sequence.
    pub has_windows: bool,
    /// Cores that the process may use.
    pub num_cores: usize,
    /// The model's folder in the repository, with links resolved.
    pub folder: &'a Path,
    /// The folder of the statistics file, with links resolved.
    pub stats_folder: Option<&'a Path>,
}

/// The warnings, each with the way out.
pub fn advice(setting: &Setting<'_>) -> Vec<String> {
    let Setting {
        settings,
        engine,
        has_windows,
        num_cores,
        folder,
        stats_folder,
    } = *setting;
    let mut advice = Vec::new();
    let num_sinks = settings.sink_token_length;
    if num_sinks > 0 && !has_windows {
        advice.push(format!(
            "sink_token_length is {num_sinks} and has no effect: every layer sees all of max_seq_len = {} positions; \
             set max_attention_window_size below it, or leave sink_token_length out",
            engine.max_seq_len
        ));
    }
    if settings.enable_sink_token_shift && (num_sinks == 0 || !has_windows) {
        advice.push(
            "enable_sink_token_shift is true and has no effect: no layer has both a window and sinks; set \
             max_attention_window_size and sink_token_length, or leave enable_sink_token_shift out"
                .to_owned(),
        );
    }
    advice.extend(unused_kv_limit(settings, engine));
    if engine.num_micro_batches > 1 && engine.max_num_requests < 2 {
        advice.push(format!(
            "enable_trt_overlap is true and max_num_requests is {}: a request takes part in every second step, and \
             none in the others; set enable_trt_overlap to false",
            engine.max_num_requests
        ));
    }
    if engine.plan_ahead && engine.speculation.is_some() {
        advice.push(
            "enable_trt_overlap is true and has no effect while a request with drafts is in flight, which are chosen when \
             the tokens of the last step are known; set speculation to none, or enable_trt_overlap to false"
                .to_owned(),
        );
    }
    if let Some(num_threads) = settings.num_threads
        && num_threads.get() > num_cores
    {
        advice.push(format!(
            "num_threads is {num_threads} and the process may use {num_cores} cores: threads wait for each other's \
             cores in every step; set num_threads to at most {num_cores}, or leave it out"
        ));
    }
    if let Some(stats_folder) = stats_folder
        && stats_folder.starts_with(folder)
    {
        advice.push(format!(
            "stats_file is in {}, a folder of the model: with --model-control-mode=poll, Triton loads the model again \
             after every step; write it elsewhere",
            stats_folder.display()
        ));
    }
    advice
}

/// The warning that a limit of the KV cache allows more than sequences in flight can use, which is all that the cache
/// has.
fn unused_kv_limit(settings: &Settings, engine: &EngineConfig) -> Option<String> {
    let max_texts = u64::from(engine.max_num_requests) * u64::from(engine.max_beam_width);
    let of_one = u64::from(engine.max_seq_len.blocks_ceil(engine.block_size).0);
    let usable = max_texts * of_one;
    let num_groups = engine.groups.num_groups() as u64;
    if u64::from(engine.num_blocks.0) != usable * num_groups {
        return None;
    }
    let block_size = engine.block_size.tokens();
    let usable_tokens = usable * u64::from(block_size.0);
    let given = settings.max_tokens_in_paged_kv_cache;
    let keep_prefixes = match settings.enable_kv_cache_reuse {
        Some(false) => {
            "set enable_kv_cache_reuse to true to keep prefixes in the rest, or leave it out"
        }
        // Its model has no prefixes to keep.
        _ => "leave it out",
    };
    let (limit, remedy) = match (given, settings.kv_cache_free_mem_fraction) {
        (Some(given), _) if u64::from(given / block_size.0) > usable => (
            format!("max_tokens_in_paged_kv_cache is {given}"),
            keep_prefixes,
        ),
        (None, Some(fraction)) if engine.reuse == BlockReuse::Off => (
            format!("kv_cache_free_gpu_mem_fraction is {fraction}"),
            keep_prefixes,
        ),
        (None, Some(fraction)) => (
            format!("kv_cache_free_gpu_mem_fraction is {fraction}"),
            "set max_tokens_in_paged_kv_cache to keep more prefixes in host memory, or leave it out",
        ),
        _ => return None,
    };
    Some(format!(
        "{limit} and allows more than {usable_tokens} tokens in the KV cache, which is all that max_num_requests = {} sequences \
         of max_seq_len = {} can use, and all that it has; {remedy}",
        engine.max_num_requests, engine.max_seq_len
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::{BlockSize, Blocks, Tokens};
    use inflight_engine::Speculation;

    fn given(parameters: &[(&str, &str)], change: impl FnOnce(&mut Setting<'_>)) -> Vec<String> {
        let settings = Settings::parse(parameters.iter().copied()).expect("good parameters");
        let engine = EngineConfig {
            max_num_requests: 1,
            num_micro_batches: if settings.enable_trt_overlap { 2 } else { 1 },
            ..EngineConfig::default()
        };
        let mut setting = Setting {
            settings: &settings,
            engine: &engine,
            has_windows: false,
            num_cores: 2,
            folder: Path::new("/repository/model"),
            stats_folder: None,
        };
        change(&mut setting);
        advice(&setting)
    }

    #[test]
    fn what_has_a_meaning_is_served_without_a_word() {
        let none = Vec::<String>::new();
        assert_eq!(given(&[], |_| {}), none);
        assert_eq!(given(&[("num_threads", "2")], |_| {}), none);
        let sinks = [("sink_token_length", "4")];
        assert_eq!(given(&sinks, |setting| setting.has_windows = true), none);
        let elsewhere = |setting: &mut Setting<'_>| {
            setting.stats_folder = Some(Path::new("/repository/model-2"));
        };
        assert_eq!(given(&[], elsewhere), none);
    }

    #[test]
    fn a_limit_of_the_cache_that_another_one_undercuts_is_named() {
        // Two sequences of 1000 tokens in blocks of 32.
        let undercut = |num_blocks, reuse| {
            move |setting: &mut Setting<'_>| {
                setting.engine = Box::leak(Box::new(EngineConfig {
                    max_num_requests: 2,
                    max_seq_len: Tokens(1000),
                    block_size: BlockSize::new(32).expect("not zero"),
                    num_blocks: Blocks(num_blocks),
                    reuse,
                    ..EngineConfig::default()
                }));
            }
        };
        let tokens = [("max_tokens_in_paged_kv_cache", "4096")];
        let off = ("enable_kv_cache_reuse", "false");
        let advice = given(&[tokens[0], off], undercut(64, BlockReuse::Off));
        let [advice] = &*advice else {
            panic!("{advice:?}")
        };
        for words in [
            "is 4096",
            "2048 tokens",
            "max_num_requests = 2",
            "max_seq_len = 1000",
            "enable_kv_cache_reuse to true",
        ] {
            assert!(advice.contains(words), "{advice}");
        }
        let fraction = [("kv_cache_free_gpu_mem_fraction", "0.5")];
        for (reuse, words) in [
            (BlockReuse::Off, "enable_kv_cache_reuse to true"),
            (
                BlockReuse::WholeBlocks,
                "max_tokens_in_paged_kv_cache to keep more",
            ),
        ] {
            let advice = given(&[fraction[0], off], undercut(64, reuse));
            assert!(advice.iter().any(|it| it.contains(words)), "{advice:?}");
        }
        // A model whose prefixes are not reused, by no choice of the user.
        for limit in [tokens, fraction] {
            let advice = given(&limit, undercut(64, BlockReuse::Off)).concat();
            assert!(advice.ends_with("leave it out"), "{advice}");
            assert!(!advice.contains("enable_kv_cache_reuse"), "{advice}");
        }
        // The limit that was given is the one that acts, or none was.
        let none = Vec::<String>::new();
        assert_eq!(given(&fraction, undercut(63, BlockReuse::Off)), none);
        assert_eq!(given(&tokens, undercut(128, BlockReuse::WholeBlocks)), none);
        assert_eq!(
            given(
                &[("max_tokens_in_paged_kv_cache", "2048")],
                undercut(64, BlockReuse::Off)
            ),
            none
        );
        assert_eq!(given(&[], undercut(64, BlockReuse::Off)), none);
    }

    #[test]
    fn what_has_none_is_named_with_its_value_and_the_way_out() {
        for (parameter, words) in [
            (
                ("sink_token_length", "4"),
                ["sink_token_length is 4", "max_attention_window_size"],
            ),
            (
                ("enable_sink_token_shift", "true"),
                ["enable_sink_token_shift is true", "sink_token_length"],
            ),
            (
                ("enable_trt_overlap", "true"),
                ["max_num_requests is 1", "enable_trt_overlap to false"],
            ),
            (("num_threads", "1024"), ["is 1024", "at most 2"]),
        ] {
            let advice = given(&[parameter], |_| {});
            let [advice] = &advice[..] else {
                panic!("{advice:?}");
            };
            for word in words {
                assert!(advice.contains(word), "{advice}");
            }
        }
        let ahead = EngineConfig {
            plan_ahead: true,
            ..EngineConfig::default()
        };
        let drafted = EngineConfig {
            speculation: Some(Speculation {
                max_draft_tokens: 4,
                prompt_lookup: None,
                has_draft_model: false,
                recomputes_drafts: false,
            }),
            ..ahead.clone()
        };
        let overlap = [("enable_trt_overlap", "true")];
        for (engine, num_warnings) in [(ahead, 0), (drafted, 1)] {
            let mut advice = Vec::new();
            given(&overlap, |setting| {
                let setting = Setting {
                    engine: &engine,
                    ..*setting
                };
                advice = super::advice(&setting);
            });
            assert_eq!(advice.len(), num_warnings, "{advice:?}");
            let is_named = |text: &String| text.contains("set speculation to none");
            assert!(advice.iter().all(is_named), "{advice:?}");
        }
        let inside = |setting: &mut Setting<'_>| {
            setting.stats_folder = Some(Path::new("/repository/model/1"));
        };
        let advice = given(&[], inside);
        assert!(
            advice[0].contains("--model-control-mode=poll"),
            "{advice:?}"
        );
    }
}
