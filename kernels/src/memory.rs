//! Memory of kernels: byte ranges kept alive by their owner, and large zeroed buffers.
//!
//! Owner: [`Bytes`] shares a file mapping (or a vector) with everybody who reads it; [`Buffer`] owns its memory.
//! Invariant: a range of `Bytes` was checked against its owner once and never changes.

use crate::KernelError;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// A shared byte range, for example a tensor inside of a memory-mapped file.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// A range of `owner`, which stays alive as long as any clone of this value.
    ///
    /// Errors: a range that is not inside of the owner's bytes.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Result<Bytes, KernelError> {
        let len = (*owner).as_ref().len();
        if range.start > range.end || range.end > len {
            return Err(KernelError::ByteRange { start: range.start, end: range.end, len });
        }
        Ok(Bytes { owner, range })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        let range = 0..bytes.len();
        Bytes { owner: Arc::new(bytes), range }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({:?})", self.range)
    }
}

/// Zeroed memory, aligned to 64 bytes, whose pages the system provides when they are first touched. Buffers of
/// several huge pages are aligned to them and ask for them.
pub(crate) struct Buffer {
    start: *mut u8,
    len: usize,
    mapping: Mapping,
}

// SAFETY: a buffer owns its memory alone, like a `Vec`.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeroes. `what` names the use in the error for refused memory.
    pub(crate) fn zeroed(len: usize, what: &'static str) -> Result<Buffer, KernelError> {
        let max = isize::MAX as usize - 2 * HUGE_PAGE;
        if len > max {
            return Err(KernelError::Size { what, size: len, max });
        }
        let mapping = Mapping::new(len.max(1)).ok_or(KernelError::Memory { what, bytes: len })?;
        Ok(Buffer { start: mapping.start(), len, mapping })
    }

    /// Bytes of memory behind this buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.mapping.len()
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` bytes, which are initialised (zeroes).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({})", self.len)
    }
}

/// A mutable slice that the workers of one job write in disjoint parts.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a mutable borrow that `part` hands out in parts that do not overlap (its caller's promise).
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// No other borrow of these elements is alive. (The range is checked.)
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside of the slice (asserted) and not aliased (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

const HUGE_PAGE: usize = 2 << 20;

#[cfg(all(unix, not(miri)))]
use mapped::Mapping;
#[cfg(not(all(unix, not(miri))))]
use portable::Mapping;

#[cfg(all(unix, not(miri)))]
mod mapped {
    use super::HUGE_PAGE;

    /// An anonymous mapping; `offset` skips to the first huge page boundary.
    pub(super) struct Mapping {
        base: *mut libc::c_void,
        total: usize,
        offset: usize,
    }

    impl Mapping {
        pub(super) fn new(bytes: usize) -> Option<Mapping> {
            let large = bytes >= 2 * HUGE_PAGE;
            let total = if large { bytes.checked_add(HUGE_PAGE)? } else { bytes };
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new private mapping at an address that the system chooses; the result is checked.
            let base =
                unsafe { libc::mmap(std::ptr::null_mut(), total, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
            if base == libc::MAP_FAILED {
                return None;
            }
            let offset = if large { (base as usize).next_multiple_of(HUGE_PAGE) - base as usize } else { 0 };
            #[cfg(target_os = "linux")]
            if large {
                // SAFETY: the range lies inside of the mapping above. A refusal only costs speed.
                unsafe { libc::madvise(base.add(offset), total - offset, libc::MADV_HUGEPAGE) };
            }
            Some(Mapping { base, total, offset })
        }

        pub(super) fn start(&self) -> *mut u8 {
            // SAFETY: `offset` is below `total`.
            unsafe { self.base.add(self.offset).cast() }
        }

        pub(super) fn len(&self) -> usize {
            self.total - self.offset
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: exactly the mapping that `new` made, unmapped once.
            unsafe { libc::munmap(self.base, self.total) };
        }
    }
}

#[cfg(not(all(unix, not(miri))))]
mod portable {
    use std::alloc::Layout;

    /// Zeroed heap memory.
    pub(super) struct Mapping {
        start: *mut u8,
        layout: Layout,
    }

    impl Mapping {
        pub(super) fn new(bytes: usize) -> Option<Mapping> {
            let layout = Layout::from_size_align(bytes, 64).ok()?;
            // SAFETY: the caller passes at least one byte, so the layout is not empty.
            let start = unsafe { std::alloc::alloc_zeroed(layout) };
            (!start.is_null()).then_some(Mapping { start, layout })
        }

        pub(super) fn start(&self) -> *mut u8 {
            self.start
        }

        pub(super) fn len(&self) -> usize {
            self.layout.size()
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: allocated in `new` with this layout, freed once.
            unsafe { std::alloc::dealloc(self.start, self.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_of_the_owner_are_refused() {
        let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(vec![1u8, 2, 3]);
        assert_eq!(Bytes::new(owner.clone(), 1..3).map(|b| b.as_slice().to_vec()), Ok(vec![2, 3]));
        assert_eq!(
            Bytes::new(owner.clone(), 1..4).map(|_| ()),
            Err(KernelError::ByteRange { start: 1, end: 4, len: 3 })
        );
        let (start, end) = (2, 1);
        assert!(Bytes::new(owner, start..end).is_err());
    }

    #[test]
    fn buffers_are_zeroed_aligned_and_writable() {
        for len in [0, 1, 1000, if cfg!(miri) { 5003 } else { (5 << 20) + 3 }] {
            let mut buffer = Buffer::zeroed(len, "a test").unwrap();
            assert!(buffer.iter().all(|&v| v == 0));
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
            assert!(buffer.bytes() >= len);
            if let Some(last) = buffer.last_mut() {
                *last = 1;
                assert_eq!(buffer[len - 1], 1);
            }
        }
        assert!(Buffer::zeroed(usize::MAX, "a test").is_err());
    }
}
