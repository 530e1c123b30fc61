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
//! Messages are kept as the bytes in which they last arrived. Equal bytes are the same message; other
//! bytes are compared by what they mean ([`Canonical`]), and remembered if they mean the same. So what an
//! agent repeats is compared, not parsed, and [`Tree::known`] tells a reader of requests how long the
//! messages are that it has seen.
//!
//! Invariants: the tokens of a path are the prompt that the engine saw, in order; sampled tokens enter
//! by [`Tree::commit`] alone, as the engine sent them; a turn without a finished reply has no children.

mod branches;
mod canonical;
mod known;
mod renderer;
mod routing;
mod surrogates;
#[cfg(test)]
mod tests;
mod wire;

pub use branches::{branches, trainable};
pub use canonical::Canonical;
pub use known::KnownMessages;
pub use renderer::{RenderError, Renderer, ToolList};
pub use surrogates::parse_json;
pub use wire::{is_reply_item, Form, Item};

use super::routing::{RoutingFile, TurnRows};
use crate::{base::SampledToken, model::chat_template::MessageError};
use serde_json::Value;
use std::sync::Arc;

/// Index of a turn in [`Tree::nodes`].
pub type NodeId = usize;

/// A message as bytes, in the form in which it last arrived.
#[derive(Debug)]
struct Stored {
    form: Form,
    raw: Box<[u8]>,
}

impl Stored {
    fn new(item: Item<'_>) -> Self {
        Self {
            form: item.form,
            raw: item.raw.into(),
        }
    }

    fn item(&self) -> Item<'_> {
        Item {
            form: self.form,
            raw: &self.raw,
        }
    }

    /// The chat messages. What is stored was parsed before.
    fn messages(&self) -> Vec<Value> {
        self.item().messages().unwrap_or_default()
    }

    fn canonical(item: Item<'_>) -> Result<Vec<Canonical>, CaptureError> {
        let messages = item.messages()?;
        Ok(messages.iter().map(Canonical::of).collect::<Result<_, _>>()?)
    }

    /// Compares bytes first; a message that only changed its form is remembered in the new one.
    fn matches(&mut self, item: Item<'_>) -> Result<bool, CaptureError> {
        if self.form == item.form && *self.raw == *item.raw {
            return Ok(true);
        }
        let (old, new) = (Self::canonical(self.item())?, Self::canonical(item)?);
        let same = old.len() == new.len() && old.iter().zip(&new).all(|(a, b)| a.same(b));
        if same {
            *self = Self::new(item);
        }
        Ok(same)
    }
}

/// One turn.
#[derive(Debug)]
pub struct Node {
    parent: Option<NodeId>,
    children: Vec<NodeId>,
    /// Branch number, in order of creation; turns of one branch share it.
    pub branch: u32,
    /// Turns above it.
    pub depth: u32,
    delta: Vec<Stored>,
    delta_tokens: Arc<[u32]>,
    sampled: Arc<[SampledToken]>,
    /// The reply as the agent received it; `None` while it is generated.
    reply: Option<Reply>,
    /// Its rows of routing, where they are recorded.
    rows: Option<TurnRows>,
    /// What else its request asked for.
    options: u64,
    removed: bool,
}

#[derive(Debug)]
struct Reply {
    /// As it was sent, as a chat message.
    message: Value,
    /// As the agent repeats it.
    echo: Stored,
    /// The end-of-turn token was sampled.
    ended: bool,
}

impl Reply {
    /// Compares bytes with the last echo, and meaning with what was sent: changes of many turns do not add up.
    fn repeated_by(&mut self, item: Item<'_>) -> Result<bool, CaptureError> {
        if self.echo.form == item.form && *self.echo.raw == *item.raw {
            return Ok(true);
        }
        let sent = Canonical::of(&self.message)?;
        let same = matches!(&Stored::canonical(item)?[..], [echo] if sent.same(echo));
        if same {
            self.echo = Stored::new(item);
        }
        Ok(same)
    }
}

struct Root {
    tools: Option<Stored>,
    node: NodeId,
    /// The agent said that this is a sub-agent's conversation; a number for the sub-agent.
    sub_agent: Option<u64>,
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

/// A request to place: nothing of it is parsed yet.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its messages.
    pub items: &'a [Item<'a>],
    /// Its tools.
    pub tools: Option<Item<'a>>,
    /// Stands for all else that shapes its reply: the same messages with other options are another turn.
    pub options: u64,
    /// The agent says that a sub-agent asks; a number for which one. Two that ask the same are not one
    /// that asks again.
    pub sub_agent: Option<u64>,
    /// A prompt of certainly more tokens is refused.
    pub limit: usize,
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
    /// Where rows of routing go, if they are recorded.
    routing: Option<Arc<RoutingFile>>,
}

fn parse(raw: &[u8]) -> Result<Value, CaptureError> {
    parse_json(raw).map_err(|error| CaptureError::Json(error.to_string()))
}

/// Tool lists that only differ in form.
fn same_tools(renderer: &Renderer, a: Item<'_>, b: Item<'_>) -> Result<bool, CaptureError> {
    Ok(renderer.tools(a)?.list == renderer.tools(b)?.list)
}

impl Tree {
    /// Places a request.
    pub fn place(&mut self, renderer: &Renderer, asked: &Asked<'_>) -> Result<Place, CaptureError> {
        let items = asked.items;
        if let Some(tools) = asked.tools {
            renderer.refuse_long_tools(tools, asked.limit)?;
        }
        let mut parent = None;
        let mut used = 0;
        let mut open = Vec::new();
        for root in &mut self.roots {
            if root.sub_agent != asked.sub_agent {
                continue;
            }
            let same = match (&mut root.tools, asked.tools) {
                (None, None) => true,
                (Some(stored), Some(tools)) if stored.form == tools.form && *stored.raw == *tools.raw => true,
                (Some(stored), Some(tools)) if same_tools(renderer, stored.item(), tools)? => {
                    *stored = Stored::new(tools);
                    true
                }
                _ => false,
            };
            if same {
                open.push((root.node, 0));
            }
        }
        while let Some((id, start)) = open.pop() {
            let Some(end) = self.match_delta(id, items, start)? else {
                continue;
            };
            let node = &mut self.nodes[id];
            if end == items.len() {
                if node.options == asked.options {
                    return Ok(Place::Known(id));
                }
                continue;
            }
            let Some(reply) = &mut node.reply else {
                continue;
            };
            if !reply.repeated_by(items[end])? {
                continue;
            }
            if end + 1 > used {
                (parent, used) = (Some(id), end + 1);
            }
            open.extend(node.children.iter().map(|child| (*child, end + 1)));
        }
        self.grow(renderer, parent, used, asked)
    }

    /// The index after the turn's delta, if the messages from `start` repeat it.
    fn match_delta(
        &mut self,
        id: NodeId,
        items: &[Item<'_>],
        start: usize,
    ) -> Result<Option<usize>, CaptureError> {
        let delta = &mut self.nodes[id].delta;
        let end = start + delta.len();
        if end > items.len() {
            return Ok(None);
        }
        for (stored, item) in delta.iter_mut().zip(&items[start..end]) {
            if !stored.matches(*item)? {
                return Ok(None);
            }
        }
        Ok(Some(end))
    }

    fn grow(
        &mut self,
        renderer: &Renderer,
        parent: Option<NodeId>,
        used: usize,
        asked: &Asked<'_>,
    ) -> Result<Place, CaptureError> {
        let new = &asked.items[used..];
        let mut values = Vec::with_capacity(new.len());
        let mut counter = renderer.counter(new, asked.limit);
        for item in new {
            let messages = item.messages()?;
            counter.add(&messages)?;
            values.extend(messages);
        }
        let tokens = match parent {
            None => {
                let tools = asked.tools.map(|tools| renderer.tools(tools)).transpose()?;
                let tokens = renderer.full(&values, tools.as_deref(), asked.limit)?;
                if let (Some(item), Some(list)) = (asked.tools, tools) {
                    if tokens.len() < asked.limit {
                        renderer.remember_tools(item, list);
                    }
                }
                tokens
            }
            Some(id) => {
                let reply = self.nodes[id].reply.as_ref();
                let (message, ended) = reply.map_or((&Value::Null, true), |r| (&r.message, r.ended));
                renderer.suffix(message, ended, &values, asked.limit)?
            }
        };
        let branch = match parent {
            Some(id) if self.nodes[id].children.is_empty() => self.nodes[id].branch,
            _ => {
                self.branches += 1;
                self.branches - 1
            }
        };
        let node = self.nodes.len();
        self.nodes.push(Node {
            parent,
            children: Vec::new(),
            branch,
            depth: parent.map_or(0, |id| self.nodes[id].depth + 1),
            delta: new.iter().map(|item| Stored::new(*item)).collect(),
            delta_tokens: tokens.into(),
            sampled: Arc::new([]),
            reply: None,
            rows: None,
            options: asked.options,
            removed: false,
        });
        match parent {
            Some(id) => self.nodes[id].children.push(node),
            None => self.roots.push(Root {
                tools: asked.tools.map(Stored::new),
                node,
                sub_agent: asked.sub_agent,
            }),
        }
        Ok(Place::New {
            node,
            prompt: self.prompt(node),
        })
    }

    /// Reads the messages of a request along what is known.
    pub fn known(&self) -> KnownMessages<'_> {
        KnownMessages::new(self)
    }

    /// Tokens from the root to the start of the turn's reply.
    pub fn prompt(&self, node: NodeId) -> Arc<[u32]> {
        let path = self.path(node);
        let length = |id: &NodeId| {
            let reply = if *id == node {
                0
            } else {
                self.nodes[*id].sampled.len()
            };
            self.nodes[*id].delta_tokens.len() + reply
        };
        let total = path.iter().map(length).sum();
        // Made in place: a long prompt is written once and not copied again.
        let mut prompt: Arc<[u32]> = std::iter::repeat_n(0, total).collect();
        let mut rest = Arc::get_mut(&mut prompt).unwrap_or_default();
        for id in path {
            let given = &self.nodes[id].delta_tokens;
            let (to, after) = std::mem::take(&mut rest).split_at_mut(given.len());
            to.copy_from_slice(given);
            rest = after;
            if id != node {
                let sampled = &self.nodes[id].sampled;
                let (to, after) = std::mem::take(&mut rest).split_at_mut(sampled.len());
                to.iter_mut()
                    .zip(sampled.iter())
                    .for_each(|(to, token)| *to = token.id);
                rest = after;
            }
        }
        debug_assert!(rest.is_empty());
        prompt
    }

    /// The turn's reply is complete: tokens as sampled, and the message as it is sent to the agent.
    pub fn commit(
        &mut self,
        renderer: &Renderer,
        node: NodeId,
        sampled: Arc<[SampledToken]>,
        message: Value,
    ) {
        let node = &mut self.nodes[node];
        node.reply = Some(Reply {
            echo: Stored {
                form: Form::Chat,
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
}
