//! Guides that make calls of functions well-formed: in the format of the model, of a function that the request has, and
//! with arguments by its schema.

use std::borrow::Cow;
use std::iter;

use serde_json::{Map, Value, json};

use crate::request::thoughts::behind_thoughts;
use inflight_config::ToolCallFormat;
use inflight_guidance::{Arguments, Structure, Tag};
use inflight_text::{Thinking, is_text_schema};

/// Which functions a reply calls: `tool_choice`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// None.
    None,
    /// Any or none, as the model decides.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
    /// Any of these: at least one, or as the model decides.
    Allowed {
        /// Their names.
        names: Vec<String>,
        /// Whether it calls one.
        is_required: bool,
    },
}

/// A function that a reply may call.
pub(super) struct Function<'a> {
    name: &'a str,
    parameters: Option<&'a Value>,
    is_strict: bool,
}

/// The texts around the names and values of arguments in a format that has them between marks.
struct ArgumentMarks {
    before_name: &'static str,
    /// Behind the name of an argument that is a text.
    behind_text_name: &'static str,
    /// Behind the name of any other argument.
    behind_name: &'static str,
    /// Between a value and the mark behind it. The value of a text has it or not.
    behind_value: &'static str,
    end: &'static str,
}

const QWEN_CODER: ArgumentMarks = ArgumentMarks {
    before_name: "<parameter=",
    behind_text_name: ">\n",
    behind_name: ">\n",
    behind_value: "\n",
    end: "</parameter>",
};

const GLM: ArgumentMarks = ArgumentMarks {
    before_name: "<arg_key>",
    behind_text_name: "</arg_key>\n<arg_value>",
    behind_name: "</arg_key>\n<arg_value>",
    behind_value: "",
    end: "</arg_value>",
};

const MINIMAX: ArgumentMarks = ArgumentMarks {
    before_name: "<parameter name=\"",
    behind_text_name: "\">",
    behind_name: "\">",
    behind_value: "",
    end: "</parameter>",
};

const DSML: ArgumentMarks = ArgumentMarks {
    before_name: "<｜DSML｜parameter name=\"",
    behind_text_name: "\" string=\"true\">",
    behind_name: "\" string=\"false\">",
    behind_value: "",
    end: "</｜DSML｜parameter>",
};

/// The texts between the arguments of a format that has them as names and values.
struct NamedMarks {
    /// Between a name and its value.
    sign: &'static str,
    separator: &'static str,
    /// Around a text that is no JSON; `None` if all values are JSON.
    quote: Option<&'static str>,
}

/// Literals of Python may be JSON.
const PYTHON: NamedMarks = NamedMarks {
    sign: "=",
    separator: ", ",
    quote: None,
};

const GEMMA_4: NamedMarks = NamedMarks {
    sign: ":",
    separator: ",",
    quote: Some("<|\"|>"),
};

const FUNCTION_GEMMA: NamedMarks = NamedMarks {
    sign: ":",
    separator: ",",
    quote: Some("<escape>"),
};

/// The blocks in which a format has its calls.
struct Blocks {
    /// What begins a block, and nothing else.
    opener: &'static str,
    rest: Structure,
    /// What is between two blocks; `None` if there is one.
    separator: Option<&'static str>,
}

impl<'a> Function<'a> {
    /// The function of a tool in OpenAI's form. `None` without a name.
    pub fn of_tool(tool: &'a Value) -> Option<Self> {
        let function = tool.get("function").unwrap_or(tool);
        Some(Self {
            name: function.get("name")?.as_str()?,
            parameters: function.get("parameters").filter(|it| !it.is_null()),
            is_strict: function.get("strict") == Some(&Value::Bool(true)),
        })
    }

    /// Its name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The form of its arguments: an object, by the schema unless `any_object`. Without a schema it has none.
    fn arguments(&self, any_object: bool) -> Box<Structure> {
        let mut schema = match self.parameters {
            _ if any_object => any_arguments(),
            None => json!({"type": "object", "additionalProperties": false}),
            Some(schema) => schema.clone(),
        };
        if let Some(members) = schema.as_object_mut() {
            members.entry("type").or_insert_with(|| json!("object"));
        }
        Box::new(self.by_schema(schema, any_arguments()))
    }

    /// JSON by a schema, or by a fallback if the schema cannot be used and the function is not strict.
    fn by_schema(&self, mut schema: Value, fallback: Value) -> Structure {
        if self.is_strict
            && let Some(members) = schema.as_object_mut()
        {
            let layout = members.entry("x-guidance").or_insert_with(|| json!({}));
            if let Some(layout) = layout.as_object_mut() {
                layout.insert("lenient".to_owned(), json!(false));
            }
        }
        Structure::Arguments(Arguments {
            function: self.name.to_owned(),
            schema,
            fallback: (!self.is_strict).then_some(fallback),
        })
    }

    /// The schemas of its arguments by name; `None` if they may be any.
    fn properties(&self, any: bool) -> Option<Cow<'a, Map<String, Value>>> {
        match self.parameters {
            _ if any => None,
            None => Some(Cow::Owned(Map::new())),
            Some(schema) => schema.get("properties")?.as_object().map(Cow::Borrowed),
        }
    }

    /// The form of its arguments between marks: the schema's properties in its order, each once, unless they may be
    /// `any`.
    fn marked_arguments(&self, marks: &ArgumentMarks, any: bool) -> Structure {
        let text_to_end = || vec![Structure::AnyText, text(marks.end), text("\n")];
        let schema = self.parameters;
        let Some(properties) = self.properties(any) else {
            let name = Structure::Regex("[A-Za-z_][A-Za-z0-9_]{0,63}".to_owned());
            let of_text = [vec![text(marks.behind_text_name)], text_to_end()].concat();
            let of_any = match marks.behind_text_name == marks.behind_name {
                true => Structure::Sequence(of_text),
                false => Structure::Or(vec![
                    Structure::Sequence(of_text),
                    Structure::Sequence(vec![
                        text(marks.behind_name),
                        Structure::JsonSchema(json!({})),
                        text(marks.end),
                        text("\n"),
                    ]),
                ]),
            };
            let argument = Box::new(Structure::Sequence(vec![name, of_any]));
            return Structure::Separated {
                tags: vec![tag(marks.before_name, argument, "")],
                separator: String::new(),
                at_least_one: false,
                stop_after_first: false,
            };
        };
        let required = schema.and_then(|schema| schema.get("required")?.as_array());
        let arguments = properties.iter().map(|(name, property)| {
            let is_text = is_text_schema(property);
            let value = match is_text && property.get("enum").is_none() {
                true => text_to_end(),
                false => {
                    let texts = [marks.behind_value, marks.end, "\n"].into_iter();
                    let texts = texts.filter(|it| !it.is_empty()).map(text);
                    iter::once(self.marked_value(name, property))
                        .chain(texts)
                        .collect()
                }
            };
            let behind_name = match is_text {
                true => marks.behind_text_name,
                false => marks.behind_name,
            };
            let begin = text(&format!("{}{name}{behind_name}", marks.before_name));
            let argument = Structure::Sequence([vec![begin], value].concat());
            match required.is_some_and(|required| required.contains(&json!(name))) {
                true => argument,
                false => Structure::Optional(Box::new(argument)),
            }
        });
        Structure::Sequence(arguments.collect())
    }

    /// The form of its arguments as `name=value, name=value`: first those that must be, then others in the schema's
    /// order, unless they may be `any`.
    fn named_arguments(&self, marks: &NamedMarks, any: bool) -> Structure {
        let NamedMarks {
            sign, separator, ..
        } = *marks;
        let schema = self.parameters;
        let Some(properties) = self.properties(any) else {
            let name = Structure::Regex("[A-Za-z_][A-Za-z0-9_]{0,63}".to_owned());
            let argument = vec![name, text(sign), Structure::JsonSchema(json!({}))];
            return Structure::Separated {
                tags: vec![tag("", Box::new(Structure::Sequence(argument)), "")],
                separator: separator.to_owned(),
                at_least_one: false,
                stop_after_first: false,
            };
        };
        let required = schema.and_then(|schema| schema.get("required")?.as_array());
        let is_required =
            |name: &String| required.is_some_and(|required| required.contains(&json!(name)));
        let argument = |separator: &str, name: &String, property: &Value| {
            let begin = text(&format!("{separator}{name}{sign}"));
            let quote = marks.quote.filter(|_| is_text_schema(property)).map(text);
            let value = match (quote, property.get("enum")) {
                (None, _) => self.json_value(name, property),
                (Some(quote), None) => {
                    Structure::Sequence(vec![quote.clone(), Structure::AnyText, quote])
                }
                (Some(quote), Some(_)) => {
                    let value = self.marked_value(name, property);
                    Structure::Sequence(vec![quote.clone(), value, quote])
                }
            };
            Structure::Sequence(vec![begin, value])
        };
        let (first, others): (Vec<_>, Vec<_>) =
            properties.iter().partition(|(name, _)| is_required(name));
        let behind = |from: usize| -> Vec<Structure> {
            let others = others[from..].iter();
            let others = others.map(|(name, property)| argument(separator, name, property));
            others.map(|it| Structure::Optional(Box::new(it))).collect()
        };
        if properties.is_empty() {
            return Structure::Sequence(Vec::new());
        }
        if first.is_empty() {
            let beginnings = others.iter().enumerate().map(|(index, (name, property))| {
                let rest = behind(index + 1);
                Structure::Sequence(
                    [argument("", name, property)]
                        .into_iter()
                        .chain(rest)
                        .collect(),
                )
            });
            return Structure::Optional(Box::new(Structure::Or(beginnings.collect())));
        }
        let first = first
            .into_iter()
            .enumerate()
            .map(|(index, (name, property))| {
                argument(if index == 0 { "" } else { separator }, name, property)
            });
        Structure::Sequence(first.chain(behind(0)).collect())
    }

    /// The form of an argument that is one of some texts, or JSON.
    fn marked_value(&self, name: &str, property: &Value) -> Structure {
        let choices = property.get("enum").and_then(Value::as_array);
        if let Some(choices) = choices.filter(|_| is_text_schema(property)) {
            let texts = choices.iter().filter_map(Value::as_str);
            return Structure::Or(texts.map(text).collect());
        }
        self.json_value(name, property)
    }

    /// The form of an argument that is JSON.
    fn json_value(&self, name: &str, property: &Value) -> Structure {
        let schema = match self.parameters {
            // A reference points into the schema of all parameters, which must come along.
            Some(parameters) if has_reference(property) => {
                let mut all = parameters.clone();
                all["$id"] = json!(ARGUMENTS);
                let pointer = name.replace('~', "~0").replace('/', "~1");
                json!({"$ref": format!("{ARGUMENTS}#/properties/{}", percent_encoded(&pointer)), "$defs": {"arguments": all}})
            }
            _ => property.clone(),
        };
        self.by_schema(schema, json!({}))
    }
}

/// The address, in the schema of one argument, of the schema of all.
const ARGUMENTS: &str = "urn:inflight:arguments";

/// Arguments of a function whose schema is not used.
fn any_arguments() -> Value {
    json!({"type": "object"})
}

fn has_reference(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => {
            members.contains_key("$ref") || members.values().any(has_reference)
        }
        Value::Array(list) => list.iter().any(has_reference),
        _ => false,
    }
}

/// A name within a reference, in which a percent sign begins a code.
fn percent_encoded(text: &str) -> String {
    text.replace('%', "%25")
}

/// The guide of a reply that calls one of these functions, or several if they may be `parallel`.
pub(super) fn required(
    format: ToolCallFormat,
    functions: &[Function<'_>],
    parallel: bool,
    thinking: Thinking,
) -> Structure {
    let blocks = blocks(format, functions, parallel, false);
    let calls = Structure::Separated {
        tags: vec![tag(blocks.opener, Box::new(blocks.rest), "")],
        separator: blocks.separator.unwrap_or_default().to_owned(),
        at_least_one: true,
        stop_after_first: !parallel || blocks.separator.is_none(),
    };
    behind_thoughts(calls, thinking)
}

/// The guide of a reply that may call functions; the arguments of those that are `strict` are by their schemas. `None`
/// if nothing is to be guided, or calls have no mark in this format by which they can be told from text.
pub(super) fn automatic(
    format: ToolCallFormat,
    functions: &[Function<'_>],
    parallel: bool,
    thinking: Thinking,
) -> Option<Structure> {
    let is_guided = !parallel || functions.iter().any(|function| function.is_strict);
    let has_mark = !matches!(
        format,
        ToolCallFormat::Llama3
            | ToolCallFormat::Pythonic
            | ToolCallFormat::XLam
            | ToolCallFormat::Harmony
    );
    if !is_guided || !has_mark {
        return None;
    }
    let blocks = blocks(format, functions, parallel, true);
    let reply = Structure::Triggered {
        triggers: vec![blocks.opener.to_owned()],
        tags: vec![tag(blocks.opener, Box::new(blocks.rest), "")],
        at_least_one: false,
        stop_after_first: !parallel,
    };
    Some(behind_thoughts(reply, thinking))
}

fn blocks(
    format: ToolCallFormat,
    functions: &[Function<'_>],
    parallel: bool,
    only_strict: bool,
) -> Blocks {
    let tags = |begin: &dyn Fn(&str) -> String, end: &str| -> Vec<Tag> {
        let of_function = |function: &Function<'_>| {
            let any_object = only_strict && !function.is_strict;
            tag(&begin(function.name), function.arguments(any_object), end)
        };
        functions.iter().map(of_function).collect()
    };
    let in_json = |key: &str, before: &str, behind: &str| {
        let begin = |name: &str| format!("{before}{{\"name\": {}, \"{key}\": ", json!(name));
        tags(&begin, &format!("}}{behind}"))
    };
    let several = |tags: Vec<Tag>, separator: &str| Structure::Separated {
        tags,
        separator: separator.to_owned(),
        at_least_one: true,
        stop_after_first: !parallel,
    };
    let list_of = |calls: Vec<Tag>, behind: &str| {
        let end = text(&format!("]{behind}"));
        Structure::Sequence(vec![text("["), several(calls, ", "), end])
    };
    let list = |behind: &str| list_of(in_json("arguments", "", ""), behind);
    let in_list = |opener: &'static str, list: Structure| Blocks {
        opener,
        rest: list,
        separator: None,
    };
    let in_python = || {
        let of_function = |function: &Function<'_>| {
            let arguments = function.named_arguments(&PYTHON, only_strict && !function.is_strict);
            tag(&format!("{}(", function.name), Box::new(arguments), ")")
        };
        functions.iter().map(of_function).collect::<Vec<_>>()
    };
    let in_braces = |opener: &'static str, marks: &NamedMarks, end: &str| {
        let of_function = |function: &Function<'_>| {
            let arguments = function.named_arguments(marks, only_strict && !function.is_strict);
            let begin = text(&format!("call:{}{{", function.name));
            Structure::Sequence(vec![begin, arguments, text(&format!("}}{end}"))])
        };
        Blocks {
            opener,
            rest: Structure::Or(functions.iter().map(of_function).collect()),
            separator: Some(""),
        }
    };
    let in_functions = |opener: &'static str, close: &str| {
        let of_function = |function: &Function<'_>| {
            let any_arguments = only_strict && !function.is_strict;
            let begin = text(&format!("\n<function={}>\n", function.name));
            let end = text(&format!("</function>\n{close}"));
            Structure::Sequence(vec![
                begin,
                function.marked_arguments(&QWEN_CODER, any_arguments),
                end,
            ])
        };
        Blocks {
            opener,
            rest: Structure::Or(functions.iter().map(of_function).collect()),
            separator: Some("\n"),
        }
    };
    let invokes = |opener: &'static str, marks: &ArgumentMarks, around: [&str; 2], end: &str| {
        let of_function = |function: &Function<'_>| {
            let any_arguments = only_strict && !function.is_strict;
            let arguments = function.marked_arguments(marks, any_arguments);
            let begin = format!("{}{}\">\n", around[0], function.name);
            tag(&begin, Box::new(arguments), around[1])
        };
        let calls = several(functions.iter().map(of_function).collect(), "");
        Blocks {
            opener,
            rest: Structure::Sequence(vec![text("\n"), calls, text(end)]),
            separator: None,
        }
    };
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::Ernie => Blocks {
            opener: "<tool_call>",
            rest: one_of(in_json("arguments", "\n", "\n</tool_call>")),
            separator: Some("\n"),
        },
        ToolCallFormat::LongCat => Blocks {
            opener: "<longcat_tool_call>",
            rest: one_of(in_json("arguments", "\n", "\n</longcat_tool_call>")),
            separator: Some("\n"),
        },
        ToolCallFormat::InternLm => Blocks {
            opener: "<|action_start|><|plugin|>",
            rest: one_of(in_json("parameters", "\n", "<|action_end|>")),
            separator: None,
        },
        ToolCallFormat::Granite20b => Blocks {
            opener: "<function_call>",
            rest: one_of(in_json("arguments", " ", "")),
            separator: Some(""),
        },
        ToolCallFormat::GigaChat => Blocks {
            opener: "function call<|role_sep|>",
            rest: one_of(in_json("arguments", "\n", "")),
            separator: None,
        },
        ToolCallFormat::MiniMaxM1 => {
            let calls = several(in_json("arguments", "", ""), "\n");
            Blocks {
                opener: "<tool_calls>",
                rest: Structure::Sequence(vec![text("\n"), calls, text("\n</tool_calls>")]),
                separator: None,
            }
        }
        ToolCallFormat::XLam => Blocks {
            opener: "[",
            rest: Structure::Sequence(vec![several(in_json("arguments", "", ""), ", "), text("]")]),
            separator: None,
        },
        ToolCallFormat::QwenCoder => in_functions("<tool_call>", "</tool_call>"),
        ToolCallFormat::SeedOss => in_functions("<seed:tool_call>", "</seed:tool_call>"),
        ToolCallFormat::Glm => {
            let of_function = |function: &Function<'_>| {
                let any_arguments = only_strict && !function.is_strict;
                let begin = text(&format!("{}\n", function.name));
                let arguments = function.marked_arguments(&GLM, any_arguments);
                Structure::Sequence(vec![begin, arguments, text("</tool_call>")])
            };
            Blocks {
                opener: "<tool_call>",
                rest: Structure::Or(functions.iter().map(of_function).collect()),
                separator: Some("\n"),
            }
        }
        ToolCallFormat::Kimi => {
            let of_function = |function: &Function<'_>| {
                let any_object = only_strict && !function.is_strict;
                let number = Structure::Regex("[0-9]{1,4}".to_owned());
                let content = vec![
                    number,
                    text("<|tool_call_argument_begin|>"),
                    *function.arguments(any_object),
                ];
                let begin = format!("<|tool_call_begin|>functions.{}:", function.name);
                let content = Box::new(Structure::Sequence(content));
                tag(&begin, content, "<|tool_call_end|>")
            };
            let calls = several(functions.iter().map(of_function).collect(), "");
            Blocks {
                opener: "<|tool_calls_section_begin|>",
                rest: Structure::Sequence(vec![calls, text("<|tool_calls_section_end|>")]),
                separator: None,
            }
        }
        ToolCallFormat::Pythonic => Blocks {
            opener: "[",
            rest: Structure::Sequence(vec![several(in_python(), ", "), text("]")]),
            separator: None,
        },
        ToolCallFormat::Lfm2 => Blocks {
            opener: "<|tool_call_start|>",
            rest: Structure::Sequence(vec![
                text("["),
                several(in_python(), ", "),
                text("]<|tool_call_end|>"),
            ]),
            separator: None,
        },
        ToolCallFormat::Olmo3 => Blocks {
            opener: "<function_calls>",
            rest: Structure::Sequence(vec![
                text("\n"),
                several(in_python(), "\n"),
                text("\n</function_calls>"),
            ]),
            separator: None,
        },
        ToolCallFormat::MiniMax => invokes(
            "<minimax:tool_call>",
            &MINIMAX,
            ["<invoke name=\"", "</invoke>\n"],
            "</minimax:tool_call>",
        ),
        ToolCallFormat::Dsml => invokes(
            "<｜DSML｜function_calls>",
            &DSML,
            ["<｜DSML｜invoke name=\"", "</｜DSML｜invoke>\n"],
            "</｜DSML｜function_calls>",
        ),
        ToolCallFormat::Gemma4 => in_braces("<|tool_call>", &GEMMA_4, "<tool_call|>"),
        ToolCallFormat::FunctionGemma => in_braces(
            "<start_function_call>",
            &FUNCTION_GEMMA,
            "<end_function_call>",
        ),
        ToolCallFormat::Hunyuan => in_list("<tool_calls>", list("</tool_calls>")),
        ToolCallFormat::Nemotron => in_list("<TOOLCALL>", list("</TOOLCALL>")),
        ToolCallFormat::Apertus => {
            let begin = |name: &str| format!("{{{}: ", json!(name));
            let calls = tags(&begin, "}");
            in_list("<|tools_prefix|>", list_of(calls, "<|tools_suffix|>"))
        }
        ToolCallFormat::Command => {
            let of_function = |function: &Function<'_>| {
                let any_object = only_strict && !function.is_strict;
                let name = format!(
                    "\", \"tool_name\": {}, \"parameters\": ",
                    json!(function.name)
                );
                let number = Structure::Regex("[0-9]{1,4}".to_owned());
                let content = vec![number, text(&name), *function.arguments(any_object)];
                let content = Box::new(Structure::Sequence(content));
                tag("{\"tool_call_id\": \"", content, "}")
            };
            let calls = functions.iter().map(of_function).collect();
            in_list("<|START_ACTION|>", list_of(calls, "<|END_ACTION|>"))
        }
        ToolCallFormat::Llama3 => Blocks {
            opener: "",
            rest: one_of(in_json("parameters", "", "")),
            separator: None,
        },
        ToolCallFormat::Mistral => {
            let space = Structure::Optional(Box::new(text(" ")));
            let named = tags(&|name| format!("{name}[ARGS]"), "");
            Blocks {
                opener: "[TOOL_CALLS]",
                rest: Structure::Or(vec![
                    Structure::Sequence(vec![space, list("")]),
                    one_of(named),
                ]),
                separator: Some(""),
            }
        }
        ToolCallFormat::DeepSeek => {
            let fenced = |name: &str| {
                format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n")
            };
            let plain = |name: &str| format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>");
            Blocks {
                opener: "<｜tool▁calls▁begin｜>",
                rest: Structure::Sequence(vec![
                    Structure::Or(vec![
                        several(tags(&fenced, "\n```<｜tool▁call▁end｜>"), "\n"),
                        several(tags(&plain, "<｜tool▁call▁end｜>"), ""),
                    ]),
                    text("<｜tool▁calls▁end｜>"),
                ]),
                separator: None,
            }
        }
        ToolCallFormat::Granite => in_list("<|tool_call|>", list("")),
        ToolCallFormat::Harmony => {
            let header = |name: &str| format!(" to=functions.{name} <|constrain|>json<|message|>");
            Blocks {
                opener: "<|channel|>commentary",
                rest: one_of(tags(&header, "")),
                separator: None,
            }
        }
    }
}

fn tag(begin: &str, content: Box<Structure>, end: &str) -> Tag {
    Tag {
        begin: begin.to_owned(),
        content,
        ends: vec![end.to_owned()],
    }
}

fn one_of(tags: Vec<Tag>) -> Structure {
    Structure::Or(tags.into_iter().map(Structure::Tag).collect())
}

fn text(text: &str) -> Structure {
    Structure::Text(text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::request::guide_toys::Toy;
    use inflight_config::ReasoningFormat;
    use inflight_guidance::GuideSpec;
    use inflight_sampling::Guide;
    use inflight_text::{ParameterTypes, ReplyFormat, ReplyParts, ReplyStart};

    const FORMATS: [ToolCallFormat; 28] = [
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
        ToolCallFormat::Hermes,
        ToolCallFormat::QwenCoder,
        ToolCallFormat::Glm,
        ToolCallFormat::Kimi,
        ToolCallFormat::Pythonic,
        ToolCallFormat::Llama3,
        ToolCallFormat::Mistral,
        ToolCallFormat::DeepSeek,
        ToolCallFormat::Granite,
        ToolCallFormat::Harmony,
    ];

    fn guide(toy: &Toy, structure: Structure) -> Guide {
        toy.guide(GuideSpec::Structure(structure))
    }

    fn tools() -> Vec<Value> {
        let schema = json!({
            "type": "object", "properties": {"a": {"enum": [1, "\u{e9}\"}"]}}, "required": ["a"],
            "additionalProperties": false, "x-guidance": {"whitespace_flexible": false},
        });
        let strict = json!({"name": "f", "parameters": schema, "strict": true});
        let none = json!({"type": "object", "maxProperties": 0, "properties": {}, "additionalProperties": false});
        vec![
            json!({"type": "function", "function": strict}),
            json!({"name": "get.time", "parameters": none}),
        ]
    }

    fn read(format: ReplyFormat, start: ReplyStart, text: &str) -> ReplyParts {
        let types = Arc::new(ParameterTypes::of_tools(&Value::from(tools())));
        let mut reader = format.reader_with(start, &types);
        let mut parts = ReplyParts::default();
        reader.push(text, &mut parts);
        reader.finish(&mut parts);
        parts
    }

    #[test]
    fn whatever_a_guide_lets_a_model_write_is_read_as_calls() {
        let toy = Toy::new();
        let tools = tools();
        let functions: Vec<_> = tools.iter().filter_map(Function::of_tool).collect();
        for format in FORMATS {
            let replies = ReplyFormat {
                reasoning: None,
                tool_calls: Some(format),
            };
            let mut most_calls = 0;
            for parallel in [true, false] {
                let guide = guide(
                    &toy,
                    required(format, &functions, parallel, Thinking::Never),
                );
                for seed in 0..12 {
                    let text = toy.random(&guide, seed);
                    let parts = read(replies, ReplyStart::Beginning, &text);
                    assert_eq!(parts.content, "", "{text}");
                    assert!(!parts.calls.is_empty(), "{text}");
                    assert!(parallel || parts.calls.len() == 1, "{text}");
                    for call in &parts.calls {
                        let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
                        match call.name.as_str() {
                            "f" => assert!(
                                arguments["a"] == 1 || arguments["a"] == "\u{e9}\"}",
                                "{text}"
                            ),
                            "get.time" => assert_eq!(arguments, json!({})),
                            other => panic!("{other}: {text}"),
                        }
                    }
                    most_calls = most_calls.max(parts.calls.len());
                }
            }
            let is_single = matches!(
                format,
                ToolCallFormat::Llama3
                    | ToolCallFormat::Harmony
                    | ToolCallFormat::InternLm
                    | ToolCallFormat::GigaChat
            );
            assert_eq!(most_calls > 1, !is_single, "{format:?}");
        }
    }

    #[test]
    fn texts_and_other_arguments_have_the_marks_of_their_kind() {
        let toy = Toy::new();
        let properties = json!({"n": {"type": "integer"}, "city": {"type": "string"}});
        let schema = json!({"type": "object", "properties": properties, "required": ["n", "city"]});
        let tool = json!({"name": "f", "parameters": schema});
        let functions: Vec<_> = Function::of_tool(&tool).into_iter().collect();
        for (format, good, bad) in [
            (
                ToolCallFormat::Gemma4,
                "<|tool_call>call:f{n:5,city:<|\"|>New \"York\", 1<|\"|>}<tool_call|>",
                "<|tool_call>call:f{n:<|\"|>5<|\"|>,city:<|\"|>Oslo<|\"|>}<tool_call|>",
            ),
            (
                ToolCallFormat::FunctionGemma,
                "<start_function_call>call:f{n:5,city:<escape>Oslo<escape>}<end_function_call>",
                "<start_function_call>call:f{n:5,city:Oslo}<end_function_call>",
            ),
            (
                ToolCallFormat::Dsml,
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
                 <｜DSML｜parameter name=\"n\" string=\"false\">5</｜DSML｜parameter>\n\
                 <｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n\
                 </｜DSML｜invoke>\n</｜DSML｜function_calls>",
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
                 <｜DSML｜parameter name=\"n\" string=\"true\">5</｜DSML｜parameter>\n",
            ),
            (
                ToolCallFormat::Command,
                "<|START_ACTION|>[{\"tool_call_id\": \"1\", \"tool_name\": \"f\", \
                 \"parameters\": {\"n\":5,\"city\":\"Oslo\"}}]<|END_ACTION|>",
                "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"n\":5,\"city\":\"Oslo\"}}]",
            ),
        ] {
            let guide = guide(&toy, required(format, &functions, true, Thinking::Never));
            assert!(toy.allows(&guide, good), "{good}");
            assert!(!toy.allows(&guide, bad), "{bad}");
        }
    }

    #[test]
    fn arguments_without_a_schema_may_be_texts_or_not() {
        let toy = Toy::new();
        let tool = json!({"name": "f", "parameters": {"type": "object"}});
        let functions: Vec<_> = Function::of_tool(&tool).into_iter().collect();
        let format = ToolCallFormat::Dsml;
        let guide = guide(&toy, required(format, &functions, true, Thinking::Never));
        for (flag, value) in [("true", "Oslo"), ("false", "[1]")] {
            let text = format!(
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
                 <｜DSML｜parameter name=\"a\" string=\"{flag}\">{value}</｜DSML｜parameter>\n\
                 </｜DSML｜invoke>\n</｜DSML｜function_calls>"
            );
            assert!(toy.allows(&guide, &text), "{text}");
        }
    }

    #[test]
    fn a_reply_may_think_before_it_calls() {
        let toy = Toy::new();
        let tools = tools();
        let functions: Vec<_> = tools.iter().filter_map(Function::of_tool).collect();
        let replies = ReplyFormat {
            reasoning: Some(ReasoningFormat::Think),
            tool_calls: Some(ToolCallFormat::Hermes),
        };
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>";
        let thought = format!("so\n</think>\n\n{call}");
        let whole = format!("<think>\n{thought}");
        let breaks = format!("\n{call}");
        for (start, good, bad) in [
            (
                ReplyStart::Beginning,
                &[call, &whole][..],
                &[&thought[..], "so", "", &breaks][..],
            ),
            (ReplyStart::Reasoning, &[&thought, &whole], &[call, "so"]),
            (ReplyStart::Content, &[call], &[&thought, &whole]),
        ] {
            let thinking = replies.thinking(start);
            let guide = guide(
                &toy,
                required(ToolCallFormat::Hermes, &functions, false, thinking),
            );
            for text in good {
                assert!(toy.allows(&guide, text), "{start:?}: {text}");
                assert_eq!(
                    read(replies, start, text).calls.len(),
                    1,
                    "{start:?}: {text}"
                );
            }
            for text in bad {
                assert!(!toy.allows(&guide, text), "{start:?}: {text}");
            }
        }
        let harmony = ReplyFormat {
            reasoning: Some(ReasoningFormat::Harmony),
            tool_calls: Some(ToolCallFormat::Harmony),
        };
        let thinking = harmony.thinking(ReplyStart::Beginning);
        let guide = guide(
            &toy,
            required(ToolCallFormat::Harmony, &functions, false, thinking),
        );
        let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\":1}";
        let thought = format!("<|channel|>analysis<|message|>so<|end|><|start|>assistant{call}");
        for text in [call, &thought] {
            assert!(toy.allows(&guide, text), "{text}");
        }
        assert_eq!(
            read(harmony, ReplyStart::Beginning, &thought).reasoning,
            "so"
        );
    }

    #[test]
    fn strict_functions_are_guided_where_the_model_decides() {
        let toy = Toy::new();
        let tools = tools();
        let functions: Vec<_> = tools.iter().filter_map(Function::of_tool).collect();
        let structure = automatic(ToolCallFormat::Hermes, &functions, true, Thinking::Never);
        let guide = guide(&toy, structure.expect("one is strict"));
        let call = |name: &str, arguments: &str| {
            format!(
                "<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>"
            )
        };
        for text in [
            "",
            "No.",
            &call("f", "{\"a\":1}"),
            &format!("So\n{}", call("get.time", "{\"b\":2}")),
        ] {
            assert!(toy.allows(&guide, text), "{text}");
        }
        for text in [
            "<tool_call>",
            &call("f", "{\"a\":2}"),
            &call("g", "{}"),
            "a <tool_call>f()</tool_call>",
        ] {
            assert!(!toy.allows(&guide, text), "{text}");
        }
        for format in [
            ToolCallFormat::Llama3,
            ToolCallFormat::Pythonic,
            ToolCallFormat::Harmony,
        ] {
            assert_eq!(automatic(format, &functions, false, Thinking::Never), None);
        }
        assert_eq!(
            automatic(
                ToolCallFormat::Hermes,
                &functions[1..],
                true,
                Thinking::Never
            ),
            None
        );
    }
}
