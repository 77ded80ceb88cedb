//! Latent attention.

use half::bf16;
use inflight_base::{BlockId, BlockSize};
use inflight_device::{
    AttentionParams, KvDtype, KvLayout, KvLayouts, KvSpan, LatentHeads, LatentParams, LatentShape,
    LayerGroups, Linear, RopeTable,
};
use inflight_device_cpu::{Cpu, KvCache, Simd};

use super::indexer::Indexer;
use super::support::{Rng, cpu, pack, simds};

const EPS: f32 = 1e-5;
/// Of the only layer that is used.
pub const LAYER: usize = 1;

/// The weights of a layer, and the rows of a sequence.
pub struct Case {
    pub shape: LatentShape,
    scale: f32,
    norm: Vec<f32>,
    pub frequencies: Vec<f32>,
    /// For each head, `[content_dim, latent_dim]` and `[value_dim, latent_dim]`.
    heads: Vec<[Vec<bf16>; 2]>,
    len: usize,
    /// `[len, q_len]`.
    q: Vec<f32>,
    /// `[len, key_dim]`.
    kv: Vec<f32>,
    /// The indexer that selects positions for queries; `None` for dense attention.
    pub indexer: Option<Indexer>,
}

impl Case {
    pub fn new(rng: &mut Rng, shape: LatentShape, len: usize) -> Self {
        let LatentShape {
            num_heads,
            content_dim,
            rotary_dim,
            latent_dim,
            value_dim,
        } = shape;
        Self {
            shape,
            scale: 1.5 / (shape.query_dim() as f32).sqrt(),
            norm: rng.f32s(latent_dim).iter().map(|x| 1.0 + x / 4.0).collect(),
            frequencies: (0..rotary_dim / 2)
                .map(|i| 0.3_f32.powi(i as i32))
                .collect(),
            heads: (0..num_heads)
                .map(|_| [content_dim, value_dim].map(|rows| rng.bf16s(rows * latent_dim)))
                .collect(),
            len,
            q: rng.f32s(len * shape.q_len()),
            kv: rng.f32s(len * shape.key_dim()),
            indexer: None,
        }
    }

    fn pack(&self, cpu: &mut Cpu) -> LatentHeads<Cpu> {
        let LatentShape {
            content_dim,
            latent_dim,
            value_dim,
            ..
        } = self.shape;
        let mut linear = |n, k, weights: &[bf16]| Linear {
            matrix: pack(cpu, n, k, weights),
            bias: None,
            place: None,
        };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for [of_keys, of_values] in &self.heads {
            let turned = (0..latent_dim)
                .flat_map(|column| (0..content_dim).map(move |row| row * latent_dim + column));
            let turned: Vec<_> = turned.map(|at| of_keys[at]).collect();
            keys.push(linear(latent_dim, content_dim, &turned));
            values.push(linear(value_dim, latent_dim, of_values));
        }
        LatentHeads { keys, values }
    }

    /// The results of all tokens, computed in chunks of these sizes, in blocks of a pool that holds NaN elsewhere, and
    /// the positions that each has seen.
    pub fn computed(
        &self,
        rng: &mut Rng,
        (simd, num_threads): (Simd, usize),
        block_size: u32,
        chunks: &[usize],
    ) -> (Vec<bf16>, Vec<Vec<u32>>) {
        let (mut cpu, shape) = (cpu(simd, num_threads), self.shape);
        let heads = self.pack(&mut cpu);
        let angles = RopeTable::new(&self.frequencies, 1.0, self.len).expect("memory");
        let params = LatentParams::<Cpu> {
            shape,
            norm: &self.norm,
            norm_eps: EPS,
            angles: &angles,
            heads: &heads,
            attention: AttentionParams {
                shape: shape.head_shape(),
                scale: self.scale,
                soft_cap: None,
                window: None,
                chunk: None,
                is_bidirectional: false,
                num_sinks: 0,
                shifts_sinks: false,
            },
        };
        let num_blocks = self.len.div_ceil(block_size as usize) + 3;
        let layout = KvLayout {
            num_kv_heads: 1,
            head_dim: shape.key_dim(),
            values: shape.kv_values(),
            indexer_dim: self.indexer.as_ref().map_or(0, |it| it.shape.head_dim),
            block_size: BlockSize::new(block_size).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        let mut cache = KvCache::new(KvLayouts::alike(layout, 2), LayerGroups::one(2), num_blocks)
            .expect("memory");
        let all: Vec<_> = (0..num_blocks as u32).map(BlockId).collect();
        let num_positions = num_blocks as u32 * block_size;
        let former = [KvSpan {
            tokens: 0..num_positions,
            kv_len: num_positions,
            block_table: 0..num_blocks as u32,
        }];
        let longer = RopeTable::new(&self.frequencies, 1.0, num_positions as usize);
        let of_former = LatentParams::<Cpu> {
            angles: &longer.expect("memory"),
            ..params
        };
        let nans = vec![f32::NAN; num_positions as usize * shape.key_dim()];
        let batch = cache.batch(&former, &all);
        cpu.store_latents(&nans, &of_former, &batch, &mut cache, LAYER);
        if let Some(indexer) = &self.indexer {
            indexer.spoil(&mut cpu, of_former.angles, &batch, &mut cache);
        }

        let mut table = all;
        for place in 0..table.len() {
            table.swap(place, rng.below(num_blocks));
        }
        let mut out = vec![bf16::NAN; self.len * shape.out_len()];
        let mut seen: Vec<Vec<_>> = (0..self.len as u32).map(|it| (0..=it).collect()).collect();
        let mut start = 0;
        for &chunk in chunks {
            let end = start + chunk;
            let spans = [KvSpan {
                tokens: 0..chunk as u32,
                kv_len: end as u32,
                block_table: 0..num_blocks as u32,
            }];
            let batch = cache.batch(&spans, &table);
            let kv = &self.kv[start * shape.key_dim()..end * shape.key_dim()];
            cpu.store_latents(kv, &params, &batch, &mut cache, LAYER);
            let q = &self.q[start * shape.q_len()..end * shape.q_len()];
            let out = &mut out[start * shape.out_len()..end * shape.out_len()];
            match &self.indexer {
                None => cpu.latent_attention(q, &params, &batch, &cache, LAYER, out),
                Some(indexer) => {
                    let selection = indexer.select(&mut cpu, &angles, &batch, &mut cache, start);
                    cpu.sparse_latent_attention(q, &params, &selection, &batch, &cache, LAYER, out);
                    let num_selected = selection.max_selected();
                    let rows = selection.positions(chunk).chunks(num_selected);
                    for (seen, row) in seen[start..end].iter_mut().zip(rows) {
                        if seen.len() > num_selected {
                            *seen = row.to_vec();
                        }
                    }
                }
            }
            start = end;
        }
        assert_eq!(start, self.len);
        (out, seen)
    }

    /// A rotated part, in f64.
    fn rotated(&self, x: &[f32], position: usize) -> Vec<f64> {
        let half = x.len() / 2;
        let angle = |i: usize| f64::from(position as f32 * self.frequencies[i % half]);
        let at = |i: usize| f64::from(x[i]);
        (0..x.len())
            .map(|i| match i < half {
                true => at(i) * angle(i).cos() - at(i + half) * angle(i).sin(),
                false => at(i) * angle(i).cos() + at(i - half) * angle(i).sin(),
            })
            .collect()
    }

    /// The normalised latent and the rotated key of each position, as the cache holds them.
    fn cached(&self) -> Vec<[Vec<f64>; 2]> {
        let rows = self.kv.chunks(self.shape.key_dim()).enumerate();
        let of_row = |(position, row): (usize, &[f32])| {
            let (latent, rotary) = row.split_at(self.shape.latent_dim);
            let squares = latent.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let scale = 1.0 / (squares / latent.len() as f64 + f64::from(EPS)).sqrt();
            let normed = latent.iter().zip(&self.norm);
            let normed = normed.map(|(&x, &weight)| f64::from(x) * scale * f64::from(weight));
            [
                normed.map(round).collect(),
                self.rotated(rotary, position)
                    .into_iter()
                    .map(round)
                    .collect(),
            ]
        };
        rows.map(of_row).collect()
    }

    /// Checks the results of tokens that have `seen` these positions against keys and values of heads, which are
    /// computed in f64 and are not rounded.
    pub fn assert_near(&self, out: &[bf16], seen: &[Vec<u32>], what: &str) {
        let shape = self.shape;
        let cached = self.cached();
        let of_head = |weights: &[bf16]| -> Vec<Vec<f64>> {
            let row = |latent: &[f64]| {
                let rows = weights.chunks(shape.latent_dim);
                let product =
                    |row: &[bf16]| row.iter().zip(latent).map(|(w, x)| w.to_f64() * x).sum();
                rows.map(product).collect()
            };
            cached.iter().map(|[latent, _]| row(latent)).collect()
        };
        for (head, [of_keys, of_values]) in self.heads.iter().enumerate() {
            let (keys, values) = (of_head(of_keys), of_head(of_values));
            for token in 0..self.len {
                let q = &self.q[token * shape.q_len() + head * shape.query_dim()..];
                let (content, rotary) = q[..shape.query_dim()].split_at(shape.content_dim);
                let content: Vec<_> = content.iter().map(|&x| round(f64::from(x))).collect();
                let rotary: Vec<_> = self.rotated(rotary, token).into_iter().map(round).collect();
                let seen = seen[token].iter().map(|&position| position as usize);
                let scores = seen.clone().map(|position| {
                    let contents = content.iter().zip(&keys[position]).map(|(q, k)| q * k);
                    let rotated = rotary.iter().zip(&cached[position][1]).map(|(q, k)| q * k);
                    contents.chain(rotated).sum::<f64>() * f64::from(self.scale)
                });
                let scores: Vec<_> = scores.collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<_> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let got = &out[token * shape.out_len() + head * shape.value_dim..];
                for (i, got) in got[..shape.value_dim].iter().enumerate() {
                    let terms = weights.iter().zip(seen.clone());
                    let terms = terms.map(|(weight, it)| weight / sum * values[it][i]);
                    let exact: f64 = terms.sum();
                    // Of the whole vector: queries are rounded in the space of the latents, where scores add up many
                    // terms.
                    let size = values[..=token].iter().flatten();
                    let size = size.fold(0.0_f64, |max, value| max.max(value.abs()));
                    // A value is made of rounded elements of a latent, whose terms may cancel: their errors have a
                    // standard deviation of at most 1 / (512 * sqrt(3)), and six of these are allowed.
                    let weights = &of_values[i * shape.latent_dim..][..shape.latent_dim];
                    let terms = cached[..=token].iter().map(|[latent, _]| {
                        let squares = weights.iter().zip(latent);
                        let squares = squares.map(|(w, x)| (w.to_f64() * x).powi(2));
                        squares.sum::<f64>().sqrt()
                    });
                    let rounded = terms.fold(0.0, f64::max) * 6.0 / (512.0 * 3.0_f64.sqrt());
                    let error = (got.to_f64() - exact).abs();
                    assert!(
                        error <= 6.0 / 256.0 * size + rounded,
                        "{what}: token {token} head {head} [{i}]: {got} for {exact}, of values up to {size}"
                    );
                }
            }
        }
    }
}

pub fn round(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

#[test]
fn heads_attend_to_latents_as_to_the_keys_and_values_made_of_them() {
    let mut rng = Rng::new();
    for simd in simds() {
        for _ in 0..4 {
            let shape = LatentShape {
                num_heads: 1 + rng.below(7),
                content_dim: 1 + rng.below(40),
                rotary_dim: 2 * (1 + rng.below(9)),
                latent_dim: 2 * (1 + rng.below(50)),
                value_dim: 1 + rng.below(40),
            };
            let len = 1 + rng.below(90);
            let case = Case::new(&mut rng, shape, len);
            let what = format!("{simd}, {shape:?}, {} positions", case.len);
            let block_size = [16, 32, 5][rng.below(3)];
            let (out, seen) = case.computed(&mut rng, (simd, 2), block_size, &[case.len]);
            case.assert_near(&out, &seen, &what);
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_any_chunks_and_blocks_on_any_threads() {
    let mut rng = Rng::new();
    // One of many heads, whose tasks have a token each, and a sequence that threads share.
    for (num_heads, len) in [(3, 100), (130, 20), (2, 1300)] {
        let shape = LatentShape {
            num_heads,
            content_dim: 11,
            rotary_dim: 6,
            latent_dim: 38,
            value_dim: 9,
        };
        let case = Case::new(&mut rng, shape, len);
        for simd in simds() {
            let (whole, _) = case.computed(&mut rng, (simd, 1), 16, &[len]);
            let first = len - 7;
            let chunks: Vec<_> = [first / 2, first - first / 2]
                .into_iter()
                .chain([1; 7])
                .collect();
            for (num_threads, block_size) in [(3, 16), (2, 7)] {
                let (in_chunks, _) =
                    case.computed(&mut rng, (simd, num_threads), block_size, &chunks);
                let differs = whole.iter().zip(&in_chunks).position(|(a, b)| a != b);
                assert_eq!(
                    differs, None,
                    "{simd}, {num_heads} heads, {len} positions in blocks of {block_size}"
                );
            }
        }
    }
}
