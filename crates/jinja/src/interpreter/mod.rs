//! Renders a syntax tree.

mod calls;
mod evaluate;
mod execute;
mod globals;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::ast::Program;
use crate::budget::{Budget, Limits};
use crate::error::{Bound, Failure, Outcome, RenderError, out_of};
use crate::value::{Function, Iter, Object, Scope, Value};

/// Formats the time of now by a format of `strftime`, or says why it cannot.
pub type Clock<'c> = dyn Fn(&str) -> Result<String, String> + 'c;

/// A rendering under way.
pub(crate) struct Interpreter<'t> {
    program: &'t Program,
    pub(crate) budget: Budget,
    clock: &'t Clock<'t>,
    /// The template's own variables.
    root: Rc<Scope>,
    /// The caller's variables, and functions that every template has.
    globals: HashMap<Arc<str>, Value>,
    /// The text since the innermost part whose text is a value.
    out: String,
    max_output: usize,
    /// The line under evaluation.
    line: usize,
    /// Objects that may be part of a reference cycle, to be emptied at the end.
    held: Vec<Held>,
}

/// An object that may be part of a reference cycle or of a long chain.
enum Held {
    Scope(Rc<Scope>),
    Object(Rc<Object>),
    Iterator(Rc<RefCell<Iter>>),
}

/// Renders a program with variables.
pub(crate) fn render<'a>(
    program: &Program,
    variables: impl Iterator<Item = (&'a str, &'a serde_json::Value)>,
    limits: &Limits,
    clock: &Clock<'_>,
) -> Result<String, RenderError> {
    let mut interpreter = Interpreter {
        program,
        budget: Budget::new(limits),
        clock,
        root: Rc::default(),
        globals: HashMap::default(),
        out: String::new(),
        max_output: limits.max_output_bytes,
        line: 1,
        held: Vec::new(),
    };
    let root = interpreter.root.clone();
    interpreter.held.push(Held::Scope(root));
    let result = interpreter.run(variables);
    result.map_err(|failure| match *failure {
        Failure::Raised(message) => RenderError::Raised(message),
        Failure::OutOfBudget(bound) => RenderError::OutOfBudget(bound),
        Failure::Failed(problem) => RenderError::Failed {
            line: interpreter.line,
            problem,
        },
    })
}

impl Interpreter<'_> {
    fn run<'a>(
        &mut self,
        variables: impl Iterator<Item = (&'a str, &'a serde_json::Value)>,
    ) -> Outcome<String> {
        for (name, function) in Function::ALL {
            self.globals
                .insert(name.into(), Value::object(Object::Function(function)));
        }
        for (name, value) in variables {
            let value = Value::from_json(value)?;
            self.globals.insert(name.into(), value);
        }
        let program = self.program;
        let root = self.root.clone();
        self.statements(&program.body, &root)?;
        if self.out.len() > self.max_output {
            return out_of(Bound::Output);
        }
        Ok(std::mem::take(&mut self.out))
    }

    /// An object that may hold itself.
    pub(crate) fn hold_object(&mut self, object: Object) -> Outcome<Rc<Object>> {
        self.budget.make(256)?;
        let object = Rc::new(object);
        self.held.push(Held::Object(object.clone()));
        Ok(object)
    }

    /// A value that gives the items of an iterator once.
    pub(crate) fn hold_iterator(&mut self, iter: Iter) -> Outcome<Value> {
        self.budget.make(256)?;
        let iter = Rc::new(RefCell::new(iter));
        self.held.push(Held::Iterator(iter.clone()));
        Ok(Value::Iterator(iter))
    }

    /// The scope of a macro, which may hold the macro.
    fn hold_scope(&mut self, scope: &Rc<Scope>) -> Outcome<()> {
        self.budget.make(128)?;
        self.held.push(Held::Scope(scope.clone()));
        Ok(())
    }

    /// All items of an iterator.
    pub(crate) fn drain(&mut self, iter: &mut Iter) -> Outcome<Vec<Value>> {
        let mut items = Vec::new();
        while let Some(item) = iter.next(self)? {
            self.budget.make(size_of::<Value>())?;
            items.push(item);
        }
        Ok(items)
    }

    /// All items of a value, as `list(value)`.
    pub(crate) fn items_of(&mut self, value: &Value) -> Outcome<Vec<Value>> {
        if let Value::List(items) | Value::Tuple(items) = value {
            self.budget
                .make_many(items.items.len(), size_of::<Value>())?;
            return Ok(items.items.clone());
        }
        let mut iter = Iter::of(value)?;
        self.drain(&mut iter)
    }
}

impl Drop for Interpreter<'_> {
    fn drop(&mut self) {
        // One by one: each holds others only through what this list holds too, so that freeing never nests deeply.
        for held in &self.held {
            match held {
                Held::Scope(scope) => scope.clear(),
                Held::Object(object) => match &**object {
                    Object::Namespace(attributes) => drop(attributes.take()),
                    Object::Loop(state) => state.borrow_mut().clear(),
                    _ => {}
                },
                Held::Iterator(iter) => drop(iter.replace(Iter::Empty)),
            }
        }
    }
}
