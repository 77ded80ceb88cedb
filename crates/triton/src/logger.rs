//! Routes the `log` crate's records to Triton's log.
//!
//! `error!`, `warn!` and `info!` keep their names there; `debug!` is Triton's verbose log. Whether a
//! level is on is asked per record, because Triton lets an operator change it while it runs.

use std::path::Path;

use log::{Level, LevelFilter, Log, Metadata, Record};

use super::error::{check, to_c_string};
use super::sys;

/// Routes the `log` crate to Triton's log. Further calls have no effect.
pub fn install_logger() {
    // It fails where this library has been initialised before, and then the same logger is in place.
    let _ = log::set_logger(&TritonLog);
    // `trace!` is left out: it is for the insides of libraries, and asking Triton costs a call.
    log::set_max_level(LevelFilter::Debug);
}

/// Whether Triton's verbose log is on, so that callers can skip the work for a record.
pub fn verbose_enabled() -> bool {
    is_enabled(Level::Debug)
}

struct TritonLog;

impl Log for TritonLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Debug && is_enabled(metadata.level())
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // Triton prints the file's name alone, and so do its own records.
        let file = Path::new(record.file().unwrap_or(record.target()))
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let file = to_c_string(file);
        let line = i32::try_from(record.line().unwrap_or(0)).unwrap_or(0);
        let message = to_c_string(record.args().to_string());
        // SAFETY: both strings outlive the call. There is nowhere to report a failure to log.
        let _ = unsafe {
            check(sys::TRITONSERVER_LogMessage(
                level(record.level()),
                file.as_ptr(),
                line,
                message.as_ptr(),
            ))
        };
    }

    fn flush(&self) {}
}

fn is_enabled(of: Level) -> bool {
    // SAFETY: takes a number and returns a flag.
    unsafe { sys::TRITONSERVER_LogIsEnabled(level(of)) }
}

fn level(level: Level) -> sys::TRITONSERVER_LogLevel {
    use sys::TRITONSERVER_LogLevel as Triton;
    match level {
        Level::Error => Triton::TRITONSERVER_LOG_ERROR,
        Level::Warn => Triton::TRITONSERVER_LOG_WARN,
        Level::Info => Triton::TRITONSERVER_LOG_INFO,
        Level::Debug | Level::Trace => Triton::TRITONSERVER_LOG_VERBOSE,
    }
}
