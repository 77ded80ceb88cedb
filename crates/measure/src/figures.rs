//! Medians of several rounds, and rounding for output.

use serde_json::{Value, json};

/// The middle value, or the mean of the two middle values.
///
/// # Panics
/// If `values` is empty.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// Rounds to four significant digits, and to whole numbers above 1000.
pub fn round(value: f64) -> Value {
    let digits = 3 - value.abs().log10().floor().clamp(-3.0, 3.0) as i32;
    let factor = 10.0_f64.powi(digits.max(0));
    json!((value * factor).round() / factor)
}

/// Rounds to four significant digits.
pub fn four_digits(value: f64) -> Value {
    if value == 0.0 || !value.is_finite() {
        return json!(value);
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    let factor = 10.0_f64.powi(digits);
    json!((value * factor).round() / factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_or_the_mean_of_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![7.0]), 7.0);
    }

    #[test]
    fn large_figures_are_whole_numbers() {
        let rounded = [1234.56, 12.3456, 0.71828, 0.0123456, 123_456.7, 0.0].map(round);
        let expected = [1235.0, 12.35, 0.7183, 0.01235, 123_457.0, 0.0].map(|value| json!(value));
        assert_eq!(rounded, expected);
    }

    #[test]
    fn large_figures_have_four_digits_too() {
        let rounded = [0.0, 0.123_456, 1.0, 98765.4].map(four_digits);
        let expected = [0.0, 0.1235, 1.0, 98770.0].map(|value| json!(value));
        assert_eq!(rounded, expected);
    }
}
