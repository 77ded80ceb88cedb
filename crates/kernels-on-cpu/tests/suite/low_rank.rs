//! Adapters: products of two narrow matrices that are added to rows, factors of the sums, biases, and weights in place
//! of those of the model.

use bytemuck::{Pod, Zeroable};
use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{F32_ROUNDING, Random, assert_close, bits, cases, to_f64, unwritten};

const MAX_PARTS: usize = 3;
const MAX_ROWS: usize = 4;
const RANK_PANEL: usize = 16;
const OUTPUT_PANEL: usize = 64;
const SHRINK_THREADS: usize = 256;
const EXPAND_THREADS: usize = 128;

/// A part in the table of an adapter.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Part {
    a: u64,
    b: u64,
    rank: u32,
    num_inputs: u32,
    first_output: u32,
    num_outputs: u32,
    scale: f32,
    padding: u32,
}

/// A place in the table of an adapter.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Place {
    parts: [Part; MAX_PARTS],
    factors: u64,
    bias: u64,
    replacement: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Tile {
    table: u64,
    first_row: u32,
    num_rows: u32,
}

/// What an adapter adds to some outputs of a place: `scale * x * a^T * b^T`.
struct LowRank {
    rank: usize,
    first_output: usize,
    num_outputs: usize,
    scale: f32,
    /// `[rank, num_inputs]`
    a: Vec<bf16>,
    /// `[num_outputs, rank]`
    b: Vec<bf16>,
}

/// What an adapter does at a place: parts, some of which may be missing, and what happens to the sums.
struct Changes {
    parts: Vec<Option<LowRank>>,
    factors: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

type Adapter = Vec<Changes>;

struct Model {
    num_inputs: usize,
    width: usize,
    /// The outputs that each part of a place begins with, and the width.
    bounds: Vec<usize>,
    max_rank: usize,
}

impl Model {
    fn new(random: &mut Random) -> Self {
        let num_parts = random.between(1, MAX_PARTS);
        let mut bounds = vec![0];
        for _ in 0..num_parts {
            bounds.push(bounds[bounds.len() - 1] + random.between(1, 300));
        }
        Self {
            num_inputs: random.between(1, 400),
            width: bounds[num_parts],
            bounds,
            max_rank: RANK_PANEL * random.between(1, 3),
        }
    }

    fn adapter(&self, random: &mut Random, num_places: usize) -> Adapter {
        let part = |random: &mut Random, outputs: &[usize]| {
            let rank = random.between(1, self.max_rank);
            let num_outputs = outputs[1] - outputs[0];
            (random.between(0, 3) > 0).then(|| LowRank {
                rank,
                first_output: outputs[0],
                num_outputs,
                scale: random.float(2.0),
                a: random.bf16s(rank * self.num_inputs, 1.0),
                b: random.bf16s(num_outputs * rank, 1.0),
            })
        };
        let place = |random: &mut Random| {
            let outputs = self.bounds.windows(2);
            let vector =
                |random: &mut Random| random.coin().then(|| random.floats(self.width, 2.0));
            Changes {
                parts: outputs.map(|outputs| part(random, outputs)).collect(),
                factors: vector(random),
                bias: vector(random),
            }
        };
        (0..num_places).map(|_| place(random)).collect()
    }
}

/// Appends an adapter to the memory of all. Returns where its table begins.
fn pack(memory: &mut Vec<u8>, adapter: &Adapter) -> u64 {
    let mut table = vec![Place::default(); adapter.len()];
    for (place, changes) in table.iter_mut().zip(adapter) {
        let mut vector = |values: &Option<Vec<f32>>| {
            let bytes = values.as_ref().map(|values| bytemuck::cast_slice(values));
            bytes.map_or(0, |bytes| append(memory, bytes))
        };
        (place.factors, place.bias) = (vector(&changes.factors), vector(&changes.bias));
        for (index, part) in changes.parts.iter().enumerate() {
            let Some(part) = part else { continue };
            place.parts[index] = pack_part(memory, part);
        }
    }
    append(memory, bytemuck::cast_slice(&table))
}

fn pack_part(memory: &mut Vec<u8>, part: &LowRank) -> Part {
    let num_inputs = part.a.len() / part.rank;
    let mut a = vec![bf16::ZERO; part.rank.next_multiple_of(RANK_PANEL) * num_inputs];
    for (rank, row) in part.a.chunks(num_inputs).enumerate() {
        for (input, weight) in row.iter().enumerate() {
            let panel = rank / RANK_PANEL * num_inputs;
            a[(panel + input) * RANK_PANEL + rank % RANK_PANEL] = *weight;
        }
    }
    // What lies beyond the last output is never used.
    let mut b = vec![bf16::NAN; part.num_outputs.next_multiple_of(OUTPUT_PANEL) * part.rank];
    for (output, row) in part.b.chunks(part.rank).enumerate() {
        for (rank, weight) in row.iter().enumerate() {
            let panel = output / OUTPUT_PANEL * part.rank;
            b[(panel + rank) * OUTPUT_PANEL + output % OUTPUT_PANEL] = *weight;
        }
    }
    Part {
        a: append(memory, bytemuck::cast_slice(&a)),
        b: append(memory, bytemuck::cast_slice(&b)),
        rank: part.rank as u32,
        num_inputs: num_inputs as u32,
        first_output: part.first_output as u32,
        num_outputs: part.num_outputs as u32,
        scale: part.scale,
        padding: 0,
    }
}

/// Returns where the bytes begin.
fn append(memory: &mut Vec<u8>, bytes: &[u8]) -> u64 {
    memory.resize(memory.len().next_multiple_of(16), 0xff);
    let start = memory.len();
    memory.extend_from_slice(bytes);
    start as u64
}

/// Memory that begins at a multiple of 16 bytes.
fn aligned(bytes: &[u8]) -> Vec<[u64; 2]> {
    let mut units = vec![[0; 2]; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut(&mut units)[..bytes.len()].copy_from_slice(bytes);
    units
}

/// All kernels over tiles. `product` is what is added to `out`, or stored there, for all rows.
fn run(
    random: &mut Random,
    model: &Model,
    memory: &[[u64; 2]],
    (x, tiles): (&[bf16], &[Tile]),
    (place, is_added): (usize, bool),
    product: &[f32],
    out: &mut [f32],
) {
    let num_rows = out.len() / model.width;
    let width = model.width as i32;
    let max_rank = model.max_rank as i32;
    let mut saved = is_added.then(|| unwritten(out.len()));
    if let Some(saved) = &mut saved {
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&mut saved[..]),
            Arg::from(memory),
            Arg::from(tiles),
            (place as i32).into(),
            width.into(),
        ];
        let dims = Dims::new(tiles.len(), random.between(1, 3), random.block(8));
        // SAFETY: the tables are in `memory`, and tiles are rows of `out` and `saved`.
        unsafe { random.launch("low_rank_take", dims, &mut args) };
    }
    for (out, product) in out.iter_mut().zip(product) {
        *out = *product + if is_added { *out } else { 0.0 };
    }
    let mut shrunk = unwritten(num_rows * MAX_PARTS * model.max_rank);
    let mut args = [
        Arg::from(&mut shrunk[..]),
        Arg::from(x),
        Arg::from(memory),
        Arg::from(tiles),
        (place as i32).into(),
        max_rank.into(),
    ];
    let panels = model.max_rank.div_ceil(RANK_PANEL);
    let dims = Dims::new(tiles.len(), MAX_PARTS * panels, SHRINK_THREADS);
    // SAFETY: as above, for rows of `x` and `shrunk`, and no rank is above the largest.
    unsafe { random.launch("low_rank_shrink", dims, &mut args) };
    let mut args = [
        Arg::from(&mut out[..]),
        Arg::from(&shrunk[..]),
        Arg::from(memory),
        Arg::from(tiles),
        (place as i32).into(),
        max_rank.into(),
        width.into(),
    ];
    let blocks = model.width.div_ceil(2 * EXPAND_THREADS);
    let dims = Dims::new(tiles.len(), MAX_PARTS * blocks, EXPAND_THREADS);
    // SAFETY: as above, and all outputs are below the width.
    unsafe { random.launch("low_rank_expand", dims, &mut args) };
    let mut args = [
        Arg::from(&mut out[..]),
        Arg::from(saved.as_deref()),
        Arg::from(memory),
        Arg::from(tiles),
        (place as i32).into(),
        width.into(),
    ];
    let dims = Dims::new(tiles.len(), random.between(1, 3), random.block(8));
    // SAFETY: as above, and vectors are as long as rows.
    unsafe { random.launch("low_rank_finish", dims, &mut args) };
}

#[test]
fn adapters_are_added_to_their_rows_and_to_no_others() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let model = Model::new(random);
        let num_places = random.between(1, 3);
        // Offset 0 stands for nothing.
        let mut memory = vec![0];
        let adapters: Vec<_> = (0..random.between(1, 3))
            .map(|_| model.adapter(random, num_places))
            .collect();
        let tables: Vec<_> = adapters.iter().map(|it| pack(&mut memory, it)).collect();
        let memory = aligned(&memory);
        let (tiles, of_rows) = random_tiles(random, &tables);
        let num_rows = of_rows.len();
        let x = random.bf16s(num_rows * model.num_inputs, 1.0);
        let before = random.floats(num_rows * model.width, 1.0);
        let product = random.floats(num_rows * model.width, 1.0);
        let (place, is_added) = (random.between(0, num_places - 1), random.coin());

        let mut out = before.clone();
        let how = (place, is_added);
        run(
            random,
            &model,
            &memory,
            (&x, &tiles),
            how,
            &product,
            &mut out,
        );
        for (row, adapter) in of_rows.iter().enumerate() {
            let at = row * model.width..(row + 1) * model.width;
            let base = &before[at.clone()];
            let base = |output: usize| {
                if is_added {
                    f64::from(base[output])
                } else {
                    0.0
                }
            };
            let mut sums = to_f64(&product[at.clone()]);
            let x = &x[row * model.num_inputs..][..model.num_inputs];
            let changes = adapter.map(|adapter| &adapters[adapter][place]);
            // How large the sums were on their way.
            let mut size = model.num_inputs as f64;
            for part in changes.into_iter().flat_map(|it| it.parts.iter().flatten()) {
                let shrunk: Vec<f64> = part
                    .a
                    .chunks(model.num_inputs)
                    .map(|row| f64::from(part.scale) * dot(row, x))
                    .collect();
                for (output, row) in part.b.chunks(part.rank).enumerate() {
                    let products = row.iter().zip(&shrunk).map(|(b, x)| b.to_f64() * x);
                    size = size.max(2.0 * products.clone().map(f64::abs).sum::<f64>());
                    sums[part.first_output + output] += products.sum::<f64>();
                }
            }
            let vector = |values: Option<&Vec<f32>>, output: usize, none| {
                values.map_or(none, |values| f64::from(values[output]))
            };
            let expected = sums.iter().enumerate().map(|(output, sum)| {
                let factors = changes.and_then(|it| it.factors.as_ref());
                let bias = changes.and_then(|it| it.bias.as_ref());
                base(output) + sum * vector(factors, output, 1.0) + vector(bias, output, 0.0)
            });
            let expected: Vec<_> = expected.collect();
            assert_close(&out[at.clone()], &expected, 10.0 * F32_ROUNDING, size);
            if changes.is_none() {
                let added = |at: usize| product[at] + if is_added { before[at] } else { 0.0 };
                let plain: Vec<_> = at.clone().map(added).collect();
                assert_eq!(bits(&out[at]), bits(&plain), "a row without an adapter");
            }
        }

        // Each row in a tile of its own has the same bits.
        let alone: Vec<_> = tiles
            .iter()
            .flat_map(|tile| {
                let rows = tile.first_row..tile.first_row + tile.num_rows;
                rows.map(|first_row| Tile {
                    first_row,
                    num_rows: 1,
                    ..*tile
                })
            })
            .collect();
        let mut out_alone = before;
        run(
            random,
            &model,
            &memory,
            (&x, &alone),
            how,
            &product,
            &mut out_alone,
        );
        assert_eq!(bits(&out), bits(&out_alone));
    }
}

fn dot(a: &[bf16], b: &[bf16]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
}

/// Tiles of 12 rows or a few more, and which of the adapters with these tables each row has, if any.
fn random_tiles(random: &mut Random, tables: &[u64]) -> (Vec<Tile>, Vec<Option<usize>>) {
    let mut tiles = Vec::new();
    let mut of_rows = Vec::new();
    while of_rows.len() < 12 {
        of_rows.extend(vec![None; random.between(0, 2)]);
        let adapter = random.between(0, tables.len() - 1);
        let num_rows = random.between(1, MAX_ROWS);
        tiles.push(Tile {
            table: tables[adapter],
            first_row: of_rows.len() as u32,
            num_rows: num_rows as u32,
        });
        of_rows.extend(vec![Some(adapter); num_rows]);
    }
    (tiles, of_rows)
}

/// The flag of a token that was sampled by the previous step.
const IN_FLIGHT: u32 = 1 << 31;

#[test]
fn embeddings_are_changed_and_replaced() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let (vocab_size, width) = (random.between(1, 60), random.between(1, 300));
        let max_rank = RANK_PANEL * random.between(1, 3);
        let mut memory = vec![0];
        let adapters: Vec<_> = (0..2)
            .map(|_| {
                let rank = random.between(1, max_rank);
                let part = random.coin().then(|| LowRank {
                    rank,
                    first_output: 0,
                    num_outputs: width,
                    scale: random.float(2.0),
                    a: random.bf16s(rank * vocab_size, 1.0),
                    b: random.bf16s(width * rank, 1.0),
                });
                let replacement = random.coin().then(|| random.bf16s(vocab_size * width, 1.0));
                (part, replacement)
            })
            .collect();
        let tables: Vec<_> = adapters
            .iter()
            .map(|(part, replacement)| {
                let mut place = Place::default();
                if let Some(part) = part {
                    place.parts[0] = pack_part(&mut memory, part);
                }
                if let Some(rows) = replacement {
                    place.replacement = append(&mut memory, bytemuck::cast_slice(rows));
                }
                append(&mut memory, bytemuck::bytes_of(&place))
            })
            .collect();
        let memory = aligned(&memory);
        let (tiles, of_rows) = random_tiles(random, &tables);
        let num_rows = of_rows.len();
        // One of several ranks has weights of some tokens.
        let first_token = random.between(0, 9);
        let num_all = first_token + vocab_size + random.between(0, 9);
        let tokens = random.indices(num_rows, num_all);
        // Some have just been sampled, and are read from there.
        let sampled = random.indices(3, num_all);
        let (words, tokens): (Vec<u32>, Vec<u32>) = tokens
            .iter()
            .map(|&token| match random.between(0, 5) {
                row @ 0..3 => (IN_FLIGHT | row as u32, sampled[row]),
                _ => (token, token),
            })
            .unzip();
        let before = random.floats(num_rows * width, 1.0);
        let scale = random.float(3.0);
        let mut out = before.clone();
        let mut shrunk = unwritten(num_rows * MAX_PARTS * max_rank);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&mut shrunk[..]),
            Arg::from(&memory[..]),
            Arg::from(&tiles[..]),
            0.into(),
            Arg::from(&words[..]),
            Arg::from(&sampled[..]),
            (first_token as i32).into(),
            (vocab_size as i32).into(),
            scale.into(),
            (max_rank as i32).into(),
            (width as i32).into(),
        ];
        let dims = Dims::new(tiles.len(), random.between(1, 3), random.block(8));
        // SAFETY: the tables are in `memory`, tiles are rows of `out` and `shrunk`, and tokens are in the vocabulary.
        unsafe { random.launch("low_rank_embed", dims, &mut args) };
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&shrunk[..]),
            Arg::from(&memory[..]),
            Arg::from(&tiles[..]),
            0.into(),
            (max_rank as i32).into(),
            (width as i32).into(),
        ];
        let blocks = width.div_ceil(2 * EXPAND_THREADS);
        let dims = Dims::new(tiles.len(), MAX_PARTS * blocks, EXPAND_THREADS);
        // SAFETY: as above.
        unsafe { random.launch("low_rank_expand", dims, &mut args) };
        for (row, adapter) in of_rows.iter().enumerate() {
            let at = row * width..(row + 1) * width;
            let token = (tokens[row] as usize).checked_sub(first_token);
            let token = token.filter(|&token| token < vocab_size);
            let mut expected = to_f64(&before[at.clone()]);
            let scale = f64::from(scale);
            let adapter = adapter.map(|adapter| &adapters[adapter]);
            if let Some(((part, replacement), token)) = adapter.zip(token) {
                if let Some(rows) = replacement {
                    let row = rows[token * width..][..width].iter();
                    expected = row.map(|weight| scale * weight.to_f64()).collect();
                }
                if let Some(part) = part {
                    for (expected, row) in expected.iter_mut().zip(part.b.chunks(part.rank)) {
                        let products = row.iter().zip(part.a.chunks(vocab_size));
                        let sum: f64 = products.map(|(b, a)| b.to_f64() * a[token].to_f64()).sum();
                        *expected += scale * f64::from(part.scale) * sum;
                    }
                }
            }
            assert_close(
                &out[at],
                &expected,
                10.0 * F32_ROUNDING,
                2.0 * max_rank as f64,
            );
        }
    }
}

#[test]
fn the_products_of_rows_with_weights_of_their_own_are_replaced() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let (num_inputs, width) = (random.between(1, 300), random.between(1, 90));
        let mut memory = vec![0];
        let replacements: Vec<_> = (0..2)
            .map(|_| random.coin().then(|| random.bf16s(width * num_inputs, 1.0)))
            .collect();
        let tables: Vec<_> = replacements
            .iter()
            .map(|rows| {
                let rows = rows.as_ref().map(|rows| bytemuck::cast_slice(rows));
                let place = Place {
                    replacement: rows.map_or(0, |rows| append(&mut memory, rows)),
                    ..Place::default()
                };
                append(&mut memory, bytemuck::bytes_of(&place))
            })
            .collect();
        let memory = aligned(&memory);
        let (tiles, of_rows) = random_tiles(random, &tables);
        let x = random.bf16s(of_rows.len() * num_inputs, 1.0);
        let before = random.floats(of_rows.len() * width, 1.0);
        let mut out = before.clone();
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::from(&memory[..]),
            Arg::from(&tiles[..]),
            0.into(),
            (num_inputs as i32).into(),
            (width as i32).into(),
        ];
        let dims = Dims::new(tiles.len(), random.between(1, 5), random.block(4));
        // SAFETY: the tables are in `memory`, tiles are rows of `out` and `x`, and replacements have these widths.
        unsafe { random.launch("low_rank_replace", dims, &mut args) };
        for (row, adapter) in of_rows.iter().enumerate() {
            let at = row * width..(row + 1) * width;
            let expected = match adapter.and_then(|adapter| replacements[adapter].as_ref()) {
                None => to_f64(&before[at.clone()]),
                Some(rows) => {
                    let x = &x[row * num_inputs..][..num_inputs];
                    rows.chunks(num_inputs).map(|row| dot(row, x)).collect()
                }
            };
            assert_close(&out[at], &expected, 10.0 * F32_ROUNDING, num_inputs as f64);
        }
    }
}
