//! How far numbers are from others.

/// The largest difference between a number and its counterpart; NaN, which no limit admits, if there is one among them.
///
/// # Panics
/// If there are not as many of one as of the other.
pub fn largest_error(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let errors = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, |largest, error| {
        if error.is_nan() || error > largest {
            error
        } else {
            largest
        }
    })
}

#[test]
fn a_number_that_is_none_is_no_small_error() {
    assert_eq!(largest_error(&[1.0, 2.0], &[1.5, 1.0]), 1.0);
    for numbers in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
        let error = largest_error(&numbers, &[1.0, 1.0]);
        assert!(error.is_nan());
    }
}
