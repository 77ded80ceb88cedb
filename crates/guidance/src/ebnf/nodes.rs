//! A grammar as rules that refer to each other only, so that its ambiguities show.

use super::grammar::{Expr, Grammar, does_not_recurse};
use super::terminals::terminals;

/// A rule, or an unlimited repetition in a rule with recursion.
pub(super) struct Node<'a> {
    /// The rule that it is, or is in.
    pub(super) rule: usize,
    /// The repetition in the grammar, if the node is one.
    pub(super) repetition: Option<&'a Expr>,
    /// The body of the rule or of the repetition, with nodes by number in place of rules.
    body: Expr,
    /// Whether it may be left out.
    is_optional: bool,
    is_nullable: bool,
    /// Whether it has a text.
    pub(super) is_live: bool,
}

/// The nodes of a grammar: its rules by number, and then repetitions.
pub(super) struct Nodes<'a> {
    /// The nodes.
    pub(super) nodes: Vec<Node<'a>>,
    /// Which rules are regular expressions.
    pub(super) is_terminal: Vec<bool>,
    firsts: Vec<Vec<usize>>,
    lasts: Vec<Vec<usize>>,
}

impl<'a> Nodes<'a> {
    /// The nodes of `grammar`.
    pub(super) fn new(grammar: &'a Grammar) -> Self {
        let mut is_terminal = vec![false; grammar.rules.len()];
        for rule in terminals(&grammar.rules) {
            is_terminal[rule] = true;
        }
        let rules = grammar.rules.iter().enumerate();
        let node = |(rule, body): (usize, &Expr)| Node {
            rule,
            repetition: None,
            body: body.clone(),
            is_optional: false,
            is_nullable: false,
            is_live: false,
        };
        let mut nodes = Self {
            nodes: rules.map(node).collect(),
            is_terminal,
            firsts: Vec::new(),
            lasts: Vec::new(),
        };
        for (rule, body) in grammar.rules.iter().enumerate() {
            nodes.nodes[rule].body = nodes.without_repetitions(rule, body);
        }
        nodes.find_properties();
        nodes.firsts = nodes.corners(true);
        nodes.lasts = nodes.corners(false);
        nodes
    }

    /// Whether a node's text may begin with a text of the node itself.
    pub(super) fn begins_with_itself(&self, node: usize) -> bool {
        reaches(&self.firsts, node)
    }

    /// Whether a node's text may end with a text of the node itself.
    pub(super) fn ends_with_itself(&self, node: usize) -> bool {
        reaches(&self.lasts, node)
    }

    /// Whether what a repetition repeats may be empty.
    pub(super) fn repeats_nothing(&self, repetition: usize) -> bool {
        self.is_nullable(&self.nodes[repetition].body)
    }

    /// Whether what a repetition repeats may be no more than a repetition.
    pub(super) fn repeats_a_repetition(&self, repetition: usize) -> bool {
        let mut is_seen = vec![false; self.nodes.len()];
        let mut stack = vec![&self.nodes[repetition].body];
        while let Some(expr) = stack.pop() {
            match expr {
                Expr::Any(options) => stack.extend(options),
                Expr::All(parts) if parts.len() == 1 => stack.extend(parts),
                Expr::Rule(node) if self.nodes[*node].repetition.is_some() => {
                    if self.nodes[*node].is_live {
                        return true;
                    }
                }
                Expr::Rule(node) if !std::mem::replace(&mut is_seen[*node], true) => {
                    stack.push(&self.nodes[*node].body);
                }
                Expr::All(_) | Expr::Repeat(..) | Expr::Regex(_) | Expr::Rule(_) => {}
            }
        }
        false
    }

    /// `expr` with a new node in place of each unlimited repetition of what has recursion.
    fn without_repetitions(&mut self, rule: usize, expr: &'a Expr) -> Expr {
        if does_not_recurse(expr, &self.is_terminal) {
            return expr.clone();
        }
        let mut all = |parts: &'a [Expr]| {
            let parts = parts.iter();
            parts.map(|it| self.without_repetitions(rule, it)).collect()
        };
        match expr {
            Expr::Any(options) => Expr::Any(all(options)),
            Expr::All(parts) => Expr::All(all(parts)),
            Expr::Repeat(inner, min, Some(max)) => {
                let inner = self.without_repetitions(rule, inner);
                Expr::Repeat(Box::new(inner), *min, Some(*max))
            }
            Expr::Repeat(inner, min, None) => {
                let body = self.without_repetitions(rule, inner);
                self.nodes.push(Node {
                    rule,
                    repetition: Some(expr),
                    body,
                    is_optional: *min == 0,
                    is_nullable: false,
                    is_live: false,
                });
                Expr::Rule(self.nodes.len() - 1)
            }
            Expr::Rule(_) | Expr::Regex(_) => expr.clone(),
        }
    }

    /// Finds which nodes may be empty, and which have a text, from those that do not need others.
    fn find_properties(&mut self) {
        let mut is_same = false;
        while !is_same {
            is_same = true;
            for node in 0..self.nodes.len() {
                let Node {
                    body, is_optional, ..
                } = &self.nodes[node];
                let is_nullable = *is_optional || self.is_nullable(body);
                let is_live = *is_optional || self.is_live(body);
                let node = &mut self.nodes[node];
                is_same &= (node.is_nullable, node.is_live) == (is_nullable, is_live);
                (node.is_nullable, node.is_live) = (is_nullable, is_live);
            }
        }
    }

    fn is_nullable(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Any(options) => options.iter().any(|it| self.is_nullable(it)),
            Expr::All(parts) => parts.iter().all(|it| self.is_nullable(it)),
            Expr::Repeat(inner, min, _) => *min == 0 || self.is_nullable(inner),
            Expr::Regex(regex) => regex.is_empty(),
            Expr::Rule(node) => self.nodes[*node].is_nullable,
        }
    }

    /// Whether `expr` has a text.
    pub(super) fn is_live(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Any(options) => options.iter().any(|it| self.is_live(it)),
            Expr::All(parts) => parts.iter().all(|it| self.is_live(it)),
            Expr::Repeat(inner, min, _) => *min == 0 || self.is_live(inner),
            Expr::Regex(_) => true,
            Expr::Rule(node) => self.nodes[*node].is_live,
        }
    }

    /// The nodes that each node's text may begin with, or end with.
    fn corners(&self, is_first: bool) -> Vec<Vec<usize>> {
        let numbers = 0..self.nodes.len();
        let of_node = |number: usize| {
            let node = &self.nodes[number];
            let mut found = Vec::new();
            self.add_corners(&node.body, is_first, &mut found);
            if node.repetition.is_some() && self.is_nullable(&node.body) {
                found.push(number);
            }
            found
        };
        numbers.map(of_node).collect()
    }

    fn add_corners(&self, expr: &Expr, is_first: bool, found: &mut Vec<usize>) {
        if !self.is_live(expr) {
            return;
        }
        match expr {
            Expr::Any(options) => {
                let options = options.iter();
                options.for_each(|it| self.add_corners(it, is_first, found));
            }
            Expr::All(parts) => {
                for index in 0..parts.len() {
                    let part = match is_first {
                        true => &parts[index],
                        false => &parts[parts.len() - 1 - index],
                    };
                    self.add_corners(part, is_first, found);
                    if !self.is_nullable(part) {
                        return;
                    }
                }
            }
            Expr::Repeat(_, _, Some(0)) | Expr::Regex(_) => {}
            Expr::Repeat(inner, ..) => self.add_corners(inner, is_first, found),
            Expr::Rule(node) => found.push(*node),
        }
    }
}

/// Whether a node leads back to itself.
fn reaches(edges: &[Vec<usize>], node: usize) -> bool {
    let mut is_seen = vec![false; edges.len()];
    let mut stack = edges[node].clone();
    while let Some(next) = stack.pop() {
        if next == node {
            return true;
        }
        if !std::mem::replace(&mut is_seen[next], true) {
            stack.extend(&edges[next]);
        }
    }
    false
}
