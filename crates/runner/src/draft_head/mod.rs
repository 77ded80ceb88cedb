//! Heads: one layer that guesses the next tokens from hidden states of the model, for the model to verify.
//!
//! ```text
//! source.rs            the checkpoint of a head
//!   eagle_source.rs    of an EAGLE-3 head: sizes, weights, and the layers of the model that it reads
//!   mtp_source.rs      of a head for multi-token prediction: its weights among the model's
//! head_step.rs         what a head computes in a pass
//! head_layer.rs        its layer, of either kind
//!   eagle_layer.rs     with the weights of eagle_weights.rs
//!   mtp_layer.rs       with a layer of the model's decoder
//! shared.rs            what a head has in common with its model
//! state_tap.rs         the state that a forward pass of the model leaves for each of its tokens
//! state_store.rs       the states of all positions, in blocks of the numbers of the KV cache's
//! drafts.rs            the drafts of a step
//! ```
//!
//! The token at position `q` is computed together with the state at `q - 1`, at position `q - 1` of its KV cache:
//!
//! ```text
//! EAGLE-3
//! state[q]  = fc(inputs of three layers of the model at q)                 for tokens that the model has computed
//!           = what the head's own layer gave for q + 1                     for drafts
//! out       = layer(concat(norm(embedding of the token), norm(state)))     which adds to the state
//! draft     = token of the largest of lm_head(norm(out))                   in a vocabulary of its own
//!
//! multi-token prediction
//! state[q]  = what the output layer reads at q: normalised                 for tokens that the model has computed
//!           = norm(out) for q + 1                                          for drafts
//! out       = layer(projection(concat(norm(embedding of the token), norm(state))))     which is one of the model's
//! draft     = token of the largest of lm_head(norm(out))                   usually with the model's lm_head
//! ```
//!
//! So states and keys and values of the head are found again wherever those of the model are: after a pause, in host
//! memory, in a prefix that another sequence has computed. Only the last entry of a prefix that is shared may belong to
//! another token behind it, which makes no more than a worse draft.
//!
//! Sources: Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time test"
//! (arXiv:2503.01840), without its tree of drafts; the layouts of checkpoints are those of SafeAILab/EAGLE and of
//! vllm-project/speculators, as vLLM reads them (model_executor/models/llama_eagle3.py). DeepSeek-AI, "DeepSeek-V3
//! technical report" (arXiv:2412.19437), whose head predicts one more token; for more, the head is computed again
//! behind its own normalised output, which is what a further layer reads in `MtpModel` of transformers
//! (modeling_layers.py).

mod drafts;
mod eagle_layer;
mod eagle_source;
mod eagle_weights;
mod head_layer;
mod head_step;
mod mtp_layer;
mod mtp_source;
mod shared;
mod source;
mod state_store;
mod state_tap;

pub(super) use drafts::DraftHead;
pub(super) use shared::SharedWeights;
pub use source::HeadSource;
pub(super) use state_store::bytes_per_block as state_bytes_per_block;
pub(super) use state_tap::StateTap;
