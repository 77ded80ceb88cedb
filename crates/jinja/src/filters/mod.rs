//! Jinja's filters.

mod markup;
mod numbers;
mod sequences;
mod text;
mod wrap;

use crate::budget::Budget;
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Arguments, Text, Value};

const NAMES: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

/// Whether there is a filter of this name.
pub(crate) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// A text with HTML's characters escaped.
pub(crate) fn escaped(text: &Text, budget: &mut Budget) -> Outcome<Text> {
    let num = text.bytes().filter(|byte| b"&<>'\"".contains(byte)).count();
    budget.make(text.len() + 5 * num)?;
    let mut out = String::with_capacity(text.len() + 5 * num);
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            char => out.push(char),
        }
    }
    Ok(Text::new(out))
}

impl Interpreter<'_> {
    /// A value after a filter.
    pub(crate) fn filter(
        &mut self,
        name: &str,
        value: Value,
        arguments: Arguments,
    ) -> Outcome<Value> {
        self.budget.work(1)?;
        self.budget.enter()?;
        let filtered = match name {
            "abs" | "float" | "int" | "round" | "sum" | "filesizeformat" => {
                self.number_filter(name, &value, arguments)?
            }
            "batch" | "slice" | "map" | "select" | "reject" | "selectattr" | "rejectattr"
            | "unique" | "groupby" | "sort" | "dictsort" | "min" | "max" | "first" | "last"
            | "list" | "reverse" | "items" | "count" | "length" => {
                self.sequence_filter(name, &value, arguments)?
            }
            "e" | "escape" | "forceescape" | "safe" | "striptags" | "urlencode" | "xmlattr" => {
                self.markup_filter(name, &value, arguments)?
            }
            "tojson" => self.json_filter(&value, arguments)?,
            "attr" => {
                let [attribute] = arguments.bind(name, ["name"])?;
                let attribute = crate::arguments::required(attribute, name)?;
                let attribute = crate::arguments::text(&attribute, name)?;
                match &value {
                    // Python finds no attribute of something undefined.
                    Value::Undefined(undefined) => return fail(&*undefined.message),
                    value => self.attribute_only(value, &attribute.text)?,
                }
            }
            "d" | "default" => {
                let [default, boolean] = arguments.bind(name, ["default_value", "boolean"])?;
                let is_missing = matches!(value, Value::Undefined(_))
                    || crate::arguments::flag(boolean.as_ref()) && !value.is_true();
                if is_missing {
                    default.unwrap_or_else(|| Value::str(""))
                } else {
                    value
                }
            }
            "random" | "urlize" => return fail(format!("the filter '{name}' is not supported")),
            _ if is_known(name) => self.text_filter(name, &value, arguments)?,
            _ => return fail(format!("there is no filter '{name}'")),
        };
        self.budget.leave();
        Ok(filtered)
    }
}
