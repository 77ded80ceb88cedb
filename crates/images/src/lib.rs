//! L2: images in prompts, from encoded bytes to the patches of a vision tower.

#![forbid(unsafe_code)]

mod patches;

pub use patches::{ImagePatches, TileGrid};
