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

/// The tokens of each prompt and of each choice so far.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Of each prompt.
    pub prompts: Vec<u32>,
    /// Of each choice.
    pub choices: Vec<u32>,
}

impl Counts {
    /// No tokens yet.
    pub fn new(num_prompts: usize, num_choices: usize) -> Self {
        Self {
            prompts: vec![0; num_prompts],
            choices: vec![0; num_choices],
        }
    }

    /// The sums.
    pub fn usage(&self) -> Usage {
        let sum = |numbers: &[u32]| numbers.iter().copied().map(u64::from).sum::<u64>();
        let (prompt_tokens, completion_tokens) = (sum(&self.prompts), sum(&self.choices));
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}
