//! SVG charts that work as files and inside pages: elements, colours, axes, charts.
//!
//! A picture carries its own style sheet and depends on nothing else, so it looks the same in a page, as a
//! file, and in a README. The reader's dark theme changes the colours, never the geometry.
//!
//! ```text
//! svg.rs      SVG elements and their text
//! theme.rs    colours, light and dark
//! scale.rs    numbers to pixels, and axis ticks
//! chart.rs    lines and areas over two axes
//! bars.rs     horizontal bars in panels
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
