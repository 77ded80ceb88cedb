//! A statistics file that grows, read from its end, and its steps as events.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::str::FromStr;

use inflight_step_records::{Record, Stage, read};
use serde::Serialize;

use crate::sse;

/// The most bytes that are read at a time. What is further behind is left out.
const MAX_BYTES: u64 = 1 << 20;
/// The requests of a step that are sent one by one, the oldest ones; the others are counted.
const MAX_REQUESTS: usize = 64;

/// A statistics file, and the name that its steps are shown under: `NAME=PATH`, or a path alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name of the model.
    pub name: String,
    /// Its `stats_file`.
    pub path: PathBuf,
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) => (name, PathBuf::from(path)),
            None => ("", PathBuf::from(text)),
        };
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let name = match (name, stem) {
            ("", Some(stem)) => stem.to_owned(),
            ("", None) => return Err("the path names no file".to_owned()),
            (name, _) => name.to_owned(),
        };
        Ok(Self { name, path })
    }
}

/// A statistics file, and how far it has been read.
pub struct StepFile {
    source: Source,
    place: Option<Place>,
    /// The beginning of a line whose end is not written yet.
    rest: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Place {
    /// The file's inode: a new one means that another file has the name now. 0 if there was none.
    inode: u64,
    offset: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    model: &'a str,
    steps: Vec<Step>,
}

/// A step, with times in milliseconds since the model's instance was loaded.
#[derive(Serialize)]
struct Step {
    step: u64,
    start: f64,
    /// How long the model call took.
    took: f64,
    used_blocks: u32,
    max_blocks: u32,
    /// Of slots of recurrent states, of snapshots, and of snapshots in host memory: those in use, and all.
    states: [[u32; 2]; 3],
    /// Requests by stage: context, generation, paused, waiting.
    counts: [u32; Stage::ALL.len()],
    /// Tokens by stage.
    tokens: [u64; Stage::ALL.len()],
    /// Id, stage, and number of tokens.
    requests: Vec<(u64, &'static str, u32)>,
}

impl StepFile {
    /// A file that is read from what its end is at the first reading.
    pub fn of(source: Source) -> Self {
        Self {
            source,
            place: None,
            rest: Vec::new(),
        }
    }

    /// Goes on at the end that the file will have at the next reading.
    pub fn forget(&mut self) {
        self.place = None;
    }

    /// An event with the steps that have been written since the last reading, if there are any.
    pub fn new_steps(&mut self) -> Option<Vec<u8>> {
        self.read()?;
        let end = self.rest.iter().rposition(|&byte| byte == b'\n')? + 1;
        let steps: Vec<_> = self.rest[..end]
            .split(|&byte| byte == b'\n')
            // A line of which only the end was read is no record.
            .filter_map(|line| read(line).ok()?.pop())
            .map(Step::of)
            .collect();
        self.rest.drain(..end);
        if steps.is_empty() {
            return None;
        }
        let mut out = Vec::new();
        let model = &self.source.name;
        sse::event(&Event { model, steps }, &mut out);
        Some(out)
    }

    /// Appends what has been written to the rest. `None` if the file cannot be read: it may come, or come back.
    fn read(&mut self) -> Option<()> {
        let path = &self.source.path;
        let found = path.metadata().ok().filter(|found| found.is_file());
        let Some(found) = found else {
            self.place = Some(Place {
                inode: 0,
                offset: 0,
            });
            return None;
        };
        let (inode, end) = (found.ino(), found.len());
        let mut offset = match self.place {
            Some(place) if place.inode == inode && place.offset <= end => place.offset,
            // Another file, or one that was emptied.
            Some(_) => 0,
            None => end,
        };
        if offset == 0 || self.place.is_none() {
            self.rest.clear();
        }
        if end - offset > MAX_BYTES {
            offset = end - MAX_BYTES;
            self.rest.clear();
        }
        let mut file = File::open(path).ok()?;
        file.seek(SeekFrom::Start(offset)).ok()?;
        let num_read = file.take(end - offset).read_to_end(&mut self.rest).ok()?;
        if self.rest.len() as u64 > 2 * MAX_BYTES {
            self.rest.clear();
        }
        let offset = offset + num_read as u64;
        self.place = Some(Place { inode, offset });
        Some(())
    }
}

impl Step {
    fn of(record: Record) -> Self {
        let mut counts = [0; Stage::ALL.len()];
        let mut tokens = [0; Stage::ALL.len()];
        for share in &record.requests {
            counts[share.stage as usize] += 1;
            tokens[share.stage as usize] += u64::from(share.tokens);
        }
        let shares = record.requests.iter().take(MAX_REQUESTS);
        Self {
            step: record.counter,
            start: record.start_us / 1e3,
            took: record.model_us / 1e3,
            used_blocks: record.used_blocks,
            max_blocks: record.max_blocks,
            states: [
                [record.used_state_slots, record.max_state_slots],
                [record.used_snapshots, record.max_snapshots],
                [record.used_host_snapshots, record.max_host_snapshots],
            ],
            counts,
            tokens,
            requests: shares
                .map(|share| (share.id, share.stage.name(), share.tokens))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_file_is_named_by_itself_or_by_its_stem() {
        let source = |name: &str, path: &str| Source {
            name: name.to_owned(),
            path: PathBuf::from(path),
        };
        for (text, expected) in [
            (
                "/tmp/stories.jsonl",
                Ok(source("stories", "/tmp/stories.jsonl")),
            ),
            ("bear=/tmp/a.jsonl", Ok(source("bear", "/tmp/a.jsonl"))),
            ("/", Err("the path names no file".to_owned())),
        ] {
            assert_eq!(text.parse(), expected);
        }
    }

    fn line(step: u64, requests: &Value) -> String {
        let record = json!({
            "Iteration Counter": step, "Max KV cache blocks": 9, "Used KV cache blocks": 3,
            "Step Start (us)": 5000.0, "Model Duration (us)": 250.0, "Requests": requests,
        });
        format!("{record}\n")
    }

    fn one(step: u64) -> String {
        line(step, &json!([{"id": 7, "stage": "context", "tokens": 5}]))
    }

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .expect("a file");
        file.write_all(text.as_bytes()).expect("room");
    }

    fn steps(event: Option<Vec<u8>>) -> Vec<u64> {
        let event = event.unwrap_or_else(|| b"data: {\"steps\":[]}\n\n".to_vec());
        let text = String::from_utf8(event).expect("text");
        let json = text
            .strip_prefix("data: ")
            .and_then(|text| text.strip_suffix("\n\n"));
        let json: Value = serde_json::from_str(json.expect("an event")).expect("JSON");
        let steps = json["steps"].as_array().expect("steps");
        steps
            .iter()
            .map(|step| step["step"].as_u64().expect("a number"))
            .collect()
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> (Self, PathBuf, StepFile) {
            let name = format!("inflight-step-file-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).expect("a folder");
            let path = folder.join("stats.jsonl");
            let file = StepFile::of(path.to_str().expect("plain").parse().expect("a path"));
            (Self(folder), path, file)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_what_is_appended_is_read_and_only_whole_lines() {
        let (_folder, path, mut file) = Folder::new("appended");
        append(&path, &one(1));
        assert!(steps(file.new_steps()).is_empty());
        let third = one(3);
        append(&path, &(one(2) + &third[..20]));
        assert_eq!(steps(file.new_steps()), [2]);
        append(&path, &(third[20..].to_owned() + "{}\n" + &one(4)));
        assert_eq!(steps(file.new_steps()), [3, 4]);
        assert!(steps(file.new_steps()).is_empty());
        append(&path, &one(5));
        file.forget();
        assert!(steps(file.new_steps()).is_empty());
        append(&path, &one(6));
        assert_eq!(steps(file.new_steps()), [6]);
    }

    #[test]
    fn a_file_that_is_new_emptied_or_replaced_is_read_from_its_beginning() {
        let (_folder, path, mut file) = Folder::new("replaced");
        assert!(steps(file.new_steps()).is_empty());
        append(&path, &(one(1) + &one(2)));
        assert_eq!(steps(file.new_steps()), [1, 2]);
        fs::write(&path, one(3)).expect("room");
        assert_eq!(steps(file.new_steps()), [3]);
        let other = path.with_extension("other");
        append(&other, &(one(4) + &one(5)));
        fs::rename(&other, &path).expect("the same folder");
        assert_eq!(steps(file.new_steps()), [4, 5]);
    }

    #[test]
    fn what_is_far_behind_is_left_out() {
        let (_folder, path, mut file) = Folder::new("behind");
        assert!(steps(file.new_steps()).is_empty());
        let line = one(1);
        let lines = line.repeat(2 * MAX_BYTES as usize / line.len());
        append(&path, &lines);
        let num_read = steps(file.new_steps()).len();
        assert!(num_read > 100 && num_read <= MAX_BYTES as usize / line.len());
        append(&path, &"a".repeat(3 * MAX_BYTES as usize));
        for _ in 0..5 {
            append(&path, &"a".repeat(MAX_BYTES as usize));
            assert!(steps(file.new_steps()).is_empty());
            assert!(file.rest.len() as u64 <= 2 * MAX_BYTES);
        }
    }

    #[test]
    fn a_step_names_the_oldest_requests_and_counts_all() {
        let (_folder, path, mut file) = Folder::new("counts");
        assert!(steps(file.new_steps()).is_empty());
        let stages = ["context", "generation", "waiting"];
        let requests: Vec<_> = (0..300)
            .map(|id| json!({"id": id, "stage": stages[id % 3], "tokens": id % 3 % 2}))
            .collect();
        append(&path, &line(4, &json!(requests)));
        let text = String::from_utf8(file.new_steps().expect("a step")).expect("text");
        let json: Value = serde_json::from_str(&text["data: ".len()..]).expect("JSON");
        let step = &json["steps"][0];
        assert_eq!(json["model"], "stats");
        assert_eq!(step["counts"], json!([100, 100, 0, 100]));
        assert_eq!(step["tokens"], json!([0, 100, 0, 0]));
        assert_eq!(
            step["requests"].as_array().map(Vec::len),
            Some(MAX_REQUESTS)
        );
        assert_eq!(step["requests"][1], json!([1, "generation", 1]));
        assert_eq!([&step["start"], &step["took"]], [&json!(5.0), &json!(0.25)]);
    }

    #[test]
    fn a_step_has_the_slots_and_snapshots_of_recurrent_states() {
        let (_folder, path, mut file) = Folder::new("states");
        assert!(steps(file.new_steps()).is_empty());
        let mut record: Value = serde_json::from_str(&one(1)).expect("JSON");
        for (name, value) in [
            ("Max state slots", 8),
            ("Used state slots", 2),
            ("Max state snapshots", 16),
            ("Used state snapshots", 5),
            ("Max host state snapshots", 4),
            ("Used host state snapshots", 1),
        ] {
            record[name] = json!(value);
        }
        append(&path, &format!("{record}\n"));
        let text = String::from_utf8(file.new_steps().expect("a step")).expect("text");
        let json: Value = serde_json::from_str(&text["data: ".len()..]).expect("JSON");
        assert_eq!(json["steps"][0]["states"], json!([[2, 8], [5, 16], [1, 4]]));
    }
}
