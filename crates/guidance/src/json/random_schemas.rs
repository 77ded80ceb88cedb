//! Schemas drawn at random: whatever is accepted leads to an end, with a value that two independent validators find
//! valid.

use serde_json::{Map, Value, json};

use super::tests::{Bytes, END};
use super::{MAX_STEPS, Problem, compiled};

/// Random numbers: PCG's multiplier, the high bits.
struct Draw(u64);

impl Draw {
    fn below(&mut self, num: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % num
    }

    fn is_in(&mut self, one_of: usize) -> bool {
        self.below(one_of) == 0
    }

    fn one<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    fn small(&mut self, max: usize) -> Value {
        json!(self.below(max + 1))
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => json!(self.is_in(2)),
            2 => self.one(&[
                json!(0),
                json!(-3),
                json!(1.5),
                json!(9007199254740993u64),
                json!(2),
            ]),
            3 | 4 => self.one(&[
                json!("a"),
                json!("ab\n"),
                json!("b\"\\"),
                json!("é🦊"),
                json!(""),
            ]),
            5 => (0..self.below(3)).map(|_| self.value(depth - 1)).collect(),
            _ => {
                let members = (0..self.below(3))
                    .map(|index| (["a", "b c"][index % 2].to_owned(), self.value(depth - 1)));
                Value::Object(members.collect())
            }
        }
    }

    fn schema(&mut self, depth: usize) -> Value {
        let mut schema = Map::new();
        let mut put = |name: &str, value: Value| _ = schema.insert(name.to_owned(), value);
        match self.below(if depth == 0 { 6 } else { 14 }) {
            0 => return self.one(&[json!({}), json!(true), json!({"title": "x"})]),
            1 => put("enum", (0..=self.below(4)).map(|_| self.value(2)).collect()),
            2 => put("const", self.value(2)),
            3 => {
                put("type", json!("string"));
                let patterns = [
                    "^a",
                    "b$",
                    "^[a-c]{1,3}$",
                    "^(?=.*b)[ab]+$",
                    "[0-9]",
                    "^(a|bc)$|^d",
                    r"^\S+$",
                    "^[^x]*$",
                ];
                for (name, value) in [
                    ("minLength", self.small(3)),
                    ("maxLength", self.small(6)),
                    ("pattern", json!(self.one(&patterns))),
                    (
                        "format",
                        json!(self.one(&[
                            "date",
                            "uuid",
                            "time",
                            "ipv4",
                            "email",
                            "password",
                            "ipv6",
                            "duration",
                            "date-time",
                            "hostname"
                        ])),
                    ),
                ] {
                    if self.is_in(3) {
                        put(name, value);
                    }
                }
            }
            4 => {
                put("type", json!(self.one(&["integer", "number"])));
                let numbers = [
                    json!(0),
                    json!(-10),
                    json!(3),
                    json!(0.5),
                    json!(12.25),
                    json!(9007199254740993u64),
                ];
                for (name, value) in [
                    ("minimum", self.one(&numbers)),
                    ("maximum", self.one(&numbers)),
                    ("exclusiveMinimum", self.one(&numbers)),
                    ("exclusiveMaximum", self.one(&numbers)),
                    (
                        "multipleOf",
                        self.one(&[
                            json!(2),
                            json!(0.5),
                            json!(7),
                            json!(10),
                            json!(0.25),
                            json!(1),
                        ]),
                    ),
                ] {
                    if self.is_in(3) {
                        put(name, value);
                    }
                }
            }
            5 => put(
                "type",
                self.one(&[
                    json!("null"),
                    json!("boolean"),
                    json!(["string", "null"]),
                    json!(["integer", "boolean"]),
                ]),
            ),
            6 => {
                put("type", json!("array"));
                for (name, value) in [
                    ("items", self.schema(depth - 1)),
                    (
                        "prefixItems",
                        json!([self.schema(depth - 1), self.schema(depth - 1)]),
                    ),
                    ("minItems", self.small(2)),
                    ("maxItems", self.small(3)),
                    ("uniqueItems", json!(true)),
                    ("contains", self.schema(depth - 1)),
                    ("maxContains", json!(1)),
                    ("unevaluatedItems", json!(false)),
                ] {
                    if self.is_in(3) {
                        put(name, value);
                    }
                }
            }
            7..=9 => {
                put("type", json!("object"));
                let names = ["a", "ab", "b c"];
                let properties: Map<_, _> = names
                    .iter()
                    .filter(|_| !self.is_in(3))
                    .map(|name| ((*name).to_owned(), Value::Null))
                    .collect();
                let properties: Map<_, _> = properties
                    .into_iter()
                    .map(|(name, _)| (name, self.schema(depth - 1)))
                    .collect();
                put("properties", properties.into());
                let required = names.iter().filter(|_| self.is_in(2));
                put("required", required.map(|name| json!(name)).collect());
                for (name, value) in [
                    ("additionalProperties", json!(false)),
                    ("additionalProperties", self.schema(depth - 1)),
                    (
                        "patternProperties",
                        json!({"^a": self.schema(depth - 1), "b": self.schema(depth - 1)}),
                    ),
                    ("propertyNames", json!({"maxLength": 4})),
                    ("minProperties", self.small(3)),
                    ("maxProperties", self.small(3)),
                    ("dependentRequired", json!({"a": ["ab"]})),
                    ("dependentSchemas", json!({"ab": self.schema(depth - 1)})),
                    ("unevaluatedProperties", json!(false)),
                    (
                        "allOf",
                        json!([{"properties": {"z": self.schema(depth - 1)}}]),
                    ),
                ] {
                    if self.is_in(4) {
                        put(name, value);
                    }
                }
            }
            10 => {
                let name = self.one(&["anyOf", "oneOf", "allOf"]);
                put(
                    name,
                    (0..2 + self.below(2))
                        .map(|_| self.schema(depth - 1))
                        .collect(),
                );
                if self.is_in(3) {
                    put("type", json!(["object", "string", "integer"]));
                }
            }
            11 => {
                put("not", self.schema(depth - 1));
                put("type", json!(["integer", "string", "object", "array"]));
            }
            12 => {
                put("if", self.schema(depth - 1));
                put("then", self.schema(depth - 1));
                put("else", self.schema(depth - 1));
            }
            _ => put(
                "$ref",
                json!(self.one(&["#/$defs/d0", "#/$defs/d~1%31", "#named"])),
            ),
        }
        schema.into()
    }

    /// A schema with others that it may refer to.
    fn document(&mut self) -> Value {
        let mut schema = match self.schema(3) {
            Value::Object(members) => members,
            other => return other,
        };
        let mut named = self.schema(1);
        if let Some(members) = named.as_object_mut() {
            members.insert("$anchor".to_owned(), json!("named"));
        }
        if named.is_boolean() {
            named = json!({"$anchor": "named"});
        }
        let defs = json!({"d0": self.schema(2), "d/1": self.schema(1), "x": named});
        schema.insert("$defs".to_owned(), defs);
        schema.into()
    }
}

const QUOTE: u32 = b'"' as u32;
const BRACE: u32 = b'}' as u32;
const BRACKET: u32 = b']' as u32;

/// Whether JSON that has begun is within a text.
fn is_in_text(json: &[u8]) -> bool {
    let (mut in_text, mut is_escaped) = (false, false);
    for byte in json {
        match byte {
            _ if std::mem::take(&mut is_escaped) => {}
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            _ => {}
        }
    }
    in_text
}

/// A random text that a schema allows, which soon closes what it has opened.
fn walk(bytes: &Bytes, schema: &Value, draw: &mut Draw) -> Option<String> {
    let mut parser = bytes.parser_or_not(schema)?;
    let mut text = Vec::new();
    loop {
        if parser.check_stop().unwrap_or(true) {
            break;
        }
        let mask = parser.compute_mask().unwrap_or_else(|error| {
            panic!(
                "{schema}: {error} behind {:?}",
                String::from_utf8_lossy(&text)
            )
        });
        let allowed: Vec<u32> = (0..=END).filter(|token| mask.is_allowed(*token)).collect();
        assert!(
            !allowed.is_empty(),
            "{schema}: no token behind {:?}",
            String::from_utf8_lossy(&text)
        );
        assert!(
            text.len() < 3_000,
            "{schema}: no end: {:?}",
            String::from_utf8_lossy(&text)
        );
        let is_late = text.len() > 60;
        let in_text = is_in_text(&text);
        let closing: &[u32] = if in_text {
            &[QUOTE]
        } else {
            &[END, BRACE, BRACKET]
        };
        let closers: Vec<u32> = closing
            .iter()
            .copied()
            .filter(|token| allowed.contains(token))
            .collect();
        let is_plain =
            |token: &u32| in_text || *token > 255 || !b"{[ \n\r\t".contains(&(*token as u8));
        let plain: Vec<u32> = allowed.iter().copied().filter(is_plain).collect();
        let token = match closers.first() {
            Some(first) if is_late => *first,
            None if is_late && !plain.is_empty() => draw.one(&plain),
            Some(_) if draw.is_in(3) => draw.one(&closers),
            _ => draw.one(&allowed),
        };
        if token == END {
            break;
        }
        text.push(token as u8);
        parser.consume_token(token).expect("an allowed token");
    }
    Some(String::from_utf8(text).expect("text"))
}

#[test]
fn whatever_an_accepted_schema_generates_is_valid_by_two_validators() {
    let bytes = Bytes::new();
    let mut draw = Draw(1);
    let (mut num_schemas, mut num_both, mut num_texts, mut num_refused) = (0, 0, 0, 0);
    for _ in 0..NUM_SCHEMAS {
        let schema = draw.document();
        let Ok(validator) = jsonschema::options()
            .should_validate_formats(true)
            .build(&schema)
        else {
            continue;
        };
        let Ok((_, left_out)) = compiled(&schema, MAX_STEPS).map_err(Problem::text) else {
            num_refused += 1;
            continue;
        };
        let mut schemas = boon::Schemas::new();
        let mut compiler = boon::Compiler::new();
        compiler.enable_format_assertions();
        compiler
            .add_resource("schema.json", schema.clone())
            .expect("a resource");
        // This one has no look-ahead.
        let other = compiler.compile("schema.json", &mut schemas).ok();
        num_both += usize::from(other.is_some());
        num_schemas += 1;
        for _ in 0..4 {
            let Some(text) = walk(&bytes, &schema, &mut draw) else {
                break;
            };
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{schema}: {text:?}: {error}"));
            if !left_out.is_empty() {
                continue;
            }
            num_texts += 1;
            if let Err(error) = validator.validate(&value) {
                panic!("{schema}: {text}: {error}");
            }
            let error = other.and_then(|other| schemas.validate(&value, other).err());
            if let Some(error) = error {
                panic!("{schema}: {text}: {error}");
            }
        }
    }
    eprintln!(
        "{num_schemas} schemas, {num_both} for both, {num_refused} refused, {num_texts} texts"
    );
    assert!(num_both > NUM_SCHEMAS / 2, "{num_both}");
    assert!(num_texts > 2 * num_schemas, "{num_texts}");
}

const NUM_SCHEMAS: usize = 400;
