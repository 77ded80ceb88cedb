//! Requests and responses as tensors by name, as in TensorRT-LLM's Batch Manager: a layer over the typed callbacks, for
//! applications in other languages.
//!
//! ```text
//! tensor.rs      a tensor: type, shape, bytes
//! request.rs     tensors -> NewRequest
//! response.rs    Response -> tensors
//! model.rs       TensorRequest, TensorModel
//! layer.rs       TensorCallbacks as Callbacks
//! ```

mod layer;
mod model;
mod request;
mod response;
mod tensor;

pub use layer::{TensorCallbacks, TensorLayer};
pub use model::{TensorModel, TensorRequest};
pub use tensor::{HostTensor, HostTensors, TensorType};
