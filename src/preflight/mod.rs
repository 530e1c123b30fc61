//! Checks before launch: a table of pure rules over `(Settings, Facts)`.
//!
//! A rule lies in a file of its own under [`rules`], with its id, what it checks, why, the evidence and
//! the fix; `legorl-rank explain RULE` prints them. [`facts`] looks at the machine and the files and
//! changes nothing. Without facts (`--structure-only`) a rule that needs them answers `Skip`.
//!
//! Invariant: nothing launches past a `Fatal`, and no flag changes that.
//!
//! How to add a rule stands at the head of [`rules`]. [`live`] is what `legorl-rank check` shows beside
//! the rules, [`pages`] writes `docs/preflight.md`.

#[cfg(test)]
mod corpus;
pub mod facts;
pub mod live;
pub mod model_family;
pub mod pages;
pub mod rules;

use crate::config::{values::RunKind, Settings};
pub use facts::Facts;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Nothing to do.
    Ok,
    /// Could not be checked without facts.
    Skip,
    /// The run works, and probably not as meant.
    Warn,
    /// The run must not start.
    Fatal,
}

/// What a rule found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Id of the rule.
    pub rule: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found, with the variables and values; for a fatal one also what to change.
    pub text: String,
}

/// One row of the table.
pub struct Rule {
    /// Short name, for `explain`.
    pub id: &'static str,
    /// Kinds of run that it is for.
    pub runs: &'static [RunKind],
    /// What is checked.
    pub what: &'static str,
    /// What happens otherwise.
    pub why: &'static str,
    /// What shows it.
    pub evidence: &'static str,
    /// What to change.
    pub fix: &'static str,
    /// The check. `None` instead of facts asks for what the settings alone tell.
    pub check: fn(&Settings, Option<&Facts>) -> Vec<Outcome>,
}

/// For [`Rule::runs`]: training, evaluation and sampling.
pub const EVERY_RUN: &[RunKind] = RunKind::ALL;

/// For [`Rule::runs`]: training alone.
pub const TRAINING: &[RunKind] = &[RunKind::Train];

/// For [`Rule::runs`]: those that draw tasks from an index.
pub const WITH_INDEX: &[RunKind] = &[RunKind::Train, RunKind::Infer];

/// A verdict and its text, before the rule's name is put to it.
pub type Outcome = (Verdict, String);

/// Nothing to do.
pub fn ok(text: impl Into<String>) -> Outcome {
    (Verdict::Ok, text.into())
}

/// Could not be checked without facts.
pub fn skip(text: impl Into<String>) -> Outcome {
    (Verdict::Skip, text.into())
}

/// Works, and probably not as meant.
pub fn warn(text: impl Into<String>) -> Outcome {
    (Verdict::Warn, text.into())
}

/// Must not start.
pub fn fatal(text: impl Into<String>) -> Outcome {
    (Verdict::Fatal, text.into())
}

/// Why the checks run; it decides what an unavailable feature means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The configuration alone.
    Structure,
    /// Everything.
    Full,
}

/// All findings, in the order of the table.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was checked.
    pub scope: Scope,
    /// Findings.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Number of findings with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|f| f.verdict == verdict).count()
    }

    /// True when the run may start.
    pub fn passes(&self) -> bool {
        self.count(Verdict::Fatal) == 0
    }
}

/// Evaluates every rule that is for this kind of run.
pub fn check(settings: &Settings, facts: Option<&Facts>) -> Report {
    let findings = rules::ALL
        .iter()
        .filter(|rule| rule.runs.contains(&settings.run.kind))
        .flat_map(|rule| {
            (rule.check)(settings, facts)
                .into_iter()
                .map(|(verdict, text)| Finding {
                    rule: rule.id,
                    verdict,
                    text,
                })
        })
        .collect();
    Report {
        scope: if facts.is_some() {
            Scope::Full
        } else {
            Scope::Structure
        },
        findings,
    }
}
