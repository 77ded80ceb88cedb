//! Images in prompts: from the tensors, options and messages of a request to spans of image tokens.
//!
//! ```text
//! arrived.rs   copies the tensors, on the execute thread
//! parts.rs     images in the messages of a conversation
//! given.rs     an image as it is sent, a file or pixels
//! listed.rs    all images of a request in the order of its prompt
//! reader.rs    decodes images, writes their tokens into the prompt, and finds these among its tokens
//! store.rs     keeps processed images, and bounds their memory
//! ```

mod arrived;
mod given;
mod listed;
mod parts;
mod reader;
mod store;

pub(super) use arrived::{ArrivedImages, IMAGE_INPUTS};
pub(super) use listed::ImageList;
pub(super) use parts::{as_text, take_images};
pub use reader::ImageReader;
pub(super) use reader::PlacedImages;
