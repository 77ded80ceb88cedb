//! A device with all that it has.

use super::indexer::IndexerOps;
use super::layer_inputs::LayerInputOps;
use super::operands::Tiling;
use super::ops::Ops;
use super::rank_host::RankHost;
use super::rank_ops::RankOps;
use super::recurrence::RecurrentOps;
use super::row_norms::RowNormOps;
use super::stacks::Stacks;
use super::states::StateOps;
use super::tiles::TileOps;
use inflight_base::LoadError;

/// A machine that a decoder runs on: [`Ops`], [`RecurrentOps`], and operations that not all devices have. Those are
/// methods of a value of their own, so that who has the value can call them; a device without them has
/// [`Lacking`](super::Lacking) in its place, of which there is no value.
///
/// ```text
/// Load      memory and weights             open, pack..., upload..., alloc..., reserve
/// StepIo    what comes and goes            copy_positions, offload, onboard; begin_step, end_step, results
/// Ops       what a forward pass computes   embed, norm, project, rope_and_store, ..., logits
/// RecurrentOps  layers with recurrent states
///   Stacks  experts as one matrix          while it is loaded
///   TileOps sums that are cut into tiles
///   RowNormOps norms of queries and keys over all ranks
///   StateOps pooling models and draft heads
///   LayerInputOps layers with inputs of their own
///   IndexerOps sparse attention by an indexer
///   RankOps one of several ranks
/// ```
pub trait Device: Ops + RecurrentOps {
    /// Packs the matrices of many experts, or heads, as one.
    type Stacks: Stacks<Self>;
    /// Cuts sums over the inputs of a product into tiles.
    type Tiles: TileOps<Self>;
    /// Normalises rows of queries and keys of which a rank has some heads.
    type RowNorms: RowNormOps<Self>;
    /// Computes pooling models and draft heads.
    type States: StateOps<Self>;
    /// Computes layers with inputs of their own.
    type LayerInputs: LayerInputOps<Self>;
    /// Computes sparse attention by an indexer.
    type Indexer: IndexerOps<Self>;
    /// Computes a model together with other ranks.
    type Ranks: RankOps<Self>;

    /// There if the experts of a layer are one matrix, and so are the heads of [latent attention](super::LatentHeads).
    /// If not, each is packed by itself.
    const STACKS: Option<Self::Stacks>;

    /// There if it can cut sums.
    const TILES: Option<Self::Tiles>;

    /// There if it normalises rows of queries and keys of which a rank has some heads.
    const ROW_NORMS: Option<Self::RowNorms>;

    /// There if it computes pooling models and draft heads, and has
    /// [bidirectional](super::AttentionParams::is_bidirectional) attention.
    const STATES: Option<Self::States>;

    /// There if it computes layers with inputs of their own, factors of the residual stream, norms of values, attention
    /// over keys and values of other layers or within chunks, and experts whose inputs are scaled by the router.
    const LAYER_INPUTS: Option<Self::LayerInputs>;

    /// There if it computes sparse attention by an indexer.
    const INDEXER: Option<Self::Indexer>;

    /// When it cuts sums into tiles, with these options.
    fn tiling(_options: &Self::Options) -> Tiling {
        match Self::TILES {
            Some(_) => Tiling::OfRanks,
            None => Tiling::Never,
        }
    }

    /// Makes it one of the ranks of a model, which compute all steps together.
    ///
    /// # Errors
    ///
    /// It can only be alone, or the other ranks cannot be reached.
    fn join_ranks(&mut self, host: &mut RankHost) -> Result<Self::Ranks, LoadError>;
}
