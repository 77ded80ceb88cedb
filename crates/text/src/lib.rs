//! L2: prompts to tokens, and output tokens to text.
//!
//! ```text
//! Conversation --ChatTemplates--> text --Tokenizer--> prompt tokens
//! output tokens --Detokenizer--> complete characters --StopWords--> text ready to send --ReplyReader--> its parts
//! ```
//!
//! [`Tokenizer`] and [`ChatTemplates`] come from the files of a Hugging Face folder, or from a [`GgufVocabulary`]. They
//! belong to a model and are shared; [`Detokenizer`] and
//! [`StopWords`] belong to one sequence. This room does not know requests, steps or Triton.

#![forbid(unsafe_code)]

#[cfg(test)]
extern crate self as inflight_text;

mod bounded_normalizer;
mod byte_alphabet;
mod chat_template_files;
mod chat_templates;
mod conversation;
mod coverage;
mod declared_tokens;
mod detokenizer;
mod encoder;
mod gguf_vocabulary;
mod growth;
mod guarded;
mod judge_prompt;
mod reply;
mod stop_words;
mod strftime;
mod token_cover;
mod tokenizer;
#[cfg(test)]
#[path = "../../../tests/support/toy_tokenizers.rs"]
mod toys;
mod vocabulary;
mod word_splits;

pub use chat_templates::ChatTemplates;
pub use conversation::{Conversation, MessageField, PromptEnding};
pub use detokenizer::Detokenizer;
pub use encoder::LengthLimit;
pub use gguf_vocabulary::GgufVocabulary;
pub use reply::{
    ParameterTypes, ReplyFormat, ReplyParts, ReplyReader, ReplyStart, Thinking, ToolCall,
    can_be_read_back, is_text_schema,
};
pub use stop_words::StopWords;
pub use tokenizer::{EncodedTexts, Tokenizer};
pub use vocabulary::TokenText;
