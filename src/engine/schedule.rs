//! How a step is decided: two passes over the sequences in order, and then what was decided is packed.
//!
//! **Capacity** says who may run, given the KV blocks there are; **budget** says how many tokens each
//! of them gets. Whoever starts does so between the two: it takes blocks and tokens at once, so that
//! the next one sees what is really left.

use crate::base::{Blocks, SeqSlot, TokenId, Tokens};
use crate::engine::budget::TokenBudget;
use crate::engine::capacity::{self, BlockBudget, Demand};
use crate::engine::draft::room_for_drafts;
use crate::engine::kv::{BlockTable, NextBlock};
use crate::engine::queue::{Queue, QueueCursor, QueueEntry};
use crate::engine::sequence::{Rank, Sequence, max_kv_len};
use crate::engine::{BatchingScheme, CapacityPolicy, Engine, Event, Phase, ReuseOptions, Step};

/// Contexts that may be passed over in one step because they wait for blocks that another is about to
/// write: each costs a look at its whole prompt.
const MAX_PASSED_OVER: usize = 16;

/// What a sequence would find and need if it started now.
struct Prospect {
    len: Tokens,
    /// Tokens whose keys and values the cache has already.
    reused: Tokens,
    demand: Demand,
    /// How many beams it may have.
    width: u32,
    /// The first block that it would write, if others could share it.
    next_block: Option<NextBlock>,
}

impl Engine {
    /// Decides the next step. It is empty only if nothing is active, or if all that is active is in a
    /// step that is out or could not be given blocks because of it.
    ///
    /// # Panics
    /// If the steps of all micro-batches are out.
    pub fn schedule(&mut self) -> Step {
        assert!(
            self.is_out.contains(&false),
            "a step is planned after another has come back"
        );
        self.end_lockstep_batch();
        let spare = self.spare_steps.pop();
        let mut step = spare.unwrap_or_else(|| Step::new(&self.config));
        let num_micro_batches = self.config.num_micro_batches;
        for n in 0..num_micro_batches {
            let micro_batch = (self.turn + n) % num_micro_batches;
            if self.is_out[micro_batch] {
                continue;
            }
            self.plan(micro_batch, &mut step);
            if !step.is_empty() {
                self.is_out[micro_batch] = true;
                // One that could not be planned keeps its turn.
                self.turn = (micro_batch + 1) % num_micro_batches;
                break;
            }
        }
        // The first of those that run is never paused and is first to get tokens.
        assert!(
            self.is_idle() || self.is_out.contains(&true),
            "{} requests are active and none can run",
            self.num_active()
        );
        self.record(&step);
        step
    }

    /// Decides the next step of one micro-batch, which may turn out to be empty.
    fn plan(&mut self, micro_batch: usize, step: &mut Step) {
        step.begin(micro_batch);
        self.contexts.clear();
        let Some(any_paused) = self.make_room(micro_batch) else {
            return;
        };
        let mut budget = TokenBudget::new(&self.config);
        self.schedule_running(micro_batch, &mut budget);
        self.admit_waiting(micro_batch, &mut budget, any_paused);
        budget.distribute(&mut self.contexts);
        if self.config.speculation.is_some() {
            self.draft(&mut budget);
        }
        self.pack(step);
    }

    /// Pauses whom the capacity policy says, so that there are blocks for what those of `micro_batch` that
    /// go on compute next. Returns whether any was paused, and `None` if none can run because what could
    /// be paused is in a step that is out.
    fn make_room(&mut self, micro_batch: usize) -> Option<bool> {
        let mut free = self.free_for_others();
        let mut lacking = self.lacking_of_all(micro_batch, free);
        let mut any_paused = false;
        while capacity::must_pause(self.config.policy, free, lacking) {
            let slot = self.last_that_can_pause()?;
            let sequence = &self.sequences[slot];
            if sequence.runs_in(micro_batch) {
                lacking -= self.lacking(sequence);
            }
            self.pause(slot);
            free = self.free_for_others();
            any_paused = true;
        }
        Some(any_paused)
    }

    /// Gives blocks and tokens to those that run: one token to each that generates, and then contexts in
    /// order.
    fn schedule_running(&mut self, micro_batch: usize, budget: &mut TokenBudget) {
        let max_chunk = self.config.max_num_tokens;
        self.being_written.clear();
        self.in_context.clear();
        self.generating.clear();
        let mut num_other_beams = 0;
        for &slot in &self.running {
            let sequence = &mut self.sequences[slot];
            if !sequence.runs_in(micro_batch) {
                continue;
            }
            let up_to = sequence.next_end(max_chunk);
            if sequence.has_beams() {
                num_other_beams += sequence.num_beams() - 1;
                sequence.grow_beams(&mut self.kv, up_to);
            } else {
                self.kv.grow(&mut sequence.blocks, up_to);
            }
            match sequence.phase() {
                Phase::Generation => self.generating.push(slot),
                Phase::Context => self.in_context.push(slot),
            }
        }
        if self.config.scheme == BatchingScheme::V1 && !self.in_context.is_empty() {
            // Those whose contexts are computed wait for the others.
            self.generating.clear();
            num_other_beams = 0;
        }
        let num_generating = self.generating.len() + num_other_beams;
        budget.take_generation(Tokens(num_generating as u32));
        for &slot in &self.in_context {
            if !budget.is_open() {
                return;
            }
            let sequence = &self.sequences[slot];
            let Some(share) = budget.take_context(sequence.computed, sequence.rest()) else {
                return;
            };
            self.contexts.push((slot, share));
            let next = self.kv.next_block(&sequence.blocks, sequence.tokens());
            self.being_written.extend(next);
        }
    }

    /// Starts those from the queue that get both blocks and tokens.
    fn admit_waiting(&mut self, micro_batch: usize, budget: &mut TokenBudget, any_paused: bool) {
        if self.queue.is_empty() {
            return;
        }
        let num_running = self.num_in(micro_batch);
        let lockstep = self.config.scheme == BatchingScheme::V1;
        if !capacity::may_join(self.config.policy, num_running > 0, any_paused)
            || lockstep && num_running > 0
        {
            return;
        }
        // Who waits for another's blocks would wait for all of a batch that nobody can join.
        let may_wait = !lockstep && self.config.policy != CapacityPolicy::StaticBatch;
        let mut free_places = self.max_in_micro_batch().saturating_sub(num_running);
        let mut beside_beams = self.beside_beams(micro_batch);
        let mut room = self.room();
        let mut cursor = QueueCursor::default();
        let mut num_passed_over = 0;
        while free_places > 0 && (lockstep || budget.is_open()) {
            let with_waiting = self.sequences.has_free_row();
            let Some(entry) = self.queue.next(&cursor, with_waiting) else {
                return;
            };
            let prospect = self.prospect(entry);
            let next = prospect.next_block;
            if may_wait && next.is_some_and(|next| self.being_written.contains(&next)) {
                num_passed_over += 1;
                if num_passed_over == MAX_PASSED_OVER {
                    return;
                }
                Queue::pass_over(&mut cursor, entry);
                continue;
            }
            let Prospect { demand, width, .. } = prospect;
            if !beside_beams.admit(width, demand.alone) || !room.admit(demand) {
                return;
            }
            let rest = prospect.len - prospect.reused;
            let share = match budget.is_open() {
                true => budget.take_context(prospect.reused, rest),
                false => None,
            };
            if share.is_none() && !lockstep {
                return;
            }
            let slot = self.admit(entry, micro_batch, prospect.reused);
            self.contexts.extend(share.map(|share| (slot, share)));
            if lockstep {
                self.lockstep.join(rest);
            }
            let sequence = &self.sequences[slot];
            let next = self.kv.next_block(&sequence.blocks, sequence.tokens());
            self.being_written.extend(next);
            free_places -= 1;
        }
    }

    /// Lets those that generate guess at their next tokens, in order, with the tokens and the blocks that
    /// are left.
    fn draft(&mut self, budget: &mut TokenBudget) {
        let mut free = capacity::blocks_for_drafts(
            self.config.policy,
            self.free_for_others(),
            self.running.len(),
            !self.queue.is_empty(),
        );
        for &slot in &self.generating {
            let sequence = &mut self.sequences[slot];
            if !sequence.is_drafted() {
                continue;
            }
            let num_held = sequence.blocks.len();
            let room = room_for_drafts(
                sequence.len(),
                sequence.details.max_kv_len,
                (num_held + free).tokens(self.config.block_size),
                budget.left(),
            );
            if room == 0 {
                continue;
            }
            let num_drafts = sequence.draft(room);
            let up_to = sequence.len() + num_drafts;
            self.kv.grow(&mut sequence.blocks, up_to);
            free -= sequence.blocks.len() - num_held;
            budget.take_drafts(num_drafts);
        }
    }

    /// Writes down what the passes have decided: contexts first, then those that generate.
    fn pack(&mut self, step: &mut Step) {
        step.copy(self.kv.copies());
        self.kv.clear_copies();
        for &(slot, share) in &self.contexts {
            step.push_context(slot, &mut self.sequences[slot], share.chunk);
        }
        if self.config.scheme != BatchingScheme::InflightFused {
            step.end_call(self.padding_of_contexts());
        }
        for &slot in &self.generating {
            let sequence = &mut self.sequences[slot];
            match sequence.is_drafted() {
                true => step.push_drafted(slot, sequence),
                false => step.push_generation(slot, sequence),
            }
        }
        step.end_call(Tokens(self.num_ended_beams()));
    }

    /// In lockstep, what the contexts of the batch lack to be as long as the longest, with the last of them.
    fn padding_of_contexts(&self) -> Tokens {
        let lasts = self.contexts.iter().filter(|(_, share)| share.is_all());
        let num_in_context = self.running.iter().filter(|&&slot| {
            let sequence = &self.sequences[slot];
            sequence.ended.is_none() && sequence.phase() == Phase::Context
        });
        let are_last = self.config.scheme == BatchingScheme::V1
            && !self.contexts.is_empty()
            && lasts.count() == num_in_context.count();
        match are_last {
            true => self.lockstep.num_padding_tokens(),
            false => Tokens::ZERO,
        }
    }

    /// Takes the blocks of a sequence that runs, and queues it again.
    fn pause(&mut self, slot: SeqSlot) {
        self.running.retain(|&running| running != slot);
        let sequence = &mut self.sequences[slot];
        sequence.rewind();
        self.kv.release(&mut sequence.blocks);
        self.changes.push(Event::Paused(sequence.id));
        self.queue.push_paused(sequence.details.rank, slot);
    }

    /// The last that runs, has no beams, and is not in a step that is out; never the first of all.
    fn last_that_can_pause(&self) -> Option<SeqSlot> {
        let but_the_first = self.running.iter().skip(1).rev();
        but_the_first.copied().find(|&slot| {
            let sequence = &self.sequences[slot];
            !sequence.has_beams() && !self.is_out[usize::from(sequence.micro_batch)]
        })
    }

    /// Starts a entry: resumes or admits it, with blocks for all of its context.
    fn admit(&mut self, entry: QueueEntry, micro_batch: usize, reused: Tokens) -> SeqSlot {
        let slot = match entry {
            QueueEntry::Paused(slot) => {
                self.queue.take_paused(slot);
                slot
            }
            QueueEntry::Waiting(arrival) => {
                let request = self.queue.take_waiting(arrival);
                // Here, and only here, memory is taken for its later tokens.
                let worst = max_kv_len(Tokens(request.prompt.len() as u32), &request.stop);
                let blocks = BlockTable::with_capacity(worst.blocks_ceil(self.config.block_size));
                let rank = Rank {
                    priority: request.priority,
                    start: self.num_started,
                };
                self.num_started += 1;
                self.changes.push(Event::Admitted(request.id));
                let speculation = self.config.speculation.as_ref();
                let sequence = Sequence::new(request, rank, blocks, speculation);
                self.sequences.insert(sequence)
            }
        };
        let sequence = &mut self.sequences[slot];
        sequence.micro_batch = u8::try_from(micro_batch).expect("there are two at most");
        let max_reused = sequence.max_reused();
        let Sequence {
            blocks,
            text,
            details,
            ..
        } = sequence;
        let text = text.as_ref().expect("no step with it is out");
        let num_reused = self.kv.totals().num_reused_blocks;
        sequence.computed = self
            .kv
            .reserve(blocks, &text.tokens, &details.reuse, max_reused);
        let num_reused = self.kv.totals().num_reused_blocks - num_reused;
        sequence.found(Blocks(num_reused as u32));
        assert_eq!(sequence.computed, reused, "what was found is still there");
        let rank = sequence.details.rank;
        let place = self
            .running
            .partition_point(|&other| self.sequences[other].details.rank < rank);
        self.running.insert(place, slot);
        slot
    }

    fn prospect(&self, entry: QueueEntry) -> Prospect {
        let (tokens, reuse, max_reused, max_kv_len, width): (&[TokenId], &ReuseOptions, _, _, _) =
            match entry {
                QueueEntry::Paused(slot) => {
                    let it = &self.sequences[slot];
                    (
                        it.tokens(),
                        &it.details.reuse,
                        it.max_reused(),
                        it.details.max_kv_len,
                        1,
                    )
                }
                QueueEntry::Waiting(arrival) => {
                    let request = self.queue.waiting(arrival);
                    let num_prompt_tokens = Tokens(request.prompt.len() as u32);
                    let max_kv_len = max_kv_len(num_prompt_tokens, &request.stop);
                    let max_reused = request.max_reused();
                    let width = request.sampling.beam_width();
                    (
                        &request.prompt,
                        &request.reuse,
                        max_reused,
                        max_kv_len,
                        width,
                    )
                }
            };
        let len = Tokens(tokens.len() as u32);
        let found = self.kv.find(tokens, reuse, max_reused);
        let to_the_end = match width {
            1 => self.kv.max_blocks(max_kv_len),
            // What has not started has no more tokens than its prompt.
            _ => self.worst_of_beams(width, len, max_kv_len),
        };
        let worst = match self.config.window {
            // As in `room`.
            Some(_) => to_the_end,
            None => to_the_end - found.num_shared + found.num_shared_free,
        };
        Prospect {
            len,
            reused: found.num_tokens,
            demand: Demand {
                now: if width == 1 { found.lacking } else { worst },
                worst,
                alone: to_the_end,
            },
            width,
            next_block: found.next,
        }
    }

    /// The room for those that start, next to all that run.
    ///
    /// Without a window, a sequence's blocks stay until it ends, so that what it will take is what it
    /// has not taken yet. With one it gives blocks back that others may still hold, and takes free ones
    /// for them: then each counts as if it shared nothing.
    fn room(&self) -> BlockBudget {
        let usage = self.kv.usage();
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        match (self.config.policy, self.config.window) {
            (CapacityPolicy::MaxUtilization, _) => BlockBudget::of_now(self.free_for_others()),
            (_, None) => {
                let promised = running.map(|sequence| self.to_come(sequence)).sum();
                BlockBudget::to_the_end(usage.num_free(), promised)
            }
            (_, Some(_)) => {
                let cancelled = self.cancelled.iter().map(|&slot| &self.sequences[slot]);
                let held: Blocks = cancelled
                    .map(|sequence| match sequence.details.beams {
                        None => sequence.blocks.num_held(),
                        Some(_) => self.worst(sequence),
                    })
                    .sum();
                let worst = running.map(|sequence| self.worst(sequence)).sum();
                BlockBudget::to_the_end(usage.num_blocks - held, worst)
            }
        }
    }

    /// Blocks that those of `micro_batch` lack for what they compute next, or a number that is not
    /// smaller, if there are enough `free` ones even for that. For those with beams they are set aside.
    fn lacking_of_all(&self, micro_batch: usize, free: Blocks) -> Blocks {
        // Without a window a context has all its blocks, and one that generates lacks one at most.
        let at_most = Blocks(self.running.len() as u32);
        if self.config.window.is_none() && at_most <= free {
            return at_most;
        }
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        running
            .filter(|sequence| sequence.runs_in(micro_batch) && !sequence.has_beams())
            .map(|sequence| self.lacking(sequence))
            .sum()
    }

    /// Blocks that a sequence lacks for what it computes next.
    fn lacking(&self, sequence: &Sequence) -> Blocks {
        let up_to = sequence.next_end(self.config.max_num_tokens);
        self.kv.probe(&sequence.blocks, up_to)
    }

    /// Sequences that run in `micro_batch`; in lockstep, those that wait for its end too.
    fn num_in(&self, micro_batch: usize) -> usize {
        let running = self.running.iter();
        running
            .filter(|&&slot| usize::from(self.sequences[slot].micro_batch) == micro_batch)
            .count()
    }

    /// How many may run in one micro-batch, so that all are about equal.
    fn max_in_micro_batch(&self) -> usize {
        let num_active = self.running.len() + self.queue.num_paused() + self.queue.num_waiting();
        num_active
            .min(self.config.max_rows() as usize)
            .div_ceil(self.config.num_micro_batches)
    }
}
