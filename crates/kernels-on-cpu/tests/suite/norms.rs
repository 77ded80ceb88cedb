//! Layer norms, norms whose result is added, and norms of queries and keys, whole ones and those of heads.

use half::bf16;
use inflight_kernels_on_cpu::{Arg, Dims};

use crate::support::{
    BF16_ROUNDING, F32_ROUNDING, Random, assert_close, cases, to_f64, unwritten_bf16,
};

const NUM_CASES: usize = 30;
const EPSILON: f32 = 1e-5;
/// The mean is up to 20 times as large as what is left, and rounded. So a small result has the error of a larger one,
/// and any may be on the wrong side of the middle between two bf16 numbers.
const MEAN_ROUNDING: f64 = 5e-2;
const PAST_THE_MIDDLE: f64 = 1.1;

#[test]
fn a_layer_norm_takes_the_mean_away() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let x = rows(random, num_rows, width);
        let (weight, bias) = (random.floats(width, 2.0), bias(random, width));
        let block = random.block(6);
        // One row more than there are: nothing may be written there.
        let mut out = unwritten_bf16((num_rows + 1) * width);
        layer_norm(random, block, &mut out, &x, &weight, bias.as_deref());
        let expected = normalised(&x, &weight, bias.as_deref(), true);
        assert_close(
            &out[..x.len()],
            &expected,
            PAST_THE_MIDDLE * BF16_ROUNDING,
            MEAN_ROUNDING,
        );
        assert!(out[x.len()..].iter().all(|x| x.is_nan()));
        // A row alone has the same bits.
        let row = random.between(0, num_rows - 1) * width;
        let mut alone = unwritten_bf16(width);
        layer_norm(
            random,
            block,
            &mut alone,
            &x[row..][..width],
            &weight,
            bias.as_deref(),
        );
        assert_eq!(alone, out[row..][..width]);
    }
}

#[test]
fn a_row_is_normalised_in_place() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let mut hidden = rows(random, num_rows, width);
        let (weight, bias) = (random.floats(width, 2.0), bias(random, width));
        let expected = normalised(&hidden, &weight, bias.as_deref(), true);
        let args = &mut [
            Arg::from(&mut hidden[..]),
            Arg::from(&weight[..]),
            Arg::from(bias.as_deref()),
            EPSILON.into(),
            (width as i32).into(),
        ];
        let dims = Dims::new(num_rows, 1, random.block(6));
        // SAFETY: all rows have this width, and there are as many as blocks.
        unsafe { random.launch("replace_layer_normed", dims, args) };
        assert_close(&hidden, &expected, 8.0 * F32_ROUNDING, 4.0);
    }
}

#[test]
fn a_normalised_row_is_added() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, width) = (random.between(1, 4), random.width());
        let (x, before) = (
            rows(random, num_rows, width),
            random.floats(num_rows * width, 2.0),
        );
        let (weight, bias) = (random.floats(width, 2.0), bias(random, width));
        let dims = Dims::new(num_rows, 1, random.block(6));
        for has_mean in [true, false] {
            let mut hidden = before.clone();
            let mut args = vec![
                Arg::from(&mut hidden[..]),
                Arg::from(&x[..]),
                Arg::from(&weight[..]),
            ];
            let (kernel, bias) = match has_mean {
                true => {
                    args.push(Arg::from(bias.as_deref()));
                    ("add_layer_normed", bias.as_deref())
                }
                false => ("add_rms_normed", None),
            };
            args.extend([EPSILON.into(), (width as i32).into()]);
            // SAFETY: all rows have this width, and there are as many as blocks.
            unsafe { random.launch(kernel, dims, &mut args) };
            let added = normalised(&x, &weight, bias, has_mean);
            let expected: Vec<f64> = before
                .iter()
                .zip(added)
                .map(|(x, y)| f64::from(*x) + y)
                .collect();
            assert_close(&hidden, &expected, 8.0 * F32_ROUNDING, 4.0);
        }
    }
}

#[test]
fn queries_and_keys_are_normalised_over_all_heads() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let (num_rows, q_width, k_width) = (
            random.between(1, 4),
            random.between(1, 300),
            random.between(1, 300),
        );
        let row_width = q_width + 2 * k_width;
        let before = rows(random, num_rows, row_width);
        let (q_weight, k_weight) = (random.floats(q_width, 2.0), random.floats(k_width, 2.0));
        let mut qkv = before.clone();
        let mut args = [
            Arg::from(&mut qkv[..]),
            Arg::from(&q_weight[..]),
            Arg::from(&k_weight[..]),
            EPSILON.into(),
            (q_width as i32).into(),
            (k_width as i32).into(),
        ];
        let dims = Dims::new(num_rows, 2, random.block(6));
        // SAFETY: each row has queries of the first width, and keys and values of the second.
        unsafe { random.launch("qk_norm", dims, &mut args) };
        let expected: Vec<f64> = before
            .chunks(row_width)
            .flat_map(|row| {
                let (q, rest) = row.split_at(q_width);
                let (k, v) = rest.split_at(k_width);
                let q = normalised(q, &q_weight, None, false);
                let k = normalised(k, &k_weight, None, false);
                [q, k, to_f64(v)].concat()
            })
            .collect();
        assert_close(&qkv, &expected, 4.0 * F32_ROUNDING, 1e-30);
    }
}

#[test]
fn each_head_of_queries_and_keys_has_a_layer_norm_of_its_own() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let [num_rows, num_q, num_k] = [(1, 4), (1, 12), (1, 5)].map(|(a, b)| random.between(a, b));
        let any = random.between(1, 150);
        let d = random.one_of(&[1, 80, 128, any]);
        let num_heads = num_q + 2 * num_k;
        // Each head has a size and a mean of its own.
        let before = rows(random, num_rows * num_heads, d);
        let q_weight = random.floats(num_q * d, 2.0);
        let k_weight = random.floats(num_k * d, 2.0);
        let dims = |random: &mut Random, num_rows| {
            Dims::new(num_rows, random.between(1, 3), random.block(6))
        };
        let run = |random: &mut Random, dims, qkv: &mut [f32]| {
            let mut args = [
                Arg::from(qkv),
                Arg::from(&q_weight[..]),
                Arg::from(&k_weight[..]),
                EPSILON.into(),
                (num_q as i32).into(),
                (num_k as i32).into(),
                (d as i32).into(),
            ];
            // SAFETY: each row has so many query heads, and twice so many key heads, of this width.
            unsafe { random.launch("qk_layer_norm", dims, &mut args) };
        };
        let mut qkv = before.clone();
        let of_all = dims(random, num_rows);
        run(random, of_all, &mut qkv);
        let weights = [&q_weight[..], &k_weight].concat();
        let heads = before.chunks(d).zip(qkv.chunks(d)).enumerate();
        for (index, (before, head)) in heads {
            match weights.chunks(d).nth(index % num_heads) {
                None => assert_eq!(head, before, "a value"),
                Some(weight) => {
                    let expected = normalised(before, weight, None, true);
                    assert_close(head, &expected, 8.0 * F32_ROUNDING, 4.0);
                }
            }
        }
        // A row alone has the same bits, however its heads are divided among blocks.
        let row = random.between(0, num_rows - 1) * num_heads * d;
        let mut alone = before[row..][..num_heads * d].to_vec();
        let of_one = dims(random, 1);
        run(random, of_one, &mut alone);
        assert_eq!(alone, qkv[row..][..num_heads * d]);
    }
}

/// Each of several GPUs has some queries and their keys. A key that two of them have counts once.
#[test]
fn queries_and_keys_are_normalised_over_the_heads_of_several_gpus() {
    let random = &mut Random::new();
    for _ in cases(NUM_CASES) {
        let [num_rows, num_k, group] = [(1, 3), (1, 5), (1, 4)].map(|(a, b)| random.between(a, b));
        let (num_q, d) = (num_k * group, random.between(1, 70));
        let (q, k) = (
            rows(random, num_rows, num_q * d),
            rows(random, num_rows, num_k * d),
        );
        let q_weight = random.floats(num_q * d, 2.0);
        let k_weight = random.floats(num_k * d, 2.0);
        // Whole groups, or single queries.
        let own_group = [1, group][random.between(0, 1)];
        let num_gpus = random.between(1, (num_q / own_group).min(4));
        let first_query = |gpu: usize| gpu * (num_q / own_group) / num_gpus * own_group;
        // The heads of a GPU, out of rows of the model.
        let heads = |x: &[f32], places: &[usize], row: usize, num_heads: usize| -> Vec<f32> {
            let of_head = |&head: &usize| &x[(row * num_heads + head) * d..][..d];
            places.iter().flat_map(of_head).copied().collect()
        };
        let mut squares = vec![-0.0_f32; num_rows * (num_q + num_k)];
        let mut parts = Vec::new();
        for gpu in 0..num_gpus {
            let queries: Vec<usize> = (first_query(gpu)..first_query(gpu + 1)).collect();
            let keys: Vec<usize> = queries
                .iter()
                .step_by(own_group)
                .map(|q| q / group)
                .collect();
            let qkv: Vec<f32> = (0..num_rows)
                .flat_map(|row| {
                    let (q, k) = (
                        heads(&q, &queries, row, num_q),
                        heads(&k, &keys, row, num_k),
                    );
                    let values = vec![7.0; keys.len() * d];
                    [q, k, values].concat()
                })
                .collect();
            // One row more than there are: nothing may be written there.
            let mut own = vec![f32::NAN; squares.len() + num_q + num_k];
            let sizes = [num_q, num_k, queries[0], queries.len(), keys.len(), d];
            let mut args = vec![Arg::from(&mut own[..]), Arg::from(&qkv[..])];
            args.extend(sizes.map(|size| Arg::from(size as i32)));
            let dims = Dims::new(num_rows, random.between(1, 3), random.block(6));
            // SAFETY: the rows have the heads of the GPU, and the squares those of the model.
            unsafe { random.launch("qk_squares", dims, &mut args) };
            assert!(own[squares.len()..].iter().all(|x| x.is_nan()));
            for (sum, own) in squares.iter_mut().zip(&own) {
                // A sum of which all terms but one are -0 is that one.
                assert!(
                    sum.to_bits() == (-0.0_f32).to_bits() || own.to_bits() == (-0.0_f32).to_bits()
                );
                *sum += own;
            }
            parts.push((queries, keys, qkv));
        }
        let expected = [(&q, &q_weight), (&k, &k_weight)]
            .map(|(x, weight)| normalised(x, weight, None, false));
        let [expected_q, expected_k] =
            expected.map(|x| x.iter().map(|x| *x as f32).collect::<Vec<_>>());
        for (queries, keys, mut qkv) in parts {
            let (q_weight, k_weight) = (
                heads(&q_weight, &queries, 0, num_q),
                heads(&k_weight, &keys, 0, num_k),
            );
            let mut args = vec![
                Arg::from(&mut qkv[..]),
                Arg::from(&squares[..]),
                Arg::from(&q_weight[..]),
                Arg::from(&k_weight[..]),
                EPSILON.into(),
            ];
            let sizes = [num_q, num_k, queries.len(), keys.len(), d];
            args.extend(sizes.map(|size| Arg::from(size as i32)));
            let dims = Dims::new(num_rows, 2, random.block(6));
            // SAFETY: as above, with weights for the heads of the GPU.
            unsafe { random.launch("qk_norm_of_squares", dims, &mut args) };
            let expected: Vec<f64> = (0..num_rows)
                .flat_map(|row| {
                    let q = heads(&expected_q, &queries, row, num_q);
                    let k = heads(&expected_k, &keys, row, num_k);
                    to_f64(&[q, k, vec![7.0; keys.len() * d]].concat())
                })
                .collect();
            assert_close(&qkv, &expected, 6.0 * F32_ROUNDING, 1e-30);
        }
    }
}

fn layer_norm(
    random: &mut Random,
    block: usize,
    out: &mut [bf16],
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
) {
    let width = weight.len();
    let mut args = [
        out.into(),
        x.into(),
        weight.into(),
        bias.into(),
        EPSILON.into(),
        (width as i32).into(),
    ] as [Arg<'_>; 6];
    let dims = Dims::new(x.len() / width, 1, block);
    // SAFETY: `x` and `out` have as many rows of the weight's width as there are blocks.
    unsafe { random.launch("layer_norm", dims, &mut args) };
}

/// The norm of rows of the weight's width, with the mean taken away or not.
fn normalised(x: &[f32], weight: &[f32], bias: Option<&[f32]>, has_mean: bool) -> Vec<f64> {
    let width = weight.len() as f64;
    let rows = x.chunks(weight.len()).map(to_f64);
    rows.flat_map(|row| {
        let mean = if has_mean {
            row.iter().sum::<f64>() / width
        } else {
            0.0
        };
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width;
        let scale = 1.0 / (variance + f64::from(EPSILON)).sqrt();
        let elements = row.into_iter().enumerate();
        elements.map(move |(i, x)| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
            (x - mean) * scale * f64::from(weight[i]) + bias
        })
    })
    .collect()
}

fn bias(random: &mut Random, width: usize) -> Option<Vec<f32>> {
    random.coin().then(|| random.floats(width, 2.0))
}

/// Rows whose elements have one size each, some with a mean that is large beside it.
fn rows(random: &mut Random, num_rows: usize, width: usize) -> Vec<f32> {
    let rows = (0..num_rows).flat_map(|_| {
        let (size, mean) = (
            random.one_of(&[1e-2, 1.0, 50.0]),
            random.one_of(&[0.0, 0.0, 20.0]),
        );
        let row = random.floats(width, size);
        row.into_iter()
            .map(move |x| x + mean * size)
            .collect::<Vec<_>>()
    });
    rows.collect()
}
