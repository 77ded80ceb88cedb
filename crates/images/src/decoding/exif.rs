//! The orientation of an image by its EXIF data.

use crate::pixels::{NUM_CHANNELS, Pixels};

/// The tag of the orientation in the first directory.
const ORIENTATION: u16 = 0x0112;
/// The type of its value, a number of 16 bits.
const SHORT: u16 = 3;

/// How the stored image has to be turned, 1 to 8 as in EXIF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orientation(u16);

impl Default for Orientation {
    fn default() -> Self {
        Self(1)
    }
}

impl Orientation {
    /// The orientation that EXIF data names; upright if the data is missing, damaged, or names none.
    pub fn of(exif: Option<&[u8]>) -> Self {
        let named = exif.and_then(orientation);
        named
            .filter(|number| (1..=8).contains(number))
            .map_or_else(Self::default, Self)
    }

    /// The upright image.
    pub fn apply(self, image: Pixels) -> Pixels {
        let (is_mirrored, num_turns) = match self.0 {
            2 => (true, 0),
            3 => (false, 2),
            4 => (true, 2),
            5 => (true, 3),
            6 => (false, 1),
            7 => (true, 1),
            8 => (false, 3),
            _ => return image,
        };
        let (height, width) = (image.height(), image.width());
        let (new_height, new_width) = match num_turns % 2 {
            0 => (height, width),
            _ => (width, height),
        };
        let mut values = Vec::with_capacity(image.values().len());
        for y in 0..new_height {
            for x in 0..new_width {
                // Where the pixel is before it is turned clockwise, and before it is mirrored.
                let (from_y, from_x) = match num_turns {
                    0 => (y, x),
                    1 => (height - 1 - x, y),
                    2 => (height - 1 - y, width - 1 - x),
                    _ => (x, width - 1 - y),
                };
                let from_x = if is_mirrored {
                    width - 1 - from_x
                } else {
                    from_x
                };
                values
                    .extend_from_slice(&image.row(from_y)[from_x * NUM_CHANNELS..][..NUM_CHANNELS]);
            }
        }
        Pixels::new(new_height, new_width, values)
    }
}

/// The orientation in a TIFF header and its first directory, which `Exif\0\0` may precede.
fn orientation(exif: &[u8]) -> Option<u16> {
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let is_little = match tiff.get(..2)? {
        b"II" => true,
        b"MM" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes = tiff.get(at..)?.first_chunk()?;
        Some(match is_little {
            true => u16::from_le_bytes(*bytes),
            false => u16::from_be_bytes(*bytes),
        })
    };
    let long = |at: usize| {
        let bytes = tiff.get(at..)?.first_chunk()?;
        Some(match is_little {
            true => u32::from_le_bytes(*bytes),
            false => u32::from_be_bytes(*bytes),
        })
    };
    let directory = long(4)? as usize;
    let num_entries = usize::from(short(directory)?);
    let mut entries = (0..num_entries).map_while(|entry| directory.checked_add(2 + 12 * entry));
    let entry = entries.find(|&entry| short(entry) == Some(ORIENTATION))?;
    match short(entry + 2)? {
        SHORT => short(entry + 8),
        _ => None,
    }
}
