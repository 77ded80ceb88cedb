//! The sampling options of a request, and the sampler's inputs for each token. A logits processor is one of
//! the options and has those inputs too, so it is defined here.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{BeamSearch, Guide, SampleError, StopText, TopPDecay};
use inflight_base::{ClientId, SequenceId, TokenId};

/// The sampling options of one request, checked: every value is in its range.
///
/// The ranges are what a client may ask for. The sampler handles any number, so that a gap in the checks is never a
/// panic.
///
/// Large fields are shared between clones: the sequences of a request differ only in seed and processor.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 to 100. `0` is greedy: the most likely token, the lowest id on a tie.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens, the lowest ids on a tie; `0` keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this; above
    /// 0, at most 1. `1` keeps all.
    pub top_p: f32,
    /// How `top_p` falls as the output grows; `None`: it is constant.
    pub top_p_decay: Option<TopPDecay>,
    /// Keep the tokens at least this fraction as likely as the most likely one; 0 to 1. `0` keeps
    /// all.
    pub min_p: f32,
    /// Keep the tokens whose information is nearest to the entropy, until their probabilities sum to at
    /// least this; above 0, at most 1. `1` keeps all.
    pub typical_p: f32,
    /// Seeds the request's random numbers, which are independent of the batch.
    pub seed: u64,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; above 0, at
    /// most 100. `1` is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token in the output; -100 to 100. `0` is off.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token is in the output; -100 to 100. `0` is off.
    pub frequency_penalty: f32,
    /// The presence and frequency penalties ignore this many tokens at the beginning of the prompt; the rest of
    /// the prompt counts like the output. `u32::MAX`: the whole prompt is ignored.
    pub prompt_ignore_length: u32,
    /// No n-gram of this size may occur twice in prompt and output; at most 64. `0` is off.
    pub no_repeat_ngram_size: u32,
    /// The end ids and the stop ids cannot be chosen before this many tokens have been generated.
    pub min_tokens: u32,
    /// Tokens that end the sequence; empty when the request ignores them.
    pub end_ids: Vec<TokenId>,
    /// Tokens that end the sequence like a stop word, even if the request ignores end ids.
    pub stop_token_ids: Vec<TokenId>,
    /// The only tokens that may be chosen, sorted; `None` is all.
    pub allowed_token_ids: Option<Arc<[TokenId]>>,
    /// Token sequences, none empty, that the output must not complete. They may begin in the prompt.
    pub bad_words: Arc<[Vec<TokenId>]>,
    /// Added to the logits of single tokens, sorted by token; finite, or minus infinity to forbid the token.
    pub logit_bias: Arc<[(TokenId, f32)]>,
    /// Guided decoding: which tokens may come next.
    pub guide: Option<Guide>,
    /// The logits post-processor. It changes the logits before all of the above.
    pub logits_processor: Option<LogitsProcessor>,
    /// Beam search instead of sampling: temperature, top-k, top-p, min-p, typical-p and seed have no effect.
    pub beam_search: Option<BeamSearch>,
    /// Detects stop words in the text of each beam. Used by beam search only.
    pub stop_text: Option<StopText>,
}

impl Default for SamplingParams {
    /// Greedy, without penalties, forbidden tokens and end ids.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            top_p_decay: None,
            min_p: 0.0,
            typical_p: 1.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            prompt_ignore_length: u32::MAX,
            no_repeat_ngram_size: 0,
            min_tokens: 0,
            end_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            allowed_token_ids: None,
            bad_words: Arc::default(),
            logit_bias: Arc::default(),
            guide: None,
            logits_processor: None,
            beam_search: None,
            stop_text: None,
        }
    }
}

impl SamplingParams {
    /// Whether the most likely token is chosen, without a random number.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// The number of beams; 1 without beam search.
    pub fn beam_width(&self) -> u32 {
        self.beam_search.map_or(1, |search| search.width)
    }

    /// The number of token ids that end a text.
    fn num_end_ids(&self) -> usize {
        self.end_ids.len() + self.stop_token_ids.len()
    }

    /// How many candidates each beam of `search` needs. Any token may complete a stop word. With twice as many
    /// candidates as beams, as in TensorRT-LLM, enough are left in all but rare cases; in those, fewer beams survive.
    pub fn num_candidates(&self, search: &BeamSearch) -> usize {
        let num_by_text = match self.stop_text {
            None => 0,
            Some(_) => search.width as usize,
        };
        search.num_candidates(self.num_end_ids() + num_by_text)
    }
}

/// What, apart from the logits, determines the next token of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct SamplingInput<'a> {
    /// The request's options.
    pub params: &'a SamplingParams,
    /// Prompt and generated tokens, in order.
    pub tokens: &'a [TokenId],
    /// How many of `tokens` are the prompt.
    pub num_prompt_tokens: usize,
    /// The beam; 0 without beam search.
    pub beam: u32,
    /// The sequence and its client.
    pub owner: Owner,
}

/// A sequence and its client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The sequence.
    pub sequence: SequenceId,
    /// The client, if the request names one. Not unique: any number of requests may name one client.
    pub client: Option<ClientId>,
}

impl<'a> SamplingInput<'a> {
    /// The tokens generated so far.
    pub fn generated(&self) -> &'a [TokenId] {
        &self.tokens[self.num_prompt_tokens..]
    }

    /// Whether the next token may not end the sequence, because of `min_tokens`.
    pub(super) fn must_go_on(&self) -> bool {
        self.generated().len() < self.params.min_tokens as usize
    }

    /// `top_p` of the next token, after its decay.
    pub(super) fn top_p(&self) -> f32 {
        match &self.params.top_p_decay {
            None => self.params.top_p,
            Some(decay) => decay.top_p(self.params.top_p, self.generated()),
        }
    }
}

/// Changes the logits from which the next token of a sequence is chosen (the logits post-processor of TensorRT-LLM's
/// Batch Manager). Each request has its own, or several share one: the input's [`Owner`] tells which request the
/// logits belong to.
///
/// The result depends only on the logits and the input, so that a sequence can be paused, resumed and computed in any
/// batch.
pub trait ProcessLogits: Any + Send + Sync {
    /// Changes `logits`, `[vocab_size]`, of the token that follows `input.tokens`.
    ///
    /// Called within the step, on any of the runner's threads, while the others wait. If a logit is NaN afterwards, or
    /// none is above `-inf`, the request ends with an error.
    ///
    /// # Errors
    /// The processor failed; the request ends with the error. [`ProcessLogits::failure`] has the reason for
    /// [`SampleError::ProcessorFailed`].
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError>;

    /// The batch processor that prepares the results, if all sequences of a step are processed at once. Then
    /// [`ProcessLogits::process`] only copies what was prepared.
    fn batch(&self) -> Option<&dyn ProcessBatch> {
        None
    }

    /// Why it has failed, for the client; `None` if it has not, or gives no reason.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Processes the logits of several sequences at once. The result for one does not depend on the others.
pub trait ProcessBatch: Send + Sync {
    /// Called once a step with all sequences whose [`ProcessLogits::batch`] is this, before any of them is processed.
    /// It leaves the results with their processors.
    fn prepare(&self, rows: &[BatchRow<'_>]);
}

/// A row of logits from which a token will be chosen.
#[derive(Clone, Copy)]
pub struct BatchRow<'a> {
    /// The processor of its request.
    pub processor: &'a dyn ProcessLogits,
    /// The model's logits, `[vocab_size]`, at the address where [`ProcessLogits::process`] will get them.
    pub logits: &'a [f32],
    /// The options and tokens of its sequence.
    pub input: SamplingInput<'a>,
}

/// A shared [`ProcessLogits`]. Two are equal if they are one object.
#[derive(Clone)]
pub struct LogitsProcessor(pub Arc<dyn ProcessLogits>);

impl fmt::Debug for LogitsProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogitsProcessor")
    }
}

impl PartialEq for LogitsProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EarlyStopping, GuideCost, GuideTokens, ReadText};

    /// Changes nothing, forbids nothing, and ends no text.
    struct Idle;

    impl ProcessLogits for Idle {
        fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
            Ok(())
        }
    }

    impl GuideTokens for Idle {
        fn fresh(&self) -> Guide {
            Guide(Arc::new(Self))
        }

        fn prepare(&self, _: &[TokenId], _: &[TokenId]) {}

        fn is_ready(&self, _: &[TokenId]) -> bool {
            true
        }

        fn cost(&self) -> GuideCost {
            GuideCost::default()
        }

        fn give_up(&self) {}

        fn restrict(&self, _: &mut [f32], _: &[TokenId]) -> Result<(), SampleError> {
            Ok(())
        }
    }

    impl ReadText for Idle {
        fn push(&mut self, _: TokenId) -> bool {
            false
        }

        fn fork(&self) -> Box<dyn ReadText> {
            Box::new(Self)
        }
    }

    #[test]
    fn objects_that_options_share_are_equal_if_they_are_one() {
        let options: [fn(&mut SamplingParams); 3] = [
            |params| params.guide = Some(Guide(Arc::new(Idle))),
            |params| params.logits_processor = Some(LogitsProcessor(Arc::new(Idle))),
            |params| params.stop_text = Some(StopText(Arc::new(Idle))),
        ];
        for (index, option) in options.into_iter().enumerate() {
            let [one, other] = [(); 2].map(|()| {
                let mut params = SamplingParams::default();
                option(&mut params);
                params
            });
            assert_eq!(one, one.clone(), "option {index}");
            assert_ne!(one, other, "option {index}");
        }
    }

    #[test]
    fn processors_and_guides_need_no_batch_and_give_no_reasons() {
        assert!(Idle.batch().is_none());
        assert_eq!(Idle.failure(), None);
        assert_eq!(Idle.explain(SampleError::GuideFailed), None);
    }

    #[test]
    fn tokens_that_end_a_text_leave_enough_candidates_for_all_beams() {
        let search = BeamSearch {
            width: 4,
            num_returned: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Likely,
            diversity_rate: 0.0,
        };
        let mut params = SamplingParams {
            end_ids: vec![1, 2],
            stop_token_ids: vec![3, 4, 5],
            ..SamplingParams::default()
        };
        assert_eq!(params.beam_width(), 1);
        params.beam_search = Some(search);
        assert_eq!(params.beam_width(), 4);
        assert_eq!(params.num_candidates(&search), 4 + 5);
        params.stop_text = Some(StopText(Arc::new(Idle)));
        assert_eq!(params.num_candidates(&search), 4 + 5 + 4, "twice the beams");
    }
}
