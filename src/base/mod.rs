//! L0: typed ids and units, and the three kinds of error. Imports nothing of this crate.

mod error;
mod ids;
mod names;
mod units;

pub use error::{LoadError, RequestError, StepError};
pub use ids::{BlockId, ClientId, RequestId, SeqSlot, TokenId};
pub use names::nearest_name;
pub use units::{BlockSize, Blocks, Tokens};
