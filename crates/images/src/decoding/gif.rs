//! GIF: the first frame.

use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, MemoryLimit};

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::ImageLimits;
use crate::pixels::NUM_CHANNELS;

const WHITE: [u8; NUM_CHANNELS] = [255; NUM_CHANNELS];

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::RGBA);
    options.check_frame_consistency(true);
    let max_bytes = limits.max_image_pixels as u64 * 4;
    options.set_memory_limit(MemoryLimit::Bytes(
        NonZeroU64::new(max_bytes).unwrap_or(NonZeroU64::MIN),
    ));
    let mut decoder = options.read_info(bytes).map_err(error)?;
    let size = (usize::from(decoder.height()), usize::from(decoder.width()));
    limits.check_size(size.0, size.1)?;
    let frame = decoder.read_next_frame().map_err(error)?;
    let Some(frame) = frame else {
        return Err(error("there is no frame"));
    };
    let frame_size = (usize::from(frame.height), usize::from(frame.width));
    let place = (-(frame.top as isize), -(frame.left as isize));
    let frame = to_rgb(frame_size, &frame.buffer, Channels::Rgba);
    Ok(Decoded {
        pixels: frame.framed(place, size, WHITE),
        orientation: Orientation::default(),
    })
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "GIF",
        reason: reason.to_string(),
    }
}
