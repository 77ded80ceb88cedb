//! MiniCPM 1, 2 and 4, by OpenBMB, the dense models.
//!
//! Llama with the factors of [MiniCPM 3](super::minicpm3). MiniCPM 4.1 has sparse attention for long texts if its
//! config says so (`sparse_config`), which is refused.
//!
//! Source: configuration_minicpm.py and modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16 and openbmb/MiniCPM4-8B; Hu
//! et al., arXiv:2404.06395.

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::llama_form::describe_with;
use super::minicpm3::{Factors, set_factors};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "MiniCPMForCausalLM",
    gguf: None,
    describe,
};

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
