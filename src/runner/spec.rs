//! The computation of a model, as data.
//!
//! The files of `families/` write it; the decoder, the loader of weights and every formula for
//! bytes read it. Nothing else depends on the family.

use std::num::NonZeroU32;

use super::limits::AttentionWindows;
use super::rope::Rope;
use crate::base::Tokens;
use crate::checkpoint::{RowOrder, RowSelection};
use crate::device::Stacking;

/// A decoder-only transformer. Sizes are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The family, by its class in transformers, such as `LlamaForCausalLM`.
    pub family: &'static str,
    /// Rows of the embedding; token ids are below it.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head, even; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Positions that the model was trained for.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f32,
    /// The modules outside of the layers.
    pub modules: ModelModules,
    /// The decoder layers, from the first to the last.
    pub layers: Vec<LayerSpec>,
    /// Whether the output layer has the weights of the embedding.
    pub tied_embeddings: bool,
}

/// The modules outside of the layers, by their names in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelModules {
    /// The embedding of tokens, `[vocab_size, hidden_size]`.
    pub embedding: &'static str,
    /// The list of layers: the prefix of the names of their modules.
    pub layers: &'static str,
    /// The norm in front of the output layer, `[hidden_size]`.
    pub final_norm: &'static str,
    /// The output layer, `[vocab_size, hidden_size]`.
    pub output_layer: &'static str,
}

/// A module of a model: a linear layer, a norm or the embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// The layer it belongs to, if any.
    pub layer: Option<usize>,
    /// Its name in transformers, below the layer.
    pub name: &'static str,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The norms of the residual stream, `[hidden_size]` each.
    pub norms: Norms,
    /// The attention block.
    pub attention: AttentionSpec,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
}

/// Where the residual stream is normalised, and the modules that do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// In front of each block: `x += block(norm(x))`.
    Pre {
        /// The norm of the attention block.
        attention: &'static str,
        /// The norm of the feed-forward block.
        feed_forward: &'static str,
    },
}

/// An attention block: `o(attention(rope(qkv(x))))`.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Queries, keys and values, in this order: `[q_width + 2 * kv_width, hidden_size]`.
    pub qkv: Projection,
    /// The norms of each query and key head in front of RoPE, `[head_dim]`.
    pub qk_norm: Option<QkNormModules>,
    /// The position embedding.
    pub rope: Rope,
    /// The factor of the products of queries and keys.
    pub scale: f32,
    /// The positions that a query sees, its own included; `None` for all.
    pub window: Option<NonZeroU32>,
    /// The output projection, `[hidden_size, q_width]`.
    pub o: Projection,
}

/// The modules that normalise heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkNormModules {
    /// The norm of query heads.
    pub q: &'static str,
    /// The norm of key heads.
    pub k: &'static str,
}

/// A feed-forward block.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    /// `down(activation(gate(x)) * up(x))`.
    Gated {
        /// Gate and up, interleaved: `[2 * intermediate_size, hidden_size]`.
        gate_up: Projection,
        /// The activation of the gate.
        activation: Activation,
        /// `[hidden_size, intermediate_size]`.
        down: Projection,
    },
}

/// A function of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// One matrix product of a layer: linear layers that share their input, packed into one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// The linear layers, in the order in which they are packed.
    pub parts: Vec<Linear>,
    /// Inputs of each part.
    pub num_inputs: usize,
    /// Whether the parts have biases.
    pub has_bias: bool,
    /// How the outputs of the parts are ordered.
    pub stacking: Stacking,
}

/// A linear layer of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Its name in transformers, below the layer.
    pub module: &'static str,
    /// Its outputs: the rows of its weights.
    pub num_outputs: usize,
    /// Where they are, if the module holds several linear layers.
    pub fused: Option<FusedOutputs>,
    /// How the checkpoint orders them.
    pub row_order: RowOrder,
}

/// The outputs of a linear layer among those of the module that it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedOutputs {
    /// The first one.
    pub first: usize,
    /// Outputs of the whole module.
    pub num_outputs: usize,
}

impl Module {
    /// A module outside of the layers.
    pub const fn of_model(name: &'static str) -> Self {
        Self { layer: None, name }
    }

    /// A module of a layer.
    pub const fn of_layer(layer: usize, name: &'static str) -> Self {
        Self {
            layer: Some(layer),
            name,
        }
    }
}

impl Linear {
    /// A linear layer that is a module of its own, in the order of transformers' Llama.
    pub const fn whole(module: &'static str, num_outputs: usize) -> Self {
        Self {
            module,
            num_outputs,
            fused: None,
            row_order: RowOrder::Same,
        }
    }

    /// Outputs of its module.
    pub fn num_module_outputs(&self) -> usize {
        self.fused
            .map_or(self.num_outputs, |fused| fused.num_outputs)
    }

    /// Its rows among those of its module; `None` if it has all of them in their order.
    pub fn selected_rows(&self) -> Option<RowSelection> {
        if self.fused.is_none() && self.row_order == RowOrder::Same {
            return None;
        }
        Some(RowSelection {
            first: self.fused.map_or(0, |fused| fused.first),
            len: self.num_outputs,
            order: self.row_order,
        })
    }
}

impl ModelSpec {
    /// The full name of a module in transformers, such as `model.layers.0.mlp.up_proj`.
    pub fn module_path(&self, module: Module) -> String {
        match module.layer {
            Some(layer) => format!("{}.{layer}.{}", self.modules.layers, module.name),
            None => module.name.to_owned(),
        }
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// The largest width inside of a feed-forward block.
    pub fn max_intermediate_size(&self) -> usize {
        let widths = self.layers.iter().map(|layer| layer.feed_forward.width());
        widths.max().unwrap_or(0)
    }

    /// Weights of all projections of all layers.
    pub fn num_layer_weights(&self) -> u64 {
        let projections = self.layers.iter().flat_map(LayerSpec::projections);
        projections.map(Projection::num_weights).sum()
    }

    /// Weights of the output layer, and of the embedding.
    pub fn num_output_weights(&self) -> u64 {
        self.vocab_size as u64 * self.hidden_size as u64
    }

    /// Bytes of the weights of a float checkpoint as the runner keeps them, in bf16.
    pub fn num_weight_bytes(&self) -> u64 {
        let num_embeddings = if self.tied_embeddings { 1 } else { 2 };
        2 * (num_embeddings * self.num_output_weights() + self.num_layer_weights())
    }

    /// The longest sequence that can be computed: all positions of the model.
    pub fn max_seq_len(&self) -> usize {
        self.max_position_embeddings
    }

    /// The window of each layer.
    pub fn windows(&self) -> impl Iterator<Item = Option<NonZeroU32>> {
        self.layers.iter().map(|layer| layer.attention.window)
    }

    /// The window of each layer: the smaller of the model's and the configured one.
    pub fn windows_within(
        &self,
        attention: &AttentionWindows,
    ) -> impl Iterator<Item = Option<NonZeroU32>> {
        let own = self.windows().enumerate();
        own.map(|(layer, own)| [own, attention.window(layer)].into_iter().flatten().min())
    }

    /// The largest window of all layers: no layer needs earlier positions, except for the sinks. `None` if a layer
    /// sees all of `max_seq_len` positions.
    pub fn largest_window(
        &self,
        attention: &AttentionWindows,
        max_seq_len: Tokens,
    ) -> Option<Tokens> {
        attention.largest(self.windows_within(attention), max_seq_len)
    }
}

impl LayerSpec {
    /// All projections, in the order in which they are packed.
    pub fn projections(&self) -> impl Iterator<Item = &Projection> {
        let FeedForward::Gated { gate_up, down, .. } = &self.feed_forward;
        [&self.attention.qkv, &self.attention.o, gate_up, down].into_iter()
    }
}

impl AttentionSpec {
    /// Sets whether its projections have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        self.qkv.has_bias = has_bias;
        self.o.has_bias = has_bias;
    }
}

impl FeedForward {
    /// Sets whether its projections have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        let Self::Gated { gate_up, down, .. } = self;
        gate_up.has_bias = has_bias;
        down.has_bias = has_bias;
    }

    /// The width inside of the block.
    pub fn width(&self) -> usize {
        let Self::Gated { down, .. } = self;
        down.num_inputs
    }
}

impl Projection {
    /// A projection with one part and without a bias.
    pub fn single(module: &'static str, num_outputs: usize, num_inputs: usize) -> Self {
        Self::stacked(&[(module, num_outputs)], num_inputs, Stacking::Concatenated)
    }

    /// A projection of several linear layers, each with its number of outputs, without biases.
    pub fn stacked(parts: &[(&'static str, usize)], num_inputs: usize, stacking: Stacking) -> Self {
        let linear = |&(module, num_outputs)| Linear::whole(module, num_outputs);
        Self {
            parts: parts.iter().map(linear).collect(),
            num_inputs,
            has_bias: false,
            stacking,
        }
    }

    /// A projection whose parts follow one another in a single module, each with this number of outputs.
    pub fn fused(
        module: &'static str,
        parts: &[usize],
        num_inputs: usize,
        stacking: Stacking,
    ) -> Self {
        let mut first = 0;
        let num_module_outputs = parts.iter().sum();
        let linear = |&num_outputs| {
            let fused = FusedOutputs {
                first,
                num_outputs: num_module_outputs,
            };
            first += num_outputs;
            Linear {
                fused: Some(fused),
                ..Linear::whole(module, num_outputs)
            }
        };
        Self {
            parts: parts.iter().map(linear).collect(),
            num_inputs,
            has_bias: false,
            stacking,
        }
    }

    /// The same with or without biases.
    #[must_use]
    pub fn with_bias(self, has_bias: bool) -> Self {
        Self { has_bias, ..self }
    }

    /// Its weights, biases not counted.
    pub fn num_weights(&self) -> u64 {
        let num_outputs: usize = self.parts.iter().map(|part| part.num_outputs).sum();
        num_outputs as u64 * self.num_inputs as u64
    }
}
