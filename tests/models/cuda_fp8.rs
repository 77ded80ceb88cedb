//! Products of FP8 weights with FP8 activations, on the stand-in for a GPU.

use std::path::Path;

use half::bf16;
use inflight_base::{BlockId, BlockSize};
use inflight_cuda_stand_in::StandIn;
use inflight_device::{
    AdapterCapacity, EmbeddingTable, KvDtype, KvLayout, KvLayouts, KvSpan, KvValues, LayerGroups,
    Linear, Load, LogitsTransform, Norm, Ops, Output, StepCapacity, StepInputs, StepIo,
};
use inflight_device_cuda::{Cuda, CudaOptions};
use inflight_machines::load_on_gpu;
use inflight_numbers::{
    CodeBits, Dtype, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape, RawMatrix, Stacking,
    from_e4m3,
};
use inflight_runner::{ModelSource, WeightPrecision};

use crate::copy::Copy;
use crate::cuda::{on_any_gpu, on_stand_in};
use crate::cuda_quantised::{fp8_checkpoint, long_requests, wide};
use crate::devices::{assert_same_alone, requests, setups};
use crate::fp8::Scales;
use crate::support::{Request, Served, Setup, fixture, serve};
use inflight_reference_device::{Reference, ReferenceOptions, rounded_to_e4m3};

/// Deterministic, so that results can be compared bit by bit.
pub fn with_fp8_activations() -> CudaOptions {
    CudaOptions {
        deterministic: true,
        fp8_activations: true,
        ..CudaOptions::default()
    }
}

/// Both devices round a row of activations to the same codes, but where their sums differ in the last bits. Then a code
/// is the next one, by 1/8 of it, and later layers have other inputs: so logits are compared by their mean difference.
#[test]
fn products_of_fp8_with_fp8_agree_with_the_reference_device() {
    let test = "cuda_fp8::products_of_fp8_with_fp8_agree_with_the_reference_device";
    on_any_gpu(StandIn::new(), test, || {
        let rounded_at_load = WeightPrecision {
            group_size: WeightPrecision::WHOLE_ROWS,
            ..WeightPrecision::new(CodeBits::Fp8)
        };
        let copies = [Scales::Tensor, Scales::Channels].map(fp8_checkpoint);
        let fixtures = ["qwen2", "llama3"].map(fixture);
        let cases = [
            (copies[0].dir(), None),
            (copies[1].dir(), None),
            // With biases, and with a tied embedding.
            (fixtures[0].as_path(), Some(rounded_at_load)),
            (fixtures[1].as_path(), Some(rounded_at_load)),
        ];
        for (dir, weights) in cases {
            for max_num_tokens in [24, 256] {
                let setup = Setup {
                    weights,
                    ..wide(&Setup::default(), max_num_tokens)
                };
                let what = format!("{}, {max_num_tokens} tokens", dir.display());
                let mut on_gpu = setup.load_on::<Cuda>(dir, &with_fp8_activations());
                let on_gpu = serve(&mut on_gpu, &setup, &long_requests()).0;
                let [rounded, exact] = [true, false].map(|fp8_activations| {
                    let options = ReferenceOptions {
                        fp8_activations,
                        ..ReferenceOptions::default()
                    };
                    let mut reference = setup.load_on::<Reference>(dir, &options);
                    serve(&mut reference, &setup, &long_requests()).0
                });
                // Most of the error of the rounding is what both have in common: of two independent ones, the
                // difference would be 1.4 times as large as each. The rest are codes that differ, for which later
                // layers have other inputs.
                let [of_device, of_rounding] =
                    [&on_gpu, &exact].map(|other| mean_difference(&rounded, other));
                println!("{what}: {of_device} between devices, {of_rounding} by rounding");
                assert!(of_device < of_rounding, "{what}");
            }
        }
    });
}

/// Of the logits of prompts.
pub fn mean_difference(ours: &[Served], theirs: &[Served]) -> f32 {
    let logits = |served: &[Served]| -> Vec<f32> {
        let logits = served.iter().flat_map(|served| &served.context_logits);
        logits.copied().collect()
    };
    let (ours, theirs) = (logits(ours), logits(theirs));
    assert!(!ours.is_empty() && ours.len() == theirs.len());
    let differences = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
    differences.sum::<f32>() / ours.len() as f32
}

/// After a few tokens, most activations still have the same codes on both devices. Then all logits are the same but for
/// the order of sums, and one wrong scale shows, even if it is that of one output. Tensor cores round sums of FP8
/// otherwise, so that this needs the stand-in.
#[test]
fn each_logit_shows_one_wrong_scale() {
    let test = "cuda_fp8::each_logit_shows_one_wrong_scale";
    on_stand_in(StandIn::new(), test, || {
        const NUM_REQUESTS: u32 = 64;
        let prompt = |index: u32| -> Vec<_> {
            (0..2 + index % 2)
                .map(|at| (index * 37 + at * 11) % 150 + 3)
                .collect()
        };
        let requests: Vec<_> = (0..NUM_REQUESTS)
            .map(|index| Request::greedy(&prompt(index), 1))
            .collect();
        let setup = Setup::default();
        for scales in [Scales::Tensor, Scales::Channels] {
            let checkpoint = fp8_checkpoint(scales);
            let mut on_gpu = setup.load_on::<Cuda>(checkpoint.dir(), &with_fp8_activations());
            let on_gpu = serve(&mut on_gpu, &setup, &requests).0;
            let num_same = |dir: &Path| {
                let options = ReferenceOptions {
                    fp8_activations: true,
                    ..ReferenceOptions::default()
                };
                let mut reference = setup.load_on::<Reference>(dir, &options);
                let reference = serve(&mut reference, &setup, &requests).0;
                let pairs = on_gpu.iter().zip(&reference);
                pairs.filter(|(a, b)| has_same_logits(a, b)).count()
            };
            let right = num_same(checkpoint.dir());
            println!("{scales:?}: {right} of {NUM_REQUESTS} are the same");
            assert!(right as u32 >= NUM_REQUESTS / 4, "{scales:?}: only {right}");
            for layer in 0..2 {
                for projection in PROJECTIONS {
                    // The norm of queries and keys takes a factor of all of them out.
                    let is_normed = projection.contains("q_proj") || projection.contains("k_proj");
                    if is_normed && matches!(scales, Scales::Tensor) {
                        continue;
                    }
                    let scale = format!("model.layers.{layer}.{projection}.weight_scale");
                    let wrong = num_same(with_wrong_scale(scales, &scale).dir());
                    println!("{scales:?}, {scale}: {wrong}");
                    assert!(3 * wrong < right, "{scales:?}, {scale}: {wrong} of {right}");
                }
            }
        }
    });
}

const PROJECTIONS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// A checkpoint one of whose scales is too large by half.
fn with_wrong_scale(scales: Scales, name: &str) -> Copy {
    fp8_checkpoint(scales).tensor(name, |view| {
        let mut data = view.data().to_vec();
        let (numbers, _) = data.as_chunks_mut();
        let middle = numbers.len() / 2;
        let scale = &mut numbers[middle];
        *scale = (1.5 * f32::from_le_bytes(*scale)).to_le_bytes();
        Some((view.dtype(), view.shape().to_vec(), data))
    })
}

/// Whether the logits of the first token, which are up to 4.8, differ by no more than sums do in f32.
fn has_same_logits(ours: &Served, theirs: &Served) -> bool {
    const TOLERANCE: f32 = 2e-4;
    let mut pairs = ours.logits[0].iter().zip(&theirs.logits[0]);
    pairs.all(|(a, b)| (a - b).abs() < TOLERANCE)
}

#[test]
fn a_request_alone_gives_the_same_bits_with_fp8_activations() {
    let test = "cuda_fp8::a_request_alone_gives_the_same_bits_with_fp8_activations";
    on_any_gpu(StandIn::new().set("SEED", 9), test, || {
        let checkpoint = fp8_checkpoint(Scales::Channels);
        let options = with_fp8_activations();
        let many_rows = ("many rows", wide(&Setup::default(), 256));
        for (what, setup) in setups().into_iter().chain([many_rows]) {
            let requests = [requests(), long_requests()].concat();
            assert_same_alone::<Cuda>(what, checkpoint.dir(), &options, &setup, requests);
        }
    });
}

/// Sums that are added to their output are computed for some rows at a time: more than 2048 of 4096 outputs are not.
#[test]
fn a_row_has_the_same_bits_in_any_piece_of_a_product() {
    let test = "cuda_fp8::a_row_has_the_same_bits_in_any_piece_of_a_product";
    on_any_gpu(StandIn::new(), test, || {
        const NUM_ROWS: usize = 2100;
        const NUM_TOKENS: usize = 7;
        const NARROW: usize = 16;
        const WIDE: usize = 4096;
        const BLOCK_LEN: usize = 128;
        let mut gpu = Cuda::open(&with_fp8_activations()).expect("a GPU");
        let number = |index: usize| (index * 37 % 101) as f32 / 50.0 - 1.0;
        let bf16s = |len: usize| -> Vec<bf16> {
            let numbers = (0..len).map(|index| bf16::from_f32(number(index)));
            numbers.collect()
        };
        let widening = Codes {
            rows: WIDE,
            columns: NARROW,
        };
        let widening = gpu.pack_quantised(&[&widening], Stacking::Concatenated);
        let widening = Linear {
            matrix: widening.expect("memory").expect("finite weights"),
            bias: None,
            place: None,
        };
        let bytes: Vec<_> = bf16s(NARROW * WIDE)
            .into_iter()
            .flat_map(bf16::to_le_bytes)
            .collect();
        let narrowing = RawMatrix::new(Dtype::Bf16, NARROW, WIDE, &bytes);
        let narrowing = gpu.pack(&[narrowing], Stacking::Concatenated);
        let bias = |output: usize| number(output * 13);
        let narrowing = Linear {
            matrix: narrowing.expect("memory").expect("finite weights"),
            bias: Some(
                gpu.upload_vector((0..NARROW).map(bias).collect())
                    .expect("memory"),
            ),
            place: None,
        };
        let table = gpu.upload_embedding(bf16s(NUM_TOKENS * NARROW), NARROW);
        let table = table.expect("memory");
        let [narrow_norm, wide_norm] =
            [NARROW, WIDE].map(|width| gpu.upload_vector(vec![1.0; width]).expect("memory"));
        let mut embedded = gpu.alloc_sums(NUM_ROWS, NARROW).expect("memory");
        let mut narrow = gpu.alloc_inputs(NUM_ROWS, NARROW).expect("memory");
        let mut sums = gpu.alloc_sums(NUM_ROWS, WIDE).expect("memory");
        let mut wide = gpu.alloc_inputs(NUM_ROWS, WIDE).expect("memory");
        let mut logits = gpu.alloc_logits(NUM_ROWS, NARROW).expect("memory");
        let num_blocks = NUM_ROWS.div_ceil(BLOCK_LEN);
        let layout = KvLayout {
            num_kv_heads: 1,
            head_dim: 64,
            values: KvValues::OfTheirOwn(64),
            indexer_dim: 0,
            block_size: BlockSize::new(BLOCK_LEN as u32).expect("not zero"),
            dtype: KvDtype::Bf16,
        };
        let cache = gpu
            .alloc_kv_cache(
                &KvLayouts::alike(layout, 1),
                &LayerGroups::one(1),
                num_blocks,
            )
            .expect("memory");
        let capacity = StepCapacity {
            max_num_tokens: NUM_ROWS,
            max_num_sequences: 1,
            max_seq_len: NUM_ROWS,
            max_blocks_per_sequence: num_blocks,
            num_layer_groups: 1,
            num_q_heads: 1,
            has_slopes: false,
            adapters: AdapterCapacity::default(),
        };
        gpu.reserve(&cache, &capacity).expect("memory");
        let tokens: Vec<_> = (0..NUM_ROWS).map(|row| (row % NUM_TOKENS) as _).collect();
        let rows: Vec<_> = (0..NUM_ROWS as u32).collect();
        let blocks: Vec<_> = (0..num_blocks as u32).map(BlockId).collect();
        let inputs = StepInputs {
            token_ids: &tokens,
            spans: &[KvSpan {
                tokens: 0..NUM_ROWS as u32,
                kv_len: NUM_ROWS as u32,
                block_table: 0..num_blocks as u32,
            }],
            block_tables: &blocks,
            kept_rows: &rows,
            sampled_rows: &rows,
            sampling: &vec![None; NUM_ROWS],
            ..StepInputs::default()
        };
        let norm = |weight| Norm::Rms { weight, eps: 1e-5 };
        let step = gpu.begin_step(&cache, inputs);
        gpu.embed(&step, EmbeddingTable::Own(&table), 1.0, &mut embedded);
        gpu.norm(NUM_ROWS, &embedded, norm(&narrow_norm), &mut narrow);
        for output in [Output::Store, Output::Add] {
            gpu.project(NUM_ROWS, &narrow, &widening, output, None, &mut sums);
        }
        gpu.norm(NUM_ROWS, &sums, norm(&wide_norm), &mut wide);
        gpu.logits(
            NUM_ROWS,
            &wide,
            &narrowing,
            LogitsTransform::IDENTITY,
            None,
            &mut logits,
        );
        gpu.end_step(step);
        let all = gpu.host_logits(&mut logits, NUM_ROWS);
        let all = all.expect("the step runs");
        let (first, others) = all.split_at(NUM_TOKENS * NARROW);
        let [rounded, exact] = [true, false].map(|is_rounded| {
            let expected = (0..NUM_TOKENS).flat_map(|token| {
                let row = |width: usize, row: usize| {
                    let numbers = (0..width).map(move |column| row * width + column);
                    numbers.map(|index| f64::from(bf16::from_f32(number(index)).to_f32()))
                };
                let x = normalised(&row(NARROW, token).collect::<Vec<_>>());
                let x = if is_rounded { rounded_to_e4m3(&x) } else { x };
                let sums =
                    (0..WIDE).map(|output| 2.0 * dot(x.iter().copied(), widening_row(output)));
                let x = normalised(&sums.collect::<Vec<_>>());
                let logits = (0..NARROW).map(|output| {
                    dot(x.iter().copied(), row(WIDE, output)) + f64::from(bias(output))
                });
                logits.collect::<Vec<_>>()
            });
            let expected: Vec<f64> = expected.collect();
            let square = |x: f64| x * x;
            let size: f64 = expected.iter().map(|&x| square(x)).sum();
            let error = expected.iter().zip(first.iter());
            let error: f64 = error.map(|(x, y)| square(x - f64::from(*y))).sum();
            (error / size).sqrt()
        });
        println!("errors: {rounded} with rounding, {exact} without");
        assert!(rounded < 0.004 && exact > 0.01, "{rounded}, {exact}");
        for (row, logits) in others.chunks(NARROW).enumerate() {
            let same = &first[row % NUM_TOKENS * NARROW..][..NARROW];
            assert_eq!(logits, same, "row {}", NUM_TOKENS + row);
        }
    });
}

/// FP8 weights with one scale for each output.
struct Codes {
    rows: usize,
    columns: usize,
}

impl QuantisedRows for Codes {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: QuantFormat {
                bits: CodeBits::Fp8,
                group_size: self.columns,
                has_offsets: false,
            },
            rows: self.rows,
            columns: self.columns,
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        row.resize(self.format(), self.columns);
        for (column, stored) in row.codes.iter_mut().enumerate() {
            *stored = code(index, column).cast_signed();
        }
        row.scales[0] = scale(index);
    }
}

/// All codes but NaN.
fn code(row: usize, column: usize) -> u8 {
    let code = (row * 29 + column * 13) % 254;
    (code % 127 + code / 127 * 128) as u8
}

fn scale(row: usize) -> f32 {
    1.0 / (row % 5 + 1) as f32
}

/// A row of these weights.
fn widening_row(row: usize) -> impl Iterator<Item = f64> {
    (0..).map(move |column| f64::from(scale(row)) * f64::from(from_e4m3(code(row, column))))
}

fn dot(x: impl Iterator<Item = f64>, y: impl Iterator<Item = f64>) -> f64 {
    x.zip(y).map(|(x, y)| x * y).sum()
}

/// A row after its norm, in bf16.
fn normalised(x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + 1e-5).sqrt();
    let values = x.iter().map(|x| bf16::from_f64(x * scale).to_f64());
    values.collect()
}

#[test]
fn fp8_activations_that_change_nothing_are_refused() {
    let test = "cuda_fp8::fp8_activations_that_change_nothing_are_refused";
    on_any_gpu(StandIn::new(), test, || {
        let source = ModelSource::open(&fixture("llama3")).expect("the checkpoint opens");
        let limits = Setup::default().runner_limits();
        let Err(error) = load_on_gpu(&source, limits, &with_fp8_activations()) else {
            panic!("it loads");
        };
        let error = error.to_string();
        for part in ["fp8_activations", "weight_only_precision"] {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    });
}

#[test]
fn fp8_activations_need_a_gpu_that_multiplies_them() {
    let test = "cuda_fp8::fp8_activations_need_a_gpu_that_multiplies_them";
    on_stand_in(StandIn::new().set("COMPUTE_CAPABILITY", 86), test, || {
        let Err(error) = Cuda::new(&with_fp8_activations()) else {
            panic!("it opens");
        };
        let error = error.to_string();
        for part in ["fp8_activations", "8.6", "8.9"] {
            assert!(error.contains(part), "'{part}' is not in: {error}");
        }
    });
}
