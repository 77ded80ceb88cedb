//! Enlarges components that have fewer samples, as libjpeg does (`jdsample.c`): by 2 with weights of 3 and 1 for the
//! nearer and the farther sample, and by any other factor with copies.

/// The samples of a component.
pub struct Plane {
    pub height: usize,
    pub width: usize,
    /// `[height][width]`.
    pub values: Vec<u8>,
}

impl Plane {
    /// The plane enlarged by factors down and across, and cut to a size.
    pub fn enlarged(self, scale: (usize, usize), (height, width): (usize, usize)) -> Self {
        if scale == (1, 1) {
            return self;
        }
        let mut values = vec![0; height * width];
        // A row is wider than the image by less than the factor.
        let mut wide = vec![0; self.width * scale.1];
        let mut sums = vec![0; self.width];
        let is_smooth = self.width > 2;
        for (y, row) in values.chunks_exact_mut(width).enumerate() {
            let near = y / scale.0;
            let is_lower = y % scale.0 == 1;
            let far = if is_lower {
                near + 1
            } else {
                near.saturating_sub(1)
            };
            let far = self.row(far.min(self.height - 1));
            let near = self.row(near);
            match scale {
                (1, 2) if is_smooth => smooth_across(near, &mut wide),
                (2, 1) => {
                    let bias = if is_lower { 2 } else { 1 };
                    for ((wide, &near), &far) in wide.iter_mut().zip(near).zip(far) {
                        *wide = ((3 * u16::from(near) + u16::from(far) + bias) >> 2) as u8;
                    }
                }
                (2, 2) if is_smooth => {
                    for ((sum, &near), &far) in sums.iter_mut().zip(near).zip(far) {
                        *sum = 3 * u16::from(near) + u16::from(far);
                    }
                    smooth_sums_across(&sums, &mut wide);
                }
                (_, across) => {
                    for (wide, &near) in wide.chunks_exact_mut(across).zip(near) {
                        wide.fill(near);
                    }
                }
            }
            row.copy_from_slice(&wide[..width]);
        }
        Self {
            height,
            width,
            values,
        }
    }

    pub fn row(&self, y: usize) -> &[u8] {
        &self.values[y * self.width..][..self.width]
    }
}

/// Two samples for each one of a row.
fn smooth_across(row: &[u8], wide: &mut [u8]) {
    let sample = |x: usize| u16::from(row[x.min(row.len() - 1)]);
    for (x, pair) in wide.chunks_exact_mut(2).enumerate() {
        let here = 3 * sample(x);
        let (left, right) = (sample(x.saturating_sub(1)), sample(x + 1));
        pair[0] = ((here + left + 1) >> 2) as u8;
        pair[1] = ((here + right + 2) >> 2) as u8;
    }
}

/// Two samples for each sum of two rows.
fn smooth_sums_across(sums: &[u16], wide: &mut [u8]) {
    let sum = |x: usize| sums[x.min(sums.len() - 1)];
    for (x, pair) in wide.chunks_exact_mut(2).enumerate() {
        let here = 3 * sums[x];
        let (left, right) = (sum(x.saturating_sub(1)), sum(x + 1));
        pair[0] = ((here + left + 8) >> 4) as u8;
        pair[1] = ((here + right + 7) >> 4) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enlarged(scale: (usize, usize), size: (usize, usize)) -> Vec<u8> {
        let plane = Plane {
            height: 2,
            width: 3,
            values: vec![0, 40, 100, 200, 8, 255],
        };
        plane.enlarged(scale, size).values
    }

    /// The values that libjpeg-turbo computes; images of other factors than 2 are rare.
    #[test]
    fn samples_are_smoothed_by_2_and_copied_otherwise() {
        let across = [0, 10, 30, 55, 85, 100, 200, 152, 56, 70, 193, 255];
        assert_eq!(enlarged((1, 2), (2, 6)), across);
        assert_eq!(
            enlarged((2, 1), (4, 3)),
            [0, 40, 100, 50, 32, 139, 150, 16, 216, 200, 8, 255]
        );
        assert_eq!(enlarged((2, 2), (1, 5)), [0, 10, 30, 55, 85]);
        assert_eq!(
            enlarged((1, 4), (1, 10)),
            [0, 0, 0, 0, 40, 40, 40, 40, 100, 100]
        );
        let narrow = Plane {
            height: 1,
            width: 2,
            values: vec![0, 100],
        };
        assert_eq!(narrow.enlarged((1, 2), (1, 4)).values, [0, 0, 100, 100]);
    }
}
