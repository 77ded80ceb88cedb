//! Parses the `parameters` block of a config.pbtxt into [`Settings`].

use crate::foreign_parameters::{Foreign, foreign};
use crate::knobs::{Knob, knobs};
use crate::settings::Settings;
use inflight_base::{LoadError, nearest_name};

impl Settings {
    /// Parses the `parameters` of a config.pbtxt. Skips parameters of TensorRT-LLM's backend that have no effect here,
    /// see `ignored_parameters`.
    ///
    /// # Errors
    /// All unknown keys, each with the nearest known key or this backend's name for it, and all values outside their
    /// range.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, LoadError> {
        let knobs = knobs();
        let mut settings = Self::default();
        let mut errors = Vec::new();
        for (key, value) in parameters {
            match knobs.iter().find(|knob| knob.key == key) {
                Some(knob) => {
                    if knob.set(&mut settings, value.trim()).is_none() {
                        errors.push(bad_value(knob, value));
                    }
                }
                None if is_of_batch_strategy(key) => {}
                None => errors.extend(not_ours(&knobs, key, value)),
            }
        }
        LoadError::combine(errors).map(|()| settings)
    }
}

/// Whether a parameter is for the library that forms Triton's batches: Triton's name for its path, the parameter of
/// Triton's own example, and the parameters of users' libraries.
pub(super) fn is_of_batch_strategy(key: &str) -> bool {
    matches!(key, "TRITON_BATCH_STRATEGY_PATH" | "MAX_BATCH_VOLUME_BYTES")
        || key.starts_with("batch_strategy_")
}

fn bad_value(knob: &Knob, value: &str) -> LoadError {
    let meant = match intended_name(knob, value) {
        Some(name) => format!("; did you mean '{name}'?"),
        None => String::new(),
    };
    LoadError::Knob {
        key: knob.key.to_owned(),
        value: value.to_owned(),
        expected: format!("{}{meant}", knob.expected),
    }
}

/// The accepted name that the Batch Manager spells as `value`, for example `kMAX_UTILIZATION` or `InflightBatching`.
fn intended_name<'k>(knob: &'k Knob, value: &str) -> Option<&'k str> {
    let plain = |name: &str| name.replace(['_', '-', ' '], "").to_ascii_lowercase();
    let value = plain(value.trim());
    let without_k = value.strip_prefix('k').unwrap_or(&value);
    let mut names = knob.expected.split('\'').skip(1).step_by(2);
    names.find(|name| [value.as_str(), without_k].contains(&plain(name).as_str()))
}

/// The parameters of other backends among `keys` that are ignored, each with the reason.
pub(super) fn ignored_parameters<'a>(
    keys: impl IntoIterator<Item = &'a str>,
) -> impl Iterator<Item = (&'a str, &'static str)> {
    keys.into_iter()
        .filter_map(|key| Some((key, why_ignored(key)?)))
}

/// Why a parameter of another backend is ignored. None if it is not.
fn why_ignored(key: &str) -> Option<&'static str> {
    match foreign(key)? {
        Foreign::NoEffect(why) => Some(why),
        // Those with a value that asks for something are an error.
        Foreign::RenamedTo(_) | Foreign::Refused { .. } => None,
    }
}

/// The error about a parameter that this backend does not have. None if it is ignored.
fn not_ours(knobs: &[Knob], key: &str, value: &str) -> Option<LoadError> {
    let reason = match foreign(key) {
        None => {
            return Some(LoadError::UnknownKnob {
                key: key.to_owned(),
                nearest: nearest_name(key, knobs.iter().map(|knob| knob.key)).map(str::to_owned),
            });
        }
        Some(Foreign::NoEffect(_)) => return None,
        Some(Foreign::RenamedTo(ours)) => format!("write '{ours}' instead"),
        Some(refused) => format!("is '{}': {}", value.trim(), refused.refusal(value)?),
    };
    Some(LoadError::ForeignKnob {
        key: key.to_owned(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_parameters_give_the_defaults() {
        assert_eq!(Settings::parse([]).expect("no errors"), Settings::default());
    }

    #[test]
    fn rejects_an_unknown_key_and_suggests_the_nearest() {
        let error = Settings::parse([("max_num_token", "8")]).expect_err("no such key");
        assert_eq!(
            error.to_string(),
            "unknown parameter 'max_num_token'; did you mean 'max_num_tokens'?"
        );
    }

    #[test]
    fn ignores_parameters_of_other_backends_with_a_reason() {
        let parameters = [
            ("gpu_weights_percent", "all weights are in the memory"),
            (
                "lora_cache_num_copy_streams",
                "read adapters into host memory",
            ),
            ("FORCE_CPU_ONLY_INPUT_TENSORS", "host memory"),
        ];
        let keys = parameters.map(|(key, _)| key);
        let given = [(keys[0], "0.5"), (keys[1], "64"), (keys[2], "no")];
        assert_eq!(
            Settings::parse(given).expect("no errors"),
            Settings::default()
        );
        let ignored: Vec<_> =
            ignored_parameters(keys.into_iter().chain(["max_num_tokens", "x"])).collect();
        assert_eq!(ignored.len(), 3);
        for ((key, why), (expected, words)) in ignored.iter().zip(parameters) {
            assert!(*key == expected && why.contains(words), "{key}: {why}");
        }
    }

    #[test]
    fn refuses_parameters_of_other_backends_that_ask_for_another_model() {
        for (key, value, instead) in [
            ("encoder_model_path", "/models/t5/encoder", "take a decoder"),
            ("encoder_engine_dir", "/models/t5", "take a decoder"),
            (
                "medusa_choices",
                "[[0], [0, 0], [1]]",
                "'speculation' instead",
            ),
            ("eagle_choices", "[[0]]", "'speculation' instead"),
            ("decoding_mode", "medusa", "'speculation' instead"),
            ("decodingMode", "Eagle", "'speculation' instead"),
        ] {
            let error = Settings::parse([(key, value)]).expect_err(key).to_string();
            assert!(
                error.contains(&format!("'{key}'"))
                    && error.contains(&format!("is '{value}'"))
                    && error.contains(instead),
                "{error}"
            );
        }
    }

    #[test]
    fn leaves_out_parameters_of_other_backends_that_ask_for_nothing() {
        for (key, value) in [
            ("encoder_model_path", ""),
            ("encoder_model_path", "${encoder_engine_dir}"),
            ("medusa_choices", "${medusa_choices}"),
            ("eagle_choices", "[]"),
            ("decoding_mode", "top_k_top_p"),
            ("decodingMode", "BeamSearch"),
        ] {
            let settings = Settings::parse([(key, value)]);
            assert_eq!(settings.expect(key), Settings::default());
            assert_eq!(ignored_parameters([key]).count(), 0);
        }
    }

    #[test]
    fn leaves_the_parameters_of_a_batch_strategy_to_it() {
        let keys = [
            "TRITON_BATCH_STRATEGY_PATH",
            "MAX_BATCH_VOLUME_BYTES",
            "batch_strategy_x",
        ];
        let settings = Settings::parse(keys.map(|key| (key, "any")));
        assert_eq!(settings.expect("no errors"), Settings::default());
        let error = Settings::parse([("batch_strategies", "x")]).expect_err("no such key");
        assert!(error.to_string().contains("unknown parameter"), "{error}");
    }

    #[test]
    fn suggests_our_names_for_the_batch_managers() {
        for (key, ours) in [
            ("maxTokens", "'max_tokens_in_paged_kv_cache'"),
            ("freeGpuMemoryFraction", "'kv_cache_free_gpu_mem_fraction'"),
            ("enableBlockReuse", "'enable_kv_cache_reuse'"),
            ("maxBeamWidth", "'max_beam_width'"),
            ("trtEnginePath", "'gpt_model_path'"),
        ] {
            let error = Settings::parse([(key, "1")]).expect_err("not ours");
            assert!(
                error.to_string().contains(&format!("write {ours}")),
                "{error}"
            );
        }
        for (key, value, ours) in [
            (
                "gpt_model_type",
                "InflightFusedBatching",
                "inflight_fused_batching",
            ),
            ("gpt_model_type", "InflightBatching", "inflight_batching"),
            (
                "batch_scheduler_policy",
                "kMAX_UTILIZATION",
                "max_utilization",
            ),
            (
                "batch_scheduler_policy",
                "GuaranteedNoEvict",
                "guaranteed_no_evict",
            ),
            (
                "context_chunking_policy",
                "kEQUAL_PROGRESS",
                "equal_progress",
            ),
        ] {
            let error = Settings::parse([(key, value)]).expect_err("not our spelling");
            let error = error.to_string();
            assert!(
                error.ends_with(&format!("did you mean '{ours}'?")),
                "{error}"
            );
        }
    }

    #[test]
    fn reports_all_unknown_keys_and_bad_values_together() {
        let parameters = [
            ("max_num_token", "8"),
            ("max_seq_len", "1"),
            ("tokens_per_block", "32"),
            ("maxTokens", "100"),
            ("num_threads", "many"),
        ];
        let error = Settings::parse(parameters).expect_err("four errors");
        assert!(
            matches!(&error, LoadError::Several(errors) if errors.len() == 4),
            "{error}"
        );
        let error = error.to_string();
        for words in [
            "4 errors: (1) unknown parameter 'max_num_token'; did you mean",
            "(2) parameter 'max_seq_len': '1' is not",
            "(3) parameter 'maxTokens' belongs to another backend: write",
            "(4) parameter 'num_threads': 'many' is not",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }
}
