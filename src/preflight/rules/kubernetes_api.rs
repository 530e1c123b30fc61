//! The cluster lets this user create sandboxes.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, skip, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "kubernetes-api",
    runs: EVERY_RUN,
    what: "The API server answers and would create a pod in K8S_NAMESPACE.",
    why: "A cluster that is gone, or a user without rights, fails every trial after its retries.",
    evidence: "The server is asked for its version, and for a pod with dryRun=All: authorisation, quota and admission decide, nothing is stored.",
    fix: "Correct K8S_KUBECONFIG or K8S_NAMESPACE, or ask the cluster's administrator for the right to create pods.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend != Backend::K8s {
        return Vec::new();
    }
    let Some(cluster) = facts.and_then(|f| f.kubernetes.as_ref()) else {
        return vec![skip("Kubernetes API: needs the cluster")];
    };
    let namespace = &s.kubernetes.namespace;
    match (&cluster.version, &cluster.create) {
        // Another rule has said why.
        (None, _) => Vec::new(),
        (Some(Err(problem)), _) => vec![fatal(format!("Kubernetes API: {problem}"))],
        (Some(Ok(version)), Some(Ok(()))) => vec![ok(format!(
            "Kubernetes API {version} answers and would create pods in {namespace}"
        ))],
        (Some(Ok(version)), Some(Err(problem))) => vec![fatal(format!(
            "Kubernetes API {version} would not create a pod in K8S_NAMESPACE={namespace}: {problem}"
        ))],
        (Some(Ok(version)), None) => vec![skip(format!("Kubernetes API {version}: pods were not asked for"))],
    }
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
    fn silence_and_refusal_are_fatal() {
        let s = settings(&["BACKEND=k8s", "K8S_KUBECONFIG=/k"]);
        let with = |version, create| {
            let facts = Facts {
                kubernetes: Some(KubernetesFacts {
                    context: Ok("c".into()),
                    version,
                    create,
                }),
                ..facts()
            };
            check(&s, Some(&facts)).first().map(|(verdict, _)| *verdict)
        };
        let version = || Some(Ok("v1.31".into()));
        assert_eq!(with(version(), Some(Ok(()))), Some(Verdict::Ok));
        assert_eq!(
            with(version(), Some(Err("forbidden".into()))),
            Some(Verdict::Fatal)
        );
        assert_eq!(with(Some(Err("no answer".into())), None), Some(Verdict::Fatal));
        assert_eq!(with(None, None), None, "the kubeconfig was already refused");
        assert_eq!(check(&s, None)[0].0, Verdict::Skip);
    }
}
