//! `legorl-rank explain RULE`.

use crate::preflight::{pages, rules};
use anyhow::bail;
use clap::Args;
use std::process::ExitCode;

/// Arguments of `explain`.
#[derive(Args)]
pub struct ExplainArgs {
    /// Rule id; without one, all rules are listed
    #[arg(value_name = "RULE")]
    rule: Option<String>,
}

/// Runs the command.
pub fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let Some(id) = &args.rule else {
        let width = rules::ALL.iter().map(|rule| rule.id.len()).max().unwrap_or(0);
        let lines: Vec<String> = rules::ALL
            .iter()
            .map(|rule| format!("{:width$}  {}\n", rule.id, rule.what))
            .collect();
        super::print(&lines.concat());
        return Ok(ExitCode::SUCCESS);
    };
    match rules::ALL.iter().find(|rule| rule.id == id) {
        Some(rule) => super::print(&pages::explain(rule)),
        None => {
            let near = rules::ALL
                .iter()
                .min_by_key(|rule| strsim::damerau_levenshtein(rule.id, id))
                .map(|rule| format!("; the nearest is `{}`", rule.id))
                .unwrap_or_default();
            bail!("no rule is called `{id}`{near} (`legorl-rank explain` lists all)");
        }
    }
    Ok(ExitCode::SUCCESS)
}
