//! A small vocabulary for tests of guides, and the texts that a guide allows with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::toys;
use inflight_base::TokenId;
use inflight_guidance::{Compiler, GuideSpec};
use inflight_sampling::Guide;
use inflight_text::{Detokenizer, Tokenizer};

/// A tokenizer of bytes and a few longer tokens, and a compiler of guides for it.
pub(super) struct Toy {
    tokenizer: Arc<Tokenizer>,
    compiler: Compiler,
    end_id: TokenId,
}

impl Toy {
    pub fn new() -> Self {
        let tokenizer = Arc::new(toys::byte_level());
        Self {
            compiler: Compiler::new(tokenizer.clone(), 272),
            // `<|end|>` is a mark in GPT-OSS.
            end_id: toys::id(&tokenizer, "<tool call>"),
            tokenizer,
        }
    }

    pub fn guide(&self, spec: GuideSpec) -> Guide {
        let now = Instant::now();
        let compilation = self.compiler.compile(spec, vec![self.end_id], now);
        let compilation = compilation.expect("a good guide");
        let long = Duration::from_secs(60);
        self.compiler.wait(|| compilation.is_done(), long);
        compilation.poll(now).expect("done").expect("a good guide")
    }

    fn allowed(&self, guide: &Guide, generated: &[TokenId]) -> Vec<TokenId> {
        let mut logits = [0.0; 272];
        let restricted = guide.0.restrict(&mut logits, generated);
        restricted.expect("computed");
        (0..272).filter(|id| logits[*id as usize] == 0.0).collect()
    }

    /// A random text that a guide allows.
    pub fn random(&self, guide: &Guide, mut seed: u64) -> String {
        let mut tokens = Vec::new();
        let mut text = String::new();
        let mut detokenizer = Detokenizer::new(&self.tokenizer, &[], false);
        loop {
            let allowed = self.allowed(guide, &tokens);
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let token = allowed[(seed >> 33) as usize % allowed.len()];
            if token == self.end_id {
                return text;
            }
            tokens.push(token);
            detokenizer.push(&self.tokenizer, token, &mut text);
            assert!(text.len() < 4000, "{text}");
        }
    }

    /// Whether a guide allows a text.
    pub fn allows(&self, guide: &Guide, text: &str) -> bool {
        let mut tokens = self.tokenizer.encode(text, false).expect("tokens");
        tokens.push(self.end_id);
        (0..tokens.len()).all(|i| self.allowed(guide, &tokens[..i]).contains(&tokens[i]))
    }
}
