//! What beams need, and what they leave to others.
//!
//! A sequence with beams is never paused, so that all that it may need is set aside for it: blocks for
//! `width` texts of the largest length, and a token of each in every step.
//!
//! ```text
//! width = 3     | full blocks of the prompt | beam 0 ............ |
//!               |       shared by all       | beam 1 ............ |     with a window nothing counts as
//!               |                           | beam 2 ............ |     shared: all may be given back
//! ```

use crate::base::{Blocks, Tokens};
use crate::engine::Engine;
use crate::engine::sequence::Sequence;

/// Who may start next to those with beams, or with beams next to others.
pub(super) struct BesideBeams {
    /// Tokens of a step that nobody who runs will need for generating.
    free_tokens: u32,
    /// Tokens that a context is given in a step at least.
    chunk: u32,
    /// Whether nobody runs so far.
    is_first: bool,
    num_blocks: Blocks,
    /// The most blocks that those with beams ever hold together, and the most of any without.
    searching: Blocks,
    largest: Blocks,
}

impl BesideBeams {
    /// Lets a sequence start that holds `worst` blocks at most, if its beams leave a step room for the next
    /// chunk of a context, and if the first of those without beams can always have all its blocks.
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

impl Engine {
    /// What those that run leave to those that start in `micro_batch`.
    pub(super) fn beside_beams(&self, micro_batch: usize) -> BesideBeams {
        let mut beside = BesideBeams {
            free_tokens: self.config.max_num_tokens.0,
            chunk: match self.config.cuts_contexts() {
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
        for sequence in self.running.iter().map(|&slot| &self.sequences[slot]) {
            let worst = self.worst(sequence);
            match sequence.details.beams {
                None => beside.largest = beside.largest.max(worst),
                Some(_) => beside.searching += worst,
            }
            if usize::from(sequence.micro_batch) == micro_batch {
                beside.free_tokens -= sequence.width();
                beside.is_first = false;
            }
        }
        beside
    }

    /// The most blocks that `width` beams ever hold together.
    pub(super) fn worst_of_beams(
        &self,
        width: u32,
        num_prompt_tokens: Tokens,
        max_kv_len: Tokens,
    ) -> Blocks {
        let shared = self.shared_of_beams(num_prompt_tokens);
        let own = self.kv.max_blocks(max_kv_len) - shared;
        shared + Blocks(own.0.saturating_mul(width))
    }

    /// The most blocks that a sequence ever holds.
    pub(super) fn worst(&self, sequence: &Sequence) -> Blocks {
        let max_kv_len = sequence.details.max_kv_len;
        match sequence.width() {
            1 => self.kv.max_blocks(max_kv_len),
            width => self.worst_of_beams(width, sequence.details.num_prompt_tokens, max_kv_len),
        }
    }

    /// The free blocks that a sequence will take until it ends, at worst, where there is no window.
    pub(super) fn to_come(&self, sequence: &Sequence) -> Blocks {
        match sequence.details.beams {
            None => self.worst(sequence) - sequence.blocks.len(),
            Some(_) => {
                let shared = self.shared_of_beams(sequence.details.num_prompt_tokens);
                self.worst(sequence) - shared - self.kv.num_own(sequence.tables(), shared)
            }
        }
    }

    /// The free blocks that anybody may take.
    pub(super) fn free_for_others(&self) -> Blocks {
        self.kv.usage().num_free().saturating_sub(self.set_aside())
    }

    /// The free blocks that only those with beams may take. With a window, what others share of theirs
    /// counts too: it is not free when they give it back.
    pub(super) fn set_aside(&self) -> Blocks {
        if !self.any_beams() {
            return Blocks::ZERO;
        }
        let running = self.running.iter().map(|&slot| &self.sequences[slot]);
        let searching = running.filter(|it| it.has_beams() && it.ended.is_none());
        match self.config.window {
            None => searching.map(|sequence| self.to_come(sequence)).sum(),
            Some(_) => {
                let worst: Blocks = searching.clone().map(|sequence| self.worst(sequence)).sum();
                let tables = searching.flat_map(Sequence::tables);
                worst - self.kv.num_own(tables, Blocks::ZERO)
            }
        }
    }

    /// The blocks that all beams hold from beginning to end.
    fn shared_of_beams(&self, num_prompt_tokens: Tokens) -> Blocks {
        let block_size = self.config.block_size;
        match self.config.window {
            None => num_prompt_tokens
                .floor_to_block(block_size)
                .blocks_ceil(block_size),
            Some(_) => Blocks::ZERO,
        }
    }

    /// Whether there may be sequences with beams at all.
    fn any_beams(&self) -> bool {
        self.config.max_beam_width > 1
    }
}
