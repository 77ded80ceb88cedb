//! How many KV blocks sequences need, and how many are left for others.
//!
//! A sequence with beams is never paused, so all that it may need is set aside for it: blocks for `width` texts of
//! the largest length, and a token of each in every step.
//!
//! ```text
//! width = 3     | full blocks of the prompt | beam 0 ............ |
//!               |       shared by all       | beam 1 ............ |     with an attention window nothing counts
//!               |                           | beam 2 ............ |     as shared: all may be freed
//! ```

use crate::base::{Blocks, TokenId, Tokens};
use crate::engine::active::ActiveSequences;
use crate::engine::capacity::{self, BlockBudget, Demand, Reservation};
use crate::engine::kv::NextBlock;
use crate::engine::queue::QueueEntry;
use crate::engine::sequence::Sequence;
use crate::engine::{EngineConfig, ReuseOptions};

/// The cached tokens and the needs of an entry of the queue, if it started now.
pub(super) struct Prospect {
    /// The tokens of its context.
    pub(super) len: Tokens,
    /// Tokens whose keys and values are in the cache.
    pub(super) reused: Tokens,
    pub(super) demand: Demand,
    /// The most beams that it may have.
    pub(super) width: u32,
    /// The first block that it would write, if others could reuse it.
    pub(super) next_block: Option<NextBlock>,
}

/// The arithmetic of blocks over all active sequences.
#[derive(Clone, Copy)]
pub(super) struct BlockNeeds<'a> {
    config: &'a EngineConfig,
    active: &'a ActiveSequences,
}

impl<'a> BlockNeeds<'a> {
    pub(super) fn new(config: &'a EngineConfig, active: &'a ActiveSequences) -> Self {
        Self { config, active }
    }

    /// The free blocks that any sequence may take.
    pub(super) fn free(&self) -> Blocks {
        let free = self.active.kv().usage().num_free();
        free.saturating_sub(self.set_aside())
    }

    /// The free blocks that only sequences with beams may take. With a window, the blocks that they share with
    /// others count too: releasing them does not free them.
    pub(super) fn set_aside(&self) -> Blocks {
        if !self.any_beams() {
            return Blocks::ZERO;
        }
        let running = self.active.running().map(|(_, sequence)| sequence);
        let searching = running.filter(|it| it.has_beams() && it.ended().is_none());
        match self.config.window {
            None => searching.map(|sequence| self.still_to_take(sequence)).sum(),
            Some(_) => {
                let worst: Blocks = searching.clone().map(|sequence| self.worst(sequence)).sum();
                let tables = searching.flat_map(Sequence::tables);
                worst - self.active.kv().num_own(tables, Blocks::ZERO)
            }
        }
    }

    /// The blocks that a sequence lacks for what it computes next.
    pub(super) fn lacking(&self, sequence: &Sequence) -> Blocks {
        let up_to = sequence.next_end(self.config.max_num_tokens);
        self.active.kv().probe(sequence.blocks(), up_to)
    }

    /// The blocks that the sequences of `micro_batch` lack for what they compute next, or an upper bound of it if
    /// even that many are `free`. Those of sequences with beams are set aside already.
    pub(super) fn lacking_of_all(&self, micro_batch: usize, free: Blocks) -> Blocks {
        // Without a window a context has all its blocks, and a sequence that generates lacks at most one.
        let at_most = Blocks(self.active.num_running() as u32);
        if self.config.window.is_none() && at_most <= free {
            return at_most;
        }
        let running = self.active.running().map(|(_, sequence)| sequence);
        running
            .filter(|sequence| sequence.runs_in(micro_batch) && !sequence.has_beams())
            .map(|sequence| self.lacking(sequence))
            .sum()
    }

    /// The blocks available to sequences that are admitted, beside all running ones.
    ///
    /// Without a window a sequence keeps its blocks until it ends, so it only needs those not allocated yet. With a
    /// window it frees blocks that others may still hold, and allocates free ones instead, so each sequence counts as
    /// if it shared nothing.
    pub(super) fn budget(&self) -> BlockBudget {
        let reservation = capacity::reservation(self.config.policy);
        let usage = self.active.kv().usage();
        let running = self.active.running().map(|(_, sequence)| sequence);
        let left = match (reservation, self.config.window) {
            (Reservation::Now, _) => self.free(),
            (Reservation::ToTheEnd, None) => {
                let promised: Blocks = running.map(|sequence| self.still_to_take(sequence)).sum();
                usage.num_free() - promised
            }
            (Reservation::ToTheEnd, Some(_)) => {
                let cancelled = self.active.cancelled();
                let held: Blocks = cancelled
                    .map(|sequence| match sequence.has_beams() {
                        false => sequence.blocks().num_held(),
                        true => self.worst(sequence),
                    })
                    .sum();
                let worst: Blocks = running.map(|sequence| self.worst(sequence)).sum();
                usage.num_blocks - held - worst
            }
        };
        BlockBudget::new(left, reservation)
    }

    /// The prospect of `entry`.
    pub(super) fn prospect(&self, entry: QueueEntry) -> Prospect {
        match entry {
            QueueEntry::Paused(slot) => {
                let it = self.active.sequence(slot);
                let tokens = it.tokens();
                let max_reusable = tokens.max_reusable();
                // Sequences with beams are never paused.
                let (tokens, max_kv_len) = (tokens.as_slice(), it.max_kv_len());
                self.prospect_of(tokens, it.reuse(), max_reusable, max_kv_len, 1)
            }
            QueueEntry::Waiting(arrival) => {
                let request = self.active.waiting(arrival);
                let max_kv_len = request.max_kv_len();
                let width = request.sampling.beam_width();
                let max_reusable = request.max_reusable();
                let (tokens, reuse) = (&request.prompt, &request.reuse);
                self.prospect_of(tokens, reuse, max_reusable, max_kv_len, width)
            }
        }
    }

    fn prospect_of(
        &self,
        tokens: &[TokenId],
        reuse: &ReuseOptions,
        max_reusable: Tokens,
        max_kv_len: Tokens,
        width: u32,
    ) -> Prospect {
        let len = Tokens(tokens.len() as u32);
        let found = self.active.kv().find(tokens, reuse, max_reusable);
        // With beams it has not started, so its tokens are its prompt.
        let alone = self.worst_of(width, len, max_kv_len);
        let worst = match self.config.window {
            // As in `budget`.
            Some(_) => alone,
            None => alone - found.num_shared + found.num_shared_free,
        };
        Prospect {
            len,
            reused: found.num_tokens,
            demand: Demand {
                now: if width == 1 { found.lacking } else { worst },
                worst,
                alone,
            },
            width,
            next_block: found.next,
        }
    }

    /// The tokens and blocks that running sequences with beams leave to those that start in `micro_batch`.
    pub(super) fn beside_beams(&self, micro_batch: usize) -> BesideBeams {
        let mut beside = BesideBeams {
            free_tokens: self.config.max_num_tokens.0,
            chunk: match self.config.is_context_chunked() {
                true => self.config.chunk_unit.tokens().0,
                false => 0,
            },
            is_first: true,
            num_blocks: self.config.num_blocks,
            searching: Blocks::ZERO,
            largest: Blocks::ZERO,
        };
        if !self.any_beams() {
            return beside;
        }
        for (_, sequence) in self.active.running() {
            let worst = self.worst(sequence);
            match sequence.has_beams() {
                false => beside.largest = beside.largest.max(worst),
                true => beside.searching += worst,
            }
            if sequence.micro_batch() == micro_batch {
                beside.free_tokens -= sequence.width();
                beside.is_first = false;
            }
        }
        beside
    }

    /// The most blocks that a sequence of `width` beams ever holds, all beams together.
    pub(super) fn worst_of(
        &self,
        width: u32,
        num_prompt_tokens: Tokens,
        max_kv_len: Tokens,
    ) -> Blocks {
        let longest = self.active.kv().max_blocks(max_kv_len);
        if width == 1 {
            return longest;
        }
        let shared = self.shared_by_beams(num_prompt_tokens);
        let own = longest - shared;
        shared + Blocks(own.0.saturating_mul(width))
    }

    /// The most blocks that a sequence ever holds.
    fn worst(&self, sequence: &Sequence) -> Blocks {
        self.worst_of(
            sequence.width(),
            sequence.num_prompt_tokens(),
            sequence.max_kv_len(),
        )
    }

    /// The free blocks that a sequence will take until it ends at worst, where there is no window.
    fn still_to_take(&self, sequence: &Sequence) -> Blocks {
        match sequence.has_beams() {
            false => self.worst(sequence) - sequence.blocks().len(),
            true => {
                let shared = self.shared_by_beams(sequence.num_prompt_tokens());
                let own = self.active.kv().num_own(sequence.tables(), shared);
                self.worst(sequence) - shared - own
            }
        }
    }

    /// The blocks that all beams share from beginning to end.
    fn shared_by_beams(&self, num_prompt_tokens: Tokens) -> Blocks {
        let block_size = self.config.block_size;
        match self.config.window {
            None => num_prompt_tokens
                .floor_to_block(block_size)
                .blocks_ceil(block_size),
            Some(_) => Blocks::ZERO,
        }
    }

    /// Whether sequences with beams are possible.
    fn any_beams(&self) -> bool {
        self.config.max_beam_width > 1
    }
}

/// Which requests are admitted beside sequences with beams, or with beams beside others.
pub(super) struct BesideBeams {
    /// Tokens of a step that no running sequence will need to generate.
    free_tokens: u32,
    /// The fewest tokens that a context is given in a step.
    chunk: u32,
    /// Whether nothing runs so far.
    is_first: bool,
    num_blocks: Blocks,
    /// The most blocks that all sequences with beams ever hold together, and the most of any without.
    searching: Blocks,
    largest: Blocks,
}

impl BesideBeams {
    /// Lets a sequence start that holds at most `worst` blocks, if its beams leave a step room for the next chunk
    /// of a context, and if the first sequence without beams can always have all its blocks.
    pub(super) fn admit(&mut self, width: u32, worst: Blocks) -> bool {
        let (mut searching, mut largest) = (self.searching, self.largest);
        match width {
            1 => largest = largest.max(worst),
            _ => searching += worst,
        }
        let chunk = if self.is_first { 0 } else { self.chunk };
        let fits = searching == Blocks::ZERO
            || width.saturating_add(chunk) <= self.free_tokens
                && searching + largest <= self.num_blocks;
        if fits {
            (self.searching, self.largest) = (searching, largest);
            self.free_tokens = self.free_tokens.saturating_sub(width);
            self.is_first = false;
        }
        fits
    }
}
