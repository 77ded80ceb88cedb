//! The date of a package.

use chrono::{DateTime, Utc};

use crate::Result;
use crate::process::{command, output};

/// A time in whole seconds.
#[derive(Clone, Copy)]
pub struct Date(DateTime<Utc>);

impl Date {
    /// That of `SOURCE_DATE_EPOCH` (<https://reproducible-builds.org/specs/source-date-epoch/>), or else of the last
    /// commit.
    pub fn of_sources() -> Result<Self> {
        let given = std::env::var("SOURCE_DATE_EPOCH");
        let seconds = match given {
            Ok(seconds) => seconds,
            Err(_) => output(command("git").args(["log", "-1", "--format=%ct"])).map_err(|error| {
                format!("the date of the sources is unknown ({error}): set SOURCE_DATE_EPOCH to seconds since 1970")
            })?,
        };
        let seconds = seconds.trim();
        Self::parse(seconds).ok_or_else(|| {
            format!("SOURCE_DATE_EPOCH is '{seconds}': write seconds since 1970").into()
        })
    }

    /// A number of seconds since 1970, as digits.
    pub fn parse(seconds: &str) -> Option<Self> {
        let seconds: u32 = seconds.parse().ok()?;
        DateTime::from_timestamp(seconds.into(), 0).map(Self)
    }

    /// Seconds since 1970.
    pub fn seconds(self) -> u64 {
        self.0.timestamp().unsigned_abs()
    }

    /// As in `2026-11-25T14:00:00Z`.
    pub fn iso_8601(self) -> String {
        self.0.format("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}
