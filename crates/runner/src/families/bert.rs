//! BERT, RoBERTa, XLM-RoBERTa and CamemBERT: encoders, whose tokens see all others of their text.
//!
//! Learned positions and types of tokens, added to the embedded tokens and normalised with them. Attention and a
//! feed-forward block without a gate, all linear layers with biases. A LayerNorm normalises the residual stream behind
//! each block, so that there is none behind the last layer.
//!
//! The others differ in their names only, and in that their positions begin behind the id of padding.
//!
//! Source: modeling_bert.py, modeling_roberta.py and modeling_xlm_roberta.py of transformers; Devlin et al.,
//! arXiv:1810.04805; Liu et al., arXiv:1907.11692; Conneau et al., arXiv:1911.02116.

use super::bounds::MAX_VOCAB;
use super::dimensions::{Defaults, Dimensions, Keys};
use super::family::Family;
use super::windows::no_windows;
use crate::rope::Rope;
use crate::spec::{
    ClassActivation, ClassDense, ClassModules, FeedForward, LearnedPositions, ModelModules,
    ModelSpec, NormKind, Norms, Projection, TokenTypes,
};
use inflight_base::{LoadError, TokenId};
use inflight_checkpoint::JsonFile;
use inflight_config::PoolingMode;
use inflight_device::{Activation, PlainActivation};
use inflight_numbers::Stacking;

pub const BERT: Family = Family {
    class: "BertModel",
    gguf: None,
    describe: |config| describe(config, BERT.class, &OF_BERT, None),
};

pub const ROBERTA: Family = Family {
    class: "RobertaModel",
    gguf: None,
    describe: |config| describe_roberta(config, ROBERTA.class),
};

pub const XLM_ROBERTA: Family = Family {
    class: "XLMRobertaModel",
    gguf: None,
    describe: |config| describe_roberta(config, XLM_ROBERTA.class),
};

pub const CAMEMBERT: Family = Family {
    class: "CamembertModel",
    gguf: None,
    describe: |config| describe_roberta(config, CAMEMBERT.class),
};

const DENSE: ClassDense = ClassDense {
    module: "classifier.dense",
    has_bias: true,
    activation: ClassActivation::Tanh,
    norm: None,
};

/// The pooler of BERT and its classifier.
pub const CLASSES: ClassModules = ClassModules {
    pooling: PoolingMode::Cls,
    dense: Some(ClassDense {
        module: "bert.pooler.dense",
        ..DENSE
    }),
    output: "classifier",
    has_bias: true,
};

pub const ROBERTA_CLASSES: ClassModules = ClassModules {
    pooling: PoolingMode::Cls,
    dense: Some(DENSE),
    output: "classifier.out_proj",
    has_bias: true,
};

const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-12,
    activation: Activation::Gelu,
    keys: Keys {
        norm_eps: "layer_norm_eps",
        ..Keys::LLAMA
    },
    ..Defaults::LLAMA
};

/// The modules outside of the layers.
struct Names {
    embedding: &'static str,
    positions: &'static str,
    token_types: &'static str,
    embedding_norm: &'static str,
    layers: &'static str,
}

const OF_BERT: Names = Names {
    embedding: "bert.embeddings.word_embeddings",
    positions: "bert.embeddings.position_embeddings",
    token_types: "bert.embeddings.token_type_embeddings",
    embedding_norm: "bert.embeddings.LayerNorm",
    layers: "bert.encoder.layer",
};

const OF_ROBERTA: Names = Names {
    embedding: "roberta.embeddings.word_embeddings",
    positions: "roberta.embeddings.position_embeddings",
    token_types: "roberta.embeddings.token_type_embeddings",
    embedding_norm: "roberta.embeddings.LayerNorm",
    layers: "roberta.encoder.layer",
};

fn describe_roberta(config: &JsonFile, class: &'static str) -> Result<ModelSpec, LoadError> {
    let padding_id = config.size("pad_token_id", 0..=MAX_VOCAB)?.unwrap_or(1);
    describe(config, class, &OF_ROBERTA, Some(padding_id as TokenId))
}

/// `padding_id`: the token without a position of its own, whose id is also the number of its row; positions begin
/// behind it.
fn describe(
    config: &JsonFile,
    class: &'static str,
    names: &Names,
    padding_id: Option<TokenId>,
) -> Result<ModelSpec, LoadError> {
    for (key, value) in [
        ("is_decoder", config.bool_or("is_decoder", false)?),
        (
            "add_cross_attention",
            config.bool_or("add_cross_attention", false)?,
        ),
    ] {
        if value {
            return Err(config.unexpected(key, true, "supported; only false is"));
        }
    }
    if let Some(kind) = config.string("position_embedding_type")?
        && kind != "absolute"
    {
        let expected = "supported; only 'absolute' is";
        return Err(config.unexpected(
            "position_embedding_type",
            format_args!("'{kind}'"),
            expected,
        ));
    }
    let num_types = config.size("type_vocab_size", 1..=MAX_VOCAB)?.unwrap_or(2);
    let mut dimensions = Dimensions::from_config(config, &DEFAULTS)?;
    dimensions.norm.kind = NormKind::Layer { has_bias: true };
    dimensions.rope = Rope::none();
    let num_rows = dimensions.max_position_embeddings;
    let first_position = padding_id.map_or(0, |id| id as usize + 1);
    if num_rows <= first_position {
        return Err(config.unexpected(
            "max_position_embeddings",
            num_rows,
            format_args!("more than {first_position}, the rows in front of the first position"),
        ));
    }
    dimensions.max_position_embeddings = num_rows - first_position;
    let hidden = dimensions.hidden_size;
    let inner = dimensions.intermediate_size;
    let [q, kv, _] = dimensions.qkv_widths();
    let qkv = [
        ("attention.self.query", q),
        ("attention.self.key", kv),
        ("attention.self.value", kv),
    ];
    let mut layer = dimensions.llama_layer();
    layer.norms = Norms::OfSums {
        attention: "attention.output.LayerNorm",
        feed_forward: "output.LayerNorm",
    };
    layer.attention.qkv = Projection::stacked(&qkv, hidden, Stacking::Concatenated);
    layer.attention.o = Projection::single("attention.output.dense", hidden, q);
    layer.attention.set_biases(true);
    layer.feed_forward = FeedForward::Plain {
        up: Projection::single("intermediate.dense", inner, hidden),
        activation: PlainActivation::Of(dimensions.activation),
        alphas: None,
        down: Projection::single("output.dense", hidden, inner),
    };
    layer.feed_forward.set_biases(true);
    let windows = no_windows(dimensions.num_layers);
    Ok(ModelSpec {
        learned_positions: Some(LearnedPositions {
            module: names.positions,
            first_row: first_position,
            padding_id,
            num_rows,
        }),
        token_types: Some(TokenTypes {
            module: names.token_types,
            num_types,
        }),
        embedding_norm: Some(names.embedding_norm),
        is_bidirectional: true,
        modules: ModelModules {
            embedding: names.embedding,
            layers: names.layers,
            first_layer: 0,
            layers_per_module: 1,
            final_norm: None,
            output_layer: "cls.predictions.decoder",
        },
        ..dimensions.model(class, layer, windows)
    })
}
