//! The tree of a session: requests are placed, replies committed, sequences taken out. Kinds of branches,
//! limits of requests and foreign templates have files of their own.

mod branches;
mod limits;
mod templates;

use super::*;
use crate::{
    base::{BranchKind, CapturedBranch, PolicyVersion, TokenSequence},
    model::{
        chat_template::ChatTemplate,
        tokenizer::{testing, Tokenizer},
    },
    serve::proxy::ProxyConfig,
};
use proptest::prelude::*;
use serde_json::{json, Map};
use std::sync::OnceLock;

fn renderer() -> Renderer {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    let template = ChatTemplate::from_dir(dir.path()).unwrap();
    Renderer::new(template, Tokenizer::from_dir(dir.path()).unwrap(), Map::new()).unwrap()
}

struct Session {
    renderer: Renderer,
    tree: Tree,
    tools: Option<Value>,
    options: u64,
    sub_agent: Option<u64>,
}

impl Session {
    fn new(tools: Option<Value>) -> Self {
        Self {
            renderer: renderer(),
            tree: Tree::default(),
            tools,
            options: 0,
            sub_agent: None,
        }
    }

    fn place(&mut self, messages: &[Value]) -> Place {
        let raw: Vec<String> = messages.iter().map(Value::to_string).collect();
        let item = |raw| Item {
            form: Form::Chat,
            raw,
        };
        let items: Vec<Item<'_>> = raw.iter().map(|raw| item(raw.as_bytes())).collect();
        let tools = self.tools.as_ref().map(Value::to_string);
        let asked = Asked {
            items: &items,
            tools: tools.as_deref().map(|raw| item(raw.as_bytes())),
            options: self.options,
            sub_agent: self.sub_agent,
            limit: 1 << 20,
        };
        self.tree.place(&self.renderer, &asked).unwrap()
    }

    /// Places a new turn and commits a reply of these token texts; returns the prompt.
    fn turn(&mut self, messages: &[Value], reply: &Value, text: &str) -> Vec<u32> {
        let Place::New { node, prompt } = self.place(messages) else {
            panic!("the request was known");
        };
        let ids = self.renderer.tokenizer().encode_rendered(text).unwrap();
        let sampled = ids.iter().enumerate().map(|(i, id)| SampledToken {
            id: *id,
            logprob: -0.5 - i as f32,
            version: PolicyVersion(node as u32),
        });
        self.tree
            .commit(&self.renderer, node, sampled.collect(), reply.clone());
        prompt.to_vec()
    }

    fn branches(&self) -> Vec<CapturedBranch> {
        branches(&self.tree, &ProxyConfig::TRAIN_BRANCHES)
    }

    fn sequences(&self) -> Vec<TokenSequence> {
        let sequences = trainable(&self.branches());
        for s in &sequences {
            s.check().unwrap();
        }
        if !sequences.is_empty() {
            let sum: f32 = sequences.iter().map(|s| s.weight).sum();
            assert!((sum - 1.0).abs() < 1e-6);
        }
        sequences
    }

    fn text(&self, ids: &[u32]) -> String {
        self.renderer.tokenizer().decode_with_special(ids)
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn tools() -> Option<Value> {
    Some(json!([{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]))
}

#[test]
fn a_tool_loop_is_one_sequence_of_the_tokens_that_were_sampled() {
    let mut s = Session::new(tools());
    let system = json!({"role": "system", "content": "be brief"});
    let mut messages = vec![system, user("go")];
    let reply = json!({"role": "assistant", "content": "look",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{\"cmd\":\"ls\"}"}}]});
    // The model wrote spacing that no template would write.
    let sampled =
        "look<tool_call>{ \"name\":\"run\",\"arguments\":{\"cmd\" : \"ls\"} }</tool_call><|im_end|>";
    let first = s.turn(&messages, &reply, sampled);
    messages.push(json!({"role": "assistant", "content": [{"type": "text", "text": "look"}],
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{\"cmd\": \"ls\"}"}}]}));
    messages.push(json!({"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|> b"}));
    let second = s.turn(&messages, &assistant("done"), "done<|im_end|>");
    assert_eq!(
        s.text(&second),
        format!("{}{sampled}\n<|im_start|>user\n<tool_response>\na <|im_end|> b\n</tool_response><|im_end|>\n<|im_start|>assistant\n", s.text(&first))
    );
    let sequences = s.sequences();
    assert_eq!(sequences.len(), 1);
    let q = &sequences[0];
    let trained: Vec<u32> = (0..q.len())
        .filter(|i| q.loss_mask[*i])
        .map(|i| q.token_ids[i])
        .collect();
    assert_eq!(s.text(&trained), format!("{sampled}done<|im_end|>"));
    assert_eq!(q.prompt_len as usize, first.len());
    assert_eq!(q.logprobs[first.len() + 3], -3.5);
    assert_eq!(*q.versions.last().unwrap(), 1);
    let branch = &s.branches()[0];
    assert_eq!((branch.messages.len(), branch.kind), (5, BranchKind::Main));
}

#[test]
fn a_reply_cut_by_length_gets_its_end_of_turn_as_context() {
    let mut s = Session::new(None);
    s.turn(&[user("go")], &assistant("hel"), "hel");
    let prompt = s.turn(
        &[user("go"), assistant("hel"), user("on")],
        &assistant("x"),
        "x<|im_end|>",
    );
    assert!(s
        .text(&prompt)
        .ends_with("assistant\nhel<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"));
    let q = &s.sequences()[0];
    assert_eq!(
        q.sampled(),
        s.renderer
            .tokenizer()
            .encode_rendered("helx<|im_end|>")
            .unwrap()
            .len()
    );
}

#[test]
fn rewritten_history_branches_and_shared_tokens_count_once() {
    let mut s = Session::new(None);
    let a = [
        user("q"),
        assistant("one"),
        user("r"),
        assistant("two"),
        user("s"),
    ];
    s.turn(&a[..1], &a[1], "one<|im_end|>");
    s.turn(&a[..3], &a[3], "two<|im_end|>");
    s.turn(&a, &assistant("three"), "three<|im_end|>");
    // The second question was rewritten: turn one is shared.
    let b = [user("q"), assistant("one"), user("r again")];
    s.turn(&b, &assistant("four"), "four<|im_end|>");
    // The first reply was rewritten: it is context in a branch of its own.
    let c = [user("q"), assistant("one, edited"), user("r")];
    let prompt = s.turn(&c, &assistant("five"), "five<|im_end|>");
    assert!(s.text(&prompt).contains("one, edited<|im_end|>"));
    let sequences = s.sequences();
    let trained: Vec<String> = sequences
        .iter()
        .map(|q| {
            let ids: Vec<u32> = (0..q.len())
                .filter(|i| q.loss_mask[*i])
                .map(|i| q.token_ids[i])
                .collect();
            s.text(&ids)
        })
        .collect();
    assert_eq!(
        trained,
        [
            "one<|im_end|>two<|im_end|>three<|im_end|>",
            "four<|im_end|>",
            "five<|im_end|>"
        ]
    );
    let places: Vec<_> = s.tree.nodes.iter().map(|n| (n.branch, n.depth)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)]);
    let kinds: Vec<_> = s.branches().iter().map(|b| (b.kind, b.parent, b.turns)).collect();
    use BranchKind::*;
    assert_eq!(
        kinds,
        [(Main, None, 3), (Rewritten, Some(0), 2), (Rewritten, None, 1)]
    );
}

#[test]
fn identical_requests_are_known_and_removed_turns_leave_no_trace() {
    let mut s = Session::new(None);
    let Place::New { node, .. } = s.place(&[user("q")]) else {
        panic!()
    };
    assert!(matches!(s.place(&[user("q")]), Place::Known(n) if n == node));
    let as_parts = json!({"role": "user", "content": [{"type": "text", "text": "q"}]});
    assert!(matches!(s.place(&[as_parts]), Place::Known(n) if n == node));
    s.tree.remove(node);
    assert!(s.sequences().is_empty());
    let Place::New { node, .. } = s.place(&[user("q")]) else {
        panic!()
    };
    s.tree.commit(&s.renderer, node, Arc::new([]), assistant("a"));
    assert!(matches!(s.place(&[user("q")]), Place::Known(n) if n == node));
    // A retry of a removed turn is the same branch again, so that it draws with the same seed.
    let Place::New { node: second, .. } = s.place(&[user("q"), assistant("a"), user("r")]) else {
        panic!()
    };
    s.tree.remove(second);
    let Place::New { node: again, .. } = s.place(&[user("q"), assistant("a"), user("r")]) else {
        panic!()
    };
    let id = |n: NodeId| (s.tree.node(n).branch, s.tree.node(n).depth);
    assert_eq!(id(second), id(again));
}

#[test]
fn the_same_messages_with_other_options_are_sampled_anew() {
    let mut s = Session::new(None);
    s.turn(&[user("q")], &assistant("a"), "a");
    s.options = 1;
    let prompt = s.turn(&[user("q")], &assistant("ab"), "ab<|im_end|>");
    assert!(s.text(&prompt).ends_with("q<|im_end|>\n<|im_start|>assistant\n"));
    assert!(matches!(s.place(&[user("q")]), Place::Known(1)));
    s.options = 0;
    assert!(matches!(s.place(&[user("q")]), Place::Known(0)));
    // Both replies can be repeated and extended.
    s.turn(
        &[user("q"), assistant("ab"), user("r")],
        &assistant("c"),
        "c<|im_end|>",
    );
    assert_eq!(s.tree.node(2).parent, Some(1));
    assert_eq!(s.sequences().len(), 2);
}

#[test]
fn other_tools_are_another_conversation() {
    let mut s = Session::new(tools());
    s.turn(&[user("q")], &assistant("a"), "a<|im_end|>");
    s.tools = None;
    let prompt = s.turn(
        &[user("q"), assistant("a"), user("r")],
        &assistant("b"),
        "b<|im_end|>",
    );
    assert!(!s.text(&prompt).contains("Tools:"));
    assert_eq!(s.branches().len(), 2);
    assert_eq!(s.sequences().len(), 1, "without tools it is a side request");
    // Only the spacing of the tools differs: the same conversation.
    s.tools = Some(serde_json::from_str(&tools().unwrap().to_string().replace(',', " , ")).unwrap());
    assert!(matches!(s.place(&[user("q")]), Place::Known(0)));
}

#[test]
fn an_echo_is_compared_with_what_was_sampled() {
    let call = |command: &str, timeout: &str| {
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function":
            {"name": "run", "arguments": format!("{{\"command\": \"{command}\", \"timeout\": {timeout}}}")}}]})
    };
    let mut s = Session::new(tools());
    s.turn(&[user("go")], &call("cd /a && ls", "5000.0"), "x<|im_end|>");
    let result = json!({"role": "tool", "tool_call_id": "c1", "content": "out"});
    let mut place = |echo: Value, content: &str| {
        let mut result = result.clone();
        result["content"] = json!(content);
        match s.place(&[user("go"), echo, result]) {
            Place::New { node, .. } | Place::Known(node) => s.tree.node(node).depth,
        }
    };
    assert_eq!(place(call("ls", "5000"), "1"), 1);
    // Changes do not add up from echo to echo.
    assert_eq!(place(call("cd /b && ls", "5000"), "2"), 0);
    assert_eq!(place(call("cd /a && ls", "5000"), "3"), 1);
}

/// What an agent may do next: go on from a turn (by number), with or without a changed reply, or begin
/// anew; the reply may fail, and it may end without its end-of-turn token.
#[derive(Clone, Debug)]
struct Move {
    from: Option<prop::sample::Index>,
    edit: bool,
    message: u8,
    reply: u8,
    fails: bool,
    cut: bool,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = (
        prop::option::weighted(0.9, any::<prop::sample::Index>()),
        prop::bool::weighted(0.15),
        0u8..4,
        0u8..4,
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.2),
    );
    let one = one.prop_map(|(from, edit, message, reply, fails, cut)| Move {
        from,
        edit,
        message,
        reply,
        fails,
        cut,
    });
    prop::collection::vec(one, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::serve::proxy::fuzz_cases(64)))]
    #[test]
    fn every_sampled_token_counts_once_where_the_engine_saw_it(moves in moves()) {
        static RENDERER: OnceLock<Renderer> = OnceLock::new();
        let renderer = RENDERER.get_or_init(renderer);
        let mut tree = Tree::default();
        // History of every finished turn as the agent knows it, and the tokens the engine saw and sampled.
        let mut turns: Vec<(Vec<Value>, Vec<u32>)> = Vec::new();
        let mut sampled_tokens = 0;
        for (step, m) in moves.iter().enumerate() {
            let mut history = match m.from {
                Some(index) if !turns.is_empty() => turns[index.index(turns.len())].0.clone(),
                _ => Vec::new(),
            };
            if let (true, Some(last)) = (m.edit, history.last_mut()) {
                *last = assistant(&format!("edited {step}"));
            }
            history.push(user(&format!("m{}", m.message)));
            let raw: Vec<String> = history.iter().map(Value::to_string).collect();
            let items: Vec<Item<'_>> = raw.iter().map(|raw| Item { form: Form::Chat, raw: raw.as_bytes() }).collect();
            // What is known is found by its bytes, and nothing else is.
            let joined = raw.join(" , ");
            let (mut at, mut known) = (0, tree.known());
            for text in &raw {
                let length = known.length(&joined.as_bytes()[at..]);
                prop_assert!(length.is_none_or(|n| n == text.len()), "{text}: {length:?}");
                at += text.len() + 3;
            }
            let asked = Asked { items: &items, tools: None, options: 0, sub_agent: None, limit: 1 << 20 };
            let Place::New { node, prompt } = tree.place(renderer, &asked).unwrap() else {
                continue;
            };
            if m.fails {
                tree.remove(node);
                continue;
            }
            let text = format!("r{}", m.reply);
            let end = if m.cut { "" } else { "<|im_end|>" };
            let ids = renderer.tokenizer().encode_rendered(&format!("{text}{end}")).unwrap();
            let sampled: Vec<_> = ids.iter().map(|id| SampledToken { id: *id, logprob: -1.0 - *id as f32, version: PolicyVersion(step as u32) }).collect();
            sampled_tokens += sampled.len();
            history.push(assistant(&text));
            tree.commit(renderer, node, sampled.into(), assistant(&text));
            turns.push((history, [&prompt[..], &ids].concat()));
        }
        let sequences = trainable(&branches(&tree, &BranchKind::ALL));
        let counted: usize = sequences.iter().map(TokenSequence::sampled).sum();
        prop_assert_eq!(counted, sampled_tokens);
        for s in &sequences {
            prop_assert_eq!(s.check(), Ok(()));
            prop_assert!(turns.iter().any(|(_, tokens)| *tokens == s.token_ids), "a leaf is what one turn's engine saw and said");
            for i in (0..s.len()).filter(|i| s.loss_mask[*i]) {
                prop_assert_eq!(s.logprobs[i], -1.0 - s.token_ids[i] as f32);
            }
        }
        // Every turn lies on the path of a leaf.
        for (_, tokens) in &turns {
            prop_assert!(sequences.iter().any(|s| s.token_ids.starts_with(tokens)));
        }
        let sum: f32 = sequences.iter().map(|s| s.weight).sum();
        prop_assert!(sequences.is_empty() || (sum - 1.0).abs() < 1e-5);
    }
}
