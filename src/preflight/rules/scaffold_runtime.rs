//! The agent's files are on this machine.

use crate::{
    config::Settings,
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "scaffold-runtime",
    runs: EVERY_RUN,
    what: "The runtime of the chosen agent is on this machine and whole.",
    why: "Sandboxes carry it read-only; without it every trial fails before its agent starts.",
    evidence: "The tree's manifest is read, its list of files is compared with its checksum, and every file's size with the list.",
    fix: "Run setup/runtimes.sh with the scaffold's name on every node that runs trials; LEGORL_RUNTIMES names another folder.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let scaffold = s.run.scaffold;
    match facts.map(|facts| &facts.scaffold_runtime) {
        None => vec![skip(format!("SCAFFOLD={scaffold}: needs this machine"))],
        Some(None) => Vec::new(),
        Some(Some(Ok(found))) => vec![ok(format!("the agent's files are there: {found}"))],
        Some(Some(Err(problem))) => vec![fatal(problem.clone())],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn an_agent_without_its_files_is_fatal() {
        let with = |runtime: Option<Result<String, String>>| {
            let facts = Facts {
                scaffold_runtime: runtime,
                ..facts()
            };
            check(&settings(&["SCAFFOLD=cc"]), Some(&facts))
        };
        let missing = with(Some(Err("not there\n  fix: setup/runtimes.sh cc".into())));
        assert!(missing[0].0 == Verdict::Fatal && missing[0].1.contains("setup/runtimes.sh cc"));
        assert_eq!(with(Some(Ok("cc 2 in /x".into())))[0].0, Verdict::Ok);
        assert!(with(None).is_empty());
        assert_eq!(check(&settings(&["SCAFFOLD=cc"]), None)[0].0, Verdict::Skip);
    }
}
