//! Llama 4: the image enlarged or shrunk into the grid of tiles that fits it best, padded, and a small copy of all of
//! it. Source: `Llama4ImageProcessor` and `Llama4Processor` of transformers.

use inflight_base::LoadError;

use super::files::{CENTRED, ProcessorFiles};
use super::{ImageProcessor, Tiling, check_tiles};
use crate::error::ImageError;
use crate::normalisation::Normalisation;
use crate::patches::PatchLayout;
use crate::pixels::{NUM_CHANNELS, Pixels};
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

/// The largest value of `max_patches`.
const MAX_TILES: usize = 64;
/// The token before the tile with all of the image.
const WHOLE_IMAGE: &str = "<|image|>";

#[derive(Debug)]
struct Llama4 {
    filter: Filter,
    /// The side of a tile.
    side: usize,
    /// Rows and columns of tiles, in the order in which the first of equal ones is taken.
    grids: Vec<(usize, usize)>,
    /// Whether images are enlarged as far as the grids allow, and not only to a tile.
    is_enlarged: bool,
    tokens_per_tile: usize,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bilinear)?;
    files.image.demand_switch("do_normalize")?;
    let (factor, (mean, deviation)) = files.scales(CENTRED)?;
    let normalisation = Normalisation::Bf16 {
        factor: factor as f32,
        mean: mean.map(|value| value as f32),
        deviation: deviation.map(|value| value as f32),
    };
    let image = &mut files.image;
    let (height, side) = image.rectangle("size")?.unwrap_or((336, 336));
    if height != side {
        return Err(image.error(&format!("size is {height} x {side}, which is no square")));
    }
    let max_tiles = image.size("max_patches")?.unwrap_or(16);
    if max_tiles > MAX_TILES {
        return Err(image.error(&format!("max_patches is {max_tiles}, above {MAX_TILES}")));
    }
    check_tiles(image, max_tiles, (side, side))?;
    let is_enlarged = image.switch("resize_to_max_canvas")?.unwrap_or(false);
    let processor = &mut files.processor;
    let patch_side = processor.size("patch_size")?.unwrap_or(14);
    let ratio = processor.number("pixel_shuffle_ratio")?.unwrap_or(0.5);
    let of_tower = files.patch_side()?;
    if patch_side != of_tower || !(0.1..=1.0).contains(&ratio) {
        return Err(files.processor.error(&format!(
            "patch_size {patch_side} and pixel_shuffle_ratio {ratio} do not fit patches of {of_tower} in config.json"
        )));
    }
    let placeholder = files.processor.text("image_token")?;
    let placeholder = placeholder.unwrap_or_else(|| WHOLE_IMAGE.to_owned());
    // The processor writes these tokens by their usual names, whatever its fields say.
    for unused in [
        "end_of_image_token",
        "fake_image_token",
        "patch_token",
        "start_of_image_token",
        "tile_x_separator_token",
        "tile_y_separator_token",
    ] {
        files.processor.take(unused);
    }
    let downsampling = (1.0 / (ratio * ratio)).round_ties_even() as usize;
    files.finish()?;
    let side_in_patches = side / patch_side;
    Ok(ImageProcessor {
        placeholder,
        image_token: "<|patch|>".to_owned(),
        normalisation,
        layout: PatchLayout::rows(patch_side),
        tiling: Box::new(Llama4 {
            filter,
            side,
            grids: grids(max_tiles),
            is_enlarged,
            tokens_per_tile: side_in_patches * side_in_patches / downsampling,
        }),
    })
}

/// All grids of up to so many tiles. Grids of one aspect ratio are adjacent, the largest first.
fn grids(max_tiles: usize) -> Vec<(usize, usize)> {
    let mut shapes: Vec<Vec<(usize, usize)>> = Vec::new();
    for num_tiles in (1..=max_tiles).rev() {
        for rows in (1..=num_tiles).filter(|rows| num_tiles % rows == 0) {
            let grid = (rows, num_tiles / rows);
            let is_alike =
                |shape: &&mut Vec<(usize, usize)>| shape[0].0 * grid.1 == shape[0].1 * grid.0;
            match shapes.iter_mut().find(is_alike) {
                Some(shape) => shape.push(grid),
                None => shapes.push(vec![grid]),
            }
        }
    }
    shapes.concat()
}

impl Llama4 {
    /// The grid that shows the image largest without shrinking it; else the one that shrinks it least. Scales are
    /// compared in single precision.
    fn grid(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let scale = |&(rows, columns): &(usize, usize)| {
            let down = (rows * self.side) as f32 / height as f32;
            let across = (columns * self.side) as f32 / width as f32;
            down.min(across)
        };
        let scales: Vec<f32> = self.grids.iter().map(scale).collect();
        let enlarging = scales.iter().copied().filter(|&scale| scale >= 1.0);
        let chosen = match self.is_enlarged {
            true => enlarging.reduce(f32::max),
            false => enlarging.reduce(f32::min),
        };
        let chosen = chosen.or_else(|| scales.iter().copied().reduce(f32::max));
        let equal = self.grids.iter().zip(&scales);
        let equal = equal.filter(|(_, scale)| Some(**scale) == chosen);
        let smallest = equal.min_by_key(|((rows, columns), _)| rows * columns);
        smallest.map_or((1, 1), |(grid, _)| *grid)
    }

    /// The size of the image within a grid.
    fn within(&self, (height, width): (usize, usize), grid: (usize, usize)) -> (usize, usize) {
        // A side that the grid bounds is a tensor in transformers, whose quotients have single precision.
        let bound = |length: usize, tiles: usize| {
            let max = tiles * self.side;
            let wanted = length.max(self.side);
            match self.is_enlarged || max < wanted {
                true => (max, (max as f32 / length as f32).into(), true),
                false => (wanted, wanted as f64 / length as f64, false),
            }
        };
        let (max_height, down, is_single_down) = bound(height, grid.0);
        let (max_width, across, is_single_across): (usize, f64, bool) = bound(width, grid.1);
        let is_across = match is_single_down || is_single_across {
            true => (across as f32) < down as f32,
            false => across < down,
        };
        let fit = |length: usize, scale: f64, is_single: bool| match is_single {
            true => (length as f32 * scale as f32).floor() as usize,
            false => (length as f64 * scale).floor() as usize,
        };
        let (height, width) = match is_across {
            true => (
                fit(height, across, is_single_across).min(max_height),
                max_width,
            ),
            false => (max_height, fit(width, down, is_single_down).min(max_width)),
        };
        (height.max(1), width.max(1))
    }
}

impl Tiling for Llama4 {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (rows, columns) = self.grid(size);
        let mut prompt = ImagePrompt::default().with_text("<|image_start|>");
        if rows * columns > 1 {
            for _ in 0..rows {
                for _ in 1..columns {
                    prompt = prompt.with_image_tokens(self.tokens_per_tile);
                    prompt = prompt.with_text("<|tile_x_separator|>");
                }
                prompt = prompt.with_image_tokens(self.tokens_per_tile);
                prompt = prompt.with_text("<|tile_y_separator|>");
            }
        }
        let prompt = prompt.with_text(WHOLE_IMAGE);
        let prompt = prompt.with_image_tokens(self.tokens_per_tile);
        Ok(prompt.with_text("<|image_end|>"))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let (rows, columns) = self.grid(image.size());
        let size = self.within(image.size(), (rows, columns));
        let canvas = (rows * self.side, columns * self.side);
        let resized = resize(image, size, self.filter);
        let square = (self.side, self.side);
        let mut tiles = resized
            .framed((0, 0), canvas, [0; NUM_CHANNELS])
            .tiles(square);
        if tiles.len() > 1 {
            tiles.push(resize(image, square, self.filter));
        }
        Ok(tiles)
    }
}
