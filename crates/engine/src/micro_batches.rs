//! Which micro-batch is planned next, and which have a step out.

/// The micro-batches of an engine, which take turns. Each has at most one step out, or two where steps are planned
/// ahead.
pub(super) struct MicroBatches {
    /// The micro-batch whose step is due next.
    turn: usize,
    /// The steps that are out, of each.
    num_out: Vec<usize>,
    max_out: usize,
}

impl MicroBatches {
    pub(super) fn new(num: usize, max_out: usize) -> Self {
        Self {
            turn: 0,
            num_out: vec![0; num],
            max_out,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.num_out.len()
    }

    /// The micro-batch that is due after `n` others, if another step of it may go out.
    pub(super) fn due_after(&self, n: usize) -> Option<usize> {
        let micro_batch = (self.turn + n) % self.len();
        (self.num_out[micro_batch] < self.max_out).then_some(micro_batch)
    }

    /// Whether a step of `micro_batch` is out.
    pub(super) fn is_out(&self, micro_batch: usize) -> bool {
        self.num_out[micro_batch] > 0
    }

    pub(super) fn any_out(&self) -> bool {
        self.num_out.iter().any(|&num| num > 0)
    }

    /// Whether no further step may go out.
    pub(super) fn are_all_out(&self) -> bool {
        self.num_out.iter().all(|&num| num == self.max_out)
    }

    /// A step of `micro_batch` goes out. A micro-batch for which no step could be planned keeps its turn.
    pub(super) fn launch(&mut self, micro_batch: usize) {
        self.num_out[micro_batch] += 1;
        self.turn = (micro_batch + 1) % self.len();
    }

    /// The step of `micro_batch` is back.
    pub(super) fn land(&mut self, micro_batch: usize) {
        self.num_out[micro_batch] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_take_turns_until_each_has_all_its_steps_out() {
        let mut batches = MicroBatches::new(3, 2);
        for round in 0..2 {
            for micro_batch in 0..3 {
                assert_eq!(batches.due_after(0), Some(micro_batch));
                assert!(!batches.are_all_out());
                assert_eq!(batches.is_out(micro_batch), round > 0);
                batches.launch(micro_batch);
            }
        }
        assert!(batches.are_all_out());
        assert_eq!(batches.due_after(0), None);
        batches.land(1);
        assert!(!batches.are_all_out() && batches.is_out(1));
        assert_eq!(
            (batches.due_after(0), batches.due_after(1)),
            (None, Some(1))
        );
    }

    #[test]
    fn a_micro_batch_without_a_step_keeps_its_turn() {
        let mut batches = MicroBatches::new(3, 1);
        assert!(!batches.any_out());
        batches.launch(1);
        assert!(batches.any_out());
        assert_eq!(batches.due_after(0), Some(2));
        batches.launch(0);
        assert_eq!(batches.due_after(0), None);
        assert_eq!(batches.due_after(1), Some(2));
    }
}
