//! Requests and responses as tensors by name, as in TensorRT-LLM's Batch Manager: a layer over the typed callbacks, for
//! applications in other languages.
//!
//! ```text
//! tensor.rs      a tensor: type, shape, bytes
//! inputs.rs      the tensors that a request may have
//! request.rs     tensors -> NewRequest
//! response.rs    Response -> tensors
//! model.rs       TensorRequest, TensorModel
//! layer.rs       TensorCallbacks as Callbacks
//! executor.rs    the executor with tensors
//! ```

mod executor;
mod inputs;
mod layer;
mod model;
mod request;
mod response;
mod tensor;

pub use executor::{TensorExecutor, TensorResponse};
pub use layer::{TensorCallbacks, TensorLayer};
pub use model::{TensorModel, TensorRequest};
pub use tensor::{HostTensor, HostTensors, TensorType};
