//! The database of stored responses: a table in which the order of the rows is their age. Tables of conversations are
//! beside it (conversations.rs).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::{Value, json};

use crate::keys::Owner;
use crate::{Error, ids};

/// The version of the database's tables.
const VERSION: i32 = 3;
/// The tables of conversations and of batches. The items of a conversation are removed with it, and so are the results
/// of a batch.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS conversations (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner BLOB NOT NULL,
        metadata TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        used_at INTEGER NOT NULL
    );
    CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (used_at, number);
    CREATE TABLE IF NOT EXISTS conversation_items (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation INTEGER NOT NULL REFERENCES conversations (number) ON DELETE CASCADE,
        id TEXT NOT NULL,
        item TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS items_of_conversations ON conversation_items (conversation, number);
    CREATE TABLE IF NOT EXISTS files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner BLOB NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        content BLOB,
        batch INTEGER REFERENCES batches (number) ON DELETE CASCADE,
        is_error INTEGER,
        created_at INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner BLOB NOT NULL,
        input INTEGER NOT NULL,
        batch TEXT NOT NULL,
        is_open INTEGER NOT NULL,
        created_at INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS batch_lines (
        batch INTEGER NOT NULL REFERENCES batches (number) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        is_error INTEGER NOT NULL,
        result TEXT NOT NULL,
        PRIMARY KEY (batch, line)
    );
";
/// The bytes that a file or a batch counts for without its content and results.
pub(super) const BATCH_BYTES: u64 = 1024;
/// The most responses before one, in a chain.
const MAX_CHAIN: usize = 4096;

/// How much is stored.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes of all responses and their inputs. The oldest are removed.
    pub max_bytes: u64,
    /// How long a response is stored.
    pub max_age: Duration,
    /// The most bytes of the items that a request continues.
    pub max_history_bytes: usize,
    /// The most bytes of the files and results of batches.
    pub max_batch_bytes: u64,
}

/// A response and its input.
#[derive(Debug)]
pub(super) struct Row {
    pub id: String,
    pub owner: Owner,
    pub previous: Option<String>,
    /// The items of the request alone, as JSON.
    pub input: Arc<str>,
    pub response: String,
    /// Whether the response is computed in the background, and is not complete.
    pub is_open: bool,
    pub created_at: u64,
}

/// The field with the id of a response that a request continues.
const PREVIOUS: &str = "previous_response_id";

/// The conversation that a request continues.
#[derive(Debug, Default, PartialEq)]
pub struct History {
    /// Its items, in their order.
    pub items: Vec<Value>,
    /// Their bytes as JSON.
    pub num_bytes: usize,
}

/// The open database.
pub struct Database {
    pub(super) connection: Connection,
    pub(super) bounds: Bounds,
    /// The bytes of responses and conversations.
    pub(super) num_bytes: u64,
    /// The bytes of files and results of batches.
    pub(super) num_batch_bytes: u64,
}

impl Database {
    pub(super) fn open(path: &Path, bounds: Bounds) -> Result<Self, Box<dyn std::error::Error>> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(Duration::ZERO)?;
        // Another process that wrote the file would not be counted.
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        // The file may have triggers of whoever could write it.
        connection.pragma_update(None, "trusted_schema", false)?;
        connection.pragma_update(None, "foreign_keys", true)?;
        // Deleted responses are not left in free pages.
        connection.pragma_update(None, "secure_delete", true)?;
        let version: i32 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let num_tables: u32 =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        let is_ours = connection.query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name = 'responses'",
            [],
            |row| Ok(row.get::<_, u32>(0)? == 1),
        )?;
        match (version, num_tables) {
            (VERSION, _) if is_ours => {}
            // The versions before had no conversations, or no batches.
            (1..VERSION, _) if is_ours => connection.execute_batch(&format!(
                "BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;"
            ))?,
            (0, 0) => connection.execute_batch(&format!(
                "BEGIN;
                 {TABLES}
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
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        let lost = json!({"code": "server_error", "message": "the server has ended before the response was complete"});
        connection.execute(
            "UPDATE responses SET is_open = 0, response = json_set(response, '$.status', 'failed', '$.error', json(?1))
             WHERE is_open",
            [lost.to_string()],
        )?;
        let num_bytes = connection.query_row(
            "SELECT (SELECT coalesce(sum(octet_length(input) + octet_length(response)), 0) FROM responses)
                  + (SELECT coalesce(sum(num_bytes), 0) FROM conversations)",
            [],
            |row| row.get(0),
        )?;
        let num_batch_bytes = num_batch_bytes(&connection)?;
        Ok(Self {
            connection,
            bounds,
            num_bytes,
            num_batch_bytes,
        })
    }

    pub(super) fn store(&mut self, row: &Row) -> Result<(), rusqlite::Error> {
        let num_bytes = row.num_bytes() as u64;
        if num_bytes > self.bounds.max_bytes {
            eprintln!(
                "inflight-openai: the response {} is not stored: it is too large",
                row.id
            );
            return Ok(());
        }
        self.make_room(num_bytes)?;
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

    /// Removes responses and conversations that are too old, and then the oldest until so many bytes have room.
    pub(super) fn make_room(&mut self, num_bytes: u64) -> Result<(), rusqlite::Error> {
        let oldest = self.oldest();
        while let Some((table, number, num_bytes_of_first, time)) = self.first()? {
            let is_full = self.num_bytes + num_bytes > self.bounds.max_bytes;
            if !is_full && time >= oldest {
                break;
            }
            let query = format!("DELETE FROM {table} WHERE number = ?1");
            self.connection.execute(&query, [number])?;
            self.num_bytes -= num_bytes_of_first;
        }
        Ok(())
    }

    /// The table, the number, the bytes and the time of what is the oldest: a response since it was stored, a
    /// conversation since its last item.
    fn first(&self) -> Result<Option<(String, i64, u64, u64)>, rusqlite::Error> {
        let query =
            "SELECT * FROM (SELECT 'responses', number, octet_length(input) + octet_length(response), created_at AS time
                            FROM responses ORDER BY number LIMIT 1)
             UNION ALL
             SELECT * FROM (SELECT 'conversations', number, num_bytes, used_at AS time
                            FROM conversations ORDER BY used_at, number LIMIT 1)
             ORDER BY time LIMIT 1";
        let read =
            |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
        self.connection.query_row(query, [], read).optional()
    }

    /// A column with JSON.
    pub(super) fn column(&self, name: &str, owner: Owner, id: &str) -> Result<Value, Error> {
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

    /// Ends a response that is open. Returns whether it was.
    pub(super) fn end(&mut self, owner: Owner, response: &Value) -> Result<bool, Error> {
        let id = response["id"].as_str().unwrap_or_default();
        let values = params![id, owner.0, response.to_string()];
        let query = "SELECT octet_length(?3) - octet_length(response) FROM responses
                     WHERE id = ?1 AND owner = ?2 AND is_open";
        let more: Option<i64> = self
            .connection
            .query_row(query, values, |row| row.get(0))
            .optional()
            .map_err(|error| unreadable(&error))?;
        let Some(more) = more else {
            return Ok(false);
        };
        let query = "UPDATE responses SET response = ?3, is_open = 0 WHERE id = ?1 AND owner = ?2";
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_bytes = self.num_bytes.saturating_add_signed(more);
        Ok(true)
    }

    pub(super) fn delete(&mut self, owner: Owner, id: &str) -> Result<(), Error> {
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
    pub(super) fn history(&self, owner: Owner, id: &str) -> Result<History, Error> {
        let query = "SELECT previous, input, response, is_open FROM responses
                     WHERE id = ?1 AND owner = ?2 AND created_at >= ?3";
        let mut turns = Vec::new();
        let mut num_bytes = 0;
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let read =
                |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
            let found: Option<(Option<String>, String, String, bool)> = self
                .connection
                .query_row(query, params![id, owner.0, self.oldest()], read)
                .optional()
                .map_err(|error| unreadable(&error))?;
            let missing = || Error {
                param: Some(PREVIOUS.to_owned()),
                ..unknown(&id)
            };
            let (previous, input, response, is_open) = found.ok_or_else(missing)?;
            if is_open {
                let problem =
                    format!("the response '{id}' is in progress; wait for it, or cancel it");
                return Err(Error::field(PREVIOUS, problem));
            }
            num_bytes += input.len() + response.len();
            if num_bytes > self.bounds.max_history_bytes || turns.len() == MAX_CHAIN {
                return Err(Error::field(
                    PREVIOUS,
                    format!(
                        "the conversation before '{PREVIOUS}' is longer than {} bytes or {MAX_CHAIN} responses; send \
                         its last items as 'input'",
                        self.bounds.max_history_bytes
                    ),
                ));
            }
            let mut response = json_of(&response)?;
            turns.push((items(json_of(&input)?), items(response["output"].take())));
            next = previous;
        }
        let turns = turns.into_iter().rev();
        let items = turns.flat_map(|(input, output)| input.into_iter().chain(output));
        Ok(History {
            items: items.collect(),
            num_bytes,
        })
    }

    /// The time before which responses are too old.
    pub(super) fn oldest(&self) -> u64 {
        ids::now().saturating_sub(self.bounds.max_age.as_secs())
    }
}

impl Row {
    pub fn num_bytes(&self) -> usize {
        self.input.len() + self.response.len()
    }
}

/// The bytes of all files and results.
pub(super) fn num_batch_bytes(connection: &rusqlite::Connection) -> Result<u64, rusqlite::Error> {
    let query = "SELECT (SELECT coalesce(sum(octet_length(content) + ?1), 0) FROM files WHERE batch IS NULL)
                      + (SELECT count(*) * ?1 FROM batches)
                      + (SELECT coalesce(sum(octet_length(result)), 0) FROM batch_lines)";
    connection.query_row(query, [BATCH_BYTES], |row| row.get(0))
}

/// The items in a list.
pub(super) fn items(value: Value) -> Vec<Value> {
    match value {
        Value::Array(items) => items,
        _ => Vec::new(),
    }
}

pub(super) fn json_of(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|error| unreadable(&error))
}

pub(super) fn unreadable(error: &dyn std::fmt::Display) -> Error {
    let problem = format!("stored responses cannot be read: {error}");
    Error::new(StatusCode::INTERNAL_SERVER_ERROR, problem)
}

fn unknown(id: &str) -> Error {
    let problem = format!(
        "there is no response '{id}': it was not stored, is too old, was deleted, or is another key's"
    );
    Error::new(StatusCode::NOT_FOUND, problem)
}

#[cfg(test)]
mod tests {
    use super::super::QUEUED;
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
            max_batch_bytes: 1 << 20,
        }
    }

    fn row(id: &str, previous: Option<&str>) -> Row {
        Row {
            id: id.to_owned(),
            owner: ME,
            previous: previous.map(str::to_owned),
            input: json!([format!("in {id}")]).to_string().into(),
            response: json!({"id": id, "output": [format!("out {id}")]}).to_string(),
            is_open: false,
            created_at: ids::now(),
        }
    }

    #[test]
    fn a_response_is_continued_with_all_that_it_continues() {
        let mut database = database(bounds());
        for row in [row("a", None), row("b", Some("a")), row("c", Some("b"))] {
            database.store(&row).expect("stored");
        }
        let all = ["in a", "out a", "in b", "out b", "in c", "out c"].map(Value::from);
        let items = |id| database.history(ME, id).map(|history| history.items);
        assert_eq!(items("c"), Ok(all.to_vec()));
        assert_eq!(items("b"), Ok(all[..4].to_vec()));
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
        database.store(&row("a", None)).expect("stored");
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
            database.store(&row(id, None)).expect("stored");
        }
        let is_there = |database: &Database, id| database.column("input", ME, id).is_ok();
        assert_eq!(
            ["a", "b", "c"].map(|id| is_there(&database, id)),
            [false, true, true]
        );
        assert_eq!(database.num_bytes, 2 * num_bytes);
        let large = Row {
            input: "x".repeat(1000).into(),
            ..row("d", None)
        };
        database.store(&large).expect("left out");
        assert!(!is_there(&database, "d") && is_there(&database, "c"));
        database.bounds.max_bytes = 1 << 20;
        let old = Row {
            created_at: ids::now() - 101,
            ..row("e", None)
        };
        database.store(&old).expect("stored");
        assert!(!is_there(&database, "e"), "it is too old");
    }

    #[test]
    fn a_response_in_the_background_ends_once() {
        let mut database = database(bounds());
        let of_status = |status: &str| Row {
            response: json!({"id": "a", "status": status, "output": []}).to_string(),
            is_open: status == QUEUED,
            ..row("a", None)
        };
        let response = |status: &str| json_of(&of_status(status).response).expect("JSON");
        database.store(&of_status(QUEUED)).expect("stored");
        let error = database.history(ME, "a").expect_err("it has no output yet");
        assert!(error.message.contains("in progress"), "{}", error.message);
        let (done, late) = (response("completed"), response("cancelled"));
        assert_eq!(database.end(Owner([2; 32]), &late), Ok(false));
        assert_eq!(database.end(ME, &done), Ok(true));
        assert_eq!(database.end(ME, &late), Ok(false), "the first end stays");
        assert_eq!(database.column("response", ME, "a"), Ok(done));
        let num_bytes = of_status("completed").num_bytes() as u64;
        assert_eq!(database.num_bytes, num_bytes);
        assert!(database.history(ME, "a").is_ok());
        database.delete(ME, "a").expect("it is there");
        assert_eq!(database.end(ME, &late), Ok(false), "it does not come back");
        assert_eq!(database.num_bytes, 0);
    }

    #[test]
    fn a_long_history_is_refused() {
        let mut database = database(Bounds {
            max_history_bytes: 100,
            ..bounds()
        });
        for (id, previous) in [("a", None), ("b", Some("a")), ("c", Some("b"))] {
            database.store(&row(id, previous)).expect("stored");
        }
        assert!(database.history(ME, "a").is_ok());
        let error = database.history(ME, "c").expect_err("more than 100 bytes");
        assert!(
            error.message.contains("longer than 100 bytes"),
            "{}",
            error.message
        );
        // A response cannot continue itself, but a file may say so.
        database.bounds = bounds();
        database.store(&row("d", Some("d"))).expect("stored");
        assert!(database.history(ME, "d").is_err());
    }

    #[test]
    fn a_file_has_one_owner_and_is_found_again() {
        let folder =
            std::env::temp_dir().join(format!("inflight-response-store-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("responses.db");
        {
            let mut database = Database::open(&path, bounds()).expect("new");
            database.store(&row("a", None)).expect("stored");
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
        database.store(&open).expect("stored");
        drop(database);
        let database = Database::open(&path, bounds()).expect("it is there");
        let lost = database.column("response", ME, "b").expect("it is there");
        assert_eq!(lost["status"], "failed", "nobody computes it any more");
        assert_eq!(lost["error"]["code"], "server_error");
        // As the version before left it.
        let before =
            "DROP TABLE conversation_items; DROP TABLE conversations; PRAGMA user_version = 1;";
        database.connection.execute_batch(before).expect("executed");
        drop(database);
        let mut database = Database::open(&path, bounds()).expect("it is there");
        assert!(database.column("response", ME, "a").is_ok());
        assert!(database.create(ME, &json!({}), &[]).is_ok());
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
