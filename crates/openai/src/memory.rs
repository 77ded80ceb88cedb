//! Responses that later requests may continue, in an SQLite database: by their id, for the key that asked for them,
//! bounded in bytes and in age.
//!
//! ```text
//! resp-1   input: [a]   output: [b]      previous: -
//! resp-2   input: [c]   output: [d]      previous: resp-1
//!                                                               a request that continues resp-2: [a, b, c, d, ...]
//! ```
//!
//! A thread owns the database. It works on commands one after the other, so what is read is behind what was kept
//! before. A response in the background is kept when it begins, and again when it ends.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use axum::http::StatusCode;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::body::{Body, wrong};
use crate::keys::Owner;
use crate::{Error, ids};

/// The status of a response in the background that is not complete.
pub const QUEUED: &str = "queued";
/// The version of the database's tables.
const VERSION: i32 = 1;
/// The most bytes that wait to be written. While there are more, requests that are to be kept are refused.
const MAX_PENDING_BYTES: usize = 64 << 20;
/// The most responses before one, in a chain.
const MAX_CHAIN: usize = 4096;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes of all responses and their inputs. The oldest are removed.
    pub max_bytes: u64,
    /// How long a response is kept.
    pub max_age: Duration,
    /// The most bytes of what a request continues.
    pub max_history_bytes: usize,
}

/// The database.
#[derive(Clone, Debug)]
pub struct Memory {
    commands: Sender<Command>,
    num_pending_bytes: Arc<AtomicUsize>,
}

/// What a request says about stored responses, and its input.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The response that it continues.
    pub previous: Option<String>,
    is_kept: bool,
    /// Whether the response is computed in the background.
    pub is_background: bool,
    input: Arc<Vec<Value>>,
}

/// What a response will be kept with.
#[derive(Clone, Debug)]
pub struct Keep {
    memory: Memory,
    owner: Owner,
    asked: Asked,
    /// About the bytes of the request.
    num_bytes: usize,
}

/// A response and its input.
#[derive(Debug)]
struct Row {
    id: String,
    owner: Owner,
    previous: Option<String>,
    /// The items of the request alone, as JSON.
    input: String,
    response: String,
    /// Whether the response is computed in the background, and is not complete.
    is_open: bool,
    created_at: u64,
}

/// What was asked for.
type Reply<T> = oneshot::Sender<Result<T, Error>>;

#[derive(Debug)]
enum Command {
    Keep(Keep, Value),
    Get(Owner, String, Reply<Value>),
    Input(Owner, String, Reply<Vec<Value>>),
    Replace(Owner, Value, Reply<()>),
    Delete(Owner, String, Reply<()>),
    History(Owner, String, Reply<Vec<Value>>),
}

impl Memory {
    /// Opens the database at `path`, or makes one that only its user may read.
    ///
    /// # Errors
    /// The file is none of this program's, is in use, or cannot be opened.
    pub fn open(path: &Path, bounds: Bounds) -> Result<Self, String> {
        let named = |problem: String| format!("{}: {problem}", path.display());
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| named(error.to_string()))?;
        let database = Database::open(path, bounds).map_err(|error| named(error.to_string()))?;
        let (commands, received) = channel();
        let num_pending_bytes = Arc::new(AtomicUsize::new(0));
        let pending = num_pending_bytes.clone();
        thread::Builder::new()
            .name("memory".to_owned())
            .spawn(move || database.run(&received, &pending))
            .map_err(|error| named(error.to_string()))?;
        Ok(Self {
            commands,
            num_pending_bytes,
        })
    }

    /// What a request continues: the items of all responses in its chain, and of their requests.
    ///
    /// # Errors
    /// A response is not there, or there is too much.
    pub async fn history(&self, owner: Owner, asked: &Asked) -> Result<Vec<Value>, Error> {
        match asked.previous.clone() {
            Some(id) => self.ask(|reply| Command::History(owner, id, reply)).await,
            None => Ok(Vec::new()),
        }
    }

    /// Where the response to a request of about `num_bytes` will be kept; `None` if the request does not want it.
    ///
    /// # Errors
    /// Too much is being written.
    pub fn keep(
        &self,
        owner: Owner,
        asked: Asked,
        num_bytes: usize,
    ) -> Result<Option<Keep>, Error> {
        if !asked.is_kept {
            return Ok(None);
        }
        if self.num_pending_bytes.load(Ordering::Relaxed) > MAX_PENDING_BYTES {
            let problem =
                "the disk of stored responses is too slow; try again, or give 'store': false";
            return Err(Error::new(StatusCode::TOO_MANY_REQUESTS, problem));
        }
        Ok(Some(Keep {
            memory: self.clone(),
            owner,
            asked,
            num_bytes,
        }))
    }

    /// A response.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn get(&self, owner: Owner, id: String) -> Result<Value, Error> {
        self.ask(|reply| Command::Get(owner, id, reply)).await
    }

    /// The items of the request for a response, without what it continues.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn input(&self, owner: Owner, id: String) -> Result<Vec<Value>, Error> {
        self.ask(|reply| Command::Input(owner, id, reply)).await
    }

    /// Gives a response that is not complete its end.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn replace(&self, owner: Owner, response: Value) -> Result<(), Error> {
        self.ask(|reply| Command::Replace(owner, response, reply))
            .await
    }

    /// Deletes a response. Those that continue it cannot be continued any more.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn delete(&self, owner: Owner, id: String) -> Result<(), Error> {
        self.ask(|reply| Command::Delete(owner, id, reply)).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Error> {
        let gone = || {
            Error::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "stored responses cannot be read",
            )
        };
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl Asked {
    /// Takes the fields of a request for a response that concern stored ones, and its input.
    ///
    /// # Errors
    /// A field of another type.
    pub fn read(body: &mut Body) -> Result<Self, Error> {
        let previous = body.text("previous_response_id")?;
        let is_kept = match body.take("store") {
            None => true,
            Some(Value::Bool(flag)) => flag,
            Some(other) => return Err(wrong("store", &other, "true or false")),
        };
        let is_background = body.flag("background")?;
        if is_background && !is_kept {
            let problem = "'background' needs 'store': true, so that the response can be asked for";
            return Err(Error::field("background", problem));
        }
        let input = match body.take("input") {
            Some(Value::String(text)) => {
                vec![json!({"type": "message", "role": "user", "content": text})]
            }
            Some(Value::Array(items)) => items,
            other => {
                // The endpoint says what is wrong with it.
                other.into_iter().for_each(|other| body.put("input", other));
                Vec::new()
            }
        };
        Ok(Self {
            previous,
            is_kept,
            is_background,
            input: Arc::new(input),
        })
    }

    /// Gives the request its input back, behind what it continues.
    pub fn give_back(&self, mut history: Vec<Value>, body: &mut Body) {
        if !self.input.is_empty() {
            history.extend(self.input.iter().cloned());
            body.put("input", Value::Array(history));
        }
    }
}

impl Keep {
    /// Keeps a response.
    pub fn keep(&self, response: Value) {
        let pending = &self.memory.num_pending_bytes;
        pending.fetch_add(self.num_bytes, Ordering::Relaxed);
        let command = Command::Keep(self.clone(), response);
        if self.memory.commands.send(command).is_err() {
            eprintln!("inflight-openai: a response is not stored: its thread has ended");
        }
    }

    fn row(&self, response: &Value) -> Row {
        Row {
            is_open: is_open(response),
            id: response["id"].as_str().unwrap_or_default().to_owned(),
            owner: self.owner,
            previous: self.asked.previous.clone(),
            input: json!(*self.asked.input).to_string(),
            response: response.to_string(),
            created_at: ids::now(),
        }
    }
}

impl Row {
    fn num_bytes(&self) -> usize {
        self.input.len() + self.response.len()
    }
}

struct Database {
    connection: Connection,
    bounds: Bounds,
    num_bytes: u64,
}

impl Database {
    fn open(path: &Path, bounds: Bounds) -> Result<Self, Box<dyn std::error::Error>> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(Duration::ZERO)?;
        // Another process that wrote the file would not be counted.
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        // The file may have triggers of whoever could write it.
        connection.pragma_update(None, "trusted_schema", false)?;
        let version: i32 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let num_tables: u32 =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        match (version, num_tables) {
            (VERSION, _) => {}
            (0, 0) => connection.execute_batch(&format!(
                "BEGIN;
                 CREATE TABLE responses (
                     number INTEGER PRIMARY KEY AUTOINCREMENT,
                     id TEXT NOT NULL UNIQUE,
                     owner BLOB NOT NULL,
                     previous TEXT,
                     input TEXT NOT NULL,
                     response TEXT NOT NULL,
                     is_open INTEGER NOT NULL,
                     created_at INTEGER NOT NULL
                 );
                 PRAGMA user_version = {VERSION};
                 COMMIT;"
            ))?,
            _ => {
                return Err(
                    "it is a database of another program, or of another version; give another file"
                        .into(),
                );
            }
        }
        let lost = json!({"code": "server_error", "message": "the server has ended before the response was complete"});
        connection.execute(
            "UPDATE responses SET is_open = 0, response = json_set(response, '$.status', 'failed', '$.error', json(?1))
             WHERE is_open",
            [lost.to_string()],
        )?;
        let num_bytes = connection.query_row(
            "SELECT coalesce(sum(octet_length(input) + octet_length(response)), 0) FROM responses",
            [],
            |row| row.get(0),
        )?;
        Ok(Self {
            connection,
            bounds,
            num_bytes,
        })
    }

    /// Works until there is nobody who could send a command.
    fn run(mut self, commands: &Receiver<Command>, num_pending_bytes: &AtomicUsize) {
        // An answer that nobody waits for is dropped.
        while let Ok(command) = commands.recv() {
            match command {
                Command::Keep(keep, response) => {
                    let row = keep.row(&response);
                    if let Err(error) = self.keep(&row) {
                        eprintln!(
                            "inflight-openai: the response {} is not stored: {error}",
                            row.id
                        );
                    }
                    num_pending_bytes.fetch_sub(keep.num_bytes, Ordering::Relaxed);
                }
                Command::Get(owner, id, reply) => {
                    let _ = reply.send(self.column("response", owner, &id));
                }
                Command::Input(owner, id, reply) => {
                    let _ = reply.send(self.column("input", owner, &id).map(items));
                }
                Command::Replace(owner, response, reply) => {
                    let _ = reply.send(self.replace(owner, &response));
                }
                Command::Delete(owner, id, reply) => {
                    let _ = reply.send(self.delete(owner, &id));
                }
                Command::History(owner, id, reply) => {
                    let _ = reply.send(self.history(owner, &id));
                }
            }
        }
    }

    fn keep(&mut self, row: &Row) -> Result<(), rusqlite::Error> {
        let num_bytes = row.num_bytes() as u64;
        if num_bytes > self.bounds.max_bytes {
            eprintln!(
                "inflight-openai: the response {} is not stored: it is too large",
                row.id
            );
            return Ok(());
        }
        let oldest = row.created_at.saturating_sub(self.bounds.max_age.as_secs());
        while let Some((number, num_bytes_of_first, created_at)) = self.first()? {
            let is_full = self.num_bytes + num_bytes > self.bounds.max_bytes;
            if !is_full && created_at >= oldest {
                break;
            }
            self.connection
                .execute("DELETE FROM responses WHERE number = ?1", [number])?;
            self.num_bytes -= num_bytes_of_first;
        }
        // A response in the background is kept again at its end.
        let before: Option<u64> = self
            .connection
            .query_row(
                "DELETE FROM responses WHERE id = ?1 RETURNING octet_length(input) + octet_length(response)",
                [&row.id],
                |row| row.get(0),
            )
            .optional()?;
        self.num_bytes -= before.unwrap_or(0);
        self.connection.execute(
            "INSERT INTO responses (id, owner, previous, input, response, is_open, created_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                row.id,
                row.owner.0,
                row.previous,
                row.input,
                row.response,
                row.is_open,
                row.created_at
            ],
        )?;
        self.num_bytes += num_bytes;
        Ok(())
    }

    /// The number, the bytes and the time of the response that was kept first.
    fn first(&self) -> Result<Option<(i64, u64, u64)>, rusqlite::Error> {
        let query = "SELECT number, octet_length(input) + octet_length(response), created_at
                     FROM responses ORDER BY number LIMIT 1";
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        self.connection.query_row(query, [], read).optional()
    }

    /// A column with JSON.
    fn column(&self, name: &str, owner: Owner, id: &str) -> Result<Value, Error> {
        let query = format!(
            "SELECT {name} FROM responses WHERE id = ?1 AND owner = ?2 AND created_at >= ?3"
        );
        let values = params![id, owner.0, self.oldest()];
        let found = self
            .connection
            .query_row(&query, values, |row| row.get::<_, String>(0))
            .optional()
            .map_err(|error| unreadable(&error))?;
        json_of(&found.ok_or_else(|| unknown(id))?)
    }

    fn replace(&mut self, owner: Owner, response: &Value) -> Result<(), Error> {
        let id = response["id"].as_str().unwrap_or_default();
        let values = params![id, owner.0, response.to_string()];
        let query = "SELECT octet_length(?3) - octet_length(response) FROM responses WHERE id = ?1 AND owner = ?2";
        let more: Option<i64> = self
            .connection
            .query_row(query, values, |row| row.get(0))
            .optional()
            .map_err(|error| unreadable(&error))?;
        let more = more.ok_or_else(|| unknown(id))?;
        let query = "UPDATE responses SET response = ?3, is_open = 0 WHERE id = ?1 AND owner = ?2";
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_bytes = self.num_bytes.saturating_add_signed(more);
        Ok(())
    }

    fn delete(&mut self, owner: Owner, id: &str) -> Result<(), Error> {
        let query = "DELETE FROM responses WHERE id = ?1 AND owner = ?2
                     RETURNING octet_length(input) + octet_length(response)";
        let deleted: Option<u64> = self
            .connection
            .query_row(query, params![id, owner.0], |row| row.get(0))
            .optional()
            .map_err(|error| unreadable(&error))?;
        self.num_bytes -= deleted.ok_or_else(|| unknown(id))?;
        Ok(())
    }

    /// The items of a response, of its request, and of all that it continues, in their order.
    fn history(&self, owner: Owner, id: &str) -> Result<Vec<Value>, Error> {
        let query = "SELECT previous, input, response FROM responses WHERE id = ?1 AND owner = ?2 AND created_at >= ?3";
        let mut turns = Vec::new();
        let mut num_bytes = 0;
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
            let found: Option<(Option<String>, String, String)> = self
                .connection
                .query_row(query, params![id, owner.0, self.oldest()], read)
                .optional()
                .map_err(|error| unreadable(&error))?;
            let (previous, input, response) = found.ok_or_else(|| unknown(&id))?;
            num_bytes += input.len() + response.len();
            if num_bytes > self.bounds.max_history_bytes || turns.len() == MAX_CHAIN {
                return Err(of_previous(format!(
                    "what 'previous_response_id' continues has more than {} bytes or {MAX_CHAIN} responses; send \
                     its last items as 'input'",
                    self.bounds.max_history_bytes
                )));
            }
            let mut response = json_of(&response)?;
            turns.push((items(json_of(&input)?), items(response["output"].take())));
            next = previous;
        }
        let turns = turns.into_iter().rev();
        Ok(turns
            .flat_map(|(input, output)| input.into_iter().chain(output))
            .collect())
    }

    /// The time before which responses are too old.
    fn oldest(&self) -> u64 {
        ids::now().saturating_sub(self.bounds.max_age.as_secs())
    }
}

/// Whether a response is not complete.
pub fn is_open(response: &Value) -> bool {
    [QUEUED, "in_progress"]
        .iter()
        .any(|status| response["status"] == *status)
}

fn items(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) => items,
        _ => Vec::new(),
    }
}

fn json_of(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|error| unreadable(&error))
}

fn unreadable(error: &dyn std::fmt::Display) -> Error {
    let problem = format!("stored responses cannot be read: {error}");
    Error::new(StatusCode::INTERNAL_SERVER_ERROR, problem)
}

fn unknown(id: &str) -> Error {
    Error {
        status: StatusCode::NOT_FOUND,
        ..of_previous(format!(
            "there is no response '{id}': it was not stored, is too old, was deleted, or is another key's"
        ))
    }
}

fn of_previous(problem: String) -> Error {
    Error::field("previous_response_id", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: Owner = Owner([1; 32]);

    fn database(bounds: Bounds) -> Database {
        Database::open(Path::new(":memory:"), bounds).expect("a database")
    }

    fn bounds() -> Bounds {
        Bounds {
            max_bytes: 1 << 20,
            max_age: Duration::from_secs(100),
            max_history_bytes: 1 << 20,
        }
    }

    fn row(id: &str, previous: Option<&str>) -> Row {
        Row {
            id: id.to_owned(),
            owner: ME,
            previous: previous.map(str::to_owned),
            input: json!([format!("in {id}")]).to_string(),
            response: json!({"id": id, "output": [format!("out {id}")]}).to_string(),
            is_open: false,
            created_at: ids::now(),
        }
    }

    #[test]
    fn a_response_is_continued_with_all_that_it_continues() {
        let mut database = database(bounds());
        for row in [row("a", None), row("b", Some("a")), row("c", Some("b"))] {
            database.keep(&row).expect("kept");
        }
        let all = ["in a", "out a", "in b", "out b", "in c", "out c"].map(Value::from);
        assert_eq!(database.history(ME, "c"), Ok(all.to_vec()));
        assert_eq!(database.history(ME, "b"), Ok(all[..4].to_vec()));
        database.delete(ME, "a").expect("it is there");
        let error = database
            .history(ME, "c")
            .expect_err("its beginning is gone");
        assert_eq!(error.status, StatusCode::NOT_FOUND);
        assert!(error.message.contains("'a'"), "{}", error.message);
    }

    #[test]
    fn a_response_is_of_the_key_that_asked_for_it() {
        let mut database = database(bounds());
        database.keep(&row("a", None)).expect("kept");
        let other = Owner([2; 32]);
        assert!(database.column("response", ME, "a").is_ok());
        assert!(database.column("response", other, "a").is_err());
        assert!(database.history(other, "a").is_err());
        assert!(database.delete(other, "a").is_err());
        assert!(database.delete(ME, "a").is_ok() && database.delete(ME, "a").is_err());
        assert_eq!(database.num_bytes, 0);
    }

    #[test]
    fn the_oldest_responses_make_room_and_old_ones_are_gone() {
        let num_bytes = row("a", None).num_bytes() as u64;
        let mut database = database(Bounds {
            max_bytes: 2 * num_bytes,
            ..bounds()
        });
        for id in ["a", "b", "c"] {
            database.keep(&row(id, None)).expect("kept");
        }
        let is_there = |database: &Database, id| database.column("input", ME, id).is_ok();
        assert_eq!(
            ["a", "b", "c"].map(|id| is_there(&database, id)),
            [false, true, true]
        );
        assert_eq!(database.num_bytes, 2 * num_bytes);
        let large = Row {
            input: "x".repeat(1000),
            ..row("d", None)
        };
        database.keep(&large).expect("left out");
        assert!(!is_there(&database, "d") && is_there(&database, "c"));
        database.bounds.max_bytes = 1 << 20;
        let old = Row {
            created_at: ids::now() - 101,
            ..row("e", None)
        };
        database.keep(&old).expect("kept");
        assert!(!is_there(&database, "e"), "it is too old");
    }

    #[test]
    fn a_response_in_the_background_is_kept_twice() {
        let mut database = database(bounds());
        let of_status = |status: &str| Row {
            response: json!({"id": "a", "status": status, "output": []}).to_string(),
            is_open: status == QUEUED,
            ..row("a", None)
        };
        for status in [QUEUED, "completed"] {
            database.keep(&of_status(status)).expect("kept");
            let found = database.column("response", ME, "a").expect("it is there");
            assert_eq!(found["status"], status);
            assert_eq!(database.num_bytes, of_status(status).num_bytes() as u64);
        }
        let cancelled = of_status("cancelled");
        let response = json_of(&cancelled.response).expect("JSON");
        assert_eq!(database.replace(ME, &response), Ok(()));
        assert_eq!(database.column("response", ME, "a"), Ok(response.clone()));
        assert_eq!(database.num_bytes, cancelled.num_bytes() as u64);
        assert!(database.replace(Owner([2; 32]), &response).is_err());
    }

    #[test]
    fn a_long_history_is_refused() {
        let mut database = database(Bounds {
            max_history_bytes: 100,
            ..bounds()
        });
        for (id, previous) in [("a", None), ("b", Some("a")), ("c", Some("b"))] {
            database.keep(&row(id, previous)).expect("kept");
        }
        assert!(database.history(ME, "a").is_ok());
        let error = database.history(ME, "c").expect_err("more than 100 bytes");
        assert!(
            error.message.contains("more than 100 bytes"),
            "{}",
            error.message
        );
        // A response cannot continue itself, but a file may say so.
        database.bounds = bounds();
        database.keep(&row("d", Some("d"))).expect("kept");
        assert!(database.history(ME, "d").is_err());
    }

    #[test]
    fn a_file_is_kept_to_itself_and_found_again() {
        let folder = std::env::temp_dir().join(format!("inflight-memory-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("responses.db");
        {
            let mut database = Database::open(&path, bounds()).expect("new");
            database.keep(&row("a", None)).expect("kept");
            assert!(Database::open(&path, bounds()).is_err(), "it is in use");
        }
        let mut database = Database::open(&path, bounds()).expect("it is there");
        assert!(database.column("response", ME, "a").is_ok());
        assert_eq!(database.num_bytes, row("a", None).num_bytes() as u64);
        let open = json!({"id": "b", "status": QUEUED, "output": []}).to_string();
        let open = Row {
            response: open,
            is_open: true,
            ..row("b", None)
        };
        database.keep(&open).expect("kept");
        drop(database);
        let database = Database::open(&path, bounds()).expect("it is there");
        let lost = database.column("response", ME, "b").expect("it is there");
        assert_eq!(lost["status"], "failed", "nobody computes it any more");
        assert_eq!(lost["error"]["code"], "server_error");
        drop(database);
        let other = folder.join("other.db");
        let connection = Connection::open(&other).expect("new");
        connection
            .execute_batch("CREATE TABLE t (a)")
            .expect("made");
        drop(connection);
        let error = Database::open(&other, bounds()).err().expect("another's");
        assert!(error.to_string().contains("another program"), "{error}");
        std::fs::write(&other, [7; 4096]).expect("written");
        assert!(
            Database::open(&other, bounds()).is_err(),
            "it is no database"
        );
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
