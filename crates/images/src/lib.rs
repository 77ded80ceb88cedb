//! L2: images in prompts, from encoded bytes to the patches of a vision tower and the tokens of a prompt.
//!
//! ```text
//! bytes --decode--> Pixels --ImageProcessor--> ImagePatches, ImagePrompt
//! ```
//!
//! An [`ImageProcessor`] comes from the JSON files of a checkpoint and is shared. It computes what the checkpoint's
//! processor in transformers computes for one image, by torchvision on a CPU. This room does not know models or
//! requests.

#![forbid(unsafe_code)]

mod decoding;
mod error;
mod fields;
mod limits;
mod normalisation;
mod patches;
mod pixels;
mod processors;
mod prompt;
mod resizing;
mod row_layout;

pub use decoding::decode;
pub use error::ImageError;
pub use limits::ImageLimits;
pub use patches::{ImagePatches, TileGrid};
pub use pixels::Pixels;
pub use processors::{ImageProcessor, ProcessedImage};
pub use prompt::{ImagePrompt, PromptPiece};
pub use resizing::shrink;
pub use row_layout::{Picture, RowLayout};
