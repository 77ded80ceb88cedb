//! Weights that were rounded at load, kept in a file for the next load.
//!
//! It is a safetensors file:
//!
//! ```text
//! NAME.codes    U8    in the layout of the device. NAME: the tensors that are packed together, joined by + if they
//!                     are concatenated and by | if they are interleaved
//! NAME.scales   U8    likewise
//! metadata            made_from: version, layout and precision, and name, size and modification time of each file of
//!                     the checkpoint
//!                     for each tensor, its checksum
//! ```
//!
//! A file that was made from anything else, or that is damaged, is not used: the weights are rounded, and the file is
//! replaced. A new file is written under another name and then renamed, so no reader sees half of it, and of several
//! writers the last one wins. Problems with the file are logged; no load fails because of them.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use safetensors::tensor::{Dtype, View, serialize_to_file};
use twox_hash::XxHash3_64;

use super::precision::WeightPrecision;
use inflight_base::LoadError;
use inflight_checkpoint::{FileStamp, SafetensorsFile, TensorLocation};
use inflight_device::{Load, PACKED_PIECE_BYTES, PackedPart, PackedReader, PackedShape};
use inflight_threads::Pool;

const MADE_FROM: &str = "made_from";
const PARTS: [(PackedPart, &str); 2] =
    [(PackedPart::Codes, "codes"), (PackedPart::Scales, "scales")];

/// The cache during one load.
pub(super) struct WeightCache {
    path: PathBuf,
    /// What the weights in the file must have been made from.
    made_from: String,
    /// The mode of a new file.
    mode: u32,
    /// `None` if there is no usable file.
    file: Option<SafetensorsFile>,
    num_read: usize,
    num_rounded: usize,
}

impl WeightCache {
    /// The cache in the file `path`, or beside it if the device has [files of its own](Load::PACKED_FILE_KIND), for a
    /// checkpoint with these files whose weights are rounded to `precision`. `None` if the device keeps no packed
    /// weights.
    pub(super) fn open<'a, D: Load>(
        path: &Path,
        mode: u32,
        precision: Option<WeightPrecision>,
        checkpoint: impl Iterator<Item = &'a FileStamp>,
        device: &D,
    ) -> Option<Self> {
        let Some(layout) = device.packed_layout() else {
            log::info!("weight_cache_dir is not used on this device");
            return None;
        };
        let path = match D::PACKED_FILE_KIND {
            Some(kind) => &path.with_extension(format!("{kind}.weights")),
            None => path,
        };
        let version = env!("CARGO_PKG_VERSION");
        let mut made_from = format!("inflight {version}, {layout}, {precision:?}");
        for stamp in checkpoint {
            made_from = format!("{made_from}\n{stamp}");
        }
        Some(Self::made_from(path, made_from, mode))
    }

    fn made_from(path: &Path, made_from: String, mode: u32) -> Self {
        Self {
            file: open_file(path, &made_from),
            path: path.to_owned(),
            made_from,
            mode,
            num_read: 0,
            num_rounded: 0,
        }
    }

    /// Reads the matrix of this name; `None` if it has to be rounded.
    ///
    /// # Errors
    /// Memory is short.
    pub(super) fn read<D: Load>(
        &mut self,
        device: &mut D,
        name: &str,
        shape: PackedShape<'_>,
    ) -> Result<Option<D::Matrix>, LoadError> {
        let found = self
            .file
            .as_ref()
            .map(|file| read(device, file, &self.path, name, shape));
        match found {
            Some(Ok(matrix)) => {
                self.num_read += 1;
                return Ok(Some(matrix));
            }
            Some(Err(error @ LoadError::Resource(_))) => return Err(error),
            Some(Err(error)) => {
                log::warn!("{error}; the weights are rounded, and the file is replaced");
                self.file = None;
            }
            None => {}
        }
        self.num_rounded += 1;
        Ok(None)
    }

    /// Writes all matrices for the next load, unless all of them were read.
    pub(super) fn keep<D: Load>(&mut self, device: &mut D, matrices: &[(String, &D::Matrix)]) {
        let path = self.path.display();
        if self.num_rounded == 0 {
            if self.num_read > 0 {
                log::info!("read {} rounded matrices from {path}", self.num_read);
            }
            return;
        }
        let started = Instant::now();
        match self.write(device, matrices) {
            Ok(()) => log::info!(
                "kept {} rounded matrices in {path} for the next load, in {:.1} s",
                matrices.len(),
                started.elapsed().as_secs_f64()
            ),
            Err(error) => {
                log::warn!(
                    "{path}: cannot be written, so the next load rounds the weights again: {error}"
                );
            }
        }
    }

    fn write<D: Load>(
        &self,
        device: &mut D,
        matrices: &[(String, &D::Matrix)],
    ) -> Result<(), Box<dyn Error>> {
        let mut metadata = HashMap::from([(MADE_FROM.to_owned(), self.made_from.clone())]);
        let mut views = Vec::new();
        let source = PartSource::new(device);
        for (name, matrix) in matrices {
            let len = D::packed_len(matrix).ok_or("a matrix that was not rounded")?;
            for ((part, suffix), len) in PARTS.into_iter().zip(len) {
                let name = format!("{name}.{suffix}");
                metadata.insert(name.clone(), source.checksum(matrix, part)?);
                let view = PartView {
                    source: &source,
                    matrix,
                    part,
                    shape: [len],
                };
                views.push((name, view));
            }
        }
        if let Some(folder) = self.path.parent() {
            let may_enter = (self.mode & 0o444) >> 2;
            let mut folders = DirBuilder::new();
            folders.recursive(true).mode(0o700 | self.mode | may_enter);
            folders.create(folder)?;
        }
        // Until it is complete, the file has another name and is readable by its owner only.
        serialize_to_file(views, Some(metadata), &self.path)?;
        if let Some(error) = source.failure.take() {
            fs::remove_file(&self.path)?;
            return Err(error.into());
        }
        fs::set_permissions(&self.path, Permissions::from_mode(self.mode))?;
        Ok(())
    }
}

/// What reads parts of packed matrices while the file is written. They may lie on a GPU: the host has memory for one at
/// a time.
struct PartSource<'d, D> {
    device: RefCell<&'d mut D>,
    /// The first error of a read.
    failure: RefCell<Option<LoadError>>,
}

impl<'d, D: Load> PartSource<'d, D> {
    fn new(device: &'d mut D) -> Self {
        Self {
            device: RefCell::new(device),
            failure: RefCell::new(None),
        }
    }

    fn checksum(&self, matrix: &D::Matrix, part: PackedPart) -> Result<String, LoadError> {
        let mut device = self.device.borrow_mut();
        let bytes = device.packed_part(matrix, part)?;
        Ok(PieceSums::of(device.host_threads(), &bytes).checksum())
    }
}

/// A part of a matrix on its way to the file.
struct PartView<'s, 'd, 'm, D: Load> {
    source: &'s PartSource<'d, D>,
    matrix: &'m D::Matrix,
    part: PackedPart,
    shape: [usize; 1],
}

impl<D: Load> View for PartView<'_, '_, '_, D> {
    fn dtype(&self) -> Dtype {
        Dtype::U8
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let read = self
            .source
            .device
            .borrow_mut()
            .packed_part(self.matrix, self.part);
        read.unwrap_or_else(|error| {
            self.source.failure.borrow_mut().get_or_insert(error);
            Cow::Owned(vec![0; self.data_len()])
        })
    }

    fn data_len(&self) -> usize {
        self.shape[0]
    }
}

/// Opens the file at `path`, if there is one that was made from `made_from`.
fn open_file(path: &Path, made_from: &str) -> Option<SafetensorsFile> {
    if !path.try_exists().is_ok_and(|exists| exists) {
        return None;
    }
    match SafetensorsFile::open(path, "the weights are rounded, and the file is replaced") {
        Ok(file) if file.metadata(MADE_FROM) == Some(made_from) => Some(file),
        Ok(_) => {
            log::info!(
                "{}: was made from another checkpoint, or with another precision or version; the weights are \
                 rounded, and the file is replaced",
                path.display()
            );
            None
        }
        Err(error) => {
            log::warn!("{error}");
            None
        }
    }
}

/// Reads the matrix of this name, and checks that it is what was written.
fn read<D: Load>(
    device: &mut D,
    file: &SafetensorsFile,
    path: &Path,
    name: &str,
    shape: PackedShape<'_>,
) -> Result<D::Matrix, LoadError> {
    let names = PARTS.map(|(_, part)| format!("{name}.{part}"));
    let [codes, scales] = [file.tensor(&names[0])?, file.tensor(&names[1])?];
    let [codes, scales] = [codes.bytes, scales.bytes];
    // Each piece is hashed right after it is read, while the processor's cache still holds it.
    let sums = [codes, scales].map(|bytes| PieceSums::new(bytes.len()));
    let found = device.read_packed(
        shape,
        PackedReader {
            num_bytes: codes.len(),
            read: &|start, out| {
                codes.read_at(start, out);
                sums[0].add(start, out);
            },
        },
        PackedReader {
            num_bytes: scales.len(),
            read: &|start, out| {
                scales.read_at(start, out);
                sums[1].add(start, out);
            },
        },
    )?;
    file.check()?;
    let place = TensorLocation { path, name };
    let other = || place.error(format!("is not of these weights: {shape:?}"));
    let matrix = found.ok_or_else(other)?;
    for (name, sums) in names.iter().zip(&sums) {
        if file.metadata(name) != Some(&sums.checksum()) {
            return Err(TensorLocation { path, name }.error("is damaged".to_owned()));
        }
    }
    Ok(matrix)
}

/// The XXH3 of each piece of a tensor. Pieces may come in any order and from any thread.
struct PieceSums(Vec<AtomicU64>);

impl PieceSums {
    /// For a tensor of `num_bytes`, of which no piece has come.
    fn new(num_bytes: usize) -> Self {
        let num_pieces = num_bytes.div_ceil(PACKED_PIECE_BYTES);
        Self((0..num_pieces).map(|_| AtomicU64::new(0)).collect())
    }

    /// The sums of a tensor in memory, computed on all threads.
    fn of(threads: &mut Pool, bytes: &[u8]) -> Self {
        let mut sums = Self::new(bytes.len());
        let mut states = vec![(); threads.num_threads()];
        threads.for_each_row(&mut states, &mut sums.0, 1, |(), index, sum| {
            let piece = &bytes[index * PACKED_PIECE_BYTES..];
            let piece = &piece[..PACKED_PIECE_BYTES.min(piece.len())];
            *sum[0].get_mut() = XxHash3_64::oneshot(piece);
        });
        sums
    }

    /// Adds the piece that begins at `start`.
    fn add(&self, start: usize, piece: &[u8]) {
        let sum = XxHash3_64::oneshot(piece);
        self.0[start / PACKED_PIECE_BYTES].store(sum, Ordering::Relaxed);
    }

    /// The XXH3 of the sums of all pieces, in order.
    fn checksum(&self) -> String {
        let sums = self.0.iter().map(|sum| sum.load(Ordering::Relaxed));
        let bytes: Vec<u8> = sums.flat_map(u64::to_le_bytes).collect();
        format!("{:016x}", XxHash3_64::oneshot(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_device_cpu::{Cpu, CpuOptions, PackedMatrix, Rounded};
    use inflight_numbers::{CodeBits, QuantFormat, Stacking};

    const NAMES: [&str; 2] = ["first", "second"];
    const SHAPE: PackedShape<'_> = PackedShape {
        num_rows: &[70],
        columns: 300,
        stacking: Stacking::Concatenated,
        format: WeightPrecision::new(CodeBits::Four).format(),
    };

    /// A file in a folder of its own, which is removed with it.
    struct TempFile(PathBuf);

    impl TempFile {
        fn new(name: &str) -> Self {
            let name = format!("inflight-weight-cache-{name}-{}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&dir);
            Self(dir.join("model-1.weights"))
        }
    }

    impl Drop for TempFile {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.parent().expect("a folder"));
        }
    }

    fn cpu() -> Cpu {
        Cpu::new(&CpuOptions::default()).expect("threads")
    }

    /// Loads both matrices as from numbers that depend on `seed`: what they are, and how many were read.
    fn load(file: &TempFile, made_from: &str, seed: usize) -> (Vec<PackedMatrix>, usize) {
        let mut cpu = cpu();
        let mut cache = WeightCache::made_from(&file.0, made_from.to_owned(), 0o600);
        let matrices = NAMES.map(|name| {
            let found = cache.read(&mut cpu, name, SHAPE).expect("memory");
            found.unwrap_or_else(|| {
                let read = |row: usize, out: &mut [f32]| {
                    for (column, out) in out.iter_mut().enumerate() {
                        *out = ((row * 31 + column * 17 + seed) % 101) as f32 - 50.0;
                    }
                };
                let QuantFormat {
                    bits, group_size, ..
                } = SHAPE.format;
                let rounded = Rounded::new(cpu.simd(), 70, 300, bits, group_size, &read);
                let packed = cpu.pack_quantised(&[&rounded], SHAPE.stacking);
                let packed = packed.expect("memory");
                packed.expect("finite numbers")
            })
        });
        let named: Vec<_> = NAMES
            .map(str::to_owned)
            .into_iter()
            .zip(&matrices)
            .collect();
        cache.keep(&mut cpu, &named);
        (matrices.into(), cache.num_read)
    }

    fn same(a: &[PackedMatrix], b: &[PackedMatrix]) -> bool {
        let bytes = |matrix: &PackedMatrix| {
            let bytes = matrix.panel_bytes().expect("rounded");
            (bytes.codes.to_vec(), bytes.scales.to_vec())
        };
        a.iter().map(bytes).eq(b.iter().map(bytes))
    }

    #[test]
    fn what_is_kept_is_read_by_those_who_ask_for_the_same() {
        let file = TempFile::new("same");
        let (kept, num_read) = load(&file, "a", 0);
        assert_eq!(num_read, 0);
        let (read, num_read) = load(&file, "a", 1);
        assert_eq!(num_read, 2);
        assert!(same(&kept, &read));
        // And not by others, who replace it.
        let (others, num_read) = load(&file, "b", 1);
        assert_eq!(num_read, 0);
        assert!(!same(&kept, &others));
        assert_eq!(load(&file, "b", 2).1, 2);
        assert_eq!(load(&file, "a", 0).1, 0);
    }

    #[test]
    fn of_another_size_or_name_there_is_nothing() {
        let file = TempFile::new("size");
        let mut cpu = cpu();
        load(&file, "a", 0);
        let (higher, wider) = (&[97][..], 350);
        for (name, num_rows, columns) in [
            ("first", higher, 300),
            ("first", SHAPE.num_rows, wider),
            ("third", SHAPE.num_rows, 300),
        ] {
            let shape = PackedShape {
                num_rows,
                columns,
                ..SHAPE
            };
            let mut cache = WeightCache::made_from(&file.0, "a".to_owned(), 0o600);
            let found = cache.read(&mut cpu, name, shape).expect("memory");
            assert!(found.is_none(), "{name}, {shape:?}");
            assert_eq!((cache.num_read, cache.num_rounded), (0, 1));
        }
    }

    #[test]
    fn every_damaged_byte_is_found_and_the_file_is_replaced() {
        let file = TempFile::new("damaged");
        let (kept, _) = load(&file, "a", 0);
        let whole = fs::read(&file.0).expect("the file");
        let header_len = u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
        let data_start = 8 + header_len;
        let data = (data_start..whole.len()).step_by(331);
        for at in data.chain([0, 7, 8, 20, whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&file.0, damaged).expect("written");
            let (read, num_read) = load(&file, "a", 0);
            assert!(num_read < 2 && same(&kept, &read), "byte {at}");
            assert_eq!(load(&file, "a", 1).1, 2);
        }
        for len in [0, 1, 8, data_start, whole.len() / 2, whole.len() - 1] {
            fs::write(&file.0, &whole[..len]).expect("written");
            let (read, num_read) = load(&file, "a", 0);
            assert!(num_read == 0 && same(&kept, &read), "{len} bytes");
            assert_eq!(load(&file, "a", 1).1, 2);
        }
        let num_files = fs::read_dir(file.0.parent().expect("a folder"))
            .expect("a folder")
            .count();
        assert_eq!(num_files, 1);
    }

    #[test]
    fn a_file_that_is_cut_short_while_it_is_read_is_replaced() {
        let file = TempFile::new("cut-short");
        load(&file, "a", 0);
        let whole = fs::read(&file.0).expect("the file");
        for len in [0, whole.len() / 2, whole.len() - 1] {
            fs::write(&file.0, &whole).expect("written");
            let mut cpu = cpu();
            let mut cache = WeightCache::made_from(&file.0, "a".to_owned(), 0o600);
            let opened = fs::File::options().write(true).open(&file.0);
            opened.expect("the file").set_len(len as u64).expect("cut");
            for name in NAMES {
                let found = cache.read(&mut cpu, name, SHAPE).expect("memory");
                assert!(found.is_none(), "{name}, {len} bytes");
            }
            assert_eq!((cache.num_read, cache.num_rounded), (0, 2));
            assert_eq!(load(&file, "a", 0).1, 0);
            assert_eq!(load(&file, "a", 1).1, 2);
        }
    }

    #[test]
    fn a_tensor_that_is_read_in_pieces_has_the_checksum_of_the_whole() {
        let num_bytes = 2 * PACKED_PIECE_BYTES + 77;
        let mut bytes: Vec<_> = (0..num_bytes).map(|index| (index % 251) as u8).collect();
        let in_pieces = |bytes: &[u8]| {
            let sums = PieceSums::new(bytes.len());
            let pieces = bytes.chunks(PACKED_PIECE_BYTES).enumerate();
            for (index, piece) in pieces.collect::<Vec<_>>().into_iter().rev() {
                sums.add(index * PACKED_PIECE_BYTES, piece);
            }
            sums.checksum()
        };
        let whole = PieceSums::of(cpu().host_threads(), &bytes).checksum();
        assert_eq!(in_pieces(&bytes), whole);
        for at in [0, PACKED_PIECE_BYTES, num_bytes - 1] {
            bytes[at] ^= 1;
            assert_ne!(in_pieces(&bytes), whole, "byte {at}");
            bytes[at] ^= 1;
        }
        let first_swapped = [&bytes[PACKED_PIECE_BYTES..][..PACKED_PIECE_BYTES], &bytes].concat();
        assert_ne!(in_pieces(&first_swapped[..num_bytes]), whole);
    }
}
