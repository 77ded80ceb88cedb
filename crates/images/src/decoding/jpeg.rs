//! JPEG: sequential and progressive, grey, YCbCr, RGB, CMYK and YCCK.

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::{ImageLimits, MAX_SIDE};

/// The scans of a progressive image, each of which passes over all of it.
const MAX_SCANS: usize = 64;

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_max_scans(MAX_SCANS);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(error)?;
    let Some((width, height)) = decoder.dimensions() else {
        return Err(error("there is no frame"));
    };
    limits.check_size(height, width)?;
    let orientation = Orientation::of(decoder.exif().map(Vec::as_slice));
    let stored = decoder.input_colorspace();
    let (wanted, mut channels) = match stored {
        Some(ColorSpace::Luma) => (ColorSpace::Luma, Channels::Grey),
        Some(space @ (ColorSpace::CMYK | ColorSpace::YCCK)) => (space, Channels::Rgba),
        Some(space @ (ColorSpace::YCbCr | ColorSpace::RGB)) => (space, Channels::Rgb),
        other => return Err(error(format!("the colours are {other:?}"))),
    };
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let mut values = decoder.decode().map_err(error)?;
    if values.len() != height * width * channels.number() {
        return Err(error("the decoder returned another size"));
    }
    match stored {
        Some(ColorSpace::YCbCr) => values.as_chunks_mut().0.iter_mut().for_each(to_rgb_values),
        Some(ColorSpace::YCCK) => {
            for [y, cb, cr, _] in values.as_chunks_mut().0 {
                let mut pixel = [*y, *cb, *cr];
                to_rgb_values(&mut pixel);
                [*y, *cb, *cr] = pixel.map(|value| 255 - value);
            }
        }
        _ => {}
    }
    if matches!(channels, Channels::Rgba) {
        values = values.as_chunks().0.iter().flat_map(from_inks).collect();
        channels = Channels::Rgb;
    }
    Ok(Decoded {
        pixels: to_rgb((height, width), &values, channels),
        orientation,
    })
}

/// Y, Cb and Cr as red, green and blue, rounded as libjpeg does: ITU-R BT.601 in fixed point with 16 binary places.
fn to_rgb_values(pixel: &mut [u8; 3]) {
    const HALF: i32 = 1 << 15;
    let [y, cb, cr] = pixel.map(i32::from);
    let (cb, cr) = (cb - 128, cr - 128);
    let red = y + ((91_881 * cr + HALF) >> 16);
    let green = y + ((-22_554 * cb - 46_802 * cr + HALF) >> 16);
    let blue = y + ((116_130 * cb + HALF) >> 16);
    *pixel = [red, green, blue].map(|value| value.clamp(0, 255) as u8);
}

/// Inverted inks, as Adobe's programs store them, as red, green and blue. As in Pillow, no colour profile is applied.
fn from_inks(inks: &[u8; 4]) -> [u8; 3] {
    let left = i32::from(inks[3]);
    [inks[0], inks[1], inks[2]].map(|inverted| {
        let product = (255 - i32::from(inverted)) * left + 128;
        (left - ((product + (product >> 8)) >> 8)).clamp(0, 255) as u8
    })
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "JPEG",
        reason: reason.to_string(),
    }
}
