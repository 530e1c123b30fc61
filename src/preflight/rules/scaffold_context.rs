//! The context window holds what the agent says before it has done anything.

use crate::{
    config::{values::Scaffold, Settings},
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, EVERY_RUN},
    rollout::scaffold::FIRST_REQUESTS,
};

pub(super) const RULE: Rule = Rule {
    id: "scaffold-context",
    runs: EVERY_RUN,
    what: "The context window holds the agent's first request (its system prompt and tools) and a reply.",
    why: "An agent whose first request is longer than the window makes no call at all, and every trial fails the same way.",
    evidence: "The first request of the tested version of each agent, behind a task of one line, counted by the proxy with Qwen3's tokenizer (docs/scaffolds.md). Only the sum MAX_PROMPT + MAX_RESP bounds a request (and ROLLOUT_MAX_MODEL_LEN and the model's positions, where they are less): MAX_PROMPT alone refuses none.",
    fix: "Raise MAX_PROMPT to the first request and the task's text; HARBOR_AGENT_DISALLOWED_TOOLS makes the first request of cc and oc shorter.",
    check,
};

/// Tokens of the shortest reply with a tool call that is of any use.
const REPLY: u64 = 128;

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let scaffold = s.run.scaffold;
    let Some((_, first)) = FIRST_REQUESTS.iter().find(|(name, _)| *name == scaffold.name()) else {
        return Vec::new();
    };
    let first = u64::from(*first);
    let (window, bounded_by) = window(s, facts);
    let least = first + REPLY.min(u64::from(s.engine.max_tokens_per_turn));
    let takes_tools_away = matches!(scaffold, Scaffold::Cc | Scaffold::Oc);
    let text = format!(
        "SCAFFOLD={scaffold}: its first request has about {first} tokens, and the context window is {window} ({bounded_by})"
    );
    let tools = if takes_tools_away {
        ", or take tools away with HARBOR_AGENT_DISALLOWED_TOOLS"
    } else {
        ""
    };
    // The first request of another version, or with fewer tools, was not counted.
    let has_all_tools = !takes_tools_away || s.agent.disallowed_tools.is_empty();
    let is_counted = s.agent.version.is_none() && has_all_tools;
    vec![if window < least && is_counted {
        fatal(format!(
            "{text}: it cannot make one call; raise MAX_PROMPT (at least {first} and the task's text){tools}"
        ))
    } else if window < least {
        warn(format!(
            "{text}: unless this version with these tools needs less, it cannot make one call; raise MAX_PROMPT"
        ))
    } else if window < 2 * first {
        warn(format!(
            "{text}: little is left for the task; raise MAX_PROMPT or MAX_RESP{tools}"
        ))
    } else {
        ok(text)
    }]
}

/// The longest request with its reply, tokens, and what bounds it.
fn window(s: &Settings, facts: Option<&Facts>) -> (u64, &'static str) {
    let positions = facts
        .and_then(|facts| facts.model.as_ref().ok())
        .and_then(|model| model.shape.max_positions);
    let bounds = [
        (s.window_tokens(), "MAX_PROMPT + MAX_RESP"),
        (u64::from(s.engine.max_model_len), "ROLLOUT_MAX_MODEL_LEN"),
        (
            positions.unwrap_or(u64::MAX),
            "the model's max_position_embeddings",
        ),
    ];
    // The first of equals.
    bounds
        .into_iter()
        .min_by_key(|(tokens, _)| *tokens)
        .unwrap_or(bounds[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn an_agent_that_cannot_make_one_call_is_fatal() {
        let found = |set: &[&str]| check(&settings(set), None);
        // The settings of these tests have a window of 768 tokens.
        for (scaffold, first) in FIRST_REQUESTS.iter().filter(|(_, first)| *first > 768) {
            let set = format!("SCAFFOLD={scaffold}");
            let (verdict, text) = found(&[&set]).remove(0);
            assert_eq!(verdict, Verdict::Fatal, "{scaffold}");
            assert!(
                text.contains(&first.to_string()) && text.contains("768"),
                "{text}"
            );
            assert!(text.contains("raise MAX_PROMPT"), "{text}");
            assert_eq!(
                text.contains("HARBOR_AGENT_DISALLOWED_TOOLS"),
                ["cc", "oc"].contains(scaffold)
            );
            let enough = format!("MAX_RESP={}", 2 * first);
            assert_eq!(
                found(&[&set, &enough])[0].0,
                Verdict::Ok,
                "the sum counts, not MAX_PROMPT"
            );
            let little = format!("MAX_RESP={first}");
            assert_eq!(found(&[&set, &little])[0].0, Verdict::Warn);
        }
        assert_eq!(found(&["SCAFFOLD=mini"])[0].0, Verdict::Ok);
        assert!(found(&["SCAFFOLD=custom", "SCAFFOLD_COMMAND=x"]).is_empty());
    }

    #[test]
    fn what_was_not_counted_is_a_warning() {
        let verdict = |set: &[&str]| check(&settings(set), None)[0].0;
        let tools = "HARBOR_AGENT_DISALLOWED_TOOLS=Agent,Skill";
        assert_eq!(verdict(&["SCAFFOLD=cc", tools]), Verdict::Warn);
        assert_eq!(
            verdict(&["SCAFFOLD=ohsdk", tools]),
            Verdict::Fatal,
            "it keeps its tools"
        );
        assert_eq!(verdict(&["SCAFFOLD=cc", "SCAFFOLD_VERSION=9"]), Verdict::Warn);
    }

    #[test]
    fn engine_and_model_bound_the_window_too() {
        let long = ["SCAFFOLD=cc", "MAX_RESP=90000"];
        let engine = [&long[..], &["ROLLOUT_MAX_MODEL_LEN=4096"]].concat();
        let found = check(&settings(&engine), None);
        assert!(found[0].0 == Verdict::Fatal && found[0].1.contains("4096 (ROLLOUT_MAX_MODEL_LEN)"));
        assert_eq!(check(&settings(&long), Some(&facts()))[0].0, Verdict::Ok);
        let mut short = facts();
        if let Ok(model) = &mut short.model {
            model.shape.max_positions = Some(2048);
        }
        let found = check(&settings(&long), Some(&short));
        assert!(
            found[0].0 == Verdict::Fatal && found[0].1.contains("max_position_embeddings"),
            "{found:?}"
        );
    }
}
