//! Experts beside a feed-forward block.
//!
//! With norms of their own (Gemma 4):
//!
//! ```text
//! sums      dense_after(down(inner)) + after(experts(before(hidden)))     chosen by router(norm(hidden) * router_scale)
//! hidden    += the feed-forward block's norm of the sums
//! ```
//!
//! As a shortcut (LongCat Flash; Cai et al., arXiv:2404.05019):
//!
//! ```text
//! sums      experts(normed)          of what the feed-forward block reads
//! hidden    += sums                  behind the attention of the next layer
//! ```

use super::feed_forward_weights::{FeedForwardSource, FeedForwardWeights, find_experts};
use super::linear_weights::{NormSource, NormWeights, ProjectionSource, SummedLinear};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe};
use super::residual::{Probed, ResidualStream};
use super::spec::{ExpertsBlock, ExpertsNorms, ModelSpec, Module};
use super::summed::Summed;
use inflight_base::LoadError;
use inflight_checkpoint::Tensor;
use inflight_device::{Device, Experts, LayerInputOps, Linear, Routing};

/// The weights, not yet read.
pub(super) struct ExpertsBlockSource<'a> {
    pub(super) experts: FeedForwardSource<'a>,
    norms: Option<ExpertsNormsSource<'a>>,
}

/// The weights of norms, not yet read.
struct ExpertsNormsSource<'a> {
    router_scale: Tensor<'a>,
    expert_scales: Tensor<'a>,
    dense_after: NormSource<'a>,
    before: NormSource<'a>,
    after: NormSource<'a>,
}

/// The weights.
pub(super) struct ExpertsBlockWeights<D: Device> {
    router: Linear<D>,
    /// The corrections of the scores of experts.
    correction: Option<D::Vector>,
    experts: Summed<D, Experts<D>>,
    /// `None`: they are a shortcut.
    pub(super) norms: Option<ExpertsNormsWeights<D>>,
}

/// The weights of norms.
pub(super) struct ExpertsNormsWeights<D: Device> {
    /// The norm of the router's input, whose weights are the router's scale divided by the root of the hidden size.
    router: NormWeights<D>,
    /// The factors of the weights of experts, `[num_experts]`.
    expert_scales: D::Vector,
    dense_after: NormWeights<D>,
    before: NormWeights<D>,
    after: NormWeights<D>,
}

/// Memory for a step, and the operations.
pub(super) struct ExpertsBlockBuffers<D: Device> {
    ops: D::LayerInputs,
    /// `[max_num_tokens, hidden_size]`.
    sums: D::Sums,
}

impl<'a> ExpertsBlockSource<'a> {
    /// Finds the weights of a layer.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape or a type that is not supported.
    pub(super) fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        model: &ModelSpec,
        block: &ExpertsBlock,
    ) -> Result<Self, LoadError> {
        let num_experts = block.experts.routing.num_experts;
        let find = |norms| ExpertsNormsSource::find(tensors, layer, model, num_experts, norms);
        Ok(Self {
            experts: find_experts(tensors, layer, &block.experts)?,
            norms: block.norms.as_ref().map(find).transpose()?,
        })
    }

    /// The projection of the router.
    pub(super) fn router(&self) -> Option<&ProjectionSource<'a>> {
        match &self.experts {
            FeedForwardSource::Experts { router, .. } => Some(router),
            FeedForwardSource::Dense(..) => None,
        }
    }

    /// Reads and packs them.
    ///
    /// # Errors
    /// A tensor is not finite or changed while it was read, or memory is short.
    pub(super) fn load<D: Device>(
        self,
        packer: &mut Packer<'_, D>,
    ) -> Result<ExpertsBlockWeights<D>, LoadError> {
        let FeedForwardWeights::Experts {
            router,
            correction,
            experts,
            ..
        } = self.experts.load(packer, None)?
        else {
            unreachable!("they are experts")
        };
        Ok(ExpertsBlockWeights {
            router,
            correction,
            experts,
            norms: match self.norms {
                Some(norms) => Some(norms.load(packer)?),
                None => None,
            },
        })
    }
}

impl<'a> ExpertsNormsSource<'a> {
    fn find(
        tensors: &ModelTensors<'a>,
        layer: usize,
        model: &ModelSpec,
        num_experts: usize,
        norms: &ExpertsNorms,
    ) -> Result<Self, LoadError> {
        let parameter = |name, len| tensors.parameter(Module::of_layer(layer, name), len);
        let norm = |name| {
            let module = Module::of_layer(layer, name);
            NormSource::find(tensors, &model.norm, module, model.hidden_size)
        };
        Ok(Self {
            router_scale: parameter(norms.router_scale, model.hidden_size)?,
            expert_scales: parameter(norms.expert_scales, num_experts)?,
            dense_after: norm(norms.dense_after)?,
            before: norm(norms.before)?,
            after: norm(norms.after)?,
        })
    }

    fn load<D: Device>(
        self,
        packer: &mut Packer<'_, D>,
    ) -> Result<ExpertsNormsWeights<D>, LoadError> {
        let root = (self.router_scale.columns() as f32).sqrt();
        Ok(ExpertsNormsWeights {
            router: NormWeights {
                weight: packer.upload_mapped(&self.router_scale, |scale| scale / root)?,
                bias: None,
            },
            expert_scales: packer.upload(&self.expert_scales)?,
            dense_after: self.dense_after.load(packer)?,
            before: self.before.load(packer)?,
            after: self.after.load(packer)?,
        })
    }
}

impl<D: Device> ExpertsBlockWeights<D> {
    /// Chooses the experts of rows.
    fn route<'m, P: Probe>(
        &self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        x: &D::Inputs,
        (routing, logits, rows): (&'m Routing, &mut D::Sums, &'m mut D::ExpertRows),
    ) -> (&'m Routing, &'m mut D::ExpertRows) {
        let rule = (routing, self.correction.as_ref());
        run.route(num_rows, x, &self.router, rule, logits, rows);
        (routing, rows)
    }

    /// Its matrices, in the order in which they were packed.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear<D>> {
        let experts = self.experts.parts().flat_map(|experts| {
            let all = experts.chosen.iter().chain(&experts.shared);
            all.flat_map(|expert| [&expert.gate_up, &expert.down])
        });
        std::iter::once(&self.router).chain(experts)
    }
}

impl<D: Device> ExpertsBlockBuffers<D> {
    /// Reserves memory for `max_rows` tokens. `None` if no layer has such experts, or the device has no operations for
    /// them, which [`LayerInputs`](super::layer_inputs::LayerInputs) has refused.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn new(
        device: &mut D,
        spec: &ModelSpec,
        max_rows: usize,
    ) -> Result<Option<Self>, LoadError> {
        let has_experts = spec.layers.iter().any(|it| it.experts_block.is_some());
        let Some(ops) = D::LAYER_INPUTS.filter(|_| has_experts) else {
            return Ok(None);
        };
        let sums = device.alloc_sums(max_rows, spec.hidden_size)?;
        Ok(Some(Self { ops, sums }))
    }

    /// Adds the results of a feed-forward block, whose inside is `inner`, and of the experts beside it, which have
    /// norms, to the residual stream, and leaves the input of what follows.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn add<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        down: (&D::Inputs, &SummedLinear<D>),
        (block, norms): (&ExpertsBlockWeights<D>, &ExpertsNormsWeights<D>),
        mixture: (&Routing, &mut D::Sums, &mut D::ExpertRows),
        [after, next]: [Option<&NormWeights<D>>; 2],
    ) {
        let (ops, sums) = (self.ops, &mut self.sums);
        ops.clear(run.device, num_rows, sums);
        let dense_after = Some(&norms.dense_after);
        residual.sum_to(run, Operation::Down, num_rows, down, dense_after, sums);
        residual.norm(run, num_rows, Some(&norms.router));
        let (routing, rows) = block.route(run, num_rows, residual.normed(), mixture);
        ops.scale_experts(run.device, num_rows, &norms.expert_scales, rows);
        residual.norm(run, num_rows, Some(&norms.before));
        let chosen = (rows, routing.num_chosen);
        let of_experts = Some(&norms.after);
        residual.mix_to(run, num_rows, &block.experts, chosen, of_experts, sums);
        residual.add_sums(run, num_rows, sums, after, next);
    }

    /// Computes experts that are a shortcut, of what the feed-forward block reads.
    pub(super) fn begin_shortcut<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        block: &ExpertsBlockWeights<D>,
        mixture: (&Routing, &mut D::Sums, &mut D::ExpertRows),
    ) {
        let sums = &mut self.sums;
        self.ops.clear(run.device, num_rows, sums);
        let (routing, rows) = block.route(run, num_rows, residual.normed(), mixture);
        let chosen = (rows, routing.num_chosen);
        residual.mix_to(run, num_rows, &block.experts, chosen, None, sums);
    }

    /// Adds the result of the shortcut that the layer before has begun to the residual stream.
    pub(super) fn end_shortcut<P: Probe>(
        &self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
    ) {
        residual.add_rows(run, num_rows, &self.sums);
    }

    /// Keeps the step's kept rows of a shortcut.
    pub(super) fn keep_rows(&mut self, device: &mut D, step: &D::Step<'_>) {
        self.ops.keep_rows(device, step, &mut self.sums);
    }
}
