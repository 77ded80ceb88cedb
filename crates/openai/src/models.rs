//! `/v1/models`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// The models with these names, each with those of its adapters behind it. Triton does not say when a model was made, so all
/// are as old as the front.
pub fn list(
    names: &[String],
    adapters: &BTreeMap<String, BTreeSet<String>>,
    created: u64,
) -> Value {
    let mut data = Vec::new();
    for name in names {
        data.push(model(name, created));
        for adapter in adapters.get(name).into_iter().flatten() {
            let mut entry = model(adapter, created);
            entry["parent"] = json!(name);
            data.push(entry);
        }
    }
    json!({"object": "list", "data": data})
}

fn model(name: &str, created: u64) -> Value {
    json!({"id": name, "object": "model", "created": created, "owned_by": "inflight"})
}
