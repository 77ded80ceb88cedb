//! Jinja2 as chat templates use it, with Python's values: the text is the one that Hugging Face transformers renders.
//!
//! This is the part of Jinja2 3.1 that a chat template can use in the environment that transformers sets up: the
//! sandbox in which values do not change, blocks that take their line end, `break` and `continue`, and the tag
//! `generation`. What is not supported is an error that names it, never another text.
//!
//! A rendering is bounded in work, memory, output and recursion, whatever the template and the variables are:
//! everything that makes a value takes its size from a budget first.

#![forbid(unsafe_code)]

mod arguments;
mod ast;
mod attributes;
mod basics;
mod budget;
mod error;
mod expressions;
mod filters;
mod format;
mod interpreter;
mod iterator;
mod json;
mod lexer;
mod literals;
mod loops;
mod methods;
mod names;
mod object;
mod operators;
mod parser;
mod path;
mod predicates;
mod repr;
mod scope;
mod signatures;
mod unicode;
mod value;

pub use budget::Limits;
pub use error::{Bound, CompileError, RenderError};
pub use interpreter::Clock;

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    program: ast::Program,
}

impl Template {
    /// Compiles a template.
    ///
    /// # Errors
    /// The template has a mistake, or uses what is not supported.
    pub fn compile(source: &str) -> Result<Self, CompileError> {
        let program = parser::parse(source)?;
        Ok(Self { program })
    }

    /// Renders the template with variables, of which a later one replaces an earlier one of its name. `clock` formats
    /// the time of now for `strftime_now`.
    ///
    /// # Errors
    /// The template calls `raise_exception`, does something that fails or is not supported, or exceeds a limit.
    pub fn render<'a>(
        &self,
        variables: impl IntoIterator<Item = (&'a str, &'a serde_json::Value)>,
        limits: &Limits,
        clock: &Clock<'_>,
    ) -> Result<String, RenderError> {
        interpreter::render(&self.program, variables.into_iter(), limits, clock)
    }
}
