//! The request whose logits are processed.

use crate::base::{ClientId, SequenceId};

/// Whose logits are to be processed.
#[derive(Clone, Copy, Debug)]
pub struct ProcessedRequest<'a> {
    /// The sequence: a request for several has a processor for each.
    pub id: SequenceId,
    /// What its client calls it, if it does.
    pub client_request_id: Option<&'a str>,
    /// Who its client is, if the request says.
    pub client_id: Option<ClientId>,
    /// Logits of a token, one for each of the vocabulary.
    pub vocab_size: u32,
}
