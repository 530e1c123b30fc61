//! Sandboxes that are not on this machine: Kubernetes API, Docker daemon, task images.

use super::tasks;
use crate::{
    config::Settings,
    rollout::sandbox::{docker, kubernetes},
};

/// Answers of a cluster.
pub type KubernetesFacts = kubernetes::Answers;

/// Answers of a daemon.
pub type DockerFacts = docker::Answers;

/// What a daemon says about an image.
pub type ImageFacts = Result<String, String>;

/// Stands for a task's image where none is known: a dry run pulls nothing.
const ANY_IMAGE: &str = "busybox";

impl KubernetesFacts {
    /// The cluster could not be asked.
    pub fn unanswered(problem: String) -> Self {
        Self {
            context: Err(problem),
            version: None,
            create: None,
        }
    }
}

/// Asks the cluster of `K8S_KUBECONFIG`.
pub(super) fn kubernetes(s: &Settings) -> KubernetesFacts {
    let Some(kubeconfig) = &s.kubernetes.kubeconfig else {
        return KubernetesFacts::unanswered("K8S_KUBECONFIG is not set".into());
    };
    let image = task_image(s).unwrap_or_else(|| ANY_IMAGE.to_owned());
    kubernetes::probe(kubeconfig, &s.kubernetes.namespace, &image)
}

/// Asks the daemon of `DOCKER_HOST`.
pub(super) fn docker(s: &Settings) -> DockerFacts {
    docker::probe(s.docker.host.as_deref(), task_image(s).as_deref())
}

/// Prebuilt image of a sampled task.
fn task_image(s: &Settings) -> Option<String> {
    tasks::probe(super::index_file(s)?).ok()?.image
}
