//! The engine's invariants as one check, for tests and debugging. It is O(everything) and allocates.

use std::collections::BTreeSet;

use crate::base::Blocks;
use crate::engine::{BatchingScheme, Engine};

impl Engine {
    /// Panics if the engine contradicts itself. To be called between `apply` and `schedule`.
    ///
    /// 1. Every block is held by as many tables as it says, or free.
    /// 2. Every row in use runs, is paused, or was cancelled while a step with it is out; every id is in
    ///    one place.
    /// 3. What is paused has no blocks and nothing computed.
    /// 4. What runs has blocks for what is computed, and something left to compute.
    /// 5. What runs is in order of rank, and what is paused too.
    /// 6. Nothing is longer than `max_seq_len`.
    /// 7. What beams may still need is free, or will be when others pause.
    pub fn check_integrity(&self) {
        let size = self.config.block_size;
        let tables = self.sequences.iter().flat_map(|(_, s)| s.tables());
        self.kv.check_integrity(tables);
        self.queue.check_integrity(&self.sequences);

        let admitted: Vec<_> = self
            .running
            .iter()
            .copied()
            .chain(self.queue.paused_slots())
            .collect();
        let slots: BTreeSet<_> = admitted.iter().copied().collect();
        assert_eq!(slots.len(), admitted.len(), "a row runs or is paused, once");

        let mut ids: BTreeSet<_> = self.queue.waiting_ids().collect();
        for (slot, sequence) in self.sequences.iter() {
            let id = sequence.id;
            let is_cancelled = self.cancelled.contains(&slot);
            assert_eq!(slots.contains(&slot), !is_cancelled, "{id:?}");
            if is_cancelled {
                assert!(sequence.text.is_none(), "{id:?} is in no step");
                continue;
            }
            assert!(ids.insert(id), "{id:?} is in two places");
            assert_eq!(self.sequences.find(id), Some(slot));
            assert!(
                sequence.len() <= self.config.max_seq_len,
                "{id:?} is too long"
            );
            if sequence.ended.is_some() {
                assert_eq!(self.config.scheme, BatchingScheme::V1, "{id:?} has ended");
            } else {
                assert!(sequence.computed < sequence.len(), "{id:?} is done");
                if let Some(text) = &sequence.text {
                    assert_eq!(sequence.len().index(), text.tokens.len(), "{id:?}");
                }
            }
        }
        assert_eq!(ids.len(), self.num_active(), "ids are not used twice");

        for slot in self.queue.paused_slots() {
            let sequence = &self.sequences[slot];
            assert!(
                sequence.blocks.blocks().is_empty(),
                "{:?} holds",
                sequence.id
            );
            assert_eq!(sequence.computed.0, 0, "{:?} is paused", sequence.id);
        }
        for &slot in &self.running {
            let sequence = &self.sequences[slot];
            let needed = sequence.computed.blocks_ceil(size);
            for table in sequence.tables() {
                assert!(table.len() >= needed, "{:?} lacks", sequence.id);
            }
        }
        let without_beams = self.running.iter().map(|&slot| &self.sequences[slot]);
        let without_beams = without_beams.filter(|it| !it.has_beams());
        let can_pause = match self.config.window {
            None => Blocks::ZERO,
            Some(_) => without_beams.map(|it| it.blocks.num_held()).sum(),
        };
        assert!(
            self.set_aside() <= self.kv.usage().num_free() + can_pause,
            "what is set aside is there"
        );
        let running = self
            .running
            .iter()
            .map(|&slot| self.sequences[slot].details.rank);
        assert!(running.is_sorted(), "what runs is in order of rank");
    }
}
