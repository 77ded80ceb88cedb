//! What further requests can have in the next step, and what each takes of it.

use crate::KvGroups;
use inflight_base::{BlockSize, Blocks, Tokens};

/// What further requests can have in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// KV blocks, under the capacity policy.
    pub blocks: Blocks,
    /// Tokens of the budget.
    pub tokens: Tokens,
    /// Positions per block.
    pub block_size: BlockSize,
    /// The groups of layers, each with blocks of its own.
    pub groups: KvGroups,
    /// The most tokens of a sequence.
    pub max_seq_len: Tokens,
    /// The most tokens of a sequence that are computed in a step.
    pub max_chunk: Tokens,
    /// Whether a sequence takes the blocks of all its tokens when it starts, or only its prompt's.
    pub reserves_to_the_end: bool,
}

/// The tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Of its prompt.
    pub prompt: Tokens,
    /// The most that it generates.
    pub output: Tokens,
}

impl Room {
    /// Takes what a request needs, if it is there.
    pub fn take(&mut self, volume: Volume) -> bool {
        let blocks = self.blocks_of(volume);
        let fits = blocks <= self.blocks && volume.prompt <= self.tokens;
        if fits {
            self.force(volume);
        }
        fits
    }

    /// Takes what a request needs, as far as it is there.
    pub fn force(&mut self, volume: Volume) {
        self.blocks = self.blocks.saturating_sub(self.blocks_of(volume));
        self.tokens = self.tokens.saturating_sub(volume.prompt);
    }

    fn blocks_of(&self, volume: Volume) -> Blocks {
        let output = match self.reserves_to_the_end {
            true => volume.output,
            false => Tokens::ZERO,
        };
        let len = Tokens(volume.prompt.0.saturating_add(output.0));
        let len = len.min(self.max_seq_len);
        self.groups.max_blocks(len, self.max_chunk, self.block_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(blocks: u32, tokens: u32, reserves_to_the_end: bool) -> Room {
        Room {
            blocks: Blocks(blocks),
            tokens: Tokens(tokens),
            block_size: BlockSize::new(16).expect("a size"),
            groups: KvGroups::one(None),
            max_seq_len: Tokens(64),
            max_chunk: Tokens(64),
            reserves_to_the_end,
        }
    }

    /// How many requests of a size find what they need.
    fn num_taken(mut room: Room, prompt: u32, output: u32) -> usize {
        let volume = Volume {
            prompt: Tokens(prompt),
            output: Tokens(output),
        };
        std::iter::repeat_with(|| room.take(volume))
            .take(100)
            .take_while(|fits| *fits)
            .count()
    }

    #[test]
    fn blocks_are_those_of_the_prompt_or_of_all_tokens() {
        assert_eq!(num_taken(room(5, 1000, false), 16, 17), 5);
        assert_eq!(num_taken(room(5, 1000, true), 16, 16), 2);
        assert_eq!(num_taken(room(5, 1000, true), 16, 17), 1);
        // No sequence is longer than the largest length.
        assert_eq!(num_taken(room(9, 1000, true), 16, u32::MAX), 2);
    }

    #[test]
    fn the_token_budget_is_for_prompts() {
        assert_eq!(num_taken(room(50, 100, false), 40, 1000), 2);
        assert_eq!(num_taken(room(50, 100, false), 101, 1), 0);
    }

    #[test]
    fn what_is_forced_leaves_nothing_behind() {
        let mut room = room(1, 10, false);
        let volume = Volume {
            prompt: Tokens(50),
            output: Tokens(1),
        };
        room.force(volume);
        assert_eq!((room.blocks, room.tokens), (Blocks::ZERO, Tokens::ZERO));
    }
}
