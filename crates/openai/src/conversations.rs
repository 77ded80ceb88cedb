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
use crate::pages::{list_of, page_query};
use crate::response_store::{Page, ResponseStore, not_stored};

/// The most members of `metadata`, and the most characters of their names and values, as in OpenAI's API.
const MAX_METADATA: [usize; 3] = [16, 64, 512];
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
///
/// # Errors
/// It is something else, or has too much.
pub fn metadata(body: &mut Body) -> Result<Option<Value>, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
