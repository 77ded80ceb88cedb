//! Division by a number that stays the same, as kernels compute it.

/// A divisor as a multiplication and a shift: `n / divisor = (2 n * multiplier >> 32) >> shift`, for `n` below 2^31
/// (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divisor {
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// The divisor is at most 2^31.
    ///
    /// # Panics
    /// It is 0, or larger.
    pub fn new(divisor: u32) -> Self {
        assert!((1..=1 << 31).contains(&divisor), "a divisor of {divisor}");
        let shift = divisor.next_power_of_two().ilog2();
        // 2^(31 + shift) / divisor, rounded up. It is too large by less than 2^shift / divisor <= 1 for each 2^(31 +
        // shift), which no n below 2^31 notices.
        let multiplier = (1_u64 << (31 + shift)).div_ceil(u64::from(divisor));
        Self {
            multiplier: multiplier as u32,
            shift,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotient(n: u32, Divisor { multiplier, shift }: Divisor) -> u32 {
        ((u64::from(2 * n) * u64::from(multiplier)) >> 32) as u32 >> shift
    }

    #[test]
    fn quotients_are_exact_on_both_sides_of_every_multiple() {
        for divisor in (1..=1024).chain([1025, 65_535, 65_536, i32::MAX as u32, 1 << 31]) {
            let of = Divisor::new(divisor);
            let last = (1_u32 << 31) - 1;
            let step = (last / divisor / 97).max(1);
            let multiples = (0..=last / divisor).step_by(step as usize);
            let near = multiples.flat_map(|multiple| {
                let at = multiple * divisor;
                [at.saturating_sub(1), at, at.saturating_add(1).min(last)]
            });
            for n in near.chain([last]) {
                assert_eq!(quotient(n, of), n / divisor, "{n} / {divisor}");
            }
        }
    }
}
