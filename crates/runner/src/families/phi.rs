//! Phi-1, Phi-1.5 and Phi-2, by Microsoft.
//!
//! LayerNorm with biases, one for both blocks of a layer, which read the residual stream side by side. The first part
//! of a head is rotated (`partial_rotary_factor`, 0.5 where config.json is silent). The feed-forward block has no gate.
//! All linear layers have biases, the output layer too. Refused: LayerNorms of heads (`qk_layernorm`), which no
//! published model has.
//!
//! Source: configuration_phi.py and modeling_phi.py of transformers; Gunasekar et al., arXiv:2306.11644; Li et al.,
//! arXiv:2309.05463.

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{ModelModules, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "PhiForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("self_attn.dense", "attn_output"),
            ("mlp.fc1", "ffn_up"),
            ("mlp.fc2", "ffn_down"),
        ],
        has_partial_rotary: true,
        ..GgufArchitecture::named("phi2")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const HAS_QK_NORM: &str = "qk_layernorm";
    if config.bool_or(HAS_QK_NORM, false)? {
        return Err(config.unexpected(HAS_QK_NORM, true, "supported; only false is"));
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(51_200, 2048, 8192, 24, 32, 2048)),
        norm_eps: 1e-5,
        rope: RopeDefaults {
            partial_rotary_factor: Some(0.5),
            ..Defaults::LLAMA.rope
        },
        activation: Activation::GeluTanh,
        keys: Keys {
            norm_eps: "layer_norm_eps",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::Parallel {
        attention: "input_layernorm",
        feed_forward: None,
    };
    layer.attention.o = Projection::single("self_attn.dense", hidden, q_width);
    layer.attention.set_biases(true);
    layer.feed_forward = dimensions.plain("mlp.fc1", "mlp.fc2");
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    let spec = dimensions.model(FAMILY.class, layer, windows);
    Ok(ModelSpec {
        output_bias: true,
        modules: ModelModules {
            final_norm: Some("model.final_layernorm"),
            ..spec.modules
        },
        ..spec
    })
}
