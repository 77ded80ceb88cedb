//! Calls: macros, functions, methods.

use std::rc::Rc;
use std::sync::Arc;

use super::Interpreter;
use crate::ast::{Expr, ExprKind};
use crate::error::{Outcome, fail};
use crate::methods;
use crate::value::{Arguments, Items, Macro, Object, Scope, Value};

impl Interpreter<'_> {
    /// Calls a value.
    pub(crate) fn call(&mut self, of: &Value, arguments: Arguments) -> Outcome<Value> {
        let object = match of {
            Value::Object(object) => object,
            Value::Undefined(undefined) => return fail(&*undefined.message),
            other => return fail(format!("'{}' object is not callable", other.type_name())),
        };
        self.budget.enter()?;
        let value = match &**object {
            Object::Macro(found) => self.call_macro(found, arguments)?,
            Object::Loop(_) => self.call_loop(object, arguments)?,
            Object::Joiner { separator, is_used } => {
                arguments.none("joiner()")?;
                if is_used.replace(true) {
                    separator.clone()
                } else {
                    Value::str("")
                }
            }
            Object::Function(function) => self.call_function(*function, arguments)?,
            Object::Method { of, name } => methods::call(self, of, name, arguments)?,
            Object::Block(name) => {
                arguments.none("a block")?;
                let root = self.root.clone();
                let (text, ()) = self.captured(|interpreter| interpreter.block(name, &root))?;
                Value::Str(text)
            }
            Object::Namespace(_) | Object::Cycler { .. } | Object::Blocks => {
                return fail(format!("'{}' object is not callable", object.type_name()));
            }
        };
        self.budget.leave();
        Ok(value)
    }

    /// Calls what a `call` block calls, with its body as the caller.
    pub(super) fn call_with_caller(
        &mut self,
        call: &Expr,
        caller: Value,
        scope: &Rc<Scope>,
    ) -> Outcome<Value> {
        let ExprKind::Call(of, arguments) = &*call.kind else {
            return fail("the tag 'call' is not followed by a call");
        };
        let of = self.evaluate(of, scope)?;
        let mut arguments = self.arguments(arguments, scope)?;
        if arguments
            .keywords
            .iter()
            .any(|(name, _)| &**name == "caller")
        {
            return fail("the argument 'caller' is given twice");
        }
        arguments.keywords.push((Arc::from("caller"), caller));
        self.line = call.line;
        self.call(&of, arguments)
    }

    fn call_macro(&mut self, found: &Macro, arguments: Arguments) -> Outcome<Value> {
        let definition = &found.definition;
        let name = definition.name.as_deref().unwrap_or("caller");
        let scope = Scope::within(&found.scope);
        let Arguments {
            mut positional,
            mut keywords,
        } = arguments;
        self.budget.make(256 + 64 * definition.parameters.len())?;
        let num_parameters = definition.parameters.len();
        let rest = positional.split_off(num_parameters.min(positional.len()));
        let mut values: Vec<_> = positional.into_iter().map(Some).collect();
        for parameter in &definition.parameters[values.len()..] {
            let given = keywords.iter().position(|(name, _)| name == parameter);
            values.push(given.map(|at| keywords.remove(at).1));
        }
        let has_own_caller = definition
            .parameters
            .iter()
            .any(|parameter| &**parameter == "caller");
        let mut caller = None;
        if definition.takes_caller && !has_own_caller {
            let given = keywords.iter().position(|(name, _)| &**name == "caller");
            caller = Some(match given.map(|at| keywords.remove(at).1) {
                None | Some(Value::None) => Value::undefined("No caller defined"),
                Some(caller) => caller,
            });
        }
        if !definition.takes_kwargs
            && let Some((keyword, _)) = keywords.first()
        {
            return fail(format!(
                "macro '{name}' takes no keyword argument '{keyword}'"
            ));
        }
        if !definition.takes_varargs && !rest.is_empty() {
            return fail(format!(
                "macro '{name}' takes not more than {num_parameters} argument(s)"
            ));
        }
        if let Some(caller) = caller {
            scope.set(&Arc::from("caller"), caller);
        }
        if definition.takes_kwargs {
            let mut items = Items::default();
            for (name, value) in keywords {
                self.insert(&mut items, Value::str(name), value)?;
            }
            scope.set(&Arc::from("kwargs"), Value::dict(items)?);
        }
        if definition.takes_varargs {
            scope.set(&Arc::from("varargs"), Value::tuple(rest)?);
        }
        // A default sees the other parameters, and not variables around of the same name.
        for (parameter, value) in definition.parameters.iter().zip(&values) {
            let missing = || Value::undefined(format!("parameter '{parameter}' was not provided"));
            scope.set(parameter, value.clone().unwrap_or_else(missing));
        }
        let without_default = num_parameters - definition.defaults.len();
        for (at, parameter) in definition.parameters.iter().enumerate() {
            if values[at].is_none() && at >= without_default {
                let value = self.evaluate(&definition.defaults[at - without_default], &scope)?;
                scope.set(parameter, value);
            }
        }
        let (text, _) =
            self.captured(|interpreter| interpreter.statements(&definition.body, &scope))?;
        Ok(Value::Str(text))
    }
}
