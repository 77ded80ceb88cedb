//! A model's shape, read from config.json: what the one decoder is parameterised by.

use std::num::NonZeroU32;

use serde_json::Value;

use super::AttentionLimits;
use super::rope::Rope;
use crate::base::{LoadError, Tokens};
use crate::checkpoint::JsonFile;

// Far above any model there is; a config beyond them is damaged or hostile, and the products of a
// few of them still fit usize.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 10;
const MAX_VOCAB: usize = 1 << 24;
/// Positions that any model may claim.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

/// The decoder-only transformers that are supported, by the name in `architectures`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2, Llama 3 and what shares their shape.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: queries and keys are normalised per head.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The class name that config.json has under `architectures`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn from_config(config: &JsonFile) -> Result<Self, LoadError> {
        let known = Self::ALL.map(Self::name).join(", ");
        let Some(value) = config.get("architectures") else {
            return Err(config.error(format!("architectures is missing; known are {known}")));
        };
        value
            .as_array()
            .and_then(|names| names.first())
            .and_then(|name| name.as_str())
            .and_then(|name| Self::ALL.into_iter().find(|known| known.name() == name))
            .ok_or_else(|| config.unexpected("architectures", value, format!("one of {known}")))
    }
}

/// A model's shape. Sizes are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding; token ids are below it.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward network.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head, even; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
    /// For each layer, the positions that a query sees, its own included; `None` for all.
    pub windows: Vec<Option<NonZeroU32>>,
    /// Added to the mean square in every normalisation.
    pub rms_norm_eps: f32,
    /// Position embedding.
    pub rope: Rope,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub o_bias: bool,
    /// Whether the three projections of the feed-forward network have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head before they are turned.
    pub qk_norm: bool,
    /// Whether the embedding is the output projection as well.
    pub tied_embeddings: bool,
}

impl ModelSpec {
    /// Reads and checks config.json.
    pub(super) fn from_config(config: &JsonFile) -> Result<Self, LoadError> {
        let architecture = Architecture::from_config(config)?;
        refuse_unsupported(config)?;

        let hidden_size = config.required_size("hidden_size", 1..=MAX_WIDTH)?;
        let num_heads = config.required_size("num_attention_heads", 1..=MAX_HEADS)?;
        let num_kv_heads = config.size("num_key_value_heads", 1..=MAX_HEADS)?;
        let num_kv_heads = num_kv_heads.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(config.unexpected(
                "num_attention_heads",
                num_heads,
                format_args!("a multiple of num_key_value_heads {num_kv_heads}"),
            ));
        }
        let head_dim = match config.size("head_dim", 1..=MAX_HEAD_DIM)? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => {
                return Err(config.unexpected(
                    "hidden_size",
                    hidden_size,
                    format_args!(
                        "a multiple of num_attention_heads {num_heads}, and head_dim is missing"
                    ),
                ));
            }
        };
        if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
            let expected = format!("an even number up to {MAX_HEAD_DIM}");
            return Err(config.unexpected("head_dim", head_dim, expected));
        }
        let positions = config.required_size("max_position_embeddings", 1..=MAX_POSITIONS)?;
        // Llama and Qwen 3 put `attention_bias` on all four projections; Qwen 2 has biases on three
        // of them without saying so; Mistral has none.
        let attention_bias = match architecture {
            Architecture::Llama | Architecture::Qwen3 => config.bool_or("attention_bias", false)?,
            Architecture::Mistral | Architecture::Qwen2 => false,
        };
        let num_layers = config.required_size("num_hidden_layers", 1..=MAX_LAYERS)?;
        Ok(Self {
            architecture,
            vocab_size: config.required_size("vocab_size", 1..=MAX_VOCAB)?,
            hidden_size,
            intermediate_size: config.required_size("intermediate_size", 1..=MAX_WIDTH)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            max_position_embeddings: positions,
            windows: windows(config, architecture, num_layers)?,
            rms_norm_eps: config.number("rms_norm_eps", 0.0..=1.0)?.unwrap_or(1e-6) as f32,
            rope: Rope::from_config(config, positions)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            o_bias: attention_bias,
            mlp_bias: architecture == Architecture::Llama && config.bool_or("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3,
            tied_embeddings: config.bool_or("tie_word_embeddings", false)?,
        })
    }

    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Bytes of the weights of a float checkpoint as the runner keeps them, in bf16.
    pub fn num_weight_bytes(&self) -> u64 {
        let (hidden, inter) = (self.hidden_size as u64, self.intermediate_size as u64);
        let projections = hidden * (2 * self.q_width() + 2 * self.kv_width()) as u64;
        let layer = projections + 3 * hidden * inter;
        let num_embeddings = if self.tied_embeddings { 1 } else { 2 };
        let embeddings = num_embeddings * self.vocab_size as u64 * hidden;
        2 * (embeddings + self.num_layers as u64 * layer)
    }

    /// The longest sequence that can be computed: all positions of the model.
    pub fn max_seq_len(&self) -> usize {
        self.max_position_embeddings
    }

    /// Each layer's window under a deployment's limits: the smaller one.
    pub fn windows_within<'a>(
        &'a self,
        limits: &'a AttentionLimits,
    ) -> impl Iterator<Item = Option<NonZeroU32>> + 'a {
        let own = self.windows.iter().enumerate();
        own.map(|(layer, &own)| [own, limits.window(layer)].into_iter().flatten().min())
    }

    /// The largest window over all layers: no layer needs what lies before it, but for the sinks.
    /// `None` if a layer sees all of `max_seq_len` positions.
    pub fn largest_window(&self, limits: &AttentionLimits, max_seq_len: Tokens) -> Option<Tokens> {
        limits.largest(self.windows_within(limits), max_seq_len)
    }
}

/// Refuses by name what would be computed wrongly.
fn refuse_unsupported(config: &JsonFile) -> Result<(), LoadError> {
    if let Some(act) = config.string("hidden_act")?
        && act != "silu"
    {
        return Err(config.unexpected(
            "hidden_act",
            format_args!("'{act}'"),
            "supported; 'silu' is",
        ));
    }
    Ok(())
}

/// The layers' attention windows. What is left out of the config has transformers' default.
fn windows(
    config: &JsonFile,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Vec<Option<NonZeroU32>>, LoadError> {
    let is_windowed = match architecture {
        // transformers takes such a Mistral for a Ministral, whose layers differ.
        Architecture::Mistral if config.get("layer_types").is_some() => {
            windowed_layers(config, num_layers)?
        }
        Architecture::Mistral => vec![true; num_layers],
        Architecture::Qwen2 | Architecture::Qwen3
            if config.bool_or("use_sliding_window", false)? =>
        {
            windowed_layers(config, num_layers)?
        }
        Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3 => {
            return Ok(vec![None; num_layers]);
        }
    };
    let window = match config.size("sliding_window", 1..=MAX_POSITIONS)? {
        None if config.has("sliding_window") => None,
        window => NonZeroU32::new(window.unwrap_or(4096) as u32),
    };
    let windows = is_windowed.into_iter().map(|is| window.filter(|_| is));
    Ok(windows.collect())
}

/// Which layers have the window: said for each one by newer configs, by the first of them
/// in older ones.
fn windowed_layers(config: &JsonFile, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    let Some(types) = config.get("layer_types") else {
        let first = config
            .size("max_window_layers", 0..=MAX_LAYERS)?
            .unwrap_or(28);
        return Ok((0..num_layers).map(|layer| layer >= first).collect());
    };
    let is_windowed = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    types
        .as_array()
        .filter(|types| types.len() == num_layers)
        .and_then(|types| types.iter().map(is_windowed).collect())
        .ok_or_else(|| {
            let expected =
                format!("a list of {num_layers} times 'sliding_attention' or 'full_attention'");
            config.unexpected("layer_types", types, expected)
        })
}
