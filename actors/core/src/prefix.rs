//! Prefix tree over full KV pages: what earlier requests left behind for new ones. Owner: the page pool.
//! Invariant: a node's page holds the keys and values of exactly the tokens on the path from the root to the node.

use crate::executor::{PAGE_TOKENS, PageId};
use crate::ids::TokenId;
use std::collections::{BTreeSet, HashMap};

type Chunk = [TokenId; PAGE_TOKENS];
type NodeId = usize;

const ROOT: NodeId = 0;

#[derive(Debug)]
struct Node {
    parent: NodeId,
    chunk: Chunk,
    page: PageId,
    children: HashMap<Chunk, NodeId>,
    last_used: u64,
}

/// A tree whose edges are pages of [`PAGE_TOKENS`] tokens. It owns one reference to every page it names.
#[derive(Debug)]
pub struct PrefixTree {
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    /// Leaves by age, oldest first: the only nodes that may be evicted.
    leaves: BTreeSet<(u64, NodeId)>,
    tick: u64,
}

impl Default for PrefixTree {
    fn default() -> Self {
        let root = Node { parent: ROOT, chunk: Chunk::default(), page: 0, children: HashMap::new(), last_used: 0 };
        PrefixTree { nodes: vec![root], vacant: Vec::new(), leaves: BTreeSet::new(), tick: 0 }
    }
}

impl PrefixTree {
    /// Pages the tree holds.
    pub fn pages(&self) -> usize {
        self.nodes.len() - 1 - self.vacant.len()
    }

    /// Pages of the longest known prefix of `tokens`, in order; only whole pages count.
    pub fn find(&mut self, tokens: &[TokenId]) -> Vec<PageId> {
        self.tick += 1;
        let mut at = ROOT;
        let mut pages = Vec::new();
        for chunk in chunks(tokens) {
            let Some(&next) = self.nodes[at].children.get(&chunk) else { break };
            self.touch(next);
            pages.push(self.nodes[next].page);
            at = next;
        }
        pages
    }

    /// Offers the pages of a finished sequence. Returns for each page whether the tree took it (it then owns the
    /// caller's reference); pages whose tokens it already had are not taken.
    pub fn insert(&mut self, tokens: &[TokenId], pages: &[PageId]) -> Vec<bool> {
        self.tick += 1;
        let mut at = ROOT;
        let mut taken = Vec::new();
        for (chunk, &page) in chunks(tokens).zip(pages) {
            let known = self.nodes[at].children.get(&chunk).copied();
            taken.push(known.is_none());
            at = match known {
                Some(node) => {
                    self.touch(node);
                    node
                }
                None => self.add(at, chunk, page),
            };
        }
        taken
    }

    /// Removes the least recently used leaf whose page nobody else uses, and returns that page.
    pub fn evict(&mut self, in_use: impl Fn(PageId) -> bool) -> Option<PageId> {
        let (used, node) = self.leaves.iter().copied().find(|&(_, node)| !in_use(self.nodes[node].page))?;
        self.leaves.remove(&(used, node));
        let Node { parent, chunk, page, .. } = self.nodes[node];
        self.nodes[parent].children.remove(&chunk);
        self.vacant.push(node);
        if parent != ROOT && self.nodes[parent].children.is_empty() {
            self.leaves.insert((self.nodes[parent].last_used, parent));
        }
        Some(page)
    }

    /// Forgets everything and returns all pages.
    pub fn clear(&mut self) -> Vec<PageId> {
        let mut pages = Vec::new();
        while let Some(page) = self.evict(|_| false) {
            pages.push(page);
        }
        pages
    }

    fn add(&mut self, parent: NodeId, chunk: Chunk, page: PageId) -> NodeId {
        let node = Node { parent, chunk, page, children: HashMap::new(), last_used: self.tick };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        if parent != ROOT {
            self.leaves.remove(&(self.nodes[parent].last_used, parent));
        }
        self.nodes[parent].children.insert(chunk, id);
        self.leaves.insert((self.tick, id));
        id
    }

    fn touch(&mut self, node: NodeId) {
        let before = std::mem::replace(&mut self.nodes[node].last_used, self.tick);
        if self.leaves.remove(&(before, node)) {
            self.leaves.insert((self.tick, node));
        }
    }
}

fn chunks(tokens: &[TokenId]) -> impl Iterator<Item = Chunk> + '_ {
    tokens.chunks_exact(PAGE_TOKENS).map(|chunk| {
        let mut out = Chunk::default();
        out.copy_from_slice(chunk);
        out
    })
}
