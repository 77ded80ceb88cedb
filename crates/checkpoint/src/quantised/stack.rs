//! Several matrices of the same shape in one tensor: the experts of a layer.

use crate::safetensors::{SafetensorsFolder, StoredTensor};
use inflight_base::LoadError;

/// One of the matrices of a tensor, by the tensor's name.
#[derive(Clone, Copy)]
pub struct Stack<'a, 'n> {
    pub tensors: &'a SafetensorsFolder,
    pub name: &'n str,
    pub num_matrices: usize,
    pub outputs: usize,
    pub inputs: usize,
    /// Whether it is `[num_matrices, inputs, outputs]`, and not `[num_matrices, outputs, inputs]`.
    pub is_by_inputs: bool,
    pub index: usize,
}

impl<'a> Stack<'a, '_> {
    /// The tensor.
    pub fn find(&self) -> Result<Option<StoredTensor<'a>>, LoadError> {
        self.tensors.find(self.name)
    }

    /// The shape of a tensor with `inputs` values for each output of each matrix.
    pub fn shape(&self, inputs: usize) -> [usize; 3] {
        match self.is_by_inputs {
            true => [self.num_matrices, inputs, self.outputs],
            false => [self.num_matrices, self.outputs, inputs],
        }
    }

    /// The first tensor beside it that exists, by the endings that its name may have.
    pub fn beside(
        &self,
        weight: &StoredTensor<'_>,
        endings: &[&str],
    ) -> Result<StoredTensor<'a>, LoadError> {
        let names = endings
            .iter()
            .map(|ending| format!("{}{ending}", self.name));
        let names: Vec<_> = names.collect();
        for name in &names {
            if let Some(stored) = self.tensors.find(name)? {
                return Ok(stored);
            }
        }
        let reason = format!("is quantised, and {} is missing", names.join(" or "));
        Err(weight.location.error(reason))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
    use serde_json::json;

    use crate::{Checkpoint, Matrix, RowOrder, RowRuns, RowSelection};

    const NUM: usize = 3;
    const OUTPUTS: usize = 12;
    const INPUTS: usize = 96;

    type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

    /// Bytes that differ, none of which is NaN in e4m3, and all of which are above 0.
    fn bytes(len: usize, seed: usize) -> Vec<u8> {
        let bytes = (0..len).map(|index| (index * index * 31 + index * 7 + seed) % 0x60 + 1);
        bytes.map(|byte| byte as u8).collect()
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }

    /// `[outputs, inputs]` elements of one byte as `[inputs, outputs]`.
    fn transposed(bytes: &[u8], outputs: usize) -> Vec<u8> {
        let inputs = bytes.len() / outputs;
        let elements = (0..inputs * outputs).map(|at| bytes[at % outputs * inputs + at / outputs]);
        elements.collect()
    }

    fn with_checkpoint(
        name: &str,
        config: &serde_json::Value,
        tensors: &Tensors,
        check: impl Fn(&Checkpoint),
    ) {
        let dir = format!("inflight-stack-{name}-{}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        fs::create_dir_all(&dir).expect("a folder");
        let config = json!({ "quantization_config": config }).to_string();
        fs::write(dir.join("config.json"), config).expect("written");
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("consistent");
            (name, view)
        });
        serialize_to_file(views, None, &dir.join("model.safetensors")).expect("written");
        check(&Checkpoint::open(&dir).expect("it opens"));
        fs::remove_dir_all(dir).expect("removed");
    }

    fn rows_of(matrix: &Matrix<'_>) -> Vec<Vec<f32>> {
        matrix.preload().expect("it is read");
        let rows = (0..matrix.rows()).map(|index| {
            let mut row = vec![0.0; matrix.columns()];
            matrix.read_row(index, &mut row);
            row
        });
        rows.collect()
    }

    fn selection(first: usize, len: usize, runs: Option<RowRuns>) -> RowSelection {
        let order = RowOrder::Same;
        RowSelection {
            first,
            len,
            order,
            runs,
        }
    }

    /// Each of the matrices has the weights of a module with its bytes, in either layout, wholly or in part.
    fn agrees(checkpoint: &Checkpoint, names: &[(&str, bool)]) {
        let store = checkpoint.store().expect("a known quantisation");
        for index in 0..NUM {
            let alone = store.matrix(&format!("alone.{index}"), OUTPUTS, INPUTS, RowOrder::Same);
            let expected = rows_of(&alone.expect("a module"));
            assert!(expected.iter().flatten().any(|&weight| weight != 0.0));
            for &(name, is_by_inputs) in names {
                let one = |rows| {
                    let shape = [NUM, OUTPUTS, INPUTS];
                    let found = match is_by_inputs {
                        true => store.one_of_transposed(name, shape, index, rows),
                        false => store.one_of_stacked(name, shape, index, rows),
                    };
                    found.unwrap_or_else(|error| panic!("{name}: {error}"))
                };
                let all = one(selection(0, OUTPUTS, None));
                assert_eq!(rows_of(&all), expected, "{name}, {index}");
                let last = one(selection(8, 4, None));
                assert_eq!(rows_of(&last), expected[8..], "{name}, {index}");
                let every_second = one(selection(1, 6, Some(RowRuns::new(1, 2))));
                let odd: Vec<_> = expected.iter().skip(1).step_by(2).cloned().collect();
                assert_eq!(rows_of(&every_second), odd, "{name}, {index}");
                let part = all.part(2..7, 32..96);
                for (row, expected) in rows_of(&part).iter().zip(&expected[2..7]) {
                    assert_eq!(*row, expected[32..96], "{name}, {index}");
                }
            }
        }
    }

    #[test]
    fn experts_in_nvfp4_have_the_weights_of_modules() {
        let codes: Vec<_> = (0..NUM)
            .map(|seed| bytes(OUTPUTS * INPUTS / 2, seed))
            .collect();
        let scales: Vec<_> = (0..NUM)
            .map(|seed| bytes(OUTPUTS * INPUTS / 16, seed + 40))
            .collect();
        let factors = [0.5, 0.25, 0.1_f32];
        let turned = |all: &[Vec<u8>]| {
            all.iter()
                .flat_map(|one| transposed(one, OUTPUTS))
                .collect()
        };
        let mut tensors = Tensors::new();
        let mut add = |name: &str, dtype, shape: &[usize], data: Vec<u8>| {
            tensors.push((name.to_owned(), dtype, shape.to_vec(), data));
        };
        for index in 0..NUM {
            let name = |tensor: &str| format!("alone.{index}.{tensor}");
            add(
                &name("weight"),
                Dtype::U8,
                &[OUTPUTS, INPUTS / 2],
                codes[index].clone(),
            );
            let shape = [OUTPUTS, INPUTS / 16];
            add(
                &name("weight_scale"),
                Dtype::F8_E4M3,
                &shape,
                scales[index].clone(),
            );
            add(
                &name("weight_scale_2"),
                Dtype::F32,
                &[],
                floats(&factors[index..=index]),
            );
        }
        add(
            "rows",
            Dtype::U8,
            &[NUM, OUTPUTS, INPUTS / 2],
            codes.concat(),
        );
        add(
            "rows_weight_scale",
            Dtype::F8_E4M3,
            &[NUM, OUTPUTS, INPUTS / 16],
            scales.concat(),
        );
        add("rows_weight_scale_2", Dtype::F32, &[NUM], floats(&factors));
        add(
            "columns",
            Dtype::U8,
            &[NUM, INPUTS / 2, OUTPUTS],
            turned(&codes),
        );
        add(
            "columns_weight_scale",
            Dtype::F8_E4M3,
            &[NUM, INPUTS / 16, OUTPUTS],
            turned(&scales),
        );
        add(
            "columns_weight_scale_2",
            Dtype::F32,
            &[NUM, 1, 1],
            floats(&factors),
        );
        // Factors that are refused.
        add(
            "broken",
            Dtype::U8,
            &[NUM, OUTPUTS, INPUTS / 2],
            codes.concat(),
        );
        add(
            "broken_weight_scale",
            Dtype::F8_E4M3,
            &[NUM, OUTPUTS, INPUTS / 16],
            scales.concat(),
        );
        add(
            "broken_weight_scale_2",
            Dtype::F32,
            &[2],
            floats(&[1.0, f32::NAN]),
        );
        add(
            "endless",
            Dtype::U8,
            &[NUM, OUTPUTS, INPUTS / 2],
            codes.concat(),
        );
        add(
            "endless_weight_scale",
            Dtype::F8_E4M3,
            &[NUM, OUTPUTS, INPUTS / 16],
            scales.concat(),
        );
        add(
            "endless_weight_scale_2",
            Dtype::F32,
            &[1],
            floats(&[f32::INFINITY]),
        );
        add(
            "alone",
            Dtype::U8,
            &[NUM, OUTPUTS, INPUTS / 2],
            codes.concat(),
        );
        let config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
        with_checkpoint("nvfp4", &config, &tensors, |checkpoint| {
            agrees(checkpoint, &[("rows", false), ("columns", true)]);
            let store = checkpoint.store().expect("a known quantisation");
            for (name, reasons) in [
                (
                    "broken",
                    [
                        "broken_weight_scale_2",
                        "has shape [2]; [1] and [3] are supported",
                    ],
                ),
                (
                    "endless",
                    [
                        "endless_weight_scale_2",
                        "is inf; a scale and its reciprocal are finite",
                    ],
                ),
                ("alone", ["alone", "alone_weight_scale is missing"]),
                ("columns", ["columns", "config.json calls for [3, 12, 48]"]),
            ] {
                let rows = selection(0, OUTPUTS, None);
                let error = store.one_of_stacked(name, [NUM, OUTPUTS, INPUTS], 1, rows);
                let error = error.err().expect("refused").to_string();
                assert!(
                    reasons.iter().all(|reason| error.contains(reason)),
                    "{error}"
                );
            }
        });
    }

    #[test]
    fn experts_in_fp8_have_the_weights_of_modules() {
        let codes: Vec<_> = (0..NUM).map(|seed| bytes(OUTPUTS * INPUTS, seed)).collect();
        let stacked = codes.concat();
        let turned: Vec<u8> = codes
            .iter()
            .flat_map(|one| transposed(one, OUTPUTS))
            .collect();
        // A scale for each output of each matrix, for each matrix, or for each block of 8 x 64.
        let of_outputs: Vec<_> = (0..NUM * OUTPUTS).map(|at| 0.5 + at as f32 / 7.0).collect();
        let of_matrices = [0.5, 0.25, 0.1_f32];
        let of_blocks: Vec<_> = (0..NUM * 4).map(|at| 0.5 + at as f32 / 7.0).collect();
        for (kind, alone, values, by_outputs, by_inputs) in [
            (
                "outputs",
                vec![OUTPUTS, 1],
                &of_outputs[..],
                vec![NUM, OUTPUTS, 1],
                Some(vec![NUM, 1, OUTPUTS]),
            ),
            (
                "matrices",
                vec![1],
                &of_matrices[..],
                vec![NUM],
                Some(vec![NUM, 1, 1]),
            ),
            ("blocks", vec![2, 2], &of_blocks[..], vec![NUM, 2, 2], None),
        ] {
            let mut tensors = Tensors::new();
            let mut add = |name: &str, dtype, shape: &[usize], data: Vec<u8>| {
                tensors.push((name.to_owned(), dtype, shape.to_vec(), data));
            };
            let of_one = values.len() / NUM;
            for index in 0..NUM {
                let name = |tensor: &str| format!("alone.{index}.{tensor}");
                add(
                    &name("weight"),
                    Dtype::F8_E4M3,
                    &[OUTPUTS, INPUTS],
                    codes[index].clone(),
                );
                let scales = floats(&values[index * of_one..][..of_one]);
                add(&name("weight_scale"), Dtype::F32, &alone, scales);
            }
            add(
                "rows",
                Dtype::F8_E4M3,
                &[NUM, OUTPUTS, INPUTS],
                stacked.clone(),
            );
            add("rows_scale_inv", Dtype::F32, &by_outputs, floats(values));
            let mut names = vec![("rows", false)];
            if let Some(shape) = by_inputs {
                add(
                    "columns",
                    Dtype::F8_E4M3,
                    &[NUM, INPUTS, OUTPUTS],
                    turned.clone(),
                );
                add("columns_weight_scale", Dtype::F32, &shape, floats(values));
                names.push(("columns", true));
            }
            let config = json!({"quant_method": "fp8", "weight_block_size": match kind {
                "blocks" => Some([8, 64]),
                _ => None,
            }});
            with_checkpoint(kind, &config, &tensors, |checkpoint| {
                agrees(checkpoint, &names);
                let store = checkpoint.store().expect("a known quantisation");
                let rows = selection(0, OUTPUTS, None);
                // Another number of matrices.
                let error = store.one_of_stacked("rows", [2, OUTPUTS, INPUTS], 0, rows);
                let error = error.err().expect("refused").to_string();
                assert!(
                    error.contains("config.json calls for [2, 12, 96]"),
                    "{error}"
                );
            });
        }
    }
}
