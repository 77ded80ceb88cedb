//! The API of Hugging Face's Text Embeddings Inference, for its clients.
//!
//! | file | noun |
//! |---|---|
//! | `embed.rs`, `rerank.rs`, `predict.rs` | the endpoints: from a JSON body to texts, from outputs to JSON |
//! | `fields.rs` | the fields of their requests |
//! | `errors.rs` | errors in the API's form |

pub mod embed;
pub mod errors;
pub mod fields;
pub mod predict;
pub mod rerank;

use serde_json::{Map, Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::fields::{Fate, Field};

/// The options of a request, whose other fields have been taken. `truncate` is the backend's option that cuts a text to
/// the model's length. Fields that the API does not know have no effect, as in TEI.
///
/// # Errors
/// A field that is refused, or of another type.
fn options(mut body: Body, fields: &[Field]) -> Result<Map<String, Value>, Error> {
    let is_cut = body.flag("truncate")?;
    let direction = body.text("truncation_direction")?;
    if let Some(other) = direction.filter(|it| !it.eq_ignore_ascii_case("right")) {
        let expected = "'Right': a text is cut at its end";
        return Err(wrong("truncation_direction", &json!(other), expected));
    }
    let mut options = body.into_options(fields)?;
    let is_known = |name: &str| {
        fields
            .iter()
            .any(|it| matches!(it.fate, Fate::Option(of) if of == name))
    };
    options.retain(|name, _| is_known(name));
    if is_cut {
        options.insert("truncate_prompt_tokens".to_owned(), json!(-1));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_its_end_to_the_length_of_the_model() {
        let read = |value: Value| {
            let body = Body::parse(value.to_string().as_bytes()).expect("an object");
            options(body, fields::EMBED)
        };
        let cut = json!({"truncate_prompt_tokens": -1});
        let right = json!({"truncate": true, "truncation_direction": "Right"});
        assert_eq!(read(right).map(Value::Object), Ok(cut));
        assert_eq!(read(json!({"truncate": false})), Ok(Map::new()));
        let unknown = json!({"tempo": 1, "dimensions": 2});
        assert_eq!(
            read(unknown).map(Value::Object),
            Ok(json!({"dimensions": 2}))
        );
        let left = json!({"truncate": true, "truncation_direction": "Left"});
        let error = read(left).expect_err("the end is kept");
        assert_eq!(error.param.as_deref(), Some("truncation_direction"));
        assert!(read(json!({"truncate": 1})).is_err());
    }
}
