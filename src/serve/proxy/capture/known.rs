//! How long are the messages that a request repeats? Told by comparing bytes, so that a reader of a body
//! need not look inside them.

use super::{NodeId, Stored, Tree};

/// Walks the tree along the messages of one request. A message of the wire is a complete JSON value, so a
/// text that begins with its bytes begins with that message and nothing else.
pub struct KnownMessages<'t> {
    tree: &'t Tree,
    /// Turns that may come next; empty once the request has left what is known.
    candidates: Vec<NodeId>,
    /// The turn being read, and the next message of its delta.
    at: Option<(NodeId, usize)>,
}

impl<'t> KnownMessages<'t> {
    pub(super) fn new(tree: &'t Tree) -> Self {
        Self {
            candidates: tree.roots.iter().map(|root| root.node).collect(),
            tree,
            at: None,
        }
    }

    /// Bytes of the message at the start of `rest`, if it is the next known one.
    pub fn length(&mut self, rest: &[u8]) -> Option<usize> {
        if self.at.is_none() {
            let best = self.candidates.iter().map(|id| (self.run(*id, rest), *id));
            let (length, id) = best
                .filter(|(run, _)| *run > 0)
                .max_by_key(|(run, id)| (*run, std::cmp::Reverse(*id)))?;
            debug_assert!(length <= rest.len());
            self.at = Some((id, 0));
        }
        let (id, index) = self.at?;
        let node = &self.tree.nodes[id];
        let mut messages = node.delta.iter().filter(|stored| !stored.form.is_head());
        match messages.nth(index) {
            Some(stored) if rest.starts_with(&stored.raw) => {
                self.at = Some((id, index + 1));
                Some(stored.raw.len())
            }
            None => {
                let echo = &node.reply.as_ref()?.echo;
                if !rest.starts_with(&echo.raw) {
                    return self.lose();
                }
                self.candidates = node.children.clone();
                self.at = None;
                Some(echo.raw.len())
            }
            Some(_) => self.lose(),
        }
    }

    fn lose(&mut self) -> Option<usize> {
        self.candidates.clear();
        self.at = None;
        None
    }

    /// Bytes at the start of `rest` that the delta of a turn explains.
    fn run(&self, id: NodeId, rest: &[u8]) -> usize {
        let mut at = 0;
        let messages = self.tree.nodes[id]
            .delta
            .iter()
            .filter(|s: &&Stored| !s.form.is_head());
        for stored in messages {
            if !rest[at..].starts_with(&stored.raw) {
                break;
            }
            at += stored.raw.len();
            while matches!(rest.get(at), Some(b',' | b' ' | b'\n' | b'\r' | b'\t')) {
                at += 1;
            }
        }
        at
    }
}
