//! AWQ (Lin et al., 2023), as AutoAWQ saves it for its GEMM kernel.
//!
//! ```text
//! qweight  I32 [inputs, outputs / 8]    the codes of an input are adjacent
//! qzeros   I32 [groups, outputs / 8]
//! scales   [groups, outputs]
//! weight = scale * (code - zero); a word holds, from its lowest bits up, the outputs 0 2 4 6 1 3 5 7
//! ```

use std::ops::Range;

use super::groups::Groups;
use super::joined_groups::matrix_of_codes;
use super::module::{Module, group_size, refused};
use super::words::{Words, code_at, codes_per_word};
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::stored_rows::StoredQuantisedRows;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

const BITS: CodeBits = CodeBits::Four;
/// The lane of each of 8 outputs in its word.
const LANES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// AWQ as `quantization_config` describes it.
#[derive(Debug)]
pub struct Awq {
    /// `None` for all inputs of an output.
    group_size: Option<usize>,
}

impl Awq {
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let either = |[new, old]: [&'static str; 2]| if section.has(old) { old } else { new };
        let bits = either(["bits", "w_bit"]);
        match section.required_size(bits, 1..=32)? {
            4 => {}
            other => return Err(refused(section, bits, other, "4")),
        }
        match section.string("version")? {
            Some(version) if !version.eq_ignore_ascii_case("gemm") => {
                let value = format_args!("'{version}'");
                return Err(refused(section, "version", value, "'gemm'"));
            }
            _ => {}
        }
        Ok(Self {
            group_size: group_size(section, either(["group_size", "q_group_size"]))?,
        })
    }

    /// A module's matrix; `None` if it is not quantised.
    pub fn matrix<'a>(&self, module: &Module<'a, '_>) -> Result<Option<Matrix<'a>>, LoadError> {
        let &Module {
            tensors,
            outputs,
            inputs,
            ..
        } = module;
        let Some(qweight) = tensors.find(&module.tensor("qweight"))? else {
            return Ok(None);
        };
        let per_word = codes_per_word(BITS);
        if !outputs.is_multiple_of(per_word) {
            return Err(qweight.location.error(format!(
                "{outputs} outputs do not fill words of {per_word} codes"
            )));
        }
        let groups = Groups::find(module, BITS, self.group_size)?;
        let rows = AwqRows {
            shape: QuantisedShape {
                format: QuantFormat {
                    bits: BITS,
                    group_size: groups.size,
                    has_offsets: true,
                },
                rows: outputs,
                columns: inputs,
            },
            first_lane: 0,
            codes: Words::new(qweight, [inputs, outputs / per_word])?,
            groups,
        };
        let matrix = matrix_of_codes(qweight.location, Box::new(rows));
        Ok(Some(matrix))
    }
}

struct AwqRows<'a> {
    shape: QuantisedShape,
    /// Which of the outputs of the first words its first one is.
    first_lane: usize,
    codes: Words<'a>,
    groups: Groups<'a>,
}

impl<'a> StoredQuantisedRows<'a> for AwqRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.codes.read()?;
        self.groups.preload()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let lanes = self.first_lane + rows.start..self.first_lane + rows.end;
        let words = lanes.start / LANES.len()..lanes.end.div_ceil(LANES.len());
        Box::new(Self {
            shape: QuantisedShape {
                rows: rows.len(),
                columns: columns.len(),
                ..self.shape
            },
            first_lane: lanes.start % LANES.len(),
            codes: self.codes.part(columns.clone(), words),
            groups: self.groups.part(rows, &columns),
        })
    }
}

impl QuantisedRows for AwqRows<'_> {
    fn shape(&self) -> QuantisedShape {
        self.shape
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let at = self.first_lane + index;
        let (column, lane) = (at / LANES.len(), LANES[at % LANES.len()]);
        row.resize(self.shape.format, self.shape.columns);
        for (input, code) in row.codes.iter_mut().enumerate() {
            let unsigned = code_at(self.codes.at(input, column), lane, BITS);
            *code = (unsigned as i32 - BITS.bias()) as i8;
        }
        let zero = |word, lane: usize| code_at(word, LANES[lane], BITS);
        self.groups.read_output(index, zero, row);
    }
}
