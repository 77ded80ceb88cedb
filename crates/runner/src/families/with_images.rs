//! Models with images, whose language models are served, for text: Qwen2-VL, Qwen2.5-VL, Qwen3-VL with and without
//! experts, Mistral Small 3.1 and later, Ministral 3, LLaVA, LLaVA-NeXT, LLaVA-OneVision, EXAONE 4.5, Kimi K2.5,
//! LFM3-VL, Idefics 3, SmolVLM, InternVL 3.
//!
//! config.json has the language model's config under `text_config`, or, in the Qwen-VL models before transformers 5,
//! beside the image encoder's. Where all tokens are text, the three positions of a token are equal, and M-RoPE
//! (`mrope_section`) is RoPE. What Qwen3-VL adds to the residual stream of its first layers is zero without images.
//!
//! Source: configuration_*.py and modeling_*.py of qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, mistral3, llava,
//! llava_next, llava_onevision, exaone4_5, kimi_k25, lfm3_vl, idefics3, smolvlm and internvl of transformers.

use serde_json::{Map, Value, json};

use super::family::Family;
use super::gguf::GgufArchitecture;
use super::{deepseek, exaone4, lfm3, llama, ministral3, mistral, qwen2, qwen3, qwen3_moe};
use crate::spec::ModelSpec;
use inflight_base::LoadError;
use inflight_checkpoint::JsonFile;

pub const QWEN2_VL: Family = Family {
    class: "Qwen2VLForConditionalGeneration",
    gguf: Some(GgufArchitecture {
        has_mrope: true,
        ..GgufArchitecture::named("qwen2vl")
    }),
    describe: |config| describe_qwen2_vl(config, QWEN2_VL.class),
};

pub const QWEN2_5_VL: Family = Family {
    class: "Qwen2_5_VLForConditionalGeneration",
    gguf: None,
    describe: |config| describe_qwen2_vl(config, QWEN2_5_VL.class),
};

pub const QWEN3_VL: Family = Family {
    class: "Qwen3VLForConditionalGeneration",
    gguf: Some(GgufArchitecture {
        has_mrope: true,
        ..GgufArchitecture::named("qwen3vl")
    }),
    describe: |config| {
        let defaults = json!({"max_position_embeddings": 128_000, "rope_theta": 500_000.0});
        describe_language_model(config, object(defaults), &qwen3::FAMILY, QWEN3_VL.class)
    },
};

/// Qwen3-VL with experts, whose weights are always divided by their sum.
pub const QWEN3_VL_MOE: Family = Family {
    class: "Qwen3VLMoeForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let defaults = json!({
            "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
            "max_position_embeddings": 128_000, "rope_theta": 500_000.0, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "norm_topk_prob": true,
        });
        let class = QWEN3_VL_MOE.class;
        let mut spec = describe_language_model(config, object(defaults), &qwen3_moe::OF_VL, class)?;
        // Whatever the language model's config says.
        spec.tied_embeddings = config.bool_or("tie_word_embeddings", false)?;
        Ok(spec)
    },
};

pub const EXAONE_4_5: Family = Family {
    class: "Exaone4_5_ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let is_tied = config.bool_or("tie_word_embeddings", false)?;
        describe_by_type(config, "exaone4", json!({}), EXAONE_4_5.class, is_tied)
    },
};

pub const MISTRAL3: Family = Family {
    class: "Mistral3ForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let defaults = json!({
            "vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": null,
        });
        let is_tied = config.bool_or("tie_word_embeddings", true)?;
        describe_by_type(config, "mistral", defaults, MISTRAL3.class, is_tied)
    },
};

pub const LLAVA: Family = Family {
    class: "LlavaForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let is_tied = config.bool_or("tie_word_embeddings", false)?;
        describe_by_type(config, "llama", json!({}), LLAVA.class, is_tied)
    },
};

/// LLaVA 1.6.
pub const LLAVA_NEXT: Family = Family {
    class: "LlavaNextForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let is_tied = config.bool_or("tie_word_embeddings", false)?;
        describe_by_type(config, "llama", json!({}), LLAVA_NEXT.class, is_tied)
    },
};

pub const LLAVA_ONEVISION: Family = Family {
    class: "LlavaOnevisionForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let is_tied = config.bool_or("tie_word_embeddings", false)?;
        describe_by_type(config, "qwen2", json!({}), LLAVA_ONEVISION.class, is_tied)
    },
};

/// Kimi K2.5 and K2.6, by Moonshot AI, whose language model is a DeepSeek-V3.
pub const KIMI_K2_5: Family = Family {
    class: "Kimi_K25ForConditionalGeneration",
    gguf: None,
    describe: |config| describe_kimi(config, KIMI_K2_5.class),
};

/// The same, as its authors call it.
pub const KIMI_K2_5_ORIGINAL: Family = Family {
    class: "KimiK25ForConditionalGeneration",
    gguf: None,
    describe: |config| describe_kimi(config, KIMI_K2_5_ORIGINAL.class),
};

pub const LFM3_VL: Family = Family {
    class: "Lfm3VlForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let class = LFM3_VL.class;
        let mut spec = describe_language_model(config, Map::new(), &lfm3::FAMILY, class)?;
        // Whatever the language model's config says.
        spec.tied_embeddings = config.bool_or("tie_word_embeddings", true)?;
        Ok(spec)
    },
};

pub const IDEFICS3: Family = Family {
    class: "Idefics3ForConditionalGeneration",
    gguf: None,
    describe: |config| describe_idefics3(config, IDEFICS3.class),
};

pub const SMOL_VLM: Family = Family {
    class: "SmolVLMForConditionalGeneration",
    gguf: None,
    describe: |config| describe_idefics3(config, SMOL_VLM.class),
};

/// InternVL 3 in transformers' format.
pub const INTERN_VL: Family = Family {
    class: "InternVLForConditionalGeneration",
    gguf: None,
    describe: |config| {
        let is_tied = config.bool_or("tie_word_embeddings", true)?;
        describe_by_type(config, "qwen2", json!({}), INTERN_VL.class, is_tied)
    },
};

/// The path of the language model's config.
const TEXT: &str = "text_config.";

/// The families of language models by `model_type`, which a config under `text_config` has in place of a class.
const LANGUAGE_MODELS: [(&str, Family); 11] = [
    ("llama", llama::FAMILY),
    ("mistral", mistral::FAMILY),
    ("ministral", mistral::MINISTRAL),
    ("ministral3", ministral3::FAMILY),
    ("mistral4", deepseek::MISTRAL4),
    ("qwen2", qwen2::FAMILY),
    ("qwen3", qwen3::FAMILY),
    ("exaone4", exaone4::FAMILY),
    // EXAONE 4's earlier model type.
    ("exaone4_5_text", exaone4::FAMILY),
    ("deepseek_v3", deepseek::V3),
    // Moonshot AI's name for DeepSeek-V3.
    ("kimi_k2", deepseek::V3),
];

fn describe_kimi(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let is_tied = config.bool_or("tie_word_embeddings", true)?;
    describe_by_type(config, "deepseek_v3", json!({}), class, is_tied)
}

fn describe_idefics3(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let is_tied = config.bool_or("tie_word_embeddings", false)?;
    let text = json!({"rms_norm_eps": 1e-5});
    describe_by_type(config, "llama", text, class, is_tied)
}

fn describe_qwen2_vl(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let defaults = json!({
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
        "rope_theta": 1e6,
    });
    describe_language_model(config, object(defaults), &qwen2::FAMILY, class)
}

/// Describes a language model whose config is under `text_config`, or beside the image encoder's. `defaults`: what it
/// has where its config is silent, and the family differs.
pub fn describe_language_model(
    config: &JsonFile,
    defaults: Map<String, Value>,
    family: &Family,
    class: &'static str,
) -> Result<ModelSpec, LoadError> {
    let text = config.object("text_config")?;
    let (text, prefix) = match &text {
        Some(text) => (text, TEXT),
        None => (config, ""),
    };
    let mut all = defaults;
    let told = text.entries();
    all.extend(told.map(|(key, value)| (key.clone(), value.clone())));
    let text = JsonFile::new(config.path(), prefix, all);
    let is_tied = config.bool_or("tie_word_embeddings", false)?;
    describe(&text, family, class, is_tied)
}

/// Describes a language model of the family that `model_type` names, or the default one. `text`: its config if
/// config.json has none.
fn describe_by_type(
    config: &JsonFile,
    default: &str,
    text: Value,
    class: &'static str,
    is_tied: bool,
) -> Result<ModelSpec, LoadError> {
    let told = config.object("text_config")?;
    let text = told.unwrap_or_else(|| JsonFile::new(config.path(), TEXT, object(text)));
    let name = text.string("model_type")?.unwrap_or(default);
    let mut families = LANGUAGE_MODELS.into_iter();
    let family = families.find(|(known, _)| *known == name);
    let (_, family) = family.ok_or_else(|| {
        let known = LANGUAGE_MODELS.map(|(name, _)| name).join(", ");
        let known = format!("one of {known}");
        text.unexpected("model_type", format_args!("'{name}'"), known)
    })?;
    describe(&text, &family, class, is_tied)
}

fn describe(
    text: &JsonFile,
    family: &Family,
    class: &'static str,
    is_tied: bool,
) -> Result<ModelSpec, LoadError> {
    let mut spec = (family.describe)(text)?;
    spec.family = class;
    spec.tied_embeddings |= is_tied;
    Ok(spec)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}
