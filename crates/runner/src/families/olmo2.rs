//! OLMo 2, by Ai2.
//!
//! Llama whose blocks read the residual stream as it is, and whose results are normalised before they are added;
//! queries and keys are normalised over all of their heads together. `attention_bias` adds biases to all four
//! projections of attention.
//!
//! Source: modeling_olmo2.py of transformers; Team OLMo, arXiv:2501.00656.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, NORMS_AROUND};
use super::windows::no_windows;
use crate::spec::{ModelSpec, Norms, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::QkNormKind;

pub const FAMILY: Family = Family {
    class: "Olmo2ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: NORMS_AROUND,
        ..GgufArchitecture::named("olmo2")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_304, 4096, 11_008, 32, 32, 2048)),
        norm_eps: 1e-5,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::after("post_attention_layernorm", "post_feedforward_layernorm");
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "self_attn.q_norm",
        k: "self_attn.k_norm",
        kind: QkNormKind::Row,
        eps: dimensions.norm.eps,
    });
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
