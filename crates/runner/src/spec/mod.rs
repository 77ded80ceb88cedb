//! The computation of a model, as data.
//!
//! The files of `families/` write it; the decoder, the loader of weights and every formula for
//! bytes read it. Nothing else depends on the family.

mod attention;
mod classes;
mod feed_forward;
mod layer;
mod mtp;
mod norms;
mod projection;
mod tower;

use std::num::NonZeroU32;
use std::ops::Range;

use crate::limits::AttentionWindows;
use crate::recurrence_spec::RecurrenceSpec;
use inflight_base::{TokenId, Tokens};
use inflight_config::PoolingMode;
use inflight_device::{
    Gating, HeadShape, IndexerShape, LatentShape, LogitsTransform, MixtureShape, QkNormKind,
    RoutingRule,
};

pub use attention::{
    AttentionSpec, GateSpec, IndexerSpec, KvHeads, LateInputsSpec, LatentQueries, LatentSelection,
    LatentSpec, QkNormSpec, TimeNorm,
};
pub use classes::{ClassActivation, ClassDense, ClassHead, ClassModules, ClassTransform};
pub use feed_forward::{ExpertsSpec, FeedForward, SharedExpert, StackedExperts, StackedLayout};
pub use layer::{
    ColumnFactors, ExpertsBlock, ExpertsNorms, InnerNorms, InputBlock, LayerInputsSpec, LayerSpec,
    Multipliers, RecurrenceBlock, StreamsSpec,
};
pub use mtp::MtpSpec;
pub use norms::{Block, BlockNorms, NormKind, NormSpec, Norms};
pub use projection::{FusedOutputs, Linear, Projection};
pub use tower::{
    DeepProjector, InnerProjection, PatchShape, PositionTable, ProjectorSpec, TileSizes, TowerSpec,
    TowerWindows,
};

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
    /// Projections between embeddings of another width and the residual stream.
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
    /// Whether each token of an image in a prompt also sees the other tokens of the image, in all layers.
    pub has_whole_images: bool,
    /// Inputs of each layer's own, besides the residual stream.
    pub layer_inputs: Option<LayerInputsSpec>,
    /// Residual streams beside the first one. Only with inputs of each layer's own.
    pub streams: Option<StreamsSpec>,
    /// How the residual stream is normalised.
    pub norm: NormSpec,
    /// The transform of the products of the output layer.
    pub logits: LogitsTransform,
    /// The modules outside of the layers.
    pub modules: ModelModules,
    /// The decoder layers, from the first to the last.
    pub layers: Vec<LayerSpec>,
    /// Whether the output layer has the weights of the embedding.
    pub tied_embeddings: bool,
    /// Whether the output layer has a bias.
    pub output_bias: bool,
    /// Whether the rows of the output layer are divided by their lengths.
    pub has_unit_outputs: bool,
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
    /// The number of the first layer in that list; 0 but for a draft head behind the layers of its model.
    pub first_layer: usize,
    /// Consecutive layers whose modules are in one element of that list.
    pub layers_per_module: usize,
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

impl ModelSpec {
    /// The full name of a module in transformers, such as `model.layers.0.mlp.up_proj`.
    pub fn module_path(&self, module: Module) -> String {
        let name = match module.index {
            Some(index) => module.name.replace("{}", &index.to_string()),
            None => module.name.to_owned(),
        };
        match module.layer {
            Some(layer) => {
                let layer = self.modules.first_layer + layer / self.modules.layers_per_module;
                format!("{}.{layer}.{name}", self.modules.layers)
            }
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
        let latent = self.latent_shape();
        let value_dim = latent.map_or(self.head_dim, |latent| latent.latent_dim);
        HeadShape {
            num_q_heads: own.map_or(self.num_heads, |heads| heads.num_q),
            num_kv_heads: own.map_or(self.num_kv_heads, |heads| heads.num),
            head_dim: own.map_or(self.head_dim, |heads| heads.dim),
            value_dim: own.map_or(value_dim, |heads| heads.value_dim),
        }
    }

    /// The query heads of the layer with the most.
    pub fn max_query_heads(&self) -> usize {
        let layers = 0..self.num_layers();
        let heads = layers.map(|layer| self.head_shape(layer).num_q_heads);
        heads.max().unwrap_or(self.num_heads)
    }

    /// Whether the residual stream starts with an RMS norm.
    pub fn has_rms_norm_of_embeddings(&self) -> bool {
        self.embedding_norm.is_some() && self.norm.kind == NormKind::Rms
    }

    /// The parts of its layers that only devices with [these operations](inflight_device::LayerInputOps) compute.
    pub fn parts_for_layer_input_ops(&self) -> Vec<&'static str> {
        let any = |has: fn(&LayerSpec) -> bool| self.layers.iter().any(has);
        let parts = [
            (self.layer_inputs.is_some(), "per-layer embeddings"),
            (self.streams.is_some(), "several residual streams"),
            (any(|it| it.gate_cutoff.is_some()), "sparse gates"),
            (
                any(|it| it.attention.clip.is_some()),
                "clipped queries, keys and values",
            ),
            (any(|it| it.inner_norms.is_some()), "norms inside of blocks"),
            (any(|it| it.column_factors.is_some()), "layer scales"),
            (
                self.has_rms_norm_of_embeddings(),
                "RMS norms of embedded tokens",
            ),
            (any(|it| it.scale.is_some()), "layer scalars"),
            (
                any(|it| it.experts_block.is_some()),
                "experts beside feed-forward blocks",
            ),
            (
                any(|it| {
                    let experts = it.experts();
                    experts.is_some_and(|it| it.routing.num_zero_experts > 0)
                }),
                "experts that return their input",
            ),
            (
                any(|it| it.attention.kv_heads.is_some()),
                "layers with other heads",
            ),
            (
                any(|it| {
                    let heads = it.attention.kv_heads;
                    heads.is_some_and(|heads| heads.value_dim != heads.dim)
                }),
                "values of another width than keys",
            ),
            (
                any(|it| it.attention.kv_source.is_some()),
                "layers that share keys and values",
            ),
            (
                any(|it| {
                    let norm = it.attention.qk_norm;
                    norm.is_some_and(|norm| norm.kind == QkNormKind::BiasedLayer)
                }),
                "norms of heads with biases",
            ),
            (
                any(|it| it.attention.qk_norm.is_some_and(|norm| norm.has_values)),
                "norms of values",
            ),
            (
                any(|it| {
                    let attention = &it.attention;
                    attention.latent.is_some() && attention.rope.query_factors.is_some()
                }),
                "queries of latent attention scaled by position",
            ),
            (
                any(|it| it.attention.chunk.is_some()),
                "attention within chunks",
            ),
            (
                any(|it| {
                    let experts = it.experts();
                    experts.is_some_and(|it| it.routing.rule == RoutingRule::WeightedInputs)
                }),
                "experts whose inputs are scaled by the router",
            ),
            (
                any(|it| {
                    it.experts().is_some_and(|it| {
                        let mut gatings = [it.gating, it.shared_gating()].into_iter();
                        gatings.any(|gating| matches!(gating, Gating::Bounded(..)))
                    })
                }),
                "experts whose gates are bounded behind their activation",
            ),
        ];
        let parts = parts.into_iter().filter(|(has, _)| *has);
        parts.map(|(_, part)| part).collect()
    }

    /// The largest width inside of a feed-forward block without experts; 0 if all have some.
    pub fn max_intermediate_size(&self) -> usize {
        self.intermediate_sizes().into_iter().max().unwrap_or(0)
    }

    /// The different widths inside of feed-forward blocks without experts; 0 if all have some.
    pub fn intermediate_sizes(&self) -> Vec<usize> {
        let layers = self.layers.iter();
        let blocks = layers.filter_map(LayerSpec::feed_forward_block);
        let widths = blocks.map(FeedForward::width);
        let mut widths: Vec<_> = widths.filter(|&width| width > 0).collect();
        widths.sort_unstable();
        widths.dedup();
        match widths.is_empty() {
            true => vec![0],
            false => widths,
        }
    }

    /// The different numbers of gates of the attention of layers.
    pub fn gate_widths(&self) -> Vec<usize> {
        let gates = self
            .layers
            .iter()
            .filter_map(|it| it.attention.gate.as_ref());
        let mut widths: Vec<_> = gates.map(|it| it.projection.num_outputs()).collect();
        widths.sort_unstable();
        widths.dedup();
        widths
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

    /// The latent attention of its layers with attention, if it has that.
    pub fn latent(&self) -> Option<&LatentSpec> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| layer.attention.latent.as_ref())
    }

    /// The sizes of latent attention, if it has that.
    pub fn latent_shape(&self) -> Option<LatentShape> {
        self.latent().map(|latent| latent.shape)
    }

    /// The sizes of its indexers, which are equal, if it has some.
    pub fn indexer_shape(&self) -> Option<IndexerShape> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| Some(layer.indexer()?.shape))
    }

    /// The late inputs of its recurrences, which are of equal sizes, if it has some.
    pub fn late_inputs(&self) -> Option<&LateInputsSpec> {
        let mut layers = self.layers.iter();
        layers.find_map(|layer| layer.attention.late.as_ref())
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
                let routing = experts.routing;
                let num_unread = routing
                    .num_computed_experts()
                    .saturating_sub(routing.num_chosen);
                num_unread as u64 * experts.num_weights_of_expert()
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
        layers.find_map(LayerSpec::recurrence)
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
        let states = self.layers.iter().filter_map(LayerSpec::recurrence);
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
