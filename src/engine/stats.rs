//! The statistics record of a step, with the field names of TensorRT-LLM's Batch Manager.
//!
//! What a record counts is the step as it was planned: who took part, and the blocks held meanwhile. In lockstep
//! (V1) there is one record for each iteration, which is a batch from its start to its end.
//! The engine has no clock, so the `Timestamp` comes from whoever writes the record down.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::base::{Blocks, SequenceId, Tokens};
use crate::engine::sequence::Sequence;
use crate::engine::{
    BatchingScheme, DraftTotals, Engine, EngineConfig, KvUsage, LockstepTotals, Phase, ReuseTotals,
    Step,
};

/// The statistics record of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepStats {
    /// Counts the steps in which something was active, from 1; in lockstep, the batches.
    pub iteration_counter: u64,
    /// How requests become batches: lockstep has other fields.
    pub scheme: BatchingScheme,
    /// Requests that had not ended: scheduled, paused and waiting.
    pub num_active: usize,
    /// As many can be active at a time.
    pub max_num_active: u32,
    /// Requests in the step.
    pub num_scheduled: usize,
    /// Those of them in context phase.
    pub num_context: usize,
    /// Those of them in generation phase.
    pub num_generation: usize,
    /// Context tokens in the step.
    pub num_context_tokens: Tokens,
    /// In lockstep, what the batch has come to; before it has come back, without the step's own tokens.
    pub lockstep: Option<LockstepTotals>,
    /// Which half of the requests the step was of.
    pub micro_batch: usize,
    /// Requests that started, gave their blocks back, and wait to start again.
    pub num_paused: usize,
    /// Active requests that were not in the step, paused ones included.
    pub num_waiting: usize,
    /// The KV cache during the step.
    pub kv: KvUsage,
    /// Whether the KV cache has blocks that are worth showing.
    pub paged_kv: bool,
    /// What reuse has come to before and with this step.
    pub reuse: ReuseTotals,
    /// The requests that had ended before it.
    pub ended: Totals,
    /// What drafts have come to before it, and once it has landed with it; `None` where nothing is drafted.
    pub drafts: Option<DraftTotals>,
}

/// Requests that have ended by themselves, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// How many.
    pub num_requests: u64,
    /// Tokens of their prompts.
    pub num_input_tokens: u64,
    /// Tokens that they generated.
    pub num_output_tokens: u64,
}

impl Totals {
    pub(super) fn count(&mut self, sequence: &Sequence) {
        self.count_of(
            sequence.details.num_prompt_tokens,
            sequence.num_output_tokens(),
        );
    }

    /// Counts a sequence of so many tokens.
    pub(super) fn count_of(&mut self, num_input_tokens: Tokens, num_output_tokens: Tokens) {
        self.num_requests += 1;
        self.num_input_tokens += u64::from(num_input_tokens.0);
        self.num_output_tokens += u64::from(num_output_tokens.0);
    }

    fn and(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests + other.num_requests,
            num_input_tokens: self.num_input_tokens + other.num_input_tokens,
            num_output_tokens: self.num_output_tokens + other.num_output_tokens,
        }
    }
}

/// What a request did in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RequestStage {
    /// Who.
    #[serde(serialize_with = "id_as_number")]
    pub id: SequenceId,
    /// Where it was on its way.
    pub stage: Stage,
    /// Its tokens that the step computed: 0 if it was in another micro-batch, or if there were not
    /// enough tokens for everybody.
    pub tokens: u32,
}

/// Where a request is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// It runs, and its known tokens are computed.
    Context,
    /// It runs, a token each step.
    Generation,
    /// It has started, and waits for blocks.
    Paused,
    /// It has not started.
    Waiting,
}

impl Engine {
    /// Writes down the step that was decided just now.
    pub(super) fn record(&mut self, step: &Step) {
        self.stages.clear();
        if self.is_idle() {
            self.stats = None;
            return;
        }
        if self.config.record_requests {
            self.record_requests(step);
        }
        if !self.lockstep.is_running() || self.lockstep.is_new() {
            self.num_steps += 1;
        }
        let num_scheduled = step.num_requests();
        let num_active = self.num_active();
        let contexts = self.contexts.iter();
        let num_context_tokens: Tokens = contexts.map(|(_, share)| share.chunk).sum();
        let is_lockstep = self.config.scheme == BatchingScheme::V1;
        if self.lockstep.is_running() {
            let totals = &mut self.lockstep.totals;
            totals.num_context_tokens += u64::from(num_context_tokens.0);
            if !self.generating.is_empty() {
                let num_ended = self.num_ended() as u64;
                self.lockstep.totals.num_empty_slots += num_ended;
            }
        }
        let num_running = match is_lockstep {
            // Who waits for the rest of the batch is in it.
            true => self.running.len(),
            false => num_scheduled,
        };
        self.stats = Some(StepStats {
            iteration_counter: self.num_steps,
            scheme: self.config.scheme,
            num_active,
            max_num_active: self.config.max_num_active,
            num_scheduled,
            num_context: self.contexts.len(),
            num_generation: num_scheduled - self.contexts.len(),
            num_context_tokens,
            lockstep: is_lockstep.then_some(self.lockstep.totals),
            micro_batch: step.micro_batch(),
            num_paused: self.queue.num_paused(),
            num_waiting: num_active - num_running,
            kv: self.kv.usage(),
            paged_kv: self.config.paged_kv,
            reuse: self.kv.totals(),
            ended: self.totals,
            drafts: self.config.speculation.map(|_| self.drafts),
        });
    }

    fn record_requests(&mut self, step: &Step) {
        for &slot in &self.running {
            let sequence = &self.sequences[slot];
            let stage = match sequence.phase() {
                Phase::Context => Stage::Context,
                Phase::Generation => Stage::Generation,
            };
            self.stages.push(RequestStage {
                id: sequence.id,
                stage,
                tokens: 0,
            });
        }
        let paused = self.queue.paused_slots().map(|slot| RequestStage {
            id: self.sequences[slot].id,
            stage: Stage::Paused,
            tokens: 0,
        });
        self.stages.extend(paused);
        let waiting = self.queue.waiting_ids().map(|id| RequestStage {
            id,
            stage: Stage::Waiting,
            tokens: 0,
        });
        self.stages.extend(waiting);
        self.stages.sort_unstable_by_key(|stage| stage.id);
        for planned in step.sequences() {
            let place = self
                .stages
                .binary_search_by_key(&planned.id, |stage| stage.id);
            let place = place.expect("who is in a step runs");
            self.stages[place].tokens += planned.tokens.end - planned.tokens.start;
        }
    }
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
            lockstep: (config.scheme == BatchingScheme::V1).then(LockstepTotals::default),
            micro_batch: 0,
            num_paused: 0,
            num_waiting: 0,
            kv,
            paged_kv: config.paged_kv,
            reuse: ReuseTotals::default(),
            ended: Totals::default(),
            drafts: config.speculation.map(|_| DraftTotals::default()),
        }
    }

    /// What holds after this step if nothing is active any more.
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
            ..self.clone()
        }
    }

    /// What holds when the engine is gone.
    pub fn gone(&self) -> Self {
        Self {
            max_num_active: 0,
            ..self.idle(KvUsage {
                num_blocks: Blocks::ZERO,
                num_used: Blocks::ZERO,
                ..self.kv
            })
        }
    }

    /// Several engines' records as one: what is counted is summed. `None` for no record.
    pub fn together<'a>(records: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        records.into_iter().cloned().reduce(|a, b| Self {
            scheme: a.scheme,
            lockstep: match (a.lockstep, b.lockstep) {
                (Some(a), Some(b)) => Some(a.and(b)),
                (one, other) => one.or(other),
            },
            micro_batch: a.micro_batch,
            paged_kv: a.paged_kv,
            reuse: a.reuse.and(b.reuse),
            ended: a.ended.and(b.ended),
            drafts: match (a.drafts, b.drafts) {
                (Some(a), Some(b)) => Some(a.and(b)),
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
            kv: KvUsage {
                num_blocks: a.kv.num_blocks + b.kv.num_blocks,
                num_used: a.kv.num_used + b.kv.num_used,
                block_size: a.kv.block_size,
            },
        })
    }

    /// The record as it is written down. `timestamp` is local time as `%m-%d-%Y %H:%M:%S`.
    pub fn with_timestamp<'a>(&'a self, timestamp: &'a str) -> impl Serialize + 'a {
        TimestampedStats {
            timestamp,
            stats: self,
        }
    }
}

/// A [`StepStats`] and its moment.
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
    use crate::base::{BlockSize, Blocks};

    fn kv(num_used: u32) -> KvUsage {
        KvUsage {
            num_blocks: Blocks(32),
            num_used: Blocks(num_used),
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
            lockstep: (config.scheme == BatchingScheme::V1).then_some(LockstepTotals {
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
}
