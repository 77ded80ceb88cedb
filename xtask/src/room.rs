//! Rooms of the library, each with its tests.

use std::fs;
use std::str::FromStr;

use crate::workspace;

/// The driver is a module of the root package, the other rooms are crates.
const DRIVER: &str = "driver";

/// A room, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room(String);

impl Room {
    /// Rooms by names that are known to exist.
    pub fn all(names: &[&str]) -> Vec<Self> {
        names.iter().map(|&name| Self(name.to_owned())).collect()
    }

    pub fn name(&self) -> &str {
        &self.0
    }

    pub fn package(&self) -> String {
        match self.is_crate() {
            true => format!("inflight-{}", self.0),
            false => "triton-inflight".to_owned(),
        }
    }

    /// The folder of its sources, from the root of the checkout.
    pub fn sources(&self) -> String {
        match self.is_crate() {
            true => format!("crates/{}/src/", self.0),
            false => format!("src/{}/", self.0),
        }
    }

    /// The arguments of `cargo test` beside the package. The root package has tests of the whole checkout besides.
    pub fn tests(&self) -> &'static [&'static str] {
        match self.is_crate() {
            true => &[],
            false => &["--lib"],
        }
    }

    fn is_crate(&self) -> bool {
        self.0 != DRIVER
    }
}

impl FromStr for Room {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = known().map_err(|error| error.to_string())?;
        match known.iter().any(|other| other == name) {
            true => Ok(Self(name.to_owned())),
            false => Err(format!("no room '{name}'; there are {}", known.join(", "))),
        }
    }
}

/// The names of all rooms, in alphabetical order.
fn known() -> std::io::Result<Vec<String>> {
    let mut names = vec![DRIVER.to_owned()];
    for entry in fs::read_dir(workspace::root().join("crates"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_room_has_its_package_and_its_sources() {
        for name in known().expect("crates") {
            let room: Room = name.parse().expect("a room");
            let sources = workspace::root().join(room.sources());
            assert!(sources.is_dir(), "{}", sources.display());
            let parents = sources.ancestors();
            let mut manifests =
                parents.filter_map(|folder| fs::read_to_string(folder.join("Cargo.toml")).ok());
            let manifest = manifests.next().expect("a manifest");
            let package = format!("name = \"{}\"\n", room.package());
            assert!(manifest.contains(&package), "{name}");
        }
    }

    #[test]
    fn an_unknown_room_is_an_error_that_names_the_known_ones() {
        let error = "attic".parse::<Room>().expect_err("there is none");
        assert!(error.starts_with("no room 'attic'; there are "), "{error}");
        assert!(error.contains(", driver, embed, "), "{error}");
    }
}
