//! How far the runner's draft model has computed a sequence.
//!
//! A block has one id for the keys and values of both. The draft model computes a sequence only in steps for which
//! it makes drafts, so it first catches up on what the model has computed since:
//!
//! ```text
//! tokens of the sequence   | computed by both | by the model only | last | drafts ...... |
//! first pass                                  |   caught up on    | last |                  gives the first draft
//! passes after it                                                        | all but the last |  give one each
//! ```
//!
//! Of blocks that were found in the cache, nobody knows whether the draft model has computed them, too: they are taken
//! as they are. Wrong keys and values there make wrong drafts, and nothing else.
//!
//! A sequence begins with the acceptance of those before it: where drafts are wrong, the draft model need not compute
//! the prompt of each new request to learn it again.

use crate::acceptance::Acceptance;
use crate::draft_prices::DraftPrices;
use inflight_base::Tokens;

/// What remains of the weight of a draft when another one is verified: some hundred drafts count.
const FORGETTING: f32 = 0.99;

/// The drafts of all sequences that the draft model has made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experience {
    /// The weights of the drafts that were verified, and of those that were right.
    num_verified: f32,
    num_right: f32,
}

impl Default for Experience {
    /// As if one of four drafts had been right: less than what most draft models reach, but enough to try one that is
    /// cheap.
    fn default() -> Self {
        Self {
            num_verified: 2.0,
            num_right: 0.5,
        }
    }
}

impl Experience {
    /// Counts the drafts of a sequence in a step. Those behind the first wrong one say nothing.
    pub(super) fn count(&mut self, num_drafted: usize, num_accepted: usize) {
        let num_verified = num_drafted.min(num_accepted + 1);
        for n in 0..num_verified {
            let is_right = n < num_accepted;
            self.num_verified = self.num_verified * FORGETTING + 1.0;
            self.num_right = self.num_right * FORGETTING + f32::from(u8::from(is_right));
        }
    }

    /// What a sequence knows at its beginning.
    fn acceptance(&self) -> Acceptance {
        let probability = self.num_right / self.num_verified;
        match self.num_verified > Self::default().num_verified {
            true => Acceptance::at(probability),
            false => Acceptance::unknown(probability),
        }
    }
}

/// The draft model's part of one sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ModelDrafts {
    /// `None` until its first drafts are considered.
    acceptance: Option<Acceptance>,
    /// Positions that it has computed, or that were found in the cache.
    computed: Tokens,
    /// Whether it makes the drafts of the step that is planned and has not landed.
    is_out: bool,
    /// Whether drafts that were accepted have to be computed again.
    recomputes_drafts: bool,
}

impl ModelDrafts {
    /// The state of a new sequence. `recomputes_drafts`: the draft model is a head, which computes drafts from its own
    /// states, and once they are accepted, again from the model's states.
    pub(super) fn new(recomputes_drafts: bool) -> Self {
        Self {
            recomputes_drafts,
            ..Self::default()
        }
    }

    /// The sequence begins, or goes on after a pause, with so many positions in the cache.
    pub(super) fn start(&mut self, computed: Tokens) {
        self.computed = computed;
    }

    /// The sequence is computed again from behind so many positions.
    pub(super) fn go_back(&mut self, computed: Tokens) {
        self.computed = self.computed.min(computed);
    }

    /// It makes the drafts of the step that is planned.
    pub(super) fn make(&mut self) {
        self.is_out = true;
    }

    /// How many positions it has computed, if it makes the drafts of the step that is planned.
    pub(super) fn made_from(&self) -> Option<Tokens> {
        self.is_out.then_some(self.computed)
    }

    /// How many positions it has to catch up on, if `computed` are in the cache.
    pub(super) fn num_missed(&self, computed: Tokens) -> Tokens {
        computed - self.computed
    }

    /// Learns from the sequences before it, if it has had no drafts.
    pub(super) fn learn(&mut self, from: &Experience) {
        self.acceptance.get_or_insert(from.acceptance());
    }

    /// Whether a draft is worth its price, apart from what has to be caught up on.
    pub(super) fn is_worth(&self, prices: &DraftPrices) -> bool {
        let acceptance = self.acceptance.unwrap_or_default();
        acceptance.num_worth(prices.made) > 0
    }

    /// How many drafts of its next step are worth their price, if `computed` positions are in the cache, and at most
    /// `num_left` tokens follow.
    pub(super) fn num_worth(
        &mut self,
        prices: &DraftPrices,
        computed: Tokens,
        num_left: Tokens,
    ) -> usize {
        let catching_up = self.num_missed(computed).0 as f32 * prices.caught_up;
        let acceptance = self.acceptance.get_or_insert_default();
        // What each later step gains with one draft, at most.
        let gain = num_left.0 as f32 * (acceptance.probability() - prices.made);
        match acceptance.num_worth(prices.made) {
            1.. if gain < catching_up => 0,
            0 => usize::from(acceptance.probes(prices.made + catching_up)),
            num_worth => num_worth,
        }
    }

    /// A step has landed, with drafts of any kind, after which `computed` positions of the sequence are in the cache.
    /// The last of its drafts was not computed: if all were accepted, the draft model lacks that one. Returns whether
    /// it had made them.
    pub(super) fn land(
        &mut self,
        num_drafted: usize,
        num_accepted: usize,
        computed: Tokens,
    ) -> bool {
        if !std::mem::take(&mut self.is_out) {
            return false;
        }
        self.computed = match num_accepted == num_drafted {
            _ if self.recomputes_drafts => computed - Tokens(num_accepted as u32),
            true => computed - Tokens(1),
            false => computed,
        };
        let acceptance = self.acceptance.get_or_insert_default();
        acceptance.count(num_drafted, num_accepted);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lacks_the_last_draft_if_that_was_accepted_and_what_others_drafted() {
        let mut model = ModelDrafts::default();
        model.start(Tokens(4));
        assert_eq!(model.made_from(), None);
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(4)));
        // Ten positions were computed, then the last token and three drafts, two of them right.
        assert!(model.land(3, 2, Tokens(13)));
        assert!(!model.land(1, 1, Tokens(15)), "others have made it");
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(13)));
        assert!(model.land(3, 3, Tokens(19)));
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(18)));
    }

    const PRICES: DraftPrices = DraftPrices {
        given: 0.05,
        made: 0.2,
        caught_up: 0.01,
    };

    /// The number of the first step with drafts, of a sequence that begins after so many wrong drafts of others.
    fn num_steps_to_probe(
        prices: &DraftPrices,
        num_wrong: usize,
        num_prompt_tokens: u32,
    ) -> Option<usize> {
        let mut experience = Experience::default();
        (0..num_wrong).for_each(|_| experience.count(4, 0));
        let mut model = ModelDrafts::default();
        model.learn(&experience);
        let computed = Tokens(num_prompt_tokens);
        (1..1000).find(|_| model.num_worth(prices, computed, Tokens(1000)) > 0)
    }

    #[test]
    fn the_first_sequence_of_all_tries_dear_drafts_at_once_unless_its_prompt_is_long() {
        let prices = DraftPrices {
            made: 0.6,
            ..PRICES
        };
        let first_step = |num_wrong, num_prompt_tokens| {
            num_steps_to_probe(&prices, num_wrong, num_prompt_tokens)
        };
        assert_eq!(first_step(0, 15), Some(1));
        assert_eq!(first_step(1, 15), Some(25), "0.75 at 3 % a step");
        assert_eq!(first_step(0, 90), Some(50), "1.5 at 3 % a step");
    }

    #[test]
    fn the_prompts_of_new_sequences_are_not_caught_up_on_where_drafts_are_wrong() {
        let num_steps_to_probe = |num_wrong, num_prompt_tokens| {
            num_steps_to_probe(&PRICES, num_wrong, num_prompt_tokens)
        };
        assert_eq!(num_steps_to_probe(0, 100), Some(1), "unknown");
        assert_eq!(num_steps_to_probe(100, 0), Some(7), "0.2 at 3 % a step");
        assert_eq!(num_steps_to_probe(100, 90), Some(37), "1.1 at 3 % a step");
    }

    #[test]
    fn a_head_has_the_last_token_and_no_drafts() {
        let mut head = ModelDrafts::new(true);
        head.start(Tokens(4));
        for (num_accepted, computed, left) in [(2, 13, 11), (3, 17, 14), (0, 18, 18)] {
            head.make();
            assert!(head.land(3, num_accepted, Tokens(computed)));
            head.make();
            assert_eq!(head.made_from(), Some(Tokens(left)));
        }
    }

    #[test]
    fn it_has_missed_what_others_have_computed_since() {
        let mut model = ModelDrafts::default();
        model.start(Tokens(32));
        assert_eq!(model.num_missed(Tokens(100)), Tokens(68));
        model.make();
        assert!(model.land(2, 1, Tokens(102)));
        assert_eq!(model.num_missed(Tokens(102)), Tokens(0));
    }

    #[test]
    fn a_long_prompt_is_not_caught_up_on_for_a_few_tokens() {
        let mut model = ModelDrafts::default();
        model.learn(&Experience::default());
        let mut num_worth = |num_left| model.num_worth(&PRICES, Tokens(300), Tokens(num_left));
        // Three tokens' worth, of which each draft gains 0.05.
        assert_eq!((num_worth(59), num_worth(61)), (0, 1));
    }

    #[test]
    fn a_sequence_begins_with_what_others_have_experienced() {
        let mut experience = Experience::default();
        // One draft was right, the next one wrong, and the other two say nothing.
        experience.count(4, 1);
        let verified = (2.0 * 0.99 + 1.0) * 0.99 + 1.0;
        let right = (0.5 * 0.99 + 1.0) * 0.99;
        let probability = experience.acceptance().probability();
        assert!((probability - right / verified).abs() < 1e-6);
    }

    #[test]
    fn a_sequence_that_is_computed_again_takes_its_drafts_back() {
        let mut model = ModelDrafts::default();
        model.start(Tokens(10));
        model.make();
        model.go_back(Tokens(7));
        assert_eq!(model.made_from(), Some(Tokens(7)));
        model.go_back(Tokens(9));
        assert_eq!(model.made_from(), Some(Tokens(7)));
    }

    #[test]
    fn drafts_are_worth_it_below_their_price() {
        // Half of them are right, as long as nothing is known.
        let model = ModelDrafts::default();
        let at = |made| DraftPrices { made, ..PRICES };
        assert!(model.is_worth(&at(0.4)));
        assert!(!model.is_worth(&at(0.6)));
    }

    #[test]
    fn a_prompt_is_caught_up_on_if_that_gains_as_much_as_it_costs() {
        let prices = DraftPrices {
            made: 0.25,
            caught_up: 0.25,
            ..PRICES
        };
        let num_worth = |num_left| {
            let mut model = ModelDrafts::default();
            model.num_worth(&prices, Tokens(10), Tokens(num_left))
        };
        assert_eq!(num_worth(9), 0);
        assert!(num_worth(10) > 0);
    }
}
