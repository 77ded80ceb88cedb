//! Which names of functions can be read back from calls.

use std::sync::Arc;

use serde_json::json;

use super::{ParameterTypes, ReplyFormat, ReplyParts, ReplyStart};
use inflight_config::ToolCallFormat;

/// The longest name. OpenAI's interface has 64 characters.
const MAX_NAME_BYTES: usize = 256;

/// Whether a call of a function of this name, in this format, is read as one.
pub fn can_be_read_back(format: ToolCallFormat, name: &str) -> bool {
    let is_read = |call: &String| {
        let reply = ReplyFormat {
            reasoning: None,
            tool_calls: Some(format),
        };
        let types = Arc::new(ParameterTypes::default());
        let mut reader = reply.reader_with(ReplyStart::Beginning, &types);
        let mut parts = ReplyParts::default();
        reader.push(call, &mut parts);
        reader.finish(&mut parts);
        parts.content.is_empty() && matches!(&parts.calls[..], [call] if call.name == name)
    };
    (1..=MAX_NAME_BYTES).contains(&name.len()) && calls(format, name).iter().all(is_read)
}

/// A call without arguments, in each way that a format has.
fn calls(format: ToolCallFormat, name: &str) -> Vec<String> {
    let call = |key: &str| json!({"name": name, key: {}});
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::Ernie => {
            vec![format!("<tool_call>\n{}\n</tool_call>", call("arguments"))]
        }
        ToolCallFormat::LongCat => vec![format!(
            "<longcat_tool_call>\n{}\n</longcat_tool_call>",
            call("arguments")
        )],
        ToolCallFormat::InternLm => vec![format!(
            "<|action_start|><|plugin|>\n{}<|action_end|>",
            call("parameters")
        )],
        ToolCallFormat::Granite20b => vec![format!("<function_call> {}", call("arguments"))],
        ToolCallFormat::GigaChat => vec![
            format!("function call<|role_sep|>\n{}", call("arguments")),
            format!("<|function_call|>{}", call("arguments")),
        ],
        ToolCallFormat::MiniMaxM1 => vec![format!(
            "<tool_calls>\n{}\n</tool_calls>",
            call("arguments")
        )],
        ToolCallFormat::XLam => vec![format!("[{}]", call("arguments"))],
        ToolCallFormat::SeedOss => vec![format!(
            "<seed:tool_call>\n<function={name}>\n</function>\n</seed:tool_call>"
        )],
        ToolCallFormat::QwenCoder => {
            vec![format!(
                "<tool_call>\n<function={name}>\n</function>\n</tool_call>"
            )]
        }
        ToolCallFormat::Glm => vec![format!("<tool_call>{name}\n</tool_call>")],
        ToolCallFormat::Kimi => vec![format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{}}\
             <|tool_call_end|><|tool_calls_section_end|>"
        )],
        ToolCallFormat::Pythonic => vec![format!("[{name}()]")],
        ToolCallFormat::Lfm2 => vec![format!("<|tool_call_start|>[{name}()]<|tool_call_end|>")],
        ToolCallFormat::Olmo3 => vec![format!("<function_calls>\n{name}()\n</function_calls>")],
        ToolCallFormat::MiniMax => vec![format!(
            "<minimax:tool_call>\n<invoke name=\"{name}\">\n</invoke>\n</minimax:tool_call>"
        )],
        ToolCallFormat::Dsml => vec![format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"{name}\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        )],
        ToolCallFormat::Hunyuan => {
            vec![format!("<tool_calls>[{}]</tool_calls>", call("arguments"))]
        }
        ToolCallFormat::Nemotron => vec![format!("<TOOLCALL>[{}]</TOOLCALL>", call("arguments"))],
        ToolCallFormat::Command => vec![format!(
            "<|START_ACTION|>[{}]<|END_ACTION|>",
            json!({"tool_name": name, "parameters": {}})
        )],
        ToolCallFormat::Apertus => vec![format!(
            "<|tools_prefix|>[{}]<|tools_suffix|>",
            json!({name: {}})
        )],
        ToolCallFormat::Gemma4 => vec![format!("<|tool_call>call:{name}{{}}<tool_call|>")],
        ToolCallFormat::FunctionGemma => vec![format!(
            "<start_function_call>call:{name}{{}}<end_function_call>"
        )],
        ToolCallFormat::Llama3 => vec![call("parameters").to_string()],
        ToolCallFormat::Mistral => vec![
            format!("[TOOL_CALLS] [{}]", call("arguments")),
            format!("[TOOL_CALLS]{name}[ARGS]{{}}"),
        ],
        ToolCallFormat::DeepSeek => vec![
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{}}\n```\
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ],
        ToolCallFormat::Granite => vec![format!("<|tool_call|>[{}]", call("arguments"))],
        ToolCallFormat::Harmony => vec![format!(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}"
        )],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ToolCallFormat::{
        Apertus, Command, DeepSeek, Dsml, Ernie, FunctionGemma, Gemma4, GigaChat, Glm, Granite,
        Granite20b, Harmony, Hermes, Hunyuan, InternLm, Kimi, Lfm2, Llama3, LongCat, MiniMax,
        MiniMaxM1, Mistral, Nemotron, Olmo3, Pythonic, QwenCoder, SeedOss, XLam,
    };

    const ALL: [ToolCallFormat; 28] = [
        Ernie,
        LongCat,
        InternLm,
        Granite20b,
        GigaChat,
        MiniMaxM1,
        XLam,
        SeedOss,
        Hermes,
        QwenCoder,
        Glm,
        Kimi,
        Pythonic,
        Lfm2,
        Olmo3,
        MiniMax,
        Dsml,
        Llama3,
        Mistral,
        DeepSeek,
        Granite,
        Hunyuan,
        Nemotron,
        Command,
        Apertus,
        Gemma4,
        FunctionGemma,
        Harmony,
    ];

    #[test]
    fn plain_names_are_read_back_in_every_format() {
        for format in ALL {
            for name in ["f", "get_time", "Weather2", "_a", "server.tool"] {
                assert!(can_be_read_back(format, name), "{format:?}: {name}");
            }
            for name in ["", &"f".repeat(257)] {
                assert!(!can_be_read_back(format, name), "{format:?}");
            }
        }
    }

    #[test]
    fn names_that_end_a_mark_of_the_format_are_not() {
        for (format, name) in [
            (QwenCoder, "a>b"),
            (QwenCoder, "a\nb"),
            (SeedOss, "a>b"),
            (MiniMaxM1, "a</tool_calls>"),
            (XLam, "a b"),
            (Glm, "a\nb"),
            (Glm, "a<arg_key>"),
            (Kimi, "a<|tool_call_argument_begin|>"),
            (Pythonic, "a b"),
            (Pythonic, "a("),
            (Mistral, "a[ARGS]"),
            (DeepSeek, "a```json"),
            (DeepSeek, "a<｜tool▁sep｜>"),
            (Gemma4, "a{b"),
            (Dsml, "a\">"),
            (Harmony, "a b"),
            (Harmony, "a<|message|>"),
        ] {
            assert!(!can_be_read_back(format, name), "{format:?}: {name}");
        }
    }
}
