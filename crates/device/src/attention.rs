//! The heads of an attention layer, and which positions its queries see.

use std::num::NonZeroU32;

/// The heads of an attention layer. A row of the QKV projection holds all query heads, then all key heads,
/// then all value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_q_heads: usize,
    /// Key heads, and equally many value heads.
    pub num_kv_heads: usize,
    /// Elements of a query head and of a key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
}

impl HeadShape {
    /// Width of the queries.
    pub const fn q_len(&self) -> usize {
        self.num_q_heads * self.head_dim
    }

    /// Width of the QKV projection.
    pub const fn qkv_len(&self) -> usize {
        self.q_len() + self.num_kv_heads * (self.head_dim + self.value_dim)
    }

    /// Width of the results of all query heads.
    pub const fn out_len(&self) -> usize {
        self.num_q_heads * self.value_dim
    }
}

/// The norms of queries and keys, before rotation but for [one kind](QkNormKind::RotatedHead). `V` is a vector of the
/// device.
pub struct QkNorm<'a, V: ?Sized = [f32]> {
    /// Weight of the query norm, `[head_dim]` or as wide as all query heads.
    pub q: &'a V,
    /// Weight of the key norm, `[head_dim]` or as wide as all key heads.
    pub k: &'a V,
    /// Which norms they are.
    pub kind: QkNormKind,
    /// Whether values have an RMS norm of each head, too, without weights.
    pub has_values: bool,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
}

impl<V: ?Sized> Clone for QkNorm<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V: ?Sized> Copy for QkNorm<'_, V> {}

/// How queries and keys are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// The RMS norm of each head by itself, with the same weights (Qwen 3).
    Head,
    /// The RMS norm of all heads of a token together (OLMo 2).
    Row,
    /// The layer norm of each head by itself, with weights of its own and no bias (Command R+).
    LayerOfHead,
    /// The layer norm of each head by itself, with weights and biases that all heads share: a vector has the weights,
    /// then the biases (Persimmon). Only on devices with [layer inputs](super::Device::LAYER_INPUTS).
    BiasedLayer,
    /// As [`Self::Head`], but behind rotation (Hunyuan).
    RotatedHead,
}

impl QkNormKind {
    /// Of so many query heads and key heads, how many have weights of their own. Biases count as one more head.
    pub const fn num_weighted_heads(self, num_heads: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Head | Self::RotatedHead => [1, 1],
            Self::BiasedLayer => [2, 2],
            Self::Row | Self::LayerOfHead => num_heads,
        }
    }
}

/// The heads of a rank of several among those of the model, for norms over all of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadPlaces {
    /// Query and key heads of the model.
    pub num_heads: [usize; 2],
    /// For each query head of the rank, and then for each of its key heads, its place among those of the model, queries
    /// first. `None` for a replicated key head, which another one already stands for.
    pub places: Vec<Option<usize>>,
}

/// Attention parameters of each query head. `V` is a vector of the device, `[num_q_heads]`.
pub struct HeadBiases<'a, V: ?Sized = [f32]> {
    /// Scores of no position, which only add to the sum that results are divided by.
    pub sink_logits: Option<&'a V>,
    /// Linear biases of scores (ALiBi; Press et al., arXiv:2108.12409): a scaled score loses so much for each position
    /// that its key is in front of its query. They are behind the [bound](AttentionParams::soft_cap) of scores.
    pub slopes: Option<&'a V>,
}

impl<V: ?Sized> HeadBiases<'_, V> {
    /// Attention without any.
    pub const NONE: Self = Self {
        sink_logits: None,
        slopes: None,
    };
}

impl<V: ?Sized> Clone for HeadBiases<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V: ?Sized> Copy for HeadBiases<'_, V> {}

/// Which positions queries attend to, and how.
///
/// ```text
/// positions   | sinks |                 |---- window ----|
/// seen        *********                 ******************
///                                                  query ^
/// ```
///
/// Positions are absolute: those between the sinks and the window are still counted, and rotary angles are
/// those of the full sequence, unless the sinks [shift](Self::shifts_sinks). The sinks (StreamingLLM; Xiao et al.,
/// arXiv:2309.17453) are seen in addition to the window.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    /// The heads.
    pub shape: HeadShape,
    /// The factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The bound `c` of a score `s` after that, which becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// The number of positions that a query sees, up to and including its own. `None` for all.
    pub window: Option<NonZeroU32>,
    /// The length of the chunks that a text is cut into: of the window, a query sees only the positions of its own
    /// chunk. Only on devices with [layer inputs](super::Device::LAYER_INPUTS).
    pub chunk: Option<NonZeroU32>,
    /// Whether a query also sees the positions behind it: all of its sequence, or as many as before it in a window. All
    /// of them are in the step then. Only on devices that [pool](super::Device::STATES).
    pub is_bidirectional: bool,
    /// Positions at the start of the sequence that every later query sees in addition.
    pub num_sinks: u32,
    /// Whether only the positions that a query sees count for its distance to the sinks, as if these were in front of
    /// the window.
    pub shifts_sinks: bool,
}

impl AttentionParams {
    /// The first position that the query at `position` sees, besides the sinks.
    pub fn first_seen(&self, position: usize) -> usize {
        let window = self
            .window
            .map_or(usize::MAX, |window| window.get() as usize);
        let of_chunk = self.chunk.map_or(0, |chunk| {
            let chunk = chunk.get() as usize;
            position / chunk * chunk
        });
        (position + 1).saturating_sub(window).max(of_chunk)
    }

    /// Where a query at `position` is for the sinks, if these shift.
    ///
    /// ```text
    /// text       | 0 1 |                | 12 13 14 15 |      window 4, 2 sinks: the query at 15 sees what it would
    /// cache      | 0 1 | 2  3  4  5 |                        see at 5
    /// ```
    ///
    /// It is as far from the positions of its window as in the text. So of two queries, one with the rotation of the
    /// text and one with that of this position, each meets the stored keys at the right distance.
    pub fn shifted(&self, position: u32) -> u32 {
        match self.window {
            Some(window) => position.min((window.get() - 1).saturating_add(self.num_sinks)),
            None => position,
        }
    }

    /// Whether queries have another rotation for the sinks.
    pub fn has_sink_queries(&self) -> bool {
        self.shifts_sinks && self.window.is_some() && self.num_sinks > 0
    }
}
