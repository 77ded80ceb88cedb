//! Model families. Each has a file that turns config.json into a [`ModelSpec`]; the rest of the runner knows no
//! family.
//!
//! ```text
//! llama.rs mistral.rs qwen2.rs ...    the families: what is special about each, with its source
//! bert.rs modernbert.rs    encoders
//! family.rs        what such a file provides
//! dimensions.rs    keys of config.json that all families share, and the layer that they start from
//! bounds.rs        the largest sizes that a config may have
//! windows.rs       keys of sliding windows
//! llama_form.rs    models of Llama's form
//! experts.rs       keys of mixtures of experts
//! grouped_experts.rs  keys of experts that are chosen by groups
//! recurrent.rs     keys of layers with recurrent states
//! state_space.rs   keys of state spaces
//! selective_scan.rs   keys of selective scans
//! layer_lists.rs   lists of layers
//! rope_config.rs   keys of the position embedding
//! with_images.rs   models whose language model is served
//! mtp.rs           heads for multi-token prediction in checkpoints of their models
//! unsupported.rs   families that are refused, and why
//! gguf.rs          GGUF files: names of tensors, and metadata as config.json
//! ```
//!
//! To add a family, write its file and add it to `FAMILIES`. What no family has needed so far, such as another
//! activation or norm, is a new field or variant of [`ModelSpec`], and the compiler names the places that must
//! compute it.

mod afmoe;
mod apertus;
mod arcee;
mod baichuan;
mod bailing_moe;
mod bamba;
mod bert;
mod biogpt;
mod bitnet;
mod bloom;
mod bounds;
mod chatglm;
mod cohere;
mod cohere2_moe;
mod cwm;
mod dbrx;
mod deepseek;
mod deepseek_moe;
mod deepseek_v32;
mod dimensions;
mod ernie4_5;
mod exaone;
mod exaone4;
mod exaone_moe;
mod experts;
mod falcon;
mod falcon_h1;
mod family;
mod flex_olmo;
mod flint;
mod gemma;
mod gemma3n;
mod gemma4;
mod gguf;
mod glm;
mod glm4_moe;
mod gpt2;
mod gpt_neo;
mod gpt_neox;
mod gpt_oss;
mod gptj;
mod granite;
mod granite_moe;
mod granite_swa;
mod grouped_experts;
mod helium;
mod hunyuan;
mod hy3;
mod hyperclovax;
mod internlm;
mod internlm2;
mod internlm3;
mod jais2;
mod jamba;
mod kimi_linear;
mod kolibri1;
mod laguna;
mod lara_mini;
mod layer_lists;
mod lfm2;
mod lfm3;
mod llama;
mod llama4;
mod llama_form;
mod longcat_flash;
mod mamba;
mod mimo_v2;
mod minicpm;
mod minicpm3;
mod minimax_m2;
mod ministral3;
mod mistral;
mod mixtral;
mod modernbert;
mod mpt;
mod mtp;
mod nanochat;
mod nemotron;
mod nemotron_h;
mod olmo;
mod olmo2;
mod olmo_hybrid;
mod olmoe;
mod opt;
mod persimmon;
mod phi;
mod phi3;
mod phimoe;
mod qwen;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod recurrent;
mod rope_config;
mod seed_oss;
mod selective_scan;
mod smollm3;
mod stablelm;
mod starcoder2;
mod state_space;
mod step3;
#[cfg(test)]
mod tests;
mod unsupported;
mod vision;
mod windows;
mod with_images;

use self::family::Family;
use self::gguf::GgufConfig;
use super::spec::{ClassModules, ModelSpec, MtpSpec, TowerSpec};
use inflight_base::LoadError;
use inflight_checkpoint::{GgufFolder, JsonFile, MetadataValue};
use inflight_config::PoolingMode;

pub(super) use gguf::GgufArchitecture;

static FAMILIES: [Family; 146] = [
    llama::FAMILY,
    arcee::FAMILY,
    mistral::FAMILY,
    mistral::MINISTRAL,
    qwen2::FAMILY,
    qwen3::FAMILY,
    phi3::FAMILY,
    smollm3::FAMILY,
    seed_oss::FAMILY,
    glm::FAMILY,
    glm::GLM4,
    ernie4_5::FAMILY,
    helium::FAMILY,
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma::GEMMA3_WITH_IMAGES,
    gemma4::GEMMA4,
    gemma4::GEMMA4_WITH_IMAGES,
    olmo2::FAMILY,
    olmo2::OLMO3,
    granite::FAMILY,
    exaone4::FAMILY,
    mixtral::FAMILY,
    qwen2_moe::FAMILY,
    qwen3_moe::FAMILY,
    olmoe::FAMILY,
    phimoe::FAMILY,
    phimoe::ORIGINAL,
    deepseek::V2,
    deepseek::V3,
    gpt_oss::FAMILY,
    gpt_neox::FAMILY,
    opt::FAMILY,
    gpt2::FAMILY,
    cohere::COHERE,
    cohere::COHERE2,
    stablelm::FAMILY,
    starcoder2::FAMILY,
    nemotron::FAMILY,
    falcon::FAMILY,
    bloom::FAMILY,
    with_images::QWEN2_VL,
    with_images::QWEN2_5_VL,
    with_images::QWEN3_VL,
    with_images::MISTRAL3,
    with_images::LLAVA,
    bailing_moe::GLM4_MOE,
    glm4_moe::DOTS1,
    granite_moe::GRANITE_MOE,
    granite_moe::GRANITE_MOE_SHARED,
    granite_moe::GRANITE_4,
    lfm2::LFM2,
    lfm2::LFM2_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen3_next::QWEN3_5,
    qwen3_next::QWEN3_5_WITH_IMAGES,
    qwen3_next::QWEN3_5_MOE,
    qwen3_next::QWEN3_5_MOE_WITH_IMAGES,
    ernie4_5::MOE,
    minimax_m2::FAMILY,
    deepseek::GLM4_MOE_LITE,
    glm4_moe::SOLAR_OPEN,
    bamba::FAMILY,
    exaone_moe::FAMILY,
    afmoe::FAMILY,
    phi::FAMILY,
    gptj::GPTJ,
    gptj::CODEGEN,
    olmo::FAMILY,
    gpt2::BIGCODE,
    gemma::VAULT_GEMMA,
    hyperclovax::FAMILY,
    jais2::FAMILY,
    granite_swa::FAMILY,
    exaone::FAMILY,
    nemotron_h::FAMILY,
    falcon_h1::FAMILY,
    olmo_hybrid::FAMILY,
    ministral3::FAMILY,
    hunyuan::DENSE,
    hunyuan::MOE,
    llama4::LLAMA4,
    llama4::LLAMA4_WITH_IMAGES,
    apertus::FAMILY,
    flex_olmo::FAMILY,
    cwm::FAMILY,
    deepseek::YOUTU,
    qwen3_moe::MELLUM,
    hy3::FAMILY,
    granite_swa::WITH_EXPERTS,
    with_images::QWEN3_VL_MOE,
    with_images::EXAONE_4_5,
    gemma3n::GEMMA3N,
    gemma3n::GEMMA3N_WITH_IMAGES,
    nanochat::FAMILY,
    gpt_neo::FAMILY,
    biogpt::FAMILY,
    mpt::FAMILY,
    mpt::ORIGINAL,
    deepseek::MISTRAL4,
    bitnet::FAMILY,
    dbrx::FAMILY,
    minicpm3::FAMILY,
    cohere2_moe::FAMILY,
    internlm3::INTERNLM3,
    internlm3::IQUEST_CODER,
    kimi_linear::FAMILY,
    jamba::FAMILY,
    mamba::MAMBA,
    mamba::FALCON_MAMBA,
    with_images::KIMI_K2_5,
    with_images::KIMI_K2_5_ORIGINAL,
    lfm3::FAMILY,
    with_images::LFM3_VL,
    laguna::FAMILY,
    flint::FAMILY,
    deepseek::AXK1,
    kolibri1::FAMILY,
    internlm2::FAMILY,
    minicpm::FAMILY,
    deepseek_v32::V32,
    deepseek_v32::GLM_MOE_DSA,
    mimo_v2::FAMILY,
    step3::STEP_3_5,
    step3::STEP_3_7,
    persimmon::FAMILY,
    lara_mini::FAMILY,
    deepseek_moe::FAMILY,
    longcat_flash::FAMILY,
    internlm::FAMILY,
    qwen::FAMILY,
    baichuan::FAMILY,
    baichuan::FIRST,
    chatglm::FAMILY,
    chatglm::CONDITIONAL,
    bitnet::EARLIER,
    bailing_moe::LING_2,
    bailing_moe::SARVAM,
    with_images::IDEFICS3,
    with_images::SMOL_VLM,
    with_images::INTERN_VL,
    with_images::LLAVA_NEXT,
    with_images::LLAVA_ONEVISION,
    bailing_moe::LING,
    bailing_moe::SARVAM_105B,
];

/// Further architectures of families.
const OTHER_GGUF: [(GgufArchitecture, Family); 3] = [
    (gemma4::GGUF_WITH_EXPERTS, gemma4::GEMMA4),
    (granite_moe::DENSE_GGUF, granite_moe::GRANITE_4),
    (nemotron_h::DENSE_GGUF, nemotron_h::FAMILY),
];

/// Families whose tokens see all others of a prompt, by the classes of their models without a head.
/// Each with its classification head.
const ENCODERS: [(Family, ClassesOf); 5] = [
    (bert::BERT, |_| Ok(bert::CLASSES)),
    (bert::ROBERTA, |_| Ok(bert::ROBERTA_CLASSES)),
    (bert::XLM_ROBERTA, |_| Ok(bert::ROBERTA_CLASSES)),
    (bert::CAMEMBERT, |_| Ok(bert::ROBERTA_CLASSES)),
    (modernbert::FAMILY, modernbert::classes),
];

/// The classification head of a config.json.
type ClassesOf = fn(&JsonFile) -> Result<ClassModules, LoadError>;

/// What an error says before the list of families.
const KNOWN: &str = "one of";

/// Describes the model of a config.json.
///
/// # Errors
/// The family, or a value, is not supported.
pub(super) fn describe(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    describe_if(config, KNOWN, |family, class| family.class == class)
}

/// Describes the layer of an EAGLE-3 head, which is Llama's but for its inputs.
///
/// # Errors
/// A value is not supported.
pub(super) fn describe_draft_head(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    (llama::FAMILY.describe)(config)
}

/// Describes the head for multi-token prediction that the checkpoint of a model has.
///
/// # Errors
/// The family is not known to have heads, or config.json says that the checkpoint has none.
pub(super) fn describe_mtp(config: &JsonFile, model: &ModelSpec) -> Result<MtpSpec, LoadError> {
    mtp::describe(config, model)
}

/// Whether the family of a model has a vision tower that is supported.
pub(super) fn has_tower(model: &ModelSpec) -> bool {
    vision::has_tower(model)
}

/// Describes the vision tower of a model.
///
/// # Errors
/// The family has none, or a value is not supported.
pub(super) fn describe_tower(config: &JsonFile, model: &ModelSpec) -> Result<TowerSpec, LoadError> {
    vision::describe_tower(config, model)
}

/// The head of a decoder that sorts prompts into classes (`GenericForSequenceClassification` of transformers).
const CLASSES_OF_DECODER: ClassModules = ClassModules {
    pooling: PoolingMode::Last,
    dense: None,
    output: "score",
    has_bias: false,
};

/// Describes the model of a config.json that sorts prompts into classes, such as `Qwen3ForSequenceClassification`, and
/// its head.
///
/// # Errors
/// As [`describe_decoder`].
pub(super) fn describe_classifier(
    config: &JsonFile,
) -> Result<(ModelSpec, ClassModules), LoadError> {
    if let Some((encoder, classes)) = encoder(config, &["ForSequenceClassification"]) {
        return Ok(((encoder.describe)(config)?, classes(config)?));
    }
    check_causal(config)?;
    let known = "a ...ForSequenceClassification, such as Qwen3ForSequenceClassification, of one of";
    let spec = describe_if(config, known, |family, class| {
        let base = family.base_class();
        base.is_some() && class.strip_suffix("ForSequenceClassification") == base
    })?;
    Ok((spec, CLASSES_OF_DECODER))
}

/// Describes the model of a config.json that embeds: an encoder, or a decoder.
///
/// # Errors
/// As [`describe_decoder`].
pub(super) fn describe_embedder(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    match encoder(config, &["Model", "ForMaskedLM"]) {
        Some((encoder, _)) => (encoder.describe)(config),
        None => describe_decoder(config),
    }
}

/// The encoder of a config.json whose class has one of these ends.
fn encoder(config: &JsonFile, ends: &[&str]) -> Option<(Family, ClassesOf)> {
    let class = class_of(config)?;
    ENCODERS.into_iter().find(|(family, _)| {
        let base = family.base_class();
        let end = base.and_then(|base| class.strip_prefix(base));
        end.is_some_and(|end| ends.contains(&end))
    })
}

/// The first of a config's classes.
fn class_of(config: &JsonFile) -> Option<&str> {
    config.get("architectures")?.as_array()?.first()?.as_str()
}

/// Describes the model of a config.json, which may be a decoder without its output layer, such as `Qwen3Model`.
///
/// # Errors
/// As [`describe`], or its tokens see those after them.
fn describe_decoder(config: &JsonFile) -> Result<ModelSpec, LoadError> {
    check_causal(config)?;
    describe_if(config, KNOWN, |family, class| {
        let base = family.base_class();
        family.class == class || base.is_some() && class.strip_suffix("Model") == base
    })
}

/// Refuses models whose tokens see those after them.
fn check_causal(config: &JsonFile) -> Result<(), LoadError> {
    let is_causal = config.bool_or("is_causal", true)?;
    for (key, sees_later) in [
        ("is_causal", !is_causal),
        (
            "use_bidirectional_attention",
            config.bool_or("use_bidirectional_attention", false)?,
        ),
    ] {
        if sees_later {
            return Err(config.unexpected(
                key,
                config
                    .get(key)
                    .map_or_else(String::new, ToString::to_string),
                "supported in this family, whose tokens see those before them only; encoders are those of docs/src/embeddings.md",
            ));
        }
    }
    Ok(())
}

/// `known`: what comes before the list of families in an error.
fn describe_if(
    config: &JsonFile,
    known: &str,
    has_class: impl Fn(&Family, &str) -> bool,
) -> Result<ModelSpec, LoadError> {
    let known = format!("{known} {}", FAMILIES.map(|family| family.class).join(", "));
    let Some(value) = config.get("architectures") else {
        return Err(config.error(format!("architectures is missing; it must be {known}")));
    };
    let class = class_of(config);
    let family = FAMILIES
        .into_iter()
        .find(|family| class.is_some_and(|class| has_class(family, class)))
        .ok_or_else(|| {
            let hint = class.and_then(|class| unsupported::class_hint(class, &FAMILIES));
            let hint = hint.map_or_else(String::new, |hint| format!("; {hint}"));
            config.unexpected("architectures", value, format!("{known}{hint}"))
        })?;
    let spec = (family.describe)(config)?;
    match spec.num_cached_layers() == 0 && spec.recurrence().is_none() {
        true => Err(config.error(
            "no layer has attention or a recurrent state; at least one is expected".to_owned(),
        )),
        false => Ok(spec),
    }
}

/// The architecture of GGUF files.
///
/// # Errors
/// It is not supported.
pub(super) fn gguf_architecture(gguf: &GgufFolder) -> Result<GgufArchitecture, LoadError> {
    let (architecture, _) = find_gguf(gguf)?;
    Ok(architecture)
}

/// Describes the model of GGUF files without a config.json. Also returns the equivalent config, made from their
/// metadata.
///
/// # Errors
/// The architecture, or a value, is not supported.
pub(super) fn describe_gguf(gguf: &GgufFolder) -> Result<(JsonFile, ModelSpec), LoadError> {
    let (architecture, family) = find_gguf(gguf)?;
    let reader = GgufConfig::new(gguf, architecture);
    let config = reader.config(family.class)?;
    let mut spec = (family.describe)(&config)?;
    reader.complete(&mut spec)?;
    Ok((config, spec))
}

fn find_gguf(gguf: &GgufFolder) -> Result<(GgufArchitecture, Family), LoadError> {
    let name = match gguf.metadata("general.architecture") {
        Some(MetadataValue::Text(name)) => name,
        _ => "none",
    };
    let num_experts = gguf.metadata(&format!("{name}.expert_count"));
    let has_experts = num_experts.is_some_and(|num| *num != MetadataValue::Unsigned(0));
    let gating = gguf.metadata(&format!("{name}.expert_gating_func"));
    let gating = gating.unwrap_or(&MetadataValue::Unsigned(1));
    let families = FAMILIES.into_iter();
    let same_name: Vec<_> = families
        .filter_map(|family| Some((family.gguf?, family)))
        .chain(OTHER_GGUF)
        .filter(|(known, _)| known.name == name && known.experts.is_some() == has_experts)
        .filter(|(known, _)| (known.is_of)(gguf))
        .collect();
    let has_gating = |known: &GgufArchitecture| {
        let experts = known.experts.as_ref();
        experts.is_none_or(|experts| *gating == MetadataValue::Unsigned(experts.gating))
    };
    let same_gating = same_name.iter().position(|(known, _)| has_gating(known));
    same_name
        .into_iter()
        .nth(same_gating.unwrap_or(0))
        .ok_or_else(|| {
            let mut known: Vec<_> = FAMILIES
                .into_iter()
                .filter_map(|family| Some(family.gguf?.name))
                .collect();
            known.sort_unstable();
            known.dedup();
            let known = known.join(", ");
            let hint = unsupported::gguf_hint(name).map_or_else(String::new, |hint| format!("; {hint}"));
            gguf.error(match has_experts {
                true => format!(
                    "general.architecture: '{name}' with {name}.expert_count is not one of {known}{hint}"
                ),
                false => format!("general.architecture: '{name}' is not one of {known}{hint}"),
            })
        })
}
