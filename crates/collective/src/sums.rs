//! Sums over ranks in a fixed order.

use super::grid::MAX_RANKS;

/// Writes the sums of what all ranks have published, from the value at `first` on. Ranks are added in pairs, then pairs
/// of pairs, and so on; a last one without a partner is added one level later.
///
/// # Panics
///
/// If a message is shorter than `out`.
pub(super) fn add_ranks(messages: &[&[u32]], first: usize, out: &mut [f32]) {
    let range = first..first + out.len();
    let of_rank = |rank: usize| bytemuck::cast_slice::<_, f32>(&messages[rank][range.clone()]);
    match messages.len() {
        2 => {
            for ((out, a), b) in out.iter_mut().zip(of_rank(0)).zip(of_rank(1)) {
                *out = a + b;
            }
        }
        4 => {
            let first = of_rank(0).iter().zip(of_rank(1));
            let second = of_rank(2).iter().zip(of_rank(3));
            for ((out, (a, b)), (c, d)) in out.iter_mut().zip(first).zip(second) {
                *out = (a + b) + (c + d);
            }
        }
        num_ranks => {
            let mut values = [0.0; MAX_RANKS];
            for (index, out) in out.iter_mut().enumerate() {
                for (value, message) in values.iter_mut().zip(messages) {
                    *value = f32::from_bits(message[first + index]);
                }
                *out = add_pairs(&mut values[..num_ranks]);
            }
        }
    }
}

/// The sum of values in pairs.
fn add_pairs(values: &mut [f32]) -> f32 {
    let mut num_values = values.len();
    while num_values > 1 {
        for index in 0..num_values / 2 {
            values[index] = values[2 * index] + values[2 * index + 1];
        }
        if num_values % 2 == 1 {
            values[num_values / 2] = values[num_values - 1];
        }
        num_values = num_values.div_ceil(2);
    }
    values[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_added_in_pairs() {
        // Each order of additions rounds these to another sum.
        let values = [1.0e8_f32, 1.0, -1.0e8, 3.0, 7.0];
        for num_ranks in 1..=values.len() {
            let words = values[..num_ranks].iter().map(|v| [0, v.to_bits()]);
            let words: Vec<_> = words.collect();
            let messages: Vec<_> = words.iter().map(|word| &word[..]).collect();
            let mut out = [0.0];
            add_ranks(&messages, 1, &mut out);
            let [a, b, c, d, e] = values;
            let expected = match num_ranks {
                1 => a,
                2 => a + b,
                3 => (a + b) + c,
                4 => (a + b) + (c + d),
                _ => ((a + b) + (c + d)) + e,
            };
            assert_eq!(out[0].to_bits(), expected.to_bits(), "{num_ranks} ranks");
        }
    }
}
