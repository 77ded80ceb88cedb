//! What further requests can have in the next step, and what each takes of it.

use crate::base::{BlockSize, Blocks, Tokens};

/// What further requests can have in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// KV blocks, under the capacity policy.
    pub blocks: Blocks,
    /// Tokens of the budget.
    pub tokens: Tokens,
    /// Positions per block.
    pub block_size: BlockSize,
    /// The most blocks that one sequence holds.
    pub max_blocks: Blocks,
    /// Whether a sequence takes the blocks of all its tokens when it starts, or those of its prompt.
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
        len.blocks_ceil(self.block_size).min(self.max_blocks)
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
            max_blocks: Blocks(4),
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
        // No sequence holds more than the window, or the largest length.
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
