//! From the images of a request to image tokens in its prompt.
//!
//! ```text
//! text       "<image> What is it?"           one placeholder for each image
//! place      "<row_1_col_1><image><image>... What is it?"
//! tokens     [ 5, 7, 7, ... , 31, 40 ]
//! spans           |image|
//! ```

use std::sync::Arc;

use crate::request::images::given::GivenImage;
use crate::request::images::store::{ImageStore, StoredImage};
use inflight_base::{LoadError, RequestError, TokenId, Tokens};
use inflight_config::Settings;
use inflight_engine::{Image, ImageSpan, PromptImages};
use inflight_images::{
    ImageError, ImageLimits, ImagePatches, ImageProcessor, ProcessedImage, PromptPiece,
};
use inflight_text::Tokenizer;
use inflight_triton::Error;
use sha2::{Digest, Sha256};

/// Reads the images of a model's requests.
pub struct ImageReader {
    processor: Arc<ImageProcessor>,
    /// The token of an image's rows.
    token: TokenId,
    max_images: usize,
    /// Of all images of a request.
    limits: ImageLimits,
    store: ImageStore,
}

/// The images of a prompt, whose tokens are in its text.
pub struct PlacedImages {
    /// The prompt.
    pub text: String,
    images: Vec<Arc<StoredImage>>,
}

impl ImageReader {
    /// A reader with the limits of `settings`.
    ///
    /// # Errors
    /// The tokenizer does not have the processor's image token.
    pub fn new(
        processor: Arc<ImageProcessor>,
        tokenizer: &Tokenizer,
        settings: &Settings,
    ) -> Result<Self, LoadError> {
        let name = processor.image_token();
        let token = tokenizer.id_of(name).ok_or_else(|| LoadError::Config {
            problem: format!("the tokenizer has no token '{name}', which stands for images"),
            remedy: "take the tokenizer of the checkpoint, or set max_num_image_tokens to 0"
                .to_owned(),
        })?;
        let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(Self {
            token,
            max_images: settings.max_images as usize,
            limits: ImageLimits {
                max_image_bytes: size(settings.max_image_bytes),
                max_image_pixels: size(settings.max_image_pixels),
            },
            store: ImageStore::new(settings.image_memory_bytes),
            processor,
        })
    }

    /// The text that stands for an image in a prompt.
    pub fn placeholder(&self) -> &str {
        self.processor.placeholder()
    }

    /// The most bytes of all encoded images of a request.
    pub fn max_bytes(&self) -> usize {
        self.limits.max_image_bytes
    }

    /// The number of places for images in a text.
    pub fn num_places(&self, text: &str) -> usize {
        text.matches(self.placeholder()).count()
    }

    /// Processes `images`, and writes their tokens into a text of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// There are too many, or one is too large or damaged, or the text has another number of placeholders.
    pub fn place(
        &self,
        text: &str,
        images: &[GivenImage<'_>],
        max_tokens: usize,
    ) -> Result<PlacedImages, Error> {
        let num_images = images.len();
        if num_images > self.max_images {
            return Err(Error::invalid(format!(
                "the request has {num_images} images, and max_images is {}; send fewer",
                self.max_images
            )));
        }
        let sizes = images.iter().map(GivenImage::num_bytes);
        let num_bytes: usize = sizes.fold(0, usize::saturating_add);
        if num_bytes > self.limits.max_image_bytes {
            return Err(Error::invalid(format!(
                "the images of the request have {num_bytes} bytes, and max_image_bytes is {}; send fewer or smaller ones",
                self.limits.max_image_bytes
            )));
        }
        let (placeholder, num_places) = (self.placeholder(), self.num_places(text));
        if num_places != num_images {
            return Err(Error::invalid(format!(
                "the prompt has '{placeholder}' {num_places} times, and the request has {num_images} images: write \
                 '{placeholder}' once for each image, where it belongs, and nowhere else"
            )));
        }
        let mut placed = Vec::with_capacity(num_images);
        let mut max_pixels = self.limits.max_image_pixels;
        let mut num_tokens = 0;
        for (index, image) in images.iter().enumerate() {
            let stored = self
                .stored(image, num_images, &mut max_pixels)
                .map_err(|error| {
                    Error::new(error.code(), format!("image {index}: {}", error.message()))
                })?;
            num_tokens += stored.prompt.num_image_tokens();
            if num_tokens > max_tokens {
                return Err(Error::invalid(format!(
                    "images 0 to {index} have {num_tokens} tokens, and max_seq_len is {max_tokens}; send fewer or smaller \
                     images"
                )));
            }
            placed.push(stored);
        }
        let token = self.processor.image_token();
        let mut pieces = text.split(placeholder);
        let mut text = pieces.next().unwrap_or_default().to_owned();
        for (image, piece) in placed.iter().zip(pieces) {
            text.push_str(&image.prompt.to_text(token));
            text.push_str(piece);
        }
        Ok(PlacedImages {
            text,
            images: placed,
        })
    }

    /// Where the images are among the tokens of their prompt.
    ///
    /// # Errors
    /// The rest of the prompt has image tokens too.
    pub fn spans(
        &self,
        ids: &[TokenId],
        placed: &PlacedImages,
    ) -> Result<PromptImages, RequestError> {
        let mut end = 0;
        let mut spans = Vec::new();
        for run in placed.images.iter().flat_map(|image| &image.runs) {
            let len = run.num_tokens().index();
            let start = ids[end..].iter().position(|&id| id == self.token);
            let start = end + start.unwrap_or(ids.len() - end);
            end = start.saturating_add(len);
            let is_run = ids
                .get(start..end)
                .is_some_and(|ids| ids.iter().all(|&id| id == self.token));
            if !is_run {
                return Err(self.more_tokens());
            }
            spans.push(ImageSpan {
                position: Tokens(start as u32),
                image: run.clone(),
            });
        }
        match ids[end..].contains(&self.token) {
            true => Err(self.more_tokens()),
            false => Ok(PromptImages::new(spans)),
        }
    }

    fn more_tokens(&self) -> RequestError {
        RequestError::Invalid(format!(
            "the text of the prompt has '{}', which stands for images; leave it out",
            self.processor.image_token()
        ))
    }

    /// An image as the store keeps it, processed if it is not there.
    fn stored(
        &self,
        image: &GivenImage<'_>,
        num_images: usize,
        max_pixels: &mut usize,
    ) -> Result<Arc<StoredImage>, Error> {
        let num_images = match self.processor.depends_on_num_images() {
            true => num_images,
            false => 1,
        };
        let hash = image.hash();
        let key = (hash, num_images.min(2));
        if let Some(stored) = self.store.find(&key) {
            return Ok(stored);
        }
        let invalid = |error: ImageError| RequestError::Invalid(error.to_string());
        let limits = ImageLimits {
            max_image_pixels: *max_pixels,
            ..self.limits
        };
        let pixels = image.pixels(&limits).map_err(|error| match error {
            ImageError::Size { height, width, .. } if *max_pixels < self.limits.max_image_pixels => {
                RequestError::Invalid(format!(
                    "{height} x {width} pixels, and the images before it leave {max_pixels} of max_image_pixels = {}; send \
                     fewer or smaller images",
                    self.limits.max_image_pixels
                ))
            }
            error => invalid(error),
        })?;
        *max_pixels -= pixels.height() * pixels.width();
        let processed = self
            .processor
            .process(&pixels, num_images)
            .map_err(invalid)?;
        drop(pixels);
        let hash = Sha256::new().chain_update(hash).chain_update([key.1 as u8]);
        let prompt = processed.prompt.clone();
        let patches: Vec<_> = runs_of(processed)?.into_iter().map(Arc::new).collect();
        let runs = patches.iter().enumerate().map(|(index, patches)| {
            let hash = hash.clone().chain_update((index as u64).to_le_bytes());
            let hash: [u8; 32] = hash.finalize().into();
            let hash = u128::from_le_bytes(*hash.first_chunk().expect("half of a hash"));
            Image::new(hash, Tokens(patches.num_tokens as u32), patches.clone())
        });
        let stored = StoredImage {
            runs: runs.collect(),
            prompt,
        };
        self.store.add(key, stored, &patches)
    }
}

/// The patches of each run of image tokens: of all of the image, or of one tile.
fn runs_of(processed: ProcessedImage) -> Result<Vec<ImagePatches>, RequestError> {
    let ProcessedImage {
        patches, prompt, ..
    } = processed;
    let runs = prompt.pieces().iter().filter_map(|piece| match piece {
        PromptPiece::Text(_) => None,
        PromptPiece::ImageTokens(num_tokens) => Some(*num_tokens),
    });
    let runs: Vec<_> = runs.collect();
    if runs.len() == 1 {
        return Ok(vec![patches]);
    }
    let num_patches = patches.num_patches();
    if runs.len() != patches.tiles.len() || num_patches == 0 {
        return Err(RequestError::Internal(format!(
            "an image of {} tiles has {} runs of tokens",
            patches.tiles.len(),
            runs.len()
        )));
    }
    let patch_len = patches.values.len() / num_patches;
    let mut values = &patches.values[..];
    let tiles = patches.tiles.iter().zip(runs);
    Ok(tiles
        .map(|(&tile, num_tokens)| {
            let (own, rest) = values.split_at(tile.rows * tile.columns * patch_len);
            values = rest;
            ImagePatches {
                values: own.to_vec(),
                tiles: vec![tile],
                num_tokens,
            }
        })
        .collect())
}
