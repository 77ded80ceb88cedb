//! Moves of KV blocks, as a device makes them.

use inflight_device::StepIo;
use inflight_engine::{BlockCopy, BlockMove};

/// Makes moves of the blocks of a cache, one after the other. Copies that follow one another go to the device together.
pub(super) fn move_device_blocks<D: StepIo>(
    device: &mut D,
    moves: &[BlockMove],
    cache: &mut D::KvCache,
    host_blocks: &mut D::HostBlocks,
) {
    for alike in moves.chunk_by(|a, b| copy_of(a).is_some() && copy_of(b).is_some()) {
        match alike[0] {
            BlockMove::Copy(_) => {
                let copies = alike.iter().filter_map(copy_of);
                let copies = copies.map(|it| (it.source, it.target, it.num_positions as usize));
                device.copy_positions(cache, copies);
            }
            BlockMove::Offload { source, target } => {
                device.offload(cache, source, host_blocks, target);
            }
            BlockMove::Onboard { source, target } => {
                device.onboard(host_blocks, source, cache, target);
            }
        }
    }
}

fn copy_of(one: &BlockMove) -> Option<&BlockCopy> {
    match one {
        BlockMove::Copy(copy) => Some(copy),
        BlockMove::Offload { .. } | BlockMove::Onboard { .. } => None,
    }
}
