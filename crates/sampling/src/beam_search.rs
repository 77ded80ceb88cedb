//! Beam search: which beams survive, which end, and when the search is over.
//!
//! A search keeps the `width` most likely texts. In each step every beam has candidates, its most likely next tokens.
//! The best continuations of all beams become the new beams; those that end become hypotheses.
//!
//! ```text
//! beam 0  -0.9 |--> a -1.1 |                                          sorted by score:
//!              |--> b -2.0 |    continuations of all beams            0a -1.1   survives
//! beam 1  -1.0 |--> END -1.2 |                                        1END -1.2  a hypothesis
//!              |--> a -1.5 |                                          1a -1.5   survives
//! ```
//!
//! This is the beam search of Hugging Face transformers (`generate` with `num_beams`, without sampling). Of the
//! continuations in order of score, those among the first `width` may become hypotheses, and the first `width` that do
//! not end survive. A score is a sum of log-probabilities. Hypotheses are ranked by the sum of log-probabilities
//! divided by `num_tokens ^ length_penalty`. Ties go to the lower beam, then to the lower token.

use std::sync::Arc;

use crate::{FinishReason, TokenLogProbs};
use inflight_base::TokenId;

/// The beam search options of one request, checked: every value is in its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// The number of beams; at least 2.
    pub width: u32,
    /// How many of the best hypotheses are returned; 1 to `width`.
    pub num_returned: u32,
    /// Above 0 favours longer hypotheses, below 0 shorter ones; finite. `0` ranks by the sums alone.
    pub length_penalty: f32,
    /// When a search that has `width` hypotheses is over.
    pub early_stopping: EarlyStopping,
    /// Subtracted from a continuation's score, for each better one of the same beam, when continuations are ranked.
    /// The scores themselves do not change. At least 0, finite. (Li and Jurafsky, "Mutual
    /// information and diverse decoding improve neural machine translation", 2016.)
    pub diversity_rate: f32,
}

/// When a search that has as many hypotheses as beams is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// At once.
    Always,
    /// When the best beam, ended now, would be no better than the worst hypothesis.
    Likely,
    /// When no beam can become better than the worst hypothesis, whatever its length.
    Never,
}

impl EarlyStopping {
    /// TensorRT-LLM's integers: 0, 1, and all others.
    pub const fn of_integer(value: i64) -> Self {
        match value {
            0 => Self::Likely,
            1 => Self::Always,
            _ => Self::Never,
        }
    }
}

/// A token that could continue a beam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamCandidate {
    /// The token.
    pub token: TokenId,
    /// Its log-probability after the request's options have changed it.
    pub log_prob: f32,
}

/// A beam and a token that could continue it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Continuation {
    /// The beam.
    pub beam: usize,
    /// The token.
    pub candidate: BeamCandidate,
    /// The candidate's place among the candidates of its beam.
    pub place: usize,
    /// The sum of the beam's score and the candidate's log-probability.
    pub score: f64,
}

/// The continuations that a step selects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The new beams, the best first.
    pub alive: Vec<Continuation>,
    /// The continuations that end, and why.
    pub ended: Vec<(Continuation, FinishReason)>,
}

/// A text that a search has found, or one of its beams.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hypothesis {
    /// The generated tokens, including the one that ended it.
    pub tokens: Vec<TokenId>,
    /// The log-probability of each token after the request's options have changed it.
    pub log_probs: Vec<f32>,
    /// Their sum.
    pub cum_log_prob: f32,
    /// The model's logits from which each token was chosen, `[vocab_size]`, if they are wanted. Hypotheses with a
    /// common beginning share them.
    pub generation_logits: Vec<Arc<Vec<f32>>>,
    /// The model's own log-probabilities at each token, if they are wanted.
    pub model_log_probs: Vec<Arc<TokenLogProbs>>,
    /// Why it ended; `None` for a beam that continues.
    pub finish_reason: Option<FinishReason>,
}

/// The best hypotheses so far.
#[derive(Debug)]
pub struct Hypotheses {
    search: BeamSearch,
    max_new_tokens: u32,
    /// Each with the value by which it is ranked, the best first; at most `width`.
    best: Vec<(f64, Hypothesis)>,
}

impl BeamSearch {
    /// How many candidates each beam needs if `num_end_ids` tokens end a text: even if all of those are the most likely
    /// ones, `width` candidates are left.
    pub fn num_candidates(&self, num_end_ids: usize) -> usize {
        self.width as usize + num_end_ids
    }

    /// Selects among the continuations of beams with these `scores` and `candidates`, the most likely first. `end`
    /// returns why a continuation ends its text, if it does.
    pub fn select(
        &self,
        scores: &[f64],
        candidates: &[impl AsRef<[BeamCandidate]>],
        end: impl Fn(&Continuation) -> Option<FinishReason>,
    ) -> Selection {
        let width = self.width as usize;
        let mut all: Vec<_> = std::iter::zip(scores, candidates)
            .enumerate()
            .flat_map(|(beam, (&score, candidates))| {
                let candidates = candidates.as_ref();
                candidates
                    .iter()
                    .enumerate()
                    .map(move |(place, &candidate)| {
                        let score = score + f64::from(candidate.log_prob);
                        let handicap = f64::from(self.diversity_rate) * place as f64;
                        let continuation = Continuation {
                            beam,
                            candidate,
                            place,
                            score,
                        };
                        (score - handicap, continuation)
                    })
            })
            .collect();
        // A stable sort keeps ties in order of beam, then of candidate.
        all.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut selection = Selection::default();
        for (place, (_, continuation)) in all.into_iter().enumerate() {
            if selection.alive.len() == width {
                break;
            }
            match end(&continuation) {
                None => selection.alive.push(continuation),
                Some(reason) if place < width => selection.ended.push((continuation, reason)),
                Some(_) => {}
            }
        }
        selection
    }

    /// The value by which hypotheses are ranked.
    fn normalised(&self, score: f64, num_tokens: u32) -> f64 {
        score / f64::from(num_tokens).powf(f64::from(self.length_penalty))
    }
}

impl Hypotheses {
    /// No hypotheses yet, of texts of at most `max_new_tokens`.
    pub fn new(search: BeamSearch, max_new_tokens: u32) -> Self {
        Self {
            search,
            max_new_tokens,
            best: Vec::new(),
        }
    }

    /// Adds a text with this `score` and `num_tokens`, if it is among the best. Of equal ones the first stays.
    pub fn offer(&mut self, score: f64, num_tokens: u32, text: Hypothesis) {
        let normalised = self.search.normalised(score, num_tokens);
        let place = self.best.partition_point(|&(other, _)| other >= normalised);
        let width = self.search.width as usize;
        if place < width {
            self.best.truncate(width - 1);
            self.best.insert(place, (normalised, text));
        }
    }

    /// Whether the search is over, if the best beam has this `score` and all beams have `num_tokens`. `None`: there are
    /// no beams.
    pub fn is_over(&self, score: Option<f64>, num_tokens: u32) -> bool {
        let Some(score) = score else {
            return true;
        };
        let is_full = self.best.len() == self.search.width as usize;
        let Some(&(worst, _)) = self.best.last().filter(|_| is_full) else {
            return false;
        };
        let lengthens = self.search.length_penalty > 0.0;
        let num_tokens = match self.search.early_stopping {
            EarlyStopping::Always => return true,
            EarlyStopping::Never if lengthens => self.max_new_tokens,
            EarlyStopping::Likely | EarlyStopping::Never => num_tokens,
        };
        self.search.normalised(score, num_tokens) <= worst
    }

    /// The result of the search if it ended now: the best of the hypotheses and of the beams, the best first. The beams
    /// have these `scores`, the best first, and `num_tokens` each. `text` builds a beam's hypothesis; on ties finished
    /// hypotheses come first.
    pub fn best_so_far(
        &self,
        scores: &[f64],
        num_tokens: u32,
        text: impl Fn(usize) -> Hypothesis,
    ) -> Box<[Hypothesis]> {
        let ended = self.best.iter().map(|&(normalised, _)| normalised);
        let beams = scores.iter();
        let beams = beams.map(|&score| self.search.normalised(score, num_tokens));
        let mut all: Vec<_> = ended.chain(beams).enumerate().collect();
        all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let best = all.into_iter().take(self.search.num_returned as usize);
        best.map(|(index, _)| match self.best.get(index) {
            Some((_, ended)) => ended.clone(),
            None => text(index - self.best.len()),
        })
        .collect()
    }

    /// Takes out the hypotheses to be returned, the best first.
    pub fn take_best(&mut self) -> Box<[Hypothesis]> {
        let best = self.best.drain(..).map(|(_, hypothesis)| hypothesis);
        best.take(self.search.num_returned as usize).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SEARCH: BeamSearch = BeamSearch {
        width: 2,
        num_returned: 2,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Likely,
        diversity_rate: 0.0,
    };

    const END: TokenId = 0;

    fn end(it: &Continuation) -> Option<FinishReason> {
        (it.candidate.token == END).then_some(FinishReason::EndId)
    }

    /// The most likely first, as a beam names them.
    fn candidates(log_probs: &[(TokenId, f32)]) -> Vec<BeamCandidate> {
        let each = log_probs.iter();
        each.map(|&(token, log_prob)| BeamCandidate { token, log_prob })
            .collect()
    }

    fn alive(selection: &Selection) -> Vec<(usize, TokenId)> {
        let each = selection.alive.iter();
        each.map(|it| (it.beam, it.candidate.token)).collect()
    }

    fn ended(selection: &Selection) -> Vec<usize> {
        selection.ended.iter().map(|(it, _)| it.beam).collect()
    }

    fn offer(hypotheses: &mut Hypotheses, score: f64, num_tokens: u32) {
        hypotheses.offer(
            score,
            num_tokens,
            Hypothesis {
                tokens: vec![1; num_tokens as usize],
                cum_log_prob: score as f32,
                finish_reason: Some(FinishReason::EndId),
                ..Hypothesis::default()
            },
        );
    }

    fn scores(mut hypotheses: Hypotheses) -> Vec<f32> {
        let best = hypotheses.take_best();
        best.iter().map(|it| it.cum_log_prob).collect()
    }

    #[test]
    fn of_equal_continuations_the_lower_beam_and_then_the_lower_token_goes_on() {
        let same = candidates(&[(3, -1.0), (5, -1.0), (4, -2.0)]);
        let selection = SEARCH.select(&[-1.0, -1.0], &[same.clone(), same.clone()], end);
        assert_eq!(alive(&selection), [(0, 3), (0, 5)]);
        let selection = SEARCH.select(&[-1.5, -1.0], &[same.clone(), same], end);
        assert_eq!(alive(&selection), [(1, 3), (1, 5)]);
    }

    #[test]
    fn only_the_first_continuations_become_hypotheses_and_others_take_their_places() {
        let selection = SEARCH.select(
            &[-1.0, -1.1],
            &[
                candidates(&[(END, -0.1), (2, -0.2), (3, -3.0)]),
                candidates(&[(END, -0.5), (4, -0.6), (5, -4.0)]),
            ],
            end,
        );
        // 0 END, 0 2, 1 END, 1 4: the third place is too late to end.
        assert_eq!(ended(&selection), [0]);
        assert_eq!(alive(&selection), [(0, 2), (1, 4)]);
        let score = selection.alive[0].score;
        assert!((score + 1.2).abs() < 1e-6, "{score}");
    }

    #[test]
    fn fewer_candidates_than_beams_leave_fewer_beams() {
        let selection = SEARCH.select(&[0.0], &[candidates(&[(1, -1.0)])], end);
        assert_eq!(alive(&selection), [(0, 1)]);
        let selection = SEARCH.select(&[0.0, 0.0], &[candidates(&[]), candidates(&[])], end);
        assert_eq!(selection, Selection::default());
    }

    #[test]
    fn a_diversity_rate_puts_the_worse_children_of_a_beam_back_and_leaves_their_scores() {
        let both = [
            candidates(&[(1, -0.1), (2, -0.2), (3, -0.3)]),
            candidates(&[(1, -0.5), (2, -0.6), (3, -0.7)]),
        ];
        let pick = |diversity_rate| {
            let search = BeamSearch {
                diversity_rate,
                ..SEARCH
            };
            search.select(&[-1.0, -1.0], &both, end)
        };
        assert_eq!(alive(&pick(0.0)), [(0, 1), (0, 2)]);
        assert_eq!(alive(&pick(0.5)), [(0, 1), (1, 1)]);
        let (plain, diverse) = (pick(0.0), pick(0.01));
        assert_eq!(plain, diverse);
    }

    #[test]
    fn hypotheses_are_compared_by_their_score_per_length_and_the_worst_gives_way() {
        for (length_penalty, expected) in [
            (0.0, [-2.0, -2.5]),
            (1.0, [-2.5, -4.0]),
            (-1.0, [-2.0, -2.5]),
        ] {
            let search = BeamSearch {
                length_penalty,
                ..SEARCH
            };
            let mut hypotheses = Hypotheses::new(search, 16);
            offer(&mut hypotheses, -4.0, 4);
            offer(&mut hypotheses, -2.0, 1);
            offer(&mut hypotheses, -2.5, 3);
            assert_eq!(scores(hypotheses), expected, "penalty {length_penalty}");
        }
    }

    #[test]
    fn a_full_search_keeps_as_many_hypotheses_as_it_has_beams() {
        let search = BeamSearch {
            early_stopping: EarlyStopping::Always,
            ..SEARCH
        };
        let mut hypotheses = Hypotheses::new(search, 16);
        for score in [-2.0, -1.0, -3.0, -1.5] {
            offer(&mut hypotheses, score, 1);
        }
        assert!(hypotheses.is_over(Some(-1.0), 1));
        assert_eq!(scores(hypotheses), [-1.0, -1.5]);
    }

    #[test]
    fn integers_name_the_ends_of_a_search_as_in_tensorrt_llm() {
        let named = [-1, 0, 1, 2].map(EarlyStopping::of_integer);
        let expected = [
            EarlyStopping::Never,
            EarlyStopping::Likely,
            EarlyStopping::Always,
            EarlyStopping::Never,
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn what_there_is_so_far_are_texts_that_have_ended_and_beams_in_one_order() {
        let search = BeamSearch { width: 3, ..SEARCH };
        let so_far = |num_returned, scores: &[f64]| -> Vec<_> {
            let search = BeamSearch {
                num_returned,
                ..search
            };
            let mut hypotheses = Hypotheses::new(search, 16);
            offer(&mut hypotheses, -2.0, 2);
            offer(&mut hypotheses, -6.0, 3);
            let beam = |beam: usize| Hypothesis {
                cum_log_prob: scores[beam] as f32,
                ..Hypothesis::default()
            };
            let best = hypotheses.best_so_far(scores, 4, beam);
            let each = best.iter();
            each.map(|it| (it.cum_log_prob, it.finish_reason.is_some()))
                .collect()
        };
        // By token: -0.5, -1 ended, -1.5, -2 ended.
        let all = [(-2.0, false), (-2.0, true), (-6.0, false)];
        assert_eq!(so_far(3, &[-2.0, -6.0]), all);
        assert_eq!(so_far(1, &[-2.0, -6.0]), all[..1]);
        assert_eq!(so_far(2, &[-4.0]), [(-2.0, true), (-4.0, false)], "equal");
        assert_eq!(so_far(3, &[]), [(-2.0, true), (-6.0, true)]);
    }

    #[test]
    fn a_search_is_over_when_it_is_full_and_no_beam_could_improve_it() {
        let is_over = |early_stopping, length_penalty, score| {
            let search = BeamSearch {
                early_stopping,
                length_penalty,
                ..SEARCH
            };
            let mut hypotheses = Hypotheses::new(search, 10);
            offer(&mut hypotheses, -1.0, 2);
            assert!(!hypotheses.is_over(Some(score), 2), "one is missing");
            assert!(hypotheses.is_over(None, 2), "no beam continues");
            offer(&mut hypotheses, -1.2, 2);
            hypotheses.is_over(Some(score), 2)
        };
        for score in [-1.1, -1.2, -5.0, -6.1] {
            assert!(is_over(EarlyStopping::Always, 1.0, score));
            let as_long_as_now = score <= -1.2;
            assert_eq!(is_over(EarlyStopping::Likely, 1.0, score), as_long_as_now);
            // With 10 tokens, -6 would be as good as -1.2 with 2.
            assert_eq!(is_over(EarlyStopping::Never, 1.0, score), score <= -6.0);
            for shortens in [0.0, -1.0] {
                assert_eq!(
                    is_over(EarlyStopping::Never, shortens, score),
                    as_long_as_now
                );
            }
        }
    }

    /// The log-probability of `token` after `text`: any numbers will do.
    fn log_prob(text: &[TokenId], token: TokenId, seed: u64) -> f32 {
        let mut hash = seed;
        for &token in text.iter().chain([&token]) {
            hash = (hash ^ u64::from(token + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        }
        -((hash % 4096) as f32) / 512.0
    }

    /// A whole search over texts of `vocab_size` tokens.
    fn run(search: BeamSearch, vocab_size: u32, max_len: u32, seed: u64) -> Box<[Hypothesis]> {
        let mut hypotheses = Hypotheses::new(search, max_len);
        let mut beams = vec![(0.0, vec![])];
        for len in 1..=max_len {
            let name = |(_, text): &(f64, Vec<TokenId>)| {
                let all = (0..vocab_size).map(|token| (token, log_prob(text, token, seed)));
                let mut all: Vec<_> = all.collect();
                all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
                all.truncate(search.num_candidates(1));
                candidates(&all)
            };
            let named: Vec<_> = beams.iter().map(name).collect();
            let scores: Vec<_> = beams.iter().map(|(score, _)| *score).collect();
            let at_end = (len == max_len).then_some(FinishReason::Length);
            let selection = search.select(&scores, &named, |it| end(it).or(at_end));
            let text = |it: &Continuation| [&beams[it.beam].1[..], &[it.candidate.token]].concat();
            for (it, finish_reason) in &selection.ended {
                hypotheses.offer(
                    it.score,
                    len,
                    Hypothesis {
                        tokens: text(it),
                        cum_log_prob: it.score as f32,
                        finish_reason: Some(*finish_reason),
                        ..Hypothesis::default()
                    },
                );
            }
            beams = selection
                .alive
                .iter()
                .map(|it| (it.score, text(it)))
                .collect();
            if hypotheses.is_over(beams.first().map(|(score, _)| *score), len) {
                break;
            }
        }
        hypotheses.take_best()
    }

    proptest! {
        /// A search that is wide enough for all texts finds the best of them all.
        #[test]
        fn a_search_that_drops_nothing_finds_the_best(
            seed in any::<u64>(),
            length_penalty in prop_oneof![Just(0.0f32), Just(1.0), Just(2.0), Just(-0.5)],
        ) {
            let (vocab_size, max_len) = (3, 4);
            let search = BeamSearch {
                width: 81,
                num_returned: 81,
                length_penalty,
                early_stopping: EarlyStopping::Never,
                diversity_rate: 0.0,
            };
            let ours = run(search, vocab_size, max_len, seed);
            let mut all = Vec::new();
            let mut open = vec![(0.0f64, vec![])];
            while let Some((score, text)) = open.pop() {
                for token in 0..vocab_size {
                    let score = score + f64::from(log_prob(&text, token, seed));
                    let text = [&text[..], &[token]].concat();
                    if token == END || text.len() == max_len as usize {
                        let divisor = (text.len() as f64).powf(f64::from(length_penalty));
                        all.push((score / divisor, text));
                    } else {
                        open.push((score, text));
                    }
                }
            }
            all.sort_by(|(a, _), (b, _)| b.total_cmp(a));
            prop_assert_eq!(ours.len(), all.len());
            for (ours, (score, text)) in ours.iter().zip(&all) {
                let divisor = (ours.tokens.len() as f64).powf(f64::from(length_penalty));
                let difference = f64::from(ours.cum_log_prob) / divisor - score;
                prop_assert!(difference.abs() < 1e-4, "{:?} {:?}", ours, text);
            }
        }
    }
}
