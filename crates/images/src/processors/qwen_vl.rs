//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: the image keeps about its size and shape, within bounds of pixels.
//! Source: `Qwen2VLImageProcessor` and `Qwen3VLProcessor` of transformers.

use inflight_base::LoadError;

use super::files::{CLIP, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_ratio};
use crate::error::ImageError;
use crate::patches::{PatchLayout, PatchOrder};
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

#[derive(Debug)]
struct QwenVl {
    filter: Filter,
    /// The side of a patch in pixels, and of the square of patches that becomes a token.
    patch_side: usize,
    merge: usize,
    min_pixels: usize,
    max_pixels: usize,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    let normalisation = files.normalisation(CLIP)?;
    let image = &mut files.image;
    let (mut min_pixels, mut max_pixels) = (56 * 56, 28 * 28 * 1280);
    if let Some(mut size) = image.object("size")? {
        min_pixels = size.num_pixels("shortest_edge")?.unwrap_or(min_pixels);
        max_pixels = size.num_pixels("longest_edge")?.unwrap_or(max_pixels);
        // Older files repeat the bounds here.
        size.finish(&["min_pixels", "max_pixels"])?;
    }
    min_pixels = image.num_pixels("min_pixels")?.unwrap_or(min_pixels);
    max_pixels = image.num_pixels("max_pixels")?.unwrap_or(max_pixels);
    let patch_side = image.patch_size()?.unwrap_or(14);
    let merge = image.factor("merge_size")?.unwrap_or(2);
    let temporal = image.factor("temporal_patch_size")?.unwrap_or(2);
    if min_pixels > max_pixels {
        return Err(image.error(&format!(
            "the least number of pixels, {min_pixels}, is above the largest, {max_pixels}"
        )));
    }
    let image_token = files.token("image_token");
    let image_token = image_token.unwrap_or_else(|| "<|image_pad|>".to_owned());
    files.finish()?;
    let layout = PatchLayout {
        side: patch_side,
        order: PatchOrder::Squares { merge, temporal },
    };
    let tiling = QwenVl {
        filter,
        patch_side,
        merge,
        min_pixels,
        max_pixels,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl QwenVl {
    /// The size that an image is resized to: multiples of a token's side.
    fn target(&self, (height, width): (usize, usize)) -> Result<(usize, usize), ImageError> {
        check_ratio((height, width))?;
        let side = self.patch_side * self.merge;
        let multiple = |pixels: f64| pixels as usize * side;
        let units = |pixels: usize| pixels as f64 / side as f64;
        let rounded = [height, width].map(|pixels| multiple(units(pixels).round_ties_even()));
        let num_pixels = (height * width) as f64;
        // No side is 0: such a size has fewer pixels than the least number, and grows.
        let [height, width] = if rounded[0] * rounded[1] > self.max_pixels {
            let shrink = (num_pixels / self.max_pixels as f64).sqrt();
            let fit = |pixels: usize| multiple((pixels as f64 / shrink / side as f64).floor());
            [height, width].map(|pixels| fit(pixels).max(side))
        } else if rounded[0] * rounded[1] < self.min_pixels {
            let grow = (self.min_pixels as f64 / num_pixels).sqrt();
            [height, width].map(|pixels| multiple((pixels as f64 * grow / side as f64).ceil()))
        } else {
            rounded
        };
        Ok((height, width))
    }
}

impl Tiling for QwenVl {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (height, width) = self.target(size)?;
        let side = self.patch_side * self.merge;
        let num_tokens = (height / side) * (width / side);
        Ok(ImagePrompt::default().with_image_tokens(num_tokens))
    }

    fn limit_tokens(&mut self, max_tokens: usize) {
        let token = (self.patch_side * self.merge).pow(2);
        self.max_pixels = self.max_pixels.min(max_tokens.saturating_mul(token));
        self.min_pixels = self.min_pixels.min(self.max_pixels);
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let target = self.target(image.size())?;
        Ok(vec![resize(image, target, self.filter)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN2_VL: QwenVl = QwenVl {
        filter: Filter::Bicubic,
        patch_side: 14,
        merge: 2,
        min_pixels: 56 * 56,
        max_pixels: 28 * 28 * 16,
    };

    #[test]
    fn sizes_are_within_the_bounds_of_pixels() {
        let target = |height, width| QWEN2_VL.target((height, width)).expect("a target");
        assert_eq!(target(100, 70), (112, 56), "70 / 28 is rounded to even");
        assert_eq!(target(1000, 700), (112, 84), "shrunk");
        assert_eq!(target(10, 10), (56, 56), "grown");
        assert_eq!(target(1, 200), (28, 812), "grown, and above the bound");
        assert!(QWEN2_VL.target((1, 201)).is_err());
    }

    #[test]
    fn images_have_no_more_tokens_than_there_may_be() {
        let mut limited = QWEN2_VL;
        limited.limit_tokens(6);
        let num_tokens = |processor: &QwenVl, size| {
            let prompt = processor.prompt(size, 1).expect("a size that fits");
            prompt.num_image_tokens()
        };
        assert_eq!(num_tokens(&QWEN2_VL, (100, 200)), 10);
        assert_eq!(num_tokens(&limited, (100, 200)), 3);
        assert_eq!(num_tokens(&limited, (56, 84)), 6);
    }
}
