//! The encoders of LLaVA: CLIP and SigLIP.
//!
//! CLIP has a class token in front of the patches, and a LayerNorm behind the embedding. SigLIP has neither, and a bias
//! in the embedding of patches. Rows are read behind a layer, without the norm that follows the last one.
//!
//! Source: modeling_clip.py and modeling_siglip.py of transformers; Radford et al., arXiv:2103.00020; Zhai et al.,
//! arXiv:2303.15343.

use serde_json::json;

use super::TEXT_ONLY;
use super::clip_layer::clip_layer;
use super::feature_layer::{demand_strategy, num_read_layers};
use super::patch_grid::PatchGrid;
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes};
use crate::families::windows::no_windows;
use crate::spec::{FeedForward, LearnedPositions, ModelModules, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

/// What distinguishes the encoders.
pub struct Kind {
    /// Its name in config.json.
    model_type: &'static str,
    defaults: Defaults,
    /// The defaults of `image_size` and `patch_size`.
    grid: [usize; 2],
    /// Whether a class token and a norm are in front of the layers, and not a bias in the embedding of patches.
    has_class_token: bool,
    /// The `vision_feature_select_strategy` that reads all patches, and nothing else.
    strategy: &'static str,
}

/// An encoder whose last norm is left out.
pub struct ReadEncoder {
    pub spec: ModelSpec,
    pub grid: PatchGrid,
    pub class_token: Option<&'static str>,
}

/// What a model says of its encoder where its config is silent.
pub struct ReadDefaults {
    /// The layer behind which rows are read.
    pub feature_layer: i64,
    pub strategy: &'static str,
}

pub const CLIP: Kind = Kind {
    model_type: "clip_vision_model",
    defaults: Defaults {
        // The tokens are patches, of which no embedding has a row.
        sizes: Some(Sizes::new(1, 768, 3072, 12, 12, 1)),
        norm_eps: 1e-5,
        keys: KEYS,
        ..Defaults::LLAMA
    },
    grid: [224, 32],
    has_class_token: true,
    strategy: "default",
};

pub const SIGLIP: Kind = Kind {
    model_type: "siglip_vision_model",
    defaults: Defaults {
        sizes: Some(Sizes::new(1, 768, 3072, 12, 12, 1)),
        activation: Activation::GeluTanh,
        keys: KEYS,
        ..Defaults::LLAMA
    },
    grid: [224, 16],
    has_class_token: false,
    strategy: "full",
};

const KEYS: Keys = Keys {
    norm_eps: "layer_norm_eps",
    ..Keys::LLAMA
};

impl ReadEncoder {
    /// Describes the encoder of a model's config, whose own config is `vision`. `first_linear` reads its rows.
    ///
    /// # Errors
    /// A value is not supported, or the encoder is not one of `kinds`, of which the first one is the default.
    pub fn describe(
        config: &JsonFile,
        vision: &JsonFile,
        kinds: [&Kind; 2],
        defaults: &ReadDefaults,
        (model, first_linear): (&ModelSpec, &'static str),
    ) -> Result<Self, LoadError> {
        let name = vision.string("model_type")?.unwrap_or(kinds[0].model_type);
        let Some(kind) = kinds.into_iter().find(|kind| kind.model_type == name) else {
            let [first, second] = kinds.map(|kind| kind.model_type);
            let expected = format_args!("'{first}' or '{second}': {TEXT_ONLY}");
            return Err(vision.unexpected("model_type", format_args!("'{name}'"), expected));
        };
        demand_strategy(config, defaults.strategy, kind.strategy)?;
        let grid = PatchGrid::read(vision, kind.grid, ("one patch,", 1))?;
        let default_activation = if kind.has_class_token {
            "quick_gelu"
        } else {
            ""
        };
        let activation = vision.string("hidden_act")?.unwrap_or(default_activation);
        let is_quick = activation == "quick_gelu";
        let vision = match is_quick {
            true => &vision.with("hidden_act", json!("gelu")),
            false => vision,
        };
        let mut dimensions = Dimensions::from_config(vision, &kind.defaults)?;
        let num_positions = grid.num_patches_per_side.pow(2) + usize::from(kind.has_class_token);
        dimensions.max_position_embeddings = num_positions;
        let mut layer = clip_layer(&mut dimensions);
        if let FeedForward::Plain { activation, .. } = &mut layer.feed_forward
            && is_quick
        {
            *activation = PlainActivation::QuickGelu;
        }
        dimensions.num_layers =
            num_read_layers(config, defaults.feature_layer, dimensions.num_layers)?;
        let windows = no_windows(dimensions.num_layers);
        let if_clip = |name| kind.has_class_token.then_some(name);
        Ok(Self {
            spec: ModelSpec {
                learned_positions: Some(LearnedPositions {
                    module: "vision_tower.embeddings.position_embedding",
                    first_row: 0,
                    padding_id: None,
                    num_rows: num_positions,
                }),
                is_bidirectional: true,
                embedding_norm: if_clip("vision_tower.pre_layrnorm"),
                modules: ModelModules {
                    embedding: "vision_tower.embeddings.patch_embedding",
                    layers: "vision_tower.encoder.layers",
                    first_layer: 0,
                    layers_per_module: 1,
                    final_norm: None,
                    output_layer: first_linear,
                },
                ..dimensions.model(model.family, layer, windows)
            },
            grid,
            class_token: if_clip("vision_tower.embeddings.class_embedding"),
        })
    }
}
