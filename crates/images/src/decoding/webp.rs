//! WebP: with and without loss, the first frame of an animation.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::ImageLimits;

/// The memory of the decoder besides the image, in bytes.
const MAX_CHUNK_BYTES: usize = 1 << 20;

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(error)?;
    let (width, height) = decoder.dimensions();
    let size = (height as usize, width as usize);
    limits.check_size(size.0, size.1)?;
    decoder.set_memory_limit(MAX_CHUNK_BYTES + size.0 * size.1 * 4);
    let channels = match decoder.has_alpha() {
        true => Channels::Rgba,
        false => Channels::Rgb,
    };
    let mut values = vec![0; size.0 * size.1 * channels.number()];
    decoder.read_image(&mut values).map_err(error)?;
    let exif = decoder.exif_metadata().map_err(error)?;
    Ok(Decoded {
        pixels: to_rgb(size, &values, channels),
        orientation: Orientation::of(exif.as_deref()),
    })
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "WebP",
        reason: reason.to_string(),
    }
}
