//! The rows of the images that the engine keeps.

use std::ops::Range;

use super::encoder::{EncodedImage, ImageEncoder};
use super::token_positions::{TokenGrid, TokenPositions};
use crate::rope::RopeAxes;
use crate::spec::ModelSpec;
use inflight_base::StepError;
use inflight_device::{AxisPositions, Device, ImageRows};
use inflight_engine::{ImageMove, ImageSlot, StepPlan};
use inflight_images::ImagePatches;

/// The tower of a model, and the rows of the images that it has encoded and that are kept.
pub(crate) struct KeptImages<D: Device> {
    encoder: ImageEncoder<D>,
    /// Whether the tokens of an image see each other.
    has_whole_images: bool,
    /// By slot.
    images: Vec<Option<KeptImage>>,
    positions: TokenPositions,
}

struct KeptImage {
    encoded: EncodedImage,
    grid: TokenGrid,
}

/// What a step computes of images.
#[derive(Default)]
pub(crate) struct ImageInputs<'a> {
    /// In place of the embeddings of image tokens.
    pub rows: Vec<ImageRows<'a>>,
    /// For each of the first layers, what is added behind it.
    pub deep_rows: Vec<Vec<ImageRows<'a>>>,
    /// The positions of all tokens, if some differ from the places in the KV cache.
    pub positions: &'a [AxisPositions],
    /// The tokens that see each other: of each image, all.
    pub mutual: Vec<Range<u32>>,
}

impl<D: Device> KeptImages<D> {
    /// Keeps nothing yet, for this model.
    pub(crate) fn new(encoder: ImageEncoder<D>, model: &ModelSpec) -> Self {
        Self {
            encoder,
            has_whole_images: model.has_whole_images,
            images: Vec::new(),
            positions: TokenPositions::default(),
        }
    }

    /// The tower.
    pub(crate) fn encoder(&self) -> &ImageEncoder<D> {
        &self.encoder
    }

    /// [`KeptImages::encoder`], to encode.
    pub(crate) fn encoder_mut(&mut self) -> &mut ImageEncoder<D> {
        &mut self.encoder
    }

    /// Encodes and evicts images, one after the other.
    ///
    /// # Errors
    /// An image is not one that the tower reads, for the request was not checked, or the device has failed.
    pub(crate) fn make_moves(&mut self, moves: &[ImageMove]) -> Result<(), StepError> {
        for one in moves {
            match one {
                ImageMove::Evict(slot) => self.images[slot.index()] = None,
                ImageMove::Encode { slot, image } => {
                    let patches = image.contents::<ImagePatches>();
                    let patches = patches.expect("an image of this runner");
                    let encoded = self.encoder.encode(patches)?;
                    if slot.index() >= self.images.len() {
                        self.images.resize_with(slot.index() + 1, || None);
                    }
                    let grid = TokenGrid::of_image(self.encoder.spec(), patches);
                    self.images[slot.index()] = Some(KeptImage { encoded, grid });
                }
            }
        }
        Ok(())
    }

    /// The inputs of a model call.
    pub(crate) fn inputs(&mut self, plan: &StepPlan<'_>) -> ImageInputs<'_> {
        let spec = self.encoder.spec();
        let width = spec.row_width();
        let images = &self.images;
        let of_slot = |slot: ImageSlot| {
            let image = images[slot.index()].as_ref();
            image.expect("the rows of an image that is kept")
        };
        let rows_of = |level: Option<usize>| {
            let images = plan.image_rows.iter().map(move |image| {
                let EncodedImage { rows, deep_rows } = &of_slot(image.slot).encoded;
                let rows = level.map_or(rows, |level| &deep_rows[level]);
                let first = image.first_row as usize * width;
                ImageRows {
                    first_token: image.tokens.start,
                    rows: &rows[first..first + image.tokens.len() * width],
                }
            });
            images.collect()
        };
        let num_deep = match plan.image_rows.is_empty() {
            true => 0,
            false => spec.deep_projectors.len(),
        };
        ImageInputs {
            rows: rows_of(None),
            deep_rows: (0..num_deep).map(|level| rows_of(Some(level))).collect(),
            positions: match spec.text_axes {
                RopeAxes::Sequence => &[],
                _ => self.positions.of_plan(plan, |slot| of_slot(slot).grid),
            },
            mutual: match self.has_whole_images {
                true => plan.image_rows.iter().map(|it| it.tokens.clone()).collect(),
                false => Vec::new(),
            },
        }
    }
}
