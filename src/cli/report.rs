//! The run-configuration block and the check lines: pure functions from settings and findings to text.

use crate::{
    config::{show, values::TrainingMode, ConfigWarning, Loaded, WarningKind},
    preflight::{Facts, Report, Scope, Verdict},
};
use std::fmt::Write as _;

/// Width of the rules around a block.
const WIDTH: usize = 70;

/// Widest check line before it is wrapped.
const WRAP: usize = 96;

/// Escape codes, or nothing.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Colour verdicts.
    pub colour: bool,
}

impl Style {
    /// Colour only on a terminal and without `NO_COLOR`.
    pub fn of_stdout() -> Self {
        use std::io::IsTerminal;
        let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
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

fn titled(title: &str, line: char, width: usize) -> String {
    let title = format!(" {title} ");
    let rest = width.saturating_sub(title.chars().count());
    let left = rest / 2;
    let bar = |n: usize| line.to_string().repeat(n);
    format!("{}{title}{}", bar(left), bar(rest - left))
}

/// The values that decide a run, in one block.
pub fn run_configuration(loaded: &Loaded, facts: Option<&Facts>) -> String {
    let s = &loaded.settings;
    let model_kind = match facts.map(|f| &f.model) {
        Some(Ok(model)) => model.model_type.as_str(),
        _ => "unknown",
    };
    let t = &s.topology;
    let dp = s.train_ranks() / t.sp_size;
    let topology = match s.run.training_mode {
        TrainingMode::Sync => format!(
            "{} nodes × {} gpu (colocated)  SP={} → dp={dp}",
            t.nnodes, t.ngpus_per_node, t.sp_size
        ),
        TrainingMode::Async => format!(
            "{} nodes × {} gpu = train {} / rollout {}  SP={} → dp={dp}",
            t.nnodes, t.ngpus_per_node, t.n_nodes_train, t.n_nodes_rollout, t.sp_size
        ),
    };
    let val = s
        .data
        .val_files
        .as_ref()
        .map_or("none".to_owned(), |p| p.display().to_string());
    let every = |freq: Option<u32>| freq.map_or("end".to_owned(), |n| n.to_string());
    let steps = match (
        s.schedule.total_training_steps,
        facts.and_then(|f| f.train_index.as_ref().ok()),
    ) {
        (Some(n), _) => format!("steps={n}"),
        (None, Some(index)) => {
            format!(
                "epochs={} (steps={})",
                s.schedule.total_epochs,
                s.total_steps(index.rows as u64)
            )
        }
        (None, None) => format!("epochs={}", s.schedule.total_epochs),
    };
    let a = &s.algorithm;
    let kl = if a.use_kl_loss {
        a.kl_loss_coef.to_string()
    } else {
        "off".into()
    };
    let rows: Vec<(&str, String)> = vec![
        ("config", s.run.config_path.display().to_string()),
        (
            "experiment",
            format!("project={}  exp={}", s.run.project_name, s.run.exp_name),
        ),
        (
            "axes",
            format!(
                "mode={} engine={} scaffold={} backend={}",
                s.run.training_mode, s.run.model_engine, s.run.scaffold, s.run.backend
            ),
        ),
        ("model", format!("{}  [{model_kind}]", s.model.path.display())),
        (
            "",
            format!(
                "served={}  tool_parser={}",
                s.model.served_model_name, s.model.tool_call_parser
            ),
        ),
        ("data", format!("train={}", s.data.train_files.display())),
        ("", format!("val  ={val}")),
        ("topology", topology),
        (
            "batch",
            format!(
                "{} prompts × {} resp = {} trials/step  mini={}  in_flight={}",
                s.batch.train_bsz,
                s.batch.n_resp,
                u64::from(s.batch.train_bsz) * u64::from(s.batch.n_resp),
                s.batch.train_mini_bsz,
                s.rollout.n_concurrent
            ),
        ),
        (
            "context",
            format!(
                "prompt={} + resp={} = {}",
                s.data.max_prompt_tokens,
                s.data.max_response_tokens,
                s.window_tokens()
            ),
        ),
        (
            "algorithm",
            format!(
                "{}  loss={}  lr={}  lr_sched={}  kl_loss_coef={kl}",
                a.adv_estimator, a.policy_loss_mode, s.optim.lr, s.optim.scheduler
            ),
        ),
        (
            "rollout",
            format!(
                "temp={} top_p={}  val_temp={}  val_n={}  staleness={}",
                s.sampling.temperature,
                s.sampling.top_p,
                s.validation.sampling.temperature,
                s.validation.n,
                s.rollout.staleness
            ),
        ),
        (
            "",
            format!(
                "max_num_seqs={}  kv_cache_tokens={}",
                s.engine.max_num_seqs, s.engine.kv_cache_tokens
            ),
        ),
        (
            "schedule",
            format!(
                "save_freq={}  test_freq={}  val_before_train={}  {steps}",
                every(s.schedule.save_freq),
                every(s.schedule.test_freq),
                if s.schedule.val_before_train {
                    "True"
                } else {
                    "False"
                }
            ),
        ),
        (
            "logs",
            format!(
                "train={}",
                s.paths.logs.join(format!("{}.log", s.run.exp_name)).display()
            ),
        ),
        ("", format!("trials={}", s.paths.trials.display())),
        ("", format!("ckpts ={}", s.paths.checkpoints.display())),
    ];
    let mut out = format!("\n{}\n", titled("run configuration (train)", '═', WIDTH - 1));
    for (label, value) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {label:<12} {value}");
    }
    out.push_str(&"═".repeat(WIDTH));
    out.push_str("\n\n");
    out
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

/// `--dry-run`: every value, as the ranks would get it.
pub fn resolved(loaded: &Loaded) -> String {
    let modules = loaded.layered.modules.join(" ");
    let s = &loaded.settings;
    let launch = if s.world_size() == 1 {
        format!("legorl-rank {}", s.run.config_path.display())
    } else {
        format!(
            "srun -n {} --mpi=pmix legorl-rank {}",
            s.world_size(),
            s.run.config_path.display()
        )
    };
    format!(
        "=== Final Configuration ===\n{}=== Template Modules ===\n{modules}\n=== Launch Command ===\n{launch}\n",
        show::text(loaded)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Finding;

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
}
