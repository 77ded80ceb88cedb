//! Turns tokens into statements.

use std::sync::Arc;

use crate::ast::{ExprKind, For, Program, Statement, StatementKind};
use crate::error::CompileError;
use crate::lexer::{Token, TokenKind, tokens};
use crate::names;

/// Depth of nested statements, and of nested expressions.
pub(super) const MAX_NESTING: u32 = 120;

/// Parses a template.
pub(crate) fn parse(source: &str) -> Result<Program, CompileError> {
    let mut parser = Parser {
        tokens: tokens(source)?,
        at: 0,
        nesting: 0,
        loops: 0,
        is_soft: false,
        blocks: Vec::new(),
    };
    let body = parser.statements(&[])?;
    Ok(Program {
        body,
        blocks: parser.blocks,
    })
}

pub(super) type Parsed<T> = Result<T, CompileError>;

pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    pub(super) nesting: u32,
    /// Loops around, within the macro or block.
    loops: u32,
    /// Whether unknown filters and tests are errors only where they are reached: within `if`.
    pub(super) is_soft: bool,
    blocks: Vec<(Arc<str>, Arc<Vec<Statement>>)>,
}

impl Parser {
    pub(super) fn kind(&self) -> &TokenKind {
        &self.tokens[self.at].kind
    }

    pub(super) fn next_kind(&self) -> &TokenKind {
        let next = (self.at + 1).min(self.tokens.len() - 1);
        &self.tokens[next].kind
    }

    pub(super) fn line(&self) -> usize {
        self.tokens[self.at].line
    }

    pub(super) fn advance(&mut self) -> TokenKind {
        let kind = self.kind().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        kind
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// The tokens from a position to the current one.
    pub(super) fn tokens_since(&self, start: usize) -> &[Token] {
        &self.tokens[start..self.at]
    }

    pub(super) fn error<T>(&self, problem: impl Into<String>) -> Parsed<T> {
        Err(CompileError {
            line: self.line(),
            problem: problem.into(),
        })
    }

    pub(super) fn unexpected<T>(&self, expected: &str) -> Parsed<T> {
        self.error(format!(
            "expected {expected}, found {}",
            described(self.kind())
        ))
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.kind(), TokenKind::Name(found) if &**found == name)
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.advance();
        }
        found
    }

    pub(super) fn is_operator(&self, operator: &str) -> bool {
        matches!(self.kind(), TokenKind::Operator(found) if *found == operator)
    }

    pub(super) fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        if found {
            self.advance();
        }
        found
    }

    pub(super) fn expect_operator(&mut self, operator: &str) -> Parsed<()> {
        if self.skip_operator(operator) {
            return Ok(());
        }
        self.unexpected(&format!("'{operator}'"))
    }

    pub(super) fn expect_name(&mut self) -> Parsed<Arc<str>> {
        if let TokenKind::Name(name) = self.kind() {
            let name = name.clone();
            self.advance();
            return Ok(name);
        }
        self.unexpected("a name")
    }

    /// Runs `parse` one level deeper.
    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.nesting >= MAX_NESTING {
            return self.error(format!("more than {MAX_NESTING} levels of nesting"));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Runs `parse` where unknown filters are errors at once, or not.
    pub(super) fn softly<T>(
        &mut self,
        is_soft: bool,
        parse: impl FnOnce(&mut Self) -> Parsed<T>,
    ) -> Parsed<T> {
        let before = std::mem::replace(&mut self.is_soft, is_soft);
        let parsed = parse(self);
        self.is_soft = before;
        parsed
    }

    /// Statements up to a tag with one of these names, which is the next token; or to the end.
    fn statements(&mut self, ends: &[&str]) -> Parsed<Vec<Statement>> {
        let mut statements = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.kind().clone() {
                TokenKind::Text(text) => {
                    self.advance();
                    StatementKind::Text(text)
                }
                TokenKind::VariableBegin => {
                    self.advance();
                    let value = self.tuple(true)?;
                    if *self.kind() != TokenKind::VariableEnd {
                        return self.unexpected("the end of the expression");
                    }
                    self.advance();
                    StatementKind::Print(vec![value])
                }
                TokenKind::BlockBegin => {
                    self.advance();
                    let TokenKind::Name(name) = self.kind().clone() else {
                        return self.unexpected("the name of a tag");
                    };
                    if ends.contains(&&*name) {
                        return Ok(statements);
                    }
                    let kind = self.nested(|parser| parser.statement(&name, ends))?;
                    if *self.kind() != TokenKind::BlockEnd {
                        return self.unexpected("the end of the tag");
                    }
                    self.advance();
                    kind
                }
                TokenKind::End if ends.is_empty() => return Ok(statements),
                TokenKind::End => {
                    return self.error(format!(
                        "the template ends before '{}'",
                        ends.join("' or '")
                    ));
                }
                _ => return self.unexpected("text or a tag"),
            };
            statements.push(Statement { line, kind });
        }
    }

    /// The body of a tag: from the end of the tag to the name of the closing one, which is taken.
    fn body(&mut self, ends: &[&str]) -> Parsed<(Vec<Statement>, Arc<str>)> {
        self.skip_operator(":");
        if *self.kind() != TokenKind::BlockEnd {
            return self.unexpected("the end of the tag");
        }
        self.advance();
        let body = self.statements(ends)?;
        let end = self.expect_name()?;
        Ok((body, end))
    }

    /// The body of a tag whose names and filters are in a scope of its own.
    fn scoped_body(&mut self, end: &str) -> Parsed<Vec<Statement>> {
        self.softly(false, |parser| Ok(parser.body(&[end])?.0))
    }

    /// The body of a function, where the loops around cannot be left.
    fn function_body(&mut self, end: &str) -> Parsed<Vec<Statement>> {
        let loops = std::mem::take(&mut self.loops);
        let body = self.scoped_body(end);
        self.loops = loops;
        body
    }

    fn statement(&mut self, name: &str, ends: &[&str]) -> Parsed<StatementKind> {
        let line = self.line();
        if name != "for" {
            self.advance();
        }
        match name {
            "for" => self.for_loop(),
            "if" => self.condition(),
            "set" => self.set(),
            "print" => self.print(),
            "macro" => {
                let name = self.expect_name()?;
                Self::check_assignable(&name, line)?;
                let (parameters, defaults) = self.signature()?;
                let body = self.function_body("endmacro")?;
                let definition = self.function(Some(name), parameters, defaults, body, line)?;
                Ok(StatementKind::Macro(Arc::new(definition)))
            }
            "call" => self.call_block(line),
            "filter" => {
                let filters = self.filters(true)?;
                let body = self.scoped_body("endfilter")?;
                Ok(StatementKind::Filter { filters, body })
            }
            "with" => self.with(),
            "generation" => Ok(StatementKind::Generation(
                self.function_body("endgeneration")?,
            )),
            "block" => self.block(),
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.error(format!("'{name}' is outside a loop"));
                }
                Ok(match name {
                    "break" => StatementKind::Break,
                    _ => StatementKind::Continue,
                })
            }
            "autoescape" => {
                let value = self.expression()?;
                if !matches!(*value.kind, ExprKind::Bool(false)) {
                    return self.error("the tag 'autoescape' is supported only with 'false'");
                }
                Ok(StatementKind::Scope(self.scoped_body("endautoescape")?))
            }
            "extends" | "include" | "import" | "from" => self.error(format!(
                "the tag '{name}' is not supported: a chat template is a single template"
            )),
            _ => {
                let hint = match ends {
                    [] => String::new(),
                    ends => format!(" before '{}'", ends.join("' or '")),
                };
                self.error(format!("unknown tag '{name}'{hint}"))
            }
        }
    }

    fn for_loop(&mut self) -> Parsed<StatementKind> {
        let first = self.at;
        self.advance();
        let target = self.target(false)?;
        if !self.skip_name("in") {
            return self.unexpected("'in'");
        }
        let iterable = self.tuple(false)?;
        let is_soft = std::mem::replace(&mut self.is_soft, false);
        let condition = self
            .skip_name("if")
            .then(|| self.expression())
            .transpose()?;
        let is_recursive = self.skip_name("recursive");
        self.loops += 1;
        let (body, end) = self.body(&["endfor", "else"])?;
        self.loops -= 1;
        let mut otherwise = Vec::new();
        if &*end == "else" {
            otherwise = self.body(&["endfor"])?.0;
        }
        self.is_soft = is_soft;
        let parsed = For {
            target,
            iterable,
            condition,
            is_recursive,
            body,
            otherwise,
        };
        if names::assigns_loop(&parsed) {
            return Err(CompileError {
                line: self.tokens[first].line,
                problem: "'loop' is assigned within a loop, which has a variable of this name"
                    .to_owned(),
            });
        }
        Ok(StatementKind::For(Arc::new(parsed)))
    }

    fn condition(&mut self) -> Parsed<StatementKind> {
        self.softly(true, |parser| {
            let mut branches = Vec::new();
            let mut otherwise = Vec::new();
            loop {
                let test = parser.tuple(false)?;
                let (body, end) = parser.body(&["elif", "else", "endif"])?;
                branches.push((test, body));
                match &*end {
                    "elif" => {}
                    "else" => {
                        otherwise = parser.body(&["endif"])?.0;
                        break;
                    }
                    _ => break,
                }
            }
            Ok(StatementKind::If {
                branches,
                otherwise,
            })
        })
    }

    fn set(&mut self) -> Parsed<StatementKind> {
        let target = self.target(true)?;
        if self.skip_operator("=") {
            let value = self.tuple(true)?;
            return Ok(StatementKind::Set { target, value });
        }
        let filters = self.softly(false, |parser| parser.filters(false))?;
        let body = self.scoped_body("endset")?;
        Ok(StatementKind::SetBlock {
            target,
            filters,
            body,
        })
    }

    fn print(&mut self) -> Parsed<StatementKind> {
        let mut values = Vec::new();
        while *self.kind() != TokenKind::BlockEnd {
            if !values.is_empty() {
                self.expect_operator(",")?;
            }
            values.push(self.expression()?);
        }
        Ok(StatementKind::Print(values))
    }

    fn with(&mut self) -> Parsed<StatementKind> {
        let mut targets = Vec::new();
        let mut values = Vec::new();
        while *self.kind() != TokenKind::BlockEnd {
            if !targets.is_empty() {
                self.expect_operator(",")?;
            }
            targets.push(self.target(false)?);
            self.expect_operator("=")?;
            values.push(self.softly(false, Self::expression)?);
        }
        let body = self.scoped_body("endwith")?;
        Ok(StatementKind::With {
            targets,
            values,
            body,
        })
    }

    fn block(&mut self) -> Parsed<StatementKind> {
        let name = self.expect_name()?;
        let is_scoped = self.skip_name("scoped");
        let is_required = self.skip_name("required");
        if self.blocks.iter().any(|(other, _)| *other == name) {
            return self.error(format!("the block '{name}' is defined twice"));
        }
        // Reserves the name while the body is read.
        let at = self.blocks.len();
        self.blocks.push((name.clone(), Arc::default()));
        let body = self.function_body("endblock")?;
        let is_blank = |statement: &Statement| match &statement.kind {
            StatementKind::Text(text) => text.chars().all(crate::unicode::is_space),
            _ => false,
        };
        if is_required && !body.iter().all(is_blank) {
            return self.error(format!("the required block '{name}' is not empty"));
        }
        self.skip_name(&name);
        self.blocks[at].1 = Arc::new(body);
        Ok(StatementKind::Block {
            name,
            is_scoped,
            is_required,
        })
    }

    fn call_block(&mut self, line: usize) -> Parsed<StatementKind> {
        let (parameters, defaults) = if self.is_operator("(") {
            self.signature()?
        } else {
            (Vec::new(), Vec::new())
        };
        let call = self.expression()?;
        if !matches!(*call.kind, ExprKind::Call(..)) {
            return self.error("the tag 'call' is not followed by a call");
        }
        let body = self.function_body("endcall")?;
        let body = Arc::new(self.function(None, parameters, defaults, body, line)?);
        Ok(StatementKind::Call { body, call })
    }
}

/// A token in a message.
fn described(kind: &TokenKind) -> String {
    match kind {
        TokenKind::Text(_) => "text".to_owned(),
        TokenKind::VariableBegin => "'{{'".to_owned(),
        TokenKind::VariableEnd => "'}}'".to_owned(),
        TokenKind::BlockBegin => "'{%'".to_owned(),
        TokenKind::BlockEnd => "'%}'".to_owned(),
        TokenKind::Name(name) => format!("'{name}'"),
        TokenKind::Str(_) => "a string".to_owned(),
        TokenKind::Int(_) | TokenKind::Float(_) => "a number".to_owned(),
        TokenKind::Operator(operator) => format!("'{operator}'"),
        TokenKind::End => "the end of the template".to_owned(),
    }
}
