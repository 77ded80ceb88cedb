//! Gemma 3n (E2B and E4B), by Google, for text.
//!
//! Gemma 3 whose scores have no factor, and whose values have norms without weights. As in Gemma 4, layers read inputs
//! of their own (`hidden_size_per_layer_input`), and the last `num_kv_shared_layers` layers read the keys and values of
//! the last layer of their kind before them. Norms are stored as they are.
//!
//! - The residual stream is one of `altup_num_inputs` (AltUp), of which layers compute the first one. Beside attention
//!   is a block of rank `laurel_rank` (LAuReL).
//! - In layers with an `activation_sparsity_pattern` above 0, gates have a cutoff, the normal quantile of that share:
//!   it is subtracted from each gate, and negative results become 0.
//! - Tokens of images and sound, which are behind `vocab_size_per_layer_input`, have the per-layer embeddings of token
//!   0.
//!
//! Of a checkpoint with encoders of images and sound, the language model is served.
//!
//! Source: configuration_gemma3n.py and modeling_gemma3n.py of transformers; Baykal et al., arXiv:2301.13310; Menghani
//! et al., arXiv:2411.07501.

use serde_json::{Map, Value, json};

use super::bounds::{MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gemma::{GLOBAL_ROPE, NORMS, embedding_scale, local_rope, soft_cap};
use super::gguf::{GgufArchitecture, GgufConfig};
use super::windows::{no_windows, windowed_except_every, windows_of};
use crate::rope::Rope;
use crate::spec::{
    FeedForward, InputBlock, LayerInputsSpec, LayerSpec, ModelSpec, Projection, QkNormSpec,
    StreamsSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile};
use inflight_device::{Activation, LogitsTransform, MAX_STREAMS};
use inflight_numbers::Stacking;

pub const GEMMA3N: Family = Family {
    class: "Gemma3nForCausalLM",
    gguf: Some(GGUF),
    describe: |config| describe(config, GEMMA3N.class),
};

/// Gemma 3n with encoders of images and sound.
pub const GEMMA3N_WITH_IMAGES: Family = Family {
    class: "Gemma3nForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let text = config.object("text_config")?;
        let silent = || JsonFile::new(config.path(), "text_config.", Map::new());
        let text = text.unwrap_or_else(silent);
        let mut spec = describe(&text, GEMMA3N_WITH_IMAGES.class)?;
        spec.tied_embeddings |= config.bool_or("tie_word_embeddings", true)?;
        Ok(spec)
    },
};

/// How llama.cpp stores the family (`Gemma3NModel` of its converter): the projections of streams in one tensor each,
/// and cutoffs in place of the shares that they are the quantiles of. Per-layer embeddings are padded with zeros up to
/// the size of the vocabulary, so tokens of images and sound have none.
const GGUF: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
        ("altup.router_norm", "altup_router_norm"),
        ("altup.modality_router", "altup_router"),
        ("altup.prediction_coefs", "altup_predict_coef"),
        ("altup.correction_coefs", "altup_correct_coef"),
        (OUTPUT_SCALE, "altup_correct_scale"),
        ("laurel.linear_left", "laurel_l"),
        ("laurel.linear_right", "laurel_r"),
        ("laurel.post_laurel_norm", "laurel_post_norm"),
    ],
    keys: &[
        ("attention.shared_kv_layers", SHARED_LAYERS),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("altup.active_idx", "altup_active_idx"),
        ("altup.num_inputs", "altup_num_inputs"),
        (
            "embedding_length_per_layer_input",
            "hidden_size_per_layer_input",
        ),
        ("rope.freq_base_swa", "rope_local_base_freq"),
    ],
    has_windows: true,
    by_layer: &["feed_forward_length"],
    optional_modules: &[("altup_correct_scale", OUTPUT_SCALE)],
    add_read: add_layers,
    rewrite: |gguf, spec| {
        set_cutoffs(gguf, spec)?;
        if let (Some(inputs), Some([rows, _])) = (
            &mut spec.layer_inputs,
            gguf.shape("per_layer_token_embd.weight"),
        ) {
            inputs.num_rows = (*rows).min(MAX_VOCAB);
        }
        Ok(())
    },
    ..GgufArchitecture::named("gemma3n")
};

/// Adds the widths of feed-forward blocks, and what only the shapes of tensors tell.
fn add_layers(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    gguf.required("attention.shared_kv_layers")?;
    if let Some(widths) = gguf.numbers_of_layers("feed_forward_length")? {
        let widths: Vec<_> = widths.into_iter().map(|width| width as u64).collect();
        config.insert(INNER.to_owned(), json!(widths));
    }
    for (name, key) in [
        ("blk.0.laurel_l.weight", "laurel_rank"),
        ("per_layer_token_embd.weight", "vocab_size_per_layer_input"),
    ] {
        if let Some([rows, _]) = gguf.shape(name) {
            config.insert(key.to_owned(), json!(rows));
        }
    }
    Ok(())
}

/// Sets the cutoffs of gates, which the file has in place of shares: -inf for none.
fn set_cutoffs(gguf: &GgufFolder, spec: &mut ModelSpec) -> Result<(), LoadError> {
    const KEY: &str = "gemma3n.activation_sparsity_scale";
    let Some(cutoffs) = gguf.numbers(KEY)? else {
        return Err(gguf.error(format!("{KEY} is missing; the file is damaged")));
    };
    if cutoffs.len() != spec.num_layers() {
        return Err(gguf.error(format!(
            "{KEY} has {} elements for {} layers; the file is damaged",
            cutoffs.len(),
            spec.num_layers()
        )));
    }
    for (layer, cutoff) in spec.layers.iter_mut().zip(cutoffs) {
        layer.gate_cutoff = match cutoff {
            f64::NEG_INFINITY => None,
            _ if cutoff.is_finite() => Some(cutoff as f32),
            _ => {
                let problem = format!("{KEY}: {cutoff} is not a number below infinity");
                return Err(gguf.error(format!("{problem}; the file is damaged")));
            }
        };
        stack_gates(layer);
    }
    Ok(())
}

const OUTPUT_SCALE: &str = "altup.correct_output_scale";
const SHARED_LAYERS: &str = "num_kv_shared_layers";
const SPARSITY: &str = "activation_sparsity_pattern";
const INNER: &str = "intermediate_size";
const DEFAULT_WINDOW: usize = 512;
/// By default every fifth layer has full attention.
const INTERVAL: usize = 5;

fn describe(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(262_400, 2048, 16_384, 35, 8, 32_768)),
        num_kv_heads: Some(2),
        head_dim: Some(256),
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        rope: GLOBAL_ROPE,
        keys: Keys {
            activation: "hidden_activation",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    // One number, or one for each layer, which is read later.
    let listed = config.get(INNER).filter(|value| value.is_array());
    let scalar = match listed {
        Some(_) => &config.with(INNER, json!(1)),
        None => config,
    };
    let dimensions = Dimensions::from_config(scalar, &defaults)?;
    let num_layers = dimensions.num_layers;
    let inner = match listed {
        Some(list) => {
            let is_size = |size: &u64| (1..=MAX_WIDTH as u64).contains(size);
            let size = |value: &Value| value.as_u64().filter(is_size).map(|size| size as usize);
            let expected = format!("a number, or a list of {num_layers} numbers");
            numbers(config, INNER, list, num_layers, size, expected)?
        }
        None => vec![dimensions.intermediate_size; num_layers],
    };
    let cutoffs = cutoffs(config, num_layers)?;
    let is_windowed = windowed_except_every(config, num_layers, INTERVAL)?;
    let windows = windows_of(config, &is_windowed, DEFAULT_WINDOW)?;
    let sources = kv_sources(config, &is_windowed)?;
    let local = local_rope(
        config,
        dimensions.max_position_embeddings,
        dimensions.head_dim,
    )?;
    let has_bias = config.bool_or("attention_bias", false)?;
    let width = config.size("hidden_size_per_layer_input", 1..=MAX_WIDTH)?;
    let width = width.unwrap_or(256);
    let layer = |index: usize| {
        let of_layer = Dimensions {
            intermediate_size: inner[index],
            ..dimensions.clone()
        };
        let mut layer = layer(&of_layer, width, cutoffs[index]);
        let attention = &mut layer.attention;
        attention.window = windows[index];
        if is_windowed[index] {
            attention.rope = Rope::clone(&local);
        }
        if let Some(source) = sources[index] {
            attention.kv_source = Some(source);
            attention.qkv.parts.truncate(1);
            // The norm of keys is never applied, as there are none.
            attention.qk_norm = Some(QkNormSpec {
                k: "self_attn.q_norm",
                ..QkNormSpec::of_heads(dimensions.norm.eps)
            });
        }
        attention.set_biases(has_bias);
        layer
    };
    let layers = (0..num_layers).map(layer).collect();
    let streams = streams(config, &dimensions)?;
    let empty = dimensions.llama_layer();
    let mut spec = dimensions.model(class, empty, no_windows(num_layers));
    spec.layers = layers;
    spec.embedding_scale = embedding_scale(spec.hidden_size);
    spec.logits = LogitsTransform {
        scale: 1.0,
        soft_cap: soft_cap(config, "final_logit_softcapping", Some(30.0))?,
    };
    spec.layer_inputs = Some(layer_inputs(config, &spec, width)?);
    spec.streams = Some(streams);
    Ok(spec)
}

/// A layer with keys and values of its own, without a window.
fn layer(dimensions: &Dimensions, width: usize, cutoff: Option<f32>) -> LayerSpec {
    let hidden = dimensions.hidden_size;
    let mut layer = dimensions.llama_layer();
    layer.norms = NORMS;
    layer.attention.scale = 1.0;
    layer.attention.qk_norm = Some(QkNormSpec {
        has_values: true,
        ..QkNormSpec::of_heads(dimensions.norm.eps)
    });
    layer.input_block = Some(InputBlock {
        gate: Projection::single("per_layer_input_gate", width, hidden),
        activation: dimensions.activation,
        down: Projection::single("per_layer_projection", hidden, width),
        after: "post_per_layer_input_norm",
    });
    layer.gate_cutoff = cutoff;
    stack_gates(&mut layer);
    layer
}

/// Puts all gates in front of ups where gates have a cutoff.
fn stack_gates(layer: &mut LayerSpec) {
    if let FeedForward::Gated { gate_up, .. } = &mut layer.feed_forward {
        gate_up.stacking = match layer.gate_cutoff {
            Some(_) => Stacking::Concatenated,
            None => Stacking::Interleaved,
        };
    }
}

/// The layer whose keys and values each layer reads, if it is another one.
fn kv_sources(config: &JsonFile, is_windowed: &[bool]) -> Result<Vec<Option<usize>>, LoadError> {
    let num_layers = is_windowed.len();
    let num_shared = config.size(SHARED_LAYERS, 0..=MAX_LAYERS)?.unwrap_or(15);
    let num_own = num_layers.checked_sub(num_shared);
    let num_own = num_own.filter(|own| *own > 0).ok_or_else(|| {
        let expected = format!("below the number of layers, {num_layers}");
        config.unexpected(SHARED_LAYERS, num_shared, expected)
    })?;
    let (own, shared) = is_windowed.split_at(num_own);
    let source = |kind: &bool| {
        let source = own.iter().rposition(|other| other == kind);
        source.map(Some).ok_or_else(|| {
            let kind = if *kind { "sliding" } else { "full" };
            let problem = format!(
                "{num_shared} of {num_layers} layers, and none before them has {kind}_attention"
            );
            config.unexpected(SHARED_LAYERS, problem, "fewer")
        })
    };
    let shared = shared.iter().map(source);
    let own = own.iter().map(|_| Ok(None));
    own.chain(shared).collect()
}

/// How many standard deviations above their mean gates count, for each layer with sparse ones.
fn cutoffs(config: &JsonFile, num_layers: usize) -> Result<Vec<Option<f32>>, LoadError> {
    let shares = match config.get(SPARSITY) {
        Some(list) => {
            let is_share = |share: &f64| (0.0..1.0).contains(share);
            let expected = format!("a list of {num_layers} numbers from 0 on, and below 1");
            let share = |value: &Value| value.as_f64().filter(is_share);
            numbers(config, SPARSITY, list, num_layers, share, expected)?
        }
        None => {
            let num_sparse = if num_layers > 10 { 10 } else { 0 };
            let share = |layer| if layer < num_sparse { 0.95 } else { 0.0 };
            (0..num_layers).map(share).collect()
        }
    };
    let cutoff = |share: f64| (share > 0.0).then(|| normal_quantile(share) as f32);
    Ok(shares.into_iter().map(cutoff).collect())
}

/// A list of one number for each layer.
fn numbers<T>(
    config: &JsonFile,
    key: &str,
    list: &Value,
    num_layers: usize,
    read: impl Fn(&Value) -> Option<T>,
    expected: String,
) -> Result<Vec<T>, LoadError> {
    let all = list.as_array().filter(|all| all.len() == num_layers);
    let all = all.and_then(|all| all.iter().map(read).collect());
    all.ok_or_else(|| config.unexpected(key, list, expected))
}

/// The number that a standard normal variable is below with probability `p`, which is between 0 and 1: algorithm AS 241
/// (Wichura, Applied Statistics 37, 1988), whose error is below 1e-7.
fn normal_quantile(p: f64) -> f64 {
    const CENTRE: ([f64; 4], [f64; 4]) = (
        [
            3.387_132_717_9,
            50.434_271_938,
            159.291_132_02,
            59.109_374_720,
        ],
        [1.0, 17.895_169_469, 78.757_757_664, 67.187_563_600],
    );
    const NEAR: ([f64; 4], [f64; 3]) = (
        [
            1.423_437_277_7,
            2.756_815_39,
            1.306_728_481_6,
            0.170_238_211_03,
        ],
        [1.0, 0.737_001_642_5, 0.120_211_329_75],
    );
    const FAR: ([f64; 4], [f64; 3]) = (
        [
            6.657_905_115,
            3.081_226_386,
            0.428_682_943_37,
            0.017_337_203_997,
        ],
        [1.0, 0.241_978_942_25, 0.012_258_202_635],
    );
    let ratio = |above: &[f64], below: &[f64], x: f64| {
        let value = |all: &[f64]| all.iter().rev().fold(0.0, |sum, coef| sum * x + coef);
        value(above) / value(below)
    };
    let distance = p - 0.5;
    if distance.abs() <= 0.425 {
        return distance * ratio(&CENTRE.0, &CENTRE.1, 0.180_625 - distance * distance);
    }
    let root = (-p.min(1.0 - p).ln()).sqrt();
    let size = match root <= 5.0 {
        true => ratio(&NEAR.0, &NEAR.1, root - 1.6),
        false => ratio(&FAR.0, &FAR.1, root - 5.0),
    };
    size.copysign(distance)
}

fn streams(config: &JsonFile, dimensions: &Dimensions) -> Result<StreamsSpec, LoadError> {
    const ACTIVE: &str = "altup_active_idx";
    const RANK: &str = "laurel_rank";
    let active = config.size(ACTIVE, 0..=MAX_STREAMS)?.unwrap_or(0);
    if active != 0 {
        return Err(config.unexpected(ACTIVE, active, "supported; only 0 is"));
    }
    let num = config.size("altup_num_inputs", 1..=MAX_STREAMS)?;
    let num = num.unwrap_or(4);
    let rank = config.size(RANK, 1..=MAX_WIDTH)?.unwrap_or(64);
    let is_scaled = config.bool_or("altup_correct_scale", true)?;
    let hidden = dimensions.hidden_size;
    Ok(StreamsSpec {
        num,
        inputs: "model.altup_projections.{}",
        outputs: "model.altup_unembed_projections.{}",
        router_norm: "altup.router_norm",
        router: Projection::single("altup.modality_router", num, hidden),
        prediction: "altup.prediction_coefs",
        correction: "altup.correction_coefs",
        output_scale: is_scaled.then_some(OUTPUT_SCALE),
        left: Projection::single("laurel.linear_left", rank, hidden),
        right: Projection::single("laurel.linear_right", hidden, rank),
        laurel_norm: "laurel.post_laurel_norm",
    })
}

fn layer_inputs(
    config: &JsonFile,
    spec: &ModelSpec,
    width: usize,
) -> Result<LayerInputsSpec, LoadError> {
    let num_rows = config.size("vocab_size_per_layer_input", 1..=MAX_VOCAB)?;
    Ok(LayerInputsSpec {
        embedding: "model.embed_tokens_per_layer",
        num_rows: num_rows.unwrap_or(262_144),
        embedding_scale: embedding_scale(width),
        projection: Projection::single(
            "model.per_layer_model_projection",
            width * spec.num_layers(),
            spec.hidden_size,
        ),
        projection_scale: (spec.hidden_size as f32).sqrt().recip(),
        norm: "model.per_layer_projection_norm",
        scale: 2.0_f32.sqrt().recip(),
        width,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        // From tables.
        for (p, expected) in [
            (0.5, 0.0),
            (0.75, 0.674_489_750),
            (0.95, 1.644_853_627),
            (0.05, -1.644_853_627),
            (0.999, 3.090_232_306),
            (1e-12, -7.034_483_783),
        ] {
            let found = normal_quantile(p);
            assert!((found - expected).abs() < 2e-6, "{p}: {found}");
        }
    }
}
