//! A chat template and the messages of a request. The input is the template, the line `---`, and the messages in JSON.

use std::sync::LazyLock;

use inflight_text::{ChatTemplates, Conversation, MessageField, PromptEnding};
use serde_json::Value;

use super::{Folder, Input};

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

/// Runs one input.
pub fn run(text: &[u8]) -> Input {
    let Ok(text) = std::str::from_utf8(text) else {
        return Input::Useless;
    };
    let Some((template, messages)) = text.split_once("\n---\n") else {
        return Input::Useless;
    };
    let Ok(Value::Array(messages)) = serde_json::from_str::<Value>(messages) else {
        return Input::Useless;
    };
    FOLDER.write("chat_template.jinja", template.as_bytes());
    if let Ok(Some(templates)) = ChatTemplates::load(FOLDER.path()) {
        for ending in [
            PromptEnding::NewMessage,
            PromptEnding::Within(MessageField::Content),
            PromptEnding::Within(MessageField::Reasoning),
        ] {
            let _ = templates.render(&Conversation {
                messages: messages.clone(),
                tools: Some(Value::Array(messages.clone())),
                ending,
                ..Conversation::default()
            });
        }
    }
    Input::Useful
}
