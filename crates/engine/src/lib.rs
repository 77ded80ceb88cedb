//! L2: the batch manager's decisions. A pure state machine: no clock, no I/O, no thread, no device, no Triton.
//!
//! ```text
//! engine.rs           Engine: add, cancel, schedule, apply
//! scheduler.rs        the two passes that plan a step
//! capacity.rs         the first pass: which sequences may run, given the KV blocks; all that a policy decides
//! block_needs.rs      how many blocks sequences need, and how many are left for others
//! budget.rs           the second pass: how many tokens each gets, given max_num_tokens
//! lockstep.rs         all that differs in lockstep (V1)
//! apply.rs            applies the results of a step
//! active.rs           the active sequences: running, paused or waiting
//! queue.rs            the queue, in order
//! sequence_table.rs   the table of admitted sequences
//! sequence.rs         a sequence: its tokens and its progress
//! sequence_tokens.rs  its tokens, which travel with a step
//! beam.rs beams.rs    its text, or several of them under beam search
//! draft.rs            drafts of later tokens, verified in the step that computes them
//! model_drafts.rs     how far the runner's draft model has computed a sequence
//! drafts_to_make.rs   what it needs to make the drafts of one
//! draft_prices.rs     what drafts cost, and acceptance.rs how many are worth it
//! kv/                 blocks, block tables, and sharing of blocks
//! micro_batches.rs    which micro-batch is next
//! step.rs             a planned step, as packed arrays
//! table_rows.rs       its block tables
//! recorder.rs         what is counted, and the record of a step
//! room.rs             what further requests can have in the next step
//! adapter.rs          the adapter that a sequence is computed with
//! adapter_pages.rs    the pages that adapters in flight hold
//! image.rs            the images of a prompt
//! image_cache.rs      their rows in the runner: what a step encodes, and what makes room
//! image_keys.rs       what prefix reuse compares in place of their tokens
//! image_limits.rs image_plan.rs    what images may take, and what a step has of them
//! config.rs request.rs plan.rs output.rs extra_outputs.rs stats.rs    what goes in and out: plain data
//! ```
//!
//! # Invariants
//!
//! - A step carries at most `max_num_tokens` tokens of at most `max_num_requests` sequences.
//! - A step encodes at most `max_num_tokens` tokens of images ([`ImageLimits`]), one larger image, or the images of a
//!   context that is not cut. The first context always has the image that it needs next.
//! - At most `max_num_active` sequences are active.
//! - Among sequences with the smallest priority number, the one that was admitted first is in every step of its
//!   micro-batch and is never paused. A paused sequence resumes before any request of its priority starts. So every
//!   request ends, unless requests with smaller numbers keep coming without end.
//! - Requests of one priority start in order of arrival, except those that wait for blocks which another sequence is
//!   about to write, or for the pages of their adapter. Behind a request that waits for pages, all that have adapters
//!   wait, too, so that none waits forever; those without start.
//! - Sequences are paused only under [`CapacityPolicy::MaxUtilization`], with all their beams.
//! - Every accepted request ends exactly once: with an [`Event::Finished`], or with an [`Engine::cancel`] that
//!   returns `true`. Its blocks are free by then, or as soon as no step that is out has it.
//! - A step that is planned ahead has only sequences that go on whatever the step before samples, unless that ends
//!   them: then the result is thrown away, and its position in the KV cache is never registered for reuse.
#![forbid(unsafe_code)]

mod acceptance;
mod active;
mod adapter;
mod adapter_pages;
mod apply;
mod beam;
mod beams;
mod block_needs;
mod budget;
mod capacity;
mod config;
mod draft;
mod draft_prices;
mod drafts_to_make;
mod engine;
mod extra_outputs;
mod image;
mod image_cache;
mod image_keys;
mod image_limits;
mod image_plan;
mod kv;
mod lockstep;
mod micro_batches;
mod model_drafts;
mod output;
mod plan;
mod queue;
mod recorder;
mod request;
mod room;
mod scheduler;
mod sequence;
mod sequence_table;
mod sequence_tokens;
mod stats;
mod step;
mod step_cost;
mod table_rows;

pub use adapter::Adapter;
pub use adapter_pages::AdapterUsage;
pub use config::{BatchingScheme, BlockReuse, CapacityPolicy, ContextChunkPolicy, EngineConfig};
pub use draft::{
    DraftOptions, DraftTotals, MAX_DRAFT_TOKENS, MAX_NGRAM, PromptLookup, Speculation,
};
pub use drafts_to_make::DraftsToMake;
pub use engine::Engine;
pub use extra_outputs::{ExtraOutputs, KvBlocks, OutputOptions};
pub use image::{Image, ImageSpan, PromptImages};
pub use image_limits::ImageLimits;
pub use image_plan::{ImageMove, ImageRows, ImageSlot, PositionShift};
pub use kv::{
    AttentionWindow, KeptBlock, KeptParent, KvGroups, KvUsage, MAX_KV_GROUPS, RetainedPrefix,
    ReuseOptions, ReuseTotals,
};
pub use lockstep::LockstepTotals;
pub use output::{BeamCandidates, Event, Sampled, StepOutput};
pub use plan::{
    BlockCopy, BlockMove, PlannedSequence, StateCopy, StateMove, StateRestore, StateSave,
    StateSnapshot, StepPlan,
};
pub use request::NewRequest;
pub use room::{Room, Volume};
pub use stats::{RequestStage, Stage, StepStats, Totals};
pub use step::Step;
pub use step_cost::StepCost;
