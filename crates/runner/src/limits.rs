//! The limits that a runner is sized for.

use std::num::NonZeroU32;

use super::precision::WeightPrecision;
use inflight_base::{BlockSize, Blocks, Tokens};
use inflight_device::{KvDtype, LayerGroups};
use inflight_engine::EngineConfig;

/// The largest step, and the KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// The most tokens in a step.
    pub max_num_tokens: Tokens,
    /// The most sequences in a step; each beam is one.
    pub max_num_requests: u32,
    /// Rows of recurrent states: one for each sequence, or for each beam that each may have.
    pub num_state_rows: u32,
    /// Snapshots of recurrent states.
    pub num_state_snapshots: u32,
    /// Snapshots in host memory, for those that the device gives up.
    pub num_host_state_snapshots: u32,
    /// The most drafts of a sequence in one step, behind which its recurrent states are kept until it is known which
    /// are accepted.
    pub max_draft_tokens: u32,
    /// The most rows of logits in a step that tokens are sampled from: one per sequence, and one per draft.
    pub max_sampled_rows: Tokens,
    /// The most positions of a sequence.
    pub max_seq_len: Tokens,
    /// Positions per KV block.
    pub block_size: BlockSize,
    /// Blocks of the KV cache.
    pub num_blocks: Blocks,
    /// Blocks in host memory, for content that the KV cache gives up.
    pub num_host_blocks: Blocks,
    /// The group of each layer, whose blocks are in the tables of steps; `None` if all layers are in one group.
    pub layer_groups: Option<LayerGroups>,
    /// The element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// The precision that the weights of a float checkpoint are rounded to; `None` for bf16.
    pub weights: Option<WeightPrecision>,
    /// Attention windows beyond those of the model.
    pub attention: AttentionWindows,
    /// What adapters may take.
    pub adapters: AdapterRoom,
}

/// What the adapters of sequences may take. The default is that of sequences without adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterRoom {
    /// The largest rank; 0: there are none.
    pub max_rank: usize,
    /// Bytes of all that are kept in memory of the host.
    pub num_bytes: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The most pages of those that sequences are computed with at a time.
    pub num_running_pages: u32,
}

impl AdapterRoom {
    /// Bytes of those that sequences are computed with at a time.
    pub fn num_running_bytes(&self) -> u64 {
        u64::from(self.num_running_pages) * self.page_bytes
    }
}

impl RunnerLimits {
    /// The groups of layers.
    pub fn num_groups(&self) -> usize {
        let groups = self.layer_groups.as_ref();
        groups.map_or(1, LayerGroups::num_groups)
    }

    /// The limits of an engine's steps, with bf16 weights, a bf16 KV cache, unlimited attention, and no adapters.
    pub fn of(config: &EngineConfig) -> Self {
        Self {
            max_num_tokens: config.max_num_tokens,
            max_num_requests: config.max_sequences(),
            num_state_rows: config.num_state_rows(),
            num_state_snapshots: config.num_state_snapshots,
            num_host_state_snapshots: config.num_host_state_snapshots,
            max_draft_tokens: config.speculation.map_or(0, |it| it.max_draft_tokens),
            max_sampled_rows: config.max_sampled_rows(),
            max_seq_len: config.max_seq_len,
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            num_host_blocks: config.num_host_blocks,
            layer_groups: None,
            kv_dtype: KvDtype::Bf16,
            weights: None,
            attention: AttentionWindows::default(),
            adapters: AdapterRoom::default(),
        }
    }
}

/// How far back attention looks, as configured. The default is unlimited.
///
/// In a layer with the window `w`, the query at position `q` sees the positions above `q - w` up to its own, and all
/// positions below `num_sinks` (StreamingLLM; Xiao et al., arXiv:2309.17453). Rotary angles are those of the full
/// sequence, unless the sinks shift.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionWindows {
    /// The windows of the layers, `max_attention_window_size`. A list that is shorter than the number of layers is
    /// repeated, as in TensorRT-LLM. Empty: no limit. If the model has a smaller window, that one applies.
    pub windows: Vec<NonZeroU32>,
    /// Positions at the start of the sequence that layers with a window see in addition, `sink_token_length`.
    pub num_sinks: Tokens,
    /// Whether distances to the sinks count only what the query sees, as in StreamingLLM, `enable_sink_token_shift`.
    pub shifts_sinks: bool,
}

impl AttentionWindows {
    /// The configured window of a layer.
    pub fn window(&self, layer: usize) -> Option<NonZeroU32> {
        self.windows.get(layer % self.windows.len().max(1)).copied()
    }

    /// The largest of the windows: what a sequence must keep besides the sinks. `None` if a layer sees all of
    /// `max_seq_len` positions.
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
