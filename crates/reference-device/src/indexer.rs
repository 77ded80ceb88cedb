//! Sparse attention by an indexer.

use super::{Cache, Reference, Rows, Step, exact, places, rotate, rounded};
use inflight_base::LoadError;
use inflight_device::{IndexerOps, IndexerParams, IndexerShape, LatentParams};

/// The indexer of the reference device.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceIndexer;

/// The positions that each query of a step sees.
#[derive(Default)]
pub struct Selection(Vec<Vec<usize>>);

impl IndexerOps<Reference> for ReferenceIndexer {
    type Selection = Selection;

    fn num_scratch_bytes(self) -> usize {
        0
    }

    fn alloc_selection(
        self,
        _: &mut Reference,
        _: usize,
        _: usize,
    ) -> Result<Selection, LoadError> {
        Ok(Selection::default())
    }

    fn store_keys(
        self,
        _: &mut Reference,
        step: &Step<'_>,
        params: IndexerParams<'_, Reference>,
        keys: &Rows,
        cache: &mut Cache,
        layer: usize,
    ) {
        let [weight, bias] = params.key_norm;
        let plane = cache.plane(layer);
        for (row, position, block, offset) in places(&step.batch, cache, layer) {
            let key: Vec<_> = keys.row(row).iter().map(|&x| exact(x)).collect();
            let len = key.len() as f64;
            let mean = key.iter().sum::<f64>() / len;
            let variance = key.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / len;
            let scale = 1.0 / (variance + exact(params.norm_eps)).sqrt();
            let elements = key.iter().zip(weight).zip(bias);
            let normed = elements.map(|((x, &w), &b)| (x - mean) * scale * exact(w) + exact(b));
            let key = rotated(
                &normed.collect::<Vec<_>>(),
                params.shape,
                params.angles.row(position),
            );
            let place = cache.indexer_place(plane, block, offset);
            cache.planes[plane].indexer_keys[place].copy_from_slice(&key);
        }
    }

    fn select(
        self,
        _: &mut Reference,
        step: &Step<'_>,
        params: IndexerParams<'_, Reference>,
        q: &Rows,
        head_weights: &Rows,
        cache: &Cache,
        layer: usize,
        selection: &mut Selection,
    ) {
        let (shape, plane) = (params.shape, cache.plane(layer));
        let block_size = cache.positions_per_block();
        selection.0.clear();
        for (row, position, _, _) in places(&step.batch, cache, layer) {
            let table = cache.table(&step.batch, step.batch.place(row).0, layer);
            let angles = params.angles.row(position);
            let heads = q.row(row).chunks(shape.head_dim);
            let queries: Vec<_> = heads
                .map(|head| {
                    let head: Vec<_> = head.iter().map(|&x| exact(x)).collect();
                    rotated(&head, shape, angles)
                })
                .collect();
            let score = |other: usize| {
                let block = table.at(other / block_size);
                let key = &cache.planes[plane].indexer_keys
                    [cache.indexer_place(plane, block, other % block_size)];
                let weighted = queries.iter().zip(head_weights.row(row));
                let terms = weighted.map(|(query, &weight)| {
                    let products = query.iter().zip(key).map(|(&q, &k)| exact(q) * exact(k));
                    exact(weight) * products.sum::<f64>().max(0.0)
                });
                terms.sum::<f64>()
            };
            let mut best: Vec<_> = (0..=position).map(|other| (score(other), other)).collect();
            best.sort_by(|(a, first), (b, second)| b.total_cmp(a).then(first.cmp(second)));
            best.truncate(shape.max_selected);
            let mut seen: Vec<_> = best.into_iter().map(|(_, other)| other).collect();
            seen.sort_unstable();
            selection.0.push(seen);
        }
    }

    fn attend(
        self,
        reference: &mut Reference,
        step: &Step<'_>,
        params: &LatentParams<'_, Reference>,
        q: &Rows,
        selection: &Selection,
        cache: &Cache,
        layer: usize,
        out: &mut Rows,
    ) {
        let seen = |row: usize, position: usize| match selection.0.get(row) {
            Some(seen) => seen.clone(),
            None => (0..=position).collect(),
        };
        reference.attend_to_latents(step, params, q, seen, cache, layer, out);
    }
}

/// A head whose first elements are rotated, in bf16.
fn rotated(head: &[f64], shape: IndexerShape, angles: &[f32]) -> Vec<f32> {
    let (start, rest) = head.split_at(shape.rotary_dim);
    let start = match shape.is_interleaved {
        false => rotate(start, angles),
        true => {
            let [even, odd] = [0, 1].map(|first| start.iter().skip(first).step_by(2).copied());
            let turned = rotate(&even.chain(odd).collect::<Vec<_>>(), angles);
            let (low, high) = turned.split_at(start.len() / 2);
            low.iter()
                .zip(high)
                .flat_map(|(&low, &high)| [low, high])
                .collect()
        }
    };
    start.iter().chain(rest).map(|&x| rounded(x)).collect()
}
