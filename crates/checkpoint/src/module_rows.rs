//! LoRA adapters as clients of TensorRT-LLM write them: a row of weights for each module, in two files or in memory.
//!
//! ```text
//! config    [n, 3 or 4]   module id, layer, rank, and 1 for DoRA
//! weights   [n, width]    A [rank, inputs], B [outputs, rank], with DoRA the factors [outputs], and zeros
//! ```
//!
//! B has the factor of the adapter, and DoRA's factors are the norms of rows over the norms of the changed rows. See
//! <https://nvidia.github.io/TensorRT-LLM/advanced/lora.html>.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::adapter_arrays::AdapterArrays;
use super::matrix::Matrix;
use super::npy::NpyFile;
use super::tensor::TensorLocation;
use inflight_base::LoadError;
use inflight_numbers::{Dtype, RawMatrix};

pub(super) const CONFIG: &str = "model.lora_config.npy";
pub(super) const WEIGHTS: &str = "model.lora_weights.npy";

/// The element types of weights; `|V2` is how NumPy calls bf16.
const TYPES: &[(&str, usize, Dtype)] = &[
    ("<f2", 2, Dtype::F16),
    ("<f4", 4, Dtype::F32),
    ("|V2", 2, Dtype::Bf16),
];

/// More modules than any adapter has.
const MAX_ROWS: usize = 1 << 16;

/// The names of module ids, as TensorRT-LLM calls them. What converters write under 5 is the gate, and under 7 the
/// other half, though its documentation has it the other way round.
const MODULE_NAMES: [&str; 8] = [
    "attn_qkv",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
];

/// The rows of an adapter.
pub struct ModuleRows {
    /// Of the weights: a path, or the name of a tensor.
    path: PathBuf,
    weights: RowWeights,
    dtype: Dtype,
    width: usize,
    modules: Vec<RowModule>,
}

/// Where weights are.
enum RowWeights {
    File(NpyFile),
    Memory(Arc<AdapterArrays>),
}

/// What a row is for.
pub struct RowModule {
    /// 0 to 7.
    pub id: usize,
    /// The layer.
    pub layer: usize,
    /// Rows of A.
    pub rank: usize,
    /// Whether there are DoRA's factors.
    pub has_factors: bool,
    name: String,
}

impl ModuleRows {
    /// Opens the two files of a folder. Of the weights only the shape is read.
    ///
    /// # Errors
    /// A file is missing or damaged, a module is not known, or a rank is above `max_rank`.
    pub(super) fn open(dir: &Path, max_rank: usize) -> Result<Self, LoadError> {
        let config_path = dir.join(CONFIG);
        let config = NpyFile::open(&config_path, &[("<i4", 4)])?;
        let config_shape = check_config_shape(&config_path, &config.header().shape)?;
        let bytes = config.data().to_vec()?;
        config.check()?;
        let numbers = bytes.as_chunks().0.iter();
        let numbers: Vec<_> = numbers.map(|it| i32::from_le_bytes(*it)).collect();
        let modules = RowModule::all(&config_path, &numbers, config_shape, max_rank)?;
        let path = dir.join(WEIGHTS);
        let types: Vec<_> = TYPES.iter().map(|(name, size, _)| (*name, *size)).collect();
        let weights = NpyFile::open(&path, &types)?;
        let header = weights.header();
        let known = TYPES.iter().find(|(name, ..)| *name == header.descr);
        let dtype = known.expect("one of these types").2;
        let width = width_of(&path, &header.shape, modules.len(), CONFIG)?;
        Ok(Self {
            path,
            dtype,
            width,
            modules,
            weights: RowWeights::File(weights),
        })
    }

    /// Reads what the rows in `arrays` are for.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub(super) fn of_arrays(
        arrays: &Arc<AdapterArrays>,
        max_rank: usize,
    ) -> Result<Self, LoadError> {
        let config_path = Path::new(AdapterArrays::CONFIG);
        let config_shape = check_config_shape(config_path, &arrays.config_shape)?;
        let modules = RowModule::all(config_path, &arrays.config, config_shape, max_rank)?;
        let path = PathBuf::from(AdapterArrays::WEIGHTS);
        let shape = &arrays.weights_shape;
        Ok(Self {
            width: width_of(&path, shape, modules.len(), AdapterArrays::CONFIG)?,
            path,
            dtype: arrays.dtype,
            modules,
            weights: RowWeights::Memory(Arc::clone(arrays)),
        })
    }

    /// The module of each row.
    pub fn modules(&self) -> &[RowModule] {
        &self.modules
    }

    /// An error about a row.
    pub fn error(&self, row: usize, reason: String) -> LoadError {
        self.location(row).error(reason)
    }

    /// Checks that a row has the weights of a module with these inputs and outputs.
    ///
    /// # Errors
    /// It is too short.
    pub fn check_width(
        &self,
        row: usize,
        num_inputs: usize,
        num_outputs: usize,
    ) -> Result<(), LoadError> {
        let RowModule {
            rank, has_factors, ..
        } = self.modules[row];
        let num_factors = if has_factors { num_outputs } else { 0 };
        let needed = rank * (num_inputs + num_outputs) + num_factors;
        match needed <= self.width {
            true => Ok(()),
            false => Err(self.error(
                row,
                format!(
                    "has {} values; rank {rank} of a module with {num_inputs} inputs and {num_outputs} outputs has \
                     {needed}: the adapter was trained for another model, or its file was cut",
                    self.width
                ),
            )),
        }
    }

    /// A matrix in a row, whose width has been checked. `first` is its first value.
    pub fn matrix(&self, row: usize, first: usize, rows: usize, columns: usize) -> Matrix<'_> {
        Matrix::Dequantised {
            location: self.location(row),
            rows,
            columns,
            read: Arc::new(move |index: usize, of_row: Range<usize>, out: &mut [f32]| {
                self.read(row, first + index * columns + of_row.start, out);
            }),
        }
    }

    /// Values of a row, whose width has been checked.
    pub fn values(&self, row: usize, first: usize, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        self.read(row, first, &mut values);
        values
    }

    /// Checks that everything read so far is what the files held when they were opened.
    ///
    /// # Errors
    /// A file has been cut short or written to.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        match &self.weights {
            RowWeights::File(file) => file.check(),
            RowWeights::Memory(_) => Ok(()),
        }
    }

    fn read(&self, row: usize, first: usize, out: &mut [f32]) {
        let size = self.dtype.size();
        let (start, num_bytes) = ((row * self.width + first) * size, out.len() * size);
        let mut copy = Vec::new();
        let bytes = match &self.weights {
            RowWeights::File(file) => {
                copy.resize(num_bytes, 0);
                file.data().read_at(start, &mut copy);
                &copy
            }
            RowWeights::Memory(arrays) => &arrays.weights[start..start + num_bytes],
        };
        RawMatrix::new(self.dtype, 1, out.len(), bytes).row_to_f32(0, out);
    }

    fn location(&self, row: usize) -> TensorLocation<'_> {
        TensorLocation {
            path: &self.path,
            name: &self.modules[row].name,
        }
    }
}

impl RowModule {
    /// Parses `numbers`, of this shape, into the module of each row.
    fn all(
        path: &Path,
        numbers: &[i32],
        [num_rows, num_columns]: [usize; 2],
        max_rank: usize,
    ) -> Result<Vec<Self>, LoadError> {
        let rows = numbers.chunks_exact(num_columns).take(num_rows);
        let modules = rows.enumerate().map(|(row, numbers)| {
            Self::new(row, numbers, max_rank).map_err(|reason| error(path, reason))
        });
        modules.collect()
    }

    fn new(row: usize, numbers: &[i32], max_rank: usize) -> Result<Self, String> {
        let [id, layer, rank] = [0, 1, 2].map(|column| usize::try_from(numbers[column]));
        let (Ok(id), Ok(layer), Ok(rank @ 1..)) = (id, layer, rank) else {
            return Err(format!(
                "has {numbers:?} in row {row}; a module id, a layer and a rank from 1 are expected"
            ));
        };
        let Some(name) = MODULE_NAMES.get(id) else {
            return Err(format!(
                "has module id {id} in row {row}; 0 to 7 are known ({})",
                MODULE_NAMES.join(", ")
            ));
        };
        if rank > max_rank {
            return Err(format!(
                "has rank {rank} in row {row}, {name} of layer {layer}; lora_cache_max_adapter_size is {max_rank}: \
                 raise it in the model's config.pbtxt"
            ));
        }
        let has_factors = match numbers.get(3) {
            None | Some(0) => false,
            Some(1) => true,
            Some(other) => {
                return Err(format!(
                    "has {other} in the fourth column of row {row}; 0 or 1 is expected: whether it has DoRA"
                ));
            }
        };
        Ok(Self {
            id,
            layer,
            rank,
            has_factors,
            name: format!("row {row}, {name} of layer {layer}"),
        })
    }
}

/// The rows and columns of the config array.
fn check_config_shape(path: &Path, shape: &[usize]) -> Result<[usize; 2], LoadError> {
    let is_expected =
        |[rows, columns]: &[usize; 2]| (1..=MAX_ROWS).contains(rows) && matches!(columns, 3 | 4);
    let found = matrix_shape(shape).filter(is_expected);
    found.ok_or_else(|| {
        let expected = "[n, 3] or [n, 4] is expected";
        error(
            path,
            format!("has shape {shape:?}; {expected}, with at most {MAX_ROWS} modules"),
        )
    })
}

/// The columns of the weights, of which there is a row for each module of the array called `config`.
fn width_of(
    path: &Path,
    shape: &[usize],
    num_modules: usize,
    config: &str,
) -> Result<usize, LoadError> {
    match matrix_shape(shape) {
        Some([rows, width]) if rows == num_modules => Ok(width),
        _ => Err(error(
            path,
            format!(
                "has shape {shape:?}; {config} has {num_modules} modules, so [{num_modules}, width] is expected"
            ),
        )),
    }
}

fn error(path: &Path, reason: String) -> LoadError {
    LoadError::File {
        path: path.to_owned(),
        reason,
    }
}

/// The rows and columns of a matrix, which may be alone in a batch.
fn matrix_shape(shape: &[usize]) -> Option<[usize; 2]> {
    match shape {
        [rows, columns] | [1, rows, columns] => Some([*rows, *columns]),
        _ => None,
    }
}
