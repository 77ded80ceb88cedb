//! The list of models in Anthropic's form.

use serde_json::{Value, json};

/// A model in OpenAI's form. Triton does not say when it was made: an epoch stands for that.
pub fn model(of_openai: &Value) -> Value {
    json!({
        "type": "model",
        "id": of_openai["id"],
        "display_name": of_openai["id"],
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": of_openai["max_model_len"],
        "max_tokens": of_openai["max_model_len"],
    })
}

/// A list of models in OpenAI's form: one page, which has them all.
pub fn list(of_openai: &Value) -> Value {
    let models = of_openai["data"].as_array().into_iter().flatten();
    let models: Vec<_> = models.map(model).collect();
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    json!({
        "data": models,
        "has_more": false,
        "first_id": id(models.first()),
        "last_id": id(models.last()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_all_models() {
        let entries = [json!({"id": "a", "max_model_len": 300}), json!({"id": "b"})];
        let page = list(&json!({"data": entries}));
        assert_eq!(page["data"][0]["max_tokens"], 300);
        assert_eq!(page["data"][1]["max_tokens"], Value::Null);
        assert_eq!(
            (&page["first_id"], &page["last_id"]),
            (&json!("a"), &json!("b"))
        );
        assert_eq!(list(&json!({"data": []}))["first_id"], Value::Null);
    }
}
