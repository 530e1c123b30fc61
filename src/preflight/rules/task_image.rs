//! One task image can be pulled.

use crate::{
    config::{values::Backend, Settings},
    preflight::{ok, skip, warn, Facts, Outcome, Rule, EVERY_RUN},
};

pub(super) const RULE: Rule = Rule {
    id: "task-image",
    runs: EVERY_RUN,
    what: "The image of one sampled task is on the daemon or in its registry.",
    why: "An image that cannot be pulled fails the set-up of every trial of its tasks.",
    evidence: "The daemon is asked for the image, and if it has none for the registry's description of it; nothing is downloaded.",
    fix: "Log the daemon in to the registry, correct the task's docker_image, or set a mirror.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    if s.run.backend != Backend::Docker {
        return Vec::new();
    }
    let Some(facts) = facts else {
        return vec![skip("task image: needs the daemon")];
    };
    let image = match &facts.train_index {
        Ok(index) => index.image.as_deref(),
        Err(_) => None,
    };
    match (image, facts.docker.as_ref().and_then(|d| d.image.as_ref())) {
        (Some(image), Some(Ok(place))) => vec![ok(format!("task image {image}: {place}"))],
        (Some(image), Some(Err(problem))) => {
            vec![warn(format!("task image {image} cannot be pulled: {problem}"))]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::DockerFacts,
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn an_image_that_cannot_be_pulled_is_named() {
        let s = settings(&["BACKEND=docker"]);
        let with = |image| {
            let mut facts = facts();
            facts.docker = Some(DockerFacts {
                version: Ok("28".into()),
                image,
            });
            if let Ok(index) = &mut facts.train_index {
                index.image = Some("repo/task:1".into());
            }
            facts
        };
        assert_eq!(check(&s, Some(&with(Some(Ok("there".into())))))[0].0, Verdict::Ok);
        let denied = check(&s, Some(&with(Some(Err("denied".into())))));
        assert_eq!(denied[0].0, Verdict::Warn);
        assert!(denied[0].1.contains("repo/task:1"));
        assert!(
            check(&s, Some(&with(None))).is_empty(),
            "the daemon did not answer"
        );
    }
}
