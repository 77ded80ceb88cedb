//! OLMo 2 and OLMo 3, by Ai2.
//!
//! Llama whose blocks read the residual stream as it is, and whose results are normalised before they are added;
//! queries and keys are normalised over all of their heads together. `attention_bias` adds biases to all four
//! projections of attention.
//!
//! Three of four layers of OLMo 3 have a window (`layer_types`), and a position embedding of their own, without the
//! scaling of the others. llama.cpp stores it as an OLMo 2 with windows.
//!
//! Source: modeling_olmo2.py and modeling_olmo3.py of transformers; Team OLMo, arXiv:2501.00656 and arXiv:2512.13961.

use super::bounds::MAX_POSITIONS;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, NORMS_AROUND};
use super::rope_config::{RopeDefaults, THETA, rope_of, rope_parameters};
use super::windows::{no_windows, set_rope_of_windows, set_windows_except_every};
use crate::rope::Rope;
use crate::spec::{ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::QkNormKind;

pub const FAMILY: Family = Family {
    class: "Olmo2ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: NORMS_AROUND,
        has_windows: true,
        ..GgufArchitecture::named("olmo2")
    }),
    describe: |config| match config.size("sliding_window", 1..=MAX_POSITIONS)? {
        Some(_) => describe_with_windows(config, FAMILY.class),
        None => Ok(describe_dense(config, FAMILY.class, &Defaults::OLMO)?.0),
    },
};

pub const OLMO3: Family = Family {
    class: "Olmo3ForCausalLM",
    gguf: None,
    describe: |config| describe_with_windows(config, OLMO3.class),
};

impl Defaults {
    const OLMO: Self = Self {
        sizes: Some(Sizes::new(50_304, 4096, 11_008, 32, 32, 2048)),
        norm_eps: 1e-5,
        ..Self::LLAMA
    };
}

const OLMO3_ROPE: RopeDefaults = RopeDefaults {
    theta: 500_000.0,
    section: Some("full_attention"),
    ..Defaults::LLAMA.rope
};

fn describe_with_windows(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        rope: OLMO3_ROPE,
        ..Defaults::OLMO
    };
    let (mut spec, _) = describe_dense(config, class, &defaults)?;
    set_windows_except_every(&mut spec, config, 4)?;
    let local = local_rope(config, &spec)?;
    set_rope_of_windows(&mut spec, &local);
    Ok(spec)
}

/// The position embedding of layers with windows. Where config.json is silent, it has the others' base.
fn local_rope(config: &JsonFile, spec: &ModelSpec) -> Result<Rope, LoadError> {
    let parameters = rope_parameters(config)?;
    let (local, theta) = match &parameters {
        Some(parameters) => (
            parameters.object("sliding_attention")?,
            parameters.number("rope_theta", THETA)?,
        ),
        None => (None, None),
    };
    let theta = match theta {
        Some(theta) => Some(theta),
        None => config.number("rope_theta", THETA)?,
    };
    let (positions, head_dim) = (spec.max_position_embeddings, spec.head_dim);
    rope_of(
        config,
        local.as_ref(),
        theta,
        positions,
        head_dim,
        OLMO3_ROPE,
    )
}

/// A model whose layers have attention and no window, and the sizes that config.json tells.
///
/// # Errors
/// A key is out of range.
pub fn describe_dense(
    config: &JsonFile,
    class: &'static str,
    defaults: &Defaults,
) -> Result<(ModelSpec, Dimensions), LoadError> {
    let dimensions = Dimensions::from_config(config, defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::after("post_attention_layernorm", "post_feedforward_layernorm");
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "self_attn.q_norm",
        k: "self_attn.k_norm",
        kind: QkNormKind::Row,
        has_values: false,
        eps: dimensions.norm.eps,
    });
    let windows = no_windows(dimensions.num_layers);
    Ok((dimensions.clone().model(class, layer, windows), dimensions))
}
