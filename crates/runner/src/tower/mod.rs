//! The vision tower of a model: from the patches of an image to rows of the residual stream.
//!
//! ```text
//! tower_source.rs     the weights of a tower in a checkpoint
//! tower_weights.rs    packed for a device
//! encoder.rs          the tower on a device, one tile after the other
//! rows_of_image.rs    from the rows of tiles to the rows of an image
//! image_rows.rs       the rows of the images that the engine keeps
//! ```
//!
//! A tile is a sequence of the tower's decoder, whose tokens are patches and see each other. Tiles are computed one by
//! one, so that rows of an image do not depend on other images.

mod encoder;
mod image_rows;
mod rows_of_image;
mod tower_source;
mod tower_weights;

pub(super) use encoder::ImageEncoder;
pub(super) use image_rows::KeptImages;
pub(super) use tower_source::TowerSource;
