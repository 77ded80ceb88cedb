//! Parses expressions.

use std::sync::Arc;

use crate::ast::{CallArguments, Comparison, Expr, ExprKind, FilterStep, Operator};
use crate::lexer::TokenKind;
use crate::parser::{Parsed, Parser};
use crate::{filters, predicates};

/// Levels of an expression: brackets, and operations of a chain such as `a + b + c`.
const MAX_DEPTH: u32 = 200;

impl Parser {
    fn node(&self, line: usize, kind: ExprKind) -> Parsed<Expr> {
        let mut depth = 0;
        kind.visit_children(&mut |child| depth = depth.max(child.depth));
        if depth >= MAX_DEPTH {
            return self.error(format!(
                "an expression has more than {MAX_DEPTH} levels: set parts of it before"
            ));
        }
        Ok(Expr {
            kind: Box::new(kind),
            line,
            depth: depth + 1,
        })
    }

    pub(super) fn expression(&mut self) -> Parsed<Expr> {
        self.nested(|parser| parser.conditional(true))
    }

    fn conditional(&mut self, with_condition: bool) -> Parsed<Expr> {
        // Whether unknown filters are errors is known after the expression only: they are in a condition's branch.
        let line = self.line();
        let start = self.position();
        let is_soft = self.is_soft;
        let first = self.softly(true, Self::or)?;
        if !with_condition || !self.is_name("if") {
            if !is_soft {
                self.check_names(start)?;
            }
            return Ok(first);
        }
        self.softly(true, |parser| {
            let mut value = first;
            while parser.skip_name("if") {
                let test = parser.or()?;
                let otherwise = if parser.skip_name("else") {
                    Some(parser.nested(|parser| parser.conditional(true))?)
                } else {
                    None
                };
                value = parser.node(
                    line,
                    ExprKind::Condition {
                        test,
                        then: value,
                        otherwise,
                    },
                )?;
            }
            Ok(value)
        })
    }

    /// Expressions with commas between them are a tuple.
    pub(super) fn tuple(&mut self, with_condition: bool) -> Parsed<Expr> {
        let line = self.line();
        if self.is_tuple_end() {
            return self.unexpected("an expression");
        }
        self.tuple_or_one(line, with_condition)
    }

    fn tuple_or_one(&mut self, line: usize, with_condition: bool) -> Parsed<Expr> {
        let item = |parser: &mut Self| parser.nested(|parser| parser.conditional(with_condition));
        let first = item(self)?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_operator(",") {
            if self.is_tuple_end() {
                break;
            }
            items.push(item(self)?);
        }
        self.node(line, ExprKind::Tuple(items))
    }

    pub(super) fn is_tuple_end(&self) -> bool {
        matches!(
            self.kind(),
            TokenKind::VariableEnd | TokenKind::BlockEnd | TokenKind::Operator(")")
        )
    }

    fn or(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.skip_name("or") {
            let right = self.and()?;
            left = self.node(line, ExprKind::Or(left, right))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.skip_name("and") {
            let right = self.not()?;
            left = self.node(line, ExprKind::And(left, right))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Parsed<Expr> {
        let line = self.line();
        if self.skip_name("not") {
            let value = self.nested(Self::not)?;
            return self.node(line, ExprKind::Not(value));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.kind() {
                TokenKind::Operator("==") => Comparison::Equal,
                TokenKind::Operator("!=") => Comparison::NotEqual,
                TokenKind::Operator("<") => Comparison::Less,
                TokenKind::Operator("<=") => Comparison::LessOrEqual,
                TokenKind::Operator(">") => Comparison::Greater,
                TokenKind::Operator(">=") => Comparison::GreaterOrEqual,
                TokenKind::Name(name) if &**name == "in" => Comparison::In,
                TokenKind::Name(name) if &**name == "not" => match self.next_kind() {
                    TokenKind::Name(next) if &**next == "in" => {
                        self.advance();
                        Comparison::NotIn
                    }
                    _ => break,
                },
                _ => break,
            };
            self.advance();
            rest.push((comparison, self.sum()?));
        }
        if rest.is_empty() {
            return Ok(first);
        }
        self.node(line, ExprKind::Compare(first, rest))
    }

    fn binary(
        &mut self,
        operators: &[(&str, Operator)],
        operand: impl Fn(&mut Self) -> Parsed<Expr>,
    ) -> Parsed<Expr> {
        let line = self.line();
        let mut left = operand(self)?;
        loop {
            let TokenKind::Operator(found) = *self.kind() else {
                return Ok(left);
            };
            let Some((_, operator)) = operators.iter().find(|(name, _)| *name == found) else {
                return Ok(left);
            };
            self.advance();
            let right = operand(self)?;
            left = self.node(line, ExprKind::Binary(*operator, left, right))?;
        }
    }

    fn sum(&mut self) -> Parsed<Expr> {
        self.binary(
            &[("+", Operator::Add), ("-", Operator::Subtract)],
            Self::concat,
        )
    }

    fn concat(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        self.node(line, ExprKind::Concat(parts))
    }

    fn product(&mut self) -> Parsed<Expr> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.binary(&operators, Self::power)
    }

    fn power(&mut self) -> Parsed<Expr> {
        self.binary(&[("**", Operator::Power)], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filter: bool) -> Parsed<Expr> {
        let line = self.line();
        let signed = match self.kind() {
            TokenKind::Operator("-") => Some(true),
            TokenKind::Operator("+") => Some(false),
            _ => None,
        };
        let mut value = match signed {
            Some(is_negative) => {
                self.advance();
                let value = self.nested(|parser| parser.unary(false))?;
                let kind = if is_negative {
                    ExprKind::Negative(value)
                } else {
                    ExprKind::Positive(value)
                };
                self.node(line, kind)?
            }
            None => self.primary()?,
        };
        value = self.postfix(value)?;
        if with_filter {
            value = self.filters_and_tests(value)?;
        }
        Ok(value)
    }

    fn primary(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let kind = match self.kind().clone() {
            TokenKind::Name(name) => {
                self.advance();
                match &*name {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => ExprKind::Name(name),
                }
            }
            TokenKind::Str(text) => {
                self.advance();
                let mut text = text;
                while let TokenKind::Str(more) = self.kind() {
                    text.push_str(more);
                    self.advance();
                }
                ExprKind::Str(text.into())
            }
            TokenKind::Int(number) => {
                self.advance();
                ExprKind::Int(number)
            }
            TokenKind::Float(number) => {
                self.advance();
                ExprKind::Float(number)
            }
            TokenKind::Operator("(") => {
                self.advance();
                if self.skip_operator(")") {
                    return self.node(line, ExprKind::Tuple(Vec::new()));
                }
                let value = self.tuple_or_one(line, true)?;
                self.expect_operator(")")?;
                return Ok(value);
            }
            TokenKind::Operator("[") => {
                self.advance();
                ExprKind::List(self.items("]", Self::expression)?)
            }
            TokenKind::Operator("{") => {
                self.advance();
                let pair = |parser: &mut Self| {
                    let key = parser.expression()?;
                    parser.expect_operator(":")?;
                    Ok((key, parser.expression()?))
                };
                ExprKind::Dict(self.items("}", pair)?)
            }
            _ => return self.unexpected("an expression"),
        };
        self.node(line, kind)
    }

    fn items<T>(&mut self, close: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.is_operator(close) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.expect_operator(close)?;
        Ok(items)
    }

    fn postfix(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            value = match self.kind() {
                TokenKind::Operator("." | "[") => self.subscript(value)?,
                TokenKind::Operator("(") => self.call(value)?,
                _ => return Ok(value),
            };
        }
    }

    fn call(&mut self, of: Expr) -> Parsed<Expr> {
        let line = self.line();
        let arguments = self.arguments()?;
        self.node(line, ExprKind::Call(of, arguments))
    }

    fn filters_and_tests(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            let line = self.line();
            value = match self.kind() {
                TokenKind::Operator("|") => {
                    self.advance();
                    let step = self.filter()?;
                    self.node(line, ExprKind::Filter(value, step))?
                }
                TokenKind::Operator("(") => self.call(value)?,
                TokenKind::Name(name) if &**name == "is" => self.test(value)?,
                _ => return Ok(value),
            };
        }
    }

    fn subscript(&mut self, of: Expr) -> Parsed<Expr> {
        let line = self.line();
        if self.skip_operator(".") {
            return match self.advance() {
                TokenKind::Name(name) => self.node(line, ExprKind::Attribute(of, name)),
                TokenKind::Int(index) => {
                    let index = self.node(line, ExprKind::Int(index))?;
                    self.node(line, ExprKind::Item(of, index))
                }
                _ => self.error("expected a name or a number after '.'"),
            };
        }
        self.expect_operator("[")?;
        let ends = |parser: &Self| parser.is_operator("]") || parser.is_operator(",");
        let start = if self.is_operator(":") {
            None
        } else {
            Some(self.expression()?)
        };
        let kind = if self.is_operator(":") {
            self.advance();
            let none = ends(self) || self.is_operator(":");
            let stop = if none { None } else { Some(self.expression()?) };
            let none = !self.skip_operator(":") || ends(self);
            let step = if none { None } else { Some(self.expression()?) };
            ExprKind::Slice {
                of,
                start,
                stop,
                step,
            }
        } else {
            let Some(index) = start else {
                return self.unexpected("an index");
            };
            if self.is_operator(",") {
                let mut items = vec![index];
                while self.skip_operator(",") {
                    items.push(self.expression()?);
                }
                let index = self.node(line, ExprKind::Tuple(items))?;
                ExprKind::Item(of, index)
            } else {
                ExprKind::Item(of, index)
            }
        };
        if self.is_operator(",") || self.is_operator(":") {
            return self.error("several slices in an index are not supported");
        }
        self.expect_operator("]")?;
        self.node(line, kind)
    }

    fn dotted_name(&mut self) -> Parsed<Arc<str>> {
        let mut name = self.expect_name()?;
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.expect_name()?).into();
        }
        Ok(name)
    }

    fn filter(&mut self) -> Parsed<FilterStep> {
        let name = self.dotted_name()?;
        if !self.is_soft {
            self.check_filter(&name)?;
        }
        let arguments = if self.is_operator("(") {
            self.arguments()?
        } else {
            CallArguments::default()
        };
        Ok(FilterStep { name, arguments })
    }

    /// Filters without a value: `| a | b(1)`, or `a | b(1)` for a `filter` block.
    pub(super) fn filters(&mut self, is_first_bare: bool) -> Parsed<Vec<FilterStep>> {
        let mut steps = Vec::new();
        if is_first_bare {
            steps.push(self.filter()?);
        }
        while self.skip_operator("|") {
            steps.push(self.filter()?);
        }
        Ok(steps)
    }

    fn test(&mut self, value: Expr) -> Parsed<Expr> {
        let line = self.line();
        self.advance();
        let is_negated = self.skip_name("not");
        let name = self.dotted_name()?;
        if !self.is_soft {
            self.check_test(&name)?;
        }
        let mut arguments = CallArguments::default();
        let has_argument = match self.kind() {
            TokenKind::Name(name) => !matches!(&**name, "else" | "or" | "and"),
            TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_) => true,
            TokenKind::Operator("[" | "{") => true,
            _ => false,
        };
        if self.is_operator("(") {
            arguments = self.arguments()?;
        } else if has_argument {
            if self.is_name("is") {
                return self.error("tests with 'is' cannot be chained");
            }
            let argument = self.nested(Self::primary)?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = self.node(
            line,
            ExprKind::Test {
                value,
                name,
                arguments,
            },
        )?;
        if is_negated {
            return self.node(line, ExprKind::Not(test));
        }
        Ok(test)
    }

    fn check_filter(&self, name: &str) -> Parsed<()> {
        if filters::is_known(name) {
            return Ok(());
        }
        self.error(format!("there is no filter '{name}'"))
    }

    fn check_test(&self, name: &str) -> Parsed<()> {
        if predicates::is_known(name) {
            return Ok(());
        }
        self.error(format!("there is no test '{name}'"))
    }

    /// Checks the names of the filters and tests from a token on.
    fn check_names(&self, start: usize) -> Parsed<()> {
        for pair in self.tokens_since(start).windows(2) {
            let TokenKind::Name(name) = &pair[1].kind else {
                continue;
            };
            match &pair[0].kind {
                TokenKind::Operator("|") => self.check_filter(name)?,
                TokenKind::Name(is) if &**is == "is" && &**name != "not" => {
                    self.check_test(name)?
                }
                _ => {}
            }
        }
        Ok(())
    }
}
