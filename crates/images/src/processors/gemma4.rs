//! Gemma 4: the image keeps its shape and takes as many patches as a budget allows. Source: `Gemma4ImageProcessor` and
//! `Gemma4Processor` of transformers, without the padding to the budget.

use inflight_base::LoadError;
use serde_json::Value;

use super::files::{ProcessorFiles, UNCHANGED};
use super::{ImageProcessor, Tiling};
use crate::error::ImageError;
use crate::patches::{PatchLayout, PatchOrder};
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

/// The budgets of tokens that the model knows.
const BUDGETS: [usize; 5] = [70, 140, 280, 560, 1120];

#[derive(Debug)]
struct Gemma4 {
    filter: Filter,
    max_tokens: usize,
    patch_side: usize,
    /// The side of the square of patches that becomes a token.
    pooling: usize,
    start: String,
    end: String,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bicubic)?;
    files.image.set_default("do_normalize", Value::Bool(false));
    let normalisation = files.normalisation(UNCHANGED)?;
    let image = &mut files.image;
    // Sizes follow from the budget.
    for unused in ["size", "image_seq_length"] {
        image.take(unused);
    }
    let patch_side = image.patch_size()?.unwrap_or(16);
    let pooling = image.factor("pooling_kernel_size")?.unwrap_or(3);
    let max_tokens = image.size("max_soft_tokens")?.unwrap_or(280);
    if !BUDGETS.contains(&max_tokens) {
        let value = Value::from(max_tokens);
        return Err(image.wrong("max_soft_tokens", &value, &format!("one of {BUDGETS:?}")));
    }
    for unused in ["audio_ms_per_token", "audio_seq_length", "image_seq_length"] {
        files.processor.take(unused);
    }
    let image_token = files.required_token("image_token")?;
    let start = files.required_token("boi_token")?;
    let end = files.required_token("eoi_token")?;
    files.finish()?;
    let layout = PatchLayout {
        side: patch_side,
        order: PatchOrder::ChannelsLast,
    };
    let tiling = Gemma4 {
        filter,
        max_tokens,
        patch_side,
        pooling,
        start,
        end,
    };
    Ok(ImageProcessor::new(
        image_token,
        normalisation,
        layout,
        tiling,
    ))
}

impl Gemma4 {
    /// Rows and columns of tokens: as many as the budget and the image's shape allow.
    fn grid(&self, (height, width): (usize, usize)) -> (usize, usize) {
        let max_patches = self.max_tokens * self.pooling * self.pooling;
        let max_pixels = max_patches * self.patch_side * self.patch_side;
        let scale = (max_pixels as f64 / (height * width) as f64).sqrt();
        let side = (self.pooling * self.patch_side) as f64;
        let fit = |length: usize| (scale * length as f64 / side).floor() as usize;
        // Both are never 0: their product before rounding is the budget.
        match (fit(height), fit(width)) {
            (0, _) => (1, (width / height).min(self.max_tokens)),
            (_, 0) => ((height / width).min(self.max_tokens), 1),
            grid => grid,
        }
    }
}

impl Tiling for Gemma4 {
    fn prompt(&self, size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        let (rows, columns) = self.grid(size);
        Ok(ImagePrompt::default()
            .with_text(&self.start)
            .with_image_tokens(rows * columns)
            .with_text(&self.end))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        let (rows, columns) = self.grid(image.size());
        let side = self.pooling * self.patch_side;
        let size = (rows * side, columns * side);
        Ok(vec![resize(image, size, self.filter)])
    }
}
