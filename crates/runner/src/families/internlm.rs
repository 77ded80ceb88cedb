//! InternLM 7B and 20B, by Shanghai AI Laboratory, the first ones.
//!
//! Llama; `bias` adds biases to all projections of attention. The base of RoPE is in `rotary`.
//!
//! Source: configuration_internlm.py and modeling_internlm.py of internlm/internlm-7b and internlm/internlm-chat-20b.

use serde_json::json;

use super::dimensions::{Defaults, Sizes};
use super::family::Family;
use super::llama_form::describe_with;
use super::rope_config::{RopeDefaults, THETA};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const FAMILY: Family = Family {
    class: "InternLMForCausalLM",
    gguf: None,
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let mut defaults = Defaults {
        sizes: Some(Sizes::new(103_168, 4096, 11_008, 32, 32, 2048)),
        ..Defaults::LLAMA
    };
    if let Some(rotary) = config.object("rotary")? {
        // Beyond the trained length, which no sequence is here, `dynamic` stretches the base.
        const KIND: &str = "type";
        if let Some(other) = rotary.string(KIND)?
            && !["origin", "dynamic"].contains(&other)
        {
            let expected = "supported; 'origin' and 'dynamic' are";
            return Err(rotary.unexpected(KIND, format_args!("'{other}'"), expected));
        }
        if let Some(theta) = rotary.number("base", THETA)? {
            defaults.rope = RopeDefaults {
                theta,
                ..defaults.rope
            };
        }
    }
    let has_bias = config.bool_or("bias", true)?;
    let told = config
        .with("attention_bias", json!(has_bias))
        .with("mlp_bias", json!(false));
    describe_with(&told, FAMILY.class, &defaults)
}
