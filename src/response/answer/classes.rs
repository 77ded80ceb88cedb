//! The form of classes and scores.

use std::sync::Arc;

use inflight_runner::ClassTransform;

/// The function of the class scores that the request or the model asks for, and the names of the classes.
#[derive(Clone, Debug, Default)]
pub struct ClassForm {
    /// The function.
    pub transform: ClassTransform,
    /// The name of each class.
    pub labels: Arc<[String]>,
}

impl ClassForm {
    /// The values of an answer: one for each class.
    pub fn of(&self, numbers: &[f32]) -> Vec<f32> {
        match self.transform {
            ClassTransform::Identity => numbers.to_vec(),
            ClassTransform::Sigmoid => {
                let sigmoid = |&number: &f32| 1.0 / (1.0 + (-f64::from(number)).exp());
                numbers.iter().map(|it| sigmoid(it) as f32).collect()
            }
            ClassTransform::Softmax => {
                let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                // None of them is infinite, and the largest becomes 1.
                let powers = numbers
                    .iter()
                    .map(|&it| (f64::from(it) - f64::from(largest)).exp());
                let powers: Vec<_> = powers.collect();
                let sum: f64 = powers.iter().sum();
                powers.iter().map(|power| (power / sum) as f32).collect()
            }
        }
    }

    /// The name of the class with the largest number, the first of them.
    pub fn best(&self, numbers: &[f32]) -> &str {
        let mut best = 0;
        for (index, number) in numbers.iter().enumerate() {
            if *number > numbers[best] {
                best = index;
            }
        }
        self.labels.get(best).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_probabilities() {
        let form = |transform| ClassForm {
            transform,
            labels: ["a", "b", "c"].map(str::to_owned).into(),
        };
        let numbers = [1000.0, -1000.0, 1000.0];
        assert_eq!(form(ClassTransform::Identity).of(&numbers), numbers);
        assert_eq!(form(ClassTransform::Softmax).of(&numbers), [0.5, 0.0, 0.5]);
        let each = form(ClassTransform::Sigmoid).of(&[0.0, 1000.0, -1000.0]);
        assert_eq!(each, [0.5, 1.0, 0.0]);
        let form = form(ClassTransform::Softmax);
        assert_eq!(form.best(&numbers), "a");
        assert_eq!(form.best(&[-3.0, -1.0, -2.0]), "b");
        // An answer that failed before.
        assert_eq!((form.best(&[]), form.of(&[]).len()), ("a", 0));
    }
}
