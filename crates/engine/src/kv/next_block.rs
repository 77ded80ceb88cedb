//! The name of a block's content, known before the block is written.

use inflight_base::TokenId;

/// The content that a block will have. Two are equal if and only if the same tokens follow the same content, except for
/// collisions of 64-bit hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NextBlock {
    parent: u64,
    tokens_hash: u64,
}

impl NextBlock {
    /// The content of a block that `tokens` fill below the content `parent`.
    pub(super) fn new(parent: u64, tokens: &[TokenId]) -> Self {
        // Multiplications by an odd number lose nothing, two tokens at a time; `mix` spreads the sum over all bits.
        let add =
            |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (pairs, last) = tokens.as_chunks();
        let pairs = pairs
            .iter()
            .map(|&[a, b]| u64::from(a) | u64::from(b) << 32);
        let last = last.iter().map(|&token| u64::from(token));
        Self {
            parent,
            tokens_hash: mix(pairs.chain(last).fold(0, add)),
        }
    }

    /// A hash of which every bit can be used.
    pub(super) fn key(self) -> u64 {
        mix(self.parent.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.tokens_hash)
    }
}

/// The finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// 2014): every bit of `x` changes half of the bits of the result.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The first outputs of splitmix64 with the seed 1234567.
    #[test]
    fn it_mixes_as_splitmix64() {
        let state = |step: u64| {
            0x9e37_79b9_7f4a_7c15_u64
                .wrapping_mul(step)
                .wrapping_add(1_234_567)
        };
        let outputs = [1, 2, 3].map(|step| mix(state(step)));
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(outputs, expected);
    }

    #[test]
    fn keys_of_different_parents_and_tokens_differ() {
        let blocks = (0..64).flat_map(|parent| {
            (0..64).map(move |tokens_hash| NextBlock {
                parent,
                tokens_hash,
            })
        });
        let keys: BTreeSet<_> = blocks.map(NextBlock::key).collect();
        assert_eq!(keys.len(), 64 * 64);
    }
}
