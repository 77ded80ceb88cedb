//! Heads for multi-token prediction, which some families have in the checkpoints of their models.
//!
//! ```text
//! Qwen3-Next, Qwen 3.5      mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0, mtp.norm
//! DeepSeek-V3, GLM-4.5      model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm}, and a layer of that prefix,
//! and 4.7-Flash             where N is the number of the model's layers
//! ```
//!
//! The layer is one of the model's: with attention in a hybrid one, with experts where the last layer has some.
//!
//! Source: DeepSeek-AI, arXiv:2412.19437, section 2.2; qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py and
//! glm4_moe_mtp.py of vLLM (vllm/model_executor/models).

use super::bounds::MAX_LAYERS;
use super::{deepseek, glm4_moe, qwen3_next};
use crate::spec::{LayerSpec, ModelModules, ModelSpec, Module, MtpSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// Families with heads.
const FAMILIES: [(&str, Layout); 8] = [
    (qwen3_next::QWEN3_NEXT.class, Layout::Beside),
    (qwen3_next::QWEN3_5.class, Layout::Beside),
    (qwen3_next::QWEN3_5_WITH_IMAGES.class, Layout::Beside),
    (qwen3_next::QWEN3_5_MOE.class, Layout::Beside),
    (qwen3_next::QWEN3_5_MOE_WITH_IMAGES.class, Layout::Beside),
    (glm4_moe::GLM4_MOE.class, Layout::Behind),
    (deepseek::GLM4_MOE_LITE.class, Layout::Behind),
    (deepseek::V3.class, Layout::Behind),
];

/// Where a checkpoint has a head.
#[derive(Clone, Copy)]
enum Layout {
    /// Beside the model.
    Beside,
    /// As a further layer of the model.
    Behind,
}

/// Describes the head of a model.
///
/// # Errors
/// The family is not known to have heads, or config.json says that the checkpoint has none.
pub fn describe(config: &JsonFile, model: &ModelSpec) -> Result<MtpSpec, LoadError> {
    let known = FAMILIES.iter().find(|(class, _)| *class == model.family);
    let Some(&(_, layout)) = known else {
        return Err(LoadError::Config {
            problem: format!(
                "speculation is mtp, and {} is not known to have a head for multi-token prediction; {} are",
                model.family,
                FAMILIES.map(|(class, _)| class).join(", ")
            ),
            remedy: "set speculation to eagle3, draft_model or prompt_lookup".to_owned(),
        });
    };
    check_has_head(config)?;
    let layer = model.layers.iter().rev().find(|it| it.has_cache());
    let Some(layer) = layer.cloned() else {
        unreachable!("a model without attention was refused");
    };
    Ok(match layout {
        Layout::Beside => beside(model, layer),
        Layout::Behind => behind(model, layer),
    })
}

/// Refuses a config.json that says that there is no head. It may be silent: Qwen3-Next's is.
fn check_has_head(config: &JsonFile) -> Result<(), LoadError> {
    let text = config.object("text_config")?;
    let config = text.as_ref().unwrap_or(config);
    for key in ["mtp_num_hidden_layers", "num_nextn_predict_layers"] {
        if config.size(key, 0..=MAX_LAYERS)? == Some(0) {
            let expected = "1 or more, and speculation is mtp, which needs the checkpoint's head for multi-token \
                            prediction";
            return Err(config.unexpected(key, 0, expected));
        }
    }
    Ok(())
}

fn beside(model: &ModelSpec, layer: LayerSpec) -> MtpSpec {
    MtpSpec {
        layer: of_one_layer(model, layer, ("mtp.layers", 0)),
        embedding_norm: Module::of_model("mtp.pre_fc_norm_embedding"),
        state_norm: Module::of_model("mtp.pre_fc_norm_hidden"),
        projection: Module::of_model("mtp.fc"),
        final_norm: Module::of_model("mtp.norm"),
        embedding: None,
        output_layer: None,
    }
}

fn behind(model: &ModelSpec, layer: LayerSpec) -> MtpSpec {
    let place = (model.modules.layers, model.num_layers());
    MtpSpec {
        layer: of_one_layer(model, layer, place),
        embedding_norm: Module::of_layer(0, "enorm"),
        state_norm: Module::of_layer(0, "hnorm"),
        projection: Module::of_layer(0, "eh_proj"),
        final_norm: Module::of_layer(0, "shared_head.norm"),
        embedding: Some(Module::of_layer(0, "embed_tokens")),
        output_layer: Some(Module::of_layer(0, "shared_head.head")),
    }
}

/// The model with this layer in place of its own.
fn of_one_layer(
    model: &ModelSpec,
    layer: LayerSpec,
    (layers, first_layer): (&'static str, usize),
) -> ModelSpec {
    ModelSpec {
        modules: ModelModules {
            layers,
            first_layer,
            layers_per_module: 1,
            ..model.modules
        },
        layers: vec![layer],
        ..model.clone()
    }
}
