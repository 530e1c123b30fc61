//! Credentials of the cluster.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "kubeconfig",
    runs: EVERY_RUN,
    what: "K8S_KUBECONFIG is a kubeconfig with a current context.",
    why: "Without credentials no pod starts, and every trial fails in its set-up.",
    evidence: "The file is parsed as the client will parse it.",
    fix:
        "Set K8S_KUBECONFIG to the cluster's kubeconfig; choose a context with `kubectl config use-context`.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend != Backend::K8s {
        return Vec::new();
    }
    let Some(path) = &s.kubernetes.kubeconfig else {
        return vec![fatal(
            "K8S_KUBECONFIG is required under BACKEND=k8s; set it in the run config",
        )];
    };
    let path = path.display();
    vec![
        match facts.and_then(|f| f.kubernetes.as_ref()).map(|k| &k.context) {
            None => skip(format!("K8S_KUBECONFIG={path}: needs the file")),
            Some(Ok(context)) => ok(format!("K8S_KUBECONFIG: context {context}")),
            Some(Err(problem)) => fatal(format!("K8S_KUBECONFIG={path}: {problem}")),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::KubernetesFacts,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn required_parsed_and_only_for_pods() {
        let set = ["BACKEND=k8s", "K8S_KUBECONFIG=/k"];
        assert!(check(&settings(&[]), None).is_empty());
        assert_eq!(check(&settings(&["BACKEND=k8s"]), None)[0].0, Verdict::Fatal);
        assert_eq!(check(&settings(&set), None)[0].0, Verdict::Skip);
        let with = |context| Facts {
            kubernetes: Some(KubernetesFacts {
                context,
                version: None,
                create: None,
            }),
            ..facts()
        };
        assert_eq!(
            check(&settings(&set), Some(&with(Ok("c at s".into()))))[0].0,
            Verdict::Ok
        );
        let broken = check(&settings(&set), Some(&with(Err("not YAML".into()))));
        assert_eq!(broken[0].0, Verdict::Fatal);
        assert!(broken[0].1.contains("K8S_KUBECONFIG=/k: not YAML"));
    }
}
