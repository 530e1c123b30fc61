//! Settings of sandboxes that do not run on this machine.

use super::resolve::Resolver;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// Image with the agent's files (`HARBOR_AGENT_RUNTIME_…`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentRuntimeSettings {
    /// `HARBOR_AGENT_RUNTIME_IMAGE`.
    pub image: Option<String>,
    /// `HARBOR_AGENT_RUNTIME_IMAGE_SUBPATH`.
    pub image_subpath: Option<String>,
    /// `HARBOR_AGENT_RUNTIME_MOUNT_PATH`.
    pub mount_path: Option<String>,
    /// `HARBOR_AGENT_VERSION`.
    pub version: Option<String>,
}

/// Kubernetes pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KubernetesSettings {
    /// `K8S_KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `K8S_NAMESPACE`.
    pub namespace: String,
    /// `HARBOR_K8S_INLINE_BUILD`.
    pub inline_build: bool,
    /// `HARBOR_OPENSWE_IMAGE_REGISTRY`.
    pub image_registry: Option<String>,
    /// `HARBOR_NYDUS_MIRROR`.
    pub nydus_mirror: Option<String>,
    /// `K8S_POD_STARTUP_TIMEOUT`.
    pub pod_startup_timeout: Duration,
    /// `K8S_POD_ACTIVE_DEADLINE_SECONDS`.
    pub pod_active_deadline_secs: u32,
    /// `K8S_VAL_POD_STARTUP_TIMEOUT`.
    pub val_pod_startup_timeout: Duration,
    /// `K8S_VAL_POD_ACTIVE_DEADLINE_SECONDS`.
    pub val_pod_active_deadline_secs: u32,
    /// `HARBOR_POD_NAME_PREFIX`.
    pub pod_name_prefix: String,
    /// `HARBOR_ENVIRONMENT_MEMORY_LIMIT_FACTOR`.
    pub memory_limit_factor: f64,
    /// `HARBOR_HOSTPATH_MOUNTS`.
    pub host_mounts: Vec<HostMount>,
    /// `HARBOR_HOSTPATH_NODE_REWRITE`: path prefix here, and on the nodes.
    pub host_path_rewrite: Option<(String, String)>,
    /// `HARBOR_K8S_EGRESS_ISOLATION`.
    pub egress_isolation: bool,
    /// `HARBOR_NETADMIN_IMAGE`.
    pub netadmin_image: Option<String>,
    /// `HARBOR_NETADMIN_CPU_REQUEST`, a Kubernetes quantity.
    pub netadmin_cpu: String,
    /// `HARBOR_NETADMIN_MEM_REQUEST`, a Kubernetes quantity.
    pub netadmin_memory_request: String,
    /// `HARBOR_NETADMIN_MEM_LIMIT`, a Kubernetes quantity.
    pub netadmin_memory_limit: String,
    /// `HARBOR_ENVIRONMENT_OVERRIDE_CPU_LIMIT`, cores.
    pub cpu_limit: Option<f64>,
    /// `HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_LIMIT_MB`, MiB.
    pub memory_limit_mb: Option<u64>,
    /// `HARBOR_ENV_EXEC_TIMEOUT_SEC`.
    pub exec_timeout: Option<Duration>,
    /// `HARBOR_AGENT_RUNTIME_IMAGE_PULL_POLICY`.
    pub runtime_image_pull_policy: String,
    /// `HARBOR_CLUSTER_DNS_IP`.
    pub cluster_dns_ip: Option<String>,
}

/// A folder of the node in every pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostMount {
    /// Folder on the node.
    pub host_path: String,
    /// Place in the pod.
    pub mount_path: String,
    /// The pod cannot write to it.
    #[serde(default)]
    pub read_only: bool,
}

/// Docker daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DockerSettings {
    /// `DOCKER_HOST`; `None` is the local socket.
    pub host: Option<String>,
}

/// Task images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageSettings {
    /// `HARBOR_OPENSWE_BASE_REGISTRY`.
    pub base_registry: Option<String>,
    /// `HARBOR_OPENSWE_SKIP_DOCKERFILE`.
    pub skip_dockerfile: bool,
    /// `HARBOR_ENVIRONMENT_FORCE_BUILD`.
    pub force_build: bool,
    /// `HARBOR_ENVIRONMENT_BUILD_TIMEOUT_MULTIPLIER`.
    pub build_timeout_multiplier: f64,
    /// `HARBOR_ENV_BUILD_RUN_TIMEOUT_SEC`.
    pub build_step_timeout: Duration,
    /// `HARBOR_ENV_START_MAX_ATTEMPTS`.
    pub start_max_attempts: u32,
}

pub(super) fn agent_runtime(r: &mut Resolver<'_>) -> AgentRuntimeSettings {
    AgentRuntimeSettings {
        image: r.text("HARBOR_AGENT_RUNTIME_IMAGE"),
        image_subpath: r.text("HARBOR_AGENT_RUNTIME_IMAGE_SUBPATH"),
        mount_path: r.text("HARBOR_AGENT_RUNTIME_MOUNT_PATH"),
        version: r.text("HARBOR_AGENT_VERSION"),
    }
}

pub(super) fn kubernetes(r: &mut Resolver<'_>) -> KubernetesSettings {
    KubernetesSettings {
        kubeconfig: r.path("K8S_KUBECONFIG"),
        namespace: r.string("K8S_NAMESPACE"),
        inline_build: r.bool("HARBOR_K8S_INLINE_BUILD"),
        image_registry: r.text("HARBOR_OPENSWE_IMAGE_REGISTRY"),
        nydus_mirror: r.text("HARBOR_NYDUS_MIRROR"),
        pod_startup_timeout: r.seconds("K8S_POD_STARTUP_TIMEOUT"),
        pod_active_deadline_secs: r.u32("K8S_POD_ACTIVE_DEADLINE_SECONDS"),
        val_pod_startup_timeout: r.seconds("K8S_VAL_POD_STARTUP_TIMEOUT"),
        val_pod_active_deadline_secs: r.u32("K8S_VAL_POD_ACTIVE_DEADLINE_SECONDS"),
        pod_name_prefix: r.string("HARBOR_POD_NAME_PREFIX"),
        memory_limit_factor: r.f64("HARBOR_ENVIRONMENT_MEMORY_LIMIT_FACTOR"),
        host_mounts: host_mounts(r),
        host_path_rewrite: host_path_rewrite(r),
        egress_isolation: r.bool("HARBOR_K8S_EGRESS_ISOLATION"),
        netadmin_image: r.text("HARBOR_NETADMIN_IMAGE"),
        netadmin_cpu: r.string("HARBOR_NETADMIN_CPU_REQUEST"),
        netadmin_memory_request: r.string("HARBOR_NETADMIN_MEM_REQUEST"),
        netadmin_memory_limit: r.string("HARBOR_NETADMIN_MEM_LIMIT"),
        cpu_limit: r.opt_f64("HARBOR_ENVIRONMENT_OVERRIDE_CPU_LIMIT"),
        memory_limit_mb: r
            .int("HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_LIMIT_MB")
            .and_then(|n| u64::try_from(n).ok()),
        exec_timeout: r
            .opt_f64("HARBOR_ENV_EXEC_TIMEOUT_SEC")
            .map(Duration::from_secs_f64),
        runtime_image_pull_policy: r.string("HARBOR_AGENT_RUNTIME_IMAGE_PULL_POLICY"),
        cluster_dns_ip: r.text("HARBOR_CLUSTER_DNS_IP"),
    }
}

fn host_mounts(r: &mut Resolver<'_>) -> Vec<HostMount> {
    const NAME: &str = "HARBOR_HOSTPATH_MOUNTS";
    let Some(text) = r.text(NAME) else {
        return Vec::new();
    };
    match serde_json::from_str(&text) {
        Ok(mounts) => mounts,
        Err(error) => {
            r.problem(
                NAME,
                format!(
                    "must be a JSON list such as [{{\"host_path\":\"/data\",\"mount_path\":\"/opt/data\",\"read_only\":true}}] \
                     in single quotes: {error}"
                ),
            );
            Vec::new()
        }
    }
}

fn host_path_rewrite(r: &mut Resolver<'_>) -> Option<(String, String)> {
    const NAME: &str = "HARBOR_HOSTPATH_NODE_REWRITE";
    let text = r.text(NAME)?;
    let parts = text
        .split_once(':')
        .filter(|(from, to)| from.starts_with('/') && to.starts_with('/'));
    if parts.is_none() {
        r.problem(
            NAME,
            format!("must be FROM:TO with two absolute paths, and is `{text}`"),
        );
    }
    parts.map(|(from, to)| (from.to_owned(), to.to_owned()))
}

pub(super) fn docker(r: &mut Resolver<'_>) -> DockerSettings {
    const NAME: &str = "DOCKER_HOST";
    let host = r.text(NAME);
    if let Some(text) = &host {
        if !["unix://", "tcp://"]
            .iter()
            .any(|scheme| text.starts_with(scheme))
        {
            let text = crate::config::show::masked_url(text);
            r.problem(
                NAME,
                format!("must start with unix:// or tcp://, and is `{text}`"),
            );
        }
    }
    DockerSettings { host }
}

pub(super) fn images(r: &mut Resolver<'_>) -> ImageSettings {
    ImageSettings {
        base_registry: r.text("HARBOR_OPENSWE_BASE_REGISTRY"),
        skip_dockerfile: r.bool("HARBOR_OPENSWE_SKIP_DOCKERFILE"),
        force_build: r.bool("HARBOR_ENVIRONMENT_FORCE_BUILD"),
        build_timeout_multiplier: r.f64("HARBOR_ENVIRONMENT_BUILD_TIMEOUT_MULTIPLIER"),
        build_step_timeout: r.seconds("HARBOR_ENV_BUILD_RUN_TIMEOUT_SEC"),
        start_max_attempts: r.u32("HARBOR_ENV_START_MAX_ATTEMPTS"),
    }
}
