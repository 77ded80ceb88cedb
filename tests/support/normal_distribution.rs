/// The probability that a standard normal variable is at most `x`: by its series, or by its continued fraction in the
/// tails.
fn normal_distribution(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let size = x.abs();
    let tail = if size < 3.0 {
        let (mut term, mut sum, mut i) = (size, size, 1.0);
        while term > 1e-18 * sum {
            i += 2.0;
            term *= size * size / i;
            sum += term;
        }
        0.5 - density * sum
    } else {
        let fraction = (1..200)
            .rev()
            .fold(size, |below, i| size + f64::from(i) / below);
        density / fraction
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}
