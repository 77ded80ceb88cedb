//! The rows of an embedding, read for a device.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::allocation::try_zeroed_vec;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use inflight_base::LoadError;
use inflight_checkpoint::Matrix;
use inflight_device::Device;

/// Reads the embedding as bf16.
pub(super) fn load_embedding<D: Device>(
    device: &mut D,
    source: &Matrix<'_>,
) -> Result<D::Embedding, LoadError> {
    source.preload()?;
    let hidden_size = source.columns();
    let len = source.rows() * hidden_size;
    let mut rows = try_zeroed_vec::<bf16>(len)
        .map_err(|()| LoadError::Resource(format!("no memory for an embedding of {len} bf16")))?;
    let threads = device.host_threads();
    let mut rows_f32 = vec![vec![0.0; hidden_size]; threads.num_threads()];
    let bad_row = AtomicUsize::new(usize::MAX);
    threads.for_each_row(
        &mut rows_f32,
        &mut rows,
        hidden_size,
        |row_f32, index, row| {
            source.read_row(index, row_f32);
            row.convert_from_f32_slice(row_f32);
            // A fold and not a search: it is vectorised, and bad values are the exception.
            if !row
                .iter()
                .fold(true, |finite, value| finite & value.is_finite())
            {
                bad_row.fetch_min(index, Ordering::Relaxed);
            }
        },
    );
    match bad_row.into_inner() {
        usize::MAX => device.upload_embedding(rows, hidden_size),
        row => Err(source.not_finite(row)),
    }
}
