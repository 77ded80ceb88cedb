//! The files of a processor.

use std::path::Path;

use inflight_base::LoadError;
use serde_json::Value;

use crate::fields::{Fields, MAX_PATCH_SIDE};
use crate::normalisation::{Normalisation, Scales};
use crate::pixels::NUM_CHANNELS;
use crate::resizing::Filter;

/// Of CLIP's training data.
pub const CLIP: Scales = (
    [0.48145466, 0.4578275, 0.40821073],
    [0.26862954, 0.26130258, 0.27577711],
);
/// The values become -1 to 1.
pub const CENTRED: Scales = ([0.5; NUM_CHANNELS], [0.5; NUM_CHANNELS]);
/// The values stay 0 to 1.
pub const UNCHANGED: Scales = ([0.0; NUM_CHANNELS], [1.0; NUM_CHANNELS]);

/// Fields of an image processor that do not change its result for one image in RGB.
const WITHOUT_EFFECT: &[&str] = &[
    "_processor_class",
    "_valid_processor_keys",
    "auto_map",
    "backend",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "feature_extractor_type",
    "input_data_format",
    "processor_class",
    "return_tensors",
    "use_fast",
];

/// Fields of `processor_config.json` that do not change the processing of images.
const OF_OTHERS: &[&str] = &[
    "audio_processor",
    "auto_map",
    "chat_template",
    "feature_extractor",
    "processor_class",
    "tokenizer",
    "video_processor",
    "video_token",
];

/// The files of a processor. Fields are taken, and [`Self::finish`] refuses any that are left.
pub struct ProcessorFiles {
    /// The class of the image processor, without the ending `Fast`.
    pub class: String,
    /// The model's type in `config.json`.
    pub model_type: String,
    /// `config.json`.
    pub config: Fields,
    /// The image processor's own fields.
    pub image: Fields,
    /// `processor_config.json`.
    pub processor: Fields,
    tokenizer: Fields,
}

impl ProcessorFiles {
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let read = |name| Fields::read(folder.join(name));
        let config_path = folder.join("config.json");
        let Some(mut config) = Fields::read(config_path.clone())? else {
            return Err(LoadError::File {
                path: config_path,
                reason: "the file is missing".to_owned(),
            });
        };
        let model_type = config.text("model_type")?;
        let model_type = model_type.ok_or_else(|| config.lacks("model_type"))?;
        let or_missing = |name: &str, file: Option<Fields>| {
            file.unwrap_or_else(|| Fields::missing(&folder.join(name)))
        };
        let mut processor = or_missing("processor_config.json", read("processor_config.json")?);
        let image = match processor.object("image_processor")? {
            Some(fields) => Some(fields),
            None => read("preprocessor_config.json")?,
        };
        let Some(mut image) = image else {
            return Err(LoadError::File {
                path: folder.join("preprocessor_config.json"),
                reason: "the file is missing, which says how images are processed".to_owned(),
            });
        };
        let class = match image.text("image_processor_type")? {
            Some(class) => class,
            None => {
                let old = image.text("feature_extractor_type")?;
                let old = old.ok_or_else(|| image.lacks("image_processor_type"))?;
                old.replace("FeatureExtractor", "ImageProcessor")
            }
        };
        let class = class.strip_suffix("Fast").unwrap_or(&class).to_owned();
        Ok(Self {
            class,
            model_type,
            config,
            image,
            processor,
            tokenizer: or_missing("tokenizer_config.json", read("tokenizer_config.json")?),
        })
    }

    /// The filter with which images are resized.
    pub fn filter(&mut self, default: Filter) -> Result<Filter, LoadError> {
        self.image.demand_switch("do_resize")?;
        let Some(value) = self.image.take("resample") else {
            return Ok(default);
        };
        match value.as_u64() {
            Some(1) => Ok(Filter::Lanczos),
            Some(2) => Ok(Filter::Bilinear),
            Some(3) => Ok(Filter::Bicubic),
            _ => {
                let expected = "1 (Lanczos), 2 (bilinear) or 3 (bicubic)";
                Err(self.image.wrong("resample", &value, expected))
            }
        }
    }

    /// How values are normalised, with a mean and a deviation as defaults.
    pub fn normalisation(&mut self, default: Scales) -> Result<Normalisation, LoadError> {
        let (factor, scales) = self.scales(default)?;
        match self.image.switch("do_normalize")? {
            Some(false) => Ok(Normalisation::Rescaled {
                factor: factor as f32,
            }),
            _ => Ok(Normalisation::standard(factor, scales)),
        }
    }

    /// The factor of values, and the mean and the deviation of their products.
    pub fn scales(&mut self, (mean, deviation): Scales) -> Result<(f64, Scales), LoadError> {
        let image = &mut self.image;
        image.demand_switch("do_rescale")?;
        let factor = image.number("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let mean = image.channels("image_mean")?.unwrap_or(mean);
        let deviation = image.channels("image_std")?.unwrap_or(deviation);
        let is_positive = |number: &f64| number.is_finite() && *number > 0.0;
        if !deviation.iter().chain([&factor]).all(is_positive) {
            return Err(image.error("image_std and rescale_factor have to be positive"));
        }
        Ok((factor, (mean, deviation)))
    }

    /// A field of the vision tower's section in `config.json` that is a size.
    pub fn vision_size(&mut self, name: &str) -> Result<Option<usize>, LoadError> {
        let Some(mut vision) = self.config.object("vision_config")? else {
            return Ok(None);
        };
        let size = vision.square(name)?;
        self.config.put_back("vision_config", vision);
        Ok(size)
    }

    /// The side of a patch of the vision tower.
    pub fn patch_side(&mut self) -> Result<usize, LoadError> {
        let side = self.vision_size("patch_size")?;
        let side = side.ok_or_else(|| self.config.lacks("vision_config.patch_size"))?;
        match side <= MAX_PATCH_SIDE {
            true => Ok(side),
            false => Err(self.config.error(&format!(
                "vision_config.patch_size is {side}, above {MAX_PATCH_SIDE}"
            ))),
        }
    }

    /// How many patches stand beside each other in a tile.
    ///
    /// # Errors
    /// Not one.
    pub fn patches_in(&self, tile_side: usize, patch_side: usize) -> Result<usize, LoadError> {
        match tile_side / patch_side {
            0 => Err(self.config.error(&format!(
                "vision_config.patch_size is {patch_side}, above the {tile_side} pixels of a tile"
            ))),
            num_patches => Ok(num_patches),
        }
    }

    /// A special token's text by its name in `tokenizer_config.json`.
    pub fn token(&self, name: &str) -> Option<String> {
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Object(token) => Some(token.get("content")?.as_str()?.to_owned()),
            _ => None,
        };
        let places = ["model_specific_special_tokens", "extra_special_tokens"];
        let nested = places
            .iter()
            .find_map(|place| self.tokenizer.get(place)?.get(name));
        nested.or_else(|| self.tokenizer.get(name)).and_then(text)
    }

    /// A special token's text that has no default.
    pub fn required_token(&self, name: &str) -> Result<String, LoadError> {
        let token = self.token(name);
        token.ok_or_else(|| {
            self.tokenizer
                .error(&format!("the special token '{name}' is missing"))
        })
    }

    /// Refuses the fields that no one has taken.
    pub fn finish(self) -> Result<(), LoadError> {
        self.image.finish(WITHOUT_EFFECT)?;
        self.processor.finish(OF_OTHERS)
    }
}
