//! Other names of a model's modules.
//!
//! A decoder is saved by itself, inside of a model with images, or without its output layer, and each version of
//! transformers puts other words in front of its modules. So a checkpoint and an adapter are asked for the names in
//! this order:
//!
//! ```text
//! model.layers.0.mlp.up_proj                      the decoder by itself: ModelSpec's names
//! model.language_model.layers.0.mlp.up_proj       in a model with images, since transformers 4.52
//! language_model.model.layers.0.mlp.up_proj       the same, before that
//! language_model.layers.0.mlp.up_proj             a model with images, without its output layer
//! model.language_model.model.layers. ...          the same inside of a wrapper
//! model.text_model.layers. ..., text_model.layers. ...
//! vision_tower.vision_model.encoder.layers. ...   a tower, before transformers 5; with `model.` in front, in between
//! backbone.layers. ...                            by the authors of Nemotron-H
//! layers.0.mlp.up_proj                            the decoder without its output layer
//! ```
//!
//! Each may have `module.` or `_orig_mod.` in front, which wrappers of PyTorch leave (data parallelism,
//! `torch.compile`).

use super::spec::ModelSpec;

/// What wrappers write in front of all names.
const WRAPPERS: [&str; 3] = ["", "_orig_mod.", "module."];

/// What stands in front of the modules of a decoder, where `{}` is the first word of its own names, such as `model.`.
const PREFIXES: [&str; 12] = [
    "{}",
    "{}language_model.",
    "language_model.{}",
    "language_model.",
    "{}language_model.{}",
    "{}text_model.",
    "text_model.",
    "{}vision_model.",
    "model.{}vision_model.",
    "model.{}",
    "backbone.",
    "",
];

/// The same of modules outside of the decoder, such as `lm_head`.
const OUTER_PREFIXES: [&str; 4] = ["", "language_model.", "model.", "model.language_model."];

/// How names in a checkpoint or an adapter differ from those of the [`ModelSpec`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModuleNames {
    /// The first word of the decoder's own names, with its dot.
    base: String,
    /// What stands there instead.
    inner: String,
    /// What is in front of other names.
    outer: String,
}

impl ModuleNames {
    /// The names under which modules are there: `has` says whether a module is. If none fits, the spec's names.
    pub(super) fn find(spec: &ModelSpec, has: impl Fn(&str) -> bool) -> Self {
        let (embedding, output) = (spec.modules.embedding, spec.modules.output_layer);
        let base = base_of(spec);
        let inner = candidates(base).find(|inner| has(&renamed(embedding, base, inner)));
        let outer = outer_candidates().find(|outer| has(&format!("{outer}{output}")));
        Self {
            inner: inner.unwrap_or_else(|| base.to_owned()),
            outer: outer.unwrap_or_default(),
            base: base.to_owned(),
        }
    }

    /// The name of a module there.
    pub(super) fn stored(&self, path: String) -> String {
        match path.strip_prefix(&self.base) {
            Some(rest) if !self.base.is_empty() => format!("{}{rest}", self.inner),
            _ => format!("{}{path}", self.outer),
        }
    }
}

/// All names that a module may have, the spec's first.
pub(super) fn all_names(spec: &ModelSpec, path: &str) -> Vec<String> {
    let base = base_of(spec);
    let mut names: Vec<String> = match path.starts_with(base) && !base.is_empty() {
        true => candidates(base)
            .map(|inner| renamed(path, base, &inner))
            .collect(),
        false => outer_candidates()
            .map(|outer| format!("{outer}{path}"))
            .collect(),
    };
    names.dedup();
    names
}

/// Whether a module belongs to an encoder of images or sound, of whose model only texts are computed here.
pub(super) fn is_of_encoders(path: &str) -> bool {
    const PARTS: [&str; 8] = [
        "vision_tower.",
        "vision_model.",
        "visual.",
        "multi_modal_projector.",
        "mm_projector.",
        "embed_vision.",
        "audio_tower.",
        "embed_audio.",
    ];
    let path = path.strip_prefix("model.").unwrap_or(path);
    PARTS.iter().any(|part| path.starts_with(part))
}

/// The first word of the names of a decoder's modules, with its dot; empty if they have none in common.
fn base_of(spec: &ModelSpec) -> &'static str {
    let embedding = spec.modules.embedding;
    let base = embedding.find('.').map_or("", |dot| &embedding[..=dot]);
    match spec.modules.layers.starts_with(base) {
        true => base,
        false => "",
    }
}

fn candidates(base: &str) -> impl Iterator<Item = String> {
    let prefixes = PREFIXES
        .iter()
        .map(move |prefix| prefix.replace("{}", base));
    prefixes.flat_map(|prefix| WRAPPERS.map(|wrapper| format!("{wrapper}{prefix}")))
}

fn outer_candidates() -> impl Iterator<Item = String> {
    let prefixes = OUTER_PREFIXES.iter();
    prefixes.flat_map(|prefix| WRAPPERS.map(|wrapper| format!("{wrapper}{prefix}")))
}

fn renamed(path: &str, base: &str, inner: &str) -> String {
    format!("{inner}{}", path.strip_prefix(base).unwrap_or(path))
}
