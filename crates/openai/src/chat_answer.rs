//! `/v1/chat/completions`: the answer.

use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::Answer;
use crate::chat::Chat;
use crate::chunk::{Frame, Head, Whole};
use crate::endpoint::EndpointAnswer;
use crate::generation::{Position, Row};
use crate::logprobs::{Token, tokens};
use crate::sse::Chunks;
use crate::usage::Counts;

impl EndpointAnswer for Chat {
    fn answer(self, id: String, answers: Vec<Answer>) -> Value {
        let mut counts = Counts::new(1, 0);
        let mut choices = Vec::new();
        for answer in answers {
            counts.note(0, &answer.reply);
            for (row, index) in answer.reply.rows.into_iter().zip(0..) {
                counts.choices.push(row.num_tokens);
                let logprobs = Logprobs::of(row.logprobs.as_deref(), self.logprobs);
                choices.push(Choice {
                    index,
                    finish_reason: self.finish_reason(row.finish_reason),
                    message: Message::of(row),
                    logprobs,
                });
            }
        }
        json!(Whole {
            head: &Head::new(id, "chat.completion", &self.model),
            choices: &choices,
            usage: counts.usage(),
        })
    }

    fn chunks(self, id: String) -> impl Chunks {
        let num_choices = self.sampling.num_choices as usize;
        ChatChunks {
            frame: Frame::new(&Head::new(id, "chat.completion.chunk", &self.model)),
            counts: Counts::new(1, num_choices),
            has_begun: vec![false; num_choices],
            request: self,
        }
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    message: Message,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

/// A whole message.
#[derive(Serialize)]
struct Message {
    role: &'static str,
    /// Null if there is nothing but calls.
    content: Option<String>,
    refusal: (),
    /// The reasoning by vLLM's name for it; `reasoning_content` is its older name, and DeepSeek's.
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

impl Message {
    fn of(row: Row) -> Self {
        let has_content = !row.text.is_empty() || row.tool_calls.is_empty();
        Self {
            role: ROLE,
            content: has_content.then_some(row.text),
            refusal: (),
            reasoning: row.reasoning.clone(),
            reasoning_content: row.reasoning,
            tool_calls: row.tool_calls,
        }
    }
}

const ROLE: &str = "assistant";

#[derive(Serialize)]
struct NewOfChoice {
    index: u32,
    delta: Delta,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

/// What is new of a message.
#[derive(Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// As in [`Message`].
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

/// The log-probabilities of a choice, by token.
#[derive(Serialize)]
struct Logprobs {
    content: Vec<Token>,
    refusal: (),
}

impl Logprobs {
    /// `num_candidates` of each position; `None` if the request asked for no log-probabilities.
    fn of(positions: Option<&[Position]>, num_candidates: Option<u32>) -> Option<Self> {
        Some(Self {
            content: tokens(positions?, num_candidates?),
            refusal: (),
        })
    }
}

/// Turns the answers of a stream into events.
pub struct ChatChunks {
    request: Chat,
    frame: Frame,
    counts: Counts,
    has_begun: Vec<bool>,
}

impl Chunks for ChatChunks {
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>) {
        self.counts.note(0, &answer.reply);
        for (index, row) in (0..self.has_begun.len()).zip(answer.reply.rows) {
            self.counts.choices[index] = row.num_tokens;
            let begins = !std::mem::replace(&mut self.has_begun[index], true);
            let positions = row.logprobs.as_deref().filter(|list| !list.is_empty());
            let has_news = !row.text.is_empty()
                || !row.reasoning.is_empty()
                || !row.tool_calls.is_empty()
                || positions.is_some()
                || row.finish_reason.is_some();
            if !begins && !has_news {
                continue;
            }
            let logprobs = Logprobs::of(positions, self.request.logprobs);
            // The first chunk always has a text, as clients begin theirs with it.
            let has_text = begins || !row.text.is_empty();
            let choice = NewOfChoice {
                index: index as u32,
                delta: Delta {
                    role: begins.then_some(ROLE),
                    content: has_text.then_some(row.text),
                    reasoning: row.reasoning.clone(),
                    reasoning_content: row.reasoning,
                    tool_calls: row.tool_calls,
                },
                logprobs,
                finish_reason: self.request.finish_reason(row.finish_reason),
            };
            let usage = self.request.sampling.usage_so_far(&self.counts);
            self.frame.event(&[choice], usage, out);
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.request.sampling.include_usage {
            let usage = Some(self.counts.usage());
            self.frame.event(&[] as &[NewOfChoice], Some(usage), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Body;
    use crate::endpoint::Endpoint;
    use crate::generation::{Candidate, Reply};

    fn request(more: Value) -> Chat {
        let mut fields = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
        let more = more.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        let body = Body::parse(fields.to_string().as_bytes()).expect("an object");
        Chat::read(body, 42).expect("a sound request")
    }

    fn answer(rows: Vec<Row>) -> Answer {
        let reply = Reply {
            num_prompt_tokens: 5,
            rows,
            ..Reply::default()
        };
        Answer { prompt: 0, reply }
    }

    fn call() -> Value {
        json!({"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}})
    }

    #[test]
    fn a_message_has_the_parts_of_the_reply() {
        let rows = vec![
            Row {
                text: "Hello".to_owned(),
                reasoning: "Hm".to_owned(),
                finish_reason: Some("stop"),
                num_tokens: 3,
                ..Row::default()
            },
            Row {
                tool_calls: vec![call()],
                finish_reason: Some("tool_calls"),
                num_tokens: 4,
                ..Row::default()
            },
        ];
        let whole = request(json!({"n": 2})).answer("id".to_owned(), vec![answer(rows)]);
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(
            whole["choices"][0],
            json!({
                "index": 0, "logprobs": null, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Hello", "refusal": null, "reasoning": "Hm", "reasoning_content": "Hm"},
            })
        );
        let calls =
            json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": [call()]});
        assert_eq!(whole["choices"][1]["message"], calls);
        assert_eq!(whole["usage"]["total_tokens"], 12);
    }

    #[test]
    fn a_stream_begins_with_the_role_and_has_what_is_new() {
        let row = |text: &str, finish_reason| Row {
            text: text.to_owned(),
            finish_reason,
            ..Row::default()
        };
        let with_call = Row {
            tool_calls: vec![call()],
            ..row("", Some("tool_calls"))
        };
        let mut chunks = request(json!({"stream": true})).chunks("id".to_owned());
        let mut out = Vec::new();
        for row in [row("", None), row("", None), row("Hi", None), with_call] {
            chunks.write(answer(vec![row]), &mut out);
        }
        chunks.finish(&mut out);
        let text = String::from_utf8(out).expect("text");
        let deltas: Vec<Value> = text
            .split_terminator("\n\n")
            .map(|event| {
                serde_json::from_str(event.strip_prefix("data: ").expect("an event")).expect("JSON")
            })
            .map(|chunk: Value| chunk["choices"][0]["delta"].clone())
            .collect();
        let expected = [
            json!({"role": "assistant", "content": ""}),
            json!({"content": "Hi"}),
            json!({"tool_calls": [call()]}),
        ];
        assert_eq!(deltas, expected);
    }

    #[test]
    fn each_token_has_its_bytes_and_candidates() {
        let candidate = |text: &str, logprob| Candidate {
            text: text.into(),
            logprob,
        };
        let position = Position {
            token: candidate("ä", -2.0),
            ranked: vec![candidate("a", -0.5), candidate("ä", -2.0)],
        };
        let row = Row {
            text: "ä".to_owned(),
            logprobs: Some(vec![position]),
            ..Row::default()
        };
        let request = request(json!({"logprobs": true, "top_logprobs": 1}));
        let whole = request.answer("id".to_owned(), vec![answer(vec![row])]);
        assert_eq!(
            whole["choices"][0]["logprobs"],
            json!({"refusal": null, "content": [{
                "token": "ä", "logprob": -2.0, "bytes": [195, 164],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            }]})
        );
    }
}
