//! The rows of images that the runner keeps: which are there, which a step encodes, and which make room.
//!
//! ```text
//! max_cached_tokens   | image A | image B | free |      a step needs A and C: B is evicted, C is encoded
//! ```
//!
//! Images are known by the hashes of their contents. Those that were used longest ago are evicted first, but none that
//! the step needs. An image evicted before its context is complete is encoded again.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::image::{Image, PromptImages};
use crate::image_limits::ImageLimits;
use crate::image_plan::{ImageMove, ImageSlot};
use inflight_base::Tokens;

/// The rows that the runner has once it has made the moves of all planned steps.
pub(super) struct ImageCache {
    limits: ImageLimits,
    by_hash: BTreeMap<u128, ImageSlot>,
    images: Vec<Option<CachedImage>>,
    /// The slots by when they were used last.
    by_use: BTreeMap<u64, ImageSlot>,
    free_slots: Vec<ImageSlot>,
    num_tokens: Tokens,
    num_uses: u64,
    /// The first use of the step that is being planned.
    first_use_of_step: u64,
    num_encoded: Tokens,
    /// Moves of the step that is being planned.
    moves: Vec<ImageMove>,
}

struct CachedImage {
    hash: u128,
    num_tokens: Tokens,
    last_use: u64,
}

impl ImageCache {
    pub(super) fn new(limits: ImageLimits) -> Self {
        Self {
            limits,
            by_hash: BTreeMap::new(),
            images: Vec::new(),
            by_use: BTreeMap::new(),
            free_slots: Vec::new(),
            num_tokens: Tokens::ZERO,
            num_uses: 0,
            first_use_of_step: 0,
            num_encoded: Tokens::ZERO,
            moves: Vec::new(),
        }
    }

    /// Begins a step, in which nothing is used and encoded yet.
    pub(super) fn begin_step(&mut self) {
        self.first_use_of_step = self.num_uses;
        self.num_encoded = Tokens::ZERO;
    }

    /// Has the step use an image: finds it, or plans to encode it. A step encodes any number of images up to the
    /// limit, and one image in any case; without a limit if `is_whole`, for a context that is not cut. Returns whether
    /// the step has the rows.
    pub(super) fn take(&mut self, image: &Image, is_whole: bool) -> bool {
        if let Some(&slot) = self.by_hash.get(&image.hash()) {
            self.touch(slot);
            return true;
        }
        let num_tokens = image.num_tokens();
        let all = self.num_encoded + num_tokens;
        let is_first = self.num_encoded == Tokens::ZERO;
        if all > self.limits.max_num_tokens && !is_first && !is_whole {
            return false;
        }
        if !self.make_room(num_tokens) {
            return false;
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.images.push(None);
            ImageSlot(self.images.len() as u32 - 1)
        });
        self.images[slot.index()] = Some(CachedImage {
            hash: image.hash(),
            num_tokens,
            last_use: self.num_uses,
        });
        self.by_use.insert(self.num_uses, slot);
        self.num_uses += 1;
        self.by_hash.insert(image.hash(), slot);
        self.num_tokens += num_tokens;
        self.num_encoded = all;
        let image = image.clone();
        self.moves.push(ImageMove::Encode { slot, image });
        true
    }

    /// [Takes](Self::take) the images of a prompt at the positions `chunk`. Returns where the first one begins that the
    /// step does not have; `None`: it has all.
    pub(super) fn take_within(
        &mut self,
        of_prompt: &PromptImages,
        chunk: Range<Tokens>,
        is_whole: bool,
    ) -> Option<Tokens> {
        let mut within = of_prompt.within(chunk.clone());
        let missing = within.find(|span| !self.take(&span.image, is_whole))?;
        Some(missing.position.max(chunk.start))
    }

    /// Where the rows of an image are that the step has [taken](Self::take).
    pub(super) fn slot(&self, image: &Image) -> ImageSlot {
        self.by_hash[&image.hash()]
    }

    /// The moves that were planned and that no step has taken along.
    pub(super) fn moves(&self) -> &[ImageMove] {
        &self.moves
    }

    /// A step has taken them along.
    pub(super) fn clear_moves(&mut self) {
        self.moves.clear();
    }

    /// Evicts images that the step does not use, until `num_tokens` more fit. Returns whether there is;
    /// if not, nothing has changed.
    fn make_room(&mut self, num_tokens: Tokens) -> bool {
        let evictable = self.by_use.range(..self.first_use_of_step);
        let sizes = evictable.map(|(_, slot)| self.cached(*slot).num_tokens);
        let kept = self.num_tokens - sizes.sum::<Tokens>();
        if kept + num_tokens > self.limits.max_cached_tokens {
            return false;
        }
        while self.num_tokens + num_tokens > self.limits.max_cached_tokens
            && let Some((_, slot)) = self.by_use.pop_first()
            && let Some(evicted) = self.images[slot.index()].take()
        {
            self.by_hash.remove(&evicted.hash);
            self.num_tokens -= evicted.num_tokens;
            self.free_slots.push(slot);
            self.moves.push(ImageMove::Evict(slot));
        }
        true
    }

    fn touch(&mut self, slot: ImageSlot) {
        let now = self.num_uses;
        self.num_uses += 1;
        let image = self.images[slot.index()].as_mut();
        let image = image.expect("a slot that a hash has");
        self.by_use.remove(&image.last_use);
        image.last_use = now;
        self.by_use.insert(now, slot);
    }

    fn cached(&self, slot: ImageSlot) -> &CachedImage {
        let image = self.images[slot.index()].as_ref();
        image.expect("a slot in use")
    }

    /// Panics unless the slots, the hashes and the counts agree.
    pub(super) fn check_integrity(&self) {
        let mut num_tokens = Tokens::ZERO;
        let mut num_images = 0;
        for (index, image) in self.images.iter().enumerate() {
            let slot = ImageSlot(index as u32);
            let Some(image) = image else {
                assert!(self.free_slots.contains(&slot), "{slot:?} is lost");
                continue;
            };
            num_images += 1;
            num_tokens += image.num_tokens;
            assert_eq!(self.by_hash.get(&image.hash), Some(&slot));
            assert_eq!(self.by_use.get(&image.last_use), Some(&slot));
        }
        assert_eq!(num_images, self.by_hash.len(), "every image can be found");
        assert_eq!(num_images, self.by_use.len(), "every image can be evicted");
        assert_eq!(num_images + self.free_slots.len(), self.images.len());
        assert_eq!(num_tokens, self.num_tokens, "tokens of all images");
        assert!(num_tokens <= self.limits.max_cached_tokens);
    }
}
