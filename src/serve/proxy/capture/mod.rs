//! A session as a tree of turns: what was asked, and the exact tokens that were sampled.
//!
//! ```text
//! root ── turn 1 ── turn 2 ── turn 3        the agent's main conversation
//!             │         └──── turn 3'       it rewrote a tool result: another branch
//!             └────────────── turn 2'       it dropped turn 2 (compaction)
//!      ── turn 1''                          other tools or another first message (a sub-agent)
//! ```
//!
//! A turn is the messages that are new in its request (`delta`, given, never trained) and the reply
//! that was sampled after them. A request belongs below the deepest turn whose messages **and** reply it
//! repeats; its further messages are the new turn's delta. Assistant messages in a delta were not sampled
//! in this form: they are rendered, and are context.
//!
//! Invariants: the tokens of a path are the prompt that the engine saw, in order; sampled tokens enter
//! by [`Tree::commit`] alone, as the engine sent them; a turn without a finished reply has no children.

mod canonical;
mod renderer;
mod sequences;
#[cfg(test)]
mod tests;

pub use canonical::Canonical;
pub use renderer::{RenderError, Renderer};
pub use sequences::sequences;

use crate::{base::SampledToken, model::chat_template::MessageError};
use serde_json::Value;
use std::sync::Arc;

/// Index of a turn in [`Tree::nodes`].
pub type NodeId = usize;

/// Why a branch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BranchReason {
    /// The session's first request.
    First,
    /// It extends the turn before it.
    Extension,
    /// Other tools, or a first message that no other branch has.
    NewConversation,
    /// It repeats a turn and goes on differently.
    Rewritten,
}

/// A message as bytes, with the form it last arrived in.
#[derive(Debug)]
struct Stored {
    raw: Box<[u8]>,
}

impl Stored {
    /// The message as JSON. What is stored was parsed before.
    fn value(&self) -> Value {
        serde_json::from_slice(&self.raw).unwrap_or(Value::Null)
    }

    /// Compares bytes first; a message that only changed its form is remembered in the new one.
    fn matches(&mut self, raw: &[u8]) -> Result<bool, CaptureError> {
        if *self.raw == *raw {
            return Ok(true);
        }
        let same = Canonical::of(&self.value())?.same(&Canonical::of(&parse(raw)?)?);
        if same {
            self.raw = raw.into();
        }
        Ok(same)
    }
}

/// One turn.
#[derive(Debug)]
pub struct Node {
    parent: Option<NodeId>,
    children: Vec<NodeId>,
    /// Why it is not simply the next turn.
    pub reason: BranchReason,
    /// Branch number, in order of creation; turns of one branch share it.
    pub branch: u32,
    /// Turns above it.
    pub depth: u32,
    delta: Vec<Stored>,
    delta_tokens: Arc<[u32]>,
    sampled: Vec<SampledToken>,
    /// The reply as the agent received it; `None` while it is generated.
    reply: Option<Reply>,
    /// What else its request asked for.
    options: u64,
    removed: bool,
}

#[derive(Debug)]
struct Reply {
    /// As it was sent.
    message: Value,
    /// As the agent repeats it.
    echo: Stored,
    /// The end-of-turn token was sampled.
    ended: bool,
}

struct Root {
    tools: Option<Stored>,
    node: NodeId,
}

/// A request that cannot be placed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// A message has a wrong form.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A message or the tools are not JSON.
    #[error("{0}")]
    Json(String),
    /// Rendering failed.
    #[error(transparent)]
    Render(#[from] RenderError),
}

/// Where a request belongs.
#[derive(Debug)]
pub enum Place {
    /// The same request was made before: this turn, running or finished.
    Known(NodeId),
    /// A new turn; its prompt has these tokens.
    New {
        /// The turn.
        node: NodeId,
        /// Tokens from the root to where the assistant begins.
        prompt: Arc<[u32]>,
    },
}

/// See the module documentation.
#[derive(Default)]
pub struct Tree {
    nodes: Vec<Node>,
    roots: Vec<Root>,
    branches: u32,
}

fn parse(raw: &[u8]) -> Result<Value, CaptureError> {
    serde_json::from_slice(raw).map_err(|error| CaptureError::Json(error.to_string()))
}

impl Tree {
    /// Places a request: its messages and tools as raw JSON, not yet parsed. `options` stands for all else
    /// that shapes its reply: the same messages with other options are another turn. A prompt of certainly
    /// more than `limit` tokens is refused.
    pub fn place(
        &mut self,
        renderer: &Renderer,
        messages: &[&[u8]],
        tools: Option<&[u8]>,
        options: u64,
        limit: usize,
    ) -> Result<Place, CaptureError> {
        let mut parent = None;
        let mut used = 0;
        let mut roots = Vec::new();
        for root in &mut self.roots {
            let same = match (&mut root.tools, tools) {
                (None, None) => true,
                (Some(stored), Some(raw)) if *stored.raw == *raw => true,
                (Some(stored), Some(raw)) if stored.value() == parse(raw)? => {
                    stored.raw = raw.into();
                    true
                }
                _ => false,
            };
            if same {
                roots.push((root.node, 0));
            }
        }
        while let Some((id, start)) = roots.pop() {
            let Some(end) = self.match_delta(id, messages, start)? else {
                continue;
            };
            let node = &mut self.nodes[id];
            if end == messages.len() {
                if node.options == options {
                    return Ok(Place::Known(id));
                }
                continue;
            }
            let Some(reply) = &mut node.reply else {
                continue;
            };
            if !reply.echo.matches(messages[end])? {
                continue;
            }
            if end + 1 > used {
                (parent, used) = (Some(id), end + 1);
            }
            roots.extend(node.children.iter().map(|child| (*child, end + 1)));
        }
        self.grow(renderer, parent, &messages[used..], tools, options, limit)
    }

    /// The index after the turn's delta, if the messages from `start` repeat it.
    fn match_delta(
        &mut self,
        id: NodeId,
        messages: &[&[u8]],
        start: usize,
    ) -> Result<Option<usize>, CaptureError> {
        let delta = &mut self.nodes[id].delta;
        let end = start + delta.len();
        if end > messages.len() {
            return Ok(None);
        }
        for (stored, raw) in delta.iter_mut().zip(&messages[start..end]) {
            if !stored.matches(raw)? {
                return Ok(None);
            }
        }
        Ok(Some(end))
    }

    fn grow(
        &mut self,
        renderer: &Renderer,
        parent: Option<NodeId>,
        new: &[&[u8]],
        tools: Option<&[u8]>,
        options: u64,
        limit: usize,
    ) -> Result<Place, CaptureError> {
        let values = new.iter().map(|raw| parse(raw)).collect::<Result<Vec<_>, _>>()?;
        let tokens = match parent {
            None => {
                let tools = match tools.map(parse).transpose()? {
                    None | Some(Value::Null) => None,
                    Some(Value::Array(list)) => Some(list),
                    Some(_) => return Err(CaptureError::Json("`tools` must be a list".into())),
                };
                renderer.full(&values, tools.as_deref(), limit)?
            }
            Some(id) => {
                let reply = self.nodes[id].reply.as_ref();
                let (message, ended) = reply.map_or((&Value::Null, true), |r| (&r.message, r.ended));
                renderer.suffix(message, ended, &values, limit)?
            }
        };
        let first_child = parent.is_some_and(|id| self.nodes[id].children.is_empty());
        let branch = match parent {
            Some(id) if first_child => self.nodes[id].branch,
            _ => {
                self.branches += 1;
                self.branches - 1
            }
        };
        let node = self.nodes.len();
        self.nodes.push(Node {
            parent,
            children: Vec::new(),
            reason: match (parent, first_child) {
                (Some(_), true) => BranchReason::Extension,
                (Some(_), false) => BranchReason::Rewritten,
                (None, _) if self.roots.is_empty() => BranchReason::First,
                (None, _) => BranchReason::NewConversation,
            },
            branch,
            depth: parent.map_or(0, |id| self.nodes[id].depth + 1),
            delta: new.iter().map(|raw| Stored { raw: (*raw).into() }).collect(),
            delta_tokens: tokens.into(),
            sampled: Vec::new(),
            reply: None,
            options,
            removed: false,
        });
        match parent {
            Some(id) => self.nodes[id].children.push(node),
            None => self.roots.push(Root {
                tools: tools.map(|raw| Stored { raw: raw.into() }),
                node,
            }),
        }
        Ok(Place::New {
            node,
            prompt: self.prompt(node),
        })
    }

    /// Tokens from the root to the start of the turn's reply.
    pub fn prompt(&self, node: NodeId) -> Arc<[u32]> {
        let mut tokens = Vec::new();
        for id in self.path(node) {
            tokens.extend_from_slice(&self.nodes[id].delta_tokens);
            if id != node {
                tokens.extend(self.nodes[id].sampled.iter().map(|t| t.id));
            }
        }
        tokens.into()
    }

    /// The turn's reply is complete: tokens as sampled, and the message as it is sent to the agent.
    pub fn commit(&mut self, renderer: &Renderer, node: NodeId, sampled: Vec<SampledToken>, message: Value) {
        let node = &mut self.nodes[node];
        node.reply = Some(Reply {
            echo: Stored {
                raw: message.to_string().into_bytes().into(),
            },
            ended: sampled.last().is_some_and(|t| t.id == renderer.end_of_turn()),
            message,
        });
        node.sampled = sampled;
    }

    /// The turn came to nothing (cancelled or failed): it leaves the tree without a trace.
    pub fn remove(&mut self, node: NodeId) {
        self.nodes[node].removed = true;
        self.nodes[node].delta = Vec::new();
        self.nodes[node].delta_tokens = Arc::new([]);
        match self.nodes[node].parent {
            Some(parent) => self.nodes[parent].children.retain(|child| *child != node),
            None => self.roots.retain(|root| root.node != node),
        }
        // A retry of the turn gets the same branch number, and with it the same seed.
        let branch = self.nodes[node].branch;
        if branch + 1 == self.branches && !self.nodes.iter().any(|n| !n.removed && n.branch == branch) {
            self.branches -= 1;
        }
    }

    /// A turn.
    pub fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node]
    }

    /// The sampled tokens of a finished turn.
    pub fn sampled(&self, node: NodeId) -> &[SampledToken] {
        &self.nodes[node].sampled
    }

    /// Turns from the root to `node`.
    fn path(&self, node: NodeId) -> Vec<NodeId> {
        let mut path = vec![node];
        let mut at = node;
        while let Some(parent) = self.nodes[at].parent {
            path.push(parent);
            at = parent;
        }
        path.reverse();
        path
    }

    /// Finished turns that no finished turn extends, in order of creation.
    fn leaves(&self) -> Vec<NodeId> {
        let finished = |id: &NodeId| self.nodes[*id].reply.is_some();
        (0..self.nodes.len())
            .filter(|id| finished(id) && !self.nodes[*id].removed)
            .filter(|id| !self.nodes[*id].children.iter().any(finished))
            .collect()
    }

    /// The messages of each leaf's path, replies as they were sent.
    pub fn conversations(&self) -> Vec<Value> {
        let leaves = self.leaves().into_iter();
        let messages = leaves.map(|leaf| {
            let mut messages = Vec::new();
            for id in self.path(leaf) {
                messages.extend(self.nodes[id].delta.iter().map(Stored::value));
                messages.extend(self.nodes[id].reply.iter().map(|r| r.message.clone()));
            }
            Value::Array(messages)
        });
        messages.collect()
    }
}
