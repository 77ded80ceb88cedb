//! The weights of an adapter as bytes, for another process of the same build.
//!
//! ```text
//! header length, u32 | header, JSON: shapes of the weights of each place | values, in the order of the header
//! ```

use half::bf16;
use serde::{Deserialize, Serialize};

use super::low_rank::{AdaptedPlace, AdapterWeights, DenseRows, LowRank};
use inflight_base::LoadError;

/// Shapes of the weights of one place.
#[derive(Serialize, Deserialize)]
struct PlaceHead {
    place: usize,
    parts: Vec<PartHead>,
    num_factors: Option<usize>,
    num_biases: Option<usize>,
    /// Rows and columns.
    replacement: Option<[usize; 2]>,
}

/// What is added to one linear layer.
#[derive(Serialize, Deserialize)]
struct PartHead {
    rank: usize,
    num_inputs: usize,
    outputs: [usize; 2],
    /// The bits of its scale.
    scale: u32,
}

/// The header.
#[derive(Serialize, Deserialize)]
struct Head {
    num_places: usize,
    places: Vec<PlaceHead>,
}

impl AdapterWeights {
    /// Its weights as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let places = self.places().iter().enumerate();
        let changed = places.filter(|(_, place)| !place.is_unchanged());
        let head = Head {
            num_places: self.places().len(),
            places: changed
                .map(|(index, place)| PlaceHead::new(index, place))
                .collect(),
        };
        let head = serde_json::to_vec(&head).expect("numbers have a text");
        let mut bytes = (head.len() as u32).to_le_bytes().to_vec();
        bytes.extend(head);
        for place in self.places() {
            for part in place.parts() {
                for values in [part.packed_a(), part.packed_b()] {
                    bytes.extend_from_slice(bytemuck::cast_slice(values));
                }
            }
            for values in [place.factors(), place.bias()].into_iter().flatten() {
                bytes.extend_from_slice(bytemuck::cast_slice(values));
            }
            if let Some(rows) = place.replacement() {
                bytes.extend_from_slice(bytemuck::cast_slice(rows.values()));
            }
        }
        bytes
    }

    /// The adapter that these bytes are; `None` if they are none.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub fn from_bytes(bytes: &[u8]) -> Result<Option<Self>, LoadError> {
        let Some((head, mut values)) = split_head(bytes) else {
            return Ok(None);
        };
        let mut weights = Self::new(head.num_places);
        for place in head.places {
            if place.place >= head.num_places || place.read(&mut values, &mut weights)?.is_none() {
                return Ok(None);
            }
        }
        weights.gather()?;
        Ok(values.is_empty().then_some(weights))
    }
}

impl PlaceHead {
    fn new(index: usize, place: &AdaptedPlace) -> Self {
        let parts = place.parts().iter().map(|part| PartHead {
            rank: part.rank(),
            num_inputs: part.num_inputs(),
            outputs: [part.outputs().start, part.outputs().end],
            scale: part.scale().to_bits(),
        });
        Self {
            place: index,
            parts: parts.collect(),
            num_factors: place.factors().map(<[f32]>::len),
            num_biases: place.bias().map(<[f32]>::len),
            replacement: place.replacement().map(|it| [it.rows(), it.columns()]),
        }
    }

    /// Takes the values from the front of the bytes. `None` if there are too few.
    fn read(
        &self,
        values: &mut &[u8],
        weights: &mut AdapterWeights,
    ) -> Result<Option<()>, LoadError> {
        let place = self.place;
        for part in &self.parts {
            let outputs = part.outputs[0]..part.outputs[1];
            let num_bytes = LowRank::num_bytes_of(part.rank, part.num_inputs, outputs.len());
            if num_bytes > values.len() as u64 {
                return Ok(None);
            }
            let scale = f32::from_bits(part.scale);
            let mut low_rank = LowRank::new(part.rank, part.num_inputs, outputs, scale)?;
            for packed in low_rank.packed_mut() {
                take_bf16(values, packed);
            }
            weights.push(place, low_rank);
        }
        if let Some(len) = self.num_factors {
            let Some(factors) = take_f32(values, len) else {
                return Ok(None);
            };
            weights.set_factors(place, len, 0, &factors);
        }
        if let Some(len) = self.num_biases {
            let Some(biases) = take_f32(values, len) else {
                return Ok(None);
            };
            weights.add_bias(place, len, 0, &biases);
        }
        if let Some([rows, columns]) = self.replacement {
            if DenseRows::num_bytes_of(rows, columns) > values.len() as u64 {
                return Ok(None);
            }
            let mut replacement = DenseRows::new(rows, columns)?;
            for row in 0..rows {
                take_bf16(values, replacement.row_mut(row));
            }
            weights.replace(place, replacement);
        }
        Ok(Some(()))
    }
}

fn split_head(bytes: &[u8]) -> Option<(Head, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (head, values) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((serde_json::from_slice(head).ok()?, values))
}

/// Fills `out` with the first bytes, of which there are enough.
fn take_bf16(bytes: &mut &[u8], out: &mut [bf16]) {
    let (own, rest) = bytes.split_at(size_of_val(out));
    bytemuck::cast_slice_mut(out).copy_from_slice(own);
    *bytes = rest;
}

fn take_f32(bytes: &mut &[u8], len: usize) -> Option<Vec<f32>> {
    let (own, rest) = bytes.split_at_checked(len.checked_mul(size_of::<f32>())?)?;
    *bytes = rest;
    let (chunks, _) = own.as_chunks();
    Some(chunks.iter().map(|it| f32::from_ne_bytes(*it)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights() -> AdapterWeights {
        let number = |it: usize| bf16::from_f32(it as f32 / 64.0);
        let mut weights = AdapterWeights::new(5);
        for (first, num_outputs, rank) in [(0, 70, 3), (70, 5, 17)] {
            let outputs = first..first + num_outputs;
            let mut part = LowRank::new(rank, 6, outputs, 0.75).expect("memory");
            for index in 0..rank {
                part.set_rank(index, &[number(index + first); 6]);
            }
            for output in 0..num_outputs {
                part.set_output(output, &vec![number(output + 9); rank]);
            }
            weights.push(3, part);
        }
        weights.set_factors(3, 75, 70, &[0.5, 2.0, 3.0, 1.5, 1.25]);
        weights.add_bias(1, 4, 1, &[-1.0, 7.5]);
        let mut rows = DenseRows::new(2, 3).expect("memory");
        rows.row_mut(1).fill(number(40));
        weights.replace(4, rows);
        weights.gather().expect("memory");
        weights
    }

    #[test]
    fn an_adapter_is_read_as_it_was_written() {
        let bytes = weights().to_bytes();
        let read = AdapterWeights::from_bytes(&bytes).expect("memory");
        let read = read.expect("an adapter");
        assert_eq!(read.places().len(), weights().places().len());
        for (read, written) in read.places().iter().zip(weights().places()) {
            assert_eq!(read.parts().len(), written.parts().len());
            for (read, written) in read.parts().iter().zip(written.parts()) {
                assert_eq!(
                    [read.rank(), read.num_inputs()],
                    [written.rank(), written.num_inputs()]
                );
                assert_eq!(read.outputs(), written.outputs());
                assert_eq!(read.scale(), written.scale());
                assert_eq!(read.packed_a(), written.packed_a());
                assert_eq!(read.packed_b(), written.packed_b());
            }
            assert_eq!(read.factors(), written.factors());
            assert_eq!(read.bias(), written.bias());
            let values = |rows: Option<&DenseRows>| rows.map(|rows| rows.values().to_vec());
            assert_eq!(values(read.replacement()), values(written.replacement()));
        }
        assert_eq!(read.to_bytes(), bytes);
    }

    #[test]
    fn bytes_that_are_no_adapter_are_none() {
        let bytes = weights().to_bytes();
        for len in (0..bytes.len()).step_by(7) {
            let read = AdapterWeights::from_bytes(&bytes[..len]);
            assert!(read.expect("memory").is_none(), "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        let read = AdapterWeights::from_bytes(&longer);
        assert!(read.expect("memory").is_none());
    }
}
