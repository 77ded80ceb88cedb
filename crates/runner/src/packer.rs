//! Packs the matrices of a checkpoint for a device.

use std::ops::Range;

use super::precision::WeightPrecision;
use super::weight_cache::WeightCache;
use inflight_base::LoadError;
use inflight_checkpoint::{Matrix, ReadRow, Tensor};
use inflight_device::{Device, PackedShape, QuantisedWidths, Stacks};
use inflight_device_cpu::{Rounded, Simd};
use inflight_numbers::{
    CodeBits, FloatRows, NotFinite, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape,
    Stacking, can_be_packed_together,
};

/// What quantised weights become that the kernels cannot compute with as they are.
const REQUANTISED: WeightPrecision = WeightPrecision {
    bits: CodeBits::Eight,
    group_size: 32,
};

/// How the matrices of a projection are packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// How they are combined.
    pub stacking: Stacking,
    /// The expert or head that they belong to, if any: names of tensors may not tell it.
    pub index: Option<usize>,
    /// Whether float weights are never rounded.
    pub is_exact: bool,
}

/// Packs the matrices of one model.
pub(super) struct Packer<'a, D> {
    device: &'a mut D,
    precision: Option<WeightPrecision>,
    /// Holds what an earlier load has rounded.
    cache: Option<WeightCache>,
    /// For each packed matrix, its name in the cache if it was rounded.
    names: Vec<Option<String>>,
    num_requantised: usize,
}

impl<'d, D: Device> Packer<'d, D> {
    /// Float weights are rounded to `precision`, or to bf16 if there is none.
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
            num_requantised: 0,
        }
    }

    /// Projections that were quantised again: no kernel supports their format, or their parts differ in format.
    pub(super) fn num_requantised(&self) -> usize {
        self.num_requantised
    }

    /// Uploads a vector.
    pub(super) fn upload(&mut self, vector: &Tensor<'_>) -> Result<D::Vector, LoadError> {
        self.device.upload_vector(vector.to_f32()?)
    }

    /// Uploads a vector of a function of the elements of another one.
    ///
    /// # Errors
    /// Memory is short, or a value is not finite.
    pub(super) fn upload_mapped(
        &mut self,
        vector: &Tensor<'_>,
        function: impl Fn(f32) -> f32,
    ) -> Result<D::Vector, LoadError> {
        let values = vector.to_f32()?.into_iter().map(function);
        self.device.upload_vector(values.collect())
    }

    /// Uploads the columns of a small matrix, one after the other.
    ///
    /// # Errors
    /// Memory is short, or a value is not finite.
    pub(super) fn upload_transposed(
        &mut self,
        matrices: &[Matrix<'_>],
    ) -> Result<D::Vector, LoadError> {
        self.upload_transposed_mapped(matrices, |value| value)
    }

    /// Uploads the columns of a function of the elements of a small matrix, one after the other.
    ///
    /// # Errors
    /// Memory is short, or a value is not finite.
    pub(super) fn upload_transposed_mapped(
        &mut self,
        matrices: &[Matrix<'_>],
        function: impl Fn(f32) -> f32,
    ) -> Result<D::Vector, LoadError> {
        let num_rows: usize = matrices.iter().map(Matrix::rows).sum();
        let num_columns = matrices.first().map_or(0, Matrix::columns);
        let mut row = vec![0.0; num_columns];
        let mut values = vec![0.0; num_rows * num_columns];
        let rows = matrices
            .iter()
            .flat_map(|matrix| (0..matrix.rows()).map(move |index| (matrix, index)));
        for (place, (matrix, index)) in rows.enumerate() {
            matrix.read_row(index, &mut row);
            if !row.iter().all(|value| value.is_finite()) {
                return Err(matrix.not_finite(index));
            }
            for (column, value) in row.iter().enumerate() {
                values[column * num_rows + place] = function(*value);
            }
        }
        self.device.upload_vector(values)
    }

    /// Uploads the weights of a norm in several parts, which are stored without `offset` and the factor of the sum.
    pub(super) fn upload_norm(
        &mut self,
        parts: &[Tensor<'_>],
        offset: f32,
        scale: f32,
    ) -> Result<D::Vector, LoadError> {
        let mut weight = joined(parts)?;
        if (offset, scale) != (0.0, 1.0) {
            let weights = weight.iter_mut();
            weights.for_each(|weight| *weight = (*weight + offset) * scale);
        }
        self.device.upload_vector(weight)
    }

    /// Uploads the weights of a norm that has none.
    pub(super) fn upload_ones(&mut self, len: usize) -> Result<D::Vector, LoadError> {
        self.device.upload_vector(vec![1.0; len])
    }

    /// Uploads the first row of an embedding, and the difference between it and the second one, if there is that.
    ///
    /// # Errors
    /// Memory is short, or a value is not finite.
    pub(super) fn upload_types(&mut self, rows: &Matrix<'_>) -> Result<Vec<D::Vector>, LoadError> {
        let mut types = Vec::new();
        let mut before = vec![0.0; rows.columns()];
        for index in 0..rows.rows().min(2) {
            let mut row = vec![0.0; rows.columns()];
            rows.read_row(index, &mut row);
            if !row.iter().all(|value| value.is_finite()) {
                return Err(rows.not_finite(index));
            }
            let difference = row.iter().zip(&before).map(|(row, before)| row - before);
            types.push(self.device.upload_vector(difference.collect())?);
            before = row;
        }
        Ok(types)
    }

    /// Uploads the biases of matrices that are packed as one.
    pub(super) fn upload_bias(&mut self, parts: &[Tensor<'_>]) -> Result<D::Vector, LoadError> {
        self.device.upload_vector(joined(parts)?)
    }

    /// Packs the matrices of a projection, which have equally many columns.
    pub(super) fn pack(
        &mut self,
        parts: &[Matrix<'_>],
        packing: Packing,
    ) -> Result<D::Matrix, LoadError> {
        let form = PackedForm::of_projection(parts, packing, self.precision, D::HAS_FP8);
        self.pack_as(parts, form, packing)
    }

    /// Packs the matrices of all experts, or heads, of a layer as one.
    pub(super) fn pack_stacked(
        &mut self,
        stacks: D::Stacks,
        parts: &[Matrix<'_>],
        packing: Packing,
    ) -> Result<D::Matrix, LoadError> {
        parts.iter().try_for_each(Matrix::preload)?;
        self.names.push(None);
        let form = PackedForm::of_projection(parts, packing, self.precision, D::HAS_FP8);
        let packed = match form {
            PackedForm::Float(rows) => stacks.pack(self.device, &rows)?,
            // Experts share the rows of activations.
            PackedForm::Quantised(codes) if codes[0].input_order().is_none() => {
                stacks.pack_quantised(self.device, &codes)?
            }
            PackedForm::Rounded(precision) => with_rounded(parts, precision, |rounded| {
                stacks.pack_quantised(self.device, rounded)
            })??,
            PackedForm::Quantised(_) | PackedForm::Requantised => {
                self.num_requantised += 1;
                with_rounded(parts, REQUANTISED, |rounded| {
                    stacks.pack_quantised(self.device, rounded)
                })??
            }
        };
        packed.map_err(|bad| parts[bad.part].not_finite(bad.row))
    }

    /// Packs the output layer.
    pub(super) fn pack_output_layer(
        &mut self,
        matrix: &Matrix<'_>,
    ) -> Result<D::Matrix, LoadError> {
        let parts = std::slice::from_ref(matrix);
        let form = PackedForm::of_output_layer(parts, self.precision, D::HAS_FP8);
        let packing = Packing {
            stacking: Stacking::Concatenated,
            index: None,
            is_exact: false,
        };
        self.pack_as(parts, form, packing)
    }

    /// Keeps rounded matrices for the next load. `matrices` are all that were packed, in that order.
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
        form: PackedForm<'_>,
        packing: Packing,
    ) -> Result<D::Matrix, LoadError> {
        let stacking = packing.stacking;
        parts.iter().try_for_each(Matrix::preload)?;
        self.names.push(match form {
            PackedForm::Rounded(_) | PackedForm::Requantised => Some(name(parts, packing)),
            PackedForm::Float(_) | PackedForm::Quantised(_) => None,
        });
        let packed = match form {
            PackedForm::Float(rows) => self.device.pack(&rows, stacking)?,
            PackedForm::Quantised(codes) => self.device.pack_quantised(&codes, stacking)?,
            PackedForm::Rounded(precision) => self.round(parts, precision, packing)?,
            PackedForm::Requantised => {
                self.num_requantised += 1;
                self.round(parts, REQUANTISED, packing)?
            }
        };
        packed.map_err(|bad| parts[bad.part].not_finite(bad.row))
    }

    fn round(
        &mut self,
        parts: &[Matrix<'_>],
        precision: WeightPrecision,
        packing: Packing,
    ) -> Result<Result<D::Matrix, NotFinite>, LoadError> {
        let stacking = packing.stacking;
        if let Some(cache) = &mut self.cache {
            let num_rows: Vec<_> = parts.iter().map(Matrix::rows).collect();
            let shape = PackedShape {
                num_rows: &num_rows,
                columns: parts[0].columns(),
                stacking,
                format: precision.format(),
            };
            if let Some(packed) = cache.read(self.device, &name(parts, packing), shape)? {
                return Ok(Ok(packed));
            }
        }
        with_rounded(parts, precision, |rounded| {
            self.device.pack_quantised(rounded, stacking)
        })?
    }
}

/// Calls `pack` with matrices that are rounded while they are read. Some columns of a matrix have the codes and scales
/// that they have in the whole one, as far as groups allow.
fn with_rounded<T>(
    parts: &[Matrix<'_>],
    precision: WeightPrecision,
    pack: impl FnOnce(&[&dyn QuantisedRows]) -> T,
) -> Result<T, LoadError> {
    let WeightPrecision { bits, group_size } = precision;
    let wider = parts.iter().map(|part| {
        let (wider, columns) = part.with_whole_groups(group_size)?;
        let format = precision.format().of_columns(&columns)?;
        Some((wider, columns, format))
    });
    let wider: Vec<_> = wider.collect();
    for (matrix, ..) in wider.iter().flatten() {
        matrix.preload()?;
    }
    let rounded_matrix = |index: usize| match &wider[index] {
        Some((matrix, ..)) => matrix,
        None => &parts[index],
    };
    let readers: Vec<_> = (0..parts.len())
        .map(|index| {
            let matrix = rounded_matrix(index);
            move |row: usize, out: &mut [f32]| matrix.read_row(row, out)
        })
        .collect();
    // All instruction sets round to the same bits.
    let simd = Simd::detect();
    let rounded = readers.iter().enumerate().map(|(index, read)| {
        let (matrix, read): (_, &ReadRow<'_>) = (rounded_matrix(index), read);
        let rows = Rounded::new(
            simd,
            matrix.rows(),
            matrix.columns(),
            bits,
            group_size,
            read,
        );
        let Some((_, columns, format)) = &wider[index] else {
            return Box::new(rows) as Box<dyn QuantisedRows>;
        };
        Box::new(RoundedColumns {
            rows,
            columns: columns.clone(),
            format: *format,
        })
    });
    let rounded: Vec<_> = rounded.collect();
    let rounded: Vec<_> = rounded.iter().map(|rows| &**rows).collect();
    Ok(pack(&rounded))
}

/// Some columns of rounded rows, with the codes and scales that they have in these.
struct RoundedColumns<'a> {
    /// From the first column of a group on.
    rows: Rounded<'a>,
    columns: Range<usize>,
    format: QuantFormat,
}

impl QuantisedRows for RoundedColumns<'_> {
    fn shape(&self) -> QuantisedShape {
        QuantisedShape {
            format: self.format,
            rows: self.rows.rows(),
            columns: self.columns.len(),
        }
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        self.rows.read_row(index, row);
        let (start, group_size) = (self.columns.start, self.rows.format().group_size);
        row.codes.copy_within(self.columns.clone(), 0);
        row.scales.copy_within(start / group_size.., 0);
        row.resize(self.format, self.columns.len());
        // Several of its groups may be of one of the whole row, whose scale has an earlier place then, or the same.
        for place in (0..row.scales.len()).rev() {
            let first = start % group_size + place * self.format.group_size;
            row.scales[place] = row.scales[first / group_size];
        }
    }
}

/// Vectors, one after the other.
fn joined(parts: &[Tensor<'_>]) -> Result<Vec<f32>, LoadError> {
    let mut all = Vec::new();
    for part in parts {
        all.extend(part.to_f32()?);
    }
    Ok(all)
}

/// The name of a packed matrix in the cache.
fn name(parts: &[Matrix<'_>], packing: Packing) -> String {
    let names: Vec<_> = parts.iter().map(|part| part.location().name).collect();
    let names = names.join(match packing.stacking {
        Stacking::Concatenated => "+",
        Stacking::Interleaved => "|",
    });
    match packing.index {
        Some(index) => format!("{names}#{index}"),
        None => names,
    }
}

/// What matrices become when they are packed together.
pub(super) enum PackedForm<'p> {
    /// bf16.
    Float(Vec<&'p dyn FloatRows>),
    /// Codes, as they are stored.
    Quantised(Vec<&'p dyn QuantisedRows>),
    /// Floats, rounded to this precision.
    Rounded(WeightPrecision),
    /// Anything else: dequantised, and rounded to 8 bits.
    Requantised,
}

impl<'p> PackedForm<'p> {
    /// The form of matrices.
    ///
    /// FP8 weights keep their codes on a device that multiplies with them, unless they are to be rounded to another
    /// precision. Else they are floats.
    fn of(parts: &'p [Matrix<'_>], precision: Option<WeightPrecision>, has_fp8: bool) -> Self {
        if has_fp8 && precision.is_none_or(|precision| precision.bits == CodeBits::Fp8) {
            let codes = parts.iter().map(Matrix::fp8_rows);
            if let Some(codes) = codes.collect::<Option<Vec<_>>>()
                && can_be_packed_together(&codes)
            {
                return Self::Quantised(codes);
            }
        }
        let floats = parts.iter().map(Matrix::float_rows);
        if let Some(floats) = floats.collect() {
            return precision.map_or(Self::Float(floats), Self::Rounded);
        }
        let codes = parts.iter().map(|part| match part {
            Matrix::Quantised(_, codes) => Some(&**codes as &dyn QuantisedRows),
            _ => None,
        });
        match codes.collect::<Option<Vec<_>>>() {
            Some(codes) if can_be_packed_together(&codes) => Self::Quantised(codes),
            _ => Self::Requantised,
        }
    }

    /// The form of a projection that is packed like this.
    pub(super) fn of_projection(
        parts: &'p [Matrix<'_>],
        packing: Packing,
        precision: Option<WeightPrecision>,
        has_fp8: bool,
    ) -> Self {
        let precision = precision.filter(|_| !packing.is_exact);
        Self::of(parts, precision, has_fp8)
    }

    /// The form of the output layer.
    pub(super) fn of_output_layer(
        parts: &'p [Matrix<'_>],
        precision: Option<WeightPrecision>,
        has_fp8: bool,
    ) -> Self {
        let precision = precision.map(WeightPrecision::of_output_layer);
        Self::of(parts, precision, has_fp8)
    }

    /// Includes these matrices in `widths`, if they are quantised in this form.
    pub(super) fn add_to(&self, widths: &mut QuantisedWidths, parts: &[Matrix<'_>]) {
        let is_reordered = match self {
            Self::Float(_) => return,
            Self::Rounded(_) | Self::Requantised => false,
            Self::Quantised(codes) => codes[0].input_order().is_some(),
        };
        let num_rows = parts.iter().map(Matrix::rows).sum();
        widths.add(num_rows, parts[0].columns(), is_reordered);
    }

    /// Bytes of these matrices of an expert, or a head, in this form, in a stack of those.
    pub(super) fn num_stacked_bytes<D: Device>(
        &self,
        stacks: D::Stacks,
        parts: &[Matrix<'_>],
    ) -> u64 {
        let (format, are_twice_e2m1) = match self {
            Self::Float(_) => return self.num_bytes::<D>(parts),
            Self::Rounded(precision) => (precision.format(), false),
            Self::Quantised(codes) if codes[0].input_order().is_none() => (
                codes[0].format(),
                codes.iter().all(|codes| codes.are_twice_e2m1()),
            ),
            Self::Quantised(_) | Self::Requantised => (REQUANTISED.format(), false),
        };
        let num_bytes = parts.iter().map(|part| {
            let shape = QuantisedShape {
                format,
                rows: part.rows(),
                columns: part.columns(),
            };
            stacks.num_bytes(shape, are_twice_e2m1) as u64
        });
        num_bytes.sum()
    }

    /// Bytes of these matrices in this form, without the padding to whole panels.
    pub(super) fn num_bytes<D: Device>(&self, parts: &[Matrix<'_>]) -> u64 {
        let columns = parts.first().map_or(0, Matrix::columns);
        let rows = parts.iter().map(Matrix::rows).sum::<usize>() as u64;
        let num_weights = rows * columns as u64;
        match self {
            Self::Float(_) => 2 * num_weights,
            Self::Rounded(precision) => precision.num_bytes(num_weights),
            Self::Requantised => REQUANTISED.num_bytes(num_weights),
            Self::Quantised(codes) => {
                let format = codes[0].format();
                let has_e2m1 = D::PACKS_E2M1 && codes.iter().all(|codes| codes.are_twice_e2m1());
                let code_bytes = match format.bits {
                    CodeBits::Eight if has_e2m1 => columns.div_ceil(2),
                    CodeBits::Four => columns.div_ceil(2),
                    CodeBits::Eight | CodeBits::Fp8 => columns,
                };
                let group_bytes = if format.has_offsets { 4 } else { 2 };
                rows * (code_bytes + group_bytes * format.num_groups(columns)) as u64
            }
        }
    }
}
