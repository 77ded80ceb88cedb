//! A file of KV cache blocks: what an instance has computed, kept for the next load.
//!
//! ```text
//! header   "INFLKV04", made_from (what the contents depend on), tokens and bytes of a block, groups of layers; number of
//!          blocks of the first group
//! heads    of each block of the first group: id, id of the block before it, salt if it is the first, ids of the blocks of
//!          other groups, tokens
//! bodies   of each of these blocks, with those of other groups behind it: keys and values as the device lays them out
//! ```
//!
//! Each head and each body is followed by the XXH3 of its bytes. Numbers are little-endian. A file that was made from anything else, or
//! that is damaged, is not used. A new file is written under another name, readable by its owner only, and then renamed,
//! so of several writers the last one wins. Problems with the file are logged; no load fails because of them.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use twox_hash::XxHash3_64;

use super::Runner;
use crate::base::{BlockSize, HostBlockId};
use crate::engine::{Engine, EngineConfig, KeptBlock, KeptParent};

const MAGIC: &[u8; 8] = b"INFLKV04";
/// Stands for no block, and for no salt.
const NONE: u32 = u32::MAX;
/// Longer than the salt of any request.
const MAX_SALT_BYTES: u32 = 1 << 12;
/// Bytes of an XXH3.
const SUM_BYTES: usize = 8;
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

    /// An engine and a runner that have not made a step begin with what is in the file, as far as there is room. Without a
    /// file the engine begins empty.
    ///
    /// # Errors
    /// Why nothing was restored. No engine then names a block that was not read, or not as it was written.
    pub fn restore(
        &self,
        config: &EngineConfig,
        runner: &mut Runner,
    ) -> Result<Engine, Box<dyn Error>> {
        let started = Instant::now();
        let mut engine = Engine::new(config.clone());
        let mut file = match File::open(&self.path) {
            Ok(file) => BufReader::with_capacity(BUFFER_BYTES, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(engine),
            Err(error) => return Err(error.into()),
        };
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
        let num_blocks = read_u32(&mut file, &mut Vec::new())?;
        let mut kept = Vec::new();
        for index in 0..num_blocks {
            let head = read_head(&mut file, config.block_size, num_groups)?;
            // The first ones are those that others go on from.
            if index < num_host_blocks as u32 {
                kept.push(head);
            }
        }
        let places: BTreeMap<_, _> = engine.restore(&kept).into_iter().collect();
        for block in kept.iter().flat_map(blocks_of) {
            match places.get(&block) {
                Some(place) => read_body(&mut file, runner.host_block(*place)?)?,
                None => file.seek_relative(block_bytes as i64 + SUM_BYTES as i64)?,
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
    pub fn keep(&self, engine: &mut Engine, runner: &mut Runner) -> Result<(), Box<dyn Error>> {
        let started = Instant::now();
        let (moves, kept) = engine.keep();
        runner.move_blocks(&moves);
        let temporary = self.temporary();
        let written = self.write(&temporary, engine.config(), &kept, runner);
        if let Err(error) = written.and_then(|()| Ok(fs::rename(&temporary, &self.path)?)) {
            let _ = fs::remove_file(&temporary);
            return Err(error);
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

    fn write(
        &self,
        path: &Path,
        config: &EngineConfig,
        kept: &[KeptBlock],
        runner: &mut Runner,
    ) -> Result<(), Box<dyn Error>> {
        // From a process that was killed.
        let _ = fs::remove_file(path);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, options.open(path)?);
        let block_bytes = runner.host_block(HostBlockId(0))?.len();
        file.write_all(&self.header(config, block_bytes))?;
        file.write_all(&(kept.len() as u32).to_le_bytes())?;
        for block in kept {
            write_checked(&mut file, &head_of(block))?;
        }
        for block in kept.iter().flat_map(blocks_of) {
            write_checked(&mut file, runner.host_block(block)?)?;
        }
        file.flush()?;
        Ok(())
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

    /// Its name until it is complete.
    fn temporary(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{}.tmp", std::process::id()));
        name.into()
    }
}

/// The blocks of a content, those of all groups.
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

/// Writes a part of the file and its XXH3.
fn write_checked(file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.write_all(&XxHash3_64::oneshot(bytes).to_le_bytes())
}

/// Reads and checks all of a block but its keys and values.
fn read_head(
    file: &mut impl Read,
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
    check(file, &head)?;
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
fn read_body(file: &mut impl Read, bytes: &mut [u8]) -> Result<(), Box<dyn Error>> {
    file.read_exact(bytes)?;
    check(file, bytes)
}

/// Reads the XXH3 of `bytes`.
fn check(file: &mut impl Read, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut sum = [0; SUM_BYTES];
    file.read_exact(&mut sum)?;
    match u64::from_le_bytes(sum) == XxHash3_64::oneshot(bytes) {
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
    use crate::base::{Blocks, SequenceId, TokenId, Tokens};
    use crate::engine::{NewRequest, StepOutput};
    use crate::runner::{RunnerLimits, SyntheticOptions, SyntheticRunner, next_token};

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

    fn load() -> (Engine, Runner) {
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
        (Engine::new(config), Runner::Synthetic(runner))
    }

    /// Serves a request for a token. Returns it, and how many tokens of the prompt were reused.
    fn serve(engine: &mut Engine, runner: &mut Runner, prompt: &[TokenId]) -> (TokenId, u64) {
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
            Some(crate::engine::Sampled::Token(token)) => (token, num_reused),
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
    fn lengths_in_a_file_take_no_memory() {
        let temp = TempFile::new("lengths");
        let file = temp.of("a model");
        keep(&file);
        let mut bytes = fs::read(&temp.0).expect("it is there");
        let header = file.header(&EngineConfig::default(), 32 * 8).len();
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
