//! The fields of requests for a message, and for the number of its tokens.

use serde_json::{Value, json};

use crate::fields::{Field, MODEL, STREAM, ignored, option, read, refused};

/// Fields of `/v1/messages`.
pub const MESSAGES: &[Field] = &[
    MODEL,
    SYSTEM,
    CONVERSATION,
    read(
        "max_tokens",
        "required: the most tokens of the answer, including thoughts",
    ),
    read(
        "stop_sequences",
        "texts that end the answer, at most 64 of 256 bytes each",
    ),
    STREAM,
    read(
        "temperature",
        "0 to 1; by default the model's: 0, or what its generation_config.json recommends",
    ),
    option("top_k", "as Anthropic describes it"),
    option("top_p", "as Anthropic describes it"),
    THINKING,
    OUTPUT_CONFIG,
    TOOLS,
    TOOL_CHOICE,
    ignored(
        "metadata",
        "nothing is stored, and requests of all users are equal",
    ),
    CACHE_CONTROL,
    SPEED,
    CONTEXT_MANAGEMENT,
    MCP_SERVERS,
    refused(
        "service_tier",
        "leave it out, or give 'auto' or 'standard_only'",
        |value| value == "auto" || value == "standard_only",
    ),
    refused(
        "container",
        "leave it out: nothing is executed here",
        |_| false,
    ),
    refused(
        "inference_geo",
        "leave it out: the server computes at one place",
        |_| false,
    ),
    refused(
        "diagnostics",
        "leave it out: nothing is stored about earlier requests",
        |_| false,
    ),
    refused(
        "compaction",
        "leave it out, and shorten the conversation",
        |_| false,
    ),
    refused("thread", "send all 'messages': nothing is stored", |_| {
        false
    }),
    refused("fallbacks", "leave it out: a request has one model", |_| {
        false
    }),
    refused(
        "fallback_credit_token",
        "leave it out: a request has one model",
        |_| false,
    ),
    refused("billing_policy", "leave it out: nothing is billed", |_| {
        false
    }),
];

/// Fields of `/v1/messages/count_tokens`.
pub const COUNT_TOKENS: &[Field] = &[
    MODEL,
    SYSTEM,
    CONVERSATION,
    THINKING,
    OUTPUT_CONFIG,
    TOOLS,
    TOOL_CHOICE,
    CACHE_CONTROL,
    SPEED,
    CONTEXT_MANAGEMENT,
    MCP_SERVERS,
];

/// The fields of each endpoint, by the endpoint's name in the documentation of Anthropic's API.
pub const ENDPOINTS: &[(&str, &[Field])] =
    &[("messages", MESSAGES), ("count-tokens", COUNT_TOKENS)];

const SYSTEM: Field = read(
    "system",
    "a text, or a list of blocks of type `text`. A block that begins with `x-anthropic-billing-header:` is left out: Claude Code may change it with each request, so that no prefix could be reused",
);
const CONVERSATION: Field = read(
    "messages",
    "the conversation, with texts or blocks as contents. Blocks of type `text`, `image` (with a source of type `base64`, or `url` at hosts that `--allow-image-host` names, in messages of the user), `thinking`, `tool_use` and `tool_result` (with `text` and `tool_reference`) are taken; `redacted_thinking`, which only Anthropic's models can read, is left out; documents and all other blocks are refused. Consecutive messages of one role become one message. If the last message has the role `assistant`, the answer continues it",
);
const THINKING: Field = read(
    "thinking",
    "`enabled` and `disabled` (or `between_tools`) set the variables `enable_thinking` and `thinking` of the chat template; `adaptive`, like a request without the field, leaves them unset. `budget_tokens` must be given, and [ends the thought](chat.md#a-budget-for-the-thought). `display`: `omitted` [hides the thought](#thinking)",
);
const OUTPUT_CONFIG: Field = read(
    "output_config",
    "`format`: a `json_schema` to which the answer conforms; a schema that cannot be enforced is refused ([JSON Schema](json-schema.md)). `effort`: the variable `reasoning_effort` of the chat template, which may or may not read it",
);
const TOOLS: Field = read(
    "tools",
    "at most 128 tools of the client, with `name`, `description`, `input_schema`, `strict` and `input_examples`. With `defer_loading`, a tool is left out of the prompt until the result of another has a `tool_reference` to it. Tools with a `type` other than `custom`, which Anthropic defines, are refused",
);
const TOOL_CHOICE: Field = read(
    "tool_choice",
    "`auto`, `any`, `tool` with a `name`, or `none`. `disable_parallel_tool_use` limits the answer to one call, where a guide can tell calls from text ([Chat](chat.md#calls-that-are-well-formed))",
);
const CACHE_CONTROL: Field = ignored(
    "cache_control",
    "here and in blocks of messages: prompts with a common prefix share its computation without it",
);
const SPEED: Field = refused("speed", "leave it out, or give 'standard'", |value| {
    value == "standard"
});
const CONTEXT_MANAGEMENT: Field = refused(
    "context_management",
    "leave it out, or keep all of the conversation, {\"edits\": [{\"type\": \"clear_thinking_20251015\", \"keep\": \"all\"}]}",
    keeps_all,
);
const MCP_SERVERS: Field = refused(
    "mcp_servers",
    "leave it out: the server calls no tools; give 'tools'",
    |value| *value == json!([]),
);

/// Whether no edit of a conversation removes anything.
fn keeps_all(value: &Value) -> bool {
    let keeps = |edit: &Value| {
        let keep = &edit["keep"];
        edit["type"] == "clear_thinking_20251015" && (keep == "all" || keep["type"] == "all")
    };
    match &value["edits"] {
        Value::Array(edits) => edits.iter().all(keeps),
        other => other.is_null(),
    }
}
