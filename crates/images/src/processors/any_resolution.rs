//! Images in the best of several resolutions: a copy of all of the image in one tile, and tiles of it enlarged and
//! padded. LLaVA-NeXT and LLaVA-OneVision. Source: `LlavaNextImageProcessor` of transformers.

use inflight_base::LoadError;
use serde_json::Value;

use super::check_tiles;
use crate::fields::Fields;
use crate::pixels::{NUM_CHANNELS, Pixels};
use crate::resizing::{Filter, resize};
use crate::row_layout::Picture;

/// The most resolutions, and the most tiles of a resolution.
const MAX_RESOLUTIONS: usize = 1024;
pub const MAX_TILES: usize = 256;

/// How an image is cut.
#[derive(Debug)]
pub struct AnyResolution {
    pub filter: Filter,
    /// The side of a tile.
    pub side: usize,
    /// Rows and columns of tiles, in the order of the checkpoint.
    pub grids: Vec<(usize, usize)>,
}

impl AnyResolution {
    /// Reads the resolutions; some are the default, in pixels.
    pub fn read(
        image: &mut Fields,
        filter: Filter,
        side: usize,
        default: &[(usize, usize)],
    ) -> Result<Self, LoadError> {
        let name = "image_grid_pinpoints";
        let sizes = match image.take(name) {
            None => default.to_vec(),
            Some(value) => {
                let size = |size: &Value| {
                    let (height, width) = (size.get(0)?.as_u64()?, size.get(1)?.as_u64()?);
                    Some((height as usize, width as usize))
                };
                let sizes = value
                    .as_array()
                    .and_then(|sizes| sizes.iter().map(size).collect());
                sizes.ok_or_else(|| image.wrong(name, &value, "a list of heights and widths"))?
            }
        };
        let grid = |&(height, width): &(usize, usize)| {
            let (rows, columns) = (height / side, width / side);
            let is_whole = (rows * side, columns * side) == (height, width);
            let num_tiles = rows.checked_mul(columns)?;
            (is_whole && (1..=MAX_TILES).contains(&num_tiles)).then_some((rows, columns))
        };
        let grids: Option<Vec<_>> = sizes.iter().map(grid).collect();
        if let Some(grids) = &grids {
            let num_tiles = grids.iter().map(|(rows, columns)| rows * columns).max();
            check_tiles(image, num_tiles.unwrap_or(0), (side, side))?;
        }
        match grids.filter(|grids| (1..=MAX_RESOLUTIONS).contains(&grids.len())) {
            Some(grids) => Ok(Self {
                filter,
                side,
                grids,
            }),
            None => Err(image.error(&format!(
                "'{name}' is not 1 to {MAX_RESOLUTIONS} sizes of at most {MAX_TILES} tiles of {side} pixels"
            ))),
        }
    }

    /// The grid that shows most of the image, and of several the one with the least padding.
    fn grid(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let (mut best, mut most, mut least_wasted) = ((1, 1), 0, usize::MAX);
        for &(rows, columns) in &self.grids {
            let (max_height, max_width) = (rows * self.side, columns * self.side);
            let scale = f64::min(
                max_width as f64 / width as f64,
                max_height as f64 / height as f64,
            );
            let fit = |side: usize| (side as f64 * scale) as usize;
            let shown = (fit(width) * fit(height)).min(width * height);
            let wasted = max_height * max_width - shown;
            if shown > most || (shown == most && wasted < least_wasted) {
                (best, most, least_wasted) = ((rows, columns), shown, wasted);
            }
        }
        best
    }

    /// The copy of all of the image, and the tiles.
    pub fn tiles(&self, image: &Pixels) -> Vec<Pixels> {
        let (height, width) = image.size();
        let (rows, columns) = self.grid((height, width));
        let (max_height, max_width) = (rows * self.side, columns * self.side);
        let down = max_height as f64 / height as f64;
        let across = max_width as f64 / width as f64;
        let fit =
            |side: usize, scale: f64, max: usize| ((side as f64 * scale).ceil() as usize).min(max);
        let size = match across < down {
            true => (fit(height, across, max_height), max_width),
            false => (max_height, fit(width, down, max_width)),
        };
        let resized = resize(image, size, self.filter);
        let before = |max: usize, side: usize| -((max - side) / 2).cast_signed();
        let padded = resized.framed(
            (before(max_height, size.0), before(max_width, size.1)),
            (max_height, max_width),
            [0; NUM_CHANNELS],
        );
        let square = (self.side, self.side);
        let mut tiles = vec![resize(image, square, self.filter)];
        tiles.extend(padded.tiles(square));
        tiles
    }

    /// The features of the tiles without the padding, given the rows of features of a tile.
    pub fn picture(&self, size: (usize, usize), side_in_patches: usize) -> Picture {
        let (height, width) = (size.0 as f64, size.1 as f64);
        let tiles = self.grid(size);
        let (mut rows, mut columns) = (tiles.0 * side_in_patches, tiles.1 * side_in_patches);
        if width / height > columns as f64 / rows as f64 {
            let fit = rounded(height * (columns as f64 / width));
            rows -= (rows - fit.min(rows)) / 2 * 2;
        } else {
            let fit = rounded(width * (rows as f64 / height));
            columns -= (columns - fit.min(columns)) / 2 * 2;
        }
        Picture {
            tiles,
            kept: (rows, columns),
            resampled: (rows, columns),
        }
    }
}

/// The whole part of a number that is first rounded to seven decimal places.
fn rounded(number: f64) -> usize {
    let decimal: f64 = format!("{number:.7}").parse().unwrap_or(number);
    decimal as usize
}

/// Whether the tower's first token, which stands for all of an image, is dropped.
pub fn is_first_dropped(strategy: &str, fields: &Fields) -> Result<bool, LoadError> {
    match strategy {
        "default" => Ok(true),
        "full" => Ok(false),
        other => {
            let name = "vision_feature_select_strategy";
            Err(fields.wrong(name, &Value::from(other), "'default' or 'full'"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes and pictures of tests/fixtures/images/llava-next.
    #[test]
    fn padding_is_not_kept() {
        let resolution = AnyResolution {
            filter: Filter::Bicubic,
            side: 8,
            grids: vec![(1, 2), (2, 1), (2, 2)],
        };
        let picture = |size| {
            let Picture { tiles, kept, .. } = resolution.picture(size, 2);
            (tiles, kept)
        };
        assert_eq!(picture((8, 16)), ((1, 2), (2, 4)));
        assert_eq!(picture((10, 19)), ((2, 2), (2, 4)));
        assert_eq!(picture((19, 10)), ((2, 2), (4, 2)));
    }
}
