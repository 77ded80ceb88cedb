//! When an instance that has failed is loaded anew.
//!
//! ```text
//! a rank's process ends   after 1, 2, 4, 8 and 16 s (`max_rank_restarts`); an instance that has then served for 10 minutes begins anew
//! a load over it          Triton keeps instances whose configuration is the same, and does not tell them of the load. What it
//!                         looks at is the time of config.pbtxt, and so does this
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// How to recover a failed instance, for error texts.
pub const REMEDY: &str =
    "unload the model and load it again, or touch its config.pbtxt and load it";

/// The time before the first attempt; each further one waits twice as long.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// How often the time is doubled: up to a minute.
const MAX_DOUBLINGS: u32 = 6;

/// An instance that has served for so long has not failed for the same reason.
const LONG_SERVICE: Duration = Duration::from_secs(600);

/// The restarts of one instance.
pub struct Restarts {
    /// How often in a row it restarts without being told.
    max_attempts: u32,
    num_attempts: u32,
    /// When the failure was seen, or the last attempt began.
    since: Option<Instant>,
    serves_since: Option<Instant>,
    config: PathBuf,
    config_time: Option<SystemTime>,
}

impl Restarts {
    /// The restarts of a new instance of the model in `folder`: at most `max_attempts` automatic ones in a row.
    pub fn new(folder: &Path, max_attempts: u32) -> Self {
        let config = folder.join("config.pbtxt");
        Self {
            max_attempts,
            num_attempts: 0,
            since: None,
            serves_since: None,
            config_time: modified(&config),
            config,
        }
    }

    /// Whether the instance, which has failed, is to be loaded anew now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        if let Some(since) = self.serves_since.take()
            && now.saturating_duration_since(since) >= LONG_SERVICE
        {
            self.num_attempts = 0;
        }
        let since = *self.since.get_or_insert(now);
        let config_time = modified(&self.config);
        let is_told = config_time.is_some() && config_time != self.config_time;
        let delay = FIRST_DELAY * 2u32.pow(self.num_attempts.min(MAX_DOUBLINGS));
        let may = self.num_attempts < self.max_attempts;
        let is_due = is_told || may && now.saturating_duration_since(since) >= delay;
        if is_due {
            self.config_time = config_time;
            self.num_attempts = match is_told {
                true => 0,
                false => self.num_attempts + 1,
            };
            self.since = Some(now);
        }
        is_due
    }

    /// The instance serves again.
    pub fn succeeded(&mut self, now: Instant) {
        self.since = None;
        self.serves_since = Some(now);
    }
}

fn modified(config: &Path) -> Option<SystemTime> {
    fs::metadata(config).and_then(|it| it.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &str = "/nonexistent";

    /// The seconds of the first 100 in which an instance that cannot be loaded is tried again.
    fn attempts(restarts: &mut Restarts, start: Instant) -> Vec<u64> {
        let is_due = |second: &u64| restarts.is_due(start + Duration::from_secs(*second));
        (0..100).filter(is_due).collect()
    }

    #[test]
    fn attempts_come_later_and_later_and_end() {
        let start = Instant::now();
        let mut restarts = Restarts::new(Path::new(NONE), 5);
        assert_eq!(attempts(&mut restarts, start), [1, 3, 7, 15, 31]);
        let mut never = Restarts::new(Path::new(NONE), 0);
        assert!(attempts(&mut never, start).is_empty());
    }

    #[test]
    fn a_long_service_counts_as_a_new_beginning_and_a_short_one_does_not() {
        let start = Instant::now();
        let mut restarts = Restarts::new(Path::new(NONE), 5);
        assert_eq!(attempts(&mut restarts, start).len(), 5);
        restarts.succeeded(start + Duration::from_secs(100));
        let soon = start + Duration::from_secs(200);
        assert!(attempts(&mut restarts, soon).is_empty());
        restarts.succeeded(soon);
        assert_eq!(attempts(&mut restarts, soon + LONG_SERVICE).len(), 5);
    }

    #[test]
    fn a_changed_configuration_is_tried_once() {
        let folder = std::env::temp_dir().join(format!("inflight-restarts-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let config = folder.join("config.pbtxt");
        fs::write(&config, "").expect("written");
        let mut restarts = Restarts::new(&folder, 0);
        let now = Instant::now();
        assert!(!restarts.is_due(now));
        let file = fs::File::options()
            .write(true)
            .open(&config)
            .expect("the file");
        let later = SystemTime::now() + Duration::from_secs(10);
        file.set_modified(later).expect("its time");
        assert!(restarts.is_due(now) && !restarts.is_due(now));
        fs::remove_dir_all(folder).expect("the folder is there");
    }
}
