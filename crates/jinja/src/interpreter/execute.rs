//! Runs statements.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::Interpreter;
use crate::ast::{Expr, FilterStep, For, Statement, StatementKind, Target};
use crate::error::{Bound, Outcome, fail, out_of};
use crate::repr::push_str;
use crate::value::{Arguments, Iter, Key, Loop, Macro, Object, Scope, Text, Value};

/// Where to go on after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl Interpreter<'_> {
    pub(super) fn statements(
        &mut self,
        statements: &[Statement],
        scope: &Rc<Scope>,
    ) -> Outcome<Flow> {
        self.budget.enter()?;
        for statement in statements {
            self.budget.work(1)?;
            self.line = statement.line;
            let flow = self.statement(statement, scope)?;
            if flow != Flow::Next {
                self.budget.leave();
                return Ok(flow);
            }
        }
        self.budget.leave();
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Statement, scope: &Rc<Scope>) -> Outcome<Flow> {
        match &statement.kind {
            StatementKind::Text(text) => self.write(text)?,
            StatementKind::Print(values) => self.print(values, scope)?,
            StatementKind::Set { target, value } => {
                self.check_namespaces(target, scope)?;
                let value = self.evaluate(value, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::SetBlock {
                target,
                filters,
                body,
            } => {
                return self.set_block(target, filters, body, scope);
            }
            StatementKind::For(parsed) => return self.for_loop(parsed, scope),
            StatementKind::If {
                branches,
                otherwise,
            } => {
                for (test, body) in branches {
                    if self.evaluate(test, scope)?.is_true() {
                        return self.statements(body, scope);
                    }
                }
                return self.statements(otherwise, scope);
            }
            StatementKind::With {
                targets,
                values,
                body,
            } => {
                let inner = Scope::within(scope);
                for (target, value) in targets.iter().zip(values) {
                    let value = self.evaluate(value, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.statements(body, &inner);
            }
            StatementKind::Filter { filters, body } => {
                return self.filter_block(filters, body, scope);
            }
            StatementKind::Macro(definition) => {
                self.hold_scope(scope)?;
                let value = Value::object(Object::Macro(Rc::new(Macro {
                    definition: definition.clone(),
                    scope: scope.clone(),
                })));
                if let Some(name) = &definition.name {
                    scope.set(name, value);
                }
            }
            StatementKind::Call { body, call } => {
                self.hold_scope(scope)?;
                let caller = Value::object(Object::Macro(Rc::new(Macro {
                    definition: body.clone(),
                    scope: scope.clone(),
                })));
                let value = self.call_with_caller(call, caller, scope)?;
                self.write_value(&value)?;
            }
            StatementKind::Generation(body) | StatementKind::Scope(body) => {
                return self.statements(body, &Scope::within(scope));
            }
            StatementKind::Block {
                name,
                is_scoped,
                is_required,
            } => {
                if *is_required {
                    return fail(format!(
                        "the required block '{name}' is not defined by another template"
                    ));
                }
                let outer = if *is_scoped {
                    scope.clone()
                } else {
                    self.root.clone()
                };
                self.block(name, &outer)?;
            }
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn print(&mut self, values: &[Expr], scope: &Rc<Scope>) -> Outcome<()> {
        for value in values {
            let value = self.evaluate(value, scope)?;
            self.write_value(&value)?;
        }
        Ok(())
    }

    /// Adds a text to the output.
    pub(super) fn write(&mut self, text: &str) -> Outcome<()> {
        if text.len() > self.max_output.saturating_sub(self.out.len()) {
            return out_of(Bound::Output);
        }
        self.budget.make(text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    fn write_value(&mut self, value: &Value) -> Outcome<()> {
        if let Value::Str(text) = value {
            return self.write(text);
        }
        push_str(&mut self.out, value, &mut self.budget)?;
        if self.out.len() > self.max_output {
            return out_of(Bound::Output);
        }
        Ok(())
    }

    /// Runs what writes text, and gives the text.
    pub(super) fn captured<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Outcome<T>,
    ) -> Outcome<(Text, T)> {
        let outer = std::mem::take(&mut self.out);
        let result = run(self)?;
        let text = std::mem::replace(&mut self.out, outer);
        self.budget.make(text.len())?;
        Ok((Text::new(text), result))
    }

    /// Whether the template has a block of this name.
    pub(crate) fn has_block(&self, name: &str) -> bool {
        self.program
            .blocks
            .iter()
            .any(|(other, _)| &**other == name)
    }

    /// Runs a block within a scope.
    pub(super) fn block(&mut self, name: &Arc<str>, scope: &Rc<Scope>) -> Outcome<()> {
        let program = self.program;
        let Some((_, body)) = program.blocks.iter().find(|(other, _)| other == name) else {
            return fail(format!("there is no block '{name}'"));
        };
        let inner = Scope::within(scope);
        let is_super = Value::undefined(format!("there is no parent block called '{name}'."));
        inner.set(&Arc::from("super"), is_super);
        self.statements(body, &inner).map(drop)
    }

    /// Fails where an attribute of another value than a namespace is assigned.
    fn check_namespaces(&mut self, target: &Target, scope: &Rc<Scope>) -> Outcome<()> {
        match target {
            Target::Name(_) => Ok(()),
            Target::Attribute(name, _) => self.namespace(name, scope).map(drop),
            Target::Tuple(targets) => targets
                .iter()
                .try_for_each(|target| self.check_namespaces(target, scope)),
        }
    }

    fn namespace(&mut self, name: &Arc<str>, scope: &Rc<Scope>) -> Outcome<Rc<Object>> {
        match self.variable(name, scope)? {
            Value::Object(object) if matches!(*object, Object::Namespace(_)) => Ok(object),
            _ => fail(format!(
                "cannot assign an attribute of '{name}', which is not a namespace"
            )),
        }
    }

    fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Outcome<()> {
        match target {
            Target::Name(name) => {
                self.budget.make(64)?;
                scope.set(name, value);
                Ok(())
            }
            Target::Attribute(name, attribute) => {
                let object = self.namespace(name, scope)?;
                if attribute.starts_with('_') {
                    return fail(format!(
                        "'{attribute}': a namespace takes no names with '_' at the start"
                    ));
                }
                self.budget.make(160)?;
                if let Object::Namespace(attributes) = &*object {
                    let key = Key::Str(attribute.clone());
                    let entry = (Value::str(attribute.clone()), value);
                    attributes.borrow_mut().insert(key, entry);
                }
                Ok(())
            }
            Target::Tuple(targets) => {
                let mut iter = Iter::of(&value)?;
                let mut values = Vec::with_capacity(targets.len());
                while let Some(item) = iter.next(self)? {
                    values.push(item);
                    if values.len() > targets.len() {
                        break;
                    }
                }
                if values.len() != targets.len() {
                    let wrong = if values.len() > targets.len() {
                        "too many"
                    } else {
                        "not enough"
                    };
                    return fail(format!(
                        "{wrong} values to unpack (expected {})",
                        targets.len()
                    ));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value, scope)?;
                }
                Ok(())
            }
        }
    }

    fn set_block(
        &mut self,
        target: &Target,
        filters: &[FilterStep],
        body: &[Statement],
        scope: &Rc<Scope>,
    ) -> Outcome<Flow> {
        let value = match self.filtered_body(filters, body, scope)? {
            Ok(value) => value,
            Err(flow) => return Ok(flow),
        };
        self.check_namespaces(target, scope)?;
        self.assign(target, value, scope)?;
        Ok(Flow::Next)
    }

    fn filter_block(
        &mut self,
        filters: &[FilterStep],
        body: &[Statement],
        scope: &Rc<Scope>,
    ) -> Outcome<Flow> {
        match self.filtered_body(filters, body, scope)? {
            Ok(value) => self.write_value(&value).map(|()| Flow::Next),
            Err(flow) => Ok(flow),
        }
    }

    /// Runs a block in a scope of its own and filters its text, unless `break` or `continue` leaves the block.
    fn filtered_body(
        &mut self,
        filters: &[FilterStep],
        body: &[Statement],
        scope: &Rc<Scope>,
    ) -> Outcome<Result<Value, Flow>> {
        let inner = Scope::within(scope);
        let (text, flow) = self.captured(|interpreter| interpreter.statements(body, &inner))?;
        if flow != Flow::Next {
            return Ok(Err(flow));
        }
        let mut value = Value::Str(text);
        for step in filters {
            let arguments = self.arguments(&step.arguments, &inner)?;
            value = self.filter(&step.name, value, arguments)?;
        }
        Ok(Ok(value))
    }

    fn for_loop(&mut self, parsed: &Arc<For>, scope: &Rc<Scope>) -> Outcome<Flow> {
        let iterable = self.evaluate(&parsed.iterable, scope)?;
        if !parsed.is_recursive {
            return self.loop_over(parsed, &iterable, scope, 0);
        }
        let run = |interpreter: &mut Self| interpreter.loop_over(parsed, &iterable, scope, 0);
        let (text, _) = self.captured(run)?;
        self.write(&text)?;
        Ok(Flow::Next)
    }

    /// Runs a loop over a value, `depth` calls of itself deep.
    pub(super) fn loop_over(
        &mut self,
        parsed: &Arc<For>,
        iterable: &Value,
        scope: &Rc<Scope>,
        depth: usize,
    ) -> Outcome<Flow> {
        let mut iter = Iter::of(iterable)?;
        let mut length = self.length_of(iterable);
        if parsed.condition.is_some() {
            length = None;
            iter = Iter::Filtered {
                source: Box::new(iter),
                parsed: parsed.clone(),
                scope: scope.clone(),
            };
        }
        let recursion = parsed.is_recursive.then(|| (parsed.clone(), scope.clone()));
        let object = self.hold_object(Object::Loop(RefCell::new(Box::new(Loop {
            iter,
            length,
            after: None,
            current: None,
            before: None,
            index: 0,
            changed: None,
            depth0: depth,
            recursion,
        }))))?;
        let Object::Loop(state) = &*object else {
            return Ok(Flow::Next);
        };
        let loop_name: Arc<str> = Arc::from("loop");
        // Jinja2's rule for `else`: no turn came to its end. One that `continue` ends does not count.
        let mut is_unfinished = true;
        loop {
            let item = state.borrow_mut().advance(self)?;
            let Some(item) = item else {
                break;
            };
            self.budget.make(128)?;
            let inner = Scope::within(scope);
            inner.set(&loop_name, Value::Object(object.clone()));
            self.assign(&parsed.target, item, &inner)?;
            match self.statements(&parsed.body, &inner)? {
                Flow::Next => is_unfinished = false,
                Flow::Break => break,
                Flow::Continue => {}
            }
        }
        if is_unfinished && !parsed.otherwise.is_empty() {
            return self.statements(&parsed.otherwise, &Scope::within(scope));
        }
        Ok(Flow::Next)
    }

    /// Whether a loop's condition holds for an item.
    pub(crate) fn passes(
        &mut self,
        parsed: &For,
        scope: &Rc<Scope>,
        item: &Value,
    ) -> Outcome<bool> {
        let Some(condition) = &parsed.condition else {
            return Ok(true);
        };
        let inner = Scope::within(scope);
        self.assign(&parsed.target, item.clone(), &inner)?;
        Ok(self.evaluate(condition, &inner)?.is_true())
    }

    /// The number of items where it is known without computing them.
    pub(crate) fn length_of(&self, value: &Value) -> Option<usize> {
        match value {
            Value::Undefined(_) => Some(0),
            Value::Str(text) => Some(text.length()),
            Value::List(items) | Value::Tuple(items) => Some(items.items.len()),
            Value::Dict(dict) | Value::View(_, dict) => Some(dict.items.len()),
            Value::Range(range) => Some(range.length),
            _ => None,
        }
    }

    /// Calls a loop, which runs it over another value.
    pub(super) fn call_loop(&mut self, object: &Object, arguments: Arguments) -> Outcome<Value> {
        let Object::Loop(state) = object else {
            return fail("not a loop");
        };
        let [iterable] = arguments.bind("loop()", ["iterable"])?;
        let iterable = crate::arguments::required(iterable, "loop()")?;
        let found = state
            .try_borrow()
            .ok()
            .map(|state| (state.recursion.clone(), state.depth0));
        let Some((Some((parsed, scope)), depth)) = found else {
            return fail("the loop is called without the marker 'recursive'");
        };
        let run =
            |interpreter: &mut Self| interpreter.loop_over(&parsed, &iterable, &scope, depth + 1);
        let (text, _) = self.captured(run)?;
        Ok(Value::Str(text))
    }
}
