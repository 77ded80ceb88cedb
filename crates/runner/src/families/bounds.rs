//! The largest sizes that a config may have. They are far above any existing model: a config beyond them is damaged or
//! hostile, and products of a few of them still fit usize.

pub const MAX_WIDTH: usize = 1 << 20;
pub const MAX_LAYERS: usize = 1 << 12;
pub const MAX_HEADS: usize = 1 << 12;
pub const MAX_EXPERTS: usize = 1 << 10;
pub const MAX_HEAD_DIM: usize = 1 << 10;
pub const MAX_VOCAB: usize = 1 << 24;
pub const MAX_POSITIONS: usize = 1 << 30;
pub const MAX_PIXELS: usize = 1 << 14;
pub const MAX_PATCHES: usize = 1 << 16;
