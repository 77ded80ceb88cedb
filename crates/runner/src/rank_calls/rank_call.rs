//! What a rank needs of a model call to compute its share.

use std::ops::Range;

use super::rank_adapters::{AdapterRuns, NumberedRun, SentAdapters};
use crate::step_layout::StepLayout;
use inflight_base::{
    BlockId, BlockSize, HostBlockId, HostSnapshotId, SnapshotId, StateRow, StepError, Tokens,
};
use inflight_device::{KvSpan, SavedState, StepInputs};
use inflight_engine::{
    BlockCopy, BlockMove, StateCopy, StateMove, StateRestore, StateSnapshot, StepPlan,
};

/// Tells a model call from anything else.
const MAGIC: u32 = 0x696e_6606;

/// A model call without what only sampling needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankCall {
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) state_moves: Vec<StateMove>,
    pub(crate) state_copies: Vec<StateCopy>,
    pub(crate) token_ids: Vec<u32>,
    spans: Vec<KvSpan>,
    /// The block tables of the spans, one after the other.
    block_tables: Vec<BlockId>,
    /// The slot of the recurrent states of each span.
    state_slots: Vec<u32>,
    saved_states: Vec<SavedState>,
    kept_rows: Vec<u32>,
    pub(crate) sampled_rows: Vec<u32>,
    /// The sampled rows of which nothing but the largest logit is needed.
    pub(crate) greedy_rows: Vec<u32>,
    /// The kept rows of each sequence whose context logits are wanted.
    pub(crate) context_rows: Vec<Range<usize>>,
    /// The adapters that no later call has.
    pub(super) forgotten: Vec<u32>,
    /// Tokens, kept rows and sampled rows with adapters.
    pub(super) adapters: [Vec<NumberedRun>; 3],
}

impl RankCall {
    /// What a device needs for it, with these adapters.
    pub(crate) fn inputs<'a>(&'a self, adapters: &'a AdapterRuns) -> StepInputs<'a> {
        StepInputs {
            token_ids: &self.token_ids,
            spans: &self.spans,
            block_tables: &self.block_tables,
            state_slots: &self.state_slots,
            saved_states: &self.saved_states,
            kept_rows: &self.kept_rows,
            sampled_rows: &self.sampled_rows,
            greedy_rows: &self.greedy_rows,
            adapters: &adapters.tokens,
            kept_adapters: &adapters.kept,
            sampled_adapters: &adapters.sampled,
            has_context_logits: !self.context_rows.is_empty(),
            ..StepInputs::default()
        }
    }

    /// Makes it that of a plan, with this layout. The adapters of the plan were sent, or it is read nowhere else.
    pub(crate) fn set(
        &mut self,
        plan: &StepPlan<'_>,
        layout: &StepLayout,
        sent: Option<&SentAdapters>,
    ) {
        let inputs = layout.inputs(plan);
        self.clear();
        let runs = [
            inputs.adapters,
            inputs.kept_adapters,
            inputs.sampled_adapters,
        ];
        for (numbered, runs) in self.adapters.iter_mut().zip(runs) {
            let sent = sent.into_iter().flat_map(|sent| {
                let runs = runs.iter();
                runs.map(|run| sent.numbered(run))
            });
            numbered.extend(sent);
        }
        self.moves.extend_from_slice(plan.moves);
        self.state_moves.extend_from_slice(plan.state_moves);
        self.state_copies.extend_from_slice(plan.state_copies);
        self.state_slots.extend_from_slice(inputs.state_slots);
        self.saved_states.extend_from_slice(inputs.saved_states);
        self.token_ids.extend_from_slice(inputs.token_ids);
        for span in inputs.spans {
            let start = self.block_tables.len() as u32;
            let blocks = span.block_table.start as usize..span.block_table.end as usize;
            self.block_tables
                .extend_from_slice(&inputs.block_tables[blocks]);
            self.spans.push(KvSpan {
                block_table: start..self.block_tables.len() as u32,
                ..span.clone()
            });
        }
        self.kept_rows.extend_from_slice(inputs.kept_rows);
        self.sampled_rows.extend_from_slice(inputs.sampled_rows);
        self.greedy_rows.extend_from_slice(inputs.greedy_rows);
        let contexts = layout.contexts().iter();
        self.context_rows
            .extend(contexts.map(|context| context.rows.clone()));
    }

    /// Makes it moves of blocks without a computation.
    pub(super) fn set_moves(&mut self, moves: &[BlockMove]) {
        self.clear();
        self.moves.extend_from_slice(moves);
    }

    fn clear(&mut self) {
        self.moves.clear();
        self.state_moves.clear();
        self.state_copies.clear();
        self.state_slots.clear();
        self.saved_states.clear();
        self.token_ids.clear();
        self.spans.clear();
        self.block_tables.clear();
        self.kept_rows.clear();
        self.sampled_rows.clear();
        self.greedy_rows.clear();
        self.context_rows.clear();
        self.forgotten.clear();
        self.adapters.iter_mut().for_each(Vec::clear);
    }

    /// Replaces `words` by the call, the `number`th of all.
    pub(super) fn write(&self, number: u32, words: &mut Vec<u32>) {
        words.clear();
        words.extend([MAGIC, number]);
        write_list(words, &self.token_ids, |words, token| words.push(*token));
        write_list(words, &self.spans, |words, span| {
            // The tokens and the blocks of spans follow one another.
            let num_blocks = span.block_table.end - span.block_table.start;
            words.extend([span.tokens.end, span.kv_len, num_blocks]);
        });
        write_list(words, &self.block_tables, |words, block| {
            words.push(block.0)
        });
        write_list(words, &self.state_slots, |words, slot| words.push(*slot));
        write_list(words, &self.saved_states, |words, saved| {
            words.extend([saved.token, saved.slot]);
        });
        write_list(words, &self.kept_rows, |words, row| words.push(*row));
        write_list(words, &self.sampled_rows, |words, row| words.push(*row));
        write_list(words, &self.greedy_rows, |words, row| words.push(*row));
        write_list(words, &self.context_rows, |words, rows| {
            words.extend([rows.start as u32, rows.end as u32]);
        });
        write_list(words, &self.moves, |words, one| {
            words.extend(match *one {
                BlockMove::Copy(copy) => [0, copy.source.0, copy.target.0, copy.num_positions],
                BlockMove::Offload { source, target } => [1, source.0, target.0, 0],
                BlockMove::Onboard { source, target } => [2, source.0, target.0, 0],
            });
        });
        write_list(words, &self.state_moves, |words, one| {
            words.extend(match *one {
                StateMove::Restore(restore) => {
                    let (kind, snapshot) = match restore.snapshot {
                        StateSnapshot::Device(id) => (0, id.0),
                        StateSnapshot::Host(id) => (1, id.0),
                    };
                    [kind, snapshot, restore.row.0, restore.num_tokens.0]
                }
                StateMove::Offload { source, target } => [2, source.0, target.0, 0],
                StateMove::Onboard { source, target } => [3, source.0, target.0, 0],
            });
        });
        write_list(words, &self.state_copies, |words, copy| {
            words.extend([copy.source.0, copy.target.0]);
        });
        write_list(words, &self.forgotten, |words, number| words.push(*number));
        for runs in &self.adapters {
            write_list(words, runs, |words, run| words.extend(run));
        }
    }

    /// Makes it the call in `words`, which is the `number`th of all, in blocks of this size for so many groups of
    /// layers.
    ///
    /// # Errors
    /// They are something else, or name rows or blocks that the call does not have.
    pub(super) fn read(
        &mut self,
        number: u32,
        block_size: BlockSize,
        num_groups: usize,
        words: &[u32],
    ) -> Result<(), StepError> {
        self.clear();
        self.read_words(number, words)
            .filter(|()| self.is_consistent(block_size, num_groups))
            .ok_or_else(|| {
                StepError(format!(
                    "{} words from rank 0 are not model call {number}",
                    words.len()
                ))
            })
    }

    fn read_words(&mut self, number: u32, words: &[u32]) -> Option<()> {
        let rest = &mut words.strip_prefix(&[MAGIC, number])?;
        read_list(rest, |&[token]| {
            self.token_ids.push(token);
            Some(())
        })?;
        let (mut token, mut block) = (0, 0_u32);
        read_list(rest, |&[end, kv_len, num_blocks]| {
            let first_block = block;
            block = block.checked_add(num_blocks)?;
            self.spans.push(KvSpan {
                tokens: std::mem::replace(&mut token, end)..end,
                kv_len,
                block_table: first_block..block,
            });
            Some(())
        })?;
        read_list(rest, |&[block]| {
            self.block_tables.push(BlockId(block));
            Some(())
        })?;
        read_list(rest, |&[slot]| {
            self.state_slots.push(slot);
            Some(())
        })?;
        read_list(rest, |&[token, slot]| {
            self.saved_states.push(SavedState { token, slot });
            Some(())
        })?;
        read_list(rest, |&[row]| {
            self.kept_rows.push(row);
            Some(())
        })?;
        read_list(rest, |&[row]| {
            self.sampled_rows.push(row);
            Some(())
        })?;
        read_list(rest, |&[row]| {
            self.greedy_rows.push(row);
            Some(())
        })?;
        read_list(rest, |&[start, end]| {
            self.context_rows.push(start as usize..end as usize);
            Some(())
        })?;
        read_list(rest, |&[kind, source, target, num_positions]| {
            self.moves.push(match kind {
                0 => BlockMove::Copy(BlockCopy {
                    source: BlockId(source),
                    target: BlockId(target),
                    num_positions,
                }),
                1 => BlockMove::Offload {
                    source: BlockId(source),
                    target: HostBlockId(target),
                },
                2 => BlockMove::Onboard {
                    source: HostBlockId(source),
                    target: BlockId(target),
                },
                _ => return None,
            });
            Some(())
        })?;
        read_list(rest, |&[kind, source, target, num_tokens]| {
            let restore = |snapshot| {
                StateMove::Restore(StateRestore {
                    snapshot,
                    row: StateRow(target),
                    num_tokens: Tokens(num_tokens),
                })
            };
            self.state_moves.push(match kind {
                0 => restore(StateSnapshot::Device(SnapshotId(source))),
                1 => restore(StateSnapshot::Host(HostSnapshotId(source))),
                2 => StateMove::Offload {
                    source: SnapshotId(source),
                    target: HostSnapshotId(target),
                },
                3 => StateMove::Onboard {
                    source: HostSnapshotId(source),
                    target: SnapshotId(target),
                },
                _ => return None,
            });
            Some(())
        })?;
        read_list(rest, |&[source, target]| {
            let [source, target] = [source, target].map(StateRow);
            self.state_copies.push(StateCopy { source, target });
            Some(())
        })?;
        read_list(rest, |&[number]| {
            self.forgotten.push(number);
            Some(())
        })?;
        for runs in &mut self.adapters {
            read_list(rest, |run| {
                runs.push(*run);
                Some(())
            })?;
        }
        rest.is_empty().then_some(())
    }

    /// Whether all ranges are of what the call has.
    fn is_consistent(&self, block_size: BlockSize, num_groups: usize) -> bool {
        let (num_tokens, num_kept) = (self.token_ids.len(), self.kept_rows.len());
        let is_ascending = |rows: &[u32], below: usize| {
            rows.is_sorted_by(|a, b| a < b) && rows.last().is_none_or(|&row| (row as usize) < below)
        };
        let num_blocks = |span: &KvSpan| span.block_table.end - span.block_table.start;
        let spans_are_good = self.spans.iter().all(|span| {
            let num_rounds = num_blocks(span) as usize / num_groups;
            let capacity = num_rounds as u64 * u64::from(block_size.tokens().0);
            let num_tokens = span.tokens.end.checked_sub(span.tokens.start);
            u64::from(span.kv_len) <= capacity && num_tokens.is_some_and(|it| it <= span.kv_len)
        });
        let last = self.spans.last();
        let [last_token, last_block] = last.map_or([0, 0], |last| {
            [last.tokens.end as usize, last.block_table.end as usize]
        });
        let runs_are_good = |(runs, num_rows): (&Vec<NumberedRun>, usize)| {
            let mut first = 0;
            runs.iter().all(|&[_, start, end]| {
                let is_next = first <= start && start <= end && end as usize <= num_rows;
                first = end;
                is_next
            })
        };
        let rows = [num_tokens, num_kept, self.sampled_rows.len()];
        let saved = &self.saved_states;
        spans_are_good
            && self.adapters.iter().zip(rows).all(runs_are_good)
            && last_token == num_tokens
            && last_block == self.block_tables.len()
            && self.state_slots.len() == self.spans.len()
            && saved.is_sorted_by_key(|it| it.token)
            && saved
                .last()
                .is_none_or(|it| (it.token as usize) < num_tokens)
            && is_ascending(&self.kept_rows, num_tokens)
            && is_ascending(&self.sampled_rows, num_kept)
            && is_ascending(&self.greedy_rows, self.sampled_rows.len())
            && self
                .context_rows
                .iter()
                .all(|rows| rows.start <= rows.end && rows.end <= num_kept)
    }
}

fn write_list<T>(words: &mut Vec<u32>, list: &[T], write: impl Fn(&mut Vec<u32>, &T)) {
    words.push(list.len() as u32);
    list.iter().for_each(|one| write(words, one));
}

/// Reads a list of items of `N` words each.
fn read_list<const N: usize>(
    words: &mut &[u32],
    mut read: impl FnMut(&[u32; N]) -> Option<()>,
) -> Option<()> {
    let (&len, rest) = words.split_first()?;
    let (items, rest) = rest.split_at_checked((len as usize).checked_mul(N)?)?;
    *words = rest;
    let (items, _) = items.as_chunks::<N>();
    items.iter().try_for_each(&mut read)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: BlockSize = BlockSize::new(4).unwrap();

    fn restore(snapshot: StateSnapshot, row: u32) -> StateMove {
        StateMove::Restore(StateRestore {
            snapshot,
            row: StateRow(row),
            num_tokens: Tokens(2),
        })
    }

    fn call() -> RankCall {
        RankCall {
            moves: vec![
                BlockMove::Copy(BlockCopy {
                    source: BlockId(7),
                    target: BlockId(8),
                    num_positions: 3,
                }),
                BlockMove::Offload {
                    source: BlockId(1),
                    target: HostBlockId(2),
                },
                BlockMove::Onboard {
                    source: HostBlockId(3),
                    target: BlockId(4),
                },
            ],
            state_moves: vec![
                StateMove::Offload {
                    source: SnapshotId(1),
                    target: HostSnapshotId(4),
                },
                StateMove::Onboard {
                    source: HostSnapshotId(3),
                    target: SnapshotId(1),
                },
                restore(StateSnapshot::Device(SnapshotId(1)), 2),
                restore(StateSnapshot::Host(HostSnapshotId(5)), 0),
            ],
            state_copies: vec![StateCopy {
                source: StateRow(2),
                target: StateRow(3),
            }],
            token_ids: vec![10, 11, 12, 13],
            spans: vec![
                KvSpan {
                    tokens: 0..3,
                    kv_len: 5,
                    block_table: 0..2,
                },
                KvSpan {
                    tokens: 3..4,
                    kv_len: 4,
                    block_table: 2..3,
                },
            ],
            block_tables: vec![BlockId(5), BlockId::NONE, BlockId(6)],
            state_slots: vec![2, 0],
            saved_states: vec![
                SavedState { token: 1, slot: 4 },
                SavedState { token: 3, slot: 5 },
            ],
            kept_rows: vec![0, 2, 3],
            sampled_rows: vec![1, 2],
            greedy_rows: vec![1],
            context_rows: vec![0..2, 2..2],
            forgotten: vec![3, 8],
            adapters: [vec![[5, 0, 3], [6, 3, 4]], vec![[5, 0, 1]], Vec::new()],
        }
    }

    fn words() -> Vec<u32> {
        let mut words = vec![1, 2, 3];
        call().write(9, &mut words);
        words
    }

    #[test]
    fn a_call_is_read_as_it_was_written() {
        let mut read = RankCall::default();
        for _ in 0..2 {
            read.read(9, BLOCK_SIZE, 1, &words()).expect("it is call 9");
            assert_eq!(read, call());
        }
        let mut words = Vec::new();
        read.set_moves(&call().moves);
        read.write(0, &mut words);
        let mut moves = call();
        moves
            .read(0, BLOCK_SIZE, 1, &words)
            .expect("moves are a call, too");
        assert_eq!(moves.moves, call().moves);
        assert!(moves.token_ids.is_empty() && moves.spans.is_empty());
    }

    #[test]
    fn anything_else_is_an_error() {
        let words = words();
        let mut read = RankCall::default();
        assert!(read.read(8, BLOCK_SIZE, 1, &words).is_err(), "another call");
        for len in 0..words.len() {
            assert!(read.read(9, BLOCK_SIZE, 1, &words[..len]).is_err(), "{len}");
        }
        let longer: Vec<_> = words.iter().copied().chain([0]).collect();
        assert!(read.read(9, BLOCK_SIZE, 1, &longer).is_err());
        let in_two_groups = read.read(9, BLOCK_SIZE, 2, &words);
        assert!(in_two_groups.is_err(), "too few blocks");
        // Any word may change what is computed, never what is a call: no index leaves its list.
        for index in 0..words.len() {
            for value in [0, 1, 3, 4, 5, 100, u32::MAX] {
                let mut changed = words.clone();
                changed[index] = value;
                if read.read(9, BLOCK_SIZE, 1, &changed).is_ok() {
                    let adapters = AdapterRuns::default();
                    let inputs = read.inputs(&adapters);
                    for span in inputs.spans {
                        let blocks = span.block_table.start as usize..span.block_table.end as usize;
                        let tokens = span.tokens.start as usize..span.tokens.end as usize;
                        assert!(inputs.block_tables.get(blocks).is_some());
                        assert!(inputs.token_ids.get(tokens).is_some());
                    }
                }
            }
        }
    }
}
