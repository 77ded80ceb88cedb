//! The volume of a request: how many tokens its prompt has, and how many it may generate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::request::options::canonical_name;
use inflight_base::Tokens;
use inflight_config::InputKind;
use inflight_engine::Volume;
use inflight_triton::{Error, ParameterValue, Request, strings};

/// A token of a text, in bytes, before any text has been tokenised.
const FIRST_GUESS: u64 = 4;

/// Reads the volumes of requests, without tokenising or parsing them.
#[derive(Clone, Debug)]
pub struct VolumeReader {
    /// What prompts are.
    pub input: InputKind,
    /// The tokens of a request that does not say how many it wants.
    pub default_max_tokens: u32,
    /// How long texts are in tokens.
    pub text_lengths: Arc<TextLengths>,
}

/// How many tokens the texts of a model have had.
#[derive(Debug)]
pub struct TextLengths {
    num_bytes: AtomicU64,
    num_tokens: AtomicU64,
}

impl Default for TextLengths {
    fn default() -> Self {
        Self {
            num_bytes: AtomicU64::new(FIRST_GUESS),
            num_tokens: AtomicU64::new(1),
        }
    }
}

impl TextLengths {
    /// Counts a text that was tokenised.
    pub fn add(&self, num_bytes: usize, num_tokens: usize) {
        self.num_bytes
            .fetch_add(num_bytes as u64, Ordering::Relaxed);
        self.num_tokens
            .fetch_add(num_tokens as u64, Ordering::Relaxed);
    }

    /// How many tokens a text probably has: as many for its bytes as the texts before it.
    fn guess(&self, num_bytes: usize) -> Tokens {
        let per = |count: &AtomicU64| u128::from(count.load(Ordering::Relaxed).max(1));
        let num_tokens = (num_bytes as u128 * per(&self.num_tokens)).div_ceil(per(&self.num_bytes));
        Tokens(u32::try_from(num_tokens).unwrap_or(u32::MAX))
    }
}

impl VolumeReader {
    /// The volume of a request. One that cannot be read has none: it is refused when it is handed over.
    pub fn read(&self, request: &Request) -> Volume {
        let volume = self.try_read(request);
        volume.unwrap_or(Volume {
            prompt: Tokens::ZERO,
            output: Tokens::ZERO,
        })
    }

    fn try_read(&self, request: &Request) -> Result<Volume, Error> {
        let is_max = |name: &str| canonical_name(name) == Some("max_tokens");
        let mut max_tokens = None;
        for parameter in request.parameters(|_| 0)? {
            if let (name, ParameterValue::Int(value)) = parameter?
                && is_max(name)
            {
                max_tokens = u32::try_from(value).ok();
            }
        }
        let mut prompt = Tokens::ZERO;
        for input in request.inputs()? {
            if input.name() == self.input.name() {
                prompt = match self.input {
                    InputKind::Text => {
                        let num_bytes = input.num_bytes().saturating_sub(strings::LENGTH_BYTES);
                        self.text_lengths.guess(num_bytes)
                    }
                    InputKind::Ids => Tokens((input.num_bytes() / size_of::<i32>()) as u32),
                };
            } else if is_max(input.name()) && input.num_bytes() == size_of::<i32>() {
                let value = input.elements_in::<i32>(0..1)?.first().copied();
                max_tokens = value.and_then(|value| u32::try_from(value).ok());
            }
        }
        Ok(Volume {
            prompt,
            output: Tokens(max_tokens.unwrap_or(self.default_max_tokens)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_a_text_are_guessed_from_those_before() {
        let lengths = TextLengths::default();
        assert_eq!(lengths.guess(0), Tokens(0));
        assert_eq!(lengths.guess(41), Tokens(11));
        // Three bytes a token: 4 + 296 bytes, 1 + 99 tokens.
        lengths.add(296, 99);
        assert_eq!(lengths.guess(30), Tokens(10));
        assert_eq!(lengths.guess(usize::MAX), Tokens(u32::MAX));
    }
}
