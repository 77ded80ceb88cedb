//! The vision tower of a model: from the patches of an image to rows of the residual stream.
//!
//! ```text
//! tower_source.rs     the weights of a tower in a checkpoint
//! tower_weights.rs    packed for a device
//! tile_layout.rs      the order and the positions of patches, and which of them see each other
//! patch_positions.rs  learned positions, interpolated in a square
//! projector.rs        from encoded patches to rows
//! encoder.rs          the tower on a device, one tile after the other
//! rows_of_image.rs    from the rows of tiles to the rows of an image
//! image_rows.rs       the rows of the images that the engine keeps
//! token_positions.rs  the positions of image tokens and of the text behind them
//! ```
//!
//! A tile is a sequence of the tower's decoder, whose tokens are patches and see each other. Tiles are computed one by
//! one, so that rows of an image do not depend on other images.

mod encoder;
mod image_rows;
mod patch_positions;
mod projector;
mod rows_of_image;
mod tile_layout;
mod token_positions;
mod tower_source;
mod tower_weights;

pub(super) use encoder::ImageEncoder;
pub(super) use image_rows::KeptImages;
pub(super) use tower_source::TowerSource;
