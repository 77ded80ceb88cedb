//! How config.json says that a tile is cut into patches.

use crate::families::bounds::{MAX_PATCHES, MAX_PIXELS};
use crate::spec::PatchShape;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

/// Red, green and blue, as the image processor makes them.
const NUM_CHANNELS: usize = 3;

/// The patches of a tile.
pub struct PatchGrid {
    pub patch: PatchShape,
    /// Rows of patches, and as many columns.
    pub num_patches_per_side: usize,
}

impl PatchGrid {
    /// Reads `image_size` and `patch_size`, with these defaults. Squares of patches are joined later, as a key of the
    /// model says.
    ///
    /// # Errors
    /// A size is too large, or no multiple of the other one.
    pub fn read(
        vision: &JsonFile,
        [image_size, patch_size]: [usize; 2],
        (merge_key, merge_size): (&str, usize),
    ) -> Result<Self, LoadError> {
        let num_channels = vision
            .size("num_channels", NUM_CHANNELS..=NUM_CHANNELS)?
            .unwrap_or(NUM_CHANNELS);
        let image_size = vision.size_or("image_size", 1..=MAX_PIXELS, Some(image_size))?;
        let patch_size = vision.size_or("patch_size", 1..=MAX_PIXELS, Some(patch_size))?;
        let (image_size, patch_size) = (image_size.unwrap_or(1), patch_size.unwrap_or(1));
        let side = image_size / patch_size;
        if side == 0 || !side.is_multiple_of(merge_size) || side * side > MAX_PATCHES {
            return Err(vision.unexpected(
                "image_size",
                image_size,
                format_args!(
                    "such that its {side} patches of {patch_size} are a multiple of {merge_key} {merge_size}, and \
                     their square is at most {MAX_PATCHES}"
                ),
            ));
        }
        Ok(Self {
            patch: PatchShape {
                num_channels,
                num_frames: None,
                num_pixels_per_side: patch_size,
            },
            num_patches_per_side: side,
        })
    }
}
