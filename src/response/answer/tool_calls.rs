//! The output `tool_calls`: calls in the form of OpenAI's interface.

use std::hash::Hasher;

use rustc_hash::FxHasher;
use serde_json::{Value, json};

use inflight_base::TokenId;
use inflight_text::ToolCall;

/// Where ids of calls come from: the same request has the same ids, and the turns of a conversation have different
/// ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallIds(u64);

impl CallIds {
    /// The ids of calls in the answer to this prompt.
    pub fn of_prompt(prompt: &[TokenId]) -> Self {
        let mut hasher = FxHasher::default();
        prompt.iter().for_each(|id| hasher.write_u32(*id));
        Self(hasher.finish())
    }

    /// The id of a call: nine letters and digits, the only form that the templates of Mistral's models accept.
    fn id(self, row: usize, index: usize) -> String {
        const CHARS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let mut hasher = FxHasher::default();
        for part in [self.0, row as u64, index as u64] {
            hasher.write_u64(part);
        }
        let mut bits = hasher.finish();
        let char = |_| {
            let char = CHARS[(bits % 62) as usize];
            bits /= 62;
            char::from(char)
        };
        (0..9).map(char).collect()
    }
}

/// The calls of a row as JSON: `[{"id", "type": "function", "function": {"name", "arguments"}}, ...]`. In a stream each
/// has its `index` among all calls of the row, of which `num_before` have begun in earlier responses, and what
/// continues one of these is `{"index", "function": {"arguments"}}`.
pub(super) fn json(
    calls: &[ToolCall],
    ids: CallIds,
    row: usize,
    num_before: usize,
    in_stream: bool,
) -> String {
    let mut num_calls = num_before;
    let call = |call: &ToolCall| {
        let arguments = &call.arguments;
        if !call.begins() {
            let is_empty = arguments.is_empty();
            let more = json!({"index": num_calls - 1, "function": {"arguments": arguments}});
            return (!is_empty).then_some(more);
        }
        let index = num_calls;
        num_calls += 1;
        let mut object = json!({
            "id": call.id.clone().unwrap_or_else(|| ids.id(row, index)),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        });
        if in_stream {
            object["index"] = json!(index);
        }
        Some(object)
    };
    let calls = calls.iter().filter_map(call);
    Value::Array(calls.collect()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str) -> ToolCall {
        ToolCall {
            name: name.to_owned(),
            arguments: "{\"a\": \"é\\n\"}".to_owned(),
            id: None,
            is_whole: true,
        }
    }

    #[test]
    fn calls_have_the_form_of_openai() {
        let ids = CallIds::of_prompt(&[1, 2, 3]);
        let whole: Value =
            serde_json::from_str(&json(&[call("f"), call("g")], ids, 0, 0, false)).expect("JSON");
        assert_eq!(whole[1]["type"], "function");
        assert_eq!(
            whole[1]["function"],
            json!({"name": "g", "arguments": "{\"a\": \"é\\n\"}"})
        );
        assert_eq!(whole[1].get("index"), None);
        let later: Value =
            serde_json::from_str(&json(&[call("g")], ids, 0, 1, true)).expect("JSON");
        assert_eq!(later[0]["index"], 1);
        assert_eq!(later[0]["id"], whole[1]["id"]);
        let named = ToolCall {
            id: Some("functions.g:0".to_owned()),
            ..call("g")
        };
        let named: Value = serde_json::from_str(&json(&[named], ids, 0, 1, true)).expect("JSON");
        assert_eq!(named[0]["id"], "functions.g:0");
        assert_eq!(json(&[], ids, 0, 0, true), "[]");
    }

    #[test]
    fn pieces_have_the_index_of_their_call() {
        let ids = CallIds::of_prompt(&[1, 2, 3]);
        let piece = |name: &str, arguments: &str, is_whole| ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            id: None,
            is_whole,
        };
        let read = |calls: &[ToolCall], num_before| -> Value {
            serde_json::from_str(&json(calls, ids, 0, num_before, true)).expect("JSON")
        };
        let more = |index: usize, arguments: &str| json!({"index": index, "function": {"arguments": arguments}});
        assert_eq!(read(&[piece("", "1}", true)], 1), json!([more(0, "1}")]));
        assert_eq!(read(&[piece("", "", true)], 1), json!([]));
        let both = read(&[piece("", "}", true), piece("g", "{", false)], 1);
        assert_eq!(both[0], more(0, "}"));
        assert_eq!(
            both[1],
            json!({
                "index": 1, "id": ids.id(0, 1), "type": "function", "function": {"name": "g", "arguments": "{"},
            })
        );
    }

    #[test]
    fn ids_differ_by_prompt_row_and_index() {
        let mut ids = Vec::new();
        for prompt in [&[1, 2][..], &[2, 1], &[]] {
            for (row, index) in [(0, 0), (0, 1), (1, 0)] {
                ids.push(CallIds::of_prompt(prompt).id(row, index));
            }
        }
        assert!(
            ids.iter()
                .all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        );
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 9);
    }
}
