//! A request for text, and the replies to it, in Triton's tensors.

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::names::Names;
use crate::protocol::{
    InferParameter, ModelInferRequest, ModelInferResponse, ParameterChoice, RequestedOutput, Tensor,
};
use crate::token_text::TokenText;
use crate::{Error, adapters};

/// A prompt for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The model, or `MODEL:ADAPTER`.
    pub model: String,
    /// The request id.
    pub id: String,
    /// The text; empty if the options contain a conversation.
    pub text: String,
    /// Request options by name.
    pub options: Map<String, Value>,
}

impl Prompt {
    /// The message for Triton. `outputs` are to be returned.
    pub fn into_message(mut self, outputs: &[&str]) -> ModelInferRequest {
        let (model, adapter) = adapters::split(&self.model);
        if let Some(adapter) = adapter {
            self.options.insert("lora_name".to_owned(), adapter.into());
        }
        // One text with all options: Triton's own parameters hold neither lists nor, in older servers, fractions.
        let options = ParameterChoice::Text(Value::Object(self.options).to_string());
        let parameters = [
            ("sampling_parameters", options),
            // Without it, a stream that ends with nothing would have no last response.
            (
                "triton_enable_empty_final_response",
                ParameterChoice::Bool(true),
            ),
            // Errors of streams have no other code.
            ("return_error_code", ParameterChoice::Bool(true)),
        ];
        let parameters = parameters.map(|(name, value)| {
            let parameter_choice = Some(value);
            (name.to_owned(), InferParameter { parameter_choice })
        });
        let output = |name: &&str| RequestedOutput {
            name: (*name).to_owned(),
        };
        ModelInferRequest {
            model_name: model.to_owned(),
            id: self.id,
            parameters: parameters.into(),
            inputs: vec![Tensor {
                name: "text_input".to_owned(),
                datatype: "BYTES".to_owned(),
                shape: vec![1, 1],
            }],
            outputs: outputs.iter().map(output).collect(),
            raw_input_contents: vec![text_tensor(&self.text)],
        }
    }
}

/// A request for text that continues one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The prompt.
    pub prompt: Prompt,
    /// The outputs to return besides those that every reply is made of.
    pub outputs: Vec<&'static str>,
    /// The names of the fields that the options are made of.
    pub names: Names,
}

/// The outputs that every reply is made of.
const OUTPUTS: [&str; 4] = [
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
];

/// The output with log-probabilities.
pub const LOGPROBS: &str = "logprobs";
/// The output with log-probabilities of the prompt.
pub const PROMPT_LOGPROBS: &str = "prompt_logprobs";
/// The output with the stop word or token that ended a sequence.
pub const STOP_REASON: &str = "stop_reason";
/// The output with what the model thought.
pub const REASONING: &str = "reasoning_content";
/// The output with calls of functions.
pub const TOOL_CALLS: &str = "tool_calls";

impl Generation {
    /// The message that stops this request.
    pub fn stop_message(&self) -> ModelInferRequest {
        let prompt = Prompt {
            text: String::new(),
            options: Map::new(),
            ..self.prompt.clone()
        };
        let mut message = prompt.into_message(&["finish_reason"]);
        let stop = InferParameter {
            parameter_choice: Some(ParameterChoice::Bool(true)),
        };
        message.parameters.insert("stop".to_owned(), stop);
        // An adapter is none of its options.
        message.parameters.remove("sampling_parameters");
        message
    }

    /// The message for Triton.
    pub fn into_message(mut self) -> ModelInferRequest {
        let options = &mut self.prompt.options;
        options.insert("return_usage".to_owned(), true.into());
        self.prompt
            .into_message(&[&OUTPUTS[..], &self.outputs].concat())
    }
}

/// A reply: the whole answer, or what is new of it in a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// The prompt's tokens, in the first reply to a request that asked for their log-probabilities.
    pub prompt_tokens: Option<PromptTokens>,
    /// One row for each sequence of the answer.
    pub rows: Vec<Row>,
    /// Further counts of tokens, in the first reply and the last.
    pub usage: Option<Details>,
    /// The backend's warning. Only the first reply has one.
    pub warning: Option<String>,
}

/// The counts beside the tokens of prompt and output, as the backend writes them with `return_usage`. The first reply
/// of a stream has `num_cached_tokens` only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Details {
    /// Tokens of the prompt that were in the KV cache.
    pub num_cached_tokens: u32,
    /// Tokens of the reasoning.
    pub num_reasoning_tokens: u32,
    /// Draft tokens that the request gave.
    pub num_draft_tokens: u32,
    /// Draft tokens that were right.
    pub num_accepted_draft_tokens: u32,
}

/// The tokens of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptTokens {
    /// The text of the first one, which has no log-probability.
    pub first: TokenText,
    /// The others.
    pub others: Vec<Position>,
}

/// What a reply says about a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The text, or the new part of it.
    pub text: String,
    /// Why the sequence ended, in OpenAI's words; `None` while it is running.
    pub finish_reason: Option<&'static str>,
    /// The stop word, or the id of the token, that ended the sequence, if the request asked for it; otherwise empty.
    pub stop_reason: String,
    /// Tokens so far.
    pub num_tokens: u32,
    /// For each token that the reply has, if the request asked for it.
    pub logprobs: Option<Vec<Position>>,
    /// What the model thought, or the new part of it, which is not in the text.
    pub reasoning: String,
    /// The calls of functions that are new, in OpenAI's form, which are not in the text; in a stream, what is new of
    /// them.
    pub tool_calls: Vec<Value>,
}

/// A token with its log-probability, and the most likely tokens in its place with theirs.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// The token itself.
    pub token: Candidate,
    /// As many of the most likely tokens as the request asked for, best first. Behind them the token itself, if it is
    /// none.
    pub ranked: Vec<Candidate>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The token's text.
    pub text: TokenText,
    /// Its log-probability.
    pub logprob: f64,
}

impl Reply {
    /// The reply that a response of Triton is.
    ///
    /// # Errors
    /// The response lacks an output, or an output is not what its name promises.
    pub fn read(response: &ModelInferResponse) -> Result<Self, Error> {
        let bytes = |name: &str| tensor(response, name);
        let missing = |name: &str| Error::bad_response(&format!("no sound output '{name}'"));
        let texts = |name: &str| bytes(name).and_then(texts).ok_or_else(|| missing(name));
        let numbers = |name: &str| bytes(name).and_then(numbers).ok_or_else(|| missing(name));

        let num_prompt_tokens = numbers("num_input_tokens")?.first().copied();
        let rows = texts("text_output")?.into_iter();
        let mut rows: Vec<_> = rows
            .zip(texts("finish_reason")?)
            .zip(numbers("num_output_tokens")?)
            .map(|((text, reason), num_tokens)| Row {
                text,
                finish_reason: finish_reason(&reason),
                num_tokens,
                ..Row::default()
            })
            .collect();
        if bytes(LOGPROBS).is_some() {
            for (row, json) in rows.iter_mut().zip(texts(LOGPROBS)?) {
                row.logprobs = Some(positions(&json).ok_or_else(|| missing(LOGPROBS))?);
            }
        }
        if bytes(STOP_REASON).is_some() {
            for (row, stop_reason) in rows.iter_mut().zip(texts(STOP_REASON)?) {
                row.stop_reason = stop_reason;
            }
        }
        if bytes(REASONING).is_some() {
            for (row, reasoning) in rows.iter_mut().zip(texts(REASONING)?) {
                row.reasoning = reasoning;
            }
        }
        if bytes(TOOL_CALLS).is_some() {
            for (row, json) in rows.iter_mut().zip(texts(TOOL_CALLS)?) {
                row.tool_calls = serde_json::from_str(&json).map_err(|_| missing(TOOL_CALLS))?;
            }
        }
        let prompt_tokens = match bytes(PROMPT_LOGPROBS) {
            None => None,
            Some(_) => {
                let of_prompt = texts(PROMPT_LOGPROBS)?;
                let tokens = of_prompt.first().and_then(|json| prompt_tokens(json));
                tokens.ok_or_else(|| missing(PROMPT_LOGPROBS))?
            }
        };
        Ok(Self {
            num_prompt_tokens: num_prompt_tokens.ok_or_else(|| missing("num_input_tokens"))?,
            prompt_tokens,
            rows,
            usage: match response.text("usage") {
                None => None,
                Some(json) => Some(serde_json::from_str(json).map_err(|_| missing("usage"))?),
            },
            warning: response.text("warning").map(str::to_owned),
        })
    }
}

/// Which sequences of a stream have ended. Each reply of the backend says of all of them how they did.
#[derive(Debug, Default)]
pub struct Ends(Vec<bool>);

impl Ends {
    /// The reply, with the ends that are new.
    pub fn once(&mut self, mut reply: Reply) -> Reply {
        self.0.resize(reply.rows.len().max(self.0.len()), false);
        for (row, has_ended) in reply.rows.iter_mut().zip(&mut self.0) {
            match row.finish_reason {
                Some(_) if *has_ended => row.finish_reason = None,
                reason => *has_ended |= reason.is_some(),
            }
        }
        reply
    }
}

/// OpenAI's word for the end of a sequence.
fn finish_reason(name: &str) -> Option<&'static str> {
    match name {
        "" => None,
        "tool_calls" => Some("tool_calls"),
        "end_id" | "stop_words" => Some("stop"),
        // Of what OpenAI has words for, `length` says best that the text may lack its end.
        _ => Some("length"),
    }
}

/// The tokens in the text of an output `logprobs`.
fn positions(json: &str) -> Option<Vec<Position>> {
    list(json)?.iter().map(position).collect()
}

/// The tokens in the text of an output `prompt_logprobs`: a list like `logprobs`, whose first token has no
/// log-probability. All replies but the first have none.
fn prompt_tokens(json: &str) -> Option<Option<PromptTokens>> {
    let list = list(json)?;
    let Some((first, others)) = list.split_first() else {
        return Some(None);
    };
    let first = first.as_object()?.values().next()?;
    Some(Some(PromptTokens {
        first: token_text(first)?,
        others: others.iter().map(position).collect::<Option<_>>()?,
    }))
}

/// The text of an entry: its bytes, where the decoded token has others.
fn token_text(entry: &Value) -> Option<TokenText> {
    let Some(bytes) = entry.get("bytes") else {
        return Some(entry["decoded_token"].as_str()?.into());
    };
    let byte = |byte: &Value| u8::try_from(byte.as_u64()?).ok();
    let bytes = bytes.as_array()?.iter().map(byte);
    Some(TokenText::of(bytes.collect::<Option<_>>()?))
}

fn list(json: &str) -> Option<Vec<Value>> {
    serde_json::from_str(json).ok()
}

/// A token among the most likely ones: an object with the token first, of `{"logprob", "rank", "decoded_token"}` by id.
fn position(value: &Value) -> Option<Position> {
    let mut ranked: Vec<_> = value
        .as_object()?
        .values()
        .map(|entry| {
            let candidate = Candidate {
                text: token_text(entry)?,
                logprob: entry["logprob"].as_f64()?,
            };
            Some((entry["rank"].as_u64()?, candidate))
        })
        .collect::<Option<_>>()?;
    let (_, token) = ranked.first().cloned()?;
    ranked.sort_by_key(|(rank, _)| *rank);
    Some(Position {
        token,
        ranked: ranked.into_iter().map(|(_, candidate)| candidate).collect(),
    })
}

/// One text as a tensor of type BYTES: its length in four bytes, little-endian, and its bytes.
fn text_tensor(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("requests are bounded far below 4 GiB");
    [&length.to_le_bytes()[..], text.as_bytes()].concat()
}

/// The elements of a tensor of type BYTES, which are texts.
pub fn texts(tensor: &Bytes) -> Option<Vec<String>> {
    let mut rest = &tensor[..];
    let mut texts = Vec::new();
    while !rest.is_empty() {
        let (length, tail) = rest.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let (text, tail) = tail.split_at_checked(length)?;
        texts.push(std::str::from_utf8(text).ok()?.to_owned());
        rest = tail;
    }
    Some(texts)
}

/// The bytes of an output.
pub fn tensor<'a>(response: &'a ModelInferResponse, name: &str) -> Option<&'a Bytes> {
    let mut outputs = response.outputs.iter();
    let index = outputs.position(|output| output.name == name)?;
    response.raw_output_contents.get(index)
}

/// The elements of a tensor of type FP32.
pub fn floats(tensor: &Bytes) -> Option<Vec<f32>> {
    let (numbers, rest) = tensor.as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
    rest.is_empty().then(|| numbers.collect())
}

/// The elements of a tensor of type INT32 or UINT32, which count something.
pub fn numbers(tensor: &Bytes) -> Option<Vec<u32>> {
    let (numbers, rest) = tensor.as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes));
    rest.is_empty().then(|| numbers.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protocol::OutputTensor;

    fn response(outputs: &[(&str, Vec<u8>)]) -> ModelInferResponse {
        let tensor = |name: &str| OutputTensor {
            name: name.to_owned(),
        };
        ModelInferResponse {
            outputs: outputs.iter().map(|(name, _)| tensor(name)).collect(),
            raw_output_contents: outputs
                .iter()
                .map(|(_, bytes)| bytes.clone().into())
                .collect(),
            ..ModelInferResponse::default()
        }
    }

    fn two_rows() -> [(&'static str, Vec<u8>); 4] {
        [
            (
                "text_output",
                [text_tensor("häuser"), text_tensor("")].concat(),
            ),
            (
                "finish_reason",
                [text_tensor(""), text_tensor("stop_words")].concat(),
            ),
            ("num_input_tokens", 7u32.to_le_bytes().to_vec()),
            (
                "num_output_tokens",
                [3u32.to_le_bytes(), 2u32.to_le_bytes()].concat(),
            ),
        ]
    }

    #[test]
    fn a_reply_has_a_row_for_each_sequence() {
        let row = |text: &str, finish_reason, num_tokens| Row {
            text: text.to_owned(),
            finish_reason,
            num_tokens,
            ..Row::default()
        };
        let expected = Reply {
            num_prompt_tokens: 7,
            rows: vec![row("häuser", None, 3), row("", Some("stop"), 2)],
            ..Reply::default()
        };
        assert_eq!(Reply::read(&response(&two_rows())), Ok(expected));
    }

    #[test]
    fn a_sequence_ends_once() {
        let mut ends = Ends::default();
        let reply = Reply::read(&response(&two_rows())).expect("sound");
        assert_eq!(ends.once(reply.clone()), reply);
        let mut last = reply;
        last.rows[0].finish_reason = Some("length");
        let found = ends.once(last).rows;
        let reasons: Vec<_> = found.iter().map(|row| row.finish_reason).collect();
        assert_eq!(reasons, [Some("length"), None]);
    }

    #[test]
    fn what_is_missing_or_cut_off_is_an_error() {
        for output in 0..4 {
            let mut outputs = two_rows();
            outputs[output].1.pop();
            assert!(
                Reply::read(&response(&outputs)).is_err(),
                "{}",
                outputs[output].0
            );
            let mut outputs = two_rows().to_vec();
            let (name, _) = outputs.remove(output);
            let error = Reply::read(&response(&outputs)).expect_err("an output is missing");
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn candidates_are_in_order_of_rank() {
        let entry = |logprob: f64, rank: u32, text: &str| json!({"logprob": logprob, "rank": rank, "decoded_token": text});
        let json =
            json!([{"9": entry(-3.0, 5, "c"), "4": entry(-0.5, 1, "a"), "3": entry(-1.0, 2, "b")}]);
        let found = positions(&json.to_string()).expect("sound");
        assert_eq!(found[0].token.text.shown(), "c");
        let ranked: Vec<_> = found[0]
            .ranked
            .iter()
            .map(|candidate| candidate.text.shown())
            .collect();
        assert_eq!(ranked, ["a", "b", "c"]);
        let part = json!([{"7": {"logprob": -1.0, "rank": 1, "decoded_token": "\u{fffd}", "bytes": [240, 159]}}]);
        let found = positions(&part.to_string()).expect("sound");
        assert_eq!(found[0].token.text.bytes(), b"\xf0\x9f");
        for bytes in ["[256]", "[-1]", "\"a\"", "null"] {
            let wrong = part.to_string().replace("[240,159]", bytes);
            assert_eq!(positions(&wrong), None, "{wrong}");
        }
        assert_eq!(positions("[{}]"), None);
        assert_eq!(positions("null"), None);
    }

    #[test]
    fn a_prompt_has_tokens_of_which_the_first_has_no_log_probability() {
        let json = json!([
            {"7": {"logprob": null, "rank": null, "decoded_token": "Once"}},
            {"9": {"logprob": -3.0, "rank": 2, "decoded_token": " upon"}, "8": {"logprob": -0.5, "rank": 1, "decoded_token": " a"}},
        ]);
        let mut outputs = two_rows().to_vec();
        outputs.push((PROMPT_LOGPROBS, text_tensor(&json.to_string())));
        let reply = Reply::read(&response(&outputs)).expect("sound");
        let tokens = reply.prompt_tokens.expect("they are there");
        assert_eq!(tokens.first.shown(), "Once");
        let [second] = &tokens.others[..] else {
            panic!("{tokens:?}");
        };
        assert_eq!(
            (&second.token.text.shown()[..], second.token.logprob),
            (" upon", -3.0)
        );
        assert_eq!(second.ranked[0].text.shown(), " a");
        for (json, is_sound) in [
            ("[]", true),
            ("[null]", false),
            ("[{}]", false),
            ("", false),
        ] {
            let mut outputs = two_rows().to_vec();
            outputs.push((PROMPT_LOGPROBS, text_tensor(json)));
            let reply = Reply::read(&response(&outputs));
            assert_eq!(reply.map(|it| it.prompt_tokens).is_ok(), is_sound, "{json}");
        }
    }

    #[test]
    fn the_adapter_in_the_name_of_a_model_becomes_an_option() {
        let prompt = Prompt {
            model: "stories:poet".to_owned(),
            id: String::new(),
            text: String::new(),
            options: Map::new(),
        };
        let message = prompt.into_message(&[]);
        assert_eq!(message.model_name, "stories");
        let options = ParameterChoice::Text(r#"{"lora_name":"poet"}"#.to_owned());
        let parameter = &message.parameters["sampling_parameters"];
        assert_eq!(parameter.parameter_choice, Some(options));
    }

    #[test]
    fn a_message_has_all_options_in_one_parameter() {
        let generation = Generation {
            prompt: Prompt {
                model: "stories".to_owned(),
                id: "7".to_owned(),
                text: "Once".to_owned(),
                options: json!({"stop": ["a"]})
                    .as_object()
                    .expect("an object")
                    .clone(),
            },
            outputs: vec![LOGPROBS],
            names: Names::of("prompt"),
        };
        let message = generation.into_message();
        let options = InferParameter {
            parameter_choice: Some(ParameterChoice::Text(
                r#"{"stop":["a"],"return_usage":true}"#.to_owned(),
            )),
        };
        assert_eq!(message.parameters["sampling_parameters"], options);
        assert_eq!(message.raw_input_contents, [b"\x04\0\0\0Once"]);
        assert_eq!(message.outputs.len(), 5);
    }
}
