//! The checkpoint that is measured.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;

use super::check::Check;
use super::report::Report;
use crate::Result;
use crate::figures::four_digits;

/// The folder of the checkpoint that is measured; written if it is not there.
pub fn folder(check: &Check, report: &mut Report) -> Result<PathBuf> {
    let shape = &check.options.shape;
    let folder = check.options.out.join("checkpoints").join(shape);
    let folder = std::path::absolute(folder)?;
    if !is_whole(&folder) {
        let start = Instant::now();
        let num_bytes = inflight_random_checkpoint::write(shape, &folder)?;
        let seconds = start.elapsed().as_secs_f64();
        report.figures(
            &format!("checkpoint {shape}"),
            json!({ "bytes": num_bytes, "seconds": four_digits(seconds) }),
        )?;
    }
    Ok(folder)
}

/// The weights get their final name when they are complete.
fn is_whole(folder: &Path) -> bool {
    folder.join("model.safetensors").is_file()
}
