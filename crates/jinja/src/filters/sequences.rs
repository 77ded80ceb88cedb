//! Filters about lists and dictionaries.

use std::cmp::Ordering;
use std::collections::HashSet;

use crate::arguments::{flag, given, int, int_flag, required, text};
use crate::error::{Outcome, fail};
use crate::interpreter::Interpreter;
use crate::value::{Arguments, Iter, Mapping, Object, Path, Value, View};

impl Interpreter<'_> {
    pub(super) fn sequence_filter(
        &mut self,
        name: &str,
        value: &Value,
        arguments: Arguments,
    ) -> Outcome<Value> {
        match name {
            "list" => {
                arguments.none(name)?;
                Value::list(self.items_of(value)?)
            }
            "count" | "length" => {
                arguments.none(name)?;
                self.length(value)
            }
            "items" => {
                arguments.none(name)?;
                match value {
                    Value::Undefined(_) => self.hold_iterator(Iter::Empty),
                    Value::Dict(dict) => {
                        self.hold_iterator(Iter::Dict(View::Items, dict.clone(), 0))
                    }
                    other => fail(format!(
                        "items: a mapping is needed, not '{}'",
                        other.type_name()
                    )),
                }
            }
            "first" => {
                arguments.none(name)?;
                let first = Iter::of(value)?.next(self)?;
                Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
            }
            "last" => {
                arguments.none(name)?;
                let last = self.items_reversed(value)?.into_iter().next();
                Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
            }
            "reverse" => {
                arguments.none(name)?;
                if let Value::Str(_) = value {
                    return self.slice(value, &Value::None, &Value::None, &Value::Int(-1));
                }
                let mut items = self.items_of(value)?;
                items.reverse();
                if matches!(value, Value::Iterator(_)) {
                    return Value::list(items);
                }
                self.hold_iterator(Iter::Values(items.into_iter()))
            }
            "batch" => {
                let [size, fill] = arguments.bind(name, ["linecount", "fill_with"])?;
                let size = int(&required(size, name)?, name)?;
                let source = Box::new(Iter::of(value)?);
                let fill = fill.unwrap_or(Value::None);
                self.hold_iterator(Iter::Batch { source, size, fill })
            }
            "slice" => {
                let [slices, fill] = arguments.bind(name, ["slices", "fill_with"])?;
                let slices = int(&required(slices, name)?, name)?;
                self.slices(value, slices, given(fill))
            }
            "map" => self.map(value, arguments),
            "select" | "reject" | "selectattr" | "rejectattr" => {
                self.select(name, value, arguments)
            }
            "unique" => {
                let [case_sensitive, attribute] =
                    arguments.bind(name, ["case_sensitive", "attribute"])?;
                let attribute = attribute.unwrap_or(Value::None);
                let path = Path::new(&attribute, !flag(case_sensitive.as_ref()))?;
                let source = Box::new(Iter::of(value)?);
                self.hold_iterator(Iter::Unique {
                    source,
                    path,
                    seen: HashSet::new(),
                })
            }
            "groupby" => self.group_by(value, arguments),
            "sort" => {
                let [reverse, case_sensitive, attribute] =
                    arguments.bind(name, ["reverse", "case_sensitive", "attribute"])?;
                let paths = Path::several(
                    &attribute.unwrap_or(Value::None),
                    !flag(case_sensitive.as_ref()),
                )?;
                let items = self.items_of(value)?;
                let mut keyed = Vec::with_capacity(items.len());
                for item in items {
                    self.budget.make(96)?;
                    let keys = paths
                        .iter()
                        .map(|path| path.of(&item, None, self))
                        .collect::<Outcome<_>>()?;
                    keyed.push((Value::list(keys)?, item));
                }
                Value::list(self.sorted(keyed, int_flag(reverse.as_ref(), "reverse")?)?)
            }
            "dictsort" => self.dict_sort(value, arguments),
            _ => {
                let [case_sensitive, attribute] =
                    arguments.bind(name, ["case_sensitive", "attribute"])?;
                let path = Path::new(
                    &attribute.unwrap_or(Value::None),
                    !flag(case_sensitive.as_ref()),
                )?;
                self.extreme(name, value, &path)
            }
        }
    }

    /// `len(value)`.
    fn length(&mut self, value: &Value) -> Outcome<Value> {
        if let Value::Str(text) = value
            && !text.is_ascii
        {
            self.budget.read(text.len())?;
        }
        if let Value::Object(object) = value
            && let Object::Loop(state) = &**object
            && let Ok(mut state) = state.try_borrow_mut()
        {
            return Ok(Value::Int(state.length(self)? as i128));
        }
        match self.length_of(value) {
            Some(length) => Ok(Value::Int(length as i128)),
            None => fail(format!(
                "object of type '{}' has no len()",
                value.type_name()
            )),
        }
    }

    /// The items of a value that can be gone through from its end.
    fn items_reversed(&mut self, value: &Value) -> Outcome<Vec<Value>> {
        if let Value::Iterator(_) | Value::Object(_) = value {
            return fail(format!("'{}' object is not reversible", value.type_name()));
        }
        let mut items = self.items_of(value)?;
        items.reverse();
        Ok(items)
    }

    fn slices(&mut self, value: &Value, slices: i128, fill: Option<Value>) -> Outcome<Value> {
        let items = self.items_of(value)?;
        let Ok(num) = usize::try_from(slices) else {
            return if slices < 0 {
                self.hold_iterator(Iter::Empty)
            } else {
                fail("slice: too many slices")
            };
        };
        if num == 0 {
            return fail("slice: division by zero");
        }
        self.budget.make_many(num, 128)?;
        let (each, extra) = (items.len() / num, items.len() % num);
        let mut parts = Vec::with_capacity(num);
        let mut start = 0;
        for slice in 0..num {
            let length = each + usize::from(slice < extra);
            let mut part = items[start..start + length].to_vec();
            start += length;
            if let Some(fill) = &fill
                && slice >= extra
            {
                part.push(fill.clone());
            }
            parts.push(Value::list(part)?);
        }
        self.hold_iterator(Iter::Values(parts.into_iter()))
    }

    fn map(&mut self, value: &Value, mut arguments: Arguments) -> Outcome<Value> {
        if !value.is_true() {
            return self.hold_iterator(Iter::Empty);
        }
        let source = Box::new(Iter::of(value)?);
        let mapping = if arguments.positional.is_empty() {
            let [attribute, default] = arguments.bind("map", ["attribute", "default"])?;
            let Some(attribute) = attribute else {
                return fail("map requires a filter argument");
            };
            Mapping::Attribute {
                path: Path::new(&attribute, false)?,
                default: given(default),
            }
        } else {
            let name = arguments.positional.remove(0);
            Mapping::Filter(text(&name, "map")?.clone(), arguments)
        };
        self.hold_iterator(Iter::Map { source, mapping })
    }

    /// An item after the filter `map`.
    pub(crate) fn mapped(&mut self, mapping: &Mapping, item: Value) -> Outcome<Value> {
        match mapping {
            Mapping::Attribute { path, default } => path.of(&item, default.as_ref(), self),
            Mapping::Filter(name, arguments) => self.filter(name, item, arguments.clone()),
        }
    }

    fn select(&mut self, name: &str, value: &Value, mut arguments: Arguments) -> Outcome<Value> {
        if !value.is_true() {
            return self.hold_iterator(Iter::Empty);
        }
        let source = Box::new(Iter::of(value)?);
        let mut path = None;
        if name.ends_with("attr") {
            if arguments.positional.is_empty() {
                return fail(format!("{name}: missing parameter for attribute name"));
            }
            path = Some(Path::new(&arguments.positional.remove(0), false)?);
        }
        let test = if arguments.positional.is_empty() {
            None
        } else {
            let test = arguments.positional.remove(0);
            Some((text(&test, name)?.clone(), arguments))
        };
        let expected = name.starts_with("select");
        self.hold_iterator(Iter::Select {
            source,
            path,
            test,
            expected,
        })
    }

    /// The values in the order of their keys; equal ones stay as they are.
    fn sorted(&mut self, mut keyed: Vec<(Value, Value)>, is_reversed: bool) -> Outcome<Vec<Value>> {
        // A stable order from the end is a stable order of the reversed list, reversed.
        if is_reversed {
            keyed.reverse();
        }
        let mut keyed = self.merge_sorted(keyed)?;
        if is_reversed {
            keyed.reverse();
        }
        Ok(keyed.into_iter().map(|(_, value)| value).collect())
    }

    /// A sort that bears comparisons that fail or contradict each other.
    fn merge_sorted(&mut self, mut keyed: Vec<(Value, Value)>) -> Outcome<Vec<(Value, Value)>> {
        if keyed.len() < 2 {
            return Ok(keyed);
        }
        self.budget.make_many(keyed.len(), 2 * size_of::<Value>())?;
        let right = keyed.split_off(keyed.len() / 2);
        let mut left = self.merge_sorted(keyed)?.into_iter().peekable();
        let mut right = self.merge_sorted(right)?.into_iter().peekable();
        let mut merged = Vec::with_capacity(left.len() + right.len());
        while let (Some((before, _)), Some((after, _))) = (left.peek(), right.peek()) {
            let is_swapped = self.order(after, before, "<")? == Some(Ordering::Less);
            merged.extend(if is_swapped {
                right.next()
            } else {
                left.next()
            });
        }
        merged.extend(left);
        merged.extend(right);
        Ok(merged)
    }

    fn dict_sort(&mut self, value: &Value, arguments: Arguments) -> Outcome<Value> {
        let [case_sensitive, by, reverse] =
            arguments.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
        let by = by.unwrap_or_else(|| Value::str("key"));
        let is_by_key = match by.as_text().map(|by| &*by.text) {
            Some("key") => true,
            Some("value") => false,
            _ => return fail("dictsort: you can only sort by either 'key' or 'value'"),
        };
        let Value::Dict(dict) = value else {
            return fail(format!(
                "dictsort: a dictionary is needed, not '{}'",
                value.type_name()
            ));
        };
        let whole = Path::new(&Value::None, !flag(case_sensitive.as_ref()))?;
        let mut keyed = Vec::new();
        for (key, value) in dict.items.values() {
            self.budget.make(160)?;
            let sort_key = whole.of(if is_by_key { key } else { value }, None, self)?;
            keyed.push((sort_key, Value::tuple(vec![key.clone(), value.clone()])?));
        }
        Value::list(self.sorted(keyed, int_flag(reverse.as_ref(), "reverse")?)?)
    }

    fn group_by(&mut self, value: &Value, arguments: Arguments) -> Outcome<Value> {
        let [attribute, default, case_sensitive] =
            arguments.bind("groupby", ["attribute", "default", "case_sensitive"])?;
        let attribute = required(attribute, "groupby")?;
        let default = given(default);
        let is_case_sensitive = flag(case_sensitive.as_ref());
        let path = Path::new(&attribute, !is_case_sensitive)?;
        let shown = Path::new(&attribute, false)?;
        let mut keyed = Vec::new();
        for item in self.items_of(value)? {
            self.budget.make(192)?;
            let key = path.of(&item, default.as_ref(), self)?;
            keyed.push((key.clone(), Value::tuple(vec![key, item])?));
        }
        let mut groups = Vec::new();
        let mut current: Option<(Value, Vec<Value>)> = None;
        for pair in self.sorted(keyed, false)? {
            let pair = self.items_of(&pair)?;
            let [key, item] = pair.as_slice() else {
                continue;
            };
            match &mut current {
                Some((last, items)) if self.equal(last, key)? => items.push(item.clone()),
                _ => {
                    groups.extend(current.replace((key.clone(), vec![item.clone()])));
                }
            }
        }
        groups.extend(current);
        let mut out = Vec::with_capacity(groups.len());
        for (mut key, items) in groups {
            if !is_case_sensitive && let Some(first) = items.first() {
                key = shown.of(first, default.as_ref(), self)?;
            }
            out.push(Value::group(key, Value::list(items)?)?);
        }
        Value::list(out)
    }

    fn extreme(&mut self, name: &str, value: &Value, path: &Path) -> Outcome<Value> {
        let mut iter = Iter::of(value)?;
        let Some(mut best) = iter.next(self)? else {
            return Ok(Value::undefined("No aggregated item, sequence was empty."));
        };
        let mut best_key = path.of(&best, None, self)?;
        while let Some(item) = iter.next(self)? {
            let key = path.of(&item, None, self)?;
            let (symbol, better) = if name == "min" {
                ("<", Ordering::Less)
            } else {
                (">", Ordering::Greater)
            };
            if self.order(&key, &best_key, symbol)? == Some(better) {
                (best, best_key) = (item, key);
            }
        }
        Ok(best)
    }
}
