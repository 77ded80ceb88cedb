//! RoPE, the KV cache and attention.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use half::bf16;
use inflight_base::{BlockId, BlockSize};
use inflight_device::{
    AttentionParams, HeadBiases, HeadShape, KvBatch, KvDtype, KvLayout, KvLayouts, KvSpan,
    KvValues, LayerGroups, QkNorm, QkNormKind, RopeTable,
};
use inflight_device_cpu::{Cpu, KvCache, Simd};

use super::support::{Rng, cpu, simds};

/// A sequence with the operands of its attention, and the results.
#[derive(Clone)]
struct Sequence {
    /// `[len, qkv_len]`
    qkv: Vec<f32>,
    len: usize,
    computed: usize,
    blocks: Vec<BlockId>,
    /// `[len, q_len]`
    out: Vec<bf16>,
}

struct Model {
    shape: HeadShape,
    rope: RopeTable,
    norm: Option<(Vec<f32>, Vec<f32>)>,
    /// Whether that is behind rotation.
    norm_is_behind: bool,
    sight: Sight,
    /// Positions of each sequence that see each other, in order.
    runs: Vec<Range<usize>>,
    soft_cap: Option<f32>,
    /// Of linear biases, one for each query head.
    slopes: Option<Vec<f32>>,
    dtype: KvDtype,
}

/// Positions that a query attends to: the last ones, including its own, and the first ones.
#[derive(Clone, Copy, Debug)]
struct Sight {
    window: Option<u32>,
    num_sinks: u32,
    /// Whether positions are counted within what a query sees.
    shifts: bool,
    /// Whether a query sees as many positions behind it.
    both_ways: bool,
    /// The length of the chunks that it does not see beyond.
    chunk: Option<u32>,
}

impl Sight {
    const ALL: Self = Self::new(None, 0);

    const fn new(window: Option<u32>, num_sinks: u32) -> Self {
        Self {
            window,
            num_sinks,
            shifts: false,
            both_ways: false,
            chunk: None,
        }
    }

    const fn in_chunks(window: u32, chunk: u32, num_sinks: u32) -> Self {
        Self {
            chunk: Some(chunk),
            ..Self::new(Some(window), num_sinks)
        }
    }

    const fn both_ways(window: Option<u32>) -> Self {
        Self {
            both_ways: true,
            ..Self::new(window, 0)
        }
    }

    const fn shifting(window: u32, num_sinks: u32) -> Self {
        Self {
            shifts: true,
            ..Self::new(Some(window), num_sinks)
        }
    }

    /// Whether the query at `query` attends to `position`.
    fn sees(&self, query: usize, position: usize) -> bool {
        let within = |distance: usize| {
            let chunk = self.chunk.map_or(usize::MAX, |chunk| chunk as usize);
            self.window.is_none_or(|window| distance < window as usize)
                && query / chunk == position / chunk
        };
        match position.checked_sub(query) {
            None => within(query - position) || position < self.num_sinks as usize,
            Some(0) => true,
            Some(ahead) => self.both_ways && within(ahead),
        }
    }
}

impl Model {
    fn new(rng: &mut Rng, shape: HeadShape, with_norm: bool, sight: Sight) -> Self {
        let d = shape.head_dim;
        let frequencies: Vec<_> = (0..d / 2)
            .map(|i| 10_000_f32.powf(-2.0 * i as f32 / d as f32))
            .collect();
        let rope = RopeTable::new(&frequencies, 1.0, 4096).expect("memory");
        let has_factors = !sight.shifts && rng.below(3) == 0;
        Self {
            shape,
            rope: match has_factors {
                true => rope.with_query_factors(query_factor).expect("memory"),
                false => rope,
            },
            // Such norms do not commute with the rotation by which sinks shift.
            norm_is_behind: !sight.shifts && rng.below(2) == 0,
            norm: with_norm.then(|| (rng.f32s(d), rng.f32s(d))),
            sight,
            runs: Vec::new(),
            // Scores are larger.
            soft_cap: (rng.below(3) == 0).then_some(1.5),
            slopes: (!sight.shifts && rng.below(3) == 0).then(|| {
                let heads = 0..shape.num_q_heads;
                heads.map(|_| rng.below(64) as f32 / 64.0).collect()
            }),
            dtype: KvDtype::Bf16,
        }
    }

    /// Whether the query at `query` attends to `position`.
    fn sees(&self, query: usize, position: usize) -> bool {
        let is_ahead =
            |run: &Range<usize>| run.contains(&query) && (query..run.end).contains(&position);
        self.sight.sees(query, position) || self.runs.iter().any(is_ahead)
    }

    /// The end of a chunk of at most `len` tokens from `start` on, in front of a run that it would cut. A run that
    /// begins at `start` is longer, and whole.
    fn end_of_chunk(&self, start: usize, len: usize) -> usize {
        let end = start + len;
        let mut runs = self.runs.iter();
        match runs.find(|run| run.start < end && end < run.end) {
            Some(run) if run.start > start => run.start,
            Some(run) => run.end,
            None => end,
        }
    }

    fn params(&self) -> AttentionParams {
        AttentionParams {
            shape: self.shape,
            scale: 1.0 / (self.shape.head_dim as f32).sqrt(),
            soft_cap: self.soft_cap,
            window: self.sight.window.and_then(NonZeroU32::new),
            chunk: self.sight.chunk.and_then(NonZeroU32::new),
            is_bidirectional: self.sight.both_ways,
            num_sinks: self.sight.num_sinks,
            shifts_sinks: self.sight.shifts,
        }
    }

    fn sequence(&self, rng: &mut Rng, len: usize) -> Sequence {
        Sequence {
            qkv: rng
                .f32s(len * self.shape.qkv_len())
                .iter()
                .map(|v| v * 3.0)
                .collect(),
            len,
            computed: 0,
            blocks: Vec::new(),
            out: vec![bf16::NAN; len * self.shape.out_len()],
        }
    }

    /// Computes the given number of further tokens of each sequence in one step.
    fn step(&self, cpu: &mut Cpu, pool: &mut Pool, work: &mut [(&mut Sequence, usize)]) {
        let (qkv_len, q_len) = (self.shape.qkv_len(), self.shape.q_len());
        let (mut spans, mut tables, mut qkv) = (Vec::new(), Vec::new(), Vec::new());
        let mut mutual = Vec::new();
        let mut num_tokens = 0;
        for (sequence, chunk) in work.iter_mut() {
            let kv_len = sequence.computed + *chunk;
            pool.give_back(sequence, self.sight);
            pool.grow(sequence, kv_len);
            let table_start = tables.len() as u32;
            tables.extend_from_slice(&sequence.blocks);
            spans.push(KvSpan {
                tokens: num_tokens..num_tokens + *chunk as u32,
                kv_len: kv_len as u32,
                block_table: table_start..tables.len() as u32,
            });
            let runs = self
                .runs
                .iter()
                .map(|run| run.start..run.end.min(sequence.len));
            let runs = runs.filter(|run| run.start >= sequence.computed && run.start < kv_len);
            let in_step = |position: usize| num_tokens + (position - sequence.computed) as u32;
            mutual.extend(runs.map(|run| in_step(run.start)..in_step(run.end)));
            qkv.extend_from_slice(&sequence.qkv[sequence.computed * qkv_len..kv_len * qkv_len]);
            num_tokens += *chunk as u32;
        }
        let batch = pool.cache.batch(&spans, &tables).with_mutual(&mutual);
        let norm = self.norm.as_ref().map(|(q, k)| QkNorm {
            q: &q[..],
            k: &k[..],
            kind: match self.norm_is_behind {
                true => QkNormKind::RotatedHead,
                false => QkNormKind::Head,
            },
            has_values: false,
            eps: 1e-6,
        });
        let mut q = vec![bf16::NAN; num_tokens as usize * q_len];
        let mut sink_q = q.clone();
        let out_len = self.shape.out_len();
        let mut out = vec![bf16::NAN; num_tokens as usize * out_len];
        let layer = 1;
        let params = self.params();
        let has_sink_queries = params.has_sink_queries();
        cpu.rope_and_store(
            &qkv,
            self.shape,
            norm,
            (&self.rope, &[]),
            &batch,
            &mut pool.cache,
            layer,
            &mut q,
            has_sink_queries.then_some((&params, &mut sink_q)),
        );
        let biases = HeadBiases {
            slopes: self.slopes.as_deref(),
            ..HeadBiases::NONE
        };
        cpu.paged_attention(
            (&q, has_sink_queries.then_some(&sink_q[..])),
            (&params, biases),
            &batch,
            &pool.cache,
            layer,
            &mut out,
        );
        let mut rest = &out[..];
        for (sequence, chunk) in work.iter_mut() {
            let rows;
            (rows, rest) = rest.split_at(*chunk * out_len);
            let Range { start, end } = sequence.computed..sequence.computed + *chunk;
            sequence.out[start * out_len..end * out_len].copy_from_slice(rows);
            sequence.computed = end;
        }
    }

    /// A rotated key or a value as stored in the cache.
    fn stored(&self, vector: &[f64]) -> Vec<f64> {
        match self.dtype {
            KvDtype::Bf16 => vector.iter().map(|&v| round(v)).collect(),
            KvDtype::Int8 => {
                let largest = vector.iter().fold(0.0, |max, v| v.abs().max(max));
                let bits = ((largest / 127.0) as f32).to_bits();
                let scale = f32::from_bits((bits + 0xffff) & 0xffff_0000);
                // Multiplied by the inverse in f32, like the kernels: a quotient at or near a half rounds to
                // the same neighbour.
                let element = |v: &f64| (*v as f32 * scale.recip()).round_ties_even();
                let stored = |v| f64::from(element(v)) * f64::from(scale);
                vector.iter().map(stored).collect()
            }
            KvDtype::Fp8 => unreachable!("the CPU has no such cache"),
        }
    }

    /// Queries and keys of a token rotated by a position, and its values, in float64, rounded where the kernels round.
    fn rotated(&self, sequence: &Sequence, token: usize, position: usize) -> [Vec<Vec<f64>>; 3] {
        let HeadShape {
            num_q_heads,
            num_kv_heads,
            head_dim: d,
            value_dim,
        } = self.shape;
        let row = &sequence.qkv[token * self.shape.qkv_len()..][..self.shape.qkv_len()];
        let (keys, values) = row.split_at((num_q_heads + num_kv_heads) * d);
        let heads = |row: &[f32], dim| -> Vec<Vec<f64>> {
            let heads = row.chunks(dim);
            heads
                .map(|head| head.iter().map(|&v| f64::from(v)).collect())
                .collect()
        };
        let (heads, v) = (heads(keys, d), heads(values, value_dim));
        let rotate = |head: &[f64], weight: Option<&[f32]>| -> Vec<f64> {
            let normalise = |head: &mut Vec<f64>, is_here: bool| {
                if let Some(weight) = weight.filter(|_| is_here) {
                    let mean = head.iter().map(|v| v * v).sum::<f64>() / d as f64;
                    for (v, w) in head.iter_mut().zip(weight) {
                        *v *= f64::from(*w) / (mean + 1e-6).sqrt();
                    }
                }
            };
            let mut head = head.to_vec();
            normalise(&mut head, !self.norm_is_behind);
            let mut rotated = (0..d)
                .map(|i| {
                    let frequency = 10_000_f32.powf(-2.0 * (i % (d / 2)) as f32 / d as f32);
                    let angle = f64::from(position as f32 * frequency);
                    let (low, high) = (head[i % (d / 2)], head[i % (d / 2) + d / 2]);
                    if i < d / 2 {
                        low * angle.cos() - high * angle.sin()
                    } else {
                        high * angle.cos() + low * angle.sin()
                    }
                })
                .collect();
            normalise(&mut rotated, self.norm_is_behind);
            rotated
        };
        let factor = self.rope.query_factor(position);
        let factor = factor.map_or(1.0, |_| f64::from(query_factor(position)));
        let norm = |i: usize| {
            self.norm
                .as_ref()
                .map(|(q, k)| if i == 0 { &q[..] } else { &k[..] })
        };
        let (q, k) = heads.split_at(num_q_heads);
        [
            q.iter()
                .map(|head| {
                    let rotated = rotate(head, norm(0)).into_iter();
                    rotated.map(|x| round(x * factor)).collect()
                })
                .collect(),
            k.iter()
                .map(|head| self.stored(&rotate(head, norm(1))))
                .collect(),
            v.iter().map(|head| self.stored(head)).collect(),
        ]
    }

    /// Checks the tokens from `first`.
    fn assert_near_the_exact_attention(&self, sequence: &Sequence, first: usize, what: &str) {
        let HeadShape {
            num_q_heads,
            num_kv_heads,
            head_dim: d,
            value_dim,
        } = self.shape;
        let of_text: Vec<_> = (0..sequence.len)
            .map(|t| self.rotated(sequence, t, t))
            .collect();
        for token in first..sequence.len {
            let seen: Vec<_> = (0..sequence.len)
                .filter(|&position| self.sees(token, position))
                .collect();
            // Shifted, they are numbered from 0 on, as if there were no others.
            let renumbered: BTreeMap<_, _> = seen
                .iter()
                .enumerate()
                .filter(|_| self.sight.shifts)
                .map(|(place, &position)| (position, self.rotated(sequence, position, place)))
                .collect();
            let all = |position: usize| match renumbered.get(&position) {
                Some(of_place) => of_place,
                None => &of_text[position],
            };
            for head in 0..num_q_heads {
                let kv_head = head / (num_q_heads / num_kv_heads);
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|&p| {
                        let (q, k) = (&all(token)[0][head], &all(p)[1][kv_head]);
                        let score =
                            q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                        let score = self.soft_cap.map_or(score, |cap| {
                            let cap = f64::from(cap);
                            cap * (score / cap).tanh()
                        });
                        let slope = self.slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
                        score - f64::from(slope) * (token as f64 - p as f64)
                    })
                    .collect();
                // Of each score, the product that has the largest part in it.
                let largest_terms: Vec<f64> = seen
                    .iter()
                    .map(|&p| {
                        let (q, k) = (&all(token)[0][head], &all(p)[1][kv_head]);
                        let terms = q.iter().zip(k).map(|(q, k)| (q * k).abs());
                        terms.fold(0.0, f64::max) / (d as f64).sqrt()
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let out = &sequence.out[(token * num_q_heads + head) * value_dim..][..value_dim];
                for (i, got) in out.iter().enumerate() {
                    let values = seen.iter().map(|&p| all(p)[2][kv_head][i]);
                    let weighted = || weights.iter().map(|w| w / sum).zip(values.clone());
                    let terms = weighted().map(|(w, v)| w * v);
                    let exact: f64 = terms.clone().sum();
                    let size: f64 = terms.map(f64::abs).sum();
                    let got = got.to_f64();
                    // Weights and result are rounded to bf16.
                    let mut bound = 4.0 / 256.0 * size;
                    // An element of a query or a key may round to the other neighbour, because its rotation was in f32:
                    // the score is off by 1/128 of the element's product, as is the weight relative to the others.
                    let off = weighted().zip(&largest_terms);
                    bound += off
                        .map(|((w, v), term)| w * term / 128.0 * (v - exact).abs())
                        .sum::<f64>();
                    if self.sight.shifts {
                        // All keys are rounded behind another rotation than those in the cache.
                        bound *= 2.0;
                    }
                    if self.dtype == KvDtype::Int8 {
                        // If a key's scale rounds to the other neighbour, so do all its elements, and its
                        // score is off by up to 0.05, as is its weight relative to the others.
                        bound += 0.05 * weighted().map(|(w, v)| w * (v - exact).abs()).sum::<f64>();
                        // Weights are integer multiples of a fraction of a tile's largest weight, with 16
                        // bits for 32,767 steps (`attention/avx2/int8.rs`): each is off by half a step, or
                        // slightly more if the values' scales differ.
                        let step = 1.0 / sum / f64::from(i16::MAX);
                        bound += step * values.clone().map(f64::abs).sum::<f64>();
                    }
                    let error = (got - exact).abs();
                    assert!(
                        error <= bound,
                        "{what}: token {token} head {head} [{i}]: {got} for {exact}"
                    );
                }
            }
        }
    }
}

/// Of a position's queries.
fn query_factor(position: usize) -> f32 {
    1.0 + 0.3 * ((position / 16) as f32).ln_1p()
}

fn round(v: f64) -> f64 {
    bf16::from_f64(v).to_f64()
}

/// A cache and its free blocks, allocated in random order. Unused memory holds NaN.
struct Pool {
    cache: KvCache,
    free: Vec<BlockId>,
    num_given_back: usize,
}

impl Pool {
    fn new(
        rng: &mut Rng,
        cpu: &mut Cpu,
        model: &Model,
        block_size: u32,
        num_positions: usize,
    ) -> Self {
        let (shape, dtype) = (model.shape, model.dtype);
        let num_blocks = num_positions.div_ceil(block_size as usize) + 8;
        let layout = KvLayout {
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            values: KvValues::OfTheirOwn(shape.value_dim),
            indexer_dim: 0,
            block_size: BlockSize::new(block_size).expect("not zero"),
            dtype,
        };
        let mut cache = KvCache::new(KvLayouts::alike(layout, 2), LayerGroups::one(2), num_blocks)
            .expect("memory");
        // A former owner's data must not matter: fill everything with NaN.
        let tables: Vec<_> = (0..num_blocks as u32).map(BlockId).collect();
        let num_tokens = num_blocks as u32 * block_size;
        let spans = [KvSpan {
            tokens: 0..num_tokens,
            kv_len: num_tokens,
            block_table: 0..num_blocks as u32,
        }];
        let rope = RopeTable::new(&vec![0.0; shape.head_dim / 2], 1.0, num_tokens as usize)
            .expect("memory");
        let qkv = vec![f32::NAN; num_tokens as usize * shape.qkv_len()];
        let mut q = vec![bf16::ZERO; num_tokens as usize * shape.q_len()];
        for layer in 0..2 {
            let batch = cache.batch(&spans, &tables);
            cpu.rope_and_store(
                &qkv,
                shape,
                None,
                (&rope, &[]),
                &batch,
                &mut cache,
                layer,
                &mut q,
                None,
            );
        }
        let mut free = tables;
        for i in (1..free.len()).rev() {
            free.swap(i, rng.below(i + 1));
        }
        Self {
            cache,
            free,
            num_given_back: 0,
        }
    }

    fn grow(&mut self, sequence: &mut Sequence, kv_len: usize) {
        let block_size = self.cache.layout(0).block_size.tokens().index();
        while sequence.blocks.len() * block_size < kv_len {
            sequence.blocks.push(self.free.pop().expect("a free block"));
        }
    }

    /// Frees the blocks that no further query attends to.
    fn give_back(&mut self, sequence: &mut Sequence, sight: Sight) {
        let block_size = self.cache.layout(0).block_size.tokens().index();
        for (index, block) in sequence.blocks.iter_mut().enumerate() {
            let mut positions = index * block_size..(index + 1) * block_size;
            // Later queries attend to fewer of the old positions.
            let is_past = positions.end <= sequence.computed;
            if is_past && !positions.any(|position| sight.sees(sequence.computed, position)) {
                let block = std::mem::replace(block, BlockId::NONE);
                if block != BlockId::NONE {
                    self.free.push(block);
                    self.num_given_back += 1;
                }
            }
        }
    }

    /// Copies a block of the sequence to another one, which replaces it.
    fn move_a_block(&mut self, rng: &mut Rng, sequence: &mut Sequence) {
        if sequence.blocks.is_empty() {
            return;
        }
        let block_size = self.cache.layout(0).block_size.tokens().index();
        let index = rng.below(sequence.blocks.len());
        if sequence.blocks[index] == BlockId::NONE {
            return;
        }
        let num_positions = (sequence.computed - index * block_size).min(block_size);
        let target = self.free.pop().expect("a free block");
        let source = std::mem::replace(&mut sequence.blocks[index], target);
        self.cache.copy_positions(source, target, num_positions);
        self.free.insert(0, source);
    }
}

const SHAPES: [HeadShape; 6] = [
    HeadShape {
        num_q_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        value_dim: 64,
    },
    HeadShape {
        num_q_heads: 6,
        num_kv_heads: 2,
        head_dim: 8,
        value_dim: 8,
    },
    HeadShape {
        num_q_heads: 7,
        num_kv_heads: 1,
        head_dim: 80,
        value_dim: 48,
    },
    HeadShape {
        num_q_heads: 2,
        num_kv_heads: 2,
        head_dim: 128,
        value_dim: 128,
    },
    HeadShape {
        num_q_heads: 8,
        num_kv_heads: 1,
        head_dim: 96,
        value_dim: 96,
    },
    HeadShape {
        num_q_heads: 3,
        num_kv_heads: 1,
        head_dim: 18,
        value_dim: 7,
    },
];

/// Every instruction set with every KV cache type.
fn simds_and_dtypes() -> impl Iterator<Item = (Simd, KvDtype)> {
    simds().flat_map(|simd| KvDtype::ON_CPU.map(|dtype| (simd, dtype)))
}

#[test]
fn attention_is_near_the_exact_result_on_every_instruction_set() {
    let mut rng = Rng::new();
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let sights = [
            Sight::ALL,
            Sight::new(Some(70), 0),
            Sight::new(Some(1), 0),
            Sight::new(Some(20), 4),
            Sight::new(Some(33), 67),
            Sight::shifting(20, 4),
            Sight::shifting(33, 67),
            Sight::in_chunks(37, 37, 0),
            Sight::in_chunks(30, 48, 5),
        ];
        for sight in [0, 3, 5, 7].map(|more| sights[(index + more) % 9]) {
            let mut model = Model::new(&mut rng, shape, index % 3 == 0, sight);
            let mut sequence = model.sequence(&mut rng, 150);
            for (simd, dtype) in simds_and_dtypes() {
                model.dtype = dtype;
                let mut cpu = cpu(simd, 2);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, 32, 150);
                sequence.blocks.clear();
                sequence.computed = 0;
                model.step(&mut cpu, &mut pool, &mut [(&mut sequence, 150)]);
                let what = format!("{simd} {dtype} {shape:?} {sight:?}");
                model.assert_near_the_exact_attention(&sequence, 0, &what);
            }
        }
    }
}

#[test]
fn a_tokens_result_is_the_same_bits_however_it_is_scheduled() {
    let mut rng = Rng::new();
    let mut num_given_back = 0;
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let sight = [
            Sight::new(Some(70), 0),
            Sight::ALL,
            Sight::new(Some(20), 4),
            Sight::new(Some(90), 75),
            Sight::in_chunks(64, 64, 1),
            Sight::shifting(40, 70),
        ][index % 6];
        let mut model = Model::new(&mut rng, shape, index % 3 == 1, sight);
        let lens: Vec<_> = (0..5).map(|_| 1 + rng.below(260)).collect();
        let total: usize = lens.iter().sum();
        for (simd, dtype) in simds_and_dtypes() {
            model.dtype = dtype;
            let mut sequences: Vec<_> = lens
                .iter()
                .map(|&len| model.sequence(&mut rng, len))
                .collect();
            // The oracle: each sequence alone, one token per step, one thread.
            let mut one = cpu(simd, 1);
            let mut expected = Vec::new();
            for sequence in &mut sequences {
                let mut pool = Pool::new(&mut rng, &mut one, &model, 64, sequence.len);
                for _ in 0..sequence.len {
                    model.step(&mut one, &mut pool, &mut [(sequence, 1)]);
                }
                expected.push(std::mem::take(&mut sequence.out));
            }
            // The last two sizes hold any sequence in one block: a contiguous cache.
            for (block_size, num_threads) in [
                (16, 3),
                (128, 2),
                (5, 2),
                (24, 1),
                (1, 2),
                (32, 2),
                (512, 2),
                (270, 1),
            ] {
                let mut cpu = cpu(simd, num_threads);
                let mut pool = Pool::new(
                    &mut rng,
                    &mut cpu,
                    &model,
                    block_size,
                    total + 5 * block_size as usize,
                );
                for sequence in &mut sequences {
                    sequence.blocks.clear();
                    sequence.computed = 0;
                    sequence.out = vec![bf16::NAN; sequence.len * shape.out_len()];
                }
                while sequences.iter().any(|s| s.computed < s.len) {
                    let mut work = Vec::new();
                    for sequence in &mut sequences {
                        if rng.below(2) == 0 {
                            pool.move_a_block(&mut rng, sequence);
                        }
                        let left = sequence.len - sequence.computed;
                        let chunk = [1, 1 + rng.below(100), left][rng.below(3)].min(left);
                        if chunk > 0 && rng.below(4) > 0 {
                            work.push((sequence, chunk));
                        }
                    }
                    model.step(&mut cpu, &mut pool, &mut work);
                }
                for (sequence, expected) in sequences.iter().zip(&expected) {
                    let same = sequence
                        .out
                        .iter()
                        .zip(expected)
                        .all(|(a, b)| a.to_bits() == b.to_bits() && !a.is_nan());
                    assert!(
                        same,
                        "{simd} {dtype} {shape:?} {sight:?} blocks of {block_size}"
                    );
                }
                num_given_back += pool.num_given_back;
            }
        }
    }
    assert!(num_given_back > 0);
}

/// As encoders have it: all of a sequence is in one step.
#[test]
fn queries_that_see_both_ways_are_near_the_exact_result_and_the_same_bits_in_any_batch() {
    let mut rng = Rng::new();
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let sight = Sight::both_ways([None, Some(20), None, Some(90)][index % 4]);
        let mut model = Model::new(&mut rng, shape, index % 2 == 0, sight);
        let lens = [1 + rng.below(15), 16 + rng.below(50), 97 + rng.below(60)];
        for (simd, dtype) in simds_and_dtypes() {
            model.dtype = dtype;
            let what = format!("{simd} {dtype} {shape:?} {sight:?}");
            let mut sequences = lens.map(|len| model.sequence(&mut rng, len));
            let expected = sequences.each_mut().map(|sequence| {
                let (mut cpu, len) = (cpu(simd, 1), sequence.len);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, 32, len);
                model.step(&mut cpu, &mut pool, &mut [(sequence, len)]);
                model.assert_near_the_exact_attention(sequence, 0, &what);
                sequence.blocks.clear();
                sequence.computed = 0;
                std::mem::take(&mut sequence.out)
            });
            for (block_size, num_threads) in [(16, 2), (5, 1), (160, 3)] {
                let mut cpu = cpu(simd, num_threads);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, block_size, 500);
                let mut batch = sequences.clone();
                let mut work: Vec<_> = batch
                    .iter_mut()
                    .map(|sequence| {
                        sequence.out = vec![bf16::NAN; sequence.len * shape.out_len()];
                        let len = sequence.len;
                        (sequence, len)
                    })
                    .collect();
                let first = rng.below(3);
                work.rotate_left(first);
                model.step(&mut cpu, &mut pool, &mut work);
                for (sequence, expected) in batch.iter().zip(&expected) {
                    let bits = |out: &[bf16]| out.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert!(
                        bits(&sequence.out) == bits(expected),
                        "{what} blocks of {block_size}"
                    );
                }
            }
        }
    }
}

/// As tokens of images have it: a run is in one step.
#[test]
fn tokens_that_see_each_other_are_near_the_exact_result_and_the_same_bits_in_any_schedule() {
    let mut rng = Rng::new();
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let sight = [
            Sight::ALL,
            Sight::new(Some(70), 0),
            Sight::new(Some(6), 0),
            Sight::new(Some(20), 4),
        ][index % 4];
        let mut model = Model::new(&mut rng, shape, index % 2 == 0, sight);
        // Side by side, of one token, longer than windows, and over several tiles of keys and of queries.
        model.runs = vec![3..9, 9..10, 10..41, 60..151, 170..190];
        let lens = [1 + rng.below(15), 41 + rng.below(60), 151 + rng.below(60)];
        for (simd, dtype) in simds_and_dtypes() {
            model.dtype = dtype;
            let what = format!("{simd} {dtype} {shape:?} {sight:?}");
            let mut sequences = lens.map(|len| model.sequence(&mut rng, len));
            let expected = sequences.each_mut().map(|sequence| {
                let mut cpu = cpu(simd, 1);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, 32, sequence.len);
                while sequence.computed < sequence.len {
                    let end = model.end_of_chunk(sequence.computed, 1).min(sequence.len);
                    let len = end - sequence.computed;
                    model.step(&mut cpu, &mut pool, &mut [(sequence, len)]);
                }
                model.assert_near_the_exact_attention(sequence, 0, &what);
                sequence.blocks.clear();
                sequence.computed = 0;
                std::mem::take(&mut sequence.out)
            });
            for (block_size, num_threads) in [(16, 2), (5, 1), (256, 3)] {
                let mut cpu = cpu(simd, num_threads);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, block_size, 900);
                let mut batch = sequences.clone();
                for sequence in &mut batch {
                    sequence.out = vec![bf16::NAN; sequence.len * shape.out_len()];
                }
                while batch.iter().any(|it| it.computed < it.len) {
                    let mut work = Vec::new();
                    for sequence in &mut batch {
                        let left = sequence.len - sequence.computed;
                        if left > 0 && rng.below(3) > 0 {
                            let len = 1 + rng.below(left);
                            let end = model.end_of_chunk(sequence.computed, len);
                            let len = end.min(sequence.len) - sequence.computed;
                            work.push((sequence, len));
                        }
                    }
                    model.step(&mut cpu, &mut pool, &mut work);
                }
                for (sequence, expected) in batch.iter().zip(&expected) {
                    let bits = |out: &[bf16]| out.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert!(
                        bits(&sequence.out) == bits(expected),
                        "{what} blocks of {block_size}"
                    );
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "tokens 2..5 behind token 0")]
fn tokens_of_two_sequences_do_not_see_each_other() {
    let span = |tokens, block: u32| KvSpan {
        tokens,
        kv_len: 3,
        block_table: block..block + 1,
    };
    let spans = [span(0..3, 0), span(3..6, 1)];
    let tables = [BlockId(0), BlockId(1)];
    let block_size = BlockSize::new(16).expect("not zero");
    let batch = KvBatch::new(&spans, &tables, 1, block_size, 2);
    let run = 2..5;
    let _ = batch.with_mutual(std::slice::from_ref(&run));
}

/// One thread computes the parts of a long sequence in sequence; several threads share them.
#[test]
fn a_long_sequence_is_the_same_bits_on_any_number_of_threads() {
    const LEN: usize = 2300;
    let mut rng = Rng::new();
    let shape = HeadShape {
        num_q_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        value_dim: 8,
    };
    for sight in [
        Sight::ALL,
        Sight::new(Some(1500), 70),
        Sight::new(Some(40), 0),
        Sight::in_chunks(700, 700, 0),
        // Some parts have sinks, and one has both.
        Sight::shifting(1000, 1100),
    ] {
        let mut model = Model::new(&mut rng, shape, false, sight);
        let (long, short) = (model.sequence(&mut rng, LEN), model.sequence(&mut rng, 40));
        for (simd, dtype) in simds_and_dtypes() {
            model.dtype = dtype;
            let what = format!("{simd} {dtype} {sight:?}");
            let mut outs = Vec::new();
            for num_threads in [1, 2, 7] {
                let (mut long, mut short) = (long.clone(), short.clone());
                let mut cpu = cpu(simd, num_threads);
                let mut pool = Pool::new(&mut rng, &mut cpu, &model, 32, LEN + 40);
                model.step(&mut cpu, &mut pool, &mut [(&mut long, LEN - 963)]);
                // Chunks that are split, so many that a difference in the last bit of a sum shows in some result.
                for _ in 0..19 {
                    model.step(&mut cpu, &mut pool, &mut [(&mut long, 50)]);
                }
                // Single tokens, and tokens beside those of a short sequence.
                for _ in 0..3 {
                    model.step(&mut cpu, &mut pool, &mut [(&mut long, 1)]);
                }
                for _ in 0..10 {
                    let work = &mut [(&mut short, 4), (&mut long, 1)];
                    model.step(&mut cpu, &mut pool, work);
                }
                if num_threads == 7 {
                    model.assert_near_the_exact_attention(&long, LEN - 70, &what);
                }
                let out = long.out.iter().chain(&short.out);
                outs.push(out.map(|v| v.to_bits()).collect::<Vec<_>>());
            }
            assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "{what}");
        }
    }
}

#[test]
#[should_panic(expected = "onto itself")]
fn a_block_is_not_copied_onto_itself() {
    let mut rng = Rng::new();
    let mut cpu = cpu(Simd::Portable, 1);
    let model = Model::new(&mut rng, SHAPES[0], false, Sight::ALL);
    let mut pool = Pool::new(&mut rng, &mut cpu, &model, 16, 16);
    pool.cache.copy_positions(BlockId(1), BlockId(1), 16);
}

#[test]
fn attention_over_equal_values_returns_them() {
    let mut rng = Rng::new();
    let shape = SHAPES[0];
    let model = Model::new(&mut rng, shape, false, Sight::ALL);
    for simd in simds() {
        let mut sequence = model.sequence(&mut rng, 200);
        for row in sequence.qkv.chunks_mut(shape.qkv_len()) {
            row[shape.qkv_len() - shape.num_kv_heads * shape.value_dim..].fill(0.75);
        }
        let mut cpu = cpu(simd, 2);
        let mut pool = Pool::new(&mut rng, &mut cpu, &model, 16, 200);
        model.step(&mut cpu, &mut pool, &mut [(&mut sequence, 200)]);
        assert!(sequence.out.iter().all(|v| v.to_f32() == 0.75));
    }
}

#[test]
fn a_sequence_with_nan_does_not_affect_the_others() {
    let mut rng = Rng::new();
    let shape = SHAPES[0];
    let mut model = Model::new(&mut rng, shape, false, Sight::ALL);
    for (simd, dtype) in simds_and_dtypes() {
        model.dtype = dtype;
        for bad_value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut bad = model.sequence(&mut rng, 90);
            let mut good = model.sequence(&mut rng, 90);
            bad.qkv[40 * shape.qkv_len()..41 * shape.qkv_len()].fill(bad_value);
            let mut cpu = cpu(simd, 2);
            let mut pool = Pool::new(&mut rng, &mut cpu, &model, 16, 300);
            model.step(&mut cpu, &mut pool, &mut [(&mut bad, 90), (&mut good, 90)]);
            let out_len = shape.out_len();
            assert!(
                bad.out[40 * out_len..].iter().all(|v| !v.is_finite()),
                "{simd} {dtype} {bad_value}"
            );
            model.assert_near_the_exact_attention(&good, 0, "in bad company");
        }
    }
}

#[test]
fn an_empty_step_does_nothing() {
    let mut rng = Rng::new();
    let shape = SHAPES[0];
    let model = Model::new(&mut rng, shape, false, Sight::ALL);
    let mut cpu = cpu(Simd::detect(), 2);
    let mut pool = Pool::new(&mut rng, &mut cpu, &model, 16, 10);
    model.step(&mut cpu, &mut pool, &mut []);
}
