//! The statistics record of a step, with the field names of TensorRT-LLM's Batch Manager.
//!
//! A record describes the step as it was planned: who took part, and the blocks that were held. In lockstep (V1)
//! there is one record for each iteration, a batch from its start to its end. The engine has no clock: whoever
//! writes a record adds its `Timestamp`.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::{
    AdapterUsage, BatchingScheme, DraftTotals, EngineConfig, KvUsage, LockstepTotals, ReuseTotals,
};
use inflight_base::{Blocks, SequenceId, Tokens};

/// The statistics record of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepStats {
    /// Counts steps in which something was active, from 1; in lockstep, batches.
    pub iteration_counter: u64,
    /// How requests become batches. Lockstep has other fields.
    pub scheme: BatchingScheme,
    /// Requests that had not ended: scheduled, paused and waiting.
    pub num_active: usize,
    /// The most requests that can be active.
    pub max_num_active: u32,
    /// Requests in the step.
    pub num_scheduled: usize,
    /// Requests in context phase.
    pub num_context: usize,
    /// Requests in generation phase.
    pub num_generation: usize,
    /// Context tokens in the step.
    pub num_context_tokens: Tokens,
    /// In lockstep, the totals of the batch, without the tokens that this step generates.
    pub lockstep: Option<LockstepTotals>,
    /// The micro-batch of the step.
    pub micro_batch: usize,
    /// Paused requests.
    pub num_paused: usize,
    /// Active requests that were not in the step, paused ones included.
    pub num_waiting: usize,
    /// The KV cache during the step.
    pub kv: KvUsage,
    /// Slots of recurrent states, one for each beam of each sequence that may run; 0 unless there are snapshots.
    pub num_state_slots: u32,
    /// Slots of sequences that run.
    pub num_state_slots_used: u32,
    /// Whether the KV cache has blocks that are worth showing.
    pub paged_kv: bool,
    /// The totals of block reuse, this step included.
    pub reuse: ReuseTotals,
    /// The totals of the requests that had ended before the step.
    pub ended: Totals,
    /// The totals of drafts before the step and, once it has landed, with it; `None` without speculation.
    pub drafts: Option<DraftTotals>,
    /// The pages of adapters during the step; `None` if the model has no adapters.
    pub adapters: Option<AdapterUsage>,
}

/// The totals of requests that have ended and were not cancelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The number of requests.
    pub num_requests: u64,
    /// The tokens of their prompts.
    pub num_input_tokens: u64,
    /// The tokens that they generated.
    pub num_output_tokens: u64,
}

impl Totals {
    fn plus(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests + other.num_requests,
            num_input_tokens: self.num_input_tokens + other.num_input_tokens,
            num_output_tokens: self.num_output_tokens + other.num_output_tokens,
        }
    }
}

/// The stage of a request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RequestStage {
    /// The request's sequence.
    #[serde(serialize_with = "id_as_number")]
    pub id: SequenceId,
    /// Its stage.
    pub stage: Stage,
    /// Its tokens in the step: 0 if it is in another micro-batch, or if the token budget was spent.
    pub tokens: u32,
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// The request runs in context phase.
    Context,
    /// The request runs in generation phase.
    Generation,
    /// The request gave its blocks back, and waits to resume.
    Paused,
    /// The request has not started.
    Waiting,
}

fn id_as_number<S: Serializer>(id: &SequenceId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(id.0)
}

impl StepStats {
    /// The record of an engine that has not planned a step.
    pub fn before_the_first(config: &EngineConfig, kv: KvUsage) -> Self {
        Self {
            iteration_counter: 0,
            scheme: config.scheme,
            num_active: 0,
            max_num_active: config.max_num_active,
            num_scheduled: 0,
            num_context: 0,
            num_generation: 0,
            num_context_tokens: Tokens::ZERO,
            lockstep: LockstepTotals::zero(config.scheme),
            micro_batch: 0,
            num_paused: 0,
            num_waiting: 0,
            kv,
            num_state_slots: config.num_state_slots(),
            num_state_slots_used: 0,
            paged_kv: config.paged_kv,
            reuse: ReuseTotals::default(),
            ended: Totals::default(),
            drafts: config.speculation.map(|_| DraftTotals::default()),
            adapters: config.num_adapter_pages.map(|num_pages| AdapterUsage {
                num_pages,
                ..AdapterUsage::default()
            }),
        }
    }

    /// The record after this step, if nothing is active any more.
    pub fn idle(&self, kv: KvUsage) -> Self {
        Self {
            num_active: 0,
            num_scheduled: 0,
            num_context: 0,
            num_generation: 0,
            num_context_tokens: Tokens::ZERO,
            lockstep: self.lockstep.map(|_| LockstepTotals::default()),
            num_paused: 0,
            num_waiting: 0,
            kv,
            num_state_slots_used: 0,
            adapters: self.adapters.map(|it| AdapterUsage {
                num_pages: it.num_pages,
                ..AdapterUsage::default()
            }),
            ..self.clone()
        }
    }

    /// The record when the engine is gone.
    pub fn gone(&self) -> Self {
        Self {
            max_num_active: 0,
            num_state_slots: 0,
            adapters: self.adapters.map(|_| AdapterUsage::default()),
            ..self.idle(KvUsage {
                num_blocks: Blocks::ZERO,
                num_used: Blocks::ZERO,
                num_host_blocks: Blocks::ZERO,
                num_host_used: Blocks::ZERO,
                num_snapshots: 0,
                num_snapshots_used: 0,
                num_host_snapshots: 0,
                num_host_snapshots_used: 0,
                ..self.kv
            })
        }
    }

    /// The records of several engines as one: counts are summed. `None` if there is no record.
    pub fn together<'a>(records: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        records.into_iter().cloned().reduce(|a, b| Self {
            scheme: a.scheme,
            lockstep: match (a.lockstep, b.lockstep) {
                (Some(a), Some(b)) => Some(a.plus(b)),
                (one, other) => one.or(other),
            },
            micro_batch: a.micro_batch,
            paged_kv: a.paged_kv,
            reuse: a.reuse.plus(b.reuse),
            ended: a.ended.plus(b.ended),
            drafts: match (a.drafts, b.drafts) {
                (Some(a), Some(b)) => Some(a.plus(b)),
                (one, other) => one.or(other),
            },
            adapters: match (a.adapters, b.adapters) {
                (Some(a), Some(b)) => Some(a.plus(b)),
                (one, other) => one.or(other),
            },
            iteration_counter: a.iteration_counter + b.iteration_counter,
            num_active: a.num_active + b.num_active,
            max_num_active: a.max_num_active.saturating_add(b.max_num_active),
            num_scheduled: a.num_scheduled + b.num_scheduled,
            num_context: a.num_context + b.num_context,
            num_generation: a.num_generation + b.num_generation,
            num_context_tokens: a.num_context_tokens + b.num_context_tokens,
            num_paused: a.num_paused + b.num_paused,
            num_waiting: a.num_waiting + b.num_waiting,
            num_state_slots: a.num_state_slots + b.num_state_slots,
            num_state_slots_used: a.num_state_slots_used + b.num_state_slots_used,
            kv: KvUsage {
                num_blocks: a.kv.num_blocks + b.kv.num_blocks,
                num_used: a.kv.num_used + b.kv.num_used,
                num_host_blocks: a.kv.num_host_blocks + b.kv.num_host_blocks,
                num_host_used: a.kv.num_host_used + b.kv.num_host_used,
                num_snapshots: a.kv.num_snapshots + b.kv.num_snapshots,
                num_snapshots_used: a.kv.num_snapshots_used + b.kv.num_snapshots_used,
                num_host_snapshots: a.kv.num_host_snapshots + b.kv.num_host_snapshots,
                num_host_snapshots_used: a.kv.num_host_snapshots_used
                    + b.kv.num_host_snapshots_used,
                block_size: a.kv.block_size,
            },
        })
    }

    /// The record as JSON. `timestamp` is local time, `%m-%d-%Y %H:%M:%S`.
    pub fn with_timestamp<'a>(&'a self, timestamp: &'a str) -> impl Serialize + 'a {
        TimestampedStats {
            timestamp,
            stats: self,
        }
    }
}

/// A [`StepStats`] and the time when it is written.
struct TimestampedStats<'a> {
    timestamp: &'a str,
    stats: &'a StepStats,
}

impl Serialize for TimestampedStats<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stats = self.stats;
        let kv = &stats.kv;
        let mut record = serializer.serialize_map(None)?;
        record.serialize_entry("Timestamp", self.timestamp)?;
        let mut put = |name: &str, value: u64| record.serialize_entry(name, &value);
        put("Iteration Counter", stats.iteration_counter)?;
        put("Active Request Count", stats.num_active as u64)?;
        put("Max Request Count", u64::from(stats.max_num_active))?;
        if stats.paged_kv {
            put("Max KV cache blocks", u64::from(kv.num_blocks.0))?;
            put("Free KV cache blocks", u64::from(kv.num_free().0))?;
            put("Used KV cache blocks", u64::from(kv.num_used.0))?;
            put("Reused KV cache blocks", stats.reuse.num_reused_blocks)?;
            put(
                "Tokens per KV cache block",
                u64::from(kv.block_size.tokens().0),
            )?;
            if kv.num_host_blocks > Blocks::ZERO {
                put("Max host KV cache blocks", u64::from(kv.num_host_blocks.0))?;
                put("Used host KV cache blocks", u64::from(kv.num_host_used.0))?;
                put(
                    "Offloaded KV cache blocks",
                    stats.reuse.num_offloaded_blocks,
                )?;
                put(
                    "Onboarded KV cache blocks",
                    stats.reuse.num_onboarded_blocks,
                )?;
            }
        }
        if kv.num_snapshots > 0 {
            put("Max state slots", stats.num_state_slots.into())?;
            put("Used state slots", stats.num_state_slots_used.into())?;
            put("Max state snapshots", kv.num_snapshots.into())?;
            put("Used state snapshots", kv.num_snapshots_used.into())?;
            put("Saved states", stats.reuse.num_saved_states)?;
            put("Restored states", stats.reuse.num_restored_states)?;
            if kv.num_host_snapshots > 0 {
                put("Max host state snapshots", kv.num_host_snapshots.into())?;
                put(
                    "Used host state snapshots",
                    kv.num_host_snapshots_used.into(),
                )?;
                put("Offloaded states", stats.reuse.num_offloaded_states)?;
                put("Onboarded states", stats.reuse.num_onboarded_states)?;
            }
        }
        match stats.lockstep {
            Some(batch) => {
                put("Scheduled Requests", batch.num_requests)?;
                // All start together.
                put("Context Requests", batch.num_requests)?;
                put("Total Generation Tokens", batch.num_generated_tokens)?;
                put("Total Context Tokens", batch.num_context_tokens)?;
                put("Empty Generation Slots", batch.num_empty_slots)?;
            }
            None => {
                put("Scheduled Requests", stats.num_scheduled as u64)?;
                put("Context Requests", stats.num_context as u64)?;
                put("Generation Requests", stats.num_generation as u64)?;
                put(
                    "Total Context Tokens",
                    u64::from(stats.num_context_tokens.0),
                )?;
                put("MicroBatch ID", stats.micro_batch as u64)?;
            }
        }
        put("Paused Requests", stats.num_paused as u64)?;
        put("Waiting Requests", stats.num_waiting as u64)?;
        put("Request count", stats.ended.num_requests)?;
        put("Total Input Tokens", stats.ended.num_input_tokens)?;
        put("Total Output Tokens", stats.ended.num_output_tokens)?;
        if let Some(drafts) = stats.drafts {
            put("Total Draft Tokens", drafts.num_drafted)?;
            put("Total Accepted Draft Tokens", drafts.num_accepted)?;
        }
        if let Some(adapters) = stats.adapters {
            put("Max LoRA pages", adapters.num_pages.into())?;
            put("Used LoRA pages", adapters.num_used.into())?;
            put("Running LoRA adapters", adapters.num_adapters.into())?;
            put("Waiting LoRA requests", adapters.num_waiting.into())?;
        }
        if stats.paged_kv {
            let fraction_used = f64::from(kv.num_used.0) / f64::from(kv.num_blocks.0);
            record.serialize_entry("Fraction used KV cache blocks", &fraction_used)?;
        }
        record.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::{BlockSize, Blocks};

    fn kv(num_used: u32) -> KvUsage {
        KvUsage {
            num_blocks: Blocks(32),
            num_used: Blocks(num_used),
            num_host_blocks: Blocks::ZERO,
            num_host_used: Blocks::ZERO,
            num_snapshots: 0,
            num_snapshots_used: 0,
            num_host_snapshots: 0,
            num_host_snapshots_used: 0,
            block_size: BlockSize::new(64).expect("not zero"),
        }
    }

    fn stats(config: &EngineConfig) -> StepStats {
        StepStats {
            iteration_counter: 66,
            num_active: 9,
            num_scheduled: 5,
            num_context: 2,
            num_generation: 3,
            num_context_tokens: Tokens(150),
            lockstep: config.scheme.is_lockstep().then_some(LockstepTotals {
                num_requests: 6,
                num_context_tokens: 170,
                num_generated_tokens: 40,
                num_empty_slots: 8,
            }),
            micro_batch: 1,
            num_paused: 1,
            num_waiting: 4,
            reuse: ReuseTotals {
                num_reused_blocks: 7,
                ..ReuseTotals::default()
            },
            ended: Totals {
                num_requests: 11,
                num_input_tokens: 1200,
                num_output_tokens: 340,
            },
            ..StepStats::before_the_first(config, kv(8))
        }
    }

    fn json(stats: &StepStats) -> String {
        serde_json::to_string(&stats.with_timestamp("09-26-2026 13:54:29"))
            .expect("numbers and a string")
    }

    #[test]
    fn a_record_has_the_batch_managers_field_names() {
        assert_eq!(
            json(&stats(&EngineConfig {
                max_num_active: 12,
                ..EngineConfig::default()
            })),
            concat!(
                r#"{"Timestamp":"09-26-2026 13:54:29","#,
                r#""Iteration Counter":66,"#,
                r#""Active Request Count":9,"#,
                r#""Max Request Count":12,"#,
                r#""Max KV cache blocks":32,"#,
                r#""Free KV cache blocks":24,"#,
                r#""Used KV cache blocks":8,"#,
                r#""Reused KV cache blocks":7,"#,
                r#""Tokens per KV cache block":64,"#,
                r#""Scheduled Requests":5,"#,
                r#""Context Requests":2,"#,
                r#""Generation Requests":3,"#,
                r#""Total Context Tokens":150,"#,
                r#""MicroBatch ID":1,"#,
                r#""Paused Requests":1,"#,
                r#""Waiting Requests":4,"#,
                r#""Request count":11,"#,
                r#""Total Input Tokens":1200,"#,
                r#""Total Output Tokens":340,"#,
                r#""Fraction used KV cache blocks":0.25}"#,
            )
        );
    }

    #[test]
    fn a_record_has_host_blocks_where_there_are_any() {
        let config = EngineConfig::default();
        let stats = stats(&config);
        assert!(!json(&stats).contains("host KV"));
        let with_host_blocks = StepStats {
            kv: KvUsage {
                num_host_blocks: Blocks(5),
                num_host_used: Blocks(4),
                ..stats.kv
            },
            reuse: ReuseTotals {
                num_offloaded_blocks: 3,
                num_onboarded_blocks: 2,
                ..stats.reuse
            },
            ..stats
        };
        let fields = concat!(
            r#""Max host KV cache blocks":5,"#,
            r#""Used host KV cache blocks":4,"#,
            r#""Offloaded KV cache blocks":3,"#,
            r#""Onboarded KV cache blocks":2,"#,
        );
        let json = json(&with_host_blocks);
        assert!(json.contains(fields), "{json}");
    }

    #[test]
    fn a_record_has_adapters_where_requests_may_name_some() {
        let config = EngineConfig::default();
        assert!(!json(&stats(&config)).contains("LoRA"));
        let config = EngineConfig {
            num_adapter_pages: Some(16),
            ..config
        };
        let pages = stats(&config).adapters.map(|it| it.num_pages);
        assert_eq!(pages, Some(16));
        let busy = StepStats {
            adapters: Some(AdapterUsage {
                num_pages: 16,
                num_used: 12,
                num_adapters: 3,
                num_waiting: 2,
            }),
            ..stats(&config)
        };
        let fields = concat!(
            r#""Max LoRA pages":16,"#,
            r#""Used LoRA pages":12,"#,
            r#""Running LoRA adapters":3,"#,
            r#""Waiting LoRA requests":2"#,
        );
        assert!(json(&busy).contains(fields), "{}", json(&busy));
        let both = StepStats::together([&busy, &busy]).expect("two records");
        assert_eq!(both.adapters.map(|it| it.num_used), Some(24));
        let idle = busy.idle(kv(0)).adapters.expect("it has pages");
        assert_eq!((idle.num_pages, idle.num_used), (16, 0));
    }

    #[test]
    fn a_record_of_lockstep_has_its_own_fields_and_a_contiguous_cache_none() {
        let config = EngineConfig {
            scheme: BatchingScheme::V1,
            paged_kv: false,
            max_num_active: 12,
            ..EngineConfig::default()
        };
        assert_eq!(
            json(&stats(&config)),
            concat!(
                r#"{"Timestamp":"09-26-2026 13:54:29","#,
                r#""Iteration Counter":66,"#,
                r#""Active Request Count":9,"#,
                r#""Max Request Count":12,"#,
                r#""Scheduled Requests":6,"#,
                r#""Context Requests":6,"#,
                r#""Total Generation Tokens":40,"#,
                r#""Total Context Tokens":170,"#,
                r#""Empty Generation Slots":8,"#,
                r#""Paused Requests":1,"#,
                r#""Waiting Requests":4,"#,
                r#""Request count":11,"#,
                r#""Total Input Tokens":1200,"#,
                r#""Total Output Tokens":340}"#,
            )
        );
    }

    #[test]
    fn two_engines_make_one_record_and_an_idle_one_keeps_its_limits() {
        let config = EngineConfig {
            max_num_active: 12,
            ..EngineConfig::default()
        };
        let before = StepStats::before_the_first(&config, kv(0));
        let one = StepStats {
            iteration_counter: 5,
            num_active: 3,
            num_scheduled: 2,
            kv: kv(6),
            ..before.clone()
        };
        let both = StepStats::together([&one, &before]).expect("two records");
        assert_eq!((both.num_active, both.max_num_active), (3, 24));
        assert_eq!(
            (both.kv.num_blocks, both.kv.num_used),
            (Blocks(64), Blocks(6))
        );
        assert_eq!(both.kv.block_size, kv(0).block_size);
        let idle = one.idle(kv(0));
        assert_eq!((idle.iteration_counter, idle.num_active), (5, 0));
        assert_eq!(idle.max_num_active, 12);
        assert_eq!(StepStats::together([]), None);
    }

    /// A record whose counts are `first` and the numbers behind it.
    fn counted(first: u32) -> StepStats {
        let n = |place| u64::from(first + place);
        StepStats {
            iteration_counter: n(0),
            num_active: first as usize + 1,
            max_num_active: first + 2,
            num_scheduled: first as usize + 3,
            num_context: first as usize + 4,
            num_generation: first as usize + 5,
            num_context_tokens: Tokens(first + 6),
            lockstep: Some(LockstepTotals {
                num_requests: n(7),
                num_context_tokens: n(8),
                num_generated_tokens: n(9),
                num_empty_slots: n(10),
            }),
            num_paused: first as usize + 11,
            num_waiting: first as usize + 12,
            kv: KvUsage {
                num_blocks: Blocks(first + 13),
                num_used: Blocks(first + 14),
                num_host_blocks: Blocks(first + 15),
                num_host_used: Blocks(first + 16),
                num_snapshots: first + 17,
                num_snapshots_used: first + 18,
                num_host_snapshots: first + 29,
                num_host_snapshots_used: first + 30,
                ..kv(0)
            },
            num_state_slots: first + 31,
            num_state_slots_used: first + 32,
            reuse: ReuseTotals {
                num_reused_blocks: n(19),
                ..ReuseTotals::default()
            },
            ended: Totals {
                num_requests: n(20),
                num_input_tokens: n(21),
                num_output_tokens: n(22),
            },
            drafts: Some(DraftTotals {
                num_drafted: n(23),
                num_accepted: n(24),
            }),
            adapters: Some(AdapterUsage {
                num_pages: first + 25,
                num_used: first + 26,
                num_adapters: first + 27,
                num_waiting: first + 28,
            }),
            ..StepStats::before_the_first(&EngineConfig::default(), kv(0))
        }
    }

    #[test]
    fn the_record_of_several_engines_has_the_sum_of_each_count() {
        let sum = StepStats {
            iteration_counter: 1100,
            num_active: 1102,
            max_num_active: 1104,
            num_scheduled: 1106,
            num_context: 1108,
            num_generation: 1110,
            num_context_tokens: Tokens(1112),
            lockstep: Some(LockstepTotals {
                num_requests: 1114,
                num_context_tokens: 1116,
                num_generated_tokens: 1118,
                num_empty_slots: 1120,
            }),
            num_paused: 1122,
            num_waiting: 1124,
            kv: KvUsage {
                num_blocks: Blocks(1126),
                num_used: Blocks(1128),
                num_host_blocks: Blocks(1130),
                num_host_used: Blocks(1132),
                num_snapshots: 1134,
                num_snapshots_used: 1136,
                num_host_snapshots: 1158,
                num_host_snapshots_used: 1160,
                ..kv(0)
            },
            num_state_slots: 1162,
            num_state_slots_used: 1164,
            reuse: ReuseTotals {
                num_reused_blocks: 1138,
                ..ReuseTotals::default()
            },
            ended: Totals {
                num_requests: 1140,
                num_input_tokens: 1142,
                num_output_tokens: 1144,
            },
            drafts: Some(DraftTotals {
                num_drafted: 1146,
                num_accepted: 1148,
            }),
            adapters: Some(AdapterUsage {
                num_pages: 1150,
                num_used: 1152,
                num_adapters: 1154,
                num_waiting: 1156,
            }),
            ..counted(0)
        };
        let both = StepStats::together([&counted(100), &counted(1000)]);
        assert_eq!(both, Some(sum));
    }

    #[test]
    fn an_engine_that_is_gone_leaves_its_totals_and_no_limits() {
        let gone = StepStats {
            num_active: 0,
            max_num_active: 0,
            num_scheduled: 0,
            num_context: 0,
            num_generation: 0,
            num_context_tokens: Tokens::ZERO,
            lockstep: Some(LockstepTotals::default()),
            num_paused: 0,
            num_waiting: 0,
            kv: KvUsage {
                num_blocks: Blocks::ZERO,
                ..kv(0)
            },
            num_state_slots: 0,
            num_state_slots_used: 0,
            adapters: Some(AdapterUsage::default()),
            ..counted(100)
        };
        assert_eq!(counted(100).gone(), gone);
    }

    #[test]
    fn only_lockstep_has_totals_of_its_batch() {
        let with = |scheme| EngineConfig {
            scheme,
            ..EngineConfig::default()
        };
        let lockstep = |scheme| StepStats::before_the_first(&with(scheme), kv(0)).lockstep;
        assert_eq!(
            lockstep(BatchingScheme::V1),
            Some(LockstepTotals::default())
        );
        assert_eq!(lockstep(BatchingScheme::InflightFused), None);
    }

    #[test]
    fn a_record_has_snapshots_where_sequences_have_states() {
        let stats = stats(&EngineConfig::default());
        assert!(!json(&stats).contains("state"));
        let with_snapshots = StepStats {
            kv: KvUsage {
                num_snapshots: 6,
                num_snapshots_used: 5,
                ..stats.kv
            },
            reuse: ReuseTotals {
                num_saved_states: 4,
                num_restored_states: 3,
                ..stats.reuse
            },
            num_state_slots: 8,
            num_state_slots_used: 7,
            ..stats
        };
        let fields = concat!(
            r#""Max state slots":8,"#,
            r#""Used state slots":7,"#,
            r#""Max state snapshots":6,"#,
            r#""Used state snapshots":5,"#,
            r#""Saved states":4,"#,
            r#""Restored states":3,"#,
        );
        let without_host_memory = json(&with_snapshots);
        assert!(
            without_host_memory.contains(fields),
            "{without_host_memory}"
        );
        assert!(!without_host_memory.contains("host state"));
        let with_host_memory = StepStats {
            kv: KvUsage {
                num_host_snapshots: 9,
                num_host_snapshots_used: 8,
                ..with_snapshots.kv
            },
            reuse: ReuseTotals {
                num_offloaded_states: 7,
                num_onboarded_states: 6,
                ..with_snapshots.reuse
            },
            ..with_snapshots
        };
        let fields = concat!(
            r#""Restored states":3,"#,
            r#""Max host state snapshots":9,"#,
            r#""Used host state snapshots":8,"#,
            r#""Offloaded states":7,"#,
            r#""Onboarded states":6,"#,
        );
        let json = json(&with_host_memory);
        assert!(json.contains(fields), "{json}");
    }
}
