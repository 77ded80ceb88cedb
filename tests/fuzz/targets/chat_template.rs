//! A chat template and the messages of a request. The input is the template, the line `---`, and the messages in JSON.

#![no_main]

use std::sync::LazyLock;

use inflight_fuzz::Folder;
use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::Value;
use triton_inflight::text::{ChatTemplates, Conversation, MessageField, PromptEnding};

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

fuzz_target!(|text: &str| -> Corpus {
    let Some((template, messages)) = text.split_once("\n---\n") else {
        return Corpus::Reject;
    };
    let Ok(Value::Array(messages)) = serde_json::from_str::<Value>(messages) else {
        return Corpus::Reject;
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
    Corpus::Keep
});
