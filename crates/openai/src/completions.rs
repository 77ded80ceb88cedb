//! `/v1/completions`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::Error;
use crate::answer::Answer;
use crate::body::Body;
use crate::chunk::{Chunk, Head};
use crate::fields::COMPLETIONS;
use crate::generation::{Generation, LOGPROBS, Position, Prompt};
use crate::input::{Input, inputs};
use crate::sampling::{MAX_CANDIDATES, Sampling};
use crate::sse::{Chunks, event};
use crate::usage::{Counts, Usage};

/// The most prompts of a request.
const MAX_PROMPTS: usize = 128;
/// As in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// OpenAI's name for the answers.
const OBJECT: &str = "text_completion";

/// A request for completions.
#[derive(Clone, Debug, PartialEq)]
pub struct Completions {
    /// How choices are drawn and sent.
    pub sampling: Sampling,
    model: String,
    prompts: Vec<Input>,
    echo: bool,
    /// How many candidates each position has.
    logprobs: Option<u32>,
    options: Map<String, Value>,
}

impl Completions {
    /// The request in a body. `seed` is that of a request which gives none.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    pub fn read(mut body: Body, seed: u64) -> Result<Self, Error> {
        let model = body.model()?;
        let prompts = inputs(&mut body, "prompt", MAX_PROMPTS)?;
        let sampling = Sampling::take(&mut body, seed)?;
        let echo = body.flag("echo")?;
        let logprobs = body.count("logprobs", 0..=MAX_CANDIDATES)?;
        if echo && logprobs.is_some() {
            return Err(Error::field(
                "echo",
                "'echo' with 'logprobs' is not supported: prompts have no log-probabilities; leave one of them out",
            ));
        }
        let is_text = |prompt: &Input| matches!(prompt, Input::Text(_));
        if echo && !prompts.iter().all(is_text) {
            return Err(Error::field(
                "echo",
                "'echo' repeats texts, and the prompt is token ids; leave it out",
            ));
        }
        let max_tokens = body.count("max_tokens", 1..=i32::MAX as u32)?;
        let mut options = sampling.options(body, COMPLETIONS)?;
        let max_tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        options.insert("max_tokens".to_owned(), json!(max_tokens));
        options.extend(logprobs.map(|num| (LOGPROBS.to_owned(), json!(num))));
        Ok(Self {
            sampling,
            model,
            prompts,
            echo,
            logprobs,
            options,
        })
    }

    /// The requests to Triton, one for each prompt.
    pub fn generations(&self, id: &str) -> Vec<Generation> {
        let generation = |(index, prompt): (usize, &Input)| Generation {
            prompt: Prompt {
                model: self.model.clone(),
                id: format!("{id}-{index}"),
                text: prompt.text().to_owned(),
                options: prompt.options(&self.options),
            },
            outputs: self.logprobs.map(|_| LOGPROBS).into_iter().collect(),
        };
        self.prompts.iter().enumerate().map(generation).collect()
    }

    /// What turns the answers into events.
    pub fn chunks(self, id: String) -> CompletionChunks {
        let num_choices = self.prompts.len() * self.sampling.num_choices as usize;
        CompletionChunks {
            head: Head::new(id, OBJECT, &self.model),
            counts: Counts::new(self.prompts.len(), num_choices),
            num_chars: vec![None; num_choices],
            request: self,
        }
    }

    /// The whole answer.
    pub fn answer(self, id: String, answers: Vec<Answer>) -> Value {
        let mut counts = Counts::new(self.prompts.len(), 0);
        let mut choices = Vec::new();
        for answer in answers {
            counts.prompts[answer.prompt] = answer.reply.num_prompt_tokens;
            for (row, index) in answer.reply.rows.into_iter().zip(0..) {
                counts.choices.push(row.num_tokens);
                let echoed = self.echo.then_some(self.prompts[answer.prompt].text());
                let logprobs = row.logprobs.zip(self.logprobs);
                choices.push(Choice {
                    index: answer.prompt as u32 * self.sampling.num_choices + index,
                    text: [echoed.unwrap_or_default(), &row.text].concat(),
                    logprobs: logprobs.map(|(positions, num)| Logprobs::of(&positions, num, 0)),
                    finish_reason: row.finish_reason,
                });
            }
        }
        choices.sort_by_key(|choice| choice.index);
        json!(Chunk {
            head: &Head::new(id, OBJECT, &self.model),
            choices: &choices,
            usage: Some(Some(counts.usage())),
        })
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

/// The log-probabilities of a choice, each list with one element for each token.
#[derive(Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    top_logprobs: Vec<Map<String, Value>>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// `num_candidates` of each position. The first token begins at character `offset` of the choice.
    fn of(positions: &[Position], num_candidates: u32, mut offset: usize) -> Self {
        let mut logprobs = Self {
            tokens: Vec::new(),
            token_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            text_offset: Vec::new(),
        };
        for position in positions {
            let top = position.ranked.iter().take(num_candidates as usize);
            logprobs.tokens.push(position.token.text.clone());
            logprobs.token_logprobs.push(position.token.logprob);
            logprobs.text_offset.push(offset);
            logprobs.top_logprobs.push(
                top.map(|candidate| (candidate.text.clone(), json!(candidate.logprob)))
                    .collect(),
            );
            offset += position.token.text.chars().count();
        }
        logprobs
    }
}

/// Turns the answers of a stream into events.
pub struct CompletionChunks {
    request: Completions,
    head: Head,
    counts: Counts,
    /// For each choice that has begun, the characters of its tokens so far.
    num_chars: Vec<Option<usize>>,
}

impl CompletionChunks {
    /// `usage` of every chunk but the last: null if the last has one.
    fn no_usage(&self) -> Option<Option<Usage>> {
        self.request.sampling.include_usage.then_some(None)
    }
}

impl Chunks for CompletionChunks {
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>) {
        self.counts.prompts[answer.prompt] = answer.reply.num_prompt_tokens;
        let first = answer.prompt * self.request.sampling.num_choices as usize;
        for (index, row) in (first..self.counts.choices.len()).zip(answer.reply.rows) {
            self.counts.choices[index] = row.num_tokens;
            let begins = self.num_chars[index].is_none();
            let offset = self.num_chars[index].unwrap_or_default();
            let positions = row.logprobs.unwrap_or_default();
            let new_chars = positions
                .iter()
                .map(|position| position.token.text.chars().count());
            self.num_chars[index] = Some(offset + new_chars.sum::<usize>());
            let echoed = match begins && self.request.echo {
                true => self.request.prompts[answer.prompt].text(),
                false => "",
            };
            let text = [echoed, &row.text].concat();
            if text.is_empty() && positions.is_empty() && row.finish_reason.is_none() {
                continue;
            }
            let logprobs = self.request.logprobs.filter(|_| !positions.is_empty());
            let choice = Choice {
                index: index as u32,
                text,
                logprobs: logprobs.map(|num| Logprobs::of(&positions, num, offset)),
                finish_reason: row.finish_reason,
            };
            let chunk = Chunk {
                head: &self.head,
                choices: &[choice],
                usage: self.no_usage(),
            };
            event(&chunk, out);
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.request.sampling.include_usage {
            let chunk = Chunk::<Choice> {
                head: &self.head,
                choices: &[],
                usage: Some(Some(self.counts.usage())),
            };
            event(&chunk, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::{Candidate, Reply, Row};

    fn read(value: Value) -> Result<Completions, Error> {
        let body = Body::parse(value.to_string().as_bytes())?;
        Completions::read(body, 42)
    }

    fn request(value: Value) -> Completions {
        read(value).expect("a sound request")
    }

    fn row(text: &str, finish_reason: Option<&'static str>, num_tokens: u32) -> Row {
        Row {
            text: text.to_owned(),
            finish_reason,
            num_tokens,
            ..Row::default()
        }
    }

    fn answer(prompt: usize, rows: Vec<Row>) -> Answer {
        let reply = Reply {
            num_prompt_tokens: 5,
            rows,
        };
        Answer { prompt, reply }
    }

    fn events(chunks: &mut CompletionChunks, answers: Vec<Answer>) -> Vec<Value> {
        let mut out = Vec::new();
        for answer in answers {
            chunks.write(answer, &mut out);
        }
        chunks.finish(&mut out);
        let text = String::from_utf8(out).expect("text");
        let json = text
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: "));
        json.map(|json| serde_json::from_str(json.expect("an event")).expect("JSON"))
            .collect()
    }

    #[test]
    fn fields_become_options() {
        let request = request(json!({
            "model": "stories", "prompt": "Once", "max_tokens": 5, "temperature": 0.5, "stop": "[",
            "logit_bias": {"7": -100}, "user": "u", "suffix": "", "top_k": 3, "logprobs": 2,
        }));
        let generation = &request.generations("cmpl-1")[0];
        let prompt = &generation.prompt;
        assert_eq!(
            Value::Object(prompt.options.clone()),
            json!({
                "max_tokens": 5, "temperature": 0.5, "stop": ["["], "logit_bias": {"7": -100}, "top_k": 3, "logprobs": 2,
                "n": 1, "seed": 42, "stream": false, "exclude_input_in_output": true,
            })
        );
        assert_eq!(
            (prompt.model.as_str(), prompt.text.as_str()),
            ("stories", "Once")
        );
        assert_eq!(generation.outputs, ["logprobs"]);
    }

    #[test]
    fn several_choices_are_drawn_unless_the_request_says_otherwise() {
        let temperature = |more: Value| {
            let mut fields = json!({"model": "m", "prompt": "p", "n": 2});
            fields
                .as_object_mut()
                .expect("fields")
                .extend(more.as_object().expect("fields").clone());
            request(fields).options.get("temperature").cloned()
        };
        assert_eq!(temperature(json!({})), Some(json!(1)));
        assert_eq!(temperature(json!({"temperature": 0.2})), Some(json!(0.2)));
        assert_eq!(temperature(json!({"top_p": 0.2})), None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (field, value) in [
            ("prompt", json!([1, "a"])),
            ("prompt", json!([])),
            ("prompt", json!(vec!["p"; 129])),
            ("n", json!(0)),
            ("n", json!(129)),
            ("logprobs", json!(21)),
            ("stop", json!(true)),
            ("suffix", json!("the end")),
            ("stream_options", json!(1)),
            ("max_tokens", json!(0)),
        ] {
            let mut fields = json!({"model": "m", "prompt": "p"});
            fields[field] = value;
            let error = read(fields).expect_err(field);
            assert_eq!(error.param.as_deref(), Some(field));
        }
        let both = json!({"model": "m", "prompt": "p", "echo": true, "logprobs": 0});
        assert_eq!(read(both).expect_err("both").param.as_deref(), Some("echo"));
    }

    #[test]
    fn choices_are_numbered_over_all_prompts() {
        let request = request(json!({"model": "m", "prompt": ["a", "b"], "n": 2, "echo": true}));
        let rows = |text: &str| vec![row(text, Some("stop"), 3), row("y", Some("length"), 4)];
        let whole = request.answer(
            "id".to_owned(),
            vec![answer(1, rows("z")), answer(0, rows("x"))],
        );
        let texts: Vec<_> = whole["choices"]
            .as_array()
            .expect("choices")
            .iter()
            .map(|choice| &choice["text"])
            .collect();
        assert_eq!(texts, ["ax", "ay", "bz", "by"]);
        assert_eq!(whole["choices"][3]["index"], 3);
        assert_eq!(whole["choices"][1]["finish_reason"], "length");
        assert_eq!(
            whole["usage"],
            json!({"prompt_tokens": 10, "completion_tokens": 14, "total_tokens": 24})
        );
        assert_eq!(whole["object"], "text_completion");
    }

    #[test]
    fn a_stream_has_what_is_new_and_then_the_usage() {
        let request = request(json!({
            "model": "m", "prompt": "a", "echo": true, "stream": true, "stream_options": {"include_usage": true},
        }));
        let replies = vec![
            answer(0, vec![row("x", None, 1)]),
            answer(0, vec![row("", None, 2)]),
            answer(0, vec![row("y", Some("stop"), 3)]),
        ];
        let events = events(&mut request.chunks("id".to_owned()), replies);
        assert_eq!(events.len(), 3, "nothing new is no event");
        assert_eq!(events[0]["choices"][0]["text"], "ax");
        assert_eq!(events[0]["choices"][0]["finish_reason"], Value::Null);
        assert_eq!(events[0]["usage"], Value::Null);
        assert_eq!(events[1]["choices"][0]["text"], "y");
        assert_eq!(events[1]["choices"][0]["finish_reason"], "stop");
        assert_eq!(events[2]["choices"], json!([]));
        assert_eq!(events[2]["usage"]["completion_tokens"], 3);
    }

    #[test]
    fn log_probabilities_are_lists_over_the_tokens() {
        let candidate = |text: &str, logprob| Candidate {
            text: text.to_owned(),
            logprob,
        };
        let position = |text: &str| Position {
            token: candidate(text, -2.0),
            ranked: vec![candidate("best", -0.5), candidate(text, -2.0)],
        };
        let request = request(json!({"model": "m", "prompt": "a", "logprobs": 1, "stream": true}));
        let with = |text: &str| Row {
            logprobs: Some(vec![position(text)]),
            ..row(text, None, 1)
        };
        let replies = vec![answer(0, vec![with("äb")]), answer(0, vec![with("c")])];
        let events = events(&mut request.chunks("id".to_owned()), replies);
        assert_eq!(
            events[1]["choices"][0]["logprobs"],
            json!({"tokens": ["c"], "token_logprobs": [-2.0], "top_logprobs": [{"best": -0.5}], "text_offset": [2]})
        );
    }
}
