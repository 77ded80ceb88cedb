//! Pixtral and Mistral 3: the image keeps its shape, with whole patches on each side, and each row of its tokens ends
//! with a token of its own. Source: `PixtralImageProcessor` and `PixtralProcessor` of transformers.

use inflight_base::LoadError;
use serde_json::Value;

use super::files::{CLIP, ProcessorFiles};
use super::{ImageProcessor, Tiling};
use crate::error::ImageError;
use crate::patches::PatchLayout;
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

#[derive(Debug)]
struct Pixtral {
    filter: Filter,
    /// The most rows and columns of pixels.
    max_size: (usize, usize),
    /// The side of a token in pixels.
    side: usize,
    /// The most tokens of an image, without those behind its lines.
    max_tokens: usize,
    row_end: String,
    end: String,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    let normalisation = files.normalisation(CLIP)?;
    let image = &mut files.image;
    image.refuse_switch("do_center_crop")?;
    // Padding only makes images of a batch equally large, and the size of patches is a field of the processor.
    image.switch("do_pad")?;
    image.square("patch_size")?;
    let is_edge = image.get("size").and_then(|size| size.get("longest_edge"));
    let max_size = match is_edge.is_some_and(Value::is_number) {
        true => image.edge("size", "longest_edge")?.map(|edge| (edge, edge)),
        false => image.rectangle("size")?,
    };
    let max_size = max_size.unwrap_or((1024, 1024));
    let processor = &mut files.processor;
    let patch_side = processor.size("patch_size")?.unwrap_or(16);
    let merge = processor.size("spatial_merge_size")?.unwrap_or(1);
    let mut token = |name, default: &str| -> Result<String, LoadError> {
        Ok(processor.text(name)?.unwrap_or_else(|| default.to_owned()))
    };
    let image_token = token("image_token", "[IMG]")?;
    let row_end = token("image_break_token", "[IMG_BREAK]")?;
    let end = token("image_end_token", "[IMG_END]")?;
    let of_tower = files.patch_side()?;
    if of_tower != patch_side {
        return Err(files.processor.error(&format!(
            "patch_size is {patch_side}, but the vision tower in config.json has {of_tower}"
        )));
    }
    files.finish()?;
    let layout = PatchLayout::rows(patch_side);
    let tiling = Pixtral {
        filter,
        max_size,
        side: patch_side * merge,
        max_tokens: usize::MAX,
        row_end,
        end,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl Pixtral {
    /// Rows and columns of tokens.
    fn grid(&self, (height, width): (usize, usize)) -> Result<(usize, usize), ImageError> {
        let (max_height, max_width) = self.max_size;
        let ratio = f64::max(
            height as f64 / max_height as f64,
            width as f64 / max_width as f64,
        );
        let fit = |side: usize| match ratio > 1.0 {
            true => (side as f64 / ratio).floor() as usize,
            false => side,
        };
        let (rows, columns) = (
            fit(height).div_ceil(self.side),
            fit(width).div_ceil(self.side),
        );
        if rows == 0 || columns == 0 {
            return Err(ImageError::Unsupported {
                height,
                width,
                problem: format!("too thin to fit into {max_height} x {max_width}"),
                remedy: "cut the image into parts".to_owned(),
            });
        }
        match rows.saturating_mul(columns) <= self.max_tokens {
            true => Ok((rows, columns)),
            false => Ok(self.largest_grid((height, width))),
        }
    }

    /// Rows and columns of tokens of an image that would have more than it may have: about its shape, and at least one
    /// of each.
    fn largest_grid(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let shrink = (self.max_tokens as f64 / (height as f64 * width as f64)).sqrt();
        let fit = |side: usize| ((side as f64 * shrink) as usize).clamp(1, self.max_tokens);
        let (rows, columns) = (fit(height), fit(width));
        (
            rows.min(self.max_tokens / columns),
            columns.min(self.max_tokens / rows),
        )
    }
}

impl Tiling for Pixtral {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (rows, columns) = self.grid(size)?;
        let mut prompt = ImagePrompt::default();
        for _ in 1..rows {
            prompt = prompt.with_image_tokens(columns).with_text(&self.row_end);
        }
        Ok(prompt.with_image_tokens(columns).with_text(&self.end))
    }

    fn limit_tokens(&mut self, max_tokens: usize) {
        self.max_tokens = self.max_tokens.min(max_tokens.max(1));
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let (rows, columns) = self.grid(image.size())?;
        let size = (rows * self.side, columns * self.side);
        Ok(vec![resize(image, size, self.filter)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_have_no_more_tokens_than_there_may_be() {
        let mut processor = Pixtral {
            filter: Filter::Bicubic,
            max_size: (1540, 1540),
            side: 28,
            max_tokens: usize::MAX,
            row_end: "[IMG_BREAK]".to_owned(),
            end: "[IMG_END]".to_owned(),
        };
        let grid = |processor: &Pixtral, size| processor.grid(size).expect("a size that fits");
        assert_eq!(grid(&processor, (2800, 1400)), (55, 28), "shrunk");
        assert_eq!(grid(&processor, (280, 141)), (10, 6));
        processor.limit_tokens(60);
        assert_eq!(grid(&processor, (280, 141)), (10, 6));
        assert_eq!(grid(&processor, (2800, 1400)), (10, 5));
        assert_eq!(grid(&processor, (1540, 10)), (55, 1), "few enough");
        processor.limit_tokens(7);
        assert_eq!(grid(&processor, (10, 1540)), (1, 7), "cut to what fits");
        assert_eq!(grid(&processor, (700, 700)), (2, 2));
        let prompt = processor.prompt((700, 700), 1).expect("a size that fits");
        assert_eq!(prompt.num_image_tokens(), 4);
    }
}
