//! `docs/configuration.md`, made from the table of variables.

use super::variables::{self, offline, remote, DefaultValue, Kind, Tier, Variable};
use std::fmt::Write as _;

const HEAD: &str = include_str!("reference_head.md");

/// The whole page.
pub fn markdown() -> String {
    let mut out = HEAD.to_owned();
    let mut section = "";
    for variable in variables::all() {
        if variable.section != section {
            section = variable.section;
            let _ = write!(
                out,
                "\n## {section}\n\n{}| Variable | Value | Default | What it does |\n|---|---|---|---|\n",
                note(section)
            );
        }
        let _ = writeln!(
            out,
            "| {}`{}` | {} | {} | {} |",
            if variable.tier == Tier::Essential {
                "★ "
            } else {
                ""
            },
            variable.name,
            form(variable),
            default(variable),
            effect(variable).replace('|', "\\|"),
        );
    }
    out.push_str("\n## Second names\n\n");
    out.push_str(
        "The original has several names for some settings. Each is the same variable here; two different \
         values are an error.\n\n| Name | Variable |\n|---|---|\n",
    );
    for (alias, variable) in variables::ALIASES {
        let _ = writeln!(out, "| `{alias}` | `{variable}` |");
    }
    out.push_str("\n## Variables of the original without effect\n\n");
    out.push_str(
        "They are accepted with a warning that repeats the reason.\n\n| Variable | Why |\n|---|---|\n",
    );
    for entry in variables::NO_EFFECT {
        let _ = writeln!(out, "| `{}` | {} |", entry.name, entry.reason);
    }
    out
}

/// What holds for all variables of a section.
fn note(section: &str) -> &'static str {
    match section {
        remote::AGENT_FILES | remote::KUBERNETES | remote::DOCKER | remote::IMAGES => {
            "Read and checked by preflight; this version cannot start such sandboxes yet.\n\n"
        }
        offline::EVAL => {
            "For `legorl-rank eval`, whose configuration is read and checked; this version cannot launch it yet.\n\n"
        }
        offline::INFER => {
            "For `legorl-rank infer`, whose configuration is read and checked; this version cannot launch it yet.\n\n"
        }
        _ => "",
    }
}

fn effect(variable: &Variable) -> String {
    let mut text = variable.doc.to_owned();
    match variable.available {
        Some([]) => text.push_str(" Not in this version: leave it unset."),
        Some(values) => {
            let _ = write!(text, " This version can launch `{}` only.", values.join("`, `"));
        }
        None => {}
    }
    text
}

fn form(variable: &Variable) -> String {
    let form = match variable.kind {
        Kind::Text => "text".to_owned(),
        Kind::Path => "path".to_owned(),
        Kind::Bool => "`True` or `False`".to_owned(),
        Kind::Choice(names) => names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(" "),
        Kind::Integer { min, max } if max >= i64::from(u32::MAX) => format!("whole number ≥ {min}"),
        Kind::Integer { min, max } => format!("whole number {min} … {max}"),
        Kind::Number { min, max } if max >= 1e12 => format!("number ≥ {min}"),
        Kind::Number { min, max } => format!("number {min} … {max}"),
    };
    if variable.unit.is_empty() {
        form
    } else {
        format!("{form}, {}", variable.unit)
    }
}

fn default(variable: &Variable) -> String {
    match variable.default {
        DefaultValue::Required if variable.kinds.len() == 1 => {
            format!("required by `{}`", variable.kinds[0])
        }
        DefaultValue::Required => "required".into(),
        DefaultValue::Value(text) => format!("`{text}`"),
        DefaultValue::Derived(how) => how.into(),
        DefaultValue::Unset(meaning) => format!("not set: {meaning}"),
    }
}

#[cfg(test)]
mod tests {
    /// `LEGORL_WRITE_DOCS=1 cargo test --lib config::reference` writes the page.
    #[test]
    fn the_page_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
        let wanted = super::markdown();
        if std::env::var_os("LEGORL_WRITE_DOCS").is_some() {
            std::fs::write(path, &wanted).expect("docs/configuration.md must be writable");
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == wanted,
            "docs/configuration.md is out of date; run LEGORL_WRITE_DOCS=1 cargo test --lib config::reference"
        );
    }
}
