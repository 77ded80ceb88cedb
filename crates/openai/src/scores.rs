//! `/score`: how relevant texts are to others, as vLLM has it.

use serde_json::{Value, json};

use crate::body::Body;
use crate::fields::{Field, SCORE};
use crate::generation::floats;
use crate::input::{Input, texts};
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Output, Pooled, Texts, descending, num_tokens, sound, usage};
use crate::protocol::ModelInferResponse;
use crate::{Error, ids};

/// A request for the scores of pairs of texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores(Texts);

/// The score of a text or of a pair, and its number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The number.
    pub score: f32,
    num_tokens: u32,
}

impl Pooled for Scores {
    const FIELDS: &'static [Field] = SCORE;
    const ID: &'static str = "score-";
    type Output = Score;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let firsts = texts(&mut body, "text_1", MAX_TEXTS)?;
        let seconds = texts(&mut body, "text_2", MAX_TEXTS)?;
        if firsts.len() != seconds.len() && firsts.len() != 1 {
            return Err(Error::field(
                "text_1",
                format!(
                    "'text_1' has {} texts and 'text_2' {}; give one for all of 'text_2', or one for each",
                    firsts.len(),
                    seconds.len()
                ),
            ));
        }
        let firsts = firsts.into_iter().map(Input::Text).collect();
        let options = body.into_options(SCORE)?;
        let texts = Texts::new(Some(model), firsts, options, Names::of("text_1"))?;
        let seconds = seconds.into_iter().map(Some).collect();
        Ok(Self(texts.with_seconds(seconds, "text_2")?))
    }

    fn texts(&self) -> &Texts {
        &self.0
    }

    fn answer(&self, id: &str, model: &str, scores: Vec<Score>) -> Value {
        let entry = |(index, score): (usize, &Score)| json!({"index": index, "object": "score", "score": score.score});
        json!({
            "id": id,
            "object": "list",
            "created": ids::now(),
            "model": model,
            "data": scores.iter().enumerate().map(entry).collect::<Vec<_>>(),
            "usage": usage(&scores),
        })
    }
}

impl Output for Score {
    const TASK: &'static str = "score";
    const NAMES: &'static [&'static str] = &["score", "num_input_tokens"];

    fn read(response: &ModelInferResponse) -> Result<Self, Error> {
        Ok(Self {
            score: sound(response, "score", |tensor| floats(tensor)?.first().copied())?,
            num_tokens: num_tokens(response)?,
        })
    }

    fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

/// The indices of scores, the highest first, and of equal ones the earliest.
pub fn ranked(scores: &[Score]) -> Vec<usize> {
    let numbers: Vec<_> = scores.iter().map(|score| score.score).collect();
    descending(&numbers)
}

/// The score of a text with `num_tokens` tokens.
#[cfg(test)]
pub fn score(score: f32, num_tokens: u32) -> Score {
    Score { score, num_tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Scores, Error> {
        Scores::read(Body::parse(value.to_string().as_bytes())?)
    }

    #[test]
    fn each_pair_has_a_score() {
        let request = json!({"model": "m", "text_1": "a", "text_2": ["b", "c"]});
        let request = read(request).expect("sound");
        assert_eq!(request.0.num(), 2);
        let answer = request.answer("score-1", "m", vec![score(0.5, 3), score(0.25, 4)]);
        let second = json!({"index": 1, "object": "score", "score": 0.25});
        assert_eq!(answer["data"][1], second);
        let usage = json!({"prompt_tokens": 7, "total_tokens": 7});
        assert_eq!(
            (&answer["id"], &answer["usage"]),
            (&json!("score-1"), &usage)
        );
    }

    #[test]
    fn the_texts_of_pairs_are_as_many_as_each_other_or_one_is_for_all() {
        let is_sound = |first: Value, second: Value| {
            read(json!({"model": "m", "text_1": first, "text_2": second})).is_ok()
        };
        assert!(is_sound(json!("a"), json!("b")));
        assert!(is_sound(json!(["a"]), json!(["b", "c"])));
        assert!(is_sound(json!(["a", "d"]), json!(["b", "c"])));
        assert!(!is_sound(json!(["a", "d"]), json!(["b"])));
        assert!(!is_sound(json!(["a", "d"]), json!(["b", "c", "e"])));
        assert!(!is_sound(json!([]), json!("b")));
        assert!(!is_sound(json!([1]), json!("b")));
    }

    #[test]
    fn equal_scores_stay_in_their_order() {
        let scores = [0.5, 0.75, 0.5, f32::NEG_INFINITY].map(|it| score(it, 1));
        assert_eq!(ranked(&scores), [1, 0, 2, 3]);
    }
}
