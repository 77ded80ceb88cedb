//! L5: guided decoding: from a grammar to the tokens that may come next.
//!
//! ```text
//! GuideSpec --Compiler--> GrammarGuide --restrict--> logits with what may not follow forbidden
//! spec.rs        what a request asks for, and its limits
//! ebnf.rs        EBNF grammars, rewritten for the parser
//! regex.rs       texts as regular expressions
//! problem.rs     why a grammar cannot be used
//! vocabulary.rs  the model's tokens, as bytes
//! compiler.rs    a thread of its own, and what it has compiled last
//! guide.rs       one sequence's guide: a parser, and the tokens that it has seen
//! ```
//!
//! The parser is the crate `llguidance` (Earley over a lexer of regular-expression derivatives). This
//! room says what goes in, bounds it, and keeps every sequence's parser to itself: what a guide allows
//! depends on its grammar and on the tokens so far, and on nothing else in the batch.

mod compiler;
mod ebnf;
mod grammar_error;
mod guide;
mod regex;
mod spec;
mod vocabulary;

pub use compiler::{Compilation, Compiler};
pub use guide::GrammarGuide;
pub use spec::{GuideSpec, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES};
