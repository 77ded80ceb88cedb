//! The weights of one matrix of an adapter.
//!
//! ```text
//! loading     each matrix has memory of its own
//! gathered    one buffer:  A of place 0 | B of place 0 | A of place 1 | B of place 1 | ...
//! ```
//!
//! A step reads all weights of its adapters, once. In one buffer, on huge pages, that needs few address translations,
//! and the matrices of a projection follow one another.

use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::memory::Buffer;
use inflight_base::LoadError;

/// Weights in bf16.
#[derive(Debug)]
pub struct AdapterValues(Memory);

#[derive(Debug)]
enum Memory {
    Own(Vec<bf16>),
    Gathered(Arc<Buffer>, Range<usize>),
}

impl AdapterValues {
    /// Weights that are zero, in memory of their own.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn zeroed(len: usize) -> Result<Self, LoadError> {
        let values = try_zeroed_vec(len)
            .map_err(|()| LoadError::Resource(format!("no memory for {len} bf16 of an adapter")))?;
        Ok(Self(Memory::Own(values)))
    }

    /// The weights, to be set.
    ///
    /// # Panics
    ///
    /// If they have been gathered.
    pub fn as_mut_slice(&mut self) -> &mut [bf16] {
        match &mut self.0 {
            Memory::Own(values) => values,
            Memory::Gathered(..) => panic!("the weights of an adapter are complete"),
        }
    }
}

impl Deref for AdapterValues {
    type Target = [bf16];

    fn deref(&self) -> &[bf16] {
        match &self.0 {
            Memory::Own(values) => values,
            Memory::Gathered(buffer, range) => buffer.as_slice()[range.clone()].reinterpret_cast(),
        }
    }
}

/// Moves weights to one buffer, in their order.
///
/// # Errors
///
/// If there is not enough memory. Then all are where they were.
pub fn gather(values: &mut [&mut AdapterValues]) -> Result<(), LoadError> {
    let len = values.iter().map(|values| values.len()).sum();
    let mut buffer = Buffer::zeroed(len)?;
    let mut rest = buffer.as_mut_slice();
    for values in &*values {
        let (own, others) = rest.split_at_mut(values.len());
        own.copy_from_slice(values.reinterpret_cast());
        rest = others;
    }
    let buffer = Arc::new(buffer);
    let mut start = 0;
    for values in values {
        let range = start..start + values.len();
        start = range.end;
        values.0 = Memory::Gathered(buffer.clone(), range);
    }
    Ok(())
}
