//! Turns the prompt of a request (text, a conversation, or token ids) into the tokens that the model sees.

use std::ops::Range;
use std::sync::Arc;

use crate::request::images::{
    ArrivedImages, ImageList, ImageReader, PlacedImages, as_text, take_images,
};
use crate::request::options::RequestOptions;
use inflight_base::{RequestError, TokenId, Tokens};
use inflight_engine::PromptImages;
use inflight_text::{
    ChatTemplates, Conversation, Detokenizer, EncodedTexts, LengthLimit, Tokenizer,
};
use inflight_triton::{Error, strings};

/// The prompt's input tensor.
pub(super) enum ArrivedPrompt {
    /// The bytes of a `text_input`.
    Text(Vec<u8>),
    /// A `text_input` that is too long, and has not been copied: its size in bytes.
    LongText(usize),
    /// A part of a request's `input_ids`.
    Ids(ArrivedIds),
}

/// The part of `input_ids` that was copied.
pub(super) struct ArrivedIds {
    /// Number of ids in the request.
    pub num_given: usize,
    /// Index of the first id that was copied.
    pub start: usize,
    /// The ids that were copied.
    pub ids: Vec<i32>,
}

/// Turns prompts, and words in options, into the model's tokens.
pub struct PromptEncoder {
    /// The tokenizer and the chat template; `None` for a model that takes and returns token ids only.
    pub text: Option<TextParts>,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// The longest prompt and output together.
    pub max_seq_len: Tokens,
    /// Whether prompts that are not rendered by a template get the tokenizer's special tokens.
    pub add_special_tokens: bool,
    /// Which part of a prompt is left when it is cut.
    pub kept: KeptPart,
    /// Whether pairs are put into the prompt of Qwen3-Reranker.
    pub judges_pairs: bool,
    /// The token that is left out at the end of a prompt, up to the first one.
    pub padding: Option<TokenId>,
    /// Reads the images of prompts; `None` for a model that takes none.
    pub images: Option<ImageReader>,
}

/// The part of a prompt that is left when it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPart {
    /// The end, which generation goes on from.
    End,
    /// The beginning, with the special tokens around it, for pooling models. Texts of more than
    /// `max_tokens` are cut unasked.
    Beginning {
        /// Tokens of a text, special ones included; `None`: texts are only cut where a request says so.
        max_tokens: Option<usize>,
    },
}

/// Converts between text and tokens.
#[derive(Clone)]
pub struct TextParts {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The templates that render conversations, if the checkpoint has any.
    pub templates: Option<Arc<ChatTemplates>>,
}

/// The tokens of a prompt, and its text if it has one.
pub(super) struct Prompt {
    /// What is new.
    pub text: String,
    /// All tokens.
    pub ids: Vec<TokenId>,
    /// How many of them were there before.
    pub num_before: usize,
    /// The first of the second text, in a pair whose texts the tokenizer tells apart.
    pub second_text: Option<Tokens>,
    /// Its images.
    pub images: PromptImages,
}

/// A prompt of text, before it is put behind a context.
struct TextPrompt {
    text: String,
    encoded: EncodedTexts,
    images: PromptImages,
}

impl ArrivedPrompt {
    /// The number of bytes that were copied.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Text(bytes) => bytes.len(),
            Self::LongText(_) => 0,
            Self::Ids(copied) => size_of_val(&copied.ids[..]),
        }
    }
}

impl PromptEncoder {
    /// The size in bytes of the longest text that can fit into the model's longest sequence. Longer texts are refused
    /// before they are tokenised.
    pub(super) fn max_prompt_bytes(&self) -> usize {
        self.max_seq_len
            .index()
            .saturating_mul(self.max_bytes_per_token())
    }

    /// The tokens of a prompt that follows `context`.
    pub(super) fn encode(
        &self,
        arrived: &ArrivedPrompt,
        images: &ArrivedImages,
        options: &RequestOptions,
        context: &[TokenId],
    ) -> Result<Prompt, Error> {
        let (text, new, second_text, images) = match (arrived, &self.text) {
            (ArrivedPrompt::Ids(copied), _) => {
                if !images.is_empty() || !options.images.is_empty() {
                    return Err(Error::invalid(
                        "images have their places in a text, and this model takes input_ids; leave them out",
                    ));
                }
                let second_text = second_text(options, copied.num_given)?;
                let ids = self.ids(copied, options)?;
                (String::new(), ids, second_text, PromptImages::default())
            }
            (_, Some(parts)) => {
                let is_first = context.is_empty();
                let TextPrompt {
                    text,
                    encoded,
                    images,
                } = self.text_prompt(arrived, images, options, parts, is_first)?;
                let mut ids = encoded.ids;
                let kept = self.kept_range(ids.len(), options);
                ids.truncate(kept.end);
                ids.drain(..kept.start);
                (text, ids, encoded.second_text, images)
            }
            (_, None) => return Err(Error::internal("a text model without a tokenizer")),
        };
        let mut new = new;
        while new.len() > 1 && new.last().copied() == self.padding {
            new.pop();
        }
        let num_before = context.len();
        if num_before > 0 && num_before + new.len() >= self.max_seq_len.index() {
            return Err(Error::invalid(format!(
                "the conversation has {num_before} tokens, and this turn adds {} and one of output at least, to more than \
                 max_seq_len = {}: start another conversation with sequence_start",
                new.len(),
                self.max_seq_len
            )));
        }
        let ids = match num_before {
            0 => new,
            _ => [context, &new].concat(),
        };
        Ok(Prompt {
            text,
            ids,
            num_before,
            second_text: second_text.map(|index| Tokens(index as u32)),
            images,
        })
    }

    /// Which of `num_given` ids are the prompt: of the first `input_lengths`, the first or the last
    /// `truncate_prompt_tokens`.
    pub(super) fn id_range(
        &self,
        num_given: usize,
        options: &RequestOptions,
    ) -> Result<Range<usize>, Error> {
        let end = options
            .input_length
            .map_or(num_given, |length| length as usize);
        if end > num_given {
            return Err(Error::invalid(format!(
                "option 'input_lengths' is {end}, and input_ids has {num_given} ids"
            )));
        }
        let kept = self.kept_range(end, options);
        if kept.len() > self.max_seq_len.index() {
            return Err(Error::invalid(format!(
                "the prompt has {} tokens, and max_seq_len = {}: shorten the prompt",
                kept.len(),
                self.max_seq_len
            )));
        }
        Ok(kept)
    }

    /// Which of `num_ids` the option `truncate_prompt_tokens` leaves.
    fn kept_range(&self, num_ids: usize, options: &RequestOptions) -> Range<usize> {
        let num_kept = self
            .max_kept(options)
            .map_or(num_ids, |max| num_ids.min(max));
        match self.kept {
            KeptPart::End => num_ids - num_kept..num_ids,
            KeptPart::Beginning { .. } => 0..num_kept,
        }
    }

    /// The most tokens that `truncate_prompt_tokens` leaves, if the request has it.
    fn max_kept(&self, options: &RequestOptions) -> Option<usize> {
        let has_output = self.kept == KeptPart::End;
        options.max_kept(self.max_seq_len.index(), has_output)
    }

    /// Whether a prompt that is too long is cut, refused or encoded in full.
    fn length_limit(&self, options: &RequestOptions) -> LengthLimit {
        let asked = self.max_kept(options);
        if let KeptPart::Beginning { max_tokens } = self.kept
            && !options.chat.is_given()
            && let Some(max_tokens) = [asked, max_tokens].into_iter().flatten().min()
        {
            return LengthLimit::Cut(max_tokens);
        }
        // Tokens are left out of those that have been encoded.
        match asked.is_some() || self.padding.is_some() {
            true => LengthLimit::None,
            false => LengthLimit::Refuse(self.max_seq_len.index()),
        }
    }

    fn ids(&self, copied: &ArrivedIds, options: &RequestOptions) -> Result<Vec<TokenId>, Error> {
        let range = self.id_range(copied.num_given, options)?;
        let ids = &copied.ids[range.start - copied.start..range.end - copied.start];
        let known = |id: i32| {
            TokenId::try_from(id)
                .ok()
                .filter(|id| *id < self.vocab_size)
        };
        ids.iter()
            .enumerate()
            .map(|(i, id)| {
                known(*id).ok_or_else(|| {
                    Error::invalid(format!(
                        "input_ids[{}] is {id}, outside the vocabulary, 0 to {}",
                        range.start + i,
                        self.vocab_size - 1
                    ))
                })
            })
            .collect()
    }

    fn text_prompt(
        &self,
        arrived: &ArrivedPrompt,
        images: &ArrivedImages,
        options: &RequestOptions,
        parts: &TextParts,
        is_first: bool,
    ) -> Result<TextPrompt, Error> {
        let too_long = |num_bytes: usize| {
            Error::invalid(format!(
                "the prompt has {num_bytes} bytes, and max_seq_len is {} tokens of at most {} bytes each; shorten it",
                self.max_seq_len,
                self.max_bytes_per_token()
            ))
        };
        let both_given = || {
            Error::invalid(
                "text_input and the option 'messages' are both given; with messages, \
                 text_input is empty",
            )
        };
        let bytes = match arrived {
            ArrivedPrompt::Text(bytes) => bytes,
            ArrivedPrompt::LongText(_) if options.chat.is_given() => return Err(both_given()),
            ArrivedPrompt::LongText(num_bytes) => {
                return Err(too_long(num_bytes - strings::LENGTH_BYTES));
            }
            ArrivedPrompt::Ids(_) => return Err(Error::internal("a text prompt of token ids")),
        };
        let texts = strings::decode(bytes)?;
        let [text] = texts[..] else {
            return Err(Error::invalid(format!(
                "text_input holds {} texts; a request has one",
                texts.len()
            )));
        };
        if !options.prompt_token_ids.is_empty() {
            if !text.is_empty() {
                return Err(Error::invalid(
                    "text_input and the option 'prompt_token_ids' are both given; with tokens, text_input is empty",
                ));
            }
            if !images.is_empty() || !options.images.is_empty() {
                return Err(Error::invalid(
                    "option 'prompt_token_ids': images have their places in a text; write the prompt to text_input or \
                     messages",
                ));
            }
            return Ok(self.given_tokens(options, parts, is_first)?);
        }
        let text = std::str::from_utf8(text).map_err(|error| {
            Error::invalid(format!(
                "text_input is not valid UTF-8 from byte {} on",
                error.valid_up_to()
            ))
        })?;
        let mut image_parts = Vec::new();
        let (text, add_special_tokens) = match options.chat.conversation()? {
            None => (text.to_owned(), self.add_special_tokens && is_first),
            Some(_) if !is_first => {
                return Err(Error::invalid(
                    "option 'messages': the chat template renders whole conversations, and this turn continues one: write \
                     its text to text_input, or set sequence_start and send all messages",
                ));
            }
            Some(_) if !text.is_empty() => return Err(both_given()),
            // The template writes the special tokens itself.
            Some(mut conversation) => {
                image_parts = take_images(&mut conversation.messages).map_err(|problem| {
                    RequestError::Invalid(format!("option 'messages': {problem}"))
                })?;
                if let Some(part) = image_parts.first().filter(|_| self.images.is_none()) {
                    return Err(takes_no_images(&part.place));
                }
                (self.render(parts, conversation, image_parts.len())?, false)
            }
        };
        let images = ImageList {
            arrived: images,
            option: &options.images,
            parts: &image_parts,
        };
        let (text, placed) = self.place_images(text, &images, options)?;
        let pair = options.text_pair.as_deref();
        let num_bytes = text.len() + pair.map_or(0, str::len);
        if num_bytes > self.max_prompt_bytes() {
            return Err(too_long(num_bytes));
        }
        if pair == Some("") {
            return Err(Error::invalid(
                "option 'text_pair' is empty; leave it out for a text without a second one",
            ));
        }
        let limit = self.length_limit(options);
        let tokenizer = &parts.tokenizer;
        let encoded = match pair {
            Some(pair) if self.judges_pairs => tokenizer.encode_judgement(&text, pair, limit),
            _ => tokenizer.encode_texts(&text, pair, add_special_tokens, limit),
        }?;
        // The tokenizer may add tokens of its own to an empty text.
        if encoded.ids.is_empty() {
            let problem = match text.is_empty() {
                true => "text_input is empty; a prompt has at least one token",
                false => {
                    "text_input has no token that the tokenizer knows; a prompt has at least one token"
                }
            };
            return Err(Error::invalid(problem));
        }
        self.check_vocabulary("the prompt", &encoded.ids)?;
        let images = match (&self.images, placed) {
            (Some(reader), Some(placed)) => reader.spans(&encoded.ids, &placed)?,
            _ => PromptImages::default(),
        };
        Ok(TextPrompt {
            text,
            encoded,
            images,
        })
    }

    /// Renders a conversation with images. Templates that know no parts of messages get placeholders in texts.
    fn render(
        &self,
        parts: &TextParts,
        conversation: Conversation,
        num_images: usize,
    ) -> Result<String, RequestError> {
        let rendered = render(parts, &conversation);
        let Some(reader) = self.images.as_ref().filter(|_| num_images > 0) else {
            return rendered;
        };
        let has_places = |text: &String| reader.num_places(text) == num_images;
        if rendered.as_ref().is_ok_and(has_places) {
            return rendered;
        }
        let as_text = Conversation {
            messages: as_text(&conversation.messages, reader.placeholder()),
            ..conversation
        };
        match render(parts, &as_text) {
            Ok(text) if has_places(&text) => Ok(text),
            _ => rendered,
        }
    }

    /// Writes the tokens of images into a prompt.
    ///
    /// # Errors
    /// The model takes no images, or not these.
    fn place_images(
        &self,
        text: String,
        images: &ImageList<'_>,
        options: &RequestOptions,
    ) -> Result<(String, Option<PlacedImages>), Error> {
        if images.is_empty() {
            return Ok((text, None));
        }
        let Some(reader) = &self.images else {
            return Err(takes_no_images("image 0"));
        };
        if options.truncate_prompt_tokens.is_some() {
            return Err(Error::invalid(
                "option 'truncate_prompt_tokens': a prompt with images is not cut; leave the option out",
            ));
        }
        let images = images.images()?;
        let (text, placed) = reader.place(&text, &images, self.max_seq_len.index())?;
        Ok((text, Some(placed)))
    }

    /// The prompt that the option `prompt_token_ids` is, and its text.
    fn given_tokens(
        &self,
        options: &RequestOptions,
        parts: &TextParts,
        is_first: bool,
    ) -> Result<TextPrompt, RequestError> {
        let ids = &options.prompt_token_ids;
        if ids.len() > self.max_seq_len.index() {
            return Err(RequestError::Invalid(format!(
                "option 'prompt_token_ids' has {} tokens, and max_seq_len = {}: shorten the prompt",
                ids.len(),
                self.max_seq_len
            )));
        }
        if !is_first {
            return Err(RequestError::Invalid(
                "option 'prompt_token_ids': this turn continues a conversation; write its text to text_input".to_owned(),
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id >= self.vocab_size) {
            return Err(RequestError::Option {
                name: "prompt_token_ids".to_owned(),
                value: format!("token {id}"),
                expected: format!("in the vocabulary, 0 to {}", self.vocab_size - 1),
            });
        }
        let mut text = String::new();
        let mut detokenizer = Detokenizer::new(&parts.tokenizer, &[], false);
        for id in ids {
            detokenizer.push(&parts.tokenizer, *id, &mut text);
        }
        detokenizer.finish(&parts.tokenizer, &mut text);
        let encoded = EncodedTexts {
            ids: ids.clone(),
            second_text: second_text(options, ids.len())?,
        };
        Ok(TextPrompt {
            text,
            encoded,
            images: PromptImages::default(),
        })
    }

    /// The tokens of each text separately.
    pub(super) fn tokens_of_each(
        &self,
        texts: &[String],
    ) -> Result<Vec<Vec<TokenId>>, RequestError> {
        let Some(parts) = &self.text else {
            return Ok(Vec::new());
        };
        let tokens = |text: &String| {
            let ids = parts.tokenizer.encode(text, false)?;
            self.check_vocabulary("option 'embedding_bias_words'", &ids)?;
            Ok(ids)
        };
        texts.iter().map(tokens).collect()
    }

    /// The tokens of an expected output, at most `max_tokens`, up to the first that the model does not have; `None`
    /// if there is no tokenizer or nothing is generated.
    pub(super) fn draft(
        &self,
        text: &str,
        max_tokens: usize,
    ) -> Result<Option<Vec<TokenId>>, RequestError> {
        let Some(parts) = self.text.as_ref().filter(|_| max_tokens > 0) else {
            return Ok(None);
        };
        let limit = LengthLimit::Cut(max_tokens);
        let mut ids = parts.tokenizer.encode_texts(text, None, false, limit)?.ids;
        let num_known = ids.iter().take_while(|&&id| id < self.vocab_size).count();
        ids.truncate(num_known);
        Ok(Some(ids))
    }

    /// The tokens of the words that the output must not contain, in all their variants.
    pub(super) fn bad_words(
        &self,
        options: &RequestOptions,
    ) -> Result<Vec<Vec<TokenId>>, RequestError> {
        let Some(parts) = &self.text else {
            return Ok(Vec::new());
        };
        let mut words = Vec::new();
        for word in &options.bad_words {
            for ids in parts.tokenizer.encode_word_variants(word)? {
                self.check_vocabulary("option 'bad_words'", &ids)?;
                words.push(ids);
            }
        }
        Ok(words)
    }

    /// Refuses tokens that the model has no embedding for: a tokenizer can have more tokens than the model, such as
    /// one for padding.
    fn check_vocabulary(&self, of: &str, ids: &[TokenId]) -> Result<(), RequestError> {
        match ids.iter().find(|id| **id >= self.vocab_size) {
            None => Ok(()),
            Some(id) => Err(RequestError::Invalid(format!(
                "{of}: the tokenizer makes token {id} of it, and the model's vocabulary is 0 to {}; leave out the \
                 text of that token",
                self.vocab_size - 1
            ))),
        }
    }

    fn max_bytes_per_token(&self) -> usize {
        self.text
            .as_ref()
            .map_or(0, |parts| parts.tokenizer.max_bytes_per_token())
    }
}

/// The first token of the second text, of a prompt of `num_tokens` whose types are given.
fn second_text(options: &RequestOptions, num_tokens: usize) -> Result<Option<usize>, RequestError> {
    match options.token_types {
        Some(types) if types.num_tokens != num_tokens => Err(RequestError::Invalid(format!(
            "option 'token_type_ids' has {} types, and the prompt has {num_tokens} tokens; give one for each",
            types.num_tokens
        ))),
        types => Ok(types
            .map(|types| types.num_first)
            .filter(|first| *first < num_tokens)),
    }
}

fn takes_no_images(place: &str) -> Error {
    Error::invalid(format!(
        "{place}: the model takes no images; leave it out, or ask a model with a vision tower (docs/src/images.md)"
    ))
}

fn render(parts: &TextParts, conversation: &Conversation) -> Result<String, RequestError> {
    let Some(templates) = &parts.templates else {
        return Err(RequestError::Invalid(
            "option 'messages': the checkpoint has no chat template; write the prompt to text_input"
                .to_owned(),
        ));
    };
    templates.render(conversation)
}
