//! Weights whose results are summed.

use inflight_base::LoadError;
use inflight_device::Device;

/// Weights of a block that adds to the residual stream: of all its inputs at once, or of the tiles of a rank of
/// several, whose results are added in pairs.
pub(super) enum Summed<D: Device, T> {
    Whole(T),
    /// One, or a power of two. `None`: one without inputs.
    Tiles(D::Tiles, Vec<Option<T>>),
}

impl<D: Device, T> Summed<D, T> {
    /// The tiles of a rank, which are one on a device that does not cut sums.
    ///
    /// # Errors
    /// There are others on such a device.
    pub(super) fn of_tiles(mut tiles: Vec<Option<T>>) -> Result<Self, LoadError> {
        if let Some(ops) = D::TILES {
            return Ok(Self::Tiles(ops, tiles));
        }
        let num_tiles = tiles.len();
        match tiles.pop().flatten().filter(|_| num_tiles == 1) {
            Some(whole) => Ok(Self::Whole(whole)),
            None => Err(LoadError::Resource(format!(
                "a block in {num_tiles} tiles, some without inputs, on a device that sums over all inputs at once: use \
                 fewer ranks"
            ))),
        }
    }

    /// All inputs at once, if there is a single tile that has them.
    pub(super) fn whole(&self) -> Option<&T> {
        match self {
            Self::Whole(whole) => Some(whole),
            Self::Tiles(_, tiles) => match &tiles[..] {
                [Some(one)] => Some(one),
                _ => None,
            },
        }
    }

    /// All tiles that have inputs.
    pub(super) fn parts(&self) -> impl Iterator<Item = &T> {
        let (whole, tiles) = match self {
            Self::Whole(whole) => (Some(whole), &[][..]),
            Self::Tiles(_, tiles) => (None, &tiles[..]),
        };
        whole.into_iter().chain(tiles.iter().flatten())
    }
}
