//! Queries that see some of the positions up to their own.

use std::ops::Range;

use inflight_device::KvSpan;

/// The positions that each query sees. A query at one of the first `num_selected` positions sees all up to its own.
#[derive(Clone, Copy)]
pub(crate) struct Selected<'a> {
    /// `[num_tokens, num_selected]`, each row in order.
    pub positions: &'a [u32],
    pub num_selected: usize,
}

impl<'a> Selected<'a> {
    /// The rows of some tokens.
    pub fn of(self, tokens: Range<usize>) -> Self {
        let num = self.num_selected;
        Self {
            positions: &self.positions[tokens.start * num..tokens.end * num],
            ..self
        }
    }

    /// The row of one token.
    pub fn row(self, token: usize) -> &'a [u32] {
        &self.positions[token * self.num_selected..][..self.num_selected]
    }
}

/// The first tokens of a span that see all positions up to their own: those at the first `max_selected` positions.
pub(crate) fn num_dense(span: &KvSpan, max_selected: usize) -> usize {
    let before = span.kv_len as usize - span.tokens.len();
    max_selected.saturating_sub(before).min(span.tokens.len())
}

/// How the queries of a span are divided into tiles of tokens: those that see all positions up to their own, then each
/// of the others by itself.
pub(super) struct SpanTiles {
    num_tokens: usize,
    num_dense: usize,
    tile_tokens: usize,
}

impl SpanTiles {
    pub fn new(span: &KvSpan, selected: Option<Selected<'_>>, tile_tokens: usize) -> Self {
        let num_tokens = span.tokens.len();
        Self {
            num_tokens,
            num_dense: selected.map_or(num_tokens, |it| num_dense(span, it.num_selected)),
            tile_tokens,
        }
    }

    fn num_dense_tiles(&self) -> usize {
        self.num_dense.div_ceil(self.tile_tokens)
    }

    /// The number of tiles.
    pub fn len(&self) -> usize {
        self.num_dense_tiles() + self.num_tokens - self.num_dense
    }

    /// The tokens of a tile, counted from the first one of the span, and whether they see all positions up to their
    /// own.
    pub fn tokens(&self, tile: usize) -> (Range<usize>, bool) {
        match tile.checked_sub(self.num_dense_tiles()) {
            None => {
                let start = tile * self.tile_tokens;
                (start..self.num_dense.min(start + self.tile_tokens), true)
            }
            Some(place) => {
                let token = self.num_dense + place;
                (token..token + 1, false)
            }
        }
    }
}
