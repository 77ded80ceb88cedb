//! Virtual time in whole nanoseconds, so that sums are exact and the same on every machine.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

/// A moment since the start of the simulation, or a duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The start of the simulation, or a zero duration.
    pub const ZERO: Self = Self(0);

    /// From seconds; negative values and NaN become zero.
    pub fn from_s(seconds: f64) -> Self {
        Self((seconds * 1e9).round() as u64)
    }

    /// From microseconds; negative values and NaN become zero.
    pub fn from_us(microseconds: f64) -> Self {
        Self((microseconds * 1e3).round() as u64)
    }

    /// In seconds.
    pub fn as_s(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// In milliseconds.
    pub fn as_ms(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// In microseconds.
    pub fn as_us(self) -> f64 {
        self.0 as f64 / 1e3
    }
}

impl Add for Time {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Time {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Time {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl Sum for Time {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::ZERO, Add::add)
    }
}
