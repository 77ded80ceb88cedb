//! Errors of one image. The caller knows which image of a request it is.

use thiserror::Error;

/// Why an image was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ImageError {
    /// The encoded image is too large.
    #[error(
        "{num_bytes} bytes are above the limit of {max_image_bytes}; compress the image, or make it smaller"
    )]
    Bytes {
        /// Its bytes.
        num_bytes: usize,
        /// The limit.
        max_image_bytes: usize,
    },
    /// The image has too many pixels.
    #[error(
        "{height} x {width} pixels are above the limit of {max_image_pixels} pixels, {max_side} a side; \
         make the image smaller"
    )]
    Size {
        /// Its rows.
        height: usize,
        /// Its columns.
        width: usize,
        /// The limit of their product.
        max_image_pixels: usize,
        /// The limit of each.
        max_side: usize,
    },
    /// The image has no pixels.
    #[error("{height} x {width} pixels are none; send an image with at least one pixel")]
    Empty {
        /// Its rows.
        height: usize,
        /// Its columns.
        width: usize,
    },
    /// The first bytes are of no known format.
    #[error(
        "the format is unknown, the data starts with {start}; send PNG, JPEG, WebP, GIF or BMP"
    )]
    Format {
        /// The first bytes in hexadecimal digits.
        start: String,
    },
    /// The data is damaged, or is of a kind that the decoder does not read.
    #[error("the {format} data cannot be decoded: {reason}; encode the image again")]
    Data {
        /// The format's name.
        format: &'static str,
        /// The decoder's reason.
        reason: String,
    },
    /// A tensor has another shape than an image.
    #[error(
        "the shape {shape:?} is not [height, width, 3]; send RGB values of 8 bits in that order"
    )]
    Shape {
        /// The shape as sent.
        shape: Vec<usize>,
    },
    /// A tensor has more or fewer values than its shape says.
    #[error(
        "{num_values} values do not fill the shape, which has {num_expected}; send all of them"
    )]
    NumValues {
        /// The values sent.
        num_values: usize,
        /// The product of the shape.
        num_expected: usize,
    },
    /// The model's processor takes no image of this shape.
    #[error("{height} x {width} pixels are {problem}; {remedy}")]
    Unsupported {
        /// Its rows.
        height: usize,
        /// Its columns.
        width: usize,
        /// The rule that the size breaks.
        problem: String,
        /// The way out.
        remedy: String,
    },
}
