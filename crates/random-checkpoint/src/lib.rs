//! Checkpoints for measurements: of given shapes with random weights, and of another one's layers.
//!
//! The output is noise, but the cost is real. Weights are random with mean 0 and standard deviation 0.02, and
//! norms are one, so that activations stay finite at any depth. The same shape gives the same bytes. The weights of
//! large shapes repeat themselves, so that they are written as fast as files are.

mod hybrids;
mod layers;
mod llama;
mod tokenizer;
mod weights;

pub use layers::with_layers;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use hybrids::{GRANITE_H_350M, LFM2_350M, QWEN3_5_0_8B, QWEN3_5_4B};
use llama::{LLAMA_3_1_8B, LLAMA_3_2_1B, LLAMA_160M, LLAMA_160M_EXPERTS, TINY};
use weights::{Weights, bf16_bits};

/// What goes wrong while a checkpoint is written.
pub type Error = Box<dyn std::error::Error>;

type Result<T> = std::result::Result<T, Error>;

/// The shape of a checkpoint, in the terms of its family.
trait Shape: Sync {
    fn vocab(&self) -> usize;

    /// config.json, without the ids of tokens.
    fn config(&self) -> Value;

    /// In the order of the file.
    fn tensors(&self) -> Vec<Tensor>;

    /// Whether a block of random weights is repeated.
    fn repeats(&self) -> bool {
        false
    }
}

const SHAPES: [(&str, &dyn Shape); 9] = [
    ("tiny", &TINY),
    ("llama-160m", &LLAMA_160M),
    ("llama-160m-experts", &LLAMA_160M_EXPERTS),
    ("llama-3.2-1b", &LLAMA_3_2_1B),
    ("llama-3.1-8b", &LLAMA_3_1_8B),
    ("qwen3.5-0.8b", &QWEN3_5_0_8B),
    ("qwen3.5-4b", &QWEN3_5_4B),
    ("granite-4.0-h-350m", &GRANITE_H_350M),
    ("lfm2-350m", &LFM2_350M),
];

/// The names of the shapes.
pub fn shapes() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|(name, _)| *name)
}

/// Writes a checkpoint of the named shape into `dir`, which is created if it is missing; returns the bytes of its
/// weights.
///
/// # Errors
/// If the shape is unknown, or a file cannot be written.
pub fn write(shape: &str, dir: &Path) -> Result<usize> {
    let Some((_, shape)) = SHAPES.iter().find(|(name, _)| *name == shape) else {
        let known: Vec<_> = shapes().collect();
        let known = known.join(", ");
        return Err(format!("unknown shape '{shape}'; known shapes: {known}").into());
    };
    let mut config = shape.config();
    config["torch_dtype"] = json!("bfloat16");
    config["vocab_size"] = json!(shape.vocab());
    config["bos_token_id"] = json!(tokenizer::BEGIN_ID);
    config["eos_token_id"] = json!(tokenizer::END_ID);

    fs::create_dir_all(dir)?;
    write_json(&dir.join("config.json"), &config)?;
    write_json(
        &dir.join("generation_config.json"),
        &tokenizer::generation_config(),
    )?;
    write_json(
        &dir.join("tokenizer.json"),
        &tokenizer::tokenizer(shape.vocab())?,
    )?;
    write_json(
        &dir.join("tokenizer_config.json"),
        &tokenizer::tokenizer_config(),
    )?;
    let file = dir.join("model.safetensors");
    write_weights(&file, &shape.tensors(), shape.repeats())
}

/// A tensor of bf16.
struct Tensor {
    name: String,
    dimensions: Vec<usize>,
    fill: Fill,
}

impl Tensor {
    fn random(name: impl Into<String>, dimensions: &[usize]) -> Self {
        Self {
            name: name.into(),
            dimensions: dimensions.to_vec(),
            fill: Fill::Random,
        }
    }

    fn ones(name: impl Into<String>, num_elements: usize) -> Self {
        Self {
            name: name.into(),
            dimensions: vec![num_elements],
            fill: Fill::Ones,
        }
    }
}

/// Initial values of a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Fill {
    Random,
    Ones,
}

/// Writes the weights as safetensors; returns their number of bytes. The file gets its final name when it is
/// complete.
fn write_weights(path: &Path, tensors: &[Tensor], repeats: bool) -> Result<usize> {
    let mut header = Map::new();
    let mut num_bytes = 0;
    for Tensor {
        name, dimensions, ..
    } in tensors
    {
        let start = num_bytes;
        num_bytes += 2 * dimensions.iter().product::<usize>();
        let entry = json!({
            "dtype": "BF16", "shape": dimensions, "data_offsets": [start, num_bytes],
        });
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }

    let part = path.with_extension("part");
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&part)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut weights = Weights::new(repeats);
    for Tensor {
        dimensions, fill, ..
    } in tensors
    {
        let num_bytes = 2 * dimensions.iter().product::<usize>();
        match fill {
            Fill::Random => weights.write(num_bytes, &mut file)?,
            Fill::Ones => file.write_all(&bf16_bits(1.0).to_le_bytes().repeat(num_bytes / 2))?,
        }
    }
    file.into_inner()?.sync_all()?;
    fs::rename(part, path)?;
    Ok(num_bytes)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    fs::write(path, value.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_the_number_of_parameters_in_their_names() {
        for ((name, shape), num_parameters) in SHAPES.iter().zip([
            139_584,
            152_980_224,
            747_596_544,
            1_235_814_400,
            8_030_261_248,
            752_393_024,
            4_205_751_296,
            340_332_224,
            354_483_968,
        ]) {
            let tensors = shape.tensors().into_iter();
            let num_elements: usize = tensors
                .map(|tensor| tensor.dimensions.iter().product::<usize>())
                .sum();
            assert_eq!(num_elements, num_parameters, "{name}");
        }
    }
}
