//! How many KV blocks sequences need, and how many are left for others.
//!
//! The beams of a sequence share the full blocks of what they have in common. Where sequences are never paused, all
//! that it may need is kept for it: blocks for `width` texts of the largest length. Under any policy a step always has
//! a token for each of its beams.
//!
//! ```text
//! width = 3     | full blocks of the prompt | beam 0 ............ |
//!               |       shared by all       | beam 1 ............ |     of groups with a window nothing counts
//!               |                           | beam 2 ............ |     as shared: all may be freed
//! ```

use crate::EngineConfig;
use crate::active::ActiveSequences;
use crate::capacity::{self, BlockBudget, Demand, Reservation};
use crate::kv::NextBlock;
use crate::queue::QueueEntry;
use crate::sequence::{BeamsToCome, Sequence};
use inflight_base::{Blocks, Tokens};

/// The cached tokens and the needs of an entry of the queue, if it started now.
pub(super) struct Prospect {
    /// The tokens of its context; of beams that go on after a pause, those that they have in common.
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

    /// The free blocks.
    pub(super) fn free(&self) -> Blocks {
        self.active.kv().usage().num_free()
    }

    /// The beams of all running sequences; one for each that has no beams.
    pub(super) fn num_beams(&self) -> u32 {
        if !self.any_beams() {
            return self.active.num_running() as u32;
        }
        let running = self.active.running();
        running.map(|(_, sequence)| sequence.num_beams()).sum()
    }

    /// The blocks that a sequence lacks for what it computes next.
    pub(super) fn lacking(&self, sequence: &Sequence) -> Blocks {
        let kv = self.active.kv();
        let up_to = sequence.next_end(self.config.max_num_tokens);
        match sequence.num_beams() {
            1 => kv.probe(sequence.blocks(), up_to),
            _ => kv.probe_beams(sequence.tables(), sequence.computed(), up_to),
        }
    }

    /// The blocks that the sequences of `micro_batch` lack for what they compute next, or an upper bound of it if
    /// even that many are `free`.
    pub(super) fn lacking_of_all(&self, micro_batch: usize, free: Blocks) -> Blocks {
        // Without a window a context has all its blocks, and a sequence that generates lacks at most one of each group.
        let groups = &self.config.groups;
        let at_most = Blocks((self.active.num_running() * groups.num_groups()) as u32);
        if !groups.any_windows() && !self.any_beams() && at_most <= free {
            return at_most;
        }
        let running = self.active.running().map(|(_, sequence)| sequence);
        running
            .filter(|sequence| sequence.runs_in(micro_batch))
            .map(|sequence| self.lacking(sequence))
            .sum()
    }

    /// The free blocks that running sequences take as soon as their contexts are computed and their beams part.
    fn of_next_partings(&self) -> Blocks {
        if !self.any_beams() {
            return Blocks::ZERO;
        }
        let running = self.active.running().map(|(_, sequence)| sequence);
        running
            .filter(|sequence| sequence.is_in_context() && sequence.num_beams() == 1)
            .map(|sequence| self.of_parting(sequence.beams_to_come()))
            .sum()
    }

    /// The blocks that these beams hold together when each has computed its tokens, without the blocks of their common
    /// tokens.
    fn of_parting(&self, beams: BeamsToCome) -> Blocks {
        let BeamsToCome {
            num_beams,
            num_common,
            len,
        } = beams;
        let before = self.active.kv().max_blocks(num_common);
        self.of_beams(num_beams, num_common, len) - before
    }

    /// The blocks available to sequences that are admitted, beside all running ones.
    ///
    /// For layers without a window a sequence keeps its blocks until it ends, so it only needs those not allocated yet.
    /// For those with a window it frees blocks that others may still hold, and allocates free ones instead, so each
    /// sequence counts as if it shared nothing of these.
    pub(super) fn budget(&self) -> BlockBudget {
        let reservation = capacity::reservation(self.config.policy);
        let left = match reservation {
            Reservation::Now => self.free().saturating_sub(self.of_next_partings()),
            Reservation::ToTheEnd => self.config.num_blocks - self.kept(),
        };
        BlockBudget::new(left, reservation)
    }

    /// The blocks that are used or kept for running sequences, where these never pause.
    fn kept(&self) -> Blocks {
        let kv = self.active.kv();
        let running = self.active.running().map(|(_, sequence)| sequence);
        let promised = running.clone().map(|sequence| self.still_to_take(sequence));
        let mut kept = kv.num_used_whole() + promised.sum::<Blocks>();
        if self.config.groups.any_windows() {
            let cancelled = self.active.cancelled();
            let held = cancelled.map(|sequence| match sequence.has_beams() {
                false => kv.num_windowed(sequence.blocks()),
                true => self.worst_windowed(sequence),
            });
            let worst = running.map(|sequence| self.worst_windowed(sequence));
            kept += held.chain(worst).sum::<Blocks>();
        }
        kept
    }

    /// Panics unless there are the blocks that are used or kept for running sequences.
    pub(super) fn check_integrity(&self) {
        let is_kept = capacity::reservation(self.config.policy) == Reservation::ToTheEnd;
        assert!(
            !is_kept || self.kept() <= self.config.num_blocks,
            "what is kept for sequences is there"
        );
    }

    /// The prospect of `entry`.
    pub(super) fn prospect(&self, entry: QueueEntry) -> Prospect {
        match entry {
            QueueEntry::Paused(slot) => {
                let it = self.active.sequence(slot);
                self.prospect_of(entry, it.beams_to_come(), it.width(), self.worst(it))
            }
            QueueEntry::Waiting(arrival) => {
                let request = self.active.waiting(arrival);
                let max_kv_len = request.max_kv_len();
                let width = request.sampling.beam_width();
                let len = request.num_prompt_tokens();
                let beams = BeamsToCome::of_context(width, len, max_kv_len);
                let worst = self.of_beams(width, len, max_kv_len);
                self.prospect_of(entry, beams, width, worst)
            }
        }
    }

    /// The prospect of an entry that has `beams` when its context is computed, later `width` at most, and then holds
    /// `worst` blocks at most.
    fn prospect_of(
        &self,
        entry: QueueEntry,
        beams: BeamsToCome,
        width: u32,
        worst: Blocks,
    ) -> Prospect {
        let (tokens, reuse, max_reusable) = self.active.context_of(entry);
        let found = self.active.kv().find(tokens, reuse, max_reusable);
        // As in `budget`.
        let worst = worst - found.num_spared;
        Prospect {
            len: Tokens(tokens.len() as u32),
            reused: found.num_tokens,
            demand: Demand {
                now: found.lacking + self.of_parting(beams),
                worst,
            },
            width,
            next_block: found.next,
        }
    }

    /// The tokens that running sequences with beams leave to those that start in `micro_batch`.
    pub(super) fn beside_beams(&self, micro_batch: usize) -> BesideBeams {
        let mut beside = BesideBeams {
            free_tokens: self.config.max_num_tokens.0,
            chunk: match self.config.is_context_chunked() {
                true => self.config.chunk_unit.tokens().0,
                false => 0,
            },
            is_first: true,
            any_searches: false,
        };
        if !self.any_beams() {
            return beside;
        }
        let running = self.active.running().map(|(_, sequence)| sequence);
        for sequence in running.filter(|it| it.micro_batch() == micro_batch) {
            beside.free_tokens -= sequence.width();
            beside.is_first = false;
            beside.any_searches |= sequence.has_beams();
        }
        beside
    }

    /// Maximum total number of blocks of `num_beams` beams of `len` tokens that share their first `num_common` tokens.
    pub(super) fn of_beams(&self, num_beams: u32, num_common: Tokens, len: Tokens) -> Blocks {
        let whole = self.whole_of_beams(num_beams, num_common, len);
        let windowed = self.windowed_of_beams(num_beams, len);
        Blocks(whole.0.saturating_add(windowed.0))
    }

    /// Blocks of the groups of layers without a window.
    fn whole_of_beams(&self, num_beams: u32, num_common: Tokens, len: Tokens) -> Blocks {
        let longest = self.active.kv().max_whole_blocks(len);
        if num_beams == 1 {
            return longest;
        }
        let shared = self.shared_by_beams(num_common);
        let own = longest - shared;
        Blocks(shared.0.saturating_add(own.0.saturating_mul(num_beams)))
    }

    /// Blocks of the groups with a window.
    fn windowed_of_beams(&self, num_beams: u32, len: Tokens) -> Blocks {
        let kv = self.active.kv();
        let longest = kv.max_blocks(len) - kv.max_whole_blocks(len);
        Blocks(longest.0.saturating_mul(num_beams))
    }

    /// The most blocks that a sequence ever holds.
    fn worst(&self, sequence: &Sequence) -> Blocks {
        self.of_beams(
            sequence.width(),
            sequence.num_prompt_tokens(),
            sequence.max_kv_len(),
        )
    }

    /// The most blocks that a sequence ever holds for the groups of layers with a window.
    fn worst_windowed(&self, sequence: &Sequence) -> Blocks {
        self.windowed_of_beams(sequence.width(), sequence.max_kv_len())
    }

    /// The free blocks that a sequence will take until it ends at worst for the groups without a window.
    fn still_to_take(&self, sequence: &Sequence) -> Blocks {
        let num_prompt_tokens = sequence.num_prompt_tokens();
        let worst = self.whole_of_beams(sequence.width(), num_prompt_tokens, sequence.max_kv_len());
        match sequence.has_beams() {
            // All these groups have the same places.
            false => worst - self.num_whole_blocks(sequence.blocks().len_of(0)),
            true => {
                let places = self.places_of_beams(num_prompt_tokens);
                let own = self.active.kv().num_own(sequence.tables(), places);
                worst - self.num_whole_blocks(places) - own
            }
        }
    }

    /// The blocks that all beams share if they have `num_common` tokens in common.
    fn shared_by_beams(&self, num_common: Tokens) -> Blocks {
        self.num_whole_blocks(self.places_of_beams(num_common))
    }

    /// The places of their full blocks.
    fn places_of_beams(&self, num_common: Tokens) -> Blocks {
        let block_size = self.config.block_size;
        num_common
            .floor_to_block(block_size)
            .blocks_ceil(block_size)
    }

    /// The blocks of the groups without a window at so many places.
    fn num_whole_blocks(&self, num_places: Blocks) -> Blocks {
        Blocks(num_places.0 * self.config.groups.num_whole() as u32)
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
    /// Whether any sequence has beams so far.
    any_searches: bool,
}

impl BesideBeams {
    /// Lets a sequence start, if the beams leave a step room for the next chunk of a context.
    pub(super) fn admit(&mut self, width: u32) -> bool {
        let any_searches = self.any_searches || width > 1;
        let chunk = if self.is_first { 0 } else { self.chunk };
        let fits = !any_searches || width.saturating_add(chunk) <= self.free_tokens;
        if fits {
            self.any_searches = any_searches;
            self.free_tokens = self.free_tokens.saturating_sub(width);
            self.is_first = false;
        }
        fits
    }
}
