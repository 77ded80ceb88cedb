//! Keys of image tokens, for prefix reuse.
//!
//! ```text
//! prompt    5  8  7  7  7  7  3  7  7  7  7  9        7: the image token
//! keys      5  8  A  A  A  A  3  B  B  B  B  9        A, B: numbers of the images, above all token ids
//! ```
//!
//! Equal keys from the beginning of two prompts mean equal images, and equal positions in them. The number of an image
//! is never given to another one. An image that is forgotten gets a new number: blocks with its old one are found no
//! longer, and are evicted in time.

use std::collections::BTreeMap;

use inflight_base::TokenId;

/// The first number. Token ids are below it.
const FIRST: TokenId = 1 << 31;

/// The images that have a number.
pub(super) struct ImageKeys {
    max_images: usize,
    by_hash: BTreeMap<u128, Known>,
    /// The images by when they were seen last.
    by_use: BTreeMap<u64, u128>,
    num_uses: u64,
    next: TokenId,
}

#[derive(Clone, Copy)]
struct Known {
    key: TokenId,
    last_use: u64,
}

/// Whether a key stands for a token of an image.
pub(super) fn is_of_image(key: TokenId) -> bool {
    key >= FIRST
}

impl ImageKeys {
    /// Remembers up to `max_images` images, at least one.
    pub(super) fn new(max_images: usize) -> Self {
        Self {
            max_images: max_images.max(1),
            by_hash: BTreeMap::new(),
            by_use: BTreeMap::new(),
            num_uses: 0,
            next: FIRST,
        }
    }

    /// The number of an image. `None` once there are no more numbers.
    pub(super) fn key_of(&mut self, hash: u128) -> Option<TokenId> {
        let this_use = self.num_uses;
        self.num_uses += 1;
        let key = match self.by_hash.get(&hash) {
            Some(known) => {
                self.by_use.remove(&known.last_use);
                known.key
            }
            None => {
                let key = self.next;
                self.next = key.checked_add(1)?;
                if self.by_hash.len() == self.max_images
                    && let Some((_, oldest)) = self.by_use.pop_first()
                {
                    self.by_hash.remove(&oldest);
                }
                key
            }
        };
        let known = Known {
            key,
            last_use: this_use,
        };
        self.by_hash.insert(hash, known);
        self.by_use.insert(this_use, hash);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_keeps_its_number_until_it_is_forgotten() {
        let mut keys = ImageKeys::new(2);
        let mut key_of = |hash| keys.key_of(hash).expect("a number");
        let (first, second) = (key_of(1), key_of(2));
        assert!(first != second && is_of_image(first) && is_of_image(second));
        assert_eq!(key_of(1), first);
        let third = key_of(3);
        // The second was seen longest ago.
        assert_eq!(key_of(1), first);
        let again = key_of(2);
        assert!(![first, second, third].contains(&again));
    }

    #[test]
    fn no_number_is_given_twice() {
        let mut keys = ImageKeys::new(4);
        keys.next = TokenId::MAX - 1;
        assert_eq!(keys.key_of(1), Some(TokenId::MAX - 1));
        assert_eq!(keys.key_of(2), None);
        assert_eq!(keys.key_of(1), Some(TokenId::MAX - 1));
    }
}
