//! All images of a request, in the order of its prompt.

use crate::request::images::arrived::ArrivedImages;
use crate::request::images::given::GivenImage;
use crate::request::images::parts::ImagePart;
use inflight_base::RequestError;
use inflight_triton::Error;

/// The images of a request, wherever they are.
pub struct ImageList<'a> {
    /// In tensors.
    pub arrived: &'a ArrivedImages,
    /// In the option `images`.
    pub option: &'a [String],
    /// In messages.
    pub parts: &'a [ImagePart],
}

impl<'a> ImageList<'a> {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.arrived.is_empty() && self.option.is_empty() && self.parts.is_empty()
    }

    /// The images in the order of the prompt: with messages, each of the parts, of which those without a source have
    /// the other images in order.
    ///
    /// # Errors
    /// An image is no image, or there are more or fewer images than parts without a source.
    pub fn images(&self) -> Result<Vec<GivenImage<'a>>, Error> {
        let mut others = self.arrived.list()?;
        for text in self.option {
            let image = GivenImage::of_text(text);
            others.push(
                image.map_err(|reason| invalid(&format!("image {}", others.len()), &reason))?,
            );
        }
        if self.parts.is_empty() {
            return Ok(others);
        }
        let num_others = others.len();
        let mut others = others.into_iter();
        let mut images = Vec::with_capacity(self.parts.len());
        for part in self.parts {
            let place = &part.place;
            let image = match &part.source {
                Some(text) => GivenImage::of_text(text).map_err(|reason| invalid(place, &reason))?,
                None => others.next().ok_or_else(|| {
                    let reason = format!(
                        "an image without a URL, and 'images' has only {num_others}; give the image here or there"
                    );
                    invalid(place, &reason)
                })?,
            };
            images.push(GivenImage {
                detail: part.detail,
                ..image
            });
        }
        match others.len() {
            0 => Ok(images),
            num_left => Err(Error::invalid(format!(
                "{num_left} of the {num_others} images in 'images' have no place in the messages; add a part \
                 {{\"type\": \"image\"}} for each"
            ))),
        }
    }
}

fn invalid(place: &str, reason: &str) -> RequestError {
    RequestError::Invalid(format!("{place}: {reason}"))
}
