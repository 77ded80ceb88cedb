//! The components of an image, and their coefficients.

use super::error;
use super::transform::{SIDE, inverse};
use super::upsampling::Plane;
use crate::error::ImageError;
use crate::limits::ImageLimits;

/// The image.
pub struct Frame {
    pub height: usize,
    pub width: usize,
    pub is_progressive: bool,
    pub components: Vec<Component>,
    /// The largest factors of the components.
    pub max_across: usize,
    pub max_down: usize,
}

/// A component, such as the luminance.
pub struct Component {
    pub id: u8,
    /// Samples across and down, relative to other components.
    pub across: usize,
    pub down: usize,
    pub table: usize,
    /// Rows and columns of samples.
    pub height: usize,
    pub width: usize,
    /// Columns of stored blocks: whole units of interleaved scans.
    pub block_columns: usize,
    /// `[block_rows][block_columns][64]`, in the order of the diagonal scan.
    pub coefficients: Vec<[i16; 64]>,
    /// The quantisation table of its first scan.
    pub quantisation: Option<[u16; 64]>,
    /// The coefficients of which some bits have been read.
    pub seen: u64,
}

impl Frame {
    pub fn read(
        segment: &[u8],
        is_progressive: bool,
        limits: &ImageLimits,
    ) -> Result<Self, ImageError> {
        let damaged = || error("the frame's header is damaged");
        let (&[depth, height_0, height_1, width_0, width_1, number], rest) =
            segment.split_first_chunk().ok_or_else(damaged)?;
        let height = usize::from(u16::from_be_bytes([height_0, height_1]));
        let width = usize::from(u16::from_be_bytes([width_0, width_1]));
        limits.check_size(height, width)?;
        if depth != 8 {
            return Err(error(format!("{depth} bits a value are not read")));
        }
        let (descriptions, _) = rest.as_chunks::<3>();
        let descriptions = descriptions
            .get(..usize::from(number))
            .ok_or_else(damaged)?;
        if !matches!(number, 1 | 3 | 4) {
            return Err(error(format!("{number} components are not read")));
        }
        let factors = descriptions.iter().map(|&[_, factors, _]| {
            let (across, down) = (usize::from(factors >> 4), usize::from(factors & 15));
            let is_valid = (1..=4).contains(&across) && (1..=4).contains(&down);
            is_valid.then_some((across, down)).ok_or_else(damaged)
        });
        let mut factors = factors.collect::<Result<Vec<_>, _>>()?;
        if let [only] = &mut factors[..] {
            // A single component is not interleaved, whatever its factors.
            *only = (1, 1);
        }
        let max_across = factors.iter().map(|factor| factor.0).max().unwrap_or(1);
        let max_down = factors.iter().map(|factor| factor.1).max().unwrap_or(1);
        let mut components = Vec::new();
        for (&[id, _, table], (across, down)) in descriptions.iter().zip(factors) {
            if max_across % across != 0 || max_down % down != 0 {
                return Err(error(
                    "the components' sizes are no multiples of each other",
                ));
            }
            let block_rows = height.div_ceil(SIDE * max_down) * down;
            let block_columns = width.div_ceil(SIDE * max_across) * across;
            components.push(Component {
                id,
                across,
                down,
                table: usize::from(table),
                height: (height * down).div_ceil(max_down),
                width: (width * across).div_ceil(max_across),
                block_columns,
                coefficients: vec![[0; 64]; block_rows * block_columns],
                quantisation: None,
                seen: 0,
            });
        }
        Ok(Self {
            height,
            width,
            is_progressive,
            components,
            max_across,
            max_down,
        })
    }

    /// Whether each component has been in a scan.
    pub fn is_complete(&self) -> bool {
        self.components
            .iter()
            .all(|component| component.seen & 1 == 1)
    }

    /// Whether the end may be missing: nothing can follow the last scan of a sequential image.
    pub fn may_end(&self) -> bool {
        !self.is_progressive && self.is_complete()
    }

    /// The components in the image's size.
    pub fn into_planes(self) -> Vec<Plane> {
        let size = (self.height, self.width);
        let scale = |component: &Component| {
            (
                self.max_down / component.down,
                self.max_across / component.across,
            )
        };
        let components = self.components.into_iter();
        components
            .map(|component| {
                let scale = scale(&component);
                component.into_plane().enlarged(scale, size)
            })
            .collect()
    }
}

impl Component {
    /// Its samples.
    fn into_plane(self) -> Plane {
        let mut values = vec![0; self.height * self.width];
        let table = self.quantisation.unwrap_or([1; 64]);
        for (block, coefficients) in self.coefficients.iter().enumerate() {
            let top = block / self.block_columns * SIDE;
            let left = block % self.block_columns * SIDE;
            if top >= self.height || left >= self.width {
                continue;
            }
            let samples = inverse(coefficients, &table);
            let len = SIDE.min(self.width - left);
            for (row, samples) in samples.iter().enumerate().take(self.height - top) {
                let start = (top + row) * self.width + left;
                values[start..start + len].copy_from_slice(&samples[..len]);
            }
        }
        Plane {
            height: self.height,
            width: self.width,
            values,
        }
    }
}
