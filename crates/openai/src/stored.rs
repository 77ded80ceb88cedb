//! The paths of stored responses.

use axum::Router;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::Error;
use crate::background::Background;
use crate::json_response::json_response;
use crate::keys::Client;
use crate::response_store::{ResponseStore, is_open, not_stored};

#[derive(Clone)]
struct Stored {
    store: Option<ResponseStore>,
    background: Background,
}

/// The paths.
pub fn routes<S: Clone + Send + Sync + 'static>(
    store: Option<ResponseStore>,
    background: Background,
) -> Router<S> {
    Router::new()
        .route(
            "/v1/responses/{id}",
            get(stored_response).delete(delete_response),
        )
        .route("/v1/responses/{id}/input_items", get(input_items))
        .route("/v1/responses/{id}/cancel", post(cancel_response))
        .with_state(Stored { store, background })
}

/// Stops the work on a response in the background.
async fn cancel_response(
    State(stored): State<Stored>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let (store, owner) = (stored.store()?, client.owner);
    let mut response = store.get(owner, id.clone()).await?;
    if response["background"] != true {
        let problem =
            format!("'{id}' is not a background response; close its connection to stop it");
        return Err(Error::invalid(problem));
    }
    if is_open(&response) {
        stored.background.stop(&id);
        response["status"] = json!("cancelled");
        response = store.end(owner, response).await?;
    }
    Ok(json_response(&response))
}

async fn stored_response(
    State(stored): State<Stored>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let response = stored.store()?.get(client.owner, id).await?;
    Ok(json_response(&response))
}

async fn delete_response(
    State(stored): State<Stored>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let store = stored.store()?;
    store.delete(client.owner, id.clone()).await?;
    stored.background.stop(&id);
    Ok(json_response(
        &json!({"id": id, "object": "response", "deleted": true}),
    ))
}

/// The items of the request for a stored response, the last one first.
async fn input_items(
    State(stored): State<Stored>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, Error> {
    let mut items = stored.store()?.input(client.owner, id).await?;
    items.reverse();
    let id_of = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    Ok(json_response(&json!({
        "object": "list",
        "first_id": id_of(items.first()),
        "last_id": id_of(items.last()),
        "has_more": false,
        "data": items,
    })))
}

impl Stored {
    /// The stored responses.
    fn store(&self) -> Result<&ResponseStore, Error> {
        self.store.as_ref().ok_or_else(not_stored)
    }
}
