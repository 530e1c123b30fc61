//! The check lines: pure functions from findings to text.

use crate::{
    config::{ConfigWarning, WarningKind},
    preflight::{rules::NOT_IN_THIS_VERSION, Finding, Report, Scope, Verdict},
};
use std::fmt::Write as _;

/// Width of the rules around a block.
pub(super) const WIDTH: usize = 70;

/// Widest check line before it is wrapped.
const WRAP: usize = 96;

/// Escape codes, or nothing.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Colour verdicts.
    pub colour: bool,
}

impl Style {
    /// Colour only on a terminal that can show it, and without `NO_COLOR`.
    pub fn of_stdout() -> Self {
        use std::io::IsTerminal;
        let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|v| v == "dumb")
            // mpirun gives its ranks a terminal of their own, wherever their output goes.
            || std::env::var_os("OMPI_COMM_WORLD_RANK").is_some();
        Self {
            colour: !refused && std::io::stdout().is_terminal(),
        }
    }

    fn paint(self, verdict: Verdict, text: &str) -> String {
        let code = match verdict {
            _ if !self.colour => return text.to_owned(),
            Verdict::Ok => 32,
            Verdict::Warn => 33,
            Verdict::Fatal => 31,
            Verdict::Skip => 90,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

pub(super) fn titled(title: &str, line: char, width: usize) -> String {
    let title = format!(" {title} ");
    let rest = width.saturating_sub(title.chars().count());
    let left = rest / 2;
    let bar = |n: usize| line.to_string().repeat(n);
    format!("{}{title}{}", bar(left), bar(rest - left))
}

/// One line a finding.
pub fn checks(report: &Report, style: Style) -> String {
    let mut out = format!("{}\n", titled("preflight config check", '─', WIDTH + 4));
    for finding in &report.findings {
        let (mark, label) = match finding.verdict {
            Verdict::Ok => ("✓", "OK"),
            Verdict::Warn => ("⚠", "WARN"),
            Verdict::Fatal => ("✗", "FATAL"),
            Verdict::Skip => ("⊘", "SKIP"),
        };
        let head = style.paint(finding.verdict, &format!("{mark} {label:<6}"));
        let mut text = finding.text.clone();
        if matches!(finding.verdict, Verdict::Fatal | Verdict::Warn) {
            let _ = write!(text, " [{}]", finding.rule);
        }
        let _ = writeln!(out, "  {head} {}", wrap(&text, WRAP - 11).join("\n           "));
    }
    out.push_str(&"─".repeat(WIDTH));
    out.push('\n');
    out.push_str(&verdict_line(report));
    out
}

fn verdict_line(report: &Report) -> String {
    let (fatal, warn) = (report.count(Verdict::Fatal), report.count(Verdict::Warn));
    let scope = match report.scope {
        Scope::Structure => "structure-only: ",
        Scope::Full => "",
    };
    let skipped = match report.scope {
        Scope::Structure => " Checks of files and machine were skipped.",
        Scope::Full => "",
    };
    if fatal > 0 {
        format!(
            "[preflight] {scope}{fatal} FATAL, {warn} WARN: nothing will be launched.{skipped} \
             `legorl-rank explain RULE` says more.\n"
        )
    } else {
        format!("[preflight] {scope}no FATAL, {warn} WARN.{skipped}\n")
    }
}

/// Last line of `--structure-only` when nothing is fatal.
pub fn structure_only(report: &Report) -> String {
    let is_absent = |f: &&Finding| f.verdict >= Verdict::Warn && f.rule == NOT_IN_THIS_VERSION;
    match report.findings.iter().filter(is_absent).count() {
        0 => "[structure-only] the configuration holds together; nothing was launched.\n".to_owned(),
        n => format!(
            "[structure-only] the configuration holds together, and {n} {} not in this version: this run will be \
             refused at launch. Nothing was launched.\n",
            if n == 1 { "of its values is" } else { "of its values are" }
        ),
    }
}

/// Breaks at blanks; a word longer than the width stays whole. Line ends in the text are kept.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    lines
}

/// Warnings of the configuration, and whether `--strict` makes one of them fatal. Variables without
/// effect are named in one line: configs written for the original hold dozens.
pub fn warnings(warnings: &[ConfigWarning], strict: bool) -> (String, bool) {
    let mut out = String::new();
    let mut fatal = false;
    for warning in warnings {
        let is_fatal = strict && warning.kind == WarningKind::UnknownVariable;
        fatal |= is_fatal;
        let _ = writeln!(out, "[{}] {warning}", if is_fatal { "FATAL" } else { "warning" });
    }
    (out, fatal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_four_marks_and_wraps_long_lines() {
        let finding = |verdict, text: &str| Finding {
            rule: "rule-id",
            verdict,
            text: text.to_owned(),
        };
        let report = Report {
            scope: Scope::Full,
            findings: vec![
                finding(Verdict::Ok, "fine"),
                finding(Verdict::Skip, "unknown"),
                finding(Verdict::Warn, &"word ".repeat(30)),
                finding(Verdict::Fatal, "broken"),
            ],
        };
        let text = checks(&report, Style { colour: false });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "  ✓ OK     fine");
        assert_eq!(lines[2], "  ⊘ SKIP   unknown");
        assert!(lines[3].starts_with("  ⚠ WARN   word word"));
        assert!(
            lines[4].starts_with("           word"),
            "continuation lines are indented"
        );
        assert!(lines.contains(&"  ✗ FATAL  broken [rule-id]"));
        assert!(text.contains("1 FATAL, 1 WARN"));
        assert!(lines.iter().all(|line| line.chars().count() <= WRAP + 20));
    }

    #[test]
    fn strict_makes_unknown_names_fatal_and_nothing_else() {
        let warning = |kind| ConfigWarning {
            kind,
            text: "x".into(),
        };
        assert!(warnings(&[warning(WarningKind::UnknownVariable)], true).1);
        assert!(!warnings(&[warning(WarningKind::UnknownVariable)], false).1);
        assert!(!warnings(&[warning(WarningKind::AmbientIgnored)], true).1);
    }

    #[test]
    fn the_last_line_tells_of_values_that_will_be_refused() {
        let finding = |rule, verdict| Finding {
            rule,
            verdict,
            text: "x".to_owned(),
        };
        let line = |findings: Vec<Finding>| {
            structure_only(&Report {
                scope: Scope::Structure,
                findings,
            })
        };
        let fine = line(vec![
            finding(NOT_IN_THIS_VERSION, Verdict::Ok),
            finding("memory", Verdict::Warn),
        ]);
        assert!(fine.contains("holds together; nothing was launched"), "{fine}");
        let absent = finding(NOT_IN_THIS_VERSION, Verdict::Warn);
        let text = line(vec![absent.clone(), absent]);
        assert!(
            text.contains("2 of its values are not in this version") && text.contains("will be refused"),
            "{text}"
        );
    }
}
