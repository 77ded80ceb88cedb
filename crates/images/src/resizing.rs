//! Changes the size of an image as torchvision does for tensors of 8 bits, bit for bit.
//!
//! A pixel of the result is a weighted sum over a window of the source, along rows first and columns then. Where the
//! image shrinks, the window grows with it. Weights are rounded to 16 bits with as many binary places as fit, and sums
//! to 8 bits after each direction.

use std::ops::Range;

use crate::pixels::{NUM_CHANNELS, Pixels};

/// The shape of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// A triangle.
    Bilinear,
    /// A cubic with the parameter -0.5.
    Bicubic,
    /// A sinc, windowed to three lobes.
    Lanczos,
}

/// The image in another size.
pub fn resize(image: &Pixels, size: (usize, usize), filter: Filter) -> Pixels {
    if image.size() == size {
        return image.clone();
    }
    resize_part(image, size, (0..size.0, 0..size.1), filter)
}

/// The image in its shape, with sides of at most `max_side` pixels.
pub fn shrink(image: Pixels, max_side: usize) -> Pixels {
    let longest = image.height().max(image.width());
    if longest <= max_side {
        return image;
    }
    let scaled = |side: usize| (side * max_side).div_ceil(longest);
    let size = (scaled(image.height()), scaled(image.width()));
    resize(&image, size, Filter::Bicubic)
}

/// The rows and columns of `part` of an image in another size. Memory is taken for the part only.
pub fn resize_part(
    image: &Pixels,
    (height, width): (usize, usize),
    (rows, columns): (Range<usize>, Range<usize>),
    filter: Filter,
) -> Pixels {
    let (num_rows, num_columns) = (rows.len(), columns.len());
    let along_rows = Windows::new(image.width(), width, columns, filter);
    let along_columns = Windows::new(image.height(), height, rows, filter);
    let row_len = num_columns * NUM_CHANNELS;
    let mut sums = vec![0_i32; num_rows * row_len];
    let mut row = vec![0_u8; row_len];
    // The results whose windows a row of the source is in are neighbours.
    let (mut first, mut end) = (0, 0);
    for y in 0..image.height() {
        while end < num_rows && along_columns.starts[end] <= y {
            end += 1;
        }
        while first < end && along_columns.end(first) <= y {
            first += 1;
        }
        if first == end {
            continue;
        }
        along_rows.apply(image.row(y), &mut row);
        for to in first..end {
            let weight = along_columns.weights(to)[y - along_columns.starts[to]];
            let sums = &mut sums[to * row_len..][..row_len];
            for (sum, &value) in sums.iter_mut().zip(&row) {
                *sum += i32::from(weight) * i32::from(value);
            }
        }
    }
    let values = sums.iter().map(|&sum| along_columns.rounded(sum));
    Pixels::new(num_rows, num_columns, values.collect())
}

/// For each place of a result, the places of the source that it is made of.
struct Windows {
    starts: Vec<usize>,
    lens: Vec<usize>,
    /// `[results][max_len]`.
    weights: Vec<i16>,
    max_len: usize,
    /// Binary places of the weights.
    precision: u32,
}

impl Windows {
    /// The windows of a range of results.
    fn new(num_sources: usize, num_results: usize, range: Range<usize>, filter: Filter) -> Self {
        let scale = num_sources as f64 / num_results as f64;
        let stretch = scale.max(1.0);
        let support = filter.radius() * stretch;
        let max_len = support.ceil() as usize * 2 + 1;
        // The weights of a result, written to the start of a slice, and the first place and the number of places.
        let weigh = |result: usize, weights: &mut [f64]| {
            let center = scale * (result as f64 + 0.5);
            // Truncated towards zero, as a cast does in C.
            let start = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(num_sources);
            let len = (end - start).min(max_len);
            for (place, weight) in weights[..len].iter_mut().enumerate() {
                let distance = (place + start) as f64 - center + 0.5;
                *weight = filter.weight(distance * (1.0 / stretch));
            }
            let total: f64 = weights[..len].iter().sum();
            if total != 0.0 {
                for weight in &mut weights[..len] {
                    *weight /= total;
                }
            }
            (start, len)
        };
        // The largest weight of all results decides the precision of each.
        let mut largest = 0.0_f64;
        let mut weights = vec![0.0; max_len];
        for result in 0..num_results {
            let (_, len) = weigh(result, &mut weights);
            largest = weights[..len].iter().copied().fold(largest, f64::max);
        }
        let precision = (0..22)
            .find(|&places| 0.5 + largest * f64::from(1 << (places + 1)) >= f64::from(1 << 15))
            .unwrap_or(22);
        let factor = f64::from(1 << precision);
        let mut windows = Self {
            starts: Vec::with_capacity(range.len()),
            lens: Vec::with_capacity(range.len()),
            weights: vec![0; range.len() * max_len],
            max_len,
            precision,
        };
        for (result, rounded) in range.zip(windows.weights.chunks_exact_mut(max_len)) {
            let (start, len) = weigh(result, &mut weights);
            windows.starts.push(start);
            windows.lens.push(len);
            for (rounded, weight) in rounded.iter_mut().zip(&weights[..len]) {
                *rounded = (weight * factor + 0.5_f64.copysign(*weight)) as i16;
            }
        }
        windows
    }

    /// The place after the last one of a window.
    fn end(&self, result: usize) -> usize {
        self.starts[result] + self.lens[result]
    }

    fn weights(&self, result: usize) -> &[i16] {
        &self.weights[result * self.max_len..][..self.lens[result]]
    }

    /// A row of pixels of the result.
    fn apply(&self, source: &[u8], row: &mut [u8]) {
        for (result, to) in row.chunks_exact_mut(NUM_CHANNELS).enumerate() {
            let weights = self.weights(result);
            let window = &source[self.starts[result] * NUM_CHANNELS..];
            let mut sums = [0_i32; NUM_CHANNELS];
            for (pixel, &weight) in window.chunks_exact(NUM_CHANNELS).zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(weight) * i32::from(value);
                }
            }
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = self.rounded(sum);
            }
        }
    }

    /// A weighted sum as a value.
    fn rounded(&self, sum: i32) -> u8 {
        let half = (1 << self.precision) >> 1;
        ((sum + half) >> self.precision).clamp(0, 255) as u8
    }
}

impl Filter {
    /// How far the window reaches to either side, in pixels.
    fn radius(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// The weight at a distance from the centre.
    fn weight(self, distance: f64) -> f64 {
        let x = distance.abs();
        match self {
            Self::Bilinear => (1.0 - x).max(0.0),
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            Self::Lanczos if x < 3.0 => sinc(distance) * sinc(distance / 3.0),
            Self::Bicubic | Self::Lanczos => 0.0,
        }
    }
}

/// sin(pi x) / (pi x).
fn sinc(x: f64) -> f64 {
    match x == 0.0 {
        true => 1.0,
        false => {
            let x = x * std::f64::consts::PI;
            x.sin() / x
        }
    }
}
