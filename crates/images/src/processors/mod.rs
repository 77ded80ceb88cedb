//! The processors of checkpoints: how an image becomes tiles, and which tokens stand for it in a prompt. Each is data
//! that one file reads from a checkpoint's JSON files, with the defaults of transformers.

mod any_resolution;
mod files;
mod gemma3;
mod gemma4;
mod idefics3;
mod internvl;
mod llama4;
mod llava;
mod llava_next;
mod llava_onevision;
mod pixtral;
mod qwen_vl;

use std::fmt::Debug;
use std::path::Path;

use inflight_base::LoadError;

use crate::error::ImageError;
use crate::fields::Fields;
use crate::normalisation::Normalisation;
use crate::patches::{ImagePatches, PatchLayout};
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::row_layout::RowLayout;

use files::ProcessorFiles;

/// Reads a processor.
type Read = fn(ProcessorFiles) -> Result<ImageProcessor, LoadError>;

/// The processors by their image processor's class, without the ending `Fast`, and the types of their models.
const PROCESSORS: &[(&str, &[&str], Read)] = &[
    ("CLIPImageProcessor", &["llava"], llava::read),
    ("Gemma3ImageProcessor", &["gemma3"], gemma3::read),
    ("Gemma4ImageProcessor", &["gemma4"], gemma4::read),
    ("GotOcr2ImageProcessor", &["internvl"], internvl::read),
    (
        "Idefics3ImageProcessor",
        &["idefics3", "smolvlm"],
        idefics3::read,
    ),
    ("Llama4ImageProcessor", &["llama4"], llama4::read),
    ("LlavaImageProcessor", &["llava"], llava::read),
    ("LlavaNextImageProcessor", &["llava_next"], llava_next::read),
    (
        "LlavaOnevisionImageProcessor",
        &["llava_onevision"],
        llava_onevision::read,
    ),
    (
        "PixtralImageProcessor",
        &["llava", "mistral3"],
        pixtral::read,
    ),
    (
        "Qwen2VLImageProcessor",
        &[
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
        ],
        qwen_vl::read,
    ),
    ("SiglipImageProcessor", &["llava"], llava::read),
    (
        "SmolVLMImageProcessor",
        &["idefics3", "smolvlm"],
        idefics3::read,
    ),
];

/// How the images of a checkpoint are processed.
#[derive(Debug)]
pub struct ImageProcessor {
    placeholder: String,
    image_token: String,
    normalisation: Normalisation,
    layout: PatchLayout,
    tiling: Box<dyn Tiling>,
}

/// An image that is ready for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessedImage {
    /// The input of the vision tower.
    pub patches: ImagePatches,
    /// The text and the tokens in place of the image's placeholder.
    pub prompt: ImagePrompt,
}

/// The tiling of an image, in which processors differ. Both functions fail if the processor takes no image of this
/// shape.
trait Tiling: Debug + Send + Sync {
    /// The prompt of an image of so many rows and columns, one of `num_images` in all of the prompt.
    fn prompt(&self, size: (usize, usize), num_images: usize) -> Result<ImagePrompt, ImageError>;

    /// Whether the tiles and the prompt of an image depend on whether there are others.
    fn depends_on_num_images(&self) -> bool {
        false
    }

    /// Makes images of more tokens smaller, if images keep their size.
    fn limit_tokens(&mut self, _max_tokens: usize) {}

    /// How rows of tiles become rows of an image of so many rows and columns of pixels.
    fn row_layout(&self, _size: (usize, usize), _num_images: usize) -> RowLayout {
        RowLayout::Tiles
    }

    /// The tiles of the image, in their final size.
    fn tiles(&self, image: &Pixels, num_images: usize) -> Result<Vec<Pixels>, ImageError>;
}

/// The most tiles of an image, and the most pixels of all.
const MAX_TILES_AND_PIXELS: (usize, usize) = (256, 1 << 26);

/// Bounds the work and the memory of an image by the fields of a processor.
///
/// # Errors
/// An image may become more tiles, or more pixels, than is bounded.
fn check_tiles(
    image: &Fields,
    num_tiles: usize,
    (height, width): (usize, usize),
) -> Result<(), LoadError> {
    let (max_tiles, max_pixels) = MAX_TILES_AND_PIXELS;
    match num_tiles <= max_tiles && num_tiles * height * width <= max_pixels {
        true => Ok(()),
        false => Err(image.error(&format!(
            "an image becomes up to {num_tiles} tiles of {height} x {width} pixels, above {max_tiles} tiles or \
             {max_pixels} pixels"
        ))),
    }
}

/// How many times as long as wide an image may be, where its size follows from its shape.
const MAX_RATIO: usize = 200;

/// # Errors
/// The image is much longer than wide, or much wider than long.
fn check_ratio((height, width): (usize, usize)) -> Result<(), ImageError> {
    match height.max(width) > MAX_RATIO * height.min(width) {
        true => Err(ImageError::Unsupported {
            height,
            width,
            problem: format!("more than {MAX_RATIO} times as long as wide"),
            remedy: "cut the image into parts".to_owned(),
        }),
        false => Ok(()),
    }
}

/// The longest side of an image that is padded to a square, which bounds the square's memory.
const MAX_SQUARE_SIDE: usize = 1 << 13;

/// # Errors
/// The image is too long to be padded to a square.
fn check_square((height, width): (usize, usize)) -> Result<(), ImageError> {
    match height.max(width) > MAX_SQUARE_SIDE {
        true => Err(ImageError::Unsupported {
            height,
            width,
            problem: format!(
                "longer than {MAX_SQUARE_SIDE} on a side, too long to be padded to a square"
            ),
            remedy: "make the image smaller".to_owned(),
        }),
        false => Ok(()),
    }
}

impl ImageProcessor {
    /// A processor whose placeholder in a prompt is the token of an image's rows.
    fn new(
        image_token: String,
        normalisation: Normalisation,
        layout: PatchLayout,
        tiling: impl Tiling + 'static,
    ) -> Self {
        Self {
            placeholder: image_token.clone(),
            image_token,
            normalisation,
            layout,
            tiling: Box::new(tiling),
        }
    }

    /// Reads the processor of a checkpoint in a folder: `config.json`, `preprocessor_config.json`,
    /// `processor_config.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// A file is missing or damaged, or the processor or one of its options is unknown.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let files = ProcessorFiles::open(folder)?;
        let known = PROCESSORS
            .iter()
            .find(|(class, _, _)| *class == files.class);
        let Some((_, model_types, read)) = known else {
            let names: Vec<&str> = PROCESSORS.iter().map(|(class, ..)| *class).collect();
            return Err(files.image.error(&format!(
                "image processor '{}' is unknown; known are {}",
                files.class,
                names.join(", ")
            )));
        };
        if !model_types.contains(&files.model_type.as_str()) {
            return Err(files.config.error(&format!(
                "model type '{}' is unknown with the image processor '{}'; known are {}",
                files.model_type,
                files.class,
                model_types.join(", ")
            )));
        }
        read(files)
    }

    /// This processor for images of at most so many tokens: where images keep their size, larger ones become smaller.
    pub fn with_max_tokens(mut self, max_tokens: usize) -> Self {
        self.tiling.limit_tokens(max_tokens);
        self
    }

    /// The text that stands for an image in a rendered prompt, which [`ProcessedImage::prompt`] replaces.
    pub fn placeholder(&self) -> &str {
        &self.placeholder
    }

    /// The name of the token of [`crate::PromptPiece::ImageTokens`].
    pub fn image_token(&self) -> &str {
        &self.image_token
    }

    /// The prompt of an image of so many rows and columns of pixels, one of the `num_images` of a prompt. It costs
    /// little, so that too many tokens can be refused before an image is processed.
    ///
    /// # Errors
    /// The processor takes no image of this shape.
    pub fn prompt(
        &self,
        size: (usize, usize),
        num_images: usize,
    ) -> Result<ImagePrompt, ImageError> {
        self.tiling.prompt(size, num_images)
    }

    /// Whether an image is processed in another way where the prompt has several.
    pub fn depends_on_num_images(&self) -> bool {
        self.tiling.depends_on_num_images()
    }

    /// Processes one of the `num_images` images of a prompt.
    ///
    /// # Errors
    /// The processor takes no image of this shape.
    pub fn process(&self, image: &Pixels, num_images: usize) -> Result<ProcessedImage, ImageError> {
        let prompt = self.prompt(image.size(), num_images)?;
        let tiles = self.tiling.tiles(image, num_images)?;
        let (values, tiles) = self.layout.cut(&tiles, &self.normalisation);
        let num_tokens = prompt.num_image_tokens();
        Ok(ProcessedImage {
            patches: ImagePatches {
                values,
                tiles,
                num_tokens,
                row_layout: self.tiling.row_layout(image.size(), num_images),
            },
            prompt,
        })
    }
}
