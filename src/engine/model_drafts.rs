//! How far the runner's draft model has computed a sequence.
//!
//! Its keys and values are in blocks of the same ids as those of the model. It computes a sequence only in steps for which
//! it makes drafts, so it first catches up on what the model has computed since:
//!
//! ```text
//! tokens of the sequence   | computed by both | by the model only | last | drafts ...... |
//! first pass                                  |   caught up on    | last |                  gives the first draft
//! passes after it                                                        | all but the last |  give one each
//! ```
//!
//! Of blocks that were found in the cache, nobody knows whether the draft model has computed them, too: they are taken as
//! they are. Wrong keys and values there make wrong drafts, and nothing else.

use crate::base::Tokens;

/// The draft model's part of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelDrafts {
    /// Positions that it has computed, or that were found in the cache.
    computed: Tokens,
    /// Whether it makes the drafts of the step that is planned and has not landed.
    is_out: bool,
}

impl ModelDrafts {
    /// The sequence begins, or goes on after a pause, with so many positions in the cache.
    pub(super) fn start(&mut self, computed: Tokens) {
        self.computed = computed;
    }

    /// It makes the drafts of the step that is planned.
    pub(super) fn make(&mut self) {
        self.is_out = true;
    }

    /// How many positions it has computed, if it makes the drafts of the step that is planned.
    pub(super) fn made_from(&self) -> Option<Tokens> {
        self.is_out.then_some(self.computed)
    }

    /// A step has landed, with drafts of any kind or none, after which `computed` positions of the sequence are in the cache.
    /// The last of its drafts was not computed: if all were accepted, the draft model lacks that one.
    pub(super) fn land(&mut self, are_all_accepted: bool, computed: Tokens) {
        if std::mem::take(&mut self.is_out) {
            self.computed = match are_all_accepted {
                true => computed - Tokens(1),
                false => computed,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lacks_the_last_draft_if_that_was_accepted_and_what_others_drafted() {
        let mut model = ModelDrafts::default();
        model.start(Tokens(4));
        assert_eq!(model.made_from(), None);
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(4)));
        // Ten positions were computed, then the last token and three drafts, two of them right.
        model.land(false, Tokens(13));
        model.land(true, Tokens(15));
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(13)));
        model.land(true, Tokens(19));
        model.make();
        assert_eq!(model.made_from(), Some(Tokens(18)));
    }
}
