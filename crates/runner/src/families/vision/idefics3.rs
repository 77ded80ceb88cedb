//! Idefics 3 and SmolVLM: a SigLIP encoder of tiles, and one linear layer.
//!
//! An image is cut into tiles of `image_size` pixels. LayerNorm in front of each block and behind the last layer,
//! attention with biases over all patches of a tile, and learned positions. Pixel shuffle: each square of
//! `scale_factor` x `scale_factor` encoded patches becomes one row.
//!
//! Source: modeling_idefics3.py and modeling_smolvlm.py of transformers; Laurençon et al., arXiv:2408.12637; Marafioti
//! et al., arXiv:2504.05299.

use super::Tower;
use crate::families::bounds::{MAX_PATCHES, MAX_PIXELS};
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes};
use crate::families::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{
    LearnedPositions, ModelModules, ModelSpec, NormKind, Norms, PatchShape, Projection,
    ProjectorSpec, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;
use inflight_numbers::Stacking;

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

/// Red, green and blue, as the image processor makes them.
const NUM_CHANNELS: usize = 3;
const PROJECTOR: &str = "model.connector.modality_projection.proj";

fn describe(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let vision = config.object("vision_config")?;
    let vision = vision
        .unwrap_or_else(|| JsonFile::new(config.path(), "vision_config.", Default::default()));
    let num_channels = vision
        .size("num_channels", NUM_CHANNELS..=NUM_CHANNELS)?
        .unwrap_or(NUM_CHANNELS);
    let image_size = vision.size("image_size", 1..=MAX_PIXELS)?.unwrap_or(224);
    let patch_size = vision.size("patch_size", 1..=MAX_PIXELS)?.unwrap_or(32);
    let merge_size = config.size("scale_factor", 1..=MAX_PIXELS)?.unwrap_or(2);
    let side = image_size / patch_size;
    if side == 0 || !side.is_multiple_of(merge_size) || side * side > MAX_PATCHES {
        return Err(vision.unexpected(
            "image_size",
            image_size,
            format_args!(
                "such that its {side} patches of {patch_size} are a multiple of scale_factor {merge_size}, and their \
                 square is at most {MAX_PATCHES}"
            ),
        ));
    }
    let mut dimensions = Dimensions::from_config(&vision, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    dimensions.max_position_embeddings = side * side;
    let hidden = dimensions.hidden_size;
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("self_attn.q_proj", q),
        ("self_attn.k_proj", kv),
        ("self_attn.v_proj", kv),
    ];
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("layer_norm1", "layer_norm2");
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    layer.attention.o = Projection::single("self_attn.out_proj", hidden, q);
    layer.attention.set_biases(true);
    layer.feed_forward = dimensions.plain("mlp.fc1", "mlp.fc2");
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: Some(LearnedPositions {
                module: "model.vision_model.embeddings.position_embedding",
                first_row: 0,
                padding_id: None,
                num_rows: side * side,
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
        patch: PatchShape {
            num_channels,
            num_pixels_per_side: patch_size,
        },
        num_patches_per_side: side,
        projector: ProjectorSpec {
            merge_size,
            projection: Projection::single(
                PROJECTOR,
                model.hidden_size,
                merge_size * merge_size * hidden,
            ),
        },
    })
}
