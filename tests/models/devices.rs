//! One decoder on two devices: the CPU, and another one.

use std::panic::catch_unwind;
use std::path::Path;

use inflight_device::{Device, KvDtype};
use inflight_device_cpu::{Cpu, CpuOptions};
use inflight_device_cuda::Cuda;
use inflight_engine::{BlockReuse, DraftOptions, OutputOptions, PromptLookup, Speculation};

use crate::errors::largest_error;
use crate::support::{Request, Served, Setup, TestedDevice, fixture, serve};
use inflight_reference_device::{Reference, ReferenceOptions};

/// A key or value may be rounded to the next 8-bit integer where the devices' sums differ in the last bits.
const INT8_TOLERANCE: f32 = 0.25;

/// Prompts that share beginnings, so that blocks are copied, and repeat themselves, so that there are drafts.
pub fn requests() -> Vec<Request> {
    let common: Vec<_> = (0..21).map(|i| (i * 37 + 11) % 90 + 3).collect();
    (0..6)
        .map(|index| {
            let own = (0..index as u32 * 3 + 2).map(|i| (i * 13 + index as u32) % 7 + 20);
            let prompt: Vec<_> = common.iter().copied().chain(own).collect();
            Request {
                arrival: index,
                drafts: DraftOptions::default(),
                outputs: OutputOptions {
                    context_logits: index % 2 == 1,
                    ..OutputOptions::default()
                },
                ..Request::greedy(&prompt, 12)
            }
        })
        .collect()
}

pub fn setups() -> Vec<(&'static str, Setup)> {
    let tight = Setup {
        max_num_requests: 4,
        max_num_tokens: 24,
        block_size: 8,
        num_blocks: 24,
        enable_chunked_context: true,
        ..Setup::default()
    };
    let reusing = Setup {
        reuse: BlockReuse::PartialBlocks,
        speculation: Some(Speculation {
            max_draft_tokens: 3,
            prompt_lookup: Some(PromptLookup { min: 1, max: 3 }),
            has_draft_model: false,
            recomputes_drafts: false,
        }),
        ..tight.clone()
    };
    let windowed = Setup {
        windows: &[16],
        num_sinks: 3,
        gives_back: true,
        ..tight.clone()
    };
    let int8 = Setup {
        kv_dtype: KvDtype::Int8,
        ..Setup::default()
    };
    vec![
        ("chunks", tight),
        ("copies and drafts", reusing),
        ("windows and sinks", windowed),
        ("int8 cache", int8),
    ]
}

#[test]
fn the_cpu_and_the_reference_device_agree() {
    let options = ReferenceOptions::default();
    for name in ["llama3", "qwen3"] {
        assert_devices_agree::<Reference>(name, &options);
    }
}

/// Sinks that are right before windows, of which sequences keep nothing else.
pub fn with_sinks_that_shift() -> Setup {
    Setup {
        windows: &[16, 9],
        num_sinks: 3,
        shifts_sinks: true,
        gives_back: true,
        ..Setup::default()
    }
}

#[test]
fn the_cpu_and_the_reference_device_agree_where_sinks_shift() {
    let setup = with_sinks_that_shift();
    for name in ["qwen3", "gpt-oss"] {
        let (ours, _) = serve(&mut setup.load(name), &setup, &requests());
        let mut reference =
            setup.load_on::<Reference>(&fixture(name), &ReferenceOptions::default());
        let (theirs, _) = serve(&mut reference, &setup, &requests());
        assert_near(name, &ours, &theirs, 0.1);
    }
}

/// Serves the same requests on the CPU and on another device, and compares tokens and logits.
pub fn assert_devices_agree<D: TestedDevice>(name: &str, options: &D::Options) {
    let requests = requests();
    for (what, setup) in setups() {
        let (ours, happened) = serve(&mut setup.load(name), &setup, &requests);
        let mut other = setup.load_on::<D>(&fixture(name), options);
        let (theirs, _) = serve(&mut other, &setup, &requests);
        if what == "copies and drafts" {
            assert!(happened.num_copies > 0 && happened.drafts.num_accepted > 0);
        }
        let tolerance = match setup.kv_dtype {
            KvDtype::Int8 => INT8_TOLERANCE,
            _ => 0.1,
        };
        assert_near(&format!("{name}, {what}"), &ours, &theirs, tolerance);
    }
}

/// Compares what two devices have served: logits differ by less than `tolerance`, and tokens are the same but for near
/// ties. The tolerance is of logits that spread by 1, as most of them do, and less where they spread less.
pub fn assert_near(what: &str, ours: &[Served], theirs: &[Served], tolerance: f32) {
    assert_within(what, ours, theirs, tolerance * spread(theirs).min(1.0));
}

/// Compares as [`assert_near`] does, with a tolerance that is an error of the reference itself: so much may a logit
/// differ. With a tenth of the logits of a step missing, the comparison fails.
pub fn assert_near_by_cost(what: &str, ours: &[Served], theirs: &[Served], tolerance: f32) {
    assert_within(what, ours, theirs, tolerance);
    let mut lacking = theirs.to_vec();
    let tenth = lacking[0].logits[0].iter_mut().step_by(10);
    tenth.for_each(|logit| *logit = 0.0);
    let is_near = catch_unwind(|| assert_within(what, &lacking, theirs, tolerance)).is_ok();
    assert!(
        !is_near,
        "{what}: {tolerance} is too much to notice anything"
    );
}

/// The largest difference between the logits of the first tokens, which follow equal prompts.
pub fn largest_first_error(ours: &[Served], theirs: &[Served]) -> f32 {
    let first = |all: &[Served]| -> Vec<f32> {
        let logits = all.iter().flat_map(|served| &served.logits[0]);
        logits.copied().collect()
    };
    largest_error(&first(ours), &first(theirs))
}

fn assert_within(what: &str, ours: &[Served], theirs: &[Served], tolerance: f32) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let largest = largest_first_error(ours, theirs);
    println!("{what}: the first logits differ by {largest}, and may by {tolerance}");
    let pairs = ours.iter().zip(theirs);
    let num_same: usize = pairs.map(|(a, b)| num_same(what, a, b, tolerance)).sum();
    let num_tokens: usize = ours.iter().map(|served| served.tokens.len()).sum();
    println!("{what}: {num_same} of {num_tokens} tokens are the same");
    assert!(2 * num_same >= num_tokens, "{what}: only {num_same} tokens");
}

/// The standard deviation of the logits of the generated tokens.
fn spread(served: &[Served]) -> f32 {
    let logits = || {
        served
            .iter()
            .flat_map(|served| served.logits.iter().flatten())
    };
    let num = logits().count() as f32;
    let mean = logits().sum::<f32>() / num;
    let squares: f32 = logits().map(|logit| (logit - mean).powi(2)).sum();
    (squares / num).sqrt()
}

/// How many tokens are the same before the first near tie, which rounding may decide either way. Up to there, logits
/// are near each other.
fn num_same(what: &str, ours: &Served, theirs: &Served, tolerance: f32) -> usize {
    let assert_near = |ours: &[f32], theirs: &[f32]| {
        let error = largest_error(ours, theirs);
        assert!(error < tolerance, "{what}: logits differ by {error}");
    };
    assert_near(&ours.context_logits, &theirs.context_logits);
    for index in 0..ours.tokens.len() {
        let (logits, of_reference) = (&ours.logits[index], &theirs.logits[index]);
        assert_near(logits, of_reference);
        let [token, other] = [ours.tokens[index], theirs.tokens[index]];
        if token != other {
            let lead = logits[token as usize] - logits[other as usize];
            assert!(lead < tolerance, "{what}: {token} leads {other} by {lead}");
            return index;
        }
    }
    ours.tokens.len()
}

#[test]
fn noise_is_near_no_logits_however_flat_they_are() {
    let setup = Setup::default();
    for name in ["llama3", "cohere"] {
        let (theirs, _) = serve(&mut setup.load(name), &setup, &requests());
        let is_near = |change: &dyn Fn(&mut f32)| {
            let mut ours = theirs.clone();
            let tenth = ours[3].logits[5].iter_mut().step_by(10);
            tenth.for_each(change);
            catch_unwind(|| assert_near(name, &ours, &theirs, 0.1)).is_ok()
        };
        assert!(is_near(&|_| ()));
        assert!(!is_near(&|logit| *logit = 0.0), "{name}: missing");
        assert!(!is_near(&|logit| *logit = f32::NAN), "{name}: NaN");
        assert!(!is_near(&|logit| *logit *= 1.3), "{name}: too large");
    }
}

#[test]
fn what_comes_back_from_host_memory_gives_the_same_bits() {
    for name in ["llama3", "qwen2"] {
        assert_host_blocks_change_nothing::<Cpu>(name, &CpuOptions::default(), &KvDtype::ON_CPU);
    }
    let of_latents = [KvDtype::Bf16];
    assert_host_blocks_change_nothing::<Cpu>("deepseek-v2", &CpuOptions::default(), &of_latents);
    let options = ReferenceOptions::default();
    assert_host_blocks_change_nothing::<Reference>("llama3", &options, &KvDtype::ALL);
}

/// Serves the same requests on a device and on the reference device, and compares tokens and logits.
pub fn assert_agrees_with_reference<D: TestedDevice>(
    what: &str,
    dir: &Path,
    options: &D::Options,
    setup: &Setup,
    requests: &[Request],
    tolerance: f32,
) {
    let reference = ReferenceOptions::default();
    let (ours, _) = serve(&mut setup.load_on::<D>(dir, options), setup, requests);
    let mut reference = setup.load_on::<Reference>(dir, &reference);
    let (theirs, _) = serve(&mut reference, setup, requests);
    assert_near(what, &ours, &theirs, tolerance);
}

/// Serves requests together, and each of them alone with its prompt in one step and without drafts, and compares every
/// bit.
pub fn assert_same_alone<D: TestedDevice>(
    what: &str,
    dir: &Path,
    options: &D::Options,
    setup: &Setup,
    requests: Vec<Request>,
) {
    let load = |setup: &Setup| setup.load_on::<D>(dir, options);
    let (together, _) = serve(&mut load(setup), setup, &requests);
    let alone = Setup {
        max_num_requests: 1,
        enable_chunked_context: false,
        max_num_tokens: 256,
        speculation: None,
        ..setup.clone()
    };
    for (request, together) in requests.into_iter().zip(together) {
        let (alone, _) = serve(&mut load(&alone), &alone, &[request]);
        assert_same_bits(what, &alone[0], &together);
    }
}

/// Serves conversations that return when others have taken their blocks, once with and once without host memory, and
/// compares every bit.
pub fn assert_host_blocks_change_nothing<D: TestedDevice>(
    name: &str,
    options: &D::Options,
    kv_dtypes: &[KvDtype],
) {
    let mut requests = Vec::new();
    for round in 0..2 {
        for user in 0..6 {
            let prompt: Vec<_> = (0..45).map(|i| (i * 7 + user * 11) % 90 + 3).collect();
            requests.push(Request {
                arrival: (6 * round + user as usize) * 20,
                ..Request::greedy(&prompt, 6)
            });
        }
    }
    for &kv_dtype in kv_dtypes {
        let without = Setup {
            block_size: 8,
            num_blocks: 14,
            reuse: BlockReuse::PartialBlocks,
            kv_dtype,
            ..Setup::default()
        };
        let with = Setup {
            num_host_blocks: 64,
            ..without.clone()
        };
        let [without, with] = [without, with].map(|setup| {
            let mut runner = setup.load_on::<D>(&fixture(name), options);
            serve(&mut runner, &setup, &requests)
        });
        assert_eq!(without.1.num_onboarded, 0);
        assert!(with.1.num_offloaded > 20, "{:?}", with.1);
        assert!(with.1.num_onboarded > 20, "{:?}", with.1);
        for (without, with) in without.0.iter().zip(&with.0) {
            assert_same_bits(&format!("{name}, {kv_dtype}"), without, with);
        }
    }
}

/// Like `assert_eq!`, without printing thousands of logits.
pub fn assert_same_bits(what: &str, alone: &Served, together: &Served) {
    assert_eq!(alone.tokens, together.tokens, "{what}");
    let differs = |a: &[f32], b: &[f32]| a.iter().zip(b).position(|(a, b)| a != b);
    for (index, (a, b)) in alone.logits.iter().zip(&together.logits).enumerate() {
        assert_eq!(differs(a, b), None, "{what}: logits of token {index}");
    }
    let [a, b] = [alone, together].map(|served| &served.context_logits[..]);
    assert_eq!(
        (a.len(), differs(a, b)),
        (b.len(), None),
        "{what}: context logits"
    );
}

#[test]
fn each_constant_of_devices_sets_some_apart() {
    fn constants<D: Device>() -> (bool, bool, bool, bool) {
        let has_own_files = D::PACKED_FILE_KIND.is_some();
        (D::SAMPLES, D::HAS_FP8, D::PACKS_E2M1, has_own_files)
    }
    assert_eq!(constants::<Cpu>(), (false, false, false, false));
    assert_eq!(constants::<Cuda>(), (true, true, true, true));
}

#[test]
fn each_type_of_operations_is_lacking_on_some_devices() {
    fn has<D: Device>() -> [bool; 6] {
        [
            D::STACKS.is_some(),
            D::TILES.is_some(),
            D::ROW_NORMS.is_some(),
            D::STATES.is_some(),
            D::LAYER_INPUTS.is_some(),
            D::INDEXER.is_some(),
        ]
    }
    assert_eq!(has::<Cpu>(), [false, true, true, true, true, true]);
    assert_eq!(has::<Cuda>(), [true, false, true, false, false, false]);
    assert_eq!(has::<Reference>(), [false, false, false, true, true, true]);
}
