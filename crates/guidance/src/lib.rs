//! L3: guided decoding: restricts the output to a grammar.
//!
//! ```text
//! GuideSpec --Compiler--> GrammarGuide --restrict--> logits with the disallowed tokens masked
//! spec.rs        a request's guide, and its limits
//! ebnf/          EBNF grammars, converted to Lark's syntax, and what makes them ambiguous
//! structure.rs   structural tags, and structure_grammar.rs their grammars
//! regex.rs       checks and escapes regular expressions
//! json/          JSON schemas as grammars
//! grammar_error.rs  why a grammar cannot be used
//! vocabulary.rs  the model's tokens as a trie of bytes
//! compiler.rs    the compiling thread, and a cache of compiled grammars
//! guide.rs       one sequence's guide: a parser, and the tokens that it has consumed
//! masks.rs       the tokens that may come next
//! work.rs        what an output costs, with its limits, and memory.rs what all outputs have in memory
//! ```
//!
//! The parser is the crate `llguidance` (Earley over a lexer of regular-expression derivatives). This
//! room builds its input, bounds it, and gives every sequence a parser of its own: the tokens that a guide allows
//! depend only on its grammar and the tokens so far, and not on the rest of the batch.

#![forbid(unsafe_code)]

mod compiler;
mod ebnf;
mod grammar_error;
mod guide;
mod json;
mod limits;
mod masks;
mod memory;
mod regex;
mod spec;
mod structure;
mod structure_grammar;
mod vocabulary;
mod work;

pub use compiler::{Compilation, Compiler};
pub use ebnf::to_lark as ebnf_to_lark;
pub use guide::GrammarGuide;
pub use limits::{MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES};
pub use memory::MAX_GUIDE_BYTES;
pub use spec::GuideSpec;
pub use structure::{Arguments, Structure, Tag};
pub use work::MAX_LOOKUPS;
