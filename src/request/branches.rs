//! The branches of a request: the sequences that the engine generates for it.
//!
//! A request for several sequences (`n`, `best_of`) is one request to Triton, with one slot, and several to the engine.
//! Branch `i` gets, bit for bit, what the request gets alone with `n` = 1 and the seed `seed + i`. They share their
//! prompt, so with reuse of the KV cache the first computes the context and the others wait for its blocks; the engine
//! need not know.
//!
//! More branches than rows or blocks cannot deadlock: the engine admits waiting branches one by one, like any request,
//! and a running branch waits for neither a sibling nor Triton. The slot is free when the last branch has ended.

use std::sync::Arc;

use crate::request::thought_budget::ThoughtBudget;
use inflight_base::{RequestError, SequenceId};
use inflight_engine::NewRequest;
use inflight_manager::{BatchManager, LoadedAdapter};
use inflight_sampling::{Guide, LogitsProcessor};

/// The engine's ids of a request's branches, which follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branches {
    first: SequenceId,
    num: u32,
}

impl Branches {
    /// `num` branches with consecutive ids, starting with `first`.
    pub fn new(first: SequenceId, num: u32) -> Self {
        Self { first, num }
    }

    /// No branches.
    pub fn none() -> Self {
        Self::new(SequenceId::default(), 0)
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.num as usize
    }

    /// The id of the first.
    pub fn first(self) -> SequenceId {
        self.first
    }

    /// Their ids, in order.
    pub fn ids(self) -> impl Iterator<Item = SequenceId> {
        (0..u64::from(self.num)).map(move |branch| SequenceId(self.first.0 + branch))
    }

    /// Cancels all of them.
    pub fn cancel(self, manager: &mut BatchManager) {
        for sequence in self.ids() {
            manager.cancel(sequence);
        }
    }

    /// The row of the answer that `branch`, one of them, adds to.
    pub fn row_of(self, branch: SequenceId) -> usize {
        (branch.0 - self.first.0) as usize
    }
}

/// The engine requests of a request's branches.
pub struct NewBranches {
    branches: Branches,
    first: NewRequest,
    processors: Vec<LogitsProcessor>,
    thought_budget: Option<ThoughtBudget>,
}

impl NewBranches {
    /// The first branch is `first`, whose id is set here. Each branch has a logits processor of its own, or none has
    /// any.
    pub fn new(
        branches: Branches,
        mut first: NewRequest,
        processors: Vec<LogitsProcessor>,
    ) -> Self {
        first.id = branches.first();
        Self {
            branches,
            first,
            processors,
            thought_budget: None,
        }
    }

    /// The branches, whose thoughts have this budget.
    pub fn with_thought_budget(self, thought_budget: Option<ThoughtBudget>) -> Self {
        Self {
            thought_budget,
            ..self
        }
    }

    /// Their ids.
    pub fn branches(&self) -> Branches {
        self.branches
    }

    /// Guides them: the first by `guide`, the others by guides of their own to the same outputs.
    pub fn set_guide(&mut self, guide: Guide) {
        Arc::make_mut(&mut self.first.sampling).guide = Some(guide);
    }

    /// Has all of them computed with an adapter.
    pub fn set_adapter(&mut self, adapter: &LoadedAdapter) {
        adapter.apply_to(&mut self.first);
    }

    /// The engine request of the first.
    pub fn first(&self) -> &NewRequest {
        &self.first
    }

    /// Gives the manager all of them, or none.
    pub fn add_to(self, manager: &mut BatchManager) -> Result<(), RequestError> {
        let branches = self.branches;
        let added = self.requests().try_for_each(|request| manager.add(request));
        added.inspect_err(|_| branches.cancel(manager))
    }

    /// The engine request of each branch.
    pub fn requests(mut self) -> impl Iterator<Item = NewRequest> {
        if let Some(budget) = &self.thought_budget {
            let sampling = Arc::make_mut(&mut self.first.sampling);
            sampling.guide = Some(budget.around(sampling.guide.take()));
        }
        let siblings = 1..self.branches.len();
        let siblings: Vec<_> = siblings.map(|branch| self.sibling(branch)).collect();
        if let Some(processor) = self.processors.first() {
            let sampling = Arc::make_mut(&mut self.first.sampling);
            sampling.logits_processor = Some(processor.clone());
        }
        std::iter::once(self.first).chain(siblings)
    }

    /// The engine request of another branch.
    fn sibling(&self, branch: usize) -> NewRequest {
        let mut request = self.first.clone();
        request.id = SequenceId(request.id.0 + branch as u64);
        let sampling = Arc::make_mut(&mut request.sampling);
        sampling.seed = sampling.seed.wrapping_add(branch as u64);
        sampling.logits_processor = self.processors.get(branch).cloned();
        sampling.guide = sampling.guide.as_ref().map(|guide| guide.0.fresh());
        // All have the same prompt: one returns its logits and log-probabilities.
        request.outputs.context_logits = false;
        request.outputs.prompt_log_probs = None;
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::{TokenId, Tokens};
    use inflight_engine::OutputOptions;
    use inflight_sampling::{
        GuideCost, GuideTokens, ProcessLogits, SampleError, SamplingInput, SamplingParams,
    };

    fn request(seed: u64) -> NewRequest {
        NewRequest {
            sampling: Arc::new(SamplingParams {
                temperature: 1.0,
                seed,
                ..SamplingParams::default()
            }),
            outputs: OutputOptions {
                context_logits: true,
                prompt_log_probs: Some(1),
                generation_logits: true,
                ..OutputOptions::default()
            },
            ..NewRequest::new(SequenceId(7), vec![1, 2], Tokens(5))
        }
    }

    struct Nothing;

    impl ProcessLogits for Nothing {
        fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
            Ok(())
        }
    }

    #[test]
    fn a_branch_is_the_request_with_an_id_and_a_seed_of_its_own() {
        let branches = Branches::new(SequenceId(7), 3);
        let processors: Vec<_> = (0..3).map(|_| LogitsProcessor(Arc::new(Nothing))).collect();
        let first = request(u64::MAX);
        let new = NewBranches::new(branches, first, processors.clone());
        let requests: Vec<_> = new.requests().collect();
        let ids: Vec<_> = requests.iter().map(|request| request.id).collect();
        assert_eq!(ids, branches.ids().collect::<Vec<_>>());
        assert_eq!(ids, [7, 8, 9].map(SequenceId));
        let seeds: Vec<_> = requests
            .iter()
            .map(|request| request.sampling.seed)
            .collect();
        assert_eq!(seeds, [u64::MAX, 0, 1], "seeds go round");
        let own = requests
            .iter()
            .map(|request| request.sampling.logits_processor.clone());
        assert_eq!(
            own.collect::<Vec<_>>(),
            processors.into_iter().map(Some).collect::<Vec<_>>()
        );
        for request in &requests {
            assert_eq!(
                (&*request.prompt, request.sampling.temperature),
                (&[1, 2][..], 1.0)
            );
            assert!(request.outputs.generation_logits);
        }
        let context: Vec<_> = requests
            .iter()
            .map(|request| {
                (
                    request.outputs.context_logits,
                    request.outputs.prompt_log_probs,
                )
            })
            .collect();
        assert_eq!(
            context,
            [(true, Some(1)), (false, None), (false, None)],
            "what belongs to the prompt is returned once"
        );
    }

    struct Anything;

    impl GuideTokens for Anything {
        fn fresh(&self) -> Guide {
            Guide(Arc::new(Anything))
        }

        fn prepare(&self, _: &[TokenId], _: &[TokenId]) {}

        fn is_ready(&self, _: &[TokenId]) -> bool {
            true
        }

        fn cost(&self) -> GuideCost {
            GuideCost::default()
        }

        fn give_up(&self) {}

        fn restrict(&self, _: &mut [f32], _: &[TokenId]) -> Result<(), SampleError> {
            Ok(())
        }
    }

    #[test]
    fn each_branch_has_a_guide_of_its_own_that_nobody_else_holds() {
        let new = || NewBranches::new(Branches::new(SequenceId(7), 40), request(0), Vec::new());
        // With a guide from the beginning, and with one that was compiled in the meantime.
        let mut guided = request(0);
        Arc::make_mut(&mut guided.sampling).guide = Some(Anything.fresh());
        let at_once = NewBranches::new(Branches::new(SequenceId(7), 40), guided, Vec::new());
        let mut later = new();
        later.set_guide(Anything.fresh());
        for branches in [at_once, later] {
            let requests: Vec<_> = branches.requests().collect();
            let guides = requests.iter().map(|it| it.sampling.guide.as_ref());
            let guides: Vec<_> = guides.map(|guide| guide.expect("guided")).collect();
            assert_eq!(guides.len(), 40);
            assert!(guides.iter().all(|guide| Arc::strong_count(&guide.0) == 1));
        }
        let free = new().requests().all(|it| it.sampling.guide.is_none());
        assert!(free, "and none where the request has none");
    }

    #[test]
    fn branches_share_what_can_be_large() {
        let mut first = request(1);
        let sampling = Arc::make_mut(&mut first.sampling);
        sampling.logit_bias = [(1, 0.5)].into();
        sampling.bad_words = [vec![1]].into();
        sampling.allowed_token_ids = Some([1, 2].into());
        first.drafts.expected = [3].into();
        let new = NewBranches::new(Branches::new(SequenceId(7), 2), first, Vec::new());
        let [a, b] = new.requests().collect::<Vec<_>>().try_into().expect("two");
        assert!(Arc::ptr_eq(&a.prompt, &b.prompt));
        assert!(Arc::ptr_eq(&a.drafts.expected, &b.drafts.expected));
        let (a, b) = (&a.sampling, &b.sampling);
        assert!(Arc::ptr_eq(&a.logit_bias, &b.logit_bias));
        assert!(Arc::ptr_eq(&a.bad_words, &b.bad_words));
        let allowed = [a, b].map(|it| it.allowed_token_ids.as_ref().expect("given"));
        assert!(Arc::ptr_eq(allowed[0], allowed[1]));
    }

    #[test]
    fn one_branch_is_the_request_itself() {
        let branches = Branches::new(SequenceId(7), 1);
        let mut requests = NewBranches::new(branches, request(4), Vec::new()).requests();
        let first = requests.next().expect("one");
        assert_eq!((first.id, first.sampling.seed), (SequenceId(7), 4));
        assert!(requests.next().is_none());
    }
}
