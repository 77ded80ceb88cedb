//! Gemma 3: a SigLIP encoder of one tile, the means of squares of patches, and one linear layer.
//!
//! LayerNorm in front of each block and behind the last layer, attention with biases over all patches, and learned
//! positions. An image becomes `mm_tokens_per_image` rows: the means of squares of encoded patches, an RMSNorm whose
//! weights are stored as differences from 1, and a projection that is stored as a parameter, `[inputs, outputs]`. The
//! tokens of an image see each other in the language model.
//!
//! Source: modeling_gemma3.py and modeling_siglip.py of transformers; Gemma Team, arXiv:2503.19786; Zhai et al.,
//! arXiv:2303.15343.

use super::Tower;
use super::clip_layer::clip_layer;
use super::patch_grid::PatchGrid;
use crate::families::bounds::MAX_PATCHES;
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes};
use crate::families::windows::no_windows;
use crate::rope::RopeAxes;
use crate::spec::{
    LearnedPositions, ModelModules, ModelSpec, NormKind, NormSpec, PositionTable, Projection,
    ProjectorSpec, TileSizes, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const GEMMA3: Tower = Tower {
    class: "Gemma3ForConditionalGeneration",
    describe,
};

const DEFAULTS: Defaults = Defaults {
    // The tokens are patches, of which no embedding has a row.
    sizes: Some(Sizes::new(1, 768, 3072, 12, 12, 1)),
    activation: Activation::GeluTanh,
    keys: Keys {
        norm_eps: "layer_norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

const NORM: &str = "multi_modal_projector.mm_soft_emb_norm";
const PROJECTION: &str = "multi_modal_projector.mm_input_projection_weight";
const NUM_TOKENS: &str = "mm_tokens_per_image";

fn describe(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let vision = config.object("vision_config")?;
    let vision = vision
        .unwrap_or_else(|| JsonFile::new(config.path(), "vision_config.", Default::default()));
    let grid = PatchGrid::read(&vision, [224, 16], ("one patch,", 1))?;
    let num_patches = grid.num_patches_per_side.pow(2);
    let num_tokens = config.size(NUM_TOKENS, 1..=MAX_PATCHES)?.unwrap_or(256);
    let side = num_tokens.isqrt();
    if side.pow(2) != num_tokens || !grid.num_patches_per_side.is_multiple_of(side) {
        return Err(config.unexpected(
            NUM_TOKENS,
            num_tokens,
            format_args!(
                "the square of a number that divides the {} patches of a side",
                grid.num_patches_per_side
            ),
        ));
    }
    let mut dimensions = Dimensions::from_config(&vision, &DEFAULTS)?;
    dimensions.max_position_embeddings = num_patches;
    let layer = clip_layer(&mut dimensions);
    let (hidden, norm_eps) = (dimensions.hidden_size, dimensions.norm.eps);
    let windows = no_windows(dimensions.num_layers);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: Some(LearnedPositions {
                module: "vision_tower.embeddings.position_embedding",
                first_row: 0,
                padding_id: None,
                num_rows: num_patches,
            }),
            is_bidirectional: true,
            modules: ModelModules {
                embedding: "vision_tower.embeddings.patch_embedding",
                layers: "vision_tower.encoder.layers",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: Some("vision_tower.post_layernorm"),
                output_layer: NORM,
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
            merge_size: grid.num_patches_per_side / side,
            has_means: true,
            merging: None,
            norm: Some((
                NORM,
                NormSpec {
                    kind: NormKind::Rms,
                    has_weights: true,
                    eps: norm_eps,
                    weight_offset: 1.0,
                },
            )),
            inner: None,
            projection: Projection::single(PROJECTION, model.hidden_size, hidden).transposed(),
        },
        deep_projectors: Vec::new(),
        text_axes: RopeAxes::Sequence,
    })
}
