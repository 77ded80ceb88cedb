//! The sampling options of a request, and what the sampler is given for each token. The logits processor is one of
//! the options and is given the same, so it is defined here too.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::base::{ClientId, SequenceId, TokenId};
use crate::sampling::{BeamSearch, Guide, SampleError, StopText, TopPDecay};

/// The sampling options of one request, checked: every value is in its range.
///
/// The ranges are what a client may ask for. The sampler gives a token for any number at all, so
/// that a slip in their check is never a panic.
///
/// What can be large is shared by all that are cloned of one: the sequences of a request differ in seed and
/// processor alone.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 to 100. `0` is greedy: the most likely token, the lowest id on a tie.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens, the lowest ids on a tie; `0` keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this; above
    /// 0, at most 1. `1` keeps all.
    pub top_p: f32,
    /// How `top_p` falls as the output grows; `None` keeps it as it is.
    pub top_p_decay: Option<TopPDecay>,
    /// Keep the tokens at least this fraction as likely as the most likely one; 0 to 1. `0` keeps
    /// all.
    pub min_p: f32,
    /// Keep the tokens whose information is nearest to the expected one, until their probabilities
    /// sum to at least this; above 0, at most 1. `1` keeps all.
    pub typical_p: f32,
    /// Seeds the request's own random numbers, which depend on nothing else in the batch.
    pub seed: u64,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; above 0, at
    /// most 100. `1` is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token in the output; -100 to 100. `0` is off.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token is in the output; -100 to 100. `0` is off.
    pub frequency_penalty: f32,
    /// So many tokens at the beginning of the prompt are nothing to the presence and the frequency
    /// penalty; those of the prompt after them count like the output. `u32::MAX`: none count.
    pub prompt_ignore_length: u32,
    /// No run of so many tokens may occur twice in prompt and output; at most 64. `0` is off.
    pub no_repeat_ngram_size: u32,
    /// The end ids and the stop ids cannot be chosen before this many tokens have been generated.
    pub min_tokens: u32,
    /// Tokens that end the sequence; empty when the request ignores them.
    pub end_ids: Vec<TokenId>,
    /// Tokens that end the sequence like a stop word, whatever becomes of the end ids.
    pub stop_token_ids: Vec<TokenId>,
    /// The only tokens that may be chosen, sorted; `None` is all.
    pub allowed_token_ids: Option<Arc<[TokenId]>>,
    /// Token sequences, none empty, that the output must not complete; their beginning may lie in
    /// the prompt.
    pub bad_words: Arc<[Vec<TokenId>]>,
    /// Added to single tokens' logits, sorted by token; finite, or minus infinity, which forbids the token.
    pub logit_bias: Arc<[(TokenId, f32)]>,
    /// What says which tokens may come next.
    pub guide: Option<Guide>,
    /// What changes the logits before all of the above.
    pub logits_processor: Option<LogitsProcessor>,
    /// Searches for the most likely texts, in the place of choosing token by token: then nothing is drawn,
    /// and temperature, cuts and seed are of no account.
    pub beam_search: Option<BeamSearch>,
    /// What reads the text of each beam, and says where it ends. Nobody else is read by it.
    pub stop_text: Option<StopText>,
}

impl Default for SamplingParams {
    /// Greedy, nothing penalised, nothing forbidden, no end id.
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
    /// Whether the next token is the most likely one, with no random number drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// How many beams it searches with; 1 without beam search.
    pub fn beam_width(&self) -> u32 {
        self.beam_search.map_or(1, |search| search.width)
    }

    /// How many tokens end a text by being chosen.
    fn num_end_ids(&self) -> usize {
        self.end_ids.len() + self.stop_token_ids.len()
    }

    /// How many candidates each beam of `search` has to name for its next token. Any token may complete a
    /// stop word; with twice as many as there are beams, as in TensorRT-LLM, enough are left to go on with in
    /// all but odd cases, and in those fewer beams go on.
    pub fn num_candidates(&self, search: &BeamSearch) -> usize {
        let num_by_text = match self.stop_text {
            None => 0,
            Some(_) => search.width as usize,
        };
        search.num_candidates(self.num_end_ids() + num_by_text)
    }
}

/// Everything that decides a sequence's next token besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct SamplingInput<'a> {
    /// The request's options.
    pub params: &'a SamplingParams,
    /// Prompt and generated tokens, in order.
    pub tokens: &'a [TokenId],
    /// How many of `tokens` are the prompt.
    pub num_prompt_tokens: usize,
    /// Which of the request's beams it is; 0 unless it searches with several.
    pub beam: u32,
    /// Whose tokens they are.
    pub owner: Owner,
}

/// A sequence, and who has sent its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its client, if the request says: not unique, any number of requests may have the same.
    pub client: Option<ClientId>,
}

impl<'a> SamplingInput<'a> {
    /// The tokens generated so far.
    pub fn generated(&self) -> &'a [TokenId] {
        &self.tokens[self.num_prompt_tokens..]
    }
}

/// Changes the logits that one request's next token is chosen from (the logits post-processor of
/// TensorRT-LLM's Batch Manager). Each request brings its own, and one may serve several: whose logits they are,
/// and of which client, stands in the input's [`Owner`](crate::sampling::Owner).
///
/// What it does depends on nothing but the logits and the input that it is given, so that a sequence may be
/// paused, resumed and computed in any batch.
pub trait ProcessLogits: Any + Send + Sync {
    /// Changes `logits`, `[vocab_size]`, of the token that follows `input.tokens`.
    ///
    /// Called in the step, on any of the runner's threads: the others wait for it. A logit that is not a
    /// number afterwards ends the request with an error, and so does leaving none above `-inf`.
    ///
    /// # Errors
    /// It cannot; the request ends with it. [`SampleError::ProcessorFailed`] leaves the reason to
    /// [`ProcessLogits::failure`].
    fn process(&self, logits: &mut [f32], input: SamplingInput<'_>) -> Result<(), SampleError>;

    /// What prepares it, if it works on all sequences of a step together with the others of its kind. Then
    /// [`ProcessLogits::process`] only takes over what has been prepared.
    fn batch(&self) -> Option<&dyn ProcessBatch> {
        None
    }

    /// Why it has failed, for the request's client; `None` if it has not, or has nothing to say.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Works on the logits of several sequences at once. What it does to one of them depends on nothing of the
/// others.
pub trait ProcessBatch: Send + Sync {
    /// Called once a step with all sequences whose [`ProcessLogits::batch`] is this, before any of them is
    /// processed. What comes of it, it leaves with their processors.
    fn prepare(&self, rows: &[BatchRow<'_>]);
}

/// A token that is to be chosen.
#[derive(Clone, Copy)]
pub struct BatchRow<'a> {
    /// Its request's processor.
    pub processor: &'a dyn ProcessLogits,
    /// The model's, `[vocab_size]`, where [`ProcessLogits::process`] will get them.
    pub logits: &'a [f32],
    /// What came before it.
    pub input: SamplingInput<'a>,
}

/// A shared [`ProcessLogits`]. Two are equal if they are the same one.
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
