//! Changes of logits that a device can make: biases, forbidden tokens, penalties.

use crate::SamplingInput;
use crate::processors::{bad_word_ends, has_penalties};
use inflight_base::TokenId;

/// What changes a row of logits before its token is chosen: what [`Sampler`](crate::Sampler) does with
/// `logit_bias`, `bad_words`, `min_tokens` and penalties. Its lists are words of [`ChangeLists`], one behind the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitChanges {
    /// The index of its first word.
    pub start: u32,
    /// Biases, each a token and the bits of an f32; no token has two.
    pub num_biases: u32,
    /// Tokens that are ruled out after that.
    pub num_forbidden: u32,
    /// Tokens of the sequence that count for `repetition_penalty` only.
    pub num_ignored: u32,
    /// Tokens of the sequence that count for all penalties, as often as they occur.
    pub num_counted: u32,
    /// As in [`SamplingParams`](crate::SamplingParams); so are the others.
    pub repetition_penalty: f32,
    /// See there.
    pub presence_penalty: f32,
    /// See there.
    pub frequency_penalty: f32,
}

/// The lists of all rows of a step.
#[derive(Clone, Debug)]
pub struct ChangeLists {
    words: Vec<u32>,
    max_words: usize,
}

impl ChangeLists {
    /// Empty lists, for steps of at most `max_num_sequences` sequences of at most `max_seq_len` tokens.
    pub fn new(max_num_sequences: usize, max_seq_len: usize) -> Self {
        Self {
            words: Vec::new(),
            max_words: Self::max_words(max_num_sequences, max_seq_len),
        }
    }

    /// The most words that the lists of such a step have: rows for which there is no room are left to the host.
    pub fn max_words(max_num_sequences: usize, max_seq_len: usize) -> usize {
        /// 4 MiB, which take 0.1 to 0.2 ms on their way to a device.
        const MOST: usize = 1 << 20;
        /// Room for biases and forbidden tokens.
        const OTHER_WORDS: usize = 2048;
        max_num_sequences
            .saturating_mul(max_seq_len.saturating_add(OTHER_WORDS))
            .min(MOST)
    }

    /// Removes all lists.
    pub fn clear(&mut self) {
        self.words.clear();
    }

    /// The words of all lists.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Adds the lists of a row, if its options change logits. `None`: a device cannot, for there is no room, or a token
    /// has several biases.
    pub(super) fn add(&mut self, input: SamplingInput<'_>) -> Option<LogitChanges> {
        let params = input.params;
        let start = self.words.len();
        let has_penalties = has_penalties(params);
        let ignored = params.prompt_ignore_length as usize;
        let (ignored, counted) = input.tokens.split_at(ignored.min(input.num_prompt_tokens));
        let (ignored, counted) = match (has_penalties, params.repetition_penalty != 1.0) {
            (false, _) => (&[][..], &[][..]),
            (true, false) => (&[][..], counted),
            (true, true) => (ignored, counted),
        };
        // The most that it may become, before anything is written.
        let num_end_ids = params.end_ids.len() + params.stop_token_ids.len();
        let num_words = 2 * params.logit_bias.len()
            + params.bad_words.len()
            + num_end_ids
            + ignored.len()
            + counted.len();
        let is_distinct = params.logit_bias.is_sorted_by(|a, b| a.0 < b.0);
        if num_words > self.max_words - start || !is_distinct {
            return None;
        }
        let is_bias = |(_, bias): &&(TokenId, f32)| *bias != f32::NEG_INFINITY;
        let biases = params.logit_bias.iter().filter(is_bias);
        let biases = biases.flat_map(|&(token, bias)| [token, bias.to_bits()]);
        self.words.extend(biases);
        let forbidden = self.words.len();
        let ruled_out = params.logit_bias.iter().filter(|bias| !is_bias(bias));
        self.words.extend(ruled_out.map(|(token, _)| *token));
        self.words.extend(bad_word_ends(input));
        if input.must_go_on() {
            let ends = params.end_ids.iter().chain(&params.stop_token_ids);
            self.words.extend(ends);
        }
        let tokens = self.words.len();
        self.words.extend_from_slice(ignored);
        self.words.extend_from_slice(counted);
        Some(LogitChanges {
            start: start as u32,
            num_biases: (forbidden - start) as u32 / 2,
            num_forbidden: (tokens - forbidden) as u32,
            num_ignored: ignored.len() as u32,
            num_counted: counted.len() as u32,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
        })
    }
}

impl LogitChanges {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.num_biases + self.num_forbidden + self.num_ignored + self.num_counted == 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Owner, SamplingParams};

    fn add(
        lists: &mut ChangeLists,
        change: impl FnOnce(&mut SamplingParams),
    ) -> Option<(LogitChanges, Vec<u32>)> {
        let mut params = SamplingParams::default();
        change(&mut params);
        let changes = lists.add(SamplingInput {
            params: &params,
            tokens: &[5, 6, 7, 8],
            num_prompt_tokens: 3,
            beam: 0,
            owner: Owner::default(),
        })?;
        let words = lists.words()[changes.start as usize..].to_vec();
        Some((changes, words))
    }

    #[test]
    fn lists_follow_one_another() {
        let mut lists = ChangeLists::new(4, 16);
        let (changes, words) = add(&mut lists, |params| {
            params.logit_bias = Arc::from([(1, 2.0), (2, f32::NEG_INFINITY)]);
            params.bad_words = Arc::from([vec![9], vec![8, 10], vec![7, 11]]);
            (params.min_tokens, params.end_ids) = (2, vec![0]);
            params.repetition_penalty = 1.5;
        })
        .expect("room");
        assert_eq!(words, [1, 2_f32.to_bits(), 2, 9, 10, 0, 5, 6, 7, 8]);
        let lens = [changes.num_biases, changes.num_forbidden];
        assert_eq!(lens, [1, 4]);
        assert_eq!([changes.num_ignored, changes.num_counted], [3, 1]);
        let (next, words) = add(&mut lists, |params| params.presence_penalty = 1.0).expect("room");
        assert_eq!((next.start, words), (10, vec![8]));
        assert_eq!([next.num_biases, next.num_forbidden], [0, 0]);
        assert_eq!([next.num_ignored, next.num_counted], [0, 1]);
        lists.clear();
        let (again, _) = add(&mut lists, |params| params.presence_penalty = 1.0).expect("room");
        assert_eq!(again.start, 0);
    }

    #[test]
    fn a_row_without_lists_changes_nothing() {
        assert!(LogitChanges::default().is_empty());
        let lists: [fn(&mut LogitChanges); 4] = [
            |changes| changes.num_biases = 1,
            |changes| changes.num_forbidden = 1,
            |changes| changes.num_ignored = 1,
            |changes| changes.num_counted = 1,
        ];
        for (index, list) in lists.into_iter().enumerate() {
            let mut changes = LogitChanges::default();
            list(&mut changes);
            assert!(!changes.is_empty(), "list {index}");
        }
    }

    #[test]
    fn no_more_is_uploaded_than_there_is_room_for() {
        let mut lists = ChangeLists::new(1, 16);
        let num_biases = ChangeLists::max_words(1, 16) as u32 / 2;
        let many = |lists: &mut ChangeLists, num| {
            let bias: Vec<_> = (0..num).map(|token| (token, 1.0)).collect();
            add(lists, |params| params.logit_bias = bias.into())
        };
        assert_eq!(many(&mut lists, num_biases + 1), None);
        assert!(lists.words().is_empty());
        assert!(many(&mut lists, num_biases).is_some());
        assert_eq!(many(&mut lists, 1), None);
    }

    #[test]
    fn there_must_be_room_for_every_list_of_a_row() {
        // 3 biases of two words, 3 bad words, 2 end ids and 3 stop ids, 3 tokens of the prompt and 1 of the output.
        let num_words = 6 + 3 + 5 + 4;
        for (max_words, fits) in [(num_words - 1, false), (num_words, true)] {
            let mut lists = ChangeLists {
                words: Vec::new(),
                max_words,
            };
            let added = add(&mut lists, |params| {
                params.logit_bias = Arc::from([(1, 2.0), (2, 2.0), (3, 2.0)]);
                params.bad_words = Arc::from([vec![9], vec![10], vec![11]]);
                (params.min_tokens, params.end_ids) = (2, vec![20, 21]);
                params.stop_token_ids = vec![22, 23, 24];
                params.repetition_penalty = 1.5;
            });
            let num_added = added.map(|(_, words)| words.len());
            assert_eq!(num_added, fits.then_some(num_words));
        }
    }

    #[test]
    fn two_biases_of_a_token_are_left_to_the_host() {
        let mut lists = ChangeLists::new(4, 16);
        let bias = Arc::from([(1, 2.0), (1, 3.0)]);
        assert_eq!(add(&mut lists, |params| params.logit_bias = bias), None);
    }
}
