//! BioGPT, by Microsoft.
//!
//! OPT with GELU, and tokens that are embedded with a factor of the square root of the hidden size (`scale_embedding`).
//! Norms add 1e-5, whatever `layer_norm_eps` says.
//!
//! Source: configuration_biogpt.py and modeling_biogpt.py of transformers; Luo et al., arXiv:2210.10341.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{LearnedPositions, ModelModules, ModelSpec, NormKind, Norms, Projection};
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "BioGptForCausalLM",
    gguf: None,
    describe,
};

/// The row of position 0.
const FIRST_POSITION: usize = 2;
const NORM_EPS: f32 = 1e-5;

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(42_384, 1024, 4096, 24, 16, 1024)),
        tied_embeddings: true,
        activation: Activation::Gelu,
        ..Defaults::LLAMA
    };
    let mut dimensions = Dimensions::from_config(config, &defaults)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.norm.eps = NORM_EPS;
    dimensions.rope = Rope::none();
    let (hidden, q_width) = (dimensions.hidden_size, dimensions.qkv_widths()[0]);
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::before("self_attn_layer_norm", "final_layer_norm");
    layer.attention.o = Projection::single("self_attn.out_proj", hidden, q_width);
    layer.attention.set_biases(true);
    layer.feed_forward = dimensions.plain("fc1", "fc2");
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    let num_positions = dimensions.max_position_embeddings;
    Ok(ModelSpec {
        embedding_scale: match config.bool_or("scale_embedding", true)? {
            true => (hidden as f32).sqrt(),
            false => 1.0,
        },
        learned_positions: Some(LearnedPositions {
            module: "biogpt.embed_positions",
            first_row: FIRST_POSITION,
            padding_id: None,
            num_rows: FIRST_POSITION + num_positions,
        }),
        modules: ModelModules {
            embedding: "biogpt.embed_tokens",
            layers: "biogpt.layers",
            first_layer: 0,
            layers_per_module: 1,
            final_norm: Some("biogpt.layer_norm"),
            output_layer: "output_projection",
        },
        ..dimensions.model(FAMILY.class, layer, windows)
    })
}
