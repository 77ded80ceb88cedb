//! The replies to the prompts of a request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::SelectAll;
use futures_util::{Stream, StreamExt};

use crate::Error;
use crate::generation::Reply;
use crate::load::Held;
use crate::triton::Replies;

/// A reply to one of the prompts of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Which prompt.
    pub prompt: usize,
    /// The reply.
    pub reply: Reply,
}

/// The replies to all prompts of a request, as they come. Whoever drops the stream has what is in flight stopped.
pub struct Answers {
    first: Option<Answer>,
    replies: Source,
}

enum Source {
    /// The usual request has one prompt. It needs no set of streams.
    One(Numbered),
    Several(SelectAll<Numbered>),
}

/// The replies to a prompt.
struct Numbered {
    prompt: usize,
    replies: Replies,
}

impl Answers {
    /// The replies to prompts, in their order. `held` is what the prompts hold while they are in flight.
    pub fn new(replies: impl IntoIterator<Item = Replies>, held: Held) -> Self {
        let held = Arc::new(held);
        let replies = replies.into_iter().enumerate();
        let mut all: Vec<_> = replies
            .map(|(prompt, replies)| Numbered {
                prompt,
                replies: replies.holding(held.clone()),
            })
            .collect();
        let only = if all.len() == 1 { all.pop() } else { None };
        Self {
            first: None,
            replies: match only {
                Some(only) => Source::One(only),
                None => Source::Several(all.into_iter().collect()),
            },
        }
    }

    /// Waits for the first answer, which the stream then begins with.
    ///
    /// # Errors
    /// The first item is an error, which ends the whole request.
    pub async fn begun(mut self) -> Result<Self, Error> {
        match self.next().await {
            Some(first) => self.first = Some(first?),
            None => return Err(Error::bad_response("no outputs")),
        }
        Ok(self)
    }

    /// The warning of the first answer. None before that answer has arrived.
    pub fn warning(&self) -> Option<String> {
        self.first.as_ref()?.reply.warning.clone()
    }
}

impl Stream for Answers {
    type Item = Result<Answer, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        match &mut self.replies {
            Source::One(replies) => replies.poll_next_unpin(context),
            Source::Several(all) => all.poll_next_unpin(context),
        }
    }
}

impl Stream for Numbered {
    type Item = Result<Answer, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let prompt = self.prompt;
        let next = self.replies.poll_next_unpin(context);
        next.map_ok(|reply| Answer { prompt, reply })
    }
}
