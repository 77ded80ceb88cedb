//! Where the weights of a checkpoint are, under the names that transformers gives them.

use super::gguf::Gguf;
use super::matrix::Matrix;
use super::quantised::Method;
use super::stamp::Stamp;
use super::tensor::Tensor;
use super::tensors::Tensors;
use crate::base::LoadError;

/// The weights of a checkpoint folder.
pub(super) enum Store {
    /// `*.safetensors`, perhaps quantised.
    Safetensors(Tensors, Option<Method>),
    /// `*.gguf`.
    Gguf(Gguf),
}

impl Store {
    /// The weights of a module, `[outputs, inputs]`: those of `model.layers.0.mlp.up_proj`, say.
    ///
    /// # Errors
    /// They are missing, or have another shape or a type that is not supported.
    pub(super) fn matrix(
        &self,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix<'_>, LoadError> {
        match self {
            Self::Safetensors(tensors, None) => {
                let weight = tensors.get(&format!("{module}.weight"), &[outputs, inputs])?;
                Ok(Matrix::Float(weight.to_float()?))
            }
            Self::Safetensors(tensors, Some(method)) => {
                method.matrix(tensors, module, outputs, inputs)
            }
            Self::Gguf(gguf) => gguf.matrix(module, outputs, inputs),
        }
    }

    /// A norm or a bias of `len` elements: `model.norm.weight`, say.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Tensor<'_>, LoadError> {
        match self {
            Self::Safetensors(tensors, _) => tensors.get(name, &[len])?.to_float(),
            Self::Gguf(gguf) => gguf.vector(name, len),
        }
    }

    /// Of all files, in a fixed order.
    pub(super) fn stamps(&self) -> Vec<&Stamp> {
        match self {
            Self::Safetensors(tensors, _) => tensors.stamps(),
            Self::Gguf(gguf) => gguf.stamps(),
        }
    }

    /// Whether all that was read is what the files had when they were opened: to be asked before it is used.
    ///
    /// # Errors
    /// One of them was cut short, or written to.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        match self {
            Self::Safetensors(tensors, _) => tensors.check(),
            Self::Gguf(gguf) => gguf.check(),
        }
    }

    /// Bytes of all files.
    pub(super) fn num_bytes(&self) -> u64 {
        match self {
            Self::Safetensors(tensors, _) => tensors.num_bytes(),
            Self::Gguf(gguf) => gguf.num_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use safetensors::SafeTensors;

    use crate::runner::Checkpoint;

    /// Rows of every matrix of every quantised fixture, as their formats' own tools dequantise them: see
    /// tests/fixtures/make_quantised_fixtures.py.
    #[test]
    fn weights_are_what_the_formats_own_tools_make_of_them() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let mut num_checkpoints = 0;
        for entry in fs::read_dir(dir).expect("the fixtures") {
            let folder = entry.expect("the fixtures").path();
            if folder.is_dir() {
                num_checkpoints += 1;
                agrees(&folder);
            }
        }
        assert_eq!(num_checkpoints, 10);
    }

    fn agrees(folder: &Path) {
        let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
        let bytes = fs::read(folder.with_extension("safetensors")).expect("its rows");
        let expected = SafeTensors::deserialize(&bytes).expect("whole");
        let spec = checkpoint.spec();
        let (hidden, inter, q) = (spec.hidden_size, spec.intermediate_size, spec.q_width());
        let mut seen = BTreeSet::new();
        for (module, rows) in expected.tensors() {
            let kind = module.rsplit_once('.').map_or(&*module, |(_, kind)| kind);
            let (outputs, inputs) = match kind {
                "embed_tokens" | "lm_head" => (spec.vocab_size, hidden),
                "q_proj" => (q, hidden),
                "k_proj" | "v_proj" => (spec.kv_width(), hidden),
                "o_proj" => (hidden, q),
                "down_proj" => (hidden, inter),
                _ => (inter, hidden),
            };
            seen.insert(kind.to_owned());
            let matrix = checkpoint.store().matrix(&module, outputs, inputs);
            let matrix = matrix.expect("the matrix is there");
            matrix.read().expect("it is read");
            assert_eq!((matrix.rows(), matrix.columns()), (outputs, inputs));
            let stride = (outputs / 8).max(1) | 1;
            let mut row = vec![0.0; inputs];
            let (values, _) = rows.data().as_chunks();
            let chunks = values.chunks_exact(inputs);
            assert_eq!(chunks.len(), outputs.div_ceil(stride), "{module}");
            for (index, expected) in chunks.enumerate() {
                let index = index * stride;
                matrix.read_row(index, &mut row);
                for (column, (got, expected)) in row.iter().zip(expected).enumerate() {
                    let expected = f32::from_le_bytes(*expected);
                    // Of a scale times a code plus an offset, in one order or another.
                    assert!(
                        (got - expected).abs() <= 1e-6,
                        "{}: {module}, row {index}, column {column}: {got} is not {expected}",
                        folder.display()
                    );
                }
            }
        }
        assert!(seen.len() >= 8, "{seen:?}");
    }
}
