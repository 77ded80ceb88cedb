//! What computes the steps of an instance.

use half::bf16;

use super::model_runner::ModelRunner;
use super::spec::TowerSpec;
use super::synthetic::SyntheticRunner;
use inflight_base::{HostBlockId, StepError};
use inflight_device::Device;
use inflight_engine::{BlockMove, Step, StepOutput, StepPlan};
use inflight_images::ImagePatches;

/// Computes the steps of an instance: a real model on some device, or a synthetic one.
pub trait Runner: Send {
    /// Makes the drafts of a step before its first model call, see [`ModelRunner::make_drafts`].
    ///
    /// # Errors
    /// As for `run`.
    fn make_drafts(&mut self, _step: &mut Step) -> Result<(), StepError> {
        Ok(())
    }

    /// Computes one model call of a step, and appends its results to `output`.
    ///
    /// # Errors
    /// If the step has failed as a whole; the instance cannot continue.
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError>;

    /// Whether a model call may be launched before the one before it was collected, with tokens that that one samples.
    fn can_run_ahead(&self) -> bool {
        false
    }

    /// Whether a model call may be launched before the one before it was collected, if it does not depend on it, see
    /// [`ModelRunner::has_stages`].
    fn has_stages(&self) -> bool {
        false
    }

    /// Starts a model call of a step, see [`ModelRunner::launch`]. A runner that does not compute in the background
    /// computes the call when it is collected.
    ///
    /// # Errors
    /// As for `run`.
    fn launch(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError>;

    /// Waits for the oldest model call that was launched, see [`ModelRunner::collect`].
    ///
    /// # Errors
    /// As for `run`.
    fn collect(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError>;

    /// Makes moves of blocks outside of a step, one after the other.
    fn move_blocks(&mut self, moves: &[BlockMove]);

    /// The bytes of a block in host memory.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If there is no such block.
    fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError>;

    /// The vision tower, if prompts may have images.
    fn tower(&self) -> Option<&TowerSpec> {
        None
    }

    /// The rows of the residual stream that an image becomes, see [`ModelRunner::encode_image`].
    ///
    /// # Errors
    /// The model was loaded without a vision tower or does not read such an image, or the device has failed.
    fn encode_image(&mut self, _image: &ImagePatches) -> Result<Vec<bf16>, StepError> {
        Err(StepError(
            "an image for a runner without a vision tower".to_owned(),
        ))
    }

    /// What it computes with.
    fn description(&self) -> String;

    /// Whether tokens are chosen from logits.
    fn has_logits(&self) -> bool {
        true
    }

    /// Whether its sequences may have adapters.
    fn has_adapters(&self) -> bool {
        true
    }

    /// Token ids are below it.
    fn vocab_size(&self) -> u32;

    /// Makes [`Runner::logits`] complete on several ranks, see [`ModelRunner::keep_all_logits`].
    fn keep_all_logits(&mut self) {}

    /// The logits that the tokens of the last run were chosen from, see [`ModelRunner::logits`].
    fn logits(&mut self) -> &[f32] {
        &[]
    }
}

impl<D: Device> Runner for ModelRunner<D>
where
    Self: Send,
{
    fn make_drafts(&mut self, step: &mut Step) -> Result<(), StepError> {
        self.make_drafts(step)
    }

    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.run(plan, output)
    }

    fn can_run_ahead(&self) -> bool {
        self.can_run_ahead()
    }

    fn launch(&mut self, plan: &StepPlan<'_>) -> Result<(), StepError> {
        self.launch(plan)
    }

    fn collect(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.collect(plan, output)
    }

    fn move_blocks(&mut self, moves: &[BlockMove]) {
        self.move_blocks(moves);
    }

    fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError> {
        self.host_block(block)
    }

    fn tower(&self) -> Option<&TowerSpec> {
        self.tower()
    }

    fn encode_image(&mut self, image: &ImagePatches) -> Result<Vec<bf16>, StepError> {
        self.encode_image(image)
    }

    fn description(&self) -> String {
        self.description()
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size() as u32
    }

    fn keep_all_logits(&mut self) {
        self.keep_all_logits();
    }

    fn logits(&mut self) -> &[f32] {
        self.logits()
    }
}

impl Runner for SyntheticRunner {
    fn run(&mut self, plan: StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.run(plan, output)
    }

    fn launch(&mut self, _plan: &StepPlan<'_>) -> Result<(), StepError> {
        Ok(())
    }

    fn collect(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), StepError> {
        self.run(*plan, output)
    }

    fn move_blocks(&mut self, moves: &[BlockMove]) {
        self.move_blocks(moves);
    }

    fn host_block(&mut self, block: HostBlockId) -> Result<&mut [u8], StepError> {
        Ok(self.host_block(block))
    }

    fn description(&self) -> String {
        "hashes".to_owned()
    }

    fn has_logits(&self) -> bool {
        false
    }

    fn has_adapters(&self) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size()
    }
}
