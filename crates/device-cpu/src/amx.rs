//! The tile registers of AMX: whether this process may use them, and their configuration.
//!
//! A tile is up to 16 rows of 64 bytes. What the eight tiles of a thread are is configured before their first use,
//! which takes as long as a few hundred instructions.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
const ROW_BYTES: u16 = 64;

/// Whether the machine has tiles and their products of bf16, and the system lets this process use them.
pub(super) fn is_usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| has_instructions() && is_permitted())
}

fn has_instructions() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    let flags = __cpuid_count(7, 0).edx;
    flags & (BF16 | TILES) == BF16 | TILES
}

/// Asks Linux for the state that the registers need in each thread of this process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const REQUEST_STATE: libc::c_int = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: takes two numbers and changes nothing but what registers threads may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The tiles of this thread, configured. Dropping it releases them.
pub(super) struct Tiles {
    num_rows: usize,
}

/// As `ldtilecfg` reads it.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    num_rows: [u8; 16],
}

impl Tiles {
    /// For products of matrices in blocks of `num_rows`, 1 to 16. Tiles 0 to 2 and 6, the sums and the activations of a
    /// block, have as many rows as the block. The others, which are also those of a second block, have 16.
    ///
    /// # Panics
    ///
    /// If AMX is not [usable](is_usable), or blocks are larger.
    pub fn of_rows(num_rows: usize) -> Self {
        Self::new(num_rows, |tile| match tile {
            0..=2 | 6 => (num_rows, ROW_BYTES),
            _ => (TILE_ROWS, ROW_BYTES),
        })
    }

    /// For attention of `num_rows` queries, 1 to 16, which tiles 0 to 4 and 6 have a row for. Tiles 6 and 7 are half as
    /// wide, and half as high, for products of half as many elements as those of tiles 4 and 5.
    ///
    /// # Panics
    ///
    /// If AMX is not [usable](is_usable), or there are more queries.
    pub fn of_queries(num_rows: usize) -> Self {
        Self::new(num_rows, |tile| match tile {
            0..=4 => (num_rows, ROW_BYTES),
            6 => (num_rows, ROW_BYTES / 2),
            7 => (TILE_ROWS / 2, ROW_BYTES),
            _ => (TILE_ROWS, ROW_BYTES),
        })
    }

    /// `shape` tells the rows of a tile, and their bytes.
    fn new(num_rows: usize, shape: impl Fn(usize) -> (usize, u16)) -> Self {
        assert!(is_usable(), "a machine with AMX");
        assert!((1..=TILE_ROWS).contains(&num_rows), "rows of a tile");
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            num_rows: [0; 16],
        };
        for tile in 0..8 {
            let (num_rows, row_bytes) = shape(tile);
            configuration.row_bytes[tile] = row_bytes;
            configuration.num_rows[tile] = num_rows as u8;
        }
        // SAFETY: the machine has the instruction, and the 64 bytes are a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack)) };
        Self { num_rows }
    }

    /// Rows of a block.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the machine has the instruction; nothing is in the tiles any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
