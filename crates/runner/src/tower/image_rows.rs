//! The rows of images that the engine keeps.

use std::ops::Range;

use half::bf16;

use super::encoder::ImageEncoder;
use crate::spec::ModelSpec;
use inflight_base::StepError;
use inflight_device::{Device, ImageRows};
use inflight_engine::{ImageMove, StepPlan};
use inflight_images::ImagePatches;

/// The tower of a model, and the rows of the images that it has encoded and that are kept.
pub(crate) struct KeptImages<D: Device> {
    encoder: ImageEncoder<D>,
    /// Whether the tokens of an image see each other.
    has_whole_images: bool,
    /// By slot, `[num_tokens, row_width]`.
    rows: Vec<Option<Vec<bf16>>>,
}

impl<D: Device> KeptImages<D> {
    /// Keeps nothing yet, for this model.
    pub(crate) fn new(encoder: ImageEncoder<D>, model: &ModelSpec) -> Self {
        Self {
            encoder,
            has_whole_images: model.has_whole_images,
            rows: Vec::new(),
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
                ImageMove::Evict(slot) => self.rows[slot.index()] = None,
                ImageMove::Encode { slot, image } => {
                    let patches = image.contents::<ImagePatches>();
                    let patches = patches.expect("an image of this runner");
                    let rows = self.encoder.encode(patches)?;
                    if slot.index() >= self.rows.len() {
                        self.rows.resize(slot.index() + 1, None);
                    }
                    self.rows[slot.index()] = Some(rows);
                }
            }
        }
        Ok(())
    }

    /// The rows of a model call, in place of the embeddings of its image tokens.
    pub(crate) fn rows_of(&self, plan: &StepPlan<'_>) -> Vec<ImageRows<'_>> {
        let width = self.encoder.spec().row_width();
        let images = plan.image_rows.iter().map(|image| {
            let rows = self.rows[image.slot.index()].as_ref();
            let rows = rows.expect("the rows of an image that is kept");
            let first = image.first_row as usize * width;
            ImageRows {
                first_token: image.tokens.start,
                rows: &rows[first..first + image.tokens.len() * width],
            }
        });
        images.collect()
    }

    /// The tokens of a model call that see each other: of each image, all.
    pub(crate) fn mutual_runs(&self, plan: &StepPlan<'_>) -> Vec<Range<u32>> {
        match self.has_whole_images {
            true => plan.image_rows.iter().map(|it| it.tokens.clone()).collect(),
            false => Vec::new(),
        }
    }
}
