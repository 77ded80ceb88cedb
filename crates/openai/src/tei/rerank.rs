//! `/rerank`: texts in the order of their relevance to a query.

use serde_json::{Value, json};

use super::fields::RERANK;
use super::options;
use crate::Error;
use crate::body::Body;
use crate::fields::Field;
use crate::input;
use crate::pooled::{MAX_TEXTS, Pooled, Texts};
use crate::rerank::{max_results, pairs};
use crate::scores::{Score, ranked};

/// A request for the order of texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Rerank {
    texts: Texts,
    max_results: usize,
    returned: Option<Vec<String>>,
}

impl Pooled for Rerank {
    const FIELDS: &'static [Field] = RERANK;
    const HAS_OPTIONS: bool = false;
    const ID: &'static str = "rerank-";
    type Output = Score;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.optional_model()?;
        let query = body.required_text("query")?;
        let texts = input::texts(&mut body, "texts", MAX_TEXTS)?;
        let max_results = max_results(&mut body)?;
        let returned = body.flag("return_text")?.then(|| texts.clone());
        let options = options(body, RERANK)?;
        let texts = pairs(model, query, texts, "texts", options)?;
        Ok(Self {
            texts,
            max_results,
            returned,
        })
    }

    fn texts(&self) -> &Texts {
        &self.texts
    }

    fn answer(&self, _: &str, _: &str, scores: Vec<Score>) -> Value {
        let rank = |index: usize| {
            let mut rank = json!({"index": index, "score": scores[index].score});
            if let Some(texts) = &self.returned {
                rank["text"] = json!(texts[index]);
            }
            rank
        };
        let ranks = ranked(&scores).into_iter().take(self.max_results);
        json!(ranks.map(rank).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scores::score;

    #[test]
    fn the_most_relevant_texts_come_first() {
        let answer = |returns_text: bool| {
            let body = json!({"query": "q", "texts": ["a", "b"], "return_text": returns_text});
            let body = Body::parse(body.to_string().as_bytes()).expect("an object");
            let request = Rerank::read(body).expect("sound");
            request.answer("r", "m", vec![score(0.25, 2), score(0.5, 2)])
        };
        let expected = json!([{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]);
        assert_eq!(answer(false), expected);
        assert_eq!(
            answer(true)[0],
            json!({"index": 1, "score": 0.5, "text": "b"})
        );
    }
}
