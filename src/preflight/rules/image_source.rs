//! Where pods get their images from.

use crate::{
    config::{values::Backend, Settings},
    preflight::{fatal, ok, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "image-source",
    runs: EVERY_RUN,
    what: "BACKEND=k8s has exactly one source of task images: a registry, or building in the pod.",
    why: "Without a source every pod ends in ImagePullBackOff; with both, every trial builds again what the registry has.",
    evidence: "By construction: pods only pull, and a failed pull is a failed set-up of every trial.",
    fix: "Set HARBOR_OPENSWE_IMAGE_REGISTRY, or HARBOR_K8S_INLINE_BUILD=true, and not both.",
    check,
};

fn check(s: &Settings, _: Option<&Facts>) -> Vec<Outcome> {
    match s.run.backend {
        Backend::K8s => {}
        Backend::Docker => return vec![ok("image: the Docker daemon builds task images on demand")],
        Backend::Process | Backend::Apptainer => return Vec::new(),
    }
    vec![match (&s.kubernetes.image_registry, s.kubernetes.inline_build) {
        (Some(registry), false) => ok(format!("image: prebuilt images from {registry}")),
        (None, true) => ok("image: built in the pod on first use, which is slow and needs no registry"),
        (Some(registry), true) => fatal(format!(
            "HARBOR_OPENSWE_IMAGE_REGISTRY={registry} and HARBOR_K8S_INLINE_BUILD=true: every trial would build again; choose one"
        )),
        (None, false) => fatal(
            "HARBOR_OPENSWE_IMAGE_REGISTRY is empty and HARBOR_K8S_INLINE_BUILD=false: pods would have no image; set one of them",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{rules::testing::settings, Verdict};

    #[test]
    fn exactly_one_source() {
        let verdict = |set: &[&str]| check(&settings(&[&["BACKEND=k8s"], set].concat()), None)[0].0;
        let (registry, inline) = (
            "HARBOR_OPENSWE_IMAGE_REGISTRY=r:5000",
            "HARBOR_K8S_INLINE_BUILD=true",
        );
        assert_eq!(verdict(&[]), Verdict::Fatal);
        assert_eq!(verdict(&[registry]), Verdict::Ok);
        assert_eq!(verdict(&[inline]), Verdict::Ok);
        assert_eq!(verdict(&[registry, inline]), Verdict::Fatal);
        assert!(
            check(&settings(&[]), None).is_empty(),
            "process sandboxes need no image"
        );
    }
}
