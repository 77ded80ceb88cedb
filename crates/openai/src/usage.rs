//! The tokens of a request, counted by the model.

use serde::Serialize;

use crate::generation::{Details, Reply};

/// Tokens of a request and of its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of all choices.
    pub completion_tokens: u64,
    /// The sum of both.
    pub total_tokens: u64,
    /// Of the prompts' tokens.
    pub prompt_tokens_details: PromptDetails,
    /// Of the choices' tokens.
    pub completion_tokens_details: CompletionDetails,
}

/// Tokens of the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    /// Tokens that were in the model's KV cache.
    pub cached_tokens: u64,
}

/// Tokens of all choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionDetails {
    /// Tokens of the reasoning.
    pub reasoning_tokens: u64,
    /// Tokens of `prediction` that are in the answer.
    pub accepted_prediction_tokens: u64,
    /// Tokens of `prediction` that were computed in vain.
    pub rejected_prediction_tokens: u64,
}

/// The tokens of each prompt and of each choice so far.
#[derive(Clone, Debug)]
pub struct Counts {
    prompts: Vec<(u32, Details)>,
    /// Of each choice.
    pub choices: Vec<u32>,
}

impl Counts {
    /// No tokens yet.
    pub fn new(num_prompts: usize, num_choices: usize) -> Self {
        Self {
            prompts: vec![(0, Details::default()); num_prompts],
            choices: vec![0; num_choices],
        }
    }

    /// Notes the tokens of a prompt, and what else a reply to it counts.
    pub fn note(&mut self, prompt: usize, reply: &Reply) {
        let (num_tokens, details) = &mut self.prompts[prompt];
        *num_tokens = reply.num_prompt_tokens;
        *details = reply.usage.unwrap_or(*details);
    }

    /// The sums.
    pub fn usage(&self) -> Usage {
        let of_prompts = |count: fn(&(u32, Details)) -> u32| {
            let counts = self.prompts.iter().map(count);
            counts.map(u64::from).sum::<u64>()
        };
        let prompt_tokens = of_prompts(|(num_tokens, _)| *num_tokens);
        let completion_tokens = self.choices.iter().copied().map(u64::from).sum();
        let num_drafted = of_prompts(|(_, details)| details.num_draft_tokens);
        let num_accepted = of_prompts(|(_, details)| details.num_accepted_draft_tokens);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails {
                cached_tokens: of_prompts(|(_, details)| details.num_cached_tokens),
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: of_prompts(|(_, details)| details.num_reasoning_tokens),
                accepted_prediction_tokens: num_accepted,
                rejected_prediction_tokens: num_drafted.saturating_sub(num_accepted),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prompts_and_choices_are_summed_up_and_the_last_counts_hold() {
        let reply = |num_prompt_tokens, usage: Option<&str>| Reply {
            num_prompt_tokens,
            usage: usage.map(|text| serde_json::from_str(text).expect("counts")),
            ..Reply::default()
        };
        let mut counts = Counts::new(2, 0);
        counts.choices.extend([3, 4]);
        counts.note(0, &reply(7, Some("{\"num_cached_tokens\": 6}")));
        counts.note(0, &reply(7, None));
        assert_eq!(counts.usage().prompt_tokens_details.cached_tokens, 6);
        let last = json!({
            "num_cached_tokens": 32, "num_reasoning_tokens": 2, "num_draft_tokens": 5, "num_accepted_draft_tokens": 4,
        });
        counts.note(1, &reply(40, Some(&last.to_string())));
        let expected = json!({
            "prompt_tokens": 47,
            "completion_tokens": 7,
            "total_tokens": 54,
            "prompt_tokens_details": {"cached_tokens": 38},
            "completion_tokens_details": {
                "reasoning_tokens": 2, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1,
            },
        });
        assert_eq!(json!(counts.usage()), expected);
    }
}
