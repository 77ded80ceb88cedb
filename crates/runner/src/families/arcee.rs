//! AFM, by Arcee AI.
//!
//! Llama whose feed-forward blocks have no gate, and square a ReLU. `attention_bias` and `mlp_bias` add biases.
//!
//! llama.cpp's converter permutes the rows of queries and keys, as it does for Llama.
//!
//! Source: modeling_arcee.py of transformers.

use super::dimensions::{Defaults, Dimensions, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, QUERIES_AND_KEYS};
use super::windows::no_windows;
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;
use inflight_device::Activation;

pub const FAMILY: Family = Family {
    class: "ArceeForCausalLM",
    gguf: Some(GgufArchitecture {
        permuted: QUERIES_AND_KEYS,
        ..GgufArchitecture::named("arcee")
    }),
    describe,
};

fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(Sizes::new(32_000, 2560, 18_432, 32, 32, 4096)),
        norm_eps: 1e-5,
        activation: Activation::SquaredRelu,
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions::from_config(config, &defaults)?;
    let mut layer = dimensions.llama_layer();
    layer
        .attention
        .set_biases(config.bool_or("attention_bias", false)?);
    layer.feed_forward = dimensions.plain("mlp.up_proj", "mlp.down_proj");
    layer
        .feed_forward
        .set_biases(config.bool_or("mlp_bias", false)?);
    let windows = no_windows(dimensions.num_layers);
    Ok(dimensions.model(FAMILY.class, layer, windows))
}
