//! Mamba and Falcon Mamba, by TII: the selective scan in all layers, which have no other block.
//!
//! Falcon Mamba normalises times, keys and queries, without weights. A config has no number of positions; where nothing
//! else is written under `max_position_embeddings`, it is the length of the training.
//!
//! Source: configuration_*.py and modeling_*.py of mamba and falcon_mamba of transformers; Gu and Dao,
//! arXiv:2312.00752; Zuo et al., arXiv:2410.05355.

use serde_json::{Map, Value, json};

use super::dimensions::{Defaults, Dimensions, Keys, Sizes};
use super::family::Family;
use super::gguf::{GgufArchitecture, GgufConfig};
use super::recurrent::check_activation;
use super::selective_scan::{ScanKeys, ScanModules, SelectiveScan};
use super::windows::no_windows;
use crate::recurrence_spec::RuleModules;
use crate::rope::Rope;
use crate::spec::{Block, ModelSpec, Norms};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile, MetadataValue};

pub const MAMBA: Family = Family {
    class: "MambaForCausalLM",
    gguf: Some(GgufArchitecture {
        is_of: |gguf| !has_norms(gguf),
        ..GGUF
    }),
    describe: |config| {
        let sizes = Sizes::new(50_280, 768, 1536, 32, 1, 2048);
        describe(config, MAMBA.class, sizes, None)
    },
};

pub const FALCON_MAMBA: Family = Family {
    class: "FalconMambaForCausalLM",
    gguf: Some(GgufArchitecture {
        is_of: has_norms,
        ..GGUF
    }),
    describe: |config| {
        let sizes = Sizes::new(50_280, 768, 1536, 32, 1, 8192);
        let eps = config.number("mixer_rms_eps", 0.0..=1.0)?.unwrap_or(1e-6);
        describe(config, FALCON_MAMBA.class, sizes, Some(eps as f32))
    },
};

/// How llama.cpp stores the families (`MambaModel` of its converter). The metadata have 0 heads, and no feed-forward
/// width.
const GGUF: GgufArchitecture = GgufArchitecture {
    modules: &[
        ("norm", "attn_norm"),
        ("mixer.in_proj", "ssm_in"),
        ("mixer.conv1d", "ssm_conv1d"),
        ("mixer.x_proj", "ssm_x"),
        ("mixer.dt_proj", "ssm_dt"),
        ("mixer.dt_proj.bias", "ssm_dt.bias"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.D", "ssm_d"),
        ("mixer.out_proj", "ssm_out"),
    ],
    keys: &[
        ("ssm.conv_kernel", "conv_kernel"),
        ("ssm.state_size", "state_size"),
        ("ssm.time_step_rank", "time_step_rank"),
        ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    ],
    optional_biases: &[
        ("use_conv_bias", "mixer.conv1d"),
        ("use_bias", "mixer.in_proj"),
    ],
    add_read: add_channels,
    ..GgufArchitecture::named("mamba")
};

/// Whether a file of `mamba` is a Falcon Mamba.
fn has_norms(gguf: &GgufFolder) -> bool {
    gguf.metadata("mamba.ssm.dt_b_c_rms") == Some(&MetadataValue::Bool(true))
}

/// Adds the channels, and removes what describes attention. llama.cpp has one epsilon for all norms.
fn add_channels(gguf: &GgufConfig<'_>, config: &mut Map<String, Value>) -> Result<(), LoadError> {
    gguf.get("ssm.dt_b_c_rms");
    for key in [
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
    ] {
        config.remove(key);
    }
    // The converter writes 2^20 in place of a length, which configs do not have.
    if gguf.number("context_length")? == Some(json!(1 << 20)) {
        config.remove("max_position_embeddings");
    }
    let num_channels = gguf.required("ssm.inner_size")?;
    config.insert("intermediate_size".to_owned(), num_channels);
    let eps = gguf.required("attention.layer_norm_rms_epsilon")?;
    config.insert("mixer_rms_eps".to_owned(), eps);
    Ok(())
}

const KEYS: ScanKeys = ScanKeys {
    num_channels: Some("intermediate_size"),
    expand: "expand",
    state_dim: "state_size",
    kernel_len: "conv_kernel",
    rank: "time_step_rank",
    has_convolution_bias: "use_conv_bias",
    has_bias: "use_bias",
};

const MODULES: ScanModules = ScanModules {
    input: "mixer.in_proj",
    convolution: "mixer.conv1d",
    selection: "mixer.x_proj",
    times: "mixer.dt_proj",
    time_norm: None,
    rule: RuleModules {
        log_rates: "mixer.A_log",
        time_biases: "mixer.dt_proj.bias",
        skips: Some("mixer.D"),
        norm: None,
        key_norms: None,
    },
    output: "mixer.out_proj",
};

/// With `norm_eps`, times, keys and queries have norms.
fn describe(
    config: &JsonFile,
    class: &'static str,
    sizes: Sizes,
    norm_eps: Option<f32>,
) -> Result<ModelSpec, LoadError> {
    let defaults = Defaults {
        sizes: Some(sizes),
        // Of attention that no layer has.
        head_dim: Some(2),
        norm_eps: 1e-5,
        tied_embeddings: true,
        keys: Keys {
            norm_eps: "layer_norm_epsilon",
            ..Keys::LLAMA
        },
        ..Defaults::LLAMA
    };
    let dimensions = Dimensions {
        rope: Rope::none(),
        // config.json calls the channels so; there is no feed-forward block.
        intermediate_size: 1,
        ..Dimensions::from_config(config, &defaults)?
    };
    check_activation(config, dimensions.activation)?;
    let (hidden, num_layers) = (dimensions.hidden_size, dimensions.num_layers);
    let scan = SelectiveScan::read(config, &KEYS, MODULES, hidden, norm_eps)?;
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::OfOne {
        block: Block::Attention,
        norm: "norm",
    };
    scan.replace(&mut layer.attention, hidden);
    let mut spec = dimensions.model(class, layer, no_windows(num_layers));
    spec.modules.embedding = "backbone.embeddings";
    spec.modules.layers = "backbone.layers";
    spec.modules.final_norm = Some("backbone.norm_f");
    Ok(spec)
}
