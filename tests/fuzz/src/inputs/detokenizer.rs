//! Token ids that become text one by one. The first byte is the number of prompt tokens; two bytes follow for each id.

use std::sync::LazyLock;

use inflight_text::{Detokenizer, Tokenizer};

use super::{Input, repository};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let folder = repository().join("model_repository/stories/1");
    Tokenizer::load(&folder).expect("the demo model's tokenizer")
});

/// The text that `output` adds to `prompt`.
fn text(prompt: &[u32], output: &[u32], skip_special_tokens: bool, is_finished: bool) -> String {
    let mut text = String::new();
    let mut detokenizer = Detokenizer::new(&TOKENIZER, prompt, skip_special_tokens);
    for id in output {
        detokenizer.push(&TOKENIZER, *id, &mut text);
    }
    if is_finished {
        detokenizer.finish(&TOKENIZER, &mut text);
    }
    text
}

/// Runs one input.
pub fn run(input: &[u8]) -> Input {
    let Some((&num_prompt_tokens, ids)) = input.split_first() else {
        return Input::Useless;
    };
    let (ids, _) = ids.as_chunks();
    let ids: Vec<u32> = ids
        .iter()
        .map(|id| u16::from_le_bytes(*id).into())
        .collect();
    let (prompt, output) = ids.split_at(ids.len().min(num_prompt_tokens.into()));
    for skip_special_tokens in [false, true] {
        let added = text(prompt, output, skip_special_tokens, true);
        let before = text(&[], prompt, skip_special_tokens, false);
        // The boundary between prompt and output makes no difference.
        assert_eq!(
            before + &added,
            text(&[], &ids, skip_special_tokens, true),
            "{num_prompt_tokens} tokens of the prompt in {ids:?}"
        );
    }
    Input::Useful
}
