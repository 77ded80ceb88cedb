//! The request whose logits are processed.

use inflight_base::{ClientId, SequenceId};

/// The request whose logits are processed.
#[derive(Clone, Copy, Debug)]
pub struct ProcessedRequest<'a> {
    /// The sequence. A request for several sequences has a processor for each.
    pub id: SequenceId,
    /// The client's request id, if any.
    pub client_request_id: Option<&'a str>,
    /// The client's id, if given.
    pub client_id: Option<ClientId>,
    /// Number of logits per token.
    pub vocab_size: u32,
}
