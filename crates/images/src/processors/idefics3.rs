//! Idefics 3 and SmolVLM: the image is cut into squares of equal size, which a small copy of all of it follows. Source:
//! `Idefics3ImageProcessor`, `SmolVLMImageProcessor` and `Idefics3Processor` of transformers.

use inflight_base::LoadError;

use super::files::{CENTRED, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_tiles};
use crate::error::ImageError;
use crate::patches::PatchLayout;
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

/// The longest side before the image is cut.
const MAX_LONGEST_EDGE: usize = 4096;
const IMAGE_TOKEN: &str = "<image>";
const AROUND_TILE: &str = "<fake_token_around_image>";
const WHOLE_IMAGE: &str = "<global-img>";

#[derive(Debug)]
struct Idefics3 {
    filter: Filter,
    /// The longest side that the image is resized to before it is cut.
    longest_edge: usize,
    /// The side of a tile.
    tile: usize,
    tokens_per_tile: usize,
    is_cut: bool,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Lanczos)?;
    let normalisation = files.normalisation(CENTRED)?;
    let image = &mut files.image;
    // Padding only makes images of a batch equally large.
    image.switch("do_pad")?;
    image.switch("return_row_col_info")?;
    image.take("video_sampling");
    let longest_edge = image.edge("size", "longest_edge")?.unwrap_or(4 * 364);
    let tile = image.edge("max_image_size", "longest_edge")?.unwrap_or(364);
    let is_cut = image.switch("do_image_splitting")?.unwrap_or(true);
    let tiles_per_side = longest_edge.div_ceil(tile);
    check_tiles(image, tiles_per_side * tiles_per_side, (tile, tile))?;
    let tokens_per_tile = files.processor.size("image_seq_len")?.unwrap_or(169);
    let patch_side = files.patch_side()?;
    let shuffle = files.config.size("scale_factor")?.unwrap_or(2);
    let side_in_tokens = tile / patch_side / shuffle;
    if side_in_tokens * side_in_tokens != tokens_per_tile {
        return Err(files.processor.error(&format!(
            "image_seq_len is {tokens_per_tile}, but tiles of {tile} pixels with patches of {patch_side} and the scale \
             factor {shuffle} have {side_in_tokens} x {side_in_tokens} tokens"
        )));
    }
    files.finish()?;
    Ok(ImageProcessor {
        placeholder: IMAGE_TOKEN.to_owned(),
        image_token: IMAGE_TOKEN.to_owned(),
        normalisation,
        layout: PatchLayout::rows(patch_side),
        tiling: Box::new(Idefics3 {
            filter,
            longest_edge,
            tile,
            tokens_per_tile,
            is_cut,
        }),
    })
}

impl Idefics3 {
    /// The size with the longest edge, and the short side even.
    fn scaled(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let ratio = width as f64 / height as f64;
        let even = |side: f64| (side as usize).next_multiple_of(2).max(1);
        let edge = self.longest_edge as f64;
        let (height, width) = match width >= height {
            true => (even(edge / ratio), self.longest_edge),
            false => (self.longest_edge, even(edge * ratio)),
        };
        let ratio = width as f64 / height as f64;
        let edge = MAX_LONGEST_EDGE as f64;
        match (width >= height, height.max(width) > MAX_LONGEST_EDGE) {
            (_, false) => (height, width),
            (true, true) => (((edge / ratio) as usize).max(1), MAX_LONGEST_EDGE),
            (false, true) => (MAX_LONGEST_EDGE, ((edge * ratio) as usize).max(1)),
        }
    }

    /// Rows and columns of tiles.
    fn grid(&self, size: (usize, usize)) -> (usize, usize) {
        if !self.is_cut {
            return (1, 1);
        }
        let (height, width) = self.scaled(size);
        let ratio = width as f64 / height as f64;
        if width >= height {
            let columns = width.div_ceil(self.tile);
            let height = ((columns * self.tile) as f64 / ratio) as usize;
            (height.div_ceil(self.tile).max(1), columns)
        } else {
            let rows = height.div_ceil(self.tile);
            let width = ((rows * self.tile) as f64 * ratio) as usize;
            (rows, width.div_ceil(self.tile).max(1))
        }
    }

    /// A tile's tokens, with the text before them.
    fn with_tile(&self, prompt: ImagePrompt, name: &str) -> ImagePrompt {
        let prompt = prompt.with_text(AROUND_TILE).with_text(name);
        prompt.with_image_tokens(self.tokens_per_tile)
    }
}

impl Tiling for Idefics3 {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (rows, columns) = self.grid(size);
        let mut prompt = ImagePrompt::default();
        if rows * columns > 1 {
            for row in 1..=rows {
                for column in 1..=columns {
                    prompt = self.with_tile(prompt, &format!("<row_{row}_col_{column}>"));
                }
                prompt = prompt.with_text("\n");
            }
            prompt = prompt.with_text("\n");
        }
        let prompt = self.with_tile(prompt, WHOLE_IMAGE);
        Ok(prompt.with_text(AROUND_TILE))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let square = (self.tile, self.tile);
        let (rows, columns) = self.grid(image.size());
        let mut whole = resize(image, self.scaled(image.size()), self.filter);
        let mut tiles = Vec::new();
        if self.is_cut {
            whole = resize(&whole, (rows * self.tile, columns * self.tile), self.filter);
            if rows * columns > 1 {
                tiles = whole.tiles(square);
            }
        }
        tiles.push(resize(&whole, square, self.filter));
        Ok(tiles)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thinnest_images_have_tiles() {
        let processor = Idefics3 {
            filter: Filter::Lanczos,
            longest_edge: 1568,
            tile: 392,
            tokens_per_tile: 1,
            is_cut: true,
        };
        assert_eq!(processor.grid((65535, 1)), (4, 1));
        assert_eq!(processor.grid((1, 65535)), (1, 4));
        for size in [(4000, 1), (1, 4000)] {
            let values = vec![0; size.0 * size.1 * 3];
            let limits = crate::limits::ImageLimits::default();
            let shape = [size.0, size.1, 3];
            let image = Pixels::from_tensor(&shape, &values, &limits).expect("sound");
            assert_eq!(processor.tiles(&image, 1).expect("sound").len(), 5);
        }
    }
}
