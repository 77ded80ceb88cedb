//! `/pooling`: the numbers of a model of any task, as vLLM has it.

use std::marker::PhantomData;

use serde_json::{Value, json};

use crate::body::{Body, wrong};
use crate::classes::Classes;
use crate::embeddings::{Embedding, Numbers, is_base64};
use crate::fields::{Field, POOLING};
use crate::input::inputs;
use crate::names::Names;
use crate::pooled::{MAX_TEXTS, Output, Pooled, Texts, usage};
use crate::prompts::PromptChoice;
use crate::scores::Score;
use crate::{Error, ids};

/// A request for the numbers of some texts.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooling<O> {
    texts: Texts,
    is_base64: bool,
    output: PhantomData<O>,
}

/// An output that is a list of numbers.
pub trait PoolingOutput: Output {
    /// The numbers.
    fn numbers(&self) -> &[f32];
}

impl PoolingOutput for Embedding {
    fn numbers(&self) -> &[f32] {
        &self.vector
    }
}

impl PoolingOutput for Classes {
    fn numbers(&self) -> &[f32] {
        self.probs()
    }
}

impl PoolingOutput for Score {
    fn numbers(&self) -> &[f32] {
        std::slice::from_ref(&self.score)
    }
}

impl<O: PoolingOutput> Pooled for Pooling<O> {
    const FIELDS: &'static [Field] = POOLING;
    const ID: &'static str = "pool-";
    type Output = O;

    fn read(mut body: Body) -> Result<Self, Error> {
        let model = body.model()?;
        let inputs = inputs(&mut body, "input", MAX_TEXTS)?;
        let is_base64 = is_base64(&mut body)?;
        if let Some(task) = body.text("task")?
            && task != O::TASK
        {
            let expected = format!("'{}', which is the task of this model", O::TASK);
            return Err(wrong("task", &json!(task), &expected));
        }
        let prompt = PromptChoice::read(&mut body)?;
        let options = body.into_options(POOLING)?;
        Ok(Self {
            texts: Texts::new(Some(model), inputs, options, Names::of("input"))?
                .with_prompt(prompt),
            is_base64,
            output: PhantomData,
        })
    }

    fn texts(&self) -> &Texts {
        &self.texts
    }

    fn answer(&self, id: &str, model: &str, outputs: Vec<O>) -> Value {
        let entry = |(index, output): (usize, &O)| {
            let numbers = Numbers::new(output.numbers(), self.is_base64);
            json!({"index": index, "object": "pooling", "data": numbers})
        };
        json!({
            "id": id,
            "object": "list",
            "created": ids::now(),
            "model": model,
            "data": outputs.iter().enumerate().map(entry).collect::<Vec<_>>(),
            "usage": usage(&outputs),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::classes;
    use crate::scores::score;

    fn read<O: PoolingOutput>(fields: Value) -> Result<Pooling<O>, Error> {
        Pooling::read(Body::parse(fields.to_string().as_bytes())?)
    }

    #[test]
    fn each_text_has_the_numbers_of_the_task() {
        let fields = json!({"model": "m", "input": ["a", "b"], "task": "classify"});
        let request = read::<Classes>(fields).expect("sound");
        let outputs = ["x", "y"].map(|label| classes(&[(label, 0.5), ("z", 0.25)], 3));
        let answer = request.answer("pool-1", "m", outputs.to_vec());
        let second = json!({"index": 1, "object": "pooling", "data": [0.5, 0.25]});
        assert_eq!(answer["data"][1], second);
        assert_eq!(answer["usage"]["total_tokens"], 6);
        let fields = json!({"model": "m", "input": "a", "encoding_format": "base64"});
        let request = read::<Score>(fields).expect("sound");
        let answer = request.answer("pool-1", "m", vec![score(1.0, 2)]);
        assert_eq!(answer["data"][0]["data"], "AACAPw==");
    }

    #[test]
    fn another_task_is_refused() {
        let error = read::<Score>(json!({"model": "m", "input": "a", "task": "token_embed"}));
        assert_eq!(
            error.expect_err("no task of the model").param.as_deref(),
            Some("task")
        );
    }
}
