//! Gemma 3: one tile of a fixed size, whatever the image's shape. Source: `Gemma3ImageProcessor` and `Gemma3Processor`
//! of transformers, without cutting of long images.

use inflight_base::LoadError;

use super::files::{CENTRED, ProcessorFiles};
use super::{ImageProcessor, Tiling};
use crate::error::ImageError;
use crate::patches::PatchLayout;
use crate::pixels::Pixels;
use crate::prompt::ImagePrompt;
use crate::resizing::{Filter, resize};

#[derive(Debug)]
struct Gemma3 {
    filter: Filter,
    size: (usize, usize),
    num_tokens: usize,
    before: String,
    after: String,
}

pub fn read(mut files: ProcessorFiles) -> Result<ImageProcessor, LoadError> {
    let filter = files.filter(Filter::Bilinear)?;
    let normalisation = files.normalisation(CENTRED)?;
    let image = &mut files.image;
    image.refuse_switch("do_pan_and_scan")?;
    for unused in [
        "image_seq_length",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_min_ratio_to_activate",
    ] {
        image.take(unused);
    }
    let size = image.rectangle("size")?.unwrap_or((224, 224));
    let num_tokens = files.processor.size("image_seq_length")?.unwrap_or(256);
    let of_config = files.config.size("mm_tokens_per_image")?.unwrap_or(256);
    if num_tokens != of_config {
        return Err(files.processor.error(&format!(
            "image_seq_length is {num_tokens}, but mm_tokens_per_image in config.json is {of_config}"
        )));
    }
    let patch_side = files.patch_side()?;
    let token = |name, default: &str| files.token(name).unwrap_or_else(|| default.to_owned());
    let start = token("boi_token", "<start_of_image>");
    let end = token("eoi_token", "<end_of_image>");
    let image_token = token("image_token", "<image_soft_token>");
    files.finish()?;
    Ok(ImageProcessor {
        placeholder: start.clone(),
        image_token,
        normalisation,
        layout: PatchLayout::rows(patch_side),
        tiling: Box::new(Gemma3 {
            filter,
            size,
            num_tokens,
            before: format!("\n\n{start}"),
            after: format!("{end}\n\n"),
        }),
    })
}

impl Tiling for Gemma3 {
    fn prompt(&self, _size: (usize, usize), _num_images: usize) -> Result<ImagePrompt, ImageError> {
        Ok(ImagePrompt::default()
            .with_text(&self.before)
            .with_image_tokens(self.num_tokens)
            .with_text(&self.after))
    }

    fn tiles(&self, image: &Pixels, _num_images: usize) -> Result<Vec<Pixels>, ImageError> {
        Ok(vec![resize(image, self.size, self.filter)])
    }
}
