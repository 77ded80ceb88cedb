//! `/v1/models`.

use serde_json::{Value, json};

/// The list of models with these names. Triton does not say when a model was made, so all are as old as the front.
pub fn list(names: &[String], created: u64) -> Value {
    let models: Vec<_> = names.iter().map(|name| model(name, created)).collect();
    json!({"object": "list", "data": models})
}

/// A model.
pub fn model(name: &str, created: u64) -> Value {
    json!({"id": name, "object": "model", "created": created, "owned_by": "inflight"})
}
