//! What a model brings along for the engine's limits: its checkpoint, or what the synthetic runner is.

use std::path::Path;

use crate::backend::limits::ModelFacts;
use crate::base::{BlockSize, LoadError, Tokens};
use crate::config::{ModelConfig, RunnerKind, Settings};
use crate::device::cpu::KvDtype;
use crate::runner::{AttentionLimits, Checkpoint, CpuRunner, SyntheticRunner};

/// Positions of a sequence where no model sets a bound.
const SYNTHETIC_MAX_POSITIONS: u32 = 1 << 20;
/// `max_seq_len` of the synthetic runner where the user sets none.
const SYNTHETIC_MAX_SEQ_LEN: u32 = 4096;
/// A position of the synthetic runner's cache (the hash of all tokens up to it).
const SYNTHETIC_KV_BYTES: u64 = 8;

/// A model's facts.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// The backend's parameters.
    pub settings: &'a Settings,
    /// The weights; none for the synthetic runner.
    pub checkpoint: Option<&'a Checkpoint>,
}

/// Opens the checkpoint that `config` names, for the `version` of the model in the folder `folder`; the
/// synthetic runner has none, and gets its limits into `config` where the user sets none.
///
/// # Errors
/// What is wrong with the checkpoint.
pub fn open_checkpoint(
    config: &mut ModelConfig,
    folder: &Path,
    version: u64,
) -> Result<Option<Checkpoint>, LoadError> {
    let settings = &mut config.settings;
    match settings.runner {
        RunnerKind::Synthetic => {
            settings.max_seq_len.get_or_insert(SYNTHETIC_MAX_SEQ_LEN);
            Ok(None)
        }
        RunnerKind::HuggingFace => {
            Checkpoint::open(&settings.checkpoint_path(folder, version)).map(Some)
        }
    }
}

impl Facts<'_> {
    /// How keys and values are kept.
    pub fn kv_dtype(&self) -> KvDtype {
        match self.settings.int8_kv_cache {
            true => KvDtype::Int8,
            false => KvDtype::Bf16,
        }
    }

    /// How far the layers look back, as the configuration limits them.
    pub fn attention(&self) -> AttentionLimits {
        AttentionLimits {
            windows: self.settings.max_attention_window_size.clone(),
            num_sinks: Tokens(self.settings.sink_token_length),
        }
    }
}

impl ModelFacts for Facts<'_> {
    fn max_positions(&self) -> u32 {
        match self.checkpoint {
            Some(checkpoint) => u32::try_from(checkpoint.spec().max_seq_len()).unwrap_or(u32::MAX),
            None => SYNTHETIC_MAX_POSITIONS,
        }
    }

    fn kv_bytes_per_block(&self, block_size: BlockSize) -> u64 {
        match self.checkpoint {
            Some(checkpoint) => {
                let spec = checkpoint.spec();
                CpuRunner::kv_bytes_per_block(spec, block_size, self.kv_dtype()) as u64
            }
            None => SYNTHETIC_KV_BYTES * u64::from(block_size.tokens().0),
        }
    }

    fn window(&self, max_seq_len: Tokens) -> Option<Tokens> {
        let limits = self.attention();
        match self.checkpoint {
            Some(checkpoint) => checkpoint.spec().largest_window(&limits, max_seq_len),
            None => SyntheticRunner::largest_window(&limits, max_seq_len),
        }
    }
}
