//! L4: text in, tokens; tokens, text out.
//!
//! ```text
//! messages --ChatTemplate--> text --Tokenizer--> prompt tokens
//! output tokens --Detokenizer--> whole characters --StopWords--> text that may be sent
//! ```
//!
//! [`Tokenizer`] and [`ChatTemplate`] belong to a model and are shared; [`Detokenizer`] and
//! [`StopWords`] belong to one sequence. Nothing here knows of requests, steps or Triton.

mod chat_template;
mod coverage;
mod detokenizer;
mod python_json;
mod stop_words;
mod tokenizer;
#[cfg(test)]
pub(crate) mod toys;
mod vocabulary;

pub use chat_template::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use stop_words::StopWords;
pub use tokenizer::Tokenizer;
pub use vocabulary::TokenText;
