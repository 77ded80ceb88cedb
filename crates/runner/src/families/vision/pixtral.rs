//! Pixtral, the encoder of Pixtral 12B and Mistral Small 3.1 and later: images of any size, and linear layers.
//!
//! An image is one tile, whose patches come row after row and are rotated by their row and column. RMSNorm behind the
//! embedding of patches and in front of each block, gated feed-forward blocks, and no biases. Pixtral 12B is a LLaVA:
//! each patch becomes a row. Mistral 3 has a norm behind the layers, and squares of `spatial_merge_size` patches a side
//! are merged by a layer without an activation in front of LLaVA's two.
//!
//! The rows of an image in a prompt have tokens of the text between their lines, and ordinary positions.
//!
//! Source: modeling_pixtral.py, modeling_llava.py and modeling_mistral3.py of transformers; Agrawal et al.,
//! arXiv:2410.07073.

use serde_json::{Value, json};

use super::feature_layer::{demand_strategy, num_read_layers};
use super::{TEXT_ONLY, Tower};
use crate::families::bounds::{MAX_PATCHES, MAX_PIXELS, MAX_WIDTH};
use crate::families::dimensions::{Defaults, Dimensions, Sizes, activation};
use crate::families::rope_config::{THETA, rope_parameters};
use crate::families::windows::no_windows;
use crate::rope::{Rope, RopeAxes};
use crate::spec::{
    FeedForward, InnerProjection, LayerSpec, ModelModules, ModelSpec, Norms, PatchShape,
    PositionTable, Projection, ProjectorSpec, TileSizes, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};
use inflight_numbers::Stacking;

pub const MISTRAL3: Tower = Tower {
    class: "Mistral3ForConditionalGeneration",
    describe: describe_mistral3,
};

/// The name of the encoder in config.json.
const MODEL_TYPE: &str = "pixtral";

const DEFAULTS: Defaults = Defaults {
    // The tokens are patches, of which no embedding has a row.
    sizes: Some(Sizes::new(1, 1024, 4096, 24, 16, 1)),
    activation: Activation::Gelu,
    ..Defaults::LLAMA
};

/// The eps of all norms of the encoder, which no config says.
const NORM_EPS: f32 = 1e-5;

const FIRST: &str = "multi_modal_projector.linear_1";
const SECOND: &str = "multi_modal_projector.linear_2";

/// Differences between Pixtral 12B and Mistral 3.
struct Own {
    /// The layer behind which rows are read, if config.json is silent.
    feature_layer: i64,
    /// Whether the linear layers have biases, if config.json is silent.
    has_bias: bool,
    /// The norm behind the layers.
    final_norm: Option<&'static str>,
    /// Patches of each side of a square, and the layer that merges them.
    merging: Option<(usize, &'static str)>,
}

/// Whether the encoder of a LLaVA, whose config is `vision`, is a Pixtral.
///
/// # Errors
/// The name of the encoder is no text.
pub fn is_pixtral(vision: &JsonFile) -> Result<bool, LoadError> {
    Ok(vision.string("model_type")? == Some(MODEL_TYPE))
}

/// Describes the tower of a LLaVA with a Pixtral.
///
/// # Errors
/// A value is not supported.
pub fn describe_llava(
    config: &JsonFile,
    vision: &JsonFile,
    model: &ModelSpec,
) -> Result<TowerSpec, LoadError> {
    demand_strategy(config, "default", "full")?;
    let own = Own {
        feature_layer: -2,
        has_bias: true,
        final_norm: None,
        merging: None,
    };
    describe(config, vision, model, &own)
}

fn describe_mistral3(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    let default = json!({"patch_size": 14});
    let vision = config.object("vision_config")?.unwrap_or_else(|| {
        let default = default.as_object().cloned().unwrap_or_default();
        JsonFile::new(config.path(), "vision_config.", default)
    });
    let name = vision.string("model_type")?.unwrap_or(MODEL_TYPE);
    if name != MODEL_TYPE {
        let expected = format_args!("'{MODEL_TYPE}': {TEXT_ONLY}");
        return Err(vision.unexpected("model_type", format_args!("'{name}'"), expected));
    }
    // The projector's norm has the eps of the language model.
    if model.norm.eps != NORM_EPS {
        let expected = format_args!("{NORM_EPS}, as in the tower: {TEXT_ONLY}");
        return Err(config.unexpected("text_config.rms_norm_eps", model.norm.eps, expected));
    }
    let merge_size = config.size("spatial_merge_size", 1..=MAX_PIXELS)?;
    let own = Own {
        feature_layer: -1,
        has_bias: false,
        final_norm: Some("multi_modal_projector.norm"),
        merging: Some((
            merge_size.unwrap_or(2),
            "multi_modal_projector.patch_merger.merging_layer",
        )),
    };
    describe(config, &vision, model, &own)
}

fn describe(
    config: &JsonFile,
    vision: &JsonFile,
    model: &ModelSpec,
    own: &Own,
) -> Result<TowerSpec, LoadError> {
    let mut dimensions = dimensions(vision)?;
    dimensions.num_layers = num_read_layers(config, own.feature_layer, dimensions.num_layers)?;
    let (hidden, row_width) = (dimensions.hidden_size, model.hidden_size);
    let patch = patch(vision)?;
    let merge_size = own.merging.map_or(1, |(merge_size, _)| merge_size);
    let merged = merge_size
        .checked_pow(2)
        .and_then(|num_patches| num_patches.checked_mul(hidden))
        .filter(|&width| width <= MAX_WIDTH)
        .ok_or_else(|| {
            let expected = format!("such that its square times hidden_size is at most {MAX_WIDTH}");
            config.unexpected("spatial_merge_size", merge_size, expected)
        })?;
    let merging = own.merging;
    let act = activation(config, "projector_hidden_act")?.unwrap_or(Activation::Gelu);
    let has_bias = config.bool_or("multimodal_projector_bias", own.has_bias)?;
    let linear =
        |module, num_inputs| Projection::single(module, row_width, num_inputs).with_bias(has_bias);
    let layer = layer(&dimensions);
    let windows = no_windows(dimensions.num_layers);
    Ok(TowerSpec {
        encoder: ModelSpec {
            is_bidirectional: true,
            embedding_norm: Some("vision_tower.ln_pre"),
            modules: ModelModules {
                embedding: "vision_tower.patch_conv",
                layers: "vision_tower.transformer.layers",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: own.final_norm,
                output_layer: FIRST,
            },
            ..dimensions.model(model.family, layer, windows)
        },
        patch,
        has_patch_bias: false,
        tiles: TileSizes::Rows {
            max_num_patches: MAX_PATCHES,
        },
        learned_positions: PositionTable::InOrder,
        windows: None,
        line_end: None,
        class_token: None,
        projector: ProjectorSpec {
            merge_size,
            norm: None,
            has_means: false,
            merging: merging.map(|(_, module)| Projection::single(module, hidden, merged)),
            inner: Some(InnerProjection {
                projection: linear(FIRST, hidden),
                activation: PlainActivation::Of(act),
            }),
            projection: linear(SECOND, row_width),
        },
        deep_projectors: Vec::new(),
        text_axes: RopeAxes::Sequence,
    })
}

/// The sizes of the encoder, whose patches are rotated by row and column.
fn dimensions(vision: &JsonFile) -> Result<Dimensions, LoadError> {
    let parameters = rope_parameters(vision)?;
    let mut theta = vision.number("rope_theta", THETA)?;
    if let Some(parameters) = &parameters {
        theta = parameters.number("rope_theta", THETA)?.or(theta);
        if let Some(kind) = parameters.string("rope_type")?
            && !matches!(kind, "axial" | "default")
        {
            return Err(parameters.unexpected("rope_type", format_args!("'{kind}'"), "'axial'"));
        }
    }
    let plain = vision
        .with("rope_parameters", Value::Null)
        .with("rope_scaling", Value::Null);
    let mut dimensions = Dimensions::from_config(&plain, &DEFAULTS)?;
    let (head_dim, num_heads) = (dimensions.head_dim, dimensions.num_heads);
    if !head_dim.is_multiple_of(4) || head_dim * num_heads != dimensions.hidden_size {
        return Err(vision.unexpected(
            "num_attention_heads",
            num_heads,
            format_args!(
                "such that heads of {head_dim} values, a multiple of 4, make up hidden_size {}",
                dimensions.hidden_size
            ),
        ));
    }
    dimensions.max_position_embeddings = MAX_PATCHES;
    dimensions.norm.eps = NORM_EPS;
    dimensions.rope = Rope {
        theta: theta.unwrap_or(10_000.0),
        rotary_dim: head_dim,
        axes: RopeAxes::PlaneInTurn,
        ..Rope::none()
    };
    Ok(dimensions)
}

fn layer(dimensions: &Dimensions) -> LayerSpec {
    let (hidden, inner) = (dimensions.hidden_size, dimensions.intermediate_size);
    let qkv = ["attention.q_proj", "attention.k_proj", "attention.v_proj"];
    let mut qkv = Projection::stacked(
        &qkv.map(|module| (module, hidden)),
        hidden,
        Stacking::Concatenated,
    );
    dimensions.order_heads(&mut qkv);
    let gate_up = ["feed_forward.gate_proj", "feed_forward.up_proj"];
    let gate_up = gate_up.map(|module| (module, inner));
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("attention_norm", "ffn_norm");
    layer.attention.qkv = qkv;
    layer.attention.o = Projection::single("attention.o_proj", hidden, hidden);
    layer.feed_forward = FeedForward::Gated {
        gate_up: Projection::stacked(&gate_up, hidden, Stacking::Interleaved),
        activation: dimensions.activation,
        down: Projection::single("feed_forward.down_proj", hidden, inner),
    };
    layer
}

fn patch(vision: &JsonFile) -> Result<PatchShape, LoadError> {
    let num_channels = vision.size("num_channels", 3..=3)?.unwrap_or(3);
    let side = vision.size("patch_size", 1..=MAX_PIXELS)?.unwrap_or(16);
    let num_values = side * side * num_channels;
    match num_values <= MAX_WIDTH {
        true => Ok(PatchShape {
            num_channels,
            num_frames: None,
            num_pixels_per_side: side,
        }),
        false => {
            let expected =
                format!("such that a patch has at most {MAX_WIDTH} values, and not {num_values}");
            Err(vision.unexpected("patch_size", side, expected))
        }
    }
}
