//! From tokens to responses: text, the outputs of a request, and the threads that send them.

pub mod answer;
pub mod answer_memory;
mod heavy_responder;
pub mod log_probs;
pub mod responder;
pub mod text_stream;
