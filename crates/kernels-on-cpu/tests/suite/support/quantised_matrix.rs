//! Random quantised matrices.

use half::f16;

use crate::support::{Random, e4m3, is_nan_e4m3};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Int4,
    Int8,
    Fp8,
    E2m1,
}

/// Twice the floats of 4 bits.
const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Kind {
    fn bits(self) -> usize {
        match self {
            Self::Int4 | Self::E2m1 => 4,
            Self::Int8 | Self::Fp8 => 8,
        }
    }

    fn random_code(self, random: &mut Random) -> i8 {
        match self {
            Self::Int4 => random.between(0, 15) as i8 - 8,
            Self::Int8 => random.between(0, 255) as u8 as i8,
            Self::Fp8 => match random.between(0, 255) as u8 {
                code if is_nan_e4m3(code) => 0,
                code => code as i8,
            },
            Self::E2m1 => random.between(0, 15) as i8,
        }
    }

    fn value(self, code: i8) -> f64 {
        match self {
            Self::Int4 | Self::Int8 => f64::from(code),
            Self::Fp8 => e4m3(code as u8),
            Self::E2m1 => f64::from(TWICE_E2M1[code as usize]),
        }
    }

    /// Added to a code in 4 bits.
    fn bias(self) -> i32 {
        match self {
            Self::Int4 => 8,
            Self::Int8 | Self::Fp8 | Self::E2m1 => 0,
        }
    }
}

/// What matrices that are packed together have in common.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub kind: Kind,
    pub group_size: usize,
    has_offsets: bool,
    /// The size of scales, in their unit.
    size: f32,
}

impl Format {
    pub fn random(random: &mut Random, kinds: &[Kind], k: usize) -> Self {
        Self {
            kind: random.one_of(kinds),
            group_size: random.one_of(&[32, 64, 96, 128, k]),
            has_offsets: random.coin(),
            // Subnormal halves too.
            size: random.one_of(&[1e-5, 40.0]),
        }
    }
}

/// A quantised matrix, as `kernels/quantised.cuh` packs it.
pub struct Matrix {
    pub format: Format,
    pub n: usize,
    pub k: usize,
    /// `[n][k]`
    codes: Vec<i8>,
    pub packed: Vec<u32>,
    /// `[ceil(n / 16)][num_groups][16]`
    pub scales: Vec<f16>,
    pub offsets: Option<Vec<f16>>,
}

/// The unit of stored scales and offsets.
const UNIT: f64 = 1.0 / 4096.0;

impl Matrix {
    pub fn new(random: &mut Random, format: Format, n: usize, k: usize) -> Self {
        let Format {
            kind,
            group_size,
            has_offsets,
            size,
        } = format;
        let (num_groups, num_row_tiles) = (k.div_ceil(group_size), n.div_ceil(16));
        let codes: Vec<i8> = (0..n * k).map(|_| kind.random_code(random)).collect();
        let stored = |random: &mut Random, size: f32| -> Vec<f16> {
            let sizes = random.floats(num_row_tiles * num_groups * 16, size);
            sizes.into_iter().map(f16::from_f32).collect()
        };
        Self {
            format,
            n,
            k,
            packed: pack(&codes, kind, n, k),
            codes,
            scales: stored(random, size),
            offsets: has_offsets.then(|| stored(random, 4.0 * size)),
        }
    }

    /// The same matrix of e2m1 numbers, as integers of 8 bits.
    pub fn in_eight_bits(&self) -> Self {
        let kind = Kind::Int8;
        let value = |&code: &i8| self.format.kind.value(code) as i8;
        let codes: Vec<_> = self.codes.iter().map(value).collect();
        Self {
            format: Format {
                kind,
                ..self.format
            },
            packed: pack(&codes, kind, self.n, self.k),
            codes,
            scales: self.scales.clone(),
            offsets: self.offsets.clone(),
            ..*self
        }
    }

    /// A weight's two parts: its code with the scale, and its offset.
    pub fn parts(&self, row: usize, column: usize) -> [f64; 2] {
        let num_groups = self.k.div_ceil(self.format.group_size);
        let at = (row / 16 * num_groups + column / self.format.group_size) * 16 + row % 16;
        let offsets = self.offsets.as_ref();
        let offset = offsets.map_or(0.0, |offsets| offsets[at].to_f64());
        let code = self.format.kind.value(self.codes[row * self.k + column]);
        [self.scales[at].to_f64() * code * UNIT, offset * UNIT]
    }
}

/// Codes in tiles of 16 rows, in the order of the tensor cores' operands.
fn pack(codes: &[i8], kind: Kind, n: usize, k: usize) -> Vec<u32> {
    let bits = kind.bits();
    let tile_columns = if bits == 4 { 64 } else { 32 };
    let code = |row: usize, column: usize| {
        let is_inside = row < n && column < k;
        i32::from(if is_inside {
            codes[row * k + column]
        } else {
            0
        })
    };
    let mut words = Vec::new();
    for row_tile in 0..n.div_ceil(16) {
        for tile in 0..k.div_ceil(tile_columns) {
            for lane in 0..32 {
                let (g, t) = (lane / 4, lane % 4);
                // The two rows of the lane, and four consecutive columns.
                let rows = [16 * row_tile + g, 16 * row_tile + g + 8];
                for word in 0..4 {
                    let (half, step) = if bits == 4 {
                        (word / 2, word % 2)
                    } else {
                        (0, word / 2)
                    };
                    let column = tile * tile_columns + 32 * half + 8 * t + 4 * step;
                    let mut packed = 0;
                    if bits == 4 {
                        for i in 0..8 {
                            let (row, pair, element) = (rows[i % 2], i / 2 % 2, i / 4);
                            let code = code(row, column + 2 * pair + element) + kind.bias();
                            packed |= (code as u32) << (4 * (i % 4) + 16 * element);
                        }
                    } else {
                        for i in 0..4 {
                            let (row, element) = (rows[i % 2], i / 2);
                            let code = code(row, column + 2 * (word % 2) + element) as u8;
                            packed |= u32::from(code) << (8 * i);
                        }
                    }
                    words.push(packed);
                }
            }
        }
    }
    words
}
