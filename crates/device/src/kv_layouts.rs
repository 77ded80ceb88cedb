//! The layouts of all layers of a KV cache.

use super::kv_layout::{KvDtype, KvLayout, KvValues};
use super::layer_groups::LayerGroups;
use inflight_base::{BlockSize, LoadError};

/// The layout of each layer of a cache. Layouts differ where layers have other heads, but not in block size and data
/// type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayouts {
    block_size: BlockSize,
    layers: Vec<KvLayout>,
}

impl KvLayouts {
    /// The layouts of the layers of a cache whose blocks have this many positions.
    ///
    /// # Panics
    ///
    /// A layout has another block size, or data types differ.
    pub fn new(block_size: BlockSize, layers: Vec<KvLayout>) -> Self {
        let dtype = |layout: &KvLayout| (layout.block_size, layout.dtype);
        let differs = |it: &KvLayout| dtype(it) != (block_size, layers[0].dtype);
        assert!(!layers.iter().any(differs), "one block size and data type");
        Self { block_size, layers }
    }

    /// So many layers with one layout.
    pub fn alike(layout: KvLayout, num_layers: usize) -> Self {
        Self::new(layout.block_size, vec![layout; num_layers])
    }

    /// Positions of a block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The layout of each layer.
    pub fn layers(&self) -> &[KvLayout] {
        &self.layers
    }

    /// Whether a layer has another layout than the first one.
    pub fn differ(&self) -> bool {
        self.layers.iter().any(|layout| *layout != self.layers[0])
    }

    /// The layout of all layers, for a device that computes no others; one that nobody uses if there are no layers.
    ///
    /// # Errors
    ///
    /// Layers have different heads.
    pub fn single(&self) -> Result<KvLayout, LoadError> {
        let of_no_layer = KvLayout {
            num_kv_heads: 1,
            head_dim: 2,
            values: KvValues::OfTheirOwn(2),
            indexer_dim: 0,
            block_size: self.block_size,
            dtype: KvDtype::Bf16,
        };
        match self.differ() {
            false => Ok(self.layers.first().copied().unwrap_or(of_no_layer)),
            true => Err(LoadError::Resource(
                "the heads of some layers have other sizes, which are computed on the CPU only: use an \
                 instance_group of kind KIND_CPU"
                    .to_owned(),
            )),
        }
    }

    /// The size of a block: the sum over the layers of the largest group, where `size` is the size of one layout.
    ///
    /// ```text
    /// layers     0 local  1 local  2 global          sizes 2, 2, 4
    /// group 0    0, 1                                4
    /// group 1    2                                   4: a block has 4
    /// ```
    pub fn largest_group(&self, groups: &LayerGroups, size: impl Fn(&KvLayout) -> usize) -> usize {
        // Layers in one place share what the largest of them takes.
        let mut places = vec![Vec::new(); groups.num_groups()];
        for (layer, layout) in self.layers.iter().enumerate() {
            let place = groups.place(layer);
            let sizes: &mut Vec<usize> = &mut places[place.group];
            sizes.resize(sizes.len().max(place.index + 1), 0);
            sizes[place.index] = sizes[place.index].max(size(layout));
        }
        let totals = places.into_iter().map(|sizes| sizes.into_iter().sum());
        totals.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(head_dim: usize) -> KvLayout {
        KvLayout {
            num_kv_heads: 1,
            head_dim,
            values: KvValues::OfTheirOwn(head_dim),
            indexer_dim: 0,
            block_size: BlockSize::new(16).expect("not zero"),
            dtype: KvDtype::Bf16,
        }
    }

    #[test]
    fn a_block_has_room_for_the_largest_group() {
        let layouts = [2, 2, 4, 2, 2].map(layout);
        let layouts = KvLayouts::new(layouts[0].block_size, layouts.to_vec());
        for (groups, expected) in [
            (LayerGroups::one(5), 12),
            (LayerGroups::new(&[0, 0, 1, 2, 2]), 4),
            (LayerGroups::new(&[0, 0, 1, 0, 2]), 6),
            (LayerGroups::of_one_step(5), 4),
        ] {
            let size = layouts.largest_group(&groups, |layout| layout.head_dim);
            assert_eq!(size, expected, "{groups:?}");
        }
        assert!(layouts.differ());
        let error = layouts.single().expect_err("two layouts").to_string();
        assert!(error.contains("KIND_CPU"), "{error}");
    }

    #[test]
    fn layers_that_are_alike_have_a_single_layout() {
        let layouts = KvLayouts::alike(layout(8), 3);
        assert_eq!(layouts.single().expect("one"), layout(8));
        assert_eq!(
            layouts.largest_group(&LayerGroups::one(3), |it| it.head_dim),
            24
        );
        let none = KvLayouts::alike(layout(8), 0);
        assert!(!none.differ());
        none.single().expect("no layer differs");
    }
}
