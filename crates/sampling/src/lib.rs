//! L1: how the next token is chosen and when a sequence ends. Pure functions over logits and tokens.
//!
//! ```text
//! logits -- processors (post-processor, guide, bias, forbidden tokens, penalties) --> argmax     (greedy)
//!        \                                                                         \-> cut --> draw   (random)
//!         \-- unchanged --> log-probabilities of the chosen token
//!         \-- log-softmax -- processors --> candidates of a beam --> beam search
//! ```
//!
//! Nothing here knows of a batch, a step, a clock or another request, so a request's tokens cannot depend on them.

#![forbid(unsafe_code)]

mod beam_search;
mod candidate;
mod device_sampling;
mod draw;
mod error;
mod exp;
mod finish_reason;
mod guide;
mod history;
mod id_words;
mod largest;
mod log_probs;
mod logit_changes;
mod params;
mod peaks;
mod plain_sampling;
mod processor_batches;
mod processors;
mod random;
#[cfg(test)]
mod reference;
mod sampler;
mod stop;
mod stop_text;
mod token_log_probs;
mod top_p_decay;
mod truncation;

pub use beam_search::{
    BeamCandidate, BeamSearch, Continuation, EarlyStopping, Hypotheses, Hypothesis, Selection,
};
pub use device_sampling::DeviceSampling;
pub use error::SampleError;
pub use finish_reason::FinishReason;
pub use guide::{Guide, GuideCost, GuideTokens};
pub use id_words::words_of_ids;
pub use largest::Largest;
pub use log_probs::LogProbs;
pub use logit_changes::{ChangeLists, LogitChanges};
pub use params::{
    BatchRow, LogitsProcessor, Owner, ProcessBatch, ProcessLogits, SamplingInput, SamplingParams,
};
pub use plain_sampling::PlainSampling;
pub use processor_batches::prepare_batches;
pub use processors::{forbid, forbid_all_but};
pub use sampler::Sampler;
pub use stop::{Endings, StopRule};
pub use stop_text::{ReadText, StopText};
pub use token_log_probs::{TokenLogProb, TokenLogProbs};
pub use top_p_decay::TopPDecay;
