//! Rows of activations that the host reads and writes.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::Cpu;
use super::embedding::Embedding;
use super::rows::Rows;
use inflight_device::{Norm, StateOps};

/// Operations of pooling models and draft heads on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuStates;

impl StateOps<Cpu> for CpuStates {
    fn add_to_rows(self, _: &mut Cpu, rows: Range<usize>, row: &Vec<f32>, out: &mut Rows<f32>) {
        for index in rows {
            let width = out.width();
            let out = &mut out.first_mut(index + 1)[index * width..];
            for (out, added) in out.iter_mut().zip(row) {
                *out += added;
            }
        }
    }

    fn add_table_rows(self, cpu: &mut Cpu, table: &Embedding, rows: &[u32], out: &mut Rows<f32>) {
        let row = |token: usize| rows[token] as usize;
        let out = out.first_mut(rows.len());
        cpu.add_positions(table.rows(), table.hidden_size(), row, out);
    }

    fn norm_in_place(
        self,
        cpu: &mut Cpu,
        num_rows: usize,
        hidden: &mut Rows<f32>,
        norm: Norm<'_, Vec<f32>>,
        out: &mut Rows<bf16>,
    ) {
        cpu.norm_rows_in_place(num_rows, hidden, norm, out);
    }

    fn write_sums(self, _: &mut Cpu, rows: &[f32], out: &mut Rows<f32>) {
        let num_rows = rows.len() / out.width();
        out.first_mut(num_rows).copy_from_slice(rows);
    }

    fn replace_rows(self, _: &mut Cpu, first: usize, rows: &[bf16], out: &mut Rows<f32>) {
        let width = out.width();
        let out = out.first_mut(first + rows.len() / width);
        rows.convert_to_f32_slice(&mut out[first * width..]);
    }

    fn add_rows(self, _: &mut Cpu, first: usize, rows: &[bf16], out: &mut Rows<f32>) {
        let width = out.width();
        let out = out.first_mut(first + rows.len() / width);
        for (out, row) in out[first * width..].iter_mut().zip(rows) {
            *out += row.to_f32();
        }
    }

    fn read_sums(self, _: &mut Cpu, sums: &Rows<f32>, num_rows: usize, out: &mut [f32]) {
        out.copy_from_slice(sums.first(num_rows));
    }

    fn read_states(self, _: &mut Cpu, states: &Rows<bf16>, num_rows: usize, out: &mut [f32]) {
        states.first(num_rows).convert_to_f32_slice(out);
    }
}
