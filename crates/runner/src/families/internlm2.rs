//! InternLM 2 and 2.5, by Shanghai AI Laboratory.
//!
//! Llama's computation under names of its own: the query heads of a key head, that key head and its value head follow
//! one another in one module, and `bias` adds biases to both projections of attention.
//!
//! Source: configuration_internlm2.py and modeling_internlm2.py of internlm/internlm2_5-7b; Cai et al.,
//! arXiv:2403.17297.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::lfm2::gated;
use super::windows::no_windows;
use crate::spec::{ModelSpec, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile};
use inflight_numbers::Stacking;

pub const FAMILY: Family = Family {
    class: "InternLM2ForCausalLM",
    gguf: Some(GgufArchitecture {
        modules: &[
            ("attention_norm", "attn_norm"),
            ("attention.wo", "attn_output"),
            ("ffn_norm", "ffn_norm"),
            ("feed_forward.w1", "ffn_gate"),
            ("feed_forward.w2", "ffn_down"),
            ("feed_forward.w3", "ffn_up"),
        ],
        permuted: QUERIES_AND_KEYS,
        optional_biases: &[("bias", "attention.wo")],
        rewrite: |gguf, spec| {
            split_heads(gguf, spec);
            Ok(())
        },
        ..GgufArchitecture::named("internlm2")
    }),
    describe,
};

/// Gives queries, keys and values modules of their own: `InternLM2Model` of llama.cpp's converter takes the groups of
/// heads apart, and permutes queries and keys as Llama's.
pub fn split_heads(gguf: &GgufFolder, spec: &mut ModelSpec) {
    let (hidden, q, kv) = (spec.hidden_size, spec.q_width(), spec.kv_width());
    let parts = [
        ("self_attn.q_proj", q),
        ("self_attn.k_proj", kv),
        ("self_attn.v_proj", kv),
    ];
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let has_bias = gguf.shape(&format!("blk.{index}.attn_q.bias")).is_some();
        layer.attention.qkv =
            Projection::stacked(&parts, hidden, Stacking::Concatenated).with_bias(has_bias);
    }
}

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(103_168, 4096, 11_008, 32, 32, 2048)),
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let [q, ..] = dimensions.qkv_widths();
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("attention_norm", "ffn_norm");
    layer.attention.qkv = dimensions.qkv_by_group("attention.wqkv");
    layer.attention.o = Projection::single("attention.wo", dimensions.hidden_size, q);
    layer.attention.set_biases(config.bool_or("bias", true)?);
    layer.feed_forward = gated(&dimensions);
    let windows = no_windows(dimensions.num_layers);
    let mut spec = dimensions.model(FAMILY.class, layer, windows);
    spec.modules.embedding = "model.tok_embeddings";
    spec.modules.output_layer = "output";
    Ok(spec)
}
