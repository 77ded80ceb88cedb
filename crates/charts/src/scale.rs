//! Linear scales from numbers to pixels, and tick positions.

/// Tolerance for rounding: 3 * 0.1 is not exactly 0.3.
const ROUNDING: f64 = 1e-9;

/// A linear map from numbers to pixels.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    numbers: (f64, f64),
    pixels: (f64, f64),
}

impl Scale {
    /// Maps `numbers.0` to `pixels.0` and `numbers.1` to `pixels.1`.
    pub fn new(numbers: (f64, f64), pixels: (f64, f64)) -> Self {
        Self { numbers, pixels }
    }

    /// The pixel of a number. If the range is empty, every number maps to the first pixel.
    pub fn at(&self, number: f64) -> f64 {
        let (first, last) = self.numbers;
        let share = if last > first {
            (number - first) / (last - first)
        } else {
            0.0
        };
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }

    /// Up to `max_ticks` round numbers within the range: multiples of 1, 2 or 5 times a power of ten.
    pub fn ticks(&self, max_ticks: usize) -> Vec<f64> {
        let (first, last) = self.numbers;
        let span = last - first;
        // Not `span <= 0.0`, which is false for NaN.
        if !(span > 0.0 && span.is_finite()) || max_ticks == 0 {
            return vec![first];
        }
        let rough = span / max_ticks as f64;
        let power = 10f64.powf(rough.log10().floor());
        let ticks_of = |step: f64| {
            let lowest = (first / step - ROUNDING).ceil() as i64;
            let highest = (last / step + ROUNDING).floor() as i64;
            (lowest..=highest)
                .map(|n| n as f64 * step)
                .collect::<Vec<_>>()
        };
        let candidates = [1.0, 2.0, 5.0, 10.0, 20.0].map(|factor| ticks_of(power * factor));
        let fits = |ticks: &Vec<f64>| ticks.len() <= max_ticks;
        candidates.into_iter().find(fits).unwrap_or_default()
    }
}

/// A number as an axis shows it: three significant digits, thousands as `k`, millions as `M`.
pub fn short(number: f64) -> String {
    let (number, suffix) = match number.abs() {
        size if size >= 999_500.0 => (number / 1e6, "M"),
        size if size >= 10_000.0 => (number / 1e3, "k"),
        _ => (number, ""),
    };
    let digits = match number.abs() {
        size if size >= 100.0 || number == 0.0 => 0,
        size => (2 - size.log10().floor() as i32).clamp(0, 6) as usize,
    };
    let text = format!("{number:.digits$}");
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (range, max_ticks, expected) in [
            ((0.0, 10.0), 5, vec![0.0, 5.0, 10.0]),
            ((0.0, 10.0), 6, vec![0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
            ((3.0, 47.0), 5, vec![10.0, 20.0, 30.0, 40.0]),
            ((0.0, 0.3), 3, vec![0.0, 0.2]),
            ((5.0, 5.0), 5, vec![5.0]),
        ] {
            assert_eq!(Scale::new(range, (0.0, 1.0)).ticks(max_ticks), expected);
        }
    }

    #[test]
    fn a_scale_can_be_reversed_or_empty() {
        let scale = Scale::new((0.0, 10.0), (100.0, 0.0));
        assert_eq!(
            [scale.at(0.0), scale.at(2.5), scale.at(10.0)],
            [100.0, 75.0, 0.0]
        );
        assert_eq!(Scale::new((3.0, 3.0), (7.0, 9.0)).at(3.0), 7.0);
    }

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0.0, "0"),
            (0.05, "0.05"),
            (1.25, "1.25"),
            (12.345, "12.3"),
            (100.0, "100"),
            (1234.0, "1234"),
            (12_000.0, "12k"),
            (123_456.0, "123k"),
            (2_500_000.0, "2.5M"),
        ] {
            assert_eq!(short(number), text);
        }
    }
}
