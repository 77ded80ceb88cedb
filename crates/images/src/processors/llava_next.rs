//! LLaVA-NeXT (LLaVA 1.6): tiles of the best resolution. Source: `LlavaNextImageProcessor` and `LlavaNextProcessor` of
//! transformers.

use inflight_base::LoadError;
use serde_json::Value;

use super::any_resolution::AnyResolution;
use super::files::{CLIP, ProcessorFiles};
use super::llava::Features;
use super::{ImageProcessor, Tiling};
use crate::error::ImageError;
use crate::patches::PatchLayout;
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::Filter;
use crate::row_layout::RowLayout;

const DEFAULT_RESOLUTIONS: &[(usize, usize)] =
    &[(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)];

#[derive(Debug)]
struct LlavaNext {
    resolution: AnyResolution,
    features: Features,
    /// Rows and columns of patches of a tile.
    side_in_patches: usize,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    let normalisation = files.normalisation(CLIP)?;
    let image = &mut files.image;
    image.switch("do_pad")?;
    image.switch("do_center_crop")?;
    let setting = image.text("aspect_ratio_setting")?;
    if let Some(setting) = setting.filter(|setting| setting != "anyres") {
        return Err(image.wrong("aspect_ratio_setting", &Value::from(setting), "'anyres'"));
    }
    let is_edge = image
        .get("size")
        .is_some_and(|size| size.get("shortest_edge").is_some());
    let size = match is_edge {
        true => image
            .edge("size", "shortest_edge")?
            .map(|edge| (edge, edge)),
        false => image.rectangle("size")?,
    };
    let size = size.unwrap_or((224, 224));
    let crop = image.rectangle("crop_size")?.unwrap_or(size);
    if crop != size || size.0 != size.1 {
        return Err(image.error(&format!(
            "size {size:?} and crop_size {crop:?} are not the sides of one square"
        )));
    }
    let resolution = AnyResolution::read(image, filter, size.0, DEFAULT_RESOLUTIONS)?;
    let features = Features::read(&mut files)?;
    let patch_side = features.patch_side;
    let side_in_patches = files.patches_in(size.0, patch_side)?;
    let image_token = features.image_token.clone();
    files.finish()?;
    let layout = PatchLayout::rows(patch_side);
    let tiling = LlavaNext {
        resolution,
        features,
        side_in_patches,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl Tiling for LlavaNext {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let num_patches = self.side_in_patches * self.side_in_patches;
        let picture = self.resolution.picture(size, self.side_in_patches);
        let num_tokens = self.features.number(num_patches) + picture.num_rows();
        Ok(ImagePrompt::default().with_image_tokens(num_tokens))
    }

    fn row_layout(&self, size: (usize, usize), _num_images: usize) -> RowLayout {
        RowLayout::Picture(self.resolution.picture(size, self.side_in_patches))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        Ok(self.resolution.tiles(image))
    }
}
