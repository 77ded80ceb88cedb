//! `/classify`: the classes of texts, as vLLM has it.

use serde_json::{Value, json};

use crate::body::Body;
use crate::fields::{CLASSIFY, Field};
use crate::generation::{floats, texts};
use crate::input::inputs;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Output, Pooled, Texts, descending, num_tokens, sound, usage};
use crate::protocol::ModelInferResponse;
use crate::{Error, ids};

/// A request for the classes of some texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Classify(Texts);

/// The probabilities of a text's classes, and its number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Classes {
    probs: Vec<f32>,
    labels: Vec<String>,
    num_tokens: u32,
}

impl Pooled for Classify {
    const FIELDS: &'static [Field] = CLASSIFY;
    const ID: &'static str = "classify-";
    type Output = Classes;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let inputs = inputs(&mut body, "input", MAX_TEXTS)?;
        let options = body.into_options(CLASSIFY)?;
        Ok(Self(Texts::new(
            Some(model),
            inputs,
            options,
            Names::of("input"),
        )?))
    }

    fn texts(&self) -> &Texts {
        &self.0
    }

    fn answer(&self, id: &str, model: &str, classes: Vec<Classes>) -> Value {
        let entry = |(index, classes): (usize, &Classes)| {
            let best = classes.ranked().next();
            json!({
                "index": index,
                "label": best.map(|(label, _)| label),
                "probs": classes.probs,
                "num_classes": classes.probs.len(),
            })
        };
        json!({
            "id": id,
            "object": "list",
            "created": ids::now(),
            "model": model,
            "data": classes.iter().enumerate().map(entry).collect::<Vec<_>>(),
            "usage": usage(&classes),
        })
    }
}

impl Classes {
    /// The probability of each class.
    pub fn probs(&self) -> &[f32] {
        &self.probs
    }

    /// The classes with their probabilities, the most probable first.
    pub fn ranked(&self) -> impl Iterator<Item = (&str, f32)> {
        let class = |index: usize| (self.labels[index].as_str(), self.probs[index]);
        descending(&self.probs).into_iter().map(class)
    }
}

impl Output for Classes {
    const TASK: &'static str = "classify";
    const NAMES: &'static [&'static str] = &["probs", "labels", "num_input_tokens"];

    fn read(response: &ModelInferResponse) -> Result<Self, Error> {
        let probs = sound(response, "probs", floats)?;
        let labels = sound(response, "labels", |tensor| {
            texts(tensor).filter(|labels| labels.len() == probs.len())
        })?;
        Ok(Self {
            probs,
            labels,
            num_tokens: num_tokens(response)?,
        })
    }

    fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

/// Classes of a text with `num_tokens` tokens, each with its probability.
#[cfg(test)]
pub fn classes(classes: &[(&str, f32)], num_tokens: u32) -> Classes {
    Classes {
        probs: classes.iter().map(|(_, prob)| *prob).collect(),
        labels: classes
            .iter()
            .map(|(label, _)| (*label).to_owned())
            .collect(),
        num_tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_the_class_that_is_the_most_probable() {
        let body = json!({"model": "m", "input": ["x", "y"]}).to_string();
        let body = Body::parse(body.as_bytes()).expect("an object");
        let request = Classify::read(body).expect("sound");
        assert_eq!(request.0.num(), 2);
        let outputs = vec![
            classes(&[("no", 0.75), ("yes", 0.25)], 3),
            classes(&[("no", 0.125), ("yes", 0.875)], 4),
        ];
        let answer = request.answer("classify-1", "m", outputs);
        let second = json!({"index": 1, "label": "yes", "probs": [0.125, 0.875], "num_classes": 2});
        assert_eq!(answer["data"][1], second);
        assert_eq!(answer["usage"]["total_tokens"], 7);
    }
}
