//! The messages of Triton's gRPC protocol that the front sends and reads.
//!
//! Names, types and field numbers come from `grpc_service.proto` and `model_config.proto` in the folder `protobuf` of
//! triton-inference-server/common (r24.10).
//! Fields that the front has no use for are left out: a reader skips what it does not know, as the wire format demands.
//! `tests/server/test_openai.py` compares the numbers with the descriptors of Triton's own client.

use std::collections::HashMap;

use axum::body::Bytes;
use prost::{Message, Oneof};

/// The service that all calls belong to.
pub const SERVICE: &str = "inference.GRPCInferenceService";

/// Asks whether the server takes requests.
#[derive(Clone, PartialEq, Message)]
pub struct ServerReadyRequest {}

/// Whether the server takes requests.
#[derive(Clone, PartialEq, Message)]
pub struct ServerReadyResponse {
    /// It does.
    #[prost(bool, tag = "1")]
    pub ready: bool,
}

/// Asks for the models of a repository.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryIndexRequest {
    /// Only those that take requests.
    #[prost(bool, tag = "2")]
    pub ready: bool,
}

/// The models of a repository.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryIndexResponse {
    /// An entry for each version of each model.
    #[prost(message, repeated, tag = "1")]
    pub models: Vec<ModelIndex>,
}

/// A version of a model.
#[derive(Clone, PartialEq, Message)]
pub struct ModelIndex {
    /// The model's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The version, a number.
    #[prost(string, tag = "2")]
    pub version: String,
    /// Such as `READY`.
    #[prost(string, tag = "3")]
    pub state: String,
}

/// Loads a model of the repository, or unloads it.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryModelRequest {
    /// The model's name.
    #[prost(string, tag = "2")]
    pub model_name: String,
}

/// Says that a model was loaded, or is being unloaded.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryModelResponse {}

/// Asks for the configuration of a model.
#[derive(Clone, PartialEq, Message)]
pub struct ModelConfigRequest {
    /// The model.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// The configuration of a model.
#[derive(Clone, PartialEq, Message)]
pub struct ModelConfigResponse {
    /// The configuration.
    #[prost(message, optional, tag = "1")]
    pub config: Option<ModelConfig>,
}

/// The part of config.pbtxt that the front reads.
#[derive(Clone, PartialEq, Message)]
pub struct ModelConfig {
    /// The parameters of the backend by name.
    #[prost(map = "string, message", tag = "14")]
    pub parameters: HashMap<String, ModelParameter>,
}

/// A parameter of a config.pbtxt.
#[derive(Clone, PartialEq, Message)]
pub struct ModelParameter {
    /// Its value.
    #[prost(string, tag = "1")]
    pub string_value: String,
}

/// A value of a request parameter.
#[derive(Clone, PartialEq, Message)]
pub struct InferParameter {
    /// The value.
    #[prost(oneof = "ParameterChoice", tags = "1, 3")]
    pub parameter_choice: Option<ParameterChoice>,
}

/// The types of values that the front sends.
#[derive(Clone, PartialEq, Oneof)]
pub enum ParameterChoice {
    /// A truth value.
    #[prost(bool, tag = "1")]
    Bool(bool),
    /// A text.
    #[prost(string, tag = "3")]
    Text(String),
}

/// A request to a model.
#[derive(Clone, PartialEq, Message)]
pub struct ModelInferRequest {
    /// The model.
    #[prost(string, tag = "1")]
    pub model_name: String,
    /// The request id.
    #[prost(string, tag = "3")]
    pub id: String,
    /// Request parameters by name.
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    /// The input tensors.
    #[prost(message, repeated, tag = "5")]
    pub inputs: Vec<Tensor>,
    /// The outputs to return.
    #[prost(message, repeated, tag = "6")]
    pub outputs: Vec<RequestedOutput>,
    /// The bytes of each input tensor.
    #[prost(bytes = "vec", repeated, tag = "7")]
    pub raw_input_contents: Vec<Vec<u8>>,
}

/// An input tensor, whose bytes are elsewhere in its message.
#[derive(Clone, PartialEq, Message)]
pub struct Tensor {
    /// The tensor's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Such as `BYTES`.
    #[prost(string, tag = "2")]
    pub datatype: String,
    /// The shape, with the batch dimension.
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
}

/// An output that a request names.
#[derive(Clone, PartialEq, Message)]
pub struct RequestedOutput {
    /// The output's name.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A response of a model. There is one for each token, so it has no field that nobody reads, and no map.
#[derive(Clone, PartialEq, Message)]
pub struct ModelInferResponse {
    /// Response parameters.
    #[prost(message, repeated, tag = "4")]
    pub parameters: Vec<ResponseParameter>,
    /// The output tensors.
    #[prost(message, repeated, tag = "5")]
    pub outputs: Vec<OutputTensor>,
    /// The bytes of each.
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub raw_output_contents: Vec<Bytes>,
}

impl ModelInferResponse {
    /// A text beside the outputs.
    pub fn text(&self, name: &str) -> Option<&str> {
        let parameter = self
            .parameters
            .iter()
            .find(|parameter| parameter.key == name)?;
        match parameter.value.as_ref()?.parameter_choice.as_ref()? {
            ParameterChoice::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether the request has no more responses. Models that always have one do not say so.
    pub fn is_final(&self) -> bool {
        let mut parameters = self.parameters.iter();
        let parameter = parameters.find(|parameter| parameter.key == "triton_final_response");
        let value = parameter.and_then(|parameter| parameter.value.as_ref());
        let value = value.and_then(|value| value.parameter_choice.as_ref());
        !matches!(value, Some(ParameterChoice::Bool(false)))
    }
}

/// A parameter of a response: an entry of a map, as the wire format has it.
#[derive(Clone, PartialEq, Message)]
pub struct ResponseParameter {
    /// The parameter's name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value.
    #[prost(message, optional, tag = "2")]
    pub value: Option<InferParameter>,
}

/// An output tensor, whose type its name tells, and whose bytes are elsewhere in its message.
#[derive(Clone, PartialEq, Message)]
pub struct OutputTensor {
    /// The tensor's name.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// What a stream of responses consists of.
#[derive(Clone, PartialEq, Message)]
pub struct ModelStreamInferResponse {
    /// Why the request failed; empty if it did not.
    #[prost(string, tag = "1")]
    pub error_message: String,
    /// The response.
    #[prost(message, optional, tag = "2")]
    pub infer_response: Option<ModelInferResponse>,
}
