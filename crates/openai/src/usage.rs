//! The tokens of a request, counted by the model.

use serde::Serialize;

/// Tokens of a request and of its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of all choices.
    pub completion_tokens: u64,
    /// The sum of both.
    pub total_tokens: u64,
}

impl Usage {
    /// The usage of prompts and choices with these numbers of tokens.
    pub fn of(
        prompts: impl IntoIterator<Item = u32>,
        choices: impl IntoIterator<Item = u32>,
    ) -> Self {
        let sum = |numbers: &mut dyn Iterator<Item = u32>| numbers.map(u64::from).sum::<u64>();
        let prompt_tokens = sum(&mut prompts.into_iter());
        let completion_tokens = sum(&mut choices.into_iter());
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}
