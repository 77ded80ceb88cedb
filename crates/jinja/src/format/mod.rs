//! Python's formatting of values into texts.

mod braces;
mod percent;
mod spec;
