//! The engine as its users see it: requests in, plans and events out.

mod beams;
mod documented_runs;
mod draft_models;
mod images;
mod limits;
mod random_walks;
mod records;
mod requests;
mod support;
mod time_tables;
mod walk_through;
