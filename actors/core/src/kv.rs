//! Pages of KV memory and who holds them. Owner: one pool per model; a `Lease` travels inside the state of a request
//! and gives its pages back when dropped. Invariant: every page is free, or counted by exactly its holders (leases and
//! the prefix tree); `free + held = total` always.
//!
//! When a pool runs short, memory goes to the older request: first the prefix tree shrinks, then the youngest
//! requests lose their pages (they keep their tokens and are prefilled again later). The oldest request can therefore
//! always go on, at every model, and nothing can wait for ever.
//!
//! Whoever has lost its pages [`LOSSES_FREE`] times comes back only when it fits with its whole length beside the whole
//! lengths of all older requests that have been here. From then on none of those can need its pages, so it loses them
//! only to older requests that come here for the first time: no more often than there are any.

use crate::executor::{PAGE_TOKENS, PageId};
use crate::ids::{RequestId, TokenId};
use crate::prefix::PrefixTree;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// As whom work asks that no request waits for: it takes pages from none and gives way to all.
pub const YOUNGEST: RequestId = RequestId(u64::MAX);

/// How often a request may lose its pages before it must wait until it fits with its whole length.
pub const LOSSES_FREE: u32 = 2;

/// Upper bounds of the buckets in which ended requests are counted by their losses; more are counted beside.
pub const LOSS_BUCKETS: [u32; 5] = [0, 1, 2, 4, 8];

/// The page pool of one model. Cloning gives another handle to the same pool.
#[derive(Clone, Debug)]
pub struct KvPool(Arc<Mutex<State>>);

/// Pages held for one request at one model, and how many of its tokens have KV in them.
#[derive(Debug)]
pub struct Lease {
    pool: KvPool,
    slot: SlotId,
}

/// A pool is too small at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} more pages are needed and only {available} can be had now")]
pub struct KvShort {
    /// Pages missing.
    pub needed: u32,
    /// Pages free or reclaimable for this request.
    pub available: u32,
}

/// Gauges and counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvStats {
    /// Pages in all.
    pub pages_total: u32,
    /// Pages nobody holds.
    pub pages_free: u32,
    /// Pages kept only for future prefix hits.
    pub pages_cached: u32,
    /// Leases that hold pages.
    pub leases: u32,
    /// Pages handed to leases so far (shared prefix pages not counted).
    pub pages_allocated: u64,
    /// Prefix look-ups so far.
    pub prefix_queries: u64,
    /// Tokens looked up so far.
    pub prefix_query_tokens: u64,
    /// Tokens found so far.
    pub prefix_hit_tokens: u64,
    /// Times a request lost its pages to an older one so far.
    pub preemptions: u64,
    /// Leases of requests that have ended, by how often that happened to them: in the first of [`LOSS_BUCKETS`] that is
    /// not less, or after the last.
    pub ended_by_losses: [u64; LOSS_BUCKETS.len() + 1],
    /// What all of them lost together.
    pub ended_losses: u64,
    /// Most losses of one request so far.
    pub losses_most: u32,
}

/// Age first: the request's seniority, then a serial number.
type SlotId = (RequestId, u64);

#[derive(Debug, Default)]
struct Slot {
    pages: Vec<PageId>,
    kv_len: u32,
    pinned: bool,
    /// Tokens it may come to.
    whole: u32,
    /// Times it lost its pages to an older one.
    losses: u32,
    /// Lost them and was not [admitted](KvPool::admit) again.
    is_out: bool,
    /// Had pages of its own once.
    used: bool,
}

#[derive(Debug)]
struct State {
    free: Vec<PageId>,
    holders: Vec<u32>,
    in_tree: Vec<bool>,
    /// Pages that only the tree holds.
    tree_only: u32,
    slots: BTreeMap<SlotId, Slot>,
    tree: PrefixTree,
    serial: u64,
    stats: KvStats,
}

impl KvPool {
    /// A pool of `pages` free pages.
    pub fn new(pages: u32) -> Self {
        let stats = KvStats { pages_total: pages, ..KvStats::default() };
        KvPool(Arc::new(Mutex::new(State {
            free: (0..pages).rev().collect(),
            holders: vec![0; pages as usize],
            in_tree: vec![false; pages as usize],
            tree_only: 0,
            slots: BTreeMap::new(),
            tree: PrefixTree::default(),
            serial: 0,
            stats,
        })))
    }

    /// An empty lease for a request that may come to `whole` tokens.
    pub fn lease(&self, request: RequestId, whole: u32) -> Lease {
        let mut state = self.state();
        state.serial += 1;
        let slot = (request, state.serial);
        state.slots.insert(slot, Slot { whole, ..Slot::default() });
        Lease { pool: self.clone(), slot }
    }

    /// Takes all pages from everyone, the prefix tree included: the device memory behind the pool is gone.
    /// Leases stay valid and are empty.
    pub fn revoke_all(&self) {
        let mut state = self.state();
        let slots: Vec<SlotId> = state.slots.keys().copied().collect();
        for slot in slots {
            state.vacate(slot);
        }
        for page in state.tree.clear() {
            state.leave_tree(page);
        }
    }

    /// Admits a request without pages, if it may start: its pages are there, and one growth page for each older request; or
    /// all pages that it and all older ones may ever need, if it lost its pages too often. Pages of younger requests count
    /// as there: the oldest request is always admitted, wherever it is.
    pub fn admit(&self, request: RequestId, tokens: u32) -> bool {
        let mut state = self.state();
        let may = state.may_start(request, tokens);
        if may {
            state.slots.range_mut((request, 0)..=(request, u64::MAX)).for_each(|(_, slot)| slot.is_out = false);
        }
        may
    }

    /// Tokens the whole pool can hold.
    pub fn capacity_tokens(&self) -> u32 {
        self.state().stats.pages_total.saturating_mul(PAGE_TOKENS as u32)
    }

    /// Gauges and counters now.
    pub fn stats(&self) -> KvStats {
        let state = self.state();
        KvStats {
            pages_free: state.free.len() as u32,
            pages_cached: state.tree_only,
            leases: state.slots.values().filter(|slot| !slot.pages.is_empty()).count() as u32,
            ..state.stats
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pages that `tokens` tokens occupy.
pub fn pages_for(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS as u32)
}

impl Lease {
    /// Tokens whose keys and values are in the pages of this lease.
    pub fn kv_len(&self) -> u32 {
        self.with(|slot| slot.kv_len)
    }

    /// Page table, position order.
    pub fn pages(&self) -> Vec<PageId> {
        self.with(|slot| slot.pages.clone())
    }

    /// Starts from what earlier requests left: the pages of the longest cached prefix of `tokens`, leaving at least
    /// one token to compute. Only for a lease without pages. Returns how many tokens need not be prefilled.
    pub fn adopt_prefix(&mut self, tokens: &[TokenId]) -> u32 {
        let mut guard = self.pool.state();
        let state = &mut *guard;
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        state.stats.prefix_queries += 1;
        state.stats.prefix_query_tokens += tokens.len() as u64;
        let Some(slot) = state.slots.get_mut(&self.slot).filter(|slot| slot.pages.is_empty()) else { return 0 };
        slot.pages = state.tree.find(usable);
        slot.kv_len = (slot.pages.len() * PAGE_TOKENS) as u32;
        for &page in &slot.pages {
            let holders = &mut state.holders[page as usize];
            state.tree_only -= u32::from(*holders == 1);
            *holders += 1;
        }
        state.stats.prefix_hit_tokens += u64::from(slot.kv_len);
        slot.kv_len
    }

    /// Makes room for `tokens` tokens in all, taking pages from the prefix tree and from younger, unpinned leases if
    /// it must, and pins the lease until [`Lease::consumed`] or [`Lease::unpin`].
    ///
    /// # Errors
    /// [`KvShort`] when older or pinned leases hold too much, or when this one lost its pages to an older one and was not
    /// admitted again; nothing was taken from anyone then.
    pub fn grow(&mut self, tokens: u32) -> Result<(), KvShort> {
        self.pool.state().grow(self.slot, tokens)
    }

    /// After a step: the first `kv_len` tokens have KV now. Unpins.
    pub fn consumed(&mut self, kv_len: u32) {
        self.change(|slot| {
            slot.pinned = false;
            slot.kv_len = kv_len.min((slot.pages.len() * PAGE_TOKENS) as u32);
        });
    }

    /// Lets others reclaim this lease again, without progress.
    pub fn unpin(&mut self) {
        self.change(|slot| slot.pinned = false);
    }

    /// Gives the pages back because their contents cannot be trusted; tokens will be prefilled again.
    pub fn forget(&mut self) {
        self.pool.state().vacate(self.slot);
    }

    /// Ends the lease and leaves its full pages to the prefix tree; `tokens` are the request's tokens.
    pub fn retire(mut self, tokens: &[TokenId]) {
        self.leave(tokens);
    }

    /// Leaves the full pages to the prefix tree and gives the rest back; the lease is empty, as if new.
    pub fn leave(&mut self, tokens: &[TokenId]) {
        let mut guard = self.pool.state();
        let state = &mut *guard;
        let Some(slot) = state.slots.get_mut(&self.slot) else { return };
        let written = (slot.kv_len as usize).min(tokens.len());
        let full = (written / PAGE_TOKENS).min(slot.pages.len());
        let pages: Vec<PageId> = slot.pages.drain(..full).collect();
        let taken = state.tree.insert(&tokens[..full * PAGE_TOKENS], &pages);
        for (page, taken) in pages.into_iter().zip(taken) {
            if taken {
                state.in_tree[page as usize] = true;
                state.tree_only += u32::from(state.holders[page as usize] == 1);
            } else {
                state.give_back(page);
            }
        }
        state.vacate(self.slot);
    }

    fn with<T>(&self, read: impl FnOnce(&Slot) -> T) -> T
    where
        T: Default,
    {
        self.pool.state().slots.get(&self.slot).map(read).unwrap_or_default()
    }

    fn change(&mut self, write: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.pool.state().slots.get_mut(&self.slot) {
            write(slot);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.vacate(self.slot);
        let slot = state.slots.remove(&self.slot);
        if let Some(slot) = slot.filter(|slot| slot.used && self.slot.0 != YOUNGEST) {
            let bucket = LOSS_BUCKETS.iter().position(|&bound| slot.losses <= bound).unwrap_or(LOSS_BUCKETS.len());
            state.stats.ended_by_losses[bucket] += 1;
            state.stats.ended_losses += u64::from(slot.losses);
        }
    }
}

impl State {
    fn may_start(&self, request: RequestId, tokens: u32) -> bool {
        let id = (request, u64::MAX);
        if self.slots.range((request, 0)..=id).any(|(_, slot)| slot.losses >= LOSSES_FREE) {
            let whole: usize = self.slots.range(..=id).map(|(_, slot)| pages_for(slot.whole) as usize).sum();
            return self.holders.len() >= whole;
        }
        let older = self.slots.range(..id).filter(|((other, _), slot)| *other != request && !slot.pages.is_empty());
        self.available(id) >= pages_for(tokens) as usize + older.count()
    }

    fn grow(&mut self, id: SlotId, tokens: u32) -> Result<(), KvShort> {
        let (held, is_out) = self.slots.get(&id).map_or((0, false), |slot| (slot.pages.len(), slot.is_out));
        let missing = (pages_for(tokens) as usize).saturating_sub(held);
        if is_out {
            return Err(KvShort { needed: missing as u32, available: 0 });
        }
        if self.free.len() < missing {
            let available = self.available(id);
            if available < missing {
                return Err(KvShort { needed: missing as u32, available: available as u32 });
            }
            self.make_room(id, missing);
        }
        let fresh = self.free.split_off(self.free.len() - missing);
        for &page in &fresh {
            self.holders[page as usize] = 1;
        }
        self.stats.pages_allocated += missing as u64;
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.pages.extend(fresh.into_iter().rev());
            slot.pinned = true;
            slot.used = true;
        }
        Ok(())
    }

    /// Pages this slot could have at most: all but its own and those of older and of pinned slots. Nothing is taken past
    /// a pinned slot: who is younger loses its pages first.
    fn available(&self, id: SlotId) -> usize {
        let pinned = self.slots.iter().rev().find(|(_, slot)| slot.pinned).map_or(id, |(&other, _)| other);
        let kept = self.slots.range(..=id.max(pinned));
        let kept: HashSet<PageId> = kept.flat_map(|(_, slot)| slot.pages.iter().copied()).collect();
        self.holders.len() - kept.len()
    }

    fn make_room(&mut self, id: SlotId, missing: usize) {
        while self.free.len() < missing {
            let holders = &self.holders;
            if let Some(page) = self.tree.evict(|page| holders[page as usize] > 1) {
                self.leave_tree(page);
                continue;
            }
            let younger = self.slots.range_mut((Bound::Excluded(id), Bound::Unbounded));
            let youngest = younger.rev().find(|(_, slot)| slot.pinned || !slot.pages.is_empty());
            let Some((&victim, slot)) = youngest.filter(|(_, slot)| !slot.pinned) else { return };
            slot.losses += 1;
            slot.is_out = true;
            if victim.0 != YOUNGEST {
                self.stats.losses_most = self.stats.losses_most.max(slot.losses);
            }
            self.vacate(victim);
            self.stats.preemptions += 1;
        }
    }

    fn vacate(&mut self, id: SlotId) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.kv_len = 0;
        slot.pinned = false;
        for page in std::mem::take(&mut slot.pages) {
            self.give_back(page);
        }
    }

    fn leave_tree(&mut self, page: PageId) {
        self.in_tree[page as usize] = false;
        self.tree_only -= u32::from(self.holders[page as usize] == 1);
        self.give_back(page);
    }

    fn give_back(&mut self, page: PageId) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        match *holders {
            0 => self.free.push(page),
            1 => self.tree_only += u32::from(self.in_tree[page as usize]),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pool: &KvPool) {
        let state = pool.state();
        let mut counted = vec![0u32; state.holders.len()];
        for page in state.slots.values().flat_map(|slot| &slot.pages) {
            counted[*page as usize] += 1;
        }
        let mut tree_only = 0;
        for (page, &in_tree) in state.in_tree.iter().enumerate() {
            tree_only += u32::from(in_tree && counted[page] == 0);
            counted[page] += u32::from(in_tree);
        }
        assert_eq!(counted, state.holders);
        assert_eq!(tree_only, state.tree_only);
        assert_eq!(state.tree.pages(), state.in_tree.iter().filter(|&&held| held).count());
        assert_eq!(state.free.len(), state.holders.iter().filter(|&&count| count == 0).count());
    }

    fn tokens(seed: u32, len: u32) -> Vec<TokenId> {
        (0..len).map(|at| seed * 1000 + at / 40).collect()
    }

    #[test]
    fn a_lease_returns_its_pages_on_drop() {
        let pool = KvPool::new(4);
        let mut lease = pool.lease(RequestId(1), 64);
        assert_eq!(lease.grow(33), Ok(()));
        assert_eq!((lease.pages().len(), pool.stats().pages_free), (3, 1));
        drop(lease);
        assert_eq!(pool.stats().pages_free, 4);
    }

    #[test]
    fn a_retired_prefix_is_found_and_one_token_is_left_to_compute() {
        let pool = KvPool::new(8);
        let text = tokens(7, 48);
        let mut first = pool.lease(RequestId(1), 64);
        first.grow(48).unwrap();
        first.consumed(48);
        let pages = first.pages();
        first.retire(&text);
        let mut second = pool.lease(RequestId(2), 64);
        assert_eq!(second.adopt_prefix(&text), 32, "the third page would leave nothing to compute");
        assert_eq!(second.pages(), pages[..2]);
        check(&pool);
        drop(second);
        assert_eq!((pool.stats().pages_cached, pool.stats().pages_free), (3, 5));
    }

    #[test]
    fn memory_goes_to_the_older_request() {
        let pool = KvPool::new(4);
        let (mut old, mut young) = (pool.lease(RequestId(1), 64), pool.lease(RequestId(2), 64));
        young.grow(48).unwrap();
        young.consumed(40);
        assert_eq!(old.grow(40), Ok(()));
        assert_eq!((young.kv_len(), young.pages().len(), pool.stats().preemptions), (0, 0, 1));
        old.consumed(40);
        assert_eq!(young.grow(40), Err(KvShort { needed: 3, available: 0 }));
        check(&pool);
    }

    /// Two free losses; then it waits until it fits whole beside the older one, and is not taken from again.
    #[test]
    fn who_lost_its_pages_too_often_comes_back_for_good() {
        let pool = KvPool::new(6);
        let (mut old, mut young) = (pool.lease(RequestId(1), 64), pool.lease(RequestId(2), 48));
        for losses in 1..=LOSSES_FREE {
            assert!(pool.admit(RequestId(2), 16), "before loss {losses}");
            young.grow(48).unwrap();
            young.consumed(48);
            old.grow(64).unwrap();
            old.consumed(64);
            assert_eq!((young.kv_len(), pool.stats().losses_most), (0, losses));
            old.forget();
        }
        assert!(!pool.admit(RequestId(2), 16), "7 pages are more than there are, though all are free");
        assert!(pool.admit(RequestId(1), 64), "the oldest always is");
        drop(old);
        assert!(pool.admit(RequestId(2), 48));
        young.grow(48).unwrap();
        let mut later = pool.lease(RequestId(3), 96);
        later.grow(48).unwrap();
        let mut first_seen_now = pool.lease(RequestId(0), 96);
        assert_eq!(first_seen_now.grow(16), Err(KvShort { needed: 1, available: 0 }), "both are in a step");
        young.consumed(48);
        later.consumed(48);
        first_seen_now.grow(16).unwrap();
        assert_eq!((young.kv_len(), later.kv_len()), (48, 0));
        let stats = |ended: [u64; 6]| assert_eq!(pool.stats().ended_by_losses, ended);
        stats([1, 0, 0, 0, 0, 0]);
        [young, later].into_iter().for_each(drop);
        stats([1, 1, 1, 0, 0, 0]);
    }

    /// Who is younger loses its pages first, so nothing is taken past one that is in a step.
    #[test]
    fn nothing_is_taken_past_a_pinned_lease() {
        let pool = KvPool::new(3);
        let mut leases = [1, 2, 3].map(|id| pool.lease(RequestId(id), 64));
        leases.iter_mut().for_each(|lease| lease.grow(16).unwrap());
        leases[1].consumed(16);
        assert_eq!(leases[0].grow(32), Err(KvShort { needed: 1, available: 0 }), "the youngest is in a step");
        leases[2].consumed(16);
        leases[0].grow(32).unwrap();
        assert_eq!((leases[1].kv_len(), leases[2].kv_len()), (16, 0));
        check(&pool);
    }

    #[test]
    fn a_pinned_lease_is_not_reclaimed() {
        let pool = KvPool::new(2);
        let (mut old, mut young) = (pool.lease(RequestId(1), 64), pool.lease(RequestId(2), 64));
        young.grow(32).unwrap();
        assert_eq!(old.grow(1), Err(KvShort { needed: 1, available: 0 }));
        young.unpin();
        assert_eq!(old.grow(1), Ok(()));
    }

    #[test]
    fn revoking_empties_every_lease_and_the_tree() {
        let pool = KvPool::new(6);
        let mut kept = pool.lease(RequestId(1), 64);
        kept.grow(20).unwrap();
        let mut ended = pool.lease(RequestId(2), 64);
        ended.grow(32).unwrap();
        ended.consumed(32);
        ended.retire(&tokens(1, 32));
        pool.revoke_all();
        assert_eq!((kept.kv_len(), kept.pages().len(), pool.stats().pages_free), (0, 0, 6));
        check(&pool);
    }

    proptest::proptest! {
        /// Any sequence of operations keeps the books balanced, and the oldest lease can always grow to the pool's size.
        #[test]
        fn books_balance(operations in proptest::collection::vec((0u8..6, 0u64..5, 1u32..120), 1..120)) {
            let pool = KvPool::new(8);
            let mut leases: BTreeMap<u64, Lease> = BTreeMap::new();
            for (what, who, len) in operations {
                let text = tokens(who as u32 % 2, 128);
                match what {
                    0 | 1 => {
                        let lease = leases.entry(who).or_insert_with(|| pool.lease(RequestId(who), 128));
                        if lease.kv_len() == 0 && !pool.admit(RequestId(who), len) {
                            continue;
                        }
                        if lease.kv_len() == 0 && what == 0 {
                            lease.adopt_prefix(&text[..len as usize]);
                        }
                        if lease.grow(len).is_ok() {
                            let reached = lease.kv_len().max(len);
                            lease.consumed(reached);
                        }
                    }
                    2 => drop(leases.remove(&who)),
                    3 => if let Some(lease) = leases.remove(&who) { lease.retire(&text) },
                    4 => if let Some(lease) = leases.get_mut(&who) { lease.forget() },
                    _ => if len > 115 { pool.revoke_all() },
                }
                check(&pool);
            }
            if let Some((&who, oldest)) = leases.iter_mut().next() {
                proptest::prop_assert!(oldest.kv_len() > 0 || pool.admit(RequestId(who), 128));
                proptest::prop_assert_eq!(oldest.grow(128), Ok(()));
                check(&pool);
            }
        }
    }
}
