//! Keys of config.json that all families share.

use std::num::NonZeroU32;

use super::bounds::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH};
use super::rope_config::{RopeDefaults, rope};
use crate::rope::Rope;
use crate::spec::{
    AttentionSpec, FeedForward, KvHeads, LayerSpec, ModelModules, ModelSpec, NormKind, NormSpec,
    Norms, Projection,
};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs, RowOrder};
use inflight_device::{Activation, LogitsTransform, PlainActivation};
use inflight_numbers::Stacking;

/// The sizes of a model, checked.
#[derive(Clone)]
pub struct Dimensions {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub norm: NormSpec,
    pub activation: Activation,
    pub rope: Rope,
    pub rotary_pairs: RotaryPairs,
    pub tied_embeddings: bool,
}

/// What transformers assumes of a family where config.json is silent.
pub struct Defaults {
    /// The sizes of the model; `None` if config.json must tell them.
    pub sizes: Option<Sizes>,
    /// `num_key_value_heads`; `None` for as many as query heads.
    pub num_kv_heads: Option<usize>,
    /// `head_dim`; `None` for `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    pub norm_eps: f64,
    pub rope: RopeDefaults,
    pub tied_embeddings: bool,
    /// The activation, if config.json may be silent about it.
    pub activation: Activation,
    pub keys: Keys,
}

/// The sizes of the model that a family's config class describes.
#[derive(Clone, Copy)]
pub struct Sizes {
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    num_layers: usize,
    num_heads: usize,
    positions: usize,
}

impl Sizes {
    /// In the order of the keys `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`,
    /// `num_attention_heads` and `max_position_embeddings`.
    pub const fn new(
        vocab: usize,
        hidden: usize,
        intermediate: usize,
        num_layers: usize,
        num_heads: usize,
        positions: usize,
    ) -> Self {
        Self {
            vocab,
            hidden,
            intermediate,
            num_layers,
            num_heads,
            positions,
        }
    }
}

/// What config.json calls things. Families with different names for `hidden_size` and the like have more.
pub struct Keys {
    pub hidden_size: &'static str,
    pub num_layers: &'static str,
    pub num_heads: &'static str,
    pub num_kv_heads: &'static str,
    pub positions: &'static str,
    pub intermediate_size: &'static str,
    /// Whether a config may be silent about it: it is four times the hidden size then.
    pub may_lack_intermediate_size: bool,
    pub activation: &'static str,
    pub norm_eps: &'static str,
}

impl Keys {
    pub const LLAMA: Self = Self {
        hidden_size: "hidden_size",
        num_layers: "num_hidden_layers",
        num_heads: "num_attention_heads",
        num_kv_heads: "num_key_value_heads",
        positions: "max_position_embeddings",
        intermediate_size: "intermediate_size",
        may_lack_intermediate_size: false,
        activation: "hidden_act",
        norm_eps: "rms_norm_eps",
    };
}

impl Defaults {
    /// The defaults that most families have in common.
    pub const LLAMA: Self = Self {
        sizes: None,
        num_kv_heads: None,
        head_dim: None,
        norm_eps: 1e-6,
        rope: RopeDefaults {
            theta: 10_000.0,
            partial_rotary_factor: None,
            section: None,
            has_mscales: false,
        },
        tied_embeddings: false,
        activation: Activation::Silu,
        keys: Keys::LLAMA,
    };
}

impl Dimensions {
    pub fn from_config(config: &JsonFile, defaults: &Defaults) -> Result<Self, LoadError> {
        let keys = &defaults.keys;
        let activation = activation(config, keys.activation)?.unwrap_or(defaults.activation);
        let size = |key, max, default: fn(&Sizes) -> usize| {
            let size = config.size_or(key, 1..=max, defaults.sizes.as_ref().map(default))?;
            size.ok_or_else(|| config.missing(key))
        };
        let hidden_size = size(keys.hidden_size, MAX_WIDTH, |it| it.hidden)?;
        let num_heads = size(keys.num_heads, MAX_HEADS, |it| it.num_heads)?;
        let num_kv_heads =
            config.size_or(keys.num_kv_heads, 1..=MAX_HEADS, defaults.num_kv_heads)?;
        let num_kv_heads = num_kv_heads.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(config.unexpected(
                keys.num_heads,
                num_heads,
                format_args!("a multiple of {} {num_kv_heads}", keys.num_kv_heads),
            ));
        }
        let head_dim = head_dim(config, keys, hidden_size, num_heads, defaults.head_dim)?;
        let positions = size(keys.positions, MAX_POSITIONS, |it| it.positions)?;
        let intermediate_size = match config.size(keys.intermediate_size, 1..=MAX_WIDTH)? {
            None if keys.may_lack_intermediate_size => 4 * hidden_size,
            _ => size(keys.intermediate_size, MAX_WIDTH, |it| it.intermediate)?,
        };
        Ok(Self {
            vocab_size: size("vocab_size", MAX_VOCAB, |it| it.vocab)?,
            hidden_size,
            intermediate_size,
            num_layers: size(keys.num_layers, MAX_LAYERS, |it| it.num_layers)?,
            num_heads,
            num_kv_heads,
            head_dim,
            max_position_embeddings: positions,
            norm: NormSpec {
                kind: NormKind::Rms,
                has_weights: true,
                eps: config
                    .number(keys.norm_eps, 0.0..=1.0)?
                    .unwrap_or(defaults.norm_eps) as f32,
                weight_offset: 0.0,
            },
            activation,
            rope: rope(config, positions, head_dim, defaults.rope)?,
            rotary_pairs: RotaryPairs::Halves,
            tied_embeddings: config.bool_or("tie_word_embeddings", defaults.tied_embeddings)?,
        })
    }

    /// A layer of Llama, without biases or window: the other families are described by what they change.
    pub fn llama_layer(&self) -> LayerSpec {
        let hidden = self.hidden_size;
        let [q, kv, _] = self.qkv_widths();
        let inner = self.intermediate_size;
        let qkv = [
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", kv),
            ("self_attn.v_proj", kv),
        ];
        let gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)];
        let mut qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
        self.order_heads(&mut qkv);
        LayerSpec {
            norms: Norms::before("input_layernorm", "post_attention_layernorm"),
            attention: AttentionSpec {
                qkv,
                latent: None,
                recurrence: None,
                late: None,
                gate: None,
                kv_heads: None,
                kv_source: None,
                clip: None,
                qk_norm: None,
                rope: self.rope.clone(),
                scale: (self.head_dim as f32).sqrt().recip(),
                soft_cap: None,
                window: None,
                chunk: None,
                sink_logits: None,
                o: Projection::single("self_attn.o_proj", hidden, q),
            },
            recurrence_block: None,
            experts_block: None,
            input_block: None,
            scale: None,
            multipliers: None,
            column_factors: None,
            gate_cutoff: None,
            inner_norms: None,
            feed_forward: FeedForward::Gated {
                gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
                activation: self.activation,
                down: Projection::single("mlp.down_proj", hidden, inner),
            },
        }
    }

    /// Queries, keys and values in one module, in this order.
    pub fn fused_qkv(&self, module: &'static str) -> Projection {
        let mut qkv = Projection::fused(
            module,
            &self.qkv_widths(),
            self.hidden_size,
            Stacking::Concatenated,
        );
        self.order_heads(&mut qkv);
        qkv
    }

    /// A feed-forward block with gate and up in one module, gate first.
    pub fn fused_gated(&self, gate_up: &'static str) -> FeedForward {
        let (inner, hidden) = (self.intermediate_size, self.hidden_size);
        FeedForward::Gated {
            gate_up: Projection::fused(gate_up, &[inner, inner], hidden, Stacking::Interleaved),
            activation: self.activation,
            down: Projection::single("mlp.down_proj", hidden, inner),
        }
    }

    /// Queries, keys and values in one module: the query heads of a key head, that key head, its value head, and so on
    /// for all key heads.
    pub fn qkv_by_group(&self, module: &'static str) -> Projection {
        let queries = self.num_heads / self.num_kv_heads * self.head_dim;
        let mut qkv = Projection::fused_in_runs(
            module,
            &[queries, self.head_dim, self.head_dim],
            self.num_kv_heads,
            self.hidden_size,
            Stacking::Concatenated,
        );
        self.order_heads(&mut qkv);
        qkv
    }

    /// A feed-forward block without a gate.
    pub fn plain(&self, up: &'static str, down: &'static str) -> FeedForward {
        let (inner, hidden) = (self.intermediate_size, self.hidden_size);
        FeedForward::Plain {
            up: Projection::single(up, inner, hidden),
            activation: PlainActivation::Of(self.activation),
            alphas: None,
            down: Projection::single(down, hidden, inner),
        }
    }

    /// The heads of a layer.
    pub fn heads(&self) -> KvHeads {
        KvHeads::of_dim(self.num_heads, self.num_kv_heads, self.head_dim)
    }

    /// Widths of all query heads, all key heads, and all value heads.
    pub fn qkv_widths(&self) -> [usize; 3] {
        let kv = self.num_kv_heads * self.head_dim;
        [self.num_heads * self.head_dim, kv, kv]
    }

    /// Sets the row order of queries and keys, the first two parts.
    pub fn order_heads(&self, qkv: &mut Projection) {
        for part in qkv.parts.iter_mut().take(2) {
            part.row_order =
                RowOrder::of_heads(self.head_dim, self.rope.rotary_dim, self.rotary_pairs);
        }
    }

    /// A model whose layers are `layer`, each with its own window.
    pub fn model(
        self,
        family: &'static str,
        layer: LayerSpec,
        windows: impl IntoIterator<Item = Option<NonZeroU32>>,
    ) -> ModelSpec {
        let scaled = self.rope.scaled_positions().unwrap_or(0);
        let positions = self.max_position_embeddings.max(scaled);
        let layers = windows.into_iter().take(self.num_layers).map(|window| {
            let mut layer = layer.clone();
            layer.attention.window = window;
            layer
        });
        ModelSpec {
            family,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            max_position_embeddings: positions.min(MAX_POSITIONS),
            embedding_scale: 1.0,
            embedding_projections: None,
            learned_positions: None,
            token_types: None,
            embedding_norm: None,
            layer_inputs: None,
            streams: None,
            slope_factor: None,
            is_bidirectional: false,
            has_whole_images: false,
            norm: self.norm,
            logits: LogitsTransform::IDENTITY,
            output_bias: false,
            has_unit_outputs: false,
            modules: ModelModules {
                embedding: "model.embed_tokens",
                layers: "model.layers",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: Some("model.norm"),
                output_layer: "lm_head",
            },
            layers: layers.collect(),
            tied_embeddings: self.tied_embeddings,
            pooling: None,
            classes: None,
        }
    }
}

fn head_dim(
    config: &JsonFile,
    keys: &Keys,
    hidden_size: usize,
    num_heads: usize,
    default: Option<usize>,
) -> Result<usize, LoadError> {
    let head_dim = match config.size_or("head_dim", 1..=MAX_HEAD_DIM, default)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(config.unexpected(
                keys.hidden_size,
                hidden_size,
                format_args!(
                    "a multiple of {} {num_heads}, and head_dim is missing",
                    keys.num_heads
                ),
            ));
        }
    };
    match head_dim.is_multiple_of(2) && head_dim <= MAX_HEAD_DIM {
        true => Ok(head_dim),
        false => {
            let expected = format!("an even number up to {MAX_HEAD_DIM}");
            Err(config.unexpected("head_dim", head_dim, expected))
        }
    }
}

/// The largest magnitude of queries, keys and values (`clip_qkv`), if they are clipped.
///
/// # Errors
/// It is out of range.
pub fn clip_qkv(config: &JsonFile) -> Result<Option<f32>, LoadError> {
    let bound = config.number("clip_qkv", 1e-6..=1e6)?;
    Ok(bound.map(|bound| bound as f32))
}

/// The activation under a key. Names that stand for the same function up to rounding are one.
///
/// # Errors
/// It is not known.
pub fn activation(config: &JsonFile, key: &str) -> Result<Option<Activation>, LoadError> {
    Ok(Some(match config.string(key)? {
        None => return Ok(None),
        Some("silu" | "swish") => Activation::Silu,
        Some("gelu" | "gelu_python") => Activation::Gelu,
        Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" | "gelu_python_tanh") => {
            Activation::GeluTanh
        }
        Some("relu") => Activation::Relu,
        Some("relu2") => Activation::SquaredRelu,
        Some(other) => {
            return Err(config.unexpected(
                key,
                format_args!("'{other}'"),
                "supported; 'silu', 'gelu', 'gelu_pytorch_tanh', 'gelu_new', 'relu' and 'relu2' are",
            ));
        }
    }))
}
