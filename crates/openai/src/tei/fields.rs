//! The fields of each endpoint's requests.

use crate::fields::{Field, INPUT_TYPE, PROMPT_NAME, option, read};

const MODEL: Field = read(
    "model",
    "the name of the model, which the API itself does not have; without it, the only model with this `task`",
);
const TRUNCATE: Field = read(
    "truncate",
    "whether a text that is too long is cut at its end; by default it is an error",
);
const DIRECTION: Field = read("truncation_direction", "`Right`; `Left` is refused");
const RAW_SCORES: Field = option(
    "raw_scores",
    "the model's own numbers instead of probabilities",
);

/// Fields of `/embed`.
pub const EMBED: &[Field] = &[
    MODEL,
    read(
        "inputs",
        "a text, a list of token ids, or a list of at most 2048 of those",
    ),
    option(
        "normalize",
        "whether each vector is divided by its length, by default true",
    ),
    option("dimensions", "the first so many elements of each vector"),
    TRUNCATE,
    DIRECTION,
    PROMPT_NAME,
    INPUT_TYPE,
];

/// Fields of `/rerank` with `texts`.
pub const RERANK: &[Field] = &[
    MODEL,
    read("query", "a text"),
    read("texts", "a list of at most 2048 texts"),
    read(
        "top_n",
        "the most results, which LiteLLM sends; by default, all texts",
    ),
    read(
        "return_text",
        "whether each result has its text, by default false",
    ),
    RAW_SCORES,
    TRUNCATE,
    DIRECTION,
];

/// Fields of `/predict`.
pub const PREDICT: &[Field] = &[
    MODEL,
    read(
        "inputs",
        "a text; a pair of texts, `[\"a\", \"b\"]`; or a list of at most 2048 of those, each a list: `[[\"a\"], [\"b\", \"c\"]]`",
    ),
    RAW_SCORES,
    TRUNCATE,
    DIRECTION,
];

/// The fields of each endpoint, by the endpoint's name in the documentation.
pub const ENDPOINTS: &[(&str, &[Field])] =
    &[("embed", EMBED), ("rerank", RERANK), ("predict", PREDICT)];
