//! Vision towers: one file for each family.

mod clip_encoder;
mod clip_layer;
mod feature_layer;
mod gemma3;
mod idefics3;
mod internvl;
mod llava;
mod patch_grid;
mod pixtral;
mod qwen_vl;

use crate::spec::{ModelSpec, TowerSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// The tower of a family.
struct Tower {
    /// The class of the model.
    class: &'static str,
    /// Describes the tower of a config.json, whose language model is given.
    describe: fn(&JsonFile, &ModelSpec) -> Result<TowerSpec, LoadError>,
}

const TOWERS: [Tower; 14] = [
    gemma3::GEMMA3,
    idefics3::IDEFICS3,
    idefics3::SMOL_VLM,
    llava::LLAVA,
    llava::LLAVA_NEXT,
    llava::LLAVA_ONEVISION,
    internvl::INTERN_VL,
    pixtral::MISTRAL3,
    qwen_vl::QWEN2_VL,
    qwen_vl::QWEN2_5_VL,
    qwen_vl::QWEN3_VL,
    qwen_vl::QWEN3_VL_MOE,
    qwen_vl::QWEN3_5,
    qwen_vl::QWEN3_5_MOE,
];

/// What a model can do whose tower is not computed.
const TEXT_ONLY: &str = "without max_num_image_tokens the model is served for text only";

/// Whether the family of a model has a tower.
pub fn has_tower(model: &ModelSpec) -> bool {
    TOWERS.iter().any(|tower| tower.class == model.family)
}

/// Describes the tower of a model.
///
/// # Errors
/// The family has none, or a value is not supported.
pub fn describe_tower(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let mut towers = TOWERS.iter();
    let Some(tower) = towers.find(|tower| tower.class == model.family) else {
        return Err(LoadError::Config {
            problem: format!(
                "images are taken by models of {}, and the model is a {}",
                TOWERS.map(|tower| tower.class).join(", "),
                model.family
            ),
            remedy: "serve it for text only".to_owned(),
        });
    };
    (tower.describe)(config, model)
}
