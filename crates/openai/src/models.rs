//! `/v1/models`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::protocol::ModelConfig;

/// A model that takes requests.
pub struct Model {
    /// Its name.
    pub name: String,
    /// The most tokens of a prompt and its output together, if config.pbtxt limits them.
    pub max_tokens: Option<u32>,
    /// The parameter `task` of config.pbtxt.
    task: Option<String>,
}

impl Model {
    /// The model of this name. `config`: its configuration, if Triton returned one.
    pub fn new(name: String, config: Option<&ModelConfig>) -> Self {
        let parameter = |name: &str| {
            let parameter = config?.parameters.get(name)?;
            Some(&parameter.string_value)
        };
        Self {
            name,
            max_tokens: parameter("max_seq_len").and_then(|it| it.parse().ok()),
            task: parameter("task").cloned(),
        }
    }

    /// Whether config.pbtxt says that the model has this task.
    pub fn has_task(&self, task: &str) -> bool {
        self.task.as_deref() == Some(task)
    }

    /// The entry of the model, or of one of its adapters.
    fn entry(&self, id: &str, created: u64) -> Value {
        let mut entry =
            json!({"id": id, "object": "model", "created": created, "owned_by": "inflight"});
        if let Some(max_tokens) = self.max_tokens {
            entry["max_model_len"] = json!(max_tokens);
        }
        entry
    }
}

/// The models, each with its adapters behind it. Triton does not say when a model was made, so all are as old as the
/// front.
pub fn list(
    models: &[Model],
    adapters: &BTreeMap<String, BTreeSet<String>>,
    created: u64,
) -> Value {
    let mut data = Vec::new();
    for model in models {
        data.push(model.entry(&model.name, created));
        for adapter in adapters.get(&model.name).into_iter().flatten() {
            let mut entry = model.entry(adapter, created);
            entry["parent"] = json!(model.name);
            data.push(entry);
        }
    }
    json!({"object": "list", "data": data})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::ModelParameter;

    fn model(max_seq_len: Option<&str>) -> Model {
        let parameter = |value: &str| ModelParameter {
            string_value: value.to_owned(),
        };
        let parameters = max_seq_len.map(|value| ("max_seq_len".to_owned(), parameter(value)));
        let config = ModelConfig {
            parameters: parameters.into_iter().collect(),
        };
        Model::new("stories".to_owned(), Some(&config))
    }

    #[test]
    fn an_entry_has_the_length_that_the_model_has() {
        let adapters = ["stories:poet".to_owned()].into();
        let adapters = [("stories".to_owned(), adapters)].into();
        let list = list(&[model(Some("300"))], &adapters, 7);
        let entry = |id: &str| json!({"id": id, "object": "model", "created": 7, "owned_by": "inflight", "max_model_len": 300});
        let mut poet = entry("stories:poet");
        poet["parent"] = json!("stories");
        assert_eq!(list["data"], json!([entry("stories"), poet]));
    }

    #[test]
    fn a_length_that_is_not_known_is_left_out() {
        let unknown = Model::new("stories".to_owned(), None);
        for model in [unknown, model(None), model(Some("")), model(Some("-1"))] {
            assert_eq!(model.entry("stories", 7).get("max_model_len"), None);
        }
    }
}
