//! Variables of one scaffold that another one does not read.

use crate::{
    config::{
        values::{Backend, Scaffold},
        Settings,
    },
    preflight::{warn, Facts, Outcome, Rule, EVERY_RUN},
    rollout::scaffold::RUNTIMES,
};

pub(super) const RULE: Rule = Rule {
    id: "scaffold-variables",
    runs: EVERY_RUN,
    what: "Every variable of an agent that is set is one that SCAFFOLD reads.",
    why: "A value that nobody reads changes nothing: tools stay, another version runs, files are not carried.",
    evidence: "By construction: docs/scaffolds.md says which scaffold reads which variable.",
    fix: "Leave the variable out, or choose the scaffold that reads it; SCAFFOLD_VERSION chooses an agent's version.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let (scaffold, agent) = (s.run.scaffold, &s.agent);
    let tested = RUNTIMES
        .iter()
        .find(|(name, _)| *name == scaffold.name())
        .map(|(_, version)| *version);
    let mut found = Vec::new();
    let mut unread = |name: &str, value: &str, why: &str| {
        found.push(warn(format!(
            "{name}={value} has no effect with SCAFFOLD={scaffold}: {why}"
        )));
    };
    if !agent.disallowed_tools.is_empty() && !matches!(scaffold, Scaffold::Cc | Scaffold::Oc) {
        unread(
            "HARBOR_AGENT_DISALLOWED_TOOLS",
            &agent.disallowed_tools.join(","),
            "only cc and oc let tools be taken away; its agent keeps all of them",
        );
    }
    if let (Some(version), None) = (&agent.version, tested) {
        unread("SCAFFOLD_VERSION", version, "it has no runtime with versions");
    }
    if let Some(folder) = agent
        .custom_runtime
        .as_ref()
        .filter(|_| scaffold != Scaffold::Custom)
    {
        let why = match tested {
            Some(_) => "its files are the runtime that setup/runtimes.sh makes",
            None => "it needs no files",
        };
        unread("SCAFFOLD_RUNTIME", &folder.display().to_string(), why);
    }
    if s.run.backend == Backend::Process {
        let runs = agent.version.as_deref().or(tested);
        if let Some(version) = s
            .agent_runtime
            .version
            .as_deref()
            .filter(|version| Some(*version) != runs)
        {
            let why = match runs {
                Some(runs) => format!("version {runs} runs, and SCAFFOLD_VERSION chooses another"),
                None => "it has no versions".to_owned(),
            };
            unread("HARBOR_AGENT_VERSION", version, &why);
        }
        if let Some(image) = &s.agent_runtime.image {
            unread(
                "HARBOR_AGENT_RUNTIME_IMAGE",
                image,
                "sandboxes of BACKEND=process carry runtimes of this machine (setup/runtimes.sh)",
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    /// Names of the variables that are said to have no effect.
    fn unread(set: &[&str]) -> Vec<String> {
        let found = check(&settings(set), None);
        assert!(found.iter().all(|(verdict, _)| *verdict == Verdict::Warn));
        let name = |text: &String| text.split('=').next().unwrap_or_default().to_owned();
        found.iter().map(|(_, text)| name(text)).collect()
    }

    #[test]
    fn every_variable_that_the_scaffold_does_not_read_is_named() {
        let (tools, version, files) = (
            "HARBOR_AGENT_DISALLOWED_TOOLS=Agent",
            "SCAFFOLD_VERSION=9",
            "SCAFFOLD_RUNTIME=/agents/x",
        );
        let name = |set: &str| set.split('=').next().unwrap_or_default().to_owned();
        let rows: [(&str, &[&str]); 7] = [
            ("cc", &[files]),
            ("oc", &[files]),
            ("ohsdk", &[tools, files]),
            ("oh", &[tools, files]),
            ("terminus2", &[tools, files]),
            ("mini", &[tools, version, files]),
            ("custom", &[tools, version]),
        ];
        for (scaffold, expected) in rows {
            let scaffold_is = format!("SCAFFOLD={scaffold}");
            let mut set = vec![scaffold_is.as_str(), tools, version, files];
            if scaffold == "custom" {
                set.push("SCAFFOLD_COMMAND=x");
            }
            let expected: Vec<String> = expected.iter().map(|set| name(set)).collect();
            assert_eq!(unread(&set), expected, "{scaffold}");
        }
        assert!(unread(&["SCAFFOLD=cc"]).is_empty());
    }

    #[test]
    fn the_originals_version_and_image_choose_nothing_here() {
        let set = [
            "SCAFFOLD=cc",
            "HARBOR_AGENT_VERSION=2.1.118",
            "HARBOR_AGENT_RUNTIME_IMAGE=registry/cc:v1",
        ];
        assert_eq!(
            unread(&set),
            ["HARBOR_AGENT_VERSION", "HARBOR_AGENT_RUNTIME_IMAGE"]
        );
        let found = check(&settings(&set), None);
        assert!(found[0].1.contains("SCAFFOLD_VERSION"), "{found:?}");
        assert!(unread(&["SCAFFOLD=cc", "HARBOR_AGENT_VERSION=7", "SCAFFOLD_VERSION=7"]).is_empty());
        assert!(unread(&[&set[..], &["BACKEND=k8s"]].concat()).is_empty());
    }
}
