//! InternVL 3 in transformers' format: squares in the grid whose shape is nearest to the image's, and a thumbnail.
//! Source: `GotOcr2ImageProcessor` and `InternVLProcessor` of transformers.

use inflight_base::LoadError;

use super::files::{CLIP, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_tiles};
use crate::error::ImageError;
use crate::patches::PatchLayout;
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

/// The largest value of `max_patches`.
const MAX_TILES: usize = 64;

#[derive(Debug)]
struct InternVl {
    filter: Filter,
    /// Rows and columns of pixels of a tile.
    tile: (usize, usize),
    min_tiles: usize,
    max_tiles: usize,
    tokens_per_tile: usize,
    start: String,
    end: String,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    let normalisation = files.normalisation(CLIP)?;
    let image = &mut files.image;
    let tile = image.rectangle("size")?.unwrap_or((384, 384));
    // The processor of InternVL cuts images whatever the image processor's field says.
    image.switch("crop_to_patches")?;
    let min_tiles = image.size("min_patches")?.unwrap_or(1);
    let max_tiles = image.size("max_patches")?.unwrap_or(12);
    if max_tiles > MAX_TILES || min_tiles > max_tiles {
        return Err(image.error(&format!(
            "min_patches is {min_tiles} and max_patches is {max_tiles}, which are not in order and at most {MAX_TILES}"
        )));
    }
    check_tiles(image, max_tiles, tile)?;
    let tokens_per_tile = files.processor.size("image_seq_length")?.unwrap_or(256);
    let patch_side = files.patch_side()?;
    let downsampling = files.config.number("downsample_ratio")?.unwrap_or(0.5);
    let num_patches = (tile.0 / patch_side) * (tile.1 / patch_side);
    if (num_patches as f64 * downsampling * downsampling) as usize != tokens_per_tile {
        return Err(files.processor.error(&format!(
            "image_seq_length is {tokens_per_tile}, but tiles of {} x {} pixels with patches of {patch_side} and the \
             downsample ratio {downsampling} have another number of tokens",
            tile.0, tile.1
        )));
    }
    let token = |name, default: &str| files.token(name).unwrap_or_else(|| default.to_owned());
    let image_token = token("context_image_token", "<IMG_CONTEXT>");
    let (start, end) = (
        token("start_image_token", "<img>"),
        token("end_image_token", "</img>"),
    );
    files.finish()?;
    let layout = PatchLayout::rows(patch_side);
    let tiling = InternVl {
        filter,
        tile,
        min_tiles,
        max_tiles,
        tokens_per_tile,
        start,
        end,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl InternVl {
    /// Columns and rows of tiles. Of grids that are equally near to the image's shape, the largest one that the image
    /// fills by more than half.
    fn grid(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let sides = 1..=self.max_tiles;
        let mut grids: Vec<(usize, usize)> = sides
            .clone()
            .flat_map(|columns| sides.clone().map(move |rows| (columns, rows)))
            .filter(|(columns, rows)| (self.min_tiles..=self.max_tiles).contains(&(columns * rows)))
            .collect();
        grids.sort_by_key(|(columns, rows)| columns * rows);
        let ratio = width as f64 / height as f64;
        let num_pixels = (width * height) as f64;
        let (mut nearest, mut best) = (f64::INFINITY, (1, 1));
        for (columns, rows) in grids {
            let distance = (ratio - columns as f64 / rows as f64).abs();
            let area = 0.5 * (self.tile.0 * self.tile.1 * columns * rows) as f64;
            if distance < nearest || (distance == nearest && num_pixels > area) {
                nearest = distance;
                best = (columns, rows);
            }
        }
        best
    }
}

impl Tiling for InternVl {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (columns, rows) = self.grid(size);
        let num_tiles = match columns * rows {
            1 => 1,
            several => several + 1,
        };
        let prompt = ImagePrompt::default().with_text(&self.start);
        let prompt = prompt.with_image_tokens(self.tokens_per_tile * num_tiles);
        Ok(prompt.with_text(&self.end))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let (columns, rows) = self.grid(image.size());
        let size = (self.tile.0 * rows, self.tile.1 * columns);
        let mut tiles = resize(image, size, self.filter).tiles(self.tile);
        if tiles.len() > 1 {
            tiles.push(resize(image, self.tile, self.filter));
        }
        Ok(tiles)
    }
}
