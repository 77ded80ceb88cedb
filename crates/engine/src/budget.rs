//! The second pass: how many tokens each sequence gets in a step, given `max_num_tokens`.
//!
//! Generation comes first, one token per sequence or beam, so that no stream stalls. Then come contexts, in order, and
//! finally drafts. A context that does not fit is cut where a block ends, by the chunk policy; where all beams of a
//! sequence are computed again after a pause, anywhere. A block that ends within an image of which a step computes all
//! tokens is cut in front of the image, or behind it:
//!
//! ```text
//! max_num_tokens = 12, blocks of 4, one sequence generating, contexts of 5 and 9
//!
//! first come first served  |g| context 1 | 1st chunk of 2|     |   finishes earlier contexts first
//!                          |g|c c c c c|  c c c c        - - |
//! equal progress           |g| chunk of 1| chunk of 2    |     |   a block each in turn, until no
//!                          |g|c c c c|    c c c c        - - - |   block fits
//! ```

use std::ops::Range;

use crate::{ContextChunkPolicy, EngineConfig, PromptImages};
use inflight_base::{BlockSize, SeqSlot, Tokens};

/// The tokens of a step that are left.
pub(super) struct TokenBudget {
    left: Tokens,
    /// Contexts may be cut where a block of this size ends; `None`: they are never cut.
    chunk_unit: Option<BlockSize>,
    rule: ChunkRule,
    is_open: bool,
}

/// How contexts share the tokens.
enum ChunkRule {
    /// Each gets all remaining tokens. The first that does not fit as a whole is the last.
    FirstComeFirstServed,
    /// Each gets one unit first, and its share of the rest in [`TokenBudget::distribute`].
    EqualProgress,
}

/// The chunk of a context that a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContextChunk {
    /// Tokens computed before it.
    start: Tokens,
    /// Tokens that were not computed.
    rest: Tokens,
    len: Tokens,
    /// The beams of which each computes `len` tokens; 1 without.
    num_beams: u32,
}

impl ContextChunk {
    /// The tokens in it, of each beam.
    pub(super) fn len(&self) -> Tokens {
        self.len
    }

    /// The beams that have it.
    pub(super) fn num_beams(&self) -> u32 {
        self.num_beams
    }

    /// The tokens in it, of all beams.
    pub(super) fn num_tokens(&self) -> Tokens {
        Tokens(self.len.0 * self.num_beams)
    }

    /// Where it begins.
    pub(super) fn start(&self) -> Tokens {
        self.start
    }

    /// Its positions in the context.
    pub(super) fn positions(&self) -> Range<Tokens> {
        self.start..self.start + self.len
    }

    /// Ends it at `end` or, if that leaves anything and cuts none of its `images`, where a block ends before that.
    pub(super) fn cut_at(&mut self, end: Tokens, unit: BlockSize, images: &PromptImages) {
        let aligned = end.floor_to_block(unit);
        let end = match aligned > self.start && images.cut_at(aligned).is_none() {
            true => aligned,
            false => end,
        };
        self.len = self.len.min(end - self.start);
    }

    /// Whether the context is complete with it.
    pub(super) fn is_last(&self) -> bool {
        self.len == self.rest
    }
}

impl TokenBudget {
    /// The budget of a whole step.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let chunk_unit = config.is_context_chunked().then_some(config.chunk_unit);
        let rule = match config.chunk_policy() {
            ContextChunkPolicy::EqualProgress if chunk_unit.is_some() => ChunkRule::EqualProgress,
            _ => ChunkRule::FirstComeFirstServed,
        };
        Self {
            left: config.max_num_tokens,
            chunk_unit,
            rule,
            is_open: true,
        }
    }

    /// Whether another context could get something.
    pub(super) fn is_open(&self) -> bool {
        self.is_open && self.left > Tokens::ZERO
    }

    /// Takes the tokens of those that generate, one for each beam. There are always enough: a sequence only starts
    /// if there are tokens for all its beams.
    pub(super) fn take_generation(&mut self, num_tokens: Tokens) {
        self.left -= num_tokens;
    }

    /// The tokens that are left.
    pub(super) fn left(&self) -> Tokens {
        self.left
    }

    /// Takes the drafts of a sequence, once all others have their tokens.
    pub(super) fn take_drafts(&mut self, num_drafts: Tokens) {
        self.left -= num_drafts;
    }

    /// Takes the chunk of a context with `start` computed tokens and `rest` to compute, by each of `num_beams`. `None`:
    /// neither it nor any context after it gets tokens.
    pub(super) fn take_context(
        &mut self,
        start: Tokens,
        rest: Tokens,
        num_beams: u32,
        images: &PromptImages,
    ) -> Option<ContextChunk> {
        let left = Tokens(self.left.0 / num_beams);
        let wanted = match self.rule {
            ChunkRule::FirstComeFirstServed => rest,
            ChunkRule::EqualProgress => {
                rest.min(next_bound(self.chunk_unit, start, images) - start)
            }
        };
        let len = match self.rule {
            // They may not have a block for each beam, but they always have a token. Their images are computed.
            _ if num_beams > 1 => wanted.min(left),
            ChunkRule::FirstComeFirstServed => cut(self.chunk_unit, start, rest, left, images),
            ChunkRule::EqualProgress if wanted <= left => wanted,
            ChunkRule::EqualProgress => Tokens::ZERO,
        };
        let chunk = ContextChunk {
            start,
            rest,
            len,
            num_beams,
        };
        self.left -= chunk.num_tokens();
        let may_go_on = len == rest || matches!(self.rule, ChunkRule::EqualProgress);
        self.is_open &= may_go_on && len > Tokens::ZERO;
        (len > Tokens::ZERO).then_some(chunk)
    }

    /// Shares the rest among contexts that have got their first unit: one more unit each, in turns.
    pub(super) fn distribute<'i>(
        &mut self,
        contexts: &mut [(SeqSlot, ContextChunk)],
        images_of: impl Fn(SeqSlot) -> &'i PromptImages,
    ) {
        if !matches!(self.rule, ChunkRule::EqualProgress) {
            return;
        }
        let mut any_fits = true;
        while std::mem::take(&mut any_fits) {
            for (slot, chunk) in &mut *contexts {
                let done = chunk.start + chunk.len;
                let one_unit = next_bound(self.chunk_unit, done, images_of(*slot)) - done;
                let more = one_unit.min(chunk.rest - chunk.len);
                let num_tokens = Tokens(more.0.saturating_mul(chunk.num_beams));
                if more > Tokens::ZERO && num_tokens <= self.left {
                    chunk.len += more;
                    self.left -= num_tokens;
                    any_fits = true;
                }
            }
        }
    }
}

/// All of `rest` if it fits into `left`; else as much as ends with a block, which may be nothing. A block that ends
/// within an image which is not cut is cut behind the image if that fits, and in front of it otherwise.
///
/// ```text
/// blocks of 4      0 1 2 3 | 4 5 6 7 | 8 9
/// start = 3, left = 6:   |- chunk -|            ends at 8, not at 9
/// ```
fn cut(
    unit: Option<BlockSize>,
    start: Tokens,
    rest: Tokens,
    left: Tokens,
    images: &PromptImages,
) -> Tokens {
    if rest <= left {
        return rest;
    }
    let Some(unit) = unit else {
        return Tokens::ZERO;
    };
    let end = (start + left).floor_to_block(unit);
    let end = match images.cut_at(end) {
        Some(span) if span.end() <= start + left => span.end(),
        Some(span) => span.position,
        None => end,
    };
    end.saturating_sub(start)
}

/// The first block bound after `position`. If it is within an image which is not cut, the beginning of the image or,
/// where `position` is that, the end.
fn next_bound(unit: Option<BlockSize>, position: Tokens, images: &PromptImages) -> Tokens {
    let Some(unit) = unit else {
        return Tokens(u32::MAX);
    };
    let bound = position.floor_to_block(unit) + unit.tokens();
    match images.cut_at(bound) {
        Some(span) if span.position > position => span.position,
        Some(span) => span.end(),
        None => bound,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{BatchingScheme, Image, ImageSpan};

    /// The chunks of contexts of `(start, rest)` tokens, in order, next to `generating` sequences, with blocks of 4.
    fn chunks(
        config: EngineConfig,
        generating: u32,
        contexts: &[(u32, u32)],
    ) -> (Vec<u32>, TokenBudget) {
        chunks_of_images(config, generating, contexts, &PromptImages::default())
    }

    /// [`chunks`], of contexts that have these images.
    fn chunks_of_images(
        config: EngineConfig,
        generating: u32,
        contexts: &[(u32, u32)],
        images: &PromptImages,
    ) -> (Vec<u32>, TokenBudget) {
        let mut budget = TokenBudget::new(&EngineConfig {
            block_size: BlockSize::new(4).expect("not zero"),
            chunk_unit: BlockSize::new(4).expect("not zero"),
            ..config
        });
        budget.take_generation(Tokens(generating));
        let mut chunks = Vec::new();
        for (slot, &(start, rest)) in (0..).map(SeqSlot).zip(contexts) {
            if !budget.is_open() {
                break;
            }
            chunks.extend(
                budget
                    .take_context(Tokens(start), Tokens(rest), 1, images)
                    .map(|chunk| (slot, chunk)),
            );
        }
        budget.distribute(&mut chunks, |_| images);
        let chunks = chunks.iter().map(|(_, chunk)| chunk.len().0).collect();
        (chunks, budget)
    }

    fn first_come(budget: u32, chunked: bool) -> EngineConfig {
        EngineConfig {
            max_num_tokens: Tokens(budget),
            enable_chunked_context: chunked,
            ..EngineConfig::default()
        }
    }

    #[test]
    fn contexts_that_fit_are_computed_whole() {
        let both = [(0, 5), (0, 5)];
        for is_chunked in [true, false] {
            let (lens, budget) = chunks(first_come(12, is_chunked), 2, &both);
            assert_eq!(lens, [5, 5]);
            // Nothing is left for another one.
            assert!(!budget.is_open());
        }
    }

    #[test]
    fn a_chunk_that_is_not_the_last_is_whole_blocks_and_ends_the_walk() {
        let three = [(0, 5), (0, 9), (0, 1)];
        assert_eq!(chunks(first_come(12, true), 1, &three).0, [5, 4]);
        assert_eq!(chunks(first_come(12, true), 8, &three).0, [4]);
        assert_eq!(chunks(first_come(11, true), 8, &three).0, [0; 0]);
    }

    #[test]
    fn a_chunk_after_a_reused_beginning_ends_where_a_block_does() {
        assert_eq!(chunks(first_come(6, true), 0, &[(3, 9)]).0, [5]);
        assert_eq!(chunks(first_come(4, true), 0, &[(3, 9)]).0, [1]);
    }

    #[test]
    fn without_chunking_the_first_context_that_does_not_fit_ends_the_walk() {
        let three = [(0, 5), (0, 9), (0, 1)];
        assert_eq!(chunks(first_come(12, false), 0, &three).0, [5]);
    }

    #[test]
    fn equal_progress_gives_a_block_each_in_turn() {
        let equal = |budget| EngineConfig {
            chunk_policy: ContextChunkPolicy::EqualProgress,
            ..first_come(budget, true)
        };
        assert_eq!(chunks(equal(16), 0, &[(0, 9), (0, 9)]).0, [8, 8]);
        assert_eq!(chunks(equal(14), 0, &[(0, 9), (0, 9)]).0, [9, 4]);
        assert_eq!(chunks(equal(20), 1, &[(0, 9), (0, 2), (4, 8)]).0, [9, 2, 8]);
        assert_eq!(chunks(equal(7), 0, &[(0, 9), (0, 9), (0, 1)]).0, [4]);
        assert_eq!(chunks(equal(8), 0, &[(3, 9), (0, 9)]).0, [1, 4]);
    }

    #[test]
    fn beams_get_as_many_tokens_each_as_there_are() {
        let equal = EngineConfig {
            chunk_policy: ContextChunkPolicy::EqualProgress,
            ..first_come(14, true)
        };
        for (config, rest, len, left) in [
            (first_come(14, true), 9, 4, 2),
            (first_come(14, false), 9, 4, 2),
            (first_come(14, true), 2, 2, 8),
            (first_come(3, true), 9, 1, 0),
            // To where a block ends.
            (equal, 9, 1, 11),
        ] {
            let mut budget = TokenBudget::new(&EngineConfig {
                chunk_unit: BlockSize::new(4).expect("not zero"),
                ..config
            });
            let chunk = budget.take_context(Tokens(7), Tokens(rest), 3, &PromptImages::default());
            let chunk = chunk.expect("a token each");
            assert_eq!((chunk.len().0, chunk.num_tokens().0), (len, 3 * len));
            assert_eq!(budget.left().0, left);
        }
        let mut budget = TokenBudget::new(&first_come(14, true));
        budget.take_generation(Tokens(12));
        let none = budget.take_context(Tokens(7), Tokens(9), 3, &PromptImages::default());
        assert_eq!(none, None);
        assert!(!budget.is_open());
    }

    #[test]
    fn no_chunk_ends_within_an_image_that_is_not_cut() {
        let span = |position, num_tokens| {
            let image = Image::new(0, Tokens(num_tokens), Arc::new(()));
            ImageSpan::of(Tokens(position), image)
        };
        // text 0 and 1, image 2 to 8, image 9 to 14, text
        let mut images = PromptImages::new(vec![span(2, 7), span(9, 6)]);
        let first = |budget, start: u32, images: &PromptImages| {
            let contexts = [(start, 20 - start), (0, 1)];
            chunks_of_images(first_come(budget, true), 0, &contexts, images).0
        };
        assert_eq!(first(7, 0, &images), [4]);
        images.set_whole(true);
        // In front of the first one; behind it; in front of the second one; behind that.
        for (budget, start, expected) in [
            (8, 0, &[2][..]),
            (9, 0, &[9]),
            (12, 0, &[9]),
            (15, 0, &[15]),
            (19, 0, &[16]),
            (7, 2, &[7]),
            (6, 9, &[6]),
            (7, 9, &[7]),
            // Nothing, and nothing behind it.
            (6, 2, &[]),
            (5, 9, &[]),
        ] {
            let found = first(budget, start, &images);
            assert_eq!(found, expected, "{budget} tokens from {start} on");
        }
        let equal = |budget, contexts: &[(u32, u32)]| {
            let config = EngineConfig {
                chunk_policy: ContextChunkPolicy::EqualProgress,
                ..first_come(budget, true)
            };
            chunks_of_images(config, 0, contexts, &images).0
        };
        assert_eq!(equal(4, &[(0, 20), (0, 20)]), [2, 2]);
        assert_eq!(equal(11, &[(0, 20), (0, 20)]), [9, 2]);
        assert_eq!(equal(18, &[(0, 20), (0, 20)]), [9, 9]);
        assert_eq!(equal(13, &[(2, 18), (9, 11)]), [7, 6]);
        assert_eq!(equal(6, &[(2, 18), (9, 11)]), [0; 0]);
    }

    #[test]
    fn a_chunk_that_ends_in_front_of_an_image_cuts_none_before_it() {
        let span = ImageSpan::of(Tokens(2), Image::new(0, Tokens(4), Arc::new(())));
        let mut images = PromptImages::new(vec![span]);
        let cut_at = |end, images: &PromptImages| {
            let mut chunk = ContextChunk {
                start: Tokens(1),
                rest: Tokens(20),
                len: Tokens(20),
                num_beams: 1,
            };
            let unit = BlockSize::new(4).expect("not zero");
            chunk.cut_at(Tokens(end), unit, images);
            chunk.positions().end.0
        };
        assert_eq!([7, 9].map(|end| cut_at(end, &images)), [4, 8]);
        images.set_whole(true);
        assert_eq!([7, 9].map(|end| cut_at(end, &images)), [7, 8]);
    }

    #[test]
    fn lockstep_cuts_contexts_whatever_else_is_configured() {
        let v1 = EngineConfig {
            scheme: BatchingScheme::V1,
            chunk_policy: ContextChunkPolicy::EqualProgress,
            ..first_come(12, false)
        };
        assert_eq!(chunks(v1, 0, &[(0, 5), (0, 9), (0, 1)]).0, [5, 4]);
    }
}
