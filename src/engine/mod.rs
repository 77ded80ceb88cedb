//! L2: the batch manager. A pure state machine: no clock, no I/O, no thread, no device, no Triton.
//!
//! ```text
//! engine.rs       Engine: add, cancel, apply
//! schedule.rs     the two passes that decide a step
//! capacity.rs     the first pass: who may run, given the KV blocks; all that a policy decides
//! budget.rs       the second pass: how many tokens each gets, given max_num_tokens
//! draft.rs        guesses at later tokens, verified in the step that computes them
//! queue.rs        who waits to start, in order
//! sequence.rs     a sequence's tokens and progress; the table of rows
//! beams.rs        the beams of a sequence that searches
//! beam_room.rs    what is set aside for them
//! kv/             blocks, block tables, and what sequences share of them
//! lockstep.rs     what a batch in lockstep (V1) has come to
//! step.rs         what was decided, as packed arrays
//! table_rows.rs   the block tables in it
//! extra_outputs.rs   what a request wants besides its tokens, and what a step brings of it
//! stats.rs        the record of a step
//! integrity.rs    the invariants, as a check
//! config.rs request.rs plan.rs output.rs    what goes in and out: plain data
//! ```
//!
//! # Invariants
//!
//! - A step carries at most `max_num_tokens` tokens of at most `max_num_requests` sequences.
//! - At most `max_num_active` requests are active.
//! - Of those of the smallest priority number, the sequence that started first is in every step of its
//!   micro-batch and is never paused; what was paused starts again before anything of its priority that
//!   waits. So every request ends, if requests of smaller numbers do not come without end.
//! - Sequences of a priority start in order of arrival, but for those that wait for blocks that another
//!   is about to write.
//! - Only under [`CapacityPolicy::MaxUtilization`] is anything ever paused, and never what has beams: all
//!   that it may need is set aside.
//! - Every accepted request ends exactly once: with an [`Event::Finished`], or with a
//!   [`Engine::cancel`] that returns `true`. Its blocks are free by then.
#![forbid(unsafe_code)]

mod apply;
mod beam_room;
mod beams;
mod budget;
mod capacity;
mod config;
mod draft;
#[expect(
    clippy::module_inception,
    reason = "the file holds the type of that name"
)]
mod engine;
mod extra_outputs;
mod integrity;
mod kv;
mod lockstep;
mod output;
mod plan;
mod queue;
mod request;
mod schedule;
mod sequence;
mod stats;
mod step;
mod table_rows;

pub use config::{BatchingScheme, BlockReuse, CapacityPolicy, ContextChunkPolicy, EngineConfig};
pub use draft::{
    DraftOptions, DraftTotals, MAX_DRAFT_TOKENS, MAX_NGRAM, PromptLookup, Speculation,
};
pub use engine::Engine;
pub use extra_outputs::{ExtraOutputs, KvBlocks, OutputOptions};
pub use kv::{AttentionWindow, KvUsage, ReuseOptions, ReuseTotals};
pub use lockstep::LockstepTotals;
pub use output::{BeamCandidates, Event, Sampled, StepOutput};
pub use plan::{BlockCopy, Phase, PlannedSequence, StepPlan};
pub use request::NewRequest;
pub use stats::{RequestStage, Stage, StepStats, Totals};
pub use step::Step;
