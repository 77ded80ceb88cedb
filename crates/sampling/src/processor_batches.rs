//! Logits processors that work on all sequences of a step at once.

use std::ptr;

use crate::{BatchRow, SamplingInput};

/// Prepares the processors that work on batches, each batch once. Rows without such a processor cost a look and no
/// memory.
pub fn prepare_batches<'a>(rows: impl Iterator<Item = (&'a [f32], SamplingInput<'a>)>) {
    let batched = rows.filter_map(|(logits, input)| {
        let processor = &*input.params.logits_processor.as_ref()?.0;
        let batch = processor.batch()?;
        let row = BatchRow {
            processor,
            logits,
            input,
        };
        Some((batch, row))
    });
    let mut batched: Vec<_> = batched.collect();
    while let Some(&(first, _)) = batched.first() {
        let mut rows = Vec::with_capacity(batched.len());
        batched.retain(|&(batch, row)| {
            let is_of_first = ptr::addr_eq(batch, first);
            if is_of_first {
                rows.push(row);
            }
            !is_of_first
        });
        first.prepare(&rows);
    }
}
