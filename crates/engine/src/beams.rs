//! Beam search within a sequence.
//!
//! The first beam computes the context alone. From the first generated token on there are up to `width` beams
//! of equal length, each with its tokens and its block table; what they have in common they share, see
//! [`KvCacheManager::fork`](super::kv::KvCacheManager::fork). [`BeamSearch::select`] decides which survive.
//!
//! ```text
//! row 3   context ------ beam 0 --- beam 0 --- ...       one row of the sequence table,
//!                   \--- beam 1 -x  beam 1 --- ...       one planned sequence for each beam
//! ```
//!
//! A pause gives the blocks of all beams back. When it is over, the first beam computes what all have in common, alone
//! again, and the others share its blocks; then each computes the rest of its tokens, all of them the same number in
//! a step.
//!
//! ```text
//! row 3   in common -------- rest of beam 0 --- beam 0 --- ...
//!                   \------- rest of beam 1 --- beam 1 --- ...
//! ```

use std::mem;
use std::sync::Arc;

use crate::beam::Beam;
use crate::kv::{BlockTable, KvCacheManager};
use crate::sequence_tokens::SequenceTokens;
use crate::{BeamCandidates, Sampled};
use inflight_base::{Blocks, TokenId, Tokens};
use inflight_sampling::{
    BeamSearch, Continuation, FinishReason, Hypotheses, Hypothesis, ReadText, SampleError,
    StopText, TokenLogProbs,
};

/// The state of a beam search. The first beam is kept by the sequence itself and passed to each call.
pub(super) struct Beams {
    search: BeamSearch,
    /// All beams but the first.
    others: Vec<Beam>,
    /// One for each beam, the first included.
    paths: Vec<Path>,
    /// The candidates of the beams that have landed from the current step, in order.
    candidates: Vec<BeamCandidates>,
    /// Why the search cannot continue.
    failure: Option<SampleError>,
    /// Beams of the current step that could only repeat themselves. Their texts end unchanged.
    exhausted: Vec<usize>,
    hypotheses: Hypotheses,
    /// The best hypotheses, once the search is over.
    found: Box<[Hypothesis]>,
    /// Blocks that the sequence has taken since it started or resumed, with its context's; `None` while only
    /// the first beam holds blocks.
    num_taken: Option<Blocks>,
    /// After a pause, the number of tokens that all beams have in common, until the first beam has computed them. The
    /// others hold no blocks until then.
    num_common: Option<Tokens>,
    /// Recurrent states to be copied before the next step, as [indices](Path::state): source and target of each.
    state_copies: Vec<[u32; 2]>,
}

/// The outputs that a beam has collected with its tokens, and its recurrent states.
#[derive(Clone, Default)]
struct Path {
    /// The index of its states among the states of all beams.
    state: u32,
    /// The sum of `log_probs`.
    score: f64,
    log_probs: Vec<f32>,
    /// The extra outputs of each token, if they are wanted. Beams with a common beginning share them.
    generation_logits: Vec<Arc<Vec<f32>>>,
    model_log_probs: Vec<Arc<TokenLogProbs>>,
    /// Its text, if stop words can end it.
    text: Option<Box<dyn ReadText>>,
}

/// The extra outputs of a beam's candidates.
struct CandidateOutputs {
    generation_logits: Option<Arc<Vec<f32>>>,
    /// One for each candidate, or empty.
    log_probs: Vec<Arc<TokenLogProbs>>,
}

impl Beams {
    /// A search that has one beam, generates at most `max_new_tokens`, and ends texts where `stop_text` says.
    pub(super) fn new(
        search: BeamSearch,
        max_new_tokens: Tokens,
        stop_text: Option<&StopText>,
    ) -> Self {
        let path = Path {
            text: stop_text.map(|text| text.0.fork()),
            ..Path::default()
        };
        Self {
            search,
            others: Vec::new(),
            paths: vec![path],
            candidates: Vec::new(),
            failure: None,
            exhausted: Vec::new(),
            hypotheses: Hypotheses::new(search, max_new_tokens.0),
            found: Box::default(),
            num_taken: None,
            num_common: None,
            state_copies: Vec::new(),
        }
    }

    /// The most beams that there may be.
    pub(super) fn width(&self) -> u32 {
        self.search.width
    }

    /// The number of beams now.
    pub(super) fn len(&self) -> usize {
        1 + self.others.len()
    }

    /// The number of beams that the next step computes.
    pub(super) fn num_in_step(&self) -> usize {
        match self.num_common {
            None => self.len(),
            Some(_) => 1,
        }
    }

    /// After a pause, the number of tokens that all beams have in common, if they are not all computed.
    pub(super) fn num_common(&self) -> Option<Tokens> {
        self.num_common
    }

    /// Blocks taken since the sequence started or resumed, once several beams hold some.
    pub(super) fn num_taken(&self) -> Option<Blocks> {
        self.num_taken
    }

    /// The number of tokens in the final hypotheses.
    pub(super) fn num_output_tokens(&self) -> Tokens {
        let found = self.found.iter();
        Tokens(found.map(|it| it.tokens.len() as u32).sum())
    }

    /// The final hypotheses, which are moved out.
    pub(super) fn take_found(&mut self) -> Box<[Hypothesis]> {
        mem::take(&mut self.found)
    }

    /// The final hypotheses.
    pub(super) fn found(&self) -> &[Hypothesis] {
        &self.found
    }

    /// The block tables of all beams but the first.
    pub(super) fn other_tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.others.iter().map(|beam| beam.blocks())
    }

    /// All beams but the first, with their tokens, which are moved out for a step, and the indices of their states.
    pub(super) fn take_tokens(
        &mut self,
    ) -> impl Iterator<Item = (Box<SequenceTokens>, &BlockTable, u32)> {
        let others = self.others.iter_mut().zip(&self.paths[1..]);
        others.map(|(beam, path)| {
            let tokens = beam.take_tokens();
            (tokens, beam.blocks(), path.state)
        })
    }

    /// The index of the states of the first beam.
    pub(super) fn first_state(&self) -> u32 {
        self.paths[0].state
    }

    /// The states to be copied before the next step, see [`StateCopy`](crate::StateCopy), which takes them.
    pub(super) fn take_state_copies(&mut self) -> impl Iterator<Item = [u32; 2]> {
        self.state_copies.drain(..)
    }

    /// Takes the blocks that the beams of the next step lack to compute up to `kv_len` positions.
    pub(super) fn grow(
        &mut self,
        first: &mut Beam,
        computed: Tokens,
        kv_len: Tokens,
        kv: &mut KvCacheManager,
    ) {
        if self.num_common.is_some() {
            return first.grow(kv, kv_len);
        }
        let before = kv.totals().num_taken_blocks;
        for beam in std::iter::once(first).chain(&mut self.others) {
            beam.grow_own(kv, computed, kv_len);
        }
        let num_taken = Blocks((kv.totals().num_taken_blocks - before) as u32);
        self.num_taken = self.num_taken.map(|before| before + num_taken);
    }

    /// Puts the tokens of a beam that is not the first back after a step.
    pub(super) fn land(
        &mut self,
        beam: u32,
        tokens: Box<SequenceTokens>,
        kv_len: Tokens,
        has_failed: bool,
        kv: &mut KvCacheManager,
    ) {
        let beam = &mut self.others[beam as usize - 1];
        beam.put_tokens(tokens);
        if !has_failed {
            beam.commit(kv_len, kv);
        }
    }

    /// Records the result of the next beam in order. Returns whether all beams have theirs.
    pub(super) fn take_candidates(
        &mut self,
        result: Sampled,
        candidates: Option<BeamCandidates>,
    ) -> bool {
        match result {
            // Other beams may still have candidates.
            Sampled::Failed(SampleError::NoneAllowed) => {}
            Sampled::Failed(SampleError::OnlyRepeats) => {
                self.exhausted.push(self.candidates.len());
            }
            Sampled::Failed(error) => self.failure = self.failure.or(Some(error)),
            Sampled::Candidates => {}
            Sampled::Token(_) | Sampled::Pooled | Sampled::Missed => {
                unreachable!("a beam has candidates")
            }
        }
        self.candidates.push(candidates.unwrap_or_default());
        self.candidates.len() == self.len()
    }

    /// Whether all beams are between two steps.
    pub(super) fn are_settled(&self) -> bool {
        self.candidates.is_empty()
    }

    /// The hypotheses that the search would return if it ended now, see [`Hypotheses::best_so_far`].
    pub(super) fn best_so_far(&self, first: &SequenceTokens) -> Box<[Hypothesis]> {
        let num_tokens = first.num_generated();
        if num_tokens == Tokens::ZERO {
            return Box::default();
        }
        let scores = self.scores();
        let beam = |beam| self.as_hypothesis(first, beam);
        self.hypotheses.best_so_far(&scores, num_tokens.0, beam)
    }

    /// Selects among the candidates of all beams. Some beams end, others continue, perhaps in several ways.
    /// Returns why the search is over, if it is. `num_taken` is the number of blocks that the first beam has taken, if
    /// it alone holds blocks.
    pub(super) fn advance(
        &mut self,
        first: &mut Beam,
        num_taken: Blocks,
        kv: &mut KvCacheManager,
    ) -> Option<FinishReason> {
        if self.num_taken.is_none() {
            self.num_taken = Some(num_taken);
            first.stop_registering(kv);
        }
        let candidates = mem::take(&mut self.candidates);
        if let Some(failure) = self.failure {
            return Some(FinishReason::Error(failure));
        }
        let num_before = first.tokens().num_generated();
        let num_tokens = num_before + Tokens(1);
        let end = |it: &Continuation| {
            let token = it.candidate.token;
            let by_token = self.tokens(first.tokens(), it.beam).finish_reason(token);
            by_token.or_else(|| {
                let by_text = self.paths[it.beam].ends_with(token);
                by_text.then_some(FinishReason::StopWords)
            })
        };
        let scores = self.scores();
        let selection = self.search.select(&scores, &candidates, end);
        let outputs: Vec<_> = candidates.into_iter().map(CandidateOutputs::from).collect();

        let exhausted = mem::take(&mut self.exhausted);
        for &beam in exhausted.iter().filter(|_| num_before > Tokens::ZERO) {
            let text = Hypothesis {
                finish_reason: Some(FinishReason::Length),
                ..self.as_hypothesis(first.tokens(), beam)
            };
            self.hypotheses.offer(scores[beam], num_before.0, text);
        }
        for (it, reason) in &selection.ended {
            let hypothesis = self.hypothesis(first.tokens(), it, &outputs[it.beam], *reason);
            self.hypotheses.offer(it.score, num_tokens.0, hypothesis);
        }
        let best = selection.alive.first().map(|it| it.score);
        if self.hypotheses.is_over(best, num_tokens.0) {
            self.found = self.hypotheses.take_best();
            self.release_others(kv);
            let reason = self.found.first().and_then(|best| best.finish_reason);
            return Some(reason.unwrap_or(match exhausted.is_empty() {
                true => FinishReason::Error(SampleError::NoneAllowed),
                false => FinishReason::Length,
            }));
        }
        self.replace(first, &selection.alive, &outputs, kv);
        None
    }

    /// Gives the blocks of all beams but the first back, because the sequence is paused.
    pub(super) fn pause(&mut self, first: &SequenceTokens, kv: &mut KvCacheManager) {
        // A sequence starts with the states of index 0.
        self.state_copies.clear();
        for (path, state) in self.paths.iter_mut().zip(0..) {
            path.state = state;
        }
        let first = first.as_slice();
        let num_common = |beam: &Beam| {
            let both = std::iter::zip(first, beam.tokens().as_slice());
            Tokens(both.take_while(|(one, other)| one == other).count() as u32)
        };
        // No two beams are equal, so each has a token left, from whose logits it goes on.
        self.num_common = self.others.iter().map(num_common).min();
        self.num_taken = None;
        for beam in &mut self.others {
            beam.release(kv);
        }
    }

    /// After a pause, lets all beams share the blocks of the first, if that has `computed` what they have in common.
    /// `num_taken` is the number of blocks that it has taken.
    pub(super) fn part(
        &mut self,
        first: &mut Beam,
        computed: Tokens,
        num_taken: Blocks,
        kv: &mut KvCacheManager,
    ) {
        if self.num_common != Some(computed) {
            return;
        }
        self.num_common = None;
        self.num_taken = Some(num_taken);
        first.stop_registering(kv);
        let source = self.first_state();
        for (beam, path) in self.others.iter_mut().zip(&self.paths[1..]) {
            beam.share(first, kv);
            self.state_copies.push([source, path.state]);
        }
    }

    /// Gives the blocks of all beams but the first back.
    pub(super) fn release_others(&mut self, kv: &mut KvCacheManager) {
        self.state_copies.clear();
        for mut beam in self.others.drain(..) {
            beam.release(kv);
        }
    }

    /// Makes `alive` the beams. The last child of a beam takes its place, the others fork. Those get recurrent states
    /// that no surviving beam has.
    fn replace(
        &mut self,
        first: &mut Beam,
        alive: &[Continuation],
        outputs: &[CandidateOutputs],
        kv: &mut KvCacheManager,
    ) {
        let old = std::iter::once(mem::take(first)).chain(self.others.drain(..));
        let mut old: Vec<_> = old.zip(self.paths.drain(..)).map(Some).collect();
        let mut num_children = vec![0; old.len()];
        for it in alive {
            num_children[it.beam] += 1;
        }
        for (old, _) in std::iter::zip(&mut old, &num_children).filter(|&(_, &num)| num == 0) {
            if let Some((mut dead, _)) = old.take() {
                dead.release(kv);
            }
        }
        let taken: Vec<_> = old.iter().flatten().map(|(_, path)| path.state).collect();
        let mut free_states = (0..).filter(|state| !taken.contains(state));
        for (place, it) in alive.iter().enumerate() {
            num_children[it.beam] -= 1;
            let parent = &mut old[it.beam];
            let (mut beam, mut path) = match (num_children[it.beam], &parent) {
                (1.., Some((beam, path))) => {
                    let state = free_states.next().expect("there is no end");
                    self.state_copies.push([path.state, state]);
                    let path = Path {
                        state,
                        ..path.clone()
                    };
                    (beam.fork(kv), path)
                }
                _ => parent.take().expect("a child is left"),
            };
            beam.extend(it.candidate.token);
            path.push(it, &outputs[it.beam]);
            self.paths.push(path);
            match place {
                0 => *first = beam,
                _ => self.others.push(beam),
            }
        }
    }

    fn scores(&self) -> Vec<f64> {
        self.paths.iter().map(|path| path.score).collect()
    }

    fn tokens<'a>(&'a self, first: &'a SequenceTokens, beam: usize) -> &'a SequenceTokens {
        match beam.checked_sub(1) {
            None => first,
            Some(other) => self.others[other].tokens(),
        }
    }

    /// The hypothesis that ends with `end`.
    fn hypothesis(
        &self,
        first: &SequenceTokens,
        end: &Continuation,
        outputs: &CandidateOutputs,
        finish_reason: FinishReason,
    ) -> Hypothesis {
        let generated = self.tokens(first, end.beam).generated();
        let mut path = self.paths[end.beam].without_text();
        path.push(end, outputs);
        Hypothesis {
            tokens: [generated, &[end.candidate.token]].concat(),
            log_probs: path.log_probs,
            cum_log_prob: path.score as f32,
            generation_logits: path.generation_logits,
            model_log_probs: path.model_log_probs,
            finish_reason: Some(finish_reason),
        }
    }

    /// A beam that continues, as a hypothesis.
    fn as_hypothesis(&self, first: &SequenceTokens, beam: usize) -> Hypothesis {
        let path = self.paths[beam].without_text();
        Hypothesis {
            tokens: self.tokens(first, beam).generated().to_vec(),
            log_probs: path.log_probs,
            cum_log_prob: path.score as f32,
            generation_logits: path.generation_logits,
            model_log_probs: path.model_log_probs,
            finish_reason: None,
        }
    }
}

impl Path {
    /// Continues with a candidate of its beam.
    fn push(&mut self, by: &Continuation, outputs: &CandidateOutputs) {
        self.score = by.score;
        self.log_probs.push(by.candidate.log_prob);
        self.generation_logits
            .extend(outputs.generation_logits.clone());
        let log_probs = outputs.log_probs.get(by.place);
        self.model_log_probs.extend(log_probs.cloned());
        if let Some(text) = &mut self.text {
            text.push(by.candidate.token);
        }
    }

    /// Whether its text ends with `token`.
    fn ends_with(&self, token: TokenId) -> bool {
        let mut text = self.text.clone();
        text.as_mut().is_some_and(|text| text.push(token))
    }

    /// A copy that reads no text.
    fn without_text(&self) -> Self {
        Self {
            state: self.state,
            score: self.score,
            log_probs: self.log_probs.clone(),
            generation_logits: self.generation_logits.clone(),
            model_log_probs: self.model_log_probs.clone(),
            text: None,
        }
    }
}

impl From<BeamCandidates> for CandidateOutputs {
    fn from(candidates: BeamCandidates) -> Self {
        let logits = Some(candidates.generation_logits).filter(|logits| !logits.is_empty());
        Self {
            generation_logits: logits.map(Arc::new),
            log_probs: candidates.log_probs.into_iter().map(Arc::new).collect(),
        }
    }
}
