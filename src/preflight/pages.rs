//! `docs/preflight.md`, made from the table of rules.

use super::{rules, Rule, EVERY_RUN};
use std::fmt::Write as _;

/// The page.
pub fn page() -> String {
    let mut out = String::from(include_str!("pages_head.md"));
    out.push('\n');
    for rule in rules::ALL {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| [`{0}`](#{0}) | {1} |", rule.id, rule.what);
    }
    for rule in rules::ALL {
        let _ = write!(out, "\n{}", section(rule));
    }
    out
}

/// One rule, as the page shows it.
fn section(rule: &Rule) -> String {
    let runs = if rule.runs == EVERY_RUN {
        "every run".to_owned()
    } else {
        let names: Vec<&str> = rule.runs.iter().map(|kind| kind.name()).collect();
        names.join(", ")
    };
    format!(
        "## {}\n\n- **What**: {}\n- **Why**: {}\n- **Evidence**: {}\n- **Fix**: {}\n- **Checked for**: {runs}\n",
        rule.id, rule.what, rule.why, rule.evidence, rule.fix
    )
}

/// One rule for a terminal.
pub fn explain(rule: &Rule) -> String {
    format!(
        "{}\n\n  what      {}\n  why       {}\n  evidence  {}\n  fix       {}\n",
        rule.id, rule.what, rule.why, rule.evidence, rule.fix
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/preflight.md");
        if std::env::var_os("LEGORL_WRITE_DOCS").is_some() {
            std::fs::write(path, page()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == page(),
            "docs/preflight.md is out of date; run the tests once with LEGORL_WRITE_DOCS=1"
        );
    }
}
