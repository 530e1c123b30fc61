//! A session's tree as branches: what each was for, and which are trained.
//!
//! One branch per leaf: its path from the root, prompt and sampled tokens in order. The kind is that of
//! the place where the branch began:
//!
//! * a **request for a summary** is [`BranchKind::Summary`], whatever it continues: see below;
//! * a conversation of its own: [`BranchKind::Main`] is the first one with tools (the first one at all if
//!   none has tools). Another one is [`BranchKind::Side`] without tools beside conversations with tools,
//!   [`BranchKind::SubAgent`] if the agent said so, [`BranchKind::Compaction`] if it begins like the main
//!   one (same tools and system prompt; without tools, the same first message) or with a summary of it,
//!   [`BranchKind::Rewritten`] if it repeats the main one's first request with another reply, and otherwise [`BranchKind::SubAgent`]. Where no conversation has tools it is a sub-agent's only with another
//!   system prompt, and [`BranchKind::Side`] without one of its own;
//! * a fork of another branch: [`BranchKind::Retry`] if the same messages were asked with other options,
//!   else [`BranchKind::Rewritten`]. Forks of a side conversation are side conversations.
//!
//! Kinds are decided when the session is over, since a title request may come before the main
//! conversation, and since a request for a summary shows what it was only by what comes after it: agents
//! ask for it with the prefix and the tools of the conversation that grew too long, as one more turn of it.
//! A finished turn asked for a summary if nothing continues it, it calls no tool, and a later conversation or fork
//! begins with its text in a message of the user or the system ([`repeats`]). It then is a branch of its own
//! beside the conversation that it sums up, which ends with the turn before.
//!
//! The later conversation must be the same agent's ([`hands_over`]): the same tools and system prompt as the one
//! that was asked, or, where the request came without tools, as an earlier one with tools. A planner whose
//! reply an executor with another system prompt is given has not summed up anything: both are trained. Neither has a
//! sub-agent whose answer another one is given, nor a first turn, before which there was nothing to sum up.
//!
//! A sampled token is counted in the first trainable leaf (in order of creation) whose path holds it, and
//! is context in the others. A leaf's weight is its share of the session's counted tokens: no token counts
//! twice, and the weights of the trainable leaves sum to one.

use super::{Canonical, NodeId, Root, Stored, Tree};
use crate::base::{BranchKind, CapturedBranch, TokenSequence};
use serde_json::{json, Value};

/// A shorter text may stand in a later prompt by chance.
const MIN_SUMMARY_BYTES: usize = 32;

/// A finished tree: which turn asked for a summary, and which turns a branch ends with.
struct View<'t> {
    tree: &'t Tree,
    /// By turn: the turn that began with its reply.
    resumed_by: Vec<Option<NodeId>>,
    leaves: Vec<NodeId>,
}

impl<'t> View<'t> {
    fn new(tree: &'t Tree) -> Self {
        let resumed_by = resumptions(tree);
        let extends = |id: &NodeId| tree.nodes[*id].reply.is_some() && resumed_by[*id].is_none();
        let leaves = (0..tree.nodes.len())
            .filter(|id| tree.nodes[*id].reply.is_some() && !tree.nodes[*id].removed)
            .filter(|id| !tree.nodes[*id].children.iter().any(extends))
            .collect();
        Self {
            tree,
            resumed_by,
            leaves,
        }
    }

    fn is_summary(&self, node: NodeId) -> bool {
        self.resumed_by[node].is_some()
    }

    /// The conversation begins with a summary of the one that begins with `other`.
    fn resumes(&self, root: NodeId, other: NodeId) -> bool {
        let summaries = self.resumed_by.iter().enumerate();
        summaries
            .filter(|(_, by)| **by == Some(root))
            .any(|(summary, _)| self.tree.path(summary)[0] == other)
    }

    /// The first turn of a leaf's branch.
    fn start(&self, leaf: NodeId) -> NodeId {
        let nodes = &self.tree.nodes;
        let mut at = leaf;
        while let Some(parent) = nodes[at]
            .parent
            .filter(|id| nodes[*id].branch == nodes[leaf].branch)
        {
            if self.is_summary(at) {
                break;
            }
            at = parent;
        }
        at
    }
}

/// For every turn, the turn with which a later conversation or fork began that repeats its reply.
fn resumptions(tree: &Tree) -> Vec<Option<NodeId>> {
    let mut out = vec![None; tree.nodes.len()];
    let begins = |id: &NodeId| {
        let node = &tree.nodes[*id];
        !node.removed
            && node
                .parent
                .is_none_or(|parent| tree.nodes[parent].branch != node.branch)
    };
    let summaries: Vec<(NodeId, String)> = (0..tree.nodes.len())
        .filter_map(|id| Some((id, summary_text(tree, id)?)))
        .collect();
    for start in (0..tree.nodes.len()).filter(begins) {
        let earlier = || summaries.iter().filter(|(id, _)| *id < start);
        if earlier().next().is_none() {
            continue;
        }
        let given: Vec<String> = tree.nodes[start]
            .delta
            .iter()
            .flat_map(Stored::messages)
            .filter(|message| message["role"] == "user" || message["role"] == "system")
            .filter_map(|message| Canonical::of(&message).ok())
            .map(|message| one_line(message.content()))
            .collect();
        for (id, summary) in earlier() {
            let repeated = || given.iter().any(|text| repeats(text, summary));
            if out[*id].is_none() && hands_over(tree, *id, start) && repeated() {
                out[*id] = Some(start);
            }
        }
    }
    out
}

/// May the conversation (or fork) that begins with turn `start` go on from what turn `asked` answered?
fn hands_over(tree: &Tree, asked: NodeId, start: NodeId) -> bool {
    let root_of = |id: NodeId| {
        let node = tree.path(id)[0];
        tree.roots.iter().find(|root| root.node == node)
    };
    let (Some(from), Some(to)) = (root_of(asked), root_of(start)) else {
        return false;
    };
    // What a sub-agent answers is handed to others all the time.
    if from.sub_agent != to.sub_agent {
        return false;
    }
    let same_agent = |a: &Root, b: &Root| same_tools(a, b) && same_system(tree, a.node, b.node);
    if from.node == to.node || same_agent(from, to) {
        return sums_up(tree, asked, from);
    }
    // Some agents ask without tools, under a system prompt of the request's own or none.
    let mut earlier = tree.roots.iter().filter(|root| root.node < to.node);
    from.tools.is_none() && to.tools.is_some() && earlier.any(|root| same_agent(root, to))
}

/// Was there anything to sum up when turn `asked`, of the conversation `of`, was asked? Earlier turns of that
/// conversation; or it repeats how an earlier one began; or, without tools, what an earlier turn answered.
fn sums_up(tree: &Tree, asked: NodeId, of: &Root) -> bool {
    if tree.path(asked).len() > 1 {
        return true;
    }
    let texts = |node: NodeId| -> Vec<String> {
        let messages = tree.nodes[node].delta.iter().flat_map(Stored::messages);
        messages
            .filter(|message| message["role"] == "user")
            .filter_map(|message| Canonical::of(&message).ok())
            .map(|message| one_line(message.content()))
            .collect()
    };
    let given = texts(of.node);
    let goes_on = |root: &Root| match (texts(root.node).first(), given.first()) {
        (Some(earlier), Some(text)) => {
            !earlier.is_empty() && text.len() > earlier.len() && text.starts_with(earlier)
        }
        _ => false,
    };
    let mut earlier = tree.roots.iter().filter(|root| root.node < of.node);
    if earlier.any(goes_on) {
        return true;
    }
    let mut replies =
        (0..of.node).filter_map(|id| tree.nodes[id].reply.as_ref()?.message["content"].as_str());
    of.tools.is_none() && replies.any(|reply| given.iter().any(|text| repeats(text, reply)))
}

fn same_tools(a: &Root, b: &Root) -> bool {
    match (&a.tools, &b.tools) {
        (None, None) => true,
        (Some(a), Some(b)) => a.raw == b.raw || a.item().tools().ok() == b.item().tools().ok(),
        _ => false,
    }
}

/// The same system prompt, or none, in two conversations. Numbers may differ: agents write date and time there.
fn same_system(tree: &Tree, a: NodeId, b: NodeId) -> bool {
    let text = |node: NodeId| {
        let first = tree.nodes[node].delta.first().filter(|s| is_system(s))?;
        let messages = Stored::canonical(first.item()).unwrap_or_default();
        let all: Vec<String> = messages.iter().map(|m| one_line(m.content())).collect();
        Some(all.join(" ").replace(|c: char| c.is_ascii_digit(), ""))
    };
    text(a) == text(b)
}

/// A message, or a request's head, that is a system prompt.
fn is_system(stored: &Stored) -> bool {
    stored.form.is_head() || stored.messages().first().is_some_and(|m| m["role"] == "system")
}

/// The reply of a turn that may have asked for a summary.
fn summary_text(tree: &Tree, id: NodeId) -> Option<String> {
    let node = &tree.nodes[id];
    if node.removed || !node.children.is_empty() {
        return None;
    }
    let message = &node.reply.as_ref()?.message;
    let calls = message["tool_calls"]
        .as_array()
        .is_some_and(|calls| !calls.is_empty());
    let text = message["content"]
        .as_str()
        .filter(|text| !calls && text.len() >= MIN_SUMMARY_BYTES)?;
    Some(text.to_owned())
}

/// Does a message begin a conversation with this summary? Agents leave out thoughts that stand beside it and
/// set it between words of their own, so a `<summary>` element counts alone where there is one, and half of
/// it (line by line, without regard to white space) must be there.
pub(super) fn repeats(message: &str, summary: &str) -> bool {
    let inner = summary
        .split_once("<summary>")
        .map(|(_, rest)| rest.split("</summary>").next());
    let summary = inner.flatten().unwrap_or(summary);
    let (mut all, mut found) = (0, 0);
    for line in summary.lines().map(one_line).filter(|line| !line.is_empty()) {
        all += line.len();
        found += if message.contains(&line) { line.len() } else { 0 };
    }
    found >= MIN_SUMMARY_BYTES && found * 2 >= all
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Every branch of the tree; see the module documentation. Turns that did not finish are left out.
pub fn branches(tree: &Tree, train: &[BranchKind]) -> Vec<CapturedBranch> {
    let view = View::new(tree);
    let leaves = &view.leaves;
    let kinds: Vec<BranchKind> = leaves.iter().map(|leaf| kind(&view, *leaf)).collect();
    let trainable = |index: usize| train.contains(&kinds[index]);
    // Tokens are counted in trainable branches first.
    let mut order: Vec<usize> = (0..leaves.len()).collect();
    order.sort_by_key(|index| !trainable(*index));
    let mut counted = vec![false; tree.nodes.len()];
    let mut tokens: Vec<TokenSequence> = vec![TokenSequence::default(); leaves.len()];
    for index in order {
        tokens[index] = sequence(tree, leaves[index], &mut counted);
    }
    let total: usize = (0..leaves.len())
        .filter(|index| trainable(*index))
        .map(|index| tokens[index].sampled())
        .sum();
    let mut out = Vec::with_capacity(leaves.len());
    for (index, mut tokens) in tokens.into_iter().enumerate() {
        let trained = trainable(index) && tokens.sampled() > 0;
        if trained {
            tokens.weight = tokens.sampled() as f32 / total as f32;
        }
        debug_assert_eq!(tokens.check(), Ok(()));
        let path = tree.path(leaves[index]);
        out.push(CapturedBranch {
            kind: kinds[index],
            trainable: trained,
            parent: parent(&view, index),
            turns: path.len() as u32,
            tokens,
            messages: messages(tree, &path),
        });
    }
    out
}

/// The sequences that are trained on.
pub fn trainable(branches: &[CapturedBranch]) -> Vec<TokenSequence> {
    let trained = branches.iter().filter(|branch| branch.trainable);
    trained.map(|branch| branch.tokens.clone()).collect()
}

fn kind(view: &View<'_>, leaf: NodeId) -> BranchKind {
    if view.is_summary(leaf) {
        return BranchKind::Summary;
    }
    let tree = view.tree;
    let first = view.start(leaf);
    let root = tree.path(leaf)[0];
    let of_root = root_kind(view, root);
    let Some(parent) = tree.nodes[first].parent else {
        return of_root;
    };
    if of_root == BranchKind::Side {
        return of_root;
    }
    let same_messages = |other: &NodeId| {
        let (a, b) = (&tree.nodes[first].delta, &tree.nodes[*other].delta);
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.raw == b.raw)
    };
    let mut siblings = tree.nodes[parent].children.iter().filter(|id| **id < first);
    if siblings.any(same_messages) {
        BranchKind::Retry
    } else {
        BranchKind::Rewritten
    }
}

fn root_kind(view: &View<'_>, node: NodeId) -> BranchKind {
    let tree = view.tree;
    let with_tools = tree.roots.iter().any(|root| root.tools.is_some());
    let eligible = |root: &&Root| !with_tools || root.tools.is_some();
    let main = tree
        .roots
        .iter()
        .filter(eligible)
        .find(|root| root.sub_agent.is_none());
    let main = main.or_else(|| tree.roots.iter().find(eligible));
    let (Some(main), Some(root)) = (main, tree.roots.iter().find(|root| root.node == node)) else {
        return BranchKind::Main;
    };
    if root.node == main.node {
        return BranchKind::Main;
    }
    if !eligible(&root) {
        return BranchKind::Side;
    }
    if root.sub_agent.is_some() {
        return BranchKind::SubAgent;
    }
    let alike = same_tools(main, root) && begins_alike(tree, main.node, root.node, with_tools);
    match (alike, with_tools) {
        // The same messages with other options are the main conversation asked again.
        (true, _)
            if tree.nodes[main.node].delta.len() == tree.nodes[root.node].delta.len()
                && all_alike(&tree.nodes[main.node].delta, &tree.nodes[root.node].delta) =>
        {
            BranchKind::Retry
        }
        // It goes on from the first request with another reply than the one that was given.
        (true, _) if replies_otherwise(&tree.nodes[main.node].delta, &tree.nodes[root.node].delta) => {
            BranchKind::Rewritten
        }
        (true, _) => BranchKind::Compaction,
        _ if view.resumes(node, main.node) => BranchKind::Compaction,
        (false, true) => BranchKind::SubAgent,
        (false, false) if has_other_system(tree, main.node, node) => BranchKind::SubAgent,
        (false, false) => BranchKind::Side,
    }
}

/// The conversation has a system prompt, and it is not the main one's.
fn has_other_system(tree: &Tree, main: NodeId, node: NodeId) -> bool {
    tree.nodes[node].delta.first().is_some_and(is_system) && !same_system(tree, main, node)
}

/// `b` holds the messages of `a` and, after them, one of the assistant.
fn replies_otherwise(a: &[Stored], b: &[Stored]) -> bool {
    let next = b
        .get(a.len())
        .and_then(|stored| stored.messages().into_iter().next());
    next.is_some_and(|message| message["role"] == "assistant") && all_alike(a, b)
}

fn all_alike(a: &[Stored], b: &[Stored]) -> bool {
    let one = |stored: &Stored| Stored::canonical(stored.item()).unwrap_or_default();
    let same = |(a, b): (&Stored, &Stored)| {
        let (a, b) = (one(a), one(b));
        a.len() == b.len() && a.iter().zip(&b).all(|(a, b): (&Canonical, &Canonical)| a.same(b))
    };
    a.iter().zip(b).all(same)
}

/// The same system prompt; without tools, the same first message.
fn begins_alike(tree: &Tree, a: NodeId, b: NodeId, with_tools: bool) -> bool {
    let (a, b) = (&tree.nodes[a].delta, &tree.nodes[b].delta);
    match (a.first().is_some_and(is_system), b.first().is_some_and(is_system)) {
        (false, false) if with_tools => true,
        (a_has, b_has) => a_has == b_has && all_alike(&a[..1.min(a.len())], &b[..1.min(b.len())]),
    }
}

/// The earliest branch that holds the turn from which a branch forks.
fn parent(view: &View<'_>, index: usize) -> Option<usize> {
    let (tree, leaves) = (view.tree, &view.leaves);
    let fork = tree.nodes[view.start(leaves[index])].parent?;
    let holds = |other: &usize| *other != index && tree.path(leaves[*other]).contains(&fork);
    (0..leaves.len()).find(holds)
}

fn messages(tree: &Tree, path: &[NodeId]) -> Vec<Value> {
    let mut out = Vec::new();
    for id in path {
        out.extend(tree.nodes[*id].delta.iter().flat_map(Stored::messages));
        if let Some(reply) = &tree.nodes[*id].reply {
            let mut message = reply.message.clone();
            message["sampled"] = json!(true);
            out.push(message);
        }
    }
    out
}

fn sequence(tree: &Tree, leaf: NodeId, counted: &mut [bool]) -> TokenSequence {
    let mut s = TokenSequence::default();
    let mut prompt_len = None;
    for id in tree.path(leaf) {
        let node = &tree.nodes[id];
        for token in node.delta_tokens.iter() {
            s.token_ids.push(*token);
            s.loss_mask.push(false);
            s.logprobs.push(0.0);
            s.versions.push(0);
        }
        let first = !std::mem::replace(&mut counted[id], true);
        if first && !node.sampled.is_empty() {
            prompt_len.get_or_insert(s.token_ids.len());
        }
        for token in node.sampled.iter() {
            s.token_ids.push(token.id);
            s.loss_mask.push(first);
            s.logprobs.push(if first { token.logprob } else { 0.0 });
            s.versions.push(if first { token.version.0 } else { 0 });
        }
    }
    s.prompt_len = prompt_len.unwrap_or(s.token_ids.len()) as u32;
    s.routing = tree.routing_of(leaf);
    s
}
