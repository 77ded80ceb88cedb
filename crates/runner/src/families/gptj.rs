//! GPT-J, by EleutherAI, and CodeGen, by Salesforce.
//!
//! LayerNorm with biases, one for both blocks of a layer, which read the residual stream side by side. RoPE rotates
//! neighbouring elements of the first `rotary_dim` of a head, with a base of 10,000. The feed-forward block has no
//! gate, but biases, as has the output layer; attention has none.
//!
//! CodeGen has one module for queries, values and keys, in this order, in four runs, each for a quarter of the heads.
//!
//! Source: modeling_gptj.py and modeling_codegen.py of transformers; Wang and Komatsuzaki, "GPT-J-6B", 2021; Nijkamp et
//! al., arXiv:2203.13474.

use super::bounds::MAX_HEAD_DIM;
use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gpt2;
use super::windows::no_windows;
use crate::rope::{Rope, RopeAxes, RopeScaling};
use crate::spec::{LayerSpec, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::{JsonFile, RotaryPairs};
use inflight_device::Activation;
use inflight_numbers::Stacking;

pub const GPTJ: Family = Family {
    class: "GPTJForCausalLM",
    gguf: None,
    describe: |config| {
        let (dimensions, mut layer) = parts(config)?;
        let [q, kv, _] = dimensions.qkv_widths();
        let qkv = [("attn.q_proj", q), ("attn.k_proj", kv), ("attn.v_proj", kv)];
        let hidden = dimensions.hidden_size;
        layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
        dimensions.order_heads(&mut layer.attention.qkv);
        Ok(model(dimensions, GPTJ.class, layer))
    },
};

pub const CODEGEN: Family = Family {
    class: "CodeGenForCausalLM",
    gguf: None,
    describe: |config| {
        let (dimensions, mut layer) = parts(config)?;
        let num_heads = dimensions.num_heads;
        if !num_heads.is_multiple_of(NUM_RUNS) {
            let expected = format!("a multiple of {NUM_RUNS}");
            return Err(config.unexpected(DEFAULTS.keys.num_heads, num_heads, expected));
        }
        let run = dimensions.qkv_widths()[0] / NUM_RUNS;
        let mut qkv = Projection::fused_in_runs(
            "attn.qkv_proj",
            &[run, run, run],
            NUM_RUNS,
            dimensions.hidden_size,
            Stacking::Concatenated,
        );
        // Values come before keys there.
        qkv.parts.swap(1, 2);
        dimensions.order_heads(&mut qkv);
        layer.attention.qkv = qkv;
        Ok(model(dimensions, CODEGEN.class, layer))
    },
};

/// Runs of queries, values and keys: the processors that CodeGen was trained on.
const NUM_RUNS: usize = 4;

const DEFAULTS: Defaults = Defaults {
    sizes: Some(Sizes::new(50_400, 4096, 16_384, 28, 16, 2048)),
    norm_eps: 1e-5,
    activation: Activation::GeluTanh,
    keys: gpt2::KEYS,
    ..Defaults::LLAMA
};

/// The sizes, and a layer but for its queries, keys and values.
fn parts(config: &JsonFile) -> Result<(Dimensions, LayerSpec), LoadError> {
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = rope(config, dimensions.head_dim)?;
    dimensions.rotary_pairs = RotaryPairs::Adjacent;
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::Parallel {
        attention: "ln_1",
        feed_forward: None,
    };
    layer.attention.o = Projection::single("attn.out_proj", hidden, q_width);
    layer.feed_forward = dimensions.plain("mlp.fc_in", "mlp.fc_out");
    layer.feed_forward.set_biases(true);
    Ok((dimensions, layer))
}

/// Config classes have no other keys of the position embedding.
fn rope(config: &JsonFile, head_dim: usize) -> Result<Rope, LoadError> {
    const KEY: &str = "rotary_dim";
    let rotary_dim = config.size_or(KEY, 0..=MAX_HEAD_DIM, Some(64))?;
    // `null` would be the hidden size.
    let rotary_dim = rotary_dim.unwrap_or(0);
    if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        let expected = format!("an even number from 2 to {head_dim}, the width of a head");
        return Err(config.unexpected(KEY, rotary_dim, expected));
    }
    Ok(Rope {
        theta: 10_000.0,
        rotary_dim,
        scaling: RopeScaling::None,
        query_factors: None,
        axes: RopeAxes::Sequence,
    })
}

fn model(dimensions: Dimensions, class: &'static str, layer: LayerSpec) -> ModelSpec {
    let windows = no_windows(dimensions.num_layers);
    ModelSpec {
        output_bias: true,
        modules: gpt2::MODULES,
        ..dimensions.model(class, layer, windows)
    }
}
