//! Files of requests, the batches that work on them, and the result of each line.
//!
//! A file of results has no content of its own: its lines are the results of its batch.

use axum::http::StatusCode;
use rusqlite::{OptionalExtension, params};
use serde_json::{Value, json};

use super::conversations::{Page, PageQuery};
use super::database::{BATCH_BYTES, Database, json_of, num_batch_bytes, unreadable};
use crate::keys::Owner;
use crate::{Error, ids};

/// The most batches that are open.
const MAX_OPEN: u32 = 64;
/// About the most bytes of results that are read at a time.
const PART_BYTES: usize = 1 << 20;

/// A part of a file's content.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Where the next part begins, if there is one.
    pub next: Option<i64>,
}

/// A batch that is not complete.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenBatch {
    /// Whose it is.
    pub owner: Owner,
    /// Its id.
    pub id: String,
    /// The path that its lines are for.
    pub endpoint: String,
}

struct FoundFile {
    number: i64,
    /// The batch whose results it has, and whether they are errors.
    of_batch: Option<(i64, bool)>,
    num_bytes: u64,
}

impl Database {
    /// Adds a file of requests. Returns its object.
    pub fn add_file(&mut self, owner: Owner, name: &str, content: &[u8]) -> Result<Value, Error> {
        self.make_batch_room(BATCH_BYTES + content.len() as u64)?;
        let id = ids::id("file-");
        let query = "INSERT INTO files (id, owner, name, purpose, content, created_at)
                     VALUES (?1, ?2, ?3, 'batch', ?4, ?5)";
        let values = params![id, owner.0, name, content, ids::now()];
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_batch_bytes += BATCH_BYTES + content.len() as u64;
        self.file(owner, &id)
    }

    /// The object of a file.
    pub fn file(&self, owner: Owner, id: &str) -> Result<Value, Error> {
        let query = format!("SELECT {FILE_COLUMNS} FROM files WHERE id = ?1 AND owner = ?2");
        let found = self
            .connection
            .query_row(&query, params![id, owner.0], file_object);
        let found = found.optional().map_err(|error| unreadable(&error))?;
        found.ok_or_else(|| unknown("file", id))
    }

    /// Some files of a key.
    pub fn files(&self, owner: Owner, query: &PageQuery) -> Result<Page, Error> {
        self.batch_page("files", FILE_COLUMNS, owner, query, file_object)
    }

    /// Deletes a file that no open batch reads.
    pub fn delete_file(&mut self, owner: Owner, id: &str) -> Result<(), Error> {
        let found = self.found_file(owner, id)?;
        let query = "SELECT count(*) FROM batches WHERE input = ?1 AND is_open";
        let num_open: u32 = self
            .connection
            .query_row(query, [found.number], |row| row.get(0))
            .map_err(|error| unreadable(&error))?;
        if num_open > 0 {
            let problem = format!("a batch reads '{id}'; wait for the batch, or cancel it");
            return Err(Error::new(StatusCode::CONFLICT, problem));
        }
        self.connection
            .execute("DELETE FROM files WHERE number = ?1", [found.number])
            .map_err(|error| unreadable(&error))?;
        if found.of_batch.is_none() {
            self.num_batch_bytes -= BATCH_BYTES + found.num_bytes;
        }
        Ok(())
    }

    /// The part of a file's content that begins at `from`, at first 0.
    pub fn content(&self, owner: Owner, id: &str, from: i64) -> Result<Part, Error> {
        let found = self.found_file(owner, id)?;
        let Some((batch, is_error)) = found.of_batch else {
            let query = "SELECT content FROM files WHERE number = ?1";
            let bytes = self
                .connection
                .query_row(query, [found.number], |row| row.get(0));
            let bytes = bytes.map_err(|error| unreadable(&error))?;
            return Ok(Part { bytes, next: None });
        };
        let mut part = Part {
            bytes: Vec::new(),
            next: None,
        };
        let sql = "SELECT line, result FROM batch_lines WHERE batch = ?1 AND is_error = ?2 AND line >= ?3 ORDER BY line";
        let read = self.connection.prepare(sql).and_then(|mut query| {
            let mut rows = query.query(params![batch, is_error, from])?;
            while let Some(row) = rows.next()? {
                if part.bytes.len() >= PART_BYTES {
                    part.next = Some(row.get(0)?);
                    break;
                }
                let line: String = row.get(1)?;
                part.bytes.extend_from_slice(line.as_bytes());
                part.bytes.push(b'\n');
            }
            Ok(())
        });
        read.map_err(|error| unreadable(&error))?;
        Ok(part)
    }

    /// Makes a batch of a file. `batch` is its object, to which the id is added.
    pub fn create_batch(&mut self, owner: Owner, mut batch: Value) -> Result<Value, Error> {
        let input = batch["input_file_id"].as_str().unwrap_or_default();
        let named = |error| Error {
            param: Some("input_file_id".to_owned()),
            ..error
        };
        let found = self.found_file(owner, input).map_err(named)?;
        if found.of_batch.is_some() {
            let problem =
                format!("'input_file_id': '{input}' has results; give a file of requests");
            return Err(Error::field("input_file_id", problem));
        }
        let open = "SELECT count(*) FROM batches WHERE is_open";
        let num_open: u32 = self
            .connection
            .query_row(open, [], |row| row.get(0))
            .map_err(|error| unreadable(&error))?;
        if num_open >= MAX_OPEN {
            let problem = format!("{MAX_OPEN} batches are open; wait for one, or cancel one");
            return Err(Error::new(StatusCode::TOO_MANY_REQUESTS, problem));
        }
        self.make_batch_room(BATCH_BYTES)?;
        let id = ids::id("batch-");
        batch["id"] = json!(id);
        let query = "INSERT INTO batches (id, owner, input, batch, is_open, created_at) VALUES (?1, ?2, ?3, ?4, 1, ?5)";
        let values = params![id, owner.0, found.number, batch.to_string(), ids::now()];
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_batch_bytes += BATCH_BYTES;
        self.batch(owner, &id)
    }

    /// The object of a batch, with the number of lines so far.
    pub fn batch(&self, owner: Owner, id: &str) -> Result<Value, Error> {
        let (number, mut batch, _) = self.found_batch(owner, id)?;
        self.count_lines(number, &mut batch)
            .map_err(|error| unreadable(&error))?;
        Ok(batch)
    }

    /// Some batches of a key.
    pub fn batches(&self, owner: Owner, query: &PageQuery) -> Result<Page, Error> {
        let read = |row: &rusqlite::Row<'_>| {
            let mut batch: Value =
                serde_json::from_str(&row.get::<_, String>(2)?).unwrap_or_default();
            self.count_lines(row.get(0)?, &mut batch)?;
            Ok(batch)
        };
        self.batch_page("batches", "number, id, batch", owner, query, read)
    }

    /// The batches that are not complete, the oldest first.
    pub fn open_batches(&self) -> Result<Vec<OpenBatch>, Error> {
        let read = |row: &rusqlite::Row<'_>| {
            let batch: Value = serde_json::from_str(&row.get::<_, String>(2)?).unwrap_or_default();
            Ok(OpenBatch {
                owner: Owner(row.get(0)?),
                id: row.get(1)?,
                endpoint: batch["endpoint"].as_str().unwrap_or_default().to_owned(),
            })
        };
        let sql = "SELECT owner, id, batch FROM batches WHERE is_open ORDER BY number";
        let found = self.connection.prepare(sql).and_then(|mut query| {
            let rows = query.query_map([], read)?;
            rows.collect::<Result<Vec<_>, _>>()
        });
        found.map_err(|error| unreadable(&error))
    }

    /// The content of an open batch's file, and the lines that have a result.
    pub fn batch_input(&self, owner: Owner, id: &str) -> Result<(Vec<u8>, Vec<usize>), Error> {
        let (number, _, _) = self.found_batch(owner, id)?;
        let query = "SELECT content FROM files JOIN batches ON files.number = input WHERE batches.number = ?1";
        let content = self.connection.query_row(query, [number], |row| row.get(0));
        let content = content.map_err(|error| unreadable(&error))?;
        let sql = "SELECT line FROM batch_lines WHERE batch = ?1";
        let lines = self.connection.prepare(sql).and_then(|mut query| {
            let rows = query.query_map([number], |row| row.get(0))?;
            rows.collect::<Result<Vec<_>, _>>()
        });
        Ok((content, lines.map_err(|error| unreadable(&error))?))
    }

    /// Says that an open batch has begun, with so many lines.
    pub fn begin_batch(&mut self, owner: Owner, id: &str, num_lines: usize) -> Result<(), Error> {
        let (number, mut batch, is_open) = self.found_batch(owner, id)?;
        if !is_open || batch["status"] == "in_progress" {
            return Ok(());
        }
        batch["status"] = json!("in_progress");
        batch["in_progress_at"] = json!(ids::now());
        batch["request_counts"]["total"] = json!(num_lines);
        let query = "UPDATE batches SET batch = ?2 WHERE number = ?1";
        self.connection
            .execute(query, params![number, batch.to_string()])
            .map_err(|error| unreadable(&error))?;
        Ok(())
    }

    /// Adds the result of a line to an open batch.
    pub fn add_result(
        &mut self,
        owner: Owner,
        id: &str,
        line: usize,
        is_error: bool,
        result: &str,
    ) -> Result<(), Error> {
        let (number, _, is_open) = self.found_batch(owner, id)?;
        if !is_open {
            return Ok(());
        }
        let num_bytes = result.len() as u64;
        self.make_batch_room(num_bytes)?;
        let query = "INSERT OR IGNORE INTO batch_lines (batch, line, is_error, result) VALUES (?1, ?2, ?3, ?4)";
        let num_added = self
            .connection
            .execute(query, params![number, line, is_error, result])
            .map_err(|error| unreadable(&error))?;
        self.num_batch_bytes += num_bytes * num_added as u64;
        Ok(())
    }

    /// Ends a batch that is open, with the status `completed`, `cancelled` or `failed`. Returns its object.
    pub fn end_batch(
        &mut self,
        owner: Owner,
        id: &str,
        status: &str,
        errors: &[Value],
    ) -> Result<Value, Error> {
        let (number, mut batch, is_open) = self.found_batch(owner, id)?;
        if is_open {
            let now = ids::now();
            batch["status"] = json!(status);
            batch[format!("{status}_at")] = json!(now);
            match status {
                "completed" => batch["finalizing_at"] = json!(now),
                "cancelled" => batch["cancelling_at"] = json!(now),
                _ => batch["errors"] = json!({"object": "list", "data": errors}),
            }
            let ended = self.end_open(owner, number, batch, now);
            ended.map_err(|error| unreadable(&error))?;
        }
        self.batch(owner, id)
    }

    fn end_open(
        &mut self,
        owner: Owner,
        number: i64,
        mut batch: Value,
        now: u64,
    ) -> Result<(), rusqlite::Error> {
        self.count_lines(number, &mut batch)?;
        let changes = self.connection.transaction()?;
        for (count, field, is_error) in [
            ("completed", "output_file_id", false),
            ("failed", "error_file_id", true),
        ] {
            if batch["request_counts"][count] == 0 {
                continue;
            }
            let id = ids::id("file-");
            let name = format!(
                "{}_{}.jsonl",
                batch["id"].as_str().unwrap_or_default(),
                &field[..field.len() - 8]
            );
            let query = "INSERT INTO files (id, owner, name, purpose, batch, is_error, created_at)
                         VALUES (?1, ?2, ?3, 'batch_output', ?4, ?5, ?6)";
            changes.execute(query, params![id, owner.0, name, number, is_error, now])?;
            batch[field] = json!(id);
        }
        let query = "UPDATE batches SET batch = ?2, is_open = 0 WHERE number = ?1";
        changes.execute(query, params![number, batch.to_string()])?;
        changes.commit()
    }

    /// Puts the number of lines with results into the object of a batch.
    fn count_lines(&self, number: i64, batch: &mut Value) -> Result<(), rusqlite::Error> {
        let query = "SELECT coalesce(sum(NOT is_error), 0), coalesce(sum(is_error), 0) FROM batch_lines WHERE batch = ?1";
        let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, u64>(0)?, row.get::<_, u64>(1)?));
        let (num_completed, num_failed) = self.connection.query_row(query, [number], read)?;
        batch["request_counts"]["completed"] = json!(num_completed);
        batch["request_counts"]["failed"] = json!(num_failed);
        Ok(())
    }

    /// Removes what is too old, and checks that so many bytes have room.
    fn make_batch_room(&mut self, num_bytes: u64) -> Result<(), Error> {
        let oldest = self.oldest();
        let removed = self
            .connection
            .execute(
                "DELETE FROM batches WHERE created_at < ?1 AND NOT is_open",
                [oldest],
            )
            .and_then(|num_batches| {
                let query = "DELETE FROM files WHERE created_at < ?1 AND batch IS NULL
                             AND number NOT IN (SELECT input FROM batches WHERE is_open)";
                Ok(num_batches + self.connection.execute(query, [oldest])?)
            });
        if removed.map_err(|error| unreadable(&error))? > 0 {
            let counted = num_batch_bytes(&self.connection);
            self.num_batch_bytes = counted.map_err(|error| unreadable(&error))?;
        }
        let max_bytes = self.bounds.max_batch_bytes;
        match self.num_batch_bytes + num_bytes <= max_bytes {
            true => Ok(()),
            false => Err(Error::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!(
                    "files and results have at most {max_bytes} bytes; delete files, or start the server with a larger \
                     --batch-bytes"
                ),
            )),
        }
    }

    fn batch_page(
        &self,
        table: &str,
        columns: &str,
        owner: Owner,
        query: &PageQuery,
        read: impl Fn(&rusqlite::Row<'_>) -> Result<Value, rusqlite::Error>,
    ) -> Result<Page, Error> {
        let (comparison, order, end) = match query.is_descending {
            true => ("<", "DESC", i64::MAX),
            false => (">", "ASC", 0),
        };
        let after = match &query.after {
            Some(id) => {
                let sql = format!("SELECT number FROM {table} WHERE id = ?1 AND owner = ?2");
                let found = self
                    .connection
                    .query_row(&sql, params![id, owner.0], |row| row.get(0));
                let found = found.optional().map_err(|error| unreadable(&error))?;
                found.ok_or_else(|| unknown("entry", id))?
            }
            None => end,
        };
        let sql = format!(
            "SELECT {columns} FROM {table} WHERE owner = ?1 AND number {comparison} ?2 ORDER BY number {order} LIMIT ?3"
        );
        let found = self.connection.prepare(&sql).and_then(|mut prepared| {
            let values = params![owner.0, after, query.max_items + 1];
            let rows = prepared.query_map(values, |row| read(row))?;
            rows.collect::<Result<Vec<_>, _>>()
        });
        let mut items = found.map_err(|error| unreadable(&error))?;
        let has_more = items.len() > query.max_items;
        items.truncate(query.max_items);
        Ok(Page { items, has_more })
    }

    fn found_file(&self, owner: Owner, id: &str) -> Result<FoundFile, Error> {
        let query = "SELECT number, batch, is_error, coalesce(length(content), 0) FROM files WHERE id = ?1 AND owner = ?2";
        let read = |row: &rusqlite::Row<'_>| {
            let batch: Option<i64> = row.get(1)?;
            let is_error: Option<bool> = row.get(2)?;
            Ok(FoundFile {
                number: row.get(0)?,
                of_batch: batch.zip(is_error),
                num_bytes: row.get(3)?,
            })
        };
        let found = self.connection.query_row(query, params![id, owner.0], read);
        let found = found.optional().map_err(|error| unreadable(&error))?;
        found.ok_or_else(|| unknown("file", id))
    }

    /// The number and the object of a batch, and whether it is open.
    fn found_batch(&self, owner: Owner, id: &str) -> Result<(i64, Value, bool), Error> {
        let query = "SELECT number, batch, is_open FROM batches WHERE id = ?1 AND owner = ?2";
        let read =
            |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, String>(1)?, row.get(2)?));
        let found = self.connection.query_row(query, params![id, owner.0], read);
        let found = found.optional().map_err(|error| unreadable(&error))?;
        let (number, batch, is_open) = found.ok_or_else(|| unknown("batch", id))?;
        Ok((number, json_of(&batch)?, is_open))
    }
}

const FILE_COLUMNS: &str = "number, id, name, purpose, created_at, coalesce(length(content), (
    SELECT sum(octet_length(result) + 1) FROM batch_lines
    WHERE batch_lines.batch = files.batch AND batch_lines.is_error = files.is_error
), 0)";

fn file_object(row: &rusqlite::Row<'_>) -> Result<Value, rusqlite::Error> {
    Ok(json!({
        "id": row.get::<_, String>(1)?,
        "object": "file",
        "bytes": row.get::<_, u64>(5)?,
        "created_at": row.get::<_, u64>(4)?,
        "filename": row.get::<_, String>(2)?,
        "purpose": row.get::<_, String>(3)?,
        "status": "processed",
    }))
}

fn unknown(what: &str, id: &str) -> Error {
    let problem =
        format!("there is no {what} '{id}': it is too old, was deleted, or is another key's");
    Error::new(StatusCode::NOT_FOUND, problem)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::response_store::Bounds;

    const ME: Owner = Owner([1; 32]);
    const OTHER: Owner = Owner([2; 32]);

    fn database(max_batch_bytes: u64) -> Database {
        let bounds = Bounds {
            max_bytes: 1 << 20,
            max_age: Duration::from_secs(100),
            max_history_bytes: 1000,
            max_batch_bytes,
        };
        Database::open(Path::new(":memory:"), bounds).expect("a database")
    }

    fn id_of(object: &Value) -> String {
        object["id"].as_str().expect("an id").to_owned()
    }

    fn begun(database: &mut Database) -> (String, String) {
        let file = database
            .add_file(ME, "a.jsonl", b"{}\n{}\n")
            .expect("added");
        let batch = json!({"input_file_id": file["id"], "endpoint": "/v1/completions", "status": "validating"});
        let batch = database.create_batch(ME, batch).expect("made");
        let (file, batch) = (id_of(&file), id_of(&batch));
        database.begin_batch(ME, &batch, 2).expect("begun");
        (file, batch)
    }

    #[test]
    fn results_are_lines_of_the_files_of_their_batch() {
        let mut database = database(1 << 20);
        let (file, id) = begun(&mut database);
        database
            .add_result(ME, &id, 1, false, "second")
            .expect("added");
        database
            .add_result(ME, &id, 1, true, "again")
            .expect("left out");
        let (content, done) = database.batch_input(ME, &id).expect("open");
        assert_eq!((&content[..], &done[..]), (&b"{}\n{}\n"[..], &[1][..]));
        let open = database.open_batches().expect("batches");
        assert_eq!((open.len(), &open[0].endpoint[..]), (1, "/v1/completions"));
        let error = database.delete_file(ME, &file).expect_err("it is read");
        assert_eq!(error.status, StatusCode::CONFLICT);
        database
            .add_result(ME, &id, 0, true, "first")
            .expect("added");
        let batch = database
            .end_batch(ME, &id, "completed", &[])
            .expect("ended");
        assert_eq!(
            batch["request_counts"],
            json!({"total": 2, "completed": 1, "failed": 1})
        );
        for (field, line) in [("output_file_id", "second\n"), ("error_file_id", "first\n")] {
            let file = batch[field].as_str().expect("a file");
            let part = database.content(ME, file, 0).expect("its content");
            assert_eq!((&part.bytes[..], part.next), (line.as_bytes(), None));
            assert_eq!(database.file(ME, file).expect("there")["bytes"], line.len());
            assert!(database.content(OTHER, file, 0).is_err());
        }
        let again = database
            .end_batch(ME, &id, "cancelled", &[])
            .expect("it has ended");
        assert_eq!(again, batch, "the first end stays");
        database
            .add_result(ME, &id, 2, false, "late")
            .expect("left out");
        assert_eq!(database.batch(ME, &id), Ok(batch));
        assert!(database.open_batches().expect("none").is_empty());
        assert!(database.delete_file(ME, &file).is_ok());
        assert!(database.batch(OTHER, &id).is_err());
    }

    #[test]
    fn long_results_are_read_in_parts() {
        let mut database = database(1 << 30);
        let (_, id) = begun(&mut database);
        let line = "x".repeat(PART_BYTES / 2);
        for number in 0..5 {
            database
                .add_result(ME, &id, number, false, &line)
                .expect("added");
        }
        let batch = database
            .end_batch(ME, &id, "cancelled", &[])
            .expect("ended");
        let file = batch["output_file_id"].as_str().expect("a file");
        let (mut from, mut lengths) = (Some(0), Vec::new());
        while let Some(start) = from {
            let part = database.content(ME, file, start).expect("a part");
            lengths.push(part.bytes.len() / line.len());
            from = part.next;
        }
        assert_eq!(lengths, [2, 2, 1]);
    }

    #[test]
    fn files_and_results_are_bounded_and_grow_old() {
        let mut database = database(4 * BATCH_BYTES);
        let (_, id) = begun(&mut database);
        let large = "x".repeat(2 * BATCH_BYTES as usize);
        let error = database
            .add_result(ME, &id, 0, false, &large)
            .expect_err("no room");
        assert_eq!(error.status, StatusCode::INSUFFICIENT_STORAGE);
        assert!(database.add_file(ME, "b", large.as_bytes()).is_err());
        let before = database.num_batch_bytes;
        let extra = id_of(&database.add_file(ME, "b", b"x").expect("added"));
        database.delete_file(ME, &extra).expect("deleted");
        assert_eq!(database.num_batch_bytes, before);
        assert_eq!(num_batch_bytes(&database.connection), Ok(before));
        let old = "UPDATE files SET created_at = created_at - 101; UPDATE batches SET created_at = created_at - 101";
        database.connection.execute_batch(old).expect("changed");
        database.make_batch_room(0).expect("room");
        assert!(
            database.batch(ME, &id).is_ok(),
            "an open batch stays, and its file"
        );
        assert!(database.batch_input(ME, &id).is_ok());
        database
            .end_batch(ME, &id, "failed", &[json!({"message": "no"})])
            .expect("ended");
        database.make_batch_room(0).expect("room");
        assert!(database.batch(ME, &id).is_err());
        assert_eq!(database.num_batch_bytes, 0);
    }

    #[test]
    fn batches_and_files_are_listed_in_pages() {
        let mut database = database(1 << 20);
        let all: Vec<_> = (0..3).map(|_| begun(&mut database)).collect();
        let query = |after: Option<&String>| PageQuery {
            after: after.cloned(),
            max_items: 2,
            is_descending: true,
        };
        let page = database.batches(ME, &query(None)).expect("a page");
        assert_eq!(
            page.items.iter().map(id_of).collect::<Vec<_>>(),
            [&all[2].1, &all[1].1].map(String::clone)
        );
        assert!(page.has_more);
        let page = database.files(ME, &query(Some(&all[1].0))).expect("a page");
        assert_eq!(
            page.items.iter().map(id_of).collect::<Vec<_>>(),
            [all[0].0.clone()]
        );
        assert!(
            database
                .files(OTHER, &query(None))
                .expect("empty")
                .items
                .is_empty()
        );
    }

    #[test]
    fn a_batch_needs_a_file_of_requests() {
        let mut database = database(1 << 20);
        let error = database
            .create_batch(ME, json!({"input_file_id": "file-1"}))
            .expect_err("no file");
        assert_eq!(error.param.as_deref(), Some("input_file_id"));
        let (_, id) = begun(&mut database);
        database.add_result(ME, &id, 0, false, "x").expect("added");
        let batch = database
            .end_batch(ME, &id, "completed", &[])
            .expect("ended");
        let results = json!({"input_file_id": batch["output_file_id"]});
        assert!(database.create_batch(ME, results).is_err());
    }
}
