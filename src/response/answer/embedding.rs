//! The form of embeddings.

/// The smallest length that a vector is divided by, as in torch's `normalize`.
const MIN_LENGTH: f64 = 1e-12;

/// The form of an embedding, as the request asks for it and the model says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingForm {
    /// How many of its elements are wanted, from the first; `None`: all. Models that are trained for it (Matryoshka
    /// representation learning, Kusupati et al., arXiv:2205.13147) keep most of the meaning there.
    pub num_dimensions: Option<u32>,
    /// Whether what is wanted is divided by its length.
    pub normalize: bool,
}

impl EmbeddingForm {
    /// The embedding that a state becomes.
    pub fn of(self, state: &[f32]) -> Vec<f32> {
        let num = self.num_dimensions.map_or(state.len(), |num| num as usize);
        let first = &state[..num.min(state.len())];
        if !self.normalize {
            return first.to_vec();
        }
        // In f64 no square of an f32 is too large.
        let squares = first.iter().map(|&it| f64::from(it) * f64::from(it));
        let length = squares.sum::<f64>().sqrt().max(MIN_LENGTH);
        let scale = |&it: &f32| (f64::from(it) / length) as f32;
        first.iter().map(scale).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_cut_and_then_divided_by_its_length_unless_it_has_none() {
        let form = |num_dimensions, normalize| EmbeddingForm {
            num_dimensions,
            normalize,
        };
        let state = [3.0, -4.0, 12.0];
        assert_eq!(form(None, false).of(&state), state);
        assert_eq!(form(Some(2), false).of(&state), [3.0, -4.0]);
        assert_eq!(form(Some(2), true).of(&state), [0.6, -0.8]);
        assert_eq!(form(Some(1), true).of(&state), [1.0]);
        assert_eq!(form(None, true).of(&[0.0, 0.0]), [0.0, 0.0]);
        assert_eq!(form(None, true).of(&[f32::MAX, 0.0]), [1.0, 0.0]);
    }
}
