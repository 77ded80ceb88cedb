//! An image of a request, decoded and processed for several models.

use std::sync::LazyLock;

use inflight_images::{ImageError, ImageLimits, ImageProcessor, decode};

use super::{Input, repository};

/// Processors of fixtures with small tiles.
const PROCESSORS: [&str; 7] = [
    "gemma4",
    "idefics3",
    "internvl",
    "llama4",
    "llava-onevision",
    "pixtral",
    "qwen2-vl",
];

const LIMITS: ImageLimits = ImageLimits {
    max_image_bytes: 1 << 20,
    max_image_pixels: 1 << 18,
};

/// The pixels of an image that is also processed, so that an input takes milliseconds.
const MAX_PROCESSED_PIXELS: usize = 1 << 12;

static OPENED: LazyLock<Vec<ImageProcessor>> = LazyLock::new(|| {
    let folder = repository().join("tests/fixtures/images/processors");
    let processors = PROCESSORS
        .iter()
        .map(|name| ImageProcessor::open(&folder.join(name)));
    processors
        .map(|processor| processor.expect("a processor of the fixtures"))
        .collect()
});

/// Runs one input.
pub fn run(bytes: &[u8]) -> Input {
    let image = match decode(bytes, &LIMITS) {
        Ok(image) => image,
        Err(ImageError::Format { .. } | ImageError::Bytes { .. }) => return Input::Useless,
        Err(_) => return Input::Useful,
    };
    let num_pixels = image.height() * image.width();
    assert!((1..=LIMITS.max_image_pixels).contains(&num_pixels));
    assert_eq!(image.values().len(), num_pixels * 3);
    if num_pixels <= MAX_PROCESSED_PIXELS {
        for processor in OPENED.iter() {
            if let Ok(processed) = processor.process(&image, 1) {
                let patches = processed.patches;
                assert!(patches.num_patches() > 0);
                assert_eq!(patches.values.len() % patches.num_patches(), 0);
                assert_eq!(patches.num_tokens, processed.prompt.num_image_tokens());
            }
        }
    }
    Input::Useful
}
