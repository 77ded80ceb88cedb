//! The real backend in the fake server: the parts of a reply, whole and streamed. A guide with a single choice makes
//! the model write the reply.

use std::ffi::{CStr, CString};

use inflight_config::{OutputKind, Task};
use inflight_tests::checkout;
use serde_json::{Value, json};

use crate::fake_triton::{Correlation, Input, Parameter, Sent, Spec};
use crate::odd_options::Folder;
use crate::served::Server;

/// Shows the marks of replies, as the templates of models do, and writes tokens that the model knows.
const TEMPLATE: &str = "{# <think></think><tool_call></tool_call> #}\
                        {% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}\
                        {{ messages[-1].content }}{% if thinking %}{{ '[THI' + 'NK]' }}{% endif %}";
const REPLY: &str = r#"<think>so</think>Yes<tool_call>{"name":"f","arguments":{"a":1}}</tool_call><tool_call>{"name":"g"}</tool_call>"#;
const MESSAGES: &str = r#"[{"role":"user","content":"ZQ7"}]"#;
const TOOLS: &str = r#"[{"type":"function","function":{"name":"f"}}]"#;

/// A model with the tokenizer of `folder`, and its checkpoint unless a parameter names another.
fn load(folder: &Folder, parameters: &[(&str, &str)]) -> Server {
    let config = json!({ "chat_template": TEMPLATE });
    std::fs::write(folder.0.join("tokenizer_config.json"), config.to_string()).expect("written");
    let path = folder.0.to_str().expect("plain text");
    let value = |text: &str| json!({ "string_value": text });
    let mut config = json!({
        "name": "m", "backend": "inflight", "max_batch_size": 8, "input": [], "output": [],
        "model_transaction_policy": { "decoupled": true },
        "parameters": {
            "gpt_model_path": value(path), "tokenizer_dir": value(path), "num_threads": value("1"),
            "max_tokens_in_paged_kv_cache": value("2048"), "default_max_tokens": value("400"),
            "cpu_instruction_set": value("portable"), "exclude_input_in_output": value("true"),
        },
    });
    for (name, text) in parameters {
        config["parameters"][name] = value(text);
    }
    Server::load_config(&config)
}

/// The texts of an output over all responses.
fn texts(sent: &[Sent], output: &str) -> Vec<String> {
    let outputs = sent.iter().flat_map(|sent| &sent.outputs);
    let found = outputs.filter(|(name, ..)| name == output);
    // A string is written behind its length, of 4 bytes.
    let text = |bytes: &[u8]| String::from_utf8(bytes[4..].to_vec()).expect("UTF-8");
    found.map(|(_, _, _, bytes)| text(bytes)).collect()
}

/// The responses to a request with these options, whose reply a guide determines.
fn ask(server: &Server, reply: &str, outputs: &[&CStr], options: &[(&CStr, &str)]) -> Vec<Sent> {
    let choice = json!([reply]).to_string();
    let choice = [(c"guided_choice", &choice[..])];
    request(server, outputs, &[&choice[..], options].concat())
}

/// The responses to a request with these options.
fn request(server: &Server, outputs: &[&CStr], options: &[(&CStr, &str)]) -> Vec<Sent> {
    let text = |value: &str| Parameter::String(CString::new(value).expect("no NUL"));
    let parameters = options
        .iter()
        .map(|(name, value)| ((*name).to_owned(), text(value)));
    // To Triton, a request that names no output names all.
    let all = OutputKind::ALL.into_iter();
    let all = all.filter(|kind| kind.is_of(Task::Generate));
    let all: Vec<_> = all.map(OutputKind::c_name).collect();
    let names = if outputs.is_empty() {
        &all[..]
    } else {
        outputs
    };
    let outputs = names.iter().map(|name| (*name).to_owned()).collect();
    let request = server.host.request(Spec {
        correlation: Correlation::Number(1),
        parameters: parameters.collect(),
        inputs: vec![Input::text("")],
        outputs,
        ..Spec::default()
    });
    server.finish(&[request]);
    server.wait_for_final(request);
    server.host.sent(request)
}

#[test]
fn a_reply_has_its_parts_in_outputs_of_their_own() {
    let folder = Folder::new("chat-parts");
    let server = load(&folder, &[]);
    let all = [
        c"text_output",
        c"reasoning_content",
        c"tool_calls",
        c"finish_reason",
    ];
    let chat = [(c"messages", MESSAGES), (c"tools", TOOLS)];
    let whole = ask(&server, REPLY, &all, &chat);
    let streamed = ask(
        &server,
        REPLY,
        &all,
        &[&chat[..], &[(c"stream", "true")]].concat(),
    );
    assert!(streamed.len() > 20, "a response for each token");
    for sent in [&whole, &streamed] {
        assert_eq!(texts(sent, "text_output").concat(), "Yes");
        assert_eq!(texts(sent, "reasoning_content").concat(), "so");
        assert_eq!(texts(sent, "finish_reason").concat(), "tool_calls");
    }
    let calls = |sent: &[Sent]| -> Vec<Value> {
        let texts = texts(sent, "tool_calls");
        let lists = texts
            .iter()
            .map(|text| serde_json::from_str::<Vec<Value>>(text).expect("a list"));
        lists.flatten().collect()
    };
    let (whole, streamed) = (calls(&whole), calls(&streamed));
    assert_eq!(
        whole[0]["function"],
        json!({"name": "f", "arguments": "{\"a\":1}"})
    );
    assert_eq!(
        whole[1]["function"],
        json!({"name": "g", "arguments": "{}"})
    );
    // The name comes first, and the arguments in pieces; a call without any comes whole.
    assert!(streamed.len() > 4, "{streamed:?}");
    for (i, whole) in whole.iter().enumerate() {
        let mut pieces = streamed.iter().filter(|piece| piece["index"] == i);
        let mut joined = pieces.next().expect("a piece").clone();
        let mut arguments = joined["function"]["arguments"]
            .as_str()
            .expect("a text")
            .to_owned();
        for piece in pieces {
            arguments += piece["function"]["arguments"].as_str().expect("a text");
            assert_eq!(piece.as_object().map(|it| it.len()), Some(2), "{piece}");
        }
        joined["function"]["arguments"] = json!(arguments);
        let mut whole = whole.clone();
        whole["index"] = json!(i);
        assert_eq!(joined, whole);
    }
    server.unload();
}

#[test]
fn a_call_that_is_cut_off_is_text_or_in_a_stream_a_call_as_far_as_it_came() {
    let folder = Folder::new("chat-cut");
    let server = load(&folder, &[]);
    let reply = r#"Yes<tool_call>{"name":"f","arguments":{"a":1"#;
    let all = [c"text_output", c"tool_calls", c"finish_reason"];
    let chat = [(c"messages", MESSAGES), (c"tools", TOOLS)];
    let whole = ask(&server, reply, &all, &chat);
    assert_eq!(texts(&whole, "text_output"), [reply]);
    assert_eq!(texts(&whole, "tool_calls"), ["[]"]);
    let streamed = ask(
        &server,
        reply,
        &all,
        &[&chat[..], &[(c"stream", "true")]].concat(),
    );
    assert_eq!(texts(&streamed, "text_output").concat(), "Yes");
    let texts_of_calls = texts(&streamed, "tool_calls");
    let pieces = texts_of_calls
        .iter()
        .flat_map(|text| serde_json::from_str::<Vec<Value>>(text).expect("a list"));
    let arguments = pieces.map(|piece| piece["function"]["arguments"].as_str().map(str::to_owned));
    let arguments: Option<String> = arguments.collect();
    assert_eq!(arguments.as_deref(), Some("{\"a\":1"));
    // No call is complete.
    for sent in [&whole, &streamed] {
        assert_eq!(texts(sent, "finish_reason").concat(), "end_id");
    }
    server.unload();
}

#[test]
fn a_part_without_an_output_stays_in_the_text() {
    let folder = Folder::new("chat-text");
    let server = load(&folder, &[]);
    let chat = [(c"messages", MESSAGES), (c"tools", TOOLS)];
    let sent = ask(&server, REPLY, &[c"text_output", c"finish_reason"], &chat);
    assert_eq!(texts(&sent, "text_output"), [REPLY]);
    assert_eq!(texts(&sent, "finish_reason"), ["end_id"]);
    // A request that names no outputs has those of its options.
    let sent = ask(&server, REPLY, &[], &chat[..1]);
    assert_eq!(
        texts(&sent, "text_output"),
        [REPLY
            .strip_prefix("<think>so</think>")
            .expect("its beginning")]
    );
    assert_eq!(texts(&sent, "reasoning_content"), ["so"]);
    assert!(texts(&sent, "tool_calls").is_empty());
    let none = (c"return_reasoning_content", "false");
    let sent = ask(
        &server,
        REPLY,
        &[],
        &[chat[0], none, (c"return_tool_calls", "true")],
    );
    assert_eq!(texts(&sent, "text_output"), ["<think>so</think>Yes"]);
    server.unload();
}

#[test]
fn a_prompt_can_begin_the_reasoning() {
    let folder = Folder::new("chat-begun");
    let server = load(&folder, &[("reasoning_parser", "mistral")]);
    let sent = ask(
        &server,
        "so[/THINK]Yes",
        &[],
        &[
            (c"messages", MESSAGES),
            (c"chat_template_kwargs", r#"{"thinking": true}"#),
        ],
    );
    assert_eq!(texts(&sent, "reasoning_content"), ["so"]);
    assert_eq!(texts(&sent, "text_output"), ["Yes"]);
    server.unload();
}

#[test]
fn a_call_that_must_be_is_well_formed() {
    let folder = Folder::new("chat-required");
    let stories = checkout()
        .join("model_repository/stories/1")
        .display()
        .to_string();
    let server = load(
        &folder,
        &[("gpt_model_path", &stories), ("reasoning_parser", "none")],
    );
    let schema = json!({
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let tool =
        |name: &str| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    let tools = json!([tool("f"), tool("g")]).to_string();
    let named = json!({"type": "function", "function": {"name": "g"}}).to_string();
    let options = [
        (c"messages", MESSAGES),
        (c"tools", &tools[..]),
        (c"tool_choice", &named[..]),
        (c"temperature", "1"),
    ];
    let outputs = [c"text_output", c"tool_calls", c"finish_reason"];
    for seed in ["1", "2", "3"] {
        let sent = request(
            &server,
            &outputs,
            &[&options[..], &[(c"seed", seed)]].concat(),
        );
        let calls: Value =
            serde_json::from_str(&texts(&sent, "tool_calls").concat()).expect("JSON");
        assert_eq!(calls[0]["function"]["name"], "g");
        let arguments = calls[0]["function"]["arguments"].as_str().expect("a text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(
            arguments == json!({"a": 1}) || arguments == json!({"a": 2}),
            "{arguments}"
        );
        assert_eq!(texts(&sent, "text_output"), [""]);
        assert_eq!(texts(&sent, "finish_reason"), ["tool_calls"]);
    }
    server.unload();
}
