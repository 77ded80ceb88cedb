//! The colours of components, as libjpeg and Pillow convert them.

use super::error;
use super::frame::Frame;
use super::upsampling::Plane;
use crate::error::ImageError;

/// The colour space of the components.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Colours {
    Grey,
    Rgb,
    /// Luminance, and differences of blue and red to it.
    YCbCr,
    /// Inverted inks, as Adobe's programs store them.
    Cmyk,
    /// Inverted inks, the first three as luminance and differences.
    Ycck,
}

impl Colours {
    /// By the number of components, JFIF's segment, and the field of Adobe's segment.
    pub fn of(frame: &Frame, is_jfif: bool, adobe: Option<u8>) -> Result<Self, ImageError> {
        let ids: Vec<u8> = frame
            .components
            .iter()
            .map(|component| component.id)
            .collect();
        match (ids.len(), adobe) {
            (1, _) => Ok(Self::Grey),
            (3, _) if is_jfif => Ok(Self::YCbCr),
            (3, Some(0)) => Ok(Self::Rgb),
            (3, None) if ids == *b"RGB" => Ok(Self::Rgb),
            (3, _) => Ok(Self::YCbCr),
            (4, None | Some(0)) => Ok(Self::Cmyk),
            (4, Some(_)) => Ok(Self::Ycck),
            (number, _) => Err(error(format!("{number} components have no known colours"))),
        }
    }

    pub fn is_grey(self) -> bool {
        self == Self::Grey
    }

    /// Red, green and blue of all pixels.
    pub fn to_rgb(self, planes: &[Plane]) -> Vec<u8> {
        let [first, second, third, others @ ..] = planes else {
            return Vec::new();
        };
        let colours = first.values.iter().zip(&second.values).zip(&third.values);
        let colours = colours.map(|((&first, &second), &third)| [first, second, third]);
        let inks = || others.iter().flat_map(|black| &black.values);
        let mut values = Vec::with_capacity(first.values.len() * 3);
        match self {
            Self::Grey | Self::Rgb => values.extend(colours.flatten()),
            Self::YCbCr => colours.for_each(|pixel| values.extend(from_differences(pixel))),
            Self::Cmyk => {
                for (pixel, &black) in colours.zip(inks()) {
                    values.extend(from_inks(pixel, black));
                }
            }
            Self::Ycck => {
                for (pixel, &black) in colours.zip(inks()) {
                    let pixel = from_differences(pixel).map(|value| 255 - value);
                    values.extend(from_inks(pixel, black));
                }
            }
        }
        values
    }
}

/// ITU-R BT.601 in fixed point with 16 binary places.
fn from_differences(values: [u8; 3]) -> [u8; 3] {
    const HALF: i32 = 1 << 15;
    let [y, cb, cr] = values.map(i32::from);
    let (cb, cr) = (cb - 128, cr - 128);
    let red = y + ((91_881 * cr + HALF) >> 16);
    let green = y + ((-22_554 * cb - 46_802 * cr + HALF) >> 16);
    let blue = y + ((116_130 * cb + HALF) >> 16);
    [red, green, blue].map(|value| value.clamp(0, 255) as u8)
}

/// As Pillow converts inverted inks, without a colour profile.
fn from_inks(inks: [u8; 3], black: u8) -> [u8; 3] {
    let left = i32::from(black);
    inks.map(|inverted| {
        let product = (255 - i32::from(inverted)) * left + 128;
        (left - ((product + (product >> 8)) >> 8)).clamp(0, 255) as u8
    })
}
