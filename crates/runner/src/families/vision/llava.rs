//! LLaVA 1.5, LLaVA-NeXT (LLaVA 1.6) and LLaVA-OneVision: an encoder of tiles, and two linear layers.
//!
//! The encoder is a [CLIP or a SigLIP](super::clip_encoder), or [Pixtral](super::pixtral)'s. Rows are made of the
//! patches behind the layer that `vision_feature_layer` counts, the last but one by default, and the last one in
//! LLaVA-OneVision, without a norm. LLaVA 1.5 has one tile. The others have a tile with all of the image, and tiles of
//! the image side by side, whose lines end with a row of their own.
//!
//! Source: modeling_llava.py, modeling_llava_next.py and modeling_llava_onevision.py of transformers; Liu et al.,
//! arXiv:2310.03744; Li et al., arXiv:2408.03326.

use serde_json::{Map, Value, json};

use super::clip_encoder::{CLIP, Kind, ReadDefaults, ReadEncoder, SIGLIP};
use super::{Tower, pixtral};
use crate::families::dimensions::activation;
use crate::rope::RopeAxes;
use crate::spec::{
    InnerProjection, ModelSpec, PositionTable, Projection, ProjectorSpec, TileSizes, TowerSpec,
};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::{Activation, PlainActivation};

pub const LLAVA: Tower = Tower {
    class: "LlavaForConditionalGeneration",
    describe: |config, model| describe(config, model, &OF_LLAVA),
};

pub const LLAVA_NEXT: Tower = Tower {
    class: "LlavaNextForConditionalGeneration",
    describe: |config, model| {
        let own = Own {
            line_end: LINE_END,
            ..OF_LLAVA
        };
        describe(config, model, &own)
    },
};

pub const LLAVA_ONEVISION: Tower = Tower {
    class: "LlavaOnevisionForConditionalGeneration",
    describe: |config, model| describe(config, model, &OF_ONEVISION),
};

/// What distinguishes the models.
struct Own {
    /// The encoders, of which the first one is the default.
    kinds: [&'static Kind; 2],
    read: ReadDefaults,
    /// The encoder where config.json has none: `hidden_size`, `intermediate_size`, `num_hidden_layers`,
    /// `num_attention_heads`, `image_size` and `patch_size`.
    sizes: [usize; 6],
    line_end: Option<&'static str>,
}

const OF_LLAVA: Own = Own {
    kinds: [&CLIP, &SIGLIP],
    read: ReadDefaults {
        feature_layer: -2,
        strategy: "default",
    },
    sizes: [1024, 4096, 24, 16, 336, 14],
    line_end: None,
};

const OF_ONEVISION: Own = Own {
    kinds: [&SIGLIP, &CLIP],
    read: ReadDefaults {
        feature_layer: -1,
        strategy: "full",
    },
    sizes: [1152, 4304, 26, 16, 384, 14],
    line_end: LINE_END,
};

const LINE_END: Option<&str> = Some("image_newline");

const FIRST: &str = "multi_modal_projector.linear_1";
const SECOND: &str = "multi_modal_projector.linear_2";

fn describe(config: &JsonFile, model: &ModelSpec, own: &Own) -> Result<TowerSpec, LoadError> {
    let vision = match config.object("vision_config")? {
        Some(vision) => vision,
        None => JsonFile::new(config.path(), "vision_config.", default_vision(own.sizes)),
    };
    if own.line_end.is_none() && pixtral::is_pixtral(&vision)? {
        return pixtral::describe_llava(config, &vision, model);
    }
    let of = (model, FIRST);
    let ReadEncoder {
        spec,
        grid,
        class_token,
    } = ReadEncoder::describe(config, &vision, own.kinds, &own.read, of)?;
    let (hidden, row_width) = (spec.hidden_size, model.hidden_size);
    let act = activation(config, "projector_hidden_act")?.unwrap_or(Activation::Gelu);
    let has_bias = config.bool_or("multimodal_projector_bias", true)?;
    let linear =
        |module, num_inputs| Projection::single(module, row_width, num_inputs).with_bias(has_bias);
    Ok(TowerSpec {
        encoder: spec,
        patch: grid.patch,
        has_patch_bias: class_token.is_none(),
        tiles: TileSizes::Square {
            num_patches_per_side: grid.num_patches_per_side,
        },
        learned_positions: PositionTable::InOrder,
        windows: None,
        line_end: own.line_end,
        class_token,
        projector: ProjectorSpec {
            merge_size: 1,
            has_means: false,
            norm: None,
            merging: None,
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

fn default_vision(sizes: [usize; 6]) -> Map<String, Value> {
    let keys = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    ];
    let sizes = keys.into_iter().zip(sizes);
    sizes
        .map(|(key, size)| (key.to_owned(), json!(size)))
        .collect()
}
