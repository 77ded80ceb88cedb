//! Scratch memory for the groups of a tile that are not read in place.

use super::super::kv_cache::GROUP;
use super::super::lines::Lines;
use super::{Scales, TILE_GROUPS};
use crate::kv_cache::GroupedLayout;
use inflight_device::KvLayout;

/// Room for a tile of keys and values, in bf16 or as they are stored, and their scales.
pub(super) struct Copies {
    keys: Lines<u16>,
    values: Lines<u16>,
    scales: Scales,
    stored_scales: [[u16; 2 * GROUP]; TILE_GROUPS],
    gathered: GatheredGroup,
}

/// A group in int8 whose positions are not in one place, gathered as it would be stored.
#[derive(Default)]
pub(super) struct GatheredGroup {
    pub keys: Vec<u16>,
    pub values: Vec<u16>,
}

/// The room for one group.
pub(super) struct Room<'a> {
    pub keys: &'a mut [u16],
    pub values: &'a mut [u16],
    pub key_scales: &'a mut [f32],
    pub value_scales: &'a mut [f32],
    /// The scales of keys and values as they are stored.
    pub stored_scales: &'a mut [u16],
}

impl Copies {
    /// Makes room for a tile.
    pub fn prepare(&mut self, layout: &KvLayout) {
        self.keys.resize(TILE_GROUPS * layout.key_group_len());
        self.values.resize(TILE_GROUPS * layout.value_group_len());
    }

    /// The room for each group of the tile, and for one that is gathered.
    pub fn rooms(
        &mut self,
        layout: &KvLayout,
    ) -> (impl Iterator<Item = Room<'_>>, &mut GatheredGroup) {
        let keys = self.keys.chunks_exact_mut(layout.key_group_len());
        let values = self.values.chunks_exact_mut(layout.value_group_len());
        let key_scales = self.scales.keys.chunks_exact_mut(GROUP);
        let value_scales = self.scales.values.chunks_exact_mut(GROUP);
        let scales = key_scales.zip(value_scales).zip(&mut self.stored_scales);
        let rooms = keys.zip(values).zip(scales).map(
            |((keys, values), ((key_scales, value_scales), stored_scales))| Room {
                keys,
                values,
                key_scales,
                value_scales,
                stored_scales,
            },
        );
        (rooms, &mut self.gathered)
    }

    /// The scales of the tile.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            keys: Lines::default(),
            values: Lines::default(),
            scales: Scales::ONE,
            stored_scales: [[0; 2 * GROUP]; TILE_GROUPS],
            gathered: GatheredGroup::default(),
        }
    }
}
