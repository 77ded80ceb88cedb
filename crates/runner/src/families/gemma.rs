//! Gemma, Gemma 2, VaultGemma and Gemma 3, by Google.
//!
//! Llama with GELU as the activation, and tokens that are embedded with a factor of the square root of the hidden size,
//! rounded to bf16 as transformers does. Checkpoints store the weights of norms as differences from 1.
//!
//! - The layers of the first Gemma are those of Llama. Its first checkpoints say `hidden_act: gelu` where they mean
//!   the tanh approximation.
//! - The layers of Gemma 2 and 3 have four norms, in front of each block and behind it, and the factor of scores
//!   `query_pre_attn_scalar^-0.5`.
//! - Gemma 2 bounds scores and logits (`attn_logit_softcapping`, `final_logit_softcapping`). Every second layer has a
//!   window.
//! - VaultGemma is Gemma 2 without the norms behind blocks.
//! - Gemma 3 normalises the heads of queries and keys. Five of six layers have a window (`sliding_window_pattern`, or
//!   `layer_types`) and a position embedding of their own, with the base `rope_local_base_freq` and without scaling.
//! - With images, the tokens of each see each other, in all layers; their rows are not multiplied by the factor of
//!   embedded tokens.
//!
//! Source: modeling_gemma.py, modeling_gemma2.py, modeling_vaultgemma.py and modeling_gemma3.py of transformers; Gemma
//! Team, arXiv:2403.08295, arXiv:2408.00118 and arXiv:2503.19786; Sinha et al., arXiv:2510.15001.

use half::bf16;
use serde_json::{Map, Value, json};

use super::bounds::MAX_POSITIONS;
use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, NORMS_AROUND};
use super::rope_config::{RopeDefaults, rope_of};
use super::windows::{no_windows, set_rope_of_windows, set_windows_except_every};
use crate::rope::Rope;
use crate::spec::{BlockNorms, ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, LogitsTransform};

pub const GEMMA: Family = Family {
    class: "GemmaForCausalLM",
    gguf: Some(GgufArchitecture {
        norms_include_one: true,
        ..GgufArchitecture::named("gemma")
    }),
    describe: describe_gemma,
};

pub const GEMMA2: Family = Family {
    class: "Gemma2ForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "gemma2",
        keys: &[
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ],
        add_fixed: |config| add_scale(config, 46),
        ..GGUF
    }),
    describe: |config| {
        let mut spec = describe(config, GEMMA2.class, &Special::GEMMA2)?;
        let interval = 2;
        set_windows_except_every(&mut spec, config, interval)?;
        Ok(spec)
    },
};

pub const GEMMA3: Family = Family {
    class: "Gemma3ForCausalLM",
    gguf: Some(GgufArchitecture {
        name: "gemma3",
        keys: &[
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
        ],
        add_fixed: |config| add_scale(config, 62),
        ..GGUF
    }),
    describe: |config| describe_gemma3(config, GEMMA3.class),
};

pub const VAULT_GEMMA: Family = Family {
    class: "VaultGemmaForCausalLM",
    gguf: None,
    describe: |config| {
        let mut spec = describe(config, VAULT_GEMMA.class, &Special::GEMMA2)?;
        for layer in &mut spec.layers {
            layer.norms = Norms::before("input_layernorm", "pre_feedforward_layernorm");
        }
        let interval = 2;
        set_windows_except_every(&mut spec, config, interval)?;
        Ok(spec)
    },
};

/// Gemma 3 with an image encoder.
pub const GEMMA3_WITH_IMAGES: Family = Family {
    class: "Gemma3ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let text = config.object("text_config")?;
        let text = text.ok_or_else(|| config.error("text_config is missing".to_owned()))?;
        Ok(ModelSpec {
            has_whole_images: true,
            ..describe_gemma3(&text, GEMMA3_WITH_IMAGES.class)?
        })
    },
};

/// The norms in front of each block and behind it.
pub const NORMS: Norms = Norms::Sequential {
    attention: BlockNorms {
        before: Some("input_layernorm"),
        after: Some("post_attention_layernorm"),
    },
    feed_forward: BlockNorms {
        before: Some("pre_feedforward_layernorm"),
        after: Some("post_feedforward_layernorm"),
    },
};

/// The GGUF layout of Gemma 2 and 3.
const GGUF: GgufArchitecture = GgufArchitecture {
    modules: NORMS_AROUND,
    has_windows: true,
    norms_include_one: true,
    ..GgufArchitecture::named("gemma")
};

/// Adds `query_pre_attn_scalar`, which GGUF files lack: the width of a head or, in the largest model, which has so many
/// layers, its share of the hidden size (gemma2.cpp and gemma3.cpp of llama.cpp).
fn add_scale(config: &mut Map<String, Value>, num_layers_of_largest: u64) {
    let number = |key| config.get(key).and_then(Value::as_u64);
    let is_largest = number("num_hidden_layers") == Some(num_layers_of_largest);
    let share = number("hidden_size").zip(number("num_attention_heads"));
    let scalar = match share {
        Some((size, num_heads)) if is_largest && num_heads > 0 => Some(size / num_heads),
        _ => number("head_dim"),
    };
    if let Some(scalar) = scalar {
        config.insert("query_pre_attn_scalar".to_owned(), json!(scalar));
    }
}

/// What differs between the generations.
struct Special {
    sizes: Sizes,
    /// The default bounds of scores and of logits.
    soft_caps: [Option<f64>; 2],
    has_qk_norm: bool,
    rope: RopeDefaults,
}

impl Special {
    const GEMMA2: Self = Self {
        sizes: Sizes::new(256_000, 2304, 9216, 26, 8, 8192),
        soft_caps: [Some(50.0), Some(30.0)],
        has_qk_norm: false,
        rope: Defaults::LLAMA.rope,
    };
    const GEMMA3: Self = Self {
        sizes: Sizes::new(262_208, 2304, 9216, 26, 8, 131_072),
        soft_caps: [None, None],
        has_qk_norm: true,
        rope: GLOBAL_ROPE,
    };
}

fn describe_gemma(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(256_000, 3072, 24_576, 28, 16, 8192)),
        num_kv_heads: Some(16),
        ..Defaults::GEMMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    if config.string("hidden_act")? == Some("gelu") {
        dimensions.activation = Activation::GeluTanh;
    }
    dimensions.norm.weight_offset = 1.0;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(GEMMA.class, layer, windows);
    spec.embedding_scale = embedding_scale(spec.hidden_size);
    Ok(spec)
}

fn describe_gemma3(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let mut spec = describe(config, class, &Special::GEMMA3)?;
    let interval = config.size("sliding_window_pattern", 1..=MAX_POSITIONS)?;
    set_windows_except_every(&mut spec, config, interval.unwrap_or(6))?;
    let local = local_rope(config, spec.max_position_embeddings, spec.head_dim)?;
    set_rope_of_windows(&mut spec, &local);
    Ok(spec)
}

/// The position embedding of layers with a window.
///
/// # Errors
/// A key is malformed.
pub fn local_rope(
    config: &JsonFile,
    max_position_embeddings: usize,
    head_dim: usize,
) -> Result<Rope, LoadError> {
    let parameters = config.object("rope_parameters")?;
    let local = match parameters {
        Some(parameters) => parameters.object("sliding_attention")?,
        None => None,
    };
    let theta = config.number("rope_local_base_freq", 1.0..=1e15)?;
    rope_of(
        config,
        local.as_ref(),
        theta,
        max_position_embeddings,
        head_dim,
        Defaults::LLAMA.rope,
    )
}

/// The position embedding of other layers, where config.json is silent.
pub const GLOBAL_ROPE: RopeDefaults = RopeDefaults {
    theta: 1e6,
    section: Some("full_attention"),
    ..Defaults::LLAMA.rope
};

fn describe(
    config: &JsonFile,
    class: &'static str,
    special: &Special,
) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(special.sizes),
        num_kv_heads: Some(4),
        rope: special.rope,
        keys: Keys {
            activation: "hidden_activation",
            ..Keys::LLAMA
        },
        ..Defaults::GEMMA
    };
    if config.bool_or("use_bidirectional_attention", false)? {
        let expected = "supported; only false is: tokens see those before them";
        return Err(config.unexpected("use_bidirectional_attention", true, expected));
    }
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.weight_offset = 1.0;
    let mut layer = dimensions.llama_layer();
    layer.norms = NORMS;
    let attention = &mut layer.attention;
    attention.set_biases(config.bool_or("attention_bias", false)?);
    let scalar = config.number("query_pre_attn_scalar", 1e-6..=1e9)?;
    attention.scale = scalar.unwrap_or(256.0).sqrt().recip() as f32;
    attention.soft_cap = soft_cap(config, "attn_logit_softcapping", special.soft_caps[0])?;
    attention.qk_norm = special
        .has_qk_norm
        .then_some(QkNormSpec::of_heads(dimensions.norm.eps));
    let num_layers = dimensions.num_layers;
    let mut spec = dimensions.model(class, layer, vec![None; num_layers]);
    spec.embedding_scale = embedding_scale(spec.hidden_size);
    spec.logits = LogitsTransform {
        scale: 1.0,
        soft_cap: soft_cap(config, "final_logit_softcapping", special.soft_caps[1])?,
    };
    Ok(spec)
}

impl Defaults {
    /// The defaults that all generations share.
    const GEMMA: Self = Self {
        head_dim: Some(256),
        tied_embeddings: true,
        activation: Activation::GeluTanh,
        ..Self::LLAMA
    };
}

/// The factor of embedded tokens.
pub fn embedding_scale(hidden_size: usize) -> f32 {
    bf16::from_f64((hidden_size as f64).sqrt()).to_f32()
}

/// A bound. An explicit `null` is none.
pub fn soft_cap(
    config: &JsonFile,
    key: &str,
    default: Option<f64>,
) -> Result<Option<f32>, LoadError> {
    let cap = match config.has(key) {
        true => config.number(key, 1e-3..=1e6)?,
        false => default,
    };
    Ok(cap.map(|cap| cap as f32))
}
