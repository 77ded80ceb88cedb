//! Weights of all families that are rounded to 8 or 4 bits at load.

use std::cell::Cell;

use half::bf16;
use inflight_base::TokenId;
use inflight_engine::OutputOptions;
use inflight_numbers::CodeBits;
use inflight_runner::WeightPrecision;

use crate::batching::serves_as_alone;
use crate::copy::Copy;
use crate::families::{Family, RECURRENT, all_families, on_shares};
use crate::family_reuse::{reuses_as_alone, reusing};
use crate::support::{Request, Setup, serve};

pub const INT8: WeightPrecision = WeightPrecision::new(CodeBits::Eight);
pub const INT4: WeightPrecision = WeightPrecision::new(CodeBits::Four);

/// Prompts have the tokens below it. Other rows of an embedding are only read if it is the output layer too.
const NUM_EMBEDDED: usize = 80;

/// What a tensor is for.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Rounded to the precision.
    Projection,
    /// Rounded to 8 bits.
    OutputLayer,
    /// Tokens: rounded only as an output layer.
    Embedding,
    /// Chooses experts or positions, or weighs a shared expert: never rounded.
    Router,
    /// Norms, biases and positions: never rounded.
    Other,
}

impl Kind {
    fn of(name: &str, shape: &[usize]) -> Self {
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let ends = |parts: &[&str]| parts.iter().any(|part| name.ends_with(part));
        match () {
            () if shape.len() < 2 || ends(&["bias"]) => Self::Other,
            // Convolutions of channels.
            () if shape.len() == 3 && shape[1] == 1 => Self::Other,
            // Rates of states, whatever their shape.
            () if ends(&["A_log"]) => Self::Other,
            // The norms of heads are rows of one tensor. Coefficients of streams are f32.
            () if has(&["embed_positions", "wpe"]) => Self::Other,
            () if ends(&["_norm.weight", "_coefs.weight"]) => Self::Other,
            () if has(&[
                "embed_tokens",
                "tok_embeddings",
                "embed_in",
                "word_embeddings",
                "wte",
                "backbone.embed",
            ]) =>
            {
                Self::Embedding
            }
            // The last one is InternLM 2's name.
            () if has(&["lm_head", "embed_out"]) || name == "output.weight" => Self::OutputLayer,
            () if has(&[".indexer."]) => Self::Router,
            () if ends(&["_input_gate.weight"]) => Self::Projection,
            () if ends(&[
                "gate.weight",
                "gate.wg.weight",
                "router.weight",
                "router.layer.weight",
                "router.proj.weight",
                "router.classifier.weight",
            ]) =>
            {
                Self::Router
            }
            () => Self::Projection,
        }
    }
}

/// The logits of all tokens of a few prompts.
fn logits(copy: &Copy, weights: Option<WeightPrecision>) -> Vec<f32> {
    let setup = Setup {
        weights,
        ..Setup::default()
    };
    let prompts = (0..3).map(|seed| {
        let token = |i: usize| 3 + (i * (17 + seed) + i * i * 7 + seed * 31) % (NUM_EMBEDDED - 3);
        let prompt: Vec<_> = (0..40).map(|i| token(i) as TokenId).collect();
        Request {
            outputs: OutputOptions {
                context_logits: true,
                ..OutputOptions::default()
            },
            ..Request::greedy(&prompt, 1)
        }
    });
    let prompts: Vec<_> = prompts.collect();
    let (served, _) = serve(&mut setup.load_from(copy.dir()), &setup, &prompts);
    served
        .into_iter()
        .flat_map(|it| it.context_logits)
        .collect()
}

fn largest(values: &[bf16]) -> f32 {
    values
        .iter()
        .fold(0.0, |it, value| value.to_f32().abs().max(it))
}

/// A copy in which some weights are this share of the tensor's largest one: so little that it is rounded to 0.
fn with_small_weights(name: &str, share: impl Fn(Kind) -> f32) -> Copy {
    Copy::of(name).values(|name, shape, values| {
        let kind = Kind::of(name, shape);
        let small = bf16::from_f32(share(kind) * largest(values));
        let first = match kind {
            Kind::Other => return,
            Kind::Embedding => NUM_EMBEDDED * shape[1],
            Kind::Projection | Kind::OutputLayer | Kind::Router => 0,
        };
        for (index, value) in values.iter_mut().enumerate().skip(first) {
            // One of 16, and never all of a group.
            if (index as u32).wrapping_mul(0x9e37_79b1) >> 28 == 0 {
                *value = small;
            }
        }
    })
}

/// A copy without weights, and whether the family has routers by the names of its tensors.
fn with_zeros(name: &str) -> (Copy, bool) {
    let has_router = Cell::new(false);
    let copy = with_small_weights(name, |kind| {
        has_router.set(has_router.get() || kind == Kind::Router);
        0.0
    });
    (copy, has_router.get())
}

#[test]
fn families_with_experts_or_streams_have_routers() {
    let with_router = all_families().filter(|(name, _)| with_zeros(name).1);
    assert_eq!(with_router.count(), 54);
}

fn every_projection_is_rounded_and_no_router(families: &[Family]) {
    // An output layer also has 8 bits where groups are as small as the rest of a row.
    let small = |kind| match kind {
        Kind::OutputLayer | Kind::Embedding => 1.0 / 60_000.0,
        Kind::Projection | Kind::Router | Kind::Other => 1.0 / 4000.0,
    };
    for &(name, _) in families {
        let is_router = |kind| kind == Kind::Router;
        let only = |in_routers| {
            with_small_weights(name, |kind| match is_router(kind) == in_routers {
                true => small(kind),
                false => 0.0,
            })
        };
        let (zero, has_router) = with_zeros(name);
        let [in_projections, in_routers] = [false, true].map(only);
        let expected = logits(&zero, None);
        assert!(expected != logits(&in_projections, None), "{name}");
        let is_read = expected != logits(&in_routers, None);
        assert_eq!(is_read, has_router, "{name}");
        for weights in [INT8, INT4] {
            let expected = logits(&zero, Some(weights));
            let is_same = expected == logits(&in_projections, Some(weights));
            assert!(is_same, "{name}: a tensor is not rounded to {weights:?}");
            let is_same = expected == logits(&in_routers, Some(weights));
            assert_eq!(
                is_same, !has_router,
                "{name}: a router is rounded to {weights:?}"
            );
        }
    }
}

/// A copy whose weights have been rounded as they lie in the file, 32 at a time.
fn rounded_in_the_file(name: &str, bits: CodeBits) -> Copy {
    Copy::of(name).values(|name, shape, values| {
        let num_steps = match (Kind::of(name, shape), bits) {
            (Kind::Projection, CodeBits::Four) => 8.0,
            (Kind::Projection | Kind::OutputLayer, _) => 127.0,
            (Kind::Embedding | Kind::Router | Kind::Other, _) => return,
        };
        for group in values.chunks_mut(32) {
            let step = largest(group) / num_steps;
            for value in group {
                *value = bf16::from_f32((value.to_f32() / step).round() * step);
            }
        }
    })
}

/// The root of the mean squared difference.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

on_shares! { rounded_projections: 8 of all_families(), every_projection_is_rounded_and_no_router }
on_shares! { loss_by_rounding: 8 of all_families(), loses_as_much_as_its_weights }
on_shares! { rounded_and_scheduled: 8 of all_families(), gives_the_same_bits_however_it_is_scheduled }

/// With 8 bits, activations lose as much as weights, which is the root of two together; with 4 bits, much less. Where
/// groups begin changes the loss by a tenth.
fn loses_as_much_as_its_weights(families: &[Family]) {
    for &(name, _) in families {
        let whole = Copy::of(name);
        let expected = logits(&whole, None);
        let [of_int8, of_int4] = [(INT8, 0.9..1.8), (INT4, 0.7..1.3)].map(|(weights, bounds)| {
            let error = distance(&expected, &logits(&whole, Some(weights)));
            let copy = rounded_in_the_file(name, weights.bits);
            let of_copy = distance(&expected, &logits(&copy, None));
            let ratio = error / of_copy;
            // Behind four layers, other experts or positions are chosen here and there.
            let bounds = match name {
                "qwen3-5-moe" | "glm4-moe" | "exaone-moe" | "granite-moe-swa" | "glm-moe-dsa" => {
                    bounds.start - 0.1..bounds.end + 0.4
                }
                // Rows of 14 times are groups of their own, which lose less than groups across rows.
                "falcon-mamba" => bounds.start - 0.1..bounds.end,
                _ => bounds,
            };
            println!("{name}, {weights:?}: {error:.4}, {ratio:.2} of that of a rounded file");
            assert!(
                bounds.contains(&ratio),
                "{name}, {weights:?}: {error}, {ratio}"
            );
            error
        });
        assert!(of_int4 > 2.0 * of_int8, "{name}: {of_int8}, {of_int4}");
    }
}

fn gives_the_same_bits_however_it_is_scheduled(families: &[Family]) {
    for family in families {
        for weights in [INT8, INT4] {
            let weights = Some(weights);
            if RECURRENT.contains(family) {
                let setup = Setup {
                    weights,
                    max_num_tokens: 20,
                    enable_chunked_context: true,
                    ..Setup::default()
                };
                serves_as_alone(family.0, &setup);
            } else {
                let setup = Setup {
                    weights,
                    ..reusing()
                };
                reuses_as_alone(family.0, &setup);
            }
        }
    }
}
