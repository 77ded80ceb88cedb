//! L2: images in prompts, from encoded bytes to the patches of a vision tower.

#![forbid(unsafe_code)]

mod decoding;
mod error;
mod limits;
mod patches;
mod pixels;
mod resizing;

pub use decoding::decode;
pub use error::ImageError;
pub use limits::ImageLimits;
pub use patches::{ImagePatches, TileGrid};
pub use pixels::Pixels;
pub use resizing::{Filter, resize};
