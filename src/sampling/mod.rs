//! L1: how the next token is chosen and when a sequence ends. Pure functions over logits and tokens.
//!
//! ```text
//! logits -- processors (post-processor, guide, bias, what is forbidden, penalties) --> argmax     (greedy)
//!        \                                                                         \-> cut --> draw   (random)
//!         \-- as they are --> log-probabilities of what was chosen
//!         \-- their logarithms of probabilities -- processors --> candidates of a beam --> beam search
//! ```
//!
//! Nothing here knows of a batch, a step, a clock or another request, so a request's tokens cannot
//! depend on them.

mod beam_search;
mod draw;
mod error;
mod exp;
mod guide;
mod history;
mod log_probs;
mod logits_processor;
mod params;
mod peaks;
mod processors;
mod random;
#[cfg(test)]
mod reference;
mod sampler;
mod stop;
mod stop_text;
mod top_p_decay;
mod truncation;

pub use beam_search::{
    BeamCandidate, BeamSearch, Continuation, EarlyStopping, Hypotheses, Hypothesis, Selection,
};
pub use error::SampleError;
pub use guide::{Guide, GuideTokens};
pub use log_probs::{LogProbs, TokenLogProb, TokenLogProbs};
pub use logits_processor::{
    BatchRow, LogitsProcessor, ProcessBatch, ProcessLogits, prepare_batches,
};
pub use params::{Owner, SamplingInput, SamplingParams};
pub use processors::{forbid, forbid_all_but};
pub use sampler::Sampler;
pub use stop::{Endings, FinishReason, StopRule};
pub use stop_text::{ReadText, StopText};
pub use top_p_decay::TopPDecay;
