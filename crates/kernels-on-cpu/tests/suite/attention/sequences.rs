//! Sequences with random queries, keys and values, and their attention in f64.

use std::ops::Range;

use half::bf16;

use crate::support::{Random, e4m3, is_nan_e4m3};

/// The elements of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Bf16,
    Int8,
    Fp8,
}

impl Dtype {
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Int8, Self::Fp8];

    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }

    /// Whether there are codes of one byte, with scales.
    pub fn has_codes(self) -> bool {
        self != Self::Bf16
    }

    pub fn size(self) -> usize {
        if self.has_codes() { 1 } else { 2 }
    }
}

/// The heads of a layer, what they see, and how the cache stores them.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Key/value heads; with latent attention, groups of query heads, which all share the keys.
    pub num_kv_heads: usize,
    /// Query heads of a key/value head.
    pub group: usize,
    /// Elements of a query and a key.
    pub head_dim: usize,
    /// Latent attention: the elements of a value, which are the first of a key.
    pub latent_dim: Option<usize>,
    pub block_size: usize,
    /// 0: none.
    pub window: usize,
    pub num_sinks: usize,
    /// Whether other queries meet the sinks.
    pub shifts_sinks: bool,
    pub scale: f32,
    pub soft_cap: Option<f32>,
    /// The attention-sink logit of the first head, if heads have one.
    pub first_sink_logit: Option<f32>,
    /// What scores of the first head lose for a position between key and query, if heads have linear biases.
    pub first_slope: Option<f32>,
    pub dtype: Dtype,
}

impl Shape {
    pub fn random(random: &mut Random) -> Self {
        let head_dim = match random.between(0, 5) {
            0 => 2 * random.between(1, 128),
            1 => random.one_of(&[80, 96, 256]),
            2 => 128,
            _ => random.one_of(&[16, 64]),
        };
        Self {
            num_kv_heads: random.between(1, 3),
            group: random.one_of(&[1, 2, 3, 4, 7, 8, 20]),
            head_dim,
            latent_dim: None,
            block_size: match random.between(0, 2) {
                0 => random.between(1, 40),
                _ => random.one_of(&[16, 32, 64, 128]),
            },
            window: match random.between(0, 2) {
                0 => random.between(1, 400),
                1 => random.one_of(&[1, 64, 128, 256]),
                _ => 0,
            },
            num_sinks: if random.coin() {
                0
            } else {
                match random.between(0, 3) {
                    0 => random.between(80, 300),
                    _ => random.between(1, 80),
                }
            },
            shifts_sinks: random.coin(),
            // Some distributions are flat, others have peaks.
            scale: random.one_of(&[0.5, 2.0, 8.0]) / (head_dim as f32).sqrt(),
            soft_cap: random.one_of(&[None, None, Some(1.5)]),
            // Small ones, and some that leave little to the positions.
            first_sink_logit: random.one_of(&[None, Some(-2.0), Some(6.0)]),
            // Kernels of larger heads have none.
            first_slope: match head_dim {
                0..=128 => random.one_of(&[None, Some(0.004), Some(0.25)]),
                _ => None,
            },
            dtype: random.one_of(&Dtype::ALL),
        }
    }

    /// One of latent attention.
    pub fn random_latent(random: &mut Random) -> Self {
        let (latent_dim, rotary_dim) = match random.between(0, 3) {
            0 => (512, 64),
            1 => (2 * random.between(1, 256), 2 * random.between(1, 32)),
            _ => (8 * random.between(1, 16), 8 * random.between(1, 4)),
        };
        let shape = Self::random(random);
        let head_dim = latent_dim + rotary_dim;
        Self {
            group: random.one_of(&[1, 3, 4, 8, 15, 16]),
            head_dim,
            latent_dim: Some(latent_dim),
            scale: shape.scale * (shape.head_dim as f32 / head_dim as f32).sqrt(),
            dtype: Dtype::Bf16,
            shifts_sinks: false,
            first_slope: None,
            ..shape
        }
    }

    /// Elements of a value.
    pub fn value_dim(&self) -> usize {
        self.latent_dim.unwrap_or(self.head_dim)
    }

    /// Heads that the cache has.
    pub fn num_cached_heads(&self) -> usize {
        match self.latent_dim {
            Some(_) => 1,
            None => self.num_kv_heads,
        }
    }

    pub fn num_q_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }

    /// The attention-sink logit of a head.
    pub fn sink_logit(&self, head: usize) -> Option<f32> {
        self.first_sink_logit
            .map(|first| first + 0.75 * (head % 5) as f32)
    }

    /// What a score of a head loses for a position between key and query.
    pub fn slope(&self, head: usize) -> Option<f32> {
        self.first_slope.map(|first| first / (1 + head) as f32)
    }

    pub fn q_len(&self) -> usize {
        self.num_q_heads() * self.head_dim
    }

    pub fn out_len(&self) -> usize {
        self.num_q_heads() * self.value_dim()
    }

    pub fn sees(&self, query: usize, position: usize) -> bool {
        position <= query
            && (self.window == 0 || position + self.window > query || position < self.num_sinks)
    }

    /// Whether a row of `rows` sees one of `positions`.
    pub fn any_sees(&self, rows: &Range<usize>, mut positions: Range<usize>) -> bool {
        positions.any(|position| rows.clone().any(|row| self.sees(row, position)))
    }
}

/// Keys or values of a sequence, `[heads of the cache][len][head_dim]`.
pub struct Vectors {
    /// Bits of bf16, or codes.
    pub elements: Vec<i16>,
    /// Of codes, `[heads of the cache][len]`; else ones.
    pub scales: Vec<f32>,
    dtype: Dtype,
}

impl Vectors {
    fn random(random: &mut Random, shape: &Shape, len: usize) -> Self {
        let num_vectors = shape.num_cached_heads() * len;
        let num_elements = num_vectors * shape.head_dim;
        // Vectors of codes are about as large as those of bf16.
        let scales = |random: &mut Random, largest: f32| {
            let scales = (0..num_vectors).map(|_| (random.float(0.7) + 0.8) / largest);
            scales.collect()
        };
        let (elements, scales) = match shape.dtype {
            Dtype::Int8 => {
                let codes = random.indices(num_elements, 255);
                let codes = codes.iter().map(|code| *code as i16 - 127);
                (codes.collect(), scales(random, 127.0))
            }
            Dtype::Fp8 => {
                let codes = random.indices(num_elements, 256);
                let codes = codes.iter().map(|code| *code as u8);
                let codes = codes.map(|code| if is_nan_e4m3(code) { code - 1 } else { code });
                (codes.map(i16::from).collect(), scales(random, 448.0))
            }
            Dtype::Bf16 => {
                let x = random.bf16s(num_elements, 1.0);
                let bits = x.iter().map(|x| x.to_bits() as i16);
                (bits.collect(), vec![1.0; num_vectors])
            }
        };
        Self {
            elements,
            scales,
            dtype: shape.dtype,
        }
    }

    fn element(&self, vector: usize, head_dim: usize, dim: usize) -> f64 {
        let element = self.elements[vector * head_dim + dim];
        let scale = f64::from(self.scales[vector]);
        match self.dtype {
            Dtype::Int8 => f64::from(element) * scale,
            Dtype::Fp8 => e4m3(element as u8) * scale,
            Dtype::Bf16 => bf16::from_bits(element as u16).to_f64(),
        }
    }
}

pub struct Sequence {
    pub len: usize,
    /// `[len][q_len]`
    pub q: Vec<bf16>,
    /// The same for the sinks, where they shift.
    pub sink_q: Vec<bf16>,
    pub keys: Vectors,
    /// Not read with latent attention.
    pub values: Vectors,
}

/// An element of the attention.
pub struct Expected {
    pub out: f64,
    /// The weighted sum of the magnitudes of the values.
    pub magnitude: f64,
}

impl Sequence {
    pub fn random(random: &mut Random, shape: &Shape, len: usize) -> Self {
        Self {
            len,
            q: random.bf16s(len * shape.q_len(), 1.0),
            sink_q: match shape.shifts_sinks {
                true => random.bf16s(len * shape.q_len(), 1.0),
                false => Vec::new(),
            },
            keys: Vectors::random(random, shape, len),
            values: Vectors::random(random, shape, len),
        }
    }

    /// The attention of a head at a position.
    pub fn attention(&self, shape: &Shape, position: usize, head: usize) -> Vec<Expected> {
        let head_dim = shape.head_dim;
        let query = |q: &'_ [bf16]| {
            let first = position * shape.q_len() + head * head_dim;
            q[first..][..head_dim].to_vec()
        };
        let q = query(&self.q);
        let sink_q = shape.shifts_sinks.then(|| query(&self.sink_q));
        let first_vector = head * shape.num_cached_heads() / shape.num_q_heads() * self.len;
        let values = match shape.latent_dim {
            Some(_) => &self.keys,
            None => &self.values,
        };
        let seen: Vec<usize> = (0..=position)
            .filter(|seen| shape.sees(position, *seen))
            .collect();
        let score = |seen: &usize| {
            let sink_q = sink_q.as_ref().filter(|_| *seen < shape.num_sinks);
            let products =
                sink_q.unwrap_or(&q).iter().enumerate().map(|(dim, q)| {
                    q.to_f64() * self.keys.element(first_vector + seen, head_dim, dim)
                });
            let score = products.sum::<f64>() * f64::from(shape.scale);
            let score = shape.soft_cap.map_or(score, |cap| {
                let cap = f64::from(cap);
                cap * (score / cap).tanh()
            });
            let slope = shape.slope(head).map_or(0.0, f64::from);
            score - slope * (position - seen) as f64
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sink_logit = shape.sink_logit(head).map(f64::from);
        let of_no_position = sink_logit.map_or(0.0, |logit| (logit - max).exp());
        let sum = weights.iter().sum::<f64>() + of_no_position;
        let of_dim = |dim| {
            let mut expected = Expected {
                out: 0.0,
                magnitude: 0.0,
            };
            for (seen, weight) in seen.iter().zip(&weights) {
                let term = weight / sum * values.element(first_vector + seen, head_dim, dim);
                expected.out += term;
                expected.magnitude += term.abs();
            }
            expected
        };
        (0..shape.value_dim()).map(of_dim).collect()
    }
}
