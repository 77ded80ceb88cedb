//! The learned positions of a model on a device.

use inflight_base::TokenId;
use inflight_device::{Load, StepInputs};

/// Embeddings of positions, `[num_positions, hidden_size]`.
pub(super) struct Positions<D: Load> {
    /// Their rows from position 0 on, or from the row of padding on.
    pub(super) table: D::Embedding,
    /// A token that has no position.
    pub(super) padding_id: Option<TokenId>,
}

impl<D: Load> Positions<D> {
    /// The rows from position 0 on, if every token has a position.
    pub(super) fn in_order(&self) -> Option<&D::Embedding> {
        self.padding_id.is_none().then_some(&self.table)
    }

    /// The table, and the row of each token of a step, if padding has no position: row 0 for padding, row n for the
    /// n-th other token of its text. Such models are encoders, of which a step has whole texts.
    pub(super) fn without_padding(
        &self,
        inputs: &StepInputs<'_>,
    ) -> Option<(&D::Embedding, Vec<u32>)> {
        let padding_id = self.padding_id?;
        let mut rows = Vec::with_capacity(inputs.token_ids.len());
        for span in inputs.spans {
            let ids = &inputs.token_ids[span.tokens.start as usize..span.tokens.end as usize];
            let mut num_others = 0;
            rows.extend(ids.iter().map(|id| {
                if *id == padding_id {
                    return 0;
                }
                num_others += 1;
                num_others
            }));
        }
        Some((&self.table, rows))
    }
}
