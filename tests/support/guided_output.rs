//! Random outputs that a guide of the demo model allows.

use inflight_base::TokenId;
use inflight_sampling::{GuideTokens, SampleError};

/// Tokens of the demo model.
pub const VOCAB_SIZE: u32 = 1536;

/// Its end id.
pub const END_ID: TokenId = 2;

/// A random output that a guide allows, which grows by one token at a time.
pub struct Output {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    seed: u64,
}

impl Output {
    /// An empty one.
    pub fn new(seed: u64) -> Self {
        Self {
            tokens: Vec::new(),
            seed,
        }
    }

    /// Adds a token other than the end. Returns whether there is one.
    ///
    /// # Errors
    /// The guide's.
    pub fn grow(&mut self, guide: &dyn GuideTokens) -> Result<bool, SampleError> {
        let mut logits = vec![0.0; VOCAB_SIZE as usize];
        guide.restrict(&mut logits, &self.tokens)?;
        let is_allowed = |id: &TokenId| *id != END_ID && logits[*id as usize] == 0.0;
        let allowed: Vec<TokenId> = (0..VOCAB_SIZE).filter(is_allowed).collect();
        // Knuth's generator: MMIX.
        self.seed = self
            .seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let chosen = (self.seed >> 33) as usize % allowed.len().max(1);
        self.tokens.extend(allowed.get(chosen));
        Ok(!allowed.is_empty())
    }
}
