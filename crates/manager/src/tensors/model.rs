//! A request as tensors, and what is needed to read and write them.

use super::tensor::HostTensors;
use inflight_base::{ClientId, SequenceId, TokenId, Tokens};

/// A request as tensors by name.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRequest {
    /// Unique among the requests in flight.
    pub id: SequenceId,
    /// The client that sent it.
    pub client_id: Option<ClientId>,
    /// Whether each step's outputs are sent at once. If not, there is one response at the end.
    pub is_streaming: bool,
    /// `input_ids` and `request_output_len`, and options.
    pub tensors: HostTensors,
}

/// The properties of a model that tensors are read and written with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorModel {
    /// Token ids are below it.
    pub vocab_size: u32,
    /// The most tokens of prompt and output together.
    pub max_seq_len: Tokens,
    /// The tokens that end an output, unless the request says otherwise.
    pub end_ids: Vec<TokenId>,
}
