//! The window of a trial against what engine and model hold.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "context-window",
    runs: EVERY_RUN,
    what: "MAX_PROMPT + MAX_RESP fits the engine's context, its cache and the model's positions.",
    why: "A trial that outgrows the engine ends as overlong; positions beyond the model's own give noise.",
    evidence: "By construction: the engine refuses a prompt that leaves no room, and config.json states max_position_embeddings, and by how much its rotary frequencies stretch it.",
    fix: "Lower MAX_PROMPT or MAX_RESP, or raise ROLLOUT_MAX_MODEL_LEN and ENGINE_KV_CACHE_TOKENS; a model published for it goes further with `rope_scaling` of type yarn in its config.json.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let window = s.window_tokens();
    let engine = u64::from(s.engine.max_model_len);
    let mut found = Vec::new();
    if s.engine.kv_cache_tokens < engine {
        found.push(fatal(format!(
            "ENGINE_KV_CACHE_TOKENS={} cannot hold one sequence of ROLLOUT_MAX_MODEL_LEN={engine}",
            s.engine.kv_cache_tokens
        )));
    }
    if u64::from(s.data.max_prompt_tokens) >= engine {
        found.push(fatal(format!(
            "MAX_PROMPT={} leaves no room in ROLLOUT_MAX_MODEL_LEN={engine}",
            s.data.max_prompt_tokens
        )));
    } else if window > engine {
        found.push(warn(format!(
            "the window MAX_PROMPT + MAX_RESP = {window} is cut by ROLLOUT_MAX_MODEL_LEN={engine}"
        )));
    }
    match facts.map(|f| &f.model) {
        Some(Ok(model))
            if model
                .shape
                .max_positions
                .is_some_and(|most| engine.min(window) > most) =>
        {
            found.push(fatal(format!(
                "a window of {} tokens exceeds the {} of the model (max_position_embeddings, stretched by rope_scaling)",
                engine.min(window),
                model.shape.max_positions.unwrap_or_default()
            )))
        }
        _ => {}
    }
    if found.is_empty() {
        let model = match facts.map(|f| &f.model) {
            Some(Ok(model)) => match model.shape.max_positions {
                Some(most) => format!(", model {most}"),
                None => String::new(),
            },
            _ => String::new(),
        };
        found.push(ok(format!("window={window} fits: engine {engine}{model}")));
        if facts.is_none() {
            found.push(skip("window against the model's positions: needs config.json"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn engine_cache_and_model_bound_the_window() {
        let full = |set: &[&str]| check(&settings(set), Some(&facts()))[0].0;
        assert_eq!(full(&[]), Verdict::Ok);
        assert_eq!(
            full(&["MAX_RESP=50000"]),
            Verdict::Fatal,
            "the model of the test has 40960 positions"
        );
        assert_eq!(full(&["ROLLOUT_MAX_MODEL_LEN=512"]), Verdict::Warn);
        assert_eq!(full(&["ROLLOUT_MAX_MODEL_LEN=256"]), Verdict::Fatal);
        assert_eq!(full(&["ENGINE_KV_CACHE_TOKENS=700"]), Verdict::Fatal);
    }
}
