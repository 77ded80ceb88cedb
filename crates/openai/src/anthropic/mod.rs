//! Anthropic's Messages API: a conversation in other words.
//!
//! | file | noun |
//! |---|---|
//! | `request.rs` | a request for a message, or for the number of its tokens |
//! | `fields.rs` | the fields of both, and what becomes of them |
//! | `conversation.rs`, `tools.rs`, `thinking.rs` | parts of requests: messages and their blocks; tools; the configuration of thinking, and signatures |
//! | `answer.rs` | a message, and the events of a stream that build it |
//! | `models.rs` | the list of models |
//! | `errors.rs` | errors in Anthropic's form |

pub mod answer;
pub mod conversation;
pub mod errors;
pub mod fields;
pub mod models;
pub mod request;
pub mod thinking;
pub mod tools;
