//! `/predict`: the classes of texts, or of pairs of texts.

use serde_json::{Value, json};

use super::fields::PREDICT;
use super::options;
use crate::Error;
use crate::body::{Body, wrong};
use crate::classes::Classes;
use crate::fields::Field;
use crate::input::Input;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Pooled, Texts};

/// A request for the classes of a text, of a pair, or of a list of both.
#[derive(Clone, Debug, PartialEq)]
pub struct Predict {
    texts: Texts,
    is_list: bool,
}

impl Pooled for Predict {
    const FIELDS: &'static [Field] = PREDICT;
    const HAS_OPTIONS: bool = false;
    const ID: &'static str = "predict-";
    type Output = Classes;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.optional_model()?;
        let expected = format!(
            "a text, a pair of texts, or a list of 1 to {MAX_TEXTS} lists with a text or a pair in each"
        );
        let missing = || Error::field("inputs", format!("'inputs' is missing: give {expected}"));
        let value = body.take("inputs").ok_or_else(missing)?;
        let (inputs, is_list) =
            sequences(&value).ok_or_else(|| wrong("inputs", &value, &expected))?;
        let options = options(body, PREDICT)?;
        let (firsts, seconds) = inputs.into_iter().unzip();
        let texts = Texts::new(model, firsts, options, Names::of("inputs"))?;
        let texts = texts.with_seconds(seconds, "inputs")?;
        Ok(Self { texts, is_list })
    }

    fn texts(&self) -> &Texts {
        &self.texts
    }

    fn answer(&self, _: &str, _: &str, classes: Vec<Classes>) -> Value {
        let prediction = |(label, score): (&str, f32)| json!({"score": score, "label": label});
        let predictions = |classes: &Classes| classes.ranked().map(prediction).collect::<Vec<_>>();
        match (self.is_list, &classes[..]) {
            (false, [one]) => json!(predictions(one)),
            _ => json!(classes.iter().map(predictions).collect::<Vec<_>>()),
        }
    }
}

/// A text, and the second one of a pair.
type Sequence = (Input, Option<String>);

/// The texts and pairs of a value, and whether it is a list of them.
fn sequences(value: &Value) -> Option<(Vec<Sequence>, bool)> {
    match value {
        Value::Array(list) if list.first().is_some_and(Value::is_array) => {
            let sequences = list.iter().map(|one| sequence(one.as_array()?));
            let sequences: Option<Vec<_>> = sequences.collect();
            let sequences = sequences.filter(|list| list.len() <= MAX_TEXTS)?;
            Some((sequences, true))
        }
        Value::Array(one) => Some((vec![sequence(one)?], false)),
        one => Some((vec![sequence(std::slice::from_ref(one))?], false)),
    }
}

/// A text or a pair.
fn sequence(texts: &[Value]) -> Option<Sequence> {
    match texts {
        [text] => Some((Input::Text(text.as_str()?.to_owned()), None)),
        [first, second] => {
            let second = second.as_str()?.to_owned();
            Some((Input::Text(first.as_str()?.to_owned()), Some(second)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::classes;

    fn read(inputs: Value) -> Result<Predict, Error> {
        let body = json!({"inputs": inputs}).to_string();
        Predict::read(Body::parse(body.as_bytes())?)
    }

    #[test]
    fn a_list_of_texts_is_a_pair_and_a_list_of_lists_has_several() {
        for (inputs, pairs, is_list) in [
            (json!("a"), &[false][..], false),
            (json!(["a"]), &[false], false),
            (json!(["a", "b"]), &[true], false),
            (json!([["a"], ["b", "c"]]), &[false, true], true),
        ] {
            let request = read(inputs.clone()).expect("sound");
            assert_eq!(request.is_list, is_list, "{inputs}");
            assert_eq!(request.texts.num(), pairs.len(), "{inputs}");
            for (index, is_pair) in pairs.iter().enumerate() {
                let message = format!("{:?}", request.texts.message(index, "p", "m", "", &[]));
                assert_eq!(message.contains("text_pair"), *is_pair, "{inputs}");
            }
        }
        for inputs in [
            json!([]),
            json!([[]]),
            json!(["a", "b", "c"]),
            json!([["a"], "b"]),
            json!([1]),
            json!({}),
        ] {
            assert!(read(inputs.clone()).is_err(), "{inputs}");
        }
    }

    #[test]
    fn the_most_probable_classes_come_first() {
        let outputs = || vec![classes(&[("no", 0.25), ("yes", 0.75)], 2)];
        let one = json!([{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]);
        let alone = read(json!("a")).expect("sound");
        assert_eq!(alone.answer("p", "m", outputs()), one);
        let list = read(json!([["a"]])).expect("sound");
        assert_eq!(list.answer("p", "m", outputs()), json!([one]));
    }
}
