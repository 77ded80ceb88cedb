//! `/v1/conversations`: lists of items that a client keeps on the server.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Extension, Path, Request, State};
use axum::http::Uri;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::Error;
use crate::body::{Body, wrong};
use crate::content::Bodies;
use crate::items::new_items;
use crate::json_response::json_response;
use crate::keys::Client;
use crate::response_store::{Page, PageQuery, ResponseStore, not_stored};

/// The most members of `metadata`, and the most characters of their names and values, as in OpenAI's API.
const MAX_METADATA: [usize; 3] = [16, 64, 512];
/// The most items of a page, and those of one that does not say.
const MAX_PAGE: usize = 100;
const DEFAULT_PAGE: usize = 20;

#[derive(Clone)]
struct Conversations {
    bodies: Arc<Bodies>,
    store: Option<ResponseStore>,
}

/// The paths, whose bodies are read from `bodies`.
pub fn routes<S: Clone + Send + Sync + 'static>(
    bodies: Arc<Bodies>,
    store: Option<ResponseStore>,
) -> Router<S> {
    Router::new()
        .route("/v1/conversations", post(create))
        .route(
            "/v1/conversations/{id}",
            get(retrieve).post(update).delete(delete),
        )
        .route("/v1/conversations/{id}/items", get(list).post(add))
        .route(
            "/v1/conversations/{id}/items/{item}",
            get(item).delete(delete_item),
        )
        .with_state(Conversations { bodies, store })
}

async fn create(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Result<Response, Error> {
    let store = state.store()?;
    let (_content, mut body) = state.bodies.fields(request).await?;
    let metadata = metadata(&mut body)?.unwrap_or_else(|| json!({}));
    let items = match body.take("items") {
        Some(items) => new_items("items", items)?,
        None => Vec::new(),
    };
    check_ended(&body)?;
    let made = store.create_conversation(client.owner, metadata, items);
    Ok(json_response(&made.await?))
}

async fn retrieve(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let found = state.store()?.conversation(client.owner, id);
    Ok(json_response(&found.await?))
}

async fn update(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Error> {
    let store = state.store()?;
    let (_content, mut body) = state.bodies.fields(request).await?;
    let missing = || Error::field("metadata", "'metadata' is missing: give an object of texts");
    let metadata = metadata(&mut body)?.ok_or_else(missing)?;
    check_ended(&body)?;
    let changed = store.set_metadata(client.owner, id, metadata);
    Ok(json_response(&changed.await?))
}

async fn delete(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let store = state.store()?;
    store.delete_conversation(client.owner, id.clone()).await?;
    Ok(json_response(
        &json!({"id": id, "object": "conversation.deleted", "deleted": true}),
    ))
}

async fn list(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, Error> {
    let query = page_query(uri.query().unwrap_or_default())?;
    let page = state.store()?.page(client.owner, id, query);
    Ok(json_response(&list_of(page.await?)))
}

async fn add(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Error> {
    let store = state.store()?;
    let (_content, mut body) = state.bodies.fields(request).await?;
    let missing = || Error::field("items", "'items' is missing: give a list of items");
    let items = new_items("items", body.take("items").ok_or_else(missing)?)?;
    check_ended(&body)?;
    let items = store.add_items(client.owner, id, items).await?;
    let has_more = false;
    Ok(json_response(&list_of(Page { items, has_more })))
}

async fn item(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let found = state.store()?.item(client.owner, id, item_id);
    Ok(json_response(&found.await?))
}

async fn delete_item(
    State(state): State<Conversations>,
    Extension(client): Extension<Client>,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Response, Error> {
    let conversation = state.store()?.delete_item(client.owner, id, item_id);
    Ok(json_response(&conversation.await?))
}

impl Conversations {
    fn store(&self) -> Result<&ResponseStore, Error> {
        self.store.as_ref().ok_or_else(not_stored)
    }
}

/// The field `metadata`: texts by name.
fn metadata(body: &mut Body) -> Result<Option<Value>, Error> {
    let Some(value) = body.take("metadata") else {
        return Ok(None);
    };
    let [max_members, max_name, max_value] = MAX_METADATA;
    let is_short = |text: &str, max: usize| text.chars().nth(max).is_none();
    let is_sound = value.as_object().is_some_and(|members| {
        members.len() <= max_members
            && members.iter().all(|(name, value)| {
                is_short(name, max_name) && value.as_str().is_some_and(|it| is_short(it, max_value))
            })
    });
    match is_sound {
        true => Ok(Some(value)),
        false => {
            let expected = format!(
                "an object of at most {max_members} texts of at most {max_value} characters, with names of at most \
                 {max_name}"
            );
            Err(wrong("metadata", &value, &expected))
        }
    }
}

fn check_ended(body: &Body) -> Result<(), Error> {
    match body.first_left() {
        None => Ok(()),
        Some(name) => {
            let problem = format!("'{name}' is no field of conversations; leave it out");
            Err(Error::field(&name, problem))
        }
    }
}

/// The items that the query of an address asks for.
fn page_query(query: &str) -> Result<PageQuery, Error> {
    let mut found = PageQuery {
        after: None,
        max_items: DEFAULT_PAGE,
        is_descending: true,
    };
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        match name {
            "after" => found.after = Some(value.to_owned()),
            "limit" => {
                let number = value.parse().ok();
                let number = number.filter(|number| (1..=MAX_PAGE).contains(number));
                let expected = format!("a whole number from 1 to {MAX_PAGE}");
                found.max_items = number.ok_or_else(|| wrong(name, &json!(value), &expected))?;
            }
            "order" if value == "asc" || value == "desc" => found.is_descending = value == "desc",
            "order" => return Err(wrong(name, &json!(value), "'asc' or 'desc'")),
            // What items may include besides, which those here have not.
            _ => {}
        }
    }
    Ok(found)
}

fn list_of(page: Page) -> Value {
    let id = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    json!({
        "object": "list",
        "first_id": id(page.items.first()),
        "last_id": id(page.items.last()),
        "has_more": page.has_more,
        "data": page.items,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_described_by_a_query() {
        let query = |after: Option<&str>, max_items, is_descending| PageQuery {
            after: after.map(str::to_owned),
            max_items,
            is_descending,
        };
        for (text, expected) in [
            ("", query(None, 20, true)),
            ("limit=100&order=asc", query(None, 100, false)),
            (
                "include[]=x&after=msg-1&order=desc",
                query(Some("msg-1"), 20, true),
            ),
        ] {
            assert_eq!(page_query(text), Ok(expected), "{text}");
        }
        for (text, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("order=up", "order"),
        ] {
            let error = page_query(text).expect_err(text);
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn metadata_are_few_short_texts() {
        let read = |value: Value| {
            metadata(&mut Body::parse(
                json!({"metadata": value}).to_string().as_bytes(),
            )?)
        };
        let longest = json!({"é".repeat(64): "é".repeat(512)});
        assert_eq!(read(longest.clone()), Ok(Some(longest)));
        let many: serde_json::Map<_, _> = (0..17).map(|i| (i.to_string(), json!("x"))).collect();
        for wrong in [
            json!({"a": 1}),
            json!("a"),
            json!({"x".repeat(65): "a"}),
            json!({"a": "x".repeat(513)}),
            many.into(),
        ] {
            assert!(read(wrong).is_err());
        }
    }
}
