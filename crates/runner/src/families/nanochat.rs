//! nanochat, by Andrej Karpathy.
//!
//! Llama with norms that have no weights, another one behind the embedding, and a norm of each head behind rotation,
//! which turns the other way. The feed-forward block has squared ReLU and no gate, and logits are bounded
//! (`final_logit_softcapping`).
//!
//! Source: configuration_nanochat.py and modeling_nanochat.py of transformers; Karpathy, "nanochat", 2025.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gemma::soft_cap;
use super::windows::no_windows;
use crate::rope::RopeScaling;
use crate::spec::{ModelSpec, QkNormSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, LogitsTransform, QkNormKind};

pub const FAMILY: Family = Family {
    class: "NanoChatForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(50_304, 768, 8192, 12, 6, 2048)),
        activation: Activation::SquaredRelu,
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.has_weights = false;
    let rope = &mut dimensions.rope;
    // The angles of the other way.
    rope.scaling = match rope.scaling {
        RopeScaling::None => RopeScaling::Linear { factor: -1.0 },
        RopeScaling::Linear { factor } => RopeScaling::Linear { factor: -factor },
        _ => {
            let expected = "supported in this family; 'default' and 'linear' are";
            return Err(config.unexpected("rope_type", "another one", expected));
        }
    };
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.attention.qk_norm = Some(QkNormSpec {
        q: "",
        k: "",
        kind: QkNormKind::RotatedHead,
        ..QkNormSpec::of_heads(dimensions.norm.eps)
    });
    layer.feed_forward = dimensions.plain("mlp.fc1", "mlp.fc2");
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        embedding_norm: Some("model.norm"),
        logits: LogitsTransform {
            scale: 1.0,
            soft_cap: soft_cap(config, "final_logit_softcapping", Some(15.0))?,
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
