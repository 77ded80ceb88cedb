//! The syntax tree of a template.

use std::sync::Arc;

/// A compiled template.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) body: Vec<Statement>,
    /// Blocks by their names.
    pub(crate) blocks: Vec<(Arc<str>, Arc<Vec<Statement>>)>,
}

#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) line: usize,
    pub(crate) kind: StatementKind,
}

#[derive(Debug)]
pub(crate) enum StatementKind {
    Text(Arc<str>),
    Print(Vec<Expr>),
    Set {
        target: Target,
        value: Expr,
    },
    SetBlock {
        target: Target,
        filters: Vec<FilterStep>,
        body: Vec<Statement>,
    },
    For(Arc<For>),
    If {
        branches: Vec<(Expr, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    With {
        targets: Vec<Target>,
        values: Vec<Expr>,
        body: Vec<Statement>,
    },
    Filter {
        filters: Vec<FilterStep>,
        body: Vec<Statement>,
    },
    Macro(Arc<Macro>),
    Call {
        body: Arc<Macro>,
        call: Expr,
    },
    /// transformers' tag for the assistant's part: a scope of its own.
    Generation(Vec<Statement>),
    /// `autoescape false`.
    Scope(Vec<Statement>),
    Block {
        name: Arc<str>,
        is_scoped: bool,
        is_required: bool,
    },
    Break,
    Continue,
}

/// Where an assignment goes.
#[derive(Debug)]
pub(crate) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) iterable: Expr,
    pub(crate) condition: Option<Expr>,
    pub(crate) is_recursive: bool,
    pub(crate) body: Vec<Statement>,
    pub(crate) otherwise: Vec<Statement>,
}

/// A macro, or the body of a `call` block.
#[derive(Debug)]
pub(crate) struct Macro {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) parameters: Vec<Arc<str>>,
    /// The defaults of the last parameters.
    pub(crate) defaults: Vec<Expr>,
    pub(crate) body: Vec<Statement>,
    pub(crate) takes_caller: bool,
    pub(crate) takes_kwargs: bool,
    pub(crate) takes_varargs: bool,
}

/// A filter with its arguments.
#[derive(Debug)]
pub(crate) struct FilterStep {
    pub(crate) name: Arc<str>,
    pub(crate) arguments: CallArguments,
}

#[derive(Debug, Default)]
pub(crate) struct CallArguments {
    pub(crate) positional: Vec<Expr>,
    pub(crate) keywords: Vec<(Arc<str>, Expr)>,
    pub(crate) star: Option<Expr>,
    pub(crate) double_star: Option<Expr>,
}

#[derive(Debug)]
pub(crate) struct Expr {
    pub(crate) kind: Box<ExprKind>,
    pub(crate) line: usize,
    /// Levels of expressions from here down.
    pub(crate) depth: u32,
}

#[derive(Debug)]
pub(crate) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Expr, Arc<str>),
    Item(Expr, Expr),
    Slice {
        of: Expr,
        start: Option<Expr>,
        stop: Option<Expr>,
        step: Option<Expr>,
    },
    Call(Expr, CallArguments),
    Filter(Expr, FilterStep),
    Test {
        value: Expr,
        name: Arc<str>,
        arguments: CallArguments,
    },
    Condition {
        test: Expr,
        then: Expr,
        otherwise: Option<Expr>,
    },
    Compare(Expr, Vec<(Comparison, Expr)>),
    And(Expr, Expr),
    Or(Expr, Expr),
    Not(Expr),
    Negative(Expr),
    Positive(Expr),
    Binary(Operator, Expr, Expr),
    Concat(Vec<Expr>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

impl CallArguments {
    /// All expressions, in the order in which they are written.
    pub(crate) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let keywords = self.keywords.iter().map(|(_, value)| value);
        let stars = self.star.iter().chain(&self.double_star);
        self.positional.iter().chain(keywords).chain(stars)
    }
}

impl ExprKind {
    /// Calls `visit` with each expression directly below this one, in the order in which they are written.
    pub(crate) fn visit_children<'e>(&'e self, visit: &mut dyn FnMut(&'e Expr)) {
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) => {}
            Self::Str(_) | Self::Name(_) => {}
            Self::Tuple(items) | Self::List(items) | Self::Concat(items) => {
                items.iter().for_each(visit);
            }
            Self::Dict(items) => {
                for (key, value) in items {
                    visit(key);
                    visit(value);
                }
            }
            Self::Attribute(of, _) | Self::Not(of) | Self::Negative(of) | Self::Positive(of) => {
                visit(of);
            }
            Self::Item(left, right)
            | Self::And(left, right)
            | Self::Or(left, right)
            | Self::Binary(_, left, right) => {
                visit(left);
                visit(right);
            }
            Self::Slice {
                of,
                start,
                stop,
                step,
            } => {
                visit(of);
                start.iter().chain(stop).chain(step).for_each(visit);
            }
            Self::Call(of, arguments)
            | Self::Filter(of, FilterStep { arguments, .. })
            | Self::Test {
                value: of,
                arguments,
                ..
            } => {
                visit(of);
                arguments.expressions().for_each(visit);
            }
            Self::Condition {
                test,
                then,
                otherwise,
            } => {
                visit(test);
                visit(then);
                otherwise.iter().for_each(visit);
            }
            Self::Compare(first, rest) => {
                visit(first);
                rest.iter().for_each(|(_, value)| visit(value));
            }
        }
    }
}
