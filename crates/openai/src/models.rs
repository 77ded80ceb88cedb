//! `/v1/models`, and what the front knows of each model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::protocol::ModelConfig;

/// How long the configurations of models are believed. Triton does not say when it loads a model again.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The models that Triton was asked for last, and when.
#[derive(Debug, Default)]
pub struct KnownModels(Mutex<Option<(Instant, Vec<Model>)>>);

impl KnownModels {
    /// The models, if they have these names and were asked for within ten seconds.
    pub fn get(&self, names: &[String], now: Instant) -> Option<Vec<Model>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (asked, models) = known.as_ref()?;
        let is_new = now.duration_since(*asked) <= MAX_AGE;
        (is_new && models.iter().map(|model| &model.name).eq(names)).then(|| models.clone())
    }

    /// Keeps models that Triton was asked for at `now`.
    pub fn set(&self, models: Vec<Model>, now: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, models));
    }

    /// Drops all models, because one of them changes.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A model that takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    fn models_are_believed_for_a_while_and_under_their_names() {
        let known = KnownModels::default();
        let start = Instant::now();
        let names = ["stories".to_owned()];
        assert_eq!(known.get(&names, start), None);
        known.set(vec![model(None)], start);
        assert_eq!(known.get(&names, start + MAX_AGE), Some(vec![model(None)]));
        let later = start + MAX_AGE + Duration::from_millis(1);
        assert_eq!(known.get(&names, later), None);
        assert_eq!(known.get(&[], start), None, "a model was unloaded");
        let more = ["stories", "tales"].map(str::to_owned);
        assert_eq!(known.get(&more, start), None, "a model was loaded");
        known.clear();
        assert_eq!(known.get(&names, start), None);
    }

    #[test]
    fn a_length_that_is_not_known_is_left_out() {
        let unknown = Model::new("stories".to_owned(), None);
        for model in [unknown, model(None), model(Some("")), model(Some("-1"))] {
            assert_eq!(model.entry("stories", 7).get("max_model_len"), None);
        }
    }
}
