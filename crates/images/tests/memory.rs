//! The memory that decoding takes is bounded by the size in the header. A test binary of its own, because it replaces
//! the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use inflight_images::{ImageLimits, decode};

const FILES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/fixtures/images/files"
);

/// Bytes that are allocated now, and the most at a time.
static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

struct CountingAllocator;

// SAFETY: every call goes to the system's allocator as it is; counting touches no memory of it.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let num_bytes = NUM_BYTES.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST_BYTES.fetch_max(num_bytes, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NUM_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Bytes of a decoder beside the image: tables, and blocks of a compressed stream.
const NUM_FIXED_BYTES: usize = 4 << 20;
const MAX_BYTES_PER_PIXEL: usize = 20;

/// The most bytes that decoding allocates at a time.
fn most_bytes(data: &[u8], limits: &ImageLimits) -> usize {
    let before = NUM_BYTES.load(Ordering::Relaxed);
    MOST_BYTES.store(before, Ordering::Relaxed);
    drop(decode(data, limits));
    MOST_BYTES.load(Ordering::Relaxed) - before
}

#[test]
fn memory_is_bounded_by_the_limit_of_pixels_whatever_the_header_says() {
    let limits = ImageLimits {
        max_image_pixels: 1 << 18,
        ..ImageLimits::default()
    };
    let bound = NUM_FIXED_BYTES + limits.max_image_pixels * MAX_BYTES_PER_PIXEL;
    let mut most = 0;
    for entry in fs::read_dir(FILES).expect("the folder of images") {
        let path = entry.expect("an entry").path();
        let (name, mut data) = (path.display(), fs::read(&path).expect("an image"));
        for place in 0..data.len().min(200) {
            let byte = data[place];
            for changed in [0, 1, 2, 0x7f, 0xff] {
                data[place] = changed;
                let num_bytes = most_bytes(&data, &limits);
                assert!(
                    num_bytes <= bound,
                    "{name} with {changed} at {place}: {num_bytes}"
                );
                most = most.max(num_bytes);
            }
            data[place] = byte;
        }
    }
    // Some header is changed to a large image that is within the limit.
    assert!(most > limits.max_image_pixels * 4, "{most}");
}
