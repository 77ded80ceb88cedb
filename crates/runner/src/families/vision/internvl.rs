//! InternVL 3 in transformers' format: an InternViT encoder of tiles, and two linear layers.
//!
//! A class token stands in front of the patches, and positions are learned. LayerNorm, or RMSNorm in InternViT-6B, in
//! front of each block; queries and keys of the latter have norms over all heads. Each column of what a block computes
//! has a factor (LayerScale). Pixel shuffle: each square of `1 / downsample_ratio` encoded patches a side becomes one
//! row, which has a LayerNorm in front of the linear layers.
//!
//! Source: modeling_internvl.py of transformers; Chen et al., arXiv:2312.14238; Zhu et al., arXiv:2504.10479.

use serde_json::Value;

use super::feature_layer::{demand_strategy, num_read_layers};
use super::patch_grid::PatchGrid;
use super::{TEXT_ONLY, Tower};
use crate::families::bounds::MAX_PIXELS;
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes, activation};
use crate::families::windows::no_windows;
use crate::rope::Rope;
use crate::rope::RopeAxes;
use crate::spec::{
    ColumnFactors, InnerProjection, LayerSpec, LearnedPositions, ModelModules, ModelSpec, NormKind,
    NormSpec, Norms, PositionTable, Projection, ProjectorSpec, QkNormSpec, TileSizes, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation, QkNormKind};
use inflight_numbers::Stacking;

pub const INTERN_VL: Tower = Tower {
    class: "InternVLForConditionalGeneration",
    describe,
};

const DEFAULTS: Defaults = Defaults {
    // The tokens are patches, of which no embedding has a row.
    sizes: Some(Sizes::new(1, 1024, 4096, 24, 16, 1)),
    activation: Activation::Gelu,
    keys: Keys {
        norm_eps: "layer_norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

const PROJECTOR_NORM: NormSpec = NormSpec {
    kind: NormKind::Layer { has_bias: true },
    has_weights: true,
    eps: 1e-5,
    weight_offset: 0.0,
};

const FIRST: &str = "multi_modal_projector.linear_1";
const SECOND: &str = "multi_modal_projector.linear_2";

fn describe(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let vision = config.object("vision_config")?;
    let vision = vision
        .unwrap_or_else(|| JsonFile::new(config.path(), "vision_config.", Default::default()));
    demand_strategy(config, "default", "default")?;
    demand(&vision, "use_absolute_position_embeddings", true)?;
    demand(&vision, "use_mean_pooling", true)?;
    let merge_size = merge_size(config)?;
    let vision = with_sides(&vision)?;
    let grid = PatchGrid::read(&vision, [448, 14], ("1 / downsample_ratio =", merge_size))?;
    let mut dimensions = Dimensions::from_config(&vision, &DEFAULTS)?;
    let num_positions = grid.num_patches_per_side.pow(2) + 1;
    dimensions.max_position_embeddings = num_positions;
    let layer = layer(&vision, &mut dimensions)?;
    dimensions.num_layers = num_read_layers(config, -1, dimensions.num_layers)?;
    let (hidden, row_width) = (dimensions.hidden_size, model.hidden_size);
    let windows = no_windows(dimensions.num_layers);
    let act = activation(config, "projector_hidden_act")?.unwrap_or(Activation::Gelu);
    let linear =
        |module, num_inputs| Projection::single(module, row_width, num_inputs).with_bias(true);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: Some(LearnedPositions {
                module: "vision_tower.embeddings.position_embeddings",
                first_row: 0,
                padding_id: None,
                num_rows: num_positions,
            }),
            is_bidirectional: true,
            modules: ModelModules {
                embedding: "vision_tower.embeddings.patch_embeddings.projection",
                layers: "vision_tower.encoder.layer",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: None,
                output_layer: FIRST,
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
        class_token: Some("vision_tower.embeddings.cls_token"),
        projector: ProjectorSpec {
            merge_size,
            has_means: false,
            norm: Some(("multi_modal_projector.layer_norm", PROJECTOR_NORM)),
            merging: None,
            inner: Some(InnerProjection {
                projection: linear(FIRST, merge_size * merge_size * hidden),
                activation: PlainActivation::Of(act),
            }),
            projection: linear(SECOND, row_width),
        },
        deep_projectors: Vec::new(),
        text_axes: RopeAxes::Sequence,
    })
}

/// Describes the layer, and sets what all layers have in common.
fn layer(vision: &JsonFile, dimensions: &mut Dimensions) -> Result<LayerSpec, LoadError> {
    dimensions.norm.kind = match vision.string("norm_type")?.unwrap_or("layer_norm") {
        "layer_norm" => NormKind::Layer { has_bias: true },
        "rms_norm" => NormKind::Rms,
        other => {
            let value = format_args!("'{other}'");
            let expected = format_args!("'layer_norm' or 'rms_norm': {TEXT_ONLY}");
            return Err(vision.unexpected("norm_type", value, expected));
        }
    };
    dimensions.rope = Rope::none();
    let hidden = dimensions.hidden_size;
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("attention.q_proj", q),
        ("attention.k_proj", kv),
        ("attention.v_proj", kv),
    ];
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("layernorm_before", "layernorm_after");
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated)
        .with_bias(vision.bool_or("attention_bias", false)?);
    layer.attention.o = Projection::single("attention.projection_layer", hidden, q).with_bias(true);
    let has_qk_norm = vision.bool_or("use_qk_norm", false)?;
    layer.attention.qk_norm = has_qk_norm.then_some(QkNormSpec {
        q: "attention.q_norm",
        k: "attention.k_norm",
        kind: QkNormKind::Row,
        has_values: false,
        eps: 1e-6,
    });
    layer.feed_forward = dimensions.plain("mlp.fc1", "mlp.fc2");
    layer.feed_forward.set_biases(true);
    layer.column_factors = Some(ColumnFactors {
        attention: "lambda_1",
        feed_forward: "lambda_2",
    });
    Ok(layer)
}

/// Patches of each side of a square that becomes a row.
fn merge_size(config: &JsonFile) -> Result<usize, LoadError> {
    const KEY: &str = "downsample_ratio";
    let ratio = config.number(KEY, 1e-6..=1.0)?.unwrap_or(0.5);
    let size = (1.0 / ratio).round();
    match size * ratio == 1.0 && size <= MAX_PIXELS as f64 {
        true => Ok(size as usize),
        false => Err(config.unexpected(KEY, ratio, "1 divided by a whole number")),
    }
}

/// The config with one number where a size may be two equal ones.
fn with_sides(vision: &JsonFile) -> Result<JsonFile, LoadError> {
    let mut with_sides = vision.clone();
    for key in ["image_size", "patch_size"] {
        if let Some(Value::Array(sides)) = vision.get(key) {
            let side = sides
                .first()
                .filter(|&side| sides[..] == [side.clone(), side.clone()]);
            let given = || Value::from(sides.clone());
            let side = side.ok_or_else(|| vision.unexpected(key, given(), "two equal sides"))?;
            with_sides = with_sides.with(key, side.clone());
        }
    }
    Ok(with_sides)
}

fn demand(vision: &JsonFile, key: &str, demanded: bool) -> Result<(), LoadError> {
    match vision.bool_or(key, demanded)? == demanded {
        true => Ok(()),
        false => {
            let expected = format_args!("{demanded}: {TEXT_ONLY}");
            Err(vision.unexpected(key, !demanded, expected))
        }
    }
}
