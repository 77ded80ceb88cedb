//! Stop words and bad words as token ids, in the form of TensorRT-LLM's tensors.

use inflight_base::TokenId;

/// The most words of one list. Every word costs time in every step.
const MAX_WORDS: usize = 64;
/// The most token ids of one word.
const MAX_WORD_IDS: usize = 256;

/// Reads the rows of a `[2, n]` tensor: the token ids of all words, one word after the other, and where each word ends
/// among them, padded with -1. Empty words are left out.
///
/// ```text
/// ids    11  12  13   0        the words 11 12 and 13
/// ends    2   3  -1  -1
/// ```
///
/// `None` if the rows are not of this form, or if there are more than 64 words, or one of more than 256 ids.
pub fn words_of_ids(ids: &[i32], ends: &[i32]) -> Option<Vec<Vec<TokenId>>> {
    if ids.len() != ends.len() {
        return None;
    }
    let mut words = Vec::new();
    let mut start = 0;
    for &end in ends.iter().take_while(|end| **end != -1) {
        let word = ids.get(start..usize::try_from(end).ok()?)?;
        start += word.len();
        if word.len() > MAX_WORD_IDS {
            return None;
        }
        if !word.is_empty() {
            let word = word.iter().map(|id| TokenId::try_from(*id).ok());
            words.push(word.collect::<Option<_>>()?);
        }
        if words.len() > MAX_WORDS {
            return None;
        }
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_end_where_the_second_row_says() {
        let words = |ids: &[i32], ends: &[i32]| words_of_ids(ids, ends);
        assert_eq!(words(&[], &[]), Some(vec![]));
        assert_eq!(words(&[0], &[-1]), Some(vec![]));
        let two = Some(vec![vec![11, 12], vec![13]]);
        assert_eq!(words(&[11, 12, 13, 0], &[2, 3, -1, -1]), two);
        // An empty word in the middle, and ends after the padding has begun.
        assert_eq!(words(&[11, 12, 13], &[2, 2, 3]), two);
        assert_eq!(
            words(&[11, 12, 13], &[3, -1, 9]),
            Some(vec![vec![11, 12, 13]])
        );
    }

    #[test]
    fn invalid_rows_are_refused() {
        for (ids, ends) in [
            (&[1, 2][..], &[2][..]),
            (&[1, 2], &[3, -1]),
            (&[1, 2], &[2, 1]),
            (&[1, 2], &[-2, 2]),
            (&[1, -2], &[2, -1]),
            (&[1, 2], &[i32::MAX, -1]),
        ] {
            assert_eq!(words_of_ids(ids, ends), None, "{ids:?} {ends:?}");
        }
        let ids = |num| vec![1; num];
        let single: Vec<i32> = (1..=64).collect();
        assert_eq!(
            words_of_ids(&ids(64), &single).map(|words| words.len()),
            Some(64)
        );
        let single: Vec<i32> = (1..=65).collect();
        assert_eq!(words_of_ids(&ids(65), &single), None);
        let one = |num: usize| [vec![num as i32], vec![-1; num - 1]].concat();
        assert!(words_of_ids(&ids(256), &one(256)).is_some());
        assert_eq!(words_of_ids(&ids(257), &one(257)), None);
    }
}
