//! The weights of a feed-forward block: found in a checkpoint, cut for a rank, and packed for a device.

use super::linear_weights::{ProjectionSource, SummedLinear};
use super::model_tensors::ModelTensors;
use super::packer::{Packer, Packing};
use super::rank::whole;
use super::share::ModelShare;
use super::spec::{ExpertsSpec, FeedForward, Module, Multipliers, Projection, StackedLayout};
use super::summed::Summed;
use inflight_base::LoadError;
use inflight_checkpoint::Tensor;
use inflight_device::{Device, Expert, Experts, Gating, InnerActivation, Linear, PlainActivation};

/// The weights of a feed-forward block.
#[allow(clippy::large_enum_variant, reason = "a layer has one")]
pub(super) enum FeedForwardSource<'a> {
    /// A block without experts, and the parameters of its xIELU.
    Dense(&'a FeedForward, DenseSource<'a>, Option<[Tensor<'a>; 2]>),
    /// A mixture of experts.
    Experts {
        router: ProjectionSource<'a>,
        /// The corrections of the scores of experts.
        correction: Option<Tensor<'a>>,
        /// Of the experts to choose from, and of the shared one.
        gatings: [Gating; 2],
        /// The factor of the result.
        scale: Option<f32>,
        /// One, or the tiles of a rank, each with some of the inside of all experts.
        tiles: Vec<ExpertsSource<'a>>,
    },
}

/// The weights of experts.
pub(super) struct ExpertsSource<'a> {
    /// Empty for a tile with nothing of them.
    pub(super) chosen: Vec<DenseSource<'a>>,
    pub(super) shared: Option<DenseSource<'a>>,
}

/// The weights of a block without experts, or of an expert.
pub(super) struct DenseSource<'a> {
    pub(super) up: ProjectionSource<'a>,
    pub(super) down: ProjectionSource<'a>,
}

/// A feed-forward block.
pub(super) enum FeedForwardWeights<D: Device> {
    Dense(DenseWeights<D>),
    Experts {
        /// `[num_logits, hidden_size]`.
        router: Linear<D>,
        /// The corrections of the scores of experts.
        correction: Option<D::Vector>,
        /// The factor of the result.
        scale: Option<f32>,
        /// The tiles of a rank of several have some of the inside of all experts each.
        experts: Summed<D, Experts<D>>,
    },
}

/// A block without experts.
pub(super) struct DenseWeights<D: Device> {
    /// To the inside: `[intermediate_size, hidden_size]`, or gate and up interleaved: `[2 * intermediate_size,
    /// hidden_size]`.
    pub(super) up: Linear<D>,
    pub(super) activation: InnerActivation,
    /// `[hidden_size, intermediate_size]`.
    pub(super) down: SummedLinear<D>,
}

impl<'a> FeedForwardSource<'a> {
    /// The share of a rank.
    pub(super) fn share(self, share: &ModelShare) -> Self {
        match self {
            Self::Dense(kind, block, alphas) => {
                let tiles = share.inner(kind.width());
                let block = DenseSource {
                    up: block.up.same_outputs(whole(&tiles)).placed(share),
                    down: block.down.inputs(&tiles, share).placed(share),
                };
                Self::Dense(kind, block, alphas)
            }
            Self::Experts {
                router,
                correction,
                gatings,
                scale,
                tiles,
            } => Self::Experts {
                router,
                correction,
                gatings,
                scale,
                tiles: tiles
                    .into_iter()
                    .flat_map(|experts| experts.tiles(share))
                    .collect(),
            },
        }
    }

    /// The block, or all experts, and whether they are chosen ones.
    pub(super) fn blocks(&self) -> Vec<(&DenseSource<'a>, bool)> {
        match self {
            Self::Dense(_, block, _) => vec![(block, false)],
            Self::Experts { tiles, .. } => {
                let chosen = tiles.iter().flat_map(|tile| &tile.chosen);
                let shared = tiles.iter().flat_map(|tile| &tile.shared);
                let chosen = chosen.map(|expert| (expert, true));
                chosen.chain(shared.map(|it| (it, false))).collect()
            }
        }
    }
}

impl<'a> ExpertsSource<'a> {
    /// The share of each tile of a rank.
    pub(super) fn tiles(&self, share: &ModelShare) -> Vec<Self> {
        let tiles = (0..share.num_tiles()).map(|tile| {
            let of_tile = |expert: &DenseSource<'a>| expert.tile(share, tile);
            Self {
                chosen: self.chosen.iter().filter_map(of_tile).collect(),
                shared: self.shared.as_ref().and_then(of_tile),
            }
        });
        tiles.collect()
    }
}

impl<'a> DenseSource<'a> {
    /// The share of an expert in a tile of a rank. `None` if it is empty.
    pub(super) fn tile(&self, share: &ModelShare, tile: usize) -> Option<Self> {
        let inner = &share.inner(self.down.matrices[0].columns())[tile];
        let is_last = tile + 1 == share.num_tiles();
        (!inner.is_empty()).then(|| Self {
            up: self.up.same_outputs(inner.clone()),
            down: self
                .down
                .some_inputs(inner.clone(), is_last && share.has_biases_of_sums()),
        })
    }
}

impl FeedForwardSource<'_> {
    pub(super) fn load<D: Device>(
        self,
        packer: &mut Packer<'_, D>,
        multipliers: Option<Multipliers>,
    ) -> Result<FeedForwardWeights<D>, LoadError> {
        Ok(match self {
            Self::Dense(spec, block, alphas) => {
                let activation = match spec {
                    FeedForward::Gated { activation, .. } => match multipliers {
                        Some(factors) => InnerActivation::ScaledGate(*activation, factors.gate),
                        None => InnerActivation::Gated(*activation),
                    },
                    FeedForward::Plain { activation, .. } => {
                        let xielu = alphas.as_ref().map(xielu_of).transpose()?;
                        InnerActivation::Plain(xielu.unwrap_or(*activation))
                    }
                    FeedForward::Experts(_) => unreachable!("its weights are those of experts"),
                };
                FeedForwardWeights::Dense(DenseWeights {
                    up: block.up.load(packer)?,
                    activation,
                    down: block.down.load_summed(packer)?,
                })
            }
            Self::Experts {
                router,
                correction,
                gatings,
                scale,
                tiles,
            } => FeedForwardWeights::Experts {
                router: router.load(packer)?,
                correction: match correction {
                    Some(correction) => Some(packer.upload(&correction)?),
                    None => None,
                },
                scale,
                experts: Summed::of_tiles(
                    tiles
                        .into_iter()
                        .map(|tile| tile.load(gatings, packer))
                        .collect::<Result<_, _>>()?,
                )?,
            },
        })
    }
}

/// xIELU with two learned parameters.
pub(super) fn xielu(above: f64, below: f64) -> PlainActivation {
    let softplus = |alpha: f64| alpha.max(0.0) + (-alpha.abs()).exp().ln_1p();
    PlainActivation::Xielu {
        positive: softplus(above) as f32,
        negative: (softplus(below) + 0.5) as f32,
    }
}

/// xIELU with the parameters of a layer.
fn xielu_of(alphas: &[Tensor<'_>; 2]) -> Result<PlainActivation, LoadError> {
    let read = |alpha: &Tensor<'_>| {
        let value = alpha.to_f32()?.first().copied().map(f64::from);
        let value = value.filter(|value| value.is_finite());
        value.ok_or_else(|| alpha.location().not_finite(0))
    };
    let [above, below] = alphas;
    Ok(xielu(read(above)?, read(below)?))
}

impl ExpertsSource<'_> {
    /// `None` if there is nothing of any.
    pub(super) fn load<D: Device>(
        self,
        [gating, shared_gating]: [Gating; 2],
        packer: &mut Packer<'_, D>,
    ) -> Result<Option<Experts<D>>, LoadError> {
        if self.chosen.is_empty() && self.shared.is_none() {
            return Ok(None);
        }
        Ok(Some(Experts {
            gating,
            shared_gating,
            chosen: load_experts(self.chosen, packer)?,
            shared: match &self.shared {
                Some(shared) => Some(shared.load(packer)?),
                None => None,
            },
        }))
    }
}

impl DenseSource<'_> {
    pub(super) fn load<D: Device>(
        &self,
        packer: &mut Packer<'_, D>,
    ) -> Result<Expert<D>, LoadError> {
        Ok(Expert {
            gate_up: self.up.load(packer)?,
            down: self.down.load(packer)?,
        })
    }
}

/// Finds the weights of a mixture of experts, each in tensors of its own or all in one.
pub(super) fn find_experts<'a>(
    tensors: &ModelTensors<'a>,
    layer: usize,
    experts: &ExpertsSpec,
) -> Result<FeedForwardSource<'a>, LoadError> {
    let ExpertsSpec {
        gate_up,
        down,
        stacked,
        ..
    } = experts;
    let mut layout = stacked.layout;
    let num_experts = experts.routing.num_experts;
    let num_computed = experts.routing.num_computed_experts();
    let all_gate_up = Module::of_layer(layer, stacked.gate_up);
    let has_no_other = [
        StackedLayout::Inputs,
        StackedLayout::Rows,
        StackedLayout::Parts,
    ];
    let has_no_other = has_no_other.contains(&layout);
    let is_stacked = has_no_other || tensors.has_tensor(all_gate_up);
    if layout == StackedLayout::InputsInParts {
        let (outputs, inputs) = (gate_up.num_outputs(), gate_up.num_inputs);
        // Of floats of 4 bits, two inputs are one element.
        let is_by_outputs = [inputs, inputs / 2].iter().any(|&elements| {
            let by_outputs = [num_computed, outputs, elements];
            outputs != elements && tensors.has_shape(all_gate_up, &by_outputs)
        });
        if is_by_outputs {
            layout = StackedLayout::Outputs;
        }
    }
    let (mut router, mut of_one) = (experts.router.clone(), [gate_up.clone(), down.clone()]);
    if is_stacked {
        router.parts[0].module = stacked.router;
        let (inputs, stacking) = (gate_up.num_inputs, gate_up.stacking);
        let inner = down.num_inputs;
        let fused = match layout {
            StackedLayout::Outputs if gate_up.parts.len() == 1 => {
                Projection::single(stacked.gate_up, inner, inputs)
            }
            StackedLayout::Outputs | StackedLayout::InputsInParts => {
                Projection::fused(stacked.gate_up, &[inner, inner], inputs, stacking)
            }
            StackedLayout::Rows | StackedLayout::Parts => gate_up.clone(),
            StackedLayout::Inputs => {
                Projection::fused_in_runs(stacked.gate_up, &[1, 1], inner, inputs, stacking)
            }
        };
        of_one[0].parts = fused.parts;
        of_one[1].parts[0].module = stacked.down;
    }
    let layout = is_stacked.then_some(layout);
    let find = |expert, projection: &Projection| {
        let matrices = projection.parts.iter().map(|part| {
            let module = Module::one_of(layer, expert, part.module);
            tensors.one_of_linears(module, part, projection.num_inputs, num_computed, layout)
        });
        let with_bias = projection.parts.iter().filter(|_| projection.has_bias);
        let biases = with_bias.map(|part| {
            let module = Module::one_of(layer, expert, part.module);
            tensors.expert_bias(module, part, num_computed)
        });
        Ok::<_, LoadError>(ProjectionSource {
            matrices: matrices.collect::<Result<_, _>>()?,
            biases: biases.collect::<Result<_, _>>()?,
            packing: Packing {
                stacking: projection.stacking,
                index: Some(expert),
                is_exact: false,
            },
            place: None,
            tiles: Vec::new(),
        })
    };
    let chosen = (0..num_computed).map(|expert| {
        let [gate_up, down] = &of_one;
        Ok(DenseSource {
            up: find(expert, gate_up)?,
            down: find(expert, down)?,
        })
    });
    let router = ProjectionSource::find(tensors, Some(layer), &router)?;
    Ok(FeedForwardSource::Experts {
        router: router.exactly(),
        correction: match experts.correction {
            Some(name) => {
                let module = Module::of_layer(layer, name);
                let is_absent = experts.may_lack_correction && !tensors.has_tensor(module);
                match is_absent {
                    true => None,
                    false => Some(tensors.parameter(module, num_experts)?),
                }
            }
            None => None,
        },
        gatings: [experts.gating, experts.shared_gating()],
        scale: experts.scale,
        tiles: vec![ExpertsSource {
            chosen: chosen.collect::<Result<_, LoadError>>()?,
            shared: match &experts.shared {
                Some(shared) => Some(DenseSource {
                    up: ProjectionSource::find(tensors, Some(layer), &shared.gate_up)?,
                    down: ProjectionSource::find(tensors, Some(layer), &shared.down)?,
                }),
                None => None,
            },
        }],
    })
}

/// Packs the experts of a layer as the device wants them: each by itself, or all as one.
fn load_experts<D: Device>(
    experts: Vec<DenseSource<'_>>,
    packer: &mut Packer<'_, D>,
) -> Result<Vec<Expert<D>>, LoadError> {
    let Some(stacks) = D::STACKS else {
        // Each leaves memory once it is packed.
        let experts = experts.into_iter();
        return experts.map(|expert| expert.load(packer)).collect();
    };
    let (gate_up, down): (Vec<_>, Vec<_>) = experts
        .into_iter()
        .map(|expert| (expert.up, expert.down))
        .unzip();
    Ok(vec![Expert {
        gate_up: ProjectionSource::load_stacked(gate_up, stacks, packer)?,
        down: ProjectionSource::load_stacked(down, stacks, packer)?,
    }])
}
