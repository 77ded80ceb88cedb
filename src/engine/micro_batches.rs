//! Which micro-batch is planned next, and which have a step out.

/// The micro-batches of an engine, which take turns. Each has at most one step out.
pub(super) struct MicroBatches {
    /// The micro-batch whose step is due next.
    turn: usize,
    is_out: Vec<bool>,
}

impl MicroBatches {
    pub(super) fn new(num: usize) -> Self {
        Self {
            turn: 0,
            is_out: vec![false; num],
        }
    }

    pub(super) fn len(&self) -> usize {
        self.is_out.len()
    }

    /// The micro-batch that is due after `n` others, if no step of it is out.
    pub(super) fn due_after(&self, n: usize) -> Option<usize> {
        let micro_batch = (self.turn + n) % self.len();
        (!self.is_out[micro_batch]).then_some(micro_batch)
    }

    /// Whether a step of `micro_batch` is out.
    pub(super) fn is_out(&self, micro_batch: usize) -> bool {
        self.is_out[micro_batch]
    }

    pub(super) fn any_out(&self) -> bool {
        self.is_out.contains(&true)
    }

    pub(super) fn are_all_out(&self) -> bool {
        !self.is_out.contains(&false)
    }

    /// A step of `micro_batch` goes out. A micro-batch for which no step could be planned keeps its turn.
    pub(super) fn launch(&mut self, micro_batch: usize) {
        self.is_out[micro_batch] = true;
        self.turn = (micro_batch + 1) % self.len();
    }

    /// The step of `micro_batch` is back.
    pub(super) fn land(&mut self, micro_batch: usize) {
        self.is_out[micro_batch] = false;
    }
}
