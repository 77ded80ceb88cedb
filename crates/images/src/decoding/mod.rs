//! Decodes PNG, JPEG, WebP, GIF and BMP.
//!
//! Sizes are read from the header and checked before anything is decoded. The result is what Pillow and the processors
//! of transformers make of a file: upright by its EXIF orientation, the first frame of an animation, transparent pixels
//! on white, CMYK without a colour profile. Of values with 16 bits the upper eight remain; Pillow clips such grey
//! values at 255 instead.

mod bmp;
mod exif;
mod gif;
mod jpeg;
mod png;
mod webp;

use crate::error::ImageError;
use crate::limits::ImageLimits;
use crate::pixels::{NUM_CHANNELS, Pixels};

use exif::Orientation;

/// Decodes an image of any known format.
///
/// # Errors
/// The image is above the limits, of an unknown format, or damaged.
pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Pixels, ImageError> {
    limits.check_bytes(bytes.len())?;
    let decode = match bytes {
        [0x89, b'P', b'N', b'G', ..] => png::decode,
        [0xff, 0xd8, 0xff, ..] => jpeg::decode,
        [
            b'R',
            b'I',
            b'F',
            b'F',
            _,
            _,
            _,
            _,
            b'W',
            b'E',
            b'B',
            b'P',
            ..,
        ] => webp::decode,
        [b'G', b'I', b'F', b'8', ..] => gif::decode,
        [b'B', b'M', ..] => bmp::decode,
        _ => {
            let start = bytes.iter().take(8).map(|byte| format!("{byte:02x}"));
            let start = start.collect();
            return Err(ImageError::Format { start });
        }
    };
    let decoded = decode(bytes, limits)?;
    Ok(decoded.orientation.apply(decoded.pixels))
}

/// A decoded image that is not upright yet.
struct Decoded {
    pixels: Pixels,
    orientation: Orientation,
}

/// Values of a pixel in a decoder's output.
#[derive(Clone, Copy)]
enum Channels {
    Grey,
    GreyAlpha,
    Rgb,
    Rgba,
}

impl Channels {
    fn number(self) -> usize {
        match self {
            Self::Grey => 1,
            Self::GreyAlpha => 2,
            Self::Rgb => 3,
            Self::Rgba => 4,
        }
    }
}

/// The image in RGB, on white where it is transparent.
fn to_rgb((height, width): (usize, usize), values: &[u8], channels: Channels) -> Pixels {
    let mut rgb = Vec::with_capacity(height * width * NUM_CHANNELS);
    for pixel in values.chunks_exact(channels.number()) {
        match (channels, pixel) {
            (Channels::Grey, &[grey]) => rgb.extend([grey; NUM_CHANNELS]),
            (Channels::GreyAlpha, &[grey, alpha]) => {
                rgb.extend([on_white(grey, alpha); NUM_CHANNELS])
            }
            (Channels::Rgba, &[red, green, blue, alpha]) => {
                rgb.extend([red, green, blue].map(|value| on_white(value, alpha)));
            }
            _ => rgb.extend_from_slice(pixel),
        }
    }
    Pixels::new(height, width, rgb)
}

/// A value that is partly transparent, on white.
fn on_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}
