//! GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel save it.
//!
//! ```text
//! qweight  I32 [inputs / codes per word, outputs]    the codes of an output are in one column
//! qzeros   I32 [groups, outputs / codes per word]    stored as zero - 1 in version 1 of the format
//! scales   [groups, outputs]
//! g_idx    I32 [inputs]                              the group of each input; in any order with act order
//! weight = scale * (code - zero)
//! ```

use std::ops::Range;

use super::groups::Groups;
use super::joined_groups::matrix_of_codes;
use super::module::{Module, group_size, refused};
use super::words::{Words, act_order, code_at, codes_per_word, max_code};
use crate::json_file::JsonFile;
use crate::matrix::Matrix;
use crate::stored_rows::StoredQuantisedRows;
use inflight_base::LoadError;
use inflight_numbers::{CodeBits, QuantFormat, QuantisedRow, QuantisedRows, QuantisedShape};

/// GPTQ as `quantization_config` describes it.
#[derive(Debug)]
pub struct Gptq {
    bits: CodeBits,
    /// `None` for all inputs of an output.
    group_size: Option<usize>,
    /// Added to a stored zero: 1 in version 1 of the format, else 0.
    zero_step: u32,
}

impl Gptq {
    pub fn from_config(section: &JsonFile) -> Result<Self, LoadError> {
        let bits = match section.required_size("bits", 1..=32)? {
            4 => CodeBits::Four,
            8 => CodeBits::Eight,
            other => return Err(refused(section, "bits", other, "4 or 8")),
        };
        let zero_step = match section.string("checkpoint_format")? {
            None | Some("gptq") => 1,
            Some("gptq_v2") => 0,
            Some(other) => {
                let value = format_args!("'{other}'");
                let supported = "'gptq' or 'gptq_v2'";
                return Err(refused(section, "checkpoint_format", value, supported));
            }
        };
        match section.string("pack_dtype")? {
            None | Some("int32") => {}
            Some(other) => {
                let value = format_args!("'{other}'");
                return Err(refused(section, "pack_dtype", value, "'int32'"));
            }
        }
        // Rules that begin with a minus list modules that are not quantised, which their tensors show as well.
        if let Some(rules) = section.object("dynamic")?
            && let Some((rule, _)) = rules.entries().find(|(rule, _)| !rule.starts_with("-:"))
        {
            let value = format_args!("a rule for '{rule}'");
            let supported = "one kind of quantisation for all modules that have one";
            return Err(refused(section, "dynamic", value, supported));
        }
        Ok(Self {
            bits,
            group_size: group_size(section, "group_size")?,
            zero_step,
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
        let per_word = codes_per_word(self.bits);
        if !inputs.is_multiple_of(per_word) || !outputs.is_multiple_of(per_word) {
            return Err(qweight.location.error(format!(
                "{outputs} outputs or {inputs} inputs do not fill words of {per_word} codes"
            )));
        }
        let groups = Groups::find(module, self.bits, self.group_size)?;
        let order = match tensors.find(&module.tensor("g_idx"))? {
            Some(g_idx) => act_order(g_idx, inputs, groups.size)?,
            None => None,
        };
        // Symmetric quantisation stores the middle of the range as every zero.
        let stored_middle = self.bits.bias() as u32 - self.zero_step;
        let has_offsets = !groups.all_zeros_are(stored_middle)?;
        let rows = GptqRows {
            shape: QuantisedShape {
                format: QuantFormat {
                    bits: self.bits,
                    group_size: groups.size,
                    has_offsets,
                },
                rows: outputs,
                columns: inputs,
            },
            codes: Words::new(qweight, [inputs / per_word, outputs])?,
            groups,
            zero_step: self.zero_step,
            order,
        };
        let matrix = matrix_of_codes(qweight.location, Box::new(rows));
        Ok(Some(matrix))
    }
}

struct GptqRows<'a> {
    shape: QuantisedShape,
    codes: Words<'a>,
    groups: Groups<'a>,
    zero_step: u32,
    order: Option<Vec<u32>>,
}

impl<'a> StoredQuantisedRows<'a> for GptqRows<'a> {
    fn preload(&self) -> Result<(), LoadError> {
        self.codes.read()?;
        self.groups.preload()
    }

    fn part(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Box<dyn StoredQuantisedRows<'a> + 'a> {
        let per_word = codes_per_word(self.shape.format.bits);
        let words = columns.start / per_word..columns.end / per_word;
        Box::new(Self {
            shape: QuantisedShape {
                rows: rows.len(),
                columns: columns.len(),
                ..self.shape
            },
            codes: self.codes.part(words, rows.clone()),
            groups: self.groups.part(rows, &columns),
            zero_step: self.zero_step,
            order: self.order.clone(),
        })
    }
}

impl QuantisedRows for GptqRows<'_> {
    fn shape(&self) -> QuantisedShape {
        self.shape
    }

    fn input_order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    fn read_row(&self, index: usize, row: &mut QuantisedRow) {
        let bits = self.shape.format.bits;
        let (per_word, middle) = (codes_per_word(bits), bits.bias());
        row.resize(self.shape.format, self.shape.columns);
        let signed = |word, lane| (code_at(word, lane, bits) as i32 - middle) as i8;
        match &self.order {
            None => {
                for (at, codes) in row.codes.chunks_exact_mut(per_word).enumerate() {
                    let word = self.codes.at(at, index);
                    for (lane, code) in codes.iter_mut().enumerate() {
                        *code = signed(word, lane);
                    }
                }
            }
            Some(order) => {
                for (code, &input) in row.codes.iter_mut().zip(order) {
                    let input = input as usize;
                    let word = self.codes.at(input / per_word, index);
                    *code = signed(word, input % per_word);
                }
            }
        }
        let zero = |word, lane| (code_at(word, lane, bits) + self.zero_step) & max_code(bits);
        self.groups.read_output(index, zero, row);
    }
}
