//! Why a template does not compile or render.

use std::fmt;

/// A template that cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileError {
    /// The line of the template, from 1.
    pub line: usize,
    /// The problem on that line.
    pub problem: String,
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for CompileError {}

/// A rendering that stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenderError {
    /// The template called `raise_exception` with this message.
    Raised(String),
    /// A limit was exceeded.
    OutOfBudget(Bound),
    /// The template does something that fails, or that is not supported.
    Failed {
        /// The line of the template, from 1.
        line: usize,
        /// The problem on that line.
        problem: String,
    },
}

impl fmt::Display for RenderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raised(message) => f.write_str(message),
            Self::OutOfBudget(bound) => write!(f, "{bound}"),
            Self::Failed { line, problem } => write!(f, "line {line}: {problem}"),
        }
    }
}

impl std::error::Error for RenderError {}

/// A limit of a rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Work.
    Steps,
    /// Memory for values.
    Bytes,
    /// The size of the text.
    Output,
    /// Depth of calls, of nested values, or of nested expressions.
    Recursion,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Steps => "it runs for too long",
            Self::Bytes => "it needs too much memory",
            Self::Output => "its text is too long",
            Self::Recursion => "its recursion is too deep",
        })
    }
}

/// Why an evaluation stops; the line is added at the end.
#[derive(Debug)]
pub(crate) enum Failure {
    Raised(String),
    OutOfBudget(Bound),
    Failed(String),
}

pub(crate) type Outcome<T> = Result<T, Box<Failure>>;

/// Fails with a problem.
pub(crate) fn fail<T>(problem: impl Into<String>) -> Outcome<T> {
    Err(Box::new(Failure::Failed(problem.into())))
}

/// Fails by a limit.
pub(crate) fn out_of<T>(bound: Bound) -> Outcome<T> {
    Err(Box::new(Failure::OutOfBudget(bound)))
}
