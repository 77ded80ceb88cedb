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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{LogitsProcessor, Owner, ProcessBatch, ProcessLogits, SampleError, SamplingParams};

    /// The first logit of each prepared row.
    #[derive(Default)]
    struct Batch(Mutex<Vec<f32>>);

    impl ProcessBatch for Batch {
        fn prepare(&self, rows: &[BatchRow<'_>]) {
            let mut prepared = self.0.lock().expect("no panic");
            assert!(prepared.is_empty(), "it is prepared twice");
            prepared.extend(rows.iter().map(|row| row.logits[0]));
        }
    }

    struct Processor(Option<Arc<Batch>>);

    impl ProcessLogits for Processor {
        fn process(&self, _: &mut [f32], _: SamplingInput<'_>) -> Result<(), SampleError> {
            Ok(())
        }

        fn batch(&self) -> Option<&dyn ProcessBatch> {
            Some(&**self.0.as_ref()?)
        }
    }

    #[test]
    fn a_batch_is_prepared_once_a_step_with_all_its_rows() {
        let [one, other] = [(); 2].map(|()| Arc::new(Batch::default()));
        let processor = |batch: Option<&Arc<Batch>>| SamplingParams {
            logits_processor: Some(LogitsProcessor(Arc::new(Processor(batch.cloned())))),
            ..SamplingParams::default()
        };
        let all = [
            processor(Some(&one)),
            SamplingParams::default(),
            processor(Some(&other)),
            processor(None),
            processor(Some(&one)),
        ];
        let logits = [[0.0], [1.0], [2.0], [3.0], [4.0]];
        let rows = logits.iter().zip(&all).map(|(logits, params)| {
            let input = SamplingInput {
                params,
                tokens: &[1],
                num_prompt_tokens: 1,
                beam: 0,
                owner: Owner::default(),
            };
            (&logits[..], input)
        });
        prepare_batches(rows);
        let prepared = |batch: &Batch| batch.0.lock().expect("no panic").clone();
        assert_eq!(prepared(&one), [0.0, 4.0]);
        assert_eq!(prepared(&other), [2.0]);
    }
}
