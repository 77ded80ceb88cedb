//! A file that holds the synthetic runner back (`synthetic_gate`).

use std::fs;
use std::path::PathBuf;

/// The number of steps that a runner may make, in a file. Without the file, there is no limit.
pub struct Gate(PathBuf);

impl Gate {
    /// A gate that lets all steps pass.
    pub fn open(test: &str) -> Self {
        let name = format!("inflight-gate-{test}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// A gate that lets no step pass.
    pub fn closed(test: &str) -> Self {
        let gate = Self::open(test);
        gate.close();
        gate
    }

    /// Lets no further step pass.
    pub fn close(&self) {
        self.allow(0);
    }

    /// Allows this many steps since the model was loaded.
    pub fn allow(&self, num_steps: u32) {
        fs::write(&self.0, num_steps.to_string()).expect("a file");
    }

    /// Lets all steps pass.
    pub fn lift(&self) {
        fs::remove_file(&self.0).expect("a closed gate");
    }

    pub fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // An open gate has no file.
        let _ = fs::remove_file(&self.0);
    }
}
