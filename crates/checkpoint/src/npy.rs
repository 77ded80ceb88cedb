//! NumPy's `.npy` files: a short header, and one array.
//! See <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::path::Path;

use super::weight_file::{FileRange, WeightFile};
use inflight_base::LoadError;

const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest header, which NumPy itself reads.
const MAX_HEADER_BYTES: u64 = 10_000;
const MAX_DIMENSIONS: usize = 4;

/// An open file and its header. Its array fills the rest of it.
pub(super) struct NpyFile {
    file: WeightFile,
    header: NpyHeader,
    data_start: u64,
}

/// The header of a file, whose array is in C order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NpyHeader {
    /// The element type, such as `<f2`.
    pub(super) descr: String,
    pub(super) shape: Vec<usize>,
}

impl NpyFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, or is no array of one of these types that fills it exactly. A type is a name, and the
    /// bytes of an element.
    pub(super) fn open(path: &Path, types: &[(&str, usize)]) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        let header = read_header(&file)?.and_then(|(header, data_start)| {
            let known = types.iter().find(|(name, _)| *name == header.descr);
            let Some((_, size)) = known else {
                let names: Vec<_> = types.iter().map(|(name, _)| *name).collect();
                return Err(format!(
                    "its elements are of type {}; {} are supported",
                    header.descr,
                    names.join(", ")
                ));
            };
            let sizes = header.shape.iter().copied().chain([*size]);
            let sizes: Vec<_> = sizes.collect();
            let num_bytes = sizes
                .iter()
                .try_fold(1_u64, |product, &len| product.checked_mul(len as u64));
            let room = file.num_bytes() - data_start;
            match num_bytes == Some(room) {
                true => Ok((header, data_start)),
                false => Err(format!(
                    "its shape {:?} calls for {} bytes, and after its header there are {room}",
                    header.shape,
                    num_bytes.map_or_else(|| "too many".to_owned(), |it| it.to_string())
                )),
            }
        });
        match header {
            Ok((header, data_start)) => Ok(Self {
                file,
                header,
                data_start,
            }),
            Err(reason) => Err(LoadError::File {
                path: path.to_owned(),
                reason: format!(
                    "is not a whole .npy file: {reason}; it has {} bytes, convert the adapter again",
                    file.num_bytes()
                ),
            }),
        }
    }

    pub(super) fn header(&self) -> &NpyHeader {
        &self.header
    }

    /// The elements.
    pub(super) fn data(&self) -> FileRange<'_> {
        let range = self.file.range(self.data_start..self.file.num_bytes());
        range.expect("the array fills the file")
    }

    /// Checks that everything read so far is what the file held when it was opened.
    ///
    /// # Errors
    /// It has been cut short or written to.
    pub(super) fn check(&self) -> Result<(), LoadError> {
        self.file.check()
    }
}

/// The header of a file and where its array begins, or what is wrong with it.
fn read_header(file: &WeightFile) -> Result<Result<(NpyHeader, u64), String>, LoadError> {
    let start = match file.range(0..12) {
        Some(start) => start.to_vec()?,
        None => return Ok(Err("it is shorter than a header".to_owned())),
    };
    let Some(start) = start.strip_prefix(MAGIC) else {
        return Ok(Err("it does not begin with \\x93NUMPY".to_owned()));
    };
    let (first, length) = match start {
        [1, _, a, b, ..] => (10, u64::from(u16::from_le_bytes([*a, *b]))),
        [2 | 3, _, a, b, c, d, ..] => (12, u64::from(u32::from_le_bytes([*a, *b, *c, *d]))),
        _ => return Ok(Err("its version is not 1, 2 or 3".to_owned())),
    };
    let header = match length <= MAX_HEADER_BYTES {
        true => file.range(first..first + length),
        false => None,
    };
    let Some(header) = header else {
        return Ok(Err(format!("its header would be {length} bytes long")));
    };
    let header = header.to_vec()?;
    let text = std::str::from_utf8(&header).ok();
    Ok(match text.and_then(NpyHeader::parse) {
        Some(header) => Ok((header, first + length)),
        None => Err("its header is not that of an array in C order".to_owned()),
    })
}

impl NpyHeader {
    /// Reads `{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }`.
    fn parse(text: &str) -> Option<Self> {
        let mut rest = text.trim().strip_prefix('{')?.strip_suffix('}')?.trim();
        let (mut descr, mut shape, mut is_c_order) = (None, None, None);
        while !rest.is_empty() {
            let (key, value) = quoted(rest)?;
            let value = value.trim_start().strip_prefix(':')?.trim_start();
            let after = match key {
                "descr" if descr.is_none() => {
                    let (name, after) = quoted(value)?;
                    descr = Some(name.to_owned());
                    after
                }
                "fortran_order" if is_c_order.is_none() => {
                    is_c_order = Some(());
                    value.strip_prefix("False")?
                }
                "shape" if shape.is_none() => {
                    let (sizes, after) = value.strip_prefix('(')?.split_once(')')?;
                    shape = Some(self::shape(sizes)?);
                    after
                }
                _ => return None,
            };
            let after = after.trim_start();
            rest = match after.strip_prefix(',') {
                Some(after) => after.trim_start(),
                None if after.is_empty() => after,
                None => return None,
            };
        }
        is_c_order?;
        Some(Self {
            descr: descr?,
            shape: shape?,
        })
    }
}

/// A text in quotes, and what follows it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

/// `2, 3` or `2,`.
fn shape(sizes: &str) -> Option<Vec<usize>> {
    let sizes = sizes.trim();
    let sizes = sizes.strip_suffix(',').unwrap_or(sizes);
    if sizes.is_empty() {
        return Some(Vec::new());
    }
    let sizes: Option<Vec<_>> = sizes
        .split(',')
        .take(MAX_DIMENSIONS + 1)
        .map(|size| size.trim().parse().ok())
        .collect();
    sizes.filter(|sizes| sizes.len() <= MAX_DIMENSIONS)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn headers_are_read_as_numpy_writes_them_and_no_others() {
        let header = |descr: &str, shape: &[usize]| {
            Some(NpyHeader {
                descr: descr.to_owned(),
                shape: shape.to_vec(),
            })
        };
        for (text, expected) in [
            (
                "{'descr': '<f2', 'fortran_order': False, 'shape': (14, 1024), }  \n",
                header("<f2", &[14, 1024]),
            ),
            (
                "{\"shape\": (3,), \"fortran_order\": False, \"descr\": \"|V2\"}",
                header("|V2", &[3]),
            ),
            (
                "{'descr': '<i4', 'fortran_order': False, 'shape': ()}",
                header("<i4", &[]),
            ),
            (
                "{'descr': '<f2', 'fortran_order': True, 'shape': (2, 2)}",
                None,
            ),
            ("{'descr': '<f2', 'fortran_order': False}", None),
            (
                "{'descr': '<f2', 'fortran_order': False, 'shape': (-1, 2)}",
                None,
            ),
            (
                "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1)}",
                None,
            ),
            (
                "{'descr': '<f2', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
                None,
            ),
            (
                "{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (1,)}",
                None,
            ),
            ("{'descr': '", None),
            ("{", None),
            ("", None),
            ("é", None),
        ] {
            assert_eq!(NpyHeader::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_file_that_is_cut_short_or_lies_is_refused() {
        let path = std::env::temp_dir().join(format!("inflight-npy-{}.npy", std::process::id()));
        let header = |shape: &str| {
            let text = format!("{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}, }}\n");
            let mut bytes = [MAGIC, &[1, 0]].concat();
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
            bytes
        };
        let open = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("written");
            NpyFile::open(&path, &[("<f2", 2), ("<f4", 4)]).map_err(|error| error.to_string())
        };
        let whole = [&header("(2, 3)")[..], &[7; 12]].concat();
        let file = open(&whole).expect("a whole file");
        assert_eq!(file.header().shape, [2, 3]);
        assert_eq!(file.data().to_vec().expect("its bytes"), [7; 12]);
        for (len, words) in [
            (
                whole.len() - 1,
                "calls for 12 bytes, and after its header there are 11",
            ),
            (20, "its header would be"),
            (11, "shorter than a header"),
        ] {
            let error = open(&whole[..len]).err().expect("cut short");
            assert!(error.contains(words), "{error}");
        }
        let huge = header("(18446744073709551615, 18446744073709551615)");
        let error = open(&huge).err().expect("no such file");
        assert!(error.contains("too many bytes"), "{error}");
        let long = [MAGIC, &[2, 0], &u32::MAX.to_le_bytes()[..], &[0; 9]].concat();
        let error = open(&long).err().expect("no such header");
        assert!(error.contains("4294967295 bytes long"), "{error}");
        let error = NpyFile::open(&path, &[]).err().expect("the file of before");
        assert!(error.to_string().contains(".npy"), "{error}");
        fs::remove_file(&path).expect("removed");
    }
}
