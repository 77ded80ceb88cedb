//! The sampler: logits and options in, one token out.

use crate::candidate::{Candidate, Cut};
use crate::draw::{Masses, Softmax};
use crate::history::History;
use crate::log_probs::find_best;
use crate::peaks::Peaks;
use crate::processors::process;
use crate::random::uniform;
use crate::truncation::Truncation;
use crate::{BeamCandidate, SampleError, SamplingInput};
use inflight_base::TokenId;

/// Chooses tokens. It keeps nothing between calls but scratch memory, sized once: a call allocates nothing, and any
/// sampler of the same vocabulary gives the same token.
///
/// The order is as in the logits processors of Hugging Face transformers (`generate`), with the
/// penalties of the OpenAI API where vLLM has them, after the repetition penalty:
///
/// | step | source |
/// |---|---|
/// | the request's own `logits_processor` | TensorRT-LLM's Batch Manager |
/// | what the `guide` does not allow forbidden | Willard and Louf, "Efficient guided generation for large language models", 2023 |
/// | `logit_bias` added | OpenAI API |
/// | last tokens of `bad_words` forbidden where the sequence ends with the others | transformers `NoBadWordsLogitsProcessor` |
/// | all but `allowed_token_ids` forbidden | vLLM |
/// | end ids and stop ids forbidden before `min_tokens` | transformers `MinNewTokensLengthLogitsProcessor` |
/// | `repetition_penalty` over prompt and output | Keskar et al., "CTRL", 2019 |
/// | `frequency_penalty`, `presence_penalty` over the output | OpenAI API |
/// | both penalties over the prompt from `prompt_ignore_length` on | TensorRT-LLM |
/// | last tokens of n-grams that have occurred forbidden, n being `no_repeat_ngram_size` | transformers `NoRepeatNGramLogitsProcessor` |
/// | greedy: the most likely token, the lowest id on a tie | |
/// | `temperature` | |
/// | `top_k`: exactly k, the lowest ids on a tie | Fan et al., 2018 |
/// | `top_p`: of what is left | Holtzman et al., 2020 |
/// | `top_p_decay`: `top_p` falls from token to token | Lee et al., 2022, as in TensorRT-LLM |
/// | `min_p`: relative to the most likely | Nguyen et al., 2024 |
/// | `typical_p`: of what is left, the nearest to the entropy | Meister et al., 2023 |
/// | draw: the inverse of the cumulative distribution at a Philox number of seed and number of generated tokens | Salmon et al., 2011 |
///
/// Forbidding commutes with the rest, since `-inf` stays `-inf`.
pub struct Sampler {
    vocab_size: usize,
    history: History,
    peaks: Peaks,
    truncation: Truncation,
    masses: Masses,
    /// The most likely tokens of a beam, the best first.
    best: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for rows of `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            history: History::new(vocab_size),
            peaks: Peaks::new(vocab_size),
            truncation: Truncation::new(vocab_size),
            masses: Masses::new(vocab_size),
            best: Vec::new(),
        }
    }

    /// The next token of a sequence, given its `logits`, `[vocab_size]`, which it changes.
    ///
    /// A pure function of its arguments: the same bits give the same token on every machine. It costs one pass over the
    /// logits if greedy, a few otherwise, and with penalties one over the output (over prompt and output with the
    /// repetition penalty or `no_repeat_ngram_size`).
    ///
    /// # Panics
    ///
    /// If the length of `logits` is not the size of the vocabulary.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        input: SamplingInput<'_>,
    ) -> Result<TokenId, SampleError> {
        assert_eq!(logits.len(), self.vocab_size, "one logit per token");
        self.process(logits, input)?;
        Ok(self.choose(logits, input))
    }

    /// The same, if the options have changed `logits` already.
    ///
    /// # Panics
    ///
    /// As above.
    pub fn sample_changed(
        &mut self,
        logits: &[f32],
        input: SamplingInput<'_>,
    ) -> Result<TokenId, SampleError> {
        assert_eq!(logits.len(), self.vocab_size, "one logit per token");
        self.peaks.find(logits)?;
        Ok(self.choose(logits, input))
    }

    /// The token, once the peaks are found.
    fn choose(&mut self, logits: &[f32], input: SamplingInput<'_>) -> TokenId {
        let params = input.params;
        if params.is_greedy() {
            return self.peaks.argmax(logits);
        }
        let softmax = Softmax {
            max: self.peaks.max(),
            temperature: params.temperature,
        };
        let cut = self.cut(logits, softmax, input);
        let position = uniform(params.seed, input.generated().len() as u64);
        self.masses
            .draw(logits, &self.peaks, softmax, cut, position)
    }

    /// The `num` most likely next tokens of a beam, given its `logits`, which it changes; fewer if no more
    /// are allowed.
    ///
    /// As in Hugging Face transformers, the options change the log-softmax, not the logits; it is computed in one fixed
    /// order. Nothing is drawn or truncated.
    ///
    /// # Panics
    ///
    /// If the length of `logits` is not the size of the vocabulary.
    pub fn candidates(
        &mut self,
        logits: &mut [f32],
        input: SamplingInput<'_>,
        num: usize,
    ) -> Result<Vec<BeamCandidate>, SampleError> {
        assert_eq!(logits.len(), self.vocab_size, "one logit per token");
        self.peaks.find(logits)?;
        let max = self.peaks.max();
        let softmax = Softmax {
            max,
            temperature: 1.0,
        };
        let log_total = self.masses.of_all(logits, softmax).ln();
        for logit in &mut *logits {
            *logit = (f64::from(*logit) - f64::from(max) - log_total) as f32;
        }
        self.process(logits, input)?;
        find_best(logits, &self.peaks, num, &mut self.best);
        let named = self.best.iter().map(|best| BeamCandidate {
            token: best.id(),
            log_prob: best.logit(),
        });
        Ok(named.collect())
    }

    /// Applies the request's options, and finds the peaks of the result.
    fn process(&mut self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError> {
        let params = input.params;
        if let Some(processor) = &params.logits_processor {
            processor.0.process(logits, input)?;
        }
        if let Some(guide) = &params.guide {
            guide.0.restrict(logits, input.generated())?;
        }
        let has_repeats = process(logits, input, &mut self.history);
        match self.peaks.find(logits) {
            Err(SampleError::NoneAllowed) if has_repeats => Err(SampleError::OnlyRepeats),
            result => result,
        }
    }

    /// The tokens that may be drawn.
    fn cut(&mut self, logits: &[f32], softmax: Softmax, input: SamplingInput<'_>) -> Option<Cut> {
        self.truncation.cut(
            logits,
            &self.peaks,
            softmax,
            input.params,
            input.top_p(),
            &mut self.masses,
        )
    }
}

#[cfg(test)]
mod tests;
