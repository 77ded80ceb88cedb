//! Bounds of what an image may cost.

use crate::error::ImageError;

/// The longest side of an image in pixels: JPEG's own limit. It bounds the work for images of extreme shapes.
pub const MAX_SIDE: usize = 65_535;

/// Limits of one image, checked before memory or time is spent on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// The encoded bytes.
    pub max_image_bytes: usize,
    /// The pixels, rows times columns. Decoding takes some 20 bytes for each.
    pub max_image_pixels: usize,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            max_image_bytes: 20 << 20,
            max_image_pixels: 32 << 20,
        }
    }
}

impl ImageLimits {
    /// # Errors
    /// The image has no pixels, or more than allowed.
    pub(crate) fn check_size(&self, height: usize, width: usize) -> Result<(), ImageError> {
        if height == 0 || width == 0 {
            return Err(ImageError::Empty { height, width });
        }
        let num_pixels = height.saturating_mul(width);
        if num_pixels > self.max_image_pixels || height.max(width) > MAX_SIDE {
            return Err(ImageError::Size {
                height,
                width,
                max_image_pixels: self.max_image_pixels,
                max_side: MAX_SIDE,
            });
        }
        Ok(())
    }

    /// # Errors
    /// There are more bytes than allowed.
    pub(crate) fn check_bytes(&self, num_bytes: usize) -> Result<(), ImageError> {
        match num_bytes > self.max_image_bytes {
            true => Err(ImageError::Bytes {
                num_bytes,
                max_image_bytes: self.max_image_bytes,
            }),
            false => Ok(()),
        }
    }
}
