//! Idefics 3 and SmolVLM: a SigLIP encoder of tiles, and one linear layer.
//!
//! An image is cut into tiles of `image_size` pixels. LayerNorm in front of each block and behind the last layer,
//! attention with biases over all patches of a tile, and learned positions. Pixel shuffle: each square of
//! `scale_factor` x `scale_factor` encoded patches becomes one row.
//!
//! Source: modeling_idefics3.py and modeling_smolvlm.py of transformers; Laurençon et al., arXiv:2408.12637; Marafioti
//! et al., arXiv:2504.05299.

use super::Tower;
use super::clip_layer::clip_layer;
use super::patch_grid::PatchGrid;
use crate::families::bounds::MAX_PIXELS;
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes};
use crate::families::windows::no_windows;
use crate::rope::RopeAxes;
use crate::spec::{
    LearnedPositions, ModelModules, ModelSpec, PositionTable, Projection, ProjectorSpec, TileSizes,
    TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const IDEFICS3: Tower = Tower {
    class: "Idefics3ForConditionalGeneration",
    describe,
};

pub const SMOL_VLM: Tower = Tower {
    class: "SmolVLMForConditionalGeneration",
    describe,
};

const DEFAULTS: Defaults = Defaults {
    // The tokens are patches, of which no embedding has a row.
    sizes: Some(Sizes::new(1, 1152, 3072, 12, 16, 1)),
    activation: Activation::GeluTanh,
    keys: Keys {
        norm_eps: "layer_norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

const PROJECTOR: &str = "model.connector.modality_projection.proj";

fn describe(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let vision = config.object("vision_config")?;
    let vision = vision
        .unwrap_or_else(|| JsonFile::new(config.path(), "vision_config.", Default::default()));
    let merge_size = config.size("scale_factor", 1..=MAX_PIXELS)?.unwrap_or(2);
    let grid = PatchGrid::read(&vision, [224, 32], ("scale_factor", merge_size))?;
    let num_patches = grid.num_patches_per_side.pow(2);
    let mut dimensions = Dimensions::from_config(&vision, &DEFAULTS)?;
    dimensions.max_position_embeddings = num_patches;
    let layer = clip_layer(&mut dimensions);
    let hidden = dimensions.hidden_size;
    let windows = no_windows(dimensions.num_layers);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: Some(LearnedPositions {
                module: "model.vision_model.embeddings.position_embedding",
                first_row: 0,
                padding_id: None,
                num_rows: num_patches,
            }),
            is_bidirectional: true,
            modules: ModelModules {
                embedding: "model.vision_model.embeddings.patch_embedding",
                layers: "model.vision_model.encoder.layers",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: Some("model.vision_model.post_layernorm"),
                output_layer: PROJECTOR,
            },
            ..dimensions.model(model.family, layer, windows)
        },
        patch: grid.patch,
        has_patch_bias: true,
        tiles: TileSizes::Square {
            num_patches_per_side: grid.num_patches_per_side,
        },
        learned_positions: PositionTable::InOrder,
        windows: None,
        line_end: None,
        class_token: None,
        projector: ProjectorSpec {
            merge_size,
            has_means: false,
            norm: None,
            merging: None,
            inner: None,
            projection: Projection::single(
                PROJECTOR,
                model.hidden_size,
                merge_size * merge_size * hidden,
            ),
        },
        deep_projectors: Vec::new(),
        text_axes: RopeAxes::Sequence,
    })
}
