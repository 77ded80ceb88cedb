//! A file by which a test controls how many steps a runner makes.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

/// How often the file is read while a run waits.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A file that holds the number of runs allowed. Without the file, there is no limit.
#[derive(Debug)]
pub struct Gate {
    file: PathBuf,
    num_passed: u64,
}

impl Gate {
    /// A gate that no run has passed.
    pub fn new(file: PathBuf) -> Self {
        Self {
            file,
            num_passed: 0,
        }
    }

    /// Waits until one more run is allowed.
    pub fn pass(&mut self) {
        while !self.allows(self.num_passed + 1) {
            thread::sleep(POLL_INTERVAL);
        }
        self.num_passed += 1;
    }

    fn allows(&self, num_runs: u64) -> bool {
        match fs::read_to_string(&self.file) {
            // A file that is being written may not hold a number yet.
            Ok(text) => text
                .trim()
                .parse::<u64>()
                .is_ok_and(|allowed| num_runs <= allowed),
            Err(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_allows_as_many_runs_as_its_file_says_and_all_without_it() {
        let file = std::env::temp_dir().join(format!("inflight-gate-{}", std::process::id()));
        let mut gate = Gate::new(file.clone());
        fs::write(&file, "2\n").expect("a file");
        gate.pass();
        gate.pass();
        assert!(!gate.allows(3));
        fs::write(&file, "3").expect("a file");
        gate.pass();
        fs::write(&file, "").expect("a file");
        assert!(!gate.allows(1));
        fs::remove_file(&file).expect("the file is there");
        gate.pass();
    }
}
