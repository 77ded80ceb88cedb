//! BMP without compression: palettes of 1, 4 and 8 bits, and pixels of 16, 24 and 32 bits. Only a file that has a mask
//! for it has an alpha channel.

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::ImageLimits;

/// The header of the file, which the header of the image follows.
const FILE_HEADER: usize = 14;
/// The shortest header with 32-bit sizes, and one that has a mask for alpha.
const INFO_HEADER: usize = 40;
const ALPHA_HEADER: usize = 56;
/// Values of the field `compression`.
const PLAIN: u32 = 0;
const BIT_FIELDS: u32 = 3;

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let header_len = long(bytes, FILE_HEADER)? as usize;
    if header_len < INFO_HEADER {
        return Err(error(format!(
            "its header of {header_len} bytes is of OS/2"
        )));
    }
    let width = long(bytes, FILE_HEADER + 4)? as usize;
    // The rows of a negative height go from the top to the bottom.
    let signed_height = long(bytes, FILE_HEADER + 8)?.cast_signed();
    let height = signed_height.unsigned_abs() as usize;
    limits.check_size(height, width)?;
    let num_bits = usize::from(short(bytes, FILE_HEADER + 14)?);
    let row_len = (width * num_bits).div_ceil(32) * 4;
    let start = long(bytes, 10)? as usize;
    let rows = bytes.get(start..).unwrap_or(&[]);
    let Some(rows) = rows.get(..row_len * height) else {
        return Err(error("the data ends before the last row"));
    };
    let format = PixelFormat::of(bytes, header_len, num_bits)?;
    let mut values = Vec::with_capacity(height * width * Channels::Rgba.number());
    for y in 0..height {
        let stored = if signed_height < 0 { y } else { height - 1 - y };
        let row = &rows[stored * row_len..][..row_len];
        for x in 0..width {
            values.extend(format.pixel(row, x)?);
        }
    }
    Ok(Decoded {
        pixels: to_rgb((height, width), &values, Channels::Rgba),
        orientation: Orientation::default(),
    })
}

/// How a pixel is stored.
enum PixelFormat<'a> {
    /// An index of so many bits into colours, each stored as blue, green, red and an unused byte.
    Palette(usize, &'a [[u8; 4]]),
    /// Blue, green and red in the first three of so many bytes.
    Bytes(usize),
    /// Bits of a number of so many bytes: red, green, blue and alpha.
    Masks(usize, [u32; 4]),
}

impl<'a> PixelFormat<'a> {
    fn of(bytes: &'a [u8], header_len: usize, num_bits: usize) -> Result<Self, ImageError> {
        let compression = long(bytes, FILE_HEADER + 16)?;
        match (num_bits, compression) {
            (1 | 4 | 8, PLAIN) => {
                let used = long(bytes, FILE_HEADER + 32)? as usize;
                let most = 1 << num_bits;
                let num_colours = if used == 0 { most } else { used.min(most) };
                let colours = bytes.get(FILE_HEADER + header_len..).unwrap_or(&[]);
                let (colours, _) = colours.as_chunks();
                let colours = colours.get(..num_colours);
                let colours = colours.ok_or_else(|| error("the data ends within the palette"))?;
                Ok(Self::Palette(num_bits, colours))
            }
            (16, PLAIN) => Ok(Self::Masks(2, [0x7c00, 0x03e0, 0x001f, 0])),
            (24 | 32, PLAIN) => Ok(Self::Bytes(num_bits / 8)),
            (16 | 32, BIT_FIELDS) => {
                let mask = |place: usize| long(bytes, FILE_HEADER + INFO_HEADER + 4 * place);
                let alpha = if header_len < ALPHA_HEADER {
                    0
                } else {
                    mask(3)?
                };
                Ok(Self::Masks(
                    num_bits / 8,
                    [mask(0)?, mask(1)?, mask(2)?, alpha],
                ))
            }
            _ => Err(error(format!(
                "pixels of {num_bits} bits with compression {compression} are not read"
            ))),
        }
    }

    fn pixel(&self, row: &[u8], x: usize) -> Result<[u8; 4], ImageError> {
        match *self {
            Self::Palette(num_bits, colours) => {
                let bit = x * num_bits;
                let index = row[bit / 8] << (bit % 8) >> (8 - num_bits);
                let colour = colours.get(usize::from(index));
                let &[blue, green, red, _] =
                    colour.ok_or_else(|| error("a pixel is outside the palette"))?;
                Ok([red, green, blue, 255])
            }
            Self::Bytes(len) => {
                let stored = &row[x * len..][..3];
                Ok([stored[2], stored[1], stored[0], 255])
            }
            Self::Masks(len, [red, green, blue, alpha]) => {
                let mut number = [0; 4];
                number[..len].copy_from_slice(&row[x * len..][..len]);
                let number = u32::from_le_bytes(number);
                let alpha = if alpha == 0 {
                    255
                } else {
                    field(number, alpha)
                };
                let [red, green, blue] = [red, green, blue].map(|mask| field(number, mask));
                Ok([red, green, blue, alpha])
            }
        }
    }
}

/// The bits of a mask, scaled to 0..=255.
fn field(number: u32, mask: u32) -> u8 {
    let largest = u64::from(mask.checked_shr(mask.trailing_zeros()).unwrap_or(0));
    let value = u64::from(
        (number & mask)
            .checked_shr(mask.trailing_zeros())
            .unwrap_or(0),
    );
    (value * 255).checked_div(largest).unwrap_or(0) as u8
}

fn short(bytes: &[u8], at: usize) -> Result<u16, ImageError> {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found
        .copied()
        .map(u16::from_le_bytes)
        .ok_or_else(header_error)
}

fn long(bytes: &[u8], at: usize) -> Result<u32, ImageError> {
    let found = bytes.get(at..).and_then(<[u8]>::first_chunk);
    found
        .copied()
        .map(u32::from_le_bytes)
        .ok_or_else(header_error)
}

fn header_error() -> ImageError {
    error("the data ends within the header")
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "BMP",
        reason: reason.to_string(),
    }
}
