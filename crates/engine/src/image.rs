//! Images in prompts as the engine sees them: it carries them from requests to steps.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use inflight_base::{RequestError, TokenId, Tokens};

/// An image in a prompt. Only the runner knows what is inside.
#[derive(Clone)]
pub struct Image {
    hash: u128,
    num_tokens: Tokens,
    num_positions: Tokens,
    contents: Arc<dyn Any + Send + Sync>,
}

/// Consecutive tokens of a prompt that stand for rows of an image. An image has one span or several, with text between
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// The position of its first token.
    pub position: Tokens,
    /// The image.
    pub image: Image,
    /// The row of the first token.
    pub first_row: Tokens,
    /// Its tokens.
    pub num_tokens: Tokens,
}

/// The images of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PromptImages {
    spans: Arc<[ImageSpan]>,
    /// Whether a step computes all tokens of an image.
    are_whole: bool,
    /// The tokens of the prompt as prefix reuse compares them, once the engine has the request. Empty without images.
    keys: Arc<[TokenId]>,
}

impl Image {
    /// An image of `num_tokens` tokens. Images with equal `hash` count as equal: it has to be a cryptographic one of
    /// all that the tower reads.
    pub fn new(hash: u128, num_tokens: Tokens, contents: Arc<impl Any + Send + Sync>) -> Self {
        Self {
            hash,
            num_tokens,
            num_positions: num_tokens,
            contents,
        }
    }

    /// This image, with fewer positions than tokens: the text behind it goes on at the position of its first token plus
    /// `num_positions`.
    pub fn at_positions(self, num_positions: Tokens) -> Self {
        Self {
            num_positions,
            ..self
        }
    }

    /// The hash of its content.
    pub fn hash(&self) -> u128 {
        self.hash
    }

    /// The tokens that stand for it in a prompt.
    pub fn num_tokens(&self) -> Tokens {
        self.num_tokens
    }

    /// The positions that it takes of a prompt; as many as tokens, if nothing else was said.
    pub fn num_positions(&self) -> Tokens {
        self.num_positions
    }

    /// Its contents, if they are of this type.
    pub fn contents<T: 'static>(&self) -> Option<&T> {
        self.contents.downcast_ref()
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        (self.hash, self.num_tokens) == (other.hash, other.num_tokens)
    }
}

impl Eq for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({:032x}, {})", self.hash, self.num_tokens)
    }
}

impl ImageSpan {
    /// The span of all rows of an image.
    pub fn of(position: Tokens, image: Image) -> Self {
        Self {
            position,
            first_row: Tokens::ZERO,
            num_tokens: image.num_tokens,
            image,
        }
    }

    /// The position behind its last token.
    pub fn end(&self) -> Tokens {
        self.position + self.num_tokens
    }

    /// The row behind the one of its last token.
    pub(super) fn end_row(&self) -> Tokens {
        self.first_row + self.num_tokens
    }
}

impl PromptImages {
    /// Spans in order of their positions. The spans of an image follow one another and have all of its rows, in order.
    pub fn new(spans: Vec<ImageSpan>) -> Self {
        Self {
            spans: spans.into(),
            are_whole: false,
            keys: Arc::default(),
        }
    }

    /// The spans, in order.
    pub fn spans(&self) -> &[ImageSpan] {
        &self.spans
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// The spans with tokens at these positions.
    pub(super) fn within(&self, positions: Range<Tokens>) -> impl Iterator<Item = &ImageSpan> {
        let first = self
            .spans
            .partition_point(|span| span.end() <= positions.start);
        let rest = self.spans[first..].iter();
        rest.take_while(move |span| span.position < positions.end)
    }

    /// The tokens without a position of their own, of images that end at `end` or before.
    pub(super) fn position_shift(&self, end: Tokens) -> Tokens {
        let before = self.spans.iter().take_while(|span| span.end() <= end);
        let last = before.filter(|span| span.end_row() == span.image.num_tokens);
        last.map(|span| span.image.num_tokens - span.image.num_positions)
            .sum()
    }

    /// The image that a chunk which ends at `end` would cut, and that must not be cut.
    pub(super) fn cut_at(&self, end: Tokens) -> Option<&ImageSpan> {
        if !self.are_whole {
            return None;
        }
        let mut within = self.within(end..end + Tokens(1));
        within.find(|span| span.position < end)
    }

    /// Sets whether a step computes all tokens of an image, or as many as there is room for.
    pub(super) fn set_whole(&mut self, are_whole: bool) {
        self.are_whole = are_whole;
    }

    /// Reuse keys, one for each token of a prompt.
    pub(super) fn keys<'a>(&'a self, prompt: &'a [TokenId]) -> &'a [TokenId] {
        match self.keys.is_empty() {
            true => prompt,
            false => &self.keys,
        }
    }

    /// Sets the keys of a prompt with images, with the number of each image. `None` if one has none.
    pub(super) fn set_keys(
        &mut self,
        prompt: &[TokenId],
        mut key_of: impl FnMut(u128) -> Option<TokenId>,
    ) -> Option<()> {
        let mut keys = prompt.to_vec();
        for span in self.spans.iter() {
            let key = key_of(span.image.hash)?;
            keys[span.position.index()..span.end().index()].fill(key);
        }
        self.keys = keys.into();
        Some(())
    }

    /// Refuses spans that are not in order, that overlap, that have no token, or that are not in the prompt, and images
    /// without some of their rows. So equal [keys](Self::keys) from the first token on mean equal rows.
    pub(super) fn check(&self, num_prompt_tokens: Tokens) -> Result<(), RequestError> {
        let mut end = Tokens::ZERO;
        // The image whose rows are not complete.
        let mut open: Option<&ImageSpan> = None;
        for (index, span) in self.spans.iter().enumerate() {
            let last = u64::from(span.position.0) + u64::from(span.num_tokens.0);
            let is_valid = span.position >= end
                && span.num_tokens > Tokens::ZERO
                && last <= u64::from(num_prompt_tokens.0);
            if !is_valid {
                return Err(RequestError::Invalid(format!(
                    "span {index} of images has {} tokens from {} on, and has to have some in a prompt of \
                     {num_prompt_tokens} tokens, behind the span before it, which ends at {end}",
                    span.num_tokens, span.position
                )));
            }
            end = span.end();
            let last_row = u64::from(span.first_row.0) + u64::from(span.num_tokens.0);
            let continues = match open {
                Some(before) => span.image == before.image && span.first_row == before.end_row(),
                None => span.first_row == Tokens::ZERO,
            };
            let num_rows = u64::from(span.image.num_tokens.0);
            if !continues || last_row > num_rows {
                return Err(RequestError::Invalid(format!(
                    "span {index} of images has {} rows from {} on of an image of {num_rows}: the spans of an image \
                     have to have all of its rows in order, and no other image between them",
                    span.num_tokens, span.first_row
                )));
            }
            let num_positions = span.image.num_positions;
            if num_positions > span.image.num_tokens {
                return Err(RequestError::Invalid(format!(
                    "span {index} of images has an image of {num_rows} tokens at {num_positions} positions, which have \
                     to be as many or fewer"
                )));
            }
            open = (last_row < num_rows).then_some(span);
        }
        match open {
            None => Ok(()),
            Some(span) => Err(RequestError::Invalid(format!(
                "the prompt has {} rows of an image of {}: give it the other ones as well",
                span.end_row(),
                span.image.num_tokens
            ))),
        }
    }
}
