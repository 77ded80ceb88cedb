//! The parts of a reply, one behind the other as a stream writes them: thoughts, texts, and calls of functions.

use serde_json::Value;

use crate::generation::Row;

/// A part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The reasoning.
    Thought,
    /// The text of the answer.
    Text,
    /// A call of a function.
    Call {
        /// The id that the backend gives the call.
        id: String,
        /// The function.
        name: String,
    },
}

/// A new piece of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A part begins. The one before it has ended.
    Begin(Part),
    /// More text of the part, or more arguments of the call.
    More(String),
    /// The part ends.
    End,
}

/// Divides the rows of a reply into parts.
#[derive(Debug, Default)]
pub struct Parts {
    /// The part that grows.
    open: Option<Part>,
    /// White space that begins a part if more follows.
    blank: String,
}

impl Parts {
    /// The pieces of a row.
    pub fn read(&mut self, row: Row) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.grow(Part::Thought, row.reasoning, &mut pieces);
        self.grow(Part::Text, row.text, &mut pieces);
        for call in &row.tool_calls {
            self.call(call, &mut pieces);
        }
        pieces
    }

    /// The piece behind the last row, if a part is open.
    pub fn finish(&mut self) -> Option<Piece> {
        self.open.take().map(|_| Piece::End)
    }

    /// Adds to the text of the open part, or of a new one.
    fn grow(&mut self, part: Part, text: String, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        if self.open.as_ref() == Some(&part) {
            return pieces.push(Piece::More(text));
        }
        // There is white space between a thought, a call, and what is next. No part is made of it.
        self.blank.push_str(&text);
        if !text.trim().is_empty() {
            self.begin(part, pieces);
            pieces.push(Piece::More(std::mem::take(&mut self.blank)));
        }
    }

    /// Adds a call, or what is new of the last one.
    fn call(&mut self, call: &Value, pieces: &mut Vec<Piece>) {
        let function = &call["function"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if function["name"].is_string() {
            self.blank.clear();
            let (id, name) = (text(&call["id"]), text(&function["name"]));
            self.begin(Part::Call { id, name }, pieces);
        }
        if matches!(self.open, Some(Part::Call { .. })) {
            pieces.push(Piece::More(text(&function["arguments"])));
        }
    }

    fn begin(&mut self, part: Part, pieces: &mut Vec<Piece>) {
        pieces.extend(self.finish());
        pieces.push(Piece::Begin(part.clone()));
        self.open = Some(part);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pieces(rows: impl IntoIterator<Item = Row>) -> Vec<Piece> {
        let mut parts = Parts::default();
        let mut pieces: Vec<_> = rows.into_iter().flat_map(|row| parts.read(row)).collect();
        pieces.extend(parts.finish());
        pieces
    }

    fn text(text: &str) -> Row {
        Row {
            text: text.to_owned(),
            ..Row::default()
        }
    }

    #[test]
    fn white_space_between_parts_belongs_to_the_next_text_or_to_none() {
        let thought = Row {
            reasoning: "Hm".to_owned(),
            ..Row::default()
        };
        let call = Row {
            tool_calls: vec![
                json!({"id": "1", "function": {"name": "f", "arguments": "{"}}),
                json!({"function": {"arguments": "}"}}),
            ],
            ..Row::default()
        };
        let rows = [
            thought.clone(),
            text("\n"),
            text("Hi"),
            text("\n"),
            call.clone(),
            text(" "),
        ];
        let more = |text: &str| Piece::More(text.to_owned());
        let begun = Part::Call {
            id: "1".to_owned(),
            name: "f".to_owned(),
        };
        let expected = [
            Piece::Begin(Part::Thought),
            more("Hm"),
            Piece::End,
            Piece::Begin(Part::Text),
            more("\nHi"),
            more("\n"),
            Piece::End,
            Piece::Begin(begun),
            more("{"),
            more("}"),
            Piece::End,
        ];
        assert_eq!(pieces(rows), expected);
        assert_eq!(pieces([text(" "), text("\n")]), []);
        let behind_call = pieces([thought, text("\n"), call, text("Hi")]);
        assert!(behind_call.contains(&more("Hi")));
    }
}
