//! Values with behaviour: functions, macros, loops, namespaces.

use crate::value::{Function, Object, Value};

impl Function {
    pub(crate) const ALL: [(&'static str, Self); 8] = [
        ("range", Self::Range),
        ("dict", Self::Dict),
        ("namespace", Self::Namespace),
        ("cycler", Self::Cycler),
        ("joiner", Self::Joiner),
        ("lipsum", Self::Lipsum),
        ("raise_exception", Self::RaiseException),
        ("strftime_now", Self::StrftimeNow),
    ];
}

impl Object {
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Cycler { .. } => "Cycler",
            Self::Joiner { .. } => "Joiner",
            Self::Function(_) => "function",
            Self::Method { .. } => "method",
            Self::Blocks => "TemplateReference",
            Self::Block(_) => "BlockReference",
        }
    }

    /// Levels of values in each other. Others than these are emptied one by one at the end of a rendering.
    pub(crate) fn levels(&self) -> u32 {
        match self {
            Self::Method { of, .. } => of.levels() + 1,
            Self::Joiner { separator, .. } => separator.levels() + 1,
            Self::Cycler { items, .. } => {
                items.items.iter().map(Value::levels).max().unwrap_or(0) + 1
            }
            _ => 0,
        }
    }

    /// Whether Python can call it.
    pub(crate) fn is_callable(&self) -> bool {
        match self {
            Self::Namespace(_) | Self::Cycler { .. } | Self::Blocks => false,
            Self::Macro(_) | Self::Loop(_) | Self::Joiner { .. } => true,
            Self::Function(_) | Self::Method { .. } | Self::Block(_) => true,
        }
    }
}
