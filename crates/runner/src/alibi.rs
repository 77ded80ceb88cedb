//! The slopes of attention with linear biases.
//!
//! Source: Press et al., "Train Short, Test Long", arXiv:2108.12409, and `get_slopes` of its
//! attention_with_linear_biases.

/// The slope of each head. Those of a power of two, `n`, are powers of `2^(-8 / n)`; other numbers have those of the
/// next smaller power, then every second one of the next larger power.
pub(super) fn slopes(num_heads: usize) -> Vec<f32> {
    let whole = 1 << num_heads.max(1).ilog2();
    let slope = |index: usize, num: usize| (-8.0 * (index + 1) as f64 / num as f64).exp2() as f32;
    let between = (0..whole).map(|index| slope(2 * index, 2 * whole));
    let all = (0..whole).map(|index| slope(index, whole)).chain(between);
    all.take(num_heads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(slopes(8)[..3], [0.5, 0.25, 0.125]);
        assert_eq!(slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
        let of_16 = slopes(16);
        assert_eq!(of_16[1], 0.5);
        assert_eq!(of_16[0], std::f32::consts::FRAC_1_SQRT_2);
        assert_eq!(slopes(11)[8..], [of_16[0], of_16[2], of_16[4]]);
    }
}
