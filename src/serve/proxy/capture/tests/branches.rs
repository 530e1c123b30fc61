//! Kinds of branches, and which of them are trained.

use super::*;

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
