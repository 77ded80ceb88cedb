//! From the matrices of a checkpoint to what the kernels read.

use super::precision::WeightPrecision;
use super::weight_cache::WeightCache;
use crate::base::LoadError;
use crate::checkpoint::{Matrix, ReadRow, Tensor};
use crate::device::cpu::{Rounded, Simd};
use crate::device::{
    CodeBits, Device, NotFinite, PackedShape, QuantisedRows, Stacking, can_be_packed_together,
};

/// What weights become that are quantised and cannot be taken over.
const ROUNDED_ANEW: WeightPrecision = WeightPrecision {
    bits: CodeBits::Eight,
    group_size: 32,
};

/// Packs the matrices of one model.
pub(super) struct Packer<'a, D> {
    device: &'a mut D,
    precision: Option<WeightPrecision>,
    /// Where what is rounded may be already.
    cache: Option<WeightCache>,
    /// Of each matrix that was packed, what its parts are called if they were rounded.
    names: Vec<Option<String>>,
    num_rounded_anew: usize,
}

impl<'d, D: Device> Packer<'d, D> {
    /// `precision` is what float weights are rounded to, if not to bf16.
    pub(super) fn new(
        device: &'d mut D,
        precision: Option<WeightPrecision>,
        cache: Option<WeightCache>,
    ) -> Self {
        Self {
            device,
            precision,
            cache,
            names: Vec::new(),
            num_rounded_anew: 0,
        }
    }

    /// How many times weights had to be rounded, because no kernel has their codes, or they are computed together
    /// and are not of one kind.
    pub(super) fn num_rounded_anew(&self) -> usize {
        self.num_rounded_anew
    }

    /// Uploads a vector.
    pub(super) fn upload(&mut self, vector: &Tensor<'_>) -> Result<D::Vector, LoadError> {
        self.device.upload_vector(vector.to_f32()?)
    }

    /// Uploads the biases of matrices that are packed as one.
    pub(super) fn upload_bias(&mut self, parts: &[Tensor<'_>]) -> Result<D::Vector, LoadError> {
        let mut bias = Vec::new();
        for part in parts {
            bias.extend(part.to_f32()?);
        }
        self.device.upload_vector(bias)
    }

    /// Packs matrices of equal width: those of a projection.
    pub(super) fn pack(
        &mut self,
        parts: &[Matrix<'_>],
        stacking: Stacking,
    ) -> Result<D::Matrix, LoadError> {
        self.pack_as(parts, Form::of(parts, self.precision), stacking)
    }

    /// Packs the output layer.
    pub(super) fn pack_output_layer(
        &mut self,
        matrix: &Matrix<'_>,
    ) -> Result<D::Matrix, LoadError> {
        let parts = std::slice::from_ref(matrix);
        let form = Form::of_output_layer(parts, self.precision);
        self.pack_as(parts, form, Stacking::Concatenated)
    }

    /// Keeps what was rounded for the next load: of all matrices that were packed, in the order in which they were.
    pub(super) fn keep<'m>(&mut self, matrices: impl Iterator<Item = &'m D::Matrix>)
    where
        D: 'm,
    {
        let Some(cache) = &mut self.cache else {
            return;
        };
        let rounded: Vec<_> = self
            .names
            .drain(..)
            .zip(matrices)
            .filter_map(|(name, matrix)| Some((name?, matrix)))
            .collect();
        cache.keep(self.device, &rounded);
    }

    fn pack_as(
        &mut self,
        parts: &[Matrix<'_>],
        form: Form<'_>,
        stacking: Stacking,
    ) -> Result<D::Matrix, LoadError> {
        parts.iter().try_for_each(Matrix::preload)?;
        self.names.push(match form {
            Form::Rounded(_) | Form::RoundedAnew => Some(name(parts, stacking)),
            Form::Floats(_) | Form::Codes(_) => None,
        });
        let packed = match form {
            Form::Floats(tensors) => self.device.pack(&tensors, stacking)?,
            Form::Codes(codes) => self.device.pack_quantised(&codes, stacking)?,
            Form::Rounded(precision) => self.round(parts, precision, stacking)?,
            Form::RoundedAnew => {
                self.num_rounded_anew += 1;
                self.round(parts, ROUNDED_ANEW, stacking)?
            }
        };
        packed.map_err(|bad| parts[bad.part].not_finite(bad.row))
    }

    fn round(
        &mut self,
        parts: &[Matrix<'_>],
        precision: WeightPrecision,
        stacking: Stacking,
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError> {
        if let Some(cache) = &mut self.cache {
            let num_rows: Vec<_> = parts.iter().map(Matrix::rows).collect();
            let shape = PackedShape {
                num_rows: &num_rows,
                columns: parts[0].columns(),
                stacking,
                format: precision.format(),
            };
            if let Some(packed) = cache.read(self.device, &name(parts, stacking), shape)? {
                return Ok(Ok(packed));
            }
        }
        let readers: Vec<_> = parts
            .iter()
            .map(|part| move |row: usize, out: &mut [f32]| part.read_row(row, out))
            .collect();
        // All instruction sets round to the same bits.
        let simd = Simd::detect();
        let rounded: Vec<_> = parts
            .iter()
            .zip(&readers)
            .map(|(part, read)| {
                let read: &ReadRow<'_> = read;
                let WeightPrecision { bits, group_size } = precision;
                Rounded::new(simd, part.rows(), part.columns(), bits, group_size, read)
            })
            .collect();
        let rounded: Vec<_> = rounded
            .iter()
            .map(|rows| rows as &dyn QuantisedRows)
            .collect();
        self.device.pack_quantised(&rounded, stacking)
    }
}

/// What matrices are called that are packed together.
fn name(parts: &[Matrix<'_>], stacking: Stacking) -> String {
    let names: Vec<_> = parts.iter().map(|part| part.location().name).collect();
    names.join(match stacking {
        Stacking::Concatenated => "+",
        Stacking::Interleaved => "|",
    })
}

/// How matrices are packed together.
pub(super) enum Form<'p> {
    Floats(Vec<Tensor<'p>>),
    /// Codes that are taken over as they are.
    Codes(Vec<&'p dyn QuantisedRows>),
    /// Floats that are to be rounded.
    Rounded(WeightPrecision),
    /// Anything else: read as numbers, and rounded to 8 bits.
    RoundedAnew,
}

impl<'p> Form<'p> {
    /// That of a projection.
    pub(super) fn of(parts: &'p [Matrix<'p>], precision: Option<WeightPrecision>) -> Self {
        let floats = parts.iter().map(|part| match part {
            Matrix::Float(tensor) => Some(*tensor),
            _ => None,
        });
        if let Some(floats) = floats.collect() {
            return precision.map_or(Self::Floats(floats), Self::Rounded);
        }
        let codes = parts.iter().map(|part| match part {
            Matrix::Quantised(_, codes) => Some(codes.as_ref() as &dyn QuantisedRows),
            _ => None,
        });
        match codes.collect::<Option<Vec<_>>>() {
            Some(codes) if can_be_packed_together(&codes) => Self::Codes(codes),
            _ => Self::RoundedAnew,
        }
    }

    /// That of the output layer.
    pub(super) fn of_output_layer(
        parts: &'p [Matrix<'p>],
        precision: Option<WeightPrecision>,
    ) -> Self {
        Self::of(parts, precision.map(WeightPrecision::of_output_layer))
    }

    /// Bytes that these matrices take in this form, but for what rounds them up to whole panels.
    pub(super) fn num_bytes(&self, parts: &[Matrix<'_>]) -> u64 {
        let columns = parts.first().map_or(0, Matrix::columns);
        let rows = parts.iter().map(Matrix::rows).sum::<usize>() as u64;
        let num_weights = rows * columns as u64;
        match self {
            Self::Floats(_) => 2 * num_weights,
            Self::Rounded(precision) => precision.num_bytes(num_weights),
            Self::RoundedAnew => ROUNDED_ANEW.num_bytes(num_weights),
            Self::Codes(codes) => {
                let format = codes[0].format();
                let code_bytes = match format.bits {
                    CodeBits::Four => columns.div_ceil(2),
                    CodeBits::Eight => columns,
                };
                let group_bytes = if format.has_offsets { 4 } else { 2 };
                rows * (code_bytes + group_bytes * format.num_groups(columns)) as u64
            }
        }
    }
}
