//! Least squares over samples with a few outliers.
//!
//! Plain least squares follows the largest error: one step that waited for something else outweighs a
//! thousand that did not. So a robust fit comes first (Huber, "Robust estimation of a location parameter",
//! 1964, by iteratively reweighted least squares). Samples far from it are dropped, and the others are fitted
//! by plain least squares.
//!
//! Where samples cannot separate two coefficients, the earlier one takes the whole effect. Negative
//! coefficients become zero, because no work takes negative time.

/// A pivot below this share of its column's size is rounding noise.
const MIN_PIVOT: f64 = 1e-9;

const MAX_ROUNDS: usize = 100;

/// An outlier is off by more than this many typical deviations, and by more than its own prediction.
const MAX_DEVIATIONS: f64 = 10.0;

/// Samples of `N` known numbers and a result.
pub(crate) struct Samples<const N: usize>(Vec<([f64; N], f64)>);

/// The fitted coefficients and their errors.
pub(crate) struct Solution<const N: usize> {
    /// Never negative.
    pub coefficients: [f64; N],
    /// Sorted errors of the samples that were kept, each as a share of the larger of result and prediction.
    pub errors: Vec<f64>,
    /// Results and predictions of the samples that were dropped.
    pub outliers: Vec<(f64, f64)>,
}

impl<const N: usize> Default for Samples<N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<const N: usize> Samples<N> {
    pub(crate) fn add(&mut self, known: [f64; N], result: f64) {
        self.0.push((known, result));
    }

    /// The best coefficients; `None` without samples.
    pub(crate) fn solve(&self) -> Option<Solution<N>> {
        if self.0.is_empty() {
            return None;
        }
        let robust = self.solve_robustly();
        let deviation = self.deviation(&robust);
        let is_outlier = |(known, result): &([f64; N], f64)| {
            let predicted = predict(&robust, known);
            let off = (result - predicted).abs();
            off > MAX_DEVIATIONS * deviation && off > predicted
        };
        let coefficients = self.solve_weighted(|sample| f64::from(!is_outlier(sample)));
        let of = |(known, result): &([f64; N], f64)| (*result, predict(&coefficients, known));
        let (outliers, kept): (Vec<_>, Vec<_>) = self.0.iter().partition(|it| is_outlier(it));
        let mut errors: Vec<_> = kept.into_iter().map(|it| error(of(it))).collect();
        errors.sort_by(f64::total_cmp);
        Some(Solution {
            coefficients,
            errors,
            outliers: outliers.into_iter().map(of).collect(),
        })
    }

    /// Coefficients by Huber's loss: beyond the typical deviation every sample pulls with the same force,
    /// however far away it is.
    fn solve_robustly(&self) -> [f64; N] {
        let mut found = self.solve_weighted(|_| 1.0);
        for _ in 0..MAX_ROUNDS {
            let deviation = self.deviation(&found);
            if deviation == 0.0 {
                break;
            }
            let before = found;
            found = self.solve_weighted(|(known, result)| {
                let off = (result - predict(&before, known)).abs();
                deviation / off.max(deviation)
            });
            if found == before {
                break;
            }
        }
        found
    }

    /// Robust estimate of the standard deviation: the median absolute error, scaled for a normal
    /// distribution.
    fn deviation(&self, coefficients: &[f64; N]) -> f64 {
        const OF_MEDIAN: f64 = 1.4826;
        let off = |(known, result): &([f64; N], f64)| (result - predict(coefficients, known)).abs();
        let mut all: Vec<_> = self.0.iter().map(off).collect();
        all.sort_by(f64::total_cmp);
        OF_MEDIAN * all[all.len() / 2]
    }

    /// Weighted least squares with non-negative coefficients.
    fn solve_weighted(&self, weight: impl Fn(&([f64; N], f64)) -> f64) -> [f64; N] {
        let mut products = [[0.0; N]; N];
        let mut results = [0.0; N];
        for sample in &self.0 {
            let weight = weight(sample);
            let (known, result) = sample;
            for i in 0..N {
                results[i] += weight * known[i] * result;
                for j in 0..N {
                    products[i][j] += weight * known[i] * known[j];
                }
            }
        }
        let mut used = [true; N];
        loop {
            let found = solve_for(&products, &results, used);
            let Some(lowest) = (0..N).find(|&i| found.iter().all(|it| found[i] <= *it)) else {
                return found;
            };
            if found[lowest] >= 0.0 {
                return found;
            }
            used[lowest] = false;
        }
    }
}

fn predict<const N: usize>(coefficients: &[f64; N], known: &[f64; N]) -> f64 {
    std::iter::zip(coefficients, known)
        .map(|(a, b)| a * b)
        .sum()
}

/// Error of a prediction, as a share of the larger of result and prediction.
fn error((result, predicted): (f64, f64)) -> f64 {
    match result.max(predicted) {
        larger if larger > 0.0 => (result - predicted).abs() / larger,
        _ => 0.0,
    }
}

/// The coefficients, with the ones that are not `used` fixed at zero: Gauss-Jordan elimination, in order.
fn solve_for<const N: usize>(
    products: &[[f64; N]; N],
    results: &[f64; N],
    used: [bool; N],
) -> [f64; N] {
    let (mut matrix, mut right) = (*products, *results);
    let mut is_pivot = [false; N];
    for pivot in 0..N {
        // The rest of a column that the earlier columns explain is rounding noise.
        if !used[pivot] || matrix[pivot][pivot] <= MIN_PIVOT * products[pivot][pivot] {
            continue;
        }
        is_pivot[pivot] = true;
        for row in (0..N).filter(|&row| row != pivot) {
            let factor = matrix[row][pivot] / matrix[pivot][pivot];
            right[row] -= factor * right[pivot];
            let pivot_row = matrix[pivot];
            for (cell, pivot_cell) in matrix[row].iter_mut().zip(pivot_row) {
                *cell -= factor * pivot_cell;
            }
        }
    }
    std::array::from_fn(|i| match is_pivot[i] {
        true => right[i] / matrix[i][i],
        false => 0.0,
    })
}
