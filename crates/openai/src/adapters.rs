//! The adapters of models: `MODEL:ADAPTER` stands for a model with an adapter wherever a model is named.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use crate::place::Place;

/// Between the names of a model and of an adapter.
const SEPARATOR: char = ':';
/// The longest name of an adapter, which the backend takes.
const MAX_NAME_BYTES: usize = 128;
/// The most adapters of a folder or a file that are listed.
const MAX_LISTED: usize = 10_000;
/// The largest file with names of adapters.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The model and the adapter that a name stands for. A name without a colon is a model's.
pub fn split(name: &str) -> (&str, Option<&str>) {
    match name.split_once(SEPARATOR) {
        Some((model, adapter)) => (model, Some(adapter)),
        None => (name, None),
    }
}

/// The adapters that are listed beside their models.
#[derive(Clone, Debug, Default)]
pub struct Adapters(Vec<Place>);

impl Adapters {
    /// The adapters of these places, which are looked into each time that models are listed.
    ///
    /// # Errors
    /// A place cannot be read.
    pub fn of(places: Vec<Place>) -> Result<Self, String> {
        for place in &places {
            names_at(&place.path).map_err(|error| format!("{}: {error}", place.path.display()))?;
        }
        Ok(Self(places))
    }

    /// Names such as `stories:poet` by the name of their model, in order. A place that cannot be read any more has
    /// none.
    pub fn names(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for place in &self.0 {
            let names = names_at(&place.path).unwrap_or_default().into_iter();
            let names = names.map(|name| format!("{}{SEPARATOR}{name}", place.model));
            all.entry(place.model.clone()).or_default().extend(names);
        }
        all
    }
}

/// The adapters in a model's `lora_dir`, or in its `multi_lora.json`.
fn names_at(path: &Path) -> io::Result<Vec<String>> {
    if path.is_dir() {
        folders(path)
    } else {
        names_in(path)
    }
}

/// The folders in a folder that have the files of adapters.
fn folders(path: &Path) -> io::Result<Vec<String>> {
    const FILES: [&str; 2] = ["adapter_config.json", "model.lora_config.npy"];
    let mut names = Vec::new();
    for entry in fs::read_dir(path)?.take(MAX_LISTED) {
        let entry = entry?;
        let has_one = FILES.iter().any(|file| entry.path().join(file).is_file());
        match entry.file_name().into_string() {
            Ok(name) if has_one && name.len() <= MAX_NAME_BYTES => names.push(name),
            _ => {}
        }
    }
    Ok(names)
}

/// The names in a `multi_lora.json`.
fn names_in(path: &Path) -> io::Result<Vec<String>> {
    let file = BufReader::new(File::open(path)?.take(MAX_FILE_BYTES));
    match serde_json::from_reader(file)? {
        Value::Object(table) => Ok(table
            .into_iter()
            .map(|(name, _)| name)
            .take(MAX_LISTED)
            .collect()),
        _ => Err(io::Error::other(
            "is no JSON object of names and folders of adapters",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use super::*;

    #[test]
    fn the_adapter_is_behind_the_first_colon() {
        assert_eq!(split("stories"), ("stories", None));
        assert_eq!(split("stories:poet"), ("stories", Some("poet")));
        assert_eq!(split("stories:a:b"), ("stories", Some("a:b")));
        assert_eq!(split("stories:"), ("stories", Some("")));
    }

    #[test]
    fn a_place_has_a_model_and_a_path() {
        for wrong in ["stories", "stories=", "=/srv/adapters", ""] {
            assert!(Place::from_str(wrong).is_err(), "{wrong}");
        }
        let place = Place::from_str("stories=/srv/a=b").expect("sound");
        assert_eq!(
            (place.model.as_str(), place.path),
            ("stories", "/srv/a=b".into())
        );
    }

    #[test]
    fn a_path_that_is_not_there_is_named() {
        let place = Place::from_str("stories=/nowhere/at/all").expect("sound");
        let problem = Adapters::of(vec![place]).expect_err("no such path");
        assert!(problem.starts_with("/nowhere/at/all: "), "{problem}");
    }
}
