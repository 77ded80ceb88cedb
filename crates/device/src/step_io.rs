//! The inputs of a step from the host, and its results.

use super::load::Load;
use super::operands::{DeviceSample, StepInputs, StepResults};
use inflight_base::{BlockId, HostBlockId, StepError};

/// A machine whose steps begin and end.
///
/// ```text
/// copy_positions, offload, onboard       forks of sequences, and blocks to and from host memory
/// begin_step                             everything that the step needs from the host
///   embed, norm                          the operations of Ops, or their fused forms, in an order that
///   project, rope_and_store, ...         depends only on the shape of the step
///   logits, sample
/// end_step
/// results                                for the host's sampler: what the device has not sampled
/// ```
///
/// Operations may run later than they are called, in order. Only [`Ops::context_logits`](super::Ops::context_logits),
/// [`StepIo::end_step`], [`StepIo::results`], [`StepIo::earlier_samples`] and [`StepIo::host_logits`] may wait for
/// them: so a device can upload a step at once in [`StepIo::begin_step`], record its operations the first time that it
/// sees a shape and replay them after that, and fetch results when they are read.
pub trait StepIo: Load {
    /// A step between [`StepIo::begin_step`] and [`StepIo::end_step`].
    type Step<'a>;

    /// Whether it samples tokens by itself. Then steps come with [`StepInputs::sampling`].
    const SAMPLES: bool = false;

    /// Copies the first positions of blocks to other ones, in all layers: `(source, target, num_positions)`, one after
    /// the other.
    fn copy_positions(
        &mut self,
        cache: &mut Self::KvCache,
        copies: impl Iterator<Item = (BlockId, BlockId, usize)>,
    );

    /// Copies a block of the cache to memory of the host, in all layers.
    fn offload(
        &mut self,
        cache: &Self::KvCache,
        source: BlockId,
        host: &mut Self::HostBlocks,
        target: HostBlockId,
    );

    /// Copies a block from memory of the host to the cache, in all layers.
    fn onboard(
        &mut self,
        host: &Self::HostBlocks,
        source: HostBlockId,
        cache: &mut Self::KvCache,
        target: BlockId,
    );

    /// The bytes of a block in memory of the host, once all copies to and from there have been made.
    ///
    /// # Errors
    ///
    /// If an operation has failed.
    fn host_block<'h>(
        &mut self,
        host: &'h mut Self::HostBlocks,
        block: HostBlockId,
    ) -> Result<&'h mut [u8], StepError>;

    /// Begins a step. On a machine that several models share, it waits for its turn.
    fn begin_step<'a>(&mut self, cache: &Self::KvCache, inputs: StepInputs<'a>) -> Self::Step<'a>;

    /// Samples from the step's rows of logits where [`StepInputs::sampling`] says how. By default the host samples all.
    fn sample(&mut self, _step: &Self::Step<'_>, _logits: &mut Self::Logits) {}

    /// Ends a step.
    fn end_step(&mut self, step: Self::Step<'_>);

    /// The results of a step with `num_rows` rows of logits, once they are there. By default these are the logits.
    ///
    /// # Errors
    ///
    /// If an operation of this step or of an earlier one has failed.
    fn results<'l>(
        &mut self,
        logits: &'l mut Self::Logits,
        num_rows: usize,
    ) -> Result<StepResults<'l>, StepError> {
        Ok(StepResults {
            logits: self.host_logits(logits, num_rows)?,
            samples: &[],
        })
    }

    /// Whether a step may begin before the results of the one before it are read, with tokens that
    /// [that one samples](StepInputs::in_flight). Never by default.
    fn can_run_ahead(&self, _logits: &Self::Logits) -> bool {
        false
    }

    /// Keeps what the step that has just ended samples from `num_rows` rows, so that it can be read after the next one
    /// has begun.
    fn keep_samples(&mut self, _logits: &mut Self::Logits, _num_rows: usize) {}

    /// Waits for the sampled tokens of the step before the latest one. Its logits have been overwritten.
    ///
    /// # Errors
    ///
    /// If an operation of that step or of an earlier one has failed.
    fn earlier_samples<'l>(
        &mut self,
        _logits: &'l mut Self::Logits,
    ) -> Result<&'l [DeviceSample], StepError> {
        Ok(&[])
    }

    /// The first rows of logits in memory of the host, once they are there. After a change by the caller, a second
    /// call in the same step gives the changed ones.
    ///
    /// # Errors
    ///
    /// If an operation of this step or of an earlier one has failed.
    fn host_logits<'l>(
        &mut self,
        logits: &'l mut Self::Logits,
        num_rows: usize,
    ) -> Result<&'l mut [f32], StepError>;
}
