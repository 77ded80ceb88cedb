//! Paged attention: each row against a reference in f64, and the same row bit for bit in chunks, steps and batches.

mod launches;
mod sequences;

use std::ops::Range;

use half::bf16;

use crate::support::Random;
use launches::{Kernel, Span, attend};
use sequences::{Dtype, Sequence, Shape};

/// Half a unit in the last place of bf16, relative.
const ROUNDING: f64 = 1.0 / 256.0;

/// Under a sanitizer, which is slow, there are fewer cases.
const fn num_cases(without_sanitizer: usize) -> usize {
    if cfg!(kernel_sanitizer = "thread") {
        2
    } else if cfg!(kernel_sanitizer) {
        without_sanitizer.div_ceil(4)
    } else {
        without_sanitizer
    }
}

/// A sequence whose length is at or beside a border of tiles or splits, or another one.
fn sequence(random: &mut Random, shape: &Shape, longest: usize) -> Sequence {
    let len = match random.between(0, 3) {
        0 => random.one_of(&[1, 63, 64, 65, 255, 256, 257, 511, 512, 513]),
        1 => random.between(1, 100),
        _ => random.between(1, longest),
    };
    Sequence::random(random, shape, len.min(longest))
}

fn check(shape: &Shape, sequence: &Sequence, rows: Range<usize>, out: &[bf16]) {
    let out_len = shape.out_len();
    assert_eq!(out.len(), rows.len() * out_len);
    for (position, out) in rows.zip(out.chunks_exact(out_len)) {
        for (head, out) in out.chunks_exact(shape.value_dim()).enumerate() {
            let expected = sequence.attention(shape, position, head);
            for (dim, (out, expected)) in out.iter().zip(&expected).enumerate() {
                // The weights of values are rounded to bf16, and the result is.
                let tolerance = 1.02 * ROUNDING * (expected.magnitude + expected.out.abs()) + 1e-6;
                let error = (out.to_f64() - expected.out).abs();
                assert!(
                    error <= tolerance,
                    "{shape:?}: element {dim} of head {head} at position {position} is {out}, not {} +- {tolerance}",
                    expected.out
                );
            }
        }
    }
}

#[test]
fn chunks_of_the_context_match_the_reference() {
    let random = &mut Random::new();
    for case in 0..num_cases(16) {
        let shape = match case % 5 {
            0 => Shape::random_latent(random),
            _ => Shape::random(random),
        };
        let kernel = match case % 4 {
            0 if shape.head_dim > 128 || shape.latent_dim.is_some() => Kernel::SmallContext,
            _ => Kernel::Context,
        };
        let sequences: Vec<Sequence> = (0..random.between(1, 2))
            .map(|_| sequence(random, &shape, 600))
            .collect();
        let spans: Vec<Span> = sequences
            .iter()
            .map(|sequence| Span {
                sequence,
                rows: random.between(sequence.len.saturating_sub(70), sequence.len - 1)
                    ..sequence.len,
            })
            .collect();
        let out = attend(random, &shape, &spans, kernel);
        for (span, out) in spans.iter().zip(&out) {
            check(&shape, span.sequence, span.rows.clone(), out);
        }
    }
}

#[test]
fn generation_and_drafts_match_the_reference() {
    let random = &mut Random::new();
    for case in 0..num_cases(30) {
        let shape = match case % 5 {
            0 => Shape::random_latent(random),
            _ => Shape::random(random),
        };
        let sequences: Vec<Sequence> = (0..random.between(1, 3))
            .map(|_| sequence(random, &shape, 1100))
            .collect();
        let spans: Vec<Span> = sequences
            .iter()
            .map(|sequence| Span {
                sequence,
                rows: sequence.len - random.between(1, 6).min(sequence.len)..sequence.len,
            })
            .collect();
        let out = attend(random, &shape, &spans, Kernel::Generation);
        for (span, out) in spans.iter().zip(&out) {
            check(&shape, span.sequence, span.rows.clone(), out);
        }
    }
}

/// More splits than the merge loads at once, and most of them between the sinks and the window in half of the cases.
#[test]
fn long_sequences_match_the_reference() {
    let random = &mut Random::new();
    for is_windowed in [false, true] {
        let window = if is_windowed { 300 } else { 0 };
        let shape = Shape {
            num_kv_heads: 1,
            group: 2,
            head_dim: 16,
            block_size: 48,
            window,
            num_sinks: 70,
            ..Shape::random(random)
        };
        let len = if cfg!(kernel_sanitizer = "thread") {
            1300
        } else {
            random.between(17 * 256, 34 * 256)
        };
        let sequence = Sequence::random(random, &shape, len);
        let span = || Span {
            sequence: &sequence,
            rows: len - 2..len,
        };
        let rows = attend(random, &shape, &[span()], Kernel::Generation);
        check(&shape, &sequence, len - 2..len, &rows[0]);
        assert_eq!(rows, attend(random, &shape, &[span()], Kernel::Context));
    }
}

/// The rows of a sequence, computed in chunks that begin at random positions.
fn in_chunks(
    random: &mut Random,
    shape: &Shape,
    sequence: &Sequence,
    rows: Range<usize>,
    kernel: Kernel,
    longest: usize,
) -> Vec<bf16> {
    let mut out = Vec::new();
    let mut begin = rows.start;
    while begin < rows.end {
        let end = (begin + random.between(1, longest)).min(rows.end);
        let span = Span {
            sequence,
            rows: begin..end,
        };
        out.append(&mut attend(random, shape, &[span], kernel)[0]);
        begin = end;
    }
    out
}

#[test]
fn a_row_is_the_same_however_it_is_computed() {
    let random = &mut Random::new();
    for case in 0..num_cases(12) {
        let shape = match case % 4 {
            0 => Shape::random_latent(random),
            _ => Shape::random(random),
        };
        let sequence = self::sequence(random, &shape, 700);
        let other = self::sequence(random, &shape, 300);
        let rows = sequence.len.saturating_sub(random.between(1, 40))..sequence.len;
        let at_once = attend(
            random,
            &shape,
            &[Span {
                sequence: &sequence,
                rows: rows.clone(),
            }],
            Kernel::Context,
        );
        check(&shape, &sequence, rows.clone(), &at_once[0]);

        let ways = [
            (Kernel::Context, 20),
            (Kernel::Generation, 1),
            (Kernel::Generation, 9),
        ];
        for (kernel, longest) in ways {
            let out = in_chunks(random, &shape, &sequence, rows.clone(), kernel, longest);
            assert_eq!(
                out, at_once[0],
                "{shape:?}: {kernel:?}, up to {longest} rows at once"
            );
        }
        // Beside others, with other blocks in another order.
        let spans = [
            Span {
                sequence: &other,
                rows: other.len - 1..other.len,
            },
            Span {
                sequence: &sequence,
                rows: rows.clone(),
            },
            Span {
                sequence: &sequence,
                rows: sequence.len - 1..sequence.len,
            },
        ];
        for kernel in [Kernel::Context, Kernel::Generation] {
            let out = attend(random, &shape, &spans, kernel);
            assert_eq!(out[1], at_once[0], "{shape:?}: {kernel:?} in a batch");
            assert!(
                at_once[0].ends_with(&out[2]),
                "{shape:?}: {kernel:?}, the last row in a batch"
            );
        }
    }
}

#[test]
fn the_kernels_for_little_shared_memory_compute_the_same() {
    let random = &mut Random::new();
    let mut shapes: Vec<Shape> = Dtype::ALL
        .into_iter()
        .map(|dtype| Shape {
            head_dim: 256,
            first_slope: None,
            dtype,
            ..Shape::random(random)
        })
        .collect();
    shapes.push(Shape::random_latent(random));
    for shape in shapes {
        let sequence = Sequence::random(random, &shape, 300);
        let spans = [Span {
            sequence: &sequence,
            rows: 290..300,
        }];
        let out = attend(random, &shape, &spans, Kernel::Context);
        assert_eq!(
            out,
            attend(random, &shape, &spans, Kernel::SmallContext),
            "{shape:?}"
        );
    }
}
