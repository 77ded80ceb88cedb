//! LLaVA-OneVision: tiles of the best resolution, whose features are shrunk to a bound. Source:
//! `LlavaOnevisionImageProcessor` and `LlavaOnevisionProcessor` of transformers. Of several images in a prompt, each is
//! one tile.

use inflight_base::LoadError;
use serde_json::Value;

use super::any_resolution::{AnyResolution, MAX_TILES, is_first_dropped};
use super::files::{CLIP, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_square};
use crate::error::ImageError;
use crate::normalisation::{Normalisation, colour_of};
use crate::patches::PatchLayout;
use crate::pixels::{NUM_CHANNELS, Pixels};
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};
use crate::row_layout::{Picture, RowLayout};

/// Sides of the default resolutions in tiles.
const DEFAULT_SIDES: std::ops::RangeInclusive<usize> = 1..=6;

#[derive(Debug)]
struct LlavaOnevision {
    resolution: AnyResolution,
    /// Rows and columns of features of a tile.
    side_in_patches: usize,
    /// The features that are not shrunk, in tiles.
    max_tiles: usize,
    is_first_dropped: bool,
    /// The colour around one of several images.
    padding: [u8; NUM_CHANNELS],
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    files.image.demand_switch("do_normalize")?;
    let (factor, scales) = files.scales(CLIP)?;
    let normalisation = Normalisation::standard(factor, scales);
    let image = &mut files.image;
    image.switch("do_pad")?;
    image.refuse_switch("do_center_crop")?;
    let (height, side) = image.rectangle("size")?.unwrap_or((384, 384));
    if height != side {
        return Err(image.error(&format!("size is {height} x {side}, which is no square")));
    }
    let sides = DEFAULT_SIDES.map(|tiles| tiles * 384);
    let default: Vec<_> = sides
        .clone()
        .flat_map(|height| sides.clone().map(move |width| (height, width)))
        .collect();
    let resolution = AnyResolution::read(image, filter, side, &default)?;
    let processor = &mut files.processor;
    let strategy = processor.text("vision_feature_select_strategy")?;
    let strategy = strategy.unwrap_or_else(|| "full".to_owned());
    let is_first_dropped = is_first_dropped(&strategy, processor)?;
    let aspect = processor.text("vision_aspect_ratio")?;
    let aspect = aspect.unwrap_or_else(|| "anyres_max_9".to_owned());
    let max_tiles = aspect
        .strip_prefix("anyres_max_")
        .and_then(|tiles| tiles.parse().ok());
    let Some(max_tiles) = max_tiles.filter(|tiles| (1..=MAX_TILES).contains(tiles)) else {
        let expected = format!("anyres_max_ with a number from 1 to {MAX_TILES}");
        return Err(processor.wrong("vision_aspect_ratio", &Value::from(aspect), &expected));
    };
    let image_token = processor
        .text("image_token")?
        .unwrap_or_else(|| "<image>".to_owned());
    let num_tokens = processor.size("num_image_tokens")?;
    let patch_side = files.patch_side()?;
    let side_in_patches = files.patches_in(side, patch_side)?;
    let num_patches = side_in_patches * side_in_patches;
    if num_tokens.is_some_and(|num_tokens| num_tokens != num_patches) {
        return Err(files.processor.error(&format!(
            "num_image_tokens is not {num_patches}, the patches of {patch_side} pixels in a tile of {side}"
        )));
    }
    let image_token = files.token("image_token").unwrap_or(image_token);
    files.finish()?;
    let layout = PatchLayout::rows(patch_side);
    let tiling = LlavaOnevision {
        resolution,
        side_in_patches,
        max_tiles,
        is_first_dropped,
        padding: colour_of(scales),
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl LlavaOnevision {
    /// The features of the tiles, without the padding, and shrunk to the bound.
    fn picture(&self, size: (usize, usize)) -> Picture {
        let picture = self.resolution.picture(size, self.side_in_patches);
        let (rows, columns) = picture.kept;
        let num_patches = self.side_in_patches * self.side_in_patches;
        let excess = (rows * columns) as f64 / (self.max_tiles * num_patches) as f64;
        let ratio = excess.sqrt();
        let shrunk = |side: usize| (side as f64 / ratio).floor() as usize;
        match ratio > 1.1 {
            true => Picture {
                resampled: (shrunk(rows), shrunk(columns)),
                ..picture
            },
            false => picture,
        }
    }
}

impl Tiling for LlavaOnevision {
    fn prompt(&self, size: (usize, usize), num_images: usize) -> Result<ImagePrompt, ImageError> {
        if num_images > 1 {
            check_square(size)?;
        }
        let num_patches = self.side_in_patches * self.side_in_patches;
        let num_patches_kept = num_patches - usize::from(self.is_first_dropped);
        let layout = self.row_layout(size, num_images);
        Ok(ImagePrompt::default().with_image_tokens(layout.num_rows(1, num_patches_kept)))
    }

    fn row_layout(&self, size: (usize, usize), num_images: usize) -> RowLayout {
        match num_images > 1 {
            true => RowLayout::Line,
            false => RowLayout::Picture(self.picture(size)),
        }
    }

    fn depends_on_num_images(&self) -> bool {
        true
    }

    fn tiles(&self, image: &Pixels, num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        if num_images <= 1 {
            return Ok(self.resolution.tiles(image));
        }
        check_square(image.size())?;
        let square = (self.resolution.side, self.resolution.side);
        let squared = image.squared(self.padding);
        Ok(vec![resize(&squared, square, self.resolution.filter)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes and pictures of tests/fixtures/images/llava-onevision.
    #[test]
    fn pictures_above_the_bound_are_resampled() {
        let processor = LlavaOnevision {
            resolution: AnyResolution {
                filter: Filter::Bicubic,
                side: 8,
                grids: vec![(1, 1), (1, 2), (2, 2), (2, 3)],
            },
            side_in_patches: 2,
            max_tiles: 3,
            is_first_dropped: false,
            padding: [0; NUM_CHANNELS],
        };
        let picture = |tiles, kept, resampled| {
            RowLayout::Picture(Picture {
                tiles,
                kept,
                resampled,
            })
        };
        let small = picture((1, 2), (2, 4), (2, 4));
        assert_eq!(processor.row_layout((8, 16), 1), small);
        let large = picture((2, 3), (4, 4), (3, 3));
        assert_eq!(processor.row_layout((16, 17), 1), large);
        assert_eq!(processor.row_layout((16, 17), 2), RowLayout::Line);
    }
}
