//! A request's beams: texts that go on side by side in one row.
//!
//! The first beam is the sequence itself: it computes the context alone. From its first token on there
//! are up to `width` beams of one length, each with its text and its block table; what they have in
//! common they share, see `kv/fork.rs`. Which go on is the decision of [`BeamSearch::select`].
//!
//! ```text
//! row 3   context ------ beam 0 --- beam 0 --- ...       one row of the sequence table,
//!                   \--- beam 1 -x  beam 1 --- ...       a planned sequence for each beam
//! ```
//!
//! Beams are never paused: all that they may need is set aside for them when their request starts.

use std::mem;
use std::sync::Arc;

use crate::base::{Blocks, TokenId, Tokens};
use crate::engine::apply::has_failed;
use crate::engine::kv::{BlockTable, KvCacheManager};
use crate::engine::sequence::{Sequence, SequenceText};
use crate::engine::{BeamCandidates, Event, PlannedSequence, Sampled};
use crate::sampling::{
    BeamSearch, Continuation, FinishReason, Hypotheses, Hypothesis, ReadText, SampleError,
    StopText, TokenLogProbs,
};

/// What a sequence with beams has besides the first of them.
pub(super) struct Beams {
    search: BeamSearch,
    /// All but the first.
    others: Vec<Beam>,
    /// Of each beam, the first included.
    paths: Vec<Path>,
    /// What the beams have candidates in the step that is coming back, up to the one whose turn it is.
    candidates: Vec<BeamCandidates>,
    /// Why the search cannot go on.
    failure: Option<SampleError>,
    /// Beams of that step that could only repeat themselves: their texts end as they are.
    exhausted: Vec<usize>,
    hypotheses: Hypotheses,
    /// The best hypotheses, when the search is over.
    pub(super) found: Box<[Hypothesis]>,
    /// Blocks taken since there have been several beams, and before; `None` until then.
    num_new: Option<Blocks>,
}

/// A beam that is not the first.
struct Beam {
    /// `None` while it is out with a step.
    text: Option<Box<SequenceText>>,
    blocks: BlockTable,
}

/// What is known of a beam's tokens besides themselves.
#[derive(Clone, Default)]
struct Path {
    /// The sum of `log_probs`.
    score: f64,
    log_probs: Vec<f32>,
    /// What is known of each besides, if that is wanted. Beams that begin alike hold the same.
    generation_logits: Vec<Arc<Vec<f32>>>,
    model_log_probs: Vec<Arc<TokenLogProbs>>,
    /// Its text, if that can end it.
    text: Option<Box<dyn ReadText>>,
}

/// What a beam has outputs of its next tokens besides the candidates.
struct CandidateOutputs {
    generation_logits: Option<Arc<Vec<f32>>>,
    /// Of each candidate, or empty.
    log_probs: Vec<Arc<TokenLogProbs>>,
}

impl Beams {
    /// One beam so far, which will generate at most `max_new_tokens`, and ends where `stop_text` says.
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
            num_new: None,
        }
    }

    /// How many there may be.
    pub(super) fn width(&self) -> u32 {
        self.search.width
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        1 + self.others.len()
    }

    /// Blocks taken so far, once there have been several beams.
    pub(super) fn num_new(&self) -> Option<Blocks> {
        self.num_new
    }

    fn scores(&self) -> Vec<f64> {
        self.paths.iter().map(|path| path.score).collect()
    }

    /// Tokens of all that was found.
    pub(super) fn num_output_tokens(&self) -> Tokens {
        let found = self.found.iter();
        Tokens(found.map(|it| it.tokens.len() as u32).sum())
    }

    /// The tables of all beams but the first.
    pub(super) fn other_tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.others.iter().map(|beam| &beam.blocks)
    }

    /// The same beams with their texts, to be taken along by a step.
    pub(super) fn lend(&mut self) -> impl Iterator<Item = (Box<SequenceText>, &BlockTable)> {
        self.others.iter_mut().map(|beam| {
            let text = beam.text.take().expect("in one step at a time");
            (text, &beam.blocks)
        })
    }

    /// Gives all blocks back but those of the first beam.
    pub(super) fn release(&mut self, kv: &mut KvCacheManager) {
        for mut beam in self.others.drain(..) {
            kv.release(&mut beam.blocks);
        }
    }

    fn text<'a>(&'a self, first: &'a SequenceText, beam: usize) -> &'a SequenceText {
        match beam.checked_sub(1) {
            None => first,
            Some(other) => self.others[other]
                .text
                .as_ref()
                .expect("its tokens are back"),
        }
    }

    /// The hypothesis that ends with a continuation.
    fn hypothesis(
        &self,
        first: &SequenceText,
        end: &Continuation,
        outputs: &CandidateOutputs,
        finish_reason: FinishReason,
    ) -> Hypothesis {
        let generated = self.text(first, end.beam).sampling_input(0).generated();
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

    /// A beam as a text that goes on.
    fn as_it_is(&self, first: &SequenceText, beam: usize) -> Hypothesis {
        let path = self.paths[beam].without_text();
        Hypothesis {
            tokens: self
                .text(first, beam)
                .sampling_input(0)
                .generated()
                .to_vec(),
            log_probs: path.log_probs,
            cum_log_prob: path.score as f32,
            generation_logits: path.generation_logits,
            model_log_probs: path.model_log_probs,
            finish_reason: None,
        }
    }
}

impl Path {
    /// Goes on by a candidate of those that its beam has outputs of.
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

    /// The same for a text that nobody reads any more.
    fn without_text(&self) -> Self {
        Self {
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

impl Sequence {
    /// All tables of a sequence: one for each of its beams.
    pub(super) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        let others = self
            .details
            .beams
            .iter()
            .flat_map(|beams| beams.other_tables());
        std::iter::once(&self.blocks).chain(others)
    }

    /// Takes the blocks that beams need to compute up to `kv_len` positions.
    pub(super) fn grow_beams(&mut self, kv: &mut KvCacheManager, kv_len: Tokens) {
        let Some(beams) = &mut self.details.beams else {
            return;
        };
        let before = kv.totals().num_taken_blocks;
        let others = beams.others.iter_mut().map(|beam| &mut beam.blocks);
        for table in std::iter::once(&mut self.blocks).chain(others) {
            kv.own_next(table, self.computed);
            kv.grow(table, kv_len);
        }
        let num_taken = Blocks((kv.totals().num_taken_blocks - before) as u32);
        beams.num_new = beams.num_new.map(|num_new| num_new + num_taken);
    }

    /// A beam that is not the first is back from a step.
    pub(super) fn take_beam_back(
        &mut self,
        planned: &PlannedSequence,
        text: Box<SequenceText>,
        result: Option<Sampled>,
        kv: &mut KvCacheManager,
    ) {
        let beams = self.details.beams.as_mut().expect("it has beams");
        let beam = &mut beams.others[planned.beam as usize - 1];
        let text = beam.text.insert(text);
        if !has_failed(result) {
            kv.commit(&mut beam.blocks, &text.tokens, Tokens(planned.kv_len));
        }
    }

    /// The next beam in order has `candidates` what could follow it, or has failed to. When all have, says
    /// whether the search is over.
    pub(super) fn take_candidates(
        &mut self,
        result: Sampled,
        candidates: Option<BeamCandidates>,
        kv: &mut KvCacheManager,
    ) -> Option<FinishReason> {
        let beams = self
            .details
            .beams
            .as_mut()
            .expect("only beams name candidates");
        match result {
            // What one beam must not go on with, another may.
            Sampled::Failed(SampleError::NoneAllowed) => {}
            Sampled::Failed(SampleError::OnlyRepeats) => {
                beams.exhausted.push(beams.candidates.len())
            }
            Sampled::Failed(error) => beams.failure = beams.failure.or(Some(error)),
            Sampled::Candidates => {}
            Sampled::Token(_) => unreachable!("a beam names candidates"),
        }
        beams.candidates.push(candidates.unwrap_or_default());
        match beams.candidates.len() == beams.len() {
            true => self.advance_beams(kv),
            false => None,
        }
    }

    /// Whether its beams are out with a step.
    pub(super) fn are_beams_out(&self) -> bool {
        self.has_beams() && self.text.is_none()
    }

    /// The best that its search has found so far, as many as are to be returned, see
    /// [`Hypotheses::best_so_far`]; nothing if it has no token yet, or does not search. Its beams must not be
    /// out.
    pub(super) fn best_so_far(&self) -> Box<[Hypothesis]> {
        let (Some(beams), Some(first)) = (&self.details.beams, &self.text) else {
            return Box::default();
        };
        let num_tokens = first.num_generated();
        if self.ended.is_some() {
            return beams.found.clone();
        }
        if num_tokens == Tokens::ZERO {
            return Box::default();
        }
        let scores = beams.scores();
        let text = |beam| beams.as_it_is(first, beam);
        beams.hypotheses.best_so_far(&scores, num_tokens.0, text)
    }

    /// The same as news, if it wants to know its beams, and has got another token of each that it is to be
    /// outputs of.
    pub(super) fn beam_news(&self) -> Option<Event> {
        let text = self.text.as_ref()?;
        let interval = text.outputs.beams?;
        let num_tokens = text.num_generated().0;
        let are_known = self.details.beams.as_ref()?.candidates.is_empty();
        let are_due =
            are_known && num_tokens > 0 && (num_tokens - 1).is_multiple_of(interval.get());
        are_due.then(|| Event::Hypotheses(self.id, self.best_so_far()))
    }

    /// Takes in what all beams have candidates: some end, some go on, perhaps in several ways. Says whether the
    /// search is over.
    fn advance_beams(&mut self, kv: &mut KvCacheManager) -> Option<FinishReason> {
        let num_own = self.kv_blocks().num_new;
        let num_tokens = self
            .text
            .as_ref()
            .expect("its tokens are back")
            .num_generated()
            + Tokens(1);
        let beams = self.details.beams.as_mut().expect("it has beams");
        if beams.num_new.is_none() {
            beams.num_new = Some(num_own);
            kv.stop_registering(&mut self.blocks);
        }
        let candidates = mem::take(&mut beams.candidates);
        if let Some(failure) = beams.failure {
            return Some(FinishReason::Error(failure));
        }
        let first = self.text.as_ref().expect("its tokens are back");
        let params = first.sampling_input(0).params;
        let end = |it: &Continuation| {
            let token = it.candidate.token;
            let by_token = first.stop.after(params, token, num_tokens);
            by_token.or_else(|| {
                let by_text = beams.paths[it.beam].ends_with(token);
                by_text.then_some(FinishReason::StopWords)
            })
        };
        let scores = beams.scores();
        let exhausted = mem::take(&mut beams.exhausted);
        let selection = beams.search.select(&scores, &candidates, end);
        let outputs: Vec<_> = candidates.into_iter().map(CandidateOutputs::from).collect();

        let num_before = num_tokens - Tokens(1);
        for &beam in exhausted.iter().filter(|_| num_before > Tokens::ZERO) {
            let text = Hypothesis {
                finish_reason: Some(FinishReason::Length),
                ..beams.as_it_is(first, beam)
            };
            beams.hypotheses.offer(scores[beam], num_before.0, text);
        }
        for (it, reason) in &selection.ended {
            let hypothesis = beams.hypothesis(first, it, &outputs[it.beam], *reason);
            beams.hypotheses.offer(it.score, num_tokens.0, hypothesis);
        }
        let best = selection.alive.first().map(|it| it.score);
        if beams.hypotheses.is_over(best, num_tokens.0) {
            beams.found = beams.hypotheses.take_best();
            beams.release(kv);
            let reason = beams.found.first().and_then(|best| best.finish_reason);
            return Some(reason.unwrap_or(match exhausted.is_empty() {
                true => FinishReason::Error(SampleError::NoneAllowed),
                false => FinishReason::Length,
            }));
        }
        self.replace_beams(&selection.alive, &outputs, kv);
        None
    }

    /// Makes the beams those that `alive` are: the last child of a beam takes its place, the others fork.
    fn replace_beams(
        &mut self,
        alive: &[Continuation],
        outputs: &[CandidateOutputs],
        kv: &mut KvCacheManager,
    ) {
        let beams = self.details.beams.as_mut().expect("it has beams");
        let first = Beam {
            text: self.text.take(),
            blocks: mem::take(&mut self.blocks),
        };
        let old = std::iter::once(first).chain(beams.others.drain(..));
        let mut old: Vec<_> = old.zip(beams.paths.drain(..)).map(Some).collect();
        let mut num_children = vec![0; old.len()];
        for it in alive {
            num_children[it.beam] += 1;
        }
        for (old, _) in std::iter::zip(&mut old, &num_children).filter(|&(_, &num)| num == 0) {
            if let Some((mut dead, _)) = old.take() {
                kv.release(&mut dead.blocks);
            }
        }
        for (place, it) in alive.iter().enumerate() {
            num_children[it.beam] -= 1;
            let parent = &mut old[it.beam];
            let (mut beam, mut path) = match (num_children[it.beam], &parent) {
                (1.., Some((beam, path))) => (beam.fork(kv), path.clone()),
                _ => parent.take().expect("a child is left"),
            };
            let text = beam.text.as_mut().expect("its tokens are back");
            text.tokens.push(it.candidate.token);
            path.push(it, &outputs[it.beam]);
            beams.paths.push(path);
            match place {
                0 => {
                    (self.text, self.blocks) = (beam.text, beam.blocks);
                    self.last_token = it.candidate.token;
                }
                _ => beams.others.push(beam),
            }
        }
    }
}

impl Beam {
    /// Another beam with the same tokens.
    fn fork(&self, kv: &mut KvCacheManager) -> Self {
        let text = self.text.as_ref().expect("its tokens are back");
        let mut blocks = BlockTable::with_capacity(self.blocks.capacity());
        kv.fork(&self.blocks, &mut blocks);
        Self {
            text: Some(Box::new(text.fork())),
            blocks,
        }
    }
}
