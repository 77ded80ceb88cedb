//! The bodies of requests, and the room that they share.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Error;
use crate::beside_streams::beside_streams;
use crate::body::Body;
use crate::downloads::Downloads;
use crate::keys::Client;

/// Limits of requests.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest body of a request.
    pub max_request_bytes: usize,
    /// The most bytes of bodies that have not been passed on yet, of all requests together.
    pub max_body_bytes: usize,
    /// The most requests to Triton that are in flight. Each prompt of a request counts.
    pub max_requests: usize,
    /// How long the body of a request may take to arrive.
    pub max_body_time: Duration,
}

/// The body of a request, and its place among those in flight.
pub struct Content {
    /// The client that has sent it.
    pub client: Client,
    bytes: Vec<u8>,
    /// Bytes of a stored conversation that the request continues.
    num_more_bytes: usize,
    /// The room of the bytes.
    pub room: Option<OwnedSemaphorePermit>,
}

impl Content {
    /// The bytes of the body, and of what it continues.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len() + self.num_more_bytes
    }

    /// Adds the bytes of a stored conversation, with their room.
    pub fn grow(&mut self, room: OwnedSemaphorePermit, num_bytes: usize) {
        self.num_more_bytes += num_bytes;
        match &mut self.room {
            Some(own) => own.merge(room),
            None => self.room = Some(room),
        }
    }
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads the bodies of requests.
#[derive(Debug)]
pub struct Bodies {
    limits: Limits,
    /// Bytes that bodies may have together.
    room: Arc<Semaphore>,
    /// Downloads their images. `None` if none are downloaded.
    downloads: Option<Downloads>,
}

impl Bodies {
    /// Bodies within these limits.
    pub fn new(limits: Limits, downloads: Option<Downloads>) -> Self {
        Self {
            limits,
            downloads,
            room: Arc::new(Semaphore::new(limits.max_body_bytes)),
        }
    }

    /// The body of a request.
    ///
    /// # Errors
    /// It is too large or too slow, or there is no room for it, or one of its images is not downloaded.
    pub async fn read(&self, request: Request) -> Result<Content, Error> {
        let limit = self.limits.max_body_time;
        let content = tokio::time::timeout(limit, self.read_at_last(request)).await;
        let content = content.unwrap_or_else(|_| Err(Error::too_slow(limit)))?;
        match &self.downloads {
            Some(downloads) => self.with_images(content, downloads).await,
            None => Ok(content),
        }
    }

    /// A body with the images that are at URLs.
    async fn with_images(
        &self,
        mut content: Content,
        downloads: &Downloads,
    ) -> Result<Content, Error> {
        let max_bytes = self.limits.max_request_bytes;
        if let Some(bytes) = downloads.fill(&content.bytes, max_bytes).await? {
            let more = self.room(bytes.len().saturating_sub(content.bytes.len()))?;
            content.grow(more, 0);
            content.bytes = bytes;
        }
        Ok(content)
    }

    async fn read_at_last(&self, request: Request) -> Result<Content, Error> {
        let max_bytes = self.limits.max_request_bytes;
        let client = Client::of(&request);
        let mut bytes = Vec::new();
        let mut room: Option<OwnedSemaphorePermit> = None;
        let mut parts = request.into_body().into_data_stream();
        while let Some(part) = parts.next().await {
            let part: Bytes =
                part.map_err(|error| Error::invalid(format!("the body cannot be read: {error}")))?;
            if part.len() > max_bytes - bytes.len() {
                return Err(Error::too_large(max_bytes));
            }
            let more = self.room(part.len())?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            bytes.extend_from_slice(&part);
        }
        Ok(Content {
            client,
            bytes,
            num_more_bytes: 0,
            room,
        })
    }

    /// Room for bytes of bodies.
    ///
    /// # Errors
    /// There is none now.
    pub fn room(&self, num_bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let num = u32::try_from(num_bytes).unwrap_or(u32::MAX);
        let room = self.room.clone().try_acquire_many_owned(num);
        room.map_err(|_| Error::too_many_bytes(self.limits.max_body_bytes))
    }

    /// The body of a request, and its fields.
    ///
    /// # Errors
    /// As [`Bodies::read`], or the body is no JSON object.
    pub async fn fields(&self, request: Request) -> Result<(Content, Body), Error> {
        let bytes = self.read(request).await?;
        let body = beside_streams(bytes.len(), || Body::parse(&bytes)).await?;
        Ok((bytes, body))
    }
}
