//! L2: buffers and operations of the devices that a model runs on. `crates/device-cpu` and `crates/device-cuda`
//! implement them.
//!
//! ```text
//! attention.rs rope.rs        heads, windows and sinks, rotary angles
//! kv_layout.rs kv_batch.rs    the blocks of a KV cache, and which of them a step uses
//! layer_groups.rs             layers that share blocks
//! latent.rs latent_weights.rs     multi-head latent attention
//! low_rank.rs adapter_values.rs adapter_bytes.rs  adapters
//! operands.rs linear.rs packed.rs what operations are given; packed weights as bytes
//! experts.rs expert_weights.rs    mixtures of experts
//! memory.rs                   large buffers of the host
//! rank_host.rs                what the hosts of several ranks say to each other
//!
//! load.rs step_io.rs ops.rs recurrence.rs
//!                             the traits of every device: memory, the ends of a step, and a forward pass
//! stacks.rs tiles.rs row_norms.rs states.rs layer_inputs.rs indexer.rs rank_ops.rs
//!                             operations that only some devices have
//! lacking.rs                  what the others have in their place
//! device.rs                   a device with all that it has
//! ```
//!
//! A [`Device`] is a machine with the operations of a decoder. An operation knows rows, sizes and block tables;
//! it knows neither requests nor the meaning of layers.

mod adapter_bytes;
mod adapter_values;
mod attention;
mod device;
mod expert_weights;
mod experts;
mod host_memory;
mod indexer;
mod kv_batch;
mod kv_layout;
mod kv_layouts;
mod lacking;
mod latent;
mod latent_weights;
mod layer_groups;
mod layer_inputs;
mod linear;
mod load;
mod low_rank;
pub mod memory;
mod operands;
mod ops;
mod packed;
mod rank_host;
mod rank_ops;
mod recurrence;
mod rope;
mod row_norms;
mod stacks;
mod states;
mod step_io;
mod tiles;

pub use attention::{AttentionParams, HeadBiases, HeadPlaces, HeadShape, QkNorm, QkNormKind};
pub use device::Device;
pub use expert_weights::{Expert, Experts};
pub use experts::{GroupedRouting, MixtureShape, RouterScores, Routing, RoutingRule};
pub use host_memory::{available_host_bytes, available_process_bytes, host_id};
pub use indexer::{IndexerOps, IndexerParams, IndexerShape};
pub use kv_batch::{KvBatch, KvSpan};
pub use kv_layout::{CpuKvDtype, KvDtype, KvLayout, KvValues};
pub use kv_layouts::KvLayouts;
pub use lacking::Lacking;
pub use latent::LatentShape;
pub use latent_weights::{LatentHeads, LatentParams};
pub use layer_groups::{GroupBlocks, LayerGroups, LayerPlace};
pub use layer_inputs::{LayerInputOps, LayerInputParams, MAX_STREAMS, StreamCoefs};
pub use linear::{EmbeddingTable, Linear, RopeParams, Tile};
pub use load::Load;
pub use low_rank::{
    AdaptedPlace, AdaptedRows, AdapterRun, AdapterWeights, DenseRows, LowRank, OUTPUT_PANEL,
    RANK_PANEL,
};
pub use operands::{
    Activation, AdapterCapacity, DeviceSample, FirstStep, Gating, ImageRows, InnerActivation,
    LayerNorm, LogitsTransform, Norm, Output, PackedWeights, PlainActivation, QuantisedWidths,
    SavedState, StepCapacity, StepInputs, StepResults, StepWidths, Tiling, TokenInFlight,
};
pub use ops::Ops;
pub use packed::{PACKED_PIECE_BYTES, PackedBytes, PackedPart, PackedReader, PackedShape};
pub use rank_host::RankHost;
pub use rank_ops::RankOps;
pub use recurrence::{
    DeltaForm, DeltaShape, GateFunction, LateInputs, RecurrenceParams, RecurrenceShape,
    RecurrenceWeights, RecurrentOps, RecurrentRule, RuleWeights, ScanShape, SpaceNorm,
    StateSpaceShape,
};
pub use rope::{AxisPositions, RopeTable};
pub use row_norms::RowNormOps;
pub use stacks::Stacks;
pub use states::StateOps;
pub use step_io::StepIo;
pub use tiles::TileOps;
