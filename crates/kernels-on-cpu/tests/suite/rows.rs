//! Kernels that move bytes.

use bytemuck::{Pod, Zeroable};
use inflight_kernels_on_cpu::{Arg, Dims};
use memmap2::MmapMut;

use crate::support::{Random, bits, cases, is_on_gpu, unwritten, unwritten_bf16};

#[test]
fn rows_are_gathered_in_the_order_of_their_indices() {
    let random = &mut Random::new();
    for _ in cases(30) {
        let kernel = random.one_of(&["gather_rows", "gather_rows_4"]);
        let units = random.between(1, 80);
        let width = if kernel == "gather_rows" {
            4 * units
        } else {
            units
        };
        let (num_rows, num_kept) = (random.between(1, 9), random.between(1, 9));
        let rows = random.floats(num_rows * width, 1.0);
        let indices = random.indices(num_kept, num_rows);
        let mut out = unwritten((num_kept + 1) * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&rows[..]),
            Arg::from(&indices[..]),
            (units as i32).into(),
        ];
        let dims = Dims::new(num_kept, random.between(1, 3), random.block(3));
        // SAFETY: the indices are those of rows of this width, and `out` has a row for each.
        unsafe { random.launch(kernel, dims, &mut args) };
        let mut expected: Vec<f32> = indices
            .iter()
            .flat_map(|index| rows[*index as usize * width..][..width].iter().copied())
            .collect();
        expected.resize(out.len(), f32::NAN);
        assert_eq!(bits(&out), bits(&expected));
    }
}

#[test]
fn columns_are_gathered_in_the_order_of_a_permutation() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_rows, width) = (random.between(1, 5), random.between(1, 300));
        let x = random.bf16s(num_rows * width, 1.0);
        let columns = random.different(width, width);
        let mut out = unwritten_bf16(num_rows * width);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&x[..]),
            Arg::from(&columns[..]),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(3));
        // SAFETY: both are [num_rows, width], and the columns are below it.
        unsafe { random.launch("gather_columns", dims, &mut args) };
        let rows = x.chunks(width);
        let expected: Vec<_> = rows
            .flat_map(|row| columns.iter().map(|column| row[*column as usize]))
            .collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn columns_are_placed_beside_others() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_rows, width) = (random.between(1, 5), random.between(1, 300));
        let (first, after) = (random.between(0, 9), random.between(0, 9));
        let out_width = first + width + after;
        let x = random.floats(num_rows * width, 1.0);
        let mut out = unwritten(num_rows * out_width);
        let mut expected = out.clone();
        for (to, from) in expected.chunks_mut(out_width).zip(x.chunks(width)) {
            to[first..first + width].copy_from_slice(from);
        }
        let mut args = [
            Arg::from(&mut out[first..]),
            Arg::from(&x[..]),
            (width as i32).into(),
            (out_width as i32).into(),
        ];
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(3));
        // SAFETY: `out` has a row for each, of which these columns are inside.
        unsafe { random.launch("place_columns", dims, &mut args) };
        assert_eq!(bits(&out), bits(&expected));
    }
}

#[test]
fn ranks_are_summed_in_pairs() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_ranks, len) = (random.between(1, 16), random.between(1, 600));
        // Sums in another order have other bits.
        let parts = random.floats(num_ranks * len, 1.0);
        let mut out = unwritten(len);
        let mut args = [
            Arg::from(&mut out[..]),
            Arg::from(&parts[..]),
            (len as i32).into(),
            (num_ranks as i32).into(),
        ];
        let dims = Dims::new(1, random.between(1, 3), random.block(3));
        // SAFETY: there are so many parts of this length.
        unsafe { random.launch("sum_ranks", dims, &mut args) };
        let expected: Vec<_> = (0..len)
            .map(|at| {
                let mut sums: Vec<f32> = parts[at..].iter().step_by(len).copied().collect();
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                sums[0]
            })
            .collect();
        assert_eq!(bits(&out), bits(&expected), "{num_ranks} ranks");
    }
}

#[test]
fn rows_beyond_4_gib_are_gathered() {
    if is_on_gpu() {
        // A GPU does not reach memory that is mapped apart.
        return;
    }
    let random = &mut Random::new();
    let width = 1 << 12;
    // 5 GiB, of which only the touched pages exist.
    let mut rows = sparse(5 << 30);
    let last = rows.len() / (4 * width) - 1;
    let row = random.floats(width, 1.0);
    rows[last * 4 * width..][..4 * width].copy_from_slice(bytemuck::cast_slice(&row));
    let indices = [last as u32];
    let mut out = unwritten(width);
    let mut args = [
        Arg::from(&mut out[..]),
        Arg::from(&rows[..]),
        Arg::from(&indices[..]),
        (width as i32 / 4).into(),
    ];
    // SAFETY: the index is that of the last row.
    unsafe { random.launch("gather_rows", Dims::new(1, 1, 256), &mut args) };
    assert_eq!(out, row);
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Region {
    offset: u64,
    position_bytes: u64,
    head_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BlockCopy {
    source: u32,
    target: u32,
    num_positions: u32,
}

#[test]
fn positions_are_copied_in_all_arrays_of_the_cache() {
    let random = &mut Random::new();
    for _ in cases(20) {
        let (num_heads, block_size) = (random.between(1, 4), random.between(1, 20));
        let (num_blocks, num_regions) = (random.between(2, 8), random.between(1, 4));
        // Scales, int8 and bf16 vectors, of odd lengths too.
        let position_bytes: Vec<usize> = (0..num_regions)
            .map(|_| random.one_of(&[4, 64, 128, 256, 40, 12, 17]))
            .collect();
        let before: Vec<Vec<u8>> = position_bytes
            .iter()
            .map(|bytes| {
                let len = num_blocks * num_heads * block_size * bytes;
                random.indices(len, 256).iter().map(|x| *x as u8).collect()
            })
            .collect();
        let mut after = before.clone();
        // The vectors lie anywhere, and their offsets count from the first of them.
        let first = after.iter().map(|bytes| bytes.as_ptr() as u64).min();
        let first = first.expect("at least one region");
        let regions: Vec<Region> = after
            .iter_mut()
            .zip(&position_bytes)
            .map(|(bytes, position_bytes)| Region {
                offset: bytes.as_mut_ptr() as u64 - first,
                position_bytes: *position_bytes as u64,
                head_bytes: (position_bytes * block_size) as u64,
            })
            .collect();
        // Different blocks, so that no target is another copy's source or target.
        let blocks = random.different(num_blocks / 2 * 2, num_blocks);
        let copies: Vec<BlockCopy> = blocks
            .chunks(2)
            .map(|pair| BlockCopy {
                source: pair[0],
                target: pair[1],
                num_positions: random.between(0, block_size) as u32,
            })
            .collect();
        let mut args = [
            Arg::value(first),
            Arg::from(&regions[..]),
            Arg::from(&copies[..]),
            (num_heads as i32).into(),
        ];
        let dims = Dims::new(num_regions * num_heads, copies.len(), random.block(3));
        // SAFETY: the regions are the vectors above, and the copies inside them.
        unsafe { random.launch("copy_positions", dims, &mut args) };
        for ((before, after), position_bytes) in before.iter().zip(&after).zip(&position_bytes) {
            let mut expected = before.clone();
            for copy in &copies {
                for head in 0..num_heads {
                    let head_bytes = block_size * position_bytes;
                    let at = |block: u32| (block as usize * num_heads + head) * head_bytes;
                    let len = copy.num_positions as usize * position_bytes;
                    let copied = &before[at(copy.source)..][..len];
                    expected[at(copy.target)..][..len].copy_from_slice(copied);
                }
            }
            assert!(
                *after == expected,
                "{num_heads} heads of {block_size} positions"
            );
        }
    }
}

#[test]
fn positions_beyond_4_gib_are_copied() {
    if is_on_gpu() {
        // A GPU does not reach memory that is mapped apart.
        return;
    }
    let random = &mut Random::new();
    let (num_heads, head_bytes) = (8, 64 * 256);
    let mut cache = sparse(6 << 30);
    let last = cache.len() / (num_heads * head_bytes) - 1;
    let at = (last * num_heads + 7) * head_bytes;
    cache[at..][..head_bytes].fill(7);
    let regions = [Region {
        offset: 0,
        position_bytes: 256,
        head_bytes: head_bytes as u64,
    }];
    let target = last - 3;
    let copies = [BlockCopy {
        source: last as u32,
        target: target as u32,
        num_positions: 40,
    }];
    let mut args = [
        Arg::value(cache.as_mut_ptr() as u64),
        Arg::from(&regions[..]),
        Arg::from(&copies[..]),
        (num_heads as i32).into(),
    ];
    // SAFETY: both blocks are inside the cache.
    unsafe { random.launch("copy_positions", Dims::new(num_heads, 1, 64), &mut args) };
    let copied = &cache[(target * num_heads + 7) * head_bytes..][..head_bytes];
    assert!(
        copied[..40 * 256].iter().all(|x| *x == 7) && copied[40 * 256..].iter().all(|x| *x == 0)
    );
}

/// Memory that is zero, and takes no room until it is touched.
fn sparse(num_bytes: usize) -> MmapMut {
    let mut options = memmap2::MmapOptions::new();
    let options = options.len(num_bytes).no_reserve_swap();
    options.map_anon().expect("address space")
}
