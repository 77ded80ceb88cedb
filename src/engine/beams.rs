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

use crate::base::{Blocks, TokenId, Tokens};
use crate::engine::kv::{BlockTable, KvCache};
use crate::engine::sequence::{Sequence, SequenceText};
use crate::engine::{PlannedSequence, Sampled};
use crate::sampling::{
    BeamCandidate, BeamSearch, Continuation, FinishReason, Hypotheses, Hypothesis, SampleError,
};

/// What a sequence with beams has besides the first of them.
pub(super) struct Beams {
    search: BeamSearch,
    /// All but the first.
    others: Vec<Beam>,
    /// Of each beam, the first included: the sum of its log-probabilities, and what it is the sum of.
    scores: Vec<Score>,
    /// What the beams have named in the step that is coming back, up to the one whose turn it is.
    named: Vec<Vec<BeamCandidate>>,
    /// Why the search cannot go on.
    failure: Option<SampleError>,
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

/// How likely a beam is.
#[derive(Clone, Default)]
struct Score {
    sum: f64,
    log_probs: Vec<f32>,
}

impl Beams {
    /// One beam so far, which will generate at most `max_new_tokens`.
    pub(super) fn new(search: BeamSearch, max_new_tokens: Tokens) -> Self {
        Self {
            search,
            others: Vec::new(),
            scores: vec![Score::default()],
            named: Vec::new(),
            failure: None,
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
    pub(super) fn release(&mut self, kv: &mut KvCache) {
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
        finish_reason: FinishReason,
    ) -> Hypothesis {
        let generated = self.text(first, end.beam).sampling_input(0).generated();
        let candidate = end.candidate;
        Hypothesis {
            tokens: [generated, &[candidate.token]].concat(),
            log_probs: [&self.scores[end.beam].log_probs[..], &[candidate.log_prob]].concat(),
            cum_log_prob: end.score as f32,
            finish_reason,
        }
    }
}

impl Sequence {
    /// All tables of a sequence: one for each of its beams.
    pub(super) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        let others = self.beams.iter().flat_map(|beams| beams.other_tables());
        std::iter::once(&self.blocks).chain(others)
    }

    /// Takes the blocks that beams need to compute up to `kv_len` positions.
    pub(super) fn grow_beams(&mut self, kv: &mut KvCache, kv_len: Tokens) {
        let Some(beams) = &mut self.beams else {
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
        kv: &mut KvCache,
    ) {
        let beams = self.beams.as_mut().expect("it has beams");
        let beam = &mut beams.others[planned.beam as usize - 1];
        let text = beam.text.insert(text);
        if !matches!(result, Some(Sampled::Failed(_))) {
            kv.commit(&mut beam.blocks, &text.tokens, Tokens(planned.kv_len));
        }
    }

    /// The next beam in order has `named` what could follow it, or has failed to. When all have, says
    /// whether the search is over.
    pub(super) fn name(
        &mut self,
        result: Sampled,
        named: Option<Vec<BeamCandidate>>,
        kv: &mut KvCache,
    ) -> Option<FinishReason> {
        let beams = self.beams.as_mut().expect("only beams name candidates");
        match result {
            // What one beam must not go on with, another may.
            Sampled::Failed(SampleError::NoneAllowed) => {}
            Sampled::Failed(error) => beams.failure = beams.failure.or(Some(error)),
            Sampled::Candidates => {}
            Sampled::Token(_) => unreachable!("a beam names candidates"),
        }
        beams.named.push(named.unwrap_or_default());
        match beams.named.len() == beams.len() {
            true => self.advance_beams(kv),
            false => None,
        }
    }

    /// Takes in what all beams have named: some end, some go on, perhaps in several ways. Says whether the
    /// search is over.
    fn advance_beams(&mut self, kv: &mut KvCache) -> Option<FinishReason> {
        let num_own = self.kv_blocks().num_new;
        let num_tokens = self.len() - self.num_prompt_tokens + Tokens(1);
        let beams = self.beams.as_mut().expect("it has beams");
        if beams.num_new.is_none() {
            beams.num_new = Some(num_own);
            kv.stop_registering(&mut self.blocks);
        }
        let named = mem::take(&mut beams.named);
        if let Some(failure) = beams.failure {
            return Some(FinishReason::Error(failure));
        }
        let first = self.text.as_ref().expect("its tokens are back");
        let params = first.sampling_input(0).params;
        let end = |token: TokenId| self.stop.after(params, token, num_tokens);
        let scores: Vec<_> = beams.scores.iter().map(|score| score.sum).collect();
        let selection = beams.search.select(&scores, &named, end);

        for (it, reason) in &selection.ended {
            let hypothesis = beams.hypothesis(first, it, *reason);
            beams.hypotheses.offer(it.score, num_tokens.0, hypothesis);
        }
        let best = selection.alive.first().map(|it| it.score);
        if beams.hypotheses.is_over(best, num_tokens.0) {
            beams.found = beams.hypotheses.take_best();
            beams.release(kv);
            let reason = beams.found.first().map(|best| best.finish_reason);
            return Some(reason.unwrap_or(FinishReason::Error(SampleError::NoneAllowed)));
        }
        self.go_on_with(&selection.alive, kv);
        None
    }

    /// Makes the beams those that `alive` are: the last child of a beam takes its place, the others fork.
    fn go_on_with(&mut self, alive: &[Continuation], kv: &mut KvCache) {
        let beams = self.beams.as_mut().expect("it has beams");
        let first = Beam {
            text: self.text.take(),
            blocks: mem::take(&mut self.blocks),
        };
        let old = std::iter::once(first).chain(beams.others.drain(..));
        let mut old: Vec<_> = old.zip(beams.scores.drain(..)).map(Some).collect();
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
            let (mut beam, mut score) = match (num_children[it.beam], &parent) {
                (1.., Some((beam, score))) => (beam.fork(kv), score.clone()),
                _ => parent.take().expect("a child is left"),
            };
            let text = beam.text.as_mut().expect("its tokens are back");
            text.tokens.push(it.candidate.token);
            score.sum = it.score;
            score.log_probs.push(it.candidate.log_prob);
            beams.scores.push(score);
            match place {
                0 => {
                    (self.text, self.blocks) = (beam.text, beam.blocks);
                    self.last_token = it.candidate.token;
                }
                _ => beams.others.push(beam),
            }
        }
        self.len += Tokens(1);
    }
}

impl Beam {
    /// Another beam with the same tokens.
    fn fork(&self, kv: &mut KvCache) -> Self {
        let text = self.text.as_ref().expect("its tokens are back");
        let mut blocks = BlockTable::with_capacity(self.blocks.capacity());
        kv.fork(&self.blocks, &mut blocks);
        Self {
            text: Some(Box::new(text.fork())),
            blocks,
        }
    }
}
