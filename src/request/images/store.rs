//! Processed images. Those that were used last are kept for later requests.
//!
//! ```text
//! max_bytes   | kept, in use | kept | in use only | free |
//! ```
//!
//! The patches of an image live as long as a request has them, and as long as the store keeps them. Both count.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use inflight_base::{RequestError, Tokens};
use inflight_engine::Image;
use inflight_images::{ImagePatches, ImagePrompt};
use inflight_triton::{Error, ErrorCode};

/// Key of a processed image: its hash, and the number of images in the prompt, where patches depend on it.
pub type ImageKey = ([u8; 32], usize);

/// A processed image.
pub struct StoredImage {
    /// The text and the tokens in place of its placeholder.
    pub prompt: ImagePrompt,
    /// The runs of image tokens in its prompt.
    pub runs: Vec<ImageRun>,
}

/// Consecutive image tokens.
#[derive(Clone)]
pub struct ImageRun {
    /// The image, or the tile, whose rows they stand for.
    pub image: Image,
    /// The row of the first token.
    pub first_row: Tokens,
    /// The tokens.
    pub num_tokens: Tokens,
}

/// The processed images of a model.
pub struct ImageStore {
    max_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    images: BTreeMap<ImageKey, Entry>,
    num_uses: u64,
}

struct Entry {
    /// `None` once it is no longer kept.
    kept: Option<Arc<StoredImage>>,
    patches: Vec<Weak<ImagePatches>>,
    num_bytes: u64,
    last_use: u64,
}

impl ImageStore {
    /// A store of `max_bytes`.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            state: Mutex::default(),
        }
    }

    /// An image that is kept.
    pub fn find(&self, key: &ImageKey) -> Option<Arc<StoredImage>> {
        let mut state = self.state.lock();
        state.num_uses += 1;
        let now = state.num_uses;
        let entry = state.images.get_mut(key)?;
        entry.last_use = now;
        entry.kept.clone()
    }

    /// Keeps an image, whose runs have these `patches`.
    ///
    /// # Errors
    /// It is larger than the store, or than what other requests leave of it.
    pub fn add(
        &self,
        key: ImageKey,
        image: StoredImage,
        patches: &[Arc<ImagePatches>],
    ) -> Result<Arc<StoredImage>, Error> {
        let sizes = patches.iter().map(|it| size_of_val(&it.values[..]) as u64);
        let num_bytes = sizes.sum();
        let max_bytes = self.max_bytes;
        if num_bytes > max_bytes {
            return Err(RequestError::Invalid(format!(
                "its patches have {num_bytes} bytes, and image_memory_bytes is {max_bytes}; send a smaller image"
            ))
            .into());
        }
        // Dropped after the lock.
        let mut _evicted = Vec::new();
        let mut state = self.state.lock();
        _evicted = state.make_room(max_bytes - num_bytes);
        let taken = state.num_bytes();
        if taken > max_bytes - num_bytes {
            return Err(Error::new(
                ErrorCode::Unavailable,
                format!(
                    "its patches have {num_bytes} bytes, and the images of requests in flight have {taken} of \
                     image_memory_bytes = {max_bytes}; try again when some are done"
                ),
            ));
        }
        let image = Arc::new(image);
        state.num_uses += 1;
        let entry = Entry {
            kept: Some(image.clone()),
            patches: patches.iter().map(Arc::downgrade).collect(),
            num_bytes,
            last_use: state.num_uses,
        };
        state.images.insert(key, entry);
        Ok(image)
    }
}

impl State {
    /// Bytes of all patches that are alive.
    fn num_bytes(&self) -> u64 {
        self.images.values().map(|entry| entry.num_bytes).sum()
    }

    /// Forgets what nobody has, and keeps no more images than leave at most `max_bytes` where possible. Returns those
    /// that are no longer kept.
    fn make_room(&mut self, max_bytes: u64) -> Vec<Arc<StoredImage>> {
        self.images.retain(|_, entry| entry.is_alive());
        let mut num_bytes = self.num_bytes();
        let mut by_use: Vec<_> = self.images.values_mut().collect();
        by_use.sort_by_key(|entry| entry.last_use);
        let mut evicted = Vec::new();
        for entry in by_use {
            if num_bytes <= max_bytes {
                break;
            }
            if !entry.is_in_use() {
                num_bytes -= entry.num_bytes;
                entry.num_bytes = 0;
                evicted.extend(entry.kept.take());
            }
        }
        self.images
            .retain(|_, entry| entry.num_bytes > 0 || entry.kept.is_some());
        evicted
    }
}

impl Entry {
    fn is_alive(&self) -> bool {
        self.kept.is_some() || self.patches.iter().any(|it| it.strong_count() > 0)
    }

    /// Whether a request has the image or its patches.
    fn is_in_use(&self) -> bool {
        let Some(kept) = &self.kept else {
            return true;
        };
        // Each run that is kept holds its patches once.
        Arc::strong_count(kept) > 1 || self.patches.iter().any(|it| it.strong_count() > 1)
    }
}

#[cfg(test)]
mod tests {
    use inflight_images::RowLayout;

    use super::*;

    /// An image of `num_values` values under the key `number`.
    fn add(store: &ImageStore, number: u8, num_values: usize) -> Result<Arc<StoredImage>, Error> {
        let patches = Arc::new(ImagePatches {
            values: vec![0.0; num_values],
            tiles: Vec::new(),
            num_tokens: 1,
            row_layout: RowLayout::Tiles,
        });
        let image = StoredImage {
            prompt: ImagePrompt::default(),
            runs: vec![ImageRun {
                image: Image::new(number.into(), Tokens(1), patches.clone()),
                first_row: Tokens(0),
                num_tokens: Tokens(1),
            }],
        };
        store.add(key(number), image, &[patches])
    }

    fn key(number: u8) -> ImageKey {
        ([number; 32], 1)
    }

    #[test]
    fn images_that_were_used_longest_ago_make_room() {
        let store = ImageStore::new(40);
        for number in [1, 2] {
            add(&store, number, 5).expect("room");
        }
        assert!(store.find(&key(1)).is_some());
        add(&store, 3, 5).expect("the second makes room");
        assert!(store.find(&key(2)).is_none());
        assert!(store.find(&key(1)).is_some() && store.find(&key(3)).is_some());
        add(&store, 4, 10).expect("both make room");
        assert!(store.find(&key(1)).is_none() && store.find(&key(3)).is_none());
    }

    #[test]
    fn images_of_requests_count_until_these_are_gone() {
        let store = ImageStore::new(40);
        let first = add(&store, 1, 5).expect("room");
        // A request keeps only the runs.
        let runs = first.runs.clone();
        drop(first);
        let error = add(&store, 2, 6).err().expect("no room");
        assert_eq!(error.code(), ErrorCode::Unavailable);
        assert!(
            error.message().contains("20 of image_memory_bytes = 40"),
            "{error}"
        );
        assert!(store.find(&key(1)).is_some(), "it would not make room");
        drop(runs);
        add(&store, 2, 6).expect("room");
        let error = add(&store, 3, 11).err().expect("never room");
        assert!(error.message().contains("send a smaller image"), "{error}");
    }
}
