//! The adapters that ranks have parts of.
//!
//! Rank 0 loads an adapter as a whole, and cuts it. Before the first model call with it, each of the other ranks gets
//! its part, in pieces, and keeps it under a number until rank 0 has let go of the adapter: the call after that names
//! it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::adapter::UsedAdapter;
use crate::adapter_parts::AdapterParts;
use inflight_base::StepError;
use inflight_device::{AdapterRun, AdapterWeights, StepInputs};
use inflight_engine::StepPlan;

/// Tells a piece from a model call.
const MAGIC: u32 = 0x696e_6603;

/// Bytes of a piece.
const PIECE_BYTES: usize = 1 << 20;

/// Rows of a call that an adapter is added to: its number, and the rows.
pub(super) type NumberedRun = [u32; 3];

/// The adapters that rank 0 has sent.
#[derive(Default)]
pub(crate) struct SentAdapters {
    known: Vec<SentAdapter>,
    next_number: u32,
}

struct SentAdapter {
    number: u32,
    /// What rank 0 has of it.
    own: Weak<AdapterWeights>,
}

/// The parts that another rank has.
#[derive(Default)]
pub(super) struct ReceivedAdapters {
    parts: HashMap<u32, Arc<AdapterWeights>>,
    /// The pieces of the one that is being sent.
    pieces: Vec<u8>,
}

/// The rows of a call that adapters are added to, as a device gets them.
#[derive(Default)]
pub(crate) struct AdapterRuns {
    /// Of all tokens.
    pub(crate) tokens: Vec<AdapterRun>,
    /// Of the kept rows.
    pub(crate) kept: Vec<AdapterRun>,
    /// Of the sampled rows.
    pub(crate) sampled: Vec<AdapterRun>,
}

impl SentAdapters {
    /// Calls `send` with those of a plan that the other ranks do not have yet, each with a new number.
    ///
    /// # Errors
    /// Those of `send`.
    pub(super) fn send(
        &mut self,
        plan: &StepPlan<'_>,
        mut send: impl FnMut(u32, &AdapterParts) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let adapters = plan.sequences.iter().filter_map(|it| it.adapter.as_ref());
        for adapter in adapters {
            let Some(used) = adapter.contents::<UsedAdapter>() else {
                continue;
            };
            let parts = used.parts();
            if self.find(parts.own()).is_none() {
                let number = self.next_number;
                self.next_number = number.wrapping_add(1);
                send(number, parts)?;
                self.known.push(SentAdapter {
                    number,
                    own: Arc::downgrade(parts.own()),
                });
            }
        }
        Ok(())
    }

    /// Adds the numbers of those that rank 0 has let go of, which it forgets.
    pub(super) fn forget(&mut self, forgotten: &mut Vec<u32>) {
        self.known.retain(|sent| {
            let is_kept = sent.own.strong_count() > 0;
            if !is_kept {
                forgotten.push(sent.number);
            }
            is_kept
        });
    }

    /// Rows with the number of their adapter, which was sent.
    pub(super) fn numbered(&self, run: &AdapterRun) -> NumberedRun {
        let number = self.find(&run.weights).expect("it was sent");
        [number, run.rows.start, run.rows.end]
    }

    fn find(&self, own: &Arc<AdapterWeights>) -> Option<u32> {
        let mut known = self.known.iter();
        // As long as there is a weak one, no other adapter is at its address.
        let found = known.find(|sent| Weak::as_ptr(&sent.own) == Arc::as_ptr(own));
        found.map(|sent| sent.number)
    }
}

impl AdapterRuns {
    /// The runs of a step.
    pub(crate) fn of(inputs: &StepInputs<'_>) -> Self {
        Self {
            tokens: inputs.adapters.to_vec(),
            kept: inputs.kept_adapters.to_vec(),
            sampled: inputs.sampled_adapters.to_vec(),
        }
    }
}

impl ReceivedAdapters {
    /// Whether a message is a piece.
    pub(super) fn is_piece(words: &[u32]) -> bool {
        words.first() == Some(&MAGIC)
    }

    /// Takes the piece in `words`. The last one completes a part.
    ///
    /// # Errors
    /// It is something else, or there is no memory.
    pub(super) fn take(&mut self, words: &[u32]) -> Result<(), StepError> {
        let refuse = || {
            let len = words.len();
            StepError(format!("{len} words from rank 0 are no part of an adapter"))
        };
        let Some((&[MAGIC, adapter, num_left, len], values)) = words.split_first_chunk() else {
            return Err(refuse());
        };
        let Some(bytes) = bytemuck::cast_slice::<_, u8>(values).get(..len as usize) else {
            return Err(refuse());
        };
        self.pieces.extend_from_slice(bytes);
        if num_left > 0 {
            return Ok(());
        }
        let pieces = std::mem::take(&mut self.pieces);
        let read = AdapterWeights::from_bytes(&pieces);
        let part = read.map_err(|error| StepError(error.to_string()))?;
        self.parts
            .insert(adapter, Arc::new(part.ok_or_else(refuse)?));
        Ok(())
    }

    /// Gives the memory of parts back.
    pub(super) fn forget(&mut self, numbers: &[u32]) {
        for number in numbers {
            self.parts.remove(number);
        }
    }

    /// Makes `runs` those of a call, by rows of tokens, kept rows, and sampled rows.
    ///
    /// # Errors
    /// An adapter is not there.
    pub(super) fn find(
        &self,
        numbered: [&[NumberedRun]; 3],
        runs: &mut AdapterRuns,
    ) -> Result<(), StepError> {
        let AdapterRuns {
            tokens,
            kept,
            sampled,
        } = runs;
        for (numbered, runs) in numbered.into_iter().zip([tokens, kept, sampled]) {
            runs.clear();
            for &[number, start, end] in numbered {
                let Some(weights) = self.parts.get(&number) else {
                    return Err(StepError(format!("rank 0 has not sent adapter {number}")));
                };
                runs.push(AdapterRun {
                    weights: Arc::clone(weights),
                    rows: start..end,
                });
            }
        }
        Ok(())
    }
}

/// Calls `send` with the pieces of a part, which has this number. `words` are reused.
///
/// # Errors
/// Those of `send`.
pub(super) fn for_each_piece<E>(
    adapter: u32,
    part: &[u8],
    words: &mut Vec<u32>,
    mut send: impl FnMut(&[u32]) -> Result<(), E>,
) -> Result<(), E> {
    let pieces = part.chunks(PIECE_BYTES);
    let num_pieces = pieces.len() as u32;
    for (index, piece) in (1..).zip(pieces) {
        words.clear();
        words.extend([MAGIC, adapter, num_pieces - index, piece.len() as u32]);
        let first = words.len();
        words.resize(first + piece.len().div_ceil(size_of::<u32>()), 0);
        bytemuck::cast_slice_mut(&mut words[first..])[..piece.len()].copy_from_slice(piece);
        send(words)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_arrives_in_pieces_and_is_kept_until_it_is_forgotten() {
        let mut weights = AdapterWeights::new(2);
        weights.add_bias(1, 700_000, 0, &[0.5; 700_000]);
        let part = weights.to_bytes();
        let mut received = ReceivedAdapters::default();
        let mut num_messages = 0;
        let sent = for_each_piece(7, &part, &mut Vec::new(), |words| {
            assert!(ReceivedAdapters::is_piece(words));
            num_messages += 1;
            received.take(words)
        });
        sent.expect("an adapter");
        assert_eq!(num_messages, part.len().div_ceil(PIECE_BYTES));
        let mut runs = AdapterRuns::default();
        let found = received.find([&[[7, 2, 5]], &[], &[[7, 0, 1]]], &mut runs);
        found.expect("it has arrived");
        let [run] = &runs.tokens[..] else {
            panic!("one run");
        };
        assert_eq!((run.rows.clone(), run.weights.to_bytes()), (2..5, part));
        assert_eq!((runs.kept.len(), runs.sampled.len()), (0, 1));
        received.forget(&[7]);
        let error = received.find([&[[7, 0, 1]], &[], &[]], &mut runs);
        assert!(error.expect_err("forgotten").0.contains("adapter 7"));
    }

    #[test]
    fn what_is_no_piece_is_refused() {
        let mut received = ReceivedAdapters::default();
        for words in [
            &[MAGIC, 1, 0][..],
            &[MAGIC, 1, 0, 9, 0],
            &[MAGIC, 1, 0, 4, 0],
        ] {
            assert!(received.take(words).is_err(), "{words:?}");
        }
    }
}
