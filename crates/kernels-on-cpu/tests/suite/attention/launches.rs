//! A step's arrays, and the launches of the kernels.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use super::sequences::{Sequence, Shape, Vectors};
use crate::support::{Random, unwritten, unwritten_bf16};

/// Rows of a sequence that a step computes; the cache holds no later ones.
pub struct Span<'a> {
    pub sequence: &'a Sequence,
    pub rows: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Context,
    /// For GPUs with little shared memory.
    SmallContext,
    Generation,
}

/// `AttentionTile` in kernels/paged_attention.cuh.
#[repr(C, align(16))]
#[derive(Clone, Copy, Default)]
struct Tile {
    first_row: u32,
    num_rows: u32,
    first_query: u32,
    position: u32,
    block_table: u32,
    split: u32,
    first_partial: u32,
    table_stride: u32,
}

/// `AttentionCall`. Pointers are numbers here.
#[repr(C)]
#[derive(Clone, Copy)]
struct Call {
    out: usize,
    partials: usize,
    q: usize,
    sink_q: usize,
    keys: usize,
    values: usize,
    key_scales: usize,
    value_scales: usize,
    block_tables: usize,
    tiles: usize,
    counts: usize,
    sink_logits: usize,
    exponent_scale: f32,
    num_kv_heads: i32,
    group: i32,
    head_dim: i32,
    block_size: i32,
    block_multiplier: u32,
    block_shift: u32,
    window: i32,
    num_sinks: i32,
    cap_shrink: f32,
    cap_grow: f32,
    key_dim: i32,
    slopes: usize,
}

// SAFETY: all fields are numbers, of which zero is one, and there are no bytes between them.
unsafe impl Zeroable for Call {}
// SAFETY: as above.
unsafe impl Pod for Call {}

const NOWHERE: u32 = u32::MAX;
const SPLIT_LEN: usize = 256;
const WARP_QUERIES: usize = 16;

/// Keys or values of all blocks, at a multiple of 16 bytes.
struct Pool {
    words: Vec<u128>,
    scales: Vec<f32>,
}

impl Pool {
    /// Nothing that is finite: NaN, or codes with NaN as scales.
    fn new(shape: &Shape, num_blocks: usize) -> Self {
        let num_vectors = num_blocks * shape.num_cached_heads() * shape.block_size;
        let num_bytes = num_vectors * shape.head_dim * shape.dtype.size();
        Self {
            words: vec![u128::MAX; num_bytes.div_ceil(16)],
            scales: if shape.dtype.has_codes() {
                unwritten(num_vectors)
            } else {
                Vec::new()
            },
        }
    }

    fn store(&mut self, shape: &Shape, vector: usize, from: &Vectors, from_vector: usize) {
        let head_dim = shape.head_dim;
        let elements = &from.elements[from_vector * head_dim..][..head_dim];
        if shape.dtype.has_codes() {
            self.scales[vector] = from.scales[from_vector];
            let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut self.words);
            for (code, element) in codes[vector * head_dim..].iter_mut().zip(elements) {
                *code = *element as i8;
            }
        } else {
            let bits: &mut [i16] = bytemuck::cast_slice_mut(&mut self.words);
            bits[vector * head_dim..][..head_dim].copy_from_slice(elements);
        }
    }

    fn scales_address(&self) -> usize {
        if self.scales.is_empty() {
            0
        } else {
            self.scales.as_ptr() as usize
        }
    }
}

/// Runs a kernel for the rows of spans, and returns the rows of each.
pub fn attend(
    random: &mut Random,
    shape: &Shape,
    spans: &[Span<'_>],
    kernel: Kernel,
) -> Vec<Vec<bf16>> {
    let tables: Vec<Vec<Option<()>>> = spans.iter().map(|span| blocks_of(shape, span)).collect();
    let num_stored = tables.iter().flatten().flatten().count();
    let num_blocks = num_stored + random.between(1, 3);
    let mut block_ids = random.different(num_stored, num_blocks).into_iter();
    let mut keys = Pool::new(shape, num_blocks);
    let mut values = Pool::new(shape, num_blocks);
    let num_other_entries = random.between(0, 3);
    let mut block_tables = random.indices(num_other_entries, num_blocks);
    // Blocks of other groups of layers are between.
    let table_stride = random.between(1, 3);
    let (mut q, mut sink_q, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    for (span, table) in spans.iter().zip(&tables) {
        starts.push((q.len() / shape.q_len(), block_tables.len()));
        let rows = span.rows.start * shape.q_len()..span.rows.end * shape.q_len();
        q.extend_from_slice(&span.sequence.q[rows.clone()]);
        if shape.shifts_sinks {
            sink_q.extend_from_slice(&span.sequence.sink_q[rows]);
        }
        for (index, block) in table.iter().enumerate() {
            let block = block.map(|()| block_ids.next().expect("as many as are stored"));
            block_tables.push(block.unwrap_or(NOWHERE));
            block_tables.extend(random.indices(table_stride - 1, num_blocks));
            let Some(block) = block else {
                continue;
            };
            for head in 0..shape.num_cached_heads() {
                for offset in 0..shape
                    .block_size
                    .min(span.rows.end - index * shape.block_size)
                {
                    let first = block as usize * shape.num_cached_heads() + head;
                    let vector = first * shape.block_size + offset;
                    let from = head * span.sequence.len + index * shape.block_size + offset;
                    keys.store(shape, vector, &span.sequence.keys, from);
                    values.store(shape, vector, &span.sequence.values, from);
                }
            }
        }
    }

    let block_queries = match kernel {
        Kernel::Context if shape.latent_dim.is_some() => 2 * WARP_QUERIES,
        Kernel::Context => 4 * WARP_QUERIES,
        Kernel::SmallContext | Kernel::Generation => WARP_QUERIES,
    };
    let (mut tiles, mut rest, mut num_partials) = (Vec::new(), Vec::new(), 0);
    for (span, (first_row, block_table)) in spans.iter().zip(&starts) {
        let num_queries = span.rows.len() * shape.group;
        for first_query in (0..num_queries).step_by(block_queries) {
            let last_query = (first_query + block_queries).min(num_queries) - 1;
            let num_splits = (span.rows.start + last_query / shape.group) / SPLIT_LEN + 1;
            let tile = Tile {
                first_row: *first_row as u32,
                num_rows: span.rows.len() as u32,
                first_query: first_query as u32,
                position: span.rows.start as u32,
                block_table: *block_table as u32,
                split: 0,
                first_partial: num_partials as u32,
                table_stride: table_stride as u32,
            };
            tiles.push(tile);
            if kernel == Kernel::Generation {
                rest.extend((1..num_splits).map(|split| Tile {
                    split: split as u32,
                    ..tile
                }));
                if num_splits > 1 {
                    num_partials += num_splits * (last_query + 1 - first_query);
                }
            }
            // Entries that do nothing, as there are in a captured launch.
            if random.between(0, 4) == 0 {
                tiles.push(Tile::default());
            }
        }
    }
    let num_first_splits = tiles.len();
    tiles.append(&mut rest);
    let counts = [tiles.len() as u32, num_first_splits as u32].to_vec();

    let mut out = unwritten_bf16(q.len() / shape.q_len() * shape.out_len());
    let mut partials =
        unwritten(num_partials * shape.num_kv_heads * ((shape.value_dim() + 9) / 8 * 8));
    let heads = 0..shape.num_q_heads();
    let sink_logits: Vec<f32> = heads.filter_map(|head| shape.sink_logit(head)).collect();
    let heads = 0..shape.num_q_heads();
    let slopes: Vec<f32> = heads.filter_map(|head| shape.slope(head)).collect();
    let block_shift = shape.block_size.next_power_of_two().ilog2();
    let call = Call {
        out: out.as_mut_ptr() as usize,
        partials: partials.as_mut_ptr() as usize,
        q: q.as_ptr() as usize,
        sink_q: match shape.shifts_sinks {
            true => sink_q.as_ptr() as usize,
            false => 0,
        },
        keys: keys.words.as_ptr() as usize,
        values: values.words.as_ptr() as usize,
        key_scales: keys.scales_address(),
        value_scales: values.scales_address(),
        block_tables: block_tables.as_ptr() as usize,
        tiles: tiles.as_ptr() as usize,
        counts: counts.as_ptr() as usize,
        sink_logits: match sink_logits.is_empty() {
            true => 0,
            false => sink_logits.as_ptr() as usize,
        },
        exponent_scale: shape.scale * std::f32::consts::LOG2_E,
        num_kv_heads: shape.num_kv_heads as i32,
        group: shape.group as i32,
        head_dim: shape.value_dim() as i32,
        block_size: shape.block_size as i32,
        block_multiplier: (1_u64 << (31 + block_shift)).div_ceil(shape.block_size as u64) as u32,
        block_shift,
        window: shape.window as i32,
        num_sinks: shape.num_sinks as i32,
        cap_shrink: shape.soft_cap.map_or(0.0, |cap| {
            2.0 * shape.scale / cap * std::f32::consts::LOG2_E
        }),
        cap_grow: shape.soft_cap.map_or(0.0, |cap| cap / shape.scale),
        key_dim: shape.head_dim as i32,
        slopes: match slopes.is_empty() {
            true => 0,
            false => slopes.as_ptr() as usize,
        },
    };
    let has_totals = spans.iter().any(|span| span.rows.end > SPLIT_LEN);
    let (name, num_warps, shared_bytes) = match shape.latent_dim {
        Some(_) => latent_kernel(kernel, has_totals),
        None => kernel_of_heads(shape, kernel, has_totals),
    };
    let grid_x = match kernel {
        Kernel::Generation => random.between(1, tiles.len() + 1),
        _ => random.between(tiles.len(), tiles.len() + 2),
    };
    let dims = Dims {
        grid: [grid_x as u32, shape.num_kv_heads as u32, 1],
        block: [32 * num_warps as u32, 1, 1],
        shared_bytes,
    };
    // SAFETY: all is as kernels/paged_attention*.cu{,h} say.
    unsafe { random.launch(&name, dims, &mut [Arg::value(call)]) };
    if kernel == Kernel::Generation {
        let dims = Dims {
            grid: [
                random.between(1, num_first_splits + 1) as u32,
                shape.num_kv_heads as u32,
                random.between(1, WARP_QUERIES) as u32,
            ],
            block: [128, 1, 1],
            shared_bytes: 0,
        };
        // SAFETY: as above.
        unsafe { random.launch("paged_attention_merge", dims, &mut [Arg::value(call)]) };
    }
    let row = |row: usize| row * shape.out_len();
    let rows_of = |(span, (first_row, _)): (&Span<'_>, &(usize, usize))| {
        out[row(*first_row)..row(first_row + span.rows.len())].to_vec()
    };
    spans.iter().zip(&starts).map(rows_of).collect()
}

/// A kernel of paged attention, the warps of its blocks, and their shared memory.
fn kernel_of_heads(shape: &Shape, kernel: Kernel, has_totals: bool) -> (String, usize, usize) {
    let dims: &[usize] = match shape.first_slope {
        Some(_) => &[64, 128],
        None => &[64, 96, 128, 256],
    };
    let padded_dim = *dims
        .iter()
        .find(|dim| **dim >= shape.head_dim)
        .expect("there is a kernel");
    let dtype = shape.dtype.name();
    let (name, num_warps) = match kernel {
        Kernel::Context => (format!("context_{dtype}_d{padded_dim}"), 4),
        Kernel::SmallContext => (format!("context_{dtype}_d{padded_dim}_w1"), 1),
        Kernel::Generation => (format!("generation_{dtype}_d{padded_dim}"), 1),
    };
    let mut shared_bytes = match shape.dtype.has_codes() {
        false => 256 * padded_dim,
        true if num_warps == 1 && padded_dim <= 128 => 128 * padded_dim + 512,
        true => 256 * padded_dim + 512,
    };
    if padded_dim > 128 {
        shared_bytes += num_warps * 8192;
    }
    if kernel != Kernel::Generation && has_totals {
        shared_bytes += num_warps * (64 * padded_dim + 512);
    }
    let biases = match shape.first_slope {
        Some(_) => "_alibi",
        None => "",
    };
    let name = format!("paged_attention_{name}{biases}");
    (name, num_warps, shared_bytes)
}

/// The same for latent attention.
fn latent_kernel(kernel: Kernel, has_totals: bool) -> (String, usize, usize) {
    let (name, num_teams, num_buffers) = match kernel {
        Kernel::Context => ("context", 2, 2),
        Kernel::SmallContext => ("context_t1", 1, 1),
        Kernel::Generation => ("generation", 1, 2),
    };
    let of_team = match has_totals && kernel != Kernel::Generation {
        true => 8192 + 34816,
        false => 8192,
    };
    let shared_bytes = num_buffers * 36864 + num_teams * of_team;
    (
        format!("latent_attention_{name}"),
        4 * num_teams,
        shared_bytes,
    )
}

/// Which blocks of a span's table are stored: those that one of its rows sees, and some others.
fn blocks_of(shape: &Shape, span: &Span<'_>) -> Vec<Option<()>> {
    let block_size = shape.block_size;
    let is_seen = |index: usize| {
        let end = ((index + 1) * block_size).min(span.rows.end);
        shape.any_sees(&span.rows, index * block_size..end)
    };
    (0..span.rows.end.div_ceil(block_size))
        .map(|index| is_seen(index).then_some(()))
        .collect()
}
