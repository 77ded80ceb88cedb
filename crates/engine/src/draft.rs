//! Draft tokens: guesses at the next tokens, verified in the step that computes them.
//!
//! A sequence in generation phase computes its last token and the drafts after it. A token is sampled from each row of
//! logits, exactly as without drafts. The row of a draft counts only if the draft is the token that was sampled from
//! the row before it. So drafts change how many tokens a step generates, and nothing else.
//!
//! ```text
//! computed     last token   draft 1    draft 2    draft 3
//! sampled      = draft 1    = draft 2  other      -          three tokens: two drafts are accepted
//! ```
//!
//! They come from:
//!
//! - the request: the output that its client expects, as long as the output follows it;
//! - prompt look-up (Saxena, "Prompt lookup decoding", 2023): the last tokens have occurred before, and what followed
//!   them then may follow now. Of the longest such n-grams the latest is used. The copy may run into itself, as in Ziv
//!   and Lempel's compression (1977), so that repeating text is predicted to any length:
//!
//! ```text
//! tokens   a b c d e x y a b c |  d e x y ..       n-gram a b c
//! tokens   x y x y x y         |  x y x y ..       n-gram x y x y, two tokens before
//! ```
//!
//! - a draft model of the runner, or a head of the model, where neither of the two has any: its tokens are filled into
//!   the planned step, see [`Step::drafts_to_make`](super::Step::drafts_to_make).

use std::sync::Arc;

use crate::acceptance::Acceptance;
use crate::draft_prices::DraftPrices;
use crate::model_drafts::ModelDrafts;
use inflight_base::{TokenId, Tokens};
use inflight_sampling::SamplingParams;

/// The most draft tokens of one sequence in one step that can be configured.
pub const MAX_DRAFT_TOKENS: u32 = 64;

/// The most tokens of an n-gram.
pub const MAX_NGRAM: u32 = 32;

/// How many tokens before the end are searched. It bounds the cost of a look-up.
const MAX_LOOK_BACK: usize = 16384;

/// How many occurrences of the last token are compared. It bounds the rest of the cost.
const MAX_CANDIDATES: usize = 256;

/// How many tokens are compared at a time when one is searched for.
const LANES: usize = 64;

/// Whether and how sequences are drafted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// The most draft tokens of one sequence in one step: 1 to [`MAX_DRAFT_TOKENS`].
    pub max_draft_tokens: u32,
    /// Prompt look-up; `None`: only the outputs that requests expect are drafted.
    pub prompt_lookup: Option<PromptLookup>,
    /// Whether the runner has a draft model, for sequences that have no other drafts.
    pub has_draft_model: bool,
    /// Whether that computes drafts again once they are accepted: a head does, from the states that the model has
    /// computed since.
    pub recomputes_drafts: bool,
}

/// Which n-grams are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// The fewest tokens that must have occurred before: 1 to `max`.
    pub min: u32,
    /// The most tokens that are compared: up to [`MAX_NGRAM`].
    pub max: u32,
}

/// The drafts of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftOptions {
    /// The most drafts in one step; `None`: as many as the configuration allows.
    pub max_draft_tokens: Option<u32>,
    /// The expected beginning of its output.
    pub expected: Arc<[TokenId]>,
}

/// The totals of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftTotals {
    /// Draft tokens that were computed.
    pub num_drafted: u64,
    /// Draft tokens that were accepted.
    pub num_accepted: u64,
}

impl DraftTotals {
    pub(super) fn add(&mut self, num_drafted: usize, num_accepted: usize) {
        self.num_drafted += num_drafted as u64;
        self.num_accepted += num_accepted as u64;
    }

    /// The share of accepted drafts, 0 to 1; 0 if nothing was drafted.
    pub fn acceptance_rate(self) -> f64 {
        match self.num_drafted {
            0 => 0.0,
            num_drafted => self.num_accepted as f64 / num_drafted as f64,
        }
    }

    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            num_drafted: self.num_drafted + other.num_drafted,
            num_accepted: self.num_accepted + other.num_accepted,
        }
    }
}

/// Drafts the tokens of one sequence.
#[derive(Debug)]
pub(super) struct Drafter {
    max_draft_tokens: usize,
    prompt_lookup: Option<PromptLookup>,
    expected: Arc<[TokenId]>,
    /// How many generated tokens have matched the expected ones; `None` once one has not.
    num_followed: Option<usize>,
    acceptance: Acceptance,
    /// `None` without a draft model.
    model: Option<ModelDrafts>,
    totals: DraftTotals,
    /// The totals that were returned last.
    told: DraftTotals,
}

impl Drafter {
    /// The drafter of a sequence; `None` if it is never drafted.
    ///
    /// A user's logits processor is called for each token of the output, in order, and for no other. So sequences with
    /// one have no drafts.
    pub(super) fn new(
        speculation: &Speculation,
        options: DraftOptions,
        sampling: &SamplingParams,
    ) -> Option<Self> {
        let max = speculation.max_draft_tokens;
        let max_draft_tokens = options.max_draft_tokens.unwrap_or(max).min(max) as usize;
        let is_drafted = speculation.prompt_lookup.is_some()
            || speculation.has_draft_model
            || !options.expected.is_empty();
        (max_draft_tokens > 0 && is_drafted && sampling.logits_processor.is_none()).then(|| Self {
            max_draft_tokens,
            prompt_lookup: speculation.prompt_lookup,
            expected: options.expected,
            num_followed: Some(0),
            acceptance: Acceptance::default(),
            model: speculation
                .has_draft_model
                .then(|| ModelDrafts::new(speculation.recomputes_drafts)),
            totals: DraftTotals::default(),
            told: DraftTotals::default(),
        })
    }

    /// Counts the drafts of a step, after which `computed` positions of the sequence are in the cache.
    pub(super) fn count(&mut self, num_drafted: usize, num_accepted: usize, computed: Tokens) {
        self.totals.add(num_drafted, num_accepted);
        let model = self.model.as_mut();
        let is_made = model.is_some_and(|it| it.land(num_drafted, num_accepted, computed));
        if !is_made {
            self.acceptance.count(num_drafted, num_accepted);
        }
    }

    /// The draft model's part of the sequence, if there is one.
    pub(super) fn model(&self) -> Option<&ModelDrafts> {
        self.model.as_ref()
    }

    /// The same, to be changed.
    pub(super) fn model_mut(&mut self) -> Option<&mut ModelDrafts> {
        self.model.as_mut()
    }

    /// The most drafts that are worth their price in the next step, if they are only verified; `None`: they cost
    /// nothing.
    fn max_worth(&mut self, prices: Option<&DraftPrices>) -> usize {
        prices.map_or(usize::MAX, |it| self.acceptance.num_drafts(it.given))
    }

    /// The totals, if they have changed since the last call.
    pub(super) fn new_totals(&mut self) -> Option<DraftTotals> {
        (self.totals != self.told).then(|| {
            self.told = self.totals;
            self.totals
        })
    }

    /// Appends up to `room.max` drafts to `tokens`, which has room for them, as many as are worth their price. Returns
    /// how many. 0 stands for those that the draft model makes.
    pub(super) fn append(
        &mut self,
        tokens: &mut Vec<TokenId>,
        num_prompt_tokens: usize,
        room: &DraftRoom<'_>,
        sampling: &SamplingParams,
    ) -> usize {
        let max = room.max.min(self.max_draft_tokens);
        let num_found = match max.min(self.max_worth(room.prices)) {
            0 => 0,
            max => self.append_found(tokens, num_prompt_tokens, max, sampling),
        };
        let Some(model) = self.model.as_mut().filter(|_| num_found == 0) else {
            return num_found;
        };
        // The last token is not computed.
        let computed = Tokens(tokens.len() as u32) - Tokens(1);
        if model.num_missed(computed) > room.max_caught_up {
            return 0;
        }
        let num_worth = room.prices.map_or(usize::MAX, |prices| {
            model.num_worth(prices, computed, room.num_left)
        });
        let num_made = max.min(num_worth);
        if num_made > 0 {
            tokens.resize(tokens.len() + num_made, 0);
            model.make();
        }
        num_made
    }

    /// Appends up to `max` drafts that need no model. A token that ends the sequence is never drafted: the row of
    /// logits behind it would be wasted.
    fn append_found(
        &mut self,
        tokens: &mut Vec<TokenId>,
        num_prompt_tokens: usize,
        max: usize,
        sampling: &SamplingParams,
    ) -> usize {
        let ends =
            |token| sampling.end_ids.contains(&token) || sampling.stop_token_ids.contains(&token);
        let len = tokens.len();
        let prompt_lookup = self.prompt_lookup;
        let expected = self.still_expected(&tokens[num_prompt_tokens..]).iter();
        tokens.extend(expected.copied().take(max).take_while(|&it| !ends(it)));
        if tokens.len() == len
            && let Some(first) = prompt_lookup.and_then(|it| it.find(tokens))
        {
            for place in first..first + max {
                let token = tokens[place];
                if ends(token) {
                    break;
                }
                tokens.push(token);
            }
        }
        tokens.len() - len
    }

    /// The expected tokens after `generated`.
    fn still_expected(&mut self, generated: &[TokenId]) -> &[TokenId] {
        let Some(num_followed) = self.num_followed else {
            return &[];
        };
        let new = &generated[num_followed..];
        let left = &self.expected[num_followed..];
        if !left.starts_with(new) {
            self.num_followed = None;
            return &[];
        }
        self.num_followed = Some(generated.len());
        &left[new.len()..]
    }
}

impl PromptLookup {
    /// The place in `tokens` behind the latest of the longest n-grams that occur before and at the end. `None` if none
    /// of at least `min` tokens occurs within the range that is searched.
    fn find(self, tokens: &[TokenId]) -> Option<usize> {
        let (&last, before) = tokens.split_last()?;
        let (min, max) = (self.min as usize, self.max as usize);
        let lowest = before.len().saturating_sub(MAX_LOOK_BACK);
        let mut end = before.len();
        let mut found = None;
        let mut longest = min.max(1) - 1;
        for _ in 0..MAX_CANDIDATES {
            let Some(place) = last_position(&before[lowest..end], last) else {
                break;
            };
            end = lowest + place;
            // The token itself, and the equal ones before it.
            let len = 1 + same_at_end(&tokens[..end], before, max);
            if len > longest {
                longest = len;
                found = Some(end + 1);
            }
            if longest >= max {
                break;
            }
        }
        found
    }
}

/// The last place of `token` in `tokens`.
fn last_position(tokens: &[TokenId], token: TokenId) -> Option<usize> {
    let mut end = tokens.len();
    while end > 0 {
        let start = end.saturating_sub(LANES);
        let lanes = &tokens[start..end];
        // Without an early exit, so that the comparison is vectorised.
        if lanes.iter().fold(false, |any, &it| any | (it == token)) {
            let place = lanes.iter().rposition(|&it| it == token);
            return place.map(|place| start + place);
        }
        end = start;
    }
    None
}

/// How many tokens at the ends of `a` and `b` are equal, up to `max`.
fn same_at_end(a: &[TokenId], b: &[TokenId], max: usize) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev()).take(max);
    pairs.take_while(|(a, b)| a == b).count()
}

/// What the drafts of a sequence may take in a step.
pub(super) struct DraftRoom<'a> {
    /// How many there may be.
    pub(super) max: usize,
    /// The most tokens that the sequence still generates.
    pub(super) num_left: Tokens,
    /// The most positions that the draft model may catch up on for them.
    pub(super) max_caught_up: Tokens,
    /// What they cost; `None`: nothing.
    pub(super) prices: Option<&'a DraftPrices>,
}

/// How many drafts a sequence of `len` tokens may have, if at most `max_kv_len` tokens are ever computed, the step has
/// `left` tokens, and there are blocks for positions up to `covered`.
pub(super) fn room_for_drafts(
    len: Tokens,
    max_kv_len: Tokens,
    covered: Tokens,
    left: Tokens,
) -> usize {
    let by_length = max_kv_len.min(covered).saturating_sub(len);
    by_length.min(left).index()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use inflight_sampling::{LogitsProcessor, ProcessLogits, SampleError, SamplingInput};

    const LOOKUP: PromptLookup = PromptLookup { min: 2, max: 4 };

    fn speculation(prompt_lookup: Option<PromptLookup>) -> Speculation {
        Speculation {
            max_draft_tokens: 5,
            prompt_lookup,
            has_draft_model: false,
            recomputes_drafts: false,
        }
    }

    fn room(max: usize) -> DraftRoom<'static> {
        DraftRoom {
            max,
            num_left: Tokens(99),
            max_caught_up: Tokens(99),
            prices: None,
        }
    }

    fn looked_up(lookup: PromptLookup, tokens: &[TokenId], max: usize) -> Vec<TokenId> {
        let mut drafter = Drafter::new(
            &speculation(Some(lookup)),
            DraftOptions::default(),
            &SamplingParams::default(),
        )
        .expect("looks up");
        let mut all = tokens.to_vec();
        let params = SamplingParams {
            end_ids: vec![99],
            stop_token_ids: vec![98],
            ..SamplingParams::default()
        };
        let num = drafter.append(&mut all, 1, &room(max), &params);
        assert_eq!(
            (&all[..tokens.len()], all.len()),
            (tokens, tokens.len() + num)
        );
        all.split_off(tokens.len())
    }

    #[test]
    fn what_followed_the_longest_and_of_those_the_latest_n_gram_is_drafted() {
        for (tokens, drafts) in [
            (&[1, 2, 3, 4, 5, 6, 1, 2][..], &[3, 4, 5, 6, 1][..]),
            // Once after three equal tokens, later after two.
            (&[7, 1, 2, 3, 4, 0, 1, 2, 9, 7, 1, 2], &[3, 4, 0, 1, 2]),
            // Twice after two.
            (
                &[1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 9, 10, 1, 2],
                &[6, 7, 8, 9, 10],
            ),
            // The longest n-gram that counts has four tokens.
            (
                &[9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 7, 7, 9, 1, 2, 3, 4],
                &[7, 7, 9, 1, 2],
            ),
            // Text that repeats itself.
            (&[5, 6, 5, 6, 5, 6], &[5, 6, 5, 6, 5]),
            (&[4, 4, 4], &[4, 4, 4, 4, 4]),
            // One equal token is too few, and none is equal.
            (&[1, 2, 3, 4, 2], &[]),
            (&[1, 2, 3], &[]),
            (&[1], &[]),
            // It stops before what ends a sequence.
            (&[1, 2, 3, 99, 5, 1, 2], &[3]),
            (&[1, 2, 98, 5, 1, 2], &[]),
        ] {
            assert_eq!(looked_up(LOOKUP, tokens, 64), drafts, "{tokens:?}");
        }
        assert_eq!(
            looked_up(LOOKUP, &[4, 4, 4], 2),
            [4, 4],
            "no more than asked"
        );
        let one = PromptLookup { min: 1, max: 1 };
        assert_eq!(looked_up(one, &[1, 2, 8, 3, 2, 7, 2], 64), [7, 2, 7, 2, 7]);
    }

    #[test]
    fn the_look_up_is_what_the_plain_search_gives() {
        // Every length around the lanes, of few different tokens.
        let mut random = 1_u64;
        for len in (1..200).chain([400, 1000]) {
            for num_different in [2, 3, 9].into_iter().filter(|it| len / it <= 200) {
                let mut draw = || {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    ((random >> 33) % num_different) as TokenId
                };
                let tokens: Vec<_> = (0..len).map(|_| draw()).collect();
                for lookup in [LOOKUP, PromptLookup { min: 1, max: 8 }] {
                    assert_eq!(lookup.find(&tokens), plain_search(lookup, &tokens));
                }
            }
        }
    }

    /// By n-gram, the longest first, and by place, the last first.
    fn plain_search(lookup: PromptLookup, tokens: &[TokenId]) -> Option<usize> {
        let sizes = (lookup.min as usize..=lookup.max as usize).rev();
        sizes.filter(|size| *size < tokens.len()).find_map(|size| {
            let ngram = &tokens[tokens.len() - size..];
            let place = tokens[..tokens.len() - 1]
                .windows(size)
                .rposition(|it| it == ngram)?;
            Some(place + size)
        })
    }

    #[test]
    fn the_look_up_goes_back_so_far_and_no_further() {
        let mut tokens = vec![0; MAX_LOOK_BACK + 20];
        let end = tokens.len();
        tokens[end - 2..].copy_from_slice(&[1, 2]);
        tokens[..3].copy_from_slice(&[1, 2, 3]);
        assert_eq!(LOOKUP.find(&tokens), None);
        let place = end - MAX_LOOK_BACK - 1;
        tokens[place - 1..place + 1].copy_from_slice(&[1, 2]);
        assert_eq!(LOOKUP.find(&tokens), Some(place + 1));
        // Nor beyond this many occurrences of the last token.
        for num_between in [MAX_CANDIDATES - 1, MAX_CANDIDATES] {
            let between = [3, 2].repeat(num_between);
            let tokens = [&[1, 2][..], &between, &[1, 2]].concat();
            let expected = (num_between < MAX_CANDIDATES).then_some(2);
            assert_eq!(LOOKUP.find(&tokens), expected);
        }
    }

    #[test]
    fn what_a_request_expects_is_drafted_as_long_as_it_comes() {
        let expecting = |max_draft_tokens, expected: &[TokenId]| DraftOptions {
            max_draft_tokens,
            expected: expected.into(),
        };
        let params = SamplingParams {
            end_ids: vec![99],
            ..SamplingParams::default()
        };
        let expected = [11, 12, 13, 14, 15, 16, 99, 17];
        let mut drafter =
            Drafter::new(&speculation(None), expecting(None, &expected), &params).expect("drafts");
        let mut drafts_after = |generated: &[TokenId], max| {
            let mut tokens = [&[1, 2][..], generated].concat();
            let num = drafter.append(&mut tokens, 2, &room(max), &params);
            tokens.split_off(tokens.len() - num)
        };
        assert_eq!(drafts_after(&[11], 64), [12, 13, 14, 15, 16]);
        assert_eq!(drafts_after(&[11, 12, 13], 2), [14, 15]);
        assert_eq!(drafts_after(&[11, 12, 13, 14], 64), [15, 16]);
        assert_eq!(drafts_after(&[11, 12, 13, 14, 15, 9], 64), [0; 0]);
        // What was left is not found again.
        assert_eq!(drafts_after(&[11, 12, 13, 14, 15, 9, 99], 64), [0; 0]);

        let lowered = Drafter::new(&speculation(None), expecting(Some(1), &[3, 4]), &params);
        let mut tokens = vec![1];
        assert_eq!(
            lowered
                .expect("drafts")
                .append(&mut tokens, 1, &room(9), &params),
            1
        );
        let raised = Drafter::new(&speculation(None), expecting(Some(9), &[3; 9]), &params);
        assert_eq!(
            raised
                .expect("drafts")
                .append(&mut tokens, 2, &room(9), &params),
            5
        );
    }

    #[test]
    fn an_output_longer_than_was_expected_is_looked_up() {
        let options = DraftOptions {
            expected: [5].into(),
            ..DraftOptions::default()
        };
        let params = SamplingParams::default();
        let mut drafter = Drafter::new(&speculation(Some(LOOKUP)), options, &params).expect("both");
        let mut tokens = vec![5, 6, 7, 5, 6];
        assert_eq!(drafter.append(&mut tokens, 3, &room(1), &params), 1);
        assert_eq!(tokens.last(), Some(&7));
    }

    #[test]
    fn who_wants_none_or_has_a_processor_of_its_own_gets_none() {
        struct Any;
        impl ProcessLogits for Any {
            fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
                Ok(())
            }
        }
        let on = speculation(Some(LOOKUP));
        let params = SamplingParams::default();
        let off = DraftOptions {
            max_draft_tokens: Some(0),
            expected: [1].into(),
        };
        assert!(Drafter::new(&on, off, &params).is_none());
        assert!(Drafter::new(&speculation(None), DraftOptions::default(), &params).is_none());
        let processed = SamplingParams {
            logits_processor: Some(LogitsProcessor(Arc::new(Any))),
            ..params
        };
        assert!(Drafter::new(&on, DraftOptions::default(), &processed).is_none());
    }

    #[test]
    fn drafts_fit_the_length_the_blocks_and_the_step() {
        let room = |len, max, covered, left| {
            room_for_drafts(Tokens(len), Tokens(max), Tokens(covered), Tokens(left))
        };
        assert_eq!(room(10, 14, 16, 9), 4);
        assert_eq!(room(10, 14, 12, 9), 2);
        assert_eq!(room(10, 14, 16, 3), 3);
        assert_eq!(room(10, 10, 16, 3), 0);
        assert_eq!(room(10, 14, 10, 3), 0);
    }

    #[test]
    fn totals_of_drafts_are_summed_and_have_a_rate() {
        let totals = |num_drafted, num_accepted| DraftTotals {
            num_drafted,
            num_accepted,
        };
        assert_eq!(totals(8, 2).plus(totals(4, 4)), totals(12, 6));
        assert_eq!(totals(8, 2).acceptance_rate(), 0.25);
        assert_eq!(totals(0, 0).acceptance_rate(), 0.0);
    }
}
