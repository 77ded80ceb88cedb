//! Conversations that a client keeps on the server: lists of items, to which responses add.

use axum::http::StatusCode;
use rusqlite::{OptionalExtension, params};
use serde_json::{Value, json};

use super::database::{Database, History, json_of, unreadable};
use crate::keys::Owner;
use crate::{Error, ids};

/// The bytes that a conversation counts for without its items and metadata.
const NUM_BYTES: u64 = 256;
/// The field of a request that names a conversation.
const FIELD: &str = "conversation";

/// Some items of a conversation.
#[derive(Debug, PartialEq)]
pub struct Page {
    /// The items, in the order that was asked for.
    pub items: Vec<Value>,
    /// Whether more items follow.
    pub has_more: bool,
}

/// Which items of a conversation are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageQuery {
    /// The items behind the one of this id.
    pub after: Option<String>,
    /// The most items.
    pub max_items: usize,
    /// Whether the last items come first.
    pub is_descending: bool,
}

struct Found {
    number: i64,
    metadata: String,
    num_bytes: u64,
    created_at: u64,
}

impl Database {
    /// Makes a conversation of items, each with an `id`.
    pub fn create(
        &mut self,
        owner: Owner,
        metadata: &Value,
        items: &[Value],
    ) -> Result<Value, Error> {
        let metadata = metadata.to_string();
        let num_bytes = NUM_BYTES + metadata.len() as u64;
        self.check_length(num_bytes + bytes_of(items))?;
        let id = ids::id("conv-");
        let now = ids::now();
        self.make_room(num_bytes + bytes_of(items))
            .map_err(|error| unreadable(&error))?;
        let query =
            "INSERT INTO conversations (id, owner, metadata, num_bytes, created_at, used_at)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?5)";
        let values = params![id, owner.0, metadata, num_bytes, now];
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_bytes += num_bytes;
        self.append(owner, &id, items)?;
        self.conversation(owner, &id)
    }

    /// A conversation, without its items.
    pub fn conversation(&self, owner: Owner, id: &str) -> Result<Value, Error> {
        let found = self.found(owner, id)?;
        Ok(json!({
            "id": id,
            "object": "conversation",
            "created_at": found.created_at,
            "metadata": json_of(&found.metadata)?,
        }))
    }

    /// Replaces the metadata of a conversation.
    pub fn set_metadata(
        &mut self,
        owner: Owner,
        id: &str,
        metadata: &Value,
    ) -> Result<Value, Error> {
        let found = self.found(owner, id)?;
        let metadata = metadata.to_string();
        let num_bytes = found.num_bytes - found.metadata.len() as u64 + metadata.len() as u64;
        let query = "UPDATE conversations SET metadata = ?2, num_bytes = ?3 WHERE number = ?1";
        let values = params![found.number, metadata, num_bytes];
        self.connection
            .execute(query, values)
            .map_err(|error| unreadable(&error))?;
        self.num_bytes = self.num_bytes - found.num_bytes + num_bytes;
        self.conversation(owner, id)
    }

    /// Deletes a conversation with its items.
    pub fn delete_conversation(&mut self, owner: Owner, id: &str) -> Result<(), Error> {
        let found = self.found(owner, id)?;
        self.connection
            .execute(
                "DELETE FROM conversations WHERE number = ?1",
                [found.number],
            )
            .map_err(|error| unreadable(&error))?;
        self.num_bytes -= found.num_bytes;
        Ok(())
    }

    /// Adds items of a client, which make a conversation no longer than a request may continue.
    pub fn add_items(&mut self, owner: Owner, id: &str, items: &[Value]) -> Result<(), Error> {
        let num_bytes = self.found(owner, id)?.num_bytes;
        self.check_length(num_bytes + bytes_of(items))?;
        self.append(owner, id, items)
    }

    /// Adds items, each with an `id`, behind all others.
    pub fn append(&mut self, owner: Owner, id: &str, items: &[Value]) -> Result<(), Error> {
        self.extend(owner, id, items)
            .unwrap_or_else(|error| Err(unreadable(&error)))
    }

    fn extend(
        &mut self,
        owner: Owner,
        id: &str,
        items: &[Value],
    ) -> Result<Result<(), Error>, rusqlite::Error> {
        let found = match self.found(owner, id) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error)),
        };
        let num_bytes = bytes_of(items);
        // Last used now, the conversation is the last one that makes room.
        let query = "UPDATE conversations SET used_at = ?2 WHERE number = ?1";
        self.connection
            .execute(query, params![found.number, ids::now()])?;
        self.make_room(num_bytes)?;
        let changes = self.connection.transaction()?;
        let query = "UPDATE conversations SET num_bytes = num_bytes + ?2 WHERE number = ?1";
        if changes.execute(query, params![found.number, num_bytes])? == 0 {
            return Ok(Err(unknown(id)));
        }
        for item in items {
            let query =
                "INSERT INTO conversation_items (conversation, id, item) VALUES (?1, ?2, ?3)";
            changes.execute(query, params![found.number, id_of(item), item.to_string()])?;
        }
        changes.commit()?;
        self.num_bytes += num_bytes;
        Ok(Ok(()))
    }

    /// An item of a conversation.
    pub fn item(&self, owner: Owner, id: &str, item_id: &str) -> Result<Value, Error> {
        let number = self.found(owner, id)?.number;
        Ok(self.found_item(number, item_id)?.1)
    }

    /// Deletes an item of a conversation. Returns the conversation.
    pub fn delete_item(&mut self, owner: Owner, id: &str, item_id: &str) -> Result<Value, Error> {
        let number = self.found(owner, id)?.number;
        let (item_number, item) = self.found_item(number, item_id)?;
        let num_bytes = bytes_of(&[item]);
        let changed = self.connection.transaction().and_then(|changes| {
            changes.execute(
                "DELETE FROM conversation_items WHERE number = ?1",
                [item_number],
            )?;
            let query = "UPDATE conversations SET num_bytes = num_bytes - ?2 WHERE number = ?1";
            changes.execute(query, params![number, num_bytes])?;
            changes.commit()
        });
        changed.map_err(|error| unreadable(&error))?;
        self.num_bytes -= num_bytes;
        self.conversation(owner, id)
    }

    /// Some items of a conversation.
    pub fn page(&self, owner: Owner, id: &str, query: &PageQuery) -> Result<Page, Error> {
        let number = self.found(owner, id)?.number;
        let (comparison, order, end) = match query.is_descending {
            true => ("<", "DESC", i64::MAX),
            false => (">", "ASC", 0),
        };
        let after = match &query.after {
            Some(item_id) => self.found_item(number, item_id)?.0,
            None => end,
        };
        let sql = format!(
            "SELECT item FROM conversation_items WHERE conversation = ?1 AND number {comparison} ?2
             ORDER BY number {order} LIMIT ?3"
        );
        let mut items = self.items(&sql, params![number, after, query.max_items + 1])?;
        let has_more = items.len() > query.max_items;
        items.truncate(query.max_items);
        Ok(Page { items, has_more })
    }

    /// All items of a conversation that a request continues.
    pub fn conversation_history(&self, owner: Owner, id: &str) -> Result<History, Error> {
        let named = |error| Error {
            param: Some(FIELD.to_owned()),
            ..error
        };
        let found = self.found(owner, id).map_err(named)?;
        self.check_length(found.num_bytes).map_err(named)?;
        let sql = "SELECT item FROM conversation_items WHERE conversation = ?1 ORDER BY number";
        let items = self.items(sql, params![found.number])?;
        Ok(History {
            items,
            num_bytes: usize::try_from(found.num_bytes).unwrap_or(usize::MAX),
        })
    }

    fn items(&self, sql: &str, values: &[&dyn rusqlite::ToSql]) -> Result<Vec<Value>, Error> {
        let texts = self.connection.prepare(sql).and_then(|mut query| {
            let rows = query.query_map(values, |row| row.get::<_, String>(0))?;
            rows.collect::<Result<Vec<_>, _>>()
        });
        let texts = texts.map_err(|error| unreadable(&error))?;
        texts.iter().map(|text| json_of(text)).collect()
    }

    fn found(&self, owner: Owner, id: &str) -> Result<Found, Error> {
        let query = "SELECT number, metadata, num_bytes, created_at FROM conversations
                     WHERE id = ?1 AND owner = ?2 AND used_at >= ?3";
        let read = |row: &rusqlite::Row<'_>| {
            Ok(Found {
                number: row.get(0)?,
                metadata: row.get(1)?,
                num_bytes: row.get(2)?,
                created_at: row.get(3)?,
            })
        };
        self.connection
            .query_row(query, params![id, owner.0, self.oldest()], read)
            .optional()
            .map_err(|error| unreadable(&error))?
            .ok_or_else(|| unknown(id))
    }

    /// The number of an item, and the item.
    fn found_item(&self, conversation: i64, id: &str) -> Result<(i64, Value), Error> {
        let query = "SELECT number, item FROM conversation_items WHERE conversation = ?1 AND id = ?2 LIMIT 1";
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, String>(1)?));
        let found = self
            .connection
            .query_row(query, params![conversation, id], read)
            .optional()
            .map_err(|error| unreadable(&error))?;
        let missing = || {
            let problem = format!("the conversation has no item '{id}'; list its items");
            Error::new(StatusCode::NOT_FOUND, problem)
        };
        let (number, text) = found.ok_or_else(missing)?;
        Ok((number, json_of(&text)?))
    }

    fn check_length(&self, num_bytes: u64) -> Result<(), Error> {
        let max_bytes = self.bounds.max_history_bytes as u64;
        match num_bytes <= max_bytes.min(self.bounds.max_bytes) {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "the conversation has {num_bytes} bytes, more than the {max_bytes} that a request may continue; delete \
                 items, or begin another conversation"
            ))),
        }
    }
}

/// The bytes of items as they are stored.
fn bytes_of(items: &[Value]) -> u64 {
    items.iter().map(|item| item.to_string().len() as u64).sum()
}

fn id_of(item: &Value) -> &str {
    item["id"].as_str().unwrap_or_default()
}

fn unknown(id: &str) -> Error {
    let problem =
        format!("there is no conversation '{id}': it is too old, was deleted, or is another key's");
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

    fn database(max_bytes: u64) -> Database {
        let bounds = Bounds {
            max_bytes,
            max_age: Duration::from_secs(100),
            max_history_bytes: 1000,
            max_batch_bytes: 0,
        };
        Database::open(Path::new(":memory:"), bounds).expect("a database")
    }

    fn item(id: &str) -> Value {
        json!({"id": id, "content": format!("text of {id}")})
    }

    fn create(database: &mut Database, items: &[Value]) -> String {
        let made = database
            .create(ME, &json!({"a": "b"}), items)
            .expect("made");
        made["id"].as_str().expect("an id").to_owned()
    }

    fn page(
        database: &Database,
        id: &str,
        after: Option<&str>,
        is_descending: bool,
    ) -> Vec<String> {
        let query = PageQuery {
            after: after.map(str::to_owned),
            max_items: 2,
            is_descending,
        };
        let page = database.page(ME, id, &query).expect("a page");
        let ids = page.items.iter().map(|item| id_of(item).to_owned());
        ids.chain(page.has_more.then(|| "more".to_owned()))
            .collect()
    }

    #[test]
    fn items_are_listed_in_pages() {
        let mut database = database(1 << 20);
        let id = create(&mut database, &[item("a"), item("b")]);
        let other = create(&mut database, &[item("a")]);
        database.add_items(ME, &id, &[item("c")]).expect("added");
        assert_eq!(page(&database, &id, None, false), ["a", "b", "more"]);
        assert_eq!(page(&database, &id, Some("b"), false), ["c"]);
        assert_eq!(page(&database, &id, None, true), ["c", "b", "more"]);
        assert_eq!(page(&database, &id, Some("b"), true), ["a"]);
        assert_eq!(page(&database, &other, None, false), ["a"]);
        let history = database.conversation_history(ME, &id).expect("all items");
        assert_eq!(history.items, ["a", "b", "c"].map(item));
        database.delete_item(ME, &id, "b").expect("it is there");
        assert!(database.delete_item(ME, &id, "b").is_err());
        assert_eq!(page(&database, &id, None, false), ["a", "c"]);
        assert_eq!(database.item(ME, &other, "a"), Ok(item("a")));
    }

    #[test]
    fn a_conversation_is_of_its_key_and_leaves_nothing() {
        let mut database = database(1 << 20);
        let id = create(&mut database, &[item("a")]);
        assert!(database.conversation(OTHER, &id).is_err());
        assert!(database.conversation_history(OTHER, &id).is_err());
        assert!(database.add_items(OTHER, &id, &[item("b")]).is_err());
        assert!(database.delete_item(OTHER, &id, "a").is_err());
        assert!(database.delete_conversation(OTHER, &id).is_err());
        let changed = database.set_metadata(ME, &id, &json!({"long": "x".repeat(99)}));
        assert_eq!(
            changed.expect("changed")["metadata"]["long"],
            "x".repeat(99)
        );
        assert!(database.append(ME, &id, &[item("b")]).is_ok());
        assert!(database.delete_item(ME, &id, "a").is_ok());
        assert!(database.num_bytes > 0);
        database.delete_conversation(ME, &id).expect("it is there");
        assert!(database.conversation(ME, &id).is_err());
        let num_items = "SELECT count(*) FROM conversation_items";
        let num_items = database
            .connection
            .query_row(num_items, [], |row| row.get::<_, u32>(0));
        assert_eq!((database.num_bytes, num_items), (0, Ok(0)));
    }

    #[test]
    fn a_conversation_is_bounded_and_the_oldest_makes_room() {
        let mut database = database(1200);
        let first = create(&mut database, &[item("a")]);
        let large = json!({"id": "b", "content": "x".repeat(1000)});
        for refused in [
            database.add_items(ME, &first, std::slice::from_ref(&large)),
            database.create(ME, &json!({}), &[large]).map(|_| ()),
        ] {
            let error = refused.expect_err("too large");
            assert!(
                error.message.contains("more than the 1000"),
                "{}",
                error.message
            );
        }
        let all: Vec<_> = (0..4)
            .map(|_| create(&mut database, &[item("a")]))
            .collect();
        assert!(database.conversation(ME, &first).is_err(), "it made room");
        assert!(database.conversation(ME, &all[3]).is_ok());
        assert!(database.num_bytes <= 1200);
        let old = "UPDATE conversations SET used_at = used_at - 101";
        database.connection.execute(old, []).expect("changed");
        assert!(database.conversation(ME, &all[3]).is_err(), "it is too old");
        database.make_room(0).expect("removed");
        assert_eq!(database.num_bytes, 0);
    }
}
