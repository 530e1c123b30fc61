//! The parser reads what the checkpoint's template writes.

use crate::{
    config::{
        values::{Scaffold, ToolCallParser},
        Settings,
    },
    preflight::{
        fatal,
        model_family::{self, Family},
        ok,
        rules::not_in_this_version,
        skip, warn, Facts, Outcome, Rule, EVERY_RUN,
    },
};

pub(super) const RULE: Rule = Rule {
    id: "tool-parser",
    runs: EVERY_RUN,
    what: "TOOL_CALL_PARSER reads the markup that the checkpoint's own chat template writes.",
    why: "With another parser every tool call stays plain text, no trial acts, and every reward is 0.",
    evidence: "A tool call is rendered with the template and read back with each parser. Without the template the family decides: Qwen3.5 and 3.6 write XML; Qwen3-30B-A3B was trained with XML for Claude Code and with JSON for OpenHands.",
    fix: "Set TOOL_CALL_PARSER to the name in the finding.",
    check,
};

/// What the chat template writes, or without it what the family writes for this scaffold.
pub(super) fn needed(s: &Settings, facts: Option<&Facts>) -> Option<ToolCallParser> {
    template_markup(facts).or_else(|| {
        let (family, _) = model_family::of(s, facts);
        by_family(family, s.run.scaffold).map(|(parser, _)| parser)
    })
}

fn template_markup(facts: Option<&Facts>) -> Option<ToolCallParser> {
    match facts.map(|f| &f.model) {
        Some(Ok(model)) => model.markup.as_ref().ok().copied().flatten(),
        _ => None,
    }
}

/// The parser of a family, and why.
fn by_family(family: Family, scaffold: Scaffold) -> Option<(ToolCallParser, String)> {
    match (family, scaffold) {
        (Family::Qwen35, _) => Some((ToolCallParser::Qwen3Coder, "Qwen3.5/3.6 writes XML".to_owned())),
        (Family::Qwen3Moe, Scaffold::Cc) => Some((
            ToolCallParser::Qwen3Coder,
            "Qwen3-30B-A3B writes XML for SCAFFOLD=cc".to_owned(),
        )),
        (Family::Qwen3Moe, Scaffold::Oh | Scaffold::Ohsdk) => Some((
            ToolCallParser::Hermes,
            format!("Qwen3-30B-A3B writes JSON for SCAFFOLD={scaffold}"),
        )),
        _ => None,
    }
}

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let parser = s.model.tool_call_parser;
    // `not-in-this-version` refuses it and says which one to set. Without facts that is a warning only, and what
    // the family tells stays fatal.
    let is_absent = !not_in_this_version::PARSERS.contains(&parser.to_string().as_str());
    if is_absent && (facts.is_some() || needed(s, facts).is_none()) {
        return Vec::new();
    }
    match template_markup(facts) {
        Some(markup) if parser == ToolCallParser::Auto => {
            return vec![ok(format!(
                "tool_parser=auto: the chat template writes the markup of {markup}"
            ))]
        }
        Some(markup) if markup == parser => {
            return vec![ok(format!("tool_parser={parser} matches the chat template"))]
        }
        Some(markup) => {
            return vec![fatal(format!(
                "TOOL_CALL_PARSER={parser}, and the chat template writes the markup of {markup}; set {markup}"
            ))]
        }
        None if parser == ToolCallParser::Auto => {
            return vec![match facts.map(|f| &f.model) {
            Some(Ok(_)) => fatal(
                "TOOL_CALL_PARSER=auto, and no parser reads what the chat template writes; name the parser",
            ),
            _ => skip("tool_parser=auto: needs the chat template"),
        }]
        }
        None => {}
    }
    let scaffold = s.run.scaffold;
    if scaffold == Scaffold::Oc {
        return vec![ok(format!(
            "tool_parser={parser}: left to opencode's own settings"
        ))];
    }
    let (family, how) = model_family::of(s, facts);
    let Some((needed, because)) = by_family(family, scaffold) else {
        let is_unread = family == Family::Other && markup_unread(facts);
        return vec![
            if is_unread && matches!(scaffold, Scaffold::Mini | Scaffold::Terminus2) {
                skip(format!(
                    "tool_parser={parser} against the chat template: needs the checkpoint"
                ))
            } else {
                warn(format!(
                "tool_parser={parser}: no rule knows this model ({how}) with SCAFFOLD={scaffold}; compare with its chat template"
            ))
            },
        ];
    };
    vec![if parser == needed {
        ok(format!("tool_parser={parser}: {because} ({how})"))
    } else {
        fatal(format!(
            "TOOL_CALL_PARSER={parser}, but {because} ({how}); set {needed}"
        ))
    }]
}

/// The checkpoint was not looked at, or another rule says that it cannot be read.
fn markup_unread(facts: Option<&Facts>) -> bool {
    facts.is_none_or(|f| f.model.is_err())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn the_template_decides_where_it_is_there() {
        let with = |markup| {
            let mut facts = facts();
            if let Ok(model) = &mut facts.model {
                model.markup = markup;
            }
            check(&settings(&["MODEL_PATH=/m/Qwen3.5-9B"]), Some(&facts))[0].0
        };
        let auto = settings(&["TOOL_CALL_PARSER=auto"]);
        assert_eq!(check(&auto, Some(&facts()))[0].0, Verdict::Ok);
        assert_eq!(check(&auto, None)[0].0, Verdict::Skip);
        assert_eq!(with(Ok(Some(ToolCallParser::Hermes))), Verdict::Ok);
        assert_eq!(with(Ok(Some(ToolCallParser::Qwen3Coder))), Verdict::Fatal);
        assert_eq!(
            with(Ok(None)),
            Verdict::Warn,
            "config.json says qwen3, the folder's name does not count"
        );
    }

    #[test]
    fn without_it_the_family_and_the_scaffold_decide() {
        let verdict = |model: &str, scaffold: &str, parser: &str| {
            let set = [
                format!("MODEL_PATH=/m/{model}"),
                format!("SCAFFOLD={scaffold}"),
                format!("TOOL_CALL_PARSER={parser}"),
            ];
            check(&settings(&set.each_ref().map(String::as_str)), None)[0].0
        };
        assert_eq!(verdict("Qwen3.5-35B-A3B", "ohsdk", "qwen3_coder"), Verdict::Ok);
        assert_eq!(verdict("Qwen3.5-35B-A3B", "ohsdk", "hermes"), Verdict::Fatal);
        assert_eq!(verdict("Qwen3-30B-A3B", "cc", "qwen3_coder"), Verdict::Ok);
        assert_eq!(verdict("Qwen3-30B-A3B", "cc", "hermes"), Verdict::Fatal);
        assert_eq!(verdict("Qwen3-30B-A3B", "oh", "hermes"), Verdict::Ok);
        assert_eq!(verdict("Qwen3-30B-A3B", "ohsdk", "qwen3_coder"), Verdict::Fatal);
        assert_eq!(verdict("Qwen3-30B-A3B", "mini", "hermes"), Verdict::Warn);
        assert_eq!(verdict("Qwen3-8B", "cc", "hermes"), Verdict::Warn);
        assert_eq!(verdict("Qwen3-8B", "mini", "hermes"), Verdict::Skip);
        assert_eq!(verdict("Qwen3.5-35B-A3B", "oc", "hermes"), Verdict::Ok);
    }
}
