//! Responses that later requests may continue, in an SQLite database: by their id, for the key that asked for them,
//! bounded in bytes and in age.
//!
//! ```text
//! resp-1   input: [a]   output: [b]      previous: -
//! resp-2   input: [c]   output: [d]      previous: resp-1
//!                                                               a request that continues resp-2: [a, b, c, d, ...]
//! ```
//!
//! A conversation is a list of items to which each response that names it adds its own.
//!
//! A thread owns the database and works on commands in their order: a read finds every response that was stored before.
//! A response in the background is stored when it begins, and again when it ends.

mod batches;
mod conversations;
mod database;

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::body::{Body, wrong};
use crate::items::stored;
use crate::keys::Owner;
use crate::{Error, ids};
use database::{Row, items};

pub use batches::{OpenBatch, Part};
pub use conversations::{Page, PageQuery};
pub use database::{Bounds, Database, History};

/// The status of a response in the background that is not complete.
pub const QUEUED: &str = "queued";
/// The most bytes that wait to be written. While there are more, requests whose responses are to be stored are refused.
const MAX_PENDING_BYTES: usize = 64 << 20;
/// The database.
#[derive(Clone, Debug)]
pub struct ResponseStore {
    commands: Sender<Command>,
    num_pending_bytes: Arc<AtomicUsize>,
}

/// The fields of a request that concern stored responses, and its input.
#[derive(Clone, Debug)]
pub struct StoreFields {
    /// The response that it continues.
    pub previous: Option<String>,
    /// The conversation that it continues.
    pub conversation: Option<String>,
    is_stored: bool,
    /// Whether the response is computed in the background.
    pub is_background: bool,
    input: Vec<Value>,
}

/// Where a response will be stored, and with which request.
#[derive(Clone, Debug)]
pub struct StoreTarget {
    store: ResponseStore,
    owner: Owner,
    previous: Option<String>,
    conversation: Option<String>,
    is_background: bool,
    /// The items of the request alone, as JSON.
    input: Arc<str>,
    /// The room of the request's body, which is taken until the response is stored.
    room: Option<Arc<OwnedSemaphorePermit>>,
}

enum Command {
    /// Stores a response.
    Store(Row, Option<Arc<OwnedSemaphorePermit>>),
    /// Anything else.
    Work(Box<dyn FnOnce(&mut Database) + Send>),
}

impl ResponseStore {
    /// Opens the database at `path`, or makes one that only its user may read.
    ///
    /// # Errors
    /// The file belongs to another program, is in use, or cannot be opened.
    pub fn open(path: &Path, bounds: Bounds) -> Result<Self, String> {
        let named = |problem: String| format!("{}: {problem}", path.display());
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| named(error.to_string()))?;
        // The file may have been made by another program, for everybody.
        std::fs::set_permissions(path, Permissions::from_mode(0o600))
            .map_err(|error| named(error.to_string()))?;
        let database = Database::open(path, bounds).map_err(|error| named(error.to_string()))?;
        let (commands, received) = channel();
        let num_pending_bytes = Arc::new(AtomicUsize::new(0));
        let pending = num_pending_bytes.clone();
        thread::Builder::new()
            .name("response-store".to_owned())
            .spawn(move || run(database, &received, &pending))
            .map_err(|error| named(error.to_string()))?;
        Ok(Self {
            commands,
            num_pending_bytes,
        })
    }

    /// The items that a request continues: of a conversation, or of all responses in its chain and of their requests.
    ///
    /// # Errors
    /// A response or the conversation is not there, or there is too much.
    pub async fn history(&self, owner: Owner, fields: &StoreFields) -> Result<History, Error> {
        if let Some(id) = fields.conversation.clone() {
            return self
                .ask(move |database| database.conversation_history(owner, &id))
                .await;
        }
        match fields.previous.clone() {
            Some(id) => self.ask(move |database| database.history(owner, &id)).await,
            None => Ok(History::default()),
        }
    }

    /// Where the response to a request will be stored; `None` if the request does not want it. `room` is the room of
    /// its body.
    ///
    /// # Errors
    /// Too much is being written.
    pub fn target(
        &self,
        owner: Owner,
        fields: &StoreFields,
        input: Arc<str>,
        room: Option<OwnedSemaphorePermit>,
    ) -> Result<Option<StoreTarget>, Error> {
        if !fields.is_stored {
            return Ok(None);
        }
        if self.num_pending_bytes.load(Ordering::Relaxed) > MAX_PENDING_BYTES {
            let problem =
                "too many responses are waiting to be written; try again, or give 'store': false";
            return Err(Error::new(StatusCode::TOO_MANY_REQUESTS, problem));
        }
        Ok(Some(StoreTarget {
            store: self.clone(),
            owner,
            previous: fields.previous.clone(),
            conversation: fields.conversation.clone(),
            is_background: fields.is_background,
            input,
            room: room.map(Arc::new),
        }))
    }

    /// A response.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn get(&self, owner: Owner, id: String) -> Result<Value, Error> {
        self.ask(move |database| database.column("response", owner, &id))
            .await
    }

    /// The items of the request for a response, without the items that it continues.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn input(&self, owner: Owner, id: String) -> Result<Vec<Value>, Error> {
        self.ask(move |database| database.column("input", owner, &id).map(items))
            .await
    }

    /// Ends a response in the background, unless it has ended. Returns the response as it is stored.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn end(&self, owner: Owner, response: Value) -> Result<Value, Error> {
        self.ask(move |database| {
            database.end(owner, &response)?;
            let id = response["id"].as_str().unwrap_or_default();
            database.column("response", owner, id)
        })
        .await
    }

    /// Deletes a response. Responses that continue it cannot be continued any more.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn delete(&self, owner: Owner, id: String) -> Result<(), Error> {
        self.ask(move |database| database.delete(owner, &id)).await
    }

    /// Makes a conversation of items that each have an `id`. Returns it.
    ///
    /// # Errors
    /// It is too large.
    pub async fn create_conversation(
        &self,
        owner: Owner,
        metadata: Value,
        items: Vec<Value>,
    ) -> Result<Value, Error> {
        self.ask(move |database| database.create(owner, &metadata, &items))
            .await
    }

    /// A conversation, without its items.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn conversation(&self, owner: Owner, id: String) -> Result<Value, Error> {
        self.ask(move |database| database.conversation(owner, &id))
            .await
    }

    /// Replaces the metadata of a conversation. Returns the conversation.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn set_metadata(
        &self,
        owner: Owner,
        id: String,
        metadata: Value,
    ) -> Result<Value, Error> {
        self.ask(move |database| database.set_metadata(owner, &id, &metadata))
            .await
    }

    /// Deletes a conversation. The responses that have added to it stay.
    ///
    /// # Errors
    /// The key has none of this id.
    pub async fn delete_conversation(&self, owner: Owner, id: String) -> Result<(), Error> {
        self.ask(move |database| database.delete_conversation(owner, &id))
            .await
    }

    /// Adds items that each have an `id` to a conversation. Returns the items.
    ///
    /// # Errors
    /// The key has no conversation of this id, or it would be too large.
    pub async fn add_items(
        &self,
        owner: Owner,
        id: String,
        items: Vec<Value>,
    ) -> Result<Vec<Value>, Error> {
        self.ask(move |database| database.add_items(owner, &id, &items).map(|()| items))
            .await
    }

    /// An item of a conversation.
    ///
    /// # Errors
    /// The key has no conversation of this id, or it has no such item.
    pub async fn item(&self, owner: Owner, id: String, item_id: String) -> Result<Value, Error> {
        self.ask(move |database| database.item(owner, &id, &item_id))
            .await
    }

    /// Deletes an item of a conversation. Returns the conversation.
    ///
    /// # Errors
    /// The key has no conversation of this id, or it has no such item.
    pub async fn delete_item(
        &self,
        owner: Owner,
        id: String,
        item_id: String,
    ) -> Result<Value, Error> {
        self.ask(move |database| database.delete_item(owner, &id, &item_id))
            .await
    }

    /// Some items of a conversation.
    ///
    /// # Errors
    /// The key has no conversation of this id, or it has no item to begin behind.
    pub async fn page(&self, owner: Owner, id: String, query: PageQuery) -> Result<Page, Error> {
        self.ask(move |database| database.page(owner, &id, &query))
            .await
    }

    /// Waits until every response so far is written, at the end of the process.
    pub async fn flushed(&self) {
        // Without the thread there is nothing to wait for.
        let _ = self.ask(|_| Ok(())).await;
    }

    /// Has the thread work on the database.
    ///
    /// # Errors
    /// As `work`, or the thread has ended.
    pub async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Database) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let gone = || {
            Error::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "stored responses cannot be read",
            )
        };
        let (reply, answer) = oneshot::channel();
        let work = move |database: &mut Database| {
            // An answer that nobody waits for is dropped.
            let _ = reply.send(work(database));
        };
        self.commands
            .send(Command::Work(Box::new(work)))
            .map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl StoreFields {
    /// Takes the fields of a request for a response that concern stored ones, and its input.
    ///
    /// # Errors
    /// A field of another type.
    pub fn read(body: &mut Body) -> Result<Self, Error> {
        let previous = body.text("previous_response_id")?;
        let is_stored = body.flag_or("store", true)?;
        let conversation = conversation(body)?;
        if conversation.is_some() && (previous.is_some() || !is_stored) {
            let problem = "'conversation' cannot be given with 'previous_response_id' or 'store': false; leave one out";
            return Err(Error::field("conversation", problem));
        }
        let is_background = body.flag("background")?;
        if is_background && !is_stored {
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
            conversation,
            is_stored,
            is_background,
            input,
        })
    }

    /// Gives the request its input back. Returns the input as JSON.
    pub fn give_back(&mut self, body: &mut Body) -> Arc<str> {
        let input = Value::Array(std::mem::take(&mut self.input));
        let json = input.to_string().into();
        if !body.has("input") {
            body.put("input", input);
        }
        json
    }
}

impl StoreTarget {
    /// Stores a response, and adds the items of its request and its own to its conversation. The end of one in the
    /// background is stored only if it is still there, and open.
    pub fn store(&self, response: &Value) {
        let command = match self.is_background && !is_open(response) {
            true => {
                let (target, response) = (self.clone(), response.clone());
                Command::Work(Box::new(move |database| target.end(database, response)))
            }
            false => {
                let row = Row {
                    id: response["id"].as_str().unwrap_or_default().to_owned(),
                    owner: self.owner,
                    previous: self.previous.clone(),
                    input: self.input.clone(),
                    response: response.to_string(),
                    is_open: is_open(response),
                    created_at: ids::now(),
                };
                let pending = &self.store.num_pending_bytes;
                pending.fetch_add(row.num_bytes(), Ordering::Relaxed);
                Command::Store(row, self.room.clone())
            }
        };
        let turn = match self.is_background {
            true => None,
            false => self.turn(response),
        };
        let commands = [Some(command), turn].into_iter().flatten();
        for command in commands {
            if self.store.commands.send(command).is_err() {
                eprintln!("inflight-openai: a response is not stored: its thread has ended");
            }
        }
    }

    /// Ends a response in the background.
    fn end(&self, database: &mut Database, response: Value) {
        let is_ended = database.end(self.owner, &response);
        if is_ended == Ok(true)
            && let Some(Command::Work(add)) = self.turn(&response)
        {
            add(database);
        }
    }

    /// Adds a response that has not failed to its conversation.
    fn turn(&self, response: &Value) -> Option<Command> {
        let id = self.conversation.clone()?;
        let has_turn = ["completed", "incomplete"]
            .iter()
            .any(|it| response["status"] == *it);
        let (owner, input) = (self.owner, self.input.clone());
        let output = items(response["output"].clone());
        let add = move |database: &mut Database| {
            let input = items(serde_json::from_str(&input).unwrap_or_default());
            let turn: Vec<_> = input.into_iter().map(stored).chain(output).collect();
            if let Err(error) = database.append(owner, &id, &turn) {
                eprintln!(
                    "inflight-openai: a response is not added to its conversation: {}",
                    error.message
                );
            }
        };
        has_turn.then(|| Command::Work(Box::new(add)))
    }
}

/// The id in a field `conversation`, a text or an object with an `id`.
fn conversation(body: &mut Body) -> Result<Option<String>, Error> {
    match body.take("conversation") {
        None => Ok(None),
        Some(Value::String(id)) => Ok(Some(id)),
        Some(Value::Object(fields)) if fields.get("id").is_some_and(Value::is_string) => {
            Ok(fields["id"].as_str().map(str::to_owned))
        }
        Some(other) => Err(wrong(
            "conversation",
            &other,
            "an id, or an object with an 'id'",
        )),
    }
}

/// The error of a server without a store.
pub fn not_stored() -> Error {
    let problem = "nothing is stored: start the server with --response-store";
    Error::new(StatusCode::NOT_FOUND, problem)
}

/// Whether a response is not complete.
pub fn is_open(response: &Value) -> bool {
    [QUEUED, "in_progress"]
        .iter()
        .any(|status| response["status"] == *status)
}

/// Works until there is nobody who could send a command.
fn run(mut database: Database, commands: &Receiver<Command>, num_pending_bytes: &AtomicUsize) {
    while let Ok(command) = commands.recv() {
        match command {
            Command::Store(row, room) => {
                if let Err(error) = database.store(&row) {
                    eprintln!(
                        "inflight-openai: the response {} is not stored: {error}",
                        row.id
                    );
                }
                num_pending_bytes.fetch_sub(row.num_bytes(), Ordering::Relaxed);
                drop(room);
            }
            Command::Work(work) => work(&mut database),
        }
    }
}
