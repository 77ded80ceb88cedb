//! From a config.pbtxt to the engine's limits, by the backend's own way.

use std::path::Path;

use serde_json::Value;
use triton_inflight::config::{AutoComplete, ModelConfig, RunnerKind};
use triton_inflight::engine::EngineConfig;
use triton_inflight::manager::sizing::{ConfiguredModel, engine_config, open_checkpoint};

use crate::cost::CostModel;
use crate::{Result, pbtxt};

/// The version whose folder holds the checkpoint.
const VERSION: u64 = 1;

/// What a config.pbtxt asks for.
#[derive(Clone, Debug)]
pub struct Model {
    /// The engine's limits.
    pub engine: EngineConfig,
    /// Requests that Triton hands over to the backend, at most.
    pub num_slots: usize,
    /// How long a step takes, where the configuration says: that of the synthetic runner.
    pub cost: Option<CostModel>,
}

impl Model {
    /// Reads a config.pbtxt in its model's folder. The KV cache is sized as for a machine with
    /// `available_bytes` of free memory, of which a checkpoint's weights take their part; `None`: memory
    /// does not limit it.
    ///
    /// # Errors
    /// What the backend would refuse, and what the simulator does not know.
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
        // Without a tokenizer: whether requests bring text or tokens makes no difference here.
        let config = ModelConfig::complete(&given, false).unwrap_or(given);
        if config.pointer("/sequence_batching/oldest").is_some() {
            return Err(
                "sequence_batching { oldest } splits batches as it happens; the simulator \
                        knows direct, which every step carries all requests of"
                    .into(),
            );
        }
        let mut config = ModelConfig::parse(&config, AutoComplete::Enabled)?;
        let checkpoint = open_checkpoint(&mut config, folder, VERSION)?;
        let model = ConfiguredModel {
            settings: &config.settings,
            checkpoint: checkpoint.as_ref(),
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

/// One instance has one engine; how Triton spreads requests over several is not known here.
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
    use triton_inflight::base::{Blocks, Tokens};
    use triton_inflight::engine::CapacityPolicy;

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
    fn the_knobs_mean_what_they_mean_to_the_backend() {
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
    fn the_cache_is_sized_for_the_machine_that_is_named() {
        let blocks = |bytes| {
            model("", bytes)
                .expect("a good configuration")
                .engine
                .num_blocks
        };
        // Half of it, in blocks of 32 positions of 8 bytes.
        assert_eq!(blocks(Some(2 * 150 * 32 * 8)), Blocks(150));
        assert_eq!(blocks(None), Blocks(64 * 4096 / 32));
    }

    #[test]
    fn what_cannot_be_simulated_is_refused() {
        for (text, expected) in [
            (
                "max_batch_sise: 4",
                "line 1, column 1: a model configuration has no field",
            ),
            ("instance_group { count: 2 }", "2 instances"),
            (
                "sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: \
                 3600000000 oldest {} }",
                "the simulator knows direct",
            ),
            (
                "parameters { key: 'max_seq_len' value { string_value: '1' } }",
                "max_seq_len",
            ),
        ] {
            let error = model(text, None).expect_err(text).to_string();
            assert!(
                error.contains(expected),
                "'{error}' does not say '{expected}'"
            );
        }
    }
}
