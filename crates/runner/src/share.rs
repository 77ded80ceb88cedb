//! What a rank of several has of each layer.
//!
//! Queries, keys, values, gate and up are cut by their outputs, the projections behind them by their inputs, and the
//! embedding and the output layer by the vocabulary. What is cut by inputs is a sum over all ranks. For the same bits
//! on 1, 2 and 4 ranks, these inputs are cut into four tiles, whatever the number of ranks, and their products are
//! added in pairs:
//!
//! ```text
//! tiles     0     1     2     3
//!            \   /       \   /       on 4 ranks by the collective operation,
//!             \ /         \ /        on 2 ranks by each rank,
//!              \___     ___/
//!                  \___/             on 2 and 4 ranks by the collective operation
//! ```
//!
//! Heads and widths that do not divide are cut as evenly as whole heads, pairs of inputs, and the groups of quantised
//! weights allow, so that a rank may have nothing of a narrow block. Keys and values that the queries of several ranks
//! read are computed and stored by each of them; so are the latents of latent attention, which all heads read.
//! Recurrences are cut as attention is, see [`RecurrenceShare`].

use std::ops::Range;

use super::head_share::HeadShare;
use super::rank::{Rank, lcm, part, whole};
use super::recurrence_share::RecurrenceShare;
use super::spec::{FeedForward, LateInputsSpec, LayerSpec, ModelSpec};
use inflight_base::LoadError;
use inflight_device::{RecurrenceShape, RecurrentRule};

/// What stays together in every tile: inputs of quantised weights whose groups have one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutUnits {
    /// Query heads.
    pub(super) heads: usize,
    /// Inputs of projections behind the inside of a feed-forward block.
    pub(super) inner: usize,
    /// Value heads, or channels, of recurrences.
    pub(super) values: usize,
}

/// The part of each layer, and of the vocabulary, that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelShare {
    rank: Rank,
    units: CutUnits,
    pub(super) heads: HeadShare,
    /// Its rows of the embedding and of the output layer.
    pub(super) vocabulary: Range<usize>,
    /// How many of these rows each rank has.
    pub(super) vocabulary_sizes: Vec<usize>,
}

impl CutUnits {
    /// The units of float weights.
    pub(super) const SINGLE: Self = Self {
        heads: 1,
        inner: 1,
        values: 1,
    };

    /// Keeps so many query heads together.
    pub(super) fn join_heads(&mut self, num: usize) {
        self.heads = lcm(self.heads, num);
    }

    /// Keeps so many inputs together.
    pub(super) fn join_inner(&mut self, num: usize) {
        self.inner = lcm(self.inner, num);
    }

    /// Keeps so many value heads, or channels, of recurrences together.
    pub(super) fn join_values(&mut self, num: usize) {
        self.values = lcm(self.values, num);
    }
}

impl ModelShare {
    /// The share of a rank.
    ///
    /// # Errors
    /// The model cannot be split over so many ranks.
    pub(super) fn new(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<Self, LoadError> {
        check(rank, spec, units)?;
        let cut = |index| part(spec.vocab_size, index, rank.num_ranks);
        Ok(Self {
            rank,
            units,
            heads: heads_of(rank, spec, units),
            vocabulary: cut(rank.index),
            vocabulary_sizes: (0..rank.num_ranks).map(|index| cut(index).len()).collect(),
        })
    }

    /// The same, for devices that sum over all inputs of a rank at once, and have no other operations for ranks.
    ///
    /// # Errors
    /// They cannot compute a share of the model.
    pub(super) fn without_tiles(&self, spec: &ModelSpec) -> Result<Self, LoadError> {
        check_without_tiles(self.rank, spec, self.units)?;
        Self::new(self.rank.without_tiles(), spec, self.units)
    }

    /// Whether it is all of the model.
    pub(super) fn is_whole(&self) -> bool {
        self.rank.num_ranks == 1
    }

    /// The tiles of its sums over inputs.
    pub(super) fn num_tiles(&self) -> usize {
        self.rank.tiles().len()
    }

    /// The first place in its weights of adapters, by that in those of the model. Its tiles follow one another.
    pub(super) fn place(&self, of_model: usize) -> usize {
        of_model * self.num_tiles()
    }

    /// Whether it adds the bias to sums over all ranks: in its last tile.
    pub(super) fn has_biases_of_sums(&self) -> bool {
        self.rank.is_last()
    }

    /// The inputs of the output projection of attention, by tiles.
    pub(super) fn attended(&self, head_dim: usize) -> Vec<Range<usize>> {
        self.heads.inputs(head_dim)
    }

    /// Its part of a layer with a recurrent state.
    pub(super) fn recurrence(&self, shape: &RecurrenceShape) -> RecurrenceShare {
        RecurrenceShare::new(self.rank, shape, self.units.values)
    }

    /// Its part of the inside of a feed-forward block of this width, by tiles.
    pub(super) fn inner(&self, width: usize) -> Vec<Range<usize>> {
        let unit = self.rank.unit_of_inputs(width, self.units.inner);
        self.rank.cut_in_units(width, unit)
    }

    /// The sizes of the model that this rank computes.
    pub(super) fn local_spec(&self, spec: &ModelSpec) -> ModelSpec {
        let mut local = spec.clone();
        local.num_heads = self.heads.queries.len();
        for layer in &mut local.layers {
            if let Some(latent) = &mut layer.attention.latent {
                latent.shape.num_heads = local.num_heads;
            }
            self.cut_gates(layer, spec.head_dim);
            self.cut_recurrence(layer);
        }
        // All heads of a rank read the same latents.
        if local.latent_shape().is_none() {
            local.num_kv_heads = self.heads.keys.len();
        }
        let downs = local.layers.iter_mut();
        for down in downs.flat_map(|layer| layer.feed_forward.downs_mut()) {
            down.num_inputs = whole(&self.inner(down.num_inputs)).len();
        }
        local
    }
}

impl ModelShare {
    /// Leaves the gates of its query heads.
    fn cut_gates(&self, layer: &mut LayerSpec, head_dim: usize) {
        let has_one = layer.attention.has_gates_of_heads(head_dim);
        if let Some(gate) = &mut layer.attention.gate {
            let of_head = if has_one { 1 } else { head_dim };
            let num_gates = self.heads.queries.len() * of_head;
            gate.projection.set_num_outputs(num_gates);
        }
    }

    /// Leaves its part of the recurrent states.
    fn cut_recurrence(&self, layer: &mut LayerSpec) {
        let Some(recurrence) = layer.recurrence_mut() else {
            return;
        };
        recurrence.shape = self.recurrence(&recurrence.shape).shape();
        let rule = recurrence.shape.rule;
        match (rule, &mut layer.attention.late) {
            (RecurrentRule::GatedDelta(delta), Some(LateInputsSpec::LowRank { gates, decays })) => {
                gates[1].set_num_outputs(delta.value_len());
                decays[1].set_num_outputs(delta.num_decays());
            }
            (RecurrentRule::SelectiveScan(scan), Some(LateInputsSpec::Selected { times, .. })) => {
                times[1].set_num_outputs(scan.num_channels)
            }
            _ => {}
        }
    }
}

/// The heads of a rank. What a model without attention calls heads is not cut.
fn heads_of(rank: Rank, spec: &ModelSpec, units: CutUnits) -> HeadShare {
    let rank = match spec.num_cached_layers() {
        0 => Rank::new(0, 1),
        _ => rank,
    };
    HeadShare::new(rank, spec.num_heads, spec.num_kv_heads, units.heads)
}

/// Refuses models that cannot be split over so many ranks.
fn check(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<(), LoadError> {
    let num_ranks = rank.num_ranks;
    let refuse = |problem: String| {
        Err(LoadError::Config {
            problem: format!("{num_ranks} ranks: {problem}"),
            remedy: "use fewer ranks".to_owned(),
        })
    };
    let has_attention = spec.num_cached_layers() > 0;
    for (count, name) in [
        (spec.num_heads, "query heads"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ] {
        if count < num_ranks && (has_attention || name != "query heads") {
            return refuse(format!("the model has only {count} {name}"));
        }
    }
    let mut ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
    if ranks.any(|rank| heads_of(rank, spec, units).queries.is_empty()) {
        return refuse(format!(
            "of the {} query heads of the model, {} have inputs of the same groups of quantised weights",
            spec.num_heads, units.heads
        ));
    }
    let recurrences = spec.layers.iter().filter_map(LayerSpec::recurrence);
    for shape in recurrences.map(|recurrence| &recurrence.shape) {
        let mut ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
        let share = |rank| RecurrenceShare::new(rank, shape, units.values);
        if ranks.any(|rank| share(rank).is_empty()) {
            return refuse(RecurrenceShare::indivisible(shape, units.values));
        }
    }
    Ok(())
}

/// Refuses models that need more operations of ranks than sums.
fn check_without_tiles(rank: Rank, spec: &ModelSpec, units: CutUnits) -> Result<(), LoadError> {
    let num_ranks = rank.num_ranks;
    let refuse = |problem: String| {
        Err(LoadError::Config {
            problem: format!("{num_ranks} ranks on GPUs: {problem}"),
            remedy: "use one GPU, or instance_group [{ kind: KIND_CPU }]".to_owned(),
        })
    };
    // Of a shared expert a rank may have nothing.
    let blocks = spec.layers.iter().filter_map(LayerSpec::feed_forward_block);
    let widths = blocks.map(|block| match block {
        FeedForward::Experts(experts) => experts.down.num_inputs,
        block => block.width(),
    });
    let unit = lcm(2, units.inner);
    if let Some(num_units) = widths.min().map(|width| width.div_ceil(unit))
        && num_units < num_ranks
    {
        return refuse(format!(
            "a down projection of the model has only {num_units} times {unit} inputs, which stay together"
        ));
    }
    let recurrences = spec.layers.iter().filter_map(LayerSpec::recurrence);
    for recurrence in recurrences {
        let share = |index| {
            let rank = Rank::new(index, num_ranks).without_tiles();
            RecurrenceShare::new(rank, &recurrence.shape, units.values)
        };
        let widths = (0..num_ranks).map(|index| share(index).shape().out_len());
        if let Some(width) = widths.into_iter().find(|width| width % 2 > 0) {
            return refuse(format!(
                "a rank would have {width} inputs of an output projection behind recurrent states, and GPUs move pairs"
            ));
        }
    }
    Ok(())
}
