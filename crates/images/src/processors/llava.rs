//! LLaVA 1.5 and its like: one tile, the middle of the image or all of it. Source: `CLIPImageProcessor`,
//! `LlavaImageProcessor`, `SiglipImageProcessor` and `LlavaProcessor` of transformers.

use inflight_base::LoadError;
use serde_json::Value;

use super::any_resolution::is_first_dropped;
use super::files::{CENTRED, CLIP, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_ratio, check_square};
use crate::error::ImageError;
use crate::normalisation::{Normalisation, colour_of};
use crate::patches::PatchLayout;
use crate::pixels::{NUM_CHANNELS, Pixels};
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize, resize_part};

#[derive(Debug)]
struct Llava {
    filter: Filter,
    size: Size,
    /// The rectangle in the middle that is kept.
    crop: Option<(usize, usize)>,
    /// The colour around the image that makes it a square.
    padding: Option<[u8; NUM_CHANNELS]>,
    patch_side: usize,
    features: Features,
}

/// The size of a resized image.
#[derive(Debug)]
enum Size {
    /// The short side; the other one follows from the image's shape.
    ShortestEdge(usize),
    /// Rows and columns.
    Rectangle(usize, usize),
}

/// The number of features that a tower makes of patches.
#[derive(Debug)]
pub struct Features {
    pub patch_side: usize,
    pub image_token: String,
    /// Tokens of the tower besides the patches.
    num_additional: usize,
    is_first_dropped: bool,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    let is_siglip = files.class == "SiglipImageProcessor";
    files.image.demand_switch("do_normalize")?;
    let (factor, scales) = files.scales(if is_siglip { CENTRED } else { CLIP })?;
    let normalisation = Normalisation::standard(factor, scales);
    let image = &mut files.image;
    let is_padded = match files.class.as_str() {
        "LlavaImageProcessor" => image.switch("do_pad")?.unwrap_or(false),
        _ => {
            image.refuse_switch("do_pad")?;
            false
        }
    };
    let is_edge = image
        .get("size")
        .is_some_and(|size| size.get("shortest_edge").is_some());
    let size = if is_edge {
        image.edge("size", "shortest_edge")?.map(Size::ShortestEdge)
    } else if image.get("size").is_some_and(Value::is_number) && !is_siglip {
        image.size("size")?.map(Size::ShortestEdge)
    } else {
        image
            .rectangle("size")?
            .map(|(height, width)| Size::Rectangle(height, width))
    };
    let default = if is_siglip {
        Size::Rectangle(224, 224)
    } else {
        Size::ShortestEdge(224)
    };
    let size = size.unwrap_or(default);
    let crop = image.rectangle("crop_size")?;
    let crop = match image.switch("do_center_crop")?.unwrap_or(!is_siglip) {
        true => Some(crop.unwrap_or((224, 224))),
        false => None,
    };
    if let (None, Size::ShortestEdge(_), false) = (crop, &size, is_padded) {
        return Err(image.error("size.shortest_edge without do_center_crop has no bound"));
    }
    let features = Features::read(&mut files)?;
    let patch_side = features.patch_side;
    let image_token = features.image_token.clone();
    files.finish()?;
    let layout = PatchLayout::rows(patch_side);
    let tiling = Llava {
        filter,
        size,
        crop,
        padding: is_padded.then(|| colour_of(scales)),
        patch_side,
        features,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl Features {
    /// Reads the fields of `LlavaProcessor` or `LlavaNextProcessor`.
    pub fn read(files: &mut ProcessorFiles) -> Result<Self, LoadError> {
        let of_tower = files.patch_side()?;
        let of_config = files.config.text("vision_feature_select_strategy")?;
        let processor = &mut files.processor;
        let patch_side = processor.size("patch_size")?.unwrap_or(of_tower);
        if patch_side != of_tower {
            return Err(processor.error(&format!(
                "patch_size is {patch_side}, but the vision tower in config.json has {of_tower}"
            )));
        }
        let strategy = processor
            .text("vision_feature_select_strategy")?
            .or(of_config);
        let strategy = strategy.unwrap_or_else(|| "default".to_owned());
        let is_first_dropped = is_first_dropped(&strategy, processor)?;
        // Older files lack the number of tokens besides patches: a tower has one if it is dropped.
        let num_additional = match processor.take("num_additional_image_tokens") {
            None => Some(u64::from(is_first_dropped)),
            Some(number) => number.as_u64().filter(|&number| number <= 16),
        };
        let Some(num_additional) = num_additional else {
            return Err(processor.error("num_additional_image_tokens is not 0 to 16"));
        };
        let image_token = processor
            .text("image_token")?
            .unwrap_or_else(|| "<image>".to_owned());
        Ok(Self {
            patch_side,
            image_token: files.token("image_token").unwrap_or(image_token),
            num_additional: num_additional as usize,
            is_first_dropped,
        })
    }

    /// The features of so many patches.
    pub fn number(&self, num_patches: usize) -> usize {
        (num_patches + self.num_additional).saturating_sub(usize::from(self.is_first_dropped))
    }
}

impl Llava {
    /// The size before a part is kept. With padding, only a square is resized.
    fn resized(&self, (height, width): (usize, usize)) -> (usize, usize) {
        match self.size {
            Size::Rectangle(height, width) => (height, width),
            Size::ShortestEdge(edge) if self.padding.is_some() => (edge, edge),
            Size::ShortestEdge(edge) => {
                let long = (edge * height.max(width)) as f64 / height.min(width) as f64;
                match width <= height {
                    true => (long as usize, edge),
                    false => (edge, long as usize),
                }
            }
        }
    }
}

impl Tiling for Llava {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        match self.padding {
            Some(_) => check_square(size)?,
            // A long side grows with the short one.
            None => check_ratio(size)?,
        }
        let (height, width) = self.crop.unwrap_or_else(|| self.resized(size));
        let num_patches = (height / self.patch_side) * (width / self.patch_side);
        Ok(ImagePrompt::default().with_image_tokens(self.features.number(num_patches)))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let squared = match self.padding {
            None => None,
            Some(fill) => {
                check_square(image.size())?;
                Some(image.squared(fill))
            }
        };
        let image = squared.as_ref().unwrap_or(image);
        let (height, width) = self.resized(image.size());
        let Some((max_height, max_width)) = self.crop else {
            return Ok(vec![resize(image, (height, width), self.filter)]);
        };
        // The kept part of the resized image, and the border around it if it is smaller.
        let kept = |length: usize, max: usize| {
            let start = length.saturating_sub(max) / 2;
            start..start + length.min(max)
        };
        let part = (kept(height, max_height), kept(width, max_width));
        let part = resize_part(image, (height, width), part, self.filter);
        let before = |max: usize, length: usize| -((max - length) / 2).cast_signed();
        let place = (
            before(max_height, part.height()),
            before(max_width, part.width()),
        );
        Ok(vec![part.framed(
            place,
            (max_height, max_width),
            [0; NUM_CHANNELS],
        )])
    }
}
