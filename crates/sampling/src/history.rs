//! How often each token occurs in a sequence: the table behind the penalties.

use crate::SamplingInput;
use inflight_base::TokenId;

/// Counts by token. They are filled for each call, and only the touched ones are cleared, so that a call costs the
/// length of the sequence and never the size of the vocabulary.
pub(super) struct History {
    /// Zero everywhere between calls. `[vocab_size]`.
    entries: Vec<TokenCount>,
    /// The tokens whose entries are not zero.
    touched: Vec<TokenId>,
}

/// The occurrences of one token.
#[derive(Clone, Copy, Default)]
pub(super) struct TokenCount {
    /// Whether it occurs in prompt or output.
    pub seen: bool,
    /// How often it occurs in the output, and in the part of the prompt that counts.
    pub num_counted: u32,
}

impl History {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            entries: vec![TokenCount::default(); vocab_size],
            touched: Vec::with_capacity(vocab_size),
        }
    }

    /// Calls `visit` once with each distinct token of the output and of the part of the prompt that counts, or of the
    /// whole prompt if `with_prompt`. Tokens outside the vocabulary are skipped.
    pub(super) fn for_each(
        &mut self,
        input: SamplingInput<'_>,
        with_prompt: bool,
        mut visit: impl FnMut(TokenId, TokenCount),
    ) {
        let ignored = input.params.prompt_ignore_length as usize;
        let (ignored, counted) = input.tokens.split_at(ignored.min(input.num_prompt_tokens));
        if with_prompt {
            self.count(ignored, 0);
        }
        self.count(counted, 1);
        for token in self.touched.drain(..) {
            visit(token, std::mem::take(&mut self.entries[token as usize]));
        }
    }

    fn count(&mut self, tokens: &[TokenId], each: u32) {
        for &token in tokens {
            let Some(entry) = self.entries.get_mut(token as usize) else {
                continue;
            };
            if !entry.seen {
                entry.seen = true;
                self.touched.push(token);
            }
            entry.num_counted += each;
        }
    }
}
