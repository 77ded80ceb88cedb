//! The computation of a model, as data.
//!
//! The files of `families/` write it; the decoder, the loader of weights and every formula for
//! bytes read it. Nothing else depends on the family.

use std::num::NonZeroU32;
use std::ops::Range;

use super::limits::AttentionWindows;
use super::recurrence_spec::RecurrenceSpec;
use super::rope::Rope;
use inflight_base::{TokenId, Tokens};
use inflight_checkpoint::{RowOrder, RowRuns, RowSelection};
use inflight_config::PoolingMode;
use inflight_device::{
    Activation, Gating, HeadShape, LatentShape, LogitsTransform, MixtureShape, QkNormKind, Routing,
};
use inflight_numbers::Stacking;

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
    /// Key and value heads; divides `num_heads`. One with latent attention.
    pub num_kv_heads: usize,
    /// Width of a head in the cache, even; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Positions that the model was trained for.
    pub max_position_embeddings: usize,
    /// The factor of the embedded tokens.
    pub embedding_scale: f32,
    /// What is between the embedding and the residual stream, and between that and the output layer, if their widths
    /// differ.
    pub embedding_projections: Option<EmbeddingProjections>,
    /// Positions that are learned and added to the embedded tokens.
    pub learned_positions: Option<LearnedPositions>,
    /// The embedding of the types of tokens, which is added too: those of a text are of type 0.
    pub token_types: Option<TokenTypes>,
    /// The norm of their sum, `[hidden_size]`, if the residual stream starts with that.
    pub embedding_norm: Option<&'static str>,
    /// The factor of the slopes of linear biases that scaled scores have (ALiBi), if they have some.
    pub slope_factor: Option<f32>,
    /// Whether each token sees those behind it, too. Then a prompt is computed in one step.
    pub is_bidirectional: bool,
    /// Inputs of each layer's own, besides the residual stream.
    pub layer_inputs: Option<LayerInputsSpec>,
    /// How the residual stream is normalised.
    pub norm: NormSpec,
    /// What becomes of the products of the output layer.
    pub logits: LogitsTransform,
    /// The modules outside of the layers.
    pub modules: ModelModules,
    /// The decoder layers, from the first to the last.
    pub layers: Vec<LayerSpec>,
    /// Whether the output layer has the weights of the embedding.
    pub tied_embeddings: bool,
    /// Whether the output layer has a bias.
    pub output_bias: bool,
    /// The vector of a prompt, in a pooling model, which has no output layer.
    pub pooling: Option<Pooling>,
    /// The classification head, if the model sorts prompts into classes.
    pub classes: Option<ClassHead>,
}

/// Linear layers between embeddings of one width and a residual stream of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingProjections {
    /// From embedded tokens, `[hidden_size, embedding_width]`.
    pub input: Projection,
    /// To what the output layer reads, `[embedding_width, hidden_size]`.
    pub output: Projection,
}

/// What sorts states into classes.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassHead {
    /// Its modules.
    pub modules: ClassModules,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// Two tokens of a model that generates: its only number is the logit of the second less that of the first. The
    /// last linear layer is the output layer then.
    pub tokens: Option<[TokenId; 2]>,
    /// What whoever answers makes of the results, unless the request wants them as they are.
    pub transform: ClassTransform,
    /// The token that pads prompts.
    pub padding: Option<TokenId>,
}

/// The modules of a head for classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassModules {
    /// Which state it reads, unless the configuration says otherwise.
    pub pooling: PoolingMode,
    /// What is in front of the last layer.
    pub dense: Option<ClassDense>,
    /// The last linear layer, `[labels.len(), embedding_width]`.
    pub output: &'static str,
    /// Whether that has a bias.
    pub has_bias: bool,
}

/// A linear layer, `[hidden_size, hidden_size]`, in front of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassDense {
    /// Its module.
    pub module: &'static str,
    /// Whether it has a bias.
    pub has_bias: bool,
    /// What becomes of its sums.
    pub activation: ClassActivation,
    /// The norm behind that, of the model's kind, if there is one.
    pub norm: Option<&'static str>,
}

/// An activation of a head for classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassActivation {
    /// The hyperbolic tangent.
    Tanh,
    /// `x` times the standard normal distribution function at `x`.
    Gelu,
}

/// How results of classes become what an answer has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClassTransform {
    /// They stay as they are.
    #[default]
    Identity,
    /// Each becomes a probability of its own.
    Sigmoid,
    /// They become probabilities whose sum is 1.
    Softmax,
}

/// Which state stands for a prompt, and in what form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// Which of the prompt's states.
    pub mode: PoolingMode,
    /// Whether whoever answers divides it by its length, unless the request says otherwise.
    pub normalize: bool,
}

/// The modules outside of the layers, by their names in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelModules {
    /// The embedding of tokens, `[vocab_size, embedding_width]`.
    pub embedding: &'static str,
    /// The list of layers: the prefix of the names of their modules.
    pub layers: &'static str,
    /// The norm behind the last layer, `[hidden_size]`, if there is one.
    pub final_norm: Option<&'static str>,
    /// The output layer, `[vocab_size, embedding_width]`.
    pub output_layer: &'static str,
}

/// An embedding of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedPositions {
    /// Its module, `[num_rows, hidden_size]`.
    pub module: &'static str,
    /// The row of position 0.
    pub first_row: usize,
    /// A token that is no position, and whose row is in front of the first.
    pub padding_id: Option<TokenId>,
    /// All of its rows.
    pub num_rows: usize,
}

/// An embedding of the types of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenTypes {
    /// Its module, `[num_types, hidden_size]`.
    pub module: &'static str,
    /// Its rows.
    pub num_types: usize,
}

/// How norms compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// The formula.
    pub kind: NormKind,
    /// Whether the norms of the residual stream have weights, which are 1 otherwise.
    pub has_weights: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// What is added to the weights of all norms of the model, those of heads too, as the checkpoint stores them: 0, or
    /// 1 where they are stored as differences from 1.
    pub weight_offset: f32,
}

/// The formula of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * weight`.
    Rms,
    /// `(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias`.
    Layer {
        /// Whether there is a bias.
        has_bias: bool,
    },
}

/// A module of a model: a linear layer, a norm or the embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// The layer it belongs to, if any.
    pub layer: Option<usize>,
    /// Of several modules that are alike, such as those of experts, which one it is.
    pub index: Option<usize>,
    /// Its name in transformers, below the layer. `{}` stands for the index.
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
    /// Experts beside that, which has no experts itself.
    pub experts_block: Option<ExpertsBlock>,
    /// The block behind it that reads the layer's own inputs. All layers have one, or none.
    pub input_block: Option<InputBlock>,
    /// The factor of the residual stream behind all blocks: its parameter, `[1]`, below the layer.
    pub scale: Option<&'static str>,
}

/// How the [inputs](inflight_device::LayerInputOps) of all layers are made of a step's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerInputsSpec {
    /// The embeddings of all layers: their module, `[num_rows, num_layers * width]`.
    pub embedding: &'static str,
    /// Rows of the embedding, of which those of tokens are used; at least `vocab_size`.
    pub num_rows: usize,
    /// Their factor.
    pub embedding_scale: f32,
    /// From embedded tokens to all layers, `[num_layers * width, hidden_size]`.
    pub projection: Projection,
    /// The factor of its results.
    pub projection_scale: f32,
    /// The RMS norm of a layer's results, `[width]`.
    pub norm: &'static str,
    /// The factor of the sum of both.
    pub scale: f32,
    /// Elements of the inputs of a layer.
    pub width: usize,
}

/// Experts beside a feed-forward block, in a layer with [sequential](Norms::Sequential) norms. Norms are `[hidden_size]`
/// each.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsBlock {
    /// The experts, without a shared one.
    pub experts: ExpertsSpec,
    /// What the normalised residual stream is multiplied with for the router, besides the root of its size: the
    /// parameter, `[hidden_size]`, below the layer.
    pub router_scale: &'static str,
    /// The factors of the weights of experts: the parameter, `[num_experts]`, below the layer.
    pub expert_scales: &'static str,
    /// The norm of the feed-forward block's result.
    pub dense_after: &'static str,
    /// The norm of what the experts read, the residual stream.
    pub before: &'static str,
    /// The norm of their result.
    pub after: &'static str,
}

/// A block that reads the layer's own inputs: `x += after(down(activation(gate(x)) * inputs))`.
#[derive(Clone, Debug, PartialEq)]
pub struct InputBlock {
    /// `[width, hidden_size]`.
    pub gate: Projection,
    /// The activation of the gate.
    pub activation: Activation,
    /// `[hidden_size, width]`.
    pub down: Projection,
    /// The norm of its result, `[hidden_size]`.
    pub after: &'static str,
}

/// How the two blocks of a layer are joined to the residual stream `x`, and with which norms: their modules, their
/// weights in a checkpoint, or those on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms<N = &'static str> {
    /// One after the other: `x += after(block(before(x)))`.
    Sequential {
        /// The norms of the attention block.
        attention: BlockNorms<N>,
        /// The norms of the feed-forward block.
        feed_forward: BlockNorms<N>,
    },
    /// Side by side: `x += attention(norm(x)) + feed_forward(norm(x))`.
    Parallel {
        /// The norm in front of the attention block.
        attention: N,
        /// The norm in front of the feed-forward block. `None`: that of the attention block.
        feed_forward: Option<N>,
    },
    /// Of the residual stream itself, behind each block: `x = norm(x + block(x))`.
    OfSums {
        /// The norm behind the attention block.
        attention: N,
        /// The norm behind the feed-forward block.
        feed_forward: N,
    },
}

/// The norms of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNorms<N> {
    /// Of what it reads. `None`: it reads the residual stream itself.
    pub before: Option<N>,
    /// Of its result. `None`: it is added as it is.
    pub after: Option<N>,
}

/// An attention block: `o(attention(rope(qkv(x))))`.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Queries, keys and values, in this order: `[q_width + 2 * kv_width, hidden_size]`. With latent attention only the
    /// queries, or their latents.
    pub qkv: Projection,
    /// What queries, keys and values are made of in latent attention, which all layers of a model have or none.
    pub latent: Option<LatentSpec>,
    /// The recurrence in place of attention: `qkv` projects its inputs, `[input_len, hidden_size]`, and `o` its
    /// results, `[hidden_size, out_len]`.
    pub recurrence: Option<RecurrenceSpec>,
    /// The gates of attention, `[q_width, hidden_size]`: `o` reads its results times the sigmoid of these.
    pub gate: Option<Projection>,
    /// Its key and value heads, if they are not [the model's](ModelSpec::num_kv_heads).
    pub kv_heads: Option<KvHeads>,
    /// The earlier layer whose keys and values it reads, which has the same heads: `qkv` makes only queries then.
    pub kv_source: Option<usize>,
    /// The norms of queries and keys in front of RoPE.
    pub qk_norm: Option<QkNormSpec>,
    /// The position embedding.
    pub rope: Rope,
    /// The factor of the products of queries and keys.
    pub scale: f32,
    /// The bound `c` of a score `s`, which becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// The positions that a query sees, its own included; `None` for all.
    pub window: Option<NonZeroU32>,
    /// The logits of each query head for no position, `[num_heads]`: their parameter, below the layer.
    pub sink_logits: Option<&'static str>,
    /// The output projection, `[hidden_size, q_width]`, or `[hidden_size, num_heads * value_dim]`.
    pub o: Projection,
}

/// The key and value heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    /// How many; divides the query heads.
    pub num: usize,
    /// Width of a head, of queries too; even.
    pub dim: usize,
}

/// The parts of [latent attention](LatentShape).
#[derive(Clone, Debug, PartialEq)]
pub struct LatentSpec {
    /// The sizes.
    pub shape: LatentShape,
    /// How queries are made of their latents. `None`: they have none.
    pub queries: Option<LatentQueries>,
    /// The latent of keys and values, and the shared key: `[latent_dim + rotary_dim, hidden_size]`.
    pub kv: Projection,
    /// The RMS norm of that latent, `[latent_dim]`.
    pub kv_norm: &'static str,
    /// From that latent to the contents of keys, then to values, head by head: `[num_heads * (content_dim + value_dim),
    /// latent_dim]`.
    pub heads: Projection,
    /// The same in two modules, as GGUF files have it: for each head, from the contents of queries to latents,
    /// `[latent_dim, content_dim]`, and from latents to values, `[value_dim, latent_dim]`.
    pub parted_heads: [&'static str; 2],
    /// Added to the mean squares of latents.
    pub norm_eps: f32,
}

/// How queries are made of their latents.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentQueries {
    /// The RMS norm of the latents, `[num_inputs]`.
    pub norm: &'static str,
    /// `[num_heads * (content_dim + rotary_dim), num_inputs]`.
    pub projection: Projection,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormSpec {
    /// The module for queries. `{}` stands for the index of a head, where each has a module of its own.
    pub q: &'static str,
    /// The module for keys, likewise.
    pub k: &'static str,
    /// Which norms they are.
    pub kind: QkNormKind,
    /// Whether values have an RMS norm of each head, too, without weights.
    pub has_values: bool,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

/// A feed-forward block.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a model has one a layer")]
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
    /// `down(activation(up(x)))`.
    Plain {
        /// `[intermediate_size, hidden_size]`.
        up: Projection,
        /// The activation.
        activation: Activation,
        /// `[hidden_size, intermediate_size]`.
        down: Projection,
    },
    /// Several gated blocks, a few of which are chosen for each token.
    Experts(ExpertsSpec),
}

/// A mixture of experts. All mixtures of a model have the same sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// The logits of the experts, and the shared one's if it has a gate: `[num_logits, hidden_size]`. Never
    /// quantised.
    pub router: Projection,
    /// How experts are chosen.
    pub routing: Routing,
    /// The corrections of their scores, `[num_experts]`: their parameter, below the layer.
    pub correction: Option<&'static str>,
    /// Gate and up of an expert, interleaved: `[2 * expert_size, hidden_size]`. In names of modules, `{}` stands for
    /// its index.
    pub gate_up: Projection,
    /// How the gates act.
    pub gating: Gating,
    /// `[hidden_size, expert_size]`.
    pub down: Projection,
    /// An expert that all tokens have.
    pub shared: Option<SharedExpert>,
    /// The names of a checkpoint that holds all experts of a layer in one tensor.
    pub stacked: StackedExperts,
}

/// The expert that all tokens have.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    /// Gate and up, interleaved: `[2 * shared_size, hidden_size]`.
    pub gate_up: Projection,
    /// `[hidden_size, shared_size]`.
    pub down: Projection,
}

/// The names of tensors with the weights of all experts, as transformers 5 has them in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackedExperts {
    /// The module of the router's logits.
    pub router: &'static str,
    /// Gate and up of all experts.
    pub gate_up: &'static str,
    /// Their down projections.
    pub down: &'static str,
    /// How these tensors are laid out.
    pub layout: StackedLayout,
}

/// The order of the weights of all experts in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackedLayout {
    /// `[num_experts, outputs, inputs]`, all outputs of gate before those of up. A checkpoint may have tensors of each
    /// expert instead.
    Outputs,
    /// `[num_experts, inputs, outputs]`, or `[num_experts, outputs, inputs]` in MXFP4; the outputs of gate and up take
    /// turns. Biases are tensors `[num_experts, outputs]`, with `_bias` behind the name. Checkpoints have no other
    /// tensors.
    Inputs,
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
    /// Whether the checkpoint stores the weights as `[inputs, outputs]`.
    pub is_transposed: bool,
}

/// The outputs of a linear layer among the outputs of the module that it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedOutputs {
    /// The first one.
    pub first: usize,
    /// Outputs of the whole module.
    pub num_outputs: usize,
    /// Where they are, if outputs of other layers are between them.
    pub runs: Option<RowRuns>,
}

impl Module {
    /// A module outside of the layers.
    pub const fn of_model(name: &'static str) -> Self {
        Self {
            layer: None,
            index: None,
            name,
        }
    }

    /// A module of a layer.
    pub const fn of_layer(layer: usize, name: &'static str) -> Self {
        Self {
            layer: Some(layer),
            index: None,
            name,
        }
    }

    /// One of several modules of a layer that are alike.
    pub const fn one_of(layer: usize, index: usize, name: &'static str) -> Self {
        Self {
            layer: Some(layer),
            index: Some(index),
            name,
        }
    }
}

impl QkNormSpec {
    /// An RMS norm of each head, under the usual names.
    pub const fn of_heads(eps: f32) -> Self {
        Self {
            q: "self_attn.q_norm",
            k: "self_attn.k_norm",
            kind: QkNormKind::Head,
            has_values: false,
            eps,
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
            is_transposed: false,
        }
    }

    /// Outputs of its module.
    pub fn num_module_outputs(&self) -> usize {
        self.fused
            .map_or(self.num_outputs, |fused| fused.num_outputs)
    }

    /// Its rows in its module; `None` if it has all of them in their order.
    pub fn selected_rows(&self) -> Option<RowSelection> {
        if self.fused.is_none() && self.row_order == RowOrder::Same {
            return None;
        }
        Some(RowSelection {
            first: self.fused.map_or(0, |fused| fused.first),
            len: self.num_outputs,
            order: self.row_order,
            runs: self.fused.and_then(|fused| fused.runs),
        })
    }
}

impl ModelSpec {
    /// The full name of a module in transformers, such as `model.layers.0.mlp.up_proj`.
    pub fn module_path(&self, module: Module) -> String {
        let name = match module.index {
            Some(index) => module.name.replace("{}", &index.to_string()),
            None => module.name.to_owned(),
        };
        match module.layer {
            Some(layer) => format!("{}.{layer}.{name}", self.modules.layers),
            None => name,
        }
    }

    /// The token at the end of a prompt that a decoder's classes do not read: the state of the last other one stands
    /// for the prompt (`GenericForSequenceClassification` of transformers).
    pub fn padding(&self) -> Option<TokenId> {
        let is_last = self.pooling.is_some_and(|it| it.mode == PoolingMode::Last);
        let classes = self
            .classes
            .as_ref()
            .filter(|_| is_last && !self.is_bidirectional);
        classes.and_then(|head| head.padding)
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The projections of all layers that adapters can change: not those of experts, and not what heads make of
    /// latents.
    pub fn projections(&self) -> impl Iterator<Item = (usize, &Projection)> {
        let layers = self.layers.iter().enumerate();
        layers.flat_map(|(index, layer)| {
            let adaptable = layer.adaptable_projections().into_iter();
            adaptable.map(move |projection| (index, projection))
        })
    }

    /// The place of one of [these](ModelSpec::projections) among them; `None` if it is another.
    pub fn place_of(&self, projection: &Projection) -> Option<usize> {
        self.projections()
            .position(|(_, other)| std::ptr::eq(other, projection))
    }

    /// The place of the embedding of tokens in the weights of adapters, behind the projections.
    pub fn embedding_place(&self) -> usize {
        self.projections().count()
    }

    /// The place of the output layer in the weights of adapters.
    pub fn output_place(&self) -> usize {
        self.embedding_place() + 1
    }

    /// The places in the weights of adapters.
    pub fn num_places(&self) -> usize {
        self.output_place() + 1
    }

    /// Width of the embedding, of the output layer, and so of the states that stand for a prompt.
    pub fn embedding_width(&self) -> usize {
        let projections = self.embedding_projections.as_ref();
        projections.map_or(self.hidden_size, |it| it.input.num_inputs)
    }

    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// The heads of a layer's attention.
    pub fn head_shape(&self, layer: usize) -> HeadShape {
        let own = self.layers[layer].attention.kv_heads;
        HeadShape {
            num_q_heads: self.num_heads,
            num_kv_heads: own.map_or(self.num_kv_heads, |heads| heads.num),
            head_dim: own.map_or(self.head_dim, |heads| heads.dim),
        }
    }

    /// Whether layers have other heads, read keys and values of each other, or have inputs or factors of their own, or
    /// norms of values: only devices with [these operations](inflight_device::LayerInputOps) compute them, in one
    /// process.
    pub fn has_layers_of_their_own(&self) -> bool {
        self.layer_inputs.is_some()
            || self.layers.iter().any(|layer| {
                let attention = &layer.attention;
                layer.scale.is_some()
                    || layer.experts_block.is_some()
                    || attention.kv_heads.is_some()
                    || attention.kv_source.is_some()
                    || attention.qk_norm.is_some_and(|norm| norm.has_values)
            })
    }

    /// The largest width inside of a feed-forward block without experts; 0 if all have some.
    pub fn max_intermediate_size(&self) -> usize {
        self.intermediate_sizes().into_iter().max().unwrap_or(0)
    }

    /// The different widths inside of feed-forward blocks without experts; 0 if all have some.
    pub fn intermediate_sizes(&self) -> Vec<usize> {
        let widths = self.layers.iter().map(|layer| layer.feed_forward.width());
        let mut widths: Vec<_> = widths.filter(|&width| width > 0).collect();
        widths.sort_unstable();
        widths.dedup();
        match widths.is_empty() {
            true => vec![0],
            false => widths,
        }
    }

    /// The different heads of the attention of layers, and whether they store keys and values.
    pub fn head_shapes(&self) -> Vec<(HeadShape, bool)> {
        let mut shapes = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let shape = (self.head_shape(index), layer.attention.kv_source.is_none());
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// Elements of a query head's result.
    pub fn attended_dim(&self) -> usize {
        self.latent_shape()
            .map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// The sizes of latent attention, if it has that.
    pub fn latent_shape(&self) -> Option<LatentShape> {
        let latent = self.layers.first()?.attention.latent.as_ref()?;
        Some(latent.shape)
    }

    /// The mixtures of experts, if it has some.
    pub fn mixture(&self) -> Option<MixtureShape> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| layer.experts().map(ExpertsSpec::shape))
    }

    /// Weights of all projections of all layers.
    pub fn num_layer_weights(&self) -> u64 {
        self.layers.iter().map(LayerSpec::num_weights).sum()
    }

    /// Of these, the weights that products of one token read.
    pub fn num_layer_weights_of_token(&self) -> u64 {
        let unread = |layer: &LayerSpec| match layer.experts() {
            Some(experts) => {
                let Routing {
                    num_experts,
                    num_chosen,
                    ..
                } = experts.routing;
                (num_experts - num_chosen) as u64 * experts.num_weights_of_expert()
            }
            None => 0,
        };
        self.num_layer_weights() - self.layers.iter().map(unread).sum::<u64>()
    }

    /// Weights of the output layer, and of the embedding.
    pub fn num_output_weights(&self) -> u64 {
        self.vocab_size as u64 * self.embedding_width() as u64
    }

    /// Bytes of the weights of a float checkpoint as the runner keeps them, in bf16.
    pub fn num_weight_bytes(&self) -> u64 {
        let is_one = self.tied_embeddings || self.pooling.is_some();
        let num_embeddings = if is_one { 1 } else { 2 };
        let between = self
            .embedding_projections
            .as_ref()
            .map_or(0, |it| it.input.num_weights() + it.output.num_weights());
        2 * (num_embeddings * self.num_output_weights() + between + self.num_layer_weights())
    }

    /// The longest sequence that can be computed: all positions of the model.
    pub fn max_seq_len(&self) -> usize {
        self.max_position_embeddings
    }

    /// The recurrence of its layers with a state, which are of equal sizes.
    pub fn recurrence(&self) -> Option<&RecurrenceSpec> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| layer.attention.recurrence.as_ref())
    }

    /// The indices of some layers among those that keep keys and values.
    ///
    /// ```text
    /// layers     0 state  1 cache  2 state  3 cache  4 cache
    /// cached              0                 1        2
    ///            |------ 0..3 ------------| is 0..1
    /// ```
    pub fn cached_layers(&self, layers: Range<usize>) -> Range<usize> {
        let count = |layers: &[LayerSpec]| layers.iter().filter(|layer| layer.has_cache()).count();
        let first = count(&self.layers[..layers.start]);
        first..first + count(&self.layers[layers])
    }

    /// Layers that keep keys and values.
    pub fn num_cached_layers(&self) -> usize {
        self.cached_layers(0..self.num_layers()).len()
    }

    /// Bytes of the recurrent states of a sequence, in all layers.
    pub fn state_bytes(&self) -> u64 {
        let states = self.layers.iter().filter_map(|it| it.attention.recurrence);
        states.map(|it| 4 * it.shape.state_len() as u64).sum()
    }

    /// The window of each layer.
    pub fn windows(&self) -> impl Iterator<Item = Option<NonZeroU32>> {
        self.layers.iter().map(|layer| layer.attention.window)
    }

    /// Elements of a key and a value of each layer that keeps them.
    pub fn kv_widths(&self) -> impl Iterator<Item = usize> {
        let layers = (0..self.num_layers()).filter(|&layer| self.layers[layer].has_cache());
        layers.map(|layer| {
            let heads = self.head_shape(layer);
            heads.num_kv_heads * heads.head_dim
        })
    }

    /// The window of each layer with keys and values: the smaller of the model's and the configured one.
    pub fn windows_within(
        &self,
        attention: &AttentionWindows,
    ) -> impl Iterator<Item = Option<NonZeroU32>> {
        let layers = self.layers.iter().enumerate();
        let cached = layers.filter(|(_, layer)| layer.has_cache());
        cached.map(|(index, layer)| {
            let windows = [layer.attention.window, attention.window(index)];
            windows.into_iter().flatten().min()
        })
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

impl<N> Norms<N> {
    /// A norm in front of each block.
    pub const fn before(attention: N, feed_forward: N) -> Self {
        Self::Sequential {
            attention: BlockNorms {
                before: Some(attention),
                after: None,
            },
            feed_forward: BlockNorms {
                before: Some(feed_forward),
                after: None,
            },
        }
    }

    /// A norm of the result of each block.
    pub const fn after(attention: N, feed_forward: N) -> Self {
        Self::Sequential {
            attention: BlockNorms {
                before: None,
                after: Some(attention),
            },
            feed_forward: BlockNorms {
                before: None,
                after: Some(feed_forward),
            },
        }
    }

    /// The norm of what the attention block reads. `None`: it reads the residual stream itself.
    pub const fn first(&self) -> Option<&N> {
        match self {
            Self::Sequential { attention, .. } => attention.before.as_ref(),
            Self::Parallel { attention, .. } => Some(attention),
            Self::OfSums { .. } => None,
        }
    }

    /// Whether results of blocks are normalised.
    pub const fn has_after(&self) -> bool {
        match self {
            Self::Sequential {
                attention,
                feed_forward,
            } => attention.after.is_some() || feed_forward.after.is_some(),
            Self::Parallel { .. } | Self::OfSums { .. } => false,
        }
    }

    /// Whether they normalise the residual stream itself.
    pub const fn are_of_sums(&self) -> bool {
        matches!(self, Self::OfSums { .. })
    }

    /// Turns each norm into something else.
    ///
    /// # Errors
    /// The first error of `convert`.
    pub fn try_map<M, E>(
        &self,
        mut convert: impl FnMut(&N) -> Result<M, E>,
    ) -> Result<Norms<M>, E> {
        let mut block = |norms: &BlockNorms<N>| {
            Ok(BlockNorms {
                before: norms.before.as_ref().map(&mut convert).transpose()?,
                after: norms.after.as_ref().map(&mut convert).transpose()?,
            })
        };
        Ok(match self {
            Self::Sequential {
                attention,
                feed_forward,
            } => Norms::Sequential {
                attention: block(attention)?,
                feed_forward: block(feed_forward)?,
            },
            Self::Parallel {
                attention,
                feed_forward,
            } => Norms::Parallel {
                attention: convert(attention)?,
                feed_forward: feed_forward.as_ref().map(convert).transpose()?,
            },
            Self::OfSums {
                attention,
                feed_forward,
            } => Norms::OfSums {
                attention: convert(attention)?,
                feed_forward: convert(feed_forward)?,
            },
        })
    }
}

impl LayerSpec {
    /// All projections, attention's first; of experts, the projections of one.
    pub fn projections(&self) -> impl Iterator<Item = &Projection> {
        let latent = self.attention.latent.iter().map(|latent| &latent.heads);
        let attention = self.attention.projections().into_iter().chain(latent);
        let inputs = self.input_block.iter().flat_map(InputBlock::projections);
        let experts = self.experts_block.iter();
        let feed_forward = self.feed_forward.projections().into_iter();
        let feed_forward = feed_forward.chain(experts.flat_map(|it| it.experts.projections()));
        attention.chain(feed_forward).chain(inputs)
    }

    /// Its experts, in place of a feed-forward block or beside it.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match (&self.feed_forward, &self.experts_block) {
            (FeedForward::Experts(experts), _) => Some(experts),
            (_, block) => block.as_ref().map(|block| &block.experts),
        }
    }

    /// Those that adapters can change.
    pub fn adaptable_projections(&self) -> Vec<&Projection> {
        let mut all = self.attention.projections();
        if !matches!(self.feed_forward, FeedForward::Experts(_)) {
            all.extend(self.feed_forward.projections());
        }
        all.extend(self.input_block.iter().flat_map(InputBlock::projections));
        all
    }

    /// Whether it keeps keys and values of its own.
    pub fn has_cache(&self) -> bool {
        self.attention.recurrence.is_none() && self.attention.kv_source.is_none()
    }

    /// The weights of all projections.
    pub fn num_weights(&self) -> u64 {
        let of_other_experts = self.experts().map_or(0, |experts| {
            (experts.routing.num_experts - 1) as u64 * experts.num_weights_of_expert()
        });
        let projections = self.projections().map(Projection::num_weights);
        projections.sum::<u64>() + of_other_experts
    }
}

impl InputBlock {
    fn projections(&self) -> [&Projection; 2] {
        [&self.gate, &self.down]
    }
}

impl ExpertsSpec {
    /// Its sizes.
    pub fn shape(&self) -> MixtureShape {
        let shared = self.shared.as_ref();
        MixtureShape {
            routing: self.routing,
            hidden_size: self.gate_up.num_inputs,
            expert_size: self.down.num_inputs,
            shared_size: shared.map_or(0, |shared| shared.down.num_inputs),
        }
    }

    /// The router, the projections of one, and the shared one's.
    fn projections(&self) -> Vec<&Projection> {
        let mut all = vec![&self.router, &self.gate_up, &self.down];
        if let Some(shared) = &self.shared {
            all.extend([&shared.gate_up, &shared.down]);
        }
        all
    }

    /// The weights of one of the experts.
    fn num_weights_of_expert(&self) -> u64 {
        self.gate_up.num_weights() + self.down.num_weights()
    }
}

impl AttentionSpec {
    /// Its projections, without what heads make of latents.
    fn projections(&self) -> Vec<&Projection> {
        let mut all = vec![&self.qkv, &self.o];
        all.extend(&self.gate);
        if let Some(latent) = &self.latent {
            all.push(&latent.kv);
            all.extend(latent.queries.iter().map(|queries| &queries.projection));
        }
        all
    }

    /// Sets whether its projections have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        self.qkv.has_bias = has_bias;
        self.o.has_bias = has_bias;
        if let Some(gate) = &mut self.gate {
            gate.has_bias = has_bias;
        }
    }
}

impl FeedForward {
    /// Sets whether the projections of a block without experts have biases.
    pub fn set_biases(&mut self, has_bias: bool) {
        match self {
            Self::Gated {
                gate_up: up, down, ..
            }
            | Self::Plain { up, down, .. } => {
                up.has_bias = has_bias;
                down.has_bias = has_bias;
            }
            Self::Experts(_) => {}
        }
    }

    /// Its projections; of experts, the router, the projections of one, and the shared one's.
    pub fn projections(&self) -> Vec<&Projection> {
        match self {
            Self::Gated {
                gate_up: up, down, ..
            }
            | Self::Plain { up, down, .. } => vec![up, down],
            Self::Experts(experts) => experts.projections(),
        }
    }

    /// The projections from its inside; of experts, the projection of one, and the shared one's.
    pub fn downs_mut(&mut self) -> Vec<&mut Projection> {
        match self {
            Self::Gated { down, .. } | Self::Plain { down, .. } => vec![down],
            Self::Experts(ExpertsSpec { down, shared, .. }) => {
                let shared = shared.as_mut().map(|shared| &mut shared.down);
                [down].into_iter().chain(shared).collect()
            }
        }
    }

    /// The width inside of a block without experts; 0 if it has some.
    pub fn width(&self) -> usize {
        match self {
            Self::Gated { down, .. } | Self::Plain { down, .. } => down.num_inputs,
            Self::Experts(_) => 0,
        }
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
                runs: None,
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

    /// A projection whose parts take turns in a single module: each has `num_runs` runs of this many outputs.
    pub fn fused_in_runs(
        module: &'static str,
        parts: &[usize],
        num_runs: usize,
        num_inputs: usize,
        stacking: Stacking,
    ) -> Self {
        let mut fused = Self::fused(module, parts, num_inputs, stacking);
        let stride = parts.iter().sum();
        for (linear, &len) in fused.parts.iter_mut().zip(parts) {
            linear.num_outputs = len * num_runs;
            if let Some(fused) = &mut linear.fused {
                fused.num_outputs *= num_runs;
                fused.runs = Some(RowRuns::new(len, stride));
            }
        }
        fused
    }

    /// Has the parts of a module follow one another, each as a whole.
    pub fn join_runs(&mut self) {
        let mut first = 0;
        for linear in &mut self.parts {
            if let Some(fused) = &mut linear.fused {
                (fused.first, fused.runs) = (first, None);
            }
            first += linear.num_outputs;
        }
    }

    /// The same, stored as `[inputs, outputs]`.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        for linear in &mut self.parts {
            linear.is_transposed = true;
        }
        self
    }

    /// The same with or without biases.
    #[must_use]
    pub fn with_bias(self, has_bias: bool) -> Self {
        Self { has_bias, ..self }
    }

    /// Outputs of all parts.
    pub fn num_outputs(&self) -> usize {
        self.parts.iter().map(|part| part.num_outputs).sum()
    }

    /// Its weights, biases not counted.
    pub fn num_weights(&self) -> u64 {
        self.num_outputs() as u64 * self.num_inputs as u64
    }
}
