//! The image tensors of a request.

use crate::request::images::given::{Detail, GivenImage, ImageContent};
use inflight_base::RequestError;
use inflight_images::ImageError;
use inflight_triton::{DataType, Error, Input, strings};

/// The input of encoded images, and the names that it has for other backends.
const ENCODED: [&str; 5] = [
    "images",
    "image",
    "image_bytes_input",
    "image_url_input",
    "image_url",
];
/// The input of decoded images.
const PIXELS: &str = "image_pixels";
/// The inputs with images.
pub const IMAGE_INPUTS: [&str; 6] = [
    ENCODED[0], ENCODED[1], ENCODED[2], ENCODED[3], ENCODED[4], PIXELS,
];

/// Images of a request in tensors.
#[derive(Default)]
pub struct ArrivedImages {
    /// BYTES tensors of encoded images.
    encoded: Vec<Vec<u8>>,
    pixels: Option<ArrivedPixels>,
}

struct ArrivedPixels {
    shape: Vec<usize>,
    values: Vec<u8>,
}

impl ArrivedImages {
    /// Copies an input, unless the images are too large together.
    ///
    /// # Errors
    /// They are, or the input has another type.
    pub fn add(&mut self, input: &Input<'_>, max_image_bytes: usize) -> Result<(), Error> {
        let num_bytes = self.num_bytes() + input.num_bytes();
        // The lengths of strings come on top.
        let max_bytes = max_image_bytes.saturating_add(max_image_bytes / 2);
        if num_bytes > max_bytes {
            return Err(Error::invalid(format!(
                "input '{}': the images of the request have {num_bytes} bytes, and max_image_bytes is {max_image_bytes}; \
                 send fewer or smaller ones",
                input.name()
            )));
        }
        let expected = match input.name() {
            PIXELS => DataType::Uint8,
            _ => DataType::Bytes,
        };
        if input.data_type() != expected {
            return Err(Error::invalid(format!(
                "input '{}' has type {}, and images there have {expected}",
                input.name(),
                input.data_type()
            )));
        }
        if input.num_bytes() == 0 {
            return Ok(());
        }
        let values = input.bytes()?.into_owned();
        match input.name() {
            PIXELS => {
                let shape = input.shape(size_of::<u8>())?;
                self.pixels = Some(ArrivedPixels { shape, values });
            }
            _ => self.encoded.push(values),
        }
        Ok(())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.encoded.is_empty() && self.pixels.is_none()
    }

    /// Bytes that were copied.
    pub fn num_bytes(&self) -> usize {
        let encoded: usize = self.encoded.iter().map(Vec::len).sum();
        encoded + self.pixels.as_ref().map_or(0, |pixels| pixels.values.len())
    }

    /// The images in order: encoded ones before pixels.
    ///
    /// # Errors
    /// A tensor is damaged, or has another shape than images.
    pub fn list(&self) -> Result<Vec<GivenImage<'_>>, Error> {
        let mut images = Vec::new();
        for tensor in &self.encoded {
            for image in strings::decode(tensor)? {
                let image = GivenImage::of_bytes(image).map_err(|reason| {
                    RequestError::Invalid(format!("image {}: {reason}", images.len()))
                })?;
                images.push(image);
            }
        }
        if let Some(pixels) = &self.pixels {
            images.extend(pixels.images()?);
        }
        Ok(images)
    }
}

impl ArrivedPixels {
    /// The images of the shape `[height, width, 3]`, `[num_images, height, width, 3]`, or either in a batch of 1.
    fn images(&self) -> Result<impl Iterator<Item = GivenImage<'_>>, RequestError> {
        let mut shape = &self.shape[..];
        while let [1, rest @ ..] = shape
            && rest.len() >= 3
        {
            shape = rest;
        }
        let &([height, width, 3] | [_, height, width, 3]) = shape else {
            let error = ImageError::Shape {
                shape: self.shape.clone(),
            };
            return Err(RequestError::Invalid(format!("input '{PIXELS}': {error}")));
        };
        let len = (height * width * 3).max(1);
        let images = self.values.chunks_exact(len);
        Ok(images.map(move |values| GivenImage {
            content: ImageContent::Pixels {
                shape: [height, width, 3],
                values,
            },
            detail: Detail::Full,
        }))
    }
}
