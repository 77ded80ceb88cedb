//! The part of a layer with a recurrent state on one of several ranks: some value heads, and the keys that they read. A
//! gated convolution and a selective scan have channels in place of value heads, and a scan's keys are made of all of
//! them.
//!
//! ```text
//! gated delta rule   queries | keys | values | gates | strengths | decays       sections of the input projection
//!                      keys     keys   values  values   values      values      the heads that they belong to
//!                    ----- convolution -----
//!
//! state space        values | keys | queries | gates | times
//!                    values   keys    keys     values  values
//!                    ----- convolution -----
//! ```
//!
//! Of each section a rank has the elements of its heads. A key that value heads of several ranks read is computed by
//! each of them. The results of value heads are the inputs of the output projection, in tiles, as in attention.

use std::ops::Range;

use super::head_share::HeadShare;
use super::rank::{Rank, lcm};
use inflight_device::{
    DeltaForm, DeltaShape, RecurrenceShape, RecurrentRule, ScanShape, SpaceNorm, StateSpaceShape,
};

/// The part of a rank.
pub(super) struct RecurrenceShare {
    /// The sizes of the whole layer.
    whole: RecurrenceShape,
    heads: HeadShare,
}

/// Neighbouring outputs of the input projection, with this many elements for each head.
#[derive(Clone, Copy)]
enum Section {
    OfKeys(usize),
    OfValues(usize),
}

/// How a projection of late inputs is cut.
pub(super) enum LateCut {
    /// Not at all: all heads read its results.
    Whole,
    /// By its outputs; the number is outputs per value head.
    Outputs(usize),
    /// By its inputs, the channels, in tiles as the output projection.
    Inputs,
}

/// The heads of a layer.
struct Heads {
    num_values: usize,
    num_keys: usize,
    /// Elements of a value.
    value_dim: usize,
    /// Value heads whose results have one norm.
    num_normed: usize,
}

impl RecurrenceShare {
    /// The part of `rank`. Quantised weights of the output projection keep so many value heads together.
    pub(super) fn new(rank: Rank, shape: &RecurrenceShape, joined: usize) -> Self {
        let Heads {
            num_values,
            num_keys,
            num_normed,
            ..
        } = Heads::of(shape);
        let joined = match shape.rule {
            RecurrentRule::GatedConvolution { .. } | RecurrentRule::SelectiveScan(_) => {
                rank.unit_of_inputs(num_values, joined)
            }
            RecurrentRule::GatedDelta(_) | RecurrentRule::StateSpace(_) => lcm(joined, num_normed),
        };
        Self {
            whole: *shape,
            heads: HeadShare::new(rank, num_values, num_keys, joined),
        }
    }

    /// Whether it has no head.
    pub(super) fn is_empty(&self) -> bool {
        self.heads.queries.is_empty()
    }

    /// Why a rank has no head.
    pub(super) fn indivisible(shape: &RecurrenceShape, joined: usize) -> String {
        let Heads {
            num_values,
            num_normed,
            ..
        } = Heads::of(shape);
        let reason = match num_normed {
            1 => "have inputs of the same groups of quantised weights",
            _ => "have one norm of their results",
        };
        match lcm(joined, num_normed) {
            1 => format!(
                "the model has only {num_values} value heads in layers with recurrent states"
            ),
            together => format!(
                "of the {num_values} value heads of layers with recurrent states, {together} {reason}"
            ),
        }
    }

    /// The value heads of a layer whose inputs of the output projection begin and end with groups of so many inputs.
    pub(super) fn num_values_of(shape: &RecurrenceShape, group: usize) -> usize {
        let Heads { value_dim, .. } = Heads::of(shape);
        lcm(group, value_dim) / value_dim
    }

    /// The sizes of its part.
    pub(super) fn shape(&self) -> RecurrenceShape {
        let (num_values, num_keys) = (self.heads.queries.len(), self.heads.keys.len());
        RecurrenceShape {
            rule: match self.whole.rule {
                RecurrentRule::GatedConvolution { .. } => RecurrentRule::GatedConvolution {
                    num_channels: num_values,
                },
                RecurrentRule::GatedDelta(delta) => RecurrentRule::GatedDelta(DeltaShape {
                    num_value_heads: num_values,
                    num_key_heads: num_keys,
                    ..delta
                }),
                RecurrentRule::StateSpace(space) => RecurrentRule::StateSpace(StateSpaceShape {
                    num_heads: num_values,
                    num_groups: num_keys,
                    num_norm_groups: num_values / Heads::of(&self.whole).num_normed,
                    ..space
                }),
                RecurrentRule::SelectiveScan(scan) => RecurrentRule::SelectiveScan(ScanShape {
                    num_channels: num_values,
                    ..scan
                }),
            },
            ..self.whole
        }
    }

    /// Its outputs of the input projection, whose linear layers have these numbers of outputs.
    pub(super) fn inputs(&self, lens: impl Iterator<Item = usize>) -> Vec<Vec<Range<usize>>> {
        let (convolved, others) = self.sections();
        self.cut(&[convolved, others].concat(), lens)
    }

    /// Its channels of the convolution, which is in parts of so many channels.
    pub(super) fn channels(&self, lens: impl Iterator<Item = usize>) -> Vec<Vec<Range<usize>>> {
        match self.whole.rule {
            // Of products of two sections.
            RecurrentRule::GatedConvolution { .. } => self.cut(&[Section::OfValues(1)], lens),
            _ => self.cut(&self.sections().0, lens),
        }
    }

    /// The elements of its value heads, each of which has so many.
    pub(super) fn values(&self, len: usize) -> Range<usize> {
        let Range { start, end } = self.heads.queries;
        start * len..end * len
    }

    /// The inputs of the output projection, by tiles.
    pub(super) fn mixed(&self) -> Vec<Range<usize>> {
        self.heads.inputs(Heads::of(&self.whole).value_dim)
    }

    /// How the projections of late inputs are cut, in order.
    pub(super) fn late_cuts(&self) -> Vec<LateCut> {
        match self.whole.rule {
            RecurrentRule::GatedDelta(delta) if delta.form == DeltaForm::Channels => {
                let num_decays = delta.num_decays() / delta.num_value_heads;
                let [gates, decays] = [delta.value_dim, num_decays].map(LateCut::Outputs);
                vec![LateCut::Whole, gates, LateCut::Whole, decays]
            }
            RecurrentRule::SelectiveScan(_) => {
                vec![LateCut::Inputs, LateCut::Outputs(1), LateCut::Inputs]
            }
            _ => Vec::new(),
        }
    }

    /// The sections of the input projection that are convolved, and those behind them.
    fn sections(&self) -> (Vec<Section>, Vec<Section>) {
        use Section::{OfKeys, OfValues};
        match self.whole.rule {
            RecurrentRule::GatedConvolution { .. } => (vec![OfValues(1); 3], Vec::new()),
            RecurrentRule::GatedDelta(delta) => (
                vec![
                    OfKeys(delta.key_dim),
                    OfKeys(delta.key_dim),
                    OfValues(delta.value_dim),
                ],
                match delta.form {
                    DeltaForm::Heads => vec![OfValues(delta.value_dim), OfValues(1), OfValues(1)],
                    DeltaForm::Channels => vec![OfValues(1)],
                },
            ),
            RecurrentRule::StateSpace(space) => (
                vec![
                    OfValues(space.head_dim),
                    OfKeys(space.state_dim),
                    OfKeys(space.state_dim),
                ],
                vec![OfValues(space.head_dim), OfValues(1)],
            ),
            RecurrentRule::SelectiveScan(_) => (vec![OfValues(1)], vec![OfValues(1)]),
        }
    }

    /// Its elements of these sections, which are one after the other in layers of so many elements.
    fn cut(
        &self,
        sections: &[Section],
        lens: impl Iterator<Item = usize>,
    ) -> Vec<Vec<Range<usize>>> {
        let Heads {
            num_values,
            num_keys,
            ..
        } = Heads::of(&self.whole);
        let mut sections = sections.iter();
        let cuts = lens.map(|len| {
            let (mut first, mut kept) = (0, Vec::new());
            while first < len {
                let (own, dim, num_heads) = match sections.next() {
                    Some(&Section::OfKeys(dim)) => (self.heads.key_runs(), dim, num_keys),
                    Some(&Section::OfValues(dim)) => {
                        (vec![self.heads.queries.clone()], dim, num_values)
                    }
                    None => panic!("{len} elements are more than the layer has"),
                };
                let own = own.into_iter();
                kept.extend(own.map(|heads| first + heads.start * dim..first + heads.end * dim));
                first += num_heads * dim;
            }
            assert_eq!(first, len, "a linear layer has whole sections");
            kept
        });
        cuts.collect()
    }
}

impl Heads {
    fn of(shape: &RecurrenceShape) -> Self {
        let of_channels = |num_channels| Self {
            num_values: num_channels,
            num_keys: num_channels,
            value_dim: 1,
            num_normed: 1,
        };
        match shape.rule {
            RecurrentRule::GatedConvolution { num_channels } => of_channels(num_channels),
            RecurrentRule::SelectiveScan(scan) => of_channels(scan.num_channels),
            RecurrentRule::GatedDelta(delta) => Self {
                num_values: delta.num_value_heads,
                num_keys: delta.num_key_heads,
                value_dim: delta.value_dim,
                num_normed: 1,
            },
            RecurrentRule::StateSpace(space) => Self {
                num_values: space.num_heads,
                num_keys: space.num_groups,
                value_dim: space.head_dim,
                num_normed: match space.norm {
                    SpaceNorm::Absent => 1,
                    SpaceNorm::Gated | SpaceNorm::Ungated => {
                        space.num_heads / space.num_norm_groups
                    }
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELTA: DeltaShape = DeltaShape {
        form: DeltaForm::Heads,
        num_key_heads: 2,
        num_value_heads: 6,
        key_dim: 5,
        value_dim: 3,
        strength_scale: 1.0,
        norm_eps: 1e-6,
    };

    const SPACE: StateSpaceShape = StateSpaceShape {
        num_heads: 12,
        head_dim: 3,
        num_groups: 4,
        state_dim: 5,
        input_scales: [1.0; 5],
        norm: SpaceNorm::Gated,
        num_norm_groups: 4,
        norm_eps: 1e-6,
        times: [0.0, 1.0],
    };

    fn shape(rule: RecurrentRule) -> RecurrenceShape {
        RecurrenceShape {
            kernel_len: 4,
            rule,
        }
    }

    fn shapes() -> Vec<RecurrenceShape> {
        let by_channels = DeltaShape {
            form: DeltaForm::Channels,
            num_key_heads: 6,
            ..DELTA
        };
        let of_one_group = StateSpaceShape {
            num_groups: 1,
            norm: SpaceNorm::Absent,
            ..SPACE
        };
        let scan = ScanShape {
            num_channels: 30,
            state_dim: 4,
            norm_eps: None,
        };
        let rules = [
            RecurrentRule::GatedConvolution { num_channels: 70 },
            RecurrentRule::GatedDelta(DELTA),
            RecurrentRule::GatedDelta(by_channels),
            RecurrentRule::StateSpace(SPACE),
            RecurrentRule::StateSpace(of_one_group),
            RecurrentRule::SelectiveScan(scan),
        ];
        rules.map(shape).to_vec()
    }

    fn shares(num_ranks: usize, shape: &RecurrenceShape) -> Vec<RecurrenceShare> {
        let ranks = (0..num_ranks).map(|index| Rank::new(index, num_ranks));
        ranks
            .map(|rank| RecurrenceShare::new(rank, shape, 1))
            .collect()
    }

    fn flat(kept: Vec<Vec<Range<usize>>>) -> Vec<usize> {
        kept.into_iter().flatten().flatten().collect()
    }

    #[test]
    fn ranks_have_all_of_a_layer_and_the_sizes_of_their_parts() {
        for shape in shapes() {
            for num_ranks in [1, 2, 3, 4] {
                let (mut inputs, mut channels, mut mixed) = (Vec::new(), Vec::new(), Vec::new());
                for share in shares(num_ranks, &shape) {
                    assert!(!share.is_empty());
                    let own = share.shape();
                    let own_inputs = flat(share.inputs([shape.input_len()].into_iter()));
                    assert_eq!(own_inputs.len(), own.input_len(), "{shape:?}");
                    let own_channels = flat(share.channels([shape.num_channels()].into_iter()));
                    assert_eq!(own_channels.len(), own.num_channels(), "{shape:?}");
                    let own_mixed = flat(vec![share.mixed()]);
                    assert_eq!(own_mixed.len(), own.out_len(), "{shape:?}");
                    inputs.extend(own_inputs);
                    channels.extend(own_channels);
                    mixed.extend(own_mixed);
                }
                // Tiles follow one another.
                assert!(mixed.into_iter().eq(0..shape.out_len()), "{shape:?}");
                for (mut all, len) in [
                    (inputs, shape.input_len()),
                    (channels, shape.num_channels()),
                ] {
                    all.sort_unstable();
                    // Keys may be on several ranks.
                    all.dedup();
                    assert!(all.into_iter().eq(0..len), "{shape:?}");
                }
            }
        }
    }

    #[test]
    fn linear_layers_have_whole_sections() {
        let shape = shape(RecurrentRule::GatedDelta(DELTA));
        let share = &shares(2, &shape)[1];
        // The second key and the last three value heads.
        let of_parts = share.inputs([10, 10, 18, 18, 6, 6].into_iter());
        let expected = [5..10, 5..10, 9..18, 9..18, 3..6, 3..6].map(|kept| vec![kept]);
        assert_eq!(of_parts, expected);
        let of_fused = share.inputs([38, 18, 12].into_iter());
        let gates = 9..18;
        let expected = [vec![5..10, 15..20, 29..38], vec![gates], vec![3..6, 9..12]];
        assert_eq!(of_fused, expected);
        assert_eq!(share.channels([38].into_iter()), expected[..1]);
    }

    #[test]
    fn a_key_is_on_each_rank_that_has_a_value_of_it() {
        let shape = shape(RecurrentRule::GatedDelta(DELTA));
        let keys: Vec<_> = shares(4, &shape)
            .iter()
            .map(|share| (share.heads.queries.clone(), share.heads.keys.clone()))
            .collect();
        // A part of a group is no whole one: each of its values has a key of its own.
        let expected = [
            (0..1, vec![0]),
            (1..3, vec![0, 0]),
            (3..4, vec![1]),
            (4..6, vec![1, 1]),
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn heads_of_one_norm_stay_together() {
        let alike = |num_norm_groups| {
            shape(RecurrentRule::StateSpace(StateSpaceShape {
                num_norm_groups,
                ..SPACE
            }))
        };
        let values = |num_norm_groups, joined| -> Vec<_> {
            let ranks = (0..2).map(|index| Rank::new(index, 2));
            let share = |rank| RecurrenceShare::new(rank, &alike(num_norm_groups), joined);
            ranks.map(|rank| share(rank).values(1)).collect()
        };
        assert_eq!(values(4, 1), [0..6, 6..12]);
        assert_eq!(values(2, 4), [0..0, 0..12]);
        let RecurrentRule::StateSpace(own) = shares(2, &alike(4))[1].shape().rule else {
            panic!("it is a state space");
        };
        assert_eq!(
            (own.num_heads, own.num_groups, own.num_norm_groups),
            (6, 2, 2)
        );
        let reason = RecurrenceShare::indivisible(&alike(1), 1);
        assert!(reason.contains("12 have one norm"), "{reason}");
        let reason = RecurrenceShare::indivisible(&shape(RecurrentRule::GatedDelta(DELTA)), 4);
        assert!(
            reason.contains("4 have inputs of the same groups"),
            "{reason}"
        );
    }

    #[test]
    fn groups_of_inputs_that_share_a_scale_have_whole_heads() {
        let delta = shape(RecurrentRule::GatedDelta(DELTA));
        assert_eq!(RecurrenceShare::num_values_of(&delta, 1), 1);
        assert_eq!(RecurrenceShare::num_values_of(&delta, 6), 2);
        assert_eq!(RecurrenceShare::num_values_of(&delta, 32), 32);
        let convolution = shape(RecurrentRule::GatedConvolution { num_channels: 70 });
        assert_eq!(RecurrenceShare::num_values_of(&convolution, 32), 32);
    }
}
