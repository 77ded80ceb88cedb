//! Parses what names are assigned to, the parameters of functions and the arguments of calls.

use std::sync::Arc;

use crate::ast::{CallArguments, Expr, Macro, Statement, Target};
use crate::error::CompileError;
use crate::lexer::TokenKind;
use crate::names;
use crate::parser::{Parsed, Parser};

impl Parser {
    pub(super) fn function(
        &self,
        name: Option<Arc<str>>,
        parameters: Vec<Arc<str>>,
        defaults: Vec<Expr>,
        body: Vec<Statement>,
        line: usize,
    ) -> Parsed<Macro> {
        let special = names::special_parameters(&body);
        let has = |name: &str| parameters.iter().any(|parameter| &**parameter == name);
        let without_default = &parameters[..parameters.len() - defaults.len()];
        let duplicate =
            (1..parameters.len()).find(|at| parameters[..*at].contains(&parameters[*at]));
        if let Some(at) = duplicate {
            return Err(CompileError {
                line,
                problem: format!("the parameter '{}' is given twice", parameters[at]),
            });
        }
        if special.caller
            && without_default
                .iter()
                .any(|parameter| &**parameter == "caller")
        {
            return Err(CompileError {
                line,
                problem: "the parameter 'caller' needs a default".to_owned(),
            });
        }
        Ok(Macro {
            takes_caller: special.caller,
            takes_kwargs: special.kwargs && !has("kwargs"),
            takes_varargs: special.varargs && !has("varargs"),
            name,
            parameters,
            defaults,
            body,
        })
    }

    pub(super) fn signature(&mut self) -> Parsed<(Vec<Arc<str>>, Vec<Expr>)> {
        self.expect_operator("(")?;
        let mut parameters = Vec::new();
        let mut defaults = Vec::new();
        while !self.is_operator(")") {
            if !parameters.is_empty() {
                self.expect_operator(",")?;
            }
            let line = self.line();
            let name = self.expect_name()?;
            Self::check_assignable(&name, line)?;
            if self.skip_operator("=") {
                defaults.push(self.softly(false, Self::expression)?);
            } else if !defaults.is_empty() {
                return self.error(format!(
                    "the parameter '{name}' without a default follows one with a default"
                ));
            }
            parameters.push(name);
        }
        self.expect_operator(")")?;
        Ok((parameters, defaults))
    }

    pub(super) fn check_assignable(name: &str, line: usize) -> Parsed<()> {
        if matches!(name, "true" | "false" | "none" | "True" | "False" | "None") {
            return Err(CompileError {
                line,
                problem: format!("cannot assign to '{name}'"),
            });
        }
        Ok(())
    }

    /// The target of an assignment: a name, or several.
    pub(super) fn target(&mut self, with_attributes: bool) -> Parsed<Target> {
        let line = self.line();
        let first = self.single_target(with_attributes)?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.skip_operator(",") {
            if self.is_tuple_end() {
                break;
            }
            targets.push(self.single_target(with_attributes)?);
        }
        if targets.len() > 1000 {
            return Err(CompileError {
                line,
                problem: "more than 1000 names are assigned".to_owned(),
            });
        }
        Ok(Target::Tuple(targets))
    }

    fn single_target(&mut self, with_attributes: bool) -> Parsed<Target> {
        if self.is_operator("(") {
            return self.nested(|parser| {
                parser.advance();
                if parser.skip_operator(")") {
                    return Ok(Target::Tuple(Vec::new()));
                }
                let target = parser.target(false)?;
                parser.expect_operator(")")?;
                Ok(target)
            });
        }
        let line = self.line();
        let name = self.expect_name()?;
        Self::check_assignable(&name, line)?;
        if with_attributes && self.skip_operator(".") {
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        Ok(Target::Name(name))
    }

    /// Arguments of a call, with their parentheses.
    pub(super) fn arguments(&mut self) -> Parsed<CallArguments> {
        self.expect_operator("(")?;
        let mut arguments = CallArguments::default();
        let mut is_first = true;
        while !self.is_operator(")") {
            if !is_first {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            is_first = false;
            let has_stars = arguments.star.is_some() || arguments.double_star.is_some();
            let is_keyword = matches!(self.kind(), TokenKind::Name(_))
                && *self.next_kind() == TokenKind::Operator("=");
            if self.is_operator("*") && !has_stars {
                self.advance();
                arguments.star = Some(self.expression()?);
            } else if self.is_operator("**") && arguments.double_star.is_none() {
                self.advance();
                arguments.double_star = Some(self.expression()?);
            } else if is_keyword && arguments.double_star.is_none() {
                let name = self.expect_name()?;
                self.advance();
                if arguments.keywords.iter().any(|(other, _)| *other == name) {
                    return self.error(format!("the argument '{name}' is given twice"));
                }
                arguments.keywords.push((name, self.expression()?));
            } else if !has_stars && arguments.keywords.is_empty() && !is_keyword {
                arguments.positional.push(self.expression()?);
            } else {
                return self.error("an argument without a name follows others with names");
            }
        }
        self.expect_operator(")")?;
        Ok(arguments)
    }
}
