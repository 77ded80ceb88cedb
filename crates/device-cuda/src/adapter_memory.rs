//! Copies of adapters in the memory of a GPU.
//!
//! A step brings in the adapters that it uses and that are not there; others give way to them.

use std::mem::offset_of;
use std::sync::{Arc, Weak};

use cudarc::driver::CudaStream;

use super::lru_arena::LruArena;
use super::memory::DeviceMemory;
use inflight_base::LoadError;
use inflight_device::RANK_PANEL;
use inflight_device::{AdaptedPlace, AdapterRun, AdapterWeights, LowRank};

/// Parts of a place, at most: queries, keys and values.
pub(super) const MAX_PARTS: usize = 3;

/// Weights begin at multiples of it, in bytes.
const ALIGNMENT: usize = 16;

/// `Part` of low_rank.cu. Offsets count bytes from the first of the memory; 0, where a table is, stands for nothing.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Part {
    a: u64,
    b: u64,
    rank: u32,
    num_inputs: u32,
    first_output: u32,
    num_outputs: u32,
    scale: f32,
    padding: u32,
}

/// `Place` of low_rank.cu.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Place {
    parts: [Part; MAX_PARTS],
    factors: u64,
    bias: u64,
    replacement: u64,
}

const _: () = assert!(offset_of!(Place, factors) == MAX_PARTS * 40 && size_of::<Place>() == 144);

/// Memory of adapters, and which are there.
pub(super) struct AdapterMemory {
    memory: DeviceMemory,
    copies: LruArena<Weak<AdapterWeights>>,
}

/// An adapter as it lies in memory, from `start` on.
///
/// ```text
/// | table of places | A | B | A | B | ... | factors | bias | replacement | ...
/// ```
struct Layout<'a> {
    table: Vec<Place>,
    start: usize,
    len: usize,
    /// What follows the table, and where.
    pieces: Vec<(usize, &'a [u8])>,
}

impl AdapterMemory {
    /// Reserves memory.
    ///
    /// # Errors
    ///
    /// There is not enough.
    pub fn new(stream: &Arc<CudaStream>, num_bytes: usize) -> Result<Self, LoadError> {
        Ok(Self {
            memory: DeviceMemory::new(stream, num_bytes)?,
            copies: LruArena::new(num_bytes),
        })
    }

    /// Bytes that tables, and what is left free in front of vectors, take if this many adapters of a model are there.
    pub fn num_table_bytes(num_adapters: usize, num_places: usize) -> usize {
        // Factors, a bias and a replacement may each have any length.
        num_adapters * num_places * (size_of::<Place>() + 3 * ALIGNMENT)
    }

    /// The address that offsets count from.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Where the table of an adapter begins that a step has brought in.
    pub fn table(&mut self, weights: &Arc<AdapterWeights>, step: u64) -> Option<u64> {
        let start = self.copies.find(step, is_copy_of(weights));
        start.map(|start| start as u64)
    }

    /// Brings in the adapters of a step.
    ///
    /// # Errors
    ///
    /// The driver refuses, or they do not fit: the manager has given requests more adapters than there is memory for.
    pub fn bring_in(
        &mut self,
        stream: &Arc<CudaStream>,
        runs: &[AdapterRun],
        step: u64,
    ) -> Result<(), LoadError> {
        self.copies.retain(|copy| copy.strong_count() > 0);
        if self.place(stream, runs, step)? {
            return Ok(());
        }
        // There may be enough room, but in pieces.
        self.copies.retain(|_| false);
        match self.place(stream, runs, step)? {
            true => Ok(()),
            false => Err(LoadError::Resource(format!(
                "the adapters of a step take more than {} bytes",
                self.memory.num_bytes()
            ))),
        }
    }

    /// The same with the room between the copies that stay. Returns whether there is enough.
    fn place(
        &mut self,
        stream: &Arc<CudaStream>,
        runs: &[AdapterRun],
        step: u64,
    ) -> Result<bool, LoadError> {
        for AdapterRun { weights, .. } in runs {
            if self.table(weights, step).is_some() {
                continue;
            }
            let len = Layout::new(weights, 0).len;
            let copy = Arc::downgrade(weights);
            let Some(start) = self.copies.insert(step, copy, len) else {
                return Ok(false);
            };
            let written = self.write(stream, &Layout::new(weights, start));
            // A copy that is not whole must not be found.
            let is_it = is_copy_of(weights);
            written.inspect_err(|_| self.copies.retain(|copy| !is_it(copy)))?;
        }
        Ok(true)
    }

    fn write(&mut self, stream: &Arc<CudaStream>, layout: &Layout<'_>) -> Result<(), LoadError> {
        let table = (layout.start, bytemuck::cast_slice(&layout.table));
        let pieces = std::iter::once(table).chain(layout.pieces.iter().copied());
        self.memory.write_pieces(stream, pieces)
    }
}

impl<'a> Layout<'a> {
    fn new(weights: &'a AdapterWeights, start: usize) -> Self {
        let places = weights.places();
        let mut layout = Self {
            table: Vec::with_capacity(places.len()),
            start,
            len: places.len() * size_of::<Place>(),
            pieces: Vec::new(),
        };
        for place in places {
            let place = layout.place(place);
            layout.table.push(place);
        }
        layout.len = layout.len.next_multiple_of(ALIGNMENT);
        layout
    }

    fn place(&mut self, changes: &'a AdaptedPlace) -> Place {
        let mut place = Place::default();
        assert!(changes.parts().len() <= MAX_PARTS, "parts of a place");
        for (part, weights) in place.parts.iter_mut().zip(changes.parts()) {
            *part = self.part(weights);
        }
        let mut vector = |values: Option<&'a [f32]>| {
            values.map_or(0, |values| self.push(bytemuck::cast_slice(values)))
        };
        place.factors = vector(changes.factors());
        place.bias = vector(changes.bias());
        if let Some(rows) = changes.replacement() {
            place.replacement = self.push(bytemuck::cast_slice(rows.values()));
        }
        place
    }

    fn part(&mut self, weights: &'a LowRank) -> Part {
        Part {
            a: self.push(bytemuck::cast_slice(weights.packed_a())),
            b: self.push(bytemuck::cast_slice(weights.packed_b())),
            rank: weights.rank() as u32,
            num_inputs: weights.num_inputs() as u32,
            first_output: weights.outputs().start as u32,
            num_outputs: weights.outputs().len() as u32,
            scale: weights.scale(),
            padding: 0,
        }
    }

    /// Appends bytes. Returns where they begin.
    fn push(&mut self, bytes: &'a [u8]) -> u64 {
        let offset = self.len.next_multiple_of(ALIGNMENT);
        self.len = offset + bytes.len();
        self.pieces.push((self.start + offset, bytes));
        (self.start + offset) as u64
    }
}

/// Copies count as long as others hold the weights: nothing else has their address then.
fn is_copy_of(weights: &Arc<AdapterWeights>) -> impl Fn(&Weak<AdapterWeights>) -> bool {
    |copy| copy.as_ptr() == Arc::as_ptr(weights)
}

/// Ranks of a row of what the shrink computes, for adapters of up to `max_rank`.
pub(super) fn padded_rank(max_rank: usize) -> usize {
    max_rank.next_multiple_of(RANK_PANEL)
}
