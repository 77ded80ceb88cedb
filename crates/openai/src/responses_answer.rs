//! `/v1/responses`: the answer. A stream's events build the same response that a request without a stream gets.

use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::endpoint::{EndpointAnswer, ended};
use crate::logprobs::{Token, from_text_on, tokens};
use crate::parts::{Part, Parts, Piece};
use crate::response_store::{QUEUED, StoreTarget};
use crate::responses::Responses;
use crate::sse::{Chunks, named_event};
use crate::usage::Counts;
use crate::{Error, ids};

impl EndpointAnswer for Responses {
    fn answer(self, id: String, answers: Vec<Answer>) -> Value {
        ended(self.events(id), answers).response()
    }

    fn chunks(self, id: String) -> impl Chunks {
        self.events(id)
    }
}

impl Responses {
    /// Computes the response in the background; returns it as it begins. The response is stored now, and when it is
    /// complete or has failed.
    pub fn in_background(
        self,
        id: String,
        answers: impl Future<Output = Result<Vec<Answer>, Error>> + Send + 'static,
    ) -> (Value, impl Future<Output = ()> + Send + 'static) {
        let mut events = self.events(id);
        let mut response = events.response();
        response["status"] = json!(QUEUED);
        if let Some(target) = &events.target {
            target.store(&response);
        }
        let work = async move {
            match answers.await {
                Ok(answers) => drop(ended(events, answers)),
                Err(error) => events.fail(&error, &mut Vec::new()),
            }
        };
        (response, work)
    }

    fn events(self, id: String) -> ResponseEvents {
        ResponseEvents {
            id,
            created_at: ids::now(),
            num_candidates: self.chat.logprobs.unwrap_or_default(),
            repeated: self.repeated,
            target: self.target,
            counts: Counts::new(1, 1),
            output: Vec::new(),
            open: None,
            parts: Parts::default(),
            tokens: Vec::new(),
            state: State::Waiting,
            num_events: 0,
        }
    }
}

/// Turns the answers of a stream into events.
pub struct ResponseEvents {
    id: String,
    created_at: u64,
    repeated: Map<String, Value>,
    target: Option<StoreTarget>,
    /// How many candidates each token has.
    num_candidates: u32,
    counts: Counts,
    /// The items that are complete.
    output: Vec<Value>,
    /// The item that grows.
    open: Option<Open>,
    parts: Parts,
    /// Tokens with log-probabilities that no message has.
    tokens: Vec<Token>,
    state: State,
    num_events: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Waiting,
    InProgress,
    Completed,
    Incomplete,
}

/// An item that is not complete.
enum Open {
    Text(Item),
    Call(Call),
}

/// An item of text.
struct Item {
    kind: Kind,
    id: String,
    text: String,
    /// The tokens of a message, if the request wants their log-probabilities.
    tokens: Vec<Token>,
}

/// An item that calls a function.
struct Call {
    id: String,
    call_id: String,
    name: String,
    arguments: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Reasoning,
    Message,
}

impl Kind {
    /// The type of the part that has the text.
    fn part(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning_text",
            Self::Message => "output_text",
        }
    }

    /// The part of an item.
    fn with_text(self, text: &str, tokens: &[Token]) -> Value {
        match self {
            Self::Reasoning => json!({"type": self.part(), "text": text}),
            Self::Message => {
                json!({"type": self.part(), "text": text, "annotations": [], "logprobs": tokens})
            }
        }
    }
}

impl Item {
    fn json(&self, content: &[Value], status: &str) -> Value {
        let id = &self.id;
        match self.kind {
            Kind::Reasoning => {
                json!({"type": "reasoning", "id": id, "summary": [], "content": content, "status": status})
            }
            Kind::Message => {
                json!({"type": "message", "id": id, "role": "assistant", "content": content, "status": status})
            }
        }
    }
}

impl Call {
    fn json(&self, arguments: &str, status: &str) -> Value {
        json!({
            "type": "function_call", "id": self.id, "call_id": self.call_id, "name": self.name,
            "arguments": arguments, "status": status,
        })
    }
}

/// What is new of an item's text.
#[derive(Serialize)]
struct Delta<'a> {
    r#type: String,
    sequence_number: u64,
    item_id: &'a str,
    output_index: usize,
    content_index: u32,
    delta: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [Token]>,
}

impl Chunks for ResponseEvents {
    fn write(&mut self, answer: Answer, out: &mut Vec<u8>) {
        if self.state == State::Waiting {
            self.state = State::InProgress;
            for name in ["response.created", "response.in_progress"] {
                let response = self.response();
                self.event(name, json!({"response": response}), out);
            }
        }
        self.counts.note(0, &answer.reply);
        let Some(row) = answer.reply.rows.into_iter().next() else {
            return;
        };
        self.counts.choices[0] = row.num_tokens;
        let positions = row.logprobs.as_deref().unwrap_or_default();
        self.tokens.extend(tokens(positions, self.num_candidates));
        let finish_reason = row.finish_reason;
        for piece in self.parts.read(row) {
            self.piece(piece, out);
        }
        match finish_reason {
            None => {}
            Some("length") => self.state = State::Incomplete,
            Some(_) => self.state = State::Completed,
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.open.is_none() && self.output.is_empty() {
            self.begin(Kind::Message, out);
        }
        self.close(out);
        let name = match self.state {
            State::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        let response = self.response();
        if let Some(target) = &self.target {
            target.store(&response);
        }
        self.event(name, json!({"response": response}), out);
    }

    fn fail(&mut self, error: &Error, out: &mut Vec<u8>) {
        let fields = json!({"code": error.code, "message": error.message, "param": error.param});
        self.event("error", fields, out);
        let mut response = self.response();
        response["status"] = json!("failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        if let Some(target) = &self.target {
            target.store(&response);
        }
        self.event("response.failed", json!({"response": response}), out);
    }

    /// The last event says that it is the last.
    fn end(&self) -> &'static [u8] {
        b""
    }
}

impl ResponseEvents {
    /// The response so far.
    fn response(&self) -> Value {
        let is_over = matches!(self.state, State::Completed | State::Incomplete);
        let details = match self.state {
            State::Incomplete => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let usage = self.counts.usage();
        let usage = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        });
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": self.status(),
            "error": null,
            "incomplete_details": details,
            "output": self.output,
            "usage": is_over.then_some(usage),
        });
        for (name, value) in &self.repeated {
            response[name] = value.clone();
        }
        response
    }

    fn status(&self) -> &'static str {
        match self.state {
            State::Waiting | State::InProgress => "in_progress",
            State::Completed => "completed",
            State::Incomplete => "incomplete",
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Begin(Part::Thought) => self.begin(Kind::Reasoning, out),
            Piece::Begin(Part::Text) => self.begin(Kind::Message, out),
            Piece::Begin(Part::Call { id, name }) => self.begin_call(id, name, out),
            Piece::More(text) => match &self.open {
                Some(Open::Text(_)) => self.grow_text(&text, out),
                Some(Open::Call(_)) => self.grow_call(&text, out),
                None => {}
            },
            Piece::End => self.close(out),
        }
    }

    fn grow_text(&mut self, text: &str, out: &mut Vec<u8>) {
        let Some(Open::Text(item)) = &mut self.open else {
            return;
        };
        let is_first = item.text.is_empty();
        item.text.push_str(text);
        let first_new = item.tokens.len();
        if item.kind == Kind::Message {
            let own = std::mem::take(&mut self.tokens);
            item.tokens.extend(match is_first {
                false => own,
                // Those before it are of what the model thought.
                true => from_text_on(own, text),
            });
        }
        let name = format!("response.{}.delta", item.kind.part());
        let delta = Delta {
            r#type: name.clone(),
            sequence_number: self.num_events,
            item_id: &item.id,
            output_index: self.output.len(),
            content_index: 0,
            delta: text,
            logprobs: (item.kind == Kind::Message).then_some(&item.tokens[first_new..]),
        };
        named_event(&name, &delta, out);
        self.num_events += 1;
    }

    fn begin(&mut self, kind: Kind, out: &mut Vec<u8>) {
        let item = Item {
            kind,
            id: ids::id(match kind {
                Kind::Reasoning => "rs-",
                Kind::Message => "msg-",
            }),
            text: String::new(),
            tokens: Vec::new(),
        };
        let index = self.output.len();
        let added = json!({"output_index": index, "item": item.json(&[], "in_progress")});
        self.event("response.output_item.added", added, out);
        let part = json!({
            "item_id": item.id, "output_index": index, "content_index": 0, "part": kind.with_text("", &[]),
        });
        self.event("response.content_part.added", part, out);
        self.open = Some(Open::Text(item));
    }

    /// Completes the open item.
    fn close(&mut self, out: &mut Vec<u8>) {
        match self.open.take() {
            None => {}
            Some(Open::Text(item)) => self.close_text(item, out),
            Some(Open::Call(call)) => self.close_call(&call, out),
        }
    }

    fn close_text(&mut self, mut item: Item, out: &mut Vec<u8>) {
        let index = self.output.len();
        if item.kind == Kind::Message {
            // The one that ends it has no text.
            item.tokens.append(&mut self.tokens);
        }
        let part = item.kind.with_text(&item.text, &item.tokens);
        let mut text = json!({
            "item_id": item.id, "output_index": index, "content_index": 0, "text": item.text,
        });
        if item.kind == Kind::Message {
            text["logprobs"] = json!(item.tokens);
        }
        self.event(&format!("response.{}.done", item.kind.part()), text, out);
        let done = json!({
            "item_id": item.id, "output_index": index, "content_index": 0, "part": part,
        });
        self.event("response.content_part.done", done, out);
        let status = match self.state {
            State::Incomplete => "incomplete",
            _ => "completed",
        };
        self.complete(item.json(&[part], status), out);
    }

    fn grow_call(&mut self, delta: &str, out: &mut Vec<u8>) {
        let Some(Open::Call(open)) = &mut self.open else {
            return;
        };
        open.arguments.push_str(delta);
        let delta = json!({"item_id": open.id, "output_index": self.output.len(), "delta": delta});
        self.event("response.function_call_arguments.delta", delta, out);
    }

    fn begin_call(&mut self, call_id: String, name: String, out: &mut Vec<u8>) {
        let open = Call {
            id: ids::id("fc-"),
            call_id,
            name,
            arguments: String::new(),
        };
        let item = open.json("", "in_progress");
        let added = json!({"output_index": self.output.len(), "item": item});
        self.event("response.output_item.added", added, out);
        self.open = Some(Open::Call(open));
    }

    fn close_call(&mut self, call: &Call, out: &mut Vec<u8>) {
        let arguments = &call.arguments;
        let done = json!({
            "item_id": call.id, "output_index": self.output.len(), "name": call.name, "arguments": arguments,
        });
        self.event("response.function_call_arguments.done", done, out);
        let status = match serde_json::from_str::<IgnoredAny>(arguments) {
            Ok(_) => "completed",
            Err(_) => "incomplete",
        };
        self.complete(call.json(arguments, status), out);
    }

    fn complete(&mut self, item: Value, out: &mut Vec<u8>) {
        let done = json!({"output_index": self.output.len(), "item": item});
        self.output.push(item);
        self.event("response.output_item.done", done, out);
    }

    fn event(&mut self, name: &str, mut fields: Value, out: &mut Vec<u8>) {
        fields["type"] = json!(name);
        fields["sequence_number"] = json!(self.num_events);
        named_event(name, &fields, out);
        self.num_events += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Body;
    use crate::endpoint::Endpoint;
    use crate::generation::{Candidate, Position, Reply, Row};

    fn request() -> Responses {
        let body = json!({"model": "m", "input": "Hi", "stream": true});
        let body = Body::parse(body.to_string().as_bytes()).expect("an object");
        Responses::read(body, 42).expect("sound")
    }

    fn answer(row: Row) -> Answer {
        let reply = Reply {
            num_prompt_tokens: 5,
            rows: vec![row],
            ..Reply::default()
        };
        Answer { prompt: 0, reply }
    }

    fn answers() -> Vec<Answer> {
        let call =
            json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let thought = Row {
            reasoning: "Hm".to_owned(),
            ..Row::default()
        };
        let text = |text: &str| Row {
            text: text.to_owned(),
            ..Row::default()
        };
        let last = Row {
            tool_calls: vec![call],
            finish_reason: Some("tool_calls"),
            num_tokens: 9,
            ..text("\n")
        };
        [thought, text("\n"), text("Hello"), text(" you"), last]
            .map(answer)
            .into()
    }

    #[test]
    fn events_are_numbered_and_build_the_response() {
        let mut events = request().events("resp-1".to_owned());
        let mut out = Vec::new();
        for answer in answers() {
            events.write(answer, &mut out);
        }
        events.finish(&mut out);
        let text = String::from_utf8(out).expect("text");
        let (mut names, mut last) = (Vec::new(), Value::Null);
        for (number, event) in text.split_terminator("\n\n").enumerate() {
            let (name, data) = event.split_once('\n').expect("two lines");
            let name = name.strip_prefix("event: ").expect("a name");
            last = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            assert_eq!(
                (&last["type"], &last["sequence_number"]),
                (&json!(name), &json!(number))
            );
            names.push(
                name.strip_prefix("response.")
                    .expect("of a response")
                    .to_owned(),
            );
        }
        let item = |kind: &str, num_deltas: usize| {
            let mut names = vec![
                "output_item.added".to_owned(),
                "content_part.added".to_owned(),
            ];
            names.extend(vec![format!("{kind}.delta"); num_deltas]);
            names.extend([format!("{kind}.done"), "content_part.done".to_owned()]);
            names.push("output_item.done".to_owned());
            names
        };
        let call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ];
        let expected = [
            vec!["created".to_owned(), "in_progress".to_owned()],
            item("reasoning_text", 1),
            item("output_text", 3),
            call.map(str::to_owned).into(),
            vec!["completed".to_owned()],
        ];
        assert_eq!(names, expected.concat());
        assert_eq!(last["response"], events.response());
        let response = &last["response"];
        let types = response["output"].as_array().expect("items").iter();
        let types: Vec<_> = types
            .map(|item| item["type"].as_str().expect("a type"))
            .collect();
        assert_eq!(types, ["reasoning", "message", "function_call"]);
        assert_eq!(response["output"][1]["content"][0]["text"], "\nHello you\n");
        assert_eq!(response["usage"]["total_tokens"], 14);
    }

    #[test]
    fn a_call_in_pieces_is_one_item() {
        let piece = |call: Value| Row {
            tool_calls: vec![call],
            ..Row::default()
        };
        let begin = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
        let more = |arguments: &str| json!({"function": {"arguments": arguments}});
        let rows = [
            piece(begin("1", "{\"a\"")),
            piece(more(": 1")),
            piece(more("}")),
            Row {
                tool_calls: vec![begin("2", "{"), more("\"b")],
                finish_reason: Some("length"),
                ..Row::default()
            },
        ];
        let mut events = request().events("resp-1".to_owned());
        let mut out = Vec::new();
        for row in rows {
            events.write(answer(row), &mut out);
        }
        events.finish(&mut out);
        let text = String::from_utf8(out).expect("text");
        let deltas = text.matches("event: response.function_call_arguments.delta");
        assert_eq!(deltas.count(), 5);
        let response = events.response();
        let calls = response["output"].as_array().expect("items").iter();
        let calls: Vec<_> = calls
            .map(|item| json!([item["call_id"], item["arguments"], item["status"]]))
            .collect();
        assert_eq!(
            calls,
            [
                json!(["1", "{\"a\": 1}", "completed"]),
                json!(["2", "{\"b", "incomplete"]),
            ]
        );
        assert_eq!(text.matches("arguments.done").count(), 4);
    }

    #[test]
    fn a_message_has_the_log_probabilities_of_its_tokens_streamed_or_whole() {
        let position = |text: &str| {
            let token = Candidate {
                text: text.into(),
                logprob: -1.0,
            };
            Position {
                ranked: vec![token.clone(), token.clone()],
                token,
            }
        };
        let row = |reasoning: &str, text: &str, tokens: &[&str]| Row {
            reasoning: reasoning.to_owned(),
            text: text.to_owned(),
            logprobs: Some(tokens.iter().map(|text| position(text)).collect()),
            ..Row::default()
        };
        let request = || {
            let body = json!({"model": "m", "input": "Hi", "stream": true, "top_logprobs": 1});
            let body = Body::parse(body.to_string().as_bytes()).expect("an object");
            Responses::read(body, 42).expect("sound")
        };
        let ended = |row| Row {
            finish_reason: Some("stop"),
            ..row
        };
        let steps = [
            row("", "", &["<think>"]),
            row("Hi", "", &["Hi"]),
            row("", "", &["</think>"]),
            row("", "Hi", &["Hi"]),
            row("", "", &["\u{fffd}"]),
            row("", " ä", &[" ä"]),
            ended(row("", "", &["</s>"])),
        ];
        let all = ["<think>", "Hi", "</think>", "Hi", "\u{fffd}", " ä", "</s>"];
        let whole = [ended(row("Hi", "Hi ä", &all))];
        // What cannot be found in the tokens leaves all of them.
        let from = |rows: Vec<Row>| {
            let answers = rows.into_iter().map(answer).collect();
            let response = request().answer("resp-1".to_owned(), answers);
            let part = &response["output"][1]["content"][0];
            let tokens = part["logprobs"].as_array().expect("a list").clone();
            for token in &tokens {
                assert_eq!(token["top_logprobs"].as_array().map(Vec::len), Some(1));
            }
            let name = |token: &Value| token["token"].as_str().expect("a text").to_owned();
            (
                part["text"].clone(),
                tokens.iter().map(name).collect::<Vec<_>>(),
            )
        };
        let (text, tokens) = from(steps.into());
        assert_eq!(
            (text, tokens.concat()),
            (json!("Hi ä"), "Hi\u{fffd} ä</s>".to_owned())
        );
        let (_, tokens) = from(whole.into());
        assert_eq!(tokens, all);
    }

    #[test]
    fn a_response_that_is_cut_off_says_so() {
        let row = Row {
            text: "Hel".to_owned(),
            finish_reason: Some("length"),
            ..Row::default()
        };
        let response = request().answer("resp-1".to_owned(), vec![answer(row)]);
        assert_eq!(response["status"], "incomplete");
        assert_eq!(
            response["incomplete_details"]["reason"],
            "max_output_tokens"
        );
        assert_eq!(response["output"][0]["status"], "incomplete");
    }

    #[test]
    fn an_empty_response_has_an_empty_message() {
        let row = Row {
            finish_reason: Some("stop"),
            ..Row::default()
        };
        let response = request().answer("resp-1".to_owned(), vec![answer(row)]);
        assert_eq!(response["output"][0]["content"][0]["text"], "");
    }

    #[test]
    fn a_failure_is_the_last_event() {
        let mut events = request().events("resp-1".to_owned());
        let mut out = Vec::new();
        events.fail(&Error::bad_response("no outputs"), &mut out);
        let text = String::from_utf8(out).expect("text");
        assert!(text.starts_with("event: error\n") && text.contains("\"status\":\"failed\""));
    }
}
