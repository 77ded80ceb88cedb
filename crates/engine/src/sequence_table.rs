//! The table of admitted sequences.

use std::collections::BTreeMap;

use crate::sequence::Sequence;
use inflight_base::{SeqSlot, SequenceId};

/// The admitted sequences, running and paused, by row. There are as many rows as sequences may run.
pub(super) struct SequenceTable {
    rows: Vec<Option<Sequence>>,
    free_rows: Vec<SeqSlot>,
    // Ordered: the order of a hash map would differ from run to run and from rank to rank.
    by_id: BTreeMap<SequenceId, SeqSlot>,
}

impl SequenceTable {
    /// A table of `num_rows` free rows.
    pub(super) fn new(num_rows: u32) -> Self {
        Self {
            rows: (0..num_rows).map(|_| None).collect(),
            free_rows: (0..num_rows).rev().map(SeqSlot).collect(),
            by_id: BTreeMap::new(),
        }
    }

    /// Gives `sequence` a row.
    ///
    /// # Panics
    /// If there is no [free row](Self::has_free_row), or if another sequence has its id.
    pub(super) fn insert(&mut self, sequence: Sequence) -> SeqSlot {
        let slot = self.free_rows.pop().expect("a free row was asked for");
        let id = sequence.id();
        let before = self.by_id.insert(id, slot);
        assert!(before.is_none(), "sequence id {id} is used twice");
        self.rows[slot.index()] = Some(sequence);
        slot
    }

    /// Takes the sequence out of its row.
    pub(super) fn remove(&mut self, slot: SeqSlot) -> Sequence {
        let sequence = self.rows[slot.index()].take().expect("the row is taken");
        if self.by_id.get(&sequence.id()) == Some(&slot) {
            self.by_id.remove(&sequence.id());
        }
        self.free_rows.push(slot);
        sequence
    }

    /// Frees the id of the sequence in `slot`: it cannot be found by it any more.
    pub(super) fn hide(&mut self, slot: SeqSlot) {
        let id = self[slot].id();
        self.by_id.remove(&id);
    }

    /// The row of a sequence, if it is admitted.
    pub(super) fn find(&self, id: SequenceId) -> Option<SeqSlot> {
        self.by_id.get(&id).copied()
    }

    /// Whether a sequence can be inserted.
    pub(super) fn has_free_row(&self) -> bool {
        !self.free_rows.is_empty()
    }

    /// Rows that no sequence has.
    pub(super) fn num_free_rows(&self) -> usize {
        self.free_rows.len()
    }

    /// The sequence in `slot`, if there is one.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: SeqSlot) -> Option<&mut Sequence> {
        self.rows[slot.index()].as_mut()
    }

    /// Whether there is a sequence in `slot`.
    pub(super) fn is_taken(&self, slot: SeqSlot) -> bool {
        self.rows[slot.index()].is_some()
    }

    /// All rows in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SeqSlot, &Sequence)> {
        let rows = self.rows.iter().enumerate();
        rows.filter_map(|(row, sequence)| Some((SeqSlot(row as u32), sequence.as_ref()?)))
    }
}

impl std::ops::Index<SeqSlot> for SequenceTable {
    type Output = Sequence;

    #[inline]
    fn index(&self, slot: SeqSlot) -> &Sequence {
        self.rows[slot.index()].as_ref().expect("the row is taken")
    }
}

impl std::ops::IndexMut<SeqSlot> for SequenceTable {
    #[inline]
    fn index_mut(&mut self, slot: SeqSlot) -> &mut Sequence {
        self.rows[slot.index()].as_mut().expect("the row is taken")
    }
}
