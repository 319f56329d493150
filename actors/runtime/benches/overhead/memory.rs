//! Counts the bytes that are allocated and not yet freed. Owner: this program. Invariant: it only counts; memory comes
//! from the system allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

#[global_allocator]
static COUNTING: Counting = Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: every call is handed to `System` unchanged, which keeps the contract of `GlobalAlloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: `at` came from `alloc` above, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Bytes in use.
pub fn live() -> i64 {
    LIVE.load(Ordering::Relaxed)
}
