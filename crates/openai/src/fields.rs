//! The fields of each endpoint's requests, and what becomes of them.

use serde_json::{Map, Value, json};

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
    /// The field is handed on as the request option of this name.
    Option(&'static str),
    /// The field may be given and has no effect.
    Ignored,
    /// The field is an error.
    Refused {
        /// What to do instead.
        instead: &'static str,
        /// Values that mean as much as leaving the field out, and are no error.
        unless: fn(&Value) -> bool,
    },
}

/// A field that the endpoint reads.
pub const fn read(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Read, text)
}

/// A field that is the request option of its name.
pub const fn option(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Option(name), text)
}

/// A field that has no effect.
pub const fn ignored(name: &'static str, text: &'static str) -> Field {
    field(name, Fate::Ignored, text)
}

/// A field that is an error.
pub const fn refused(
    name: &'static str,
    instead: &'static str,
    unless: fn(&Value) -> bool,
) -> Field {
    field(name, Fate::Refused { instead, unless }, instead)
}

const fn field(name: &'static str, fate: Fate, text: &'static str) -> Field {
    Field { name, fate, text }
}

/// The model.
pub const MODEL: Field = read(
    "model",
    "the name of the model in Triton's repository, or [`MODEL:ADAPTER`](openai.md#adapters)",
);
const N: Field = read(
    "n",
    "choices for each prompt, at most 128 and the model's `max_batch_size`. Above 1, `temperature` is 1 unless the request says otherwise",
);
/// Whether the answer is a stream.
pub const STREAM: Field = read(
    "stream",
    "the answer as server-sent events, one for each token",
);
const STREAM_OPTIONS: Field = read(
    "stream_options",
    "`include_usage`: a last chunk with the numbers of tokens. `continuous_usage_stats` beside it, as vLLM has it: every chunk has those so far, of all choices",
);
const STOP: Field = read("stop", "a text, or a list of texts, that end a choice");
const SEED: Field = read(
    "seed",
    "the same seed gives the same choices; without one, or with -1, they differ each time",
);
const MODERATION: Field = refused("moderation", "leave it out: nothing is moderated", |_| {
    false
});
const USER: Field = ignored("user", "requests of all users are equal");

/// Fields of `/v1/completions`.
pub const COMPLETIONS: &[Field] = &[
    MODEL,
    read(
        "prompt",
        "a text, a list of token ids, or a list of at most 128 of those",
    ),
    option(
        "best_of",
        "choices of which the best `n` are returned; not in a stream",
    ),
    read(
        "echo",
        "each choice begins with its prompt, and its `logprobs` with those of the prompt's tokens; those of the first one are null",
    ),
    option("frequency_penalty", "as OpenAI describes it"),
    option("logit_bias", "as OpenAI describes it"),
    read(
        "logprobs",
        "the log-probability of each token and of this many of the most likely tokens at its position, at most 20. A part of a character is `bytes:` with its bytes, such as `bytes:\\xf0\\x9f`",
    ),
    read(
        "max_tokens",
        "the most tokens of a choice, by default 16. 0 with `echo`: the prompt alone",
    ),
    N,
    option("presence_penalty", "as OpenAI describes it"),
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
    option("top_p", "as OpenAI describes it"),
    USER,
];

/// Fields of `/v1/chat/completions`.
pub const CHAT: &[Field] = &[
    MODEL,
    read(
        "messages",
        "the conversation, which the model's chat template turns into the prompt. Contents are texts, or lists of parts of type `text` and `image_url`, whose [images](images.md) are data URLs, or at hosts that `--allow-image-host` names; other parts are refused. The role `developer` becomes `system`",
    ),
    refused("audio", "leave it out: models here write text", |_| false),
    option("frequency_penalty", "as OpenAI describes it"),
    refused("function_call", "give 'tool_choice'", |_| false),
    refused("functions", "give 'tools'", |_| false),
    option("logit_bias", "as OpenAI describes it"),
    read(
        "logprobs",
        "true: each token has its log-probability, and its `bytes`, which together are those of the text, also where tokens are parts of a character",
    ),
    read(
        "max_completion_tokens",
        "the most tokens of a choice, reasoning included; by default as many as the model's context has room for",
    ),
    read("max_tokens", "the older name of `max_completion_tokens`"),
    ignored("metadata", "nothing is stored"),
    refused("modalities", "leave it out, or give [\"text\"]", |value| {
        *value == json!(["text"])
    }),
    MODERATION,
    N,
    option(
        "parallel_tool_calls",
        "as OpenAI describes it, where a guide can tell calls from text ([Chat](chat.md#calls-that-are-well-formed))",
    ),
    read(
        "prediction",
        "the expected answer, or its beginning, as OpenAI describes it. A model with `speculation` generates it faster \
         where it is right ([`draft_text`](request-options.md)); the answer does not depend on it",
    ),
    option("presence_penalty", "as OpenAI describes it"),
    ignored(
        "prompt_cache_key",
        "prompts that begin in the same way share their blocks by themselves; `cache_salt` separates them",
    ),
    ignored("prompt_cache_options", "as `prompt_cache_key`"),
    ignored("prompt_cache_retention", "as `prompt_cache_key`"),
    read(
        "reasoning_effort",
        "a variable of the chat template, which may or may not read it",
    ),
    read(
        "response_format",
        "`text`; `json_object`; `json_schema`, to which the answer conforms; without `strict`, what cannot be enforced is listed in the header `Warning` ([JSON Schema](json-schema.md)); `structural_tag` ([Guided decoding](guided-decoding.md))",
    ),
    ignored("safety_identifier", "as `user`"),
    SEED,
    ignored(
        "service_tier",
        "there is one; `request_priority` orders requests",
    ),
    STOP,
    ignored("store", "nothing is stored"),
    STREAM,
    STREAM_OPTIONS,
    option(
        "temperature",
        "by default the model's: 0, or what its generation_config.json recommends",
    ),
    option(
        "tool_choice",
        "`none`, `auto`, `required`, a function's name, or `allowed_tools`: some of the functions, with the mode `auto` or `required`",
    ),
    read("tools", "functions, at most 128"),
    read(
        "top_logprobs",
        "with `logprobs`: the number of most likely tokens returned at each position, at most 20",
    ),
    option("top_p", "as OpenAI describes it"),
    USER,
    refused(
        "verbosity",
        "leave it out, or tell the model in a message",
        |value| value == "medium",
    ),
    refused(
        "web_search_options",
        "leave it out: models here search nothing",
        |_| false,
    ),
];

/// Fields of `/v1/responses`.
pub const RESPONSES: &[Field] = &[
    MODEL,
    read(
        "input",
        "a text, or a list of items: messages of texts, `function_call`, `function_call_output`, and `reasoning` with its text",
    ),
    refused(
        "access_programs",
        "leave it out: it concerns models of OpenAI's own",
        |_| false,
    ),
    field(
        "background",
        Fate::Refused {
            instead: "start the server with --response-store, or leave it out",
            unless: |value| *value == json!(false),
        },
        "taken with `--response-store`: whether the response is computed in the background and asked for by its id",
    ),
    ignored(
        "background_options",
        "responses in the background wait for nothing else",
    ),
    refused(
        "context_management",
        "leave it out, or shorten the input",
        |value| *value == json!([]),
    ),
    field(
        "conversation",
        Fate::Refused {
            instead: "start the server with --response-store, or send the items of the conversation as 'input': nothing is stored",
            unless: |_| false,
        },
        "taken with `--response-store`: the [conversation](#conversations) that the request continues. The items of the request and of the response are added to it",
    ),
    refused("image", "leave it out: models here write text", |_| false),
    read(
        "include",
        "`message.output_text.logprobs`: the tokens of messages have their log-probabilities. Anything else is refused: nothing else is left out of responses",
    ),
    read("instructions", "a system message before the input"),
    read(
        "max_output_tokens",
        "the most tokens, reasoning included; by default as many as the model's context has room for",
    ),
    ignored("max_tool_calls", "it concerns tools of OpenAI's own"),
    read("metadata", "repeated in the response"),
    MODERATION,
    option("parallel_tool_calls", "as for `/v1/chat/completions`"),
    field(
        "previous_response_id",
        Fate::Refused {
            instead: "start the server with --response-store, or send the items of the conversation as 'input': nothing is stored",
            unless: |value| *value == json!(false),
        },
        "taken with `--response-store`: the stored response that the request continues",
    ),
    refused("prompt", "give 'input': nothing is stored", |_| false),
    ignored(
        "prompt_cache_key",
        "prompts that begin in the same way share their blocks by themselves; `cache_salt` separates them",
    ),
    ignored("prompt_cache_options", "as `prompt_cache_key`"),
    ignored("prompt_cache_retention", "as `prompt_cache_key`"),
    read(
        "reasoning",
        "`effort`: a variable of the chat template, which may or may not read it. `summary` has no effect: the reasoning itself is in the response",
    ),
    ignored("safety_identifier", "as `user`"),
    ignored(
        "service_tier",
        "there is one; `request_priority` orders requests",
    ),
    field(
        "store",
        Fate::Refused {
            instead: "start the server with --response-store, or give false: nothing is stored",
            unless: |value| *value == json!(false),
        },
        "taken with `--response-store`: whether the response is stored, by default true",
    ),
    STREAM,
    ignored("stream_options", "events are not padded"),
    option(
        "temperature",
        "by default the model's: 0, or what its generation_config.json recommends",
    ),
    read(
        "text",
        "`format`: `text`, `json_object`, or `json_schema`, as in `response_format` of chat completions; `verbosity` other than `medium` is refused",
    ),
    read(
        "tool_choice",
        "`none`, `auto`, `required`, a function's name, or `allowed_tools`: some of the functions, with the mode `auto` or `required`",
    ),
    read(
        "tools",
        "functions, at most 128. Tools of OpenAI's own are refused",
    ),
    read(
        "top_logprobs",
        "the number of most likely tokens returned at each position, at most 20; any number above 0 includes log-probabilities",
    ),
    option("top_p", "as OpenAI describes it"),
    refused(
        "truncation",
        "leave it out, or shorten the input",
        |value| value == "disabled",
    ),
    USER,
];

/// Fields of `/v1/embeddings`.
pub const EMBEDDINGS: &[Field] = &[
    MODEL,
    read(
        "input",
        "a text, a list of token ids, or a list of at most 2048 of those",
    ),
    option("dimensions", "the first so many elements of each vector"),
    read("encoding_format", "`float` or `base64`"),
    PROMPT_NAME,
    INPUT_TYPE,
    USER,
];

/// Fields of `/rerank`, `/v1/rerank` and `/v2/rerank`.
pub const RERANK: &[Field] = &[
    MODEL,
    read("query", "a text"),
    read(
        "documents",
        "a list of at most 2048 texts, or of objects with a `text`",
    ),
    read("top_n", "the most results; by default, all documents"),
    read(
        "return_documents",
        "whether each result has its document, by default true",
    ),
    ignored(
        "max_chunks_per_doc",
        "a document is one chunk; `truncate_prompt_tokens` cuts long ones",
    ),
    ignored(
        "max_tokens_per_doc",
        "`truncate_prompt_tokens` cuts a query with its document; -1: to the model's length",
    ),
    refused("rank_fields", "give each document as one text", |value| {
        *value == json!(["text"])
    }),
    field(
        "priority",
        Fate::Option("request_priority"),
        "the order of requests, the smallest first",
    ),
    USER,
];

/// Fields of `/score`.
pub const SCORE: &[Field] = &[
    MODEL,
    read(
        "text_1",
        "a text, or a list of at most 2048: the queries. One is for all of `text_2`",
    ),
    read("text_2", "a text, or a list of at most 2048: the documents"),
    USER,
];

/// Fields of `/classify`.
pub const CLASSIFY: &[Field] = &[
    MODEL,
    read(
        "input",
        "a text, a list of token ids, or a list of at most 2048 of those",
    ),
    USER,
];

/// Fields of `/pooling`.
pub const POOLING: &[Field] = &[
    MODEL,
    read(
        "input",
        "a text, a list of token ids, or a list of at most 2048 of those",
    ),
    read(
        "task",
        "`embed`, `classify` or `score`, if it is the task of the model. Numbers of single tokens are refused",
    ),
    option("dimensions", "the first so many elements of each vector"),
    read("encoding_format", "`float` or `base64`"),
    PROMPT_NAME,
    INPUT_TYPE,
    USER,
];

/// The name of a prompt.
pub const PROMPT_NAME: Field = read(
    "prompt_name",
    "the [prompt](openai.md#prompts) of the model that stands before each text",
);
/// The kind of text, which chooses a prompt.
pub const INPUT_TYPE: Field = read(
    "input_type",
    "instead of `prompt_name`: `query` (or `search_query`), `document` (or `passage`, `search_document`), or the name of a prompt",
);
const ONLY_MODEL: Field = read(
    "model",
    "as elsewhere; without it, the only model that there is",
);

/// Fields of `/tokenize`.
pub const TOKENIZE: &[Field] = &[
    ONLY_MODEL,
    read("prompt", "a text"),
    read("content", "llama.cpp's name for `prompt`"),
    read(
        "messages",
        "instead of `prompt`: a conversation, as for `/v1/chat/completions`. `tools` and other options of conversations may be given beside it",
    ),
    option(
        "add_generation_prompt",
        "whether the prompt of a conversation ends with the beginning of an answer, by default true",
    ),
    refused(
        "add_special_tokens",
        "leave it out: the model's parameter `add_special_tokens` says it, so that the tokens are those of a completion",
        |value| *value == json!(true),
    ),
    refused(
        "add_special",
        "leave it out, as `add_special_tokens`",
        |value| *value == json!(true),
    ),
    refused(
        "parse_special",
        "leave it out: the text of a special token is that token, as in a completion",
        |value| *value == json!(true),
    ),
    refused(
        "return_token_strs",
        "leave it out, and give each token to `/detokenize`",
        |value| *value == json!(false),
    ),
    refused(
        "with_pieces",
        "leave it out, as `return_token_strs`",
        |value| *value == json!(false),
    ),
];

/// Fields of `/detokenize`.
pub const DETOKENIZE: &[Field] = &[ONLY_MODEL, read("tokens", "a list of token ids")];

/// The fields of each endpoint, by the endpoint's name in the documentation of OpenAI's API.
pub const ENDPOINTS: &[(&str, &[Field])] = &[
    ("completions", COMPLETIONS),
    ("chat", CHAT),
    ("responses", RESPONSES),
    ("embeddings", EMBEDDINGS),
    ("rerank", RERANK),
    ("score", SCORE),
    ("classify", CLASSIFY),
    ("pooling", POOLING),
    ("tokenize", TOKENIZE),
    ("detokenize", DETOKENIZE),
];

/// The first of these options that is a field of `/v1/chat/completions` and no option of the backend. An endpoint may
/// have `shared` ones under their names.
pub fn first_of_chat<'a>(options: &'a Map<String, Value>, shared: &[&str]) -> Option<&'a str> {
    let is_of_chat = |name: &&str| {
        let field = CHAT.iter().find(|field| field.name == *name);
        let is_own = field.is_some_and(|field| !matches!(field.fate, Fate::Option(_)));
        is_own && !shared.contains(name)
    };
    options.keys().map(String::as_str).find(is_of_chat)
}

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
