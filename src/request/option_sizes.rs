//! Size limits of a request's options, checked before a value is copied or parsed. They apply to parameters and to
//! tensors alike.

use crate::request::options;
use inflight_triton::Error;

/// Parameters and option tensors of one request: every option and every field of other clients, with room to
/// spare.
const MAX_OPTIONS: usize = 256;

/// What one number in JSON, and the comma after it, takes at most.
const MAX_NUMBER_BYTES: usize = 26;

/// Bytes of a conversation, of a guide, of a list of as many token ids as an option takes.
const MAX_DOCUMENT_BYTES: usize = 1 << 20;

/// Bytes of an option that is a single value or a short list.
const MAX_VALUE_BYTES: usize = 4 << 10;

/// The options of one request, counted as they are read.
pub struct OptionSizes {
    vocab_size: usize,
    /// Bytes of images as base64.
    image_bytes: usize,
    num_options: usize,
    num_bytes: usize,
}

impl OptionSizes {
    /// Nothing counted, for a model whose token ids are below `vocab_size`, and whose requests may have
    /// `max_image_bytes` of images.
    pub fn new(vocab_size: u32, max_image_bytes: usize) -> Self {
        Self {
            vocab_size: vocab_size as usize,
            image_bytes: max_image_bytes.saturating_add(max_image_bytes / 2),
            num_options: 0,
            num_bytes: 0,
        }
    }

    /// Bytes that the value of an option may have, as a tensor or as a text. More than its list of the most and
    /// longest elements takes, so that one which is only a little too long is refused by what it holds.
    pub fn max_bytes(&self, name: &str) -> usize {
        match options::canonical_name(name) {
            Some("sampling_parameters" | "embedding_bias") => self.max_total(),
            Some("messages" | "images") => MAX_DOCUMENT_BYTES.saturating_add(self.image_bytes),
            Some(
                "tools"
                | "documents"
                | "text_pair"
                | "chat_template_kwargs"
                | "guided_decoding_guide"
                | "structured_outputs"
                | "guided_json"
                | "guided_regex"
                | "guided_choice"
                | "guided_grammar"
                | "structural_tag"
                | "allowed_token_ids"
                | "draft_input_ids"
                | "draft_text"
                | "prompt_token_ids"
                | "token_type_ids",
            ) => MAX_DOCUMENT_BYTES,
            // 64 words of 256 ids, each with its place among the ends.
            Some("stop_words_list" | "bad_words_list") => 512 << 10,
            // 64 words of 256 bytes, each byte escaped; 64 KiB of arguments; 1024 biases.
            Some(
                "stop"
                | "bad_words"
                | "embedding_bias_words"
                | "logits_post_processor_args"
                | "logit_bias",
            ) => 128 << 10,
            _ => MAX_VALUE_BYTES,
        }
    }

    /// Counts an option whose value has `num_bytes`.
    ///
    /// # Errors
    /// There are too many, or they are too large together.
    pub fn add(&mut self, num_bytes: usize) -> Result<(), Error> {
        self.num_options += 1;
        self.num_bytes += num_bytes;
        if self.num_options > MAX_OPTIONS {
            return Err(Error::invalid(format!(
                "the request has more than {MAX_OPTIONS} parameters and inputs"
            )));
        }
        let max = (2 * self.max_total()).saturating_add(self.image_bytes);
        if self.num_bytes > max {
            return Err(Error::invalid(format!(
                "the options of the request have more than {max} bytes together"
            )));
        }
        Ok(())
    }

    /// Total bytes of the counted options.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The error for an option that is too large. `size` is a text, because the length of a string that is too long is
    /// not known.
    pub fn refusal(&self, name: &str, size: &str) -> Error {
        Error::invalid(format!(
            "option '{name}' has {size} bytes, and may have at most {}; shorten it",
            self.max_bytes(name)
        ))
    }

    /// Bytes of all options in one, and of the longest: a number for each token of the vocabulary.
    fn max_total(&self) -> usize {
        MAX_DOCUMENT_BYTES.max(self.vocab_size.saturating_mul(MAX_NUMBER_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_an_option_has_its_limit() {
        let sizes = OptionSizes::new(1000, 0);
        for (name, expected) in [
            ("messages", 1 << 20),
            ("guided_decoding", 1 << 20),
            ("stop", 128 << 10),
            ("stop_words", 128 << 10),
            ("sampling_param_stop", 128 << 10),
            ("temperature", 4 << 10),
            ("no_option", 4 << 10),
            ("embedding_bias", 1 << 20),
        ] {
            assert_eq!(sizes.max_bytes(name), expected, "{name}");
        }
        let large = OptionSizes::new(150_000, 0);
        assert_eq!(large.max_bytes("embedding_bias"), 3_900_000);
        assert_eq!(large.max_bytes("messages"), 1 << 20);
    }

    #[test]
    fn many_options_are_refused_and_so_are_large_ones_together() {
        let mut many = OptionSizes::new(1000, 0);
        for _ in 0..MAX_OPTIONS {
            many.add(1).expect("few enough");
        }
        let error = many.add(1).expect_err("one more");
        assert!(error.message().contains("256 parameters"), "{error}");

        let mut large = OptionSizes::new(1000, 0);
        large.add(1 << 20).expect("one");
        large.add(1 << 20).expect("two");
        let error = large.add(1).expect_err("and a byte");
        assert!(error.message().contains("2097152 bytes"), "{error}");
    }
}
