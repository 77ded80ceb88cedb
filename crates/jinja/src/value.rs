//! Python's values, as far as a template has them. Lists and dictionaries never change: the sandbox refuses it.
//!
//! Values hold iterators and functions, which hold values: so their types are in one file. What they do is in others.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use indexmap::IndexMap;
use rustc_hash::FxHashMap;

use crate::ast;

/// A value of a template.
#[derive(Clone)]
pub(crate) enum Value {
    Undefined(Rc<Undefined>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    List(Rc<Sequence>),
    Tuple(Rc<Sequence>),
    Dict(Rc<Dict>),
    View(View, Rc<Dict>),
    Range(Rc<Range>),
    Iterator(Rc<RefCell<Iter>>),
    Object(Rc<Object>),
}

/// An undefined value, with the message of the error that its use raises.
#[derive(Debug)]
pub(crate) struct Undefined {
    pub(crate) message: String,
}

/// A text. Markup is a text that HTML's escaping leaves alone.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) text: Arc<str>,
    pub(crate) is_ascii: bool,
    pub(crate) is_markup: bool,
}

/// The items of a list or tuple.
pub(crate) struct Sequence {
    pub(crate) items: Vec<Value>,
    pub(crate) levels: u32,
    /// Whether this is a pair that the filter `groupby` gives, whose parts have names.
    pub(crate) is_group: bool,
}

/// A dictionary: its items in order, under keys by which equal ones are found.
/// Clients choose keys, so that the hash must be one that nobody can foresee.
pub(crate) struct Dict {
    pub(crate) items: Items,
    pub(crate) levels: u32,
}

pub(crate) type Items = IndexMap<Key, (Value, Value)>;

/// The part of a dictionary that a view shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

/// Numbers from `start` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) start: i128,
    pub(crate) stop: i128,
    pub(crate) step: i128,
    pub(crate) length: usize,
}

/// A value as a key: equal values have equal keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Undefined,
    None,
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
    Object(usize),
}

/// A value with behaviour.
pub(crate) enum Object {
    Namespace(RefCell<Items>),
    Macro(Rc<Macro>),
    Loop(RefCell<Box<Loop>>),
    Cycler {
        items: Rc<Sequence>,
        at: Cell<usize>,
    },
    Joiner {
        separator: Value,
        is_used: Cell<bool>,
    },
    Function(Function),
    Method {
        of: Value,
        name: Arc<str>,
    },
    /// The variable `self`, whose attributes are the blocks.
    Blocks,
    Block(Arc<str>),
}

/// A macro, or the body of a `call` block, with the scope in which it is defined.
pub(crate) struct Macro {
    pub(crate) definition: Arc<ast::Macro>,
    pub(crate) scope: Rc<Scope>,
}

/// A function that every template has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
    RaiseException,
    StrftimeNow,
}

/// An iterator, with its remaining items.
pub(crate) enum Iter {
    Empty,
    Items(Rc<Sequence>, usize),
    Values(std::vec::IntoIter<Value>),
    Chars(Text, usize),
    Range(Rc<Range>, usize),
    Dict(View, Rc<Dict>, usize),
    Shared(Rc<RefCell<Iter>>),
    /// The items of a `for` loop with a condition.
    Filtered {
        source: Box<Iter>,
        parsed: Arc<ast::For>,
        scope: Rc<Scope>,
    },
    Map {
        source: Box<Iter>,
        mapping: Mapping,
    },
    Select {
        source: Box<Iter>,
        path: Option<Path>,
        test: Option<(Text, Arguments)>,
        expected: bool,
    },
    Unique {
        source: Box<Iter>,
        path: Path,
        seen: HashSet<Key>,
    },
    Batch {
        source: Box<Iter>,
        size: i128,
        fill: Value,
    },
}

/// The operation of the filter `map`.
pub(crate) enum Mapping {
    Attribute { path: Path, default: Option<Value> },
    Filter(Text, Arguments),
}

/// The state of a loop.
pub(crate) struct Loop {
    pub(crate) iter: Iter,
    pub(crate) length: Option<usize>,
    /// The next item, if it was looked at; within, none at the end.
    pub(crate) after: Option<Option<Value>>,
    pub(crate) current: Option<Value>,
    pub(crate) before: Option<Value>,
    /// Items given so far.
    pub(crate) index: usize,
    pub(crate) changed: Option<Vec<Value>>,
    pub(crate) depth0: usize,
    /// The body and the scope of a recursive loop.
    pub(crate) recursion: Option<(Arc<ast::For>, Rc<Scope>)>,
}

/// Variables, and the scope around.
#[derive(Default)]
pub(crate) struct Scope {
    pub(crate) variables: RefCell<FxHashMap<Arc<str>, Value>>,
    pub(crate) parent: RefCell<Option<Rc<Scope>>>,
}

/// Steps from a value to one within it.
pub(crate) struct Path {
    pub(crate) parts: Vec<Value>,
    /// Whether capitals count as small letters.
    pub(crate) ignores_case: bool,
}

/// Arguments of a call, evaluated.
#[derive(Clone, Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Value>,
    pub(crate) keywords: Vec<(Arc<str>, Value)>,
}
