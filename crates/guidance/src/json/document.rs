//! A schema as a document: its values by number, and what its references lead to.

use std::collections::HashMap;
use std::rc::Rc;

use serde_json::Value;

use crate::grammar_error::GrammarError;

/// Number of a value within the document.
pub(super) type Id = usize;

pub(super) struct Document<'a> {
    nodes: Vec<Node<'a>>,
    ids: HashMap<*const Value, Id>,
    /// Schemas by their address.
    resources: HashMap<String, Id>,
    /// Schemas by the address that they are part of, and their name.
    anchors: HashMap<(Rc<str>, &'a str), Id>,
}

struct Node<'a> {
    value: &'a Value,
    parent: Option<Id>,
    key: Key<'a>,
    /// The address that its references are relative to.
    base: Rc<str>,
}

#[derive(Clone, Copy)]
enum Key<'a> {
    Name(&'a str),
    Index(usize),
}

impl<'a> Document<'a> {
    pub fn new(schema: &'a Value) -> Self {
        let mut document = Self {
            nodes: Vec::new(),
            ids: HashMap::new(),
            resources: HashMap::new(),
            anchors: HashMap::new(),
        };
        document.resources.insert(String::new(), 0);
        document.add_all(schema);
        document
    }

    fn add_all(&mut self, root: &'a Value) {
        let mut rest = vec![(root, None, Key::Name(""), Rc::from(""))];
        while let Some((value, parent, key, base)) = rest.pop() {
            let id = self.nodes.len();
            let base = self.register(id, value, base);
            self.ids.insert(std::ptr::from_ref(value), id);
            let part = |key, value| (value, Some(id), key, base.clone());
            match value {
                Value::Object(members) => {
                    let members = members.iter().rev();
                    rest.extend(members.map(|(name, value)| part(Key::Name(name), value)));
                }
                Value::Array(list) => {
                    let list = list.iter().enumerate().rev();
                    rest.extend(list.map(|(index, value)| part(Key::Index(index), value)));
                }
                _ => {}
            }
            self.nodes.push(Node {
                value,
                parent,
                key,
                base,
            });
        }
    }

    /// Takes the address and the names of a value, and returns what its references are relative to.
    fn register(&mut self, id: Id, value: &'a Value, mut base: Rc<str>) -> Rc<str> {
        let text = |name: &str| value.get(name).and_then(Value::as_str);
        match text("$id").map(|address| address.split_once('#').unwrap_or((address, ""))) {
            // A name, in older drafts.
            Some(("", name)) => _ = self.anchors.entry((base.clone(), name)).or_insert(id),
            Some((address, _)) => {
                base = joined(&base, address).into();
                self.resources.entry(base.to_string()).or_insert(id);
            }
            None => {}
        }
        for name in ["$anchor", "$dynamicAnchor"].into_iter().filter_map(text) {
            self.anchors.entry((base.clone(), name)).or_insert(id);
        }
        base
    }

    /// The number of a value of the document.
    pub fn id(&self, value: &'a Value) -> Id {
        self.ids
            .get(&std::ptr::from_ref(value))
            .copied()
            .unwrap_or(0)
    }

    pub fn value(&self, id: Id) -> &'a Value {
        self.nodes[id].value
    }

    /// Whether one of these keywords is in it.
    pub fn has_key(&self, keywords: &[&str]) -> bool {
        let is_one =
            |node: &Node<'_>| matches!(node.key, Key::Name(name) if keywords.contains(&name));
        self.nodes.iter().any(is_one)
    }

    /// Where a value is, as a JSON pointer.
    pub fn path(&self, id: Id) -> String {
        let mut keys = Vec::new();
        let mut node = &self.nodes[id];
        while let Some(parent) = node.parent {
            keys.push(match node.key {
                Key::Name(name) => name.replace('~', "~0").replace('/', "~1"),
                Key::Index(index) => index.to_string(),
            });
            node = &self.nodes[parent];
        }
        keys.iter().rev().map(|key| format!("/{key}")).collect()
    }

    /// The schema that a reference in a schema leads to.
    ///
    /// # Errors
    /// It leads out of the document, or to nothing.
    pub fn referred(&self, from: Id, reference: &str) -> Result<Id, GrammarError> {
        let (address, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let base = &self.nodes[from].base;
        let address = if address.is_empty() {
            base.to_string()
        } else {
            joined(base, address)
        };
        let Some(&resource) = self.resources.get(&address) else {
            return Err(format!(
                "its '$ref' to '{reference}' leads out of the schema; copy what it refers to into '$defs'"
            ));
        };
        let missing = || format!("its '$ref' to '{reference}' leads to nothing in the schema");
        let fragment = percent_decoded(fragment).ok_or_else(missing)?;
        if fragment.is_empty() {
            return Ok(resource);
        }
        if !fragment.starts_with('/') {
            let base = self.nodes[resource].base.clone();
            let own = self.anchors.get(&(base, &*fragment));
            return own.copied().ok_or_else(missing);
        }
        // Some write "#/" for the whole document.
        if fragment == "/" && self.value(resource).get("").is_none() {
            return Ok(resource);
        }
        let found = self
            .value(resource)
            .pointer(&fragment)
            .ok_or_else(missing)?;
        Ok(self.id(found))
    }
}

/// An address, relative to another one (RFC 3986, section 5.2, without merging of paths beyond the last segment).
fn joined(base: &str, address: &str) -> String {
    let scheme = |text: &str| {
        let (scheme, rest) = text.split_once(':')?;
        let is_scheme = scheme.starts_with(|it: char| it.is_ascii_alphabetic())
            && scheme
                .chars()
                .all(|it| it.is_ascii_alphanumeric() || "+-.".contains(it));
        is_scheme.then(|| (scheme.to_owned(), rest.to_owned()))
    };
    if scheme(address).is_some() {
        return address.to_owned();
    }
    let Some((name, rest)) = scheme(base) else {
        return in_folder(base, address);
    };
    match rest.strip_prefix("//") {
        _ if address.starts_with("//") => format!("{name}:{address}"),
        None => format!("{name}:{}", in_folder(&rest, address)),
        Some(rest) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let path = if path.is_empty() { "/" } else { path };
            format!("{name}://{host}{}", in_folder(path, address))
        }
    }
}

fn in_folder(path: &str, address: &str) -> String {
    let whole = match address.starts_with('/') {
        true => address.to_owned(),
        false => format!(
            "{}{address}",
            &path[..path.rfind('/').map_or(0, |end| end + 1)]
        ),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "." => {}
            ".." if parts.last().is_some_and(|last| !last.is_empty()) => _ = parts.pop(),
            ".." => {}
            other => parts.push(other),
        }
    }
    parts.join("/")
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        let code = behind.get(..2).and_then(|it| std::str::from_utf8(it).ok());
        match code
            .filter(|_| byte == b'%')
            .map(|it| u8::from_str_radix(it, 16))
        {
            Some(Ok(decoded)) => {
                bytes.push(decoded);
                rest = &behind[2..];
            }
            _ => {
                bytes.push(byte);
                rest = behind;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reference_resolves_within_the_document() {
        let schema = json!({
            "$id": "https://example.com/schemas/root.json",
            "$defs": {
                "a/b": {"const": "slash"}, "a~b": {"const": "tilde"}, "F<B>": {"const": "generic"}, "é": {"const": "accent"},
                "named": {"$anchor": "here", "const": "anchor"},
                "part": {"$id": "parts/one.json", "$defs": {"x": {"$anchor": "deep", "const": "in the part"}}},
                "urn": {"$id": "urn:example:two", "const": "urn"},
                "old": {"$id": "#legacy", "const": "name of an older draft"},
            },
            "prefixItems": [{"const": "first"}],
        });
        let document = Document::new(&schema);
        let part = document.id(schema.pointer("/$defs/part").expect("it is there"));
        for (from, reference, expected) in [
            (0, "#/$defs/a~1b", "slash"),
            (0, "#/$defs/a~0b", "tilde"),
            (0, "#/%24defs/a~1b", "slash"),
            (0, "#/$defs/F%3CB%3E", "generic"),
            (0, "#/$defs/F<B>", "generic"),
            (0, "#/$defs/%C3%A9", "accent"),
            (0, "#/prefixItems/0", "first"),
            (0, "#here", "anchor"),
            (0, "root.json#here", "anchor"),
            (0, "https://example.com/schemas/root.json#here", "anchor"),
            (0, "/schemas/root.json#/$defs/named", "anchor"),
            (0, "parts/one.json#deep", "in the part"),
            (0, "./parts/../parts/one.json#/$defs/x", "in the part"),
            (0, "urn:example:two", "urn"),
            (0, "#legacy", "name of an older draft"),
            (part, "#/$defs/x", "in the part"),
            (part, "#deep", "in the part"),
            (part, "../root.json#here", "anchor"),
        ] {
            let id = document
                .referred(from, reference)
                .unwrap_or_else(|error| panic!("{reference}: {error}"));
            assert_eq!(document.value(id)["const"], expected, "{reference}");
        }
        assert_eq!(document.referred(0, "#"), Ok(0));
        assert_eq!(document.referred(part, "#"), Ok(part));
        for (reference, words) in [
            ("http://localhost/x.json", "leads out of the schema"),
            ("file:///etc/passwd", "leads out of the schema"),
            ("two.json#here", "leads out of the schema"),
            ("#/$defs/none", "leads to nothing"),
            ("#none", "leads to nothing"),
            ("#/prefixItems/1", "leads to nothing"),
            ("#/%FF", "leads to nothing"),
        ] {
            let error = document.referred(0, reference).expect_err(reference);
            assert!(error.contains(words), "{reference}: {error}");
        }
    }

    #[test]
    fn a_part_of_the_document_has_a_path() {
        let schema = json!({"properties": {"a/b": {"anyOf": [true, {"not": {}}]}}});
        let document = Document::new(&schema);
        let part = schema
            .pointer("/properties/a~1b/anyOf/1/not")
            .expect("it is there");
        assert_eq!(
            document.path(document.id(part)),
            "/properties/a~1b/anyOf/1/not"
        );
        assert_eq!(document.path(0), "");
    }
}
