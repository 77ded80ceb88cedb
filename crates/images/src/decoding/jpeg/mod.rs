//! JPEG of 8 bits with Huffman codes, sequential and progressive, with the values that libjpeg-turbo computes.
//!
//! Decoders may round the cosine transform and the interpolation of colours as they like, and differ by up to 4 of 255.
//! Checkpoints were trained on libjpeg's values, which transformers reads too. No crate of Rust has these.

mod bits;
mod colours;
mod frame;
mod scan;
mod segments;
mod transform;
mod upsampling;

use super::exif::Orientation;
use super::{Channels, Decoded, to_rgb};
use crate::error::ImageError;
use crate::limits::ImageLimits;
use crate::pixels::Pixels;

use colours::Colours;
use frame::Frame;
use segments::{Reader, Tables};

/// The most scans of an image, each of which may pass over all of it.
const MAX_SCANS: usize = 64;

// Markers, after a byte 0xff.
const START: u8 = 0xd8;
const END: u8 = 0xd9;
const HUFFMAN_TABLES: u8 = 0xc4;
const QUANTISATION_TABLES: u8 = 0xdb;
const RESTART_INTERVAL: u8 = 0xdd;
const START_OF_SCAN: u8 = 0xda;
const EXIF: u8 = 0xe1;
const JFIF: u8 = 0xe0;
const ADOBE: u8 = 0xee;

pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Decoded, ImageError> {
    let mut reader = Reader::new(bytes);
    let mut tables = Tables::default();
    let mut frame: Option<Frame> = None;
    let mut orientation = Orientation::default();
    let (mut is_jfif, mut adobe) = (false, None);
    let mut num_scans = 0;
    loop {
        let marker = match reader.marker() {
            Some(marker) => marker,
            // All of a sequential image may be there.
            None if frame.as_ref().is_some_and(Frame::may_end) => break,
            None => return Err(error("the data ends early")),
        };
        match marker {
            START | 0x01 | 0xd0..=0xd7 => {}
            END => break,
            0xc0..=0xc2 => {
                if frame.is_some() {
                    return Err(error("there is a second frame"));
                }
                frame = Some(Frame::read(reader.segment()?, marker == 0xc2, limits)?);
            }
            HUFFMAN_TABLES => tables.read_huffman(reader.segment()?)?,
            QUANTISATION_TABLES => tables.read_quantisation(reader.segment()?)?,
            RESTART_INTERVAL => tables.read_restart_interval(reader.segment()?)?,
            START_OF_SCAN => {
                let Some(frame) = &mut frame else {
                    return Err(error("a scan stands before the frame"));
                };
                num_scans += 1;
                if num_scans > MAX_SCANS {
                    return Err(error(format!("there are more than {MAX_SCANS} scans")));
                }
                let header = reader.segment()?;
                let len = scan::decode(frame, &tables, header, reader.rest())?;
                reader.skip(len);
            }
            0xc3 | 0xc5..=0xcf => {
                let coding = "lossless, hierarchical and arithmetic coding are not read";
                return Err(error(format!("marker {marker:02x}: {coding}")));
            }
            JFIF => is_jfif |= reader.segment()?.starts_with(b"JFIF\0"),
            EXIF => {
                let segment = reader.segment()?;
                if segment.starts_with(b"Exif\0") && orientation == Orientation::default() {
                    orientation = Orientation::of(Some(segment));
                }
            }
            ADOBE => {
                let segment = reader.segment()?;
                if segment.starts_with(b"Adobe") {
                    adobe = segment.get(11).copied();
                }
            }
            _ => drop(reader.segment()?),
        }
    }
    let frame = frame.filter(Frame::is_complete);
    let frame = frame.ok_or_else(|| error("a part of the image is missing"))?;
    let colours = Colours::of(&frame, is_jfif, adobe)?;
    let size = (frame.height, frame.width);
    let planes = frame.into_planes();
    let pixels = match colours.is_grey() {
        true => to_rgb(size, &planes[0].values, Channels::Grey),
        false => Pixels::new(size.0, size.1, colours.to_rgb(&planes)),
    };
    Ok(Decoded {
        pixels,
        orientation,
    })
}

fn error(reason: impl ToString) -> ImageError {
    ImageError::Data {
        format: "JPEG",
        reason: reason.to_string(),
    }
}
