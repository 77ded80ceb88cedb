//! The keys and values of all sequences: a pool of blocks in device memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::memory::{DeviceMemory, DeviceSpan};
use inflight_base::{BlockId, LoadError};
use inflight_device::{KvDtype, KvLayout, KvLayouts, KvValues, LayerGroups};

/// The arrays of a layer begin at multiples of it.
const ALIGNMENT: usize = 256;

/// The pool: `num_blocks` blocks with as many layers as a group has.
///
/// ```text
/// layer 0   keys [num_blocks][num_kv_heads][block_size][head_dim], values the same,
///           scales of keys [num_blocks][num_kv_heads][block_size] f32, of values the same      not bf16
/// layer 1   ...
/// ```
///
/// There are no values if they are [in the keys](KvValues::InKeys).
pub struct KvCache {
    pub(super) layout: KvLayout,
    pub(super) num_blocks: usize,
    groups: LayerGroups,
    memory: DeviceMemory,
    /// [`KvRegion`]s of all layers, for the kernel that copies positions.
    regions: DeviceMemory,
    num_regions: usize,
}

/// The addresses of a layer's arrays; 0 for those that there are not: scales of bf16, values that are in the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvLayer {
    pub keys: u64,
    pub values: u64,
    pub key_scales: u64,
    pub value_scales: u64,
}

/// `KvRegion` of copy_positions.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct KvRegion {
    offset: u64,
    position_bytes: u64,
    head_bytes: u64,
}

impl KvCache {
    /// Reserves the pool.
    ///
    /// # Errors
    ///
    /// There is not enough memory, or layouts differ.
    ///
    /// # Panics
    ///
    /// `head_dim` is odd or zero, or there are no layers.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        layouts: &KvLayouts,
        groups: LayerGroups,
        num_blocks: usize,
    ) -> Result<Self, LoadError> {
        let layout = layouts.single()?;
        let head_dim = layout.head_dim;
        assert!(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "head_dim {head_dim} is even"
        );
        let num_bytes = layer_bytes(&layout, num_blocks).saturating_mul(groups.layers_per_group());
        let mut cache = Self {
            layout,
            num_blocks,
            groups,
            memory: DeviceMemory::new(stream, num_bytes)?,
            regions: DeviceMemory::new(stream, 0)?,
            num_regions: 0,
        };
        let regions: Vec<_> = cache.all_regions().collect();
        cache.num_regions = regions.len();
        cache.regions = DeviceMemory::upload(stream, &regions)?;
        Ok(cache)
    }

    /// Bytes of one block in a layer.
    pub(super) fn bytes_per_block(layout: &KvLayout) -> usize {
        let vectors = layout.num_kv_heads * layout.block_size.tokens().index();
        num_arrays(layout) * vectors * (vector_bytes(layout) + scale_bytes(layout))
    }

    /// The arrays of a layer.
    pub(super) fn layer(&self, layer: usize) -> KvLayer {
        self.arrays(self.groups.place(layer).index)
    }

    /// The group of a layer.
    pub(super) fn group(&self, layer: usize) -> usize {
        self.groups.place(layer).group
    }

    /// The groups of layers.
    pub(super) fn num_groups(&self) -> usize {
        self.groups.num_groups()
    }

    /// The arrays of a layer, by its index in its group.
    fn arrays(&self, layer: usize) -> KvLayer {
        let [vectors, scales] = array_bytes(&self.layout, self.num_blocks);
        let keys =
            self.memory.address() + (layer * layer_bytes(&self.layout, self.num_blocks)) as u64;
        let key_scales = keys + (num_arrays(&self.layout) * vectors) as u64;
        let [has_values, has_scales] = [num_arrays(&self.layout) == 2, scales > 0];
        let if_there = |is_there: bool, address: u64| if is_there { address } else { 0 };
        KvLayer {
            keys,
            values: if_there(has_values, keys + vectors as u64),
            key_scales: if_there(has_scales, key_scales),
            value_scales: if_there(has_values && has_scales, key_scales + scales as u64),
        }
    }

    /// The address of the pool.
    pub(super) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The address and the number of its regions on the device.
    pub(super) fn device_regions(&self) -> (u64, usize) {
        (self.regions.address(), self.num_regions)
    }

    /// What `block` has in each array of each layer.
    ///
    /// # Panics
    ///
    /// It is not in this pool.
    pub(super) fn spans(&self, block: BlockId) -> impl Iterator<Item = DeviceSpan> + '_ {
        assert!(
            block.index() < self.num_blocks,
            "{block:?} of {}",
            self.num_blocks
        );
        let first = self.memory.address();
        let vectors = self.layout.num_kv_heads;
        self.all_regions().map(move |region| {
            let num_bytes = vectors * region.head_bytes as usize;
            DeviceSpan {
                address: first + region.offset + (block.index() * num_bytes) as u64,
                num_bytes,
            }
        })
    }

    fn all_regions(&self) -> impl Iterator<Item = KvRegion> + '_ {
        (0..self.groups.layers_per_group()).flat_map(|layer| self.regions(layer))
    }

    fn regions(&self, layer: usize) -> Vec<KvRegion> {
        let layer = self.arrays(layer);
        let block_size = self.layout.block_size.tokens().index() as u64;
        let first = self.memory.address();
        let region = |address: u64, position_bytes: usize| KvRegion {
            offset: address - first,
            position_bytes: position_bytes as u64,
            head_bytes: block_size * position_bytes as u64,
        };
        let vectors = vector_bytes(&self.layout);
        let scales = scale_bytes(&self.layout);
        let arrays = [
            (layer.keys, vectors),
            (layer.values, vectors),
            (layer.key_scales, scales),
            (layer.value_scales, scales),
        ];
        let arrays = arrays.into_iter().filter(|(address, _)| *address != 0);
        arrays
            .map(|(address, position_bytes)| region(address, position_bytes))
            .collect()
    }
}

/// Arrays of vectors that a layer has.
fn num_arrays(layout: &KvLayout) -> usize {
    match layout.values {
        KvValues::OfTheirOwn(_) => 2,
        KvValues::InKeys(_) => 1,
    }
}

/// Bytes of a key or a value of one head.
fn vector_bytes(layout: &KvLayout) -> usize {
    match layout.dtype {
        KvDtype::Bf16 => 2 * layout.head_dim,
        KvDtype::Int8 | KvDtype::Fp8 => layout.head_dim,
    }
}

/// Bytes of its scale.
fn scale_bytes(layout: &KvLayout) -> usize {
    match layout.dtype {
        KvDtype::Bf16 => 0,
        KvDtype::Int8 | KvDtype::Fp8 => 4,
    }
}

/// Bytes of a layer's keys, or values, and of their scales, padding included.
fn array_bytes(layout: &KvLayout, num_blocks: usize) -> [usize; 2] {
    let vectors = num_blocks * layout.num_kv_heads * layout.block_size.tokens().index();
    [vector_bytes(layout), scale_bytes(layout)]
        .map(|bytes| vectors.saturating_mul(bytes).next_multiple_of(ALIGNMENT))
}

fn layer_bytes(layout: &KvLayout, num_blocks: usize) -> usize {
    let [vectors, scales] = array_bytes(layout, num_blocks);
    num_arrays(layout) * (vectors + scales)
}
