//! The work and the memory that a rendering may take.

use crate::error::{Bound, Outcome, out_of};

/// The limits of a rendering.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Evaluated nodes, turns of loops and elements, and a share of the bytes that are read.
    pub max_steps: u64,
    /// Bytes of all values that are made, freed ones included.
    pub max_bytes: u64,
    /// Bytes of the rendered text.
    pub max_output_bytes: usize,
}

impl Default for Limits {
    /// About a second at most. A long conversation needs tens of thousands of steps.
    fn default() -> Self {
        Self {
            max_steps: 10_000_000,
            max_bytes: 256 << 20,
            max_output_bytes: 64 << 20,
        }
    }
}

/// Bytes of text that are read in a step.
const BYTES_PER_STEP: usize = 32;
/// Depth of nested calls, statements and expressions under evaluation, each of which uses stack.
const MAX_DEPTH: u32 = 500;

/// The remaining steps and bytes, and the current depth.
pub(crate) struct Budget {
    steps: u64,
    bytes: u64,
    depth: u32,
}

impl Budget {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            steps: limits.max_steps,
            bytes: limits.max_bytes,
            depth: 0,
        }
    }

    /// Takes steps.
    pub(crate) fn work(&mut self, steps: usize) -> Outcome<()> {
        match self.steps.checked_sub(steps as u64) {
            Some(left) => {
                self.steps = left;
                Ok(())
            }
            None => {
                self.steps = 0;
                out_of(Bound::Steps)
            }
        }
    }

    /// Takes the steps for reading a text of this length.
    pub(crate) fn read(&mut self, bytes: usize) -> Outcome<()> {
        self.work(bytes / BYTES_PER_STEP + 1)
    }

    /// Takes the bytes of a value that is about to be made, and the steps to make it.
    pub(crate) fn make(&mut self, bytes: usize) -> Outcome<()> {
        let Some(left) = self.bytes.checked_sub(bytes as u64) else {
            self.bytes = 0;
            return out_of(Bound::Bytes);
        };
        self.bytes = left;
        self.read(bytes)
    }

    /// Takes the bytes of `count` parts of this size.
    pub(crate) fn make_many(&mut self, count: usize, size: usize) -> Outcome<()> {
        match count.checked_mul(size) {
            Some(bytes) => self.make(bytes),
            None => out_of(Bound::Bytes),
        }
    }

    /// Goes a level deeper; `leave` goes back.
    pub(crate) fn enter(&mut self) -> Outcome<()> {
        if self.depth >= MAX_DEPTH {
            return out_of(Bound::Recursion);
        }
        self.depth += 1;
        Ok(())
    }

    pub(crate) fn leave(&mut self) {
        self.depth -= 1;
    }
}
