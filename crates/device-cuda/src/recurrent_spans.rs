//! The sequences of a step as the kernels of recurrent states read them: `RecurrentSpan` of `kernels/recurrence.cuh`.

use inflight_device::{KvSpan, StepInputs};

/// Words of a sequence.
pub(super) const SPAN_WORDS: usize = 6;
/// Words of a state that is saved: its token and its slot.
pub(super) const SAVED_WORDS: usize = 2;

/// `BEGINS` of the kernels.
const BEGINS: u32 = 1;
/// `IS_REPEATED` of the kernels.
const IS_REPEATED: u32 = 2;

/// The words of a sequence, whose saved states follow the first `first_saved` pairs of words of the upload. A sequence
/// without a slot, as in steps before the first request, has no tokens.
pub(super) fn span_words(
    inputs: &StepInputs<'_>,
    index: usize,
    span: &KvSpan,
    first_saved: usize,
) -> [u32; SPAN_WORDS] {
    let Some(&slot) = inputs.state_slots.get(index) else {
        return [0; SPAN_WORDS];
    };
    let num_tokens = span.tokens.len() as u32;
    let begins = num_tokens == span.kv_len;
    let flags = BEGINS * u32::from(begins) + IS_REPEATED * u32::from(inputs.is_repeated[index]);
    let saved = num_saved(inputs, span.tokens.start)..num_saved(inputs, span.tokens.end);
    [
        span.tokens.start,
        num_tokens,
        slot,
        flags,
        (first_saved + saved.start) as u32,
        saved.len() as u32,
    ]
}

/// The saved states behind tokens before this one.
fn num_saved(inputs: &StepInputs<'_>, token: u32) -> usize {
    let saved = inputs.saved_states;
    saved.partition_point(|saved| saved.token < token)
}
