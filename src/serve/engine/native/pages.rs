//! Bookkeeping of the KV cache: pages of [`PAGE_TOKENS`] tokens, shared by exact token prefix.
//!
//! A page is in one of three states:
//!
//! ```text
//! free ──allocate──▶ held (refs > 0) ──release──▶ idle (refs = 0, still in the prefix tree)
//!   ▲                    ▲  │                        │ │
//!   └── release, unless ─┼──┘                        │ │
//!       registered       └───────── take_prefix ─────┘ │
//!   ◀───────────────────────── evicted ────────────────┘
//! ```
//!
//! A full page may be registered in the prefix tree under the node of the page before it and its own
//! tokens. The key is the tokens themselves, not a hash of them: a collision would silently give one
//! conversation the memory of another. Because every sequence that starts with the same tokens finds the
//! same pages, the turns of a session, its branches and the samples of a group share them without a copy.
//!
//! Eviction takes pages of ended sessions first, then the least recently released; a sequence releases its
//! last page first, so that a prefix outlives what follows it.
//!
//! For models with a delta net the pool also keeps the books of their states ([`super::states`]): a prefix
//! is then worth as much as its last snapshot, and a snapshot goes with its page.
//!
//! Invariant: free + idle + held = all pages, and exactly the registered pages are in the tree
//! ([`PagePool::sanity_check`]).

use super::states::{SlotId, StateOp, StatePool};
use crate::base::SessionId;
use std::collections::{BTreeSet, HashMap};

/// Tokens of one page.
pub(super) const PAGE_TOKENS: usize = 16;

/// Index of a page in the cache memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PageId(pub u32);

/// A node of the prefix tree: a whole prefix. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(u64);

impl NodeId {
    /// The empty prefix.
    pub(super) const ROOT: NodeId = NodeId(0);
}

/// Where a page hangs in the tree.
pub(super) type PageKey = (NodeId, [u32; PAGE_TOKENS]);

#[derive(Debug, Default)]
struct Page {
    refs: u32,
    registered: Option<(PageKey, NodeId)>,
    /// Last session that released it.
    owner: Option<SessionId>,
    /// Its place in `idle`.
    idle_at: Option<IdleKey>,
}

/// Eviction order: ended sessions (false) before live ones, then by time of release.
type IdleKey = (bool, u64);

/// All pages and the prefix tree.
pub(super) struct PagePool {
    pages: Vec<Page>,
    free: Vec<PageId>,
    idle: BTreeSet<(IdleKey, PageId)>,
    tree: HashMap<PageKey, PageId>,
    next_node: u64,
    clock: u64,
    states: Option<StatePool>,
}

impl PagePool {
    /// Bytes of the books of a page.
    pub(super) const PAGE_BYTES: usize = size_of::<Page>() + size_of::<PageId>();

    pub(super) fn new(num_pages: usize) -> Self {
        Self {
            states: None,
            pages: (0..num_pages).map(|_| Page::default()).collect(),
            free: (0..num_pages as u32).rev().map(PageId).collect(),
            idle: BTreeSet::new(),
            tree: HashMap::new(),
            next_node: NodeId::ROOT.0 + 1,
            clock: 0,
        }
    }

    /// With slots for delta-net states.
    pub(super) fn with_states(mut self, num_slots: usize) -> Self {
        self.states = Some(StatePool::new(num_slots));
        self
    }

    /// Whether sequences hold a state beside their pages.
    pub(super) fn has_states(&self) -> bool {
        self.states.is_some()
    }

    /// A state for a new sequence that goes on behind this prefix; None for models without.
    pub(super) fn start_state(&mut self, prefix: NodeId) -> Option<SlotId> {
        self.states.as_mut().map(|states| states.start(prefix))
    }

    /// Moves a sequence's state behind a prefix that has a snapshot.
    pub(super) fn jump_state(&mut self, slot: SlotId, prefix: NodeId) {
        if let Some(states) = &mut self.states {
            states.jump(slot, prefix);
        }
    }

    /// Keeps a sequence's state as the snapshot of a prefix.
    pub(super) fn save_state(&mut self, slot: SlotId, prefix: NodeId) {
        if let Some(states) = &mut self.states {
            states.save(slot, prefix);
        }
    }

    /// Gives up the snapshot of a prefix.
    pub(super) fn forget_state(&mut self, prefix: NodeId) {
        if let Some(states) = &mut self.states {
            states.forget(prefix);
        }
    }

    /// Gives up a sequence's state.
    pub(super) fn release_state(&mut self, slot: SlotId) {
        if let Some(states) = &mut self.states {
            states.release(slot);
        }
    }

    /// Copies of states to make before the next step, in order.
    pub(super) fn take_state_ops(&mut self) -> Vec<StateOp> {
        self.states.as_mut().map(StatePool::take_ops).unwrap_or_default()
    }

    /// Whether a sequence can go on behind this prefix without computing it.
    pub(super) fn is_reusable(&self, prefix: NodeId) -> bool {
        self.states
            .as_ref()
            .is_none_or(|states| states.has_snapshot(prefix))
    }

    /// [`PagePool::find_prefix`] as far as a sequence can go on behind it.
    pub(super) fn find_reusable(&self, tokens: &[u32]) -> Vec<(PageId, NodeId)> {
        let mut found = self.find_prefix(tokens);
        let last = found.iter().rposition(|(_, node)| self.is_reusable(*node));
        found.truncate(last.map_or(0, |i| i + 1));
        found
    }

    pub(super) fn num_pages(&self) -> usize {
        self.pages.len()
    }

    /// Pages that [`PagePool::allocate`] can hand out, evicting where needed.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Pages of running sequences.
    pub(super) fn held(&self) -> usize {
        self.pages.len() - self.available()
    }

    /// Pages without content.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// The registered pages that hold a prefix of `tokens`, with their nodes. Nothing is held by this.
    pub(super) fn find_prefix(&self, tokens: &[u32]) -> Vec<(PageId, NodeId)> {
        let mut found = Vec::new();
        let mut node = NodeId::ROOT;
        for page in tokens.chunks_exact(PAGE_TOKENS) {
            let Some((id, next)) = self.child(&(node, to_key(page))) else {
                break;
            };
            found.push((id, next));
            node = next;
        }
        found
    }

    /// How many of these pages nobody holds at the moment.
    pub(super) fn count_idle(&self, pages: &[(PageId, NodeId)]) -> usize {
        pages.iter().filter(|(id, _)| self.page(*id).refs == 0).count()
    }

    /// The page under this key and the node behind it.
    pub(super) fn child(&self, key: &PageKey) -> Option<(PageId, NodeId)> {
        let id = *self.tree.get(key)?;
        let (_, node) = self.page(id).registered?;
        Some((id, node))
    }

    /// Holds a page that [`PagePool::find_prefix`] or [`PagePool::child`] gave.
    pub(super) fn hold(&mut self, id: PageId) {
        let page = &mut self.pages[id.0 as usize];
        page.refs += 1;
        if let Some(key) = page.idle_at.take() {
            self.idle.remove(&(key, id));
        }
    }

    /// A blank page, held once. None when every page is held.
    pub(super) fn allocate(&mut self) -> Option<PageId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.idle.pop_first()?;
                self.page_mut(id).idle_at = None;
                self.forget(id);
                id
            }
        };
        let page = self.page_mut(id);
        debug_assert_eq!(page.refs, 0);
        page.refs = 1;
        page.owner = None;
        Some(id)
    }

    /// Offers a full page to others. When an equal prefix is registered already, that page is held in the
    /// place of this one, which is released. Gives the page to use and the node behind it.
    pub(super) fn register(&mut self, id: PageId, parent: NodeId, tokens: &[u32]) -> (PageId, NodeId) {
        let key = (parent, to_key(tokens));
        if let Some((other, node)) = self.child(&key) {
            if other != id {
                self.hold(other);
                self.release_one(id, None);
            }
            return (other, node);
        }
        let node = NodeId(self.next_node);
        self.next_node += 1;
        self.page_mut(id).registered = Some((key, node));
        self.tree.insert(key, id);
        (id, node)
    }

    /// Lets go of a sequence's pages, in sequence order.
    pub(super) fn release(&mut self, pages: &[PageId], session: &SessionId) {
        for id in pages.iter().rev() {
            self.release_one(*id, Some(session));
        }
    }

    fn release_one(&mut self, id: PageId, session: Option<&SessionId>) {
        self.clock += 1;
        let key = (true, self.clock);
        let page = &mut self.pages[id.0 as usize];
        debug_assert!(page.refs > 0);
        page.refs -= 1;
        if let Some(session) = session {
            page.owner = Some(session.clone());
        }
        if page.refs > 0 {
            return;
        }
        if page.registered.is_some() {
            page.idle_at = Some(key);
            self.idle.insert((key, id));
        } else {
            self.free.push(id);
        }
    }

    /// Idle pages that this session released last go first from now on.
    pub(super) fn end_session(&mut self, session: &SessionId) {
        let of_session = |(_, id): &&(IdleKey, PageId)| self.page(*id).owner.as_ref() == Some(session);
        let moved: Vec<_> = self.idle.iter().filter(of_session).copied().collect();
        for (key, id) in moved {
            self.idle.remove(&(key, id));
            let key = (false, key.1);
            self.page_mut(id).idle_at = Some(key);
            self.idle.insert((key, id));
        }
    }

    /// Empties the prefix tree: its content was computed with weights that are no longer in use. Held
    /// pages stay held.
    pub(super) fn clear_cache(&mut self) {
        for (_, id) in std::mem::take(&mut self.idle) {
            self.page_mut(id).idle_at = None;
            self.free.push(id);
        }
        if let Some(states) = &mut self.states {
            states.clear();
        }
        self.tree.clear();
        for page in &mut self.pages {
            page.registered = None;
        }
    }

    fn forget(&mut self, id: PageId) {
        if let Some((key, node)) = self.page_mut(id).registered.take() {
            self.tree.remove(&key);
            self.forget_state(node);
        }
    }

    fn page(&self, id: PageId) -> &Page {
        &self.pages[id.0 as usize]
    }

    fn page_mut(&mut self, id: PageId) -> &mut Page {
        &mut self.pages[id.0 as usize]
    }

    /// [`StatePool::sanity_check`] with the slots of all sequences; every snapshot belongs to a page.
    #[cfg(test)]
    pub(super) fn check_states(&self, live: impl Iterator<Item = SlotId>) {
        let Some(states) = &self.states else {
            assert_eq!(live.count(), 0);
            return;
        };
        states.sanity_check(live);
        let nodes = self.pages.iter().filter_map(|p| p.registered.as_ref());
        let with_page = nodes.filter(|(_, node)| states.has_snapshot(*node)).count();
        assert_eq!(with_page, states.num_snapshots(), "a snapshot outlived its page");
    }

    /// Checks every invariant between the tables; `holders` are the page lists of all sequences.
    #[cfg(test)]
    pub(super) fn sanity_check<'a>(&self, holders: impl Iterator<Item = &'a [PageId]>) {
        let mut refs = vec![0u32; self.pages.len()];
        for id in holders.flatten() {
            refs[id.0 as usize] += 1;
        }
        let free: BTreeSet<_> = self.free.iter().copied().collect();
        assert_eq!(free.len(), self.free.len(), "a page is free twice");
        for (i, page) in self.pages.iter().enumerate() {
            let id = PageId(i as u32);
            assert_eq!(page.refs, refs[i], "references of {id:?}");
            let idle = page.idle_at.is_some_and(|key| self.idle.contains(&(key, id)));
            assert_eq!(
                page.idle_at.is_some(),
                idle,
                "{id:?} misses its place in the eviction order"
            );
            let states = [page.refs > 0, idle, free.contains(&id)];
            assert_eq!(states.iter().filter(|s| **s).count(), 1, "{id:?} is {states:?}");
            if idle {
                assert!(page.registered.is_some(), "{id:?} is idle and nobody can find it");
            }
            if let Some((key, node)) = &page.registered {
                assert_eq!(self.tree.get(key), Some(&id));
                assert!(node.0 < self.next_node && key.0 .0 < node.0);
            }
        }
        let registered = self.pages.iter().filter(|p| p.registered.is_some()).count();
        assert_eq!(
            registered,
            self.tree.len(),
            "the tree holds a page that does not know of it"
        );
        let idle = self.pages.iter().filter(|p| p.idle_at.is_some()).count();
        assert_eq!(idle, self.idle.len());
    }
}

/// The tokens of a full page.
pub(super) fn to_key(tokens: &[u32]) -> [u32; PAGE_TOKENS] {
    let mut key = [0; PAGE_TOKENS];
    key.copy_from_slice(tokens);
    key
}
