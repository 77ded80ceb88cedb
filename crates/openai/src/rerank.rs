//! `/rerank`, `/v1/rerank` and `/v2/rerank`: documents in the order of their relevance to a query, as Cohere, Jina and
//! vLLM have it.

use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::fields::{Field, RERANK};
use crate::input::Input;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Pooled, Texts, usage};
use crate::scores::{Score, ranked};

/// A request for the order of documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Rerank {
    texts: Texts,
    documents: Vec<String>,
    max_results: usize,
    returns_documents: bool,
}

impl Pooled for Rerank {
    const FIELDS: &'static [Field] = RERANK;
    const ID: &'static str = "rerank-";
    type Output = Score;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let query = body.required_text("query")?;
        let documents = documents(&mut body)?;
        let max_results = max_results(&mut body)?;
        let returns_documents = body.flag_or("return_documents", true)?;
        let options = body.into_options(RERANK)?;
        Ok(Self {
            texts: pairs(Some(model), query, documents.clone(), "documents", options)?,
            max_results,
            documents,
            returns_documents,
        })
    }

    fn texts(&self) -> &Texts {
        &self.texts
    }

    fn answer(&self, id: &str, model: &str, scores: Vec<Score>) -> Value {
        let result = |index: usize| {
            let mut result = json!({"index": index, "relevance_score": scores[index].score});
            if self.returns_documents {
                result["document"] = json!({"text": self.documents[index]});
            }
            result
        };
        let results = ranked(&scores).into_iter().take(self.max_results);
        json!({
            "id": id,
            "model": model,
            "results": results.map(result).collect::<Vec<_>>(),
            "usage": usage(&scores),
        })
    }
}

/// A query beside each of some documents, which are in the field `field`.
///
/// # Errors
/// The query is too long for so many documents.
pub fn pairs(
    model: Option<String>,
    query: String,
    documents: Vec<String>,
    field: &'static str,
    options: Map<String, Value>,
) -> Result<Texts, Error> {
    let query = vec![Input::Text(query)];
    let texts = Texts::new(model, query, options, Names::of("query"))?;
    texts.with_seconds(documents.into_iter().map(Some).collect(), field)
}

/// How many of the results are returned at most.
///
/// # Errors
/// It is something else than a number from 1.
pub fn max_results(body: &mut Body) -> Result<usize, Error> {
    let max = body.count("top_n", 1..=u32::MAX)?;
    Ok(max.map_or(usize::MAX, |max| max as usize))
}

/// An error in Cohere's form, `{"message"}`.
pub struct CohereError(Error);

impl From<Error> for CohereError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for CohereError {
    fn into_response(self) -> Response {
        let body = json!({"message": self.0.message});
        self.0.worded(self.0.status, &body)
    }
}

/// The documents: texts, or objects with a `text`.
fn documents(body: &mut Body) -> Result<Vec<String>, Error> {
    const NAME: &str = "documents";
    let expected = format!("a list of 1 to {MAX_TEXTS} texts, or of objects with a 'text'");
    let value = body.take(NAME);
    let value =
        value.ok_or_else(|| Error::field(NAME, format!("'{NAME}' is missing: give {expected}")))?;
    let text = |document: &Value| match document {
        Value::String(text) => Some(text.clone()),
        other => Some(other.get("text")?.as_str()?.to_owned()),
    };
    let list = value
        .as_array()
        .filter(|list| (1..=MAX_TEXTS).contains(&list.len()));
    let documents: Option<Vec<_>> = list.and_then(|list| list.iter().map(text).collect());
    documents.ok_or_else(|| wrong(NAME, &value, &expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scores::score;

    fn read(value: Value) -> Result<Rerank, Error> {
        Rerank::read(Body::parse(value.to_string().as_bytes())?)
    }

    fn answer(more: Value) -> Value {
        let mut fields =
            json!({"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"]});
        for (name, value) in more.as_object().expect("an object") {
            fields[name] = value.clone();
        }
        let request = read(fields).expect("sound");
        assert_eq!(request.texts.num(), 3);
        let scores = [0.25, 0.75, 0.5].map(|it| score(it, 2)).to_vec();
        request.answer("rerank-1", "m", scores)
    }

    #[test]
    fn the_most_relevant_documents_come_first() {
        let all = answer(json!({}));
        let first = json!({"index": 1, "relevance_score": 0.75, "document": {"text": "b"}});
        assert_eq!(all["results"][0], first);
        let indices = |answer: &Value| -> Vec<u64> {
            let results = answer["results"].as_array().expect("a list").iter();
            results
                .map(|it| it["index"].as_u64().expect("a number"))
                .collect()
        };
        assert_eq!(indices(&all), [1, 2, 0]);
        assert_eq!(all["usage"]["total_tokens"], 6);
        let two = answer(json!({"top_n": 2, "return_documents": false}));
        assert_eq!(indices(&two), [1, 2]);
        assert_eq!(two["results"][0].get("document"), None);
        assert_eq!(indices(&answer(json!({"top_n": 9}))), [1, 2, 0]);
    }

    #[test]
    fn a_wrong_field_is_named() {
        for (field, value) in [
            ("query", json!(["q"])),
            ("documents", json!("a")),
            ("documents", json!([])),
            ("documents", json!([{"title": "a"}])),
            ("documents", json!(vec!["a"; MAX_TEXTS + 1])),
            ("top_n", json!(0)),
            ("return_documents", json!(1)),
            ("rank_fields", json!(["title"])),
        ] {
            let mut fields = json!({"model": "m", "query": "q", "documents": ["a"]});
            fields[field] = value;
            assert_eq!(read(fields).expect_err(field).param.as_deref(), Some(field));
        }
    }
}
