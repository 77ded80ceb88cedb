//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6: an encoder of images of any size, and two linear layers.
//!
//! An image is one tile, whose patches come in squares of `spatial_merge_size`: each square becomes a token. Patches
//! are rotated by their row and column. Tokens have three positions in the language model (M-RoPE).
//!
//! ```text
//!                 norms        feed-forward    beside                               pairs of M-RoPE
//! Qwen2-VL        LayerNorm    QuickGELU                                            in sections
//! Qwen2.5-VL      RMSNorm      gated SiLU      windows in most layers               in sections
//! Qwen3-VL        LayerNorm    GELU            learned positions, DeepStack         interleaved
//! Qwen3.5         LayerNorm    GELU            learned positions                    interleaved
//! ```
//!
//! Source: modeling_*.py of qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_5 of transformers; Wang et al., arXiv:2409.12191;
//! Bai et al., arXiv:2502.13923; Meng et al., DeepStack, arXiv:2406.04334.

use serde_json::{Value, json};

use super::Tower;
use crate::families::bounds::{MAX_PATCHES, MAX_PIXELS, MAX_WIDTH};
use crate::families::dimensions::{Defaults, Dimensions, Keys, Sizes};
use crate::families::rope_config::{THETA, rope_parameters};
use crate::families::windows::no_windows;
use crate::rope::{Rope, RopeAxes};
use crate::spec::{
    DeepProjector, FeedForward, InnerProjection, LayerSpec, LearnedPositions, ModelModules,
    ModelSpec, NormKind, NormSpec, Norms, PatchShape, PositionTable, Projection, ProjectorSpec,
    TileSizes, TowerSpec, TowerWindows,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

pub const QWEN2_VL: Tower = Tower {
    class: "Qwen2VLForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN2),
};

pub const QWEN2_5_VL: Tower = Tower {
    class: "Qwen2_5_VLForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN2_5),
};

pub const QWEN3_VL: Tower = Tower {
    class: "Qwen3VLForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN3),
};

pub const QWEN3_VL_MOE: Tower = Tower {
    class: "Qwen3VLMoeForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN3),
};

pub const QWEN3_5: Tower = Tower {
    class: "Qwen3_5ForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN3_5),
};

pub const QWEN3_5_MOE: Tower = Tower {
    class: "Qwen3_5MoeForConditionalGeneration",
    describe: |config, model| describe(config, model, &Form::QWEN3_5),
};

/// What differs between the generations.
struct Form {
    sizes: Sizes,
    patch_size: usize,
    /// The width of the residual stream, and the key of the width of rows.
    widths: [&'static str; 2],
    has_windows: bool,
    /// Learned positions, and biases of patches.
    has_positions: bool,
    has_deep_projectors: bool,
    interleaves_axes: bool,
    /// The pairs of each axis, if the config may be silent about them.
    sections: Option<[usize; 3]>,
    /// The norm behind the last layer, and the two linear layers.
    projector: [&'static str; 3],
}

impl Form {
    const QWEN2: Self = Self {
        sizes: Sizes::new(1, 1280, 5120, 32, 16, 1),
        patch_size: 14,
        widths: ["embed_dim", "hidden_size"],
        has_windows: false,
        has_positions: false,
        has_deep_projectors: false,
        interleaves_axes: false,
        sections: None,
        projector: [
            "model.visual.merger.ln_q",
            "model.visual.merger.mlp.0",
            "model.visual.merger.mlp.2",
        ],
    };

    const QWEN2_5: Self = Self {
        sizes: Sizes::new(1, 3584, 3420, 32, 16, 1),
        widths: ["hidden_size", "out_hidden_size"],
        has_windows: true,
        ..Self::QWEN2
    };

    const QWEN3: Self = Self {
        sizes: Sizes::new(1, 1152, 4304, 27, 16, 1),
        patch_size: 16,
        widths: ["hidden_size", "out_hidden_size"],
        has_windows: false,
        has_positions: true,
        has_deep_projectors: true,
        interleaves_axes: true,
        sections: Some([24, 20, 20]),
        projector: [
            "model.visual.merger.norm",
            "model.visual.merger.linear_fc1",
            "model.visual.merger.linear_fc2",
        ],
    };

    const QWEN3_5: Self = Self {
        has_deep_projectors: false,
        sections: Some([11, 11, 10]),
        ..Self::QWEN3
    };
}

/// The eps of all norms, which no config says.
const NORM_EPS: f32 = 1e-6;

fn describe(config: &JsonFile, model: &ModelSpec, form: &Form) -> Result<TowerSpec, LoadError> {
    let vision = config.object("vision_config")?;
    let vision = vision
        .unwrap_or_else(|| JsonFile::new(config.path(), "vision_config.", Default::default()));
    let [width_key, row_width_key] = form.widths;
    let row_width = vision.size(row_width_key, 1..=MAX_WIDTH)?.unwrap_or(3584);
    if row_width != model.hidden_size {
        return Err(vision.unexpected(
            row_width_key,
            row_width,
            format_args!("{}, the width of the language model", model.hidden_size),
        ));
    }
    let mut dimensions = dimensions(&vision, form, width_key)?;
    let layer = layer(&mut dimensions, form, &vision)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let merge_size = vision.size("spatial_merge_size", 1..=MAX_PIXELS)?;
    let merge_size = merge_size.unwrap_or(2);
    let patch = patch(&vision, form)?;
    let merged = merge_size
        .checked_pow(2)
        .and_then(|num_patches| num_patches.checked_mul(hidden))
        .filter(|&width| width <= MAX_WIDTH)
        .ok_or_else(|| {
            let expected = format!("such that its square times {width_key} is at most {MAX_WIDTH}");
            vision.unexpected("spatial_merge_size", merge_size, expected)
        })?;
    let [norm, first, second] = form.projector;
    let projector = |norm, first, second| ProjectorSpec {
        merge_size,
        has_means: false,
        norm,
        merging: None,
        inner: Some(InnerProjection {
            projection: Projection::single(first, merged, merged).with_bias(true),
            activation: PlainActivation::Of(Activation::Gelu),
        }),
        projection: Projection::single(second, row_width, merged).with_bias(true),
    };
    let side = match form.has_positions {
        true => Some(position_side(&vision)?),
        false => None,
    };
    let deep = match form.has_deep_projectors {
        true => deep_layers(&vision, num_layers, model.num_layers())?,
        false => Vec::new(),
    };
    let deep_projectors = deep.into_iter().map(|layer| DeepProjector {
        layer,
        projector: projector(
            Some(("model.visual.deepstack_merger_list.{}.norm", layer_norm())),
            "model.visual.deepstack_merger_list.{}.linear_fc1",
            "model.visual.deepstack_merger_list.{}.linear_fc2",
        ),
    });
    let windows = match form.has_windows {
        true => Some(windows(
            &vision,
            num_layers,
            merge_size * patch.num_pixels_per_side,
        )?),
        false => None,
    };
    dimensions.max_position_embeddings = MAX_PATCHES;
    let no_windows = no_windows(num_layers);
    Ok(TowerSpec {
        encoder: ModelSpec {
            learned_positions: side.map(|side| LearnedPositions {
                module: "model.visual.pos_embed",
                first_row: 0,
                padding_id: None,
                num_rows: side * side,
            }),
            is_bidirectional: true,
            modules: ModelModules {
                embedding: "model.visual.patch_embed.proj",
                layers: "model.visual.blocks",
                first_layer: 0,
                layers_per_module: 1,
                final_norm: Some(norm),
                output_layer: second,
            },
            ..dimensions.model(model.family, layer, no_windows)
        },
        patch,
        has_patch_bias: form.has_positions,
        tiles: TileSizes::Squares {
            max_num_patches: MAX_PATCHES,
        },
        learned_positions: match side {
            Some(side) => PositionTable::Interpolated { side },
            None => PositionTable::InOrder,
        },
        windows,
        class_token: None,
        line_end: None,
        projector: projector(None, first, second),
        deep_projectors: deep_projectors.collect(),
        text_axes: text_axes(config, model, form)?,
    })
}

/// The sizes of the encoder, whose patches are rotated by row and column.
fn dimensions(
    vision: &JsonFile,
    form: &Form,
    width_key: &'static str,
) -> Result<Dimensions, LoadError> {
    let parameters = rope_parameters(vision)?;
    let theta = match &parameters {
        Some(parameters) => parameters.number("rope_theta", THETA)?,
        None => None,
    };
    if let Some(parameters) = &parameters
        && let Some(kind) = parameters.string("rope_type")?
        && !matches!(kind, "axial" | "default")
    {
        return Err(parameters.unexpected("rope_type", format_args!("'{kind}'"), "'axial'"));
    }
    let mut plain = vision
        .with("rope_parameters", Value::Null)
        .with("rope_scaling", Value::Null);
    if let Some(ratio) = vision.number("mlp_ratio", 0.0..=1024.0)? {
        let width = vision.size(width_key, 1..=MAX_WIDTH)?.unwrap_or(1280);
        plain = plain.with("intermediate_size", json!((width as f64 * ratio) as usize));
    }
    if is_quick(vision)? {
        plain = plain.with("hidden_act", json!("gelu"));
    }
    let defaults = Defaults {
        // The tokens are patches, of which no embedding has a row.
        sizes: Some(form.sizes),
        activation: match form.has_windows {
            true => Activation::Silu,
            false => Activation::GeluTanh,
        },
        keys: Keys {
            hidden_size: width_key,
            num_layers: "depth",
            num_heads: "num_heads",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(&plain, &defaults)?;
    let head_dim = dimensions.head_dim;
    if !head_dim.is_multiple_of(4) {
        return Err(vision.unexpected(
            "num_heads",
            dimensions.num_heads,
            format_args!(
                "such that heads of {width_key} have a multiple of 4 values, and not {head_dim}"
            ),
        ));
    }
    dimensions.norm.eps = NORM_EPS;
    dimensions.rope = Rope {
        theta: theta.unwrap_or(10_000.0),
        rotary_dim: head_dim,
        axes: RopeAxes::Plane,
        ..Rope::none()
    };
    Ok(dimensions)
}

/// Whether feed-forward blocks have QuickGELU, the default of Qwen2-VL.
fn is_quick(vision: &JsonFile) -> Result<bool, LoadError> {
    let default = match vision.get("embed_dim").is_some() {
        true => "quick_gelu",
        false => "",
    };
    Ok(vision.string("hidden_act")?.unwrap_or(default) == "quick_gelu")
}

fn layer_norm() -> NormSpec {
    NormSpec {
        kind: NormKind::Layer { has_bias: true },
        has_weights: true,
        eps: NORM_EPS,
        weight_offset: 0.0,
    }
}

fn layer(
    dimensions: &mut Dimensions,
    form: &Form,
    vision: &JsonFile,
) -> Result<LayerSpec, LoadError> {
    if !form.has_windows {
        dimensions.norm = layer_norm();
    }
    let hidden = dimensions.hidden_size;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("norm1", "norm2");
    layer.attention.qkv = dimensions.fused_qkv("attn.qkv");
    layer.attention.o = Projection::single("attn.proj", hidden, hidden);
    layer.attention.set_biases(true);
    if !form.has_windows {
        layer.feed_forward = match form.has_positions {
            true => dimensions.plain("mlp.linear_fc1", "mlp.linear_fc2"),
            false => dimensions.plain("mlp.fc1", "mlp.fc2"),
        };
    }
    if let FeedForward::Plain { activation, .. } = &mut layer.feed_forward
        && is_quick(vision)?
    {
        *activation = PlainActivation::QuickGelu;
    }
    layer.feed_forward.set_biases(true);
    Ok(layer)
}

fn patch(vision: &JsonFile, form: &Form) -> Result<PatchShape, LoadError> {
    let num_channels = vision.size("in_channels", 3..=3)?.unwrap_or(3);
    let num_frames = vision.size("temporal_patch_size", 1..=16)?.unwrap_or(2);
    let side = vision.size("patch_size", 1..=MAX_PIXELS)?;
    let side = side.unwrap_or(form.patch_size);
    let num_values = side * side * num_channels * num_frames;
    if num_values > MAX_WIDTH {
        let expected =
            format!("such that a patch has at most {MAX_WIDTH} values, and not {num_values}");
        return Err(vision.unexpected("patch_size", side, expected));
    }
    Ok(PatchShape {
        num_channels,
        num_frames: Some(num_frames),
        num_pixels_per_side: side,
    })
}

/// The side of the square of learned positions.
fn position_side(vision: &JsonFile) -> Result<usize, LoadError> {
    const KEY: &str = "num_position_embeddings";
    let num_rows = vision.size(KEY, 1..=MAX_PATCHES)?.unwrap_or(2304);
    match num_rows.isqrt() {
        side if side * side == num_rows => Ok(side),
        _ => Err(vision.unexpected(KEY, num_rows, "a square number")),
    }
}

/// The layers in a list, ascending.
fn layer_list(
    vision: &JsonFile,
    key: &str,
    default: &[usize],
    num_layers: usize,
) -> Result<Vec<usize>, LoadError> {
    let given = vision.get(key).cloned();
    let given = given.filter(|given| !given.is_null());
    let given = given.unwrap_or_else(|| json!(default));
    let layers = given.as_array().map(|layers| {
        let layers = layers.iter().map(|layer| layer.as_u64());
        let layers = layers.map(|layer| layer.and_then(|layer| usize::try_from(layer).ok()));
        layers.collect::<Option<Vec<_>>>()
    });
    let layers = layers.flatten().filter(|layers| {
        layers.iter().all(|&layer| layer < num_layers) && layers.is_sorted_by(|a, b| a < b)
    });
    let expected = || format!("an ascending list of layers below {num_layers}");
    layers.ok_or_else(|| vision.unexpected(key, given, expected()))
}

/// The layers with deep projectors, whose rows are added behind the first layers of the language model.
fn deep_layers(
    vision: &JsonFile,
    num_layers: usize,
    num_text_layers: usize,
) -> Result<Vec<usize>, LoadError> {
    const KEY: &str = "deepstack_visual_indexes";
    let layers = layer_list(vision, KEY, &[8, 16, 24], num_layers)?;
    match layers.len() < num_text_layers {
        true => Ok(layers),
        false => Err(vision.unexpected(
            KEY,
            json!(layers),
            format_args!("fewer than the {num_text_layers} layers of the language model"),
        )),
    }
}

/// The windows of layers, whose side is counted in tokens of so many pixels.
fn windows(
    vision: &JsonFile,
    num_layers: usize,
    token_side: usize,
) -> Result<TowerWindows, LoadError> {
    const KEY: &str = "window_size";
    let size = vision.size(KEY, 1..=MAX_PIXELS)?.unwrap_or(112);
    let side = size / token_side;
    if side == 0 {
        let expected = format!("at least {token_side}, the side of a token");
        return Err(vision.unexpected(KEY, size, expected));
    }
    let whole = layer_list(
        vision,
        "fullatt_block_indexes",
        &[7, 15, 23, 31],
        num_layers,
    )?;
    Ok(TowerWindows {
        side,
        layers: (0..num_layers).map(|it| !whole.contains(&it)).collect(),
    })
}

/// Which of a token's positions rotates which pairs of heads of the language model.
fn text_axes(config: &JsonFile, model: &ModelSpec, form: &Form) -> Result<RopeAxes, LoadError> {
    const KEY: &str = "mrope_section";
    let text = config.object("text_config")?;
    let text = text.as_ref().unwrap_or(config);
    let parameters = rope_parameters(text)?;
    let parameters = parameters.as_ref().unwrap_or(text);
    let rotary_dim = model.layers.iter().map(|it| it.attention.rope.rotary_dim);
    let num_pairs = rotary_dim.max().unwrap_or(0) / 2;
    let given = parameters.get(KEY).cloned();
    let given = given.unwrap_or_else(|| json!(form.sections));
    let sections = given.as_array().and_then(|sections| {
        let sections = sections
            .iter()
            .map(Value::as_u64)
            .collect::<Option<Vec<_>>>()?;
        let sections = sections.into_iter().map(usize::try_from);
        sections.collect::<Result<Vec<_>, _>>().ok()
    });
    let sections = sections.and_then(|sections| <[usize; 3]>::try_from(sections).ok());
    let is_whole = |sections: &[usize; 3]| {
        let sum = sections
            .iter()
            .try_fold(0, |sum: usize, &it| sum.checked_add(it));
        sum == Some(num_pairs)
    };
    let sections = sections.filter(is_whole).ok_or_else(|| {
        let expected =
            format!("three numbers with the sum {num_pairs}, the rotated pairs of a head");
        parameters.unexpected(KEY, given, expected)
    })?;
    Ok(match form.interleaves_axes {
        true => RopeAxes::Interleaved(sections),
        false => RopeAxes::Sections(sections),
    })
}
