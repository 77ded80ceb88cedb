//! Evaluates expressions.

use std::rc::Rc;
use std::sync::Arc;

use super::Interpreter;
use crate::ast::{CallArguments, Comparison, Expr, ExprKind, Operator};
use crate::error::{Outcome, fail};
use crate::repr::push_str;
use crate::value::{Arguments, Items, Object, Scope, Text, Value};

impl Interpreter<'_> {
    pub(super) fn evaluate(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        self.budget.work(1)?;
        self.budget.enter()?;
        let value = self.evaluate_kind(expr, scope)?;
        self.budget.leave();
        Ok(value)
    }

    fn evaluate_kind(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        match &*expr.kind {
            ExprKind::None => Ok(Value::None),
            ExprKind::Bool(value) => Ok(Value::Bool(*value)),
            ExprKind::Int(number) => Ok(Value::Int(*number)),
            ExprKind::Float(number) => Ok(Value::Float(*number)),
            ExprKind::Str(text) => self.literal(text),
            ExprKind::Name(name) => self.variable(name, scope),
            ExprKind::Tuple(items) => Value::tuple(self.all(items, scope)?),
            ExprKind::List(items) => Value::list(self.all(items, scope)?),
            ExprKind::Dict(items) => self.dict(items, scope),
            ExprKind::Attribute(of, name) => {
                let of = self.evaluate(of, scope)?;
                self.line = expr.line;
                self.attribute(&of, name)
            }
            ExprKind::Item(of, index) => {
                let of = self.evaluate(of, scope)?;
                let index = self.evaluate(index, scope)?;
                self.line = expr.line;
                self.item(&of, &index)
            }
            ExprKind::Slice {
                of,
                start,
                stop,
                step,
            } => {
                let of = self.evaluate(of, scope)?;
                let mut part = |part: &Option<Expr>| match part {
                    Some(part) => self.evaluate(part, scope),
                    None => Ok(Value::None),
                };
                let (start, stop, step) = (part(start)?, part(stop)?, part(step)?);
                self.line = expr.line;
                self.slice(&of, &start, &stop, &step)
            }
            ExprKind::Call(of, arguments) => {
                let of = self.evaluate(of, scope)?;
                let arguments = self.arguments(arguments, scope)?;
                self.line = expr.line;
                self.call(&of, arguments)
            }
            ExprKind::Filter(of, step) => {
                let of = self.evaluate(of, scope)?;
                let arguments = self.arguments(&step.arguments, scope)?;
                self.line = expr.line;
                self.filter(&step.name, of, arguments)
            }
            ExprKind::Test {
                value,
                name,
                arguments,
            } => {
                let value = self.evaluate(value, scope)?;
                let arguments = self.arguments(arguments, scope)?;
                self.line = expr.line;
                self.test(name, value, arguments).map(Value::Bool)
            }
            ExprKind::Condition {
                test,
                then,
                otherwise,
            } => {
                if self.evaluate(test, scope)?.is_true() {
                    return self.evaluate(then, scope);
                }
                match otherwise {
                    Some(otherwise) => self.evaluate(otherwise, scope),
                    None => Ok(Value::undefined(
                        "the inline if-expression evaluated to false and no else section was defined",
                    )),
                }
            }
            ExprKind::Compare(first, rest) => self.comparison(first, rest, scope),
            ExprKind::And(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() {
                    self.evaluate(right, scope)
                } else {
                    Ok(left)
                }
            }
            ExprKind::Or(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() {
                    Ok(left)
                } else {
                    self.evaluate(right, scope)
                }
            }
            ExprKind::Not(value) => Ok(Value::Bool(!self.evaluate(value, scope)?.is_true())),
            ExprKind::Negative(value) => {
                let value = self.evaluate(value, scope)?;
                self.negative(&value)
            }
            ExprKind::Positive(value) => {
                let value = self.evaluate(value, scope)?;
                self.positive(&value)
            }
            ExprKind::Binary(operator, left, right) => {
                let left = self.evaluate(left, scope)?;
                let right = self.evaluate(right, scope)?;
                self.line = expr.line;
                self.binary(*operator, &left, &right)
            }
            ExprKind::Concat(parts) => self.concat(parts, scope),
        }
    }

    fn literal(&mut self, text: &Arc<str>) -> Outcome<Value> {
        self.budget.read(text.len())?;
        Ok(Value::Str(Text::new(text.clone())))
    }

    fn all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Outcome<Vec<Value>> {
        self.budget.make_many(items.len(), size_of::<Value>())?;
        items
            .iter()
            .map(|item| self.evaluate(item, scope))
            .collect()
    }

    fn dict(&mut self, items: &[(Expr, Expr)], scope: &Rc<Scope>) -> Outcome<Value> {
        let mut dict = Items::default();
        for (key, value) in items {
            let key = self.evaluate(key, scope)?;
            let value = self.evaluate(value, scope)?;
            self.insert(&mut dict, key, value)?;
        }
        Value::dict(dict)
    }

    /// Sets an item of a dictionary; an equal key stays.
    pub(crate) fn insert(&mut self, items: &mut Items, key: Value, value: Value) -> Outcome<()> {
        self.budget.make(160)?;
        let found = self.key(&key)?;
        match items.get_mut(&found) {
            Some((_, old)) => *old = value,
            None => drop(items.insert(found, (key, value))),
        }
        Ok(())
    }

    fn concat(&mut self, parts: &[Expr], scope: &Rc<Scope>) -> Outcome<Value> {
        let mut out = String::new();
        for part in parts {
            let value = self.evaluate(part, scope)?;
            push_str(&mut out, &value, &mut self.budget)?;
        }
        Ok(Value::str(out))
    }

    fn comparison(
        &mut self,
        first: &Expr,
        rest: &[(Comparison, Expr)],
        scope: &Rc<Scope>,
    ) -> Outcome<Value> {
        let mut left = self.evaluate(first, scope)?;
        for (comparison, right) in rest {
            let right = self.evaluate(right, scope)?;
            if !self.compare(*comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// The value of a variable.
    pub(super) fn variable(&mut self, name: &Arc<str>, scope: &Rc<Scope>) -> Outcome<Value> {
        let mut scope = Some(scope.clone());
        while let Some(found) = scope {
            self.budget.work(1)?;
            if let Some(value) = found.get(name) {
                return Ok(value);
            }
            scope = found.parent();
        }
        if &**name == "self" {
            return Ok(Value::object(Object::Blocks));
        }
        if let Some(value) = self.globals.get(name) {
            return Ok(value.clone());
        }
        Ok(Value::undefined(format!("'{name}' is undefined")))
    }

    pub(super) fn arguments(
        &mut self,
        arguments: &CallArguments,
        scope: &Rc<Scope>,
    ) -> Outcome<Arguments> {
        let mut found = Arguments {
            positional: self.all(&arguments.positional, scope)?,
            keywords: Vec::with_capacity(arguments.keywords.len()),
        };
        for (name, value) in &arguments.keywords {
            found
                .keywords
                .push((name.clone(), self.evaluate(value, scope)?));
        }
        if let Some(star) = &arguments.star {
            let star = self.evaluate(star, scope)?;
            found.positional.extend(self.items_of(&star)?);
        }
        if let Some(double_star) = &arguments.double_star {
            let Value::Dict(dict) = self.evaluate(double_star, scope)? else {
                return fail("argument after ** must be a mapping");
            };
            for (key, value) in dict.items.values() {
                self.budget.make(64)?;
                let Value::Str(name) = key else {
                    return fail("keywords must be strings");
                };
                if found.keywords.iter().any(|(other, _)| *other == name.text) {
                    return fail(format!("the argument '{}' is given twice", &**name));
                }
                self.budget.work(found.keywords.len())?;
                found.keywords.push((name.text.clone(), value.clone()));
            }
        }
        Ok(found)
    }

    fn binary(&mut self, operator: Operator, left: &Value, right: &Value) -> Outcome<Value> {
        match operator {
            Operator::Add => self.add(left, right),
            Operator::Multiply => self.multiply(left, right),
            Operator::Remainder if matches!(left, Value::Str(_)) => self.percent(left, right),
            _ => self.arithmetic(operator, left, right),
        }
    }
}
