//! Variables of what lies outside this machine or this version's own engine: parallel plan, routing
//! replay, importance weights, Kubernetes, Docker, task images.

use super::{between, integer, number, row, whole, DefaultValue::*, Kind::*, Tier::*, Variable};

/// Section of the agent's files in remote sandboxes.
pub const AGENT_FILES: &str = "Agent files of remote sandboxes";
const PLAN: &str = "Parallel plan";

/// Section of `BACKEND=k8s`.
pub const KUBERNETES: &str = "Kubernetes";
/// Section of `BACKEND=docker`.
pub const DOCKER: &str = "Docker";
/// Section of task images, for both.
pub const IMAGES: &str = "Task images";

#[rustfmt::skip]
pub(super) const VARIABLES: &[Variable] = &[
    row(PLAN, "EP_SIZE", whole(1, 65_536), Value("1"), "ranks", Common,
        "Ranks that share the experts of a layer under `veomni`; it divides the experts and the number of trainer ranks."),
    row(PLAN, "GEN_TP", whole(1, 1024), Value("1"), "ranks", Common,
        "Ranks of an engine replica that share its attention heads; it divides the key-value heads.").only(&["1"]),
    row(PLAN, "ENABLE_R3", Bool, Unset("on for a mixture of experts, off for a dense policy"), "", Common,
        "Routing replay: train with the experts that were chosen when a token was sampled."),
    row(PLAN, "FUSED_KERNELS", Bool, Value("False"), "", Advanced,
        "Fused loss kernels; `veomni` cannot use them.").only(&["False"]),
    row(PLAN, "ENABLE_ACTIVATION_OFFLOAD", Bool, Value("False"), "", Advanced,
        "Keep activations in host memory; `veomni` cannot use it.").only(&["False"]),
    row(PLAN, "HARBOR_AGENT_NAME", Text, Unset("the scaffold decides"), "", Advanced,
        "Agent factory of Harbor; must stay empty for `oh` and `ohsdk`, which are imported by path."),

    row(AGENT_FILES, "HARBOR_AGENT_RUNTIME_IMAGE", Text, Unset("no image"), "", Common,
        "Image that holds the agent's files, for `docker` and `k8s`; sandboxes of `process` carry a runtime of the node."),
    row(AGENT_FILES, "HARBOR_AGENT_RUNTIME_IMAGE_SUBPATH", Text, Unset("the whole image"), "", Advanced,
        "Folder of that image that is mounted."),
    row(AGENT_FILES, "HARBOR_AGENT_RUNTIME_MOUNT_PATH", Text, Unset("not mounted"), "", Advanced,
        "Place of that folder in the sandbox."),
    row(AGENT_FILES, "HARBOR_AGENT_VERSION", Text, Unset("not said"), "", Advanced,
        "Version of the agent in that image, for reports; SCAFFOLD_VERSION chooses the version that a `process` sandbox carries."),

    row(KUBERNETES, "K8S_KUBECONFIG", Path, Unset("none; the template module backend/k8s.env requires one"), "", Essential,
        "Kubeconfig of the cluster that runs the sandboxes."),
    row(KUBERNETES, "K8S_NAMESPACE", Text, Value("default"), "", Common,
        "Namespace of the pods."),
    row(KUBERNETES, "K8S_POD_STARTUP_TIMEOUT", number(1.0), Value("1200"), "seconds", Advanced,
        "Longest time from creating a pod to its running."),
    row(KUBERNETES, "K8S_POD_ACTIVE_DEADLINE_SECONDS", integer(1), Value("6000"), "seconds", Advanced,
        "Life of a pod, after which the cluster ends it."),
    row(KUBERNETES, "K8S_VAL_POD_STARTUP_TIMEOUT", number(1.0), Value("2400"), "seconds", Advanced,
        "The same in validation, where images are often not on the node yet."),
    row(KUBERNETES, "K8S_VAL_POD_ACTIVE_DEADLINE_SECONDS", integer(1), Value("9000"), "seconds", Advanced,
        "Life of a pod in validation."),
    row(KUBERNETES, "HARBOR_POD_NAME_PREFIX", Text, Value("harbor"), "", Common,
        "Start of pod names; lower-case letters, digits and `-`."),
    row(KUBERNETES, "HARBOR_ENVIRONMENT_MEMORY_LIMIT_FACTOR", between(1.0, 1e3), Value("4"), "", Advanced,
        "Memory limit of a pod as a multiple of its request."),
    row(KUBERNETES, "HARBOR_HOSTPATH_MOUNTS", Text, Unset("no mounts"), "", Common,
        "JSON list of `{\"host_path\", \"mount_path\", \"read_only\"}`: folders of the node that every pod sees."),
    row(KUBERNETES, "HARBOR_HOSTPATH_NODE_REWRITE", Text, Unset("no rewriting"), "", Advanced,
        "`FROM:TO`: paths of this machine that start with FROM lie under TO on the nodes."),
    row(KUBERNETES, "HARBOR_K8S_EGRESS_ISOLATION", Bool, Value("True"), "", Common,
        "Let a pod reach nothing but the proxy."),
    row(KUBERNETES, "HARBOR_NETADMIN_IMAGE", Text, Unset("the task's own image"), "", Advanced,
        "Image of the container that closes a pod's network; it holds iptables."),
    row(KUBERNETES, "HARBOR_NETADMIN_CPU_REQUEST", Text, Value("1m"), "", Advanced,
        "CPU request of that container, as Kubernetes writes quantities."),
    row(KUBERNETES, "HARBOR_NETADMIN_MEM_REQUEST", Text, Value("16Mi"), "", Advanced,
        "Memory request of that container."),
    row(KUBERNETES, "HARBOR_NETADMIN_MEM_LIMIT", Text, Value("64Mi"), "", Advanced,
        "Memory limit of that container."),
    row(KUBERNETES, "HARBOR_ENVIRONMENT_OVERRIDE_CPU_LIMIT", between(0.01, 4096.0), Unset("no limit above the request"), "cores", Advanced,
        "CPU limit of a pod."),
    row(KUBERNETES, "HARBOR_ENVIRONMENT_OVERRIDE_MEMORY_LIMIT_MB", Integer { min: 16, max: 1 << 30 }, Unset("HARBOR_ENVIRONMENT_MEMORY_LIMIT_FACTOR decides"), "MiB", Advanced,
        "Memory limit of a pod."),
    row(KUBERNETES, "HARBOR_ENV_EXEC_TIMEOUT_SEC", number(1.0), Unset("the limit of the step that runs it"), "seconds", Advanced,
        "Longest time of one command in a pod."),
    row(KUBERNETES, "HARBOR_AGENT_RUNTIME_IMAGE_PULL_POLICY", Text, Value("IfNotPresent"), "", Advanced,
        "When nodes pull HARBOR_AGENT_RUNTIME_IMAGE."),
    row(KUBERNETES, "HARBOR_CLUSTER_DNS_IP", Text, Unset("the pod's own resolver"), "", Advanced,
        "Address of the cluster's DNS, which stays reachable."),

    row(DOCKER, "DOCKER_HOST", Text, Unset("the local socket /var/run/docker.sock"), "", Essential,
        "Daemon that runs the sandboxes: unix:///PATH or tcp://HOST:PORT."),

    row(IMAGES, "HARBOR_OPENSWE_IMAGE_REGISTRY", Text, Unset("no registry"), "", Common,
        "Registry of prebuilt task images. `k8s` needs this or HARBOR_K8S_INLINE_BUILD, and not both."),
    row(IMAGES, "HARBOR_OPENSWE_BASE_REGISTRY", Text, Unset("as the Dockerfiles say"), "", Advanced,
        "Registry of the base images of inline builds."),
    row(IMAGES, "HARBOR_OPENSWE_SKIP_DOCKERFILE", Bool, Value("True"), "", Advanced,
        "A prebuilt image is complete; its Dockerfile's steps do not run again."),
    row(IMAGES, "HARBOR_NYDUS_MIRROR", Text, Unset("images come from where their names say"), "", Common,
        "Registry that mirrors official benchmark images, for pods without access to Docker Hub."),
    row(IMAGES, "HARBOR_K8S_INLINE_BUILD", Bool, Value("False"), "", Essential,
        "Run a task's Dockerfile steps in the pod on first use: no registry needed, and slow."),
    row(IMAGES, "HARBOR_ENVIRONMENT_FORCE_BUILD", Bool, Value("False"), "", Advanced,
        "Build task images even if they exist (`docker`)."),
    row(IMAGES, "HARBOR_ENVIRONMENT_BUILD_TIMEOUT_MULTIPLIER", between(1e-3, 1e3), Value("1.0"), "", Advanced,
        "Multiplies the task's own build limit."),
    row(IMAGES, "HARBOR_ENV_BUILD_RUN_TIMEOUT_SEC", number(1.0), Value("1800"), "seconds", Advanced,
        "Longest time of one step of an inline build."),
    row(IMAGES, "HARBOR_ENV_START_MAX_ATTEMPTS", integer(1), Value("1"), "attempts", Advanced,
        "Attempts to start a sandbox within one attempt of its trial."),
];
