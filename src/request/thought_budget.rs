//! A limit for the reasoning of a reply: a guide that forces the end of the thought.
//!
//! ```text
//! generated   <think>  t  t  t  ...  t | </think>    answer ...
//! tokens               '-- budget ---' | forced
//! ```
//!
//! The guide depends only on the sequence's own tokens, so a reply is equal in any batch.

use std::sync::Arc;

use inflight_base::{RequestError, TokenId};
use inflight_sampling::{Guide, GuideCost, GuideTokens, SampleError};
use inflight_text::{Thinking, Tokenizer};

/// The name of the option.
pub(super) const OPTION: &str = "thinking_token_budget";

/// The most tokens of a thought, and how one begins and ends.
#[derive(Clone, Debug)]
pub struct ThoughtBudget {
    /// The tokens of the mark that opens the thought; none if the prompt has opened it.
    start: Vec<TokenId>,
    max_tokens: usize,
    /// The tokens that close the thought, at least one.
    end: Vec<TokenId>,
}

impl ThoughtBudget {
    /// The budget of a reply with this thought. `header` is the text that the format has between thought and answer.
    /// `None` if the reply has no thought.
    ///
    /// # Errors
    /// The end of a thought cannot be told from other text, since the tokenizer has no token for it.
    pub fn new(
        max_tokens: usize,
        thinking: Thinking,
        header: Option<&str>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, RequestError> {
        let (start, mark) = match thinking {
            Thinking::Never => return Ok(None),
            Thinking::Begun(end) => ("", end),
            Thinking::Perhaps(start, end) => (start, end),
        };
        let end = tokenizer.encode(&[mark, header.unwrap_or("")].concat(), false)?;
        match end.first() {
            Some(first) if tokenizer.is_added(*first) => Ok(Some(Self {
                start: tokenizer.encode(start, false)?,
                max_tokens,
                end,
            })),
            _ => Err(RequestError::Invalid(format!(
                "option '{OPTION}': the model's tokenizer has no token for '{mark}', which ends a thought; leave the option \
                 out, or have the chat template leave thoughts out"
            ))),
        }
    }

    /// A guide that keeps the budget, and allows otherwise what `inner` allows.
    pub fn around(&self, inner: Option<Guide>) -> Guide {
        Guide(Arc::new(BudgetGuide {
            budget: self.clone(),
            inner,
        }))
    }

    /// The token that must follow `generated`, if the budget is spent.
    fn forced(&self, generated: &[TokenId]) -> Option<TokenId> {
        let thought = generated.strip_prefix(&self.start[..])?;
        let num_forced = thought.len().checked_sub(self.max_tokens)?;
        let token = *self.end.get(num_forced)?;
        let has_ended = thought[..self.max_tokens].contains(&self.end[0]);
        (!has_ended).then_some(token)
    }
}

/// The guide of a sequence with a budget.
struct BudgetGuide {
    budget: ThoughtBudget,
    inner: Option<Guide>,
}

impl GuideTokens for BudgetGuide {
    fn fresh(&self) -> Guide {
        let inner = self.inner.as_ref().map(|inner| inner.0.fresh());
        self.budget.around(inner)
    }

    fn prepare(&self, generated: &[TokenId], drafts: &[TokenId]) {
        if let Some(inner) = &self.inner {
            inner.0.prepare(generated, drafts);
        }
    }

    fn is_ready(&self, generated: &[TokenId]) -> bool {
        self.inner
            .as_ref()
            .is_none_or(|inner| inner.0.is_ready(generated))
    }

    fn cost(&self) -> GuideCost {
        let inner = self.inner.as_ref();
        inner.map_or_else(GuideCost::default, |inner| inner.0.cost())
    }

    fn give_up(&self) {
        if let Some(inner) = &self.inner {
            inner.0.give_up();
        }
    }

    fn explain(&self, error: SampleError) -> Option<String> {
        self.inner.as_ref()?.0.explain(error)
    }

    fn restrict(&self, logits: &mut [f32], generated: &[TokenId]) -> Result<(), SampleError> {
        if let Some(token) = self.budget.forced(generated) {
            logits.fill(f32::NEG_INFINITY);
            logits[token as usize] = 0.0;
            return Ok(());
        }
        match &self.inner {
            None => Ok(()),
            Some(inner) => inner.0.restrict(logits, generated),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toys;

    const START: TokenId = 1;
    const END: TokenId = 2;
    const HEADER: TokenId = 3;
    const WORD: TokenId = 4;

    fn budget(start: &[TokenId], max_tokens: usize, end: &[TokenId]) -> ThoughtBudget {
        ThoughtBudget {
            start: start.to_vec(),
            max_tokens,
            end: end.to_vec(),
        }
    }

    /// The reply under the budget of a model that would write `wish` without one.
    fn reply(budget: &ThoughtBudget, wish: &[TokenId]) -> Vec<TokenId> {
        let guide = budget.around(None);
        let mut generated = Vec::new();
        for token in wish {
            let mut logits = [0.0; 5];
            logits[*token as usize] = 1.0;
            guide
                .0
                .restrict(&mut logits, &generated)
                .expect("a guide without another");
            let best = logits.iter().zip(0..).max_by(|a, b| a.0.total_cmp(b.0));
            generated.push(best.expect("some tokens").1);
        }
        generated
    }

    #[test]
    fn a_thought_ends_with_its_budget_and_not_before_and_the_answer_is_free() {
        let words = [WORD; 6];
        let opened = |max_tokens| reply(&budget(&[], max_tokens, &[END]), &words);
        assert_eq!(opened(0), [END, WORD, WORD, WORD, WORD, WORD]);
        assert_eq!(opened(3), [WORD, WORD, WORD, END, WORD, WORD]);
        assert_eq!(opened(6), words);
        // It ends by itself, with its last token at the latest.
        for wish in [
            [END, WORD, WORD, WORD, WORD, WORD],
            [WORD, WORD, END, WORD, WORD, WORD],
            [WORD, WORD, WORD, END, WORD, END],
        ] {
            assert_eq!(reply(&budget(&[], 3, &[END]), &wish), wish);
        }
    }

    #[test]
    fn only_a_thought_that_the_reply_begins_with_has_a_budget() {
        let budget = budget(&[START], 2, &[END, HEADER]);
        let plain = [WORD, START, WORD, WORD, WORD, WORD, WORD];
        assert_eq!(reply(&budget, &plain), plain);
        let thought = [START, WORD, WORD, WORD, WORD, WORD, WORD];
        let cut = [START, WORD, WORD, END, HEADER, WORD, WORD];
        assert_eq!(reply(&budget, &thought), cut);
        let short = [START, WORD, END, WORD, WORD, WORD, WORD];
        assert_eq!(reply(&budget, &short), short);
    }

    #[test]
    fn the_end_is_forced_whatever_its_logit_is() {
        let guide = budget(&[], 0, &[END]).around(None);
        let mut logits = [0.0, 0.0, f32::NEG_INFINITY, 5.0, f32::NAN];
        guide.0.restrict(&mut logits, &[]).expect("no other guide");
        let expected = [0, 1, 2, 3, 4].map(|id| if id == END { 0.0 } else { f32::NEG_INFINITY });
        assert_eq!(logits, expected);
    }

    #[test]
    fn a_mark_without_a_token_is_refused() {
        let tokenizer = toys::byte_level();
        let new = |thinking| ThoughtBudget::new(5, thinking, None, &tokenizer);
        assert!(new(Thinking::Never).expect("no thought").is_none());
        let error = new(Thinking::Begun("</think>")).expect_err("no such token");
        assert!(
            error.to_string().contains("no token for '</think>'"),
            "{error}"
        );
        let budget = new(Thinking::Begun("<|end|>")).expect("a token");
        let end = toys::id(&tokenizer, "<|end|>");
        assert_eq!(budget.expect("a thought").forced(&[0; 5]), Some(end));
    }
}
