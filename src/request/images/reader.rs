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
use crate::request::images::store::{ImageRun, ImageStore, StoredImage};
use inflight_base::{LoadError, RequestError, TokenId, Tokens};
use inflight_config::Settings;
use inflight_engine::{Image, ImageSpan, PromptImages};
use inflight_images::{
    ImageError, ImageLimits, ImagePatches, ImageProcessor, ImagePrompt, ProcessedImage,
    PromptPiece, RowLayout,
};
use inflight_runner::TowerSpec;
use inflight_text::Tokenizer;
use inflight_triton::Error;
use sha2::{Digest, Sha256};

/// Reads the images of a model's requests.
pub struct ImageReader {
    processor: Arc<ImageProcessor>,
    tower: TowerSpec,
    /// The token of an image's rows.
    token: TokenId,
    max_images: usize,
    /// Of all images of a request.
    limits: ImageLimits,
    store: ImageStore,
}

/// The images of a prompt, whose tokens are in its text.
pub struct PlacedImages(Vec<Arc<StoredImage>>);

impl ImageReader {
    /// A reader with the limits of `settings`.
    ///
    /// # Errors
    /// The tokenizer does not have the processor's image token.
    pub fn new(
        processor: Arc<ImageProcessor>,
        tower: TowerSpec,
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
            tower,
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

    /// Processes `images`, and writes their tokens into a text of at most `max_tokens` tokens. Returns that text.
    ///
    /// # Errors
    /// There are too many, or one is too large or damaged, or the text has another number of placeholders.
    pub fn place(
        &self,
        text: &str,
        images: &[GivenImage<'_>],
        max_tokens: usize,
    ) -> Result<(String, PlacedImages), Error> {
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
        Ok((text, PlacedImages(placed)))
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
        for run in placed.0.iter().flat_map(|image| &image.runs) {
            let len = run.num_tokens.index();
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
                image: run.image.clone(),
                first_row: run.first_row,
                num_tokens: run.num_tokens,
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
        let pixels = image.detail.of(pixels);
        let processed = self
            .processor
            .process(&pixels, num_images)
            .map_err(invalid)?;
        drop(pixels);
        let hash = Sha256::new().chain_update(hash).chain_update([key.1 as u8]);
        let ProcessedImage { patches, prompt } = processed;
        let patches = self.images_of(patches);
        let images = patches.iter().enumerate().map(|(index, patches)| {
            let hash = hash.clone().chain_update((index as u64).to_le_bytes());
            let hash: [u8; 32] = hash.finalize().into();
            let hash = u128::from_le_bytes(*hash.first_chunk().expect("half of a hash"));
            Image::new(hash, Tokens(patches.num_tokens as u32), patches.clone())
                .at_positions(Tokens(self.tower.num_positions(patches)))
        });
        let stored = StoredImage {
            runs: runs_of(&images.collect::<Vec<_>>(), &prompt),
            prompt,
        };
        self.store.add(key, stored, &patches)
    }

    /// The images that the engine is to know: the tiles of an image, if the tower reads each of them alone, so that a
    /// step need not encode all.
    fn images_of(&self, patches: ImagePatches) -> Vec<Arc<ImagePatches>> {
        let num_tiles = patches.tiles.len();
        let is_whole = num_tiles < 2 || patches.row_layout != RowLayout::Tiles;
        if is_whole || !patches.num_tokens.is_multiple_of(num_tiles) {
            return vec![Arc::new(patches)];
        }
        let patch_len = patches.values.len() / patches.num_patches().max(1);
        let mut values = &patches.values[..];
        let tiles = patches.tiles.iter().map(|&tile| {
            let (own, rest) = values.split_at(tile.rows * tile.columns * patch_len);
            values = rest;
            ImagePatches {
                values: own.to_vec(),
                tiles: vec![tile],
                num_tokens: patches.num_tokens / num_tiles,
                row_layout: RowLayout::Tiles,
            }
        });
        let tiles: Vec<_> = tiles.collect();
        match tiles
            .iter()
            .all(|tile| self.tower.check_image(tile).is_ok())
        {
            true => tiles.into_iter().map(Arc::new).collect(),
            false => vec![Arc::new(patches)],
        }
    }
}

/// The runs of image tokens of a prompt, each of one of its images.
///
/// ```text
/// prompt   text  i i i i  text  i i        runs of 4 and 2 tokens
/// images         | a| | b |     |c|        three of 2 tokens:   a b, c
///                |       a      a |        one of 6 tokens:     rows 0 to 3, rows 4 and 5
/// ```
fn runs_of(images: &[Image], prompt: &ImagePrompt) -> Vec<ImageRun> {
    let lens = prompt.pieces().iter().filter_map(|piece| match piece {
        PromptPiece::Text(_) => None,
        PromptPiece::ImageTokens(num_tokens) => Some(Tokens(*num_tokens as u32)),
    });
    let mut images = images.iter();
    let mut open: Option<(&Image, Tokens)> = None;
    let mut runs = Vec::new();
    for mut left in lens {
        while left > Tokens::ZERO {
            let next = || Some((images.next()?, Tokens::ZERO));
            let Some((image, first_row)) = open.take().or_else(next) else {
                return runs;
            };
            let num_tokens = left.min(image.num_tokens() - first_row);
            left -= num_tokens;
            let end = first_row + num_tokens;
            open = (end < image.num_tokens()).then_some((image, end));
            runs.push(ImageRun {
                image: image.clone(),
                first_row,
                num_tokens,
            });
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(images: &[u32], lens: &[usize]) -> Vec<(u128, u32, u32)> {
        let patches = |num_tokens: usize| ImagePatches {
            values: Vec::new(),
            tiles: Vec::new(),
            num_tokens,
            row_layout: RowLayout::Tiles,
        };
        let images = images.iter().zip(0..).map(|(&num_tokens, hash)| {
            Image::new(
                hash,
                Tokens(num_tokens),
                Arc::new(patches(num_tokens as usize)),
            )
        });
        let mut prompt = ImagePrompt::default();
        for &len in lens {
            prompt = prompt.with_text("a").with_image_tokens(len);
        }
        let runs = runs_of(&images.collect::<Vec<_>>(), &prompt);
        let shown = |run: &ImageRun| (run.image.hash(), run.first_row.0, run.num_tokens.0);
        runs.iter().map(shown).collect()
    }

    #[test]
    fn runs_are_divided_among_images_and_images_among_runs() {
        assert_eq!(runs(&[2, 2, 2], &[4, 2]), [(0, 0, 2), (1, 0, 2), (2, 0, 2)]);
        assert_eq!(
            runs(&[2, 2, 2], &[2, 2, 2]),
            [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
        );
        assert_eq!(runs(&[6], &[4, 2]), [(0, 0, 4), (0, 4, 2)]);
        assert_eq!(runs(&[6], &[6]), [(0, 0, 6)]);
    }
}
