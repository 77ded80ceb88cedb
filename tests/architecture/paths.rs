//! Paths in the code of a file: which modules and names it mentions, each from the crate's root.
//!
//! The code is read as tokens, macros included: comments and strings are no code, and a path may be written over as
//! many lines as its author likes.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// A path that a file mentions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathUse {
    /// The line of its last name.
    pub line: usize,
    /// The module that mentions it, from the crate's root.
    pub module: Vec<String>,
    /// `crate::a::b`, `super::b` and `self::b` from the crate's root: `[a, b]`; of any other path its names as written.
    pub names: Vec<String>,
    /// Whether it begins with `crate`, `super` or `self`.
    pub is_rooted: bool,
    /// The name under which a `use` item makes it known, `*` for all of its names.
    pub alias: Option<String>,
    /// Whether it is re-exported: `pub use`, in any visibility.
    pub is_reexport: bool,
    /// Whether only test builds have it.
    pub is_test: bool,
}

/// All paths of two names or more, and rooted ones of one, in the code of `module`.
pub fn paths(code: &TokenStream, module: &[String]) -> Vec<PathUse> {
    let mut found = Vec::new();
    Reader {
        module: module.to_vec(),
        is_test: false,
        found: &mut found,
    }
    .read(code);
    found
}

/// Modules that are declared for test builds only: `#[cfg(test)] mod name;`.
pub fn test_modules(code: &TokenStream) -> Vec<String> {
    let tokens: Vec<_> = code.clone().into_iter().collect();
    (0..tokens.len())
        .filter(|&at| is_ident(tokens.get(at), "mod") && is_for_tests(&tokens, at))
        .filter_map(|at| ident(tokens.get(at + 1)))
        .collect()
}

struct Reader<'a> {
    module: Vec<String>,
    is_test: bool,
    found: &'a mut Vec<PathUse>,
}

/// The `use` item that a path is part of.
#[derive(Clone, Copy)]
struct UseItem {
    is_reexport: bool,
}

impl Reader<'_> {
    fn read(&mut self, code: &TokenStream) {
        let tokens: Vec<_> = code.clone().into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            if is_ident(tokens.get(at), "use") {
                let item = UseItem {
                    is_reexport: is_public(&tokens, at),
                };
                at = self.path(&tokens, at + 1, None, Some(item));
                continue;
            }
            match &tokens[at] {
                TokenTree::Ident(_) => at = self.path(&tokens, at, None, None),
                TokenTree::Group(group) => {
                    if !is_visibility(&tokens, at, &group.stream()) {
                        self.group(&tokens, at, &group.stream(), group.delimiter());
                    }
                    at += 1;
                }
                _ => at += 1,
            }
        }
    }

    /// Reads the code between brackets: a module of its own where it is the body of one.
    fn group(&mut self, tokens: &[TokenTree], at: usize, code: &TokenStream, delimiter: Delimiter) {
        let is_body = delimiter == Delimiter::Brace && at >= 2;
        let name = ident(at.checked_sub(1).and_then(|at| tokens.get(at)));
        match name {
            Some(name) if is_body && is_ident(tokens.get(at - 2), "mod") => {
                let mut module = self.module.clone();
                module.push(name);
                Reader {
                    module,
                    is_test: self.is_test || is_for_tests(tokens, at - 2),
                    found: self.found,
                }
                .read(code);
            }
            _ => self.read(code),
        }
    }

    /// Reads a path, and the paths of the list that it may end with. Gives the place behind it.
    fn path(
        &mut self,
        tokens: &[TokenTree],
        mut at: usize,
        prefix: Option<(Vec<String>, bool)>,
        item: Option<UseItem>,
    ) -> usize {
        let is_first = prefix.is_none();
        let (mut names, mut is_rooted) = prefix.unwrap_or_default();
        let mut num_names = 0;
        let mut line = 0;
        loop {
            match tokens.get(at) {
                Some(TokenTree::Ident(name)) => {
                    line = name.span().start().line;
                    let is_start = is_first && num_names == 0;
                    match name.to_string().as_str() {
                        "crate" if is_start => is_rooted = true,
                        "self" if is_start => {
                            (names, is_rooted) = (self.module.clone(), true);
                        }
                        // `use a::{self}`: the prefix itself.
                        "self" => {}
                        "super" => {
                            if is_start {
                                (names, is_rooted) = (self.module.clone(), true);
                            }
                            names.pop();
                        }
                        name => names.push(name.to_owned()),
                    }
                    num_names += 1;
                    at += 1;
                }
                Some(TokenTree::Group(list))
                    if list.delimiter() == Delimiter::Brace && (num_names > 0 || !is_first) =>
                {
                    self.list(&list.stream(), &names, is_rooted, item);
                    return at + 1;
                }
                Some(TokenTree::Punct(star)) if star.as_char() == '*' && num_names > 0 => {
                    line = star.span().start().line;
                    let alias = item.map(|_| "*".to_owned());
                    self.push(line, names, is_rooted, alias, item);
                    return at + 1;
                }
                _ => break,
            }
            if !is_path_sep(tokens, at) {
                break;
            }
            at += 2;
        }
        if num_names == 0 {
            return at + 1;
        }
        let alias = item.and_then(|_| match is_ident(tokens.get(at), "as") {
            true => ident(tokens.get(at + 1)),
            false => names.last().cloned(),
        });
        // A name by itself, such as `self` or a keyword, is no path.
        if num_names > 1 || !is_first || item.is_some() {
            self.push(line, names, is_rooted, alias, item);
        }
        at
    }

    /// Reads the list that a path ends with.
    fn list(
        &mut self,
        list: &TokenStream,
        names: &[String],
        is_rooted: bool,
        item: Option<UseItem>,
    ) {
        let tokens: Vec<_> = list.clone().into_iter().collect();
        let is_comma =
            |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ',');
        for path in tokens.split(is_comma).filter(|path| !path.is_empty()) {
            match path {
                [TokenTree::Punct(star)] if star.as_char() == '*' => {
                    let line = star.span().start().line;
                    let alias = item.map(|_| "*".to_owned());
                    self.push(line, names.to_vec(), is_rooted, alias, item);
                }
                _ => {
                    self.path(path, 0, Some((names.to_vec(), is_rooted)), item);
                }
            }
        }
    }

    fn push(
        &mut self,
        line: usize,
        names: Vec<String>,
        is_rooted: bool,
        alias: Option<String>,
        item: Option<UseItem>,
    ) {
        self.found.push(PathUse {
            line,
            module: self.module.clone(),
            names,
            is_rooted,
            alias,
            is_reexport: item.is_some_and(|item| item.is_reexport),
            is_test: self.is_test,
        });
    }
}

/// Whether the brackets at `at` are those of `pub(in crate::a)`: a path that takes nothing from where it leads.
fn is_visibility(tokens: &[TokenTree], at: usize, code: &TokenStream) -> bool {
    is_ident(at.checked_sub(1).and_then(|at| tokens.get(at)), "pub")
        && is_ident(code.clone().into_iter().next().as_ref(), "in")
}

/// Whether the item whose keyword is at `at` has a `pub` before it.
fn is_public(tokens: &[TokenTree], at: usize) -> bool {
    let before = |by: usize| at.checked_sub(by).and_then(|at| tokens.get(at));
    is_ident(before(1), "pub")
        || (matches!(before(1), Some(TokenTree::Group(_))) && is_ident(before(2), "pub"))
}

/// Whether the item whose keyword is at `at` has `#[cfg(test)]` before it.
fn is_for_tests(tokens: &[TokenTree], at: usize) -> bool {
    tokens[..at]
        .iter()
        .rev()
        .take_while(|token| match token {
            TokenTree::Group(group) => group.delimiter() != Delimiter::Brace,
            TokenTree::Punct(punct) => punct.as_char() == '#',
            TokenTree::Ident(ident) => ident == "pub",
            TokenTree::Literal(_) => false,
        })
        .any(|token| matches!(token, TokenTree::Group(group) if group.stream().to_string() == "cfg (test)"))
}

pub fn is_ident(token: Option<&TokenTree>, name: &str) -> bool {
    matches!(token, Some(TokenTree::Ident(ident)) if ident == name)
}

fn ident(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

fn is_path_sep(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |at| match tokens.get(at) {
        Some(TokenTree::Punct(punct)) if punct.as_char() == ':' => Some(punct.spacing()),
        _ => None,
    };
    colon(at) == Some(Spacing::Joint) && colon(at + 1).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file's module, its code, and each path with its line.
    type Case = (
        &'static [&'static str],
        &'static str,
        &'static [(usize, &'static str)],
    );

    #[test]
    fn paths_are_found_however_they_are_written() {
        let cases: &[Case] = &[
            (
                &["a"],
                "use crate::engine::Engine;",
                &[(1, "engine::Engine")],
            ),
            (
                &["a", "b"],
                "use crate::{\n    base::{BlockId, Tokens},\n    runner::{self},\n};",
                &[(2, "base::BlockId"), (2, "base::Tokens"), (3, "runner")],
            ),
            (
                &["a", "b"],
                "fn f() { crate::text::f() }",
                &[(1, "text::f")],
            ),
            (
                &["a", "b"],
                "mod tests {\n use crate::triton::Error;\n}",
                &[(2, "triton::Error")],
            ),
            (
                &["a", "b"],
                "use super::super::backend::Driver;",
                &[(1, "backend::Driver")],
            ),
            (
                &["a", "b"],
                "use super::{weights, super::engine};",
                &[(1, "a::weights"), (1, "engine")],
            ),
            (
                &["a", "b", "c"],
                "use super::super::weights;",
                &[(1, "a::weights")],
            ),
            (
                &["a"],
                "mod b { mod c {\n use super::super::super::engine; } }",
                &[(2, "engine")],
            ),
            (&["a"], "mod c { use super::b; }", &[(1, "a::b")]),
            (
                &["a"],
                "fn f() { assert!(x == crate\n  ::config::y); }",
                &[(2, "config::y")],
            ),
            (
                &["a"],
                "macro_rules! m { () => { $crate::sampling::f() } }",
                &[(1, "sampling::f")],
            ),
            (
                &["a"],
                "pub(crate) fn f(_: &'a u8) {} // crate::engine\nconst S: &str = \"crate::engine\";",
                &[],
            ),
            (
                &["a", "b"],
                "/// See [`crate::engine`].\npub(in crate::base) fn f(self) { self.x }",
                &[],
            ),
            (&["a"], "use crate::*;", &[(1, "")]),
            (&["a"], "use self::b::C;", &[(1, "a::b::C")]),
        ];
        for (module, code, expected) in cases {
            let module: Vec<_> = module.iter().map(|name| (*name).to_owned()).collect();
            let found: Vec<_> = paths(&tokens(code), &module)
                .into_iter()
                .filter(|path| path.is_rooted)
                .map(|path| (path.line, path.names.join("::")))
                .collect();
            let found: Vec<_> = found.iter().map(|(line, path)| (*line, &**path)).collect();
            assert_eq!(found, *expected, "{code}");
        }
    }

    #[test]
    fn a_path_without_a_root_is_as_it_is_written() {
        let code = "use std::time::{Duration, Instant as Now};\npub use child::Name;\nfn f() { child::f::<u8>() }";
        let found = paths(&tokens(code), &["a".to_owned()]);
        let written: Vec<_> = found
            .iter()
            .map(|path| {
                (
                    path.names.join("::"),
                    path.alias.as_deref(),
                    path.is_reexport,
                )
            })
            .collect();
        let expected = [
            ("std::time::Duration", Some("Duration"), false),
            ("std::time::Instant", Some("Now"), false),
            ("child::Name", Some("Name"), true),
            ("child::f", None, false),
        ];
        assert_eq!(
            written,
            expected.map(|(path, alias, is_reexport)| (path.to_owned(), alias, is_reexport))
        );
        assert!(found.iter().all(|path| !path.is_rooted && !path.is_test));
    }

    #[test]
    fn what_only_tests_have_is_known() {
        let code = "use a::b;\n#[cfg(test)]\nmod walks;\nmod shipped;\n#[cfg(test)]\nmod tests { use c::d; }\nuse e::f;";
        let found = paths(&tokens(code), &[]);
        let in_tests: Vec<_> = found.iter().map(|path| path.is_test).collect();
        assert_eq!(in_tests, [false, true, false]);
        assert_eq!(test_modules(&tokens(code)), ["walks", "tests"]);
    }

    fn tokens(code: &str) -> TokenStream {
        code.parse().expect("Rust")
    }
}
