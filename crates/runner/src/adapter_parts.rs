//! The parts of an adapter on the ranks of a model.
//!
//! ```text
//! projection cut by outputs    x * A^T on every rank, and the rows of B of its outputs
//! projection cut by inputs     in each tile the columns of A of its inputs, and all of B
//! embedding, output layer      the columns of A, or the rows of B, of its tokens
//! ```
//!
//! An adapter is read and checked as a whole, and cut then. What is added to a tile does not depend on the number of
//! ranks, so the sums have the same bits.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::rank::whole;
use super::recurrence_share::{LateCut, RecurrenceShare};
use super::share::ModelShare;
use super::spec::{AttentionSpec, FeedForward, LateInputsSpec, ModelSpec, Projection};
use super::stage::ModelPart;
use inflight_base::LoadError;
use inflight_device::{AdaptedPlace, AdapterWeights, DenseRows, LowRank};

/// An adapter, or what the ranks of a model have of it.
#[derive(Debug)]
pub struct AdapterParts {
    /// The part of rank 0.
    own: Arc<AdapterWeights>,
    /// The serialised parts of the other ranks.
    others: Vec<Vec<u8>>,
}

/// What a rank has of the weights at a place.
enum PlaceCut {
    /// Of each linear layer, some outputs.
    Outputs(Vec<LinearCut>),
    /// Some inputs, in tiles.
    Inputs(Vec<Range<usize>>),
    /// Some tokens, which are inputs.
    Tokens(Range<usize>),
    /// Another stage has it.
    Nothing,
}

/// What it has of a linear layer.
struct LinearCut {
    /// Of the outputs of its place.
    outputs: Range<usize>,
    /// Among these.
    kept: Vec<Range<usize>>,
}

impl From<AdapterWeights> for AdapterParts {
    fn from(weights: AdapterWeights) -> Self {
        Self {
            own: Arc::new(weights),
            others: Vec::new(),
        }
    }
}

impl AdapterParts {
    /// Cuts an adapter for ranks with these parts of the model.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn new(
        weights: &AdapterWeights,
        ranks: &[ModelPart],
        spec: &ModelSpec,
    ) -> Result<Self, LoadError> {
        let mut parts = ranks.iter().map(|rank| cut(weights, rank, spec));
        let own = parts.next().expect("rank 0")?;
        let others = parts.map(|part| Ok(part?.to_bytes()));
        Ok(Self {
            own: Arc::new(own),
            others: others.collect::<Result<_, LoadError>>()?,
        })
    }

    /// All of it, or what rank 0 has.
    pub(super) fn own(&self) -> &Arc<AdapterWeights> {
        &self.own
    }

    /// What each of the other ranks has.
    pub(super) fn others(&self) -> &[Vec<u8>] {
        &self.others
    }
}

/// What a rank has of an adapter.
fn cut(
    weights: &AdapterWeights,
    rank: &ModelPart,
    spec: &ModelSpec,
) -> Result<AdapterWeights, LoadError> {
    let mut parts = AdapterWeights::new(spec.num_places() * rank.num_tiles());
    let has_biases = rank
        .share
        .as_ref()
        .is_none_or(ModelShare::has_biases_of_sums);
    for (index, cut) in place_cuts(rank, spec).into_iter().enumerate() {
        let (place, first) = (weights.at(index), index * rank.num_tiles());
        match cut {
            PlaceCut::Outputs(linears) => cut_outputs(place, &linears, first, &mut parts)?,
            PlaceCut::Inputs(tiles) => cut_inputs(place, &tiles, has_biases, first, &mut parts)?,
            PlaceCut::Tokens(tokens) => cut_tokens(place, &tokens, first, &mut parts)?,
            PlaceCut::Nothing => {}
        }
    }
    parts.gather()?;
    Ok(parts)
}

/// How each place is cut.
fn place_cuts(rank: &ModelPart, spec: &ModelSpec) -> Vec<PlaceCut> {
    let share = rank.share.as_ref();
    let tokens = share.map_or(0..spec.vocab_size, |share| share.vocabulary.clone());
    let mut cuts = Vec::new();
    for (index, layer) in spec.layers.iter().enumerate() {
        let projections = layer.adaptable_projections().into_iter();
        if !rank.stage.layers.contains(&index) {
            cuts.extend(projections.map(|_| PlaceCut::Nothing));
            continue;
        }
        let Some(share) = share else {
            cuts.extend(projections.map(PlaceCut::whole));
            continue;
        };
        if let Some(attention) = layer.attention_block() {
            cuts.extend(attention_cuts(share, spec, attention));
        }
        if let Some(block) = &layer.recurrence_block {
            let own = share.recurrence(&block.recurrence.shape);
            cuts.extend(recurrence_cuts(&own, &block.input));
        }
        let Some(FeedForward::Gated { gate_up: up, .. } | FeedForward::Plain { up, .. }) =
            layer.feed_forward_block()
        else {
            continue;
        };
        let tiles = share.inner(layer.feed_forward.width());
        let inner = whole(&tiles);
        let lens = up.parts.iter().map(|part| part.num_outputs);
        cuts.push(PlaceCut::of_linears(
            lens.map(|len| (len, vec![inner.clone()])),
        ));
        cuts.push(PlaceCut::Inputs(tiles));
    }
    let output_layer = (spec.vocab_size, vec![tokens.clone()]);
    cuts.push(match rank.stage.is_first() {
        true => PlaceCut::Tokens(tokens),
        false => PlaceCut::Nothing,
    });
    cuts.push(match rank.stage.is_last() {
        true => PlaceCut::of_linears([output_layer].into_iter()),
        false => PlaceCut::Nothing,
    });
    assert_eq!(cuts.len(), spec.num_places(), "a cut for each place");
    cuts
}

/// How a layer's attention, or the recurrence in its place, is cut.
fn attention_cuts(
    share: &ModelShare,
    spec: &ModelSpec,
    attention: &AttentionSpec,
) -> Vec<PlaceCut> {
    if let Some(recurrence) = &attention.recurrence {
        let own = share.recurrence(&recurrence.shape);
        let mut cuts = Vec::from(recurrence_cuts(&own, &attention.qkv));
        if let Some(late) = &attention.late {
            cuts.extend(late_cuts(&own, late));
        }
        return cuts;
    }
    let of_heads = |heads: &Range<usize>| heads.start * spec.head_dim..heads.end * spec.head_dim;
    let attended = PlaceCut::Inputs(share.attended(spec.attended_dim()));
    let Some(latent) = &attention.latent else {
        let queries = vec![of_heads(&share.heads.queries)];
        let keys: Vec<_> = share.heads.key_runs().iter().map(of_heads).collect();
        let lens = attention.qkv.parts.iter().map(|part| part.num_outputs);
        let kept = [queries.clone(), keys.clone(), keys];
        let gate = attention.gate.iter().map(|gate| {
            let num_gates = gate.projection.num_outputs();
            let kept = match attention.has_gates_of_heads(spec.head_dim) {
                true => vec![share.heads.queries.clone()],
                false => queries.clone(),
            };
            let cut = (num_gates, kept);
            PlaceCut::of_linears([cut].into_iter())
        });
        let qkv = PlaceCut::of_linears(lens.zip(kept));
        return [qkv, attended].into_iter().chain(gate).collect();
    };
    let width = latent.shape.query_dim();
    let Range { start, end } = share.heads.queries;
    let of_heads = || {
        let own = start * width..end * width;
        PlaceCut::of_linears([(latent.shape.q_len(), vec![own])].into_iter())
    };
    let latents = PlaceCut::whole(&attention.qkv);
    let (first, behind) = match &latent.queries {
        Some(_) => (latents, Some(of_heads())),
        None => (of_heads(), None),
    };
    let cuts = [first, attended, PlaceCut::whole(&latent.kv)].into_iter();
    cuts.chain(behind).collect()
}

/// How the projections around a recurrence are cut.
fn recurrence_cuts(own: &RecurrenceShare, input: &Projection) -> [PlaceCut; 2] {
    let lens = || input.parts.iter().map(|part| part.num_outputs);
    let kept = own.inputs(lens());
    [
        PlaceCut::of_linears(lens().zip(kept)),
        PlaceCut::Inputs(own.mixed()),
    ]
}

/// How the projections of late inputs are cut.
fn late_cuts(own: &RecurrenceShare, late: &LateInputsSpec) -> Vec<PlaceCut> {
    let projections = late.projections().into_iter().zip(own.late_cuts());
    let cuts = projections.map(|(projection, cut)| match cut {
        LateCut::Whole => PlaceCut::whole(projection),
        LateCut::Outputs(len) => {
            let cut = (projection.num_outputs(), vec![own.values(len)]);
            PlaceCut::of_linears([cut].into_iter())
        }
        LateCut::Inputs => PlaceCut::Inputs(own.mixed()),
    });
    cuts.collect()
}

impl PlaceCut {
    /// All of a projection.
    fn whole(projection: &Projection) -> Self {
        let lens = projection.parts.iter().map(|part| part.num_outputs);
        Self::of_linears(lens.map(|len| {
            let all = 0..len;
            (len, vec![all])
        }))
    }

    /// Linear layers one after the other, each with the number of its outputs, and which of these are kept.
    fn of_linears(linears: impl Iterator<Item = (usize, Vec<Range<usize>>)>) -> Self {
        let mut first = 0;
        let cuts = linears.map(|(len, kept)| {
            let outputs = first..first + len;
            first = outputs.end;
            LinearCut { outputs, kept }
        });
        Self::Outputs(cuts.collect())
    }
}

impl LinearCut {
    /// Its outputs, by their place in the weights of the place.
    fn kept(&self) -> impl Iterator<Item = usize> {
        let first = self.outputs.start;
        let kept = self.kept.iter().cloned().flatten();
        kept.map(move |output| first + output)
    }

    fn len(&self) -> usize {
        self.kept.iter().map(Range::len).sum()
    }
}

fn cut_outputs(
    place: &AdaptedPlace,
    linears: &[LinearCut],
    target: usize,
    parts: &mut AdapterWeights,
) -> Result<(), LoadError> {
    let mut first = 0;
    for linear in linears {
        let own = first..first + linear.len();
        first = own.end;
        let part = place
            .parts()
            .iter()
            .find(|part| part.outputs() == linear.outputs);
        if let Some(part) = part.filter(|_| !own.is_empty()) {
            let outputs = linear.kept().map(|output| output - linear.outputs.start);
            parts.push(target, part_of(part, 0..part.num_inputs(), own, outputs)?);
        }
    }
    let kept = |values: &[f32]| -> Vec<f32> {
        let kept = linears.iter().flat_map(LinearCut::kept);
        kept.map(|output| values[output]).collect()
    };
    if let Some(factors) = place.factors() {
        parts.set_factors(target, first, 0, &kept(factors));
    }
    if let Some(bias) = place.bias() {
        parts.add_bias(target, first, 0, &kept(bias));
    }
    if let Some(rows) = place.replacement() {
        let kept: Vec<_> = linears.iter().flat_map(LinearCut::kept).collect();
        parts.replace(target, rows_of(rows, &kept)?);
    }
    Ok(())
}

fn cut_inputs(
    place: &AdaptedPlace,
    tiles: &[Range<usize>],
    has_biases: bool,
    target: usize,
    parts: &mut AdapterWeights,
) -> Result<(), LoadError> {
    // That with the bias of the projection.
    let last = tiles.iter().rposition(|tile| !tile.is_empty());
    for (index, tile) in tiles.iter().enumerate() {
        if tile.is_empty() {
            continue;
        }
        let target = target + index;
        for part in place.parts() {
            let outputs = part.outputs();
            let all = 0..outputs.len();
            parts.push(target, part_of(part, tile.clone(), outputs, all)?);
        }
        if let Some(factors) = place.factors() {
            parts.set_factors(target, factors.len(), 0, factors);
        }
        if let Some(bias) = place.bias()
            && has_biases
            && last == Some(index)
        {
            parts.add_bias(target, bias.len(), 0, bias);
        }
    }
    Ok(())
}

fn cut_tokens(
    place: &AdaptedPlace,
    tokens: &Range<usize>,
    target: usize,
    parts: &mut AdapterWeights,
) -> Result<(), LoadError> {
    for part in place.parts() {
        let outputs = part.outputs();
        let all = 0..outputs.len();
        parts.push(target, part_of(part, tokens.clone(), outputs, all)?);
    }
    if let Some(rows) = place.replacement() {
        let tokens: Vec<_> = tokens.clone().collect();
        parts.replace(target, rows_of(rows, &tokens)?);
    }
    Ok(())
}

/// Some inputs of A, and these outputs of B, at other places.
fn part_of(
    part: &LowRank,
    inputs: Range<usize>,
    places: Range<usize>,
    outputs: impl Iterator<Item = usize>,
) -> Result<LowRank, LoadError> {
    let mut own = LowRank::new(part.rank(), inputs.len(), places, part.scale())?;
    let mut row: Vec<bf16> = Vec::new();
    for rank in 0..part.rank() {
        row.clear();
        row.extend(inputs.clone().map(|input| part.a(rank, input)));
        own.set_rank(rank, &row);
    }
    for (index, output) in outputs.enumerate() {
        row.clear();
        row.extend((0..part.rank()).map(|rank| part.b(output, rank)));
        own.set_output(index, &row);
    }
    Ok(own)
}

fn rows_of(rows: &DenseRows, indices: &[usize]) -> Result<DenseRows, LoadError> {
    let mut own = DenseRows::new(indices.len(), rows.columns())?;
    for (row, &index) in indices.iter().enumerate() {
        own.row_mut(row).copy_from_slice(rows.row(index));
    }
    Ok(own)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model_source::ModelSource;
    use inflight_collective::Grid;
    use inflight_device::Tiling;

    #[test]
    fn each_place_is_cut() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        for name in [
            "llama3",
            "mixtral",
            "deepseek-v2",
            "deepseek-v3",
            "afmoe",
            "falcon-h1",
            "jamba",
            "kimi-linear",
            "lfm2",
            "nemotron-h",
            "qwen3-next",
        ] {
            let source = ModelSource::open(&fixtures.join(name)).expect("the checkpoint opens");
            let stages = Grid {
                num_stages: 2,
                ranks_per_stage: 1,
            };
            for rank in 0..2 {
                let part = source.part(stages, rank, Tiling::OfRanks).expect("a stage");
                let cuts = place_cuts(&part, source.spec());
                assert_eq!(cuts.len(), source.spec().num_places(), "{name}");
            }
            // Each is of the outputs of its projection, or of all of its inputs.
            let parts = (0..2).map(|rank| {
                source
                    .part(2.into(), rank, Tiling::OfRanks)
                    .expect("a share")
            });
            let of_ranks: Vec<_> = parts.map(|part| place_cuts(&part, source.spec())).collect();
            let projections: Vec<_> = source.spec().projections().collect();
            for (index, (_, projection)) in projections.into_iter().enumerate() {
                let mut inputs = Vec::new();
                for cut in of_ranks.iter().map(|cuts| &cuts[index]) {
                    match cut {
                        PlaceCut::Outputs(linears) => {
                            let len = linears.last().map(|linear| linear.outputs.end);
                            assert_eq!(len, Some(projection.num_outputs()), "{name}");
                        }
                        PlaceCut::Inputs(tiles) => inputs.extend(tiles.iter().cloned().flatten()),
                        PlaceCut::Tokens(_) | PlaceCut::Nothing => panic!("{name}: {index}"),
                    }
                }
                let all = 0..projection.num_inputs;
                assert!(inputs.is_empty() || inputs.into_iter().eq(all), "{name}");
            }
        }
    }
}
