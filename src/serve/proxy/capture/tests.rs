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

fn kinds(s: &Session) -> Vec<(BranchKind, bool, Option<usize>)> {
    let branches = s.branches();
    let sum: f32 = branches.iter().map(|b| b.tokens.weight).sum();
    assert!((sum - 1.0).abs() < 1e-6, "the weights sum to one");
    branches.iter().map(|b| (b.kind, b.trainable, b.parent)).collect()
}

#[test]
fn kinds_of_conversations_beside_the_main_one() {
    use BranchKind::*;
    let system = |text: &str| json!({"role": "system", "content": text});
    let mut s = Session::new(None);
    // A title request comes first, and has no tools.
    s.turn(&[user("a title, please")], &assistant("T"), "T<|im_end|>");
    s.tools = tools();
    let main = [system("you are an agent"), user("go")];
    s.turn(&main, &assistant("one"), "one<|im_end|>");
    // A sub-agent has other rules, or says what it is.
    s.turn(
        &[system("you search"), user("find")],
        &assistant("found"),
        "found<|im_end|>",
    );
    let raw = [
        system("you are an agent").to_string(),
        user("by header").to_string(),
    ];
    let items: Vec<Item<'_>> = raw
        .iter()
        .map(|raw| Item {
            form: Form::Chat,
            raw: raw.as_bytes(),
        })
        .collect();
    let tool_text = tools().unwrap().to_string();
    let asked = Asked {
        items: &items,
        tools: Some(Item {
            form: Form::Chat,
            raw: tool_text.as_bytes(),
        }),
        options: 0,
        sub_agent: Some(1),
        limit: 1 << 20,
    };
    let Place::New { node, .. } = s.tree.place(&s.renderer, &asked).unwrap() else {
        panic!()
    };
    let token = SampledToken {
        id: 1,
        logprob: -1.0,
        version: PolicyVersion(0),
    };
    s.tree
        .commit(&s.renderer, node, Arc::new([token]), assistant("x"));
    // The same one asks again; then another one asks the same.
    let again = s.tree.place(&s.renderer, &asked).unwrap();
    assert!(matches!(again, Place::Known(known) if known == node));
    let other = Asked {
        sub_agent: Some(2),
        ..asked
    };
    let Place::New { node: twin, .. } = s.tree.place(&s.renderer, &other).unwrap() else {
        panic!("two sub-agents share a turn")
    };
    s.tree.remove(twin);
    // After a compaction the same agent begins anew.
    s.turn(
        &[system("you are an agent"), user("so far: one")],
        &assistant("two"),
        "two<|im_end|>",
    );
    // Asked again with other options.
    s.options = 1;
    s.turn(&main, &assistant("one!"), "one!<|im_end|>");
    assert_eq!(
        kinds(&s),
        [
            (Side, false, None),
            (Main, true, None),
            (SubAgent, true, None),
            (SubAgent, true, None),
            (Compaction, true, None),
            (Retry, true, None)
        ]
    );
    let side = &s.branches()[0];
    assert_eq!((side.tokens.weight, side.tokens.sampled()), (0.0, 2));
    assert_eq!(
        side.messages[1],
        json!({"role": "assistant", "content": "T", "sampled": true})
    );
    // Nothing is trained that is not asked for.
    assert!(trainable(&branches(&s.tree, &[])).is_empty());
    let only = trainable(&branches(&s.tree, &[Side]));
    assert_eq!((only.len(), only[0].weight), (1, 1.0));
}

/// What agents do when the window is full: the conversation so far with one more wish, same tools.
#[test]
fn a_request_for_a_summary_is_told_by_the_conversation_that_begins_with_its_reply() {
    use BranchKind::*;
    let system = |text: &str| json!({"role": "system", "content": text});
    let summary = "<analysis>\nlong thoughts that are left out of what follows, all of them\n</analysis>\n\
                   <summary>\n1. The user wants number 7 fixed.\n   2. src/a.rs was read.\n</summary>";
    let resumed = "This goes on from an earlier conversation.\nSummary:\n1. The user wants number 7 fixed.\n2. src/a.rs was read.\nGo on.";
    let mut s = Session::new(tools());
    let mut messages = vec![system("rules\nToday is 2026-03-09, 23:58."), user("fix number 7")];
    s.turn(&messages, &assistant("I read it."), "I read it.<|im_end|>");
    messages.extend([assistant("I read it."), user("output")]);
    s.turn(&messages, &assistant("I fix it."), "I fix it.<|im_end|>");
    messages.extend([assistant("I fix it."), user("more output\nSum up what was done.")]);
    s.turn(&messages, &assistant(summary), "sum<|im_end|>");
    // As long as nothing begins with it, it is a turn like others.
    assert_eq!(kinds(&s), [(Main, true, None)]);
    // The system prompt has a new date.
    s.turn(
        &[system("rules\nToday is 2026-03-10, 0:04."), user(resumed)],
        &assistant("done"),
        "done<|im_end|>",
    );
    assert_eq!(
        kinds(&s),
        [
            (Main, true, None),
            (Summary, false, Some(0)),
            (Compaction, true, None)
        ]
    );
    let all = trainable(&branches(&s.tree, &[Main, Summary, Compaction]));
    let branches = s.branches();
    assert_eq!(
        branches[0].turns, 2,
        "the main conversation ends before the request"
    );
    assert_eq!((branches[1].turns, branches[1].tokens.weight), (3, 0.0));
    let tokens = &branches[1].tokens;
    let sampled = tokens
        .token_ids
        .iter()
        .zip(&tokens.loss_mask)
        .filter(|(_, mask)| **mask);
    let sampled: Vec<u32> = sampled.map(|(id, _)| *id).collect();
    assert_eq!(s.text(&sampled), "sum<|im_end|>");
    // Trained, it counts its own tokens and no others.
    let counted: Vec<usize> = all.iter().map(TokenSequence::sampled).collect();
    assert_eq!(counted[1], branches[1].tokens.sampled());
    assert_eq!(all.iter().map(|q| q.weight).sum::<f32>(), 1.0);
}

/// Sub-agents hand their answers on, and a wrong answer is asked for again: both are trained.
#[test]
fn answers_that_others_are_given_are_no_summaries() {
    use BranchKind::*;
    let answer = "The recipe wants two cups of sugar, which sugar.txt holds.";
    let mut s = Session::new(tools());
    s.turn(&[user("bake a cake")], &assistant("I ask."), "ask<|im_end|>");
    s.sub_agent = Some(1);
    s.turn(&[user("How much sugar?")], &assistant(answer), "two<|im_end|>");
    s.sub_agent = Some(2);
    let second = user(&format!("Write this down: {answer}"));
    s.turn(&[second], &assistant("done"), "done<|im_end|>");
    assert_eq!(
        kinds(&s),
        [(Main, true, None), (SubAgent, true, None), (SubAgent, true, None)]
    );
    let mut s = Session::new(tools());
    s.turn(
        &[user("How much sugar? Answer in JSON.")],
        &assistant(answer),
        "two<|im_end|>",
    );
    let again = user(&format!(
        "Your answer was: {answer} That is no JSON. Answer again."
    ));
    s.turn(&[again], &assistant("{}"), "json<|im_end|>");
    assert_eq!(kinds(&s)[0], (Main, true, None));
    assert!(kinds(&s)[1].1);
}

/// A planner's reply is pasted into the first message of an executor, which has rules of its own.
#[test]
fn a_plan_that_another_agent_is_given_is_trained() {
    use BranchKind::*;
    let system = |text: &str| json!({"role": "system", "content": text});
    let plan = "1. Read sugar.txt in the folder otter.\n2. Copy it to the folder of the recipe.";
    let given = user(&format!("Carry out this plan:\n{plan}"));
    let other =
        Some(json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]));
    let planner = [system("You plan."), user("copy the sugar")];
    // Tools of the planner and of the executor.
    for (planners, executors) in [(None, None), (tools(), tools()), (other.clone(), tools())] {
        let mut s = Session::new(planners);
        s.turn(&planner, &assistant(plan), "plan<|im_end|>");
        s.tools = executors.clone();
        let executor = [system("You work."), given.clone()];
        s.turn(&executor, &assistant("done"), "done<|im_end|>");
        assert_eq!(
            kinds(&s),
            [(Main, true, None), (SubAgent, true, None)],
            "executor with {executors:?}"
        );
    }
    // Other tools alone tell them apart too.
    let mut s = Session::new(other);
    s.turn(&planner[1..], &assistant(plan), "plan<|im_end|>");
    s.tools = tools();
    s.turn(std::slice::from_ref(&given), &assistant("done"), "done<|im_end|>");
    assert_eq!(kinds(&s), [(Main, true, None), (SubAgent, true, None)]);
    // The same rules and tools: the same agent, which begins anew with what it wrote.
    for tools in [None, tools()] {
        let mut s = Session::new(tools);
        s.turn(&planner, &assistant("I begin."), "begin<|im_end|>");
        let mut asked = planner.to_vec();
        asked.extend([assistant("I begin."), user("Sum up.")]);
        s.turn(&asked, &assistant(plan), "sum<|im_end|>");
        s.turn(
            &[planner[0].clone(), given.clone()],
            &assistant("done"),
            "done<|im_end|>",
        );
        assert_eq!(
            kinds(&s),
            [
                (Main, true, None),
                (Summary, false, Some(0)),
                (Compaction, true, None)
            ]
        );
    }
}

/// An agent whose request for a summary is a conversation of its own, without tools.
#[test]
fn a_summary_may_be_asked_for_without_tools() {
    use BranchKind::*;
    let system = |text: &str| json!({"role": "system", "content": text});
    let summary = "USER_CONTEXT: copy sugar.txt.\nCOMPLETED: the folder otter was listed.";
    for head in [None, Some(system("You sum up."))] {
        let mut s = Session::new(tools());
        s.turn(
            &[system("rules"), user("copy the sugar")],
            &assistant("I look."),
            "look<|im_end|>",
        );
        s.tools = None;
        let mut asked: Vec<Value> = head.into_iter().collect();
        asked.push(user("These are the events so far. Sum them up."));
        s.turn(&asked, &assistant(summary), "sum<|im_end|>");
        s.tools = tools();
        s.turn(
            &[system("rules"), user(summary)],
            &assistant("done"),
            "done<|im_end|>",
        );
        assert_eq!(
            kinds(&s),
            [
                (Main, true, None),
                (Summary, false, None),
                (Compaction, true, None)
            ]
        );
    }
}

#[test]
fn what_only_looks_like_a_summary_is_none() {
    use BranchKind::*;
    let report = "The bug is in line 7 of src/a.rs, where the index is off by one.";
    let call = |id: &str| {
        json!({"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function",
               "function": {"name": "run", "arguments": "{}"}}]})
    };
    let mut s = Session::new(tools());
    let main = vec![user("fix it")];
    s.turn(&main, &call("c1"), "call<|im_end|>");
    // A sub-agent's report comes back as a tool's result, also in a rewritten history.
    s.tools =
        Some(json!([{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]));
    s.turn(&[user("find it")], &assistant(report), "report<|im_end|>");
    s.tools = tools();
    let result = |text: &str| json!({"role": "tool", "tool_call_id": "c1", "content": text});
    for text in [report.to_owned(), format!("{report}\nexit 0")] {
        let mut messages = main.clone();
        messages.extend([call("c1"), result(&text)]);
        s.turn(&messages, &assistant("ok"), "ok<|im_end|>");
    }
    assert_eq!(
        kinds(&s),
        [
            (SubAgent, true, None),
            (Main, true, None),
            (Rewritten, true, Some(1))
        ]
    );
    use crate::serve::proxy::capture::branches::repeats;
    // A short title may be repeated by chance.
    assert!(!repeats("Fix it", "Fix it") && repeats(report, report));
    assert!(!repeats(&report[..31], report), "less than half of it");
}

#[test]
fn a_shared_prefix_is_counted_in_a_branch_that_is_trained() {
    let mut s = Session::new(None);
    s.turn(&[user("q")], &assistant("a"), "a<|im_end|>");
    let q = |text: &str| [user("q"), assistant("a"), user(text)];
    s.turn(&q("r"), &assistant("b"), "b<|im_end|>");
    s.turn(&q("s"), &assistant("c"), "c<|im_end|>");
    let all = branches(&s.tree, &[BranchKind::Rewritten]);
    assert_eq!(
        all.iter().map(|b| (b.kind, b.trainable)).collect::<Vec<_>>(),
        [(BranchKind::Main, false), (BranchKind::Rewritten, true)]
    );
    let sampled: Vec<usize> = all.iter().map(|b| b.tokens.sampled()).collect();
    assert_eq!(sampled, [2, 4], "the first turn counts in the second branch");
    assert_eq!(all[1].tokens.weight, 1.0);
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
fn a_tool_list_is_read_once_and_forms_are_told_apart() {
    let r = renderer();
    let raw = r#"[{"type": "function", "name": "run", "function": {"name": "run"}, "input_schema": {"type": "object"}}]"#;
    let read = |form| {
        let item = Item {
            form,
            raw: raw.as_bytes(),
        };
        let list = r.tools(item).unwrap();
        r.remember_tools(item, list.clone());
        list
    };
    let (chat, anthropic) = (read(Form::Chat), read(Form::Anthropic));
    assert_ne!(chat.list, anthropic.list);
    for n in 0..20 {
        let other = format!("[{{\"type\": \"function\", \"function\": {{\"name\": \"f{n}\"}}}}]");
        let other = Item {
            form: Form::Chat,
            raw: other.as_bytes(),
        };
        let list = r.tools(other).unwrap();
        assert_eq!(list.list[0]["function"]["name"], format!("f{n}"));
        r.remember_tools(other, list);
    }
    assert!(Arc::ptr_eq(&chat, &read(Form::Chat)) && Arc::ptr_eq(&anthropic, &read(Form::Anthropic)));
    let wrong = Item {
        form: Form::Chat,
        raw: b"{}",
    };
    assert!(r.tools(wrong).is_err() && r.tools(wrong).is_err());
}

#[test]
fn templates_that_cannot_be_extended_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    testing::write_folder(dir.path());
    let build = |source: String| {
        let template = ChatTemplate::from_source(source, "t", Default::default()).unwrap();
        Renderer::new(template, Tokenizer::from_dir(dir.path()).unwrap(), Map::new())
    };
    let no_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let error = build(no_end.into()).err().unwrap().to_string();
    assert!(error.contains("stop tokens"), "{error}");
    // The number of messages is written with each one.
    let counting = "{% for m in messages %}{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}";
    let error = build(counting.into()).err().unwrap().to_string();
    assert!(error.contains("not rendered as"), "{error}");
}

#[test]
fn megabytes_beyond_the_window_are_refused_with_a_count() {
    let r = renderer();
    let text = "hello world ".repeat(1 << 20);
    let error = r.full(&[user(&text)], None, 10_000).unwrap_err();
    assert!(
        matches!(error, RenderError::TooLong { at_least, limit: 10_000 } if at_least > 10_000),
        "{error}"
    );
}

/// Cost of a turn: what is rendered depends on the new messages alone.
#[test]
fn the_suffix_of_a_long_conversation_is_that_of_a_short_one() {
    let r = renderer();
    let new = [user("next")];
    let short = r.suffix(&assistant("a"), true, &new, 1 << 20).unwrap();
    let mut long = vec![json!({"role": "system", "content": "rules"})];
    for n in 0..50 {
        long.extend([user(&format!("q{n}")), assistant(&format!("a{n}"))]);
    }
    let without = r.full(&long[..long.len() - 1], None, 1 << 20).unwrap();
    long.extend(new);
    let with = r.full(&long, None, 1 << 20).unwrap();
    assert!(with.starts_with(&without));
    assert!(with.ends_with(&short));
}

/// Real templates with a real tokenizer: `LEGORL_TEST_TOKENIZER` names a folder with Qwen3's
/// tokenizer.json, `LEGORL_TEST_TEMPLATES` one with `*.jinja` files. What is spliced must be what the
/// template writes for the whole conversation.
#[test]
fn real_templates_can_be_extended_turn_by_turn() {
    let (Ok(folder), Ok(templates)) = (
        std::env::var("LEGORL_TEST_TOKENIZER"),
        std::env::var("LEGORL_TEST_TEMPLATES"),
    ) else {
        eprintln!("SKIPPED real_templates_can_be_extended_turn_by_turn: set LEGORL_TEST_TOKENIZER and LEGORL_TEST_TEMPLATES");
        return;
    };
    let templates = std::path::Path::new(&templates);
    for name in [
        "qwen2_5",
        "qwen3",
        "qwen3_instruct_2507",
        "qwen3_5_think",
        "qwen3_5_nothink",
        "qwen3_6",
    ] {
        let source = std::fs::read_to_string(templates.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::from_source(source, name, Default::default()).unwrap();
        let tokenizer = Tokenizer::from_dir(folder.as_ref()).unwrap();
        let r = Renderer::new(template, tokenizer, Map::new()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "run", "arguments": {"cmd": "ls"}}});
        let reply = json!({"role": "assistant", "content": "look", "tool_calls": [call]});
        let result =
            json!({"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|>\n<tool_call> é \u{1F600}"});
        let mut all = vec![
            json!({"role": "system", "content": "s"}),
            user("q"),
            reply.clone(),
            result.clone(),
        ];
        let raw = tools().unwrap().to_string();
        let item = Item {
            form: Form::Chat,
            raw: raw.as_bytes(),
        };
        let tools = r.tools(item).unwrap();
        let suffix = r.suffix(&reply, true, &[result], 1 << 20).unwrap();
        let full = r.full(&all, Some(&tools), 1 << 20).unwrap();
        assert!(full.ends_with(&suffix), "{name}");
        all.truncate(2);
        let begin = r.full(&all, Some(&tools), 1 << 20).unwrap();
        let common = begin.iter().zip(&full).take_while(|(a, b)| a == b).count();
        // Thinking templates open a thought in the generation prompt that history does not repeat.
        assert!(begin.len() - common <= 4, "{name}: {common} of {}", begin.len());
        let ends = suffix.iter().filter(|id| **id == r.end_of_turn()).count();
        assert_eq!(ends, 1, "{name}: the tool wrote <|im_end|> as text");
    }
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

fn chat_item(raw: &str) -> Item<'_> {
    Item {
        form: Form::Chat,
        raw: raw.as_bytes(),
    }
}

/// A tool list of about so many bytes, unlike those with another number.
fn long_tools(number: usize, bytes: usize) -> String {
    let description = format!("{number} {}", "x1 ".repeat(bytes / 3));
    json!([{"type": "function", "function": {"name": "run", "description": description}}]).to_string()
}

fn place_with(renderer: &Renderer, tools: &str, limit: usize) -> Result<Place, CaptureError> {
    let message = user("go").to_string();
    let asked = Asked {
        items: &[chat_item(&message)],
        tools: Some(chat_item(tools)),
        options: 0,
        sub_agent: None,
        limit,
    };
    Tree::default().place(renderer, &asked)
}

#[test]
fn tool_lists_of_refused_requests_are_not_kept_and_kept_ones_are_bounded() {
    let renderer = renderer();
    let too_long = |result: Result<Place, CaptureError>| {
        matches!(result, Err(CaptureError::Render(RenderError::TooLong { .. })))
    };
    // Refused from the bytes alone.
    for number in 0..3 {
        assert!(too_long(place_with(
            &renderer,
            &long_tools(number, 2 << 20),
            1000
        )));
    }
    // Placed and then refused by the session, since the prompt is as long as the window.
    assert!(place_with(&renderer, &long_tools(9, 3000), 100).is_ok());
    assert_eq!(renderer.remembered_tools(), (0, 0));
    // Too long to be kept, though it fits.
    assert!(place_with(&renderer, &long_tools(9, 3 << 19), 4 << 20).is_ok());
    assert_eq!(renderer.remembered_tools(), (0, 0));
    // Many that are kept.
    for number in 0..20 {
        assert!(place_with(&renderer, &long_tools(number, 900_000), 4 << 20).is_ok());
        let (lists, bytes) = renderer.remembered_tools();
        assert!(
            lists == (number + 1).min(9) && bytes <= 8 << 20,
            "{lists} {bytes}"
        );
    }
    let last = long_tools(19, 900_000);
    let list = renderer.tools(chat_item(&last)).unwrap();
    assert!(
        Arc::ptr_eq(&list, &renderer.tools(chat_item(&last)).unwrap()),
        "read once"
    );
    for number in 0..40 {
        assert!(place_with(&renderer, &long_tools(number, 30), 1 << 20).is_ok());
    }
    assert_eq!(renderer.remembered_tools().0, 32);
}

#[test]
fn long_tools_and_messages_that_fit_are_never_refused_early() {
    let renderer = renderer();
    let escaped = "\\u0041".repeat(400_000);
    let indented = format!("[{}{{\"type\":\"function\",", " ".repeat(2 << 20));
    let blank = "\\n ".repeat(1 << 20);
    for raw in [
        format!(r#"[{{"type": "function", "function": {{"name": "run", "description": "{escaped}"}}}}]"#),
        format!(r#"{indented} "function": {{"name": "run"}}}}]"#),
        format!(r#"[{{"type": "function", "function": {{"name": "run", "description": "{blank}"}}}}]"#),
    ] {
        let Place::New { prompt, .. } = place_with(&renderer, &raw, usize::MAX).unwrap() else {
            panic!("the request was known");
        };
        assert!(place_with(&renderer, &raw, prompt.len()).is_ok());
    }
    let place = |message: &str, limit: usize| {
        let asked = Asked {
            items: &[chat_item(message)],
            tools: None,
            options: 0,
            sub_agent: None,
            limit,
        };
        Tree::default().place(&renderer, &asked)
    };
    let long = json!("word hello 12 ".repeat(200_000));
    for message in [
        format!(r#"{{"role": "user", "content": "{escaped}"}}"#),
        format!(r#"{{"role": "assistant", "content": "x", "reasoning_content": {long}}}"#),
        format!(r#"{{"role": "user", "content": {long}}}"#),
        format!(r#"{{"role": "user", "content": [{{"type": "text", "text": {long}}}]}}"#),
    ] {
        let Place::New { prompt, .. } = place(&message, usize::MAX).unwrap() else {
            panic!("the request was known");
        };
        assert!(place(&message, prompt.len()).is_ok());
        let refused = place(&message, prompt.len() / 2);
        assert!(prompt.len() < 1000 || refused.is_err(), "{}", prompt.len());
    }
    // Refused while it is read: what follows is not even looked at.
    let message = format!(r#"{{"role": "user", "content": {long}}}"#);
    let items = [chat_item(&message), chat_item("not read")];
    let mut tree = Tree::default();
    let asked = Asked {
        items: &items,
        tools: None,
        options: 0,
        sub_agent: None,
        limit: 1000,
    };
    let error = tree.place(&renderer, &asked).unwrap_err();
    assert!(
        matches!(error, CaptureError::Render(RenderError::TooLong { .. })),
        "{error}"
    );
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
