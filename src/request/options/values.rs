//! Parsers of option values: each function reads one kind and returns `None` for anything else.

use std::ops::RangeInclusive;

use serde_json::Value;

use inflight_base::{RequestError, TokenId};
use inflight_sampling::{EarlyStopping, words_of_ids};

/// The largest count that an option takes.
pub(super) const MAX_COUNT: u32 = i32::MAX as u32;
/// Words in a list, bytes of a word, entries of `logit_bias`. These are bounded because they cost time in every step.
pub(super) const MAX_WORDS: usize = 64;
pub(super) const MAX_WORD_BYTES: usize = 256;
pub(super) const MAX_BIASES: usize = 1024;
const MAX_BIAS: f64 = 1000.0;
pub(super) const MAX_END_IDS: usize = 16;
/// Allowed ids are read with the logits, once per token.
pub(super) const MAX_ALLOWED_IDS: usize = 65536;
pub(super) const MAX_DRAFT_IDS: usize = 65536;
pub(super) const MAX_PROMPT_IDS: usize = 65536;

pub(super) fn set<T>(place: &mut T, value: Option<T>) -> Option<()> {
    *place = value?;
    Some(())
}

/// The members of a `sampling_parameters` option.
pub(super) fn nested(value: &Value) -> Result<serde_json::Map<String, Value>, RequestError> {
    match parsed(value) {
        Some(Value::Object(members)) if !members.contains_key("sampling_parameters") => Ok(members),
        _ => Err(RequestError::Option {
            name: "sampling_parameters".to_owned(),
            value: shortened(&value.to_string()),
            expected: expected_of("a JSON object of options", value),
        }),
    }
}

/// A parameter's structured value: itself, or the JSON in its string.
pub(crate) fn parsed(value: &Value) -> Option<Value> {
    match value {
        Value::String(text) => serde_json::from_str(text).ok(),
        other => Some(other.clone()),
    }
}

/// Images in texts: one, or a list, itself or as JSON.
pub(super) fn image_texts(value: &Value) -> Option<Vec<String>> {
    let list = match value {
        Value::String(text) if !text.trim_start().starts_with('[') => {
            return Some(vec![text.clone()]);
        }
        value => parsed(value)?,
    };
    let text = |it: &Value| it.as_str().map(str::to_owned);
    list.as_array()?.iter().map(text).collect()
}

/// What an option expects, with the syntax error if `value` looks like JSON and is not.
pub(super) fn expected_of(expected: &str, value: &Value) -> String {
    let looks_like_json = |text: &&str| text.trim_start().starts_with(['{', '[']);
    match value.as_str().filter(looks_like_json).map(json_of) {
        Some(Err(problem)) => format!("{expected}: {problem}"),
        _ => expected.to_owned(),
    }
}

/// Parses JSON.
///
/// # Errors
/// The syntax error.
pub(crate) fn json_of(text: &str) -> Result<Value, String> {
    const MAX_DEPTH: u32 = 127;
    serde_json::from_str(text).map_err(|error| {
        let problem = error.to_string();
        match problem.strip_prefix("recursion limit exceeded") {
            Some(place) => format!("it nests more than {MAX_DEPTH} deep{place}"),
            None => format!("it is not JSON: {problem}"),
        }
    })
}

/// gRPC clients without a type for a number send it as a string.
pub(super) fn unsigned(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_str()?.trim().parse().ok())
}

/// A seed; -1 stands for none, which is the default.
pub(super) fn seed(value: &Value) -> Option<u64> {
    let is_none = signed(value) == Some(-1);
    unsigned(value).or(is_none.then_some(0))
}

pub(super) fn integer(value: &Value, range: RangeInclusive<u32>) -> Option<u32> {
    u32::try_from(unsigned(value)?)
        .ok()
        .filter(|count| range.contains(count))
}

pub(super) fn signed(value: &Value) -> Option<i32> {
    let written = value.as_str().and_then(|text| text.trim().parse().ok());
    value.as_i64().or(written)?.try_into().ok()
}

pub(super) fn number(value: &Value, range: RangeInclusive<f64>) -> Option<f32> {
    let number: f64 = value
        .as_f64()
        .or_else(|| value.as_str()?.trim().parse().ok())?;
    range.contains(&number).then_some(number as f32)
}

pub(crate) fn flag(value: &Value) -> Option<bool> {
    value
        .as_bool()
        .or_else(|| value.as_str()?.trim().to_ascii_lowercase().parse().ok())
}

pub(super) fn words(value: &Value) -> Option<Vec<String>> {
    let list = match value {
        Value::String(text) if !text.trim_start().starts_with('[') => vec![text.clone()],
        _ => {
            let list = parsed(value)?;
            list.as_array()?
                .iter()
                .map(|w| w.as_str().map(str::to_owned))
                .collect::<Option<_>>()?
        }
    };
    let fits = |word: &String| word.len() <= MAX_WORD_BYTES;
    if list.len() > MAX_WORDS || !list.iter().all(fits) {
        return None;
    }
    // Clients of TensorRT-LLM say with an empty text that there is no word.
    Some(list.into_iter().filter(|word| !word.is_empty()).collect())
}

/// A probability that is not zero.
pub(super) fn share(value: &Value) -> Option<f32> {
    number(value, 0.0..=1.0).filter(|share| *share > 0.0)
}

/// A token id, or a list of at most `max_len` of them.
pub(super) fn ids(value: &Value, max_len: usize) -> Option<Vec<TokenId>> {
    let list = match parsed(value)? {
        Value::Array(list) => list,
        id => vec![id],
    };
    if list.len() > max_len {
        return None;
    }
    list.iter().map(|id| integer(id, 0..=MAX_COUNT)).collect()
}

/// The types of a prompt's tokens: 0 in the first text, then 1 in the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenTypes {
    /// How many tokens there are.
    pub num_tokens: usize,
    /// How many are of the first text.
    pub num_first: usize,
}

/// The types of tokens.
pub(super) fn token_types(value: &Value, max_len: usize) -> Option<TokenTypes> {
    let types = ids(value, max_len)?;
    let num_first = types.iter().take_while(|kind| **kind == 0).count();
    let are_second = types[num_first..].iter().all(|kind| *kind == 1);
    are_second.then_some(TokenTypes {
        num_tokens: types.len(),
        num_first,
    })
}

/// End ids. Clients of TensorRT-LLM send -1 for none.
pub(super) fn end_ids(value: &Value) -> Option<Vec<TokenId>> {
    match parsed(value)?.as_i64() {
        Some(-1) => Some(Vec::new()),
        _ => ids(value, MAX_END_IDS),
    }
}

/// Words as ids in the form of TensorRT-LLM's `[2, n]` tensors: the concatenated ids of all words, and the end of each
/// word among them, padded with -1. Either as two lists or as one.
pub(super) fn id_words(value: &Value) -> Option<Vec<Vec<TokenId>>> {
    let Value::Array(list) = parsed(value)? else {
        return None;
    };
    let (ids, ends) = match &list[..] {
        [Value::Array(ids), Value::Array(ends)] => (&ids[..], &ends[..]),
        list => list.split_at(list.len() / 2),
    };
    let numbers = |list: &[Value]| list.iter().map(signed).collect::<Option<Vec<_>>>();
    words_of_ids(&numbers(ids)?, &numbers(ends)?)
}

/// Token ids, sorted and without duplicates.
pub(super) fn allowed_ids(value: &Value) -> Option<Vec<TokenId>> {
    let mut ids = ids(value, MAX_ALLOWED_IDS).filter(|ids| !ids.is_empty())?;
    ids.sort_unstable();
    ids.dedup();
    Some(ids)
}

pub(super) fn weights(value: &Value) -> Option<Vec<f32>> {
    let list = match parsed(value)? {
        Value::Array(list) => list,
        weight => vec![weight],
    };
    if list.len() > MAX_WORDS {
        return None;
    }
    let weight = |weight: &Value| number(weight, -MAX_BIAS..=MAX_BIAS);
    list.iter().map(weight).collect()
}

pub(super) fn biases(value: &Value) -> Option<Vec<(TokenId, f32)>> {
    let members = parsed(value)?;
    let members = members.as_object()?;
    let bias = |(token, bias): (&String, &Value)| {
        let token = token
            .parse::<TokenId>()
            .ok()
            .filter(|token| *token <= MAX_COUNT)?;
        Some((token, number(bias, -MAX_BIAS..=MAX_BIAS)?))
    };
    let mut biases: Vec<_> = members.iter().map(bias).collect::<Option<_>>()?;
    biases.sort_unstable_by_key(|(token, _)| *token);
    let unique = biases.windows(2).all(|pair| pair[0].0 != pair[1].0);
    (unique && biases.len() <= MAX_BIASES).then_some(biases)
}

/// A bias for each token of the vocabulary; minus infinity excludes a token.
pub(super) fn all_biases(value: &Value) -> Option<Vec<f32>> {
    let list = parsed(value)?;
    let bias = |bias: &Value| number(bias, f64::NEG_INFINITY..=MAX_BIAS);
    list.as_array()?.iter().map(bias).collect()
}

/// A client's text, shortened for an error message: it can be megabytes long.
pub(super) fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The stop criterion of a beam search: transformers' booleans and "never", or TensorRT-LLM's integers.
pub(super) fn early_stopping(value: &Value) -> Option<EarlyStopping> {
    if value.as_str().is_some_and(|text| text.trim() == "never") {
        return Some(EarlyStopping::Never);
    }
    let integer = value.as_i64().or_else(|| flag(value).map(i64::from));
    integer.map(EarlyStopping::of_integer)
}
