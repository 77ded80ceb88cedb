//! The positions of the tokens of a step, in models whose images have rows and columns.

use crate::rope::RopeAxes;
use crate::spec::TowerSpec;
use inflight_device::AxisPositions;
use inflight_engine::{ImageRows, ImageSlot, StepPlan};
use inflight_images::ImagePatches;

/// The rows of a tile that stand for tokens, and their columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenGrid {
    pub rows: u32,
    pub columns: u32,
}

/// The positions of tokens, from step to step.
///
/// ```text
/// tokens      a  b  [ image of 2 x 3 ]  c         what each axis counts
/// sequence    0  1  2  2  2  2  2  2    5         the image's place
/// row         0  1  2  2  2  3  3  3    5         the rows of the image, from its place on
/// column      0  1  2  3  4  2  3  4    5         its columns; text goes on behind the longest side
/// ```
#[derive(Default)]
pub(super) struct TokenPositions {
    /// How far the positions of the next tokens are behind their places in the KV cache, by slot of the sequence.
    shifts: Vec<u32>,
    positions: Vec<AxisPositions>,
}

impl TokenGrid {
    /// The grid of an image of one tile.
    pub fn of_image(spec: &TowerSpec, image: &ImagePatches) -> Self {
        let grid = image.tiles.first().map(|&tile| spec.token_grid(tile));
        Self {
            rows: grid.map_or(0, |grid| grid.rows as u32),
            columns: grid.map_or(0, |grid| grid.columns as u32),
        }
    }

    /// Its tokens.
    pub const fn num_tokens(self) -> u32 {
        self.rows * self.columns
    }

    /// The positions that it takes of a prompt.
    pub fn num_positions(self) -> u32 {
        self.rows.max(self.columns)
    }
}

impl TokenPositions {
    /// The positions of a plan's tokens; empty if all are those in the KV cache. `grid_of` tells the grid of an image.
    pub(super) fn of_plan(
        &mut self,
        plan: &StepPlan<'_>,
        grid_of: impl Fn(ImageSlot) -> TokenGrid,
    ) -> &[AxisPositions] {
        let Self { shifts, positions } = self;
        let slots = plan.sequences.iter().map(|sequence| sequence.slot.index());
        let num_slots = slots.clone().max().map_or(0, |slot| slot + 1);
        if num_slots > shifts.len() {
            shifts.resize(num_slots, 0);
        }
        for shift in plan.position_shifts {
            let sequence = &plan.sequences[shift.sequence as usize];
            shifts[sequence.slot.index()] = shift.num_tokens;
        }
        positions.clear();
        let mut slots = slots;
        if plan.image_rows.is_empty() && slots.all(|slot| shifts[slot] == 0) {
            return &[];
        }
        let mut images = plan.image_rows;
        for sequence in plan.sequences {
            let shift = &mut shifts[sequence.slot.index()];
            let tokens = sequence.tokens.clone();
            let place = |token: u32| sequence.kv_len - (tokens.end - token);
            let mut token = tokens.start;
            while token < tokens.end {
                let next = images.first();
                let next = next.filter(|image| image.tokens.start < tokens.end);
                let end = next.map_or(tokens.end, |image| image.tokens.start);
                positions.extend((token..end).map(|token| [place(token) - *shift; 3]));
                let Some(image) = next else { break };
                let origin = place(image.tokens.start) - image.first_row - *shift;
                let grid = grid_of(image.slot);
                *shift += push_image(positions, image, origin, grid);
                images = &images[1..];
                token = image.tokens.end;
            }
        }
        positions
    }
}

impl TowerSpec {
    /// The positions that an image takes of a prompt.
    pub fn num_positions(&self, image: &ImagePatches) -> u32 {
        match self.text_axes {
            RopeAxes::Sequence => image.num_tokens as u32,
            _ => TokenGrid::of_image(self, image).num_positions(),
        }
    }
}

/// Appends the positions of rows of an image whose first row is at `origin`. Returns how many of its tokens have no
/// position of their own, if these are its last rows.
fn push_image(
    positions: &mut Vec<AxisPositions>,
    image: &ImageRows,
    origin: u32,
    grid: TokenGrid,
) -> u32 {
    let first_row = image.first_row;
    let rows = first_row..first_row + (image.tokens.end - image.tokens.start);
    let end = rows.end;
    positions.extend(rows.map(|row| {
        [
            origin,
            origin + row / grid.columns,
            origin + row % grid.columns,
        ]
    }));
    match end == grid.num_tokens() {
        true => end - grid.num_positions(),
        false => 0,
    }
}
