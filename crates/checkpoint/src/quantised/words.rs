//! Codes in 32-bit words, float scales, and act order.

use std::ops::Range;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use crate::safetensors::StoredTensor;
use crate::tensor::TensorLocation;
use crate::weight_file::LazyBytes;
use inflight_base::LoadError;
use inflight_numbers::CodeBits;

/// Unsigned codes in little-endian 32-bit words, `[_, width]`, read as a whole by [`Words::read`].
pub struct Words<'a> {
    bytes: LazyBytes<'a>,
    width: usize,
}

impl<'a> Words<'a> {
    /// The words of a tensor, which must have this shape and type I32.
    pub fn new(stored: StoredTensor<'a>, shape: [usize; 2]) -> Result<Self, LoadError> {
        let stored = stored.of_shape(&shape)?;
        if stored.dtype != Dtype::I32 {
            let reason = format!("is of type {:?}; codes are packed in I32", stored.dtype);
            return Err(stored.location.error(reason));
        }
        Ok(Self {
            bytes: stored.bytes.lazy(),
            width: shape[1],
        })
    }

    /// Some words of some of its rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let bytes = 4 * columns.start..4 * columns.end;
        Self {
            bytes: self.bytes.part(4 * self.width, rows, bytes),
            width: columns.len(),
        }
    }

    /// Reads them into memory.
    pub fn read(&self) -> Result<(), LoadError> {
        self.bytes.read()
    }

    /// The word at a position.
    pub fn at(&self, row: usize, column: usize) -> u32 {
        u32::from_le_bytes(self.words()[row * self.width + column])
    }

    /// The words of a row.
    pub fn row(&self, row: usize) -> impl Iterator<Item = u32> {
        let row = &self.words()[row * self.width..][..self.width];
        row.iter().map(|word| u32::from_le_bytes(*word))
    }

    /// Whether every word equals `word`.
    pub fn are_all(&self, word: u32) -> bool {
        let mut words = self.words().iter();
        words.all(|&other| other == word.to_le_bytes())
    }

    fn words(&self) -> &[[u8; 4]] {
        self.bytes.as_chunks().0
    }
}

/// Codes of a word.
pub const fn codes_per_word(bits: CodeBits) -> usize {
    32 / bits.count()
}

/// The unsigned code in a lane of a word; lane 0 is the lowest bits.
pub const fn code_at(word: u32, lane: usize, bits: CodeBits) -> u32 {
    (word >> (lane * bits.count())) & max_code(bits)
}

/// The largest unsigned code.
pub const fn max_code(bits: CodeBits) -> u32 {
    (1 << bits.count()) - 1
}

/// The word that repeats a code in every lane.
pub const fn word_of(code: u32, bits: CodeBits) -> u32 {
    match bits {
        CodeBits::Four => code * 0x1111_1111,
        CodeBits::Eight | CodeBits::Fp8 => code * 0x0101_0101,
    }
}

/// Float values, `[_, width]` or one for all, read as a whole by [`Floats::read`].
pub struct Floats<'a> {
    dtype: Dtype,
    width: usize,
    bytes: LazyBytes<'a>,
}

impl<'a> Floats<'a> {
    /// The values of a float tensor.
    pub fn new(stored: StoredTensor<'a>) -> Result<Self, LoadError> {
        stored.to_float()?;
        Ok(Self {
            dtype: stored.dtype,
            width: match stored.shape {
                [_, width] => *width,
                _ => 1,
            },
            bytes: stored.bytes.lazy(),
        })
    }

    /// All values of a float tensor, in its order.
    pub fn all(stored: StoredTensor<'a>) -> Result<Vec<f32>, LoadError> {
        let len = stored.shape.iter().product();
        Self::some(stored, 0..len)
    }

    /// Some values of a float tensor, by their places in its order.
    pub fn some(stored: StoredTensor<'a>, places: Range<usize>) -> Result<Vec<f32>, LoadError> {
        let all = Self {
            width: 1,
            ..Self::new(stored)?
        };
        let len = places.len();
        let floats = all.part(places, 0..1);
        floats.read()?;
        Ok((0..len).map(|index| floats.at(index)).collect())
    }

    /// Some values of some of its rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let size = match self.dtype {
            Dtype::F16 | Dtype::BF16 => 2,
            _ => 4,
        };
        let bytes = size * columns.start..size * columns.end;
        Self {
            dtype: self.dtype,
            width: columns.len(),
            bytes: self.bytes.part(size * self.width, rows, bytes),
        }
    }

    /// Reads them into memory.
    pub fn read(&self) -> Result<(), LoadError> {
        self.bytes.read()
    }

    /// The value at an index of the flat tensor.
    pub fn at(&self, index: usize) -> f32 {
        let two = || [self.bytes[2 * index], self.bytes[2 * index + 1]];
        match self.dtype {
            Dtype::F16 => f16::from_le_bytes(two()).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(two()).to_f32(),
            _ => f32::from_le_bytes(self.bytes.as_chunks().0[index]),
        }
    }
}

/// The permutation of the inputs that sorts them by group, from `g_idx`, the group of each input. `None` if they are
/// sorted already.
///
/// # Errors
/// A group does not exist, or has the wrong number of inputs.
pub fn act_order(
    g_idx: StoredTensor<'_>,
    inputs: usize,
    group_size: usize,
) -> Result<Option<Vec<u32>>, LoadError> {
    let g_idx = g_idx.of_shape(&[inputs])?;
    if g_idx.dtype != Dtype::I32 {
        let reason = format!("is of type {:?}; groups are numbered in I32", g_idx.dtype);
        return Err(g_idx.location.error(reason));
    }
    let bytes = g_idx.bytes.to_vec()?;
    let groups = bytes.as_chunks().0.iter();
    let groups: Vec<_> = groups.map(|group| i32::from_le_bytes(*group)).collect();
    sort_by_group(g_idx.location, groups, group_size)
}

fn sort_by_group(
    location: TensorLocation<'_>,
    groups: Vec<i32>,
    group_size: usize,
) -> Result<Option<Vec<u32>>, LoadError> {
    let inputs = groups.len();
    let mut in_order = groups.iter().enumerate();
    if in_order.all(|(input, &group)| group as usize == input / group_size) {
        return Ok(None);
    }
    let num_groups = inputs.div_ceil(group_size);
    // The next free position of each group.
    let mut next: Vec<usize> = (0..num_groups).map(|group| group * group_size).collect();
    let mut order = vec![0; inputs];
    for (input, group) in groups.into_iter().enumerate() {
        let index = usize::try_from(group).ok();
        let Some((index, next)) = index.and_then(|index| Some((index, next.get_mut(index)?)))
        else {
            let reason = format!(
                "input {input} is in group {group}, and there are {num_groups}; the file is damaged"
            );
            return Err(location.error(reason));
        };
        if *next == inputs.min((index + 1) * group_size) {
            let reason = format!(
                "group {index} has more inputs than group_size {group_size} allows; the file is damaged"
            );
            return Err(location.error(reason));
        }
        order[*next] = input as u32;
        *next += 1;
    }
    Ok(Some(order))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn order(groups: &[i32], group_size: usize) -> Result<Option<Vec<u32>>, String> {
        let location = TensorLocation {
            path: Path::new("file"),
            name: "g_idx",
        };
        sort_by_group(location, groups.to_vec(), group_size).map_err(|error| error.to_string())
    }

    #[test]
    fn inputs_are_ordered_by_their_groups() {
        assert_eq!(order(&[0, 0, 1, 1, 2], 2), Ok(None));
        assert_eq!(order(&[0, 0, 0], 7), Ok(None));
        assert_eq!(order(&[1, 0, 2, 1, 0], 2), Ok(Some(vec![1, 4, 0, 3, 2])));
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        for (groups, reason) in [
            ([0, 3, 1, 2], "input 1 is in group 3, and there are 2"),
            ([0, -1, 1, 1], "input 1 is in group -1"),
            ([1, 1, 1, 0], "group 1 has more inputs than group_size 2"),
        ] {
            let error = order(&groups, 2).expect_err("refused");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_code_is_taken_from_its_lane() {
        assert_eq!(code_at(0xfedc_ba98, 0, CodeBits::Four), 8);
        assert_eq!(code_at(0xfedc_ba98, 7, CodeBits::Four), 15);
        assert_eq!(code_at(0xfedc_ba98, 1, CodeBits::Eight), 0xba);
        assert_eq!(word_of(7, CodeBits::Four), 0x7777_7777);
        assert_eq!(word_of(128, CodeBits::Eight), 0x8080_8080);
    }
}
