//! BitNet b1.58 2B-4T, by Microsoft, and the models of the paper before it (`BitnetForCausalLM`).
//!
//! Llama with RMS norms of what the output and down projections read, and with squared ReLU in the gate, or SiLU in the
//! earlier models, whose norms have other names.
//!
//! The projections are trained to have weights of three values, -s, 0 and s, and inputs of 8 bits. What a checkpoint
//! stores, and how it becomes these, is a matter of its [quantisation](inflight_checkpoint), not of the family.
//!
//! Source: configuration_bitnet.py and modeling_bitnet.py of transformers and of 1bitLLM/bitnet_b1_58-3B; Ma et al.,
//! arXiv:2402.17764 and arXiv:2504.12285.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::GgufArchitecture;
use super::rope_config::RopeDefaults;
use super::windows::no_windows;
use crate::spec::{InnerNorms, ModelSpec};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "BitNetForCausalLM",
    // llama.cpp's architecture is the earlier models', whose gate has SiLU.
    gguf: None,
    describe: |config| {
        let defaults = Defaults {
            sizes: Some(Sizes::new(VOCAB_SIZE, 2560, 6912, 30, 20, 2048)),
            num_kv_heads: Some(5),
            norm_eps: 1e-5,
            rope: RopeDefaults {
                theta: 500_000.0,
                ..Defaults::LLAMA.rope
            },
            activation: Activation::SquaredRelu,
            ..Defaults::LLAMA
        };
        let norms = InnerNorms {
            attended: "self_attn.attn_sub_norm",
            inside: "mlp.ffn_sub_norm",
        };
        describe(config, FAMILY.class, &defaults, norms)
    },
};

pub const EARLIER: Family = Family {
    class: "BitnetForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            (EARLIER_NORMS.attended, "attn_sub_norm"),
            (EARLIER_NORMS.inside, "ffn_sub_norm"),
        ],
        // The converter gives its name to models of 2B-4T, too.
        is_of: |gguf| {
            let embedding = gguf.shape("token_embd.weight");
            embedding.and_then(<[usize]>::first) != Some(&VOCAB_SIZE)
        },
        ..GgufArchitecture::named("bitnet")
    }),
    describe: |config| {
        const BITS: [(&str, u64); 2] = [("weight_bits", 1), ("input_bits", 8)];
        for (key, bits) in BITS {
            if let Some(other) = config.get(key).filter(|it| it.as_u64() != Some(bits)) {
                return Err(config.unexpected(key, other, format!("supported; {bits} is")));
            }
        }
        let defaults = Defaults {
            sizes: Some(Sizes::new(32_000, 4096, 11_008, 32, 32, 2048)),
            ..Defaults::LLAMA
        };
        describe(config, EARLIER.class, &defaults, EARLIER_NORMS)
    },
};

/// The tokens of 2B-4T.
const VOCAB_SIZE: usize = 128_256;

const EARLIER_NORMS: InnerNorms = InnerNorms {
    attended: "self_attn.inner_attn_ln",
    inside: "mlp.ffn_layernorm",
};

fn describe(
    config: &JsonFile,
    class: &'static str,
    defaults: &Defaults,
    norms: InnerNorms,
) -> Result<ModelSpec, LoadError> {
    let dimensions = Dimensions::from_config(config, defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.inner_norms = Some(norms);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(class, layer, windows))
}
