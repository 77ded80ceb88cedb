//! Images in the messages of a conversation.

use serde_json::{Value, json};

use crate::request::images::given::Detail;

/// The types of a part of a message that is an image: in transformers, in OpenAI's Chat Completions, and in Responses.
const TYPES: [&str; 3] = ["image", "image_url", "input_image"];

/// An image in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePart {
    /// Its place, such as `messages[0].content[1]`.
    pub place: String,
    /// Its URL or its base64; `None` if it is the next one of the request's other images.
    pub source: Option<String>,
    /// The resolution at which the model sees the image.
    pub detail: Detail,
}

/// Takes the images out of messages, in order. The parts that they leave are `{"type": "image"}`, as templates expect.
///
/// # Errors
/// A part has an image in a form that is not known; the problem.
pub fn take_images(messages: &mut [Value]) -> Result<Vec<ImagePart>, String> {
    let mut images = Vec::new();
    for (message, value) in messages.iter_mut().enumerate() {
        let content = value.get_mut("content").and_then(Value::as_array_mut);
        for (part, value) in content.into_iter().flatten().enumerate() {
            if !is_image(value) {
                continue;
            }
            let place = format!("messages[{message}].content[{part}]");
            let detail = detail(value).map_err(|problem| format!("{place}: {problem}"))?;
            let Ok(source) = source(value) else {
                return Err(format!(
                    "{place} is an image without a text in 'url', 'image_url' or 'image'; write \
                     {{\"type\": \"image_url\", \"image_url\": {{\"url\": \"data:image/png;base64,...\"}}}}"
                ));
            };
            *value = json!({"type": "image"});
            images.push(ImagePart {
                place,
                source,
                detail,
            });
        }
    }
    Ok(images)
}

/// Messages whose contents are texts, with `placeholder` where an image is, for templates that know no parts.
pub fn as_text(messages: &[Value], placeholder: &str) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let Some(content) = message.get_mut("content") else {
            continue;
        };
        let Some(parts) = content.as_array() else {
            continue;
        };
        let texts = parts.iter().filter_map(|part| match is_image(part) {
            true => Some(placeholder),
            false => part.get("text").and_then(Value::as_str),
        });
        *content = texts.collect::<Vec<_>>().join("\n").into();
    }
    messages
}

fn is_image(part: &Value) -> bool {
    let kind = part.get("type").and_then(Value::as_str);
    kind.is_some_and(|kind| TYPES.contains(&kind))
}

/// The source of an image, if its part has one.
fn source(part: &Value) -> Result<Option<String>, ()> {
    let fields = ["image_url", "image", "url", "data"].iter();
    let Some(value) = fields
        .filter_map(|name| part.get(name))
        .find(|it| !it.is_null())
    else {
        return Ok(None);
    };
    let text = value.get("url").unwrap_or(value).as_str();
    text.map(|text| Some(text.to_owned())).ok_or(())
}

/// The detail of an image: a field of its part, or beside its URL. `auto`, `high` and `original` are all of it.
fn detail(part: &Value) -> Result<Detail, String> {
    let beside_url = part.get("image_url").and_then(|url| url.get("detail"));
    match beside_url.or(part.get("detail")) {
        None | Some(Value::Null) => Ok(Detail::Full),
        Some(value) => match value.as_str() {
            Some("auto" | "high" | "original") => Ok(Detail::Full),
            Some("low") => Ok(Detail::Low),
            _ => Err(format!(
                "'detail' is {value}, and is not 'auto', 'low', 'high' or 'original'"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_every_form_leave_a_part_for_the_template() {
        let mut messages = vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": [
                {"type": "text", "text": "Compare"},
                {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}},
                {"type": "input_image", "image_url": "data:b", "detail": "low"},
                {"type": "image", "image": "data:c", "detail": "high"},
                {"type": "image", "url": "data:d"},
                {"type": "image"},
                {"type": "text", "text": "please"},
            ]}),
        ];
        let images = take_images(&mut messages).expect("known forms");
        let sources = images.iter().map(|image| image.source.as_deref());
        let expected = [
            Some("data:a"),
            Some("data:b"),
            Some("data:c"),
            Some("data:d"),
            None,
        ];
        assert_eq!(sources.collect::<Vec<_>>(), expected);
        let details = images.iter().map(|image| image.detail);
        let [low, full] = [Detail::Low, Detail::Full];
        assert_eq!(details.collect::<Vec<_>>(), [low, low, full, full, full]);
        assert_eq!(images[1].place, "messages[1].content[2]");
        let image = json!({"type": "image"});
        let content = messages[1]["content"].as_array().expect("a list");
        assert!(content[1..6].iter().all(|part| *part == image));
        let texts = as_text(&messages, "<image>");
        assert_eq!(texts[0], messages[0]);
        let expected = "Compare\n<image>\n<image>\n<image>\n<image>\n<image>\nplease";
        assert_eq!(texts[1]["content"], expected);
    }

    #[test]
    fn an_image_in_an_unknown_form_is_named() {
        let mut messages = vec![json!({"content": [{"type": "image_url", "image_url": 7}]})];
        let error = take_images(&mut messages).expect_err("refused");
        assert!(error.starts_with("messages[0].content[0]"), "{error}");
        let mut messages =
            vec![json!({"content": [{"type": "image", "image": "data:a", "detail": 7}]})];
        let error = take_images(&mut messages).expect_err("refused");
        let expected =
            "messages[0].content[0]: 'detail' is 7, and is not 'auto', 'low', 'high' or 'original'";
        assert_eq!(error, expected);
    }
}
