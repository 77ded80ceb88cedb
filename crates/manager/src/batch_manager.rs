//! An engine and its runner as one object.

use std::sync::Arc;

use crate::step_loop::{LandedStep, StepLoop};
use crate::step_runner::StepRunner;
use inflight_base::{Blocks, RequestError, SequenceId, StepError, TokenId, Tokens};
use inflight_engine::{
    DraftTotals, Engine, EngineConfig, Event, KvUsage, NewRequest, PromptImages, RetainedPrefix,
    Room,
};
use inflight_images::ImagePatches;
use inflight_runner::{KvFile, Runner, TowerSpec};
use inflight_sampling::{FinishReason, Hypothesis};

/// A batch manager: requests in, tokens out, a step at a time.
///
/// With one micro-batch a step is computed in `launch`, on the caller's thread. With two
/// ([`EngineConfig::num_micro_batches`]) the runner has a thread of its own, and `land` returns the step before:
///
/// ```text
/// caller   | launch A |       launch B | land A: answer, wait for more | launch A' | land B ...
/// runner              |------ A ------------||------ B -------------------||---- A' ----
/// ```
///
/// A runner whose layers are in stages on several ranks computes the first stage on the caller's thread, in `launch`,
/// while the micro-batch before is in the stages behind.
///
/// Where steps are [planned ahead](EngineConfig::plan_ahead), B has the requests of A: their tokens stay on the device.
/// `land` returns A all the same where B could not be planned before A's tokens are known.
pub struct BatchManager {
    steps: StepLoop<StepRunner>,
    /// Token ids are below it.
    vocab_size: u32,
    /// Whether tokens are chosen from logits.
    has_logits: bool,
    /// Whether requests may have logits processors.
    allows_processors: bool,
    /// Whether requests may have adapters.
    has_adapters: bool,
    /// `None` if prompts have no images.
    tower: Option<TowerSpec>,
    kv_file: Option<KvFile>,
}

impl BatchManager {
    /// A batch manager without requests.
    ///
    /// # Errors
    /// The system refuses the runner's thread.
    ///
    /// # Panics
    /// If [`EngineConfig::check`] refuses the configuration.
    pub fn new(config: EngineConfig, runner: Box<dyn Runner>) -> std::io::Result<Self> {
        Self::with_kv_file(config, runner, None)
    }

    /// A batch manager that begins with the KV cache blocks of a file, and replaces it when it is dropped.
    ///
    /// # Errors
    /// The system refuses the runner's thread. Problems with the file are logged.
    ///
    /// # Panics
    /// As for [`BatchManager::new`]; or if steps are planned ahead, and the runner cannot run ahead.
    pub fn with_kv_file(
        config: EngineConfig,
        mut runner: Box<dyn Runner>,
        kv_file: Option<KvFile>,
    ) -> std::io::Result<Self> {
        let (vocab_size, has_logits) = (runner.vocab_size(), runner.has_logits());
        let has_adapters = runner.has_adapters();
        let tower = runner.tower().cloned();
        let allows_processors = has_logits && !config.is_lockstep();
        assert!(
            runner.can_run_ahead() || !config.plan_ahead,
            "the runner needs the results of a step before the next one"
        );
        let restored = kv_file.as_ref().and_then(|file| {
            let restored = file.restore(&config, &mut *runner);
            let path = file.path().display();
            restored
                .inspect_err(|error| log::warn!("{path}: {error}: the KV cache begins empty"))
                .ok()
        });
        let engine = restored.unwrap_or_else(|| Engine::new(config.clone()));
        let computer = StepRunner::new(runner, &config)?;
        Ok(Self {
            kv_file,
            steps: StepLoop::with_engine(engine, computer),
            vocab_size,
            has_logits,
            allows_processors,
            has_adapters,
            tower,
        })
    }

    /// Queues a request, see [`Engine::add`](inflight_engine::Engine::add).
    ///
    /// # Errors
    /// A request that could never run, or with a token outside the vocabulary. A request with a logits processor in
    /// lockstep. A request with an image that the vision tower does not read. A request with an adapter, or for a
    /// logits processor, guided decoding, log-probabilities or logits, if the runner has none.
    ///
    /// # Panics
    /// As for [`Engine::add`](inflight_engine::Engine::add).
    pub fn add(&mut self, request: NewRequest) -> Result<(), RequestError> {
        let mut ids = request.prompt.iter().chain(request.drafts.expected.iter());
        if let Some(id) = ids.find(|id| **id >= self.vocab_size) {
            return Err(RequestError::Invalid(format!(
                "token {id} of the prompt, or of the expected output, is outside the vocabulary, 0 to {}",
                self.vocab_size - 1
            )));
        }
        if request.sampling.logits_processor.is_some() && !self.allows_processors {
            return Err(RequestError::Invalid(
                "a logits processor needs a model and in-flight batching".to_owned(),
            ));
        }
        if request.adapter.is_some() && !self.has_adapters {
            return Err(RequestError::Invalid(
                "an adapter needs a model: the synthetic runner has none".to_owned(),
            ));
        }
        self.check_images(&request.images)?;
        if request.outputs.needs_logits() && !self.has_logits {
            return Err(RequestError::Invalid(
                "log-probabilities and logits need a model: the synthetic runner has none"
                    .to_owned(),
            ));
        }
        if request.sampling.guide.is_some() && !self.has_logits {
            return Err(RequestError::Invalid(
                "guided decoding needs a model: the synthetic runner has no logits".to_owned(),
            ));
        }
        self.steps.engine_mut().add(request)
    }

    /// Refuses images that the vision tower does not read, which would fail a step.
    fn check_images(&self, images: &PromptImages) -> Result<(), RequestError> {
        for (index, span) in images.spans().iter().enumerate() {
            let invalid = |reason: &str| {
                RequestError::Invalid(format!("image {index} is not read by the model: {reason}"))
            };
            let tower = self.tower.as_ref();
            let tower = tower.ok_or_else(|| invalid("it was loaded for text only"))?;
            let patches = span.image.contents::<ImagePatches>();
            let patches = patches.ok_or_else(|| invalid("its contents are no patches"))?;
            tower
                .check_image(patches)
                .map_err(|reason| invalid(&reason))?;
            if patches.num_tokens != span.image.num_tokens().index() {
                return Err(invalid("it has another number of tokens than its patches"));
            }
            let num_positions = span.image.num_positions();
            if num_positions != Tokens(tower.num_positions(patches)) {
                return Err(invalid(
                    "it has another number of positions than its patches",
                ));
            }
            if num_positions != span.image.num_tokens()
                && span.num_tokens != span.image.num_tokens()
            {
                return Err(invalid(
                    "its tokens have positions in a plane, and are in several spans",
                ));
            }
        }
        Ok(())
    }

    /// Cancels a request, see [`Engine::cancel`](inflight_engine::Engine::cancel).
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        self.steps.engine_mut().cancel(id)
    }

    /// Why an active request has ended, see [`Engine::ended`](inflight_engine::Engine::ended).
    pub fn ended(&self, id: SequenceId) -> Option<FinishReason> {
        self.steps.engine().ended(id)
    }

    /// Whether a request's beams are in a step on its way, see
    /// [`Engine::are_beams_out`](inflight_engine::Engine::are_beams_out); not after [`BatchManager::settle`].
    pub fn are_beams_out(&self, id: SequenceId) -> bool {
        self.steps.engine().are_beams_out(id)
    }

    /// What a beam search would return if it ended now, see
    /// [`Engine::best_so_far`](inflight_engine::Engine::best_so_far).
    ///
    /// # Panics
    /// If the beams are in a step on its way.
    pub fn best_so_far(&self, id: SequenceId) -> Box<[Hypothesis]> {
        self.steps.engine().best_so_far(id)
    }

    /// Ends a request after one of its tokens, see [`Engine::finish`](inflight_engine::Engine::finish).
    pub fn finish(
        &mut self,
        id: SequenceId,
        num_output_tokens: Tokens,
        reason: FinishReason,
    ) -> bool {
        self.steps
            .engine_mut()
            .finish(id, num_output_tokens, reason)
    }

    /// Whether no request is active.
    pub fn is_idle(&self) -> bool {
        self.steps.engine().is_idle()
    }

    /// How many further requests could start in the next step, see
    /// [`Engine::num_startable`](inflight_engine::Engine::num_startable).
    pub fn num_startable(&self) -> usize {
        self.steps.engine().num_startable()
    }

    /// Capacity left for further requests in the next step, see [`Engine::room`](inflight_engine::Engine::room).
    pub fn room(&self) -> Room {
        self.steps.engine().room()
    }

    /// The most requests that run at a time.
    pub fn max_num_requests(&self) -> usize {
        self.steps.engine().config().max_num_requests as usize
    }

    /// The most requests that can be active at a time.
    pub fn max_num_active(&self) -> usize {
        self.steps.engine().config().max_num_active as usize
    }

    /// Requests that have not ended.
    pub fn num_active(&self) -> usize {
        self.steps.engine().num_active()
    }

    /// The totals of all drafts so far.
    pub fn draft_totals(&self) -> DraftTotals {
        self.steps.engine().draft_totals()
    }

    /// How full the KV cache is now.
    pub fn kv_usage(&self) -> KvUsage {
        self.steps.engine().kv_usage()
    }

    /// Retains the cached blocks of a prefix, see [`Engine::retain`](inflight_engine::Engine::retain).
    pub fn retain(&mut self, tokens: Arc<[TokenId]>, salt: Option<Arc<str>>) -> RetainedPrefix {
        self.steps.engine_mut().retain(tokens, salt)
    }

    /// Retains them no longer, see [`Engine::release_retained`](inflight_engine::Engine::release_retained).
    pub fn release_retained(&mut self, retained: &RetainedPrefix) {
        self.steps.engine_mut().release_retained(retained);
    }

    /// Plans the next step and has it computed, see [`StepLoop::launch`].
    ///
    /// # Errors
    /// The step failed as a whole; the manager cannot continue. So for `land` and `settle`.
    pub fn launch(&mut self) -> Result<(), StepError> {
        self.steps.launch()
    }

    /// Applies the oldest step that is on its way, if it is due, see [`StepLoop::land`].
    ///
    /// # Errors
    /// As for `launch`.
    pub fn land(&mut self, events: &mut Vec<Event>) -> Result<Option<LandedStep>, StepError> {
        self.steps.land(events)
    }

    /// Applies all steps that are on their way, see [`StepLoop::settle`].
    ///
    /// # Errors
    /// As for `launch`.
    pub fn settle(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        self.steps.settle(events)
    }
}

impl Drop for BatchManager {
    /// Keeps the KV cache blocks, if there is a file for them and nothing has failed.
    fn drop(&mut self) {
        let Some(file) = self.kv_file.take() else {
            return;
        };
        let path = file.path().display();
        let (engine, computer) = self.steps.parts_mut();
        let is_at_rest = engine.is_idle() && engine.kv_usage().num_used == Blocks::ZERO;
        let Some(runner) = computer.stop().filter(|_| is_at_rest) else {
            log::warn!(
                "{path}: no KV cache blocks are kept, because a step is on its way or has failed"
            );
            return;
        };
        if let Err(error) = file.keep(engine, runner) {
            log::warn!("{path}: KV cache blocks cannot be kept: {error}");
        }
    }
}
