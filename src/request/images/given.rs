//! An image as a request sends it.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use sha2::{Digest, Sha256};

use inflight_images::{ImageError, ImageLimits, Pixels, decode, shrink};

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The first bytes of files. Base64 of a file never begins like one.
const SIGNATURES: [&[u8]; 5] = [b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM"];

/// The longest side of an image of low detail, in pixels, as OpenAI's models see such an image.
const MAX_SIDE_OF_LOW_DETAIL: usize = 512;

/// The resolution at which a model sees an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The resolution of the checkpoint's processor.
    Full,
    /// Sides of at most 512 pixels, before preprocessing.
    Low,
}

impl Detail {
    /// The pixels to preprocess.
    pub fn of(self, pixels: Pixels) -> Pixels {
        match self {
            Self::Full => pixels,
            Self::Low => shrink(pixels, MAX_SIDE_OF_LOW_DETAIL),
        }
    }
}

/// An image as a request sends it.
pub struct GivenImage<'a> {
    pub content: ImageContent<'a>,
    pub detail: Detail,
}

/// The encoded file or the pixels of an image.
pub enum ImageContent<'a> {
    /// A file.
    Encoded(Cow<'a, [u8]>),
    /// RGB values of 8 bits.
    Pixels {
        /// `[height, width, 3]`
        shape: [usize; 3],
        /// The values.
        values: &'a [u8],
    },
}

impl<'a> GivenImage<'a> {
    /// The image in an element of a tensor: a file, or a text as for [`GivenImage::of_text`].
    ///
    /// # Errors
    /// It is neither; the reason.
    pub fn of_bytes(bytes: &'a [u8]) -> Result<Self, String> {
        if SIGNATURES.iter().any(|start| bytes.starts_with(start)) {
            return Ok(Self::encoded(bytes));
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::of_text(text),
            // The decoder names the first bytes.
            Err(_) => Ok(Self::encoded(bytes)),
        }
    }

    /// The image in a text: base64, alone or in a `data:` URL.
    ///
    /// # Errors
    /// It is another URL, or no base64; the reason.
    pub fn of_text(text: &str) -> Result<Self, String> {
        let data = match text.split_once(':') {
            Some(("data", url)) => match url.split_once(";base64,") {
                Some((_, data)) => data,
                None => {
                    return Err("a data URL without ';base64,'; encode the image in base64".into());
                }
            },
            Some(_) => {
                return Err(
                    "a URL that is no data URL, and the model downloads nothing; send the image itself, as \
                     data:image/png;base64,..."
                        .into(),
                );
            }
            None => text,
        };
        match BASE64.decode(data.trim()) {
            Ok(bytes) => Ok(Self::encoded(bytes)),
            Err(error) => Err(format!("no image file and no base64: {error}")),
        }
    }

    fn encoded(bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Self {
            content: ImageContent::Encoded(bytes.into()),
            detail: Detail::Full,
        }
    }

    /// Bytes of the file, or of the values.
    pub fn num_bytes(&self) -> usize {
        match &self.content {
            ImageContent::Encoded(bytes) => bytes.len(),
            ImageContent::Pixels { values, .. } => values.len(),
        }
    }

    /// A cryptographic hash of the content and the detail.
    pub fn hash(&self) -> [u8; 32] {
        let hash = Sha256::new().chain_update([self.detail as u8]);
        let hash = match &self.content {
            ImageContent::Encoded(bytes) => hash.chain_update([0]).chain_update(bytes),
            ImageContent::Pixels { shape, values } => {
                let hash = hash.chain_update([1]);
                let sizes = shape.iter().map(|size| (*size as u64).to_le_bytes());
                let hash = sizes.fold(hash, |hash, size| hash.chain_update(size));
                hash.chain_update(values)
            }
        };
        hash.finalize().into()
    }

    /// All of its pixels.
    ///
    /// # Errors
    /// The image is above the limits, of an unknown format, or damaged.
    pub fn pixels(&self, limits: &ImageLimits) -> Result<Pixels, ImageError> {
        match &self.content {
            ImageContent::Encoded(bytes) => decode(bytes, limits),
            ImageContent::Pixels { shape, values } => Pixels::from_tensor(shape, values, limits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

    fn file(given: Result<GivenImage<'_>, String>) -> Result<Vec<u8>, String> {
        match given?.content {
            ImageContent::Encoded(bytes) => Ok(bytes.into_owned()),
            ImageContent::Pixels { .. } => panic!("no file"),
        }
    }

    #[test]
    fn files_base64_and_data_urls_are_told_apart() {
        let text = "iVBORw0KGgo=";
        for given in [
            PNG,
            text.as_bytes(),
            b"iVBORw0KGgo",
            b"data:image/png;base64,iVBORw0KGgo=",
            b"data:;base64,iVBORw0KGgo=\n",
        ] {
            assert_eq!(file(GivenImage::of_bytes(given)), Ok(PNG.to_vec()));
        }
        // Unknown files are left to the decoder, which names their first bytes.
        assert_eq!(file(GivenImage::of_bytes(b"\0\xff")), Ok(vec![0, 0xff]));
    }

    #[test]
    fn other_texts_are_refused_with_the_way_out() {
        for (text, reason) in [
            ("https://host/a.png", "downloads nothing"),
            ("file:///etc/passwd", "downloads nothing"),
            ("data:image/svg+xml,<svg/>", "without ';base64,'"),
            ("a picture", "no base64"),
        ] {
            let error = file(GivenImage::of_bytes(text.as_bytes())).expect_err("refused");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_hash_tells_shapes_kinds_and_details_apart() {
        let pixels = |shape, detail| {
            let values = &[7; 18];
            let content = ImageContent::Pixels { shape, values };
            GivenImage { content, detail }.hash()
        };
        let hashes = [
            pixels([2, 3, 3], Detail::Full),
            pixels([3, 2, 3], Detail::Full),
            pixels([2, 3, 3], Detail::Low),
            GivenImage::encoded(&[7; 18][..]).hash(),
        ];
        for (index, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..index].contains(hash), "{index}");
        }
        assert_eq!(hashes[0], pixels([2, 3, 3], Detail::Full));
    }

    #[test]
    fn an_image_of_low_detail_has_sides_of_at_most_512_pixels() {
        for (shape, low) in [
            ([600, 1200, 3], (256, 512)),
            ([513, 2, 3], (512, 2)),
            ([1, 2048, 3], (1, 512)),
            ([512, 300, 3], (512, 300)),
        ] {
            let values = vec![9; shape.iter().product()];
            for (detail, expected) in [(Detail::Full, (shape[0], shape[1])), (Detail::Low, low)] {
                let pixels = Pixels::from_tensor(&shape, &values, &ImageLimits::default());
                let pixels = detail.of(pixels.expect("an image"));
                assert_eq!((pixels.height(), pixels.width()), expected);
                assert!(pixels.values().iter().all(|&value| value == 9));
            }
        }
    }
}
