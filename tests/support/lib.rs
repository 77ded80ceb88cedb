//! What tests of the library as a whole share.

use std::path::Path;

mod seed;

pub use seed::seed;

/// The folder of the checkout.
///
/// # Panics
/// This package is in no checkout.
pub fn checkout() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("tests/ is in a checkout")
}
