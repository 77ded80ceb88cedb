//! PNG.

use std::io::Cursor;

use png::{BitDepth, ColorType, Decoder, Limits, Transformations};

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::ImageLimits;

/// The memory of the decoder besides the image, in bytes.
const MAX_CHUNK_BYTES: usize = 1 << 20;

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let mut decoder = Decoder::new_with_limits(
        Cursor::new(bytes),
        Limits {
            bytes: MAX_CHUNK_BYTES,
        },
    );
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    // Palettes, fewer than 8 bits and transparent colours become channels of 8 bits.
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let header = decoder.read_header_info().map_err(error)?;
    let size = (header.height as usize, header.width as usize);
    limits.check_size(size.0, size.1)?;
    decoder.set_limits(Limits {
        bytes: MAX_CHUNK_BYTES + size.0 * size.1 * 8,
    });
    let mut reader = decoder.read_info().map_err(error)?;
    let Some(num_bytes) = reader.output_buffer_size() else {
        return Err(error("the image is too large for memory"));
    };
    let mut values = vec![0; num_bytes];
    let frame = reader.next_frame(&mut values).map_err(error)?;
    let channels = match (frame.color_type, frame.bit_depth) {
        (ColorType::Grayscale, BitDepth::Eight) => Channels::Grey,
        (ColorType::GrayscaleAlpha, BitDepth::Eight) => Channels::GreyAlpha,
        (ColorType::Rgb, BitDepth::Eight) => Channels::Rgb,
        (ColorType::Rgba, BitDepth::Eight) => Channels::Rgba,
        (color_type, depth) => return Err(error(format!("{color_type:?} of {depth:?} bits"))),
    };
    if (frame.height as usize, frame.width as usize) != size {
        return Err(error("the first frame is not as large as the image"));
    }
    let orientation = Orientation::of(reader.info().exif_metadata.as_deref());
    Ok(Decoded {
        pixels: to_rgb(size, &values, channels),
        orientation,
    })
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "PNG",
        reason: reason.to_string(),
    }
}
