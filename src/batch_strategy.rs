//! How Triton's dynamic batcher forms the batches of a model: a batch is complete when the requests in it need all KV
//! blocks that are free, or the token budget of a step. Those behind it stay in Triton's queue, where its priorities,
//! limits and time-outs act on them.
//!
//! ```text
//! step       publishes the room for further requests: free blocks, tokens of the budget
//! batch      begins with the largest room of the model's instances
//! request    takes its volume of it; the first that does not fit begins the next batch
//! ```
//!
//! Triton calls this with the lock of its queue held, so nothing here waits or takes time in proportion to a prompt.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::request::volume::VolumeReader;
use inflight_engine::{Room, Volume};
use inflight_triton::Request;

/// The batches of one model.
#[derive(Debug)]
pub struct BatchStrategy {
    reader: VolumeReader,
    instances: Mutex<Vec<PublishedRoom>>,
    batch: Mutex<Batch>,
}

/// The room of an instance beside the requests that it has. `None`: there is no limit.
#[derive(Clone, Debug)]
pub struct PublishedRoom {
    room: Arc<Mutex<Option<Room>>>,
    reader: VolumeReader,
}

#[derive(Debug, Default)]
struct Batch {
    is_empty: bool,
    /// What is left for it; `None`: there is no limit.
    room: Option<Room>,
}

impl BatchStrategy {
    /// For a model whose volumes `reader` reads, and that has no instances yet.
    pub fn new(reader: VolumeReader) -> Self {
        Self {
            reader,
            instances: Mutex::default(),
            batch: Mutex::default(),
        }
    }

    /// Adds an instance. Returns where it publishes its room.
    pub fn add_instance(&self) -> PublishedRoom {
        let room = PublishedRoom {
            room: Arc::default(),
            reader: self.reader.clone(),
        };
        self.instances.lock().push(room.clone());
        room
    }

    /// Begins a batch.
    pub fn begin(&self) {
        let instances = self.instances.lock();
        let rooms = instances
            .iter()
            .filter_map(|instance| *instance.room.lock());
        *self.batch.lock() = Batch {
            is_empty: true,
            room: rooms.max_by_key(|room| (room.blocks, room.tokens)),
        };
    }

    /// Whether a request joins the batch.
    pub fn includes(&self, request: &Request) -> bool {
        self.batch.lock().includes(|| self.reader.read(request))
    }
}

impl PublishedRoom {
    /// Says what the engine has room for beside requests that it has not seen yet.
    pub fn publish(&self, mut room: Room, unseen: &[Volume]) {
        for volume in unseen {
            room.force(*volume);
        }
        *self.room.lock() = Some(room);
    }

    /// Takes the room of a request that is handed over. Returns its volume.
    pub fn take(&self, request: &Request) -> Volume {
        let volume = self.reader.read(request);
        if let Some(room) = &mut *self.room.lock() {
            room.force(volume);
        }
        volume
    }
}

impl Batch {
    /// Whether a request joins. The first always does: one that is larger than the room must start some time.
    fn includes(&mut self, volume: impl FnOnce() -> Volume) -> bool {
        let Some(room) = &mut self.room else {
            return true;
        };
        if std::mem::take(&mut self.is_empty) {
            room.force(volume());
            return true;
        }
        room.take(volume())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_base::{BlockSize, Blocks, Tokens};
    use inflight_config::InputKind;
    use inflight_engine::KvGroups;

    fn room(tokens: u32) -> Room {
        Room {
            blocks: Blocks(100),
            tokens: Tokens(tokens),
            block_size: BlockSize::new(16).expect("a size"),
            groups: KvGroups::one(None),
            max_seq_len: Tokens(1600),
            max_chunk: Tokens(1600),
            reserves_to_the_end: true,
        }
    }

    fn strategy() -> BatchStrategy {
        BatchStrategy::new(VolumeReader {
            input: InputKind::Ids,
            default_max_tokens: 16,
            text_lengths: Arc::default(),
        })
    }

    /// How many requests with prompts of these lengths join the batch that begins now.
    fn num_joined(strategy: &BatchStrategy, prompts: &[u32]) -> usize {
        strategy.begin();
        let joins = |prompt: &&u32| {
            let volume = Volume {
                prompt: Tokens(**prompt),
                output: Tokens(1),
            };
            strategy.batch.lock().includes(|| volume)
        };
        prompts.iter().take_while(joins).count()
    }

    #[test]
    fn a_batch_ends_before_the_request_that_does_not_fit() {
        let strategy = strategy();
        assert_eq!(num_joined(&strategy, &[1000; 9]), 9, "no instance yet");
        let (small, large) = (strategy.add_instance(), strategy.add_instance());
        let few_blocks = Room {
            blocks: Blocks(10),
            ..room(50)
        };
        small.publish(few_blocks, &[]);
        assert_eq!(num_joined(&strategy, &[20; 9]), 2);
        large.publish(room(100), &[]);
        assert_eq!(num_joined(&strategy, &[20; 9]), 5);
        let unseen = Volume {
            prompt: Tokens(30),
            output: Tokens(1),
        };
        large.publish(room(100), &[unseen]);
        assert_eq!(num_joined(&strategy, &[20; 9]), 3);
        assert_eq!(num_joined(&strategy, &[20, 60, 1]), 1, "in order");
    }

    #[test]
    fn the_first_request_joins_whatever_its_size() {
        let strategy = strategy();
        strategy.add_instance().publish(room(50), &[]);
        assert_eq!(num_joined(&strategy, &[51, 1]), 1);
        assert_eq!(num_joined(&strategy, &[50, 1]), 1);
        assert_eq!(num_joined(&strategy, &[49, 1, 1]), 2);
    }
}
