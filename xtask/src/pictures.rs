//! `cargo xtask pictures`: the pictures of the documentation that show recorded results, and the one of the live page.

use std::fs;

use clap::Args;
use xtask::charts;

use crate::library::Build;
use crate::process::{command, run as run_command};
use crate::{Result, library, setup, workspace};

/// Options of `cargo xtask pictures`.
#[derive(Args)]
pub struct Options {
    /// Also build everything, serve the demo model, and take a picture of the page that shows its steps
    #[arg(long)]
    live_page: bool,
}

/// Draws the pictures into `docs/src`.
pub fn run(options: &Options) -> Result<()> {
    let docs = workspace::root().join("docs/src");
    let recorded = docs.join(charts::RECORDED);
    let text = fs::read_to_string(&recorded)
        .map_err(|error| format!("{}: {error}", recorded.display()))?;
    for chart in charts::read(&text)? {
        fs::write(docs.join(&chart.picture), chart.draw())?;
    }
    if options.live_page {
        run_command(
            command(setup::python()?)
                .arg(workspace::root().join("tools/pictures/live_page.py"))
                .arg(docs.join("live-page.png"))
                .env("PYTHONPATH", workspace::root().join("tools"))
                .env("CHROMIUM", setup::browser()?)
                .env("TRITONSERVER", setup::tritonserver()?)
                .env(
                    "TRITON_BACKENDS",
                    library::backend_directory(Build::Tested)?,
                )
                .env("INFLIGHT_OPENAI", library::openai(Build::Tested)?),
        )?;
    }
    Ok(())
}
