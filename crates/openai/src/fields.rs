//! The fields of each endpoint's requests, and what becomes of them.

use serde_json::Value;

/// A field of a request.
pub struct Field {
    /// Its name in OpenAI's API.
    pub name: &'static str,
    /// What becomes of it.
    pub fate: Fate,
    /// What it does here, for the documentation.
    pub text: &'static str,
}

/// What becomes of a field.
pub enum Fate {
    /// The endpoint reads it.
    Read,
    /// It is handed on as the request option of this name.
    Option(&'static str),
    /// It may be given and has no effect.
    Ignored,
    /// It is an error.
    Refused {
        /// What to do instead.
        instead: &'static str,
        /// Values that say the same as leaving the field out, which are no error.
        unless: fn(&Value) -> bool,
    },
}

const fn read(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Read, text)
}

const fn option(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Option(name), text)
}

const fn ignored(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Ignored, text)
}

const fn refused(name: &'static str, instead: &'static str, unless: fn(&Value) -> bool) -> Field {
    field(name, Fate::Refused { instead, unless }, instead)
}

const fn field(name: &'static str, fate: Fate, text: &'static str) -> Field {
    Field { name, fate, text }
}

const MODEL: Field = read("model", "the name of the model in Triton's repository");
const N: Field = read(
    "n",
    "choices for each prompt, at most 128 and the model's `max_batch_size`. Above 1, `temperature` is 1 unless the request says otherwise",
);
const STREAM: Field = read(
    "stream",
    "the answer as server-sent events, one for each token",
);
const STREAM_OPTIONS: Field = read(
    "stream_options",
    "`include_usage`: a last chunk with the numbers of tokens",
);
const STOP: Field = read("stop", "a text, or a list of texts, that end a choice");
const SEED: Field = read(
    "seed",
    "the same seed gives the same choices; without one they differ each time",
);
const USER: Field = ignored("user", "ignored");

/// Fields of `/v1/completions`.
pub const COMPLETIONS: &[Field] = &[
    MODEL,
    read(
        "prompt",
        "a text, or a list of at most 128 texts. Token ids are refused",
    ),
    option(
        "best_of",
        "choices of which the best `n` are returned; not in a stream",
    ),
    read("echo", "each choice begins with its prompt"),
    option("frequency_penalty", "as there"),
    option("logit_bias", "as there"),
    read(
        "logprobs",
        "log-probabilities of each token and of so many of the most likely ones, at most 20",
    ),
    read("max_tokens", "the most tokens of a choice, by default 16"),
    N,
    option("presence_penalty", "as there"),
    SEED,
    STOP,
    STREAM,
    STREAM_OPTIONS,
    refused(
        "suffix",
        "leave it out: models continue a text and do not fill one in",
        |value| value == "",
    ),
    option(
        "temperature",
        "by default the model's: 0, or what its generation_config.json recommends",
    ),
    option("top_p", "as there"),
    USER,
];

/// The fields of each endpoint, by the endpoint's name in the documentation.
pub const ENDPOINTS: &[(&str, &[Field])] = &[("completions", COMPLETIONS)];

/// The documentation's table of `fields`.
pub fn table(fields: &[Field]) -> String {
    let row = |field: &Field| {
        let fate = match field.fate {
            Fate::Read | Fate::Option(_) => "taken",
            Fate::Ignored => "ignored",
            Fate::Refused { .. } => "refused",
        };
        format!("| `{}` | {fate} | {} |\n", field.name, field.text)
    };
    let head = "| field | | here |\n|---|---|---|\n".to_owned();
    head + &fields.iter().map(row).collect::<String>()
}
