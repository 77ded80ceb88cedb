//! OpenAI's API, and Anthropic's, in front of a tritonserver with models of this backend.
//!
//! | file | noun |
//! |---|---|
//! | `server.rs` | the paths, the limits, and what all endpoints share |
//! | `models.rs`, `completions.rs`, `chat.rs`, `chat_answer.rs`, `responses.rs`, `responses_answer.rs`, `embeddings.rs`, `classes.rs`, `scores.rs`, `pooling.rs`, `rerank.rs`, `tokens.rs` | the endpoints: from a JSON body to a request, from responses to JSON |
//! | `endpoint.rs`, `pooled.rs` | the interfaces of conversations, and of pooling models |
//! | `anthropic/` | Anthropic's Messages API |
//! | `tei/` | the API of Text Embeddings Inference |
//! | `adapters.rs`, `prompts.rs`, `place.rs` | names of models with adapters; the prompts of embedding models; where files of a model are |
//! | `sampling.rs`, `messages.rs`, `items.rs`, `input.rs` | parts of requests: what completions and conversations have in common; the messages of a conversation; items of `/v1/responses`; prompts |
//! | `chunk.rs`, `logprobs.rs`, `token_text.rs`, `usage.rs`, `ids.rs` | parts of answers: their frame, log-probabilities of messages, the text of a token, the tokens of a request, ids |
//! | `fields.rs` | the fields of each endpoint's requests, and what becomes of them |
//! | `answer.rs`, `parts.rs` | the replies to the prompts of a request; the parts of a reply |
//! | `content.rs`, `body.rs`, `encodings.rs`, `pages.rs` | the bodies of requests; a JSON object of which fields are taken one by one; compressed bodies; lists in pages |
//! | `json_response.rs` | a JSON value as a response |
//! | `names.rs` | what a client calls what the backend's refusals name |
//! | `generation.rs` | a request for text, and the responses to it, in Triton's tensors |
//! | `listener.rs`, `tls.rs` | the connections of clients, and their encryption |
//! | `load.rs` | the requests in flight |
//! | `origins.rs` | the origins whose pages may use the server in a browser |
//! | `sse.rs` | responses as server-sent events |
//! | `metrics.rs`, `triton_metrics.rs` | metrics of this server and of tritonserver |
//! | `triton.rs`, `protocol.rs` | the connection to tritonserver, and its messages |
//! | `trace.rs` | traces that requests belong to |
//! | `response_store/`, `stored.rs`, `conversations.rs`, `background.rs` | stored responses and conversations, the paths of both, and responses in the background |
//! | `batches/` | files of requests, and the batches that work on them |
//! | `keys.rs`, `rights.rs`, `access_log.rs` | who may send requests, how many and for what; a line for each |
//! | `page.rs`, `page.html` | the page at `/` |
//! | `live.rs`, `step_file.rs` | the steps of the models as they happen; the files that they are read from |
//! | `error.rs` | errors in OpenAI's form |

pub mod access_log;
pub mod adapters;
pub mod answer;
pub mod anthropic;
pub mod background;
pub mod batches;
pub mod beside_streams;
pub mod body;
pub mod chat;
pub mod chat_answer;
pub mod chunk;
pub mod classes;
pub mod completions;
pub mod content;
pub mod conversations;
pub mod downloads;
pub mod embeddings;
pub mod encodings;
pub mod endpoint;
pub mod error;
pub mod fields;
pub mod generation;
pub mod ids;
pub mod input;
pub mod items;
pub mod json_response;
pub mod keys;
pub mod listener;
pub mod live;
pub mod load;
pub mod logprobs;
pub mod message_content;
pub mod messages;
pub mod metrics;
pub mod models;
pub mod names;
pub mod origins;
pub mod page;
pub mod pages;
pub mod parts;
pub mod place;
pub mod pooled;
pub mod pooling;
pub mod prompts;
pub mod protocol;
pub mod rerank;
pub mod response_store;
pub mod responses;
pub mod responses_answer;
pub mod rights;
pub mod sampling;
pub mod scores;
pub mod server;
pub mod sse;
pub mod step_file;
pub mod stored;
pub mod tei;
pub mod tls;
pub mod token_text;
pub mod tokens;
pub mod trace;
pub mod triton;
pub mod triton_metrics;
pub mod usage;

pub use error::Error;
