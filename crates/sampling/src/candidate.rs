//! The order of tokens by likelihood, and the range of it that is kept.

use inflight_base::TokenId;

/// A token and its logit as one number whose order is likelihood: the larger logit first, the lower
/// id on a tie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u64);

impl Candidate {
    pub(super) fn new(logit: f32, id: TokenId) -> Self {
        // Adding zero makes -0.0 equal to 0.0. Flipping all bits of negative numbers and the sign
        // of the others gives them the order of integers.
        let bits = (logit + 0.0).to_bits();
        let flip = if bits >> 31 == 1 { u32::MAX } else { 1 << 31 };
        Self(u64::from(bits ^ flip) << 32 | u64::from(!id))
    }

    pub(super) fn logit(self) -> f32 {
        let order = (self.0 >> 32) as u32;
        let flip = if order >> 31 == 1 { 1 << 31 } else { u32::MAX };
        f32::from_bits(order ^ flip)
    }

    pub(super) fn id(self) -> TokenId {
        !(self.0 as u32)
    }

    /// Whether a token is at least as likely as this one.
    #[inline(always)]
    pub(super) fn keeps(self, logit: f32, id: TokenId) -> bool {
        logit > self.logit() || (logit == self.logit() && id <= self.id())
    }
}

/// The tokens that are kept: those between two likelihoods.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// The least likely token.
    pub least: Candidate,
    /// The logit of the most likely tokens.
    pub most: f32,
}

impl Cut {
    #[inline(always)]
    pub(super) fn keeps(self, logit: f32, id: TokenId) -> bool {
        self.least.keeps(logit, id) && logit <= self.most
    }
}
