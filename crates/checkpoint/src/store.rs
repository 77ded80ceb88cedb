//! The weights of a checkpoint by name, whatever their format.

use super::gguf::GgufFolder;
use super::matrix::Matrix;
use super::quantised::{Quantisation, Stack};
use super::row_order::{RowOrder, RowSelection};
use super::safetensors::{SafetensorsFolder, StoredTensor};
use super::tensor::Tensor;
use super::transposed::Transposed;
use inflight_base::LoadError;

/// Looks up weights under the names of their format.
pub struct Store<'a> {
    files: &'a WeightFiles,
    /// How safetensors are quantised; `None` if they are not.
    quantisation: Option<Quantisation>,
}

/// The opened weight files of a folder.
pub(super) enum WeightFiles {
    /// `*.safetensors`.
    Safetensors(SafetensorsFolder),
    /// `*.gguf`.
    Gguf(GgufFolder),
}

impl<'a> Store<'a> {
    pub(super) fn new(files: &'a WeightFiles, quantisation: Option<Quantisation>) -> Self {
        Self {
            files,
            quantisation,
        }
    }

    /// The weights of a linear layer, `[outputs, inputs]`. `module` is the name without `.weight`, such as
    /// `model.layers.0.mlp.up_proj`. Only GGUF files reorder rows.
    ///
    /// # Errors
    /// They are missing, or their shape or type is not supported.
    pub fn matrix(
        &self,
        module: &str,
        outputs: usize,
        inputs: usize,
        row_order: RowOrder,
    ) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{module}.weight");
        match (self.files, &self.quantisation) {
            (WeightFiles::Safetensors(tensors), None) => {
                let weight = tensors.get(&name, &[outputs, inputs])?;
                Ok(Matrix::Float(weight.to_float()?))
            }
            (WeightFiles::Safetensors(tensors), Some(quantisation)) => {
                quantisation.matrix(tensors, module, outputs, inputs)
            }
            (WeightFiles::Gguf(tensors), _) => tensors.matrix(&name, &[outputs, inputs], row_order),
        }
    }

    /// The weights of a linear layer that safetensors hold as `[inputs, outputs]`, as rows of outputs. Only floating
    /// point in safetensors.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn transposed_matrix(
        &self,
        module: &str,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        match (self.files, &self.quantisation) {
            (WeightFiles::Safetensors(tensors), None) => {
                // The projection of Gemma 3 is a parameter, whose name has no end.
                let name = match self.has(module) {
                    true => module,
                    false => &format!("{module}.weight"),
                };
                let weight = tensors.get(name, &[inputs, outputs])?;
                Ok(Matrix::Transposed(Transposed::new(weight.to_float()?)))
            }
            (WeightFiles::Safetensors(tensors), Some(_)) => Err(tensors.error(
                &format!("{module}.weight"),
                "belongs to a family that stores weights as [inputs, outputs]; quantised checkpoints of these are not \
                 supported: use one that is not, with weight_only_precision"
                    .to_owned(),
            )),
            (WeightFiles::Gguf(_), _) => self.matrix(module, outputs, inputs, RowOrder::Same),
        }
    }

    /// Matrices of the same shape in one tensor, `[num_matrices, outputs, inputs]`, by its full name: the rows of all,
    /// one after the other. Only floating point in safetensors.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn stacked_matrices(&self, name: &str, shape: [usize; 3]) -> Result<Matrix<'a>, LoadError> {
        self.matrix_of_shape(name, &shape)
    }

    /// The rows of a tensor of floats or, in GGUF files, of any type, whose last dimension is a row, by its full name.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn matrix_of_shape(&self, name: &str, shape: &[usize]) -> Result<Matrix<'a>, LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => {
                Ok(Matrix::Float(tensors.get(name, shape)?.to_float()?))
            }
            WeightFiles::Gguf(tensors) => tensors.matrix(name, shape, RowOrder::Same),
        }
    }

    /// The kernels of a convolution in safetensors, each as a row, by their full name.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn kernels(&self, name: &str, shape: &[usize]) -> Result<Matrix<'a>, LoadError> {
        match self.matrix_of_shape(name, shape)? {
            Matrix::Float(kernels) => Ok(Matrix::Float(kernels.with_joined_rows())),
            other => Err(other
                .location()
                .error("a convolution with quantised weights is not supported".to_owned())),
        }
    }

    /// Some rows of one of the matrices in a tensor that holds them as `[num_matrices, outputs, inputs]`, by its full
    /// name.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn one_of_stacked(
        &self,
        name: &str,
        shape: [usize; 3],
        index: usize,
        rows: RowSelection,
    ) -> Result<Matrix<'a>, LoadError> {
        if let Some(one) = self.quantised_one_of(name, shape, index, false)? {
            return Ok(some_rows(one, rows));
        }
        let all = self.stacked_matrices(name, shape)?;
        Ok(all.select(RowSelection {
            first: index * shape[1] + rows.first,
            ..rows
        }))
    }

    /// Some rows of one of the matrices in a tensor that holds them as `[num_matrices, inputs, outputs]`, by its full
    /// name: `shape` is `[num_matrices, outputs, inputs]`, and rows are outputs. In MXFP4 its tensors hold rows of
    /// outputs. Only in safetensors.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn one_of_transposed(
        &self,
        name: &str,
        shape: [usize; 3],
        index: usize,
        rows: RowSelection,
    ) -> Result<Matrix<'a>, LoadError> {
        let [num_matrices, outputs, inputs] = shape;
        let tensors = match self.files {
            WeightFiles::Safetensors(tensors) => tensors,
            WeightFiles::Gguf(_) => return self.stacked_matrices(name, shape),
        };
        if let Some(one) = self.quantised_one_of(name, shape, index, true)? {
            return Ok(some_rows(one, rows));
        }
        let all = tensors.get(name, &[num_matrices, inputs, outputs])?;
        let one = one_of_floats(&all, [outputs, inputs], index, true)?;
        Ok(one.select(rows))
    }

    /// One of the matrices in a tensor that holds all of them below one another, by its full name: `shape` is
    /// `[num_matrices, outputs, inputs]`, and the tensor is `[num_matrices * outputs, inputs]`, or
    /// `[num_matrices * inputs, outputs]` if it is stored by inputs. Only in safetensors, as floats.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn one_of_rows(
        &self,
        name: &str,
        shape: [usize; 3],
        index: usize,
        is_by_inputs: bool,
    ) -> Result<Matrix<'a>, LoadError> {
        let [num_matrices, outputs, inputs] = shape;
        let [rows, columns] = match is_by_inputs {
            true => [inputs, outputs],
            false => [outputs, inputs],
        };
        let all = match self.files {
            WeightFiles::Safetensors(tensors) => {
                tensors.get(name, &[num_matrices * rows, columns])?
            }
            WeightFiles::Gguf(_) => return self.stacked_matrices(name, shape),
        };
        one_of_floats(&all, [outputs, inputs], index, is_by_inputs)
    }

    fn quantised_one_of(
        &self,
        name: &str,
        [num_matrices, outputs, inputs]: [usize; 3],
        index: usize,
        is_by_inputs: bool,
    ) -> Result<Option<Matrix<'a>>, LoadError> {
        match (self.files, &self.quantisation) {
            (WeightFiles::Safetensors(tensors), Some(quantisation)) => {
                quantisation.one_of(&Stack {
                    tensors,
                    name,
                    num_matrices,
                    outputs,
                    inputs,
                    is_by_inputs,
                    index,
                })
            }
            _ => Ok(None),
        }
    }

    /// Vectors of the same length in one tensor, `[num_vectors, len]`, by its full name.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn stacked_vectors(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<'a>, LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => tensors.get(name, &shape)?.to_float(),
            WeightFiles::Gguf(tensors) => tensors.floats_of_shape(name, &shape),
        }
    }

    /// All numbers of a tensor of any shape, by its full name.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn flattened(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => {
                Ok(tensors.get(name, shape)?.to_float()?.flattened())
            }
            WeightFiles::Gguf(tensors) => Ok(tensors.floats_of_shape(name, shape)?.flattened()),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        match self.files {
            WeightFiles::Safetensors(tensors) => matches!(tensors.find(name), Ok(Some(_))),
            WeightFiles::Gguf(tensors) => tensors.shape(name).is_some(),
        }
    }

    /// Whether there is a tensor of this name and shape.
    pub fn has_shape(&self, name: &str, shape: &[usize]) -> bool {
        match self.files {
            WeightFiles::Safetensors(tensors) => {
                let found = tensors.find(name);
                matches!(found, Ok(Some(tensor)) if tensor.shape == shape)
            }
            WeightFiles::Gguf(tensors) => tensors.shape(name) == Some(shape),
        }
    }

    /// A norm or a bias of `len` elements, by its full name, such as `model.norm.weight`.
    ///
    /// # Errors
    /// As [`Store::matrix`].
    pub fn vector(
        &self,
        name: &str,
        len: usize,
        row_order: RowOrder,
    ) -> Result<Tensor<'a>, LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => tensors.get(name, &[len])?.to_float(),
            WeightFiles::Gguf(tensors) => tensors.vector(name, len, row_order),
        }
    }

    /// `len` integers of 64 bits, by their full name. Only in safetensors.
    ///
    /// # Errors
    /// They are missing, or their shape or type is another one.
    pub fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>, LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => tensors.get(name, &[len])?.to_integers(),
            WeightFiles::Gguf(_) => Err(LoadError::Resource(format!(
                "{name} is not read from GGUF files"
            ))),
        }
    }

    /// Checks that everything read so far is what the files held when they were opened. To be called before the
    /// weights are used.
    ///
    /// # Errors
    /// A file was cut short or written to.
    pub fn check(&self) -> Result<(), LoadError> {
        match self.files {
            WeightFiles::Safetensors(tensors) => tensors.check(),
            WeightFiles::Gguf(tensors) => tensors.check(),
        }
    }

    /// Bytes of all files.
    pub fn num_bytes(&self) -> u64 {
        match self.files {
            WeightFiles::Safetensors(tensors) => tensors.num_bytes(),
            WeightFiles::Gguf(tensors) => tensors.num_bytes(),
        }
    }
}

/// One of the matrices of floats, `[outputs, inputs]`, that a tensor holds below one another.
fn one_of_floats<'a>(
    all: &StoredTensor<'a>,
    [outputs, inputs]: [usize; 2],
    index: usize,
    is_by_inputs: bool,
) -> Result<Matrix<'a>, LoadError> {
    let all = all.to_float()?;
    Ok(match is_by_inputs {
        true => {
            let one = all.part(index * inputs..(index + 1) * inputs, 0..outputs);
            Matrix::Transposed(Transposed::new(one))
        }
        false => Matrix::Float(all.part(index * outputs..(index + 1) * outputs, 0..inputs)),
    })
}

/// Some rows of a matrix. Only these are read, if they are neighbours.
fn some_rows(matrix: Matrix<'_>, rows: RowSelection) -> Matrix<'_> {
    match rows.is_contiguous() {
        true => matrix.part(rows.first..rows.first + rows.len, 0..matrix.columns()),
        false => matrix.select(rows),
    }
}
