//! Sparse attention by an indexer (DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556).
//!
//! Beside [latent attention](super::LatentShape), a layer has a small attention without values, the indexer. Its scores
//! choose the positions that all heads of a query see. Its keys are in the cache, beside the latents.
//!
//! ```text
//! key         rotate(norm(k))                                 of a position, [head_dim]
//! query       rotate(q)                                       of each indexer head, [head_dim]
//! score       sum over heads h of w[h] * max(q[h] . key, 0)   of a query and a position up to its own
//! selection   the max_selected positions with the largest scores; of equal scores, the first positions
//! ```
//!
//! Constant factors of scores are left out: they do not change the selection. A query at one of the first
//! `max_selected` positions sees all positions up to its own.

use super::lacking::Lacking;
use super::latent_weights::LatentParams;
use super::load::Load;
use super::step_io::StepIo;
use inflight_base::LoadError;

/// The sizes of an indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerShape {
    /// Query heads, all of which meet one key.
    pub num_heads: usize,
    /// Elements of a query head and of a key, an even number.
    pub head_dim: usize,
    /// The first elements of a head, which are rotated; an even number.
    pub rotary_dim: usize,
    /// Whether adjacent elements are rotated together, instead of elements of both halves.
    pub is_interleaved: bool,
    /// The most positions that a query sees.
    pub max_selected: usize,
}

impl IndexerShape {
    /// Width of the queries of all heads.
    pub const fn q_len(&self) -> usize {
        self.num_heads * self.head_dim
    }
}

/// The operands of an indexer that a layer has.
pub struct IndexerParams<'a, D: Load> {
    /// The sizes.
    pub shape: IndexerShape,
    /// The weights and the biases of the layer norm of keys, `[head_dim]` each.
    pub key_norm: [&'a D::Vector; 2],
    /// Added to the variance of a key.
    pub norm_eps: f32,
    /// The angles, `[rotary_dim / 2]` for each position.
    pub angles: &'a D::Angles,
}

impl<D: Load> Clone for IndexerParams<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Load> Copy for IndexerParams<'_, D> {}

/// Operations of layers with an indexer.
pub trait IndexerOps<D: StepIo>: Copy {
    /// The positions that the queries of a step select.
    type Selection;

    /// Bytes of scratch memory that [`IndexerOps::alloc_selection`] takes once on a device, whatever the number of
    /// layers and queries.
    fn num_scratch_bytes(self) -> usize;

    /// Reserves memory for `max_rows` queries, and scratch memory.
    ///
    /// # Errors
    ///
    /// Memory is short.
    fn alloc_selection(
        self,
        device: &mut D,
        max_rows: usize,
        max_selected: usize,
    ) -> Result<Self::Selection, LoadError>;

    /// Normalises and rotates the keys of the step's tokens, `[num_tokens, head_dim]`, and stores them in a layer of
    /// the cache.
    fn store_keys(
        self,
        device: &mut D,
        step: &D::Step<'_>,
        params: IndexerParams<'_, D>,
        keys: &D::Sums,
        cache: &mut D::KvCache,
        layer: usize,
    );

    /// Selects positions for the step's tokens, whose keys are in the cache. `q` has the queries, `[num_tokens,
    /// q_len]`, not rotated yet, and `head_weights` their weights, `[num_tokens, num_heads]`.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn select(
        self,
        device: &mut D,
        step: &D::Step<'_>,
        params: IndexerParams<'_, D>,
        q: &D::Sums,
        head_weights: &D::Sums,
        cache: &D::KvCache,
        layer: usize,
        selection: &mut Self::Selection,
    );

    /// [Latent attention](super::Ops::latent_attention) over the selected positions.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    fn attend(
        self,
        device: &mut D,
        step: &D::Step<'_>,
        params: &LatentParams<'_, D>,
        q: &D::Sums,
        selection: &Self::Selection,
        cache: &D::KvCache,
        layer: usize,
        out: &mut D::Inputs,
    );
}

impl<D: StepIo> IndexerOps<D> for Lacking {
    type Selection = Self;

    fn num_scratch_bytes(self) -> usize {
        match self {}
    }

    fn alloc_selection(self, _: &mut D, _: usize, _: usize) -> Result<Self, LoadError> {
        match self {}
    }

    fn store_keys(
        self,
        _: &mut D,
        _: &D::Step<'_>,
        _: IndexerParams<'_, D>,
        _: &D::Sums,
        _: &mut D::KvCache,
        _: usize,
    ) {
        match self {}
    }

    fn select(
        self,
        _: &mut D,
        _: &D::Step<'_>,
        _: IndexerParams<'_, D>,
        _: &D::Sums,
        _: &D::Sums,
        _: &D::KvCache,
        _: usize,
        _: &mut Self,
    ) {
        match self {}
    }

    fn attend(
        self,
        _: &mut D,
        _: &D::Step<'_>,
        _: &LatentParams<'_, D>,
        _: &D::Sums,
        _: &Self,
        _: &D::KvCache,
        _: usize,
        _: &mut D::Inputs,
    ) {
        match self {}
    }
}
