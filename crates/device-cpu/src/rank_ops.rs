//! A CPU as one of the ranks of a model.

use super::logits::CpuLogits;
use super::rows::Rows;
use super::step::CpuStep;
use super::{Cpu, Simd};
use inflight_base::{LoadError, StepError};
use inflight_device::{EmbeddingTable, RankHost, RankOps};

/// Collective operations of a CPU. Only a CPU that has joined ranks has this value.
#[derive(Clone, Copy, Debug)]
pub struct CpuRanks(());

impl CpuRanks {
    /// Makes a CPU one of several ranks.
    pub(super) fn join(cpu: &mut Cpu) -> Self {
        cpu.is_rank = true;
        Self(())
    }
}

impl RankOps<Cpu> for CpuRanks {
    fn check_alike(self, cpu: &mut Cpu, host: &mut RankHost) -> Result<(), LoadError> {
        let index = Simd::ALL.iter().position(|simd| *simd == cpu.simd);
        let describe = |index: u32| match Simd::ALL.get(index as usize) {
            Some(simd) => format!("the instruction set {simd}"),
            None => "another build".to_owned(),
        };
        let index = index.map_or(u32::MAX, |index| index as u32);
        host.check_alike(
            index,
            describe,
            "set cpu_instruction_set to one that all hosts have",
        )
    }

    fn wait(self, _: &mut Cpu, host: &mut RankHost) -> Result<(), StepError> {
        host.check()
    }

    fn all_reduce(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &mut Rows<f32>) {
        host.all_reduce(rows.first_mut(num_rows));
    }

    fn embed_part(
        self,
        cpu: &mut Cpu,
        step: &CpuStep<'_>,
        table: EmbeddingTable<'_, Cpu>,
        first_token: usize,
        scale: f32,
        out: &mut Rows<f32>,
    ) {
        let width = out.width();
        let out = out.first_mut(step.token_ids.len());
        cpu.embed_rows(step.token_ids, width, scale, out, |id, row| {
            let index = (id as usize).checked_sub(first_token);
            match (index, &table) {
                (Some(index), EmbeddingTable::Own(own)) if index < own.num_rows() => {
                    own.table().row_to_f32(index, row);
                }
                (Some(index), EmbeddingTable::Tied(matrix)) if index < matrix.n() => {
                    matrix.row_to_f32(index, row);
                }
                _ => row.fill(-0.0),
            }
        });
    }

    fn gather_logits(
        self,
        cpu: &mut Cpu,
        host: &mut RankHost,
        num_rows: usize,
        greedy_rows: &[u32],
        widths: &[usize],
        part: &mut CpuLogits,
        out: &mut CpuLogits,
    ) {
        if greedy_rows.is_empty() {
            let (part, out) = (part.first_mut(num_rows), out.begin(num_rows));
            return host.gather_columns(widths, part, out, |row| row);
        }
        cpu.gather_greedy_logits(host, num_rows, greedy_rows, widths, part, out);
    }

    fn send_rows(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &Rows<f32>) {
        host.send(rows.first(num_rows));
    }

    fn receive_rows(self, _: &mut Cpu, host: &mut RankHost, num_rows: usize, rows: &mut Rows<f32>) {
        host.receive(rows.first_mut(num_rows));
    }
}
