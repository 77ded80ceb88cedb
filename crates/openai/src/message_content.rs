//! The content of a message: a text, or texts and images.

use serde_json::{Value, json};

/// The types of texts, in Chat Completions and in Responses.
const TEXTS: [&str; 4] = ["text", "input_text", "output_text", "reasoning_text"];
/// The types of images.
const IMAGES: [&str; 3] = ["image_url", "input_image", "image"];
const DETAILS: [&str; 4] = ["auto", "low", "high", "original"];

/// The content that a list of parts is: one text if all are texts, else parts as the backend knows them. An error has
/// the index of a part, and the problem.
///
/// # Errors
/// A part that is no text and no image.
pub fn content(parts: &[Value]) -> Result<Value, (usize, String)> {
    let has_image = parts.iter().any(is_image);
    if !has_image {
        return Ok(text(parts)?.into());
    }
    let part = |(index, part): (usize, &Value)| match is_image(part) {
        true => image(part).map_err(|problem| (index, problem)),
        false => Ok(json!({"type": "text", "text": text_of(index, part)?})),
    };
    let parts: Result<_, _> = parts.iter().enumerate().map(part).collect();
    parts.map(Value::Array)
}

/// The texts of a list of parts behind each other; or the index of a part that is none, and what is wrong with it.
///
/// # Errors
/// A part that is no text.
pub fn text(parts: &[Value]) -> Result<String, (usize, String)> {
    let parts = parts.iter().enumerate();
    parts.map(|(index, part)| text_of(index, part)).collect()
}

/// The part of an image at a URL.
pub fn image_part(url: &str) -> Value {
    json!({"type": "image", "image": url})
}

fn text_of(index: usize, part: &Value) -> Result<&str, (usize, String)> {
    match part["type"].as_str() {
        Some(kind) if TEXTS.contains(&kind) => part["text"]
            .as_str()
            .ok_or((index, "the part has no 'text'".to_owned())),
        Some(kind) => Err((
            index,
            format!(
                "a part of type '{kind}' is not supported here: models read texts, and images in the messages of users"
            ),
        )),
        None => Err((index, "the part has no 'type'".to_owned())),
    }
}

fn is_image(part: &Value) -> bool {
    let kind = part["type"].as_str();
    kind.is_some_and(|kind| IMAGES.contains(&kind))
}

/// An image of Chat Completions, `{"image_url": {"url": ..., "detail": ...}}`, or of Responses, `{"image_url": ...}`.
fn image(part: &Value) -> Result<Value, String> {
    let image = match &part["image_url"] {
        Value::Null => &part["image"],
        image => image,
    };
    let url = image.get("url").unwrap_or(image).as_str();
    let Some(url) = url else {
        let remedy = "give a data URL, {\"type\": \"image_url\", \"image_url\": {\"url\": \"data:image/png;base64,...\"}}";
        return Err(match part["file_id"] {
            Value::Null => format!("the image has no URL; {remedy}"),
            _ => format!("there are no files here; {remedy}"),
        });
    };
    let detail = image.get("detail").or(part.get("detail"));
    let detail = detail.filter(|detail| !detail.is_null());
    if let Some(detail) = detail
        && !detail.as_str().is_some_and(|it| DETAILS.contains(&it))
    {
        return Err(format!(
            "'detail' is {detail}, and is not 'auto', 'low', 'high' or 'original'"
        ));
    }
    match url.starts_with("data:") {
        true => {
            let mut part = image_part(url);
            if let Some(detail) = detail {
                part["detail"] = detail.clone();
            }
            Ok(part)
        }
        false => Err(
            "images at other URLs are not downloaded; give a data URL, data:image/png;base64,..., or have the operator \
             name the host in --allow-image-host"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_one_text_and_images_are_parts() {
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(content(&[text("A "), text("fox?")]), Ok(json!("A fox?")));
        let chat = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}});
        let responses = json!({"type": "input_image", "image_url": "data:image/png;base64,BB=="});
        let input = json!({"type": "input_text", "text": "Compare."});
        let expected = json!([
            {"type": "image", "image": "data:image/png;base64,AA==", "detail": "low"},
            {"type": "image", "image": "data:image/png;base64,BB=="},
            {"type": "text", "text": "Compare."},
        ]);
        assert_eq!(content(&[chat, responses, input]), Ok(expected));
    }

    #[test]
    fn parts_that_are_neither_are_named() {
        for (part, problem) in [
            (json!({"type": "input_audio"}), "'input_audio'"),
            (json!({"text": "a"}), "no 'type'"),
            (json!({"type": "image_url"}), "no URL"),
            (json!({"type": "input_image", "file_id": "f"}), "no files"),
            (
                json!({"type": "image_url", "image_url": {"url": "https://host/a.png"}}),
                "not downloaded",
            ),
            (
                json!({"type": "input_image", "image_url": "data:,", "detail": "huge"}),
                "'detail' is \"huge\"",
            ),
        ] {
            let before = json!({"type": "text", "text": "a"});
            let (index, error) = content(&[before, part]).expect_err(problem);
            assert!(index == 1 && error.contains(problem), "{error}");
        }
    }
}
