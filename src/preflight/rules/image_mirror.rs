//! A mirror for public images.

use crate::{
    config::{values::Backend, Settings},
    preflight::{warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "image-mirror",
    runs: EVERY_RUN,
    what: "BACKEND=k8s has a mirror of the public benchmark images.",
    why: "Validation tasks name images of Docker Hub; pods without egress cannot pull them, and the validation reward is 0.",
    evidence: "A validation in a cluster without egress scored 0 on all 221 tasks whose image came from Docker Hub.",
    fix: "Set HARBOR_NYDUS_MIRROR, or ignore this where pods reach Docker Hub.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend == Backend::K8s && s.kubernetes.nydus_mirror.is_none() {
        return vec![warn(
            "NYDUS_MIRROR empty: if validation uses public swebench images and pods cannot reach Docker Hub, the validation reward is 0",
        )];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn only_pods_need_it() {
        assert_eq!(check(&settings(&["BACKEND=k8s"]), None)[0].0, Verdict::Warn);
        assert!(check(&settings(&["BACKEND=k8s", "HARBOR_NYDUS_MIRROR=m"]), None).is_empty());
        assert!(check(&settings(&[]), None).is_empty());
    }
}
