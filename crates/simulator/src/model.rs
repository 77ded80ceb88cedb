//! The engine's limits from a config.pbtxt, derived with the backend's own code.

use std::path::Path;

use inflight_config::{AutoComplete, ModelConfig, RunnerKind};
use inflight_engine::EngineConfig;
use inflight_manager::sizing::{ConfiguredModel, engine_config, open_model_source};
use serde_json::Value;

use crate::cost::CostModel;
use crate::{Result, pbtxt};

/// The version folder that holds the checkpoint.
const VERSION: u64 = 1;

/// The settings of a config.pbtxt.
#[derive(Clone, Debug)]
pub struct Model {
    /// The engine's limits.
    pub engine: EngineConfig,
    /// Maximum number of requests that Triton passes to the backend at a time.
    pub num_slots: usize,
    /// The cost of a step as configured for the synthetic runner; `None` for other runners.
    pub cost: Option<CostModel>,
}

impl Model {
    /// Reads the config.pbtxt of a model folder. The KV cache is sized for a machine with `available_bytes`
    /// of free memory, minus a checkpoint's weights; with `None`, memory does not limit it.
    ///
    /// # Errors
    /// What the backend would reject, and what the simulator does not support.
    pub fn load(path: &Path, available_bytes: Option<u64>) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
        let folder = std::path::absolute(path)?;
        let folder = folder.parent().unwrap_or(Path::new("/"));
        Self::parse(&text, folder, available_bytes)
            .map_err(|error| format!("{name}: {error}").into())
    }

    fn parse(text: &str, folder: &Path, available_bytes: Option<u64>) -> Result<Self> {
        let given = pbtxt::parse(text)?;
        check_instances(&given)?;
        // Without a tokenizer: text and token inputs simulate the same.
        let config = ModelConfig::complete(&given, false).unwrap_or(given);
        if config.pointer("/sequence_batching/oldest").is_some() {
            return Err(
                "sequence_batching { oldest } splits batches unpredictably; the simulator supports \
                        direct, which puts every request into every step"
                    .into(),
            );
        }
        let mut config = ModelConfig::parse(&config, AutoComplete::Enabled)?;
        let source = open_model_source(&mut config, folder, VERSION)?;
        let model = ConfiguredModel {
            settings: &config.settings,
            source: source.as_ref(),
            gpu: None,
        };
        let weight_bytes = model.num_weight_bytes()?;
        let left = available_bytes.map(|bytes| bytes.saturating_sub(weight_bytes));
        let engine = engine_config(&config, &model, left)?;
        let settings = &config.settings;
        let cost = (settings.runner == RunnerKind::Synthetic).then(|| CostModel {
            step_us: settings.synthetic_step_us,
            token_us: settings.synthetic_token_us,
            ..CostModel::default()
        });
        Ok(Self {
            engine,
            num_slots: config.max_batch_size as usize,
            cost,
        })
    }
}

/// One instance has one engine; how Triton distributes requests over several is not modelled.
fn check_instances(config: &Value) -> Result<()> {
    let groups = config.get("instance_group").and_then(Value::as_array);
    let count = |group: &Value| group.get("count").and_then(Value::as_u64).unwrap_or(1);
    let num_instances: u64 = groups.into_iter().flatten().map(count).sum();
    if num_instances > 1 {
        return Err(format!(
            "instance_group has {num_instances} instances; simulate one of them, with its share of the \
             load"
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use inflight_base::{Blocks, Tokens};
    use inflight_engine::CapacityPolicy;

    use super::*;

    fn model(text: &str, available_bytes: Option<u64>) -> Result<Model> {
        let text =
            format!("{text} parameters {{ key: 'runner' value {{ string_value: 'synthetic' }} }}");
        Model::parse(&text, Path::new("/models/m"), available_bytes)
    }

    fn parameter(key: &str, value: &str) -> String {
        format!("parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}")
    }

    #[test]
    fn reads_the_parameters_as_the_backend_does() {
        let text = [
            "max_batch_size: 12".to_owned(),
            parameter("max_num_requests", "8"),
            parameter("max_seq_len", "100"),
            parameter("tokens_per_block", "16"),
            parameter("max_tokens_in_paged_kv_cache", "200"),
            parameter("batch_scheduler_policy", "max_utilization"),
            parameter("synthetic_step_us", "2500"),
            parameter("synthetic_token_us", "12.5"),
        ]
        .join("\n");
        let Model {
            engine,
            num_slots,
            cost,
        } = model(&text, None).expect("a good configuration");
        assert_eq!((engine.max_num_requests, num_slots), (8, 12));
        assert_eq!(
            (engine.max_seq_len, engine.num_blocks),
            (Tokens(100), Blocks(12))
        );
        assert_eq!(engine.policy, CapacityPolicy::MaxUtilization);
        let cost = cost.expect("the synthetic runner's");
        assert_eq!((cost.step_us, cost.token_us), (2500.0, 12.5));
    }

    #[test]
    fn the_cache_is_sized_for_the_given_memory() {
        let blocks = |bytes| {
            model("", bytes)
                .expect("a good configuration")
                .engine
                .num_blocks
        };
        // Half of the memory, in blocks of 32 positions of 8 bytes.
        assert_eq!(blocks(Some(2 * 150 * 32 * 8)), Blocks(150));
        assert_eq!(blocks(None), Blocks(64 * 4096 / 32));
    }

    #[test]
    fn rejects_what_it_cannot_simulate() {
        for (text, expected) in [
            (
                "max_batch_sise: 4",
                "line 1, column 1: a model configuration has no field",
            ),
            ("instance_group { count: 2 }", "2 instances"),
            (
                "sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: \
                 3600000000 oldest {} }",
                "the simulator supports direct",
            ),
            (
                "parameters { key: 'max_seq_len' value { string_value: '1' } }",
                "max_seq_len",
            ),
        ] {
            let error = model(text, None).expect_err(text).to_string();
            assert!(
                error.contains(expected),
                "'{error}' does not contain '{expected}'"
            );
        }
    }
}
