//! LLaVA 1.5: a CLIP encoder of one tile, and two linear layers.
//!
//! A class token stands in front of the patches, and a LayerNorm behind the embedding. Rows are made of the patches
//! behind the layer that `vision_feature_layer` counts, the last but one by default, without a norm.
//!
//! Source: modeling_llava.py and modeling_clip.py of transformers; Liu et al., arXiv:2310.03744; Radford et al.,
//! arXiv:2103.00020.

use serde_json::{Map, Value, json};

use super::Tower;
use super::clip_layer::clip_layer;
use super::patch_grid::PatchGrid;
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes, activation};
use crate::families::windows::no_windows;
use crate::spec::{
    FeedForward, InnerProjection, LearnedPositions, ModelModules, ModelSpec, Projection,
    ProjectorSpec, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

pub const LLAVA: Tower = Tower {
    class: "LlavaForConditionalGeneration",
    describe,
};

const DEFAULTS: Defaults = Defaults {
    // The tokens are patches, of which no embedding has a row.
    sizes: Some(Sizes::new(1, 768, 3072, 12, 12, 1)),
    norm_eps: 1e-5,
    keys: Keys {
        norm_eps: "layer_norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

const FIRST: &str = "multi_modal_projector.linear_1";
const SECOND: &str = "multi_modal_projector.linear_2";

fn describe(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let vision = match config.object("vision_config")? {
        Some(vision) => vision,
        None => JsonFile::new(config.path(), "vision_config.", default_vision()),
    };
    let kind = vision.string("model_type")?.unwrap_or("clip_vision_model");
    if kind != "clip_vision_model" {
        return Err(vision.unexpected(
            "model_type",
            format_args!("'{kind}'"),
            "'clip_vision_model': without max_num_image_tokens the model is served for text only",
        ));
    }
    let strategy = config.string("vision_feature_select_strategy")?;
    if let Some(strategy) = strategy.filter(|&strategy| strategy != "default") {
        return Err(config.unexpected(
            "vision_feature_select_strategy",
            format_args!("'{strategy}'"),
            "'default': without max_num_image_tokens the model is served for text only",
        ));
    }
    let grid = PatchGrid::read(&vision, [224, 32], ("one patch,", 1))?;
    let is_quick = vision.string("hidden_act")?.unwrap_or("quick_gelu") == "quick_gelu";
    let vision = match is_quick {
        true => vision.with("hidden_act", json!("gelu")),
        false => vision,
    };
    let mut dimensions = Dimensions::from_config(&vision, &DEFAULTS)?;
    let num_positions = grid.num_patches_per_side.pow(2) + 1;
    dimensions.max_position_embeddings = num_positions;
    let mut layer = clip_layer(&mut dimensions);
    if let FeedForward::Plain { activation, .. } = &mut layer.feed_forward
        && is_quick
    {
        *activation = PlainActivation::QuickGelu;
    }
    dimensions.num_layers = num_read_layers(config, dimensions.num_layers)?;
    let (hidden, row_width) = (dimensions.hidden_size, model.hidden_size);
    let windows = no_windows(dimensions.num_layers);
    let act = activation(config, "projector_hidden_act")?.unwrap_or(Activation::Gelu);
    let has_bias = config.bool_or("multimodal_projector_bias", true)?;
    let linear =
        |module, num_inputs| Projection::single(module, row_width, num_inputs).with_bias(has_bias);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: Some(LearnedPositions {
                module: "vision_tower.embeddings.position_embedding",
                first_row: 0,
                padding_id: None,
                num_rows: num_positions,
            }),
            is_bidirectional: true,
            embedding_norm: Some("vision_tower.pre_layrnorm"),
            modules: ModelModules {
                embedding: "vision_tower.embeddings.patch_embedding",
                layers: "vision_tower.encoder.layers",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: None,
                output_layer: FIRST,
            },
            ..dimensions.model(model.family, layer, windows)
        },
        patch: grid.patch,
        has_patch_bias: false,
        num_patches_per_side: grid.num_patches_per_side,
        class_token: Some("vision_tower.embeddings.class_embedding"),
        projector: ProjectorSpec {
            merge_size: 1,
            has_means: false,
            norm: None,
            inner: Some(InnerProjection {
                projection: linear(FIRST, hidden),
                activation: PlainActivation::Of(act),
            }),
            projection: linear(SECOND, row_width),
        },
    })
}

/// The encoder where config.json has none.
fn default_vision() -> Map<String, Value> {
    let sizes = [
        ("hidden_size", 1024),
        ("intermediate_size", 4096),
        ("num_hidden_layers", 24),
        ("num_attention_heads", 16),
        ("image_size", 336),
        ("patch_size", 14),
    ];
    let sizes = sizes.into_iter();
    sizes
        .map(|(key, size)| (key.to_owned(), json!(size)))
        .collect()
}

/// The layers in front of the rows that are read. `vision_feature_layer` counts from the embedded patches, or from the
/// last layer if it is negative.
fn num_read_layers(config: &JsonFile, num_layers: usize) -> Result<usize, LoadError> {
    const KEY: &str = "vision_feature_layer";
    let given = config.get(KEY).cloned().unwrap_or_else(|| json!(-2));
    let layer = given.as_i64().map(|layer| match layer < 0 {
        true => num_layers as i64 + 1 + layer,
        false => layer,
    });
    let layer = layer.and_then(|layer| usize::try_from(layer).ok());
    let layer = layer.filter(|layer| (1..=num_layers).contains(layer));
    layer.ok_or_else(|| {
        config.unexpected(
            KEY,
            given,
            format_args!("one layer of {num_layers}: without max_num_image_tokens the model is served for text only"),
        )
    })
}
