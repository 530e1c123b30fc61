//! The parser reads what the checkpoint's template writes.

use crate::{
    config::{values::ToolCallParser, Settings},
    preflight::{Facts, Outcome, Rule, Verdict},
};

pub(super) const RULE: Rule = Rule {
    id: "tool-parser",
    what: "TOOL_CALL_PARSER reads the markup that the checkpoint's own chat template writes.",
    why: "With another parser every tool call stays plain text, no trial acts, and every reward is 0.",
    evidence: "A tool call is rendered with the template and read back with each parser.",
    fix: "Set TOOL_CALL_PARSER to the name in the finding.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let parser = s.model.tool_call_parser;
    let Some(facts) = facts else {
        return vec![(
            Verdict::Skip,
            format!("tool_parser={parser} against the chat template: needs the checkpoint"),
        )];
    };
    // A folder that cannot be read is the finding of another rule.
    let Ok(model) = &facts.model else {
        return vec![(
            Verdict::Skip,
            format!("tool_parser={parser}: the checkpoint cannot be read"),
        )];
    };
    vec![match &model.markup {
        Ok(Some(markup)) if parser == ToolCallParser::Auto => (
            Verdict::Ok,
            format!("tool_parser=auto: the chat template writes the markup of {markup}"),
        ),
        Ok(Some(markup)) if *markup == parser => (
            Verdict::Ok,
            format!("tool_parser={parser} matches the chat template"),
        ),
        Ok(Some(markup)) => (
            Verdict::Fatal,
            format!("TOOL_CALL_PARSER={parser}, and the chat template writes the markup of {markup}"),
        ),
        Ok(None) if parser == ToolCallParser::Auto => (
            Verdict::Fatal,
            "tool_parser=auto: the chat template writes a markup that no parser reads".into(),
        ),
        Ok(None) => (
            Verdict::Warn,
            format!("the chat template's tool-call markup is not known; check that {parser} reads it"),
        ),
        Err(problem) => (
            Verdict::Fatal,
            format!("the chat template cannot render a tool call: {problem}"),
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::{facts, settings};

    #[test]
    fn the_template_decides() {
        let with = |markup| {
            let mut facts = facts();
            if let Ok(model) = &mut facts.model {
                model.markup = markup;
            }
            check(&settings(&[]), Some(&facts))[0].0
        };
        assert_eq!(with(Ok(Some(ToolCallParser::Hermes))), Verdict::Ok);
        assert_eq!(with(Ok(Some(ToolCallParser::Qwen3Coder))), Verdict::Fatal);
        assert_eq!(with(Ok(None)), Verdict::Warn);
        assert_eq!(with(Err("no template".into())), Verdict::Fatal);
        assert_eq!(check(&settings(&[]), None)[0].0, Verdict::Skip);
    }
}
