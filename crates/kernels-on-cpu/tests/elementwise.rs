//! Kernels that work on each row by itself.

mod support;

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use support::{Random, bits, unwritten};

const NUM_CASES: usize = 30;

/// Widths of vectors of 8 elements, and others, for which kernels take a slower path.
fn width(random: &mut Random) -> usize {
    match random.between(0, 2) {
        0 => 8 * random.between(1, 40),
        1 => random.between(1, 300),
        _ => 8 * random.between(100, 300),
    }
}

#[test]
fn embed_widens_rows_of_the_table() {
    let random = &mut Random::new();
    for _ in 0..NUM_CASES {
        let (num_rows, width) = (random.between(1, 5), width(random));
        let vocab_size = random.between(1, 20);
        let table = random.bf16s(vocab_size * width, 2.0);
        let token_ids = random.indices(num_rows, vocab_size);
        let mut out = unwritten(num_rows * width);
        let dims = Dims::new(num_rows, random.between(1, 3), random.block(4));
        embed(random, dims, &mut out, &table, &token_ids, width);
        let rows = token_ids.iter().map(|id| *id as usize * width);
        let expected: Vec<f32> = rows
            .flat_map(|at| table[at..][..width].iter().map(|x| x.to_f32()))
            .collect();
        assert_eq!(bits(&out), bits(&expected));
    }
}

fn embed(
    random: &mut Random,
    dims: Dims,
    out: &mut [f32],
    table: &[bf16],
    token_ids: &[u32],
    width: usize,
) {
    let mut args = [
        out.into(),
        table.into(),
        token_ids.into(),
        (width as i32).into(),
    ] as [Arg<'_>; 4];
    // SAFETY: the shapes are those of the kernel, and the tokens are rows of the table.
    unsafe { random.launch("embed", dims, &mut args) };
}
