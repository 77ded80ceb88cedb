//! A file of KV cache blocks: what an instance has computed, kept for the next load.
//!
//! ```text
//! header   "INFLKV05", made_from (what the contents depend on), tokens and bytes of a block, groups of layers; a random number;
//!          number of blocks of the first group
//! heads    of each block of the first group: id, id of the block before it, salt if it is the first, ids of the blocks of
//!          other groups, tokens
//! bodies   of each of these blocks, with those of other groups behind it: keys and values as the device lays them out
//! ```
//!
//! Each head and each body is followed by its sum: a SHA-256 of the header with its random number, of the place in the
//! file, and of the bytes. So a part of another file, or of another place, is as good as a damaged one. Numbers are
//! little-endian. A file that was made from anything else, that is damaged, or that another user could have written, is
//! not used. A new file is written under a name of its own, readable by its owner only, brought to the disk, and then
//! renamed, so of several writers the last one wins. What writers that were killed have left is removed by the next.
//! Problems with the file are logged; no load fails because of them.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};

use super::Runner;
use inflight_base::{BlockSize, HostBlockId};
use inflight_engine::{Engine, EngineConfig, KeptBlock, KeptParent};

const MAGIC: &[u8; 8] = b"INFLKV05";
/// Stands for no block, and for no salt.
const NONE: u32 = u32::MAX;
/// Longer than the salt of any request.
const MAX_SALT_BYTES: u32 = 1 << 12;
/// Bytes of a sum.
const SUM_BYTES: usize = 32;
/// Bytes of the random number.
const NONCE_BYTES: usize = 16;
/// How the name of a file that is not complete ends.
const TEMPORARY: &str = ".tmp";
/// Bytes that are read and written at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// A file of KV cache blocks.
pub struct KvFile {
    path: PathBuf,
    made_from: String,
}

impl KvFile {
    /// The file at `path`, for an instance whose keys and values depend on `made_from`.
    pub fn new(path: PathBuf, made_from: String) -> Self {
        Self { path, made_from }
    }

    /// An engine and a runner that have not made a step begin with what is in the file, as far as there is room.
    /// Without a file the engine begins empty.
    ///
    /// # Errors
    /// Why nothing was restored. No engine then names a block that was not read, or not as it was written.
    pub fn restore(
        &self,
        config: &EngineConfig,
        runner: &mut dyn Runner,
    ) -> Result<Engine, Box<dyn Error>> {
        let started = Instant::now();
        let mut engine = Engine::new(config.clone());
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(engine),
            Err(error) => return Err(error.into()),
        };
        check_owner(&file)?;
        let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
        let num_host_blocks = config.num_host_blocks.index();
        if num_host_blocks == 0 {
            return Ok(engine);
        }
        let block_bytes = runner.host_block(HostBlockId(0))?.len();
        let num_groups = config.groups.num_groups();
        let header = self.header(config, block_bytes);
        let mut found_header = vec![0; header.len()];
        file.read_exact(&mut found_header)?;
        if found_header != header {
            return Err(
                "was made from another checkpoint, or with other settings or versions".into(),
            );
        }
        let mut nonce = [0; NONCE_BYTES];
        file.read_exact(&mut nonce)?;
        let mut sums = Sums::new(&header, nonce);
        let num_blocks = read_u32(&mut file, &mut Vec::new())?;
        let mut kept = Vec::new();
        for index in 0..num_blocks {
            let head = read_head(&mut file, &mut sums, config.block_size, num_groups)?;
            // The first ones are those that others go on from.
            if index < num_host_blocks as u32 {
                kept.push(head);
            }
        }
        let places: BTreeMap<_, _> = engine.restore(&kept).into_iter().collect();
        for block in kept.iter().flat_map(blocks_of) {
            match places.get(&block) {
                Some(place) => read_body(&mut file, &mut sums, runner.host_block(*place)?)?,
                None => {
                    sums.pass();
                    file.seek_relative(block_bytes as i64 + SUM_BYTES as i64)?;
                }
            }
        }
        log::info!(
            "read {} KV cache blocks from {} in {:.1} s",
            places.len(),
            self.path.display(),
            started.elapsed().as_secs_f64()
        );
        Ok(engine)
    }

    /// Writes what is cached. The engine must be idle.
    ///
    /// # Errors
    /// The device has failed, or the file cannot be written.
    pub fn keep(&self, engine: &mut Engine, runner: &mut dyn Runner) -> Result<(), Box<dyn Error>> {
        let started = Instant::now();
        let (moves, kept) = engine.keep();
        runner.move_blocks(&moves);
        self.remove_stale();
        let temporary = self.temporary();
        let written = self.write(&temporary, engine.config(), &kept, runner);
        if let Err(error) = written.and_then(|_locked| Ok(fs::rename(&temporary, &self.path)?)) {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        // The name, too. The contents are safe in any case.
        if let Ok(folder) = File::open(self.folder()) {
            let _ = folder.sync_all();
        }
        log::info!(
            "kept {} KV cache blocks in {} in {:.1} s",
            kept.iter().flat_map(blocks_of).count(),
            self.path.display(),
            started.elapsed().as_secs_f64()
        );
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file, which is locked as long as the returned one is open.
    fn write(
        &self,
        path: &Path,
        config: &EngineConfig,
        kept: &[KeptBlock],
        runner: &mut dyn Runner,
    ) -> Result<File, Box<dyn Error>> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(path)?;
        // Tells it from one that a writer has left.
        file.lock()?;
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, file);
        let block_bytes = runner.host_block(HostBlockId(0))?.len();
        let header = self.header(config, block_bytes);
        let nonce = random_bytes();
        let mut sums = Sums::new(&header, nonce);
        file.write_all(&header)?;
        file.write_all(&nonce)?;
        file.write_all(&(kept.len() as u32).to_le_bytes())?;
        for block in kept {
            write_checked(&mut file, &mut sums, &head_of(block))?;
        }
        for block in kept.iter().flat_map(blocks_of) {
            write_checked(&mut file, &mut sums, runner.host_block(block)?)?;
        }
        let file = file.into_inner()?;
        file.sync_all()?;
        Ok(file)
    }

    /// All that must be equal, up to the number of blocks.
    fn header(&self, config: &EngineConfig, block_bytes: usize) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend((self.made_from.len() as u32).to_le_bytes());
        header.extend(self.made_from.as_bytes());
        header.extend(config.block_size.tokens().0.to_le_bytes());
        header.extend((block_bytes as u64).to_le_bytes());
        header.extend((config.groups.num_groups() as u32).to_le_bytes());
        header
    }

    /// A name until it is complete, which no other writer has.
    fn temporary(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        let number = u128::from_le_bytes(random_bytes());
        name.push(format!(".{number:032x}{TEMPORARY}"));
        name.into()
    }

    /// Removes what writers that were killed have left: nobody has it locked.
    fn remove_stale(&self) {
        let Some(own_name) = self.path.file_name().and_then(OsStr::to_str) else {
            return;
        };
        let Ok(files) = fs::read_dir(self.folder()) else {
            return;
        };
        for file in files.flatten() {
            let name = file.file_name();
            let rest = name.to_str().and_then(|name| name.strip_prefix(own_name));
            let is_temporary =
                rest.is_some_and(|rest| rest.starts_with('.') && rest.ends_with(TEMPORARY));
            if !is_temporary || !file.file_type().is_ok_and(|it| it.is_file()) {
                continue;
            }
            let is_left = File::open(file.path()).is_ok_and(|it| it.try_lock().is_ok());
            if is_left && fs::remove_file(file.path()).is_ok() {
                log::info!(
                    "removed {}, which was never completed",
                    file.path().display()
                );
            }
        }
    }

    fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        }
    }
}

/// Refuses a file that another user could have written.
fn check_owner(file: &File) -> Result<(), Box<dyn Error>> {
    /// The bit of files that anybody may write.
    const WRITABLE_BY_ALL: u32 = 0o002;
    let found = file.metadata()?;
    let own = fs::metadata("/proc/self")?.uid();
    match found.uid() == own && found.mode() & WRITABLE_BY_ALL == 0 {
        true => Ok(()),
        false => Err("could have been written by another user".into()),
    }
}

fn random_bytes() -> [u8; NONCE_BYTES] {
    let numbers = [0u8, 1].map(|half| RandomState::new().hash_one(half));
    let mut bytes = [0; NONCE_BYTES];
    for (place, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
        *place = number.to_le_bytes();
    }
    bytes
}

/// The sums of a file's parts, in their order.
struct Sums {
    key: [u8; SUM_BYTES],
    num_parts: u64,
}

impl Sums {
    fn new(header: &[u8], nonce: [u8; NONCE_BYTES]) -> Self {
        let key = Sha256::new().chain_update(header).chain_update(nonce);
        Self {
            key: key.finalize().into(),
            num_parts: 0,
        }
    }

    /// The sum of the next part.
    fn next(&mut self, part: &[u8]) -> [u8; SUM_BYTES] {
        let sum = Sha256::new()
            .chain_update(self.key)
            .chain_update(self.num_parts.to_le_bytes())
            .chain_update(part);
        self.num_parts += 1;
        sum.finalize().into()
    }

    /// Leaves a part out.
    fn pass(&mut self) {
        self.num_parts += 1;
    }
}

/// The blocks of a content, in all groups.
fn blocks_of(kept: &KeptBlock) -> impl Iterator<Item = HostBlockId> {
    std::iter::once(kept.block).chain(kept.beside.iter().copied().flatten())
}

fn head_of(block: &KeptBlock) -> Vec<u8> {
    let mut head = Vec::new();
    let mut put = |number: u32| head.extend(number.to_le_bytes());
    put(block.block.0);
    match &block.parent {
        KeptParent::Block(parent) => {
            put(parent.0);
            put(NONE);
        }
        KeptParent::Salt(None) => {
            put(NONE);
            put(NONE);
        }
        KeptParent::Salt(Some(salt)) => {
            put(NONE);
            put(salt.len() as u32);
            head.extend(salt.as_bytes());
        }
    }
    for beside in &block.beside {
        let id = beside.map_or(NONE, |beside| beside.0);
        head.extend(id.to_le_bytes());
    }
    for token in &block.tokens {
        head.extend(token.to_le_bytes());
    }
    head
}

/// Writes a part of the file and its sum.
fn write_checked(file: &mut impl Write, sums: &mut Sums, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.write_all(&sums.next(bytes))
}

/// Reads and checks all of a block but its keys and values.
fn read_head(
    file: &mut impl Read,
    sums: &mut Sums,
    block_size: BlockSize,
    num_groups: usize,
) -> Result<KeptBlock, Box<dyn Error>> {
    let mut head = Vec::new();
    let id = read_u32(file, &mut head)?;
    let parent = read_u32(file, &mut head)?;
    let salt_len = read_u32(file, &mut head)?;
    let salt = match salt_len {
        NONE => None,
        len if len <= MAX_SALT_BYTES => {
            let mut salt = vec![0; len as usize];
            file.read_exact(&mut salt)?;
            head.extend(&salt);
            Some(Arc::from(String::from_utf8(salt)?))
        }
        _ => return Err("is damaged".into()),
    };
    let beside = (1..num_groups).map(|_| {
        let id = read_u32(file, &mut head)?;
        Ok((id != NONE).then_some(HostBlockId(id)))
    });
    let beside = beside.collect::<io::Result<Box<[_]>>>()?;
    let tokens = (0..block_size.tokens().0).map(|_| read_u32(file, &mut head));
    let tokens = tokens.collect::<Result<Box<[_]>, _>>()?;
    check(file, sums, &head)?;
    Ok(KeptBlock {
        block: HostBlockId(id),
        parent: match parent {
            NONE => KeptParent::Salt(salt),
            parent => KeptParent::Block(HostBlockId(parent)),
        },
        tokens,
        beside,
    })
}

/// Reads and checks the keys and values of a block.
fn read_body(
    file: &mut impl Read,
    sums: &mut Sums,
    bytes: &mut [u8],
) -> Result<(), Box<dyn Error>> {
    file.read_exact(bytes)?;
    check(file, sums, bytes)
}

/// Reads the sum of `bytes`.
fn check(file: &mut impl Read, sums: &mut Sums, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut sum = [0; SUM_BYTES];
    file.read_exact(&mut sum)?;
    match sum == sums.next(bytes) {
        true => Ok(()),
        false => Err("is damaged".into()),
    }
}

/// Reads a number, and appends its bytes to `head`.
fn read_u32(file: &mut impl Read, head: &mut Vec<u8>) -> io::Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact(&mut bytes)?;
    head.extend(bytes);
    Ok(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RunnerLimits, SyntheticOptions, SyntheticRunner, next_token};
    use inflight_base::{Blocks, SequenceId, TokenId, Tokens};
    use inflight_engine::{NewRequest, StepOutput};

    const VOCAB_SIZE: u32 = 1000;

    /// A file in a folder of its own, which is removed with it.
    struct TempFile(PathBuf);

    impl TempFile {
        fn new(name: &str) -> Self {
            let name = format!("inflight-kv-file-{name}-{}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&dir);
            fs::create_dir(&dir).expect("a new folder");
            Self(dir.join("model.kv"))
        }

        fn of(&self, made_from: &str) -> KvFile {
            KvFile::new(self.0.clone(), made_from.to_owned())
        }
    }

    impl Drop for TempFile {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.parent().expect("a folder"));
        }
    }

    fn load() -> (Engine, SyntheticRunner) {
        let config = EngineConfig {
            num_host_blocks: Blocks(32),
            ..EngineConfig::default()
        };
        let options = SyntheticOptions {
            vocab_size: VOCAB_SIZE,
            step_base_us: 0.0,
            step_per_token_us: 0.0,
        };
        let runner = SyntheticRunner::new(options, &RunnerLimits::of(&config)).expect("memory");
        (Engine::new(config), runner)
    }

    /// Serves a request for a token. Returns it, and how many tokens of the prompt were reused.
    fn serve(engine: &mut Engine, runner: &mut dyn Runner, prompt: &[TokenId]) -> (TokenId, u64) {
        let request = NewRequest::new(SequenceId(1), prompt.to_vec(), Tokens(1));
        engine.add(request).expect("fits");
        let (mut output, mut events) = (StepOutput::default(), Vec::new());
        let mut num_reused = 0;
        let mut token = None;
        while !engine.is_idle() {
            output.clear();
            let step = engine.schedule();
            num_reused = engine.stats().expect("active").reuse.num_reused_tokens;
            for plan in step.plans() {
                runner.run(plan, &mut output).expect("a step");
            }
            token = output.sampled.last().map(|(_, sampled)| *sampled).or(token);
            engine.apply(step, &mut output, &mut events);
        }
        match token {
            Some(inflight_engine::Sampled::Token(token)) => (token, num_reused),
            other => panic!("{other:?}"),
        }
    }

    fn prompt() -> Vec<TokenId> {
        (0..200).collect()
    }

    /// Keeps the prompt's blocks in the file.
    fn keep(file: &KvFile) {
        let (mut engine, mut runner) = load();
        serve(&mut engine, &mut runner, &prompt());
        file.keep(&mut engine, &mut runner).expect("it is written");
    }

    fn assert_refused(file: &KvFile, reason: &str) {
        let (engine, mut runner) = load();
        match file.restore(engine.config(), &mut runner) {
            Ok(_) => panic!("it is restored: {reason}"),
            Err(error) => assert!(error.to_string().contains(reason), "{error}"),
        }
    }

    #[test]
    fn the_next_load_finds_what_was_kept() {
        let temp = TempFile::new("found");
        let file = temp.of("a model");
        let (engine, mut runner) = load();
        let empty = file.restore(engine.config(), &mut runner);
        assert!(empty.expect("no file is no error").is_idle());
        keep(&file);
        keep(&file);
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &fs::metadata(&temp.0).expect("it is there").permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
        let restored = file.restore(engine.config(), &mut runner);
        let mut engine = restored.expect("our own file");
        let (token, num_reused) = serve(&mut engine, &mut runner, &prompt());
        // The chain of hashes goes through the blocks that were read.
        assert_eq!(token, next_token(&prompt(), VOCAB_SIZE));
        assert_eq!(num_reused, 192, "six blocks of 32");
        let files = fs::read_dir(temp.0.parent().expect("a folder")).expect("it is there");
        assert_eq!(files.count(), 1, "nothing is left behind");
    }

    #[test]
    fn as_many_blocks_are_read_as_there_is_room_for() {
        let temp = TempFile::new("room");
        let file = temp.of("a model");
        keep(&file);
        let (engine, mut runner) = load();
        let config = EngineConfig {
            num_host_blocks: Blocks(2),
            ..engine.config().clone()
        };
        let mut engine = file.restore(&config, &mut runner).expect("our own file");
        let (token, num_reused) = serve(&mut engine, &mut runner, &prompt());
        assert_eq!(token, next_token(&prompt(), VOCAB_SIZE));
        assert_eq!(num_reused, 64, "two blocks of 32");
    }

    #[test]
    fn a_file_of_another_model_or_a_damaged_one_is_refused() {
        let temp = TempFile::new("refused");
        keep(&temp.of("a model"));
        assert_refused(&temp.of("another"), "made from another");
        assert_refused(
            &temp.of("a model of a much longer name"),
            "made from another",
        );
        let whole = fs::read(&temp.0).expect("it is there");
        for at in [60, 200, whole.len() - 20] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&temp.0, damaged).expect("writable");
            assert_refused(&temp.of("a model"), "damaged");
        }
        for len in [0, 4, 30, whole.len() / 2, whole.len() - 1] {
            fs::write(&temp.0, &whole[..len]).expect("writable");
            assert_refused(&temp.of("a model"), "fill whole buffer");
        }
    }

    #[test]
    fn parts_of_another_place_or_another_file_are_refused() {
        let temp = TempFile::new("forged");
        let file = temp.of("a model");
        keep(&file);
        let whole = fs::read(&temp.0).expect("it is there");
        // The last two bodies of six, each with a sum that is right in its own place.
        let body = 32 * 8 + SUM_BYTES;
        let (rest, bodies) = whole.split_at(whole.len() - 2 * body);
        let exchanged = [rest, &bodies[body..], &bodies[..body]].concat();
        assert_ne!(exchanged, whole);
        fs::write(&temp.0, exchanged).expect("writable");
        assert_refused(&file, "damaged");
        // Of the same contents, written another time.
        fs::remove_file(&temp.0).expect("it is there");
        keep(&file);
        let again = fs::read(&temp.0).expect("it is there");
        assert_eq!(again.len(), whole.len());
        let half = whole.len() / 2;
        fs::write(&temp.0, [&again[..half], &whole[half..]].concat()).expect("writable");
        assert_refused(&file, "damaged");
    }

    #[test]
    fn a_file_that_anybody_could_have_written_is_refused() {
        let temp = TempFile::new("open");
        let file = temp.of("a model");
        keep(&file);
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o602);
        fs::set_permissions(&temp.0, open).expect("our own");
        assert_refused(&file, "another user");
    }

    #[test]
    fn what_a_killed_writer_has_left_is_removed_and_what_a_live_one_writes_is_not() {
        let temp = TempFile::new("stale");
        let file = temp.of("a model");
        let (left, live) = (file.temporary(), file.temporary());
        assert_ne!(left, live);
        fs::write(&left, "half").expect("writable");
        let locked = File::create(&live).expect("writable");
        locked.lock().expect("nobody has it");
        let other = temp.0.with_extension("tmp");
        fs::write(&other, "of something else").expect("writable");
        keep(&file);
        assert!(!left.exists() && live.exists() && other.exists());
    }

    #[test]
    fn lengths_in_a_file_take_no_memory() {
        let temp = TempFile::new("lengths");
        let file = temp.of("a model");
        keep(&file);
        let mut bytes = fs::read(&temp.0).expect("it is there");
        let header = file.header(&EngineConfig::default(), 32 * 8).len() + NONCE_BYTES;
        // More blocks than there are: the first one's keys and values are taken for another one's tokens.
        bytes[header..header + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        fs::write(&temp.0, &bytes).expect("writable");
        assert_refused(&file, "damaged");
        // A salt of gigabytes.
        bytes[header + 12..header + 16].copy_from_slice(&(u32::MAX - 1).to_le_bytes());
        fs::write(&temp.0, &bytes).expect("writable");
        assert_refused(&file, "damaged");
    }
}
