//! What latent attention stores of a token, and its queries and results on their way to the heads' matrices.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, bits, cases, unwritten, unwritten_bf16,
};

const NOWHERE: u32 = u32::MAX;

/// Rows of a step, and the heads of a chunk.
#[derive(Clone, Copy, Debug)]
struct Shape {
    num_rows: usize,
    all_heads: usize,
    /// The first head of the chunk, and how many it has.
    first: usize,
    num_heads: usize,
    content_dim: usize,
    latent_dim: usize,
    rotary_dim: usize,
}

impl Shape {
    fn random(random: &mut Random) -> Self {
        let (first, num_heads) = (random.between(0, 3), random.between(1, 5));
        Self {
            num_rows: random.between(1, 5),
            all_heads: first + num_heads + random.between(0, 3),
            first,
            num_heads,
            content_dim: random.between(1, 70),
            latent_dim: 2 * random.between(1, 100),
            rotary_dim: 2 * random.between(1, 32),
        }
    }

    fn key_dim(&self) -> usize {
        self.latent_dim + self.rotary_dim
    }

    fn query_dim(&self) -> usize {
        self.content_dim + self.rotary_dim
    }

    /// Queries of all heads of the step.
    fn queries(&self, random: &mut Random) -> Vec<f32> {
        random.floats(self.num_rows * self.all_heads * self.query_dim(), 2.0)
    }

    fn query<'q>(&self, q: &'q [f32], row: usize, head: usize) -> &'q [f32] {
        let query = row * self.all_heads + self.first + head;
        &q[query * self.query_dim()..][..self.query_dim()]
    }

    fn grid(&self, random: &mut Random) -> Dims {
        Dims::new(self.num_rows, random.between(1, 3), random.block(4))
    }

    /// Each row and head of the chunk, in this order.
    fn rows_and_heads(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (num_rows, num_heads) = (self.num_rows, self.num_heads);
        (0..num_rows).flat_map(move |row| (0..num_heads).map(move |head| (row, head)))
    }
}

/// Angles of some positions, and the positions of rows.
struct Places {
    angles: Vec<f32>,
    positions: Vec<u32>,
    rotary_dim: usize,
}

impl Places {
    fn random(random: &mut Random, num_rows: usize, rotary_dim: usize) -> Self {
        let num_positions = random.between(1, 9);
        let angles = (0..num_positions).flat_map(|_| {
            let angles = random.floats(rotary_dim / 2, 3.0);
            let cosines: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
            let sines = angles.into_iter().map(f32::sin);
            cosines.into_iter().chain(sines).collect::<Vec<_>>()
        });
        Self {
            angles: angles.collect(),
            positions: random.indices(num_rows, num_positions),
            rotary_dim,
        }
    }

    /// `x` at the position of a row: each of its pairs is a complex number, which is turned.
    fn rotated(&self, row: usize, x: &[f32]) -> Vec<f64> {
        let half = self.rotary_dim / 2;
        let first = self.positions[row] as usize * self.rotary_dim;
        let angles = &self.angles[first..][..self.rotary_dim];
        let [x, angles] = [x, angles].map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        let (low, high) = x.split_at(half);
        let (cosines, sines) = angles.split_at(half);
        let of_pair = |i: usize| {
            [
                low[i] * cosines[i] - high[i] * sines[i],
                high[i] * cosines[i] + low[i] * sines[i],
            ]
        };
        let (low, high): (Vec<_>, Vec<_>) = (0..half).map(of_pair).map(|[x, y]| (x, y)).unzip();
        [low, high].concat()
    }
}

#[test]
fn latents_are_normalised_and_shared_keys_rotated() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let shape = Shape::random(random);
        let (num_rows, key_dim) = (shape.num_rows, shape.key_dim());
        let kv = random.floats(num_rows * key_dim, 2.0);
        let weight = random.floats(shape.latent_dim, 1.5);
        let eps = random.one_of(&[1e-6, 1e-2]);
        let places = Places::random(random, num_rows, shape.rotary_dim);
        let num_slots = num_rows + random.between(0, 4);
        let mut slots = random.different(num_rows, num_slots);
        if random.coin() {
            slots[random.between(0, num_rows - 1)] = NOWHERE;
        }
        let mut keys = unwritten_bf16(num_slots * key_dim);
        let mut args = [
            Arg::from(&mut keys[..]),
            Arg::from(&kv[..]),
            Arg::from(&weight[..]),
            eps.into(),
            Arg::from(&places.angles[..]),
            Arg::from(&places.positions[..]),
            Arg::from(&slots[..]),
            (shape.latent_dim as i32).into(),
            (shape.rotary_dim as i32).into(),
        ];
        // SAFETY: there is a slot for each row, and angles for each position.
        unsafe { random.launch("store_latents", Dims::new(num_rows, 1, 128), &mut args) };
        let mut is_written = vec![false; num_slots];
        for (row, slot) in slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| **slot != NOWHERE)
        {
            let (latent, rotary) = kv[row * key_dim..][..key_dim].split_at(shape.latent_dim);
            let square = |x: &f32| f64::from(*x) * f64::from(*x);
            let mean = latent.iter().map(square).sum::<f64>() / shape.latent_dim as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            let normed = latent.iter().zip(&weight);
            let normed = normed.map(|(x, weight)| f64::from(*x) * scale * f64::from(*weight));
            let expected: Vec<f64> = normed.chain(places.rotated(row, rotary)).collect();
            let stored = &keys[*slot as usize * key_dim..][..key_dim];
            assert_close(stored, &expected, BF16_ROUNDING, 1e-3);
            is_written[*slot as usize] = true;
        }
        for (stored, is_written) in keys.chunks(key_dim).zip(is_written) {
            assert!(
                is_written || stored.iter().all(|x| x.is_nan()),
                "a slot of no row"
            );
        }
    }
}

#[test]
fn queries_are_split_by_heads() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let shape = Shape::random(random);
        let q = shape.queries(random);
        let width = shape.content_dim;
        let mut by_heads = unwritten_bf16(shape.num_heads * shape.num_rows * width);
        let mut args = [
            Arg::from(&mut by_heads[..]),
            Arg::from(&q[..]),
            (shape.first as i32).into(),
            (shape.num_heads as i32).into(),
            (shape.all_heads as i32).into(),
            (width as i32).into(),
            (shape.query_dim() as i32).into(),
        ];
        let dims = shape.grid(random);
        // SAFETY: the sizes are those of the slices.
        unsafe { random.launch("split_queries", dims, &mut args) };
        for (row, head) in shape.rows_and_heads() {
            let content = &shape.query(&q, row, head)[..width];
            let expected: Vec<bf16> = content.iter().copied().map(bf16::from_f32).collect();
            assert_eq!(
                by_heads[(head * shape.num_rows + row) * width..][..width],
                expected
            );
        }
    }
}

#[test]
fn queries_of_latents_are_joined_with_rotated_ones() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let shape = Shape::random(random);
        let (num_rows, key_dim) = (shape.num_rows, shape.key_dim());
        let q = shape.queries(random);
        let latents = random.floats(shape.num_heads * num_rows * shape.latent_dim, 2.0);
        let places = Places::random(random, num_rows, shape.rotary_dim);
        let mut keyed = unwritten_bf16(num_rows * shape.num_heads * key_dim);
        let mut args = vec![
            Arg::from(&mut keyed[..]),
            Arg::from(&latents[..]),
            Arg::from(&q[..]),
            Arg::from(&places.angles[..]),
            Arg::from(&places.positions[..]),
        ];
        let sizes = [
            shape.first,
            shape.num_heads,
            shape.all_heads,
            shape.content_dim,
            shape.latent_dim,
            shape.rotary_dim,
        ];
        args.extend(sizes.map(|size| Arg::from(size as i32)));
        let dims = shape.grid(random);
        // SAFETY: the sizes are those of the slices, and there are angles for each position.
        unsafe { random.launch("rotate_queries", dims, &mut args) };
        for ((row, head), keyed) in shape.rows_and_heads().zip(keyed.chunks(key_dim)) {
            let latent = &latents[(head * num_rows + row) * shape.latent_dim..][..shape.latent_dim];
            let rotary = &shape.query(&q, row, head)[shape.content_dim..];
            let latent = latent.iter().map(|x| f64::from(*x));
            let expected: Vec<f64> = latent.chain(places.rotated(row, rotary)).collect();
            assert_close(keyed, &expected, BF16_ROUNDING + F32_ROUNDING, 1e-3);
        }
    }
}

#[test]
fn results_are_split_by_heads_and_values_joined() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let shape = Shape::random(random);
        let (num_rows, num_heads) = (shape.num_rows, shape.num_heads);
        let width = shape.latent_dim;
        let attended = random.bf16s(num_rows * num_heads * width, 2.0);
        let mut by_heads = unwritten_bf16(attended.len());
        let mut args = [
            Arg::from(&mut by_heads[..]),
            Arg::from(&attended[..]),
            (num_heads as i32).into(),
            (width as i32).into(),
        ];
        let dims = shape.grid(random);
        // SAFETY: the sizes are those of the slices.
        unsafe { random.launch("split_attended", dims, &mut args) };
        for ((row, head), expected) in shape.rows_and_heads().zip(attended.chunks(width)) {
            let split = &by_heads[(head * num_rows + row) * width..][..width];
            assert_eq!(split, expected);
        }

        let width = shape.content_dim;
        let values = random.floats(num_heads * num_rows * width, 2.0);
        let mut out = unwritten_bf16(num_rows * shape.all_heads * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&values[..]),
            (shape.first as i32).into(),
            (num_heads as i32).into(),
            (shape.all_heads as i32).into(),
            (width as i32).into(),
        ];
        let dims = shape.grid(random);
        // SAFETY: as above.
        unsafe { random.launch("join_values", dims, &mut args) };
        for (index, out) in out.chunks(width).enumerate() {
            let (row, head) = (index / shape.all_heads, index % shape.all_heads);
            match head
                .checked_sub(shape.first)
                .filter(|head| *head < num_heads)
            {
                Some(head) => {
                    let values = &values[(head * num_rows + row) * width..][..width];
                    let expected: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
                    assert_eq!(out, expected);
                }
                None => assert!(out.iter().all(|x| x.is_nan()), "a head of no chunk"),
            }
        }
    }
}

#[test]
fn tiles_have_each_row_of_each_head_once() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_heads, num_rows) = (random.between(1, 9), random.between(1, 300));
        let (first, tile_rows) = (random.between(0, 9), random.one_of(&[8, 16, 32, 64]));
        let num_tiles = num_heads * num_rows.div_ceil(tile_rows);
        let mut words = unwritten(4 * (num_tiles + 1));
        let mut args = [
            Arg::from(&mut words[..]),
            (first as i32).into(),
            (num_rows as i32).into(),
            (tile_rows as i32).into(),
        ];
        let dims = Dims::new(num_heads, 1, random.block(3));
        // SAFETY: there are so many tiles.
        unsafe { random.launch("tile_heads", dims, &mut args) };
        let (words, behind) = words.split_at(4 * num_tiles);
        assert_eq!(bits(behind), bits(&unwritten(4)));
        let mut expected = Vec::new();
        for head in 0..num_heads {
            for row in (0..num_rows).step_by(tile_rows) {
                let len = tile_rows.min(num_rows - row);
                expected.extend([first + head, head * num_rows + row, len, 0].map(|x| x as u32));
            }
        }
        assert_eq!(bits(words), expected, "{num_heads} heads, {num_rows} rows");
    }
}
