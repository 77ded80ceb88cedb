//! `/v1/completions`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::body::Body;
use crate::chunk::{Frame, Head, Whole};
use crate::fields::COMPLETIONS;
use crate::generation::{
    Generation, LOGPROBS, PROMPT_LOGPROBS, Position, Prompt, PromptTokens, Row,
};
use crate::input::{Input, check_copies, inputs};
use crate::names::Names;
use crate::protocol::ModelInferRequest;
use crate::sampling::{MAX_CANDIDATES, Sampling};
use crate::sse::Chunks;
use crate::tokens::Tokens;
use crate::usage::Counts;
use crate::{Error, adapters};

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
    /// What the choices of each prompt begin with; empty without `echo`.
    echoes: Vec<String>,
    echo: bool,
    /// Whether there are tokens besides the prompt's.
    continues: bool,
    /// How many candidates each position has.
    logprobs: Option<u32>,
    options: Map<String, Value>,
}

impl Completions {
    /// The request in a body. `seed` is for a request that gives none.
    ///
    /// # Errors
    /// A field that is missing, refused, or of another type or range.
    pub fn read(mut body: Body, seed: u64) -> Result<Self, Error> {
        let model = body.model()?;
        let prompts = inputs(&mut body, "prompt", MAX_PROMPTS)?;
        let sampling = Sampling::take(&mut body, seed)?;
        let echo = body.flag("echo")?;
        let logprobs = body.count("logprobs", 0..=MAX_CANDIDATES)?;
        let max_tokens = body.count("max_tokens", 0..=i32::MAX as u32)?;
        let mut options = sampling.options(body, COMPLETIONS)?;
        let max_tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        // A model computes a prompt for the sake of a token, which nobody sees if none is wanted.
        options.insert("max_tokens".to_owned(), json!(max_tokens.max(1)));
        options.extend(logprobs.map(|num| (LOGPROBS.to_owned(), json!(num))));
        let of_prompt = logprobs.filter(|_| echo);
        options.extend(of_prompt.map(|num| (PROMPT_LOGPROBS.to_owned(), json!(num))));
        check_copies(&options, prompts.len())?;
        let echoed = |prompt: &Input| {
            if echo {
                prompt.text().to_owned()
            } else {
                String::new()
            }
        };
        Ok(Self {
            sampling,
            model,
            echoes: prompts.iter().map(echoed).collect(),
            prompts,
            echo,
            continues: max_tokens > 0,
            logprobs,
            options,
        })
    }

    /// Requests to Triton for the texts that choices begin with and that only the model knows, each with the index of
    /// its prompt.
    pub fn unread(&self, id: &str) -> Vec<(usize, ModelInferRequest)> {
        let prompts = self.prompts.iter().enumerate();
        let unread = prompts.filter_map(|(index, prompt)| match prompt {
            Input::Tokens(ids) if self.echo => {
                let tokens = Tokens::of_prompt(ids.clone());
                let message = tokens.message(self.model.clone(), &format!("{id}-text-{index}"));
                Some((index, message))
            }
            _ => None,
        });
        unread.collect()
    }

    /// Says what the text of a prompt is.
    pub fn set_text(&mut self, prompt: usize, text: String) {
        self.echoes[prompt] = text;
    }

    /// The requests to Triton, one for each prompt.
    pub fn generations(&self, id: &str) -> Vec<Generation> {
        let mut names = Names::of("prompt");
        if adapters::split(&self.model).1.is_some() {
            names.add("lora_name", "model");
        }
        let generation = |(index, prompt): (usize, &Input)| Generation {
            names: names.clone(),
            prompt: Prompt {
                model: self.model.clone(),
                id: format!("{id}-{index}"),
                text: prompt.text().to_owned(),
                options: prompt.options(&self.options),
            },
            outputs: match (self.logprobs, self.echo) {
                (None, _) => Vec::new(),
                (Some(_), false) => vec![LOGPROBS],
                (Some(_), true) => vec![LOGPROBS, PROMPT_LOGPROBS],
            },
        };
        self.prompts.iter().enumerate().map(generation).collect()
    }

    /// What turns the answers into events.
    pub fn chunks(self, id: String) -> CompletionChunks {
        let num_choices = self.prompts.len() * self.sampling.num_choices as usize;
        CompletionChunks {
            frame: Frame::new(&Head::new(id, OBJECT, &self.model)),
            counts: Counts::new(self.prompts.len(), num_choices),
            num_chars: vec![None; num_choices],
            prompt_tokens: vec![None; self.prompts.len()],
            request: self,
        }
    }

    /// The whole answer.
    pub fn answer(self, id: String, answers: Vec<Answer>) -> Value {
        let mut counts = Counts::new(self.prompts.len(), 0);
        let mut choices = Vec::new();
        for answer in answers {
            counts.note(answer.prompt, &answer.reply);
            let echoed = &self.echoes[answer.prompt];
            for (row, index) in answer.reply.rows.into_iter().zip(0..) {
                let row = self.shown(row);
                counts.choices.push(row.num_tokens);
                choices.push(Choice {
                    index: answer.prompt as u32 * self.sampling.num_choices + index,
                    text: [echoed, &row.text[..]].concat(),
                    logprobs: row.logprobs.zip(self.logprobs).map(|(positions, num)| {
                        let mut logprobs = Logprobs::default();
                        if let Some(tokens) = &answer.reply.prompt_tokens {
                            logprobs.add_prompt(tokens, num, echoed.chars().count());
                        }
                        logprobs.add(&positions, num, echoed.chars().count());
                        logprobs
                    }),
                    finish_reason: row.finish_reason,
                });
            }
        }
        choices.sort_by_key(|choice| choice.index);
        json!(Whole {
            head: &Head::new(id, OBJECT, &self.model),
            choices: &choices,
            usage: counts.usage(),
        })
    }
}

impl Completions {
    /// What the client gets of a row.
    fn shown(&self, row: Row) -> Row {
        match self.continues {
            true => row,
            // As where `max_tokens` ends it.
            false => Row {
                finish_reason: row.finish_reason.map(|_| "length"),
                logprobs: row.logprobs.map(|_| Vec::new()),
                ..Row::default()
            },
        }
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

/// The log-probabilities of a choice, each list with one element for each token. Those of a prompt's first token are
/// null.
#[derive(Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// Adds tokens with `num_candidates` of each position. The first one begins at character `offset` of the choice.
    fn add(&mut self, positions: &[Position], num_candidates: u32, mut offset: usize) {
        for position in positions {
            let mut top = Map::new();
            for candidate in position.ranked.iter().take(num_candidates as usize) {
                // Of tokens with the same text, the likeliest.
                top.entry(candidate.text.key())
                    .or_insert(json!(candidate.logprob));
            }
            self.tokens.push(position.token.text.key());
            self.token_logprobs.push(Some(position.token.logprob));
            // Where the character begins that a token continues.
            let is_behind = position.token.text.continues();
            self.text_offset
                .push(offset.saturating_sub(usize::from(is_behind)));
            self.top_logprobs.push(Some(top));
            offset += num_chars(position);
        }
    }

    /// Adds the tokens of the prompt that the choice begins with, whose text has `num_chars`. Where the texts of the
    /// tokens have more, the first ones are no part of it, such as a token before all texts.
    fn add_prompt(&mut self, tokens: &PromptTokens, num_candidates: u32, num_chars_of_text: usize) {
        self.tokens.push(tokens.first.key());
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
        self.text_offset.push(0);
        let num_chars_of_first = tokens.first.num_chars();
        self.add(&tokens.others, num_candidates, num_chars_of_first);
        let of_tokens = num_chars_of_first + tokens.others.iter().map(num_chars).sum::<usize>();
        let num_more = of_tokens.saturating_sub(num_chars_of_text);
        for offset in &mut self.text_offset {
            *offset = offset.saturating_sub(num_more);
        }
    }
}

/// The characters that begin in a token.
fn num_chars(position: &Position) -> usize {
    position.token.text.num_chars()
}

/// Turns the answers of a stream into events.
pub struct CompletionChunks {
    request: Completions,
    frame: Frame,
    counts: Counts,
    /// For each choice that has begun, the characters of its tokens so far.
    num_chars: Vec<Option<usize>>,
    /// For each prompt, its tokens, if they are wanted and have come.
    prompt_tokens: Vec<Option<PromptTokens>>,
}

impl Chunks for CompletionChunks {
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>) {
        let Answer { prompt, reply } = answer;
        self.counts.note(prompt, &reply);
        if reply.prompt_tokens.is_some() {
            self.prompt_tokens[prompt] = reply.prompt_tokens;
        }
        let first = prompt * self.request.sampling.num_choices as usize;
        for (index, row) in (first..self.counts.choices.len()).zip(reply.rows) {
            let row = self.request.shown(row);
            self.counts.choices[index] = row.num_tokens;
            let begins = self.num_chars[index].is_none();
            let echoed = &self.request.echoes[prompt][..];
            let offset = self.num_chars[index].unwrap_or_else(|| echoed.chars().count());
            let positions = row.logprobs.unwrap_or_default();
            let new_chars = positions.iter().map(num_chars).sum::<usize>();
            self.num_chars[index] = Some(offset + new_chars);
            let mut logprobs = Logprobs::default();
            if let Some(num) = self.request.logprobs {
                if let Some(tokens) = self.prompt_tokens[prompt].as_ref().filter(|_| begins) {
                    logprobs.add_prompt(tokens, num, offset);
                }
                logprobs.add(&positions, num, offset);
            }
            let text = match begins {
                true => [echoed, &row.text].concat(),
                false => row.text,
            };
            let has_logprobs = !logprobs.tokens.is_empty();
            if text.is_empty() && !has_logprobs && row.finish_reason.is_none() {
                continue;
            }
            let choice = Choice {
                index: index as u32,
                text,
                logprobs: has_logprobs.then_some(logprobs),
                finish_reason: row.finish_reason,
            };
            let usage = self.request.sampling.usage_so_far(&self.counts);
            self.frame.event(&[choice], usage, out);
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.request.sampling.include_usage {
            let usage = Some(self.counts.usage());
            self.frame.event(&[] as &[Choice], Some(usage), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::{Candidate, Reply};
    use crate::token_text::TokenText;

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
            ..Reply::default()
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
            ("max_tokens", json!(-1)),
        ] {
            let mut fields = json!({"model": "m", "prompt": "p"});
            fields[field] = value;
            let error = read(fields).expect_err(field);
            assert_eq!(error.param.as_deref(), Some(field));
        }
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
        let usage = ["prompt_tokens", "completion_tokens", "total_tokens"];
        assert_eq!(usage.map(|name| &whole["usage"][name]), [10, 14, 24]);
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
            text: text.into(),
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

    fn position(text: &str, logprob: f64) -> Position {
        let token = Candidate {
            text: text.into(),
            logprob,
        };
        Position {
            ranked: vec![token.clone()],
            token,
        }
    }

    #[test]
    fn parts_of_a_character_have_keys_of_their_own() {
        let request = request(json!({"model": "m", "prompt": "a", "logprobs": 1}));
        let candidate = |bytes: &[u8]| Candidate {
            text: TokenText::of(bytes.to_vec()),
            logprob: -1.0,
        };
        let position = |bytes: &[u8]| Position {
            token: candidate(bytes),
            ranked: vec![candidate(bytes)],
        };
        let parts: [&[u8]; 4] = [b"a", b"\xf0\x9f", b"\xa6\x8a", b"b"];
        let with_parts = Row {
            logprobs: Some(parts.map(position).to_vec()),
            ..row("a\u{1f98a}b", Some("length"), 4)
        };
        let whole = request.answer("id".to_owned(), vec![answer(0, vec![with_parts])]);
        let found = &whole["choices"][0]["logprobs"];
        assert_eq!(
            found["tokens"],
            json!(["a", "bytes:\\xf0\\x9f", "bytes:\\xa6\\x8a", "b"])
        );
        assert_eq!(found["top_logprobs"][1], json!({"bytes:\\xf0\\x9f": -1.0}));
        assert_eq!(found["text_offset"], json!([0, 1, 1, 2]));
    }

    /// The reply to a prompt `<s>a bc`, and its first new token.
    fn echoed_reply(finish_reason: Option<&'static str>) -> Answer {
        let first = Row {
            logprobs: Some(vec![position("d", -4.0)]),
            ..row("d", finish_reason, 1)
        };
        let mut answer = answer(0, vec![first.clone(), first]);
        answer.reply.prompt_tokens = Some(PromptTokens {
            first: "<s>".into(),
            others: vec![position("a", -1.0), position(" bc", -2.0)],
        });
        answer
    }

    #[test]
    fn what_is_echoed_has_log_probabilities_but_for_the_first_token() {
        let fields = json!({"model": "m", "prompt": "a bc", "n": 2, "echo": true, "logprobs": 1, "max_tokens": 1});
        let expected = json!({
            "tokens": ["<s>", "a", " bc", "d"],
            "token_logprobs": [null, -1.0, -2.0, -4.0],
            "top_logprobs": [null, {"a": -1.0}, {" bc": -2.0}, {"d": -4.0}],
            "text_offset": [0, 0, 1, 4],
        });
        let request = request(fields);
        let generation = &request.generations("cmpl-1")[0];
        assert_eq!(generation.prompt.options["prompt_logprobs"], 1);
        assert_eq!(generation.outputs, ["logprobs", "prompt_logprobs"]);
        let whole = request
            .clone()
            .answer("id".to_owned(), vec![echoed_reply(Some("length"))]);
        let later = Row {
            logprobs: Some(vec![position("e", -5.0)]),
            ..row("e", Some("length"), 2)
        };
        let mut events = events(
            &mut request.chunks("id".to_owned()),
            vec![echoed_reply(None), answer(0, vec![later.clone(), later])],
        )
        .into_iter();
        for choice in 0..2 {
            assert_eq!(whole["choices"][choice]["text"], "a bcd");
            assert_eq!(whole["choices"][choice]["logprobs"], expected);
            let event = events.next().expect("a chunk");
            assert_eq!(event["choices"][0]["text"], "a bcd");
            assert_eq!(event["choices"][0]["logprobs"], expected);
        }
        let last = &events.next().expect("a chunk")["choices"][0]["logprobs"];
        assert_eq!(last["tokens"], json!(["e"]));
        assert_eq!(last["text_offset"], json!([5]));
    }

    #[test]
    fn without_new_tokens_a_choice_is_its_prompt() {
        let fields = json!({"model": "m", "prompt": [1, 2, 3], "n": 2, "echo": true, "logprobs": 0, "max_tokens": 0});
        let mut request = request(fields);
        let unread = request.unread("cmpl-1").into_iter();
        let unread: Vec<_> = unread
            .map(|(prompt, message)| (prompt, message.id))
            .collect();
        assert_eq!(unread, [(0, "cmpl-1-text-0".to_owned())]);
        request.set_text(0, "a bc".to_owned());
        assert_eq!(
            request.generations("cmpl-1")[0].prompt.options["max_tokens"],
            1
        );
        let whole = request
            .clone()
            .answer("id".to_owned(), vec![echoed_reply(Some("stop"))]);
        let events = events(
            &mut request.chunks("id".to_owned()),
            vec![echoed_reply(Some("stop"))],
        );
        for choice in [&whole["choices"][0], &events[0]["choices"][0]] {
            assert_eq!(choice["text"], "a bc");
            assert_eq!(choice["finish_reason"], "length");
            assert_eq!(choice["logprobs"]["tokens"], json!(["<s>", "a", " bc"]));
            assert_eq!(
                choice["logprobs"]["token_logprobs"],
                json!([null, -1.0, -2.0])
            );
        }
        assert_eq!(whole["usage"]["completion_tokens"], 0);
    }
}
