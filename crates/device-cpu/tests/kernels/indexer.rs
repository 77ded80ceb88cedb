//! Sparse attention by an indexer.

use inflight_device::{IndexerParams, IndexerShape, KvBatch, LatentShape, RopeTable};
use inflight_device_cpu::{Cpu, CpuSelection, KvCache, Simd};

use super::latent::{Case, LAYER, round};
use super::support::{Rng, simds};

const EPS: f32 = 1e-6;

/// The indexer of a layer, and the rows of a sequence.
pub struct Indexer {
    pub shape: IndexerShape,
    /// The weights and biases of the norm of keys.
    norm: [Vec<f32>; 2],
    /// `[len, q_len]`.
    q: Vec<f32>,
    /// `[len, head_dim]`.
    keys: Vec<f32>,
    /// `[len, num_heads]`.
    head_weights: Vec<f32>,
}

impl Indexer {
    fn new(rng: &mut Rng, shape: IndexerShape, len: usize) -> Self {
        let weight = rng
            .f32s(shape.head_dim)
            .iter()
            .map(|x| 1.0 + x / 4.0)
            .collect();
        Self {
            shape,
            norm: [weight, rng.f32s(shape.head_dim)],
            q: rng.f32s(len * shape.q_len()),
            keys: rng.f32s(len * shape.head_dim),
            head_weights: rng.f32s(len * shape.num_heads),
        }
    }

    fn params<'a>(&'a self, angles: &'a RopeTable) -> IndexerParams<'a, Cpu> {
        IndexerParams {
            shape: self.shape,
            key_norm: self.norm.each_ref(),
            norm_eps: EPS,
            angles,
        }
    }

    /// Fills a cache with keys that are not numbers.
    pub fn spoil(
        &self,
        cpu: &mut Cpu,
        angles: &RopeTable,
        batch: &KvBatch<'_>,
        cache: &mut KvCache,
    ) {
        let nans = vec![f32::NAN; batch.num_tokens() * self.shape.head_dim];
        cpu.store_indexer_keys(&nans, self.params(angles), batch, cache, LAYER);
    }

    /// Stores the keys of the tokens of a batch, of which `start` is the first one, and selects what they see.
    pub fn select(
        &self,
        cpu: &mut Cpu,
        angles: &RopeTable,
        batch: &KvBatch<'_>,
        cache: &mut KvCache,
        start: usize,
    ) -> CpuSelection {
        let rows = |values: &'_ [f32], width: usize| {
            values[start * width..(start + batch.num_tokens()) * width].to_vec()
        };
        let params = self.params(angles);
        let keys = rows(&self.keys, self.shape.head_dim);
        cpu.store_indexer_keys(&keys, params, batch, cache, LAYER);
        let q = rows(&self.q, self.shape.q_len());
        let weights = rows(&self.head_weights, self.shape.num_heads);
        let mut selection =
            CpuSelection::new(batch.num_tokens(), self.shape.max_selected).expect("memory");
        cpu.select_positions((&q, &weights), params, batch, cache, LAYER, &mut selection);
        selection
    }

    /// A rotated head, in bf16.
    fn rotated(&self, case: &Case, head: &[f64], position: usize) -> Vec<f64> {
        let (rotary, half) = (self.shape.rotary_dim, self.shape.rotary_dim / 2);
        let mut out = head.to_vec();
        for pair in 0..half {
            let (i, j) = match self.shape.is_interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + half),
            };
            assert!(j < rotary);
            let angle = f64::from(position as f32 * case.frequencies[pair]);
            out[i] = head[i] * angle.cos() - head[j] * angle.sin();
            out[j] = head[j] * angle.cos() + head[i] * angle.sin();
        }
        out.into_iter().map(round).collect()
    }

    /// The scores of a token, and the size of their terms, in f64.
    fn scores(&self, case: &Case, token: usize) -> Vec<(f64, f64)> {
        let f64s = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let dim = self.shape.head_dim;
        let q = f64s(&self.q[token * self.shape.q_len()..][..self.shape.q_len()]);
        let queries: Vec<_> = q
            .chunks(dim)
            .map(|head| self.rotated(case, head, token))
            .collect();
        let weights =
            f64s(&self.head_weights[token * self.shape.num_heads..][..self.shape.num_heads]);
        let key = |position: usize| {
            let key = f64s(&self.keys[position * dim..][..dim]);
            let mean = key.iter().sum::<f64>() / dim as f64;
            let variance = key.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / dim as f64;
            let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
            let normed = (0..dim).map(|i| {
                (key[i] - mean) * scale * f64::from(self.norm[0][i]) + f64::from(self.norm[1][i])
            });
            self.rotated(case, &normed.collect::<Vec<_>>(), position)
        };
        let score = |position: usize| {
            let key = key(position);
            let terms = queries.iter().zip(&weights).map(|(query, weight)| {
                let product: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                let size: f64 = query.iter().zip(&key).map(|(q, k)| (q * k).abs()).sum();
                (weight * product.max(0.0), weight.abs() * size)
            });
            terms.fold((0.0, 0.0), |(sum, total), (term, size)| {
                (sum + term, total + size)
            })
        };
        (0..=token).map(score).collect()
    }

    /// Checks that no position has a larger score than a selected one, but for what rounding of keys may change.
    fn assert_largest(&self, case: &Case, seen: &[Vec<u32>], what: &str) {
        for (token, seen) in seen.iter().enumerate() {
            let scores = self.scores(case, token);
            assert_eq!(
                seen.len(),
                scores.len().min(self.shape.max_selected),
                "{what}"
            );
            assert!(
                seen.is_sorted_by(|a, b| a < b),
                "{what}: token {token}: {seen:?}"
            );
            let is_seen = |position: usize| seen.binary_search(&(position as u32)).is_ok();
            let of =
                |wanted: bool| (0..=token).filter(move |&position| is_seen(position) == wanted);
            let least = of(true)
                .map(|it| scores[it].0)
                .fold(f64::INFINITY, f64::min);
            for position in of(false) {
                let (score, size) = scores[position];
                assert!(
                    score <= least + size / 128.0,
                    "{what}: token {token} does not see {position} with {score}, but one with {least}"
                );
            }
        }
    }
}

fn case(rng: &mut Rng, num_heads: usize, shape: IndexerShape, len: usize) -> Case {
    let latent = LatentShape {
        num_heads,
        content_dim: 11,
        rotary_dim: shape.rotary_dim,
        latent_dim: 38,
        value_dim: 9,
    };
    let mut case = Case::new(rng, latent, len);
    case.indexer = Some(Indexer::new(rng, shape, len));
    case
}

#[test]
fn queries_see_the_positions_with_the_largest_scores_and_no_others() {
    let mut rng = Rng::new();
    for simd in simds() {
        for is_interleaved in [false, true] {
            let rotary_dim = 2 * (1 + rng.below(4));
            let shape = IndexerShape {
                num_heads: 1 + rng.below(9),
                head_dim: rotary_dim + 2 * rng.below(9),
                rotary_dim,
                is_interleaved,
                max_selected: 1 + rng.below(30),
            };
            let num_heads = 1 + rng.below(7);
            let case = case(&mut rng, num_heads, shape, 90);
            let block_size = [16, 32, 5][rng.below(3)];
            let (out, seen) = case.computed(&mut rng, (simd, 2), block_size, &[90]);
            let what = format!("{simd}, {shape:?}");
            let indexer = case.indexer.as_ref().expect("it has one");
            indexer.assert_largest(&case, &seen, &what);
            case.assert_near(&out, &seen, &what);
        }
    }
}

#[test]
fn a_token_selects_alike_in_any_chunks_and_blocks_on_any_threads() {
    let mut rng = Rng::new();
    // Many heads, whose tasks have a token each, and selections that threads share.
    for (num_heads, max_selected, len) in [(3, 40, 100), (130, 7, 20), (2, 1100, 1300)] {
        let shape = IndexerShape {
            num_heads: 5,
            head_dim: 14,
            rotary_dim: 6,
            is_interleaved: false,
            max_selected,
        };
        let case = case(&mut rng, num_heads, shape, len);
        for simd in simds() {
            let whole = case.computed(&mut rng, (simd, 1), 16, &[len]);
            let first = len - 7;
            let chunks: Vec<_> = [first / 2, first - first / 2]
                .into_iter()
                .chain([1; 7])
                .collect();
            for (num_threads, block_size) in [(3, 16), (2, 7)] {
                let in_chunks = case.computed(&mut rng, (simd, num_threads), block_size, &chunks);
                assert!(
                    whole == in_chunks,
                    "{simd}, {num_heads} heads, {max_selected} of {len} positions in blocks of {block_size}"
                );
            }
        }
    }
}

#[test]
fn of_no_more_positions_than_are_selected_all_are_seen_with_the_bits_of_dense_attention() {
    let mut rng = Rng::new();
    let shape = IndexerShape {
        num_heads: 3,
        head_dim: 10,
        rotary_dim: 4,
        is_interleaved: true,
        max_selected: 33,
    };
    let (len, simd) = (40, Simd::detect());
    let mut case = case(&mut rng, 3, shape, len);
    let (sparse, _) = case.computed(&mut rng, (simd, 2), 16, &[20, 20]);
    case.indexer = None;
    let (dense, _) = case.computed(&mut rng, (simd, 2), 16, &[len]);
    let width = case.shape.out_len();
    assert!(sparse[..33 * width] == dense[..33 * width]);
    for token in 33..len {
        let row = token * width..(token + 1) * width;
        assert!(sparse[row.clone()] != dense[row], "token {token} sees less");
    }
}
