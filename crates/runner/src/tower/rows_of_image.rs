//! From the rows of tiles to the rows that stand for an image.

use half::bf16;

use crate::spec::TowerSpec;
use inflight_images::{ImagePatches, Picture, RowLayout};

impl TowerSpec {
    /// Refuses an image whose rows the tower makes of tiles in another way.
    ///
    /// # Errors
    /// How the image differs from one that the tower reads.
    pub(super) fn check_rows(&self, image: &ImagePatches) -> Result<(), String> {
        let num_tiles = image.tiles.len();
        let family = self.encoder.family;
        match (image.row_layout, self.line_end) {
            (RowLayout::Tiles, Some(_)) => {
                return Err(format!(
                    "rows without the ends of lines, which {family} has"
                ));
            }
            (RowLayout::Line | RowLayout::Picture(_), None) => {
                return Err(format!("rows with ends of lines, which {family} has not"));
            }
            _ => {}
        }
        let side = self.num_tokens_per_side();
        if let RowLayout::Picture(picture) = image.row_layout
            && !is_made_of(&picture, num_tiles, side)
        {
            return Err(format!(
                "{picture:?}, which is not made of {num_tiles} tiles of {side} x {side} rows, of which the first one is \
                 not in it"
            ));
        }
        let num_tokens = self.num_rows(image);
        match image.num_tokens == num_tokens {
            true => Ok(()),
            false => Err(format!(
                "{} tokens for an image of {num_tiles} tiles, which becomes {num_tokens} rows",
                image.num_tokens
            )),
        }
    }

    /// Rows that stand for an image.
    fn num_rows(&self, image: &ImagePatches) -> usize {
        let num_tiles = image.tiles.len();
        let rows_of_tiles = image.num_patches() / self.num_patches_per_token();
        let rows_per_tile = rows_of_tiles / num_tiles.max(1);
        match image.row_layout {
            RowLayout::Tiles => rows_of_tiles,
            layout => layout.num_rows(num_tiles, rows_per_tile),
        }
    }

    /// The rows of an image, `[num_tokens, row_width]`, made of the rows of its tiles, `[num_tiles, num_tokens,
    /// row_width]`. `line_end` is `[row_width]`, if lines have an end.
    pub(super) fn rows_of_image(
        &self,
        layout: RowLayout,
        line_end: &[bf16],
        mut of_tiles: Vec<bf16>,
    ) -> Vec<bf16> {
        match layout {
            RowLayout::Tiles => of_tiles,
            RowLayout::Line => {
                of_tiles.extend_from_slice(line_end);
                of_tiles
            }
            RowLayout::Picture(picture) => {
                let (side, width) = (self.num_tokens_per_side(), self.row_width());
                let (first, others) = of_tiles.split_at(side * side * width);
                let elements = Elements {
                    picture,
                    side,
                    width,
                    of_tiles: others,
                };
                let mut rows = first.to_vec();
                let (lines, columns) = picture.resampled;
                for line in 0..lines {
                    for column in 0..columns {
                        elements.resample((line, column), &mut rows);
                    }
                    rows.extend_from_slice(line_end);
                }
                rows
            }
        }
    }
}

/// Whether a picture is made of the tiles behind the first one, each with `side` x `side` elements.
fn is_made_of(picture: &Picture, num_tiles: usize, side: usize) -> bool {
    let Picture {
        tiles,
        kept,
        resampled,
    } = *picture;
    let fits = |tiles: usize, kept: usize, resampled: usize| {
        let all = tiles.saturating_mul(side);
        kept <= all && (all - kept).is_multiple_of(2) && resampled <= kept
    };
    tiles.0.checked_mul(tiles.1) == num_tiles.checked_sub(1)
        && fits(tiles.0, kept.0, resampled.0)
        && fits(tiles.1, kept.1, resampled.1)
}

/// The elements of a picture.
struct Elements<'a> {
    picture: Picture,
    /// Lines and columns of elements of a tile.
    side: usize,
    /// The length of an element.
    width: usize,
    /// `[tiles, side, side, width]`, tiles line by line.
    of_tiles: &'a [bf16],
}

impl Elements<'_> {
    /// Appends an element of the resampled picture.
    fn resample(&self, (line, column): (usize, usize), out: &mut Vec<bf16>) {
        let Picture {
            kept, resampled, ..
        } = self.picture;
        if kept == resampled {
            return out.extend_from_slice(self.kept((line, column)));
        }
        let lines = Neighbours::find(line, kept.0, resampled.0);
        let columns = Neighbours::find(column, kept.1, resampled.1);
        let at = |line, column| self.kept((line, column));
        let [above, below] = [lines.first, lines.second]
            .map(|line| [columns.first, columns.second].map(|column| at(line, column)));
        for index in 0..self.width {
            let [above, below] = [above, below]
                .map(|[left, right]| columns.mix(left[index].to_f32(), right[index].to_f32()));
            out.push(bf16::from_f32(lines.mix(above, below)));
        }
    }

    /// An element of what is kept.
    fn kept(&self, (line, column): (usize, usize)) -> &[bf16] {
        let Picture { tiles, kept, .. } = self.picture;
        let side = self.side;
        let line = line + (tiles.0 * side - kept.0) / 2;
        let column = column + (tiles.1 * side - kept.1) / 2;
        let tile = line / side * tiles.1 + column / side;
        let element = (tile * side + line % side) * side + column % side;
        &self.of_tiles[element * self.width..][..self.width]
    }
}

/// The two of `num` numbers that the one of the `num_resampled` lies between.
struct Neighbours {
    first: usize,
    second: usize,
    /// How far it is from the first one to the second one.
    share: f32,
}

impl Neighbours {
    /// By the centres of elements: PyTorch's `interpolate` with `align_corners=False`.
    fn find(index: usize, num: usize, num_resampled: usize) -> Self {
        let step = num as f32 / num_resampled as f32;
        let place = ((index as f32 + 0.5) * step - 0.5).max(0.0);
        let first = (place as usize).min(num - 1);
        Self {
            first,
            second: (first + 1).min(num - 1),
            share: place - first as f32,
        }
    }

    fn mix(&self, first: f32, second: f32) -> f32 {
        (1.0 - self.share) * first + self.share * second
    }
}
