//! `/v1/messages`: the answer. A stream's events build the message that a request without a stream gets.

use serde_json::{Map, Value, json};

use super::errors;
use super::request::Messages;
use super::tools;
use crate::Error;
use crate::answer::Answer;
use crate::endpoint::{EndpointAnswer, ended};
use crate::parts::{Part, Parts, Piece};
use crate::sse::{Chunks, named_event};
use crate::usage::Counts;

impl EndpointAnswer for Messages {
    fn answer(self, id: String, answers: Vec<Answer>) -> Value {
        ended(self.events(id), answers).message()
    }

    fn chunks(self, id: String) -> impl Chunks {
        self.events(id)
    }
}

impl Messages {
    fn events(self, id: String) -> MessageEvents {
        MessageEvents {
            id,
            request: self,
            parts: Parts::default(),
            content: Vec::new(),
            open: None,
            has_begun: false,
            counts: Counts::new(1, 1),
            stop: None,
        }
    }
}

/// Turns the answers of a stream into events.
struct MessageEvents {
    id: String,
    request: Messages,
    parts: Parts,
    /// The blocks that are complete.
    content: Vec<Value>,
    /// The block that grows, and its text.
    open: Option<(Part, String)>,
    has_begun: bool,
    counts: Counts,
    stop: Option<Stop>,
}

/// Why a message ended.
struct Stop {
    reason: &'static str,
    sequence: Option<String>,
}

impl Chunks for MessageEvents {
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>) {
        self.counts.note(0, &answer.reply);
        let row = answer.reply.rows.into_iter().next();
        self.counts.choices[0] = row.as_ref().map_or(0, |row| row.num_tokens);
        if !std::mem::replace(&mut self.has_begun, true) {
            event("message_start", json!({"message": self.message()}), out);
            event("ping", json!({}), out);
        }
        let Some(row) = row else {
            return;
        };
        let stop = row
            .finish_reason
            .map(|reason| self.stop(reason, &row.stop_reason));
        for piece in self.parts.read(row) {
            self.piece(piece, out);
        }
        self.stop = self.stop.take().or(stop);
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if let Some(end) = self.parts.finish() {
            self.piece(end, out);
        }
        let message = self.message();
        let names = ["stop_reason", "stop_sequence"];
        let delta = names.map(|name| (name.to_owned(), message[name].clone()));
        let delta: Map<_, _> = delta.into_iter().collect();
        let usage = &message["usage"];
        event(
            "message_delta",
            json!({"delta": delta, "usage": usage}),
            out,
        );
        event("message_stop", json!({}), out);
    }

    fn fail(&mut self, error: &Error, out: &mut Vec<u8>) {
        named_event("error", &errors::body(error, &self.id), out);
    }

    /// The last event says that it is the last.
    fn end(&self) -> &'static [u8] {
        b""
    }
}

impl MessageEvents {
    /// The message so far.
    fn message(&self) -> Value {
        let stop = self.stop.as_ref();
        let usage = self.counts.usage();
        let num_cached = usage.prompt_tokens_details.cached_tokens;
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.chat.model,
            "content": self.content,
            "stop_reason": stop.map(|stop| stop.reason),
            "stop_sequence": stop.and_then(|stop| stop.sequence.as_ref()),
            // Every prompt is kept while there is room, so that nothing is created for a fee.
            "usage": {
                "input_tokens": usage.prompt_tokens.saturating_sub(num_cached),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached,
                "output_tokens": usage.completion_tokens,
            },
        })
    }

    /// Why the message ends, from OpenAI's word for it and the stop word or token that the backend names.
    fn stop(&self, finish_reason: &str, stopped_by: &str) -> Stop {
        let mut sequences = self.request.stop_sequences.iter();
        let sequence = sequences.find(|sequence| *sequence == stopped_by);
        let reason = match finish_reason {
            "tool_calls" => "tool_use",
            "stop" if sequence.is_some() => {
                return Stop {
                    reason: "stop_sequence",
                    sequence: sequence.cloned(),
                };
            }
            "stop" => "end_turn",
            _ if self.counts.choices[0] < self.request.max_tokens && !self.request.has_timeout => {
                "model_context_window_exceeded"
            }
            _ => "max_tokens",
        };
        Stop {
            reason,
            sequence: None,
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Begin(part) => {
                self.event("content_block_start", "content_block", block(&part), out);
                self.open = Some((part, String::new()));
            }
            Piece::More(text) => {
                let Some((part, all)) = &mut self.open else {
                    return;
                };
                all.push_str(&text);
                let delta = match part {
                    Part::Thought if !self.request.thinking.is_shown => return,
                    Part::Thought => json!({"type": "thinking_delta", "thinking": text}),
                    Part::Text => json!({"type": "text_delta", "text": text}),
                    Part::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                };
                self.event("content_block_delta", "delta", delta, out);
            }
            Piece::End => self.close(out),
        }
    }

    /// Completes the open block.
    fn close(&mut self, out: &mut Vec<u8>) {
        let Some((part, text)) = self.open.take() else {
            return;
        };
        let mut block = block(&part);
        match part {
            Part::Thought => {
                let signature = self.request.thinking.signature(&text);
                let delta = json!({"type": "signature_delta", "signature": signature});
                self.event("content_block_delta", "delta", delta, out);
                block["signature"] = json!(signature);
                if self.request.thinking.is_shown {
                    block["thinking"] = json!(text);
                }
            }
            Part::Text => block["text"] = json!(text),
            // The limit of tokens may have cut it off.
            Part::Call { .. } => {
                block["input"] = serde_json::from_str(&text).unwrap_or_else(|_| json!({}));
            }
        }
        let stop = json!({"index": self.content.len()});
        event("content_block_stop", stop, out);
        self.content.push(block);
    }

    /// Writes an event about the open block.
    fn event(&self, name: &str, field: &str, value: Value, out: &mut Vec<u8>) {
        event(
            name,
            json!({"index": self.content.len(), field: value}),
            out,
        );
    }
}

/// A block without its text.
fn block(part: &Part) -> Value {
    match part {
        Part::Thought => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Part::Text => json!({"type": "text", "text": ""}),
        Part::Call { id, name } => {
            json!({"type": "tool_use", "id": tools::id(id), "name": name, "input": {}})
        }
    }
}

fn event(name: &str, mut fields: Value, out: &mut Vec<u8>) {
    fields["type"] = json!(name);
    named_event(name, &fields, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Body;
    use crate::endpoint::Endpoint;
    use crate::generation::{Details, Reply, Row};

    fn request(more: Value) -> Messages {
        let mut fields = json!({
            "model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}],
        });
        let more = more.as_object().expect("fields").clone();
        fields.as_object_mut().expect("fields").extend(more);
        let body = Body::parse(fields.to_string().as_bytes()).expect("an object");
        Messages::read(body, 42).expect("sound")
    }

    fn answer(row: Row) -> Answer {
        let reply = Reply {
            num_prompt_tokens: 5,
            rows: vec![row],
            usage: Some(Details {
                num_cached_tokens: 3,
                ..Details::default()
            }),
            ..Reply::default()
        };
        Answer { prompt: 0, reply }
    }

    /// The events of a stream of rows.
    fn events(request: Messages, rows: Vec<Row>) -> Vec<Value> {
        let mut events = request.events("msg_1".to_owned());
        let mut out = Vec::new();
        for row in rows {
            events.write(answer(row), &mut out);
        }
        events.finish(&mut out);
        let text = String::from_utf8(out).expect("text");
        let event = |event: &str| {
            let (name, data) = event.split_once('\n').expect("two lines");
            let data = data.strip_prefix("data: ").expect("data");
            let event: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(
                Some(name),
                event["type"]
                    .as_str()
                    .map(|name| format!("event: {name}"))
                    .as_deref()
            );
            event
        };
        text.split_terminator("\n\n").map(event).collect()
    }

    /// The message that events build by Anthropic's rules.
    fn built(events: &[Value]) -> Value {
        let mut message = Value::Null;
        let mut inputs = String::new();
        let mut open = None;
        for event in events {
            let index = event["index"].as_u64().map(|index| index as usize);
            match event["type"].as_str().expect("a type") {
                "message_start" => message = event["message"].clone(),
                "content_block_start" => {
                    let content = message["content"].as_array_mut().expect("a list");
                    assert_eq!((open, index), (None, Some(content.len())));
                    content.push(event["content_block"].clone());
                    open = index;
                }
                "content_block_delta" => {
                    assert_eq!(open, index);
                    let block = &mut message["content"][index.expect("an index")];
                    let delta = &event["delta"];
                    let field = match delta["type"].as_str().expect("a type") {
                        "text_delta" => "text",
                        "thinking_delta" => "thinking",
                        "signature_delta" => "signature",
                        "input_json_delta" => {
                            inputs.push_str(delta["partial_json"].as_str().expect("a text"));
                            continue;
                        }
                        other => panic!("{other}"),
                    };
                    let text = format!(
                        "{}{}",
                        block[field].as_str().expect("a text"),
                        delta[field].as_str().expect("a text")
                    );
                    block[field] = json!(text);
                }
                "content_block_stop" => {
                    assert_eq!(open.take(), index);
                    if !inputs.is_empty() {
                        let input = serde_json::from_str(&std::mem::take(&mut inputs));
                        message["content"][index.expect("an index")]["input"] =
                            input.expect("JSON");
                    }
                }
                "message_delta" => {
                    for name in ["stop_reason", "stop_sequence"] {
                        message[name] = event["delta"][name].clone();
                    }
                    message["usage"] = event["usage"].clone();
                }
                "ping" | "message_stop" => {}
                other => panic!("{other}"),
            }
        }
        assert_eq!(events.last().expect("an event")["type"], "message_stop");
        message
    }

    /// A pseudo-random number below `end`.
    fn below(state: &mut u64, end: usize) -> usize {
        *state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (*state >> 33) as usize % end
    }

    /// Pieces of a text, cut at random characters.
    fn cut(text: &str, state: &mut u64) -> Vec<String> {
        let mut pieces = vec![String::new()];
        for character in text.chars() {
            if below(state, 3) == 0 {
                pieces.push(String::new());
            }
            pieces.last_mut().expect("one").push(character);
        }
        pieces
    }

    #[test]
    fn a_stream_builds_the_whole_message_in_any_chunking() {
        const THOUGHT: &str = "\nA fox? häuser\n";
        const TEXT: &str = "\n\nLet me see. ä\n";
        let calls = [("a", r#"{"city": "Oslo"}"#), ("b", "{}")];
        let whole = Row {
            reasoning: THOUGHT.to_owned(),
            text: TEXT.to_owned(),
            tool_calls: calls
                .iter()
                .map(|(id, arguments)| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}))
                .collect(),
            finish_reason: Some("tool_calls"),
            num_tokens: 9,
            ..Row::default()
        };
        for display in ["summarized", "omitted"] {
            let request = || request(json!({"thinking": {"type": "adaptive", "display": display}}));
            let expected = request().answer("msg_1".to_owned(), vec![answer(whole.clone())]);
            assert_eq!(expected["content"].as_array().map(Vec::len), Some(4));
            for seed in 0..200 {
                let mut state = seed;
                let mut rows = Vec::new();
                for reasoning in cut(THOUGHT, &mut state) {
                    rows.push(Row {
                        reasoning,
                        ..Row::default()
                    });
                }
                for text in cut(TEXT, &mut state) {
                    rows.push(Row {
                        text,
                        ..Row::default()
                    });
                }
                for (index, (id, arguments)) in calls.iter().enumerate() {
                    let mut pieces = cut(arguments, &mut state).into_iter();
                    let first = pieces.next().expect("one");
                    let begin = json!({"index": index, "id": id, "type": "function", "function": {"name": "f", "arguments": first}});
                    let more = pieces
                        .map(|piece| json!({"index": index, "function": {"arguments": piece}}));
                    let calls = std::iter::once(begin).chain(more);
                    rows.extend(calls.map(|call| Row {
                        tool_calls: vec![call],
                        ..Row::default()
                    }));
                }
                let last = rows.last_mut().expect("a row");
                last.finish_reason = Some("tool_calls");
                last.num_tokens = 9;
                assert_eq!(built(&events(request(), rows)), expected, "seed {seed}");
            }
        }
    }

    #[test]
    fn a_message_has_the_blocks_of_the_reply() {
        let row = Row {
            reasoning: "Hm".to_owned(),
            text: "Hello".to_owned(),
            finish_reason: Some("stop"),
            num_tokens: 3,
            ..Row::default()
        };
        let message = request(json!({})).answer("msg_1".to_owned(), vec![answer(row.clone())]);
        let expected = json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "inflight"},
                {"type": "text", "text": "Hello"},
            ],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3,
                "output_tokens": 3,
            },
        });
        assert_eq!(message, expected);
        let hidden = request(json!({"thinking": {"type": "adaptive", "display": "omitted"}}));
        let message = hidden.answer("msg_1".to_owned(), vec![answer(row)]);
        let block = json!({"type": "thinking", "thinking": "", "signature": "inflight.SG0="});
        assert_eq!(message["content"][0], block);
    }

    #[test]
    fn the_end_of_a_message_has_its_reason() {
        for (fields, finish_reason, stop_reason, num_tokens, expected) in [
            (json!({}), "stop", "7", 3, ("end_turn", None)),
            (
                json!({"stop_sequences": ["7"]}),
                "stop",
                "fox",
                3,
                ("end_turn", None),
            ),
            (
                json!({"stop_sequences": ["a", "fox"]}),
                "stop",
                "fox",
                3,
                ("stop_sequence", Some("fox")),
            ),
            (
                json!({"stop_sequences": ["fox"]}),
                "tool_calls",
                "fox",
                3,
                ("tool_use", None),
            ),
            (json!({}), "length", "", 99, ("max_tokens", None)),
            (
                json!({}),
                "length",
                "",
                98,
                ("model_context_window_exceeded", None),
            ),
            (
                json!({"timeout": 9}),
                "length",
                "",
                98,
                ("max_tokens", None),
            ),
        ] {
            let row = Row {
                finish_reason: Some(finish_reason),
                stop_reason: stop_reason.to_owned(),
                num_tokens,
                ..Row::default()
            };
            let message = request(fields).answer("msg_1".to_owned(), vec![answer(row)]);
            let (reason, sequence) = expected;
            assert_eq!(
                (&message["stop_reason"], &message["stop_sequence"]),
                (&json!(reason), &json!(sequence))
            );
            assert_eq!(message["content"], json!([]));
        }
    }

    #[test]
    fn a_failure_is_the_last_event() {
        let mut events = request(json!({})).events("msg_1".to_owned());
        let mut out = Vec::new();
        events.fail(&Error::bad_response("no outputs"), &mut out);
        let text = String::from_utf8(out).expect("text");
        assert!(text.starts_with("event: error\ndata: "), "{text}");
        assert!(text.contains("\"api_error\"") && text.contains("\"request_id\":\"msg_1\""));
    }
}
