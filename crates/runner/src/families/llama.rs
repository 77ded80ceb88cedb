//! Llama 1 to 3, and the many models of their shape.
//!
//! RMSNorm in front of each block, grouped-query attention with RoPE over whole heads, a SwiGLU feed-forward block.
//! `attention_bias` adds biases to all four projections of attention, `mlp_bias` to all three of the feed-forward
//! block. Llama 3.1 and later scale the frequencies of RoPE (`rope_type: llama3`).
//!
//! llama.cpp's converter permutes the rows of queries and keys (`LlamaModel.permute` in convert_hf_to_gguf.py), and
//! stores the scaling of frequencies as a tensor of divisors.
//!
//! Source: modeling_llama.py of transformers; Touvron et al., arXiv:2302.13971 and arXiv:2307.09288; Llama Team,
//! arXiv:2407.21783.

use super::dimensions::{Defaults, Sizes};
use super::exaone;
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::internlm3;
use super::llama_form::describe_with;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "LlamaForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        ..GgufArchitecture::named("llama")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    if config.string("model_type")? == Some(exaone::TYPE) {
        return exaone::describe(config);
    }
    if let Some(spec) = internlm3::describe_by_type(config, FAMILY.class)? {
        return Ok(spec);
    }
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 4096, 11_008, 32, 32, 2048)),
        ..Defaults::LLAMA
    };
    describe_with(config, FAMILY.class, &defaults)
}
