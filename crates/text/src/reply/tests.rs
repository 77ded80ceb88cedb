use std::sync::Arc;

use proptest::prelude::*;

use serde_json::json;

use super::*;
use crate::{ChatTemplates, Conversation, PromptEnding};
use inflight_config::{ReasoningFormat, ReplyParser, ToolCallFormat};

const TOOL_CALLS: [ToolCallFormat; 28] = [
    ToolCallFormat::Ernie,
    ToolCallFormat::LongCat,
    ToolCallFormat::InternLm,
    ToolCallFormat::Granite20b,
    ToolCallFormat::GigaChat,
    ToolCallFormat::MiniMaxM1,
    ToolCallFormat::XLam,
    ToolCallFormat::SeedOss,
    ToolCallFormat::Dsml,
    ToolCallFormat::Hunyuan,
    ToolCallFormat::Nemotron,
    ToolCallFormat::Command,
    ToolCallFormat::Apertus,
    ToolCallFormat::Gemma4,
    ToolCallFormat::FunctionGemma,
    ToolCallFormat::Lfm2,
    ToolCallFormat::Olmo3,
    ToolCallFormat::MiniMax,
    ToolCallFormat::Glm,
    ToolCallFormat::Kimi,
    ToolCallFormat::Pythonic,
    ToolCallFormat::Hermes,
    ToolCallFormat::QwenCoder,
    ToolCallFormat::Llama3,
    ToolCallFormat::Mistral,
    ToolCallFormat::DeepSeek,
    ToolCallFormat::Granite,
    ToolCallFormat::Harmony,
];

const REASONING: [ReasoningFormat; 9] = [
    ReasoningFormat::Command,
    ReasoningFormat::Apertus,
    ReasoningFormat::Gemma4,
    ReasoningFormat::Think,
    ReasoningFormat::DeepSeekR1,
    ReasoningFormat::Mistral,
    ReasoningFormat::SeedOss,
    ReasoningFormat::Granite,
    ReasoningFormat::Harmony,
];

fn calls(format: ToolCallFormat) -> ReplyFormat {
    ReplyFormat {
        tool_calls: Some(format),
        reasoning: None,
    }
}

fn thoughts(format: ReasoningFormat) -> ReplyFormat {
    ReplyFormat {
        reasoning: Some(format),
        tool_calls: None,
    }
}

fn read(reader: &ReplyReader, pieces: &[&str]) -> ReplyParts {
    let (mut reader, mut parts) = (reader.clone(), ReplyParts::default());
    for piece in pieces {
        reader.push(piece, &mut parts);
    }
    reader.finish(&mut parts);
    assert!(reader.stages.iter().all(|stage| stage.held.is_empty()));
    parts
}

/// The parts of a text, which are the same by whole text, character by character, and by each single cut.
fn parts_from(format: &ReplyFormat, start: ReplyStart, text: &str) -> ReplyParts {
    let reader = format.reader(start);
    let whole = read(&reader, &[text]);
    let chars: Vec<_> = text.split("").collect();
    assert_eq!(read(&reader, &chars), whole, "{text}");
    for (cut, _) in text.char_indices() {
        let (left, right) = text.split_at(cut);
        assert_eq!(read(&reader, &[left, right]), whole, "{left}|{right}");
    }
    let reader = reader.in_pieces();
    let joined = read(&reader, &[text]);
    check_joined(&joined, &whole);
    assert_eq!(read(&reader, &chars), joined, "{text}");
    whole
}

/// Checks the parts of a text that were given in pieces.
fn check_joined(joined: &ReplyParts, whole: &ReplyParts) {
    let given: Vec<_> = joined.calls.iter().filter(|call| call.is_whole).collect();
    let mut missing = whole.calls.iter().filter(|call| !given.contains(call));
    assert_eq!(missing.next(), None, "{joined:?}");
    assert_eq!(joined.reasoning, whole.reasoning);
    // What turned out to be no call is content, if it is given whole.
    if joined.calls.len() == whole.calls.len() {
        assert_eq!(joined, whole);
    } else {
        assert!(whole.content.len() > joined.content.len(), "{joined:?}");
    }
}

fn parts(format: &ReplyFormat, text: &str) -> ReplyParts {
    parts_from(format, ReplyStart::Beginning, text)
}

/// The content of a text, and its calls as `name(arguments)`.
fn content_and_calls(format: ToolCallFormat, text: &str) -> (String, Vec<String>) {
    let parts = parts(&calls(format), text);
    let shown = |call: &ToolCall| format!("{}({})", call.name, call.arguments);
    (parts.content, parts.calls.iter().map(shown).collect())
}

#[track_caller]
fn check_calls(format: ToolCallFormat, text: &str, content: &str, expected: &[&str]) {
    let (found, calls) = content_and_calls(format, text);
    assert_eq!(calls, expected, "{text}");
    assert_eq!(found, content, "{text}");
}

#[track_caller]
/// Checks a reply in a format that leaves the types of arguments to the tools, by whole text and by each single cut.
fn check_typed_calls(
    format: ToolCallFormat,
    tools: &serde_json::Value,
    text: &str,
    content: &str,
    expected: &[&str],
) {
    let types = Arc::new(ParameterTypes::of_tools(tools));
    let reader = calls(format).reader_with(ReplyStart::Beginning, &types);
    let whole = read(&reader, &[text]);
    for (cut, _) in text.char_indices() {
        let (left, right) = text.split_at(cut);
        assert_eq!(read(&reader, &[left, right]), whole, "{left}|{right}");
    }
    let calls = whole.calls.iter();
    let calls: Vec<_> = calls
        .map(|call| format!("{}({})", call.name, call.arguments))
        .collect();
    assert_eq!(calls, expected, "{text}");
    assert_eq!(whole.content, content, "{text}");
}

fn check_content(format: ToolCallFormat, text: &str) {
    check_calls(format, text, text, &[]);
}

#[test]
fn hermes_has_a_block_for_each_call() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Hermes, text, content, calls)
    };
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"</tool_call>\"]}}\n</tool_call>";
    let read = r#"f({"a": [1, "</tool_call>"]})"#;
    check(call, "", &[read]);
    check(
        &format!("I will.\n{call}\n{call}\n"),
        "I will.\n",
        &[read, read],
    );
    check(&format!("{call}\n so"), "\n so", &[read]);
    check(&format!("{call}\n<tool"), "\n<tool", &[read]);
    // The end of the sequence may come before the last mark.
    check(r#"<tool_call>{"name": "f"}"#, "", &["f({})"]);
    check(r#"<tool_call>{"name": "f"}</tool"#, "", &["f({})"]);
    let broken = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\n</tool_call>\n";
    check(&format!("{broken}{call}"), broken, &[read]);
    for text in [
        "no <tool_call",
        "<tool_call>",
        "<tool_call>\n{\"name\": \"f\", ",
        "<tool_call>\nf(1)\n</tool_call>",
        "<tool_call>{\"name\": \"f\"} or</tool_call>",
        "<tool_call>{\"name\": 1}</tool_call>",
        "</tool_call>",
    ] {
        check_content(ToolCallFormat::Hermes, text);
    }
}

#[test]
fn qwen_coder_has_arguments_between_marks() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "number": {"type": "integer"}, "list": {"type": "array"}, "any": {}, "flag": {"type": "boolean"},
        "choice": {"type": ["string", "null"]},
    }}}}]);
    let check = |text: &str, content: &str, expected: &[&str]| {
        check_typed_calls(ToolCallFormat::QwenCoder, &tools, text, content, expected)
    };
    let block = |arguments: &[(&str, &str)]| {
        let arguments = arguments.iter();
        let arguments =
            arguments.map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"));
        let arguments: String = arguments.collect();
        format!("<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>")
    };
    for (name, value, json) in [
        ("text", "12", r#""12""#),
        ("text", "a\n\"b\" </function>", r#""a\n\"b\" </function>""#),
        ("text", "", r#""""#),
        ("text", " x ", r#"" x ""#),
        ("number", "12", "12"),
        ("number", "twelve", r#""twelve""#),
        ("list", "[1, {\"a\": 2}]", r#"[1, {"a": 2}]"#),
        ("any", "1.0", "1.0"),
        ("any", "so", r#""so""#),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("flag", "False", "false"),
        ("any", "None", "null"),
        ("choice", "null", r#""null""#),
        ("unknown", "1", r#""1""#),
    ] {
        let call = format!("f({{\"{name}\": {json}}})");
        check(&block(&[(name, value)]), "", &[&call]);
    }
    let two = block(&[("number", "1"), ("text", "x")]);
    let read_two = r#"f({"number": 1, "text": "x"})"#;
    check(
        &format!("So:\n{two}\n{two}\n"),
        "So:\n",
        &[read_two, read_two],
    );
    check(&block(&[]), "", &["f({})"]);
    // The last of several values, and the end of the sequence before the last mark.
    check(
        &block(&[("number", "1"), ("number", "2")]),
        "",
        &[r#"f({"number": 2})"#],
    );
    check("<tool_call><function=g></function>", "", &["g({})"]);
    check("<tool_call><function=g></function></tool", "", &["g({})"]);
    check(
        "<tool_call><function=g><parameter=a>1</parameter></function></tool_call>",
        "",
        &[r#"g({"a": "1"})"#],
    );
    for text in [
        "<tool_call>",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n",
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>",
        "<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
        "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f\n</function>\n</tool_call>",
        "<tool_call>\n<function=f</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\nx</tool_call>",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn llama_replies_with_nothing_but_calls() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Llama3, text, content, calls)
    };
    let call = r#"{"name": "f", "parameters": {"a": "{"}}"#;
    let read = r#"f({"a": "{"})"#;
    check(call, "", &[read]);
    check(&format!("<|python_tag|>{call}"), "", &[read]);
    check(
        &format!("\n<|python_tag|> {call}; {call}\n"),
        "",
        &[read, read],
    );
    check(&format!("{call}; <|python_tag|>{call}"), "", &[read, read]);
    check(&format!("{call}; then"), "; then", &[read]);
    check(&format!("{call}; <|pyt"), "; <|pyt", &[read]);
    for text in [
        "Hello {",
        "",
        "  ",
        r#"{"name": "Ann", "age": 5}"#,
        r#"{"answer": 42} and"#,
        "<|python_tag|>search.call(query=\"x\")",
        "<|pyt",
        "{\"name\": \"f\", \"parameters\": {",
    ] {
        check_content(ToolCallFormat::Llama3, text);
    }
}

#[test]
fn mistral_has_a_list_or_a_mark_for_each_call() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Mistral, text, content, calls)
    };
    check(
        r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]"#,
        "",
        &[r#"f({"a": 1})"#, "g({})"],
    );
    check(
        r#"So[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}"#,
        "So",
        &[r#"f({"a": 1})"#, "g({})"],
    );
    check(
        r#"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}"#,
        "",
        &[r#"f({"a": 1})"#],
    );
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS] [{\"name\": \"f\"",
        "[TOOL_CALLS]a name\n{}",
        "[TOOL_CALLS]a name{}",
        "[TOOL",
        &format!("[TOOL_CALLS]{}{{}}", "x".repeat(600)),
    ] {
        check_content(ToolCallFormat::Mistral, text);
    }
}

#[test]
fn deepseek_has_marks_within_marks() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::DeepSeek, text, content, calls)
    };
    let v3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"```json\"}\n```<｜tool▁call▁end｜>";
    let v31 = "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"b\": \"```json\"}<｜tool▁call▁end｜>";
    let all = format!("Yes<｜tool▁calls▁begin｜>{v3}\n{v31}<｜tool▁calls▁end｜>");
    check(
        &all,
        "Yes",
        &[r#"f({"a": "```json"})"#, r#"g({"b": "```json"})"#],
    );
    check(v31, "", &[r#"g({"b": "```json"})"#]);
    for text in [
        "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "<｜tool▁",
    ] {
        check_content(ToolCallFormat::DeepSeek, text);
    }
    let twice = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>";
    check(&format!("{twice}{v31}"), twice, &[r#"g({"b": "```json"})"#]);
}

#[test]
fn granite_has_a_list_behind_a_mark() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Granite, text, content, calls)
    };
    check(
        r#"<|tool_call|>[{"name": "f", "arguments": {}}]"#,
        "",
        &["f({})"],
    );
    check(
        r#"a<|tool_call|> {"name": "f"}<|/tool_call|> "#,
        "a",
        &["f({})"],
    );
    check(r#"<|tool_call|>[{"name": "f"}] b"#, " b", &["f({})"]);
    check_content(ToolCallFormat::Granite, "<|tool_call|>[1]");
}

#[test]
fn glm_has_arguments_between_marks() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "number": {"type": "integer"}, "list": {"type": "array"},
    }}}}]);
    let check = |text: &str, content: &str, expected: &[&str]| {
        check_typed_calls(ToolCallFormat::Glm, &tools, text, content, expected)
    };
    let call = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12\n</arg_value>\n<arg_key>number</arg_key>\n\
                <arg_value>12</arg_value>\n</tool_call>";
    let read_call = r#"f({"text": "12\n", "number": 12})"#;
    check(call, "", &[read_call]);
    check(
        &format!("So\n{call}\n{call}\n"),
        "So\n",
        &[read_call, read_call],
    );
    // As GLM 4.7 writes it.
    let short =
        "<tool_call>f<arg_key>list</arg_key><arg_value>[1, \"</arg_key>\"]</arg_value></tool_call>";
    check(short, "", &[r#"f({"list": [1, "</arg_key>"]})"#]);
    check("<tool_call>g</tool_call> so", " so", &["g({})"]);
    for text in [
        "<tool_call>",
        "<tool_call>f",
        "<tool_call>f\n",
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>x",
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n",
        "<tool_call>f\n<arg_key>text</arg_key>\nx</tool_call>",
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        "<tool_call>a b</tool_call>",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn kimi_names_each_call_with_an_id_that_stays() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Kimi, text, content, calls)
    };
    let call = |id: &str| {
        format!(
            "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{\"a\": \"<|\"}}<|tool_call_end|>"
        )
    };
    let [first, second] = ["functions.get_weather:0", "functions.f:11"].map(call);
    let text = format!("So.<|tool_calls_section_begin|>{first}{second}<|tool_calls_section_end|>");
    check(
        &text,
        "So.",
        &[r#"get_weather({"a": "<|"})"#, r#"f({"a": "<|"})"#],
    );
    let ids = parts(&calls(ToolCallFormat::Kimi), &text).calls;
    let ids: Vec<_> = ids.iter().map(|call| call.id.as_deref()).collect();
    assert_eq!(
        ids,
        [Some("functions.get_weather:0"), Some("functions.f:11")]
    );
    check(&call("g:0"), "", &[r#"g({"a": "<|"})"#]);
    for text in [
        &call("functions.f")[..],
        &call("functions.f:x"),
        &call(":0"),
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[]<|tool_call_end|>",
        "<|tool_calls",
    ] {
        check_content(ToolCallFormat::Kimi, text);
    }
}

#[test]
fn pythonic_replies_are_lists_of_calls() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Pythonic, text, content, calls)
    };
    let list = r#"[get_weather(city='San ]"Francisco', days=[1, 2.0], deep={"a": None}), f(flag=True), time.now()]"#;
    let read = [
        r#"get_weather({"city": "San ]\"Francisco", "days": [1, 2.0], "deep": {"a": null}})"#,
        r#"f({"flag": true})"#,
        "time.now({})",
    ];
    check(list, "", &read);
    check(&format!("\n{list} \n"), "", &read);
    check(&format!("<|python_start|>{list}<|python_end|>"), "", &read);
    check(&format!("{list} so"), " so", &read);
    check(&format!("{list} <|python_e"), " <|python_e", &read);
    for text in [
        "",
        "[",
        "[]",
        "[1] says",
        "Hello [f()]",
        "[f(1)]",
        "[f(a=1]",
        "[f(a=b)]",
        "[f(a=1)",
        "[f]",
        "[f, g(a=1)]",
        "[f(a=1) g()]",
        "<|python_start|>print(1)<|python_end|>",
        "<|python_",
    ] {
        check_content(ToolCallFormat::Pythonic, text);
    }
}

#[test]
fn lfm_has_a_list_in_python_between_marks() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Lfm2, text, content, calls)
    };
    let (open, close) = ("<|tool_call_start|>", "<|tool_call_end|>");
    let list = "[weather(city='Oslo', days=[1, 2]), now()]";
    let read = [r#"weather({"city": "Oslo", "days": [1, 2]})"#, "now({})"];
    check(&format!("{open}{list}{close}"), "", &read);
    check(
        &format!("{open}\n{list}\n{close}\nLet me see."),
        "\nLet me see.",
        &read,
    );
    check(&format!("So: {open}{list}"), "So: ", &read);
    let twice = format!("{open}[f()]{close}\n{open}[g(a=None)]{close}");
    check(&twice, "", &["f({})", r#"g({"a": null})"#]);
    for text in [
        open.to_owned(),
        format!("{open}[]{close}"),
        format!("{open}f(){close}"),
        format!("{open}[f(1)]{close} so"),
        format!("{open}[f(a=1)"),
        format!("{open}{{\"name\": \"f\"}}{close}"),
        list.to_owned(),
    ] {
        check_content(ToolCallFormat::Lfm2, &text);
    }
}

#[test]
fn olmo_has_lines_in_python_between_marks() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Olmo3, text, content, calls)
    };
    let (open, close) = ("<function_calls>", "</function_calls>");
    let lines = "weather(city=\"Oslo\\n\", wet=true)\nnow()";
    let read = [r#"weather({"city": "Oslo\n", "wet": true})"#, "now({})"];
    check(&format!("{open}\n{lines}\n{close}"), "", &read);
    check(&format!("{open}{lines}{close} so"), " so", &read);
    check(&format!("So. {open}\n{lines}\n"), "So. ", &read);
    for text in [
        open.to_owned(),
        format!("{open}{close}"),
        format!("{open}f() g(){close}"),
        format!("{open}[f()]{close}"),
        format!("{open}f(1)\n{close}"),
        format!("{open}f("),
    ] {
        check_content(ToolCallFormat::Olmo3, &text);
    }
}

#[test]
fn minimax_has_calls_between_marks_and_their_arguments_too() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "list": {"type": "array"},
    }}}}]);
    let check = |text: &str, content: &str, expected: &[&str]| {
        check_typed_calls(ToolCallFormat::MiniMax, &tools, text, content, expected)
    };
    let (open, close) = ("<minimax:tool_call>", "</minimax:tool_call>");
    let call = "<invoke name=\"f\">\n<parameter name=\"text\">12\n<a></parameter>\n\
                <parameter name=\"list\">[1, \"b\"]</parameter>\n</invoke>";
    let read_call = r#"f({"text": "12\n<a>", "list": [1, "b"]})"#;
    check(&format!("{open}\n{call}\n{close}"), "", &[read_call]);
    let both = format!("So\n{open}{call}<invoke name=\"g\"></invoke>{close}\nthen");
    check(&both, "So\n\nthen", &[read_call, "g({})"]);
    check(&format!("{open}\n{call}\n"), "", &[read_call]);
    for text in [
        open.to_owned(),
        format!("{open}{close}"),
        format!("{open}\n{{\"name\": \"f\"}}\n{close}"),
        format!("{open}<invoke name=\"f\">x</invoke>{close}"),
        format!("{open}<invoke name=\"f\"><parameter name=\"text\">x</invoke>{close}"),
        format!("{open}<invoke name=\"a b\"></invoke>{close}"),
        call.to_owned(),
    ] {
        check(&text, &text, &[]);
    }
}

#[test]
fn harmony_has_messages_of_channels() {
    let both = ReplyFormat {
        reasoning: Some(ReasoningFormat::Harmony),
        tool_calls: Some(ToolCallFormat::Harmony),
    };
    let text = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis<|message|>Call f.<|end|>\
                <|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
                <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>\
                <|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}";
    let found = parts(&both, text);
    assert_eq!(found.reasoning, "Look.\nCall f.");
    assert_eq!(found.content, "I look.");
    let read: Vec<_> = found
        .calls
        .iter()
        .map(|it| (&it.name[..], &it.arguments[..]))
        .collect();
    assert_eq!(read, [("f", "{\"a\": 1}"), ("g", "{}")]);
    let unended = "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>analysis<|message|>So<|channel|>final<|message|>Yes.";
    let found = parts(&both, unended);
    assert_eq!(
        (&found.reasoning[..], &found.content[..]),
        ("Hm\nSo", "Yes.")
    );
    let refused = "<|channel|>commentary to=functions.f<|message|>not JSON<|call|>";
    let found = parts(
        &both,
        &format!("{refused}<|start|>assistant<|channel|>final<|message|>Yes."),
    );
    assert_eq!(found.content, format!("{refused}Yes."));
    let answer = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>";
    let found = parts(&both, answer);
    assert_eq!((&found.reasoning[..], &found.content[..]), ("Hm", "Yes."));
    // The prompt may have the beginning of a message.
    let found = parts_from(&both, ReplyStart::Content, "es.<|return|>");
    assert_eq!(found.content, "es.");
    let found = parts_from(
        &both,
        ReplyStart::Reasoning,
        "m<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    );
    assert_eq!((&found.reasoning[..], &found.content[..]), ("m", "Yes."));
    for text in [
        "Just text",
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.f<|message|>not JSON",
        "<|start|>assistant<|cha",
        "<|sta",
        &format!("<|channel|>{}<|message|>x", "y".repeat(2000)),
    ] {
        let found = parts(&both, text);
        assert_eq!(found.content, text);
        assert!(found.calls.is_empty() && found.reasoning.is_empty());
    }
}

#[test]
fn reasoning_is_what_is_between_its_marks() {
    let check = |format, start, text, reasoning: &str, content: &str| {
        let found = parts_from(&thoughts(format), start, text);
        assert_eq!(
            (&found.reasoning[..], &found.content[..]),
            (reasoning, content),
            "{text}"
        );
    };
    use ReasoningFormat::{DeepSeekR1, Granite, Mistral, SeedOss, Think};
    use ReplyStart::{Beginning, Content, Reasoning};
    check(
        Think,
        Beginning,
        "<think>\nso\n\nit is\n</think>\n\nYes\n",
        "so\n\nit is",
        "Yes\n",
    );
    check(Think, Beginning, "\n<think>\n\n</think>\n\nYes", "", "Yes");
    check(Think, Beginning, "<think>so", "so", "");
    check(Think, Beginning, "<think>so</thin", "so</thin", "");
    check(
        Think,
        Beginning,
        " No <think>x</think>",
        "",
        " No <think>x</think>",
    );
    check(Think, Beginning, "<thi", "", "<thi");
    check(Think, Reasoning, "so\n</think>\n\nYes", "so", "Yes");
    check(Think, Reasoning, "<think>so\n</think>Yes", "so", "Yes");
    check(Think, Content, "Yes</think>", "", "Yes</think>");
    check(
        DeepSeekR1,
        Beginning,
        "so</think>Yes</think>",
        "so",
        "Yes</think>",
    );
    check(DeepSeekR1, Beginning, "<think>so", "so", "");
    check(Mistral, Beginning, "[THINK]so[/THINK]Yes", "so", "Yes");
    check(
        SeedOss,
        Beginning,
        "<seed:think>so</seed:think>Yes",
        "so",
        "Yes",
    );
    check(
        Granite,
        Beginning,
        "Here is my thought process:\nso\nHere is my response:\nYes",
        "so",
        "Yes",
    );
}

#[test]
fn calls_follow_reasoning_and_are_none_within_it() {
    let format = ReplyFormat {
        reasoning: Some(ReasoningFormat::Think),
        tool_calls: Some(ToolCallFormat::Hermes),
    };
    let call = r#"<tool_call>{"name": "f"}</tool_call>"#;
    let found = parts(
        &format,
        &format!("<think>\nI could {call}\n</think>\n\n{call}"),
    );
    assert_eq!(found.reasoning, format!("I could {call}"));
    assert_eq!((&found.content[..], found.calls.len()), ("", 1));
}

#[test]
fn a_reply_begins_where_its_prompt_ends() {
    let think = thoughts(ReasoningFormat::Think);
    for (prompt, expected) in [
        ("<think>x</think>\nuser\nassistant\n", ReplyStart::Beginning),
        ("assistant\n<think>\n", ReplyStart::Reasoning),
        ("assistant\n<think>\n\n</think>\n\n", ReplyStart::Content),
    ] {
        assert_eq!(think.start_after(prompt), expected, "{prompt}");
    }
    for (content, expected) in [
        ("Yes", ReplyStart::Content),
        ("<think>\nso", ReplyStart::Reasoning),
        ("<think>\nso</think>Yes", ReplyStart::Content),
    ] {
        assert_eq!(think.start_within(content), expected, "{content}");
    }
}

#[test]
fn a_template_says_which_format_it_is_for() {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../../tests/fixtures/chat.json"))
            .expect("well formed");
    let format = |name: &str| {
        let template = fixture["templates"][name].as_str().expect("a template");
        ReplyFormat::new(
            ReplyParser::Auto,
            ReplyParser::Auto,
            std::iter::once(template),
        )
    };
    let both = |reasoning, tool_calls| ReplyFormat {
        reasoning: Some(reasoning),
        tool_calls: Some(tool_calls),
    };
    assert_eq!(
        format("hermes"),
        both(ReasoningFormat::Think, ToolCallFormat::Hermes)
    );
    assert_eq!(
        format("channels"),
        both(ReasoningFormat::Harmony, ToolCallFormat::Harmony)
    );
    assert_eq!(format("chatml"), ReplyFormat::default());
    let coder = "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n</tool_call>";
    let found = ReplyFormat::new(ReplyParser::Auto, ReplyParser::Auto, [coder].into_iter());
    assert_eq!(found, calls(ToolCallFormat::QwenCoder));
    for (template, expected) in [
        (
            "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n</tool_call>",
            ToolCallFormat::Glm,
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            ToolCallFormat::Kimi,
        ),
        (
            "<minimax:tool_call>\n<invoke name=\"",
            ToolCallFormat::MiniMax,
        ),
        (
            "<tool_call></tool_call><response>{{ content }}</response>",
            ToolCallFormat::Ernie,
        ),
        ("<seed:tool_call>\n<function=", ToolCallFormat::SeedOss),
        ("<longcat_tool_call>", ToolCallFormat::LongCat),
        ("<|action_start|><|plugin|>", ToolCallFormat::InternLm),
        ("function call<|role_sep|>", ToolCallFormat::GigaChat),
        ("List of tools: <|tool_list_start|>[", ToolCallFormat::Lfm2),
        ("<｜DSML｜function_calls>", ToolCallFormat::Dsml),
        ("<tool_calls>[]</tool_calls>", ToolCallFormat::Hunyuan),
        ("<TOOLCALL>[]</TOOLCALL>", ToolCallFormat::Nemotron),
        ("<|START_ACTION|>[]<|END_ACTION|>", ToolCallFormat::Command),
        ("<|tools_prefix|>", ToolCallFormat::Apertus),
        (
            "<|tool_call>call:{{ name }}{ }<tool_call|>",
            ToolCallFormat::Gemma4,
        ),
        ("<start_function_call>call:", ToolCallFormat::FunctionGemma),
        (
            "within <function_calls></function_calls>",
            ToolCallFormat::Olmo3,
        ),
        (
            "<|header_start|>[func_name1(params_name1=params_value1), func_name2(params)]",
            ToolCallFormat::Pythonic,
        ),
        (
            "<|header_start|>{\"name\": function name, \"parameters\": {}}",
            ToolCallFormat::Llama3,
        ),
    ] {
        let found = ReplyFormat::new(ReplyParser::Auto, ReplyParser::Auto, [template].into_iter());
        assert_eq!(found, calls(expected), "{template}");
    }
    let named = ReplyFormat::new(
        ReplyParser::Named(ReasoningFormat::DeepSeekR1),
        ReplyParser::None,
        ["[TOOL_CALLS]"].into_iter(),
    );
    assert_eq!(named, thoughts(ReasoningFormat::DeepSeekR1));
}

/// The templates of the fixture, or of the file that `CHAT_FIXTURE` names, by name (make_chat_fixtures.py).
fn templates() -> Vec<(String, String)> {
    let committed = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/chat.json"
    );
    let path = std::env::var_os("CHAT_FIXTURE").unwrap_or_else(|| committed.into());
    let fixture = std::fs::read_to_string(path).expect("a fixture");
    let fixture: serde_json::Value = serde_json::from_str(&fixture).expect("well formed");
    let templates = fixture["templates"].as_object().expect("an object");
    let text = |source: &serde_json::Value| source.as_str().expect("a template").to_owned();
    let named = templates
        .iter()
        .map(|(name, source)| (name.clone(), text(source)));
    named.collect()
}

#[test]
fn calls_that_a_template_writes_are_read_back() {
    let arguments = json!({"city": "東京 <1>", "days": [1, 2.5, null], "text": "\"}]\n"});
    let call = |name: &str| json!({"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
    let user = json!({"role": "user", "content": "Which weather?"});
    let token = |name: &str, token: &str| (name.to_owned(), token.to_owned());
    let special_tokens = vec![token("bos_token", "<s>"), token("eos_token", "</s>")];
    let mut read_back = Vec::new();
    for (name, source) in templates() {
        let templates =
            ChatTemplates::with_source(&source, special_tokens.clone()).expect("compiles");
        let format = ReplyFormat::new(ReplyParser::Auto, ReplyParser::Auto, templates.sources());
        for calls in [vec!["weather"], vec!["weather", "time"]] {
            let tool_calls: Vec<_> = calls.iter().map(|name| call(name)).collect();
            let reply = json!({"role": "assistant", "content": null, "tool_calls": tool_calls});
            let render = |messages: Vec<serde_json::Value>, ending| {
                let tools = Some(
                    json!([{"type": "function", "function": {"name": "weather", "description": "It", "parameters": {"type": "object", "properties": {}}}}]),
                );
                templates.render(&Conversation {
                    messages,
                    tools,
                    ending,
                    ..Conversation::default()
                })
            };
            // Some templates know no tools, or one call only.
            let prompt = render(vec![user.clone()], PromptEnding::NewMessage);
            let whole = render(vec![user.clone(), reply], PromptEnding::LastMessage);
            let (Ok(prompt), Ok(whole), Some(_)) = (&prompt, &whole, format.tool_calls) else {
                continue;
            };
            // Some write no reasoning into earlier messages, and begin it in new ones.
            let before = prompt.trim_end().trim_end_matches("<think>");
            let (written, start) = match whole.strip_prefix(prompt.as_str()) {
                Some(written) => (written, format.start_after(prompt)),
                None => (
                    whole.strip_prefix(before).expect("the prompt"),
                    ReplyStart::Content,
                ),
            };
            let found = parts_from(&format, start, written);
            let names: Vec<_> = found.calls.iter().map(|call| &call.name[..]).collect();
            if format.tool_calls == Some(ToolCallFormat::Harmony) {
                assert_eq!(names, calls[..1], "{name}: {written}");
            } else {
                assert_eq!(names, calls, "{name}: {written}");
            }
            for call in &found.calls {
                let read: serde_json::Value = serde_json::from_str(&call.arguments).expect("JSON");
                assert_eq!(read, arguments, "{name}: {written}");
            }
            read_back.push(name.clone());
        }
    }
    println!("{}", read_back.join(" "));
    assert!(read_back.len() >= 3);
}

/// Every format alone, and some of reasoning before calls.
fn all_formats() -> Vec<ReplyFormat> {
    let alone = TOOL_CALLS
        .into_iter()
        .map(calls)
        .chain(REASONING.into_iter().map(thoughts));
    let pairs = TOOL_CALLS
        .into_iter()
        .zip(REASONING)
        .map(|(tool_calls, reasoning)| ReplyFormat {
            reasoning: Some(reasoning),
            tool_calls: Some(tool_calls),
        });
    alone.chain(pairs).collect()
}

/// Texts of marks, pieces of marks, JSON and others.
fn reply(format: &ReplyFormat) -> impl Strategy<Value = String> + use<> {
    let marks = format.marks();
    let marks = if marks.is_empty() { vec!["x"] } else { marks };
    let json = [
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
        "{\"name\": \"f\", \"parameters\": {}}",
        "[{\"name\": \"f\"}]",
        "[{\"f\": {\"a\": 1}}]",
        "{\"name\": \"f\", ",
        "{",
        "}",
        "\"",
        "\\",
    ];
    let other = [
        "\n",
        " ",
        "\n\n",
        ";",
        "é",
        "<",
        "f",
        "analysis",
        "commentary to=functions.f ",
        "final",
        "```json\n",
        "```",
        "[f(a=1)]",
        "[f(",
        "f(a=1)",
        "f\">",
        "a\" string=\"true\">",
        "call:f{a:1,b:",
        "call:f{}",
        "functions.f:0",
    ];
    let piece = prop_oneof![
        4 => prop::sample::select(marks.clone()).prop_map(str::to_owned),
        1 => (prop::sample::select(marks), 0usize..8).prop_map(|(mark, len)| mark.chars().take(len).collect()),
        3 => prop::sample::select(json.to_vec()).prop_map(str::to_owned),
        2 => prop::sample::select(other.to_vec()).prop_map(str::to_owned),
        1 => "[a-z<|> ]{0,4}",
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

fn start() -> impl Strategy<Value = ReplyStart> {
    prop::sample::select(vec![
        ReplyStart::Beginning,
        ReplyStart::Reasoning,
        ReplyStart::Content,
    ])
}

/// A format, a text in it, where it begins, and places to cut it at.
fn case() -> impl Strategy<Value = (ReplyFormat, String, ReplyStart, Vec<prop::sample::Index>)> {
    let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
    prop::sample::select(all_formats())
        .prop_flat_map(|format| (Just(format), reply(&format)))
        .prop_flat_map(move |(format, text)| (Just(format), Just(text), start(), cuts.clone()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn parts_do_not_depend_on_where_the_text_is_cut((format, text, start, cuts) in case()) {
        let reader = format.reader(start);
        let whole = read(&reader, &[&text]);
        let places: Vec<_> = text.char_indices().map(|(place, _)| place).chain([text.len()]).collect();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| places[cut.index(places.len())]).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[from..cut]);
            from = cut;
        }
        prop_assert_eq!(read(&reader, &pieces), whole.clone());
        let in_pieces = reader.clone().in_pieces();
        let joined = read(&in_pieces, &[&text]);
        prop_assert_eq!(read(&in_pieces, &pieces), joined.clone());
        check_joined(&joined, &whole);
        // Nothing is said twice.
        let num_said = whole.content.len() + whole.reasoning.len();
        prop_assert!(num_said <= text.len());
        // Content and reasoning are in the text, and so is what is called.
        for call in &whole.calls {
            let is_rewritten = format.tool_calls.is_some_and(rewrites_arguments) || call.arguments.len() == 2;
            prop_assert!(text.contains(&call.name) && (text.contains(&call.arguments) || is_rewritten));
        }
        let is_plain = format.reasoning.is_none() && whole.calls.is_empty();
        let drops_marks = matches!(
            format.tool_calls,
            Some(
                ToolCallFormat::DeepSeek
                    | ToolCallFormat::Kimi
                    | ToolCallFormat::Harmony
                    | ToolCallFormat::Ernie
            )
        );
        if is_plain && !drops_marks {
            prop_assert_eq!(whole.content, text);
        }
    }
}

/// Whether a format has its arguments in another form than JSON.
fn rewrites_arguments(format: ToolCallFormat) -> bool {
    matches!(
        format,
        ToolCallFormat::QwenCoder
            | ToolCallFormat::SeedOss
            | ToolCallFormat::Glm
            | ToolCallFormat::MiniMax
            | ToolCallFormat::Dsml
            | ToolCallFormat::Gemma4
            | ToolCallFormat::FunctionGemma
            | ToolCallFormat::Pythonic
            | ToolCallFormat::Lfm2
            | ToolCallFormat::Olmo3
    )
}

/// Texts with a call, or two, in a format that has its arguments as JSON and gives them in pieces.
fn call_in(format: ToolCallFormat, name: &str, arguments: &str) -> Vec<String> {
    let named = |key: &str| format!("{{\"name\": \"{name}\", \"{key}\": {arguments}}}");
    let object = named("arguments");
    match format {
        ToolCallFormat::Hermes => vec![format!("<tool_call>\n{object}\n</tool_call>")],
        ToolCallFormat::Ernie => vec![format!(
            "<response>\nYes\n</response>\n<tool_call>\n{object}\n</tool_call>"
        )],
        ToolCallFormat::LongCat => vec![format!(
            "<longcat_tool_call>\n{object}\n</longcat_tool_call>"
        )],
        ToolCallFormat::InternLm => vec![format!(
            "<|action_start|><|plugin|>\n{}<|action_end|>",
            named("parameters")
        )],
        ToolCallFormat::Granite20b => {
            vec![format!("<function_call> {object}<function_call> {object}")]
        }
        ToolCallFormat::GigaChat => vec![
            format!("function call<|role_sep|>\n{object}"),
            format!("<|function_call|>{object}"),
        ],
        ToolCallFormat::XLam => vec![
            format!("[{object}, {object}]"),
            format!("```json\n[{object}]\n```"),
            format!("[TOOL_CALLS][{object}]"),
            format!("<tool_call>[{object}]</tool_call>"),
        ],
        ToolCallFormat::Granite => vec![
            format!("<|tool_call|>[{object}]"),
            format!("<|tool_call|>[{object}, {object}]<|/tool_call|>"),
        ],
        ToolCallFormat::Hunyuan => vec![format!("<tool_calls>[{object}, {object}]</tool_calls>")],
        ToolCallFormat::Nemotron => vec![format!("<TOOLCALL>[{object}]</TOOLCALL>")],
        ToolCallFormat::Command => vec![format!(
            "<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"{name}\", \"parameters\": {arguments}}}\n]\
             <|END_ACTION|>"
        )],
        ToolCallFormat::Llama3 => vec![named("parameters"), format!("{object}; {object}")],
        ToolCallFormat::Mistral => vec![
            format!("[TOOL_CALLS] [{object}, {object}]"),
            format!("[TOOL_CALLS]{name}[ARGS]{arguments}"),
            format!("[TOOL_CALLS]{name}{arguments}[TOOL_CALLS]{name}{arguments}"),
        ],
        ToolCallFormat::DeepSeek => vec![
            format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            ),
            format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"),
        ],
        ToolCallFormat::Kimi => vec![format!(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        )],
        ToolCallFormat::Harmony => vec![format!(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        )],
        ToolCallFormat::QwenCoder
        | ToolCallFormat::SeedOss
        | ToolCallFormat::MiniMaxM1
        | ToolCallFormat::Glm
        | ToolCallFormat::MiniMax
        | ToolCallFormat::Dsml
        | ToolCallFormat::Apertus
        | ToolCallFormat::Gemma4
        | ToolCallFormat::FunctionGemma
        | ToolCallFormat::Pythonic
        | ToolCallFormat::Lfm2
        | ToolCallFormat::Olmo3 => Vec::new(),
    }
}

#[test]
fn lists_stand_between_the_marks_of_their_models() {
    let object = |name: &str| format!(r#"{{"name": "{name}", "arguments": {{"a": [1, "x"]}}}}"#);
    let both = [r#"f({"a": [1, "x"]})"#, r#"g({"a": [1, "x"]})"#];
    let list = format!("[{},\n {}]", object("f"), object("g"));
    let named = r#"[{"f": {"a": [1, "x"]}}, {"g": {"a": [1, "x"]}}]"#;
    let by_cohere = list.replace("\"name\"", "\"tool_name\"");
    let by_cohere = by_cohere.replace("\"arguments\"", "\"parameters\"");
    for (format, open, list, close) in [
        (
            ToolCallFormat::Hunyuan,
            "<tool_calls>",
            &list[..],
            "</tool_calls>",
        ),
        (ToolCallFormat::Nemotron, "<TOOLCALL>", &list, "</TOOLCALL>"),
        (
            ToolCallFormat::Command,
            "<|START_ACTION|>",
            &by_cohere,
            "<|END_ACTION|>",
        ),
        (
            ToolCallFormat::Apertus,
            "<|tools_prefix|>",
            named,
            "<|tools_suffix|>",
        ),
    ] {
        check_calls(format, &format!("Yes{open}{list}{close}"), "Yes", &both);
        check_calls(format, &format!("{open}\n{list}\n{close}\n"), "", &both);
        check_calls(format, &format!("{open}{list}"), "", &both);
        check_content(format, &format!("{open}[1]{close}"));
        check_content(format, &format!("{open}{{\"a\": 1}}{close}"));
        check_content(format, &format!("{open}none{close}"));
    }
}

#[test]
fn calls_in_json_stand_behind_the_mark_of_their_model() {
    let object = r#"{"name": "f", "arguments": {"a": [1, "</tool_call>"]}}"#;
    let read = r#"f({"a": [1, "</tool_call>"]})"#;
    for (format, open, close) in [
        (
            ToolCallFormat::LongCat,
            "<longcat_tool_call>",
            "</longcat_tool_call>",
        ),
        (
            ToolCallFormat::InternLm,
            "<|action_start|><|plugin|>",
            "<|action_end|>",
        ),
        (ToolCallFormat::Granite20b, "<function_call>", ""),
        (ToolCallFormat::GigaChat, "function call<|role_sep|>", ""),
        (ToolCallFormat::GigaChat, "<|function_call|>", ""),
    ] {
        check_calls(
            format,
            &format!("Yes{open}\n{object}{close}"),
            "Yes",
            &[read],
        );
        let two = format!("{open}{object}{close}\n{open} {object}{close}\n");
        check_calls(format, &two, "", &[read, read]);
        check_calls(
            format,
            &format!("{open}{object}{close}\n so"),
            "\n so",
            &[read],
        );
        check_content(format, &format!("{open}[1]{close}"));
        check_content(format, &format!("{open}none{close}"));
        check_content(format, &format!("{open}{{\"name\": "));
    }
}

#[test]
fn ernie_says_what_it_says_between_marks() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::Ernie, text, content, calls)
    };
    check("<response>\n\nHi\n there\n</response>", "Hi\n there", &[]);
    check("<response>\nHi\n", "Hi\n", &[]);
    check(&format!("{call}\n\n{call}\n"), "", &["f({})", "f({})"]);
    check(
        &format!("<response>\nHi\n</response>{call}"),
        "Hi",
        &["f({})"],
    );
    check("Hi <respond>", "Hi <respond>", &[]);
    let format = ReplyFormat {
        reasoning: Some(ReasoningFormat::Think),
        tool_calls: Some(ToolCallFormat::Ernie),
    };
    let parts = parts(
        &format,
        "<think>\nHm.\n</think>\n\n<response>\nHi\n</response>\n",
    );
    assert_eq!((&parts.reasoning[..], &parts.content[..]), ("Hm.", "Hi\n"));
}

#[test]
fn the_first_minimax_has_a_line_for_each_call() {
    let object = |name: &str| format!(r#"{{"name": "{name}", "arguments": {{"a": 1}}}}"#);
    let text = format!(
        "So\n<tool_calls>\n{}\n{}\n</tool_calls>",
        object("f"),
        object("g")
    );
    let read = [r#"f({"a": 1})"#, r#"g({"a": 1})"#];
    check_calls(ToolCallFormat::MiniMaxM1, &text, "So\n", &read);
    let begun = format!("<tool_calls>\n{}", object("f"));
    check_calls(ToolCallFormat::MiniMaxM1, &begun, "", &read[..1]);
    for text in [
        "<tool_calls></tool_calls>",
        "<tool_calls>[]</tool_calls>",
        "<tool_calls>\n{\"name\": \"f\"}\nx</tool_calls>",
        "<tool_calls>\n{\"name\": 1}\n</tool_calls>",
    ] {
        check_content(ToolCallFormat::MiniMaxM1, text);
    }
}

#[test]
fn seeds_have_marks_of_their_own_around_those_of_qwen() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "number": {"type": "integer"},
    }}}}]);
    let call = "<seed:tool_call>\n<function=f>\n<parameter=text>12</parameter>\n<parameter=number>12</parameter>\n\
                </function>\n</seed:tool_call>";
    let read = r#"f({"text": "12", "number": 12})"#;
    let text = format!("So\n{call}\n{call}");
    check_typed_calls(
        ToolCallFormat::SeedOss,
        &tools,
        &text,
        "So\n",
        &[read, read],
    );
    for text in [
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<seed:tool_call>x",
    ] {
        check_typed_calls(ToolCallFormat::SeedOss, &tools, text, text, &[]);
    }
}

#[test]
fn xlam_replies_with_a_list_and_nothing_else() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        check_calls(ToolCallFormat::XLam, text, content, calls)
    };
    let list = r#"[{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]"#;
    let read = [r#"f({"a": "]"})"#, "g({})"];
    check(list, "", &read);
    check(&format!("\n{list}\n"), "", &read);
    check(&format!("```json\n{list}\n```"), "", &read);
    check(&format!("[TOOL_CALLS] {list}"), "", &read);
    check(&format!("<tool_call>{list}</tool_call>"), "", &read);
    check(&format!("{list} so"), " so", &read);
    for text in [
        "Yes [",
        "[]",
        "[1, 2]",
        r#"[{"name": "Ann"}]"#,
        r#"{"name": "f", "arguments": {}}"#,
        "```json\n{\"a\": 1}\n```",
        "```rust\n[]\n```",
        "[TOOL",
        "[{\"name\": ",
    ] {
        check_content(ToolCallFormat::XLam, text);
    }
}

#[test]
fn commands_think_before_they_act() {
    let format = ReplyFormat {
        reasoning: Some(ReasoningFormat::Command),
        tool_calls: Some(ToolCallFormat::Command),
    };
    let reply = "<|START_THINKING|>I ask.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \
                 \"tool_name\": \"f\", \"parameters\": {}}\n]<|END_ACTION|>";
    let parts = parts(&format, reply);
    assert_eq!((&parts.reasoning[..], &parts.content[..]), ("I ask.", ""));
    assert_eq!(
        (&parts.calls[0].name[..], &parts.calls[0].arguments[..]),
        ("f", "{}")
    );
}

#[test]
fn gemma_has_texts_between_quotes_of_its_own() {
    let text = r#"So.<|tool_call>call:weather{city:<|"|>New "York", {1}<|"|>,days:[1,2],now:true}<tool_call|>"#;
    let call = r#"weather({"city":"New \"York\", {1}","days":[1,2],"now":true})"#;
    check_calls(ToolCallFormat::Gemma4, text, "So.", &[call]);
    let two = "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:{b:1}}<tool_call|>";
    check_calls(
        ToolCallFormat::Gemma4,
        two,
        "",
        &["f({})", r#"g({"a":{"b":1}})"#],
    );
    let older = "<start_function_call>call:f{city:<escape>Oslo<escape>, n:3}<end_function_call>";
    let call = r#"f({"city":"Oslo","n":3})"#;
    check_calls(ToolCallFormat::FunctionGemma, older, "", &[call]);
    for text in [
        "<|tool_call>call:f<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>call:a b{}<tool_call|>",
        "<|tool_call>f{}<tool_call|>",
        r#"<|tool_call>call:f{a:<|"|>x}<tool_call|>"#,
    ] {
        check_content(ToolCallFormat::Gemma4, text);
    }
    let format = ReplyFormat {
        reasoning: Some(ReasoningFormat::Gemma4),
        tool_calls: Some(ToolCallFormat::Gemma4),
    };
    let parts = parts(
        &format,
        "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{}<tool_call|>",
    );
    assert_eq!(
        (&parts.reasoning[..], &parts.content[..], parts.calls.len()),
        ("Hm.", "", 1)
    );
}

#[test]
fn dsml_says_which_arguments_are_texts() {
    let call = |name: &str, arguments: &str| {
        format!("<｜DSML｜invoke name=\"{name}\">\n{arguments}</｜DSML｜invoke>\n")
    };
    let argument = |name: &str, is_text: bool, value: &str| {
        format!(
            "<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n"
        )
    };
    let arguments = [
        argument("a", true, "5"),
        argument("b", false, "[1, 2]"),
        argument("c", true, "x\n<y> \"z\""),
    ];
    let f = call("f", &arguments.concat());
    let expected = r#"f({"a": "5", "b": [1, 2], "c": "x\n<y> \"z\""})"#;
    for mark in ["function_calls", "tool_calls"] {
        let text = format!(
            "Yes\n<｜DSML｜{mark}>\n{f}{}</｜DSML｜{mark}>",
            call("g", "")
        );
        check_calls(ToolCallFormat::Dsml, &text, "Yes\n", &[expected, "g({})"]);
    }
    let json = call("f", "{\"a\": 1}");
    let text = format!("<｜DSML｜function_calls>\n{json}</｜DSML｜function_calls>");
    check_calls(ToolCallFormat::Dsml, &text, "", &[r#"f({"a": 1})"#]);
    for inside in ["", "f", "<｜DSML｜invoke name=\"f\">\nx</｜DSML｜invoke>"] {
        let text = format!("<｜DSML｜function_calls>{inside}</｜DSML｜function_calls>");
        check_content(ToolCallFormat::Dsml, &text);
    }
}

#[test]
fn what_is_no_call_is_content_in_pieces_too() {
    for (format, text) in [
        (
            ToolCallFormat::Kimi,
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[]<|tool_call_end|>",
        ),
        (
            ToolCallFormat::Kimi,
            "<|tool_call_begin|>functions.a b:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        (
            ToolCallFormat::DeepSeek,
            "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        (ToolCallFormat::Mistral, "[TOOL_CALLS]a b[ARGS]{}"),
        (
            ToolCallFormat::Llama3,
            r#"[{"name": "f", "parameters": {}}]"#,
        ),
        (
            ToolCallFormat::Harmony,
            "<|channel|>commentary to=functions.f<|message|>[]",
        ),
    ] {
        let reader = calls(format).reader(ReplyStart::Beginning).in_pieces();
        let content = text.to_owned();
        let expected = ReplyParts {
            content,
            ..ReplyParts::default()
        };
        assert_eq!(read(&reader, &[text]), expected);
        assert_eq!(read(&reader, &text.split("").collect::<Vec<_>>()), expected);
    }
}

#[test]
fn a_call_in_pieces_stays_as_it_was_given_and_the_rest_is_content() {
    for (format, text, content) in [
        (
            ToolCallFormat::Hermes,
            r#"<tool_call>{"name": "f", "arguments": {"a": <b"#,
            "<b",
        ),
        (
            ToolCallFormat::Granite,
            r#"<|tool_call|>[{"name": "f", "arguments": {"a": <b"#,
            "<b",
        ),
        (
            ToolCallFormat::Llama3,
            r#"{"name": "f", "parameters": {"a": <b"#,
            "<b",
        ),
        (ToolCallFormat::Mistral, r#"[TOOL_CALLS]f{"a": <b"#, "<b"),
        (
            ToolCallFormat::DeepSeek,
            r#"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": <b<｜tool▁call▁end｜>"#,
            "<b<｜tool▁call▁end｜>",
        ),
        (
            ToolCallFormat::Harmony,
            r#"<|channel|>commentary to=functions.f<|message|>{"a": <b<|call|>"#,
            "<b<|call|>",
        ),
    ] {
        let reader = calls(format).reader(ReplyStart::Beginning).in_pieces();
        let expected = ReplyParts {
            content: content.to_owned(),
            calls: vec![ToolCall {
                name: "f".to_owned(),
                arguments: r#"{"a": "#.to_owned(),
                id: None,
                is_whole: false,
            }],
            ..ReplyParts::default()
        };
        assert_eq!(read(&reader, &[text]), expected);
        assert_eq!(read(&reader, &text.split("").collect::<Vec<_>>()), expected);
    }
}

/// Clients see at once that a reply is no call, and no text makes a reply wait without end.
#[test]
fn a_text_waits_while_it_may_become_a_call() {
    let content = |format, text: &str| {
        let mut parts = ReplyParts::default();
        let mut reader = calls(format).reader(ReplyStart::Beginning);
        reader.push(text, &mut parts);
        assert!(parts.calls.is_empty(), "{text}");
        parts.content
    };
    for (format, text) in [
        (ToolCallFormat::Hermes, "<tool_call>f"),
        (ToolCallFormat::QwenCoder, "<tool_call>{"),
        (ToolCallFormat::QwenCoder, "<tool_call><function=f\n"),
        (ToolCallFormat::Glm, "<tool_call>{"),
        (ToolCallFormat::Granite, "<|tool_call|>f"),
        (ToolCallFormat::Granite20b, "<function_call>f"),
        (ToolCallFormat::MiniMaxM1, "<tool_calls>\n["),
        (ToolCallFormat::SeedOss, "<seed:tool_call>f"),
        (ToolCallFormat::XLam, "Yes"),
        (ToolCallFormat::XLam, "[[1], {"),
        (ToolCallFormat::Lfm2, "<|tool_call_start|>f"),
        (ToolCallFormat::Olmo3, "<function_calls>\n["),
        (ToolCallFormat::MiniMax, "<minimax:tool_call>\nf"),
        (ToolCallFormat::Dsml, "<｜DSML｜tool_calls>f"),
        (ToolCallFormat::Hunyuan, "<tool_calls>f"),
        (ToolCallFormat::Gemma4, "<|tool_call>f"),
        (ToolCallFormat::FunctionGemma, "<start_function_call>f"),
        (ToolCallFormat::Llama3, r#"{"name": "Ann"}"#),
        (ToolCallFormat::Llama3, "Yes"),
        (ToolCallFormat::Mistral, "[TOOL_CALLS]Then\n"),
        (ToolCallFormat::Pythonic, "[1+"),
        (ToolCallFormat::Pythonic, "[f(1)]"),
        (ToolCallFormat::Harmony, "Yes"),
    ] {
        assert_eq!(content(format, text), text);
    }
    for (format, begun, max_bytes) in [
        (ToolCallFormat::QwenCoder, "<tool_call><function=", 256),
        (
            ToolCallFormat::QwenCoder,
            "<tool_call><function=f><parameter=",
            256,
        ),
        (ToolCallFormat::Glm, "<tool_call>", 256),
        (ToolCallFormat::Glm, "<tool_call>f\n<arg_key>", 256),
        (ToolCallFormat::Mistral, "[TOOL_CALLS]", 512),
        (
            ToolCallFormat::Harmony,
            "<|channel|>",
            1024 - "<|channel|>".len(),
        ),
    ] {
        let longest = format!("{begun}{}", "x".repeat(max_bytes));
        assert_eq!(content(format, &longest), "");
        let longer = format!("{longest}x");
        assert_eq!(content(format, &longer), longer);
    }
}

#[test]
fn names_of_functions_are_limited_by_the_marks_around_them() {
    let name = |num_bytes| "x".repeat(num_bytes);
    for (format, before, behind, max_bytes) in [
        (
            ToolCallFormat::QwenCoder,
            "<tool_call><function=",
            "></function></tool_call>",
            256,
        ),
        (ToolCallFormat::Glm, "<tool_call>", "\n</tool_call>", 256),
        (ToolCallFormat::Mistral, "[TOOL_CALLS]", "{}", 512),
    ] {
        let longest = name(max_bytes);
        let read = format!("{longest}({{}})");
        check_calls(format, &format!("{before}{longest}{behind}"), "", &[&read]);
        check_content(format, &format!("{before}{longest}x{behind}"));
    }
}

/// A JSON object as models write it: with escapes, characters of several bytes, and white space.
fn object() -> impl Strategy<Value = String> {
    let char = prop_oneof![
        6 => "[a-z {}\\[\\]:,<]",
        1 => Just("é".to_owned()),
        1 => Just("😀".to_owned()),
        1 => Just(r"\n".to_owned()),
        1 => Just(r"\\".to_owned()),
        1 => Just(r#"\""#.to_owned()),
        1 => Just(r"\u00e9".to_owned()),
        1 => Just(r"\ud83d\ude00".to_owned()),
    ];
    let text = prop::collection::vec(char, 0..8).prop_map(|it| format!("\"{}\"", it.concat()));
    let leaf = prop_oneof![
        3 => text.clone(),
        1 => any::<i32>().prop_map(|it| it.to_string()),
        1 => prop::sample::select(vec!["1.5e-3", "true", "null", "{}", "[]"]).prop_map(str::to_owned),
    ];
    let value = leaf.prop_recursive(3, 12, 3, move |inner| {
        let list = prop::collection::vec(inner.clone(), 0..3);
        let members = prop::collection::vec((text.clone(), inner), 0..3);
        prop_oneof![
            list.prop_map(|it| format!("[{}]", it.join(", "))),
            members.prop_map(|it| {
                let members = it.into_iter().map(|(key, value)| format!("{key}:{value}"));
                format!("{{{}}}", members.collect::<Vec<_>>().join(",\n"))
            }),
        ]
    });
    prop::collection::vec(value, 0..4).prop_map(|values| {
        let members = values.iter().enumerate();
        let members = members.map(|(i, value)| format!("\"k{i}\": {value}"));
        format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
    })
}

/// Where the characters of a text in JSON end, of which some are escapes.
fn ends_of_characters(json: &str) -> Vec<usize> {
    let escape = |rest: &str| match rest.as_bytes() {
        [b'\\', b'u', b'd', ..] => 12,
        [b'\\', b'u', ..] => 6,
        [b'\\', ..] => 2,
        _ => rest.chars().next().map_or(0, char::len_utf8),
    };
    let mut ends = vec![0];
    while let Some(rest) = json
        .get(ends[ends.len() - 1]..)
        .filter(|rest| !rest.is_empty())
    {
        ends.push(json.len() - rest.len() + escape(rest));
    }
    ends
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arguments_arrive_with_their_text(arguments in object(), is_thought in any::<bool>()) {
        for format in TOOL_CALLS {
            for text in call_in(format, "get_weather", &arguments) {
                let (format, text) = match is_thought && format != ToolCallFormat::Harmony {
                    false => (calls(format), text),
                    true => {
                        let reasoning = Some(ReasoningFormat::Think);
                        (ReplyFormat { reasoning, ..calls(format) }, format!("<think>So</think>{text}"))
                    }
                };
                let reader = format.reader(ReplyStart::Beginning);
                let whole = read(&reader, &[&text]);
                prop_assert!(!whole.calls.is_empty(), "{}", text);
                let (mut not_in_pieces, mut reader) = (reader.clone(), reader.in_pieces());
                let mut joined = ReplyParts::default();
                let ends = ends_of_characters(&arguments);
                let starts = [text.find(&arguments), text.rfind(&arguments)];
                let last = starts.map(|start| start.expect("they are there") + arguments.len() - 1);
                for (at, char) in text.char_indices() {
                    if last.contains(&at) {
                        let call = joined.calls.last().expect("a call");
                        prop_assert_eq!(&call.arguments, &arguments[..arguments.len() - 1]);
                    }
                    let mut new = ReplyParts::default();
                    not_in_pieces.push(char.encode_utf8(&mut [0; 4]), &mut new);
                    prop_assert!(new.calls.iter().all(|call| call.begins() && call.is_whole));
                    let mut new = ReplyParts::default();
                    reader.push(char.encode_utf8(&mut [0; 4]), &mut new);
                    prop_assert!(new.calls.iter().all(|call| call.is_whole || !call.arguments.is_empty()));
                    joined.append(new);
                    if let [.., call] = &joined.calls[..] {
                        let given = &call.arguments;
                        prop_assert!(arguments.starts_with(given) && ends.contains(&given.len()), "{}", given);
                    }
                }
                reader.finish(&mut joined);
                prop_assert_eq!(joined, whole);
            }
        }
    }
}
