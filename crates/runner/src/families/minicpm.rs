//! MiniCPM 1, 2 and 4, by OpenBMB, the dense models.
//!
//! Llama with the factors of [MiniCPM 3](super::minicpm3). MiniCPM 4.1 has sparse attention for long texts if its
//! config says so (`sparse_config`), which is refused.
//!
//! Source: configuration_minicpm.py and modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16 and openbmb/MiniCPM4-8B; Hu
//! et al., arXiv:2404.06395.

use serde_json::{Map, Value, json};

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig, QUERIES_AND_KEYS};
use super::llama_form::describe_with;
use super::minicpm3::{Factors, set_factors};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "MiniCPMForCausalLM",
    gguf: Some(GgufArchitecture {
        keys: &[("embedding_scale", "scale_emb")],
        permuted: QUERIES_AND_KEYS,
        add_read: add_factors,
        ..GgufArchitecture::named("minicpm")
    }),
    describe,
};

/// Adds the factors of blocks and of logits, which `MiniCPMModel` of llama.cpp's converter computes from the config.
/// Files of before it did have the factors that llama.cpp's minicpm.cpp then takes.
fn add_factors(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    let number = |key| Ok::<_, LoadError>(gguf.number(key)?.and_then(|it| it.as_f64()));
    let count = |key: &str| config.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let (num_layers, hidden) = (count("num_hidden_layers"), count("hidden_size"));
    let depth = number("residual_scale")?.map_or(1.4, |scale| scale * num_layers.sqrt());
    let base = match number("logit_scale")? {
        Some(scale) if scale > 0.0 => hidden / scale,
        Some(_) => return Err(gguf.error("logit_scale", "is not above 0", "the file is damaged")),
        None => 256.0,
    };
    config.entry("scale_emb").or_insert(json!(12.0));
    config.insert("scale_depth".to_owned(), json!(depth));
    config.insert("dim_model_base".to_owned(), json!(base));
    Ok(())
}

const FACTORS: Factors = Factors {
    embedding: 1.0,
    depth: 1.0,
    base: 1.0,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    const SPARSE: &str = "sparse_config";
    const EXPERTS: &str = "num_experts";
    if let Some(sparse) = config.get(SPARSE) {
        let expected =
            "supported; remove it: the model is trained for attention to all tokens, too";
        return Err(config.unexpected(SPARSE, sparse, expected));
    }
    if let Some(num) = config.get(EXPERTS).filter(|num| num.as_u64() != Some(0)) {
        return Err(config.unexpected(EXPERTS, num, "supported in this family; only 0 is"));
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 4096, 11_008, 32, 32, 2048)),
        tied_embeddings: true,
        ..Defaults::LLAMA
    };
    let mut spec = describe_with(config, FAMILY.class, &defaults)?;
    set_factors(config, &mut spec, &FACTORS)?;
    Ok(spec)
}
