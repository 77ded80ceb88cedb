//! L1: Triton's C API in Rust: generated bindings, and safe owners of Triton's objects.
//!
//! Everything that must be answered, released, sent or deleted is owned by a value, and dropping the value is safe. A
//! [`Request`] that is dropped is answered with an error and released; an [`UnsentResponse`] that is dropped is
//! deleted; a second final response cannot reach Triton, because all code that answers a request shares its
//! [`ResponseFactory`].
//!
//! ```text
//! sys.rs       the C declarations, generated (`cargo xtask bindings`)
//! error.rs     Error: Triton's code and message
//! backend.rs   the API's version, BackendAttributes
//! model.rs     Model: config, auto-complete     } handles of Triton's objects, valid
//! served_model.rs  ServedModel: whether it is ready, requests by the backend
//! instance.rs  Instance: statistics, memory     } from Initialize to Finalize
//! health.rs    Health: whether an instance can serve
//! request.rs   Request: flags, ids, parameters, release and reschedule
//! input.rs     Input: an input tensor, gathered from all its buffers
//! response.rs  ResponseFactory and UnsentResponse
//! data_type.rs DataType, and Element: the Rust types that tensors hold
//! strings.rs   the encoding of BYTES tensors
//! metrics.rs   MetricFamily and its Counter, Gauge, Histogram
//! logger.rs    the `log` crate into Triton's log
//! endpoints.rs ports that the server closes while it stops
//! process_exit.rs  the end of the process while instances are loaded
//! lifecycle.rs what the exported entry points do, whatever the backend
//! ```
//!
//! This room never parses JSON, knows nothing of engine or runner, starts no thread and calls no
//! function that server 2.51 (r24.10) lacks: the library is linked with BIND_NOW.

mod backend;
mod data_type;
mod endpoints;
mod error;
mod health;
mod input;
mod instance;
pub mod lifecycle;
mod logger;
mod memory;
mod message;
mod metrics;
mod model;
mod process_exit;
mod request;
mod response;
mod served_model;
pub mod strings;
pub mod sys;

pub use backend::{BackendAttributes, check_api_version};
pub use data_type::{DataType, Element};
pub use endpoints::endpoints_are_up;
pub use error::{Error, ErrorCode};
pub use health::Health;
pub use input::{Input, OwnedInput};
pub use instance::{Instance, Timestamps, now_ns};
pub use logger::{install_logger, verbose_enabled};
pub use metrics::{Counter, Gauge, Histogram, MetricFamily};
pub use model::Model;
pub use request::{CorrelationId, MovingRequest, ParameterValue, Request, RequestFlags};
pub use response::{Completion, ResponseFactory, UnsentResponse};
pub use served_model::{ServedModel, Serving};
