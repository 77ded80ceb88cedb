//! An EAGLE-3 head: one layer that guesses the next tokens from hidden states of the model, for the model to verify.
//!
//! ```text
//! source.rs       its checkpoint: sizes, weights, and the layers of the model that it reads
//! weights.rs      the same on a device
//! state_tap.rs    the state that a forward pass of the model leaves for each of its tokens
//! state_store.rs  the states of all positions, in blocks of the numbers of the KV cache's
//! drafts.rs       the drafts of a step
//! ```
//!
//! The token at position `q` is computed together with the state at `q - 1`:
//!
//! ```text
//! state[q]  = fc(inputs of three layers of the model at q)                 for tokens that the model has computed
//!           = what the head's own layer gave for q + 1                     for drafts
//! x         = qkv(concat(norm(embedding of the token), norm(state)))       at position q - 1 of the head's KV cache
//! out       = state + o(attention(rope(x)));  out += down(silu(gate) * up of norm(out))
//! draft     = token of the largest of lm_head(norm(out))                   in a vocabulary of its own
//! ```
//!
//! So states and keys and values of the head are found again wherever those of the model are: after a pause, in host
//! memory, in a prefix that another sequence has computed. Only the last entry of a prefix that is shared may belong to
//! another token behind it, which makes no more than a worse draft.
//!
//! Source: Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time test"
//! (arXiv:2503.01840), without its tree of drafts; the layouts of checkpoints are those of SafeAILab/EAGLE and of
//! vllm-project/speculators, as vLLM reads them (model_executor/models/llama_eagle3.py).

mod drafts;
mod source;
mod state_store;
mod state_tap;
mod weights;

pub(super) use drafts::DraftHead;
pub use source::HeadSource;
pub(super) use state_store::bytes_per_block as state_bytes_per_block;
pub(super) use state_tap::StateTap;
