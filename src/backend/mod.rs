//! L7: where Triton meets the engine: the driver, request parsing, the responder, metrics.

mod admission;
mod advice;
mod answer;
mod answer_memory;
mod branches;
mod clients;
mod correlation;
mod driver;
mod facts;
mod guide_options;
mod heavy_responder;
mod host_memory;
mod implementation;
mod in_flight;
mod instance;
mod limits;
mod log_probs;
mod metrics;
mod model;
mod model_anchor;
mod model_load;
mod observer;
mod option_sizes;
mod option_tensors;
mod options;
mod post_processor_options;
mod responder;
mod stop_ids;
mod text_stream;
mod watched_driver;

pub use clients::client_tables;
pub use facts::{Facts, open_checkpoint};
pub use implementation::Inflight;
pub use limits::{ModelFacts, engine_config};
pub use options::reference_table;
