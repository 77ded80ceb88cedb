//! Experts beside a feed-forward block, with norms of their own (Gemma 4).
//!
//! ```text
//! sums      dense_after(down(inner)) + after(experts(before(hidden)))     chosen by router(norm(hidden) * router_scale)
//! hidden    += the feed-forward block's norm of the sums
//! ```

use super::feed_forward_weights::{FeedForwardSource, FeedForwardWeights, find_experts};
use super::linear_weights::{NormSource, NormWeights, ProjectionSource, SummedLinear};
use super::model_tensors::ModelTensors;
use super::packer::Packer;
use super::probe::{Operation, Probe};
use super::residual::{Probed, ResidualStream};
use super::spec::{ExpertsBlock, ModelSpec, Module};
use super::summed::Summed;
use inflight_base::LoadError;
use inflight_checkpoint::Tensor;
use inflight_device::{Device, Experts, LayerInputOps, Linear, Routing};

/// The weights, not yet read.
pub(super) struct ExpertsBlockSource<'a> {
    pub(super) experts: FeedForwardSource<'a>,
    router_scale: Tensor<'a>,
    expert_scales: Tensor<'a>,
    dense_after: NormSource<'a>,
    before: NormSource<'a>,
    after: NormSource<'a>,
}

/// The weights.
pub(super) struct ExpertsBlockWeights<D: Device> {
    router: Linear<D>,
    experts: Summed<D, Experts<D>>,
    /// The norm of the router's input, whose weights are the router's scale divided by the root of the hidden size.
    router_norm: NormWeights<D>,
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
        let parameter = |name, len| tensors.parameter(Module::of_layer(layer, name), len);
        let norm = |name| {
            let module = Module::of_layer(layer, name);
            NormSource::find(tensors, &model.norm, module, model.hidden_size)
        };
        Ok(Self {
            experts: find_experts(tensors, layer, &block.experts)?,
            router_scale: parameter(block.router_scale, model.hidden_size)?,
            expert_scales: parameter(block.expert_scales, block.experts.routing.num_experts)?,
            dense_after: norm(block.dense_after)?,
            before: norm(block.before)?,
            after: norm(block.after)?,
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
            router, experts, ..
        } = self.experts.load(packer, None)?
        else {
            unreachable!("they are experts")
        };
        let root = (self.router_scale.columns() as f32).sqrt();
        Ok(ExpertsBlockWeights {
            router,
            experts,
            router_norm: NormWeights {
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

    /// Adds the results of a feed-forward block, whose inside is `inner`, and of the experts beside it to the residual
    /// stream, and leaves the input of what follows.
    #[allow(clippy::too_many_arguments, reason = "each is an operand")]
    pub(super) fn add<P: Probe>(
        &mut self,
        run: &mut Probed<'_, D, P>,
        num_rows: usize,
        residual: &mut ResidualStream<D>,
        (inner, down): (&D::Inputs, &SummedLinear<D>),
        block: &ExpertsBlockWeights<D>,
        (routing, logits, rows): (&Routing, &mut D::Sums, &mut D::ExpertRows),
        [after, next]: [Option<&NormWeights<D>>; 2],
    ) {
        let (ops, sums) = (self.ops, &mut self.sums);
        ops.clear(run.device, num_rows, sums);
        let dense_after = Some(&block.dense_after);
        residual.sum_to(
            run,
            Operation::Down,
            num_rows,
            (inner, down),
            dense_after,
            sums,
        );
        residual.norm(run, num_rows, Some(&block.router_norm));
        let rule = (routing, None);
        run.route(
            num_rows,
            residual.normed(),
            &block.router,
            rule,
            logits,
            rows,
        );
        ops.scale_experts(run.device, num_rows, &block.expert_scales, rows);
        residual.norm(run, num_rows, Some(&block.before));
        let chosen = (rows, routing.num_chosen);
        let of_experts = Some(&block.after);
        residual.mix_to(run, num_rows, &block.experts, chosen, of_experts, sums);
        residual.add_sums(run, num_rows, sums, after, next);
    }
}
