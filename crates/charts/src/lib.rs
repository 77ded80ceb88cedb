//! Pictures in SVG that stand alone or in a page: elements, colours, axes, charts.
//!
//! One idea: a picture carries its own style sheet and nothing else, so that it looks the same in a page,
//! as a file, and in a README; a reader's dark theme changes the colours, never the geometry.
//!
//! ```text
//! svg.rs      elements and their text
//! theme.rs    the colours, light and dark
//! scale.rs    from numbers to pixels, and the ticks between
//! chart.rs    lines and areas over two axes
//! bars.rs     values side by side
//! ```
#![forbid(unsafe_code)]

mod bars;
mod chart;
mod scale;
mod svg;
pub mod theme;

pub use bars::{Bar, Bars, Group, Panel};
pub use chart::{Chart, Series, Shape};
pub use scale::{Scale, short};
pub use svg::{Anchor, Rect, Svg, escape, text_width};
