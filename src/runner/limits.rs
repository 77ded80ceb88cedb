//! What a runner's buffers are sized for.

use std::num::NonZeroU32;

use super::precision::WeightPrecision;
use crate::base::{BlockSize, Blocks, Tokens};
use crate::device::KvDtype;
use crate::engine::EngineConfig;

/// The largest step there will be, and the KV pool: the engine's limits as the runner needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// Tokens in one step, at most.
    pub max_num_tokens: Tokens,
    /// Sequences in one step, at most; each beam is one.
    pub max_num_requests: u32,
    /// Rows of logits in one step that tokens are chosen from, at most: one for each sequence, and one for
    /// each of its drafts.
    pub max_sampled_rows: Tokens,
    /// Positions of one sequence, at most.
    pub max_seq_len: Tokens,
    /// Positions per KV block.
    pub block_size: BlockSize,
    /// Blocks of the KV pool.
    pub num_blocks: Blocks,
    /// What keys and values are stored as.
    pub kv_dtype: KvDtype,
    /// What the weights of a float checkpoint are rounded to, if not to bf16.
    pub weights: Option<WeightPrecision>,
    /// What queries see, besides what the model limits itself.
    pub attention: AttentionLimits,
}

impl RunnerLimits {
    /// What an engine's steps need, with weights, keys and values in bf16, and attention over everything.
    pub fn of(config: &EngineConfig) -> Self {
        Self {
            max_num_tokens: config.max_num_tokens,
            max_num_requests: config.max_sequences(),
            max_sampled_rows: config.max_sampled_rows(),
            max_seq_len: config.max_seq_len,
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            kv_dtype: KvDtype::Bf16,
            weights: None,
            attention: AttentionLimits::default(),
        }
    }
}

/// How far attention looks back, as a deployment limits it. The default is: over everything.
///
/// The query at position `q` of a layer with a window `w` sees the positions above `q - w`, its own
/// included, and all below `num_sinks` (StreamingLLM; Xiao et al., arXiv:2309.17453). So it sees up to
/// `w + num_sinks`. Positions are never renumbered: angles are those of the whole text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionLimits {
    /// The layers' windows, `max_attention_window_size`. A list shorter than the layers is repeated,
    /// as in TensorRT-LLM; an empty one limits nothing. A model's own window counts where it is smaller.
    pub windows: Vec<NonZeroU32>,
    /// Positions from the first on that every windowed layer sees besides, `sink_token_length`.
    pub num_sinks: Tokens,
}

impl AttentionLimits {
    /// The window of a layer, before the model's own is considered.
    pub fn window(&self, layer: usize) -> Option<NonZeroU32> {
        self.windows.get(layer % self.windows.len().max(1)).copied()
    }

    /// The largest of some layers' windows: what a sequence must keep besides the sinks. `None` if one
    /// of them sees all of `max_seq_len` positions.
    pub fn largest(
        &self,
        windows: impl IntoIterator<Item = Option<NonZeroU32>>,
        max_seq_len: Tokens,
    ) -> Option<Tokens> {
        windows
            .into_iter()
            .map(|window| Tokens(window.map_or(u32::MAX, NonZeroU32::get)))
            .max()
            .filter(|&window| max_seq_len.saturating_sub(window) > self.num_sinks)
    }
}
