//! Which special names a part of a template uses.

use crate::ast::{Expr, ExprKind, FilterStep, For, Macro, Statement, StatementKind, Target};

/// The special variables of a macro that its body reads.
#[derive(Default)]
pub(crate) struct Special {
    pub(crate) caller: bool,
    pub(crate) kwargs: bool,
    pub(crate) varargs: bool,
}

/// Finds the special variables that are read before they are assigned.
pub(crate) fn special_parameters(body: &[Statement]) -> Special {
    let names = ["caller", "kwargs", "varargs"];
    let mut is_read = [false; 3];
    let mut is_hidden = [false; 3];
    walk(body, &mut |name, access| {
        if let Some(at) = names.iter().position(|special| *special == name) {
            match access {
                Access::Load if !is_hidden[at] => is_read[at] = true,
                Access::Load => {}
                Access::Store | Access::Parameter => is_hidden[at] = true,
            }
        }
    });
    let [caller, kwargs, varargs] = is_read;
    Special {
        caller,
        kwargs,
        varargs,
    }
}

/// Whether a loop assigns the name `loop` anywhere.
pub(crate) fn assigns_loop(parsed: &For) -> bool {
    let mut found = false;
    walk_for(parsed, &mut |name, access| {
        found |= name == "loop" && access == Access::Store
    });
    found
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Load,
    Store,
    /// Of a macro or of `with`.
    Parameter,
}

type Visit<'v> = &'v mut dyn FnMut(&str, Access);

fn walk(body: &[Statement], visit: Visit<'_>) {
    for statement in body {
        match &statement.kind {
            StatementKind::Text(_) | StatementKind::Break | StatementKind::Continue => {}
            // A block has variables of its own.
            StatementKind::Block { .. } => {}
            StatementKind::Print(values) => {
                values.iter().for_each(|value| expression(value, visit))
            }
            StatementKind::Set { target, value } => {
                assigned(target, Access::Store, visit);
                expression(value, visit);
            }
            StatementKind::SetBlock {
                target,
                filters,
                body,
            } => {
                assigned(target, Access::Store, visit);
                steps(filters, visit);
                walk(body, visit);
            }
            StatementKind::For(parsed) => walk_for(parsed, visit),
            StatementKind::If {
                branches,
                otherwise,
            } => {
                for (test, body) in branches {
                    expression(test, visit);
                    walk(body, visit);
                }
                walk(otherwise, visit);
            }
            StatementKind::With {
                targets,
                values,
                body,
            } => {
                targets
                    .iter()
                    .for_each(|target| assigned(target, Access::Parameter, visit));
                values.iter().for_each(|value| expression(value, visit));
                walk(body, visit);
            }
            StatementKind::Filter { filters, body } => {
                walk(body, visit);
                steps(filters, visit);
            }
            StatementKind::Macro(definition) => function(definition, visit),
            StatementKind::Call { body, call } => {
                expression(call, visit);
                function(body, visit);
            }
            StatementKind::Generation(body) | StatementKind::Scope(body) => walk(body, visit),
        }
    }
}

fn walk_for(parsed: &For, visit: Visit<'_>) {
    assigned(&parsed.target, Access::Store, visit);
    expression(&parsed.iterable, visit);
    walk(&parsed.body, visit);
    walk(&parsed.otherwise, visit);
    parsed
        .condition
        .iter()
        .for_each(|value| expression(value, visit));
}

fn function(definition: &Macro, visit: Visit<'_>) {
    definition
        .parameters
        .iter()
        .for_each(|name| visit(name, Access::Parameter));
    definition
        .defaults
        .iter()
        .for_each(|value| expression(value, visit));
    walk(&definition.body, visit);
}

fn steps(filters: &[FilterStep], visit: Visit<'_>) {
    for step in filters {
        step.arguments
            .expressions()
            .for_each(|value| expression(value, visit));
    }
}

fn assigned(target: &Target, access: Access, visit: Visit<'_>) {
    match target {
        Target::Name(name) => visit(name, access),
        // The namespace is read.
        Target::Attribute(..) => {}
        Target::Tuple(targets) => targets
            .iter()
            .for_each(|target| assigned(target, access, visit)),
    }
}

fn expression(value: &Expr, visit: Visit<'_>) {
    if let ExprKind::Name(name) = &*value.kind {
        visit(name, Access::Load);
    }
    value
        .kind
        .visit_children(&mut |child| expression(child, visit));
}
