//! `legorl-rank check CONFIG`: may this run start here and now? Preflight, who else is on the machine, one
//! verdict line, what to do next. Nothing is changed.

use super::{block, report, ConfigArgs};
use crate::{
    config::{values::RunKind, Loaded, Settings},
    preflight::{
        self,
        live::{self, Row, State},
        rules, Facts, Report, Verdict,
    },
};
use clap::Args;
use serde_json::json;
use std::{fmt::Write as _, process::ExitCode};

/// Arguments of `check`.
#[derive(Args)]
pub struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// For machines
    #[arg(long)]
    json: bool,
}

/// Runs the command: exit code 0 for YES, 1 for NO.
pub fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let loaded = args.config.load(RunKind::Train)?;
    let facts = Facts::probe(&loaded.settings, None);
    let checks = preflight::check(&loaded.settings, Some(&facts));
    let rows = live::probe(&loaded.settings, &facts);
    let safe = is_safe(&checks, &rows);
    let steps = next_steps(&loaded, &checks, &rows, &args.config.to_words());
    if args.json {
        super::print(&format!("{:#}\n", to_json(&loaded, &checks, &rows, safe, &steps)));
    } else {
        super::print(&report::warnings(&loaded.warnings, false).0);
        super::print(&block::text(&loaded, Some(&facts)));
        super::print(&report::checks(&checks, report::Style::of_stdout()));
        super::print(&table(&rows));
        super::print(&verdict(safe, &steps));
    }
    Ok(if safe {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn is_safe(checks: &Report, rows: &[Row]) -> bool {
    checks.passes() && rows.iter().all(|row| row.state != State::Taken)
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.what.len()).max().unwrap_or(0);
    let mut out = String::from("\nthis machine\n");
    for row in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  {:width$}  {:5}  {}",
            row.what,
            row.state.name(),
            row.detail
        );
    }
    out
}

fn verdict(safe: bool, steps: &[String]) -> String {
    let mut out = format!("\nSAFE TO RUN: {}\n", if safe { "YES" } else { "NO" });
    for (i, step) in steps.iter().enumerate() {
        let _ = writeln!(out, "  {}. {step}", i + 1);
    }
    out
}

/// What to do, most urgent first.
fn next_steps(loaded: &Loaded, checks: &Report, rows: &[Row], arguments: &[String]) -> Vec<String> {
    let mut steps = Vec::new();
    // One step a rule: several findings of one rule have one fix.
    for wanted in [Verdict::Fatal, Verdict::Warn] {
        for rule in rules::ALL {
            let mut texts = checks
                .findings
                .iter()
                .filter(|f| f.rule == rule.id && f.verdict == wanted)
                .map(|f| f.text.as_str());
            if let Some(first) = texts.next() {
                let more = texts.count();
                let more = if more > 0 {
                    format!(" (and {more} more)")
                } else {
                    String::new()
                };
                let label = if wanted == Verdict::Fatal {
                    "fix"
                } else {
                    "consider"
                };
                steps.push(format!("{label} [{}] {first}{more}. {}", rule.id, rule.fix));
            }
        }
        if wanted == Verdict::Fatal {
            let taken = rows.iter().filter(|row| row.state == State::Taken);
            steps.extend(taken.map(|row| format!("free {}: {}", row.what, row.detail)));
        }
    }
    if is_safe(checks, rows) {
        steps.push(format!("start it: {}", launch_line(&loaded.settings, arguments)));
    } else {
        steps.push("run this check again".to_owned());
    }
    steps
}

/// The command that was checked, with all that it was given.
fn launch_line(s: &Settings, arguments: &[String]) -> String {
    let words = super::dry_run::words(s, arguments);
    match (s.world_size(), std::env::var_os("SLURM_JOB_ID").is_some()) {
        (1, _) => format!("legorl-rank {words}"),
        (ranks, true) => format!("srun --mpi=pmix -n {ranks} legorl-rank {words}"),
        (ranks, false) => format!("mpirun -n {ranks} legorl-rank {words}"),
    }
}

fn to_json(
    loaded: &Loaded,
    checks: &Report,
    rows: &[Row],
    safe: bool,
    steps: &[String],
) -> serde_json::Value {
    let mark = |verdict| match verdict {
        Verdict::Ok => "ok",
        Verdict::Skip => "skip",
        Verdict::Warn => "warn",
        Verdict::Fatal => "fatal",
    };
    json!({
        "config": loaded.settings.run.config_path,
        "safe_to_run": safe,
        "findings": checks
            .findings
            .iter()
            .map(|f| json!({"rule": f.rule, "verdict": mark(f.verdict), "text": f.text}))
            .collect::<Vec<_>>(),
        "machine": rows
            .iter()
            .map(|row| json!({"what": row.what, "state": row.state.name(), "detail": row.detail}))
            .collect::<Vec<_>>(),
        "next_steps": steps,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{Finding, Scope};

    fn report(verdict: Verdict) -> Report {
        Report {
            scope: Scope::Full,
            findings: vec![Finding {
                rule: "topology",
                verdict,
                text: "NNODES=3".into(),
            }],
        }
    }

    fn row(state: State) -> Row {
        Row {
            what: "gpu 0".into(),
            state,
            detail: "process 7 of ann".into(),
        }
    }

    #[test]
    fn a_fatal_finding_or_a_taken_machine_is_a_no() {
        assert!(is_safe(&report(Verdict::Warn), &[row(State::Note)]));
        assert!(!is_safe(&report(Verdict::Fatal), &[]));
        assert!(!is_safe(&report(Verdict::Ok), &[row(State::Taken)]));
    }

    #[test]
    fn the_table_and_the_verdict_line_are_stable() {
        assert_eq!(
            table(&[row(State::Taken)]),
            "\nthis machine\n  gpu 0  TAKEN  process 7 of ann\n"
        );
        let steps = ["fix it".to_owned(), "run this check again".to_owned()];
        assert_eq!(
            verdict(false, &steps),
            "\nSAFE TO RUN: NO\n  1. fix it\n  2. run this check again\n"
        );
    }
}
