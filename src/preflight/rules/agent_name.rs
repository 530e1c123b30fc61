//! The agent factory fits the scaffold.

use crate::{
    config::{values::Scaffold, Settings},
    preflight::{fatal, ok, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "agent-name",
    runs: EVERY_RUN,
    what: "HARBOR_AGENT_NAME is empty, or the name that belongs to SCAFFOLD.",
    why: "With a name, Harbor installs that agent inside every sandbox instead of mounting it, which fails without egress.",
    evidence: "A run whose OpenHands was installed in the pod failed in the set-up of every trial.",
    fix: "Leave HARBOR_AGENT_NAME empty; the scaffold knows its agent.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    let scaffold = s.run.scaffold;
    let own = match scaffold {
        Scaffold::Oh | Scaffold::Ohsdk => None,
        Scaffold::Cc => Some("claude-code"),
        Scaffold::Oc => Some("opencode"),
        Scaffold::Mini | Scaffold::Terminus2 | Scaffold::Custom => return Vec::new(),
    };
    vec![match (&s.plan.agent_name, own) {
        (None, _) => ok(format!("AGENT_NAME=null: {scaffold} knows its agent")),
        (Some(name), Some(own)) if name.eq_ignore_ascii_case(own) => {
            ok(format!("AGENT_NAME={name} is the agent of {scaffold}"))
        }
        (Some(name), Some(own)) => warn(format!(
            "HARBOR_AGENT_NAME={name} with SCAFFOLD={scaffold}, whose agent is {own}; leave it empty"
        )),
        (Some(name), None) => fatal(format!(
            "HARBOR_AGENT_NAME={name} with SCAFFOLD={scaffold} would install the agent in every sandbox; leave it empty"
        )),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn a_name_must_belong_to_the_scaffold() {
        let verdict = |scaffold: &str, name: &str| {
            let set = [
                format!("SCAFFOLD={scaffold}"),
                format!("HARBOR_AGENT_NAME={name}"),
            ];
            check(&settings(&set.each_ref().map(String::as_str)), None)[0].0
        };
        assert_eq!(verdict("ohsdk", "null"), Verdict::Ok);
        assert_eq!(verdict("oh", "openhands"), Verdict::Fatal);
        assert_eq!(verdict("cc", "null"), Verdict::Ok, "what the template sets");
        assert_eq!(verdict("cc", "claude-code"), Verdict::Ok);
        assert_eq!(verdict("cc", "opencode"), Verdict::Warn);
        assert_eq!(verdict("oc", ""), Verdict::Ok);
        assert_eq!(verdict("oc", "openhands"), Verdict::Warn);
    }
}
