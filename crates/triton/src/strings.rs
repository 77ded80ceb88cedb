//! BYTES tensors: each element is its length as a little-endian `u32`, then its bytes.
//!
//! ```text
//! | 5 0 0 0 | h e l l o | 0 0 0 0 | 2 0 0 0 | h i |      three elements
//! ```

use super::Error;

/// Bytes that a tensor of these strings takes; an error if one is too long for its length field.
pub fn encoded_len<S: AsRef<[u8]>>(strings: &[S]) -> Result<usize, Error> {
    encoded_len_of(strings.iter().map(|string| string.as_ref().len()))
}

/// Encoded size in bytes of strings of these lengths.
pub fn encoded_len_of(lens: impl IntoIterator<Item = usize>) -> Result<usize, Error> {
    lens.into_iter()
        .try_fold(0, |total, len| match u32::try_from(len) {
            Ok(_) => Ok(total + LENGTH_BYTES + len),
            Err(_) => Err(Error::internal(format!(
                "a string of {len} bytes is too long for a BYTES tensor"
            ))),
        })
}

/// Writes the strings into `buffer`, which holds exactly [`encoded_len`] bytes.
///
/// # Panics
/// If the buffer has another length.
pub fn encode_into<S: AsRef<[u8]>>(strings: &[S], buffer: &mut [u8]) {
    let lens = strings.iter().map(|string| string.as_ref().len());
    for (string, place) in strings.iter().zip(places(lens, buffer)) {
        place.copy_from_slice(string.as_ref());
    }
}

/// Writes the lengths of strings into `buffer`, and returns the places for their bytes.
///
/// # Panics
/// If the buffer has another length than [`encoded_len_of`] says.
pub fn places(lens: impl IntoIterator<Item = usize>, buffer: &mut [u8]) -> Vec<&mut [u8]> {
    let mut places = Vec::new();
    let mut rest = buffer;
    for len in lens {
        let (length, tail) = rest.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&(len as u32).to_le_bytes());
        let (body, tail) = tail.split_at_mut(len);
        places.push(body);
        rest = tail;
    }
    assert!(rest.is_empty(), "the buffer is longer than the strings");
    places
}

/// The strings of a tensor, as slices of its bytes. Does not trust lengths in the data.
pub fn decode(data: &[u8]) -> Result<Vec<&[u8]>, Error> {
    let mut strings = Vec::new();
    let mut rest = data;
    while !rest.is_empty() {
        let element = rest
            .split_first_chunk::<LENGTH_BYTES>()
            .and_then(|(length, tail)| tail.split_at_checked(u32::from_le_bytes(*length) as usize));
        let Some((string, tail)) = element else {
            return Err(Error::invalid(format!(
                "a BYTES tensor of {} bytes ends inside its element {}; each element is its length \
                 as a little-endian 32-bit number, then its bytes",
                data.len(),
                strings.len()
            )));
        };
        strings.push(string);
        rest = tail;
    }
    Ok(strings)
}

/// Bytes of an element's length.
pub const LENGTH_BYTES: usize = size_of::<u32>();

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ErrorCode;

    proptest! {
        #[test]
        fn strings_survive_the_tensor(
            strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8)
        ) {
            let mut buffer = vec![0; encoded_len(&strings).expect("short strings")];
            encode_into(&strings, &mut buffer);
            prop_assert_eq!(decode(&buffer).expect("well formed"), strings);
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(data in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(strings) = decode(&data) {
                let total: usize = strings.iter().map(|string| string.len() + LENGTH_BYTES).sum();
                prop_assert_eq!(total, data.len());
            }
        }
    }

    #[test]
    fn a_cut_tensor_is_refused() {
        for cut in [&[5, 0, 0][..], &[5, 0, 0, 0, b'h'], &[255, 255, 255, 255]] {
            let error = decode(cut).expect_err("cut");
            assert_eq!(error.code(), ErrorCode::InvalidArg);
        }
    }
}
