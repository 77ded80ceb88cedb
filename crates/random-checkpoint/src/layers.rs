//! A checkpoint with another number of layers, for draft models and what they draft for.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::Result;

/// What comes before the number of a layer.
const LAYERS: &str = "model.layers.";
/// The projections that add to the residual stream.
const ADDING: [&str; 2] = [".self_attn.o_proj.weight", ".mlp.down_proj.weight"];

/// Writes a copy of the checkpoint of one safetensors file in `source` to the folder `dir`, with so many layers:
///
/// ```text
/// fewer   its first ones: a model that is often, but not always right about the whole one
/// more    its own, and copies of the last one that add zero: the same answers at a higher cost
/// ```
///
/// Returns the bytes of its weights.
///
/// # Errors
///
/// There is no such checkpoint, it has no layers as Llama has them, or the folder cannot be written.
pub fn with_layers(source: &Path, num_layers: usize, dir: &Path) -> Result<usize> {
    let mut config: Value = serde_json::from_slice(&fs::read(source.join("config.json"))?)?;
    let num_own = config["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
    if num_own == 0 || num_layers == 0 {
        return Err("a model has at least one layer".into());
    }
    let bytes = fs::read(source.join("model.safetensors"))?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let zeros = largest_adding(&tensors)?;
    let mut written = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let Some((layer, part)) = layer_of(name) else {
            written.insert(name.to_owned(), tensor);
            continue;
        };
        if layer < num_layers {
            written.insert(name.to_owned(), tensor.clone());
        }
        if layer + 1 < num_own {
            continue;
        }
        let (dtype, shape, data) = (tensor.dtype(), tensor.shape().to_vec(), tensor.data());
        let data = match ADDING.contains(&part) {
            true => &zeros[..data.len()],
            false => data,
        };
        for layer in num_own..num_layers {
            let copy = TensorView::new(dtype, shape.clone(), data)?;
            written.insert(format!("{LAYERS}{layer}{part}"), copy);
        }
    }
    let num_bytes = written.values().map(|tensor| tensor.data().len()).sum();
    fs::create_dir_all(dir)?;
    serialize_to_file(written, None, &dir.join("model.safetensors"))?;
    config["num_hidden_layers"] = json!(num_layers);
    fs::write(dir.join("config.json"), format!("{config:#}\n"))?;
    for entry in fs::read_dir(source)? {
        let path = entry?.path();
        let name = path.file_name().ok_or("a file without a name")?;
        let is_written = name == "config.json" || name == "model.safetensors";
        if !is_written && path.extension().is_some_and(|it| it == "json") {
            fs::copy(&path, dir.join(name))?;
        }
    }
    Ok(num_bytes)
}

/// As many zero bytes as the largest projection that adds to the residual stream has.
fn largest_adding(tensors: &SafeTensors<'_>) -> Result<Vec<u8>> {
    let sizes = tensors.iter().filter_map(|(name, tensor)| {
        let (_, part) = layer_of(name)?;
        ADDING.contains(&part).then_some(tensor.data().len())
    });
    let largest = sizes
        .max()
        .ok_or("no projection of a layer is named as Llama's")?;
    Ok(vec![0; largest])
}

/// The number of a tensor's layer, and the rest of its name.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let rest = name.strip_prefix(LAYERS)?;
    let end = rest.find('.')?;
    Some((rest[..end].parse().ok()?, &rest[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of tensors and whether all their bytes are zero.
    fn zeros(dir: &Path) -> Result<BTreeMap<String, bool>> {
        let bytes = fs::read(dir.join("model.safetensors"))?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let is_zero = |tensor: &TensorView<'_>| tensor.data().iter().all(|&byte| byte == 0);
        let all = tensors.iter();
        Ok(all
            .map(|(name, tensor)| (name.to_owned(), is_zero(&tensor)))
            .collect())
    }

    #[test]
    fn layers_are_left_out_or_added_as_zero() {
        let dir = std::env::temp_dir().join(format!("inflight-layers-{}", std::process::id()));
        let [whole, fewer, more] = ["whole", "fewer", "more"].map(|name| dir.join(name));
        crate::write("tiny", &whole).expect("it is written");
        with_layers(&whole, 1, &fewer).expect("it is written");
        with_layers(&whole, 4, &more).expect("it is written");
        let [whole, fewer, more] = [whole, fewer, more].map(|it| zeros(&it).expect("it is read"));
        let per_layer = whole
            .keys()
            .filter(|it| it.starts_with("model.layers.1."))
            .count();
        assert_eq!(fewer.len(), whole.len() - per_layer);
        assert_eq!(more.len(), whole.len() + 2 * per_layer);
        let added: Vec<_> = more.iter().filter(|(_, is_zero)| **is_zero).collect();
        assert_eq!(added.len(), 4, "{added:?}");
        for name in ["self_attn.o_proj", "mlp.down_proj"] {
            assert!(more[&format!("model.layers.3.{name}.weight")]);
        }
        fs::remove_dir_all(&dir).expect("it is removed");
    }
}
