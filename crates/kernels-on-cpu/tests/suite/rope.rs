//! Norms of heads, rotation, and storing keys and values.

use std::f64::consts::PI;

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, cases, e4m3, to_f64, unwritten,
    unwritten_bf16,
};

const NOWHERE: u32 = u32::MAX;

/// The shape of a step and of its model.
struct Case {
    num_rows: usize,
    num_q_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    num_blocks: usize,
    eps: f32,
    qkv: Vec<f32>,
    angles: Vec<f32>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    /// Whether heads are normalised behind their rotation.
    norms_follow: bool,
    /// Of rotated queries, by their positions.
    query_factors: Option<Vec<f32>>,
    positions: Vec<u32>,
    /// Where the queries for the sinks are at most.
    last_for_sinks: u32,
    slots: Vec<u32>,
}

impl Case {
    fn new(random: &mut Random) -> Self {
        let num_kv_heads = random.between(1, 3);
        let num_q_heads = num_kv_heads * random.between(1, 4);
        let head_dim = match random.between(0, 2) {
            0 => random.one_of(&[64, 80, 96, 128, 256]),
            1 => 16 * random.between(1, 16),
            _ => 2 * random.between(1, 128),
        };
        let (num_rows, block_size) = (random.between(1, 5), random.between(1, 17));
        let num_blocks = random.between(1, 3) + num_rows.div_ceil(block_size);
        let num_positions = 50;
        let half_dim = head_dim / 2;
        let mut angles = Vec::new();
        for position in 0..num_positions {
            let angle =
                |i: usize| f64::from(position) * 10.0_f64.powf(-(i as f64) / half_dim as f64);
            angles.extend((0..half_dim).map(|i| angle(i).cos() as f32));
            angles.extend((0..half_dim).map(|i| angle(i).sin() as f32));
        }
        let num_heads = num_q_heads + 2 * num_kv_heads;
        let norm = |random: &mut Random| random.coin().then(|| random.floats(head_dim, 2.0));
        let mut slots = random.different(num_rows, num_blocks * block_size);
        for slot in &mut slots {
            if random.between(0, 4) == 0 {
                *slot = NOWHERE;
            }
        }
        Self {
            num_rows,
            num_q_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_blocks,
            eps: 1e-5,
            qkv: random.floats(num_rows * num_heads * head_dim, 3.0),
            angles,
            q_norm: norm(random),
            k_norm: norm(random),
            norms_follow: random.coin(),
            query_factors: random
                .coin()
                .then(|| random.floats(num_positions as usize, 2.0)),
            positions: random.indices(num_rows, num_positions as usize),
            last_for_sinks: random.between(0, num_positions as usize) as u32,
            slots,
        }
    }

    /// One of its rows by itself.
    fn alone(&self, row: usize) -> Self {
        let width = self.qkv.len() / self.num_rows;
        Self {
            num_rows: 1,
            qkv: self.qkv[row * width..][..width].to_vec(),
            positions: vec![self.positions[row]],
            slots: vec![self.slots[row]],
            angles: self.angles.clone(),
            q_norm: self.q_norm.clone(),
            k_norm: self.k_norm.clone(),
            query_factors: self.query_factors.clone(),
            ..*self
        }
    }

    fn num_vectors(&self) -> usize {
        self.num_blocks * self.num_kv_heads * self.block_size
    }

    /// A head of a row as it should be: queries first, then keys, then values.
    fn head(&self, row: usize, head: usize) -> Vec<f64> {
        self.head_at(self.positions[row], row, head)
    }

    /// The same at another position.
    fn head_at(&self, position: u32, row: usize, head: usize) -> Vec<f64> {
        let (d, half_dim) = (self.head_dim, self.head_dim / 2);
        let num_heads = self.num_q_heads + 2 * self.num_kv_heads;
        let mut x = to_f64(&self.qkv[(row * num_heads + head) * d..][..d]);
        let norm = match head {
            head if head < self.num_q_heads => &self.q_norm,
            head if head < self.num_q_heads + self.num_kv_heads => &self.k_norm,
            _ => return x,
        };
        let normalise = |x: &mut [f64]| {
            let Some(weight) = norm else { return };
            let mean = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
            let scale = 1.0 / (mean + f64::from(self.eps)).sqrt();
            let weighted = x.iter_mut().zip(weight);
            weighted.for_each(|(x, weight)| *x *= scale * f64::from(*weight));
        };
        if !self.norms_follow {
            normalise(&mut x);
        }
        let angles = &self.angles[position as usize * d..][..d];
        let angle = |i: usize| f64::from(angles[i]);
        let rotated = |i: usize| match i.checked_sub(half_dim) {
            None => x[i] * angle(i) - x[i + half_dim] * angle(i + half_dim),
            Some(i) => x[i + half_dim] * angle(i) + x[i] * angle(i + half_dim),
        };
        let mut rotated: Vec<_> = (0..d).map(rotated).collect();
        if self.norms_follow {
            normalise(&mut rotated);
        }
        if let Some(factors) = self
            .query_factors
            .as_ref()
            .filter(|_| head < self.num_q_heads)
        {
            let factor = f64::from(factors[self.positions[row] as usize]);
            rotated.iter_mut().for_each(|x| *x *= factor);
        }
        rotated
    }

    /// The stored vectors as they should be: for each row that is stored, its key and value heads and where they are.
    fn stored(&self) -> Vec<Stored> {
        let mut stored = Vec::new();
        for (row, slot) in self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| **slot != NOWHERE)
        {
            let (block, offset) = (
                *slot as usize / self.block_size,
                *slot as usize % self.block_size,
            );
            for head in 0..self.num_kv_heads {
                stored.push(Stored {
                    vector: (block * self.num_kv_heads + head) * self.block_size + offset,
                    key: self.head(row, self.num_q_heads + head),
                    value: self.head(row, self.num_q_heads + self.num_kv_heads + head),
                });
            }
        }
        stored
    }

    /// Runs a kernel that fills `q` and the cache; scales may be null with bf16.
    fn run<'a>(&'a self, random: &mut Random, kernel: &str, mut outputs: Vec<Arg<'a>>) {
        outputs.extend([
            Arg::from(&self.qkv[..]),
            Arg::from(&self.angles[..]),
            Arg::from(self.q_norm.as_deref()),
            Arg::from(self.k_norm.as_deref()),
            self.eps.into(),
            Arg::from(&self.positions[..]),
            Arg::from(&self.slots[..]),
            (self.num_q_heads as i32).into(),
            (self.num_kv_heads as i32).into(),
            (self.head_dim as i32).into(),
            (self.block_size as i32).into(),
            Arg::from(self.query_factors.as_deref()),
            i32::from(self.norms_follow).into(),
        ]);
        let dims = Dims::new(self.num_rows, random.between(1, 3), random.block(4));
        // SAFETY: `Case::new` makes arrays of these sizes, positions that have angles, and slots of the cache, for
        // which the callers make arrays of `num_vectors` vectors.
        unsafe { random.launch(kernel, dims, &mut outputs) };
    }

    fn run_bf16(&self, random: &mut Random) -> Bf16Outputs {
        let len = self.num_vectors() * self.head_dim;
        let mut queries = self.unwritten_queries();
        let [q, sink_q] = &mut queries;
        let mut cache = [unwritten_bf16(len), unwritten_bf16(len)];
        let [keys, values] = &mut cache;
        let outputs = vec![
            Arg::from(&mut q[..]),
            Arg::from(&mut sink_q[..]),
            self.last_for_sinks.into(),
            Arg::from(&mut keys[..]),
            Arg::from(&mut values[..]),
            Arg::NULL,
            Arg::NULL,
        ];
        self.run(random, "rope_and_store_bf16", outputs);
        Bf16Outputs { queries, cache }
    }

    fn run_codes(&self, random: &mut Random, codes: Codes) -> CodeOutputs {
        let num_vectors = self.num_vectors();
        let mut q = self.unwritten_queries()[0].clone();
        let unwritten_codes = vec![codes.unwritten(); num_vectors * self.head_dim];
        let mut stored = [unwritten_codes.clone(), unwritten_codes];
        let mut scales = [unwritten(num_vectors), unwritten(num_vectors)];
        let ([keys, values], [key_scales, value_scales]) = (&mut stored, &mut scales);
        let outputs = vec![
            Arg::from(&mut q[..]),
            // Sinks that do not shift.
            Arg::NULL,
            0_u32.into(),
            Arg::from(&mut keys[..]),
            Arg::from(&mut values[..]),
            Arg::from(&mut key_scales[..]),
            Arg::from(&mut value_scales[..]),
        ];
        self.run(random, codes.kernel(), outputs);
        CodeOutputs {
            q,
            codes: stored,
            scales,
        }
    }

    /// The queries as they should be, at their positions or at the last one for the sinks.
    fn queries(&self, last: u32) -> Vec<f64> {
        let heads =
            (0..self.num_rows).flat_map(|row| (0..self.num_q_heads).map(move |head| (row, head)));
        heads
            .flat_map(|(row, head)| self.head_at(self.positions[row].min(last), row, head))
            .collect()
    }

    /// Those at their positions, and those for the sinks.
    fn unwritten_queries(&self) -> [Vec<bf16>; 2] {
        [(); 2].map(|()| unwritten_bf16(self.num_rows * self.num_q_heads * self.head_dim))
    }
}

/// The codes of a cache.
#[derive(Clone, Copy, Debug)]
enum Codes {
    Int8,
    Fp8,
}

impl Codes {
    const ALL: [Self; 2] = [Self::Int8, Self::Fp8];

    fn kernel(self) -> &'static str {
        match self {
            Self::Int8 => "rope_and_store_int8",
            Self::Fp8 => "rope_and_store_fp8",
        }
    }

    /// A code that no vector has.
    fn unwritten(self) -> u8 {
        match self {
            Self::Int8 => 0x80,
            Self::Fp8 => 0xff,
        }
    }

    fn largest(self) -> f64 {
        match self {
            Self::Int8 => 127.0,
            Self::Fp8 => 448.0,
        }
    }

    fn value(self, code: u8) -> f64 {
        match self {
            Self::Int8 => f64::from(code.cast_signed()),
            Self::Fp8 => e4m3(code),
        }
    }

    /// The largest distance of a number from its code: half of the distance between two codes.
    fn rounding(self, x: f64) -> f64 {
        match self {
            Self::Int8 => 0.5,
            Self::Fp8 => (x.abs().log2().floor().max(-6.0) - 4.0).exp2(),
        }
    }
}

struct Stored {
    vector: usize,
    key: Vec<f64>,
    value: Vec<f64>,
}

#[derive(PartialEq)]
struct Bf16Outputs {
    /// Those at their positions, and those for the sinks.
    queries: [Vec<bf16>; 2],
    /// Keys and values.
    cache: [Vec<bf16>; 2],
}

struct CodeOutputs {
    q: Vec<bf16>,
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
}

/// The size that errors are relative to: that of the elements before rotation.
const SIZE: f64 = 3.0;

#[test]
fn heads_are_normalised_rotated_and_stored_in_bf16() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let case = Case::new(random);
        let Bf16Outputs { queries, mut cache } = case.run_bf16(random);
        let relative = BF16_ROUNDING + F32_ROUNDING;
        let close = |actual: &[bf16], expected: &[f64]| {
            for (actual, expected) in actual.iter().zip(expected) {
                let error = (actual.to_f64() - expected).abs();
                assert!(error <= relative * expected.abs() + F32_ROUNDING * SIZE);
            }
        };
        for (q, last) in queries.iter().zip([u32::MAX, case.last_for_sinks]) {
            close(q, &case.queries(last));
        }
        for stored in case.stored() {
            for (cache, expected) in cache.iter_mut().zip([&stored.key, &stored.value]) {
                let vector = &mut cache[stored.vector * case.head_dim..][..case.head_dim];
                close(vector, expected);
                vector.fill(bf16::NAN);
            }
        }
        assert!(
            cache.iter().flatten().all(|x| x.is_nan()),
            "a vector that no row has"
        );
    }
}

#[test]
fn heads_are_stored_as_codes_of_8_bits() {
    let random = &mut Random::new();
    for of in cases(40).map(|case| Codes::ALL[case % 2]) {
        let case = Case::new(random);
        let CodeOutputs {
            q,
            mut codes,
            mut scales,
        } = case.run_codes(random, of);
        assert_close(
            &q,
            &case.queries(u32::MAX),
            BF16_ROUNDING + 2.0 * F32_ROUNDING,
            1e-3,
        );
        for stored in case.stored() {
            let expected = [&stored.key, &stored.value];
            for ((codes, scales), expected) in codes.iter_mut().zip(&mut scales).zip(expected) {
                let largest = expected
                    .iter()
                    .fold(0.0_f64, |largest, x| largest.max(x.abs()));
                let scale = f64::from(scales[stored.vector]);
                assert!((scale * of.largest() - largest).abs() <= 4.0 * F32_ROUNDING * SIZE);
                let vector = &mut codes[stored.vector * case.head_dim..][..case.head_dim];
                for (&code, expected) in vector.iter().zip(expected) {
                    let error = (of.value(code) * scale - expected).abs();
                    let rounding = of.rounding(expected / scale) * scale;
                    assert!(
                        error <= 1.0002 * rounding + 4.0 * F32_ROUNDING * SIZE,
                        "{of:?}: {code} * {scale}: {expected}"
                    );
                }
                let has_largest = |code: &u8| of.value(*code).abs() == of.largest();
                assert!(vector.iter().any(has_largest));
                vector.fill(of.unwritten());
                scales[stored.vector] = f32::NAN;
            }
        }
        let is_unwritten = codes.iter().flatten().all(|code| *code == of.unwritten())
            && scales.iter().flatten().all(|scale| scale.is_nan());
        assert!(is_unwritten, "a vector that no row has");
    }
}

#[test]
fn a_row_alone_has_the_same_bits() {
    let random = &mut Random::new();
    for of in cases(10).map(|case| Codes::ALL[case % 2]) {
        let case = Case::new(random);
        let all = case.run_bf16(random);
        let coded = case.run_codes(random, of);
        for row in 0..case.num_rows {
            let alone = case.alone(row);
            let width = case.num_q_heads * case.head_dim;
            let [q, sink_q] = all.queries.each_ref().map(|q| &q[row * width..][..width]);
            let outputs = alone.run_bf16(random);
            assert_eq!(outputs.queries, [q, sink_q]);
            let coded_alone = alone.run_codes(random, of);
            assert_eq!(coded_alone.q, q);
            for vector in alone.stored().iter().map(|stored| stored.vector) {
                let at = vector * case.head_dim..(vector + 1) * case.head_dim;
                for i in 0..2 {
                    assert_eq!(outputs.cache[i][at.clone()], all.cache[i][at.clone()]);
                    assert_eq!(coded_alone.codes[i][at.clone()], coded.codes[i][at.clone()]);
                    assert_eq!(coded_alone.scales[i][vector], coded.scales[i][vector]);
                }
            }
        }
    }
}

#[test]
fn vectors_without_a_scale_are_zero_or_not_finite() {
    let random = &mut Random::new();
    let elements = [
        (0.0, Some(0.0)),
        (1e-40, Some(0.0)),
        (f32::NAN, None),
        (f32::INFINITY, None),
        (-f32::INFINITY, None),
    ];
    let cases = Codes::ALL.map(|of| elements.map(|element| (of, element)));
    for (of, (element, expected)) in cases.into_iter().flatten() {
        let mut case = Case::new(random);
        case.slots.fill(NOWHERE);
        case.slots[0] = 0;
        // The last value head of the first row.
        let end = case.qkv.len() / case.num_rows;
        let value = &mut case.qkv[end - case.head_dim..end];
        value.fill(if expected.is_some() { element } else { 1.0 });
        value[case.head_dim / 2] = element;
        let CodeOutputs { codes, scales, .. } = case.run_codes(random, of);
        let vector = (case.num_kv_heads - 1) * case.block_size;
        let codes = &codes[1][vector * case.head_dim..][..case.head_dim];
        if expected.is_some() {
            let are_zero = codes.iter().all(|code| of.value(*code) == 0.0);
            assert!(are_zero, "{element}: {codes:?}");
        }
        let scale = scales[1][vector];
        assert!(
            expected.map_or(scale.is_nan(), |expected| scale == expected),
            "{element}: {scale}"
        );
    }
}

#[test]
fn angles_turn_by_what_they_say() {
    let random = &mut Random::new();
    // A quarter turn at position 1: (x, y) becomes (-y, x).
    let mut case = Case::new(random);
    (case.q_norm, case.k_norm, case.query_factors) = (None, None, None);
    let half_dim = case.head_dim / 2;
    let quarter = [(PI / 2.0).cos() as f32, (PI / 2.0).sin() as f32];
    case.angles[2 * half_dim..][..half_dim].fill(quarter[0]);
    case.angles[3 * half_dim..][..half_dim].fill(quarter[1]);
    case.positions.fill(1);
    let [q, _] = case.run_bf16(random).queries;
    let (low, high) = case.qkv[..case.head_dim].split_at(half_dim);
    let turned = high
        .iter()
        .map(|y| -f64::from(*y))
        .chain(low.iter().map(|x| f64::from(*x)));
    let turned: Vec<f64> = turned.collect();
    assert_close(
        &q[..case.head_dim],
        &turned,
        BF16_ROUNDING + F32_ROUNDING,
        1e-3,
    );
}
